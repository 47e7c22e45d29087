package dispatch

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/iop-fabric/iop/edge/pool"
	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/wire"
	"github.com/iop-fabric/iop/wire/iopv1"
)

func wantClass(t testing.TB, res Result, class wire.Class) {
	t.Helper()
	switch {
	case class == "" && res.Err != nil:
		t.Fatalf("got %s (%s), want the whole answer", res.Err.Class, res.Err)
	case class != "" && (res.Err == nil || res.Err.Class != class):
		t.Fatalf("got %v, want class %s", res.Err, class)
	}
}

func TestSmallAnswerInOneMessage(t *testing.T) {
	inBubble(t, Config{}, func(t *testing.T, r *rig) {
		n := r.node("n", 7)
		a := r.attempt(n, `{"model":"m"}`)
		a.Timeout, a.StallTimeout, a.RawQuery, a.Stream = 1500*time.Millisecond, 3*time.Second, "beta=true", true
		var w answer
		p := r.do(t.Context(), a, &w)
		req := <-n.requests
		if req.RunId != a.RunID || req.Adapter != "a" || req.Target != "m" || string(req.Body) != `{"model":"m"}` ||
			req.BodySize != 13 || req.BodyFollows || req.TimeoutSec != 2 || req.ResponseStallTimeoutMs != 3000 ||
			req.Operation != "chat_completions" || req.Method != "POST" || req.RawQuery != "beta=true" || !req.Stream ||
			req.Credit != wire.MinWindow || len(req.Headers) != 1 {
			t.Fatalf("request %v", req)
		}
		f := whole("hello")
		f.Status = 429
		f.Headers = []*iopv1.Header{{Name: "Retry-After", Value: []byte("3")}, {Name: "X", Value: []byte{0xe9}}}
		f.Trailers = []*iopv1.Header{{Name: "Sum", Value: []byte("1")}}
		f.Usage = &iopv1.Usage{InputTokens: 3, OutputTokens: 4}
		f.RunId, f.Adapter = "somebody-elses", "x" // informs, decides nothing
		f.Metadata = map[string]string{"a": "b"}
		n.send(a.RunID, f)
		res := p.wait()
		wantClass(t, res, "")
		if !res.Started || !res.Acked || res.Status != 429 || res.Bytes != 5 || res.Usage.GetOutputTokens() != 4 || res.FirstByte.IsZero() {
			t.Fatalf("%+v", res)
		}
		if got := strings.Join(w.calls, ", "); got != "start 429, body 5, trailer 1" {
			t.Fatal(got)
		}
		if len(w.header) != 2 || string(w.header[1].Value) != "\xe9" || w.text() != "hello" {
			t.Fatalf("%v %q", w.header, w.body)
		}
		if how := r.how(a.Slot); how != pool.ByTerminal {
			t.Fatal(how)
		}
		synctest.Wait()
		if n.count(subjects.Cancel, a.RunID) != 0 {
			t.Fatal("a finished attempt was cancelled")
		}
	})
}

// The caller's writer is flushed whenever nothing more is at hand, and gets the
// provider's bytes as they were cut; usage and metadata are never among them.
//
// Contract: E4 T3 T4
func TestEveryChunkIsFlushedAsItArrives(t *testing.T) {
	inBubble(t, Config{}, func(t *testing.T, r *rig) {
		n := r.node("n", 1)
		a := r.attempt(n, "{}")
		var w answer
		p := r.do(t.Context(), a, &w)
		<-n.requests
		send := func(f *iopv1.ProviderTunnelFrame) { n.send(a.RunID, f); synctest.Wait() }
		send(frameOf(1, start, ""))
		send(frameOf(2, body, "data: \xe2\x82"))
		send(frameOf(3, body, "\xac\r\n\r\n"))
		u := frameOf(4, usage, "")
		u.Usage = &iopv1.Usage{TotalTokens: 9}
		u.Metadata = map[string]string{"x": "y"}
		send(u)
		send(frameOf(5, end, ""))
		res := p.wait()
		wantClass(t, res, "")
		if got := strings.Join(w.calls, ", "); got != "start 200, flush, body 8, flush, body 5, flush" {
			t.Fatal(got)
		}
		if w.text() != "data: €\r\n\r\n" || res.Usage.GetTotalTokens() != 9 {
			t.Fatalf("%q %v", w.text(), res.Usage)
		}
	})
}

func TestA09ErrorAfterTheStartIsTold(t *testing.T) {
	inBubble(t, Config{}, func(t *testing.T, r *rig) {
		n := r.node("n", 1)
		a := r.attempt(n, "{}")
		var w answer
		p := r.do(t.Context(), a, &w)
		<-n.requests
		long := errorOf(3, "")
		long.ErrorClass, long.Error = "provider", strings.Repeat("é", 1<<10)
		n.send(a.RunID, frameOf(1, start, ""), frameOf(2, body, "half"), long)
		res := p.wait()
		wantClass(t, res, wire.Provider)
		if !res.Started || !wire.IsRemote(res.Err) || len(res.Err.Message) > maxText || w.text() != "half" {
			t.Fatalf("%+v %q", res, w.text())
		}
		synctest.Wait()
		if r.how(a.Slot) != pool.ByTerminal || n.count(subjects.Cancel, a.RunID) != 0 {
			t.Fatal("the terminal was there: nothing is to be cancelled")
		}
	})
}

// Contract: M3
func TestUnknownClassBecomesProtocol(t *testing.T) {
	inBubble(t, Config{}, func(t *testing.T, r *rig) {
		n := r.node("n", 1)
		a := r.attempt(n, "{}")
		p := r.do(t.Context(), a, &answer{})
		<-n.requests
		n.send(a.RunID, errorOf(1, "meltdown"))
		res := p.wait()
		wantClass(t, res, wire.Protocol)
		if res.Started || !res.Acked {
			t.Fatalf("%+v", res)
		}
	})
}

// That nobody listens at the provider's address is told with its class, and of no other.
//
// Contract: M3 P1
func TestANodeSaysThatNobodyListens(t *testing.T) {
	inBubble(t, Config{}, func(t *testing.T, r *rig) {
		n := r.node("n", 1)
		for class, refused := range map[wire.Class]bool{wire.Unreachable: true, wire.Provider: false} {
			a := r.attempt(n, "{}")
			p := r.do(t.Context(), a, &answer{})
			<-n.requests
			f := errorOf(1, class)
			f.Metadata = map[string]string{wire.MetaReason: wire.ReasonRefused}
			n.send(a.RunID, f)
			res := p.wait()
			wantClass(t, res, class)
			if res.Err.Refused != refused || !wire.IsRemote(res.Err) {
				t.Errorf("%s: %+v", class, res.Err)
			}
		}
	})
}

// An adapter progresses while frames of any of its attempts come.
//
// Contract: P1 P9
func TestAnAdapterProgressesWithItsStreams(t *testing.T) {
	inBubble(t, Config{}, func(t *testing.T, r *rig) {
		n := r.node("n", 1)
		a := r.attempt(n, "{}")
		p := r.do(t.Context(), a, &answer{})
		<-n.requests
		began := time.Now()
		pass(time.Second)
		if r.d.Progresses("n", "a", began) {
			t.Error("before a frame came")
		}
		n.send(a.RunID, frameOf(1, start, ""))
		synctest.Wait()
		if !r.d.Progresses("n", "a", began) || r.d.Progresses("n", "b", began) || r.d.Progresses("m", "a", began) || r.d.Progresses("n", "a", time.Now()) {
			t.Error("a frame of it came, and of no other, and not later")
		}
		n.send(a.RunID, frameOf(2, end, ""))
		p.wait()
		if r.d.Progresses("n", "a", began) {
			t.Error("after its end")
		}
	})
}

// A25: nothing is committed before the provider's own status is known.
func TestA25NothingIsCommittedBeforeTheStart(t *testing.T) {
	inBubble(t, Config{}, func(t *testing.T, r *rig) {
		n := r.node("n", 1)
		a := r.attempt(n, "{}")
		var w answer
		p := r.do(t.Context(), a, &w)
		<-n.requests
		synctest.Wait()
		if len(w.calls) != 0 {
			t.Fatal(w.calls)
		}
		f := whole("bad")
		f.Status = 400
		n.send(a.RunID, f)
		if res := p.wait(); res.Status != 400 || w.status != 400 {
			t.Fatalf("%+v", res)
		}
	})
}

// The caller is gone: one CancelRequest, Do returns at once, and the slot waits
// for the Node's terminal.
//
// Contract: T6 P8 E5
func TestA19CallerGoneCancelsOnceAndTheSlotWaits(t *testing.T) {
	inBubble(t, Config{}, func(t *testing.T, r *rig) {
		n := r.node("n", 1)
		a := r.attempt(n, "{}")
		ctx, cancel := context.WithCancel(t.Context())
		p := r.do(ctx, a, &answer{})
		<-n.requests
		before := time.Now()
		cancel()
		res := p.wait()
		wantClass(t, res, wire.Cancelled)
		synctest.Wait()
		if got := n.count(subjects.Cancel, a.RunID); got != 1 || time.Since(before) != 0 {
			t.Fatalf("%d cancels after %s", got, time.Since(before))
		}
		if r.how(a.Slot) != 0 || r.d.Open() != 1 {
			t.Fatal("the slot came back though the Node has not answered")
		}
		pass(time.Second)
		n.send(a.RunID, frameOf(1, start, "late"), errorOf(2, wire.Cancelled))
		synctest.Wait()
		if r.how(a.Slot) != pool.ByTerminal || r.d.Open() != 0 {
			t.Fatalf("%v, %d open", r.how(a.Slot), r.d.Open())
		}
		pass(time.Minute)
		if got := n.count(subjects.Cancel, a.RunID); got != 1 {
			t.Fatalf("%d cancels", got)
		}
		if e := n.ack(a.RunID); e.GetAcked() != 2 {
			t.Fatalf("the terminal is not acknowledged: %v", e)
		}
	})
}

// A20, P8: a cancel that nobody answers gives the slot back after the bound.
//
// Contract: P8
func TestA20UnansweredCancelReturnsTheSlotAfterTheBound(t *testing.T) {
	inBubble(t, Config{CancelBound: 12 * time.Second}, func(t *testing.T, r *rig) {
		n := r.node("n", 1)
		a := r.attempt(n, "{}")
		ctx, cancel := context.WithCancelCause(t.Context())
		p := r.do(ctx, a, &answer{})
		<-n.requests
		cancel(context.DeadlineExceeded)
		wantClass(t, p.wait(), wire.Deadline)
		pass(12*time.Second - time.Millisecond)
		if r.how(a.Slot) != 0 {
			t.Fatal("too early")
		}
		pass(time.Millisecond)
		if r.how(a.Slot) != pool.ByCancelBound {
			t.Fatal(r.how(a.Slot))
		}
		// Whatever still comes belongs to nobody.
		n.send(a.RunID, frameOf(1, start, "late"))
		pass(time.Second)
		if e := n.ack(a.RunID); !e.GetReset_() {
			t.Fatalf("%v", e)
		}
	})
}

func TestDeadlineOfTheAttempt(t *testing.T) {
	inBubble(t, Config{}, func(t *testing.T, r *rig) {
		n := r.node("n", 1)
		a := r.attempt(n, "{}")
		a.Timeout, a.Grace = 600*time.Millisecond, 100*time.Millisecond
		began := time.Now()
		p := r.do(t.Context(), a, &answer{})
		if req := <-n.requests; req.TimeoutSec != 1 {
			t.Fatal(req.TimeoutSec)
		}
		n.send(a.RunID, frameOf(1, start, ""))
		wantClass(t, p.wait(), wire.Deadline)
		if took := time.Since(began); took != a.Timeout+a.Grace {
			t.Fatal(took)
		}
		synctest.Wait()
		if n.count(subjects.Cancel, a.RunID) != 1 {
			t.Fatal("not cancelled")
		}
		n.send(a.RunID, errorOf(2, wire.Cancelled))
	})
}

// The writer's failure is the caller's absence.
//
// Contract: T6
func TestWriterErrorCancels(t *testing.T) {
	inBubble(t, Config{}, func(t *testing.T, r *rig) {
		n := r.node("n", 1)
		a := r.attempt(n, "{}")
		w := answer{fail: errors.New("broken pipe")}
		p := r.do(t.Context(), a, &w)
		<-n.requests
		n.send(a.RunID, frameOf(1, start, ""), frameOf(2, body, "x"))
		res := p.wait()
		wantClass(t, res, wire.Cancelled)
		synctest.Wait()
		if n.count(subjects.Cancel, a.RunID) != 1 || !res.Started {
			t.Fatalf("%+v", res)
		}
		n.send(a.RunID, errorOf(3, wire.Cancelled))
		synctest.Wait()
		if r.how(a.Slot) != pool.ByTerminal {
			t.Fatal(r.how(a.Slot))
		}
	})
}

// A caller who leaves while the end is already there cancels nothing.
func TestWriterErrorAfterTheTerminalCancelsNothing(t *testing.T) {
	inBubble(t, Config{}, func(t *testing.T, r *rig) {
		n := r.node("n", 1)
		a := r.attempt(n, "{}")
		w := answer{fail: errors.New("broken pipe")}
		p := r.do(t.Context(), a, &w)
		<-n.requests
		n.send(a.RunID, whole("x"))
		wantClass(t, p.wait(), wire.Cancelled)
		pass(time.Second)
		if n.count(subjects.Cancel, a.RunID) != 0 || r.how(a.Slot) != pool.ByTerminal {
			t.Fatal("cancelled after the terminal")
		}
	})
}

// A caller who has left before anything was sent gets nothing sent.
func TestTrap07GoneCallerSendsNothing(t *testing.T) {
	inBubble(t, Config{}, func(t *testing.T, r *rig) {
		n := r.node("n", 1)
		a := r.attempt(n, "{}")
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		res := r.d.Do(ctx, a, &answer{})
		wantClass(t, res, wire.Cancelled)
		synctest.Wait()
		if n.count(subjects.Tunnel, a.RunID)+n.count(subjects.Cancel, a.RunID) != 0 || r.how(a.Slot) != pool.ByNotSent {
			t.Fatal("something was sent, or the slot is gone")
		}
	})
}

// A takeover as the dispatcher sees it: the pool took both slots back; what g1
// still sends changes nothing, what g2 runs is not touched.
//
// Contract: F3 F5 F8
func TestTrap01FencedAttemptsEndOnceAndStaleFramesChangeNothing(t *testing.T) {
	inBubble(t, Config{}, func(t *testing.T, r *rig) {
		g1, g2 := r.node("n", 1), r.node("n", 2)
		a, b, c := r.attempt(g1, "{}"), r.attempt(g1, "{}"), r.attempt(g2, "{}")
		var wb answer
		ctx, cancel := context.WithCancel(t.Context())
		pa, pb := r.do(ctx, a, &answer{}), r.do(t.Context(), b, &wb)
		<-g1.requests
		<-g1.requests
		g1.send(b.RunID, frameOf(1, start, "half"))
		synctest.Wait()
		cancel() // a lingers when the fence comes
		wantClass(t, pa.wait(), wire.Cancelled)
		r.d.Fenced(a.Slot, "superseded")
		r.d.Fenced(b.Slot, "superseded")
		r.d.Fenced(b.Slot, "superseded")
		res := pb.wait()
		wantClass(t, res, wire.SessionEnded)
		if !res.Started || !strings.Contains(res.Err.Message, "superseded") {
			t.Fatalf("%+v", res)
		}
		if r.d.Open() != 0 {
			t.Fatal("open after the fence")
		}
		pc := r.do(t.Context(), c, &answer{})
		<-g2.requests
		// g1 goes on, also under the run of g2.
		g1.send(b.RunID, frameOf(2, body, "late"), frameOf(3, end, ""))
		g1.send(c.RunID, whole("not mine"))
		g1.sendAck(&iopv1.StreamAck_Entry{RunId: c.RunID, Direction: "body", Acked: 9, Credit: 9})
		pass(time.Second)
		if pc.isDone() || len(r.returned()) != 0 || g1.ack(b.RunID).GetReset_() || len(r.misbehaved) != 0 {
			t.Fatalf("a stale message changed something: %v", r.returned())
		}
		if got := g1.count(subjects.Cancel, b.RunID); got != 0 {
			t.Fatal("a fenced attempt was cancelled")
		}
		g2.send(c.RunID, whole("mine"))
		res = pc.wait()
		wantClass(t, res, "")
		pass(time.Minute)
		if got := r.returned(); len(got) != 1 || got[0] != (returned{c.Slot, pool.ByTerminal}) {
			t.Fatal(got)
		}
	})
}

// The fence came between the grant and Do: nothing is sent, nothing returned.
//
// Contract: F3
func TestFenceBeforeDo(t *testing.T) {
	inBubble(t, Config{}, func(t *testing.T, r *rig) {
		n := r.node("n", 3)
		a := r.attempt(n, "{}")
		r.d.Fenced(a.Slot, "")
		wantClass(t, r.d.Do(t.Context(), a, &answer{}), wire.SessionEnded)
		synctest.Wait()
		if n.count(subjects.Tunnel, a.RunID) != 0 || len(r.returned()) != 0 {
			t.Fatal("sent, or returned")
		}
	})
}

// Nobody listens and nothing was acknowledged: unreachable at once, cancelled
// all the same, and the slot waits, for a dropped leaf link looks the same.
//
// Contract: G4
func TestA67NoRespondersBeforeAnythingWasAcknowledged(t *testing.T) {
	inBubble(t, Config{}, func(t *testing.T, r *rig) {
		n := r.node("n", 1)
		a := r.attempt(n, "{}")
		n.conn.Close()
		began := time.Now()
		res := r.d.Do(t.Context(), a, &answer{})
		wantClass(t, res, wire.Unreachable)
		if res.Acked || res.Started || time.Since(began) != 0 {
			t.Fatalf("%+v after %s", res, time.Since(began))
		}
		if r.how(a.Slot) != 0 {
			t.Fatal("a hint is no proof: the Node may live")
		}
		// The link is there again, and the Node had the request after all.
		n = r.node("n", 1)
		n.send(a.RunID, errorOf(1, wire.Cancelled))
		synctest.Wait()
		if r.how(a.Slot) != pool.ByTerminal {
			t.Fatal(r.how(a.Slot))
		}
	})
}

// A link that is away for a moment costs an attempt without another candidate no more
// than that: the same request goes out again, more seldom each time, until somebody
// answers for the Node or its patience is over.
//
// Contract: G4 J5 H6
func TestPatienceOutlivesAShortDropOfTheLink(t *testing.T) {
	for name, back := range map[string]bool{"back in time": true, "away": false} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, Config{}, func(t *testing.T, r *rig) {
				n := r.node("n", 1)
				a := r.attempt(n, "{}")
				a.Patience = 30 * time.Second
				n.conn.Close()
				began := time.Now()
				p := r.do(t.Context(), a, &answer{})
				synctest.Wait()
				pass(2900 * time.Millisecond)
				if p.isDone() {
					t.Fatalf("%+v", p.res)
				}
				if !back {
					wantClass(t, p.wait(), wire.Unreachable)
					if took := time.Since(began); took < a.Patience || took > a.Patience+lastHurry {
						t.Error(took)
					}
					n = r.node("n", 1)
					n.send(a.RunID, errorOf(1, wire.Cancelled))
					synctest.Wait()
					return
				}
				n = r.node("n", 1)
				if req := <-n.requests; req.RunId != a.RunID || string(req.Body) != "{}" {
					t.Errorf("%v", req)
				}
				if took := time.Since(began); took > 2900*time.Millisecond+lastHurry {
					t.Error(took)
				}
				n.send(a.RunID, whole("x"))
				wantClass(t, p.wait(), "")
				if r.how(a.Slot) != pool.ByTerminal || n.count(subjects.Cancel, a.RunID) != 0 {
					t.Error(r.how(a.Slot))
				}
			})
		})
	}
}

// An open stream lives through the hint.
//
// Contract: G4
func TestNoRespondersIsNothingToAnOpenStream(t *testing.T) {
	inBubble(t, Config{}, func(t *testing.T, r *rig) {
		n := r.node("n", 1)
		a := r.attempt(n, "{}")
		p := r.do(t.Context(), a, &answer{})
		<-n.requests
		n.send(a.RunID, frameOf(1, start, ""))
		synctest.Wait()
		r.d.NoResponders(a.RunID)
		r.d.NoResponders(wire.NewRunID())
		pass(time.Second)
		if p.isDone() {
			t.Fatal("ended by a hint")
		}
		n.send(a.RunID, frameOf(2, end, ""))
		wantClass(t, p.wait(), "")
	})
}

// The bus may lose a request without a word; it is sent again until the Node
// acknowledged something of it.
func TestLostRequestIsSentAgain(t *testing.T) {
	inBubble(t, Config{}, func(t *testing.T, r *rig) {
		n := r.node("n", 1)
		r.bus.Inject(membusDrop("iop.v1.*.*.*.down.tunnel.*", 2))
		a := r.attempt(n, "{}")
		p := r.do(t.Context(), a, &answer{})
		req := <-n.requests
		if req.RunId != a.RunID || string(req.Body) != "{}" {
			t.Fatalf("%v", req)
		}
		// The Node works silently; an acknowledgement stops the repetition.
		n.sendAck(&iopv1.StreamAck_Entry{RunId: a.RunID, Direction: "body"})
		pass(5 * time.Minute)
		if got := n.count(subjects.Tunnel, a.RunID); got != 1 || p.isDone() {
			t.Fatalf("%d requests came", got)
		}
		n.send(a.RunID, whole("x"))
		wantClass(t, p.wait(), "")
	})
}

func TestPublishThatFailsReturnsTheSlotUnsent(t *testing.T) {
	inBubble(t, Config{}, func(t *testing.T, r *rig) {
		n := r.node("n", 1)
		a := r.attempt(n, "{}")
		a.Operation = strings.Repeat("x", wire.MaxMessage)
		wantClass(t, r.d.Do(t.Context(), a, &answer{}), wire.Invalid)
		if r.how(a.Slot) != pool.ByNotSent {
			t.Fatal(r.how(a.Slot))
		}
		b := r.attempt(n, "short")
		b.BodySize = 100
		wantClass(t, r.d.Do(t.Context(), b, &answer{}), wire.Internal)
		if r.how(b.Slot) != pool.ByNotSent || r.d.Open() != 0 {
			t.Fatal(r.how(b.Slot))
		}
	})
}

// The connection to the broker has ended: what is open ends, Run says why.
func TestBusEndsWhileAttemptsAreOpen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, Config{})
		n := r.node("n", 1)
		a, b := r.attempt(n, "{}"), r.attempt(n, "{}")
		p := r.do(t.Context(), a, &answer{})
		<-n.requests
		gone := errors.New("gone")
		r.edge.Kill(gone)
		wantClass(t, p.wait(), wire.SessionEnded)
		if err := <-r.ran; !errors.Is(err, gone) {
			t.Fatal(err)
		}
		res := r.d.Do(t.Context(), b, &answer{})
		wantClass(t, res, wire.SessionEnded)
		if r.how(a.Slot) != pool.ByCancelBound || r.how(b.Slot) != pool.ByNotSent {
			t.Fatal(r.returned())
		}
		r.stop()
		n.conn.Close()
	})
}

// Stopping ends every caller's side, and waits for the Nodes.
func TestRunReturnsWhenAllAttemptsHaveEnded(t *testing.T) {
	inBubble(t, Config{}, func(t *testing.T, r *rig) {
		n := r.node("n", 1)
		a := r.attempt(n, "{}")
		p := r.do(t.Context(), a, &answer{})
		<-n.requests
		r.stop()
		wantClass(t, p.wait(), wire.Draining)
		synctest.Wait()
		select {
		case <-r.ran:
			t.Fatal("Run returned with a slot out")
		default:
		}
		b := r.attempt(n, "{}")
		wantClass(t, r.d.Do(t.Context(), b, &answer{}), wire.Draining)
		if r.how(b.Slot) != pool.ByNotSent || n.count(subjects.Cancel, a.RunID) != 1 {
			t.Fatal(r.returned())
		}
		n.send(a.RunID, errorOf(1, wire.Cancelled))
	})
}

// Cancel orders as Edge makes them; always one terminal.
//
// Contract: J4 C1
func TestTrap16CancelOrders(t *testing.T) {
	inBubble(t, Config{}, func(t *testing.T, r *rig) {
		n := r.node("n", 1)
		// Two attempts on one node, the first is cancelled, the second unharmed.
		a, b := r.attempt(n, "{}"), r.attempt(n, "{}")
		ctx, cancel := context.WithCancel(t.Context())
		pa, pb := r.do(ctx, a, &answer{}), r.do(t.Context(), b, &answer{})
		<-n.requests
		<-n.requests
		cancel()
		wantClass(t, pa.wait(), wire.Cancelled)
		if id := <-n.cancels; id != a.RunID {
			t.Fatal(id)
		}
		// The terminal was on its way already: it ends a, and b goes on.
		n.send(a.RunID, whole("all of it"))
		n.send(b.RunID, whole("b"))
		wantClass(t, pb.wait(), "")
		synctest.Wait()
		if !slices.Equal(r.returned(), []returned{{a.Slot, pool.ByTerminal}, {b.Slot, pool.ByTerminal}}) {
			t.Fatal(r.returned())
		}
		if n.count(subjects.Cancel, b.RunID) != 0 || n.count(subjects.Cancel, a.RunID) != 1 {
			t.Fatal("cancels")
		}
	})
}

// 10,000 calls one after the other through one slot each time: it is back before
// Do returns, and one acknowledgement message serves many of them.
func TestTrap14SlotIsBackBeforeTheCallerIs(t *testing.T) {
	inBubble(t, Config{}, func(t *testing.T, r *rig) {
		n := r.node("n", 1)
		n.mu.Lock()
		n.serve = func(m subjects.Message, _ []byte) {
			if m.Verb == subjects.Tunnel {
				n.send(m.Run, whole("x"))
			}
		}
		n.mu.Unlock()
		go func() {
			for range n.requests {
			}
		}()
		const calls = 10_000
		for i := range calls {
			a := r.attempt(n, "{}")
			wantClass(t, r.d.Do(t.Context(), a, &answer{}), "")
			if i%100 == 0 && (len(r.returned()) != i+1 || r.d.Open() != 0) {
				t.Fatal("the slot is late")
			}
		}
		pass(time.Second)
		n.mu.Lock()
		defer n.mu.Unlock()
		if len(n.acks) != calls || n.ackMsgs > calls/100 {
			t.Fatalf("%d acknowledged with %d messages", len(n.acks), n.ackMsgs)
		}
		close(n.requests)
	})
}
