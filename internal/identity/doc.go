// Package identity owns who a process is and how it proves it: the CA and its
// certificates, SPIFFE names, nkeys, key files, the session token and the two
// transcripts that Edge and Node sign for each other (G3, L8).
//
//	I1  A chain is good only if it verifies against our own CA for the use at
//	    hand, holds exactly one URI SAN, and that SAN has the role asked for.
//	I2  A token is good for one (edge, node, generation, nkey) and one issuer;
//	    the issuer is compared, never taken from the token.
//	I3  Signatures cover the transported bytes, length-prefixed, under a label of
//	    their own, so that none can serve another purpose.
//	I4  A key file is written whole, mode 0600, or not at all; reading one that is
//	    half-written, world-readable or not the pair of its certificate is an
//	    error that names the file and says what is wrong.
//	    A new pair of certificate and key may be cut off anywhere while it is written.
//	I5  No secret is printed: seeds and private keys live in types that format as
//	    "[redacted]".
//	I6  What is learnt of the roots, over whatever way, is signed by a root that is
//	    trusted already and stays so; no root comes in that is not newer than all of
//	    them, so nothing of the past comes back (Trust).
//
// A CA is exchanged in three steps (BeginCA, SwitchCA, FinishCA); in between both roots
// are trusted, and the chains of the new one hold a certificate of the old one for it.
package identity
