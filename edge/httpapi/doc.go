// Package httpapi owns what callers of an Edge meet: the OpenAI-compatible
// surface and Anthropic's messages. It admits by API key, reads each request body whole, finds the model
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
//	    "model", and none of the caller's credentials. A body that came encoded is
//	    decoded once and goes on as if it had come so.
//	I3  Another attempt is made only while nothing was committed to the caller,
//	    the class allows it, or the operator for the status of an answer, and
//	    attempts are left. Each has its own run id, slot and body. An answer that
//	    is kept back for it is lost only to a better one.
//	I4  Nothing that can fail stands between Acquire and Do: a granted slot always
//	    reaches Do, which returns it.
//	I5  After commitment a failure is visible: an event stream gets the error event
//	    of its dialect and ends without what would make it whole; everything else
//	    ends in a broken connection. So does a stream whose provider ended it
//	    without its dialect's end: [DONE] of chat completions and completions,
//	    response.completed, incomplete or failed of responses, message_stop of
//	    messages, or for the last two the provider's own error event.
//	I6  What a caller holds is bounded: header, body in memory and on disk, how much
//	    it grows when it is decoded, the sum of all bodies, streams per key, and the
//	    time it may take to send or take a byte, and to send the whole body.
//	I7  No label and no log key comes from outside; a model's name is logged only
//	    once the pool knew it.
//
// It leaves queueing and slots to the pool behind Pool, and frames, credit and
// cancelling to dispatch.Runner.
package httpapi
