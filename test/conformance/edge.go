package conformance

import (
	"fmt"
	"sync"
	"time"

	"github.com/iop-fabric/iop/internal/bus"
	"github.com/iop-fabric/iop/internal/identity"
	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/wire"
	"github.com/iop-fabric/iop/wire/iopv1"
)

// edgeSide is the player as an Edge: it takes a Node's registration, makes it ready,
// answers its heartbeats, and hands on what it says about runs.
type edgeSide struct {
	conn      bus.Conn
	edge      string
	cert      *identity.Certificate
	config    *iopv1.NodeConfigPayload
	instance  string
	providers *Providers
	// issue makes session tokens, where no session service does.
	issue func(s subjects.Session) ([]byte, error)

	mu       sync.Mutex
	session  subjects.Session
	ready    chan struct{}
	isReady  bool
	receiver func(v subjects.Verb, run string, data []byte)
	err      error
}

func newEdgeSide(conn bus.Conn, edge string, cert *identity.Certificate, config *iopv1.NodeConfigPayload, providers *Providers) *edgeSide {
	return &edgeSide{
		conn: conn, edge: edge, cert: cert, config: config, instance: wire.NewToken(), providers: providers, ready: make(chan struct{}),
	}
}

func (e *edgeSide) subscribe() error {
	_, err := e.conn.Subscribe(subjects.UpWildcard(e.edge), e.take)
	return err
}

// take is the callback of the one subscription.
func (e *edgeSide) take(m bus.Msg) {
	msg, err := subjects.ParseUp(m.Subject)
	if err == nil {
		err = e.answer(msg, m.Data)
	}
	if err != nil {
		e.mu.Lock()
		if e.err == nil {
			e.err = fmt.Errorf("%s: %w", m.Subject, err)
		}
		e.mu.Unlock()
	}
}

func (e *edgeSide) answer(m subjects.Message, data []byte) error {
	switch m.Verb {
	case subjects.SessionVerb:
		if e.issue == nil {
			return nil
		}
		token, err := e.issue(m.Session)
		if err != nil {
			return err
		}
		return e.tell(m.Session, subjects.SessionVerb, &iopv1.SessionGrant{Token: token})
	case subjects.Register:
		var q iopv1.RegisterRequest
		if err := q.UnmarshalVT(data); err != nil {
			return err
		}
		payload, err := e.config.MarshalVT()
		if err != nil {
			return err
		}
		signed, err := identity.SignConfig(e.cert, payload, q.GetNonce(), e.config.GetRevision())
		if err != nil {
			return err
		}
		return e.tell(m.Session, subjects.Register, &iopv1.RegisterResponse{
			Accepted: true, NodeId: m.Session.Node, Protocol: wire.ProtocolVersion, Config: signed, EdgeInstance: e.instance,
			HeartbeatIntervalMs: uint32(wire.HeartbeatInterval.Milliseconds()),
			HeartbeatBoundMs:    uint32((10 * wire.HeartbeatBound).Milliseconds()),
		})
	case subjects.Ready:
		err := e.tell(m.Session, subjects.Ready, &iopv1.NodeReadyResponse{Ready: true})
		e.mu.Lock()
		e.session = m.Session
		if !e.isReady {
			e.isReady = true
			close(e.ready)
		}
		e.mu.Unlock()
		return err
	case subjects.Heartbeat:
		return e.tell(m.Session, subjects.Heartbeat, &iopv1.Heartbeat{EdgeInstance: e.instance})
	case subjects.Frame, subjects.Ack:
		e.mu.Lock()
		fn := e.receiver
		if m.Session != e.session {
			fn = nil
		}
		e.mu.Unlock()
		if fn != nil {
			fn(m.Verb, m.Run, data)
		}
	default:
	}
	return nil
}

func (e *edgeSide) tell(s subjects.Session, v subjects.Verb, m encoder) error {
	return e.conn.Publish(s.Down(v, ""), encode(m))
}

func (e *edgeSide) wait() error {
	select {
	case <-e.ready:
		return nil
	case <-time.After(Hang):
		e.mu.Lock()
		defer e.mu.Unlock()
		return fmt.Errorf("the Node did not become ready: %w", e.err)
	}
}

// Publish implements World.
func (e *edgeSide) Publish(gen int, v subjects.Verb, run string, data []byte) error {
	e.mu.Lock()
	s := e.session
	e.mu.Unlock()
	s.Gen += uint64(gen) //nolint:gosec // a small one
	return e.conn.Publish(s.Down(v, run), data)
}

// Receive implements World.
func (e *edgeSide) Receive(fn func(v subjects.Verb, run string, data []byte)) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.receiver = fn
}

// Providers implements NodeWorld.
func (e *edgeSide) Providers() *Providers { return e.providers }

// configuration is what the player gives a Node: adapter "a" with places enough, and
// "one" with one place. base is the provider's URL; "": it is in the Node's process.
func configuration(base string) *iopv1.NodeConfigPayload {
	p := &iopv1.NodeConfigPayload{Revision: 1}
	for name, places := range map[string]int32{"a": 1024, "one": 1} {
		c := &iopv1.AdapterConfig{Name: name, Type: "demo", Capacity: places, Enabled: true}
		if base != "" {
			c.Type, c.OpenaiCompat = "openai_compat", &iopv1.OpenAICompatAdapterConfig{BaseUrl: base}
		}
		p.Adapters = append(p.Adapters, c)
	}
	return p
}
