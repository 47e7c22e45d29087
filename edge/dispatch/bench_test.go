package dispatch

import (
	"runtime"
	"strings"
	"testing"

	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/wire"
	"github.com/iop-fabric/iop/wire/iopv1"
)

type sink struct{ n int }

func (s *sink) Start(int, []*iopv1.Header) error { return nil }
func (s *sink) Body(p []byte) error              { s.n += len(p); return nil }
func (s *sink) Flush() error                     { return nil }
func (s *sink) Trailer([]*iopv1.Header) error    { return nil }

func benchRig(b *testing.B) (*rig, *fakeNode) {
	r := newRig(b, Config{})
	n := r.node("n", 1)
	go func() {
		for range n.requests {
		}
	}()
	b.Cleanup(func() { r.close(); close(n.requests) })
	return r, n
}

func benchAttempt(r *rig, n *fakeNode) Attempt {
	return r.attempt(n, `{"model":"m","messages":[{"role":"user","content":"hello"}]}`)
}

// One caller, one small answer in one message.
func BenchmarkSmallAnswer(b *testing.B) {
	r, n := benchRig(b)
	f := whole(strings.Repeat("x", 300))
	f.Headers = []*iopv1.Header{{Name: "Content-Type", Value: []byte("application/json")}, {Name: "Date", Value: []byte("now")}}
	data, _ := f.MarshalVT()
	n.mu.Lock()
	n.serve = func(m subjects.Message, _ []byte) {
		if m.Verb == subjects.Tunnel {
			n.raw(m.Run, data)
		}
	}
	n.mu.Unlock()
	b.ReportAllocs()
	for b.Loop() {
		if res := r.d.Do(b.Context(), benchAttempt(r, n), &sink{}); res.Err != nil {
			b.Fatal(res.Err)
		}
	}
}

// Frames as fast as they come into one stream, without the bus: what Edge's
// half costs for each.
func benchFrames(b *testing.B, size int) {
	r, n := benchRig(b)
	a := benchAttempt(r, n)
	got := make(chan subjects.Message, 1)
	n.mu.Lock()
	n.serve = func(m subjects.Message, _ []byte) {
		if m.Verb == subjects.Tunnel {
			got <- m
		}
	}
	n.mu.Unlock()
	s := &sink{}
	p := r.do(b.Context(), a, s)
	m := <-got
	m.Verb = subjects.Frame
	data, _ := frameOf(1, start, "").MarshalVT()
	r.d.Frame(m, data)
	st := r.d.table.get(a.RunID, r.d.table.hash(a.RunID))
	msg := frameOf(0, body, strings.Repeat("x", size))
	seq, cost := uint64(1), uint64(wire.FrameOverhead)
	b.ReportAllocs()
	b.SetBytes(int64(size))
	for b.Loop() {
		seq++
		cost += uint64(size + wire.FrameOverhead)
		for {
			// Credit as a Node sees it.
			st.mu.Lock()
			room := cost <= st.recv.Ack().Credit
			st.mu.Unlock()
			if room {
				break
			}
			runtime.Gosched()
		}
		msg.Sequence = seq
		data, _ := msg.MarshalVT()
		r.d.Frame(m, data)
	}
	data, _ = frameOf(seq+1, end, "").MarshalVT()
	r.d.Frame(m, data)
	if res := p.wait(); res.Err != nil {
		b.Fatal(res.Err)
	}
}

func BenchmarkFrames64KiB(b *testing.B) { benchFrames(b, wire.MaxBody) }
func BenchmarkFrames200B(b *testing.B)  { benchFrames(b, 200) }
