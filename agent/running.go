package agent

import (
	"context"
	"sync"
)

// Running counts an adapter's exchanges under way, so that its Stop can wait
// for them. The zero value is ready.
type Running struct {
	mu      sync.Mutex
	n       int
	stopped bool
	idle    chan struct{} // made by Stop, closed when n is 0
}

// Enter counts one more, unless Stop was called. Who gets true calls Leave.
func (r *Running) Enter() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.stopped {
		return false
	}
	r.n++
	return true
}

// Leave counts one less.
func (r *Running) Leave() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.n--
	if r.n == 0 && r.idle != nil {
		close(r.idle)
	}
}

// Stop lets nothing new in and waits until all have left, or returns the
// context's cause. Calling it again waits again.
func (r *Running) Stop(ctx context.Context) error {
	r.mu.Lock()
	r.stopped = true
	if r.idle == nil {
		r.idle = make(chan struct{})
		if r.n == 0 {
			close(r.idle)
		}
	}
	idle := r.idle
	r.mu.Unlock()
	select {
	case <-idle:
		return nil
	default:
	}
	select {
	case <-idle:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
