package dispatch

import (
	"bytes"
	"context"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/iop-fabric/iop/edge/pool"
	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/tunnel"
	"github.com/iop-fabric/iop/wire"
	"github.com/iop-fabric/iop/wire/iopv1"
)

func with(f *iopv1.ProviderTunnelFrame, change func(*iopv1.ProviderTunnelFrame)) *iopv1.ProviderTunnelFrame {
	change(f)
	return f
}

func header(name, value string) []*iopv1.Header {
	return []*iopv1.Header{{Name: name, Value: []byte(value)}}
}

// hostile are the ways to break the rules of a stream, each from its first frame on.
var hostile = map[string]struct {
	frames []*iopv1.ProviderTunnelFrame
	reason breach
	ended  bool // the last frame is a terminal: the slot is back with it
}{
	"body without start":   {[]*iopv1.ProviderTunnelFrame{frameOf(1, body, "x")}, breachEarly, false},
	"end without start":    {[]*iopv1.ProviderTunnelFrame{frameOf(1, end, "")}, breachEarly, true},
	"start twice":          {[]*iopv1.ProviderTunnelFrame{frameOf(1, start, ""), frameOf(2, start, "")}, breachSecondStart, false},
	"unknown kind":         {[]*iopv1.ProviderTunnelFrame{frameOf(1, 17, "")}, breachKind, false},
	"no kind":              {[]*iopv1.ProviderTunnelFrame{frameOf(1, 0, "x")}, breachKind, false},
	"sequence 0":           {[]*iopv1.ProviderTunnelFrame{frameOf(0, start, "")}, breachStream, false},
	"two contents":         {[]*iopv1.ProviderTunnelFrame{frameOf(1, start, "a"), frameOf(1, start, "b")}, breachStream, false},
	"status 100":           {[]*iopv1.ProviderTunnelFrame{with(frameOf(1, start, ""), func(f *iopv1.ProviderTunnelFrame) { f.Status = 100 })}, breachStatus, false},
	"status 0":             {[]*iopv1.ProviderTunnelFrame{with(frameOf(1, start, ""), func(f *iopv1.ProviderTunnelFrame) { f.Status = 0 })}, breachStatus, false},
	"status 600":           {[]*iopv1.ProviderTunnelFrame{with(frameOf(1, start, ""), func(f *iopv1.ProviderTunnelFrame) { f.Status = 600 })}, breachStatus, false},
	"status below 0":       {[]*iopv1.ProviderTunnelFrame{with(frameOf(1, start, ""), func(f *iopv1.ProviderTunnelFrame) { f.Status = -200 })}, breachStatus, false},
	"header value CR LF":   {[]*iopv1.ProviderTunnelFrame{with(frameOf(1, start, ""), func(f *iopv1.ProviderTunnelFrame) { f.Headers = header("A", "b\r\nSet-Cookie: x") })}, breachHeader, false},
	"header value NUL":     {[]*iopv1.ProviderTunnelFrame{with(frameOf(1, start, ""), func(f *iopv1.ProviderTunnelFrame) { f.Headers = header("A", "b\x00") })}, breachHeader, false},
	"header name LF":       {[]*iopv1.ProviderTunnelFrame{with(frameOf(1, start, ""), func(f *iopv1.ProviderTunnelFrame) { f.Headers = header("A\nB", "b") })}, breachHeader, false},
	"header name colon":    {[]*iopv1.ProviderTunnelFrame{with(frameOf(1, start, ""), func(f *iopv1.ProviderTunnelFrame) { f.Headers = header("A:", "b") })}, breachHeader, false},
	"header name empty":    {[]*iopv1.ProviderTunnelFrame{with(frameOf(1, start, ""), func(f *iopv1.ProviderTunnelFrame) { f.Headers = header("", "b") })}, breachHeader, false},
	"headers too large":    {[]*iopv1.ProviderTunnelFrame{with(frameOf(1, start, ""), func(f *iopv1.ProviderTunnelFrame) { f.Headers = header("A", strings.Repeat("x", wire.MaxHeaders)) })}, breachHeader, false},
	"headers on a body":    {[]*iopv1.ProviderTunnelFrame{frameOf(1, start, ""), with(frameOf(2, body, "x"), func(f *iopv1.ProviderTunnelFrame) { f.Headers = header("A", "b") })}, breachMisplaced, false},
	"trailers too large":   {[]*iopv1.ProviderTunnelFrame{frameOf(1, start, ""), with(frameOf(2, end, ""), func(f *iopv1.ProviderTunnelFrame) { f.Trailers = header("A", strings.Repeat("x", wire.MaxHeaders)) })}, breachHeader, true},
	"trailer value LF":     {[]*iopv1.ProviderTunnelFrame{with(whole("x"), func(f *iopv1.ProviderTunnelFrame) { f.Trailers = header("A", "\n") })}, breachHeader, true},
	"trailers in between":  {[]*iopv1.ProviderTunnelFrame{frameOf(1, start, ""), with(frameOf(2, body, "x"), func(f *iopv1.ProviderTunnelFrame) { f.Trailers = header("A", "b") })}, breachMisplaced, false},
	"usage with a body":    {[]*iopv1.ProviderTunnelFrame{frameOf(1, start, ""), frameOf(2, usage, "x")}, breachMisplaced, false},
	"usage as the end":     {[]*iopv1.ProviderTunnelFrame{frameOf(1, start, ""), with(frameOf(2, usage, ""), func(f *iopv1.ProviderTunnelFrame) { f.End = true })}, breachMisplaced, false},
	"error with a body":    {[]*iopv1.ProviderTunnelFrame{with(errorOf(1, wire.Provider), func(f *iopv1.ProviderTunnelFrame) { f.Body = []byte("x") })}, breachMisplaced, true},
	"body of 64 KiB and 1": {[]*iopv1.ProviderTunnelFrame{frameOf(1, start, ""), frameOf(2, body, strings.Repeat("x", wire.MaxBody+1))}, breachBodySize, false},
}

// Every breach ends the attempt with class protocol, cancels it once, and leaves
// the slot to the Node's terminal; nothing of the breach reaches the caller.
//
// Contract: J8 T3 V1
func TestHostileFrames(t *testing.T) {
	for name, tc := range hostile {
		t.Run(name, func(t *testing.T) {
			inBubble(t, Config{}, func(t *testing.T, r *rig) {
				n := r.node("n", 1)
				a, other := r.attempt(n, "{}"), r.attempt(n, "{}")
				var w answer
				p, po := r.do(t.Context(), a, &w), r.do(t.Context(), other, &answer{})
				<-n.requests
				<-n.requests
				n.send(a.RunID, tc.frames...)
				res := p.wait()
				wantClass(t, res, wire.Protocol)
				if wire.IsRemote(res.Err) {
					t.Fatal("it is ours to say")
				}
				synctest.Wait()
				if got := n.count(subjects.Cancel, a.RunID); got != 1 {
					t.Fatalf("%d cancels", got)
				}
				if got := counter(t, r, "iop_edge_stream_breaches_total", tc.reason.String()); got != 1 {
					t.Fatalf("breach %s counted %v times", tc.reason, got)
				}
				if back := r.how(a.Slot) != 0; back != tc.ended {
					t.Fatalf("slot back: %v", back)
				}
				// More of it is one breach still; the terminal frees the slot.
				last := uint64(len(tc.frames))
				n.send(a.RunID, frameOf(last+1, body, "x"), frameOf(last+2, start, ""), errorOf(last+3, wire.Cancelled))
				synctest.Wait()
				if how := r.how(a.Slot); how != pool.ByTerminal || n.count(subjects.Cancel, a.RunID) != 1 {
					t.Fatalf("%v, %d cancels", how, n.count(subjects.Cancel, a.RunID))
				}
				pass(time.Second)
				if e := n.ack(a.RunID); !tc.ended && e.GetAcked() != last+3 {
					t.Fatalf("the Node cannot forget the stream: %v", e)
				}
				// Only that stream is lost.
				n.send(other.RunID, whole("y"))
				wantClass(t, po.wait(), "")
				if len(r.misbehaved) != 0 {
					t.Fatal(r.misbehaved)
				}
			})
		})
	}
}

// Contract: J8
func TestHostileBytes(t *testing.T) {
	inBubble(t, Config{}, func(t *testing.T, r *rig) {
		n := r.node("n", 1)
		a := r.attempt(n, "{}")
		p := r.do(t.Context(), a, &answer{})
		<-n.requests
		n.raw(a.RunID, []byte{0xff, 0xff, 0xff, 0xff, 0xff})
		wantClass(t, p.wait(), wire.Protocol)
		n.send(a.RunID, errorOf(1, wire.Cancelled))
		// And in acknowledgements.
		_ = n.conn.Publish(n.id.Up(subjects.Ack, ""), []byte{0xff, 0xff})
		synctest.Wait()
		if got := counter(t, r, "iop_edge_frames_dropped_total", dropAck); got != 1 {
			t.Fatal(got)
		}
	})
}

// More than was granted is a breach, however small the frames are, and a caller
// who takes nothing lets no more than the window lie here.
//
// Contract: J1 J7 J8
func TestOverCreditEndsTheStream(t *testing.T) {
	for name, size := range map[string]int{"large frames": wire.MaxBody, "small frames": 1} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, Config{}, func(t *testing.T, r *rig) {
				n := r.node("n", 1)
				a := r.attempt(n, "{}")
				w := answer{block: make(chan struct{}), blocked: make(chan struct{}, 1)}
				p := r.do(t.Context(), a, &w)
				<-n.requests
				n.send(a.RunID, frameOf(1, start, ""))
				chunk := strings.Repeat("x", size)
				n.send(a.RunID, frameOf(2, body, chunk))
				<-w.blocked
				fit := (wire.MinWindow - 2*wire.FrameOverhead - size) / (size + wire.FrameOverhead)
				seq := uint64(3)
				for range fit {
					n.send(a.RunID, frameOf(seq, body, chunk))
					seq++
				}
				synctest.Wait()
				if n.count(subjects.Cancel, a.RunID) != 0 {
					t.Fatal("within the credit, and cancelled")
				}
				n.send(a.RunID, frameOf(seq, body, chunk))
				synctest.Wait()
				// The cancel goes out though the caller still holds Do up.
				if n.count(subjects.Cancel, a.RunID) != 1 || p.isDone() {
					t.Fatal("over credit, and not cancelled")
				}
				n.send(a.RunID, errorOf(seq+1, wire.Cancelled))
				synctest.Wait()
				if r.how(a.Slot) != pool.ByTerminal {
					t.Fatal("a stuck caller holds the slot")
				}
				close(w.block)
				wantClass(t, p.wait(), wire.Protocol)
			})
		})
	}
}

// A message may be large where its body is not; what it keeps alive counts.
//
// Contract: J7 Z5
func TestUnreadMessagesAreBoundedByTheirSize(t *testing.T) {
	inBubble(t, Config{}, func(t *testing.T, r *rig) {
		n := r.node("n", 1)
		a := r.attempt(n, "{}")
		w := answer{block: make(chan struct{}), blocked: make(chan struct{}, 1)}
		p := r.do(t.Context(), a, &w)
		<-n.requests
		n.send(a.RunID, frameOf(1, start, ""), frameOf(2, body, "x"))
		<-w.blocked
		s := r.d.table.get(a.RunID, r.d.table.hash(a.RunID))
		junk := map[string]string{"k": strings.Repeat("x", 200<<10)}
		for seq := uint64(3); seq < 200; seq++ {
			f := frameOf(seq, usage, "")
			f.Metadata = junk
			n.send(a.RunID, f)
		}
		synctest.Wait()
		s.mu.Lock()
		unread := s.unread
		s.mu.Unlock()
		if unread > wire.MaxWindow+inboxSlack || n.count(subjects.Cancel, a.RunID) != 1 {
			t.Fatalf("%d bytes are kept", unread)
		}
		n.send(a.RunID, errorOf(200, wire.Cancelled))
		close(w.block)
		wantClass(t, p.wait(), wire.Protocol)
	})
}

// A gap that nobody repairs ends the attempt.
//
// Contract: J2 T3
func TestA64GapThatStaysEndsTheAttempt(t *testing.T) {
	inBubble(t, Config{}, func(t *testing.T, r *rig) {
		n := r.node("n", 1)
		a := r.attempt(n, "{}")
		p := r.do(t.Context(), a, &answer{})
		<-n.requests
		n.send(a.RunID, frameOf(1, start, ""), frameOf(3, body, "c"))
		synctest.Wait()
		if e := n.ack(a.RunID); e.GetAcked() != 1 || !e.GetResend() {
			t.Fatalf("the gap is not asked for at once: %v", e)
		}
		pass(silenceBound - time.Millisecond)
		if p.isDone() {
			t.Fatal("too early")
		}
		pass(time.Millisecond)
		wantClass(t, p.wait(), wire.Protocol)
		n.send(a.RunID, frameOf(2, body, "b"), errorOf(3, wire.Cancelled))
	})
}

// One that is repaired in time ends nothing.
func TestGapThatIsRepaired(t *testing.T) {
	inBubble(t, Config{}, func(t *testing.T, r *rig) {
		n := r.node("n", 1)
		a := r.attempt(n, "{}")
		var w answer
		p := r.do(t.Context(), a, &w)
		<-n.requests
		n.send(a.RunID, frameOf(1, start, ""), frameOf(3, end, "c"))
		pass(silenceBound - time.Second)
		n.send(a.RunID, frameOf(2, body, "b"))
		pass(silenceBound)
		n.send(a.RunID, frameOf(3, end, "c"))
		wantClass(t, p.wait(), "")
		if w.text() != "bc" {
			t.Fatal(w.text())
		}
	})
}

// A Node that goes on breaking rules loses its session, said once; another's
// streams are not touched.
//
// Contract: J8 Z5
func TestGoingOnLosesTheSession(t *testing.T) {
	inBubble(t, Config{}, func(t *testing.T, r *rig) {
		n, good := r.node("n", 4), r.node("good", 5)
		a := r.attempt(good, "{}")
		p := r.do(t.Context(), a, &answer{})
		<-good.requests
		for i := range 3 * patience {
			n.send(a.RunID, whole("foreign")) // a run of another node
			synctest.Wait()
			if got := len(r.misbehaved); (i+1 >= patience) != (got == 1) {
				t.Fatalf("after %d: %v", i+1, r.misbehaved)
			}
		}
		if r.misbehaved[0] != "n/4/foreign" || p.isDone() {
			t.Fatal(r.misbehaved)
		}
		good.send(a.RunID, whole("x"))
		wantClass(t, p.wait(), "")
	})
}

// Contract: J3
func TestFinishedTerminalsAreAcknowledgedAgainAndUnknownIdsReset(t *testing.T) {
	inBubble(t, Config{}, func(t *testing.T, r *rig) {
		n := r.node("n", 1)
		a := r.attempt(n, "{}")
		p := r.do(t.Context(), a, &answer{})
		<-n.requests
		n.send(a.RunID, frameOf(1, start, ""), frameOf(2, end, ""))
		wantClass(t, p.wait(), "")
		pass(time.Second)
		n.mu.Lock()
		delete(n.acks, a.RunID) // that message was lost
		n.mu.Unlock()
		n.send(a.RunID, frameOf(2, end, ""))
		unknown := wire.NewRunID()
		n.send(unknown, frameOf(1, start, ""))
		pass(time.Second)
		if e := n.ack(a.RunID); e.GetAcked() != 2 || e.GetReset_() {
			t.Fatalf("%v", e)
		}
		if e := n.ack(unknown); !e.GetReset_() {
			t.Fatalf("%v", e)
		}
		// A new sequence after the terminal is a breach.
		n.send(a.RunID, frameOf(3, body, "x"))
		synctest.Wait()
		if got := counter(t, r, "iop_edge_stream_breaches_total", "late"); got != 1 {
			t.Fatal(got)
		}
	})
}

// A flood of unknown ids costs Edge a bounded answer and the Node its session.
//
// Contract: J8 Z5
func TestFloodOfUnknownIds(t *testing.T) {
	inBubble(t, Config{}, func(t *testing.T, r *rig) {
		n := r.node("n", 1)
		data, _ := frameOf(1, start, "").MarshalVT()
		for range 10 {
			for range 10_000 {
				r.d.Frame(subjects.Message{Session: n.id, Verb: subjects.Frame, Run: wire.NewRunID()}, data)
			}
			synctest.Wait()
		}
		pass(time.Second)
		n.mu.Lock()
		acks, msgs := len(n.acks), n.ackMsgs
		n.mu.Unlock()
		if acks > 10*maxStrays || msgs > 10*maxStrays/ackEntries+10 {
			t.Fatalf("%d answers in %d messages", acks, msgs)
		}
		if len(r.misbehaved) != 1 {
			t.Fatal(r.misbehaved)
		}
	})
}

// Contract: J7 U3
func TestSlowCallerStallsOnlyItsOwnStream(t *testing.T) {
	inBubble(t, Config{}, func(t *testing.T, r *rig) {
		n := r.node("n", 1)
		a, b := r.attempt(n, "{}"), r.attempt(n, "{}")
		w := answer{block: make(chan struct{}), blocked: make(chan struct{}, 1)}
		pa := r.do(t.Context(), a, &w)
		<-n.requests
		n.send(a.RunID, frameOf(1, start, ""), frameOf(2, body, "x"), frameOf(3, body, "y"))
		<-w.blocked
		pb := r.do(t.Context(), b, &answer{})
		<-n.requests
		n.send(b.RunID, whole("z"))
		wantClass(t, pb.wait(), "")
		pass(time.Minute)
		// What lies unread is acknowledged: the Node has no reason to give up.
		if e := n.ack(a.RunID); e.GetAcked() != 3 || pa.isDone() {
			t.Fatalf("%v", e)
		}
		n.send(a.RunID, frameOf(4, end, ""))
		synctest.Wait()
		if r.how(a.Slot) != pool.ByTerminal {
			t.Fatal("a slow caller keeps the slot of a finished attempt")
		}
		close(w.block)
		wantClass(t, pa.wait(), "")
		if w.text() != "xy" {
			t.Fatal(w.text())
		}
	})
}

// Near the bound of all windows, new ones shrink.
//
// Contract: J7
func TestWindowsShrinkNearTheBound(t *testing.T) {
	inBubble(t, Config{StreamMemory: 16 << 20, CancelBound: time.Second}, func(t *testing.T, r *rig) {
		n := r.node("n", 1)
		ctx, cancel := context.WithCancel(t.Context())
		var all []*pending
		last := uint64(wire.MaxWindow)
		for i := range 60 {
			all = append(all, r.do(ctx, r.attempt(n, "{}"), &answer{}))
			req := <-n.requests
			s := r.d.table.get(req.RunId, r.d.table.hash(req.RunId))
			if s.window > last || req.Credit > wire.MinWindow || req.Credit < 2*tunnel.MaxCost {
				t.Fatalf("stream %d: window %d, credit %d", i, s.window, req.Credit)
			}
			last = s.window
		}
		if last != 2*tunnel.MaxCost {
			t.Fatalf("the last window is %d", last)
		}
		cancel()
		for _, p := range all {
			p.wait()
		}
		pass(time.Minute)
		if got := r.d.reserved.Load(); got != 0 || r.d.Open() != 0 {
			t.Fatalf("%d bytes are reserved for nobody", got)
		}
	})
}

// 1,000 cancelled streams of a silent provider leave nothing behind; goleak
// watches the goroutines.
func TestA61CancelledStreamsOfASilentNode(t *testing.T) {
	inBubble(t, Config{}, func(t *testing.T, r *rig) {
		n := r.node("n", 1)
		ctx, cancel := context.WithCancel(t.Context())
		var all []*pending
		for range 1000 {
			all = append(all, r.do(ctx, r.attempt(n, "{}"), &answer{}))
		}
		synctest.Wait()
		cancel()
		for _, p := range all {
			wantClass(t, p.wait(), wire.Cancelled)
		}
		synctest.Wait()
		if len(n.cancels) != 1000 {
			t.Fatalf("%d cancels", len(n.cancels))
		}
		pass(wire.CancelBound)
		if r.d.Open() != 0 || len(n.cancels) != 6000 || len(r.returned()) != 1000 {
			t.Fatalf("%d open, %d cancels", r.d.Open(), len(n.cancels))
		}
		pass(cancelAgain)
		if len(r.d.bounds) != 0 || len(r.d.repeats) != 0 || len(r.d.table.bySlot) != 0 {
			t.Fatal("something is remembered")
		}
	})
}

// A caller leaves while the Node is in the middle of sending: what is on its way
// is dropped and granted anew, so the Node comes to its terminal.
func TestA62CancelWhileTheNodeSends(t *testing.T) {
	inBubble(t, Config{}, func(t *testing.T, r *rig) {
		n := r.node("n", 1)
		a := r.attempt(n, "{}")
		w := answer{block: make(chan struct{}), blocked: make(chan struct{}, 1)}
		ctx, cancel := context.WithCancel(t.Context())
		p := r.do(ctx, a, &w)
		<-n.requests
		n.send(a.RunID, frameOf(1, start, ""))
		chunk := strings.Repeat("x", 32<<10)
		for seq := uint64(2); seq < 8; seq++ {
			n.send(a.RunID, frameOf(seq, body, chunk))
		}
		<-w.blocked
		cancel()
		close(w.block)
		wantClass(t, p.wait(), wire.Cancelled)
		pass(time.Second)
		e := n.ack(a.RunID)
		if e.GetAcked() != 7 || e.GetCredit() <= wire.MinWindow {
			t.Fatalf("%v", e)
		}
		// What comes now is dropped on arrival, and granted anew as well.
		for seq := uint64(8); seq < 14; seq++ {
			n.send(a.RunID, frameOf(seq, body, chunk))
		}
		pass(time.Second)
		if later := n.ack(a.RunID); later.GetAcked() != 13 || later.GetCredit() <= e.GetCredit() {
			t.Fatalf("%v", later)
		}
		n.send(a.RunID, errorOf(14, wire.Cancelled))
		synctest.Wait()
		if r.how(a.Slot) != pool.ByTerminal {
			t.Fatal(r.how(a.Slot))
		}
	})
}

// counter reads a metric of the registry, by its one label's value.
func counter(t testing.TB, r *rig, name, label string) float64 {
	t.Helper()
	all, err := r.reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, mf := range all {
		if mf.GetName() != name {
			continue
		}
		for _, m := range mf.GetMetric() {
			if len(m.GetLabel()) == 0 || m.GetLabel()[0].GetValue() == label {
				return m.GetCounter().GetValue()
			}
		}
	}
	t.Fatalf("no metric %s{%s}", name, label)
	return 0
}

// An idle stream of ours is small.
//
// Contract: J7
func TestIdleStreamIsAtMost4KiB(t *testing.T) {
	inBubble(t, Config{}, func(t *testing.T, r *rig) {
		n := r.node("n", 1)
		const streams = 2000
		ctx, cancel := context.WithCancel(t.Context())
		attempts := make([]Attempt, streams)
		waits := make([]*pending, streams)
		ws := make([]answer, streams)
		for i := range attempts {
			attempts[i] = r.attempt(n, "{}")
		}
		var before, after runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&before)
		for i, a := range attempts {
			waits[i] = r.do(ctx, a, &ws[i])
			<-n.requests
		}
		for _, a := range attempts {
			n.send(a.RunID, frameOf(1, start, ""))
		}
		pass(time.Second)
		runtime.GC()
		runtime.ReadMemStats(&after)
		heap := (int64(after.HeapAlloc) - int64(before.HeapAlloc)) / streams
		stack := (int64(after.StackInuse) - int64(before.StackInuse)) / streams
		t.Logf("heap %d bytes a stream, stack (the caller's goroutine, net/http's in the product) %d", heap, stack)
		if heap > 4<<10 {
			t.Fatalf("%d bytes a stream", heap)
		}
		cancel()
		for i, p := range waits {
			p.wait()
			n.send(attempts[i].RunID, errorOf(2, wire.Cancelled))
		}
	})
}

// FuzzFrame: whatever bytes a Node sends, nothing panics and the slot comes back.
//
// Contract: J8 V1
func FuzzFrame(f *testing.F) {
	add := func(fs ...*iopv1.ProviderTunnelFrame) {
		var b bytes.Buffer
		for _, x := range fs {
			data, _ := x.MarshalVT()
			b.WriteByte(byte(len(data)))
			b.Write(data)
		}
		f.Add(b.Bytes())
	}
	add(whole("x"))
	add(frameOf(1, start, ""), frameOf(2, body, "x"), frameOf(3, end, ""))
	add(frameOf(1, start, ""), frameOf(3, body, "x"), frameOf(1, start, "y"))
	add(errorOf(1, wire.Provider))
	f.Fuzz(func(t *testing.T, script []byte) {
		inBubble(t, Config{}, func(t *testing.T, r *rig) {
			n := r.node("n", 1)
			a := r.attempt(n, "{}")
			ctx, cancel := context.WithCancel(t.Context())
			p := r.do(ctx, a, &answer{})
			<-n.requests
			for len(script) > 0 {
				size := min(int(script[0]), len(script)-1)
				n.raw(a.RunID, script[1:1+size])
				if size%3 == 0 {
					_ = n.conn.Publish(n.id.Up(subjects.Ack, ""), script[1:1+size])
				}
				script = script[1+size:]
			}
			synctest.Wait()
			cancel()
			p.wait()
			pass(wire.CancelBound)
			if len(r.returned()) != 1 || r.d.Open() != 0 {
				t.Fatal("the slot is lost")
			}
		})
	})
}

// flood sends frames of a run, as fast as the callback takes them.
func (n *fakeNode) flood(run string, count int, f *iopv1.ProviderTunnelFrame) {
	data, _ := f.MarshalVT()
	for range count {
		n.r.d.Frame(subjects.Message{Session: n.id, Verb: subjects.Frame, Run: run}, data)
	}
}

// A Node that broke a stream and goes on sending in it loses its session, however
// large or small the frames; its neighbour's streams are not touched.
//
// Contract: J8
func TestFloodOfABrokenStream(t *testing.T) {
	for name, size := range map[string]int{"small frames": 1, "large frames": wire.MaxBody} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, Config{}, func(t *testing.T, r *rig) {
				n, good := r.node("n", 4), r.node("good", 5)
				a, other := r.attempt(n, "{}"), r.attempt(good, "{}")
				p, po := r.do(t.Context(), a, &answer{}), r.do(t.Context(), other, &answer{})
				<-n.requests
				<-good.requests
				n.send(a.RunID, frameOf(1, body, "x")) // no start
				wantClass(t, p.wait(), wire.Protocol)
				f := frameOf(2, body, strings.Repeat("x", size))
				// No more than was granted can have been on its way: a few more, and it is over.
				n.flood(a.RunID, 2*wire.MinWindow/(size+wire.FrameOverhead)+patience, f)
				synctest.Wait()
				if len(r.misbehaved) != 1 || r.misbehaved[0] != "n/4/going_on" {
					t.Fatal(r.misbehaved)
				}
				n.flood(a.RunID, 1000, f)
				good.send(other.RunID, whole("y"))
				wantClass(t, po.wait(), "")
				if len(r.misbehaved) != 1 {
					t.Fatal(r.misbehaved)
				}
			})
		})
	}
}

// What was on its way when a stream broke is no further offence, nor what comes
// again after a lost connection, nor all a Node still sends after a cancel.
func TestFramesInFlightAreNoOffence(t *testing.T) {
	inBubble(t, Config{}, func(t *testing.T, r *rig) {
		n := r.node("n", 1)
		granted := wire.MinWindow / (1 + wire.FrameOverhead)
		window := wire.MaxWindow/(1+2*wire.FrameOverhead) - 1
		for range patience - 2 { // each is one severe offence, and no more
			a := r.attempt(n, "{}")
			p := r.do(t.Context(), a, &answer{})
			<-n.requests
			n.send(a.RunID, frameOf(1, body, "x"))
			wantClass(t, p.wait(), wire.Protocol)
			n.flood(a.RunID, granted, frameOf(2, body, "x"))
			r.d.resume()
			n.flood(a.RunID, window, frameOf(2, body, "x"))
			n.send(a.RunID, errorOf(3, wire.Cancelled))
			synctest.Wait()
		}
		if got := counter(t, r, "iop_edge_stream_breaches_total", breachGoingOn.String()); got != 0 || len(r.misbehaved) != 0 {
			t.Fatalf("%v offences, %v", got, r.misbehaved)
		}
		for range 4 * patience {
			a := r.attempt(n, "{}")
			ctx, cancel := context.WithCancel(t.Context())
			p := r.do(ctx, a, &answer{})
			<-n.requests
			n.send(a.RunID, frameOf(1, start, ""))
			synctest.Wait()
			cancel()
			wantClass(t, p.wait(), wire.Cancelled)
			for seq := uint64(2); seq < 1000; seq++ {
				n.send(a.RunID, frameOf(seq, body, "x"))
			}
			n.send(a.RunID, errorOf(1000, wire.Cancelled))
			synctest.Wait()
		}
		if len(r.misbehaved) != 0 {
			t.Fatal(r.misbehaved)
		}
	})
}

// acksOf makes one message of acknowledgements.
func acksOf(runs ...string) []byte {
	var msg iopv1.StreamAck
	for _, run := range runs {
		msg.Entries = append(msg.Entries, &iopv1.StreamAck_Entry{RunId: run, Direction: "body", Acked: 1})
	}
	data, _ := msg.MarshalVT()
	return data
}

// Acknowledgements of runs that nobody knows cost a Node its session once they are
// many, and its neighbour nothing.
//
// Contract: J8
func TestFloodOfAcksOfUnknownRuns(t *testing.T) {
	inBubble(t, Config{}, func(t *testing.T, r *rig) {
		n, good := r.node("n", 4), r.node("good", 5)
		other := r.attempt(good, "{}")
		p := r.do(t.Context(), other, &answer{})
		<-good.requests
		const each = 1500
		var runs []string
		for range each {
			runs = append(runs, wire.NewRunID())
		}
		data := acksOf(runs...)
		most := int(patience / strangeAck)
		for i := 1; i <= 2*most/each; i++ {
			r.d.Ack(subjects.Message{Session: n.id, Verb: subjects.Ack}, data)
			if lost := len(r.misbehaved) == 1; lost != (i*each >= most) {
				t.Fatalf("after %d: %v", i*each, r.misbehaved)
			}
		}
		if r.misbehaved[0] != "n/4/ack" {
			t.Fatal(r.misbehaved)
		}
		good.send(other.RunID, whole("y"))
		wantClass(t, p.wait(), "")
		// A session that was replaced offends nobody.
		old := good.id
		old.Gen--
		for range 2 * most / each {
			r.d.Ack(subjects.Message{Session: old, Verb: subjects.Ack}, data)
		}
		if len(r.misbehaved) != 1 {
			t.Fatal(r.misbehaved)
		}
	})
}

// Acknowledgements that come after the end of a run are no offence of its Node,
// in any number of runs; of one run they are, without end, and another's always.
func TestLateAcksAreNoOffence(t *testing.T) {
	inBubble(t, Config{}, func(t *testing.T, r *rig) {
		n, stranger := r.node("n", 1), r.node("stranger", 2)
		var last string
		for range 500 {
			a := r.attempt(n, "{}")
			p := r.do(t.Context(), a, &answer{})
			<-n.requests
			n.send(a.RunID, whole("x"))
			wantClass(t, p.wait(), "")
			for range lateAcks {
				r.d.Ack(subjects.Message{Session: n.id, Verb: subjects.Ack}, acksOf(a.RunID))
			}
			last = a.RunID
		}
		unknown := func() float64 { return counter(t, r, "iop_edge_frames_dropped_total", dropUnknown) }
		if got := unknown(); got != 0 || len(r.misbehaved) != 0 {
			t.Fatalf("%v counted, %v", got, r.misbehaved)
		}
		r.d.Ack(subjects.Message{Session: n.id, Verb: subjects.Ack}, acksOf(last))
		r.d.Ack(subjects.Message{Session: stranger.id, Verb: subjects.Ack}, acksOf(last))
		if got := unknown(); got != 2 {
			t.Fatalf("%v counted", got)
		}
	})
}

// A session that is fenced while its Node goes on talking is found whole, or made for
// the moment; the race detector watches.
//
// Contract: J8 F5
func TestFenceWhileTheNodeTalks(t *testing.T) {
	s := seats{byID: map[string]*seat{}}
	over := make(chan uint64)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for gen := range over {
			s.fence("n", gen)
		}
	}()
	for gen := uint64(1); gen < 5000; gen++ {
		id := subjects.Session{Edge: "e", Node: "n", Gen: gen}
		s.session(id)
		over <- gen
		for range 20 {
			if s.session(id) == nil {
				t.Fatal("no session")
			}
		}
	}
	close(over)
	<-done
}

// pour sends one message of a run again and again until the session is lost, and says
// how many it took; most is too many.
func (n *fakeNode) pour(t *testing.T, most int, next func(i int) (run string, f *iopv1.ProviderTunnelFrame)) int {
	t.Helper()
	for i := range most {
		run, f := next(i)
		n.flood(run, 1, f)
		if len(n.r.misbehaved) > 0 {
			return i + 1
		}
	}
	t.Fatalf("after %d: it has its session", most)
	return 0
}

// What a Node may say in each way there is before its session is over, and that nothing
// is looked at after that: no decoding, no answer, no offence.
//
// Contract: J8 Z5
func TestFloodsAreShort(t *testing.T) {
	broken := func(t *testing.T, r *rig, n *fakeNode) string { // a stream without its start
		a := r.attempt(n, "{}")
		p := r.do(t.Context(), a, &answer{})
		<-n.requests
		n.send(a.RunID, frameOf(1, body, "x"))
		wantClass(t, p.wait(), wire.Protocol)
		return a.RunID
	}
	open := func(t *testing.T, r *rig, n *fakeNode) string {
		a := r.attempt(n, "{}")
		r.do(t.Context(), a, &answer{})
		<-n.requests
		n.send(a.RunID, frameOf(1, start, ""))
		synctest.Wait()
		return a.RunID
	}
	const (
		granted = (wire.MinWindow*5/4 + tunnel.TerminalReserve) / wire.FrameOverhead
		wasted  = wasteWindows * wire.MinWindow / wire.FrameOverhead
	)
	for name, c := range map[string]struct {
		run  func(t *testing.T, r *rig, n *fakeNode) string
		next func(run string, i int) (string, *iopv1.ProviderTunnelFrame)
		most int // of the smallest frames
		why  breach
	}{
		"in a stream it broke": {broken, func(run string, _ int) (string, *iopv1.ProviderTunnelFrame) {
			return run, frameOf(2, body, "x")
		}, granted + patience, breachGoingOn},
		"over credit": {broken, func(run string, i int) (string, *iopv1.ProviderTunnelFrame) {
			return run, frameOf(uint64(2+i), body, "x")
		}, granted + patience, breachGoingOn},
		"the same again": {open, func(run string, _ int) (string, *iopv1.ProviderTunnelFrame) {
			return run, frameOf(1, start, "")
		}, wasted + 2*granted + patience, breachGoingOn},
		"behind a gap": {open, func(run string, _ int) (string, *iopv1.ProviderTunnelFrame) {
			return run, frameOf(3, body, "x")
		}, wasted + 2*granted + patience, breachGoingOn},
		"of runs nobody knows": {nil, func(string, int) (string, *iopv1.ProviderTunnelFrame) {
			return wire.NewRunID(), frameOf(1, start, "")
		}, patience / strange, breachUnknown},
		"a terminal without end": {func(t *testing.T, r *rig, n *fakeNode) string {
			run := open(t, r, n)
			n.send(run, frameOf(2, end, ""))
			synctest.Wait()
			return run
		}, func(run string, _ int) (string, *iopv1.ProviderTunnelFrame) {
			return run, frameOf(2, end, "")
		}, lateFrames + patience, breachLate},
		"after a cancel it did not answer": {func(t *testing.T, r *rig, n *fakeNode) string {
			a := r.attempt(n, "{}")
			ctx, cancel := context.WithCancel(t.Context())
			p := r.do(ctx, a, &answer{})
			<-n.requests
			cancel()
			p.wait()
			pass(wire.CancelBound)
			return a.RunID
		}, func(run string, i int) (string, *iopv1.ProviderTunnelFrame) {
			return run, frameOf(uint64(1+i), body, "x")
		}, lateFrames + patience, breachLate},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, Config{}, func(t *testing.T, r *rig) {
				n := r.node("n", 4)
				run := ""
				if c.run != nil {
					run = c.run(t, r, n)
				}
				got := n.pour(t, c.most, func(i int) (string, *iopv1.ProviderTunnelFrame) { return c.next(run, i) })
				if r.misbehaved[0] != "n/4/"+c.why.String() {
					t.Error(r.misbehaved)
				}
				t.Logf("%d messages of at most %d", got, c.most)
				pass(time.Second)
				before := counter(t, r, "iop_edge_stream_breaches_total", c.why.String())
				n.mu.Lock()
				answers := n.ackMsgs
				n.mu.Unlock()
				for i := range 1000 {
					run, f := c.next(run, got+i)
					n.flood(run, 1, f)
				}
				pass(time.Second)
				n.mu.Lock()
				defer n.mu.Unlock()
				if after := counter(t, r, "iop_edge_stream_breaches_total", c.why.String()); after != before || n.ackMsgs != answers {
					t.Errorf("%v breaches and %d answers more, of a session that is lost", after-before, n.ackMsgs-answers)
				}
			})
		})
	}
}

// Acknowledgements that are nothing in themselves cost a session its patience where
// they are more than any session can have reason for.
//
// Contract: J8
func TestFloodOfEmptyAcks(t *testing.T) {
	inBubble(t, Config{}, func(t *testing.T, r *rig) {
		n := r.node("n", 4)
		data, _ := (&iopv1.StreamAck{Entries: []*iopv1.StreamAck_Entry{{RunId: wire.NewRunID(), Direction: "sideways"}}}).MarshalVT()
		say := func() { r.d.Ack(subjects.Message{Session: n.id, Verb: subjects.Ack}, data) }
		for range 3 {
			for range emptyPerSecond {
				say()
			}
			pass(time.Second)
		}
		if len(r.misbehaved) != 0 {
			t.Fatal(r.misbehaved)
		}
		for range emptyPerSecond + int(patience/hastyAck) {
			say()
		}
		if len(r.misbehaved) != 1 || r.misbehaved[0] != "n/4/ack" {
			t.Fatal(r.misbehaved)
		}
	})
}
