// Package dispatch is Edge's end of the tunnels: it sends an attempt to the Node
// that its slot names, delivers the answer to the caller as it arrives, and gives
// the slot back when, and only when, one of P8's reasons is there.
//
// An attempt (life.go, pure):
//
//	         caller's side ends first            Node's side ends next
//	        +--- cut, then leave -----> Lingering ----------------------+
//	Open ---+                                                           +--> Over
//	        +--- terminal or fence ---> Ended ------- leave ------------+
//	             (or the cancel's bound)
//
// A cut is whatever ends the caller's side before the Node did: the caller left,
// a deadline, a breach, no answer at all. It orders the one CancelRequest and
// starts the bound after which the slot comes back without an answer.
//
// Invariants:
//
//	I1  A slot is given back at most once, and never after its fence took it;
//	    when nothing of the attempt is left it was given back or taken.
//	I2  The caller sees one terminal; what ended its side first stands (J4).
//	I3  One CancelRequest is ordered for a cut, and none where the terminal was
//	    there before (T6). It is repeated after a lost connection, and every two
//	    seconds until it is answered or its bound has passed.
//	I4  A message of another session than the slot's changes nothing of the
//	    attempt (F5, F8).
//	I5  What a stream holds unread is bounded by its window and one message (J7).
//	I6  Nothing that the subscription's callback calls waits (U3).
//
// Who does what: the callback of the one subscription (Frame, Ack) steps the
// receiving half of a stream, so that a caller who does not read leaves nothing
// unacknowledged; the goroutine of Do consumes and sends; Run batches what is
// owed to the Nodes. A stream's lock is held between them for a step only, and
// no other lock is taken under it.
//
// A request is published again until the Node has acknowledged something of the
// attempt: the bus may lose it without an error (B3), and a Node that knows the
// run leaves it alone (X6).
//
// Left to others: choosing the provider and the retry (edge/pool, edge/httpapi),
// the stream's rules (tunnel), what the caller's protocol makes of a terminal.
package dispatch
