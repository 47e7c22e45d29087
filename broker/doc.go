// Package broker owns the NATS server between Edges and Nodes, and the authority
// that decides who may connect to it and under which generation.
//
//	dial ── TLS 1.3 ──> callout: decide ──┬─ plain refusal (logged, counted)
//	                                      ├─ lobby (reads "!denied.<reason>", 2 s)
//	                                      └─ live: duplicate? ── KV put = generation
//	                                            │
//	   Edge <── ctl.admitted ───────────────────┤
//	   older session <── down.fence, 10 ms, kick┘
//	   connected ── advisory ──> live ── disconnected ──> ctl.closed ──> Edge
//
// Three accounts: SYS (advisories, kick), AUTH (callout, JetStream) and FABRIC
// (Edges and Nodes). The session service holds one connection in each; nobody
// else is in SYS or AUTH. The text of the server's configuration never changes
// while it runs: what changes lives in KV or behind GetConfigForClient.
//
//	I1  Nobody is admitted on trust: TLS 1.3, a chain of our CA for client
//	    authentication, one URI SAN of a fitting role, a registered nkey and its
//	    signature of this connection's nonce, each checked by decide alone (B2).
//	I2  A generation is the revision of one KV write; it only grows (G1).
//	I3  ctl.admitted of a generation is at the server before the generation is
//	    anybody's (B6), and before its ctl.closed.
//	I4  A session of a lower generation than the node's highest is fenced, and
//	    at least 5 ms later closed, whenever it appears (B6).
//	I5  While a session of a name lives, no other instance takes the name (B12).
//	I6  An Edge reads and writes its own keys alone: its name is the subject's,
//	    and its answer goes to its own inbox alone (B10).
//	I7  A reason is told only to who has proved who it is (B3); nobody learns
//	    from a refusal what a stranger may not know.
//
// A Node's certificate is renewed over its session (up.renew), not at the enrolment
// listener: that is closed while nobody is invited, and would have to stay open for
// all of a Node's life. A session is there anyway, through leaves and proxies, and is
// the proof of the nkey; the request is one of the certificate's key. The key itself
// is the old one: it never leaves the Node, the authority has nothing to choose, and
// the Node replaces one file, so a crash leaves no pair that does not fit. Only the
// process that holds the CA's key subscribes the verb.
//
//	I8  A certificate is signed anew for the name and key it has, for the node's
//	    newest session, and by the proof of both keys alone (B8).
//	I9  What one session says of itself, however often, keeps nobody else waiting; a
//	    session that its Edge has fenced and that stays is closed (Z5), one that it
//	    has fenced for breaking rules at once, and its node stays out for a while (J8).
//	I10 Through a leaf no session is superseded that lives elsewhere, and a proof is
//	    good once (Z6).
//
// The bucket of generations is neither made anew nor emptied while it is there: what
// is never to happen is that its revisions go back. An operator who says above what
// they are to go on (iop restore --generation-above N) has the stream's records below
// N+1 taken out, which is the one way to raise its sequence in place: NATS keeps the
// sequence over a purge and never lowers it, the next write is N+1 or above, and the
// records that go are of sessions that ended with the servers. So G1's order holds, and
// its word "never purged" is kept in its sense, not in its letter.
//
// A certificate is measured when a connection is made, and its end is a matter of the
// session: the service that admitted a Node ends the session with the certificate, and
// says so (certificate_expired); the server cuts the connection a few seconds later in
// any case. Of an Edge and a leaf the server alone ends it, and they come back.
//
//	I9  A session does not outlive the certificate it was admitted with (B8).
//
// It leaves to others: what a registration means (edge), the identity files and
// the token (internal/identity), every subject and permission (subjects).
package broker
