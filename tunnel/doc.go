// Package tunnel owns one stream between Edge and Node: its sequence, its
// acknowledgement, its credit and its one terminal. The same engine carries
// tunnel frames and run events (Node to Edge) and request bodies (Edge to Node).
//
// It is a pure core: data and functions of (state, event, now). It never
// sees a socket, a clock, a goroutine or a message type. The shell encodes a
// frame with the sequence the Sender names, hands the bytes over, and does what
// the effects say.
//
//	Sender:    Open --Offer(terminal)--> Closing --acked--> Done
//	             |                          |
//	             +------ gave up, reset ----+--> Failed
//
//	Receiver:  Open --terminal in order--> Done
//	             |
//	             +--- breach ---> Failed
//
// Invariants:
//
//	I1  Every sequence is delivered once and in order; a duplicate is
//	    acknowledged again and not delivered (J2).
//	I2  The sender's unacknowledged cost never exceeds the credit; terminals and
//	    control frames have a reserve of their own (J1).
//	I3  One terminal, the last sequence, and nothing after it (J3, J4).
//	I4  What is unacknowledged is kept, and sent again until it is acknowledged
//	    or the give-up bound passes (J2, J3).
//	I5  Every frame handed to a Sender is released exactly once.
//	I6  What the peer sends never panics; it fails the stream with class
//	    protocol (J8).
//	I7  Credit only grows, and never by more than the window beyond what was
//	    consumed (J7).
//
// What both sides count alike: a frame costs its body plus wire.FrameOverhead,
// whatever its kind, and the costs add up to the offset that credit is about.
// Body must fit the credit. Frames without a body may go ControlReserve beyond
// it, the terminal TerminalReserve; what such frames hold beside a body (headers,
// a usage) is bounded by the shell, which lets each kind come as often as T3 says.
// Where no grant has crossed the wire yet, both sides begin with wire.MinWindow.
//
// A sender that has everything acknowledged and no credit for a full frame keeps
// its last frame and repeats it, ever more rarely: the receiver answers any
// duplicate with its acknowledgement, so a lost grant cannot stop a stream.
//
// What a shell owes: FrameReceived when the frame arrives, and the
// acknowledgement when it is due, even while the stream's reader blocks: a slow
// reader holds back Consumed and nothing else. A shell that acknowledges from
// the reader's goroutine would make a slow caller look like a dead peer after
// GiveUp.
//
// Left to others: which stream a message belongs to, generations, batching of
// acknowledgements into messages, memory budgets over many streams, remembering
// finished ids.
package tunnel
