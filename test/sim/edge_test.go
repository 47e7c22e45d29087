package sim

import (
	"context"
	"slices"
	"time"

	"github.com/iop-fabric/iop/edge/dispatch"
	"github.com/iop-fabric/iop/edge/pool"
	"github.com/iop-fabric/iop/edge/registry"
	"github.com/iop-fabric/iop/internal/bus"
	"github.com/iop-fabric/iop/internal/history"
	"github.com/iop-fabric/iop/node/session"
	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/wire"
)

const (
	heartbeatInterval = wire.HeartbeatInterval
	heartbeatBound    = wire.HeartbeatBound
)

// edge is an Edge's shell: the registry, the pool and the dispatcher, called in the
// order of edge/loop.go and edge/session.go.
type edge struct {
	w        *world
	up       bool
	life     int
	instance string
	reg      *registry.Registry
	pool     *pool.Pool
	d        *dispatch.Driven
	beatAt   time.Time
	waiters  map[pool.WaiterID]*request
	waiter   pool.WaiterID
	calls    []*request // with an attempt under way
	returns  []pool.Event
	slots    map[uint64]pool.Slot

	paused  bool // the process does not run; what comes waits
	inbox   []func()
	resumed time.Time // no deadline passes before

	away  bool // the connection is lost
	knows bool // and the Edge knows
	epoch int  // counts connections

	regEffects  []registry.Effect
	poolEffects []pool.Effect
}

func newEdge(w *world) *edge {
	e := &edge{w: w}
	e.begin()
	return e
}

// begin starts the process.
func (e *edge) begin() {
	w := e.w
	e.up, e.life = true, e.life+1
	e.instance = "edge" + runID(e.life)
	e.reg, e.pool = registry.New(registry.Config{Nodes: w.configured()}), pool.New()
	e.waiters, e.calls, e.returns, e.slots = map[pool.WaiterID]*request{}, nil, nil, map[uint64]pool.Slot{}
	e.d = dispatch.Drive(dispatch.New(dispatch.Config{Edge: edgeName}, dispatch.Deps{
		Bus: edgeConn{e, e.life}, Now: w.Now, Misbehaved: func(node string, gen uint64, reason string) {
			e.stepRegistry(registry.Misbehaved{Node: node, Gen: gen})
		},
		Return: func(s pool.Slot, how pool.Return) { e.returns = append(e.returns, pool.ReturnSlot(s.ID, how)) },
	}))
	e.beatAt = w.now.Add(heartbeatInterval)
	w.event(history.Event{Kind: history.Up})
	for _, n := range w.nodes {
		w.event(history.Event{Kind: history.Capacity, Provider: n.provider(), N: int64(n.capacity)})
	}
	e.stepPool(pool.SetConfig(w.poolConfig()))
	for _, n := range w.nodes {
		if n.resting {
			e.stepPool(pool.SetDraining(n.name, 0, true))
		}
	}
}

// rest is an operator's drain; a new process is told again.
func (e *edge) rest(n *nodeProc, on bool) {
	n.resting = on
	e.awake(func() {
		if e.up {
			e.stepPool(pool.SetDraining(n.name, 0, n.resting))
		}
	})
}

// remove takes a Node out of the configuration, or puts it back.
func (e *edge) remove(n *nodeProc, out bool) {
	n.gone = out
	e.awake(func() {
		if e.up {
			e.stepRegistry(registry.ConfigChanged{Nodes: e.w.configured()})
			e.stepPool(pool.SetConfig(e.w.poolConfig()))
		}
	})
}

func (w *world) configured() (names []string) {
	for _, n := range w.nodes {
		if !n.gone {
			names = append(names, n.name)
		}
	}
	return names
}

// crash ends it: its callers do not know what became of their requests.
func (e *edge) crash() {
	e.up, e.paused, e.inbox = false, false, nil
	e.life++
	e.w.event(history.Event{Kind: history.Down})
	for _, q := range e.w.requests {
		q.edgeGone()
	}
	e.waiters, e.calls = map[pool.WaiterID]*request{}, nil
}

func (w *world) poolConfig() (c pool.Config) {
	c.Queue.Wait = w.patience
	all := pool.Group{Name: "all"}
	for _, n := range w.nodes {
		if n.gone {
			continue
		}
		c.Adapters = append(c.Adapters, pool.Adapter{Node: n.name, Name: adapterName, Capacity: n.capacity})
		c.Providers = append(c.Providers, pool.Provider{ID: n.provider(), Node: n.name, Adapter: adapterName, Target: "m", StallTimeout: stallBound})
		k := pool.Candidate{Provider: n.provider()}
		all.Candidates = append(all.Candidates, k)
		c.Groups = append(c.Groups, pool.Group{Name: n.name, Candidates: []pool.Candidate{k}})
	}
	c.Groups = append(c.Groups, all)
	return c
}

// edgeConn is the Edge's connection, as dispatch has it.
type edgeConn struct {
	e    *edge
	life int
}

var _ bus.Conn = edgeConn{}

// Publish implements bus.Conn.
func (c edgeConn) Publish(subject string, data []byte) error {
	m, err := subjects.ParseDown(subject)
	if err != nil {
		return err
	}
	if err := c.e.lost(); err != nil || c.life != c.e.life {
		return err
	}
	out := message{verb: m.Verb, run: m.Run, data: slices.Clone(data)}
	if c.e.away {
		// Into a hole: some of it lies in the buffers of a server that comes back.
		if w := c.e.w; chance(w.net, 0.3) {
			w.after(between(w.net, 0, 8*time.Second), func() {
				w.counts.late++
				c.e.toNode(m.Session, out)
			})
		}
		return nil
	}
	c.e.toNode(m.Session, out)
	return nil
}

// PublishRequest implements bus.Conn.
func (c edgeConn) PublishRequest(subject, _ string, data []byte) error {
	return c.Publish(subject, data)
}

// Subscribe implements bus.Conn.
func (edgeConn) Subscribe(string, func(bus.Msg)) (bus.Subscription, error) {
	return nil, errNotSimulated
}

// Request implements bus.Conn.
func (edgeConn) Request(context.Context, string, []byte) (bus.Msg, error) {
	return bus.Msg{}, errNotSimulated
}

// Flush implements bus.Conn.
func (edgeConn) Flush(context.Context) error { return nil }

// Inbox implements bus.Conn.
func (edgeConn) Inbox() string { return "" }

// Closed implements bus.Conn.
func (edgeConn) Closed() <-chan struct{} { return nil }

// Err implements bus.Conn.
func (edgeConn) Err() error { return nil }

// Close implements bus.Conn.
func (edgeConn) Close() {}

func (e *edge) lost() error {
	if e.away && e.knows {
		return bus.ErrAway
	}
	return nil
}

func (e *edge) toNode(s subjects.Session, m message) {
	if e.away || !e.up || !e.w.broker.up {
		return
	}
	for _, c := range e.w.broker.conns {
		if c.id == s {
			c.toNode(m)
			return
		}
	}
	if m.run != "" {
		e.w.broker.tellNobody(m.run)
	}
}

func (e *edge) tell(node string, gen uint64, verb subjects.Verb, ev session.Event) {
	ev.Gen = gen
	e.toNode(subjects.Session{Edge: edgeName, Node: node, Gen: gen}, message{verb: verb, toNode: ev})
}

// lose takes the connection away. known: publishing says so.
func (e *edge) lose(known bool) { e.away, e.knows = true, known }

// restore is a new connection.
func (e *edge) restore() {
	if !e.away || !e.w.broker.up {
		return
	}
	e.away, e.knows = false, false
	e.epoch++
	if e.up && !e.paused {
		e.d.Reconnected()
	} else if e.paused {
		e.inbox = append(e.inbox, e.d.Reconnected)
	}
}

// receive is onUp.
func (e *edge) receive(s subjects.Session, m message) {
	if e.paused {
		e.inbox = append(e.inbox, func() { e.receive(s, m) })
		return
	}
	if !e.up || e.away {
		return
	}
	e.stale(s.Node, s.Gen, func() { e.onUp(s, m) })
}

func (e *edge) onUp(s subjects.Session, m message) {
	live := e.reg.Live(s.Node, s.Gen)
	msg := subjects.Message{Session: s, Verb: m.verb, Run: m.run}
	switch m.verb {
	case subjects.Frame:
		if live {
			e.d.Frame(msg, m.data)
			return
		}
		e.stepRegistry(registry.MessageReceived{Node: s.Node, Gen: s.Gen})
	case subjects.Ack:
		if live {
			e.d.Ack(msg, m.data)
			return
		}
		e.stepRegistry(registry.MessageReceived{Node: s.Node, Gen: s.Gen})
	case subjects.Register: // verified beside the loop, so others may overtake it
		life := e.life
		e.w.after(between(e.w.sched, 0, 2*time.Millisecond), func() {
			if e.life == life {
				e.stale(s.Node, s.Gen, func() { e.stepRegistry(m.toEdge) })
			}
		})
	default:
		e.stepRegistry(m.toEdge)
	}
}

// fromBroker is onCtl.
func (e *edge) fromBroker(ev registry.Event) {
	if e.paused {
		e.inbox = append(e.inbox, func() { e.fromBroker(ev) })
		return
	}
	if !e.up {
		return
	}
	node, gen := "", uint64(0)
	switch ev := ev.(type) {
	case registry.Admitted:
		node, gen = ev.Node, ev.Gen
	case registry.Closed:
		node, gen = ev.Node, ev.Gen
	}
	e.stale(node, gen, func() { e.stepRegistry(ev) })
}

// stale does what is to be done, and looks whether it changed anything though its
// generation is over.
func (e *edge) stale(node string, gen uint64, do func()) {
	if highest, _ := e.reg.Owner(node); gen >= highest {
		do()
		return
	}
	before := e.pool.AppendKey(e.reg.AppendKey(nil))
	do()
	changed := string(e.pool.AppendKey(e.reg.AppendKey(nil))) != string(before)
	e.w.event(history.Event{Kind: history.Stale, Node: node, Gen: gen, Changed: changed})
}

// pause stops the process as a signal does. When it goes on, it reads what waited
// before time passes, and gives what is on its way an interval (edge/loop.go).
func (e *edge) pause() {
	if e.up && !e.paused {
		e.paused = true
		e.w.event(history.Event{Kind: history.Paused})
	}
}

func (e *edge) resume() {
	if !e.paused {
		return
	}
	e.paused = false
	e.w.event(history.Event{Kind: history.Resumed})
	e.resumed = e.w.now.Add(heartbeatInterval)
	waiting := e.inbox
	e.inbox = nil
	for _, do := range waiting {
		do()
	}
}

// stepRegistry and the three below are edge/loop.go's.
func (e *edge) stepRegistry(ev registry.Event) {
	effects := e.reg.Step(e.w.now, ev, e.regEffects[:0])
	e.regEffects = nil
	for _, ef := range effects {
		e.applyRegistry(ef)
	}
	clear(effects)
	e.regEffects = effects[:0]
}

func (e *edge) applyRegistry(effect registry.Effect) {
	w := e.w
	switch x := effect.(type) {
	case registry.SendRegisterAnswer:
		if x.Accepted && !x.Repeat {
			w.event(history.Event{Kind: history.Register, Node: x.Node, Gen: x.Gen})
		}
		e.tell(x.Node, x.Gen, subjects.Register, session.Event{
			Kind: session.RegisterAnswered, OK: x.Accepted, Reason: session.Reason(x.Reason), Instance: e.instance,
			Interval: heartbeatInterval, Bound: heartbeatBound,
		})
	case registry.SendReadyAnswer:
		err := e.lost()
		if err == nil {
			e.tell(x.Node, x.Gen, subjects.Ready, session.Event{Kind: session.ReadyAnswered, OK: x.Ready, Reason: session.Reason(x.Reason)})
		}
		switch {
		case !x.Ready:
		case err != nil:
			e.stepRegistry(registry.ReadyAckFailed{Node: x.Node, Gen: x.Gen})
		default:
			w.event(history.Event{Kind: history.Ready, Node: x.Node, Gen: x.Gen})
			e.stepRegistry(registry.ReadyAckSent{Node: x.Node, Gen: x.Gen})
		}
	case registry.SendFence:
		e.tell(x.Node, x.Gen, subjects.Fence, session.Event{Kind: session.FenceReceived, Reason: session.Reason(x.Reason)})
	case registry.CloseSession:
	case registry.Activate:
		// The event stands before the grants that follow from it.
		w.event(history.Event{Kind: history.Connected, Node: x.Node, Gen: x.Gen})
		e.stepPool(pool.Activate(x.Node, x.Gen))
	case registry.FenceGeneration:
		w.event(history.Event{Kind: history.Fenced, Node: x.Node, Gen: x.Gen, How: string(x.Cause)})
		e.stepPool(pool.Fence(x.Node, x.Gen, string(x.Cause)))
	case registry.Draining:
		e.stepPool(pool.SetDraining(x.Node, x.Gen, x.On))
	case registry.NodeConnected, registry.NodeDisconnected:
	}
}

func (e *edge) stepPool(ev pool.Event) {
	effects := e.pool.Step(e.w.now, ev, e.poolEffects[:0])
	e.poolEffects = nil
	for i := range effects {
		e.applyPool(&effects[i])
	}
	clear(effects)
	e.poolEffects = effects[:0]
}

func (e *edge) applyPool(x *pool.Effect) {
	switch x.Kind {
	case pool.Granted:
		e.w.event(history.Event{Kind: history.Take, Slot: e.slotID(x.Slot.ID), Provider: x.Slot.Provider, Node: x.Slot.Node, Gen: x.Slot.Gen})
		e.slots[x.Slot.ID] = x.Slot
		q := e.waiters[x.Waiter]
		delete(e.waiters, x.Waiter)
		q.granted(x)
	case pool.Refused:
		q := e.waiters[x.Waiter]
		delete(e.waiters, x.Waiter)
		q.refused(x.Err)
	case pool.EndAttempt:
		e.d.Fenced(x.Slot, x.Cause)
	case pool.SlotReturned:
		delete(e.slots, x.Slot.ID)
		e.w.event(history.Event{Kind: history.Release, Slot: e.slotID(x.Slot.ID), Gen: x.Slot.Gen, How: x.How.String()})
	case pool.CatalogChanged:
	}
}

// slotID tells the slots of one Edge process from those of the next.
func (e *edge) slotID(id uint64) uint64 { return uint64(e.life)<<32 | id } //nolint:gosec // a small count

func (e *edge) deadline() (at time.Time) {
	if !e.up || e.paused {
		return at
	}
	at = earlier(e.beatAt, e.d.Deadline())
	if at = earlier(at, e.loopDeadline()); e.w.now.Before(e.resumed) {
		at = earlier(earlier(e.beatAt, e.d.Deadline()), e.resumed)
	}
	for _, q := range e.calls {
		if !q.busy() {
			at = earlier(at, q.attempt.Deadline())
		}
	}
	return at
}

// loopDeadline is that of the two cores.
func (e *edge) loopDeadline() time.Time { return earlier(e.reg.Deadline(), e.pool.Deadline()) }

func (e *edge) passDeadlines() {
	if !e.up || e.paused {
		return
	}
	now := e.w.now
	if !now.Before(e.resumed) {
		if due(now, e.reg.Deadline()) {
			e.stepRegistry(registry.DeadlinePassed{})
		}
		if due(now, e.pool.Deadline()) {
			e.stepPool(pool.DeadlinePassed())
		}
	}
	if due(now, e.beatAt) {
		e.beatAt = now.Add(heartbeatInterval)
		for _, n := range e.w.nodes {
			if gen, s := e.reg.Owner(n.name); s.Owns() {
				e.tell(n.name, gen, subjects.Heartbeat, session.Event{Kind: session.HeartbeatReceived, Instance: e.instance})
			}
		}
	}
}

// settle runs what was woken, and reports whether anything was.
func (e *edge) settle() (any bool) {
	if !e.up || e.paused {
		return false
	}
	for len(e.returns) > 0 {
		any = true
		ev := e.returns[0]
		e.returns = e.returns[1:]
		e.stepPool(ev)
	}
	if e.d.Woken() || due(e.w.now, e.d.Deadline()) {
		any = true
		e.d.Pass()
	}
	for i := 0; i < len(e.calls); i++ {
		q := e.calls[i]
		if q.busy() || !q.attempt.Ready() {
			continue
		}
		any = true
		q.attempt.Turn()
		if q.judge() {
			i-- // it left the list
		}
	}
	return any
}

// awake runs do once the process runs.
func (e *edge) awake(do func()) {
	if e.paused {
		e.inbox = append(e.inbox, do)
	} else {
		do()
	}
}
