package sim

import (
	"context"
	"slices"
	"time"

	"github.com/iop-fabric/iop/agent"
	"github.com/iop-fabric/iop/edge/registry"
	"github.com/iop-fabric/iop/internal/history"
	"github.com/iop-fabric/iop/node"
	"github.com/iop-fabric/iop/node/session"
	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/wire"
	"github.com/iop-fabric/iop/wire/iopv1"
)

const (
	adapterName   = "a"
	reconnectWait = 2 * time.Second
	// liveBound is F10's: the interval and 2 s, and what of the last fault is noticed
	// late: a name that a dead session still holds, a network that swallows.
	liveBound  = reconnectWait + 2*time.Second + heartbeatBound + pingBound
	stallBound = 4 * time.Second
)

// nodeProc is a Node's process: the supervisor's shell of node/loop.go around the
// session core, and the tunnels.
type nodeProc struct {
	w        *world
	name     string
	capacity int
	up       bool
	life     int
	instance string
	core     *session.Core
	driven   *node.Driven
	conn     *nodeConn
	tunnels  *node.Tunnels
	sent     map[frameID]bool
	asked    map[string]bool // the runs whose request came

	resting, gone  bool // drained by the operator; not configured
	cutUp, cutDown bool // partitioned
	paused         bool // the process does not run; what comes waits
	inbox          []func()
	vanished       bool // its end is not seen: the host is gone
}

type frameID struct {
	run string
	seq uint64
}

func (n *nodeProc) provider() string { return n.name + "/" + adapterName + "/m" }

// begin starts the process.
func (n *nodeProc) begin() {
	n.up, n.vanished = true, false
	n.life++
	n.sent, n.asked = map[frameID]bool{}, map[string]bool{}
	n.instance = n.name + runID(n.life)
	n.core = session.New(session.Config{
		Policy: session.Policy{Interval: reconnectWait}, StopGrace: 3 * time.Second,
	})
	var err error
	n.driven, err = node.Drive(n.w, func(*iopv1.AdapterConfig) (agent.Provider, error) { return &provider{n}, nil }, &iopv1.NodeConfigPayload{
		Adapters: []*iopv1.AdapterConfig{{Name: adapterName, Type: adapterName, Capacity: int32(n.capacity), Enabled: true}}, //nolint:gosec // small
	})
	if err != nil {
		panic(err)
	}
	n.w.event(history.Event{Kind: history.Up, Node: n.name})
	n.step(session.Event{Kind: session.Started})
}

// crash ends the process; unseen: nobody closes its connection.
func (n *nodeProc) crash(unseen bool) {
	n.up, n.vanished, n.paused, n.inbox = false, unseen, false, nil
	n.life++
	n.w.event(history.Event{Kind: history.Down, Node: n.name})
	if n.conn != nil {
		n.conn.Close()
		n.tunnels.End()
	}
	n.conn, n.tunnels = nil, nil
}

func (n *nodeProc) restart() {
	if !n.up {
		n.begin()
	}
}

// step runs the core on ev and on what its effects bring in turn.
func (n *nodeProc) step(ev session.Event) {
	for ev.Kind != 0 {
		ev.Rand = n.w.sched.Float64()
		effects := n.core.Step(n.w.now, ev, nil)
		ev = session.Event{}
		for _, ef := range effects {
			if ef.Kind == session.Exit {
				n.exit()
				return
			}
			if next := n.apply(ef); next.Kind != 0 {
				ev = next
			}
		}
	}
}

// exit is the end of a process that was told to stop.
func (n *nodeProc) exit() {
	n.up = false
	n.life++
	n.w.event(history.Event{Kind: history.Down, Node: n.name})
}

func (n *nodeProc) apply(ef session.Effect) session.Event {
	c := n.conn
	switch ef.Kind {
	case session.Dial:
		n.dial()
	case session.AskToken:
		c.up.send(64, func() {
			b := n.w.broker
			if !c.known || !b.live.Grant(c.id) {
				return
			}
			c.toNode(message{verb: subjects.SessionVerb, toNode: session.Event{Kind: session.Granted, OK: true}})
		})
	case session.SendRegister:
		c.toEdge(message{verb: subjects.Register, toEdge: registry.RegisterReceived{
			Node: n.name, Gen: c.id.Gen, PayloadNode: n.name, ProtocolMin: wire.ProtocolVersion, ProtocolMax: wire.ProtocolVersion, Instance: n.instance,
		}})
	case session.Apply:
		return session.Event{Kind: session.Applied, Gen: c.id.Gen, OK: !chance(n.w.fault, n.w.badConfig())}
	case session.TakeWork:
		n.tunnels.TakeWork()
	case session.SendReady:
		c.toEdge(message{verb: subjects.Ready, toEdge: registry.ReadyReceived{Node: n.name, Gen: c.id.Gen, PayloadNode: n.name}})
	case session.SendHeartbeat:
		c.toEdge(message{verb: subjects.Heartbeat, toEdge: registry.HeartbeatReceived{Node: n.name, Gen: c.id.Gen, Draining: ef.Draining}})
	case session.RefuseWork:
		n.tunnels.RefuseWork()
	case session.CutRest:
		n.tunnels.CutRest()
	case session.EndSession:
		n.w.logf("%s: session %d ends: %s", n.name, ef.Gen, ef.Reason)
		n.tunnels.End()
		n.conn, n.tunnels = nil, nil
		c.Close()
	case session.Exit:
	}
	return session.Event{}
}

// dial takes its time, in which nothing else happens to the supervisor.
func (n *nodeProc) dial() {
	life, w := n.life, n.w
	w.after(between(w.net, time.Millisecond, 30*time.Millisecond), func() {
		switch {
		case n.life != life:
			return
		case n.paused: // the dial is given up by its peer
			n.inbox = append(n.inbox, func() { n.step(session.Event{Kind: session.DialFailed, Reason: session.Unreachable}) })
			return
		case n.cutUp || n.cutDown || !w.broker.up:
			wait := between(w.net, 0, 10*time.Millisecond) // refused
			if w.broker.up {
				wait = between(w.net, time.Second, 3*time.Second) // swallowed
			}
			w.after(wait, func() {
				n.awake(life, func() { n.step(session.Event{Kind: session.DialFailed, Reason: session.Unreachable}) })
			})
			return
		}
		c, why := w.broker.admit(n)
		if c == nil {
			n.step(session.Event{Kind: session.DialFailed, Reason: why})
			return
		}
		w.after(between(w.net, 0, 5*time.Millisecond), func() {
			if n.life != life { // it died while it dialled
				c.Close()
				return
			}
			n.awake(life, func() {
				n.conn, n.tunnels = c, n.driven.Open(c.id, tap{c, n})
				n.step(session.Event{Kind: session.Connected, Gen: c.id.Gen})
				if !c.open {
					n.lost(c)
				}
			})
		})
	})
}

// awake runs do in this life of the process, once it runs.
func (n *nodeProc) awake(life int, do func()) {
	switch {
	case n.life != life:
	case n.paused:
		n.inbox = append(n.inbox, func() { n.awake(life, do) })
	default:
		do()
	}
}

// pause stops the process as a signal does, and resume lets it go on: what waits for
// it is read before, or after, it looks at the clock.
func (n *nodeProc) pause() { n.paused = true }

func (n *nodeProc) resume() {
	n.paused = false
	if n.w.sched.IntN(2) == 0 {
		n.passDeadlines()
	}
	waiting := n.inbox
	n.inbox = nil
	for _, do := range waiting {
		do()
	}
}

// tap sees what the tunnels publish: which frames go out again.
type tap struct {
	*nodeConn
	n *nodeProc
}

// Publish implements bus.Conn.
func (t tap) Publish(subject string, data []byte) error {
	if m, err := subjects.ParseUp(subject); err == nil && m.Verb == subjects.Frame {
		var f iopv1.ProviderTunnelFrame
		if f.UnmarshalVTUnsafe(data) == nil {
			id := frameID{m.Run, f.Sequence}
			if t.n.sent[id] {
				t.n.w.event(history.Event{Kind: history.Resent, Run: m.Run, Seq: f.Sequence})
			}
			t.n.sent[id] = true
		}
	}
	return t.nodeConn.Publish(subject, data)
}

// lost is the end of the connection, from outside.
func (n *nodeProc) lost(c *nodeConn) {
	if n.paused {
		n.inbox = append(n.inbox, func() { n.lost(c) })
		return
	}
	if n.conn == c {
		n.step(session.Event{Kind: session.ConnectionLost, Gen: c.id.Gen})
	}
}

// receive takes a message of the connection's subscription.
func (n *nodeProc) receive(c *nodeConn, m message) {
	if n.paused {
		n.inbox = append(n.inbox, func() { n.receive(c, m) })
		return
	}
	if n.conn != c || !n.up {
		return
	}
	n.w.starting = n
	switch {
	case m.verb == subjects.Tunnel:
		n.asked[m.run] = true
	case m.verb == subjects.Cancel && !n.asked[m.run]:
		n.w.event(history.Event{Kind: history.Cancel, Run: m.run})
	}
	if !n.tunnels.Receive(subjects.Message{Session: c.id, Verb: m.verb, Run: m.run}, m.data) {
		m.toNode.Gen = c.id.Gen
		n.step(m.toNode)
	}
}

// stop is a local shutdown.
func (n *nodeProc) stop() {
	if n.up && !n.paused {
		n.step(session.Event{Kind: session.StopAsked})
	}
}

func (n *nodeProc) deadline() (at time.Time) {
	if !n.up || n.paused {
		return at
	}
	at = n.core.Deadline()
	if n.tunnels != nil {
		at = earlier(at, n.tunnels.Deadline())
	}
	return at
}

func (n *nodeProc) passDeadlines() {
	if n.up && !n.paused && due(n.w.now, n.core.Deadline()) {
		n.step(session.Event{Kind: session.DeadlinePassed})
	}
}

func (n *nodeProc) settle() (any bool) {
	for n.up && !n.paused && n.tunnels != nil && (n.tunnels.Woken() || due(n.w.now, n.tunnels.Deadline())) {
		any = true
		gen := n.conn.id.Gen
		n.w.starting = n
		if n.tunnels.Round() {
			n.step(session.Event{Kind: session.Idle, Gen: gen})
		}
	}
	return any
}

// provider is the model server beside a Node.
type provider struct{ n *nodeProc }

// Start implements agent.Provider.
func (*provider) Start(context.Context) error { return nil }

// Stop implements agent.Provider.
func (*provider) Stop(context.Context) error { return nil }

var errBroken = &agent.Failure{Code: agent.CodeProvider, Message: "the provider broke off"}

// Exchange implements agent.Exchanger: the answer that the request's plan holds.
func (p *provider) Exchange(ctx context.Context, ex agent.Exchange, sink agent.Sink) error {
	w := p.n.w
	q := w.attempts[ex.RunID]
	a := q.answer
	w.event(history.Event{Kind: history.Begin, Run: ex.RunID})
	read, sum := int64(0), uint32(0)
	if ex.Body != nil {
		buf := make([]byte, 0, ex.BodySize)
		for {
			if len(buf) == cap(buf) {
				buf = slices.Grow(buf, 512)
			}
			k, err := ex.Body.Read(buf[len(buf):cap(buf)])
			buf = buf[:len(buf)+k]
			if err != nil {
				if int64(len(buf)) != ex.BodySize {
					return err
				}
				break
			}
			if err := w.sleep(ctx, a.readPace, false); err != nil {
				return err
			}
		}
		read, sum = int64(len(buf)), history.Sum(buf)
	}
	if err := w.sleep(ctx, a.think, false); err != nil {
		return err
	}
	switch a.fate {
	case fateRefuses:
		return &agent.Failure{Code: agent.CodeUnreachable, Message: "connection refused"}
	case fatePanics:
		panic("sim: the adapter panics")
	case fateHangs: // until the calm, whoever cancels
		_ = w.sleep(ctx, w.quietAt.Sub(w.now), true)
		return errBroken
	case fateAnswers, fateBreaks, fateStalls:
	}
	if err := sink.Start(a.status, nil, a.size()); err != nil {
		return err
	}
	content := contentOf(ex.RunID)
	total := int64(0)
	for i, size := range a.chunks {
		if i == a.at {
			switch a.fate {
			case fateBreaks:
				return errBroken
			case fateStalls:
				if err := w.sleep(ctx, time.Hour, false); err != nil {
					return err
				}
			default:
			}
		}
		if err := w.sleep(ctx, a.pace, false); err != nil {
			return err
		}
		part := content(total, size)
		total += int64(size)
		w.event(history.Event{Kind: history.Sent, Run: ex.RunID, Seq: uint64(i + 1), N: int64(size), Sum: history.Sum(part)}) //nolint:gosec // small
		if err := sink.Body(part); err != nil {
			return err
		}
	}
	w.event(history.Event{Kind: history.Served, Run: ex.RunID, Seq: uint64(len(a.chunks)), N: total, Read: read, Sum: sum})
	return nil
}

// comeBack starts the process again once it has stopped.
func (n *nodeProc) comeBack() {
	if n.up && n.core.Stopping() {
		n.crash(false) // whoever stopped it has no more patience
	}
	n.restart()
}
