package agent

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"sync"
)

// ErrRegistryStopped: the registry takes no set any more.
var ErrRegistryStopped = errors.New("registry stopped")

// Registry owns the lives of providers, keyed by adapter name: it starts them,
// swaps whole sets, and stops each when nobody holds it any longer (AR7).
type Registry struct {
	swapping sync.Mutex // one Swap or Stop at a time

	mu      sync.Mutex // guards what follows
	stopped bool
	current map[string]*entry
	retired map[*entry]struct{}
	ended   sync.WaitGroup // the goroutines that stop retired entries
}

type entry struct {
	name     string
	provider Provider
	cut      context.CancelFunc // ends the waiting for holders; set at retirement

	// guarded by Registry.mu
	holders int
	idle    chan struct{} // made at retirement, closed when holders is 0
}

// Held is a provider in use. It is not stopped before Release.
type Held struct {
	r    *Registry
	e    *entry
	once sync.Once
}

// NewRegistry returns an empty registry.
func NewRegistry() *Registry {
	return &Registry{current: map[string]*entry{}, retired: map[*entry]struct{}{}}
}

// Acquire takes hold of the provider that serves name now.
func (r *Registry) Acquire(name string) (*Held, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	e, ok := r.current[name]
	if !ok {
		return nil, false
	}
	e.holders++
	return &Held{r: r, e: e}, true
}

// Provider returns what is held: the same for as long as it is held.
func (h *Held) Provider() Provider { return h.e.provider }

// Release lets go. Calling it again does nothing.
func (h *Held) Release() {
	h.once.Do(func() {
		h.r.mu.Lock()
		defer h.r.mu.Unlock()
		h.e.holders--
		if h.e.holders == 0 && h.e.idle != nil {
			close(h.e.idle)
		}
	})
}

// Names returns the adapters' names, sorted.
func (r *Registry) Names() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Sorted(maps.Keys(r.current))
}

// Swap makes next the set that serves. A provider that stands under the same
// name already goes on, and is not started again; new ones are started first,
// all or none (I1); what is no longer in the set is stopped when its last
// holder lets go (I2).
func (r *Registry) Swap(ctx context.Context, next map[string]Provider) error {
	r.swapping.Lock()
	defer r.swapping.Unlock()

	r.mu.Lock()
	old, stopped := r.current, r.stopped
	r.mu.Unlock()
	if stopped {
		return ErrRegistryStopped
	}

	set := make(map[string]*entry, len(next))
	var started []*entry
	for _, name := range slices.Sorted(maps.Keys(next)) {
		if e, ok := old[name]; ok && same(e.provider, next[name]) {
			set[name] = e
			continue
		}
		e := &entry{name: name, provider: next[name]}
		if err := e.provider.Start(ctx); err != nil {
			err = fmt.Errorf("start adapter %q: %w", name, err)
			for _, s := range started {
				err = errors.Join(err, s.stop(ctx))
			}
			return err
		}
		started = append(started, e)
		set[name] = e
	}
	r.become(ctx, set)
	return nil
}

// become is the one place where the serving set changes.
func (r *Registry) become(ctx context.Context, set map[string]*entry) {
	r.mu.Lock()
	defer r.mu.Unlock()
	old := r.current
	r.current = set
	for name, e := range old {
		if set[name] != e {
			r.retire(ctx, e)
		}
	}
}

// retire stops e once nobody holds it. r.mu is held.
func (r *Registry) retire(ctx context.Context, e *entry) {
	// The work that e still does outlives the swap that retired it.
	ctx, e.cut = context.WithCancel(context.WithoutCancel(ctx))
	e.idle = make(chan struct{})
	if e.holders == 0 {
		close(e.idle)
	}
	r.retired[e] = struct{}{}
	r.ended.Go(func() {
		defer e.cut()
		select {
		case <-e.idle:
		case <-ctx.Done():
		}
		_ = e.stop(ctx) // a retired provider that cannot stop harms nobody: no new work reaches it
		r.mu.Lock()
		delete(r.retired, e)
		r.mu.Unlock()
	})
}

func (e *entry) stop(ctx context.Context) error {
	if err := e.provider.Stop(ctx); err != nil {
		return fmt.Errorf("stop adapter %q: %w", e.name, err)
	}
	return nil
}

// Stop retires every provider and waits until all have stopped. When ctx ends
// first, holders are waited for no longer: the rest is told to stop at once and
// the context's cause is returned. Stopping again, or before a Swap, is fine.
func (r *Registry) Stop(ctx context.Context) error {
	r.swapping.Lock()
	defer r.swapping.Unlock()
	r.mu.Lock()
	r.stopped = true
	r.mu.Unlock()
	r.become(ctx, map[string]*entry{})

	all := make(chan struct{})
	go func() {
		r.ended.Wait()
		close(all)
	}()
	select {
	case <-all:
		return nil
	case <-ctx.Done():
	}
	r.mu.Lock()
	for e := range r.retired {
		e.cut()
	}
	r.mu.Unlock()
	<-all // a Provider's Stop returns when its context has ended
	return context.Cause(ctx)
}

// same reports whether a and b are one provider; values that cannot be
// compared never are.
func same(a, b Provider) bool {
	va, vb := reflect.ValueOf(a), reflect.ValueOf(b)
	return va.IsValid() && vb.IsValid() && va.Comparable() && vb.Comparable() && a == b
}
