package node

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/iop-fabric/iop/agent"
	"github.com/iop-fabric/iop/node/gate"
	"github.com/iop-fabric/iop/wire"
	"github.com/iop-fabric/iop/wire/iopv1"
)

// host holds what outlives sessions: the adapters and their slots.
type host struct {
	make     func(*iopv1.AdapterConfig) (agent.Provider, error)
	registry *agent.Registry
	running  map[string]*adapter // what the registry serves; the supervisor's alone
	log      *slog.Logger
	metrics  *metrics

	// mu guards the gate: exchanges of several sessions meet at it, and a loop of
	// its own would cost every call two more hand-overs.
	mu    sync.Mutex
	gate  *gate.Gate
	users int // exchanges under way
	grace time.Duration
	stall time.Duration // where a request names none (W1)
	// idle is made by wait and closed when the last exchange returned.
	idle chan struct{}
	// quiet is told whenever the last exchange returned; one word stands for all.
	quiet chan struct{}
}

func newHost(mk func(*iopv1.AdapterConfig) (agent.Provider, error), log *slog.Logger, m *metrics) *host {
	return &host{
		make: mk, registry: agent.NewRegistry(), running: map[string]*adapter{},
		log: log, metrics: m, gate: gate.New(), grace: wire.CloseGrace, stall: wire.StallTimeout,
		quiet: make(chan struct{}, 1),
	}
}

// adapter is a provider whose panics stay its own (I7).
type adapter struct {
	name        string
	fingerprint string
	provider    agent.Provider
	exchanger   agent.Exchanger // nil: it runs no tunnels
	log         *slog.Logger
}

var errStartPanic = errors.New("it panicked while starting")

// Start implements agent.Provider.
func (a *adapter) Start(ctx context.Context) (err error) {
	defer func() {
		if recover() != nil { // the value is the adapter's and may hold anything
			err = errStartPanic
		}
	}()
	return a.provider.Start(ctx)
}

// Stop implements agent.Provider.
func (a *adapter) Stop(ctx context.Context) (err error) {
	defer func() {
		if recover() != nil {
			a.log.Error(evPanic, slog.String(keyAdapter, a.name))
		}
	}()
	if err = a.provider.Stop(ctx); err != nil {
		a.log.Warn(evAdapter, slog.String(keyAdapter, a.name), slog.Any(keyError, err))
	}
	return err
}

// use is one exchange's hold on its adapter and slot.
type use struct {
	held *agent.Held
	slot gate.Slot // zero: it needs none
}

func (u use) exchanger() agent.Exchanger { return u.held.Provider().(*adapter).exchanger }

// take finds the adapter and takes a slot of it, or says why not.
func (h *host) take(name string, slot bool) (use, *wire.Error) {
	held, ok := h.registry.Acquire(name)
	if !ok {
		return use{}, errUnknownAdapter
	}
	u := use{held: held}
	if u.exchanger() == nil {
		held.Release()
		return use{}, errNoTunnels
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if slot {
		if u.slot, ok = h.gate.Acquire(name); !ok {
			held.Release()
			return use{}, errCapacity
		}
	}
	h.users++
	h.metrics.open.Inc()
	return u, nil
}

// free gives the hold back; its owner calls it once, when the provider returned.
func (h *host) free(u use) {
	u.held.Release()
	h.mu.Lock()
	defer h.mu.Unlock()
	h.gate.Release(u.slot)
}

// leave ends what take began: the exchange's goroutine is done.
func (h *host) leave() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.users--
	h.metrics.open.Dec()
	if h.users > 0 {
		return
	}
	select {
	case h.quiet <- struct{}{}:
	default:
	}
	if h.idle != nil {
		close(h.idle)
		h.idle = nil
	}
}

// open is how many exchanges are under way.
func (h *host) open() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.users
}

// closeGrace is how long a cancelled exchange may take to return.
func (h *host) closeGrace() time.Duration {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.grace
}

// stallTimeout is how long a provider may be silent in an exchange that asks for so
// many milliseconds; 0: the request is to be refused.
func (h *host) stallTimeout(ms int64) time.Duration {
	switch {
	case ms < 0 || ms > maxStallMillis:
		return 0
	case ms > 0:
		return time.Duration(ms) * time.Millisecond
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.stall
}

// close waits for the exchanges under way and stops the adapters, both within
// the bound: a provider that never returns cannot hold the process (W9).
func (h *host) close(bound time.Duration) {
	ctx, cancel := context.WithTimeout(context.Background(), bound)
	defer cancel()
	h.mu.Lock()
	idle := make(chan struct{})
	if h.users == 0 {
		close(idle)
	} else {
		h.idle = idle
	}
	h.mu.Unlock()
	select {
	case <-idle:
	case <-ctx.Done():
		h.log.Warn(evLeft, slog.Int(keyCount, h.open()))
	}
	stopCtx, cancelStop := context.WithTimeout(context.Background(), bound)
	defer cancelStop()
	if err := h.registry.Stop(stopCtx); err != nil {
		h.log.Warn(evAdapter, slog.Any(keyError, err))
	}
}
