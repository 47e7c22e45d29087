// Package openai_compat owns the raw HTTP exchange with one provider that
// speaks the OpenAI HTTP API (Ollama, vLLM, llama.cpp's server, a hosted one).
// It implements agent.Provider, agent.Exchanger and agent.Prober.
//
//	Exchange:  resolve --> connect --> send --> headers --> body* --> trailers --> nil
//	             |            |         |          |          |
//	          invalid    unreachable    +----------+----------+--> provider
//	                          ^         |
//	                          +---------+ nothing of it left this host: once more,
//	                                      on a fresh connection
//
// Invariants:
//
//	I1  What comes back is the provider's: status, end-to-end headers and bytes
//	    pass unchanged, error statuses and 3xx too (T4). Nothing is inflated,
//	    parsed, followed or re-cut.
//	I2  A request is sent again only if not one byte of it was written to a
//	    connection, so no provider ever executes one exchange twice; a GET is no
//	    exception of ours, but net/http may repeat it.
//	I3  CodeUnreachable says exactly that: nothing of the request was written.
//	    After the first byte every failure is CodeProvider.
//	I4  No host but the base URL's is called, and no path but the profile's or a
//	    clean one below the base URL (Z2).
//	I5  The provider sees its own credential or none; a caller's never passes,
//	    and a key that is configured but missing fails the exchange (A42, A43).
//	I6  A Sink's error or the context's end closes the provider's connection at
//	    once. An aborted answer is not drained: some providers would generate to
//	    their limit.
//	I7  Failures carry no address, key or provider output; the metadata key
//	    "reason" holds a word of a closed list.
//
// A response that has neither length nor chunks ends where the provider closes;
// only a reset tells a cut from an end there.
//
// Trailers are bounded by the connection's read buffer (4 KiB), which is per
// stream; a longer block fails the exchange.
package openai_compat
