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

// runtime holds what outlives sessions: the adapters and their slots.
type runtime struct {
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
	// idle is made by wait and closed when the last exchange returned.
	idle chan struct{}
}

func newRuntime(mk func(*iopv1.AdapterConfig) (agent.Provider, error), log *slog.Logger, m *metrics) *runtime {
	return &runtime{
		make: mk, registry: agent.NewRegistry(), running: map[string]*adapter{},
		log: log, metrics: m, gate: gate.New(), grace: wire.CloseGrace,
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
			a.log.Error(evPanic, keyAdapter, a.name)
		}
	}()
	if err = a.provider.Stop(ctx); err != nil {
		a.log.Warn(evAdapter, keyAdapter, a.name, keyError, err)
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
func (rt *runtime) take(name string, slot bool) (use, *wire.Error) {
	held, ok := rt.registry.Acquire(name)
	if !ok {
		return use{}, errUnknownAdapter
	}
	u := use{held: held}
	if u.exchanger() == nil {
		held.Release()
		return use{}, errNoTunnels
	}
	rt.mu.Lock()
	defer rt.mu.Unlock()
	if slot {
		if u.slot, ok = rt.gate.Acquire(name); !ok {
			held.Release()
			return use{}, errCapacity
		}
	}
	rt.users++
	rt.metrics.open.Inc()
	return u, nil
}

// free gives the hold back; its owner calls it once, when the provider returned.
func (rt *runtime) free(u use) {
	u.held.Release()
	rt.mu.Lock()
	defer rt.mu.Unlock()
	rt.gate.Release(u.slot)
}

// leave ends what take began: the exchange's goroutine is done.
func (rt *runtime) leave() {
	rt.mu.Lock()
	defer rt.mu.Unlock()
	rt.users--
	rt.metrics.open.Dec()
	if rt.users == 0 && rt.idle != nil {
		close(rt.idle)
		rt.idle = nil
	}
}

// open is how many exchanges are under way.
func (rt *runtime) open() int {
	rt.mu.Lock()
	defer rt.mu.Unlock()
	return rt.users
}

// closeGrace is how long a cancelled exchange may take to return.
func (rt *runtime) closeGrace() time.Duration {
	rt.mu.Lock()
	defer rt.mu.Unlock()
	return rt.grace
}

// close waits for the exchanges under way and stops the adapters, both within
// the bound: a provider that never returns cannot hold the process (W9).
func (rt *runtime) close(bound time.Duration) {
	ctx, cancel := context.WithTimeout(context.Background(), bound)
	defer cancel()
	rt.mu.Lock()
	idle := make(chan struct{})
	if rt.users == 0 {
		close(idle)
	} else {
		rt.idle = idle
	}
	rt.mu.Unlock()
	select {
	case <-idle:
	case <-ctx.Done():
		rt.log.Warn(evLeft, keyCount, rt.open())
	}
	stopCtx, cancelStop := context.WithTimeout(context.Background(), bound)
	defer cancelStop()
	if err := rt.registry.Stop(stopCtx); err != nil {
		rt.log.Warn(evAdapter, keyError, err)
	}
}
