package node

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/iop-fabric/iop/agent"
	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/bus"
	"github.com/iop-fabric/iop/internal/identity"
	"github.com/iop-fabric/iop/node/session"
	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/wire/iopv1"
)

// Errors that Run returns; errors.Is tells them apart.
var (
	// ErrExhausted: reconnect.max_attempts dials in a row brought no ready session.
	ErrExhausted = session.ErrExhausted
	// ErrLocal: Deps.Dial wraps it around what no further attempt can mend: an own
	// key or certificate that is missing, unreadable or not a pair (S4).
	ErrLocal = session.ErrLocal
)

// Identity is who this Node is, and whom it believes.
type Identity struct {
	Certificate *identity.Certificate
	User        *identity.NKey // the connection's
	NextUser    *identity.NKey // that is to follow it, once it is registered; nil: none
	Curve       *identity.NKey // the recipient of credential leases
	Trust       identity.Trust // our own trust store (G3, L8)
}

// Deps are a Node's collaborators.
type Deps struct {
	// Dial makes one connection: TLS, nkey and inbox are its affair. It must
	// return soon after ctx ends. An error is a failed attempt, unless it wraps
	// ErrLocal.
	Dial func(ctx context.Context) (bus.Conn, error)
	// WhoAmI asks the server what it calls the connection: "<edge>.<node>.<gen>"
	// or "!denied.<reason>[.<detail>]" (G2, B3). Nil: AskServer.
	WhoAmI func(ctx context.Context, c bus.Conn) (string, error)
	// Adapters makes an adapter by its type; an unknown type is an error.
	Adapters func(c *iopv1.AdapterConfig) (agent.Provider, error)
	Identity Identity
	// Reload reads what Identity was read from again, and makes the next Dial use it.
	// It is called before every dial, and once in a while; nil: it never changes.
	Reload func() (Identity, error)
	// Save keeps a certificate that the authority has signed anew, for the same key,
	// where Reload reads it; nil: the authority is not asked.
	Save func(*identity.Certificate) error
	// SaveTrust keeps roots that were learnt from the authority, and SaveUser makes
	// NextUser the User, where Reload reads them; nil: neither is ever learnt.
	SaveTrust func(*iopv1.TrustBundle) error
	SaveUser  func() error
	// InstanceID is this process's own: 16 characters, wire.NewToken (B12).
	InstanceID string
	// Software says who we are, for people: "iop/1.4.0 linux/amd64".
	Software string
	Log      *slog.Logger          // nil: none
	Metrics  prometheus.Registerer // nil: none
}

// Node is a Node daemon.
type Node struct {
	cfg     configs.Node
	deps    Deps
	log     *slog.Logger
	core    *session.Core // the supervisor's alone
	metrics *metrics
	host    *host

	inbox chan signal   // of the live session's callback to the supervisor
	asked chan struct{} // one place: Reload was called
	link  *link         // the supervisor's alone
	keys  keys          // the supervisor's alone
	// children are the goroutines of ended sessions and of exchanges.
	children sync.WaitGroup

	mu     sync.Mutex
	status Status
}

// New checks cfg and deps and starts nothing.
func New(cfg configs.Node, deps Deps) (*Node, error) {
	policy, err := session.PolicyOf(cfg.Reconnect.MaxAttempts, cfg.Reconnect.IntervalSec)
	if err != nil {
		return nil, err
	}
	for _, name := range []string{cfg.Edge, cfg.Name} {
		if err := subjects.CheckName(name); err != nil {
			return nil, err
		}
	}
	id := deps.Identity
	switch {
	case deps.Dial == nil, deps.Adapters == nil:
		return nil, errors.New("node: Dial and Adapters are needed")
	case id.Certificate == nil, id.User == nil, id.Curve == nil, len(id.Trust.Roots()) == 0:
		return nil, errors.New("node: certificate, nkey, curve key and CA are needed")
	case deps.InstanceID == "":
		return nil, errors.New("node: an instance id is needed")
	}
	if deps.WhoAmI == nil {
		deps.WhoAmI = AskServer
	}
	log := deps.Log
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	m, err := newMetrics(deps.Metrics)
	if err != nil {
		return nil, fmt.Errorf("node metrics: %w", err)
	}
	n := &Node{
		cfg: cfg, deps: deps, log: log, metrics: m,
		core: session.New(session.Config{Policy: policy, StopGrace: cfg.StopGrace}),
		// A session owes the supervisor a handful of answers and a heartbeat a
		// second; what a peer floods beyond that is dropped.
		inbox:  make(chan signal, 64),
		asked:  make(chan struct{}, 1),
		status: Status{State: "new"},
	}
	n.keys.use(id)
	m.expiry.Set(float64(id.Certificate.Leaf.NotAfter.Unix()))
	n.host = newHost(deps.Adapters, log, m)
	return n, nil
}

// Status is what the Node says of itself.
type Status struct {
	State      string
	Generation uint64 // 0: no session
	Since      time.Time
	Attempts   int    // dials in a row without a ready
	Open       int    // tunnels
	LastReason string // why the last session ended or the last attempt failed
}

// State returns the Node's status; any goroutine may ask.
func (n *Node) State() Status {
	n.mu.Lock()
	defer n.mu.Unlock()
	s := n.status
	s.Open = n.host.open()
	return s
}

// AskServer asks the server that holds the connection for its user name (G2).
func AskServer(ctx context.Context, c bus.Conn) (string, error) {
	msg, err := c.Request(ctx, subjects.UserInfo, nil)
	if err != nil {
		return "", fmt.Errorf("ask the broker who we are: %w", err)
	}
	var answer struct {
		Data struct {
			User string `json:"user"`
		} `json:"data"`
	}
	if err := json.Unmarshal(msg.Data, &answer); err != nil {
		return "", errors.New("ask the broker who we are: unreadable answer")
	}
	return answer.Data.User, nil
}
