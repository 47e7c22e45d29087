package node

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/iop-fabric/iop/agent"
	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/wire"
	"github.com/iop-fabric/iop/wire/iopv1"
)

const (
	stallBound = 2 * time.Second
	tick       = time.Millisecond
)

// stallIn asks for a stall bound of so long.
func stallIn(d time.Duration) func(*iopv1.ProviderTunnelRequest) {
	return func(q *iopv1.ProviderTunnelRequest) { q.ResponseStallTimeoutMs = d.Milliseconds() }
}

// wantStalled checks the one terminal of a stall.
func (e *fakeEdge) wantStalled(a *answer, text string) {
	e.r.t.Helper()
	e.wantClass(a, string(wire.Stalled))
	frames := e.got(a)
	if len(frames) == 0 {
		return
	}
	if f := frames[len(frames)-1]; f.GetError() != text || f.GetFailure() != nil {
		e.r.t.Errorf("told %q with %v", f.GetError(), f.GetFailure())
	}
}

// Comments that keep a stream alive are bytes, and any byte is life: nothing else for
// far longer than the bound, then tokens, and no stall (A07).
//
// Contract: W2 T4
func TestA07CommentsAreLife(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, options{exchange: func(_ context.Context, _ agent.Exchange, sink agent.Sink) error {
			err := sink.Start(200, []agent.Field{{Name: "Content-Type", Value: []byte("text/event-stream")}}, -1)
			for range 20 {
				<-time.After(stallBound - tick)
				err = errors.Join(err, sink.Body([]byte(": keep-alive\n\n")))
			}
			return errors.Join(err, sink.Body([]byte("data: x\n\n")))
		}}).ready()
		defer r.finish()
		_, a := r.edge.open(stallIn(stallBound))
		<-a.ended
		r.edge.wantClass(a, "END")
	})
}

// Bytes that are no part of the answer are life too: what says that it works on it.
//
// Contract: W2
func TestInformationalResponsesAreLife(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, options{exchange: func(_ context.Context, _ agent.Exchange, sink agent.Sink) error {
			for range 5 {
				<-time.After(stallBound - tick)
				sink.(agent.Listener).Heard()
			}
			<-time.After(stallBound - tick)
			return sink.Start(200, nil, -1)
		}}).ready()
		defer r.finish()
		_, a := r.edge.open(stallIn(stallBound))
		<-a.ended
		r.edge.wantClass(a, "END")
	})
}

// A provider that falls silent, wherever in its answer, is given up when the bound
// has passed since its last byte, and its slot is free.
//
// Contract: W2
func TestSilentProviderStalls(t *testing.T) {
	silent := func(ctx context.Context) error {
		<-ctx.Done()
		return context.Cause(ctx)
	}
	for name, c := range map[string]struct {
		frames   int // before the terminal
		exchange func(ctx context.Context, sink agent.Sink) error
	}{
		"before the head": {0, func(context.Context, agent.Sink) error { return nil }},
		"after the head": {1, func(_ context.Context, sink agent.Sink) error {
			return sink.Start(200, nil, -1)
		}},
		// Nothing went out of it yet, so the attempt may be made elsewhere.
		"after the head of a small answer": {0, func(_ context.Context, sink agent.Sink) error {
			return sink.Start(200, nil, 5)
		}},
		"inside a small answer": {2, func(_ context.Context, sink agent.Sink) error {
			return errors.Join(sink.Start(200, nil, 5), sink.Body([]byte("abc")))
		}},
		"after a chunk": {2, func(_ context.Context, sink agent.Sink) error {
			return errors.Join(sink.Start(200, nil, -1), sink.Body([]byte("abc")))
		}},
		"after many chunks, each in time": {12, func(_ context.Context, sink agent.Sink) error {
			err := sink.Start(200, nil, -1)
			for range 11 {
				<-time.After(stallBound - tick)
				err = errors.Join(err, sink.Body([]byte("abc")))
			}
			return err
		}},
		"after the trailers": {1, func(_ context.Context, sink agent.Sink) error {
			err := sink.Start(200, nil, -1)
			<-time.After(stallBound - tick)
			return errors.Join(err, sink.Trailer(nil))
		}},
		"empty reads are no bytes": {2, func(_ context.Context, sink agent.Sink) error {
			err := errors.Join(sink.Start(200, nil, -1), sink.Body([]byte("abc")))
			<-time.After(stallBound / 2)
			return errors.Join(err, sink.Body(nil))
		}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var last time.Time
				r := newRig(t, options{exchange: func(ctx context.Context, _ agent.Exchange, sink agent.Sink) error {
					if err := c.exchange(ctx, sink); err != nil {
						t.Error(err)
					}
					if last = time.Now(); name == "empty reads are no bytes" {
						last = last.Add(-stallBound / 2)
					}
					err := silent(ctx)
					if took := time.Since(last); took != stallBound {
						t.Errorf("cancelled %v after the last byte, not %v", took, stallBound)
					}
					if wire.ClassOf(err) != wire.Stalled {
						t.Errorf("cancelled with %v", err)
					}
					return err
				}}).ready()
				defer r.finish()
				_, a := r.edge.open(stallIn(stallBound))
				<-a.ended
				synctest.Wait()
				r.edge.wantStalled(a, "no byte from the provider for 2s")
				if got := r.edge.got(a); len(got) != c.frames+1 {
					t.Errorf("%s", describe(got))
				}
				if n := r.node.host.open(); n != 0 {
					t.Errorf("%d exchanges are open", n)
				}
				pass(time.Minute)
				if n := r.node.link.streams.count(); n != 0 {
					t.Errorf("%d streams are known", n)
				}
			})
		})
	}
}

// An answer that comes in time is whole, though it takes many bounds.
//
// Contract: W2
func TestSlowProviderDoesNotStall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, options{exchange: func(_ context.Context, _ agent.Exchange, sink agent.Sink) error {
			<-time.After(stallBound - tick)
			err := sink.Start(200, nil, -1)
			for range 100 {
				<-time.After(stallBound - tick)
				err = errors.Join(err, sink.Body([]byte("x")))
			}
			<-time.After(stallBound - tick)
			return err
		}}).ready()
		defer r.finish()
		_, a := r.edge.open(stallIn(stallBound))
		<-a.ended
		r.edge.wantClass(a, "END")
		if got := r.edge.got(a); len(body(got)) != 100 {
			t.Errorf("%s", describe(got))
		}
	})
}

// While the caller's credit is waited for the watchdog is off, and starts from
// zero when it is there.
//
// Contract: W2
func TestWaitForCreditIsNoStall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var resumed time.Time
		r := newRig(t, options{exchange: func(ctx context.Context, _ agent.Exchange, sink agent.Sink) error {
			if err := sink.Start(200, nil, -1); err != nil {
				return err
			}
			<-time.After(stallBound - tick) // what it used up before the wait is forgiven
			if err := sink.Body(make([]byte, 2*wire.MinWindow)); err != nil {
				t.Errorf("while the caller read nothing: %v", err)
				return err
			}
			resumed = time.Now()
			<-ctx.Done()
			if took := time.Since(resumed); took != stallBound {
				t.Errorf("cancelled %v after the wait, not %v", took, stallBound)
			}
			return context.Cause(ctx)
		}}).ready()
		defer r.finish()
		run := wire.NewRunID()
		a := r.edge.expect(run)
		r.edge.with(func() { a.slow = true }) // before the answer can come
		r.edge.openAs(run, stallIn(stallBound))
		pass(time.Hour + 700*time.Millisecond)
		r.edge.wantClass(a, "")
		r.edge.read(run, a)
		synctest.Wait()
		if resumed.IsZero() {
			t.Fatal("the exchange does not go on")
		}
		<-a.ended
		r.edge.wantStalled(a, "no byte from the provider for 2s")
	})
}

// The provider call has ended: a small answer that waits for credit with its END
// is not the provider's to answer for.
func TestWaitForCreditAfterTheCallIsNoStall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, options{exchange: small("hello")}).ready()
		defer r.finish()
		run, a := r.edge.open(func(q *iopv1.ProviderTunnelRequest) {
			stallIn(stallBound)(q)
			q.Credit = 1 // no frame with a body fits
		})
		pass(time.Minute)
		r.edge.wantClass(a, "")
		r.edge.with(func() { r.edge.ack(a.sess, run, a) })
		<-a.ended
		r.edge.wantClass(a, "END")
	})
}

// A provider that was not given the whole request owes no answer: while Edge owes
// more of the body the watchdog is off.
//
// Contract: W2
func TestWaitForTheRequestsBodyIsNoStall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var whole time.Time
		r := newRig(t, options{exchange: func(ctx context.Context, ex agent.Exchange, _ agent.Sink) error {
			for buf, n := make([]byte, 8), int64(0); n < ex.BodySize; {
				m, err := ex.Body.Read(buf)
				if n += int64(m); err != nil {
					t.Errorf("after %d bytes of the body: %v", n, err)
					return err
				}
			}
			whole = time.Now()
			<-ctx.Done()
			if took := time.Since(whole); took != stallBound {
				t.Errorf("cancelled %v after the body, not %v", took, stallBound)
			}
			return context.Cause(ctx)
		}}).ready()
		defer r.finish()
		run, a := r.edge.open(func(q *iopv1.ProviderTunnelRequest) {
			stallIn(stallBound)(q)
			q.BodyFollows, q.BodySize = true, 20
		})
		for seq := range uint64(2) {
			pass(4*stallBound + 300*time.Millisecond) // not as long as an Edge that gave up is silent
			r.edge.wantClass(a, "")
			r.edge.send(a.sess, subjects.Body, run, &iopv1.BodyFrame{RunId: run, Sequence: seq + 1, Body: make([]byte, 10), Last: seq == 1})
		}
		<-a.ended
		r.edge.wantStalled(a, "no byte from the provider for 2s")
	})
}

// A request that names no bound gets the Node's: what its configuration says, or
// 300 s.
//
// Contract: W1
func TestStallDefault(t *testing.T) {
	for name, c := range map[string]struct {
		runtime *iopv1.NodeRuntimeConfig
		bound   time.Duration
	}{
		"nothing":    {nil, 300 * time.Second},
		"zero":       {&iopv1.NodeRuntimeConfig{}, 300 * time.Second},
		"negative":   {&iopv1.NodeRuntimeConfig{StallTimeoutMs: -1}, 300 * time.Second},
		"configured": {&iopv1.NodeRuntimeConfig{StallTimeoutMs: 7000}, 7 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				config := payload("a")
				config.Runtime = c.runtime
				r := newRig(t, options{config: config, exchange: hang}).ready()
				defer r.finish()
				_, a := r.edge.open(nil)
				_, b := r.edge.open(stallIn(3 * time.Second)) // the request's own wins
				pass(3*time.Second + tick)
				r.edge.wantStalled(b, "no byte from the provider for 3s")
				pass(c.bound - 3*time.Second - 2*tick)
				r.edge.wantClass(a, "")
				pass(2 * tick)
				r.edge.wantStalled(a, "no byte from the provider for "+c.bound.String())
			})
		})
	}
}

// Trap 12: what came first stands. The probe, and the failure's evidence, are not
// part of it here.
func TestTrap12WatchdogWindow(t *testing.T) {
	// A provider that ignores its context, and succeeds at last.
	stubborn := func(release <-chan struct{}) options {
		return options{exchange: func(_ context.Context, _ agent.Exchange, sink agent.Sink) error {
			if err := sink.Start(200, nil, -1); err != nil {
				return err
			}
			<-release
			_ = sink.Body([]byte("late")) // refused by now
			return nil
		}}
	}
	// Expired: neither a cancel, nor the deadline, nor success changes anything.
	t.Run("a expired first", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			release := make(chan struct{})
			r := newRig(t, stubborn(release)).ready()
			defer r.finish()
			run, a := r.edge.open(func(q *iopv1.ProviderTunnelRequest) {
				stallIn(stallBound)(q)
				q.TimeoutSec = 3 // within the grace
			})
			pass(stallBound + tick)
			r.edge.cancel(run)
			pass(time.Second + tick)
			r.edge.wantClass(a, "")
			close(release)
			synctest.Wait()
			r.edge.wantStalled(a, "no byte from the provider for 2s")
			pass(time.Minute)
			if got := r.edge.got(a); len(got) != 2 || len(body(got)) != 0 {
				t.Errorf("%s", describe(got))
			}
		})
	})
	// One that does not return within the grace holds its slot, not its terminal.
	//
	// Contract: W9
	t.Run("a and does not return", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			release := make(chan struct{})
			r := newRig(t, stubborn(release)).ready()
			defer r.finish()
			_, a := r.edge.open(stallIn(stallBound))
			pass(stallBound + wire.CloseGrace - tick)
			r.edge.wantClass(a, "")
			pass(2 * tick)
			r.edge.wantStalled(a, "no byte from the provider for 2s")
			if n := r.node.host.open(); n != 1 {
				t.Errorf("%d exchanges are open", n)
			}
			close(release)
			synctest.Wait()
			if got := r.edge.got(a); len(got) != 2 || r.node.host.open() != 0 {
				t.Errorf("%s", describe(got))
			}
		})
	})
	// Contract: W8
	t.Run("b cancelled one tick before", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			release := make(chan struct{})
			r := newRig(t, stubborn(release)).ready()
			defer r.finish()
			run, a := r.edge.open(stallIn(stallBound))
			pass(stallBound - tick)
			r.edge.cancel(run)
			pass(wire.CloseGrace - tick) // the bound passes meanwhile
			r.edge.wantClass(a, "")
			pass(2 * tick)
			r.edge.wantClass(a, string(wire.Cancelled))
			if f := r.edge.got(a); f[len(f)-1].GetFailure() != nil {
				t.Errorf("%v", f[len(f)-1].GetFailure())
			}
			close(release)
		})
	})
	// Contract: W8
	t.Run("b the deadline at the same tick", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t, options{exchange: hang}).ready()
			defer r.finish()
			_, a := r.edge.open(func(q *iopv1.ProviderTunnelRequest) {
				stallIn(stallBound)(q)
				q.TimeoutSec = int64(stallBound / time.Second)
			})
			pass(stallBound + tick)
			r.edge.wantClass(a, string(wire.Deadline))
		})
	})
	t.Run("c the session ends in the grace", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			release := make(chan struct{})
			r := newRig(t, stubborn(release)).ready()
			defer r.finish()
			_, a := r.edge.open(stallIn(stallBound))
			pass(stallBound + tick)
			r.conn.Kill(nil)
			pass(time.Second)
			r.wantState("ready")
			pass(wire.CloseGrace)
			close(release)
			pass(time.Minute)
			r.edge.wantClass(a, "")
			if got := r.edge.got(a); len(got) != 1 {
				t.Errorf("%s", describe(got))
			}
		})
	})
}
