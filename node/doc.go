// Package node owns the Node daemon: one session after another with the broker,
// the tunnels that Edge opens in them, and the adapters that serve these. Its
// decisions are in two pure cores, node/session (when to dial, the handshake,
// what ends a session) and node/gate (local capacity); the streams are
// tunnel's. The rest is shell:
//
//	loop.go    the supervisor, one goroutine: applies what node/session orders
//	link.go    one session's connection: its messages out, its messages in
//	streams.go the session's send loop, one goroutine: owns the tunnel cores
//	stream.go  one tunnel between its exchange, the bus and the send loop
//	watch.go   when a tunnel's provider was last heard
//	host.go    adapters and slots; they outlive sessions
//
// A tunnel's life on the Node:
//
//	request --refused------------------------------> ERROR ---acked---> forgotten
//	   |                                               ^
//	   +--slot, adapter--> Exchange --returns--> slot free --> END or ERROR
//	                          |
//	                          +-- cancel, deadline, stall, stop: context cancelled;
//	                          |   after the close grace ERROR goes out all the
//	                          |   same (W9)
//	                          +-- session over: dropped, nothing is sent (F5, W8)
//
// Invariants:
//
//	I1  One run id, one exchange: a second request of a known id is ignored (X6).
//	I2  A tunnel ends in one terminal, the last of its sequences; the first one
//	    made wins and nothing follows it (T3).
//	I3  The slot is free before the terminal is offered, unless the provider did
//	    not return within the grace; then the slot waits for it (P7, W9).
//	I4  Nothing of a session is sent after it ended (F5).
//	I5  The bus's callback never blocks, and what a peer sends grows nothing
//	    beyond its bound (J8).
//	I6  A configuration is applied whole or not at all, and only after Edge's
//	    signature over our own nonce was verified (R3, G3, L8).
//	I7  What an adapter does, a panic included, ends its tunnel and no more.
//	I8  An exchange whose provider gives no byte for its bound ends, unless
//	    something else ended it before (W2, W8). Only the wait for the provider
//	    counts: not that for the caller's credit, nor that for the request's body.
//
// A stall's ERROR says its class and how long it was silent. The ExecutionFailure
// beside it (W4, W5), the probe it rests on (W3) and the numbering of its evidence
// (W6) are not made yet: the field stays unset, and Edge draws no conclusion about
// the provider's health from a stall.
package node
