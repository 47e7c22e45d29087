package registry

// Reason says why a session is refused, or over. The list is closed; a reason
// goes to the Node and into logs and metrics. The Node reads none but
// Superseded, after which it waits a full interval (S3).
type Reason string

// The reasons.
const (
	// Superseded: a newer session of the node was admitted or accepted.
	Superseded Reason = "superseded"
	// SessionClosed: the broker saw it end.
	SessionClosed Reason = "closed"
	// HeartbeatMissed: nothing was heard for the heartbeat bound.
	HeartbeatMissed Reason = "heartbeat missed"
	// PendingTooLong: it was not ready within the pending bound (R10).
	PendingTooLong Reason = "not ready in time"
	// NotRegistered: it must register first.
	NotRegistered Reason = "not registered"
	// SessionOver: this session ended before, so it must dial anew.
	SessionOver Reason = "session is over"
	// UnknownNode: no such node is configured here.
	UnknownNode Reason = "unknown node"
	// WrongNode: the payload names another node than the session's (R1).
	WrongNode Reason = "node id is not this session's"
	// Unproved: the registration's proof does not hold.
	Unproved Reason = "registration proof refused"
	// WrongProtocol: no common protocol version (M5).
	WrongProtocol Reason = "no common protocol version"
	// Removed: the node left the configuration.
	Removed Reason = "removed from configuration"
	// Misbehaving: it went on breaking the rules of streams (J8).
	Misbehaving Reason = "protocol rules broken"
	// EdgeStopping: this Edge takes nothing new, or ends.
	EdgeStopping Reason = "edge is stopping"
)
