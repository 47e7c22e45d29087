// Package registry owns the nodes: which session owns each, in which state, and
// under which generation.
//
// It is a pure core, stepped by the Edge's one loop together with edge/pool:
//
//	out = r.Step(now, registry.ReadyReceived{Node: n, Gen: g, PayloadNode: id}, out[:0])
//
// Per node there is one record, of the highest generation seen:
//
//	Absent --admitted--> Admitted --register--> Pending --ready--> Acking --ack sent--> Ready
//	                        |                     |  ^               |                    |
//	                        |                     |  +--ack failed---+                    |
//	                        +---------------------+---------- ended ----------------------+
//	                                                            v
//	                                                           Gone
//
// ended: closed, fenced by a newer generation, out of time, removed. Any state
// goes to Admitted, or by a registration to Pending, of a higher generation.
//
// Invariants:
//
//	I1  At most one session owns a node, and it is of the highest generation seen
//	    (R1, R9); a generation that ended never owns again (R10).
//	I2  Activate and NodeConnected come once for a generation, after its ready
//	    acknowledgement went out (R4).
//	I3  FenceGeneration and NodeDisconnected come once for each generation that
//	    was activated, and for no other (F2).
//	I4  Nothing but answers, heartbeats and fences goes to a session before
//	    Activate (R6).
//	I5  An event of a generation below the highest leaves the state bit-identical:
//	    AppendKey is equal before and after (F5).
//	I6  Who speaks without being the owner is told by a fence, once a second at
//	    most (F10); that it floods it is told, and the broker with it, at once (J8).
//
// The loop reports ReadyAckSent or ReadyAckFailed before it reads its next
// event. It applies FenceGeneration and Activate to the pool in the order they
// come, before the next event (F3). After a pause of the process it reads what
// waits in its inbox before DeadlinePassed, or it fences the living.
//
// explore_test.go visits every state of small worlds around this core and
// edge/pool's; make explore the millions of larger ones. mutants_test.go lists wrong
// variants of both cores, and of those of broker, Node and streams, that the tests
// must find: make mutants.
//
// It leaves to others: the check of signatures (the verdict is in the event),
// what is configured on a node, slots, attempts, sending heartbeats.
package registry
