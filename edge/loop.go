package edge

import (
	"context"
	"errors"
	"hash/maphash"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/iop-fabric/iop/edge/httpapi"
	"github.com/iop-fabric/iop/edge/pool"
	"github.com/iop-fabric/iop/edge/registry"
)

// peerQueue bounds what peers may have waiting for the loop. A thousand nodes
// that register at once need a few thousand places.
const peerQueue = 1 << 16

// item is one event on its way to the loop; exactly one field is set.
type item struct {
	reg     registry.Event
	pool    pool.Event
	isPool  bool
	waiter  *waiter // who wants a slot, or, leaving, no more
	leaving bool
	regis   *registration // with a RegisterReceived
	do      func()        // a question to the cores, answered on the loop
}

// inbox is the loop's: many write, one reads. It never blocks a writer.
type inbox struct {
	mu     sync.Mutex
	items  []item
	spare  []item
	notify chan struct{} // one place: "there is something"
}

func newInbox() *inbox { return &inbox{notify: make(chan struct{}, 1)} }

// put adds an event; of a peer's it refuses what is over the bound.
func (b *inbox) put(it item, fromPeer bool) bool {
	b.mu.Lock()
	if fromPeer && len(b.items) >= peerQueue {
		b.mu.Unlock()
		return false
	}
	b.items = append(b.items, it)
	first := len(b.items) == 1
	b.mu.Unlock()
	if first {
		select {
		case b.notify <- struct{}{}:
		default:
		}
	}
	return true
}

// take returns everything there is; the slice is good until the next take.
func (b *inbox) take() []item {
	b.mu.Lock()
	defer b.mu.Unlock()
	out := b.items
	b.items = b.spare[:0]
	if cap(out) > 1024 {
		b.spare = nil // a burst's memory is given back
	} else {
		b.spare = out
	}
	return out
}

// waiter is one request between Acquire and the loop. The loop alone writes grant
// and err, before it sends on answered; who has left reads neither.
type waiter struct {
	request  pool.Request
	answered chan struct{} // one place, so the loop never waits
	grant    httpapi.Grant
	err      error
}

// port is what the loop needs of the shell around it. No method blocks.
type port interface {
	sendRegisterAnswer(registry.SendRegisterAnswer, *registration)
	sendReadyAnswer(registry.SendReadyAnswer) error
	sendFence(registry.SendFence)
	sendHeartbeat(node string, gen uint64)
	connected(node string, gen uint64)
	disconnected(node string, gen uint64, cause registry.Reason)
	endAttempt(slot pool.Slot, cause string)
	// takeIn makes nodes known that have proved themselves but are not configured,
	// where that is wanted: all nodes' names, and the pool's configuration with them.
	takeIn(proved []string) (nodes []string, cfg pool.Config, ok bool)
}

// loop owns the two cores.
type loop struct {
	in       *inbox
	reg      *registry.Registry
	pool     *pool.Pool
	port     port
	interval time.Duration // between heartbeats
	log      *slog.Logger
	metrics  *metrics

	waiters map[pool.WaiterID]*waiter
	nextID  atomic.Uint64
	live    atomic.Pointer[map[string]*liveSession]
	models  atomic.Pointer[[]pool.Model]
	changed chan struct{} // one place: the model list changed
	stopped chan struct{}

	regEffects  []registry.Effect
	poolEffects []pool.Effect
}

func newLoop(reg *registry.Registry, p *pool.Pool, pt port, interval time.Duration, log *slog.Logger, m *metrics) *loop {
	l := &loop{
		in: newInbox(), reg: reg, pool: p, port: pt, interval: interval, log: log, metrics: m,
		waiters: map[pool.WaiterID]*waiter{}, changed: make(chan struct{}, 1), stopped: make(chan struct{}),
	}
	l.live.Store(&map[string]*liveSession{})
	l.models.Store(&[]pool.Model{})
	return l
}

// run steps the cores until ctx ends.
func (l *loop) run(ctx context.Context) error {
	defer close(l.stopped)
	beat := time.NewTicker(l.interval)
	defer beat.Stop()
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	last := time.Now()
	var resume time.Time // no deadline passes before
	for {
		if items := l.in.take(); len(items) > 0 {
			now := time.Now()
			l.takeIn(now, items)
			for i := range items {
				l.handle(now, items[i])
				items[i] = item{}
			}
			continue // what waits is read before time passes
		}
		now := time.Now()
		// The ticker wakes this loop every interval. A longer gap means that the
		// process did not run: what the nodes sent meanwhile is still on its way
		// here, and must be read before anybody is declared silent.
		if now.Sub(last) > 3*l.interval {
			resume = now.Add(l.interval)
		}
		last = now
		if !now.Before(resume) {
			l.passDeadlines(now)
		}
		timer.Reset(max(l.untilDeadline(now), resume.Sub(now)))
		select {
		case <-l.in.notify:
		case <-timer.C:
		case <-beat.C:
			l.reg.EachOwner(func(node string, gen uint64, _ registry.State) { l.port.sendHeartbeat(node, gen) })
		case <-ctx.Done():
			return nil
		}
	}
}

func (l *loop) passDeadlines(now time.Time) {
	if d := l.reg.Deadline(); !d.IsZero() && !d.After(now) {
		l.stepRegistry(now, registry.DeadlinePassed{}, nil)
	}
	if d := l.pool.Deadline(); !d.IsZero() && !d.After(now) {
		l.stepPool(now, pool.DeadlinePassed())
	}
}

func (l *loop) untilDeadline(now time.Time) time.Duration {
	wait := time.Hour
	for _, d := range []time.Time{l.reg.Deadline(), l.pool.Deadline()} {
		if !d.IsZero() {
			wait = min(wait, max(d.Sub(now), 0))
		}
	}
	return wait
}

func (l *loop) handle(now time.Time, it item) {
	switch {
	case it.do != nil:
		it.do()
	case it.leaving:
		l.leave(now, it.waiter)
	case it.waiter != nil:
		l.waiters[it.waiter.request.Waiter] = it.waiter
		l.stepPool(now, pool.Enqueue(&it.waiter.request))
	case !it.isPool:
		l.stepRegistry(now, it.reg, it.regis)
	default:
		l.stepPool(now, it.pool)
	}
}

// takeIn makes invited nodes known before their registrations are judged, in one
// change for all that wait. What each registers as is what its connection, its
// certificate and its nkey prove.
func (l *loop) takeIn(now time.Time, items []item) {
	var proved []string
	for i := range items {
		if items[i].regis == nil {
			continue
		}
		if r, ok := items[i].reg.(registry.RegisterReceived); ok && r.Verified == nil && r.PayloadNode == r.Node {
			proved = append(proved, r.Node)
		}
	}
	if len(proved) == 0 {
		return
	}
	if nodes, cfg, ok := l.port.takeIn(proved); ok {
		l.stepRegistry(now, registry.ConfigChanged{Nodes: nodes}, nil)
		l.stepPool(now, pool.SetConfig(cfg))
	}
}

// leave takes a request whose caller is gone out of the queue; if it was
// granted in the same instant, the slot goes back (trap 7).
func (l *loop) leave(now time.Time, w *waiter) {
	if _, waiting := l.waiters[w.request.Waiter]; waiting {
		delete(l.waiters, w.request.Waiter)
		l.stepPool(now, pool.CancelWaiter(w.request.Waiter))
		return
	}
	if w.err == nil {
		l.stepPool(now, pool.ReturnSlot(w.grant.Slot.ID, pool.ByNotSent))
	}
}

// stepRegistry steps the registry and applies what follows, to the pool too,
// before it returns (F3).
func (l *loop) stepRegistry(now time.Time, ev registry.Event, regis *registration) {
	effects := l.reg.Step(now, ev, l.regEffects[:0])
	// apply may step the registry again (ReadyAckSent): it must not reuse the
	// slice that is being read.
	l.regEffects = nil
	for _, e := range effects {
		l.applyRegistry(now, e, regis)
	}
	clear(effects)
	l.regEffects = effects[:0]
}

func (l *loop) applyRegistry(now time.Time, effect registry.Effect, regis *registration) {
	switch e := effect.(type) {
	case registry.SendRegisterAnswer:
		l.metrics.registrations.WithLabelValues(outcome(e.Accepted)).Inc()
		l.port.sendRegisterAnswer(e, regis)
	case registry.SendReadyAnswer:
		err := l.port.sendReadyAnswer(e)
		switch {
		case !e.Ready:
		case err != nil:
			l.stepRegistry(now, registry.ReadyAckFailed{Node: e.Node, Gen: e.Gen}, nil)
		default:
			l.stepRegistry(now, registry.ReadyAckSent{Node: e.Node, Gen: e.Gen}, nil)
		}
	case registry.SendFence:
		l.port.sendFence(e)
	case registry.CloseSession:
		// The fence told the session; whether the broker cuts it is the
		// broker's own affair, nothing here depends on it.
		level := slog.LevelWarn
		if e.Reason == registry.EdgeStopping {
			level = slog.LevelInfo
		}
		l.log.LogAttrs(context.Background(), level, eventSessionClosing,
			slog.String("node", e.Node), slog.Uint64("generation", e.Gen), slog.String("reason", string(e.Reason)))
	case registry.Activate:
		l.publishLive()
		l.stepPool(now, pool.Activate(e.Node, e.Gen))
	case registry.FenceGeneration:
		l.publishLive()
		l.metrics.fences.Inc()
		l.stepPool(now, pool.Fence(e.Node, e.Gen, string(e.Cause)))
	case registry.Draining:
		l.log.LogAttrs(context.Background(), slog.LevelInfo, eventNodeDraining,
			slog.String("node", e.Node), slog.Uint64("generation", e.Gen), slog.Bool("on", e.On))
		l.stepPool(now, pool.SetDraining(e.Node, e.Gen, e.On))
	case registry.NodeConnected:
		l.port.connected(e.Node, e.Gen)
	case registry.NodeDisconnected:
		l.port.disconnected(e.Node, e.Gen, e.Cause)
	}
}

func outcome(accepted bool) string {
	if accepted {
		return "accepted"
	}
	return "refused"
}

// liveSession is what the demux knows of a session that is ready.
type liveSession struct {
	gen   uint64
	spoke time.Time // the demux's alone: when the loop was last told that it speaks
}

func (l *loop) publishLive() {
	sessions := l.reg.LiveSessions()
	live := make(map[string]*liveSession, len(sessions))
	for node, gen := range sessions {
		live[node] = &liveSession{gen: gen}
	}
	l.live.Store(&live)
	l.metrics.ready.Set(float64(len(live)))
}

// isLive is the demux's cheap check, from any goroutine; nil: it is not.
func (l *loop) isLive(node string, gen uint64) *liveSession {
	if s := (*l.live.Load())[node]; s != nil && s.gen == gen {
		return s
	}
	return nil
}

func (l *loop) stepPool(now time.Time, ev pool.Event) {
	effects := l.pool.Step(now, ev, l.poolEffects[:0])
	l.poolEffects = nil
	for i := range effects {
		l.applyPool(&effects[i])
	}
	clear(effects)
	l.poolEffects = effects[:0]
}

func (l *loop) applyPool(e *pool.Effect) {
	switch e.Kind {
	case pool.Granted:
		l.metrics.wait.Observe(e.Waited.Seconds())
		l.answer(e.Waiter, httpapi.Grant{Slot: e.Slot, StallTimeout: e.StallTimeout, Waited: e.Waited, Others: e.Others}, nil)
	case pool.Refused:
		l.metrics.refused.WithLabelValues(refusal(e.Err)).Inc()
		l.answer(e.Waiter, httpapi.Grant{}, e.Err)
	case pool.EndAttempt:
		l.port.endAttempt(e.Slot, e.Cause)
	case pool.SlotReturned:
		l.metrics.returned.WithLabelValues(e.How.String()).Inc()
	case pool.CatalogChanged:
		l.models.Store(new(l.pool.Models()))
		select {
		case l.changed <- struct{}{}:
		default:
		}
	}
}

func (l *loop) answer(id pool.WaiterID, grant httpapi.Grant, err error) {
	if w := l.waiters[id]; w != nil {
		delete(l.waiters, id)
		w.grant, w.err = grant, err
		w.answered <- struct{}{}
	}
}

// refusal is a metric's label: a closed set.
func refusal(err error) string {
	switch {
	case errors.Is(err, pool.ErrQueueFull):
		return "queue_full"
	case errors.Is(err, pool.ErrWaitExpired):
		return "wait_expired"
	case errors.Is(err, pool.ErrUnknownModel):
		return "unknown_model"
	case errors.Is(err, pool.ErrUnsupported):
		return "unsupported"
	case errors.Is(err, pool.ErrNoProvider):
		return "no_provider"
	case errors.Is(err, pool.ErrStopping):
		return "stopping"
	default:
		return "other"
	}
}

// Acquire implements httpapi.Pool. While it waits it holds little stack: with the
// frame of enqueue in its own, each waiting request would need a stack twice as large.
func (l *loop) Acquire(ctx context.Context, want *httpapi.Want, grant *httpapi.Grant) error {
	w := l.enqueue(want)
	select {
	case <-w.answered:
		*grant = w.grant
		return w.err
	case <-ctx.Done():
		l.abandon(w)
		return context.Cause(ctx)
	case <-l.stopped:
		return pool.ErrStopping
	}
}

//go:noinline
func (l *loop) abandon(w *waiter) { l.in.put(item{waiter: w, leaving: true}, false) }

//go:noinline
func (l *loop) enqueue(want *httpapi.Want) *waiter {
	w := &waiter{answered: make(chan struct{}, 1), request: pool.Request{
		Waiter: pool.WaiterID(l.nextID.Add(1)), Model: want.Model, Principal: want.Principal,
		Operation: want.Operation, PromptTokens: want.PromptTokens, Affinity: affinityKey(want.Model, want.Affinity),
		MaxWait: want.MaxWait, Avoid: want.Avoid,
	}}
	l.in.put(item{waiter: w}, false)
	return w
}

// affinitySeed makes keys that nobody outside can aim at another's.
var affinitySeed = maphash.MakeSeed()

// affinityKey is the pool's word for what a request belongs to, for each model
// apart: another model is other providers. 0: nothing.
func affinityKey(model, affinity string) uint64 {
	if affinity == "" {
		return 0
	}
	return max(maphash.Comparable(affinitySeed, [2]string{model, affinity}), 1)
}

// returnSlot gives a slot back; dispatch calls it, once per attempt. Attempts
// that hold no slot of the pool (model lists) have an id of listSlots.
func (l *loop) returnSlot(slot pool.Slot, how pool.Return) {
	if slot.ID < listSlots {
		l.in.put(item{isPool: true, pool: pool.ReturnSlot(slot.ID, how)}, false)
	}
}

// Models implements httpapi.Pool.
func (l *loop) Models() []httpapi.Model {
	models := *l.models.Load()
	out := make([]httpapi.Model, len(models))
	for i, m := range models {
		out[i] = httpapi.Model{ID: m.Name, Created: m.Since.Unix(), OwnedBy: "iop"}
	}
	return out
}

// ask runs fn on the loop and waits for it: a question to the cores.
func (l *loop) ask(ctx context.Context, fn func()) error {
	done := make(chan struct{})
	l.in.put(item{do: func() { fn(); close(done) }}, false)
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-l.stopped:
		return pool.ErrStopping
	}
}
