package session

import "errors"

// Why Exit is ordered; nil stands for a local shutdown.
var (
	// ErrExhausted: the allowed number of dials in a row brought no ready session.
	ErrExhausted = errors.New("no session became ready within reconnect.max_attempts dials")
	// ErrLocal: something of this machine's own is broken (a key, a certificate),
	// which no further attempt can mend.
	ErrLocal = errors.New("local fault")
)

// Reason says why an attempt failed or a session ended. The list is closed: it
// labels a metric.
type Reason string

// The reasons.
const (
	Unreachable Reason = "unreachable" // the dial failed
	Denied      Reason = "denied"      // the broker's lobby told us no
	Duplicate   Reason = "duplicate"   // another instance of this name is alive (B12)
	WrongName   Reason = "wrong_name"  // the broker took us for somebody else
	NoToken     Reason = "no_token"    // the session service gave none
	Refused     Reason = "refused"     // Edge did not accept the registration
	BadConfig   Reason = "bad_config"  // the configuration did not verify or apply
	NotReady    Reason = "not_ready"   // Edge answered ready=false
	StepBound   Reason = "step_bound"  // a step was not answered in time
	Superseded  Reason = "superseded"  // a newer session of this node was admitted
	Fenced      Reason = "fenced"      // Edge fenced this session for another reason
	// Expired: the session service ended it, for our certificate has come to its end (B8).
	Expired     Reason = "certificate_expired"
	Silent      Reason = "silent" // Edge's heartbeats stopped
	EdgeChanged Reason = "edge_changed"
	// EdgeStopping: Edge was told to stop, and ended the session in good order.
	EdgeStopping Reason = "edge_stopping"
	Lost         Reason = "lost" // the connection ended
	Stopped      Reason = "stopped"
	Renewed      Reason = "renewed" // our own doing: the next dial shows a newer certificate (B8)
	Retired      Reason = "retired" // the broker said that it is about to stop (Y6)
)

// Reasons lists them all.
var Reasons = []Reason{
	Unreachable, Denied, Duplicate, WrongName, NoToken, Refused, BadConfig, NotReady,
	StepBound, Superseded, Fenced, Expired, Silent, EdgeChanged, EdgeStopping, Lost, Stopped, Renewed, Retired,
}

// ReasonOf reads the reason word a peer gave. Two of them change what follows, one is an
// operator's to mend, one is as it should be; any other text is otherwise.
func ReasonOf(word string, otherwise Reason) Reason {
	switch Reason(word) {
	case Superseded, Duplicate, Expired:
		return Reason(word)
	case "edge is stopping":
		return EdgeStopping
	default:
		return otherwise
	}
}
