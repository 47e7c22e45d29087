package node

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/iop-fabric/iop/agent"
	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/bus"
	"github.com/iop-fabric/iop/internal/bus/membus"
	"github.com/iop-fabric/iop/internal/identity"
	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/tunnel"
	"github.com/iop-fabric/iop/wire"
	"github.com/iop-fabric/iop/wire/iopv1"
)

const (
	testEdge = "edge1"
	testNode = "node1"
	beat     = time.Second
	hbBound  = 5 * time.Second
)

// rig is one Node, the bus, and the Edge and broker that the test plays.
type rig struct {
	t    testing.TB
	bus  *membus.Bus
	edge *fakeEdge
	node *Node
	logs *lockedBuffer
	reg  *prometheus.Registry

	mu       sync.Mutex
	gen      uint64
	dials    int
	dialling int
	conn     *membus.Conn // the Node's newest
	dialErr  func(n int) error
	user     func(gen uint64) string // nil: as is right
	makes    map[string]int
	stops    map[string]int
	provide  func(c *iopv1.AdapterConfig) (agent.Provider, error)

	stop context.CancelFunc
	done chan struct{}
	err  error
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

type options struct {
	cfg      configs.Node
	config   *iopv1.NodeConfigPayload
	exchange func(ctx context.Context, ex agent.Exchange, sink agent.Sink) error
	seed     uint64
	level    slog.Level // of the log; zero: all
}

func forever() configs.Reconnect {
	zero := 0
	return configs.Reconnect{MaxAttempts: &zero}
}

// newRig makes a Node that is not running yet, with one adapter "a" of capacity 4.
func newRig(t testing.TB, o options) *rig {
	t.Helper()
	ca, err := identity.NewCA("iop", time.Hour)
	must(t, err)
	cert := func(role identity.Role, name string) *identity.Certificate {
		c, err := ca.Issue(identity.ID{TrustDomain: "iop", Edge: testEdge, Role: role, Name: name}, nil, time.Hour)
		must(t, err)
		return c
	}
	user, err := identity.NewUserKey()
	must(t, err)
	curve, err := identity.NewCurveKey()
	must(t, err)
	issuer, err := identity.NewAccountKey()
	must(t, err)

	if o.level == 0 {
		o.level = slog.LevelDebug
	}
	r := &rig{
		t: t, bus: membus.NewSeeded(o.seed + 1), logs: &lockedBuffer{}, reg: prometheus.NewRegistry(),
		makes: map[string]int{}, stops: map[string]int{}, done: make(chan struct{}),
	}
	if o.config == nil {
		o.config = payload("a")
	}
	if o.exchange == nil {
		o.exchange = small("hello")
	}
	r.provide = func(c *iopv1.AdapterConfig) (agent.Provider, error) {
		return &fakeProvider{r: r, name: c.GetName(), exchange: o.exchange}, nil
	}
	if o.cfg.Reconnect.MaxAttempts == nil && o.cfg.Reconnect.IntervalSec == nil {
		o.cfg.Reconnect = forever()
	}
	o.cfg.Name, o.cfg.Edge = testNode, testEdge
	n, err := New(o.cfg, Deps{
		Dial: r.dial, WhoAmI: r.whoAmI,
		Adapters: func(c *iopv1.AdapterConfig) (agent.Provider, error) {
			r.mu.Lock()
			r.makes[c.GetName()]++
			r.mu.Unlock()
			return r.provide(c)
		},
		Identity:   Identity{Certificate: cert(identity.RoleNode, testNode), User: user, Curve: curve, Trust: ca.Trust()},
		InstanceID: wire.NewToken(), Software: "iop/test",
		Log: slog.New(slog.NewTextHandler(r.logs, &slog.HandlerOptions{Level: o.level})), Metrics: r.reg,
	})
	must(t, err)
	r.node = n
	r.edge = &fakeEdge{
		r: r, ca: ca, cert: cert(identity.RoleEdge, "edge-a"), issuer: issuer, user: user.Public(), config: o.config,
		instance: "edge-instance-1", runs: map[string]*answer{}, beats: true,
	}
	r.edge.conn = r.bus.Connect("_INBOX.edge1._edge")
	_, err = r.edge.conn.Subscribe(subjects.UpWildcard(testEdge), r.edge.receive)
	must(t, err)
	return r
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func payload(names ...string) *iopv1.NodeConfigPayload {
	p := &iopv1.NodeConfigPayload{Revision: 1}
	for _, n := range names {
		p.Adapters = append(p.Adapters, &iopv1.AdapterConfig{Name: n, Type: "demo", Capacity: 4, Enabled: true})
	}
	return p
}

// dial is the Node's: it counts, and refuses to be called twice at a time.
func (r *rig) dial(ctx context.Context) (bus.Conn, error) {
	r.mu.Lock()
	r.dials++
	r.dialling++
	n, fail := r.dials, r.dialErr
	if r.dialling > 1 {
		r.t.Error("two dials at a time")
	}
	r.mu.Unlock()
	defer func() {
		r.mu.Lock()
		r.dialling--
		r.mu.Unlock()
	}()
	if fail != nil {
		if err := fail(n); err != nil {
			return nil, err
		}
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.conn = r.bus.Connect(subjects.NodeInbox(testEdge, testNode, wire.NewToken()))
	return r.conn, nil
}

func (r *rig) whoAmI(context.Context, bus.Conn) (string, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.gen++
	if r.user != nil {
		return r.user(r.gen), nil
	}
	return r.session().String(), nil
}

func (r *rig) session() subjects.Session {
	return subjects.Session{Edge: testEdge, Node: testNode, Gen: r.gen}
}

// start runs the Node; finish stops it and checks that it ended well.
func (r *rig) start() *rig {
	ctx, cancel := context.WithCancel(context.Background())
	r.stop = cancel
	go func() {
		defer close(r.done)
		r.err = r.node.Run(ctx)
	}()
	return r
}

func (r *rig) finish() {
	r.t.Helper()
	r.stop()
	<-r.done
	if r.err != nil {
		r.t.Errorf("Run: %v", r.err)
	}
	r.edge.conn.Close()
}

// ready starts the Node and waits until it is ready.
func (r *rig) ready() *rig {
	r.t.Helper()
	r.start()
	synctest.Wait()
	r.wantState("ready")
	return r
}

func (r *rig) wantState(state string) {
	r.t.Helper()
	if s := r.node.State(); s.State != state {
		r.t.Fatalf("the node is %+v, not %s\n%s", s, state, r.logs)
	}
}

// pass lets the bubble's time go by.
func pass(d time.Duration) {
	<-time.After(d)
	synctest.Wait()
}

// fakeEdge plays Edge and the session service.
type fakeEdge struct {
	r        *rig
	conn     *membus.Conn
	ca       *identity.CA
	cert     *identity.Certificate
	issuer   *identity.NKey
	user     string
	instance string

	mu     sync.Mutex
	config *iopv1.NodeConfigPayload
	log    []string // verbs the Node sent, heartbeats, frames and acks aside
	// What differs from what is right.
	silent  map[subjects.Verb]int // so many requests of a verb get no answer
	refuse  map[subjects.Verb]string
	tamper  func(*iopv1.RegisterResponse)
	beats   bool
	request *iopv1.RegisterRequest // the last
	hearts  []*iopv1.Heartbeat
	runs    map[string]*answer
	acks    []*iopv1.StreamAck_Entry
}

// answer is what came of one run.
type answer struct {
	sess    subjects.Session
	recv    *tunnel.Receiver
	frames  []*iopv1.ProviderTunnelFrame // delivered, in order
	mute    bool                         // acknowledge nothing
	slow    bool                         // acknowledge, but read nothing
	late    int                          // frames after the terminal
	ended   chan struct{}
	started chan struct{}
}

func (e *fakeEdge) receive(m bus.Msg) {
	msg, err := subjects.ParseUp(m.Subject)
	if err != nil {
		e.r.t.Errorf("the node published %s", m.Subject)
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	switch msg.Verb {
	case subjects.Frame:
		e.frame(msg, m.Data)
		return
	case subjects.Ack:
		var a iopv1.StreamAck
		e.decode(m.Data, &a)
		e.acks = append(e.acks, a.GetEntries()...)
		return
	case subjects.Heartbeat:
		h := &iopv1.Heartbeat{}
		e.decode(m.Data, h)
		e.hearts = append(e.hearts, h)
		if e.beats {
			e.send(msg.Session, subjects.Heartbeat, "", &iopv1.Heartbeat{EdgeInstance: e.instance})
		}
		return
	}
	e.log = append(e.log, string(msg.Verb))
	if e.silent[msg.Verb] > 0 {
		e.silent[msg.Verb]--
		return
	}
	reason := e.refuse[msg.Verb]
	switch msg.Verb {
	case subjects.SessionVerb:
		g := &iopv1.SessionGrant{Reason: reason}
		if reason == "" {
			g.Token, err = identity.IssueToken(e.issuer, identity.SessionClaims{Edge: testEdge, Node: testNode, Gen: msg.Session.Gen, NKey: e.user})
			must(e.r.t, err)
		}
		e.send(msg.Session, subjects.SessionVerb, "", g)
	case subjects.Register:
		e.register(msg.Session, m.Data, reason)
	case subjects.Ready:
		e.send(msg.Session, subjects.Ready, "", &iopv1.NodeReadyResponse{Ready: reason == "", Reason: reason})
	}
}

func (e *fakeEdge) register(s subjects.Session, data []byte, reason string) {
	q := &iopv1.RegisterRequest{}
	e.decode(data, q)
	e.request = q
	if err := identity.VerifyRegister(e.ca.Pool(), e.issuer.Public(), testEdge, testNode, s.Gen, q); err != nil {
		e.r.t.Errorf("the node's registration: %v", err)
	}
	raw, err := e.config.MarshalVT()
	must(e.r.t, err)
	signed, err := identity.SignConfig(e.cert, raw, q.GetNonce(), e.config.GetRevision())
	must(e.r.t, err)
	a := &iopv1.RegisterResponse{
		Accepted: reason == "", Reason: reason, NodeId: testNode, Protocol: wire.ProtocolVersion, Config: signed,
		EdgeInstance: e.instance, HeartbeatIntervalMs: uint32(beat.Milliseconds()), HeartbeatBoundMs: uint32(hbBound.Milliseconds()),
	}
	if e.tamper != nil {
		e.tamper(a)
	}
	e.send(s, subjects.Register, "", a)
}

type decoder interface{ UnmarshalVT([]byte) error }

func (e *fakeEdge) decode(data []byte, into decoder) {
	if err := into.UnmarshalVT(data); err != nil {
		e.r.t.Errorf("the node sent %T: %v", into, err)
	}
}

func (e *fakeEdge) send(s subjects.Session, v subjects.Verb, run string, m message) {
	data, err := m.MarshalVT()
	must(e.r.t, err)
	_ = e.conn.Publish(s.Down(v, run), data)
}

// frame receives as Edge does, and acknowledges at once.
func (e *fakeEdge) frame(msg subjects.Message, data []byte) {
	if e.runs == nil { // a benchmark's affair
		return
	}
	f := &iopv1.ProviderTunnelFrame{}
	e.decode(data, f)
	a := e.runs[msg.Run]
	if a == nil || a.sess != msg.Session {
		e.r.t.Errorf("a frame of run %s in session %v, which is not its own", msg.Run, msg.Session)
		return
	}
	if f.GetRunId() != msg.Run {
		e.r.t.Errorf("run id %q on %s", f.GetRunId(), msg.Run)
	}
	terminal := f.GetKind() == iopv1.ProviderTunnelFrame_END || f.GetKind() == iopv1.ProviderTunnelFrame_ERROR || f.GetEnd()
	if a.recv.Done() && f.GetSequence() > uint64(len(a.frames)) {
		a.late++
	}
	now := time.Now()
	for _, ef := range a.recv.Step(now, tunnel.RecvEvent{Kind: tunnel.FrameReceived, Seq: f.GetSequence(), Body: len(f.GetBody()), Terminal: terminal}, nil) {
		switch ef.Kind {
		case tunnel.Deliver:
			a.frames = append(a.frames, f)
			if f.GetKind() == iopv1.ProviderTunnelFrame_RESPONSE_START {
				close(a.started)
			}
			if !a.mute && !a.slow {
				a.recv.Step(now, tunnel.RecvEvent{Kind: tunnel.Consumed, Body: len(f.GetBody())}, nil)
			}
			if terminal {
				close(a.ended)
			}
		case tunnel.ReceiverFailed:
			e.r.t.Errorf("run %s: %v", msg.Run, ef.Err)
		}
	}
	if !a.mute {
		e.ack(msg.Session, msg.Run, a)
	}
}

func (e *fakeEdge) ack(s subjects.Session, run string, a *answer) {
	k := a.recv.Ack()
	e.send(s, subjects.Ack, "", &iopv1.StreamAck{Entries: []*iopv1.StreamAck_Entry{
		{RunId: run, Acked: k.Acked, Credit: k.Credit, Resend: k.Resend, Direction: dirFrame},
	}})
}

// read lets a slow caller read what lies there, and all that comes.
func (e *fakeEdge) read(run string, a *answer) {
	e.mu.Lock()
	defer e.mu.Unlock()
	a.slow = false
	for _, f := range a.frames {
		a.recv.Step(time.Now(), tunnel.RecvEvent{Kind: tunnel.Consumed, Body: len(f.GetBody())}, nil)
	}
	e.ack(a.sess, run, a)
}

// open is a request of Edge's; fill in what differs.
func (e *fakeEdge) open(change func(*iopv1.ProviderTunnelRequest)) (string, *answer) {
	return e.openAs(wire.NewRunID(), change)
}

func (e *fakeEdge) openAs(run string, change func(*iopv1.ProviderTunnelRequest)) (string, *answer) {
	e.r.mu.Lock()
	s := e.r.session()
	e.r.mu.Unlock()
	q := &iopv1.ProviderTunnelRequest{
		RunId: run, Adapter: "a", Target: "m", Operation: "chat_completions", Method: "POST", Credit: wire.MinWindow,
	}
	if change != nil {
		change(q)
	}
	a := e.expect(run)
	e.send(s, subjects.Tunnel, run, q)
	return run, a
}

// expect is ready to receive a run of the current session.
func (e *fakeEdge) expect(run string) *answer {
	e.r.mu.Lock()
	s := e.r.session()
	e.r.mu.Unlock()
	e.mu.Lock()
	defer e.mu.Unlock()
	a := e.runs[run]
	if a == nil {
		a = &answer{sess: s, recv: tunnel.NewReceiver(tunnel.ReceiverConfig{}), ended: make(chan struct{}), started: make(chan struct{})}
		e.runs[run] = a
	}
	return a
}

func (e *fakeEdge) cancel(run string) {
	e.r.mu.Lock()
	s := e.r.session()
	e.r.mu.Unlock()
	e.send(s, subjects.Cancel, run, &iopv1.CancelRequest{RunId: run})
}

func (e *fakeEdge) with(fn func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	fn()
}

// got is what was delivered of a run.
func (e *fakeEdge) got(a *answer) []*iopv1.ProviderTunnelFrame {
	e.mu.Lock()
	defer e.mu.Unlock()
	if a.late > 0 {
		e.r.t.Errorf("%d frames after the terminal", a.late)
	}
	return slices.Clone(a.frames)
}

// class is the class of a run's terminal: "" while there is none, "END" for END.
func (e *fakeEdge) class(a *answer) string {
	frames := e.got(a)
	if len(frames) == 0 {
		return ""
	}
	switch f := frames[len(frames)-1]; {
	case f.GetKind() == iopv1.ProviderTunnelFrame_ERROR:
		if f.GetError() == "" {
			e.r.t.Error("an ERROR without words (W4)")
		}
		return f.GetErrorClass()
	case f.GetKind() == iopv1.ProviderTunnelFrame_END || f.GetEnd():
		return "END"
	}
	return ""
}

func (e *fakeEdge) wantClass(a *answer, class string) {
	e.r.t.Helper()
	if got := e.class(a); got != class {
		e.r.t.Errorf("the terminal is %q, not %q\n%s", got, class, e.r.logs)
	}
}

func body(frames []*iopv1.ProviderTunnelFrame) []byte {
	var b []byte
	for _, f := range frames {
		b = append(b, f.GetBody()...)
	}
	return b
}

// fakeProvider is an adapter whose exchange the test plays.
type fakeProvider struct {
	r        *rig
	name     string
	exchange func(ctx context.Context, ex agent.Exchange, sink agent.Sink) error
	startErr error
}

func (p *fakeProvider) Start(context.Context) error { return p.startErr }

func (p *fakeProvider) Stop(context.Context) error {
	p.r.mu.Lock()
	defer p.r.mu.Unlock()
	p.r.stops[p.name]++
	return nil
}

func (p *fakeProvider) Exchange(ctx context.Context, ex agent.Exchange, sink agent.Sink) error {
	return p.exchange(ctx, ex, sink)
}

var jsonHeader = []agent.Field{{Name: "Content-Type", Value: []byte("application/json")}}

// small answers with a body of known size.
func small(text string) func(context.Context, agent.Exchange, agent.Sink) error {
	return func(_ context.Context, _ agent.Exchange, sink agent.Sink) error {
		return errors.Join(sink.Start(200, jsonHeader, int64(len(text))), sink.Body([]byte(text)))
	}
}

// hang begins an answer and waits for the end of the context.
func hang(ctx context.Context, _ agent.Exchange, sink agent.Sink) error {
	if err := sink.Start(200, jsonHeader, -1); err != nil {
		return err
	}
	<-ctx.Done()
	return context.Cause(ctx)
}

func describe(frames []*iopv1.ProviderTunnelFrame) string {
	s := ""
	for _, f := range frames {
		s += fmt.Sprintf("%v(%d) ", f.GetKind(), len(f.GetBody()))
	}
	return s
}
