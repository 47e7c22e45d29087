package dispatch

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"strings"
	"sync"
	"testing"
	"testing/iotest"
	"testing/synctest"
	"time"

	"github.com/iop-fabric/iop/edge/pool"
	"github.com/iop-fabric/iop/internal/bus/membus"
	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/wire"
	"github.com/iop-fabric/iop/wire/iopv1"
)

// echo answers with the hash of the request's body, then with size bytes of a
// pattern that the run id seeds, cut into odd pieces.
func echo(size int) func(*iopv1.ProviderTunnelRequest, io.Reader, func(*iopv1.ProviderTunnelFrame) bool) {
	return func(req *iopv1.ProviderTunnelRequest, in io.Reader, send func(*iopv1.ProviderTunnelFrame) bool) {
		h := sha256.New()
		n, err := io.Copy(h, in)
		if err != nil || uint64(n) != req.BodySize {
			send(errorOf(0, wire.Invalid))
			return
		}
		if !send(frameOf(0, start, "")) || !send(frameOf(0, body, string(h.Sum(nil)))) {
			return
		}
		rest := pattern(req.RunId, size)
		for cut := 1; len(rest) > 0; cut = min(cut*3+1, wire.MaxBody) {
			k := min(cut, len(rest))
			if !send(frameOf(0, body, string(rest[:k]))) {
				return
			}
			rest = rest[k:]
		}
		send(frameOf(0, end, ""))
	}
}

func checkEcho(t testing.TB, a Attempt, sent []byte, got []byte, size int) {
	t.Helper()
	sum := sha256.Sum256(sent)
	want := append(sum[:], pattern(a.RunID, size)...)
	if !bytes.Equal(got, want) {
		t.Fatalf("run %s: %d bytes, want %d, equal up to %d", a.RunID, len(got), len(want), equalUpTo(got, want))
	}
}

func equalUpTo(a, b []byte) int {
	for i := range min(len(a), len(b)) {
		if a[i] != b[i] {
			return i
		}
	}
	return min(len(a), len(b))
}

// lossy puts faults on everything that carries a stream, both ways.
func lossy(r *rig, f membus.Fault) {
	for _, subject := range []string{"iop.v1.e.*.*.up.frame.*", "iop.v1.e.*.*.up.ack", "iop.v1.e.*.*.down.ack", "iop.v1.e.*.*.down.body.*", "iop.v1.e.*.*.down.tunnel.*"} {
		f.Subject = subject
		r.bus.Inject(f)
	}
}

// Bodies larger than a message both ways, over a bus that loses, repeats and
// reorders: no byte is lost, none comes twice, order is kept.
//
// Contract: J1 J2 J3 J6 T7
func TestStreamsOverAFaultyBus(t *testing.T) {
	for name, f := range map[string]membus.Fault{
		"no fault":   {},
		"loss":       {Drop: 0.05},
		"duplicates": {Duplicate: 0.2},
		"reordering": {Jitter: 3 * time.Millisecond},
		"all":        {Drop: 0.03, Duplicate: 0.05, Jitter: 2 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, Config{}, func(t *testing.T, r *rig) {
				n := r.node("n", 1)
				const streams, size = 40, 300 << 10
				stop := n.honest(echo(size))
				lossy(r, f)
				var wg sync.WaitGroup
				for i := range streams {
					wg.Go(func() {
						up := pattern(fmt.Sprint("up", i), i*17<<10)
						a := r.attempt(n, string(up))
						var w answer
						res := r.d.Do(t.Context(), a, &w)
						if res.Err != nil {
							t.Errorf("stream %d: %v", i, res.Err)
							return
						}
						checkEcho(t, a, up, w.body, size)
					})
				}
				wg.Wait()
				if len(r.returned()) != streams {
					t.Fatal(len(r.returned()))
				}
				if len(r.misbehaved) != 0 {
					t.Fatal(r.misbehaved)
				}
				pass(20 * time.Second)
				stop()
			})
		})
	}
}

// Edge's connection is lost in mid-stream and comes back: the streams go on.
//
// Contract: J5
func TestConnectionLostAndRemade(t *testing.T) {
	inBubble(t, Config{}, func(t *testing.T, r *rig) {
		n := r.node("n", 1)
		const streams, size = 20, 200 << 10
		stop := n.honest(func(req *iopv1.ProviderTunnelRequest, in io.Reader, send func(*iopv1.ProviderTunnelFrame) bool) {
			echo(size)(req, iotest.OneByteReader(io.LimitReader(in, 0)), func(*iopv1.ProviderTunnelFrame) bool { return false })
			h := sha256.New()
			_, _ = io.Copy(h, in)
			send(frameOf(0, start, ""))
			send(frameOf(0, body, string(h.Sum(nil))))
			for p := pattern(req.RunId, size); len(p) > 0; p = p[2048:] {
				<-time.After(40 * time.Millisecond) // a stream of 4 s
				send(frameOf(0, body, string(p[:2048])))
			}
			send(frameOf(0, end, ""))
		})
		var wg sync.WaitGroup
		for i := range streams {
			wg.Go(func() {
				up := pattern(fmt.Sprint("up", i), 150<<10)
				a := r.attempt(n, string(up))
				var w answer
				<-time.After(time.Duration(i) * 150 * time.Millisecond) // some requests go out while it is down
				res := r.d.Do(t.Context(), a, &w)
				if res.Err != nil {
					t.Errorf("stream %d: %v", i, res.Err)
					return
				}
				checkEcho(t, a, up, w.body, size)
			})
		}
		for range 3 {
			<-time.After(time.Second)
			r.edge.Cut()
			<-time.After(2 * time.Second)
			r.edge.Restore()
		}
		wg.Wait()
		pass(20 * time.Second)
		stop()
	})
}

// A request that comes while the connection to the broker is away is not refused: it
// goes out when the connection is back.
//
// Contract: J5 E6
func TestRequestWaitsForTheConnection(t *testing.T) {
	inBubble(t, Config{}, func(t *testing.T, r *rig) {
		n := r.node("n", 1)
		r.edge.Leave()
		a := r.attempt(n, "{}")
		p := r.do(t.Context(), a, &answer{})
		pass(time.Second)
		if n.count(subjects.Tunnel, a.RunID) != 0 {
			t.Fatal("the connection is away")
		}
		r.edge.Restore()
		synctest.Wait()
		if n.count(subjects.Tunnel, a.RunID) == 0 {
			t.Fatal("the request is lost")
		}
		n.send(a.RunID, whole("x"))
		wantClass(t, p.wait(), "")
		if r.how(a.Slot) != pool.ByTerminal {
			t.Fatal(r.how(a.Slot))
		}
	})
}

// A cancel that was lost with the connection is sent again when it is back.
//
// Contract: T6 J5
func TestCancelIsRepeatedAfterAReconnect(t *testing.T) {
	inBubble(t, Config{}, func(t *testing.T, r *rig) {
		n := r.node("n", 1)
		a := r.attempt(n, "{}")
		ctx, cancel := context.WithCancel(t.Context())
		p := r.do(ctx, a, &answer{})
		<-n.requests
		r.edge.Cut()
		cancel()
		wantClass(t, p.wait(), wire.Cancelled)
		pass(time.Second)
		if n.count(subjects.Cancel, a.RunID) != 0 {
			t.Fatal("the connection is cut")
		}
		r.edge.Restore()
		synctest.Wait()
		if n.count(subjects.Cancel, a.RunID) != 1 {
			t.Fatal("the cancel is lost")
		}
		n.send(a.RunID, errorOf(1, wire.Cancelled))
		synctest.Wait()
		if r.how(a.Slot) != pool.ByTerminal {
			t.Fatal(r.how(a.Slot))
		}
		r.edge.Cut()
		r.edge.Restore()
		synctest.Wait()
		if n.count(subjects.Cancel, a.RunID) != 1 {
			t.Fatal("cancelled after its end")
		}
	})
}

// A cancel that nobody answers was lost, or came before its request: it goes out again
// every two seconds, until the Node's terminal comes or the slot is back without it.
//
// Contract: T6 P8 J5
func TestCancelIsRepeatedUntilItIsAnswered(t *testing.T) {
	inBubble(t, Config{CancelBound: 7 * time.Second}, func(t *testing.T, r *rig) {
		n := r.node("n", 2)
		answered, silent := r.attempt(n, "{}"), r.attempt(n, "{}")
		ctx, cancel := context.WithCancel(t.Context())
		a, b := r.do(ctx, answered, &answer{}), r.do(ctx, silent, &answer{})
		<-n.requests
		<-n.requests
		cancel()
		wantClass(t, a.wait(), wire.Cancelled)
		wantClass(t, b.wait(), wire.Cancelled)
		synctest.Wait()
		for i := range 4 {
			if got := n.count(subjects.Cancel, silent.RunID); got != i+1 {
				t.Errorf("%d cancels after %d s", got, 2*i)
			}
			if i == 1 {
				n.send(answered.RunID, errorOf(1, wire.Cancelled))
			}
			pass(2 * time.Second)
		}
		pass(time.Minute)
		if got := n.count(subjects.Cancel, answered.RunID); got != 2 {
			t.Errorf("%d cancels of an attempt that ended after three seconds", got)
		}
		if got := n.count(subjects.Cancel, silent.RunID); got != 4 || r.how(silent.Slot) != pool.ByCancelBound {
			t.Errorf("%d cancels, the slot came back by %v", got, r.how(silent.Slot))
		}
		if len(r.d.repeats) != 0 {
			t.Error("something is remembered")
		}
	})
}

// The exact size is announced, frames are cut at 64 KiB, and none is sent beyond
// the Node's credit.
//
// Contract: T7 J1 J6
func TestLargeBodyFollowsAsCreditAllows(t *testing.T) {
	inBubble(t, Config{}, func(t *testing.T, r *rig) {
		n := r.node("n", 1)
		payload := pattern("p", 1<<20|1)
		var got bytes.Buffer
		var frames int
		n.mu.Lock()
		n.serve = func(m subjects.Message, data []byte) {
			if m.Verb != subjects.Body {
				return
			}
			f := &iopv1.BodyFrame{}
			if err := f.UnmarshalVT(data); err != nil || len(f.Body) > wire.MaxBody || len(data) > wire.MaxBody+512 {
				t.Errorf("%v, %d bytes", err, len(data))
			}
			if frames++; f.Sequence != uint64(frames) {
				return // a repetition, or a probe
			}
			got.Write(f.Body)
			if f.Last != (got.Len() == len(payload)) {
				t.Errorf("last is %v after %d bytes", f.Last, got.Len())
			}
		}
		n.mu.Unlock()
		a := r.attempt(n, string(payload))
		p := r.do(t.Context(), a, &answer{})
		req := <-n.requests
		if !req.BodyFollows || req.BodySize != uint64(len(payload)) || len(req.Body) != 0 {
			t.Fatalf("%v", req)
		}
		synctest.Wait()
		if cost := got.Len() + frames*wire.FrameOverhead; cost > wire.MinWindow || cost < wire.MinWindow-wire.MaxBody-wire.FrameOverhead {
			t.Fatalf("%d used of the first credit", cost)
		}
		for before := 0; before < frames; { // what is under way to the session is bounded too
			before = frames
			n.sendAck(&iopv1.StreamAck_Entry{RunId: a.RunID, Direction: "body", Acked: uint64(frames), Credit: 2 << 20})
			synctest.Wait()
		}
		if !bytes.Equal(got.Bytes(), payload) {
			t.Fatalf("%d bytes came", got.Len())
		}
		n.sendAck(&iopv1.StreamAck_Entry{RunId: a.RunID, Direction: "body", Acked: uint64(frames), Credit: 2 << 20})
		n.send(a.RunID, whole("x"))
		wantClass(t, p.wait(), "")
	})
}

// A body that finds no room behind others is not forgotten: its Node hears of the run
// again and again, and so does not take it for one that nobody sends any more.
//
// Contract: J2 J7
func TestBodyThatWaitsForItsTurn(t *testing.T) {
	inBubble(t, Config{}, func(t *testing.T, r *rig) {
		n := r.node("n", 1)
		big := string(pattern("p", 1<<20))
		first := r.do(t.Context(), r.attempt(n, big), &answer{})
		<-n.requests
		synctest.Wait() // it has sent what the first window and the downlink hold
		a := r.attempt(n, big)
		ctx, leave := context.WithCancel(t.Context())
		second := r.do(ctx, a, &answer{})
		<-n.requests
		n.sendAck(&iopv1.StreamAck_Entry{RunId: a.RunID, Direction: "body", Credit: wire.MinWindow})
		synctest.Wait()
		heard := func() int { return n.count(subjects.Tunnel, a.RunID) + n.count(subjects.Body, a.RunID) }
		for range 3 {
			before := heard()
			pass(stillThere + lookAgain)
			if heard() == before {
				t.Error("its Node hears nothing of it for seconds")
			}
		}
		leave()
		second.wait()
		pass(silenceBound)
		first.wait()
	})
}

// An answer may end before the body was taken: the rest is not sent.
func TestAnswerBeforeTheBodyIsTaken(t *testing.T) {
	inBubble(t, Config{}, func(t *testing.T, r *rig) {
		n := r.node("n", 1)
		a := r.attempt(n, string(pattern("p", 4<<20)))
		p := r.do(t.Context(), a, &answer{})
		<-n.requests
		f := whole("too large")
		f.Status = 413
		n.send(a.RunID, f)
		if res := p.wait(); res.Err != nil || res.Status != 413 {
			t.Fatalf("%+v", res)
		}
		synctest.Wait()
		sent := n.count(subjects.Body, a.RunID)
		pass(time.Minute)
		if n.count(subjects.Body, a.RunID) != sent || n.count(subjects.Cancel, a.RunID) != 0 {
			t.Fatal("it went on")
		}
	})
}

// The request was lost and the body's frames were not: the Node's reset brings
// the request again.
func TestResetBeforeAnythingWasAcknowledged(t *testing.T) {
	inBubble(t, Config{}, func(t *testing.T, r *rig) {
		n := r.node("n", 1)
		stop := n.honest(echo(10))
		r.bus.Inject(membusDrop("iop.v1.*.*.*.down.tunnel.*", 1))
		up := pattern("p", 400<<10)
		a := r.attempt(n, string(up))
		var w answer
		began := time.Now()
		res := r.d.Do(t.Context(), a, &w)
		wantClass(t, res, "")
		checkEcho(t, a, up, w.body, 10)
		if took := time.Since(began); took >= firstRepeat {
			t.Fatalf("the reset was not heeded: %s", took)
		}
		pass(time.Minute)
		stop()
	})
}

// Acknowledgements that make no sense end the attempt, and only it.
//
// Contract: J8
func TestHostileAcknowledgements(t *testing.T) {
	for name, e := range map[string]*iopv1.StreamAck_Entry{
		"beyond what was sent":  {Acked: 1 << 40},
		"credit beyond windows": {Acked: 1, Credit: 1 << 60},
		"reset":                 {Reset_: true},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, Config{}, func(t *testing.T, r *rig) {
				n := r.node("n", 1)
				a := r.attempt(n, string(pattern("p", 4<<20)))
				p := r.do(t.Context(), a, &answer{})
				<-n.requests
				synctest.Wait()
				n.sendAck(&iopv1.StreamAck_Entry{RunId: a.RunID, Direction: "body", Acked: 1})
				synctest.Wait()
				e.RunId, e.Direction = a.RunID, "body"
				n.sendAck(e)
				if e.Reset_ {
					pass(resetBound) // a Node that means it says it again
					n.sendAck(e)
				}
				wantClass(t, p.wait(), wire.Protocol)
				synctest.Wait()
				if n.count(subjects.Cancel, a.RunID) != 1 {
					t.Fatal("not cancelled")
				}
				n.send(a.RunID, errorOf(1, wire.Cancelled))
			})
		})
	}
}

// A Node that never acknowledges any of the body has not begun.
//
// Contract: J2
func TestBodyThatNobodyTakes(t *testing.T) {
	inBubble(t, Config{}, func(t *testing.T, r *rig) {
		n := r.node("n", 1)
		a := r.attempt(n, string(pattern("p", 4<<20)))
		p := r.do(t.Context(), a, &answer{})
		res := p.wait()
		wantClass(t, res, wire.Unreachable)
		if res.Acked {
			t.Fatalf("%+v", res)
		}
		n.send(a.RunID, errorOf(1, wire.Cancelled))
	})
}

// What was kept of the caller's body cannot be read to its end.
func TestBodyThatIsTooShort(t *testing.T) {
	inBubble(t, Config{}, func(t *testing.T, r *rig) {
		n := r.node("n", 1)
		a := r.attempt(n, strings.Repeat("x", 100<<10))
		a.BodySize = 200 << 10
		res := r.d.Do(t.Context(), a, &answer{})
		wantClass(t, res, wire.Internal)
		synctest.Wait()
		if n.count(subjects.Cancel, a.RunID) != 1 {
			t.Fatal("not cancelled")
		}
		n.send(a.RunID, errorOf(1, wire.Cancelled))
	})
}
