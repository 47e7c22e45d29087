package membus

import (
	"container/heap"
	"sync"
	"time"

	"github.com/iop-fabric/iop/internal/bus"
)

// sub is one subscription: a queue by due time, and the goroutine that empties it.
type sub struct {
	conn    *Conn
	pattern string

	mu    sync.Mutex
	queue queue
	ended bool
	wake  chan struct{} // capacity 1: there is something new
}

type queued struct {
	msg   bus.Msg
	due   time.Time
	order uint64
}

func newSub(c *Conn, pattern string) *sub {
	return &sub{conn: c, pattern: pattern, wake: make(chan struct{}, 1)}
}

func (s *sub) push(q queued) {
	s.mu.Lock()
	heap.Push(&s.queue, q)
	s.mu.Unlock()
	s.signal()
}

func (s *sub) end() {
	s.mu.Lock()
	s.ended, s.queue = true, nil
	s.mu.Unlock()
	s.signal()
}

func (s *sub) signal() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

func (s *sub) run(fn func(bus.Msg)) {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		msg, wait, ok, ended := s.next()
		if ended {
			return
		}
		if ok {
			fn(msg)
			continue
		}
		timer.Stop()
		var due <-chan time.Time
		if wait > 0 {
			timer.Reset(wait)
			due = timer.C
		}
		select {
		case <-s.wake:
		case <-due:
		}
	}
}

// next takes the first message if it is due, and says how long to wait if not.
func (s *sub) next() (msg bus.Msg, wait time.Duration, ok, ended bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.ended:
		return bus.Msg{}, 0, false, true
	case len(s.queue) == 0:
		return bus.Msg{}, 0, false, false
	}
	if wait = time.Until(s.queue[0].due); wait > 0 {
		return bus.Msg{}, wait, false, false
	}
	q, _ := heap.Pop(&s.queue).(queued)
	return q.msg, 0, true, false
}

// Unsubscribe ends it; what is queued is dropped. It may be called by the callback.
func (s *sub) Unsubscribe() error {
	s.conn.bus.mu.Lock()
	s.conn.subs = without(s.conn.subs, s)
	s.conn.bus.mu.Unlock()
	s.end()
	return nil
}

type queue []queued

func (q queue) Len() int { return len(q) }
func (q queue) Less(i, j int) bool {
	if q[i].due.Equal(q[j].due) {
		return q[i].order < q[j].order
	}
	return q[i].due.Before(q[j].due)
}
func (q queue) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q *queue) Push(x any)   { *q = append(*q, x.(queued)) }
func (q *queue) Pop() any {
	old := *q
	last := old[len(old)-1]
	old[len(old)-1] = queued{}
	*q = old[:len(old)-1]
	return last
}
