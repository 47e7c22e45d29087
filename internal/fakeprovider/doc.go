// Package fakeprovider owns a scriptable HTTP provider for tests: it answers on
// loopback with exactly the bytes a script says, cut where it says, waits for
// channels instead of time, and can break every rule of HTTP. Imitate replays
// what real servers answered.
//
//	connection:  Idle --request head--> Reading --body whole--> Scripted --> Idle
//	               ^                                               |
//	               +---- script over, keep-alive ------------------+
//	                                     close, reset, hang, peer gone --> Closed
//
// Invariants:
//
//	I1  A request is recorded once, when its body is whole (its head, where the
//	    script answers early), and counts as one execution.
//	I2  A script's bytes leave as they are written: one write per step, nothing
//	    added.
//	I3  A request's Gone is closed when its connection is, whoever closed it.
//	I4  Close, which the test's end calls, ends every script, waits for every
//	    goroutine, and leaves no listener.
//
// It is no part of the product: only tests import it.
package fakeprovider
