package session

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/wire"
)

// State is where the Node stands.
type State uint8

// The states.
const (
	// Waiting: no connection; the next dial is due at the deadline.
	Waiting State = iota + 1
	// Dialling: one dial is under way, until Connected or DialFailed.
	Dialling
	// Admitted: connected and named by the broker; the token is asked for.
	Admitted
	// Registering: the proof was sent; Edge's answer is awaited.
	Registering
	// Applying: accepted; the configuration is being verified and applied.
	Applying
	// AwaitingReady: ready was asked for; work is taken from here on (R6).
	AwaitingReady
	// Ready: Edge acknowledged.
	Ready
	// Draining: a local stop was asked for, or new keys are to serve; what runs may
	// end within its grace.
	Draining
	// Closed: Exit was ordered. Nothing follows.
	Closed
)

var stateNames = [...]string{"new", "waiting", "dialling", "admitted", "registering", "applying", "awaiting_ready", "ready", "draining", "closed"}

func (s State) String() string { return stateNames[s] }

// live reports whether a session exists in this state.
func (s State) live() bool { return s >= Admitted && s <= Draining }

// Defaults of S3.
const (
	DefaultMaxAttempts = 10
	DefaultInterval    = 10 * time.Second
	// LostJitter is the longest wait before the first dial after a lost session.
	LostJitter = 250 * time.Millisecond
)

// Policy is S3's.
type Policy struct {
	MaxAttempts int // 0: for ever
	Interval    time.Duration
}

// PolicyOf reads the policy an operator wrote; what was omitted, nil, has its
// default.
func PolicyOf(maxAttempts, intervalSec *int) (Policy, error) {
	p := Policy{MaxAttempts: DefaultMaxAttempts, Interval: DefaultInterval}
	if maxAttempts != nil {
		p.MaxAttempts = *maxAttempts
	}
	if intervalSec != nil {
		if *intervalSec > int(24*time.Hour/time.Second) {
			return Policy{}, errors.New("reconnect.interval_sec: more than a day")
		}
		p.Interval = time.Duration(*intervalSec) * time.Second
	}
	switch {
	case p.MaxAttempts < 0:
		return Policy{}, errors.New("reconnect.max_attempts: negative; 0 means for ever")
	case p.Interval < 0:
		return Policy{}, errors.New("reconnect.interval_sec: negative")
	case p.Interval == 0 && p.MaxAttempts == 0:
		return Policy{}, errors.New("reconnect.interval_sec: 0 needs a positive max_attempts")
	}
	return p, nil
}

// Config parameterises the core; zero durations mean the defaults below.
type Config struct {
	Policy    Policy
	StepBound time.Duration // one step before ready; 10s
	Resend    time.Duration // an unanswered request goes out again; 1s
	StopGrace time.Duration // what runs at a stop may end within it; 10s
	// CutBound is how long, after the grace, the last terminals may take to be
	// acknowledged; 3s.
	CutBound time.Duration
}

func (c Config) withDefaults() Config {
	for _, d := range []struct {
		at  *time.Duration
		def time.Duration
	}{{&c.StepBound, 10 * time.Second}, {&c.Resend, time.Second}, {&c.StopGrace, 10 * time.Second}, {&c.CutBound, wire.CloseGrace + time.Second}} {
		if *d.at <= 0 {
			*d.at = d.def
		}
	}
	return c
}

// Kind says what happened.
type Kind uint8

// Events. Those of a session carry its Gen.
const (
	Started           Kind = iota + 1 // the process began
	Connected                         // the dial succeeded and the broker named session Gen
	DialFailed                        // for Reason; Rand
	LocalFault                        // Err is nothing another attempt could mend
	Granted                           // OK: the session token is here
	RegisterAnswered                  // OK: accepted by Instance, with Interval and Bound
	Applied                           // OK: the configuration runs whole
	ReadyAnswered                     // OK, or not
	HeartbeatReceived                 // of Instance
	EdgeSpoke                         // any other message of Edge's about work, once a while: it lives
	FenceReceived                     // for Reason
	ConnectionLost                    // the bus closed under us
	Idle                              // nothing is open any more; told while Draining
	DeadlinePassed                    // Deadline() is due
	StopAsked                         // local shutdown
	LeaveAsked                        // for Reason (Renewed, Retired): drain for Bound at the most, then dial anew; Resume
)

// Event is one event.
type Event struct {
	Kind     Kind
	Gen      uint64
	OK       bool
	Reason   Reason
	Instance string // Edge's
	Interval time.Duration
	Bound    time.Duration
	// Resume, of LeaveAsked: where something still runs after Bound, cut nothing, and
	// take work again.
	Resume bool
	Err    error
	// Rand in [0,1) draws the wait before the next dial, should there be one.
	Rand float64
}

// EffectKind says what is ordered.
type EffectKind uint8

// Effects. Except for Dial and Exit each is about session Gen.
const (
	Dial          EffectKind = iota + 1
	AskToken                 // send SessionRequest
	SendRegister             // send RegisterRequest, the same bytes each time
	Apply                    // verify and apply the accepted answer's configuration
	TakeWork                 // accept tunnels from now on
	SendReady                // send NodeReadyRequest
	SendHeartbeat            // Draining says whether we drain
	RefuseWork               // refuse new tunnels as draining; report Idle
	CutRest                  // the grace is over: end what still runs with its terminal
	EndSession               // cancel every tunnel, close the connection; for Reason
	Exit                     // Run returns Err
)

var effectNames = [...]string{
	"", "dial", "ask_token", "send_register", "apply", "take_work", "send_ready",
	"send_heartbeat", "refuse_work", "cut_rest", "end_session", "exit",
}

func (k EffectKind) String() string { return effectNames[k] }

// Effect is one order.
type Effect struct {
	Kind     EffectKind
	Gen      uint64
	Reason   Reason
	Draining bool
	Err      error
}

// Core is the state. The zero value is of no use: New.
type Core struct {
	cfg      Config
	state    State
	since    time.Time
	attempts int // dials in a row without a ready
	stopping bool

	// Of the current session.
	gen      uint64
	ready    bool   // it once was ready
	instance string // Edge's, from the registration on
	interval time.Duration
	bound    time.Duration
	heard    time.Time // Edge's last heartbeat
	beatAt   time.Time // our next one; zero: none

	due    time.Time // Waiting: the dial. Steps: the bound. Draining: grace, then cut
	resend time.Time // the unanswered request goes out again; zero: nothing to repeat
	cut    bool      // Draining: CutRest was ordered
	leave  Reason    // Draining: why, if it is not for a stop
	resume bool      // Draining: take work again when due
	refuse time.Time // Draining: RefuseWork is due; zero: it was ordered
}

// New makes a core that has not begun: Started does.
func New(cfg Config) *Core { return &Core{cfg: cfg.withDefaults()} }

// State is where the session stands. It is for status, as are Since, Generation
// and Attempts.
func (c *Core) State() State { return c.state }

// Since is when the state was entered.
func (c *Core) Since() time.Time { return c.since }

// Generation is the current session's, 0 without one.
func (c *Core) Generation() uint64 { return c.gen }

// Attempts counts the dials in a row without a ready.
func (c *Core) Attempts() int { return c.attempts }

// Stopping reports whether a local shutdown was asked for.
func (c *Core) Stopping() bool { return c.stopping }

// ErrWrongName: the broker's name for this connection is not ours.
var ErrWrongName = errors.New("the broker named this connection otherwise")

// Identify reads what the broker calls this connection (G2): a session of this
// edge and node, or the lobby's "!denied.<reason>[.<detail>]" (B3).
func Identify(user, edge, node string) (s subjects.Session, denied string, err error) {
	if rest, ok := strings.CutPrefix(user, "!denied."); ok {
		if rest == "" || len(rest) > 128 {
			rest = "unspecified"
		}
		return subjects.Session{}, rest, nil
	}
	s, err = subjects.ParseSession(user)
	if err != nil {
		return subjects.Session{}, "", fmt.Errorf("%w: no session name", ErrWrongName)
	}
	if s.Edge != edge || s.Node != node {
		return subjects.Session{}, "", fmt.Errorf("%w: %s.%s instead of %s.%s", ErrWrongName, s.Edge, s.Node, edge, node)
	}
	return s, "", nil
}

// Told is what the lobby's words mean to people.
func Told(denied string) string {
	word, detail, _ := strings.Cut(denied, ".")
	at := time.Time{}
	if when, err := strconv.ParseInt(detail, 10, 64); err == nil {
		at = time.Unix(when, 0).UTC()
	}
	switch {
	case at.IsZero():
	case Reason(word) == Duplicate:
		return "duplicate: another instance of this node is connected since " + at.Format(time.RFC3339)
	case word == "misbehaved":
		return "misbehaved: this node broke rules of the protocol and is let in again at " + at.Format(time.RFC3339)
	}
	return denied
}

// DeniedReason is the reason behind the lobby's words.
func DeniedReason(denied string) Reason {
	word, _, _ := strings.Cut(denied, ".")
	return ReasonOf(word, Denied)
}
