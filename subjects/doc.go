// Package subjects owns every NATS subject and every permission set: nothing
// else builds, parses or grants one.
//
//	iop.v1.<edge>.<node>.<gen>.up.<verb>[.<run>]     Node to Edge
//	iop.v1.<edge>.<node>.<gen>.down.<verb>[.<run>]   Edge (and the session service) to Node
//	iop.v1.<edge>.ctl.<verb>                         session service to Edge
//	iop.v1.<edge>.store.<op>                         Edge, answered by the session service
//	iop.v1.<edge>.leaf.<leaf>.<verb>                 a leaf's agent and the session service
//	iop.v1.callout.<edge>.<leaf>                     a leaf's callout requests
//	_INBOX.<edge>.<node>.<connection>.>              a Node's inbox, for USER.INFO alone
//	_INBOX.<edge>._nr.<run>                          no-responders notices to Edge (G4)
//
// Invariants:
//
//	I1  What a builder returns parses back to what was given (U1).
//	I2  No token is built from a value that could hold a dot, a wildcard or a
//	    blank: builders panic on a local breach, parsers refuse a peer's (Z1).
//	I3  A permission set grants the subjects its role's builders make and no
//	    subject of another session, node or edge (B5, U2).
package subjects
