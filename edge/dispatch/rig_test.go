package dispatch

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/iop-fabric/iop/edge/pool"
	"github.com/iop-fabric/iop/internal/bus"
	"github.com/iop-fabric/iop/internal/bus/membus"
	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/tunnel"
	"github.com/iop-fabric/iop/wire"
	"github.com/iop-fabric/iop/wire/iopv1"
)

const (
	start = iopv1.ProviderTunnelFrame_RESPONSE_START
	body  = iopv1.ProviderTunnelFrame_BODY
	end   = iopv1.ProviderTunnelFrame_END
	fail  = iopv1.ProviderTunnelFrame_ERROR
	usage = iopv1.ProviderTunnelFrame_USAGE
)

// returned is one call of Deps.Return.
type returned struct {
	slot pool.Slot
	how  pool.Return
}

// rig is a Dispatcher on a bus in memory, with Nodes that the test plays.
type rig struct {
	t    testing.TB
	bus  *membus.Bus
	edge *membus.Conn
	d    *Dispatcher
	reg  *prometheus.Registry
	stop context.CancelFunc
	ran  chan error

	mu         sync.Mutex
	returns    []returned
	misbehaved []string
	slots      uint64
	nodes      []*fakeNode
}

// inBubble runs a test in a bubble of virtual time, with everything stopped at
// its end and each slot that was given out accounted for.
func inBubble(t *testing.T, cfg Config, fn func(t *testing.T, r *rig)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, cfg)
		fn(t, r)
		r.close()
	})
}

func newRig(t testing.TB, cfg Config) *rig {
	r := &rig{t: t, bus: membus.New(), reg: prometheus.NewRegistry(), ran: make(chan error, 1)}
	cfg.Edge = "e"
	r.edge = r.bus.Connect(subjects.EdgeInbox("e"))
	r.d = New(cfg, Deps{
		Bus: r.edge, Metrics: r.reg,
		Return: func(s pool.Slot, how pool.Return) {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.returns = append(r.returns, returned{s, how})
		},
		Misbehaved: func(node string, gen uint64, reason string) {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.misbehaved = append(r.misbehaved, fmt.Sprintf("%s/%d/%s", node, gen, reason))
		},
	})
	if _, err := r.edge.Subscribe(subjects.UpWildcard("e"), func(m bus.Msg) {
		msg, err := subjects.ParseUp(m.Subject)
		if err != nil {
			t.Errorf("subject %q: %v", m.Subject, err)
			return
		}
		switch msg.Verb {
		case subjects.Frame:
			r.d.Frame(msg, m.Data)
		case subjects.Ack:
			r.d.Ack(msg, m.Data)
		default:
			t.Errorf("verb %q", msg.Verb)
		}
	}); err != nil {
		t.Fatal(err)
	}
	if _, err := r.edge.Subscribe(subjects.NoRespondersWildcard("e"), func(m bus.Msg) {
		run, err := subjects.ParseNoResponders(m.Subject)
		if err != nil || !m.NoResponders {
			t.Errorf("notice %q: %v", m.Subject, err)
			return
		}
		r.d.NoResponders(run)
	}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	r.stop = cancel
	go func() { r.ran <- r.d.Run(ctx) }()
	return r
}

func (r *rig) close() {
	r.stop()
	if err := <-r.ran; err != nil {
		r.t.Errorf("Run: %v", err)
	}
	r.edge.Close()
	for _, n := range r.nodes {
		n.conn.Close()
	}
	if n := r.d.Open(); n != 0 {
		r.t.Errorf("%d attempts are open after Run", n)
	}
	seen := map[uint64]bool{}
	for _, x := range r.returned() {
		if seen[x.slot.ID] {
			r.t.Errorf("slot %d came back twice", x.slot.ID)
		}
		seen[x.slot.ID] = true
	}
}

func (r *rig) returned() []returned {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]returned(nil), r.returns...)
}

// how says how a slot came back; 0: it did not.
func (r *rig) how(slot pool.Slot) pool.Return {
	for _, x := range r.returned() {
		if x.slot == slot {
			return x.how
		}
	}
	return 0
}

// attempt makes one for the node.
func (r *rig) attempt(n *fakeNode, payload string) Attempt {
	r.mu.Lock()
	r.slots++
	id := r.slots
	r.mu.Unlock()
	return Attempt{
		RunID:     wire.NewRunID(),
		Slot:      pool.Slot{ID: id, Provider: "n/a/m", Node: n.id.Node, Gen: n.id.Gen, Adapter: "a", Target: "m"},
		Operation: "chat_completions", Method: "POST", Path: "/v1/chat/completions",
		Header: []*iopv1.Header{{Name: "Content-Type", Value: []byte("application/json")}},
		Body:   bytes.NewReader([]byte(payload)), BodySize: int64(len(payload)),
	}
}

// do runs an attempt in the background.
func (r *rig) do(ctx context.Context, a Attempt, w Writer) *pending {
	p := &pending{done: make(chan struct{})}
	go func() {
		defer close(p.done)
		p.res = r.d.Do(ctx, a, w)
	}()
	return p
}

type pending struct {
	done chan struct{}
	res  Result
}

func (p *pending) wait() Result {
	<-p.done
	return p.res
}

func (p *pending) isDone() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

// answer is a Writer that keeps what it was given.
type answer struct {
	mu      sync.Mutex
	status  int
	header  []*iopv1.Header
	body    []byte
	trailer []*iopv1.Header
	calls   []string
	fail    error         // what Body answers
	block   chan struct{} // Body waits for it, if it is there
	blocked chan struct{} // tells that it does
}

func (a *answer) log(s string) { a.calls = append(a.calls, s) }

func (a *answer) Start(status int, h []*iopv1.Header) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.status, a.header = status, h
	a.log(fmt.Sprint("start ", status))
	return nil
}

func (a *answer) Body(p []byte) error {
	if a.block != nil {
		select {
		case a.blocked <- struct{}{}:
		default:
		}
		<-a.block
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.fail != nil {
		return a.fail
	}
	a.body = append(a.body, p...)
	a.log(fmt.Sprint("body ", len(p)))
	return nil
}

func (a *answer) Flush() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.log("flush")
	return nil
}

func (a *answer) Trailer(h []*iopv1.Header) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.trailer = h
	a.log(fmt.Sprint("trailer ", len(h)))
	return nil
}

func (a *answer) text() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return string(a.body)
}

// fakeNode is a session that the test plays by hand.
type fakeNode struct {
	r    *rig
	id   subjects.Session
	conn *membus.Conn

	mu      sync.Mutex
	counts  map[subjects.Verb]map[string]int // messages, by verb and run
	acks    map[string]*iopv1.StreamAck_Entry
	ackMsgs int
	bodies  map[string][]byte
	serve   func(m subjects.Message, data []byte) // what an honest Node does, if set

	requests chan *iopv1.ProviderTunnelRequest
	cancels  chan string
}

func (r *rig) node(name string, gen uint64) *fakeNode {
	n := &fakeNode{
		r: r, id: subjects.Session{Edge: "e", Node: name, Gen: gen},
		counts: map[subjects.Verb]map[string]int{}, acks: map[string]*iopv1.StreamAck_Entry{}, bodies: map[string][]byte{},
		requests: make(chan *iopv1.ProviderTunnelRequest, 1<<14), cancels: make(chan string, 1<<14),
	}
	n.conn = r.bus.Connect(subjects.NodeInbox("e", name, "abcdefghijklmnopqrstuvwxyz234567"))
	if _, err := n.conn.Subscribe(n.id.DownWildcard(), n.down); err != nil {
		r.t.Fatal(err)
	}
	r.nodes = append(r.nodes, n)
	return n
}

func (n *fakeNode) down(m bus.Msg) {
	msg, err := subjects.ParseDown(m.Subject)
	if err != nil {
		n.r.t.Errorf("subject %q: %v", m.Subject, err)
		return
	}
	if m.Reply == "" {
		n.r.t.Errorf("%s has no reply subject", m.Subject)
	}
	n.mu.Lock()
	if n.counts[msg.Verb] == nil {
		n.counts[msg.Verb] = map[string]int{}
	}
	n.counts[msg.Verb][msg.Run]++
	serve := n.serve
	n.mu.Unlock()
	switch msg.Verb {
	case subjects.Tunnel:
		req := &iopv1.ProviderTunnelRequest{}
		if err := req.UnmarshalVT(m.Data); err != nil {
			n.r.t.Error(err)
		}
		n.requests <- req
	case subjects.Cancel:
		req := &iopv1.CancelRequest{}
		if err := req.UnmarshalVT(m.Data); err != nil || req.RunId != msg.Run {
			n.r.t.Errorf("cancel of %q: %v %v", msg.Run, req, err)
		}
		n.cancels <- msg.Run
	case subjects.Ack:
		ack := &iopv1.StreamAck{}
		if err := ack.UnmarshalVT(m.Data); err != nil {
			n.r.t.Error(err)
		}
		n.mu.Lock()
		n.ackMsgs++
		for _, e := range ack.Entries {
			if e.Direction != "frame" {
				n.r.t.Errorf("direction %q", e.Direction)
			}
			n.acks[e.RunId] = e
		}
		n.mu.Unlock()
	case subjects.Body:
	default:
		n.r.t.Errorf("verb %q", msg.Verb)
	}
	if serve != nil {
		serve(msg, m.Data)
	}
}

func (n *fakeNode) count(v subjects.Verb, run string) int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.counts[v][run]
}

func (n *fakeNode) ack(run string) *iopv1.StreamAck_Entry {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.acks[run]
}

// send publishes frames of a run as they are.
func (n *fakeNode) send(run string, fs ...*iopv1.ProviderTunnelFrame) {
	for _, f := range fs {
		data, err := f.MarshalVT()
		if err != nil {
			n.r.t.Fatal(err)
		}
		n.raw(run, data)
	}
}

func (n *fakeNode) raw(run string, data []byte) {
	if err := n.conn.Publish(n.id.Up(subjects.Frame, run), data); err != nil && !errors.Is(err, bus.ErrClosed) {
		n.r.t.Error(err)
	}
}

func (n *fakeNode) sendAck(es ...*iopv1.StreamAck_Entry) {
	data, err := (&iopv1.StreamAck{Entries: es}).MarshalVT()
	if err != nil {
		n.r.t.Fatal(err)
	}
	if err := n.conn.Publish(n.id.Up(subjects.Ack, ""), data); err != nil {
		n.r.t.Error(err)
	}
}

func frameOf(seq uint64, kind iopv1.ProviderTunnelFrame_Kind, payload string) *iopv1.ProviderTunnelFrame {
	f := &iopv1.ProviderTunnelFrame{Sequence: seq, Kind: kind, Body: []byte(payload)}
	if kind == start {
		f.Status = 200
	}
	return f
}

func errorOf(seq uint64, class wire.Class) *iopv1.ProviderTunnelFrame {
	return &iopv1.ProviderTunnelFrame{Sequence: seq, Kind: fail, ErrorClass: string(class), Error: "it failed"}
}

// whole is a small answer in one message.
func whole(payload string) *iopv1.ProviderTunnelFrame {
	f := frameOf(1, start, payload)
	f.End = true
	return f
}

// honest makes the Node answer every request as handler says, over the stream
// engine, as a real Node does; it lives until the connection is closed.
func (n *fakeNode) honest(handler func(req *iopv1.ProviderTunnelRequest, body io.Reader, send func(*iopv1.ProviderTunnelFrame) bool)) (stop func()) {
	h := &honest{n: n, runs: map[string]*honestRun{}, handler: handler, quit: make(chan struct{})}
	n.mu.Lock()
	n.serve = h.message
	n.mu.Unlock()
	return func() {
		close(h.quit)
		h.wg.Wait()
	}
}

type honest struct {
	n       *fakeNode
	handler func(*iopv1.ProviderTunnelRequest, io.Reader, func(*iopv1.ProviderTunnelFrame) bool)
	quit    chan struct{}
	wg      sync.WaitGroup
	mu      sync.Mutex
	runs    map[string]*honestRun
}

type honestRun struct {
	h       *honest
	run     string
	mu      sync.Mutex
	sender  *tunnel.Sender
	recv    *tunnel.Receiver
	changed chan struct{}
	body    bytes.Buffer
	bodyEOF bool
	ended   bool // the engine forgot it
	cancel  bool
}

func (h *honest) message(m subjects.Message, data []byte) {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch m.Verb {
	case subjects.Tunnel:
		if h.runs[m.Run] != nil {
			h.n.sendAck(&iopv1.StreamAck_Entry{RunId: m.Run, Direction: "body"})
			return
		}
		req := &iopv1.ProviderTunnelRequest{}
		if req.UnmarshalVT(data) != nil {
			return
		}
		r := &honestRun{
			h: h, run: m.Run, changed: make(chan struct{}, 1),
			sender: tunnel.NewSender(tunnel.SenderConfig{Credit: req.Credit}),
			recv:   tunnel.NewReceiver(tunnel.ReceiverConfig{}),
		}
		h.runs[m.Run] = r
		var in io.Reader = bytes.NewReader(req.Body)
		if req.BodyFollows {
			in = r
		}
		h.wg.Go(func() { h.handler(req, in, r.send) })
		h.wg.Go(r.drive)
	case subjects.Cancel:
		if r := h.runs[m.Run]; r != nil {
			r.change(func() { r.cancel = true })
		}
	case subjects.Ack:
		a := &iopv1.StreamAck{}
		if a.UnmarshalVT(data) != nil {
			return
		}
		for _, e := range a.Entries {
			if r := h.runs[e.RunId]; r != nil {
				r.change(func() {
					r.step(tunnel.SendEvent{Kind: tunnel.AckReceived, Acked: e.Acked, Credit: e.Credit, Resend: e.Resend, Reset: e.Reset_})
				})
			}
		}
	case subjects.Body:
		f := &iopv1.BodyFrame{}
		if f.UnmarshalVT(data) != nil {
			return
		}
		r := h.runs[m.Run]
		if r == nil {
			h.n.sendAck(&iopv1.StreamAck_Entry{RunId: m.Run, Reset_: true, Direction: "body"})
			return
		}
		r.change(func() {
			for _, ef := range r.recv.Step(time.Now(), tunnel.RecvEvent{Kind: tunnel.FrameReceived, Seq: f.Sequence, Body: len(f.Body), Terminal: f.Last}, nil) {
				switch ef.Kind {
				case tunnel.Deliver:
					r.body.Write(f.Body)
					r.bodyEOF = f.Last
					r.recv.Step(time.Now(), tunnel.RecvEvent{Kind: tunnel.Consumed, Body: len(f.Body)}, nil)
				case tunnel.ReceiverFailed:
					r.h.n.r.t.Errorf("body of %s: %v", r.run, ef.Err)
				default:
				}
			}
			a := r.recv.Ack()
			h.n.sendAck(&iopv1.StreamAck_Entry{RunId: m.Run, Acked: a.Acked, Credit: a.Credit, Resend: a.Resend, Direction: "body"})
		})
	default:
	}
}

func (r *honestRun) change(fn func()) {
	r.mu.Lock()
	fn()
	r.mu.Unlock()
	select {
	case r.changed <- struct{}{}:
	default:
	}
}

func (r *honestRun) step(ev tunnel.SendEvent) {
	for _, ef := range r.sender.Step(time.Now(), ev, nil) {
		switch ef.Kind {
		case tunnel.SendFrame:
			r.h.n.raw(r.run, ef.Frame.Data)
		case tunnel.SenderDone:
			r.ended = true
		case tunnel.SenderFailed:
			r.ended = true
		default:
		}
	}
}

// wait waits for a change; false: the Node is gone.
func (r *honestRun) wait() bool {
	select {
	case <-r.changed:
		return true
	case <-r.h.quit:
		return false
	case <-time.After(10 * time.Millisecond): // two may wait for one change
		return true
	}
}

func (r *honestRun) send(f *iopv1.ProviderTunnelFrame) bool {
	terminal := f.Kind == end || f.Kind == fail || f.End
	for {
		r.mu.Lock()
		switch {
		case r.ended:
			r.mu.Unlock()
			return false
		case r.cancel && !terminal:
			f, terminal = errorOf(0, wire.Cancelled), true
		}
		if terminal || r.sender.Room(len(f.Body)) {
			break
		}
		r.mu.Unlock()
		if !r.wait() {
			return false
		}
	}
	defer r.mu.Unlock()
	f.Sequence = r.sender.NextSeq()
	data, _ := f.MarshalVT()
	r.step(tunnel.SendEvent{Kind: tunnel.Offer, Frame: tunnel.Frame{Seq: f.Sequence, Data: data, Body: len(f.Body), Terminal: terminal}})
	cancelled := f.Kind == fail && f.ErrorClass == string(wire.Cancelled)
	return !cancelled
}

// drive serves the sender's deadlines.
func (r *honestRun) drive() {
	for {
		r.mu.Lock()
		due, ended := r.sender.Deadline(), r.ended
		r.mu.Unlock()
		if ended {
			return
		}
		var timer <-chan time.Time
		if !due.IsZero() {
			timer = time.After(time.Until(due))
		} else {
			timer = time.After(50 * time.Millisecond)
		}
		select {
		case <-r.h.quit:
			return
		case <-timer:
			r.change(func() {
				if d := r.sender.Deadline(); !d.IsZero() && !time.Now().Before(d) {
					r.step(tunnel.SendEvent{Kind: tunnel.SendDeadline})
				}
			})
		}
	}
}

func (r *honestRun) Read(p []byte) (int, error) {
	for {
		r.mu.Lock()
		n, _ := r.body.Read(p)
		eof := r.bodyEOF && r.body.Len() == 0
		r.mu.Unlock()
		switch {
		case n > 0:
			return n, nil
		case eof:
			return 0, io.EOF
		}
		if !r.wait() {
			return 0, io.ErrUnexpectedEOF
		}
	}
}

// pattern makes bytes that are the same for the same seed, and nowhere repeat.
func pattern(seed string, n int) []byte {
	out := make([]byte, 0, n+32)
	sum := sha256.Sum256([]byte(seed))
	for len(out) < n {
		out = append(out, sum[:]...)
		sum = sha256.Sum256(sum[:])
	}
	return out[:n]
}

// pass lets virtual time pass, and what it brings about happen.
func pass(d time.Duration) {
	<-time.After(d)
	synctest.Wait()
}

// membusDrop loses the first so many messages of a subject.
func membusDrop(subject string, limit int) membus.Fault {
	return membus.Fault{Subject: subject, Drop: 1, Limit: limit}
}
