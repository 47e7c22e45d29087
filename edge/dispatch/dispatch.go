package dispatch

import (
	"context"
	"hash/maphash"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/iop-fabric/iop/edge/pool"
	"github.com/iop-fabric/iop/internal/bus"
	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/tunnel"
	"github.com/iop-fabric/iop/wire"
	"github.com/iop-fabric/iop/wire/iopv1"
)

// Config parameterises a Dispatcher. Zero means the default.
type Config struct {
	Edge string // the edge's name
	// CancelBound is how long a slot waits for the answer to a cancel (P8);
	// wire.CancelBound.
	CancelBound time.Duration
	// AckDelay is how long acknowledgements wait for each other; 25 ms.
	AckDelay time.Duration
	// StreamMemory bounds the sum of all windows (J7): as it fills, new streams
	// get smaller ones, down to the smallest a stream works with. 1 GiB.
	StreamMemory int64
	// HeartbeatBound is what a session outlives; 5 s. Where it is longer than 10 s, a
	// stream that is not answered, or misses a frame, lasts as long (J2, J5).
	HeartbeatBound time.Duration
}

// silenceBound is how long a stream whose session lives waits for what it misses (J2).
const silenceBound = 10 * time.Second

func (d *Dispatcher) silence() time.Duration { return max(silenceBound, d.cfg.HeartbeatBound) }

// Deps are a Dispatcher's collaborators. Return, Misbehaved and Draining are called
// from the bus's callback too and must not block.
type Deps struct {
	// Bus is Edge's connection. If it is a bus.Reconnecter, streams are resumed
	// when it came back.
	Bus bus.Conn
	// Return gives a slot back, exactly once, unless Fenced was called for it.
	Return func(slot pool.Slot, how pool.Return)
	// Misbehaved names a session that goes on breaking rules (J8), once.
	Misbehaved func(node string, gen uint64, reason string)
	// Draining names a session whose Node refused an attempt because it drains. It
	// comes before the Return of that attempt's slot, so nobody is granted it (D7).
	Draining func(node string, gen uint64)
	Log      *slog.Logger
	Metrics  prometheus.Registerer
	// Now is the clock; nil: time.Now.
	Now func() time.Time
}

// Dispatcher runs attempts. It implements Runner; its methods may be called
// from anywhere at any time.
type Dispatcher struct {
	cfg     Config
	deps    Deps
	log     *slog.Logger
	now     func() time.Time
	metrics *metrics
	table   *table
	seats   seats

	live     atomic.Int64 // attempts that are not over
	reserved atomic.Int64 // the sum of their windows
	stopped  atomic.Pointer[wire.Error]

	kick   chan struct{} // 1: a wake-up of Run that is pending says all
	urgent atomic.Bool

	mu      sync.Mutex // what Run is told
	owing   []*session
	cancels []*stream
	repeats []dueAt // of cancels that were not answered, by time
	bounds  []dueAt // when a slot comes back though its cancel was not answered, by time
}

// dueAt is when something of a stream is due. All of a list wait equally long.
type dueAt struct {
	s   *stream
	due time.Time
}

// cancelAgain is how long the answer to a cancel may take before the cancel goes out
// again: the bus may lose it without an error, or bring it before a request that is late
// (B3). A Node whose provider is slow to close answers later, and heeds no repetition.
const cancelAgain = 2 * time.Second

var _ Runner = (*Dispatcher)(nil)

// New makes a Dispatcher; Run is what makes it work.
func New(cfg Config, deps Deps) *Dispatcher {
	if cfg.CancelBound <= 0 {
		cfg.CancelBound = wire.CancelBound
	}
	if cfg.AckDelay <= 0 {
		cfg.AckDelay = 25 * time.Millisecond
	}
	if cfg.StreamMemory <= 0 {
		cfg.StreamMemory = 1 << 30
	}
	d := &Dispatcher{
		cfg: cfg, deps: deps, log: deps.Log, now: deps.Now,
		table: newTable(),
		seats: seats{byID: map[string]*seat{}},
		kick:  make(chan struct{}, 1),
	}
	if d.log == nil {
		d.log = slog.New(slog.DiscardHandler)
	}
	if d.now == nil {
		d.now = time.Now
	}
	d.metrics = newMetrics(deps.Metrics, d.Open)
	return d
}

// Open is how many attempts have not ended, those included whose callers left.
func (d *Dispatcher) Open() int { return int(d.live.Load()) }

// Frame takes one message of the verb frame from the subscription's callback.
// It keeps data (B4).
func (d *Dispatcher) Frame(m subjects.Message, data []byte) {
	hash := d.table.hash(m.Run)
	s := d.table.get(m.Run, hash)
	if s == nil {
		d.stray(m, hash, data)
		return
	}
	if !d.own(s, m) || s.sess.lost.Load() {
		return
	}
	now := d.now()
	f := frames.Get().(*frame)
	decoded := len(data) <= wire.MaxMessage && f.UnmarshalVTUnsafe(data) == nil
	f.size = len(data)
	o, n, b, what := s.receive(now, f, decoded, maphash.Bytes(digestSeed, data))
	if n != needNone { // before the attempt may be over, and Run with it
		d.owe(s, n)
	}
	if what == last && f.ErrorClass == string(wire.Draining) && d.deps.Draining != nil {
		d.deps.Draining(s.slot.Node, s.slot.Gen)
	}
	d.apply(s, o, false)
	switch what {
	case last:
		s.finish(f)
	case dropped:
		f.recycle()
	case kept:
	}
	switch b {
	case breachNone:
	case breachTrailing:
		d.offend(s.sess, b, heavy(len(data)), s.run)
	default:
		d.offend(s.sess, b, severe, s.run)
	}
}

// own reports whether the session that sent m is the one that the slot of s is
// bound to (F5, F8).
func (d *Dispatcher) own(s *stream, m subjects.Message) bool {
	if m.Session == s.sess.id {
		return true
	}
	if m.Session.Node == s.sess.id.Node {
		d.metrics.dropped[dropStale].Inc()
		return false
	}
	d.metrics.dropped[dropForeign].Inc()
	d.offend(d.seats.session(m.Session), breachForeign, severe, "")
	return false
}

// stray answers a frame that belongs to no open attempt: a finished one's
// terminal is acknowledged again, anything else is told that nobody knows it (J3).
func (d *Dispatcher) stray(m subjects.Message, hash uint64, data []byte) {
	if !d.seats.current(m.Session) {
		d.metrics.dropped[dropStale].Inc()
		return
	}
	sess := d.seats.session(m.Session)
	if sess.lost.Load() {
		return
	}
	switch done, ok, over := d.table.lateFrame(hash, sess.key, len(data)); {
	case ok && done.acked > 0:
		d.metrics.dropped[dropLate].Inc()
		f := frames.Get().(*frame)
		after := len(data) > wire.MaxMessage || f.UnmarshalVTUnsafe(data) != nil || f.Sequence > done.acked
		f.recycle()
		if after || over {
			d.offend(sess, breachLate, severe, m.Run)
		}
		d.oweStray(sess, owed{run: m.Run, acked: done.acked})
		return
	case ok: // it did not answer the cancel in time
		d.metrics.dropped[dropLate].Inc()
		if over {
			d.offend(sess, breachLate, severe, m.Run)
		}
	default:
		d.metrics.dropped[dropUnknown].Inc()
		d.offend(sess, breachUnknown, strange, m.Run)
	}
	d.oweStray(sess, owed{run: m.Run, reset: true})
}

var ackMessages = sync.Pool{New: func() any { return new(iopv1.StreamAck) }}

// Ack takes one message of the verb ack from the subscription's callback.
func (d *Dispatcher) Ack(m subjects.Message, data []byte) {
	msg := ackMessages.Get().(*iopv1.StreamAck)
	defer func() { msg.Reset(); ackMessages.Put(msg) }()
	if len(data) > wire.MaxMessage || msg.UnmarshalVTUnsafe(data) != nil {
		d.metrics.dropped[dropAck].Inc()
		if d.seats.current(m.Session) {
			d.offend(d.seats.session(m.Session), breachUndecodable, severe, "")
		}
		return
	}
	sess := d.heeded(m)
	if sess != nil && sess.lost.Load() {
		return
	}
	strays, empty := 0, true
	for _, e := range msg.Entries {
		if e.Direction != directionBody { // of a stream we do not send, or a later version's
			continue
		}
		hash := d.table.hash(e.RunId)
		switch s := d.table.get(e.RunId, hash); {
		case s == nil:
			// Of an attempt that has ended since, it is to be expected.
			if d.table.lateAck(hash, sessionKey(m.Session)) {
				empty = false
			} else {
				strays++
			}
		case d.own(s, m):
			if s.acknowledged(e) {
				empty = false
			}
		}
	}
	if sess != nil && sess.hasty(d.now().Unix(), empty) {
		d.offend(sess, breachAck, hastyAck, "")
	}
	if strays > 0 {
		d.strayAcks(m, strays)
	}
}

// heeded finds the session of a message; nil: it is over, and nothing comes of it.
func (d *Dispatcher) heeded(m subjects.Message) *session {
	if !d.seats.current(m.Session) {
		return nil
	}
	return d.seats.session(m.Session)
}

// hasty notes one message of acknowledgements, and says whether it is one too many.
func (s *session) hasty(unix int64, empty bool) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.acks.hasty(unix, empty)
}

// strayAcks notes acknowledgements of runs that nobody remembers. A few are honest,
// of attempts whose cancel the Node did not answer in time.
func (d *Dispatcher) strayAcks(m subjects.Message, n int) {
	if !d.seats.current(m.Session) {
		d.metrics.dropped[dropStale].Add(float64(n))
		return
	}
	d.metrics.dropped[dropUnknown].Add(float64(n))
	d.offend(d.seats.session(m.Session), breachAck, float64(n)*strangeAck, "")
}

// acknowledged notes what the Node acknowledged of the request. A reset is no
// acknowledgement: the Node says that it does not know the run (G4). news: it says more
// than was said before.
func (s *stream) acknowledged(e *iopv1.StreamAck_Entry) (news bool) {
	s.mu.Lock()
	news = e.Acked > s.saidAcked || e.Credit > s.saidCredit
	s.saidAcked, s.saidCredit = max(s.saidAcked, e.Acked), max(s.saidCredit, e.Credit)
	s.heard = s.heard || !e.Reset_
	b := &s.body
	switch {
	case e.Acked > b.acked:
		b.resend = e.Resend // what was asked for before has come
	case e.Acked == b.acked: // one that was overtaken asks for nothing
		b.resend = b.resend || e.Resend
	}
	b.pending, b.reset = true, e.Reset_ // the last word counts
	b.acked, b.credit = max(b.acked, e.Acked), max(b.credit, e.Credit)
	s.mu.Unlock()
	s.wakeUp()
	return news
}

// NoResponders takes the bus's hint that nobody read what was sent about a run.
// It ends only an attempt of which the Node acknowledged nothing (G4), once its patience
// is over; until then the request goes out again soon. Even that may have reached a
// living Node, so it is cancelled, and its slot waits.
func (d *Dispatcher) NoResponders(run string) {
	s := d.table.get(run, d.table.hash(run))
	if s == nil {
		return
	}
	var o orders
	s.mu.Lock()
	switch {
	case s.heard:
	case d.now().Before(s.patient):
		s.hinted = true
	default:
		o = s.life.cutBy(wire.Errorf(wire.Unreachable, "nobody answers for the node"))
	}
	wake := o.cancel || s.hinted
	s.mu.Unlock()
	if o.cancel {
		d.apply(s, o, false)
	}
	if wake {
		s.wakeUp()
	}
}

// Fenced ends the attempt that runs under a slot which the pool took back with
// its generation (F3). Nothing is returned for it.
func (d *Dispatcher) Fenced(slot pool.Slot, cause string) {
	d.seats.fence(slot.Node, slot.Gen)
	if s := d.table.slot(slot.ID); s != nil {
		d.fence(s, cause)
	}
}

func (d *Dispatcher) fence(s *stream, cause string) {
	err := errSessionEnded(cause)
	d.apply(s, s.step(func(l *life) orders { return l.fence(err) }), false)
}

func errSessionEnded(cause string) *wire.Error {
	if cause == "" {
		return wire.Errorf(wire.SessionEnded, "the node's session ended")
	}
	return wire.Errorf(wire.SessionEnded, "the node's session ended: %s", cause)
}

// Progresses reports whether a frame of an attempt at the adapter has come since then:
// whoever answers is not gone.
func (d *Dispatcher) Progresses(node, adapter string, since time.Time) (yes bool) {
	d.table.each(func(s *stream) {
		if s.slot.Node != node || s.slot.Adapter != adapter {
			return
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		yes = yes || s.came.After(since)
	})
	return yes
}

// apply does what a step of a life ordered. direct: the caller may wait for the
// bus; else Run publishes.
func (d *Dispatcher) apply(s *stream, o orders, direct bool) {
	if o == (orders{}) {
		return
	}
	if o.remove {
		acked := uint64(0)
		if o.give == pool.ByTerminal {
			acked = s.last()
		}
		d.table.remove(s, acked > 0 || o.give == pool.ByCancelBound, acked, d.now().Unix())
	}
	if o.give != 0 {
		d.metrics.returns[o.give].Inc()
		if o.give == pool.ByCancelBound {
			d.log.Warn(eventUnanswered, slog.String("run_id", s.run), slog.String("node", s.slot.Node),
				slog.Uint64("generation", s.slot.Gen), slog.String("provider", s.slot.Provider))
		}
		d.deps.Return(s.slot, o.give)
	}
	if o.cancel {
		if direct {
			d.cancel(s)
		}
		d.mu.Lock()
		if !direct {
			d.cancels = append(d.cancels, s)
		}
		now := d.now()
		d.repeats = append(d.repeats, dueAt{s: s, due: now.Add(cancelAgain)})
		d.bounds = append(d.bounds, dueAt{s: s, due: now.Add(d.cfg.CancelBound)})
		tell := !direct || len(d.repeats) == 1 || len(d.bounds) == 1
		d.mu.Unlock()
		if tell {
			d.tell()
		}
	}
	if o.over {
		d.reserved.Add(-int64(s.window)) //nolint:gosec // a window is at most 4 MiB
		d.gone()
	}
}

func (d *Dispatcher) gone() {
	if d.live.Add(-1) == 0 && d.stopped.Load() != nil {
		d.tell()
	}
}

// last is the sequence of the stream's terminal, once it came.
func (s *stream) last() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.highest
}

// cancel publishes the CancelRequest. If the bus does not take it, it goes out again
// as one that was lost.
func (d *Dispatcher) cancel(s *stream) {
	data, err := (&iopv1.CancelRequest{RunId: s.run}).MarshalVT()
	if err == nil {
		err = d.publish(s, subjects.Cancel, data)
	}
	if err != nil {
		d.log.Warn(eventSendFailed, slog.String("run_id", s.run), slog.String("verb", string(subjects.Cancel)), slog.Any("error", err))
	}
}

// publish sends a message about a run, with the reply subject of its hints (G4).
func (d *Dispatcher) publish(s *stream, v subjects.Verb, data []byte) error {
	return d.deps.Bus.PublishRequest(s.sess.id.Down(v, s.run), subjects.NoResponders(d.cfg.Edge, s.run), data)
}

// offend notes a broken rule against a session.
func (d *Dispatcher) offend(sess *session, b breach, weight float64, run string) {
	d.metrics.breaches[b].Inc()
	sess.mu.Lock()
	lost := sess.conduct.offend(d.now().Unix(), weight)
	given := sess.conduct.lost
	sess.mu.Unlock()
	if weight >= severe && (lost || !given) { // bounded by the patience there is
		d.log.Warn(eventBreach, slog.String("node", sess.id.Node), slog.Uint64("generation", sess.id.Gen),
			slog.String("reason", b.String()), slog.String("run_id", run))
	}
	if lost {
		sess.lost.Store(true)
		d.metrics.lost.Inc()
		d.log.Warn(eventMisbehaved, slog.String("node", sess.id.Node), slog.Uint64("generation", sess.id.Gen), slog.String("reason", b.String()))
		if d.deps.Misbehaved != nil {
			d.deps.Misbehaved(sess.id.Node, sess.id.Gen, b.String())
		}
	}
}

// window is what a new stream may have unread: an eighth of what is left of the
// sum, so that streams that come later find something.
func (d *Dispatcher) window() uint64 {
	left := d.cfg.StreamMemory - d.reserved.Load()
	w := min(max(left/8, 2*tunnel.MaxCost), wire.MaxWindow)
	d.reserved.Add(w)
	return uint64(w) //nolint:gosec // within the bounds above
}

// register puts a new attempt where its messages find it. It fails where the
// attempt must not be sent: its generation is over, or we stop.
func (d *Dispatcher) register(a *Attempt) (*stream, *wire.Error) {
	window := d.window()
	s := &stream{
		run: a.RunID, slot: a.Slot,
		sess:   d.seats.session(subjects.Session{Edge: d.cfg.Edge, Node: a.Slot.Node, Gen: a.Slot.Gen}),
		window: window,
		wake:   make(chan struct{}, 1),
		hash:   d.table.hash(a.RunID),
		recv:   tunnel.NewReceiver(tunnel.ReceiverConfig{Window: min(window, wire.MinWindow), MaxWindow: window}),
	}
	if a.Patience > 0 {
		s.patient = d.now().Add(a.Patience)
	}
	d.live.Add(1)
	if !d.table.add(s) {
		panic("BUG: dispatch I1: a run id or a slot was used twice")
	}
	// Both are looked at after the stream can be found: whoever comes later finds it.
	if d.seats.fenced(a.Slot.Node, a.Slot.Gen) {
		d.fence(s, "")
	}
	if err := d.stopped.Load(); err != nil {
		return s, err
	}
	return s, nil
}

// gone is how the context's end is told.
func gone(ctx context.Context) *wire.Error {
	cause := context.Cause(ctx)
	switch wire.ClassOf(cause) {
	case wire.Deadline:
		return errDeadline
	case wire.Cancelled, wire.Internal:
		return errCallerGone
	default:
		return wire.AsError(cause)
	}
}

var (
	errCallerGone = wire.Errorf(wire.Cancelled, "the caller is gone")
	errDeadline   = wire.Errorf(wire.Deadline, "the deadline passed")
)
