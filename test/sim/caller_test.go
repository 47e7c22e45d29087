package sim

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/iop-fabric/iop/edge/dispatch"
	"github.com/iop-fabric/iop/edge/httpapi"
	"github.com/iop-fabric/iop/edge/pool"
	"github.com/iop-fabric/iop/internal/history"
	"github.com/iop-fabric/iop/wire"
	"github.com/iop-fabric/iop/wire/iopv1"
)

// fate is what becomes of a provider's answer.
type fate uint8

const (
	fateAnswers fate = iota
	fateRefuses      // the connection
	fateBreaks       // in the middle of the body
	fateStalls       // so that the watchdog must act
	fatePanics
	fateHangs // and does not hear that it is cancelled
)

// answer is a provider's plan for a request.
type answer struct {
	fate     fate
	at       int // the chunk before which it breaks or stalls
	status   int
	think    time.Duration
	pace     time.Duration
	readPace time.Duration
	chunks   []int
	sized    bool // the length is announced
}

func (a *answer) size() int64 {
	if !a.sized {
		return -1
	}
	total := int64(0)
	for _, c := range a.chunks {
		total += int64(c)
	}
	return total
}

// quick: reading the request and thinking about it take no longer than a provider may
// be silent.
func (a *answer) quick(body int) bool {
	return a.think+a.readPace*time.Duration(body/wire.MaxBody+2) < stallBound
}

// request is one caller's, with what the HTTP surface does for it: it queues, takes
// attempts as edge/httpapi's relay does, and reads the answer as fast as it may.
type request struct {
	w       *world
	n       int
	id      string
	model   string
	body    []byte
	answer  answer
	until   time.Time // its deadline; zero: none
	leaves  time.Time // when the caller goes; zero: it stays
	reads   time.Duration
	breaks  int // the caller's socket fails at this part; 0: never
	timeout time.Duration
	probe   string // the node

	open    bool
	waiting pool.WaiterID // 0: not in the queue
	grant   *pool.Slot    // granted, not yet dispatched
	attempt *dispatch.Call
	run     string
	slot    pool.Slot
	tries   int
	avoid   []string
	seq     uint64
	busyTil time.Time
	last    wire.Class
}

var content = func() []byte {
	r := rand.New(rand.NewPCG(1, 1))
	b := make([]byte, 8<<20)
	for i := 0; i < len(b); i += 8 {
		v := r.Uint64()
		for j := range 8 {
			b[i+j] = byte(v >> (8 * j)) //nolint:gosec // cut on purpose
		}
	}
	return b
}()

// contentOf gives parts of what a run's provider says: other bytes for every run.
func contentOf(run string) func(offset int64, n int) []byte {
	base := int64(nameHash(run) % (4 << 20)) //nolint:gosec // below 4 Mi
	return func(offset int64, n int) []byte {
		at := (base + offset) % int64(len(content)-wire.MaxBody*4)
		return content[at : at+int64(n)]
	}
}

// invoke begins it.
func (q *request) invoke() {
	w := q.w
	q.open = true
	w.event(history.Event{
		Kind: history.Invoke, Req: q.id, N: int64(len(q.body)), Sum: bodySum(q.body), Until: sinceEpoch(q.until), Probe: q.probe != "", Node: q.probe,
		Sure: q.answer.fate == fateAnswers && q.until.IsZero() && q.leaves.IsZero() && q.timeout == 0 && q.breaks == 0 && w.swarm.config == 0 && w.patience == 0 && q.answer.quick(len(q.body)) &&
			(!w.stubborn || !w.now.Before(w.quietAt)), // else a Node may have no place (W9)
	})
	if !w.edge.up {
		q.end(history.Fail, "refused")
		return
	}
	if !q.until.IsZero() {
		w.at(q.until, func() { q.leave(context.DeadlineExceeded, "deadline") })
	}
	if !q.leaves.IsZero() {
		w.at(q.leaves, func() { q.leave(context.Canceled, "gone") })
	}
	w.edge.awake(func() {
		if q.open {
			q.enqueue(0)
		}
	})
}

func bodySum(b []byte) uint32 {
	if len(b) == 0 {
		return 0
	}
	return history.Sum(b)
}

func sinceEpoch(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return int64(t.Sub(epoch))
}

func (q *request) enqueue(most time.Duration) {
	e := q.w.edge
	e.waiter++
	q.waiting = e.waiter
	e.waiters[q.waiting] = q
	e.stepPool(pool.Enqueue(&pool.Request{Waiter: q.waiting, Model: q.model, Principal: "p", MaxWait: most, Avoid: q.avoid}))
}

func (q *request) refused(err error) {
	q.waiting = 0
	q.end(history.Fail, err.Error())
}

// granted: the caller's goroutine sends the attempt when it runs next.
func (q *request) granted(x *pool.Effect) {
	slot := x.Slot
	q.waiting, q.grant = 0, &slot
	stall := x.StallTimeout
	life := q.w.edge.life
	most := 300 * time.Microsecond
	if q.w.lazy > 0 {
		most = 100 * time.Millisecond
	}
	q.w.after(between(q.w.sched, 0, most), func() {
		if q.w.edge.life == life && q.grant != nil {
			q.w.edge.awake(func() { q.send(stall) })
		}
	})
}

// send dispatches what was granted, if the caller is still there.
func (q *request) send(stall time.Duration) {
	if q.grant == nil {
		return
	}
	slot := *q.grant
	q.grant = nil
	w, e := q.w, q.w.edge
	q.tries++
	q.run, q.slot = runID(q.n*10+q.tries), slot
	w.attempts[q.run] = q
	if _, held := e.slots[slot.ID]; held { // else it went with its fence
		w.event(history.Event{Kind: history.Dispatch, Req: q.id, Run: q.run, Slot: e.slotID(slot.ID), Node: slot.Node, Gen: slot.Gen, Provider: slot.Provider})
	}
	var body io.Reader
	if len(q.body) > 0 {
		body = bytes.NewReader(q.body)
	}
	q.attempt = e.d.Begin(dispatch.Attempt{
		RunID: q.run, Slot: slot, Operation: "chat_completions", Method: "POST", Path: "/v1/chat/completions",
		Body: body, BodySize: int64(len(q.body)), Stream: true, Timeout: q.timeout, StallTimeout: stall,
	}, q)
	e.calls = append(e.calls, q)
	q.judge()
}

// judge ends the attempt if it is over, and reports whether it left the list.
func (q *request) judge() bool {
	res, over := q.attempt.Result()
	if !over {
		return false
	}
	w, e := q.w, q.w.edge
	q.attempt = nil
	e.calls = slices.DeleteFunc(e.calls, func(o *request) bool { return o == q })
	q.w.event(history.Event{Kind: history.Ended, Req: q.id, Run: q.run, Class: q.class(res.Err)})
	if !q.open {
		return true
	}
	if res.Err == nil {
		q.end(history.OK, "")
		return true
	}
	q.last = res.Err.Class
	if !httpapi.MayRetry(res.Err.Class, res.Started, q.tries) {
		q.end(history.Fail, string(res.Err.Class))
		return true
	}
	w.logf("%s: attempt %d ended: %v", q.id, q.tries, res.Err)
	q.avoid = append(q.avoid, q.slot.Provider)
	q.enqueue(30 * time.Second)
	return true
}

// class is an attempt's; a panic that was planned is not the product's.
func (q *request) class(err *wire.Error) string {
	switch {
	case err == nil:
		return ""
	case err.Class == wire.Internal && q.answer.fate == fatePanics:
		return "panicked"
	case err.Class == wire.Protocol && q.w.now.Before(q.w.edge.resumed):
		// An Edge that did not run counts that time into the bound of a gap (J2): known,
		// and not mended yet.
		return "protocol after a stop"
	default:
		return string(err.Class)
	}
}

// leave is the end of the caller's context.
func (q *request) leave(cause error, why string) {
	if !q.open {
		return
	}
	e := q.w.edge
	if e.paused { // it will see
		e.awake(func() { q.leave(cause, why) })
		return
	}
	switch {
	case q.waiting != 0:
		delete(e.waiters, q.waiting)
		e.stepPool(pool.CancelWaiter(q.waiting))
		q.waiting = 0
	case q.grant != nil:
		e.stepPool(pool.ReturnSlot(q.grant.ID, pool.ByNotSent))
		q.grant = nil
	case q.attempt != nil:
		q.end(history.Fail, why)
		q.attempt.Leave(cause)
		q.judge()
		return
	}
	q.end(history.Fail, why)
}

// edgeGone: the connection broke, and the caller does not know why.
func (q *request) edgeGone() {
	if !q.open {
		return
	}
	q.waiting, q.grant, q.attempt = 0, nil, nil
	q.end(history.Unknown, "edge_gone")
}

func (q *request) end(o history.Outcome, class string) {
	q.open = false
	q.w.event(history.Event{Kind: history.Terminal, Req: q.id, Outcome: o, Class: class})
}

// busy: the caller has not taken the last part yet, so Edge's write waits.
func (q *request) busy() bool { return q.open && q.w.now.Before(q.busyTil) }

// Start implements dispatch.Writer.
func (q *request) Start(int, []*iopv1.Header) error { return nil }

// Body implements dispatch.Writer.
func (q *request) Body(p []byte) error {
	if !q.open {
		return context.Canceled
	}
	q.seq++
	q.w.event(history.Event{Kind: history.Frame, Req: q.id, Run: q.run, Seq: q.seq, N: int64(len(p)), Sum: history.Sum(p)})
	if q.breaks > 0 && q.seq >= uint64(q.breaks) { //nolint:gosec // not negative
		return fmt.Errorf("write: %w", io.ErrClosedPipe)
	}
	if q.reads > 0 {
		q.busyTil = q.w.now.Add(q.reads)
		q.w.at(q.busyTil, func() {}) // the write returns
	}
	return nil
}

// Flush implements dispatch.Writer.
func (q *request) Flush() error { return nil }

// Trailer implements dispatch.Writer.
func (q *request) Trailer([]*iopv1.Header) error { return nil }
