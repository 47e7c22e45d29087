// Package session owns the life of a Node's sessions: when to dial, the steps
// from a connection to ready, what ends a session, and what follows its end. It
// is a pure core: the shell dials, sends and applies what the effects say, and
// tells what came of it.
//
//	          +-----------------------<--------------------------------+
//	          |  (attempts left)                                       |
//	       Waiting --due--> Dialling --identified--> Admitted          |
//	                           |                        | token        |
//	                           |                     Registering       |
//	                           |                        | accepted     |
//	                           |                     Applying          |
//	                           |                        | applied      |
//	                           |                     AwaitingReady     |
//	                           |                        | ready=true   |
//	                           |                      Ready -----------+
//	                           +---- any failure, any end of session --+
//
//	AwaitingReady, Ready --stop--> Draining --idle, or the bounds--> Closed
//	Ready --leave--> Draining --idle, or its bound--> Waiting
//	                 Draining --the bound of one that resumes--> Ready
//	any other state      --stop---------------------------------->  Closed
//	attempts exhausted, a local fault --------------------------->  Closed
//
// Invariants:
//
//	I1  At most one dial is under way, and none while a session lives (S2).
//	I2  With a positive limit exactly that many dials follow each other without a
//	    ready, then Exit; a ready starts the count anew (S3).
//	I3  A lost ready session is redialled within 250 ms; a failed dial waits
//	    between half an interval and a whole one; after superseded or duplicate
//	    it is a whole one (S3).
//	I4  An event of another generation than the current session's changes nothing
//	    (F5).
//	I5  Work is taken from the moment ready is asked for, never before the
//	    configuration was applied whole (R3, R6), and never while draining (D7).
//	I6  Whatever a remote says leads to another attempt, never to Exit by itself
//	    (S4).
//	I7  Every step before ready ends within its bound; a ready session ends when
//	    Edge's heartbeats stop or come from another instance (F9).
//	I8  EndSession is ordered once per session; Exit once, and nothing after it.
//	I9  A leave, for newer keys or because the broker is about to stop, is of a ready
//	    session alone. It takes what Edge sends before it has heard of the drain, ends
//	    nothing that runs before its bound, and leads to the next dial as a lost
//	    session does (B8, Y6). One that resumes cuts nothing at all: after its bound
//	    the session is ready as before.
//
// Left to others: what the messages hold, who verifies them, the tunnels.
package session
