package pool

import (
	"fmt"
	"runtime"
	"testing"
	"time"
)

// benchPool has one model on two nodes of 8 places each.
func benchPool(weights map[string]int) *Pool {
	p := New()
	cfg := Config{Queue: Queue{Weights: weights, Depth: 1 << 20, Total: 1 << 20}}
	g := Group{Name: "m"}
	for i := range 2 {
		node := fmt.Sprintf("n%d", i)
		cfg.Adapters = append(cfg.Adapters, Adapter{Node: node, Name: "a", Capacity: 8})
		cfg.Providers = append(cfg.Providers, Provider{Node: node, Adapter: "a", Target: "m"})
		g.Candidates = append(g.Candidates, Candidate{Provider: TargetID(node, "a", "m")})
	}
	cfg.Groups = []Group{g}
	p.Step(epoch, SetConfig(cfg), nil)
	for i := range 2 {
		p.Step(epoch, Activate(fmt.Sprintf("n%d", i), uint64(i+1)), nil)
	}
	return p
}

func BenchmarkUncontended(b *testing.B) {
	p := benchPool(nil)
	r := &Request{Model: "m", Principal: "alice", Operation: "chat_completions"}
	var out []Effect
	b.ReportAllocs()
	for b.Loop() {
		r.Waiter++
		out = p.Step(epoch, Enqueue(r), out[:0])
		out = p.Step(epoch, ReturnSlot(out[0].Slot.ID, ByTerminal), out[:0])
	}
}

// One request joins at the end of a queue and one slot comes back, which goes to
// the front, while n others wait.
func BenchmarkQueued(b *testing.B) {
	for _, n := range []int{0, 10_000} {
		for _, principals := range []int{1, 1000} {
			b.Run(fmt.Sprintf("waiting=%d/principals=%d", n, principals), func(b *testing.B) {
				p := benchPool(nil)
				names := make([]string, principals)
				for i := range names {
					names[i] = fmt.Sprintf("principal-%d", i)
				}
				r := &Request{Model: "m", Operation: "chat_completions"}
				var (
					out  []Effect
					busy []uint64 // the slots in use, oldest first
				)
				add := func() {
					r.Waiter++
					r.Principal = names[int(r.Waiter)%principals]
					out = p.Step(epoch, Enqueue(r), out[:0])
				}
				for range n + 16 {
					add()
					if len(out) > 0 {
						busy = append(busy, out[0].Slot.ID)
					}
				}
				next := 0
				b.ReportAllocs()
				for b.Loop() {
					add()
					out = p.Step(epoch, ReturnSlot(busy[next], ByTerminal), out[:0])
					busy[next] = out[1].Slot.ID
					next = (next + 1) % len(busy)
				}
			})
		}
	}
}

func BenchmarkCancel(b *testing.B) {
	p := benchPool(nil)
	r := &Request{Model: "m", Principal: "alice"}
	for range 10_016 {
		r.Waiter++
		p.Step(epoch, Enqueue(r), nil)
	}
	gone := WaiterID(5000)
	b.ReportAllocs()
	for b.Loop() {
		r.Waiter++
		gone++
		p.Step(epoch, Enqueue(r), nil)
		p.Step(epoch, CancelWaiter(gone), nil)
	}
}

// The state of one waiting request is at most 1 KiB.
func TestMemoryPerWaiter(t *testing.T) {
	p := benchPool(nil)
	const n = 10_000
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	for i := range n + 16 {
		p.Step(epoch, Enqueue(&Request{
			Waiter: WaiterID(i), Model: "m", Principal: "alice", Operation: "chat_completions", MaxWait: time.Minute,
		}), nil)
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	each := (int64(after.HeapAlloc) - int64(before.HeapAlloc)) / n
	t.Logf("%d bytes per waiting request", each)
	if each > 1024 {
		t.Errorf("a waiting request holds %d bytes", each)
	}
	runtime.KeepAlive(p)
}

// The path of a request that finds a place at once allocates nothing in the pool.
func TestUncontendedAllocatesNothing(t *testing.T) {
	p := benchPool(nil)
	r := &Request{Model: "m", Principal: "alice", Operation: "chat_completions"}
	out := make([]Effect, 0, 4)
	got := testing.AllocsPerRun(1000, func() {
		r.Waiter++
		out = p.Step(epoch, Enqueue(r), out[:0])
		out = p.Step(epoch, ReturnSlot(out[0].Slot.ID, ByTerminal), out[:0])
	})
	if got > 0 {
		t.Errorf("%v allocations", got)
	}
}
