package dispatch

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/iop-fabric/iop/internal/bus"
	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/wire"
	"github.com/iop-fabric/iop/wire/iopv1"
)

// tell wakes Run.
func (d *Dispatcher) tell() {
	select {
	case d.kick <- struct{}{}:
	default:
	}
}

// owe puts a stream on the list of its session's next acknowledgement.
func (d *Dispatcher) owe(s *stream, n need) {
	s.mu.Lock()
	listed := s.owed
	s.owed = true
	s.mu.Unlock()
	if !listed {
		d.list(s.sess, owed{s: s})
	}
	if n == needNow && !d.urgent.Swap(true) {
		d.tell()
	}
}

func (d *Dispatcher) oweStray(sess *session, o owed) {
	sess.mu.Lock()
	room := sess.strays < maxStrays
	if room {
		sess.strays++
	}
	sess.mu.Unlock()
	if room {
		d.list(sess, o)
	}
}

func (d *Dispatcher) list(sess *session, o owed) {
	sess.mu.Lock()
	sess.owed = append(sess.owed, o)
	listed := sess.listed
	sess.listed = true
	sess.mu.Unlock()
	if listed {
		return
	}
	d.mu.Lock()
	d.owing = append(d.owing, sess)
	first := len(d.owing) == 1
	d.mu.Unlock()
	if first {
		d.tell()
	}
}

// Run sends what is owed to the Nodes and watches the bounds of cancels. When
// ctx ends it takes nothing new, ends what is open, and returns when all
// attempts have ended; the bus's end does the same and is the error.
func (d *Dispatcher) Run(ctx context.Context) error {
	var reconnected <-chan struct{}
	if r, ok := d.deps.Bus.(bus.Reconnecter); ok {
		reconnected = r.Reconnected()
	}
	var (
		done   = ctx.Done()
		closed = d.deps.Bus.Closed()
		out    = sweep{out: ackWriter{d: d}}
		result error
	)
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		select {
		case <-d.kick:
		case <-timer.C:
		case <-reconnected:
			d.resume()
		case <-done:
			done = nil
			d.stop(wire.Errorf(wire.Draining, "this edge is stopping"))
		case <-closed:
			closed, done = nil, nil
			result = fmt.Errorf("dispatch: %w", d.closedCause())
			d.stop(wire.Errorf(wire.SessionEnded, "the connection to the broker ended"))
		}
		now := d.now()
		next := out.do(now, closed == nil)
		if d.stopped.Load() != nil && d.live.Load() == 0 && !d.owes() {
			d.log.Debug(eventStopped)
			return result
		}
		timer.Reset(wait(now, out.ackDue, next))
	}
}

// sweep is what Run does each time it wakes.
type sweep struct {
	out    ackWriter
	ackDue time.Time // when what is owed is sent at the latest; zero: nothing is owed
}

// do sends what is due and says when a cancel is to be repeated, or its bound is. all: no cancel can be
// answered any more.
func (p *sweep) do(now time.Time, all bool) (next time.Time) {
	d := p.out.d
	d.sendCancels()
	next = d.passBounds(now, all)
	next = earlier(next, d.repeatCancels(now))
	switch {
	case !d.owes():
		p.ackDue = time.Time{}
	case d.urgent.Load() || d.stopped.Load() != nil || (!p.ackDue.IsZero() && !now.Before(p.ackDue)):
		p.out.flush()
		p.ackDue = time.Time{}
	case p.ackDue.IsZero():
		p.ackDue = now.Add(d.cfg.AckDelay)
	}
	return next
}

func (d *Dispatcher) closedCause() error {
	if err := d.deps.Bus.Err(); err != nil {
		return err
	}
	return bus.ErrClosed
}

// earlier of two times; zero is never.
func earlier(a, b time.Time) time.Time {
	if a.IsZero() || (!b.IsZero() && b.Before(a)) {
		return b
	}
	return a
}

// wait is how long until the earliest of some times; an hour if there is none.
func wait(now time.Time, times ...time.Time) time.Duration {
	w := time.Hour
	for _, t := range times {
		if !t.IsZero() {
			w = min(w, t.Sub(now))
		}
	}
	return max(w, 0)
}

func (d *Dispatcher) owes() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.owing) > 0
}

// stop takes nothing new and ends every caller's side.
func (d *Dispatcher) stop(err *wire.Error) {
	d.stopped.Store(err)
	d.table.each(func(s *stream) {
		d.apply(s, s.step(func(l *life) orders { return l.cutBy(err) }), false)
	})
}

// resume is for a connection that was lost and is there again: what was on its
// way may be lost, so both sides say where they are.
func (d *Dispatcher) resume() {
	now := d.now()
	d.table.each(func(s *stream) {
		s.mu.Lock()
		again := s.life.cancelled && s.life.held()
		heard := s.heard
		s.again, s.reconnect = heard, true
		s.expectInFlight(now, s.window) // what was lost comes again
		s.mu.Unlock()
		s.wakeUp()
		if again {
			d.cancel(s)
		}
		if heard {
			d.owe(s, needNow)
		}
	})
}

func (d *Dispatcher) sendCancels() {
	d.mu.Lock()
	list := d.cancels
	d.cancels = nil
	d.mu.Unlock()
	for _, s := range list {
		d.cancel(s)
	}
}

// repeatCancels sends again what was not answered, and says when the next one is due.
func (d *Dispatcher) repeatCancels(now time.Time) (next time.Time) {
	for {
		var s *stream
		if s, next = d.pop(&d.repeats, now); s == nil {
			return next
		}
		s.mu.Lock()
		again := s.life.held()
		s.mu.Unlock()
		if again {
			d.cancel(s)
			d.mu.Lock()
			d.repeats = append(d.repeats, dueAt{s: s, due: now.Add(cancelAgain)})
			d.mu.Unlock()
		}
	}
}

// passBounds gives back the slots whose cancel was not answered in time (all of
// them where no answer can come any more) and says when the next one is due.
func (d *Dispatcher) passBounds(now time.Time, all bool) (next time.Time) {
	if all {
		now = now.Add(d.cfg.CancelBound)
	}
	for {
		var s *stream
		if s, next = d.pop(&d.bounds, now); s == nil {
			return next
		}
		d.apply(s, s.step((*life).bound), false)
	}
}

// pop takes the first of a list if it is due, else says when that is; zero: never.
func (d *Dispatcher) pop(list *[]dueAt, now time.Time) (s *stream, next time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	l := *list
	switch {
	case len(l) == 0:
		*list = nil
		return nil, time.Time{}
	case now.Before(l[0].due):
		return nil, l[0].due
	}
	s, l[0] = l[0].s, dueAt{}
	*list = l[1:]
	return s, time.Time{}
}

// ackEntries is how many entries one message holds: with the longest run ids it
// is then below 64 KiB (J6).
const ackEntries = 500

// ackWriter makes the messages, in memory that is reused.
type ackWriter struct {
	d       *Dispatcher
	entries [ackEntries]iopv1.StreamAck_Entry
	msg     iopv1.StreamAck
	buf     []byte
	spare   []owed
	owing   []*session
}

// flush sends everything that is owed.
func (w *ackWriter) flush() {
	d := w.d
	// What becomes urgent from here on is in a later flush.
	d.urgent.Store(false)
	d.mu.Lock()
	w.owing, d.owing = d.owing, w.owing[:0]
	d.mu.Unlock()
	for i, sess := range w.owing {
		w.owing[i] = nil
		sess.mu.Lock()
		list := sess.owed
		sess.owed, w.spare = w.spare[:0], nil
		sess.strays, sess.listed = 0, false
		sess.mu.Unlock()
		w.session(sess, list)
		clear(list)
		w.spare = list
		if cap(list) > 4*ackEntries {
			w.spare = nil
		}
	}
	w.owing = w.owing[:0]
}

func (w *ackWriter) session(sess *session, list []owed) {
	for len(list) > 0 {
		w.msg.Entries = w.msg.Entries[:0]
		part := list[:min(len(list), ackEntries)]
		list = list[len(part):]
		for i := range part {
			e := &w.entries[i]
			e.RunId, e.Acked, e.Credit, e.Resend, e.Reset_ = part[i].run, part[i].acked, 0, false, part[i].reset
			if s := part[i].s; s != nil {
				a := s.ack()
				e.RunId, e.Acked, e.Credit, e.Resend = s.run, a.Acked, a.Credit, a.Resend
			}
			e.Direction = directionFrame
			w.msg.Entries = append(w.msg.Entries, e)
		}
		size := w.msg.SizeVT()
		if cap(w.buf) < size {
			w.buf = make([]byte, size, size+size/2)
		}
		n, err := w.msg.MarshalToSizedBufferVT(w.buf[:size])
		if err == nil {
			w.d.metrics.acks.Inc()
			reply := subjects.NoResponders(w.d.cfg.Edge, w.entries[0].RunId)
			err = w.d.deps.Bus.PublishRequest(sess.ack, reply, w.buf[:n])
		}
		if err != nil {
			// Lost like any message: the Node repeats what is not acknowledged.
			w.d.log.Debug(eventSendFailed, slog.String("node", sess.id.Node), slog.String("verb", string(subjects.Ack)), slog.Any("error", err))
		}
	}
}

// The directions an entry can be about: the frames that a Node sends, and the
// request's body, with the request itself, that it receives.
const (
	directionFrame = "frame"
	directionBody  = "body"
)
