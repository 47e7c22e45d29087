package sim

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/iop-fabric/iop/broker"
	"github.com/iop-fabric/iop/edge/registry"
	"github.com/iop-fabric/iop/internal/bus"
	"github.com/iop-fabric/iop/internal/history"
	"github.com/iop-fabric/iop/node/session"
	"github.com/iop-fabric/iop/subjects"
)

const edgeName = "e1"

// message is what crosses: of a stream with data, of a session as the event that its
// reader makes of it.
type message struct {
	verb   subjects.Verb
	run    string
	data   []byte
	toEdge registry.Event
	toNode session.Event
}

// path is one publisher's way to one subscription: it keeps order while it stands.
type path struct {
	w        *world
	last     time.Time
	lossTill time.Time // all is lost until then: a burst
	cut      bool      // partitioned
	loose    float64   // how much likelier than others' its messages are late
}

// weather is what all paths have in common.
type weather struct {
	delay, jitter time.Duration
	loss, dup     float64
	late          float64 // share of messages that are kept somewhere and come long after
}

// way is how long a message of this size takes; it keeps the order of its path.
func (p *path) way(size int) time.Duration {
	w := p.w
	d := w.broker.weather.delay
	if j := w.broker.weather.jitter; j > 0 {
		d += time.Duration(w.net.Int64N(int64(j)))
	}
	d += time.Duration(size) * 8 // a second for 125 MB
	at := w.now.Add(d)
	if at.Before(p.last) {
		at = p.last
	}
	p.last = at
	return at.Sub(w.now)
}

// send carries a message: it may be lost, come twice, or late.
func (p *path) send(size int, deliver func()) {
	w := p.w
	w.counts.messages++
	b := w.broker
	if p.cut || w.now.Before(p.lossTill) || !b.up || chance(w.net, b.weather.loss) {
		w.counts.lost++
		return
	}
	d := p.way(size)
	life, epoch := b.life, w.edge.epoch
	arrive := func() {
		if b.life != life || !b.up {
			w.counts.lost++
			return // it was on its way when that went
		}
		if p.cut {
			// Lost, or kept somewhere: it comes when nobody expects it any more.
			if chance(w.net, 0.5) {
				w.counts.lost++
				return
			}
			w.after(between(w.net, 0, 10*time.Second), func() {
				if b.life == life && b.up && !w.edge.away {
					w.counts.late++
					deliver()
				}
			})
			return
		}
		// What was on its way when the Edge's connection went is lost, or comes late
		// out of a server's buffer, after what was sent anew.
		if w.edge.away || w.edge.epoch != epoch {
			if !chance(w.net, 0.3) {
				w.counts.lost++
				return
			}
			w.after(between(w.net, 0, 6*time.Second), func() {
				if b.life == life && b.up && !w.edge.away && !p.cut {
					w.counts.late++
					deliver()
				}
			})
			return
		}
		deliver()
	}
	if chance(w.net, b.weather.late*p.loose) {
		w.counts.late++
		d += between(w.net, 0, 8*time.Second)
	}
	w.after(d, arrive)
	if chance(w.net, b.weather.dup) {
		w.counts.duplicated++
		w.after(d+between(w.net, 0, 200*time.Millisecond), arrive)
	}
}

// server is the broker: one server, with the session service and the live core. What it keeps over
// a restart are the generations.
type server struct {
	w       *world
	up      bool
	life    int
	gens    map[string]uint64
	live    *broker.Driven
	conns   []*nodeConn // that it takes for connected
	lastNum uint64
	ctl     path // its notices to the Edge
	weather weather
	calm    weather
}

// nodeConn is a Node's connection; it carries one session.
type nodeConn struct {
	w        *world
	id       subjects.Session
	num      uint64
	node     *nodeProc
	instance string
	open     bool // at the Node
	known    bool // at the broker
	up, down path
}

var _ bus.Conn = (*nodeConn)(nil)

var errNotSimulated = errors.New("sim: not simulated")

// Publish implements bus.Conn.
func (c *nodeConn) Publish(subject string, data []byte) error {
	if !c.open {
		return bus.ErrClosed
	}
	m, err := subjects.ParseUp(subject)
	if err != nil {
		return err
	}
	c.toEdge(message{verb: m.Verb, run: m.Run, data: slices.Clone(data)})
	return nil
}

// PublishRequest implements bus.Conn.
func (c *nodeConn) PublishRequest(subject, _ string, data []byte) error {
	return c.Publish(subject, data)
}

// Subscribe implements bus.Conn.
func (c *nodeConn) Subscribe(string, func(bus.Msg)) (bus.Subscription, error) {
	return nil, errNotSimulated
}

// Request implements bus.Conn.
func (c *nodeConn) Request(context.Context, string, []byte) (bus.Msg, error) {
	return bus.Msg{}, errNotSimulated
}

// Flush implements bus.Conn.
func (c *nodeConn) Flush(context.Context) error { return nil }

// Inbox implements bus.Conn.
func (c *nodeConn) Inbox() string { return "" }

// Closed implements bus.Conn.
func (c *nodeConn) Closed() <-chan struct{} { return nil }

// Err implements bus.Conn.
func (c *nodeConn) Err() error { return nil }

// Close implements bus.Conn: the broker sees it when the network lets it.
func (c *nodeConn) Close() {
	if !c.open {
		return
	}
	c.open = false
	c.w.broker.hearsClose(c, "client_closed")
}

func (c *nodeConn) toEdge(m message) {
	if !c.known { // what a server does not hold it does not carry
		return
	}
	c.up.send(len(m.data), func() {
		if m.verb == subjects.Heartbeat {
			c.w.broker.live.Heard(c.w.now, c.id)
		}
		c.w.edge.receive(c.id, m)
	})
}

// toNode carries what is published below the session's down subjects.
func (c *nodeConn) toNode(m message) {
	c.down.send(len(m.data), func() {
		if c.open {
			c.node.receive(c, m)
		} else if !c.known && m.run != "" {
			c.w.broker.tellNobody(m.run)
		}
	})
}

// tellNobody is the server's hint that nobody reads what is sent about a run.
func (b *server) tellNobody(run string) {
	b.ctl.send(0, func() {
		if e := b.w.edge; e.up && !e.paused {
			e.d.NoResponders(run)
		}
	})
}

func newServer(w *world) *server {
	b := &server{w: w, up: true, gens: map[string]uint64{}, live: newLive(), ctl: path{w: w, loose: 8}}
	b.weather = weather{delay: between(w.net, 50*time.Microsecond, 5*time.Millisecond)}
	b.weather.jitter = between(w.net, 0, b.weather.delay)
	b.calm = b.weather
	b.tick()
	return b
}

func newLive() *broker.Driven { return broker.Drive(heartbeatBound) }

func (b *server) tick() {
	b.w.after(5*time.Second, func() {
		if b.up {
			b.apply(b.live.Expire(b.w.now))
		}
		b.tick()
	})
}

// admit is the callout's part of a dial: the session, or why there is none.
func (b *server) admit(n *nodeProc) (*nodeConn, session.Reason) {
	id := subjects.Session{Edge: edgeName, Node: n.name}
	if b.live.Duplicate(b.w.now, id, n.instance) {
		return nil, session.Duplicate
	}
	b.gens[n.name]++
	id.Gen = b.gens[n.name]
	b.w.event(history.Event{Kind: history.Alloc, Node: n.name, Gen: id.Gen})
	b.lastNum++
	c := &nodeConn{w: b.w, id: id, num: b.lastNum, node: n, instance: n.instance, open: true, known: true}
	c.up, c.down = path{w: b.w, cut: n.cutUp, loose: 1}, path{w: b.w, cut: n.cutDown, loose: 1}
	b.conns = append(b.conns, c)
	b.apply(b.live.Admitted(b.w.now, id, n.instance))
	b.notify(registry.Admitted{Node: n.name, Gen: id.Gen, Instance: n.instance})
	life := b.life
	b.w.after(between(b.w.net, 0, 5*time.Millisecond), func() { // the server's advisory
		if b.life == life && c.known {
			b.apply(b.live.Connected(b.w.now, id, c.num, c.instance))
		}
	})
	return c, ""
}

func (b *server) notify(ev registry.Event) {
	b.ctl.send(0, func() { b.w.edge.fromBroker(ev) })
}

func (b *server) find(num uint64) *nodeConn {
	for _, c := range b.conns {
		if c.num == num {
			return c
		}
	}
	return nil
}

const kickDelay = 100 * time.Millisecond

func (b *server) apply(orders []broker.Order) {
	for _, o := range orders {
		if !o.Evict {
			b.notify(registry.Closed{Node: o.Session.Node, Gen: o.Session.Gen, Reason: o.Reason})
			continue
		}
		c := b.find(o.Conn)
		if c == nil {
			continue
		}
		c.toNode(message{verb: subjects.Fence, toNode: session.Event{Kind: session.FenceReceived, Reason: session.Reason(o.Reason)}})
		life := b.life
		b.w.after(kickDelay, func() {
			if b.life == life {
				b.kick(c)
			}
		})
	}
}

// kick closes a connection from the broker's side.
func (b *server) kick(c *nodeConn) {
	if !c.known {
		return
	}
	b.forget(c, "kicked")
	b.tellClosed(c)
}

// tellClosed has the Node notice that its connection is gone: at once, or where the
// network swallows that, when it asks in vain.
func (b *server) tellClosed(c *nodeConn) {
	d := between(b.w.net, 0, 10*time.Millisecond)
	if c.down.cut {
		d = pingBound
	}
	b.w.after(d, func() {
		if c.open {
			c.open = false
			c.node.lost(c)
		}
	})
}

// hearsClose has the broker notice that a Node's end is gone.
func (b *server) hearsClose(c *nodeConn, why string) {
	d := between(b.w.net, 0, 10*time.Millisecond)
	if c.up.cut || c.node.vanished {
		d = pingBound + between(b.w.net, 0, 2*time.Second)
	}
	life := b.life
	b.w.after(d, func() {
		if b.life == life {
			b.forget(c, why)
		}
	})
}

func (b *server) forget(c *nodeConn, why string) {
	if !c.known {
		return
	}
	c.known = false
	b.conns = slices.DeleteFunc(b.conns, func(o *nodeConn) bool { return o == c })
	if b.w.now.Before(b.w.quietAt) && chance(b.w.net, b.w.swarm.deaf) {
		return // the advisory is a message like any
	}
	b.apply(b.live.Disconnected(c.id, c.num, why))
}

// pingBound is how long either end of a connection takes a silent network.
const pingBound = 4 * time.Second

// crash ends the server: every connection, and all it knew but the generations.
func (b *server) crash() {
	b.up = false
	b.life++
	conns := b.conns
	b.conns, b.live = nil, newLive()
	for _, c := range conns {
		c.known = false
		b.tellClosed(c)
	}
	b.w.edge.lose(true)
}

func (b *server) restart() {
	b.up = true
	b.w.edge.restore()
}

// partition cuts a Node off, in one direction or both. A connection on which nothing
// comes through for long is given up by either end.
func (b *server) partition(n *nodeProc, up, down bool) {
	n.cutUp, n.cutDown = up, down
	for _, c := range b.conns {
		if c.node != n {
			continue
		}
		c.up.cut, c.down.cut = up, down
		if !up && !down {
			continue
		}
		c := c
		life := b.life
		b.w.after(pingBound+between(b.w.net, 0, time.Second), func() {
			if !c.up.cut && !c.down.cut {
				return
			}
			if c.open { // its own pings are not answered
				c.open = false
				c.node.lost(c)
			}
			if b.life == life {
				b.forget(c, "stale")
			}
		})
	}
}
