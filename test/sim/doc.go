// Package sim plays fabrics in virtual time: one seed is one fabric, its requests and
// its faults, and always the same history.
//
//	make sim                  75 s of fresh seeds, and those that once showed a fault
//	make sim SIM_TIME=10m     more of them
//	make sim FIRST=n          the seeds from n on, as CI does
//	make sim SEED=n           one, with all that happens
//
// There is one heap of what will happen, and one thing happens at a time. After each,
// what was woken runs until everything waits, in an order that is drawn, and in some
// seeds a little late. Every purpose draws from a stream of its own: the plan, the
// network, the scheduler, the faults, the callers.
//
// Production code, driven step by step:
//
//	edge/registry, edge/pool   the cores
//	edge/dispatch              all of it: an attempt's turns, the sweep of acknowledgements
//	edge/httpapi               whether a request may have another attempt
//	node/session, node/gate    the cores
//	node                       tunnels, bodies, the stall watchdog, adapters' places; an
//	                           exchange is a coroutine where it has a goroutine else
//	tunnel                     both halves of a stream, in both directions
//	broker                     the live core: duplicates, takeovers, what Edge is told
//
// Played here, in the order of calls of the shell that is named: edge/loop.go and
// edge/session.go (edge_test.go), node/loop.go and node/link.go (nodeproc_test.go), the
// session service and one server (net_test.go), the HTTP surface (caller_test.go).
// Stream messages cross as the bytes they are; a session's messages as the events that
// their readers make of them, for signatures are not what is looked at.
//
// Not simulated: TLS, proofs, tokens and configurations' contents; the store, whose
// generations only rise here; several servers and leaves, but for what they do to
// messages; discovery; HTTP itself; memory.
//
// The network keeps order on each path from a publisher to a subscription, and only
// there. Messages are lost one by one and in bursts, come twice, or long after; a
// partition swallows one direction or both. A Node is killed with or without a
// goodbye, stopped by a signal, drained, renewed, taken out of the configuration; its
// connection is reset. The Edge is killed,
// stopped, or loses its connection, knowing it or not. The broker restarts. The last
// fault is followed by a calm, in which every node must be live within a bound, serve
// a probe, and nothing may be left.
//
// Known and let pass: an Edge whose process was stopped counts that time into the bound
// of a missing frame, so it may end an attempt as a broken rule when it goes on.
//
// Rules: internal/history. mutants_test.go lists small wrong variants of the code above,
// each of which must be found: make mutants.
package sim
