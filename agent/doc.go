// Package agent owns the host-neutral types of running a provider: what a
// provider is asked, what it yields, how it fails, and who is running. A Node's
// adapters implement them, and so may any other host: nothing here knows a
// wire, a broker or an Edge (AR10).
//
// Today it holds what adapters of HTTP providers need: Exchanger (one raw HTTP
// exchange) and Prober (an exact-target health probe), the codec of Failure,
// and the Registry that owns providers' lives.
//
//	Registry entry:  Starting --started--> Serving --swapped out--> Retired --last release--> Stopped
//	                    |
//	                    +--one of the swap failed--> Stopped
//
// Invariants:
//
//	I1  A swap is whole or not at all: until every new provider has started,
//	    Acquire sees the old set, and after a failure it goes on seeing it.
//	I2  A provider is stopped once, and not before its last holder has released
//	    it (a stop's own deadline excepted), so running work ends on what it
//	    began with (AR7).
//	I3  A Failure carries a code of this version, or CodeUnknown and the original
//	    under MetaOriginalCode (AR8).
//	I4  An error nobody classified becomes CodeInternal without its text: it may
//	    hold provider output, a token or an endpoint (AR8).
//
// Left to others: capacity, deadlines, stall watching, and what a failure means
// on the wire.
package agent
