package agent

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// life is a Provider that records its own.
type life struct {
	mu       sync.Mutex
	starts   int
	stops    int
	startErr error
	onStop   func(ctx context.Context) error
}

func (l *life) Start(context.Context) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.starts++
	return l.startErr
}

func (l *life) Stop(ctx context.Context) error {
	l.mu.Lock()
	l.stops++
	f := l.onStop
	l.mu.Unlock()
	if f != nil {
		return f(ctx)
	}
	return nil
}

func (l *life) want(t *testing.T, name string, starts, stops int) {
	t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.starts != starts || l.stops != stops {
		t.Errorf("%s: %d starts, %d stops, want %d, %d", name, l.starts, l.stops, starts, stops)
	}
}

func acquire(t *testing.T, r *Registry, name string) *Held {
	t.Helper()
	h, ok := r.Acquire(name)
	if !ok {
		t.Fatalf("no %q", name)
	}
	return h
}

// Contract: AR7
func TestI2SwapLeavesRunningWorkAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := NewRegistry()
		kept, before, after, gone := &life{}, &life{}, &life{}, &life{}
		if err := r.Swap(t.Context(), map[string]Provider{"kept": kept, "changed": before, "gone": gone}); err != nil {
			t.Fatal(err)
		}
		running := acquire(t, r, "changed")
		alsoRunning := acquire(t, r, "changed")

		if err := r.Swap(t.Context(), map[string]Provider{"kept": kept, "changed": after}); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if running.Provider() != Provider(before) {
			t.Error("running work lost its provider")
		}
		if h := acquire(t, r, "changed"); h.Provider() != Provider(after) {
			t.Error("new work did not get the new provider")
		} else {
			h.Release()
		}
		if _, ok := r.Acquire("gone"); ok {
			t.Error("what was removed is still given out")
		}
		if got := r.Names(); !slices.Equal(got, []string{"changed", "kept"}) {
			t.Errorf("names: %v", got)
		}
		kept.want(t, "kept", 1, 0)
		before.want(t, "before, in use", 1, 0)
		after.want(t, "after", 1, 0)
		gone.want(t, "gone", 1, 1)

		running.Release()
		running.Release() // once more does nothing
		synctest.Wait()
		before.want(t, "before, still in use", 1, 0)
		alsoRunning.Release()
		synctest.Wait()
		before.want(t, "before, released", 1, 1)

		if err := errors.Join(r.Stop(t.Context()), r.Stop(t.Context())); err != nil {
			t.Error(err)
		}
		kept.want(t, "kept", 1, 1)
		after.want(t, "after", 1, 1)
		before.want(t, "before", 1, 1)
	})
}

// Contract: AR7
func TestI1SwapIsWholeOrNotAtAll(t *testing.T) {
	r := NewRegistry()
	old, a, z := &life{}, &life{}, &life{startErr: errors.New("no")}
	if err := r.Swap(t.Context(), map[string]Provider{"old": old}); err != nil {
		t.Fatal(err)
	}
	if err := r.Swap(t.Context(), map[string]Provider{"a": a, "z": z}); !errors.Is(err, z.startErr) {
		t.Fatalf("got %v", err)
	}
	if got := r.Names(); !slices.Equal(got, []string{"old"}) {
		t.Fatalf("names: %v", got)
	}
	old.want(t, "old", 1, 0)
	a.want(t, "a", 1, 1)
	z.want(t, "z", 1, 0)
	if err := r.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := r.Swap(t.Context(), map[string]Provider{"old": old}); !errors.Is(err, ErrRegistryStopped) {
		t.Fatalf("got %v", err)
	}
	old.want(t, "old", 1, 1)
}

func TestStopDoesNotWaitForEver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := NewRegistry()
		stuck := &life{onStop: func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }}
		if err := r.Swap(t.Context(), map[string]Provider{"x": stuck}); err != nil {
			t.Fatal(err)
		}
		h := acquire(t, r, "x")
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := r.Stop(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v", err)
		}
		stuck.want(t, "stuck", 1, 1)
		h.Release()
	})
}

// Work and swaps side by side: nobody is ever given a provider that was
// stopped, and each is stopped once.
func TestSwapsUnderLoad(t *testing.T) {
	r := NewRegistry()
	var lives []*life
	for range 100 {
		lives = append(lives, &life{})
	}
	if err := r.Swap(t.Context(), map[string]Provider{"x": lives[0]}); err != nil {
		t.Fatal(err)
	}
	stop := make(chan struct{})
	var workers sync.WaitGroup
	for range 4 {
		workers.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				h, ok := r.Acquire("x")
				if !ok {
					t.Error("no provider")
					return
				}
				l := h.Provider().(*life)
				l.mu.Lock()
				if l.stops != 0 {
					t.Error("a stopped provider is in use")
				}
				l.mu.Unlock()
				h.Release()
			}
		})
	}
	for _, l := range lives[1:] {
		if err := r.Swap(t.Context(), map[string]Provider{"x": l}); err != nil {
			t.Fatal(err)
		}
	}
	close(stop)
	workers.Wait()
	if err := r.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	for i, l := range lives {
		l.want(t, "life", 1, 1)
		if t.Failed() {
			t.Fatalf("number %d", i)
		}
	}
}

func TestRunning(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r Running
		for range 2 {
			if !r.Enter() {
				t.Fatal("refused")
			}
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := r.Stop(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatal(err)
		}
		if r.Enter() {
			t.Fatal("let in after Stop")
		}
		r.Leave()
		r.Leave()
		if err := r.Stop(ctx); err != nil {
			t.Fatalf("all have left: %v", err)
		}
		var unused Running
		if err := unused.Stop(t.Context()); err != nil {
			t.Fatal(err)
		}
	})
}
