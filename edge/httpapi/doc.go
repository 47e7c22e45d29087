// Package httpapi owns what callers of an Edge meet: the OpenAI-compatible
// surface. It admits by API key, reads each request body whole, finds the model
// it names, asks the pool for a slot, lets the dispatcher run the attempt, and
// hands the provider's answer back unchanged.
//
//	request --> refused ------------------------------------> JSON error
//	   |
//	 admitted -> body read -> queued -> attempt -> committed -> ended
//	                            ^          |           |
//	                            +- retry --+           +-> cut: error event or
//	                              (I3)                     aborted connection
//
//	I1  Every answer carries x-request-id; no answer is a success without bytes
//	    of the provider behind it.
//	I2  The provider gets the caller's body with nothing changed but the value of
//	    "model", and none of the caller's credentials.
//	I3  Another attempt is made only while nothing was committed to the caller,
//	    the class allows it and attempts are left. Each has its own run id, slot
//	    and body.
//	I4  Nothing that can fail stands between Acquire and Do: a granted slot always
//	    reaches Do, which returns it.
//	I5  After commitment a failure is visible: an event stream gets an error event
//	    and ends without [DONE]; everything else ends in a broken connection.
//	I6  What a caller holds is bounded: header, body in memory and on disk, the sum
//	    of all bodies, streams per key, and the time it may take to send or take
//	    a byte.
//	I7  No label and no log key comes from outside; a model's name is logged only
//	    once the pool knew it.
//
// It leaves queueing and slots to the pool behind Pool, and frames, credit and
// cancelling to dispatch.Runner.
package httpapi
