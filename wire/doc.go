// Package wire owns what both ends of the fabric must agree on and neither may
// decide alone: the closed list of error classes, the shape of a run id, and
// the limits of messages and streams. The messages themselves are in
// wire/proto and, generated, in wire/iopv1.
//
//	W1  A class outside the closed list never leaves this package: what a peer
//	    sends is mapped by ParseClass, what fails locally by ClassOf.
//	W2  A run id is minted at random for each attempt and holds nothing of the
//	    caller's.
//	W3  Message texts travel: they hold no secret, payload or path.
//
// It imports nothing of ours.
package wire
