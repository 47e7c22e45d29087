package conformance

import (
	"bytes"
	"context"
	"fmt"
	"sync"
	"testing/synctest"
	"time"

	"github.com/iop-fabric/iop/agent"
	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/edge/dispatch"
	"github.com/iop-fabric/iop/edge/pool"
	"github.com/iop-fabric/iop/internal/bus"
	"github.com/iop-fabric/iop/internal/bus/membus"
	"github.com/iop-fabric/iop/internal/identity"
	"github.com/iop-fabric/iop/node"
	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/wire"
	"github.com/iop-fabric/iop/wire/iopv1"
)

const (
	edgeName = "edge1"
	nodeName = "node1"
)

// faults are what a lossy bus does to everything that carries a stream. Cancels pass:
// nobody repeats them, for a place has its bound (P8).
func faults(b *membus.Bus) {
	f := membus.Fault{Drop: 0.05, Duplicate: 0.1, Jitter: 3 * time.Millisecond}
	for _, s := range []string{"up.frame.*", "up.ack", "down.ack", "down.body.*", "down.tunnel.*"} {
		f.Subject = "iop.v1." + edgeName + ".*.*." + s
		b.Inject(f)
	}
}

// secrets are made once: they cost more than a case.
type secrets struct {
	ca         *identity.CA
	edge, node *identity.Certificate
	issuer     *identity.NKey
	user       *identity.NKey
	curve      *identity.NKey
}

func newSecrets() (s secrets, err error) {
	issue := func(role identity.Role, name string) (c *identity.Certificate) {
		if err == nil {
			c, err = s.ca.Issue(identity.ID{TrustDomain: "iop", Edge: edgeName, Role: role, Name: name}, nil, time.Hour)
		}
		return c
	}
	key := func(mk func() (*identity.NKey, error)) (k *identity.NKey) {
		if err == nil {
			k, err = mk()
		}
		return k
	}
	if s.ca, err = identity.NewCA("iop", time.Hour); err != nil {
		return s, err
	}
	s.edge, s.node = issue(identity.RoleEdge, "edge-a"), issue(identity.RoleNode, nodeName)
	s.issuer, s.user, s.curve = key(identity.NewAccountKey), key(identity.NewUserKey), key(identity.NewCurveKey)
	return s, err
}

// inMemory plays a case against our Node or our Edge on the bus in memory; it must be
// called in a bubble. seed other than 0: the bus is lossy.
func inMemory(c *Case, seed uint64) (err error) {
	b := membus.NewSeeded(seed)
	defer func() {
		if seed != 0 && err != nil {
			err = fmt.Errorf("seed %d: %w", seed, err)
		}
	}()
	if c.Role == Edge {
		w, stop := memoryEdge(b)
		defer stop()
		if seed != 0 {
			faults(b)
		}
		return Play(c, w)
	}
	w, stop, err := memoryNode(b)
	if err != nil {
		return err
	}
	defer stop()
	if seed != 0 {
		faults(b)
	}
	return Play(c, w)
}

type memoryNodeWorld struct {
	*edgeSide
	member *membus.Conn
}

func (memoryNodeWorld) Settle()       { synctest.Wait() }
func (memoryNodeWorld) Virtual() bool { return true }

// Connection loses the Edge's connection, or brings it back.
func (w memoryNodeWorld) Connection(there bool) { connection(w.member, there) }

func connection(c *membus.Conn, there bool) {
	if there {
		c.Restore()
	} else {
		c.Cut()
	}
}

func memoryNode(b *membus.Bus) (w memoryNodeWorld, stop func(), err error) {
	s, err := newSecrets()
	if err != nil {
		return w, nil, err
	}
	providers := newProviders(func() {})
	conn := b.Connect(subjects.EdgeInbox(edgeName))
	w = memoryNodeWorld{newEdgeSide(conn, edgeName, s.edge, configuration(""), providers), conn}
	w.issue = func(id subjects.Session) ([]byte, error) {
		return identity.IssueToken(s.issuer, identity.SessionClaims{Edge: edgeName, Node: nodeName, Gen: id.Gen, NKey: s.user.Public()})
	}
	if err := w.subscribe(); err != nil {
		return w, nil, err
	}
	zero, gen := 0, uint64(6)
	n, err := node.New(configs.Node{Name: nodeName, Edge: edgeName, Reconnect: configs.Reconnect{MaxAttempts: &zero}}, node.Deps{
		Dial: func(context.Context) (bus.Conn, error) {
			return b.Connect(subjects.NodeInbox(edgeName, nodeName, wire.NewToken())), nil
		},
		WhoAmI: func(context.Context, bus.Conn) (string, error) {
			gen++
			return subjects.Session{Edge: edgeName, Node: nodeName, Gen: gen}.String(), nil
		},
		Adapters:   func(*iopv1.AdapterConfig) (agent.Provider, error) { return exchanger{providers}, nil },
		Identity:   node.Identity{Certificate: s.node, User: s.user, Curve: s.curve, Trust: s.ca.Trust()},
		InstanceID: wire.NewToken(), Software: "conformance",
	})
	if err != nil {
		return w, nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- n.Run(ctx) }()
	stop = func() {
		cancel()
		<-done
		conn.Close()
	}
	if err := w.wait(); err != nil {
		stop()
		return w, nil, err
	}
	synctest.Wait()
	return w, stop, nil
}

// memoryEdgeWorld is our Edge's end of the streams with a caller above it and the
// player as its Node.
type memoryEdgeWorld struct {
	edge, node *membus.Conn
	session    subjects.Session
	d          *dispatch.Dispatcher

	mu       sync.Mutex
	receiver func(v subjects.Verb, run string, data []byte)
	slots    uint64
	back     map[uint64]string
	lost     bool
}

func (*memoryEdgeWorld) Settle()                 { synctest.Wait() }
func (*memoryEdgeWorld) Virtual() bool           { return true }
func (w *memoryEdgeWorld) Connection(there bool) { connection(w.edge, there) }

func (w *memoryEdgeWorld) Publish(gen int, v subjects.Verb, run string, data []byte) error {
	s := w.session
	s.Gen += uint64(gen) //nolint:gosec // a small one
	return w.node.Publish(s.Up(v, run), data)
}

func (w *memoryEdgeWorld) Receive(fn func(v subjects.Verb, run string, data []byte)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.receiver = fn
}

func (w *memoryEdgeWorld) Lost() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.lost
}

// Fence ends the session: the pool takes back every place of it.
func (w *memoryEdgeWorld) Fence() {
	w.mu.Lock()
	var held []pool.Slot
	for id := uint64(1); id <= w.slots; id++ {
		if w.back[id] == "" {
			held = append(held, w.slot(id))
			w.back[id] = "fence"
		}
	}
	w.mu.Unlock()
	for _, s := range held {
		w.d.Fenced(s, "superseded")
	}
}

func (w *memoryEdgeWorld) slot(id uint64) pool.Slot {
	return pool.Slot{ID: id, Provider: "p", Node: nodeName, Gen: w.session.Gen, Adapter: "a", Target: "m"}
}

func memoryEdge(b *membus.Bus) (w *memoryEdgeWorld, stop func()) {
	w = &memoryEdgeWorld{
		edge: b.Connect(subjects.EdgeInbox(edgeName)), node: b.Connect(subjects.NodeInbox(edgeName, nodeName, wire.NewToken())),
		session: subjects.Session{Edge: edgeName, Node: nodeName, Gen: 7}, back: map[uint64]string{},
	}
	w.d = dispatch.New(dispatch.Config{Edge: edgeName}, dispatch.Deps{
		Bus: w.edge,
		Return: func(s pool.Slot, how pool.Return) {
			w.mu.Lock()
			defer w.mu.Unlock()
			if was := w.back[s.ID]; was != "" {
				how, w.back[s.ID] = 0, "twice: "+was+" and "+how.String()
				return
			}
			w.back[s.ID] = how.String()
		},
		Misbehaved: func(string, uint64, string) {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.lost = true
		},
	})
	subscribe := func(c *membus.Conn, subject string, parse func(string) (subjects.Message, error), fn func(subjects.Message, []byte)) {
		_, err := c.Subscribe(subject, func(m bus.Msg) {
			if msg, err := parse(m.Subject); err == nil {
				fn(msg, m.Data)
			}
		})
		if err != nil {
			panic("BUG: conformance: " + err.Error()) // a subject of our own
		}
	}
	subscribe(w.edge, subjects.UpWildcard(edgeName), subjects.ParseUp, func(m subjects.Message, data []byte) {
		switch m.Verb {
		case subjects.Frame:
			w.d.Frame(m, data)
		case subjects.Ack:
			w.d.Ack(m, data)
		default:
		}
	})
	subscribe(w.node, w.session.DownWildcard(), subjects.ParseDown, func(m subjects.Message, data []byte) {
		w.mu.Lock()
		fn := w.receiver
		w.mu.Unlock()
		if fn != nil {
			fn(m.Verb, m.Run, data)
		}
	})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- w.d.Run(ctx) }()
	return w, func() {
		cancel()
		<-done
		w.edge.Close()
		w.node.Close()
	}
}

// Call implements EdgeWorld.
func (w *memoryEdgeWorld) Call(_ string, body []byte, timeout time.Duration, changed func()) Caller {
	w.mu.Lock()
	w.slots++
	slot := w.slot(w.slots)
	w.mu.Unlock()
	ctx, cancel := context.WithCancelCause(context.Background())
	c := &memoryCaller{w: w, slot: slot.ID, cancel: cancel, changed: changed, read: make(chan struct{})}
	close(c.read)
	go func() {
		res := w.d.Do(ctx, dispatch.Attempt{
			RunID: wire.NewRunID(), Slot: slot, Operation: "chat_completions", Method: "POST", Path: "/v1/chat/completions",
			Body: bytes.NewReader(body), BodySize: int64(len(body)), Timeout: timeout,
		}, c)
		c.mu.Lock()
		c.over, c.err = true, res.Err
		c.mu.Unlock()
		changed()
	}()
	return c
}

// memoryCaller is a caller in the place of the HTTP surface.
type memoryCaller struct {
	w       *memoryEdgeWorld
	slot    uint64
	cancel  context.CancelCauseFunc
	changed func()

	mu     sync.Mutex
	status int
	body   []byte
	over   bool
	err    *wire.Error
	after  bool          // something came after the end
	read   chan struct{} // closed: the caller reads
}

func (c *memoryCaller) State() (status int, body []byte, over bool, class string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		class = string(c.err.Class)
	}
	if c.after {
		class = "something came after the end"
	}
	return c.status, c.body, c.over, class
}

func (c *memoryCaller) Leave() { c.cancel(context.Canceled) }

func (c *memoryCaller) Stop(stop bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	select {
	case <-c.read:
		if stop {
			c.read = make(chan struct{})
		}
	default:
		if !stop {
			close(c.read)
		}
	}
}

func (c *memoryCaller) Slot() string {
	c.w.mu.Lock()
	defer c.w.mu.Unlock()
	return c.w.back[c.slot]
}

func (c *memoryCaller) wait() {
	c.mu.Lock()
	read := c.read
	c.mu.Unlock()
	<-read
}

func (c *memoryCaller) Start(status int, _ []*iopv1.Header) error {
	c.wait()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.after = c.after || c.over
	c.status = status
	c.changed()
	return nil
}

func (c *memoryCaller) Body(p []byte) error {
	c.wait()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.after = c.after || c.over
	c.body = append(c.body, p...)
	c.changed()
	return nil
}

func (c *memoryCaller) Flush() error                  { return nil }
func (c *memoryCaller) Trailer([]*iopv1.Header) error { return nil }
