// Package edge is the gateway's shell: it owns the one loop that steps the
// registry and the pool, speaks with Nodes over the bus, and wires the HTTP
// surface (edge/httpapi) to the streams (edge/dispatch).
//
//	callers --> httpapi --Acquire--> loop{registry, pool} --Granted--> httpapi --> dispatch --> Node
//	Node --> up.register, ready, heartbeat --> session.go --> loop
//	Node --> up.frame, ack --> session.go --> dispatch
//	session service --> ctl.admitted, closed --> session.go --> loop
//
//	I1  Only the loop's goroutine touches the two cores; effects of one are applied
//	    to the other before the next event is read (F3).
//	I2  A bus callback never blocks: it decodes, looks up, appends (U3).
//	I3  What a peer sends fills bounded queues only; what is over is dropped and
//	    counted, and what was dropped is sent again by an honest peer.
//	I4  Stopping goes: callers, waiting requests, running answers within the
//	    grace, sessions, bus (D7).
//
// Files: edge.go (New, Run), loop.go (the loop), session.go (bus callbacks and
// answers to Nodes), discovery.go (what adapters list), config.go (from the
// operator's words to the cores').
package edge
