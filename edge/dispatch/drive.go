package dispatch

import (
	"context"
	"time"
)

// Driven steps a Dispatcher from outside, in place of Run and of the goroutines of
// Do: no goroutine, and no clock but Deps.Now. What it steps is what those run; the
// simulator of test/sim is its user. It must be used from one goroutine.
type Driven struct {
	*Dispatcher
	pass sweep
	next time.Time
}

// Drive takes a Dispatcher whose Run is never called.
func Drive(d *Dispatcher) *Driven { return &Driven{Dispatcher: d, pass: sweep{out: ackWriter{d: d}}} }

// Woken reports whether Pass has something to do at once.
func (d *Driven) Woken() bool { return len(d.kick) > 0 }

// Pass does what Run does when it wakes.
func (d *Driven) Pass() {
	select {
	case <-d.kick:
	default:
	}
	d.next = d.pass.do(d.now(), false)
}

// Deadline is when Pass is due; zero: when Woken says so.
func (d *Driven) Deadline() time.Time { return earlier(d.next, d.pass.ackDue) }

// Reconnected tells that the connection was lost and is there again.
func (d *Driven) Reconnected() { d.resume() }

// Call is one attempt under way.
type Call struct {
	c    call
	more bool
	over bool
}

// Begin is the beginning of Do.
func (d *Driven) Begin(a Attempt, w Writer) *Call {
	c := &Call{c: call{d: d.Dispatcher, w: w, taken: -1}, more: true}
	c.over = c.c.begin(context.Background(), &a)
	return c
}

// Result is Do's, once over.
func (c *Call) Result() (r Result, over bool) { return c.c.res, c.over }

// Ready reports whether Turn has something to do.
func (c *Call) Ready() bool {
	return !c.over && (c.more || len(c.c.s.wake) > 0 || (!c.c.due.IsZero() && !c.c.d.now().Before(c.c.due)))
}

// Deadline is when Turn is due if nothing wakes the call before; zero: never.
func (c *Call) Deadline() time.Time { return c.c.due }

// Turn waits no more and does what is at hand, one frame of the answer at most.
func (c *Call) Turn() {
	if c.over {
		return
	}
	select {
	case <-c.c.s.wake:
	default:
	}
	if now := c.c.d.now(); !c.c.due.IsZero() && !now.Before(c.c.due) {
		if err := c.c.passed(now); err != nil {
			c.c.cut(err)
			c.over = true
			return
		}
	}
	c.more, c.over = c.c.turn()
}

// Leave is the end of the context that Do was given, with its cause.
func (c *Call) Leave(cause error) {
	if c.over {
		return
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	cancel(cause)
	c.c.cut(gone(ctx))
	c.over = true
}
