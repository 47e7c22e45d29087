package membus

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/iop-fabric/iop/internal/bus"
	"github.com/iop-fabric/iop/wire"
)

// Bus is one bus; its connections see each other's messages.
type Bus struct {
	mu     sync.Mutex
	rnd    *rand.Rand
	conns  []*Conn // in the order they came, so that draws are repeatable
	faults []*fault
	taps   []*tap
	order  uint64 // of messages, to keep those due at one time apart
	inbox  uint64
	stats  Stats
}

// Stats counts deliveries, a message to two subscriptions being two.
type Stats struct {
	Delivered, Dropped, Duplicated, Delayed uint64
}

// New makes a bus whose random faults are drawn from the seed 1.
func New() *Bus { return NewSeeded(1) }

// NewSeeded makes a bus whose random faults are drawn from this seed.
func NewSeeded(seed uint64) *Bus {
	return &Bus{rnd: rand.New(rand.NewPCG(seed, seed))} //nolint:gosec // a test's faults, not a secret
}

// Stats returns what happened so far.
func (b *Bus) Stats() Stats {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.stats
}

// Fault is what happens to messages of some subjects. Each applies to every
// message that matches it; a drop by one is final.
type Fault struct {
	Subject   string        // a pattern; empty: all
	Drop      float64       // share of messages lost
	Duplicate float64       // share of messages that come twice
	Delay     time.Duration // all of them later, in order
	Jitter    time.Duration // up to so much later each, so out of order
	Limit     int           // ends after so many matching messages; 0: never
	// Only, if set, says which messages it is about, beside Subject.
	Only func(subject string, data []byte) bool
}

type fault struct {
	Fault
	left int
}

// Inject adds a fault; the function returned removes it.
func (b *Bus) Inject(f Fault) (remove func()) {
	if f.Subject == "" {
		f.Subject = ">"
	}
	p := &fault{Fault: f, left: f.Limit}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.faults = append(b.faults, p)
	return func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.faults = without(b.faults, p)
	}
}

// Hold keeps the matching messages back until the function returned is called,
// which sends them in the order they came, after whatever overtook them.
func (b *Bus) Hold(subject string) (release func()) {
	h := &tap{pattern: subject, hold: true}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.taps = append(b.taps, h)
	return func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.taps = without(b.taps, h)
		for _, m := range h.held {
			b.route(m)
		}
		h.held = nil
	}
}

// Tap calls fn with every message published to a matching subject, before any
// fault; fn must not call the bus, and must copy the data if it keeps it.
func (b *Bus) Tap(subject string, fn func(bus.Msg)) (remove func()) {
	t := &tap{pattern: subject, fn: fn}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.taps = append(b.taps, t)
	return func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.taps = without(b.taps, t)
	}
}

type tap struct {
	pattern string
	fn      func(bus.Msg)
	hold    bool
	held    []message
}

func without[T comparable](list []T, gone T) []T {
	kept := make([]T, 0, len(list))
	for _, x := range list {
		if x != gone {
			kept = append(kept, x)
		}
	}
	return kept
}

// Conn is one connection; it implements bus.Conn and bus.Reconnecter.
type Conn struct {
	bus         *Bus
	inbox       string
	closed      chan struct{}
	retiring    chan struct{}
	reconnected chan struct{}

	// Under bus.mu.
	subs []*sub
	down bool // cut: everything either way is lost
	away bool // and it knows
	err  error
}

var (
	_ bus.Conn        = (*Conn)(nil)
	_ bus.Reconnecter = (*Conn)(nil)
)

// Connect makes a connection that is answered below the inbox prefix.
func (b *Bus) Connect(inbox string) *Conn {
	c := &Conn{bus: b, inbox: inbox, closed: make(chan struct{}), retiring: make(chan struct{}), reconnected: make(chan struct{}, 1)}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.conns = append(b.conns, c)
	return c
}

type message struct {
	from           *Conn
	subject, reply string
	data           []byte
	notice         bool
}

// Publish sends data to every matching subscription.
func (c *Conn) Publish(subject string, data []byte) error { return c.publish(subject, "", data) }

// PublishRequest does so with a reply subject, on which this connection hears
// that there was none.
func (c *Conn) PublishRequest(subject, reply string, data []byte) error {
	if err := checkSubject(reply, false); err != nil {
		return err
	}
	return c.publish(subject, reply, data)
}

func (c *Conn) publish(subject, reply string, data []byte) error {
	if err := checkSubject(subject, false); err != nil {
		return err
	}
	if len(data) > wire.MaxMessage {
		return bus.ErrTooLarge
	}
	b := c.bus
	b.mu.Lock()
	defer b.mu.Unlock()
	if c.err != nil {
		return bus.ErrClosed
	}
	if c.down {
		b.stats.Dropped++
		if c.away {
			return bus.ErrAway
		}
		return nil // B3
	}
	m := message{from: c, subject: subject, reply: reply, data: data}
	held := false
	for _, t := range b.taps {
		switch {
		case !Match(t.pattern, subject):
		case t.hold:
			m.data = append([]byte(nil), data...)
			t.held, held = append(t.held, m), true
		default:
			t.fn(bus.Msg{Subject: subject, Reply: reply, Data: data})
		}
	}
	if !held {
		b.route(m)
	}
	return nil
}

// route gives a message to its subscriptions, or its notice to the sender.
func (b *Bus) route(m message) {
	found := false
	for _, c := range b.conns {
		for _, s := range c.subs {
			if Match(s.pattern, m.subject) && (!m.notice || c == m.from) {
				found = true
				b.deliver(s, m)
			}
		}
	}
	if !found && m.reply != "" {
		b.route(message{from: m.from, subject: m.reply, notice: true})
	}
}

// deliver applies the faults and queues what is left.
func (b *Bus) deliver(s *sub, m message) {
	if s.conn.down {
		b.stats.Dropped++
		return
	}
	copies, late := 1, time.Duration(0)
	for _, f := range b.faults {
		if !Match(f.Subject, m.subject) || (f.Only != nil && !f.Only(m.subject, m.data)) || (f.Limit > 0 && f.left == 0) {
			continue
		}
		f.left--
		if f.Drop > 0 && b.rnd.Float64() < f.Drop {
			b.stats.Dropped++
			return
		}
		if f.Duplicate > 0 && b.rnd.Float64() < f.Duplicate {
			b.stats.Duplicated++
			copies++
		}
		late += f.Delay
		if f.Jitter > 0 {
			late += time.Duration(b.rnd.Int64N(int64(f.Jitter)))
		}
	}
	now := time.Now()
	if late > 0 {
		b.stats.Delayed++
	}
	for range copies {
		b.stats.Delivered++
		b.order++
		out := bus.Msg{Subject: m.subject, NoResponders: m.notice}
		if !m.notice {
			out.Reply, out.Data = m.reply, append([]byte(nil), m.data...) // B4
		}
		s.push(queued{msg: out, due: now.Add(late), order: b.order})
	}
}

// Subscribe calls fn, on a goroutine of the subscription's own, for every
// message whose subject matches.
func (c *Conn) Subscribe(pattern string, fn func(bus.Msg)) (bus.Subscription, error) {
	if err := checkSubject(pattern, true); err != nil {
		return nil, err
	}
	s := newSub(c, pattern)
	c.bus.mu.Lock()
	defer c.bus.mu.Unlock()
	if c.err != nil {
		return nil, bus.ErrClosed
	}
	c.subs = append(c.subs, s)
	go s.run(fn)
	return s, nil
}

// Request sends data and waits for one answer.
func (c *Conn) Request(ctx context.Context, subject string, data []byte) (bus.Msg, error) {
	c.bus.mu.Lock()
	c.bus.inbox++
	reply := fmt.Sprintf("%s.r%d", c.inbox, c.bus.inbox)
	c.bus.mu.Unlock()
	answer := make(chan bus.Msg, 1) // one answer; a second is dropped
	s, err := c.Subscribe(reply, func(m bus.Msg) {
		select {
		case answer <- m:
		default:
		}
	})
	if err != nil {
		return bus.Msg{}, err
	}
	defer s.Unsubscribe() // never fails
	if err := c.publish(subject, reply, data); err != nil {
		return bus.Msg{}, err
	}
	select {
	case m := <-answer:
		if m.NoResponders {
			return bus.Msg{}, bus.ErrNoResponders
		}
		return m, nil
	case <-c.closed:
		return bus.Msg{}, bus.ErrClosed
	case <-ctx.Done():
		return bus.Msg{}, fmt.Errorf("request: %w", ctx.Err())
	}
}

// Flush has nothing to wait for: what was published is routed.
func (c *Conn) Flush(ctx context.Context) error {
	c.bus.mu.Lock()
	defer c.bus.mu.Unlock()
	switch {
	case c.err != nil:
		return bus.ErrClosed
	case c.down:
		return errors.New("flush: the connection is cut")
	}
	return ctx.Err()
}

// Inbox is the prefix given to Connect.
func (c *Conn) Inbox() string { return c.inbox }

// Retiring is closed by Retire.
func (c *Conn) Retiring() <-chan struct{} { return c.retiring }

// Retire says that the server is about to stop. Once is enough.
func (c *Conn) Retire() { close(c.retiring) }

// Closed is closed when the connection has ended.
func (c *Conn) Closed() <-chan struct{} { return c.closed }

// Reconnected receives a value after Restore.
func (c *Conn) Reconnected() <-chan struct{} { return c.reconnected }

// Err says why the connection ended; nil while it lives.
func (c *Conn) Err() error {
	c.bus.mu.Lock()
	defer c.bus.mu.Unlock()
	return c.err
}

// Close ends the connection; what was published is delivered.
func (c *Conn) Close() { c.Kill(bus.ErrClosed) }

// Kill ends the connection as its loss would: Err gives err.
func (c *Conn) Kill(err error) {
	if err == nil {
		err = errors.New("membus: connection lost")
	}
	b := c.bus
	b.mu.Lock()
	defer b.mu.Unlock()
	if c.err != nil {
		return
	}
	c.err = err
	for _, s := range c.subs {
		s.end()
	}
	c.subs = nil
	b.conns = without(b.conns, c)
	close(c.closed)
}

// Cut loses, silently, everything to and from this connection until Restore.
// The others still take it for a subscriber: as when a route is black-holed.
func (c *Conn) Cut() {
	c.bus.mu.Lock()
	defer c.bus.mu.Unlock()
	c.down = true
}

// Leave is a Cut that the connection knows of: publishing answers ErrAway.
func (c *Conn) Leave() {
	c.bus.mu.Lock()
	defer c.bus.mu.Unlock()
	c.down, c.away = true, true
}

// Restore ends a Cut, or a Leave, and says so on Reconnected.
func (c *Conn) Restore() {
	c.bus.mu.Lock()
	defer c.bus.mu.Unlock()
	if !c.down || c.err != nil {
		return
	}
	c.down, c.away = false, false
	select {
	case c.reconnected <- struct{}{}:
	default:
	}
}
