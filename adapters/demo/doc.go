// Package demo owns a stand-in for a provider: one model, "demo", that needs no
// network, says plainly what it is, and echoes a little. It lets a new
// installation answer its first call, and lets people see how the fabric behaves
// when a provider is slow or breaks. It implements agent.Provider,
// agent.Exchanger and agent.Prober.
//
//	Exchange:  models            --> 200
//	           chat_completions  --> read --> 400 | 404 | demo:status
//	                                   |
//	                                   +--> whole answer | chunk* --> [DONE]
//	                                                         |
//	                                                         +--demo:cut--> provider
//	           anything else     --> invalid
//
// Words in the last user message steer it, each at most once:
//
//	demo:delay=50ms    waits so long before each token, 10m at most
//	demo:tokens=200    answers with exactly so many tokens, 100000 at most
//	demo:status=429    answers with this error status, 400 to 599
//	demo:cut=5         breaks off after so many chunks (not streamed: in mid-answer)
//	help               alone: answers with this list
//
// A token is a run of bytes that are no white space, with the white space after
// it; tokens of the prompt are those of all messages' text. It is honest
// counting, not any real model's.
//
// Invariants:
//
//	I1  The answer has OpenAI's shape: the first chunk names the role,
//	    finish_reason is null until the last, a usage chunk with no choices comes
//	    only if asked for, and [DONE] ends a stream that was not cut.
//	I2  The context's end stops it at once, also while it waits.
//	I3  max_tokens and max_completion_tokens are kept to.
//	I4  What it holds of a request is bounded (16 MiB).
package demo
