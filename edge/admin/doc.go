// Package admin is the operator's surface of an Edge: JSON under /api/v1/ (D4).
//
//	GET /api/v1/snapshot   everything of one instant
//	GET /api/v1/nodes, /providers, /models, /queue   parts of it
//
// Invariants:
//
//	I1  Nothing is told without the token, compared by its digest in constant time.
//	I2  A page in a browser can neither read nor ask: a Host that is a name other
//	    than localhost and the configured one is refused (a name can be made to
//	    point here), and so is every request with another origin.
//	I3  No address, token, certificate, subject or connection detail is told (N4).
//	I4  Who asks never makes the loop wait: a snapshot is taken in one step of it.
//
// view is the pure part: it makes the answer of the two cores' snapshots.
package admin
