package dispatch

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"strings"
	"time"

	"github.com/iop-fabric/iop/internal/bus"
	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/wire"
	"github.com/iop-fabric/iop/wire/iopv1"
)

const (
	// A request of which nothing was heard is published again after firstRepeat,
	// and ever more seldom.
	firstRepeat = 500 * time.Millisecond
	lastRepeat  = 8 * time.Second
	// Where nobody answered for the Node it is again after firstHurry, and then more
	// seldom down to once in lastHurry.
	firstHurry = 100 * time.Millisecond
	lastHurry  = time.Second
	// maxText bounds the human part of a Node's error.
	maxText = 1 << 10
)

// call is Do's side of an attempt.
type call struct {
	d   *Dispatcher
	s   *stream
	w   Writer
	res Result

	request   []byte // kept until something was heard of the run
	repeatAt  time.Time
	repeat    time.Duration
	hurry     time.Duration // how long after the last hint it went out again
	deadline  time.Time
	gapDue    time.Time
	upRequest []byte  // with a body that follows: the same, kept as long as that
	up        *upload // nil: the body is in the request, or is acknowledged

	timer *time.Timer
	armed time.Time // when it fires; zero: it does not matter
	due   time.Time // when it should; zero: nothing is due
	dirty bool      // something was delivered since the last Flush
	taken int       // the body of the frame that was delivered last; below 0: none was
}

// Do implements Runner.
func (d *Dispatcher) Do(ctx context.Context, a Attempt, w Writer) Result {
	c := call{d: d, w: w, taken: -1}
	if c.begin(ctx, &a) {
		return c.res
	}
	for {
		more, over := c.turn()
		if over {
			return c.res
		}
		if err := c.wait(ctx, !more); err != nil {
			return c.cut(err)
		}
	}
}

// begin sends the attempt; over: nothing left Edge, and the result is there.
func (c *call) begin(ctx context.Context, a *Attempt) (over bool) {
	s, err := c.d.register(a)
	c.s = s
	if err == nil && ctx.Err() != nil {
		err = gone(ctx)
	}
	if err == nil {
		err = c.send(a)
	}
	if err == nil {
		return false
	}
	c.d.unsent(s)
	if cut := s.cutErr(); cut != nil { // its fence came first
		err = cut
	}
	c.end(err)
	return true
}

func (d *Dispatcher) unsent(s *stream) {
	d.apply(s, s.step((*life).unsent), true)
}

func (s *stream) cutErr() *wire.Error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.life.cut
}

// end makes the result; the slot is another matter, and settled elsewhere.
func (c *call) end(err *wire.Error) Result {
	if c.up != nil {
		c.up.stop(c.d.now())
	}
	if c.timer != nil {
		c.timer.Stop()
	}
	c.d.metrics.bytes.Add(float64(c.res.Bytes))
	c.d.metrics.terminal(err)
	c.res.Err = err
	return c.res
}

// send publishes the request. An error means that nothing left Edge. While the
// connection is away the request counts as lost with it: it goes out again once the
// connection is back, within what the session outlives (J5).
func (c *call) send(a *Attempt) *wire.Error {
	if err := c.s.cutErr(); err != nil {
		return err
	}
	req := iopv1.ProviderTunnelRequest{
		RunId: a.RunID, Adapter: a.Slot.Adapter, Target: a.Slot.Target,
		Operation: a.Operation, Method: a.Method, Path: a.Path, RawQuery: a.RawQuery, Headers: a.Header,
		Stream:                 a.Stream,
		TimeoutSec:             int64((a.Timeout + time.Second - 1) / time.Second),
		ResponseStallTimeoutMs: stallMillis(a.StallTimeout),
		BodySize:               uint64(max(a.BodySize, 0)), //nolint:gosec // not negative
		Credit:                 c.s.recv.Window(),
	}
	switch {
	case a.BodySize > wire.MaxBody:
		req.BodyFollows = true
	case a.BodySize > 0:
		raw := bodyBuffers.Get().(*[]byte)
		defer bodyBuffers.Put(raw)
		req.Body = (*raw)[:a.BodySize]
		if _, err := io.ReadFull(a.Body, req.Body); err != nil {
			return errBody(err)
		}
	}
	data, err := req.MarshalVT()
	switch {
	case err != nil:
		return wire.Errorf(wire.Internal, "encode the request: %w", err)
	case len(data) > wire.MaxMessage:
		return wire.Errorf(wire.Invalid, "the request's headers are too large")
	}
	if err := c.d.publish(c.s, subjects.Tunnel, data); err != nil && !errors.Is(err, bus.ErrAway) {
		c.d.log.Warn(eventSendFailed, slog.String("run_id", a.RunID), slog.String("verb", string(subjects.Tunnel)), slog.Any("error", err))
		return wire.Errorf(wire.Unreachable, "the broker does not take the request")
	}
	now := c.d.now()
	c.request, c.repeat, c.repeatAt = data, firstRepeat, now.Add(firstRepeat)
	if a.Timeout > 0 {
		c.deadline = now.Add(a.Timeout + a.Grace)
	}
	if req.BodyFollows {
		c.up, c.upRequest = newUpload(c.d, c.s, a.Body, a.BodySize), data
	}
	return nil
}

// stallMillis is a stall bound in the wire's unit, where 0 would be the Node's own:
// one below a millisecond becomes one.
func stallMillis(d time.Duration) int64 {
	if d > 0 && d < time.Millisecond {
		return 1
	}
	return d.Milliseconds()
}

// turn does what is at hand, one frame of the answer at most. more: there may be
// more at hand; over: the attempt is over for the caller, with c.res.
func (c *call) turn() (more, over bool) {
	now := c.d.now()
	c.sleptThrough(now)
	v := c.s.next(now, c.taken)
	c.taken = -1
	if v.need != needNone {
		c.d.owe(c.s, v.need)
	}
	if v.cut != nil {
		c.leave(v.cut)
		return false, true
	}
	if v.heard {
		c.request, c.repeatAt = nil, time.Time{}
	}
	if v.hinted && c.request != nil {
		c.hurry = min(max(2*c.hurry, firstHurry), lastHurry)
		if at := c.d.now().Add(c.hurry); at.Before(c.repeatAt) {
			c.repeatAt = at
		}
	}
	if more = v.f != nil; more {
		c.taken = len(v.f.Body)
		terminal, outcome, err := c.deliver(v.f)
		v.f.recycle()
		switch {
		case err != nil:
			c.cut(errCallerGone)
			return false, true
		case terminal:
			c.leave(outcome)
			return false, true
		}
	}
	if c.up != nil || v.reconnect {
		if err := c.upload(&v); err != nil {
			c.cut(err)
			return false, true
		}
	}
	if !more && c.dirty {
		c.dirty = false
		if c.w.Flush() != nil {
			c.cut(errCallerGone)
			return false, true
		}
	}
	c.arm(&v)
	return more, false
}

// upload sends of the request's body what can be sent, and the request itself
// again where it may be lost.
func (c *call) upload(v *view) *wire.Error {
	lost := v.reconnect
	if c.up != nil && v.ended { // the Node has said its last, and answers for the body no more
		c.up.stop(c.d.now())
		c.up = nil
	}
	if c.up != nil {
		done, again, err := c.up.step(c.d.now(), v)
		if done {
			c.up = nil
		}
		if err != nil {
			if err.Class == wire.Unreachable && v.heard {
				// It knows the run, so it may have begun it: no other is to be asked (G4).
				err = wire.Errorf(wire.Protocol, "%s", err.Message)
			}
			if err.Class == wire.Protocol && !c.up.silent {
				c.d.offend(c.s.sess, breachAck, severe, c.s.run)
			}
			return err
		}
		lost = lost || again
		if !done && c.up.stillThere(c.d.now()) {
			_ = c.d.publish(c.s, subjects.Tunnel, c.upRequest)
		}
	}
	if lost {
		c.sendAgain()
	}
	return nil
}

func (c *call) sendAgain() {
	if c.request == nil {
		return
	}
	c.d.metrics.repeats.Inc()
	_ = c.d.publish(c.s, subjects.Tunnel, c.request) // it is repeated anyhow
	c.repeat = min(2*c.repeat, lastRepeat)
	c.repeatAt = c.d.now().Add(c.repeat)
}

// arm notes what is due next, if anything is.
func (c *call) arm(v *view) {
	due := c.deadline
	sooner := func(t time.Time) {
		if !t.IsZero() && (due.IsZero() || t.Before(due)) {
			due = t
		}
	}
	sooner(c.repeatAt)
	c.gapDue = time.Time{}
	if !v.gapSince.IsZero() {
		c.gapDue = v.gapSince.Add(c.d.silence())
		if look := c.d.now().Add(gapLook); look.Before(c.gapDue) {
			c.gapDue = look
		}
		sooner(c.gapDue)
	}
	if c.up != nil {
		sooner(c.up.sender.Deadline())
		sooner(c.up.lookAt)
	}
	c.due = due
}

// setTimer has the timer fire at due.
func (c *call) setTimer() {
	switch {
	case c.due.Equal(c.armed):
	case c.due.IsZero():
		c.timer.Stop()
	case c.timer == nil:
		c.timer = time.NewTimer(time.Until(c.due))
	default:
		c.timer.Reset(time.Until(c.due))
	}
	c.armed = c.due
}

// wait waits for something to do; with more at hand it only looks whether the
// attempt has to end. The error ends the caller's side.
func (c *call) wait(ctx context.Context, block bool) *wire.Error {
	c.setTimer()
	var fired <-chan time.Time
	if !c.armed.IsZero() {
		fired = c.timer.C
	}
	if block {
		select {
		case <-c.s.wake:
			return nil
		case <-ctx.Done():
			return gone(ctx)
		case <-fired:
		}
	} else {
		select {
		case <-ctx.Done():
			return gone(ctx)
		case <-fired:
		default:
			return nil
		}
	}
	c.armed = time.Time{}
	return c.passed(c.d.now())
}

// passed does what is due by now. The error ends the caller's side.
func (c *call) passed(now time.Time) *wire.Error {
	c.sleptThrough(now)
	passed := func(t time.Time) bool { return !t.IsZero() && !now.Before(t) }
	switch {
	case passed(c.deadline):
		return errDeadline
	case passed(c.gapDue) && c.s.gapPassed(now, c.d.silence()):
		c.d.offend(c.s.sess, breachGap, severe, c.s.run)
		return breachGap.err()
	case passed(c.repeatAt):
		if !c.s.wasHeard() {
			c.sendAgain()
		}
	}
	return nil
}

// gapLook is how often a call looks while a frame is missing. One that comes later than
// another gapLook was held up, by its caller, or with the whole process.
const gapLook = time.Second

// sleptThrough: the time that a call was held up is no silence of the Node's, which may
// have sent the frame.
func (c *call) sleptThrough(now time.Time) {
	if c.gapDue.IsZero() || now.Sub(c.gapDue) < gapLook {
		return
	}
	s := c.s
	s.mu.Lock()
	if !s.gapSince.IsZero() {
		s.gapSince = s.gapSince.Add(now.Sub(c.gapDue))
	}
	s.mu.Unlock()
	c.gapDue = now
}

func (s *stream) wasHeard() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.heard
}

// gapPassed: the frame is still missing.
func (s *stream) gapPassed(now time.Time, bound time.Duration) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return !s.gapSince.IsZero() && now.Sub(s.gapSince) >= bound
}

// deliver hands one frame to the caller. Its parts are known to be in order.
// outcome is what a terminal says; err is the caller's.
func (c *call) deliver(f *frame) (terminal bool, outcome *wire.Error, err error) {
	switch f.Kind {
	case iopv1.ProviderTunnelFrame_END:
		terminal = true
	case iopv1.ProviderTunnelFrame_ERROR:
		text := strings.ToValidUTF8(f.Error[:min(len(f.Error), maxText)], "")
		// Cloned, for the message they are part of is large and goes.
		terminal, outcome = true, wire.FromPeer(f.ErrorClass, strings.Clone(text))
		outcome.Refused = outcome.Class == wire.Unreachable && f.Metadata[wire.MetaReason] == wire.ReasonRefused
	default:
		terminal = f.End
	}
	if f.Usage != nil {
		c.res.Usage = f.Usage
	}
	if f.Kind == iopv1.ProviderTunnelFrame_RESPONSE_START {
		c.res.Started, c.res.Status, c.res.FirstByte = true, int(f.Status), c.d.now()
		c.dirty = true
		if err := c.w.Start(int(f.Status), f.Headers); err != nil {
			return terminal, outcome, err
		}
	}
	if len(f.Body) > 0 {
		c.res.Bytes += int64(len(f.Body))
		c.dirty = true
		if err := c.w.Body(f.Body); err != nil {
			return terminal, outcome, err
		}
	}
	if len(f.Trailers) > 0 {
		err = c.w.Trailer(f.Trailers)
	}
	return terminal, outcome, err
}

// cut ends the caller's side before the Node's.
func (c *call) cut(err *wire.Error) Result {
	c.d.apply(c.s, c.s.step(func(l *life) orders { return l.cutBy(err) }), true)
	if first := c.s.cutErr(); first != nil {
		err = first
	}
	return c.leave(err)
}

// leave ends Do's part.
func (c *call) leave(err *wire.Error) Result {
	o, n, heard := c.s.leave(c.d.now())
	if n != needNone {
		c.d.owe(c.s, n)
	}
	c.d.apply(c.s, o, true)
	c.res.Acked = heard
	return c.end(err)
}
