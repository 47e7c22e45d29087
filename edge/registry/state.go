package registry

import (
	"time"

	"github.com/iop-fabric/iop/wire"
)

// Config is what the registry is told once. Zero times mean the wire's defaults.
type Config struct {
	Nodes          []string
	HeartbeatBound time.Duration
	PendingBound   time.Duration
}

// State is where a node's highest session stands.
type State uint8

const (
	// Absent: no session was seen. Left by Admitted, or a registration.
	Absent State = iota
	// AdmittedState: the broker let it in; it has not registered. It owns nothing.
	AdmittedState
	// Pending: registered; it owns the node and gets no work (R2).
	Pending
	// Acking: it asked for ready, and the answer is on its way out (R4).
	Acking
	// Ready: live. The one state that is connected and dispatchable.
	Ready
	// Gone: the session ended. Left by a higher generation only.
	Gone
)

func (s State) String() string {
	return [...]string{"absent", "admitted", "pending", "acking", "ready", "gone"}[s]
}

// Owns reports whether a session in this state is the node's owner.
func (s State) Owns() bool { return s == Pending || s == Acking || s == Ready }

// Registry is the state of all nodes. One goroutine owns it.
type Registry struct {
	heartbeatBound time.Duration
	pendingBound   time.Duration
	configured     map[string]bool
	nodes          map[string]*node
	stopping       bool
	// next is at or before the earliest deadline of any node; DeadlinePassed
	// computes it anew. A heartbeat, which only moves deadlines away, costs nothing.
	next   time.Time
	fences limiter // outside the key: it decides on messages, never on state
}

// node is the record of a node's highest generation.
type node struct {
	gen      uint64
	state    State
	draining bool
	heard    time.Time // Ready: when the session last spoke
	due      time.Time // Pending, Acking: when the claim ends
	since    time.Time // when state was entered
	instance string
	software string
	features []string
	protocol uint32
}

// New makes a registry.
func New(cfg Config) *Registry {
	r := &Registry{
		heartbeatBound: cfg.HeartbeatBound,
		pendingBound:   cfg.PendingBound,
		configured:     map[string]bool{},
		nodes:          map[string]*node{},
	}
	if r.heartbeatBound <= 0 {
		r.heartbeatBound = wire.HeartbeatBound
	}
	if r.pendingBound <= 0 {
		r.pendingBound = wire.PendingBound
	}
	for _, n := range cfg.Nodes {
		r.configured[n] = true
	}
	return r
}

// Deadline is when DeadlinePassed is due; zero: never.
func (r *Registry) Deadline() time.Time { return r.next }

// Owner returns a node's highest generation and its state; the session owns the
// node if state.Owns().
func (r *Registry) Owner(name string) (gen uint64, state State) {
	if n := r.nodes[name]; n != nil {
		return n.gen, n.state
	}
	return 0, Absent
}

// Live reports whether the session is the node's ready owner.
func (r *Registry) Live(name string, gen uint64) bool {
	n := r.nodes[name]
	return n != nil && n.gen == gen && n.state == Ready
}

// LiveSessions is a copy of all that Live says yes to, for a demux that runs
// beside the loop. It changes with Activate and FenceGeneration, and only then.
func (r *Registry) LiveSessions() map[string]uint64 {
	live := make(map[string]uint64, len(r.nodes))
	for name, n := range r.nodes {
		if n.state == Ready {
			live[name] = n.gen
		}
	}
	return live
}

// EachOwner calls fn for every session that owns its node, pending or ready:
// those that get heartbeats.
func (r *Registry) EachOwner(fn func(node string, gen uint64, s State)) {
	for name, n := range r.nodes {
		if n.state.Owns() {
			fn(name, n.gen, n.state)
		}
	}
}
