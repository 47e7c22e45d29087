// Package enrol owns what an invitation is: how one is told in a line, asked for
// with, judged and answered (B11). It is a core: who listens, keeps the records
// and reads the clock is the broker; who dials is the joining machine.
//
//	            ┌── Cancel ──▶ cancelled
//	New ──▶ open┼── time ────▶ expired
//	            ├── 10 wrong ▶ closed
//	            └── Judge ───▶ used ── the same machine, for a while ──▶ answered again
//
//	I1  A secret is kept as its SHA-256 alone; it stands in the line, once.
//	I2  An invitation lets one machine in: of two that ask, the record that was
//	    written first wins, and the other is refused for good.
//	I3  Who asks proves the secret by a MAC over exactly the bytes that are sent,
//	    so nothing of a request can be changed on the way.
//	I4  Of a certificate request only the key is read. Name, role and edge of the
//	    certificate are the invitation's.
//	I5  Whoever is refused learns no more than that: which of the reasons it was
//	    is the authority's own.
package enrol
