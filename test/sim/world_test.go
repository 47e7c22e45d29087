package sim

import (
	"container/heap"
	"context"
	"fmt"
	"hash/fnv"
	"io"
	"iter"
	"math/rand/v2"
	"slices"
	"strconv"
	"time"

	"github.com/iop-fabric/iop/internal/history"
)

// epoch is when every world begins.
var epoch = time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)

// world is one fabric in virtual time: one heap of what will happen, one thing at a
// time, all of it drawn from the seed. Each purpose draws from a stream of its own, so
// that a change of one leaves the others' draws as they are.
type world struct {
	seed  uint64
	now   time.Time
	order uint64
	queue events
	same  int // steps without time passing

	plan, net, sched, fault, provide, call *rand.Rand

	broker   *server
	edge     *edge
	nodes    []*nodeProc
	requests []*request
	attempts map[string]*request // by run id
	tasks    []*task
	current  *task
	starting *nodeProc // whose message or round begins exchanges

	checker *history.Checker
	hash    uint64
	trace   io.Writer           // nil: none
	record  func(history.Event) // nil: nobody wants the events

	swarm    swarm
	stubborn bool          // a provider hangs until the calm
	patience time.Duration // the longest wait for a place; 0: the product's
	uploads  bool          // every request has a large body, read slowly
	resting  bool          // something was skipped
	lazy     float64       // how often a part that was woken does not run at once
	quietAt  time.Time     // the last fault is over
	probed   bool
	quiet    bool // nothing is recorded any more
	counts   counts
}

// counts are what the world saw beside the history.
type counts struct{ steps, messages, lost, duplicated, late int64 }

// happening is one entry of the heap.
type happening struct {
	at    time.Time
	order uint64
	do    func()
}

type events []happening

func (q events) Len() int { return len(q) }
func (q events) Less(i, j int) bool {
	return q[i].at.Before(q[j].at) || q[i].at.Equal(q[j].at) && q[i].order < q[j].order
}
func (q events) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q *events) Push(x any)   { *q = append(*q, x.(happening)) }
func (q *events) Pop() any {
	old := *q
	last := old[len(old)-1]
	old[len(old)-1] = happening{}
	*q = old[:len(old)-1]
	return last
}

func newWorld(seed uint64, trace io.Writer) *world {
	stream := func(purpose uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, purpose)) }
	w := &world{
		seed: seed, now: epoch, trace: trace, attempts: map[string]*request{},
		plan: stream(1), net: stream(2), sched: stream(3), fault: stream(4), provide: stream(5), call: stream(6),
		hash: fnvOffset,
	}
	return w
}

func (w *world) at(t time.Time, do func()) {
	w.order++
	heap.Push(&w.queue, happening{t, w.order, do})
}

func (w *world) after(d time.Duration, do func()) { w.at(w.now.Add(d), do) }

// Now, Start and Wait make the world what exchanges run on (node.Runner).
func (w *world) Now() time.Time { return w.now }

// task is an exchange: a coroutine that runs until it has to wait.
type task struct {
	node   *nodeProc
	resume func() (struct{}, bool)
	stop   func()
	yield  func(struct{}) bool
	ready  func() bool
}

// Start implements node.Runner.
func (w *world) Start(exchange func()) {
	t := &task{node: w.starting, ready: func() bool { return true }}
	t.resume, t.stop = iter.Pull(func(yield func(struct{}) bool) {
		t.yield = yield
		exchange()
	})
	w.tasks = append(w.tasks, t)
}

// park has the running exchange wait; false: the world is over.
func (w *world) park(ready func() bool) bool {
	t := w.current
	t.ready = ready
	return t.yield(struct{}{})
}

// Wait implements node.Runner. Where both are there, either may win.
func (w *world) Wait(ctx context.Context, ready <-chan struct{}) bool {
	w.park(func() bool { return len(ready) > 0 || ctx.Err() != nil })
	if len(ready) == 0 || (ctx.Err() != nil && w.sched.IntN(2) == 0) {
		return false
	}
	<-ready
	return true
}

// sleep is a provider's; stubborn ones do not hear that they are cancelled.
func (w *world) sleep(ctx context.Context, d time.Duration, stubborn bool) error {
	if d <= 0 {
		return nil
	}
	over := false
	w.after(d, func() { over = true })
	if !w.park(func() bool { return over || (!stubborn && ctx.Err() != nil) }) || (!over && ctx.Err() != nil) {
		return context.Cause(ctx)
	}
	return nil
}

// runTasks resumes what waits no more, and reports whether anything did.
func (w *world) runTasks() (any bool) {
	for i := 0; i < len(w.tasks); i++ {
		t := w.tasks[i]
		if t.node.paused || !t.ready() {
			continue
		}
		any = true
		w.current = t
		_, more := t.resume()
		w.current = nil
		if !more {
			t.stop()
			w.tasks = slices.Delete(w.tasks, i, i+1)
			i--
		}
	}
	return any
}

// event records, judges and hashes.
func (w *world) event(e history.Event) {
	if w.quiet {
		return
	}
	e.At = int64(w.now.Sub(epoch))
	w.checker.Add(e)
	if w.record != nil {
		w.record(e)
	}
	w.mix(uint64(e.At), e.Gen, e.Slot, e.Seq, uint64(e.N), uint64(e.Sum), uint64(e.Read)) //nolint:gosec // a hash
	for _, s := range []string{string(e.Kind), e.Req, e.Run, e.Node, e.Provider, string(e.Outcome), e.Class, e.How, e.Fault} {
		w.mixString(s)
	}
	if w.trace != nil {
		w.logf("%s %s", e.Kind, describe(e))
	}
}

func describe(e history.Event) string {
	s := ""
	add := func(name, v string) {
		if v != "" && v != "0" {
			s += name + "=" + v + " "
		}
	}
	add("req", e.Req)
	add("run", e.Run)
	add("node", e.Node)
	add("gen", strconv.FormatUint(e.Gen, 10))
	add("slot", strconv.FormatUint(e.Slot, 10))
	add("provider", e.Provider)
	add("seq", strconv.FormatUint(e.Seq, 10))
	add("n", strconv.FormatInt(e.N, 10))
	add("read", strconv.FormatInt(e.Read, 10))
	add("outcome", string(e.Outcome))
	add("class", e.Class)
	add("how", e.How)
	add("fault", e.Fault)
	return s
}

const (
	fnvOffset = 14695981039346656037
	fnvPrime  = 1099511628211
)

func (w *world) mix(vs ...uint64) {
	for _, v := range vs {
		w.hash = (w.hash ^ v) * fnvPrime
		w.hash ^= w.hash >> 29
	}
}

func (w *world) mixString(s string) {
	for i := 0; i < len(s); i++ {
		w.hash = (w.hash ^ uint64(s[i])) * fnvPrime
	}
	w.hash = (w.hash ^ 0xff) * fnvPrime
}

// logf writes to the trace.
func (w *world) logf(format string, args ...any) {
	if w.trace != nil {
		fmt.Fprintf(w.trace, "%12v  %s\n", w.now.Sub(epoch), fmt.Sprintf(format, args...))
	}
}

// maxSame is how many steps may take no time, before it is said that the world makes no way.
const maxSame = 200_000

// step lets the next thing happen; false: nothing is left before the end.
func (w *world) step(end time.Time) bool {
	next := end
	if len(w.queue) > 0 && w.queue[0].at.Before(next) {
		next = w.queue[0].at
	}
	next = earlier(next, w.deadline())
	if !next.Before(end) {
		return false
	}
	if next.After(w.now) {
		w.now, w.same = next, 0
	} else if w.same++; w.same > maxSame {
		panic("the world makes no way: something is due for ever")
	}
	w.counts.steps++
	if len(w.queue) > 0 && !w.queue[0].at.After(w.now) {
		h, _ := heap.Pop(&w.queue).(happening)
		h.do()
	} else {
		w.passDeadlines()
	}
	w.settle()
	return true
}

// deadline is the earliest of all parts; zero: there is none.
func (w *world) deadline() (at time.Time) {
	at = w.edge.deadline()
	for _, n := range w.nodes {
		at = earlier(at, n.deadline())
	}
	return at
}

func (w *world) passDeadlines() {
	w.edge.passDeadlines()
	for _, n := range w.nodes {
		n.passDeadlines()
	}
}

// settle lets all that was woken run until everything waits.
func (w *world) settle() {
	for i := 0; ; i++ {
		any := false
		parts := len(w.nodes) + 2
		from := w.sched.IntN(parts) // who runs first is the scheduler's affair
		for k := range parts {
			// And who runs soon: what is skipped runs at the next event, or a little later.
			if w.lazy > 0 && i == 0 && chance(w.sched, w.lazy) {
				if !w.resting {
					w.resting = true
					w.after(between(w.sched, 0, 3*time.Millisecond), func() { w.resting = false })
				}
				continue
			}
			switch part := (from + k) % parts; part {
			case 0:
				any = w.edge.settle() || any
			case 1:
				any = w.runTasks() || any
			default:
				any = w.nodes[part-2].settle() || any
			}
		}
		if !any {
			return
		}
		if i > maxSame {
			panic("the world does not settle")
		}
	}
}

// earlier is the earlier of two times, of which zero is none.
func earlier(a, b time.Time) time.Time {
	if a.IsZero() || (!b.IsZero() && b.Before(a)) {
		return b
	}
	return a
}

func due(now, at time.Time) bool { return !at.IsZero() && !now.Before(at) }

func chance(r *rand.Rand, p float64) bool { return r.Float64() < p }

// between draws a duration.
func between(r *rand.Rand, from, to time.Duration) time.Duration {
	return from + time.Duration(r.Int64N(int64(to-from)+1))
}

// logUniform draws small ones as often as large ones.
func logUniform(r *rand.Rand, from, to int) int {
	for limit := from; ; limit *= 4 {
		if limit >= to || r.IntN(3) == 0 {
			return from + r.IntN(max(1, min(limit*4, to)-from+1))
		}
	}
}

// runID is a run's id as wire.NewRunID makes them, but repeatable.
func runID(n int) string { return fmt.Sprintf("run%017d", n) }

func nameHash(s string) uint64 {
	h := fnv.New64a()
	_, _ = h.Write([]byte(s))
	return h.Sum64()
}
