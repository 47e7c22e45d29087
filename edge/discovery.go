package edge

import (
	"context"
	"encoding/json"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/iop-fabric/iop/edge/dispatch"
	"github.com/iop-fabric/iop/edge/pool"
	"github.com/iop-fabric/iop/wire"
	"github.com/iop-fabric/iop/wire/iopv1"
)

// Bounds of one model list. A list is read within listBound whatever its
// provider does (A47), and a provider that hung or failed allowedMisses times in a
// row is taken to list nothing. The Node is the one that knows that it hung: its word
// may take listGrace more, over a busy link.
const (
	listBound     = 3 * time.Second
	listGrace     = 5 * time.Second
	listBytes     = 4 << 20
	listModels    = 1000
	listName      = 256
	allowedMisses = 3
)

// listSlots is where the ids of slots begin that the pool knows nothing of: a
// list takes no place, it never waits behind inference (A48).
const listSlots = 1 << 63

// discovery reads what the adapters of ready nodes list, again and again, and
// tells the pool (P1, D2).
type discovery struct {
	runner   lister
	adapters func(node string) []string
	adopt    func(node string, gen uint64, adapter string, targets []string)
	interval time.Duration
	log      *slog.Logger

	lists   atomic.Uint64
	mu      sync.Mutex
	ctx     context.Context //nolint:containedctx // the life of run, for the goroutines it owns
	running map[string]*nodeDiscovery
	group   sync.WaitGroup
	first   chan struct{} // closed when a node was asked for all its lists once
	once    sync.Once
}

// lister is what discovery needs of a Dispatcher.
type lister interface {
	dispatch.Runner
	Progresses(node, adapter string, since time.Time) bool
}

type nodeDiscovery struct {
	gen    uint64
	cancel context.CancelFunc
}

func newDiscovery(r lister, adapters func(string) []string, adopt func(string, uint64, string, []string), interval time.Duration, log *slog.Logger) *discovery {
	return &discovery{
		runner: r, adapters: adapters, adopt: adopt, interval: interval, log: log,
		running: map[string]*nodeDiscovery{}, first: make(chan struct{}),
	}
}

// open lets start begin work that ends with ctx, at the latest; run waits for it.
func (d *discovery) open(ctx context.Context) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.ctx = ctx
}

// run owns the goroutines of start until ctx ends.
func (d *discovery) run(ctx context.Context) error {
	<-ctx.Done()
	d.mu.Lock()
	d.ctx = nil // start begins nothing any more
	d.mu.Unlock()
	d.group.Wait()
	return nil
}

// start begins with a node that became ready. It never blocks.
func (d *discovery) start(node string, gen uint64) {
	adapters := d.adapters(node)
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.ctx == nil {
		return
	}
	if old := d.running[node]; old != nil {
		old.cancel()
	}
	ctx, cancel := context.WithCancel(d.ctx)
	d.running[node] = &nodeDiscovery{gen: gen, cancel: cancel}
	d.group.Go(func() {
		defer cancel()
		d.watch(ctx, node, gen, adapters)
	})
}

// stop ends it with the session.
func (d *discovery) stop(node string, gen uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if r := d.running[node]; r != nil && r.gen == gen {
		r.cancel()
		delete(d.running, node)
	}
}

func (d *discovery) watch(ctx context.Context, node string, gen uint64, adapters []string) {
	var round sync.WaitGroup
	misses := make([]int, len(adapters))
	tick := time.NewTicker(d.interval)
	defer tick.Stop()
	for {
		for i, adapter := range adapters {
			round.Go(func() { d.ask(ctx, node, gen, adapter, &misses[i]) })
		}
		round.Wait()
		if ctx.Err() != nil {
			return
		}
		d.once.Do(func() { close(d.first) })
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// ask reads one list. What stands in it is what the provider offers, and one where
// nobody listens offers nothing. Where it hangs or fails, its last list stands for
// a while, and for as long as it answers other requests (A56); where the fabric is at
// fault, or the Node stops, it stands for good: the session's end says the rest (P6, P9).
func (d *discovery) ask(ctx context.Context, node string, gen uint64, adapter string, misses *int) {
	began := time.Now()
	w := &listWriter{}
	res := d.runner.Do(ctx, dispatch.Attempt{
		RunID: wire.NewRunID(), Slot: pool.Slot{ID: listSlots | d.lists.Add(1), Node: node, Gen: gen, Adapter: adapter},
		Operation: "models", Method: "GET", Timeout: listBound, Grace: listGrace,
	}, w)
	if ctx.Err() != nil {
		return
	}
	switch v := verdictOf(res, w.status); v {
	case listGiven:
		*misses = 0
		targets, left := parseModels(w.body)
		if left > 0 {
			d.tell(ctx, slog.LevelWarn, node, adapter, slog.Int("left_out", left))
		}
		d.adopt(node, gen, adapter, targets)
	case listGone:
		*misses = 0
		d.adopt(node, gen, adapter, nil)
	case listMissed:
		if d.runner.Progresses(node, adapter, began) {
			return
		}
		attrs := []slog.Attr{slog.Int("status", w.status)}
		if res.Err != nil {
			attrs = append(attrs, slog.String("class", string(res.Err.Class)))
		}
		if *misses++; *misses < allowedMisses {
			return
		}
		if *misses == allowedMisses {
			d.tell(ctx, slog.LevelInfo, node, adapter, attrs...)
		}
		d.adopt(node, gen, adapter, nil)
	case listUnasked:
	}
}

func (d *discovery) tell(ctx context.Context, level slog.Level, node, adapter string, attrs ...slog.Attr) {
	d.log.LogAttrs(ctx, level, eventListFailed, append([]slog.Attr{slog.String("node", node), slog.String("adapter", adapter)}, attrs...)...)
}

// verdict says what an attempt to read a list tells of the provider.
type verdict int

const (
	listGiven   verdict = iota
	listGone            // nobody listens there: the Node itself says so
	listMissed          // it hung, could not be reached, or answered something else
	listUnasked         // it was not asked: nothing is known of it
)

func verdictOf(res dispatch.Result, status int) verdict {
	switch {
	case res.Err == nil && status == 200:
		return listGiven
	case res.Err == nil:
		return listMissed
	case !wire.IsRemote(res.Err) && res.Err.Class != wire.Protocol: // no word of the Node, or none in time: the fabric's own trouble
		return listUnasked
	case res.Err.Refused:
		return listGone
	}
	switch res.Err.Class {
	case wire.Unreachable, wire.Deadline, wire.Provider, wire.Stalled, wire.Protocol:
		return listMissed
	default: // the Node stops, is full, or has ended
		return listUnasked
	}
}

// parseModels reads the OpenAI list shape. What is no usable name is left out, and
// so is what is too many; left counts the latter.
func parseModels(body []byte) (out []string, left int) {
	var list struct {
		Data []struct {
			ID string `json:"id"`
		} `json:"data"`
	}
	if json.Unmarshal(body, &list) != nil {
		return nil, 0
	}
	for _, m := range list.Data {
		switch {
		case !usableModel(m.ID):
		case len(out) < listModels:
			out = append(out, m.ID)
		default:
			left++
		}
	}
	return out, left
}

func usableModel(id string) bool {
	if id == "" || len(id) > listName {
		return false
	}
	for _, r := range id {
		if r < ' ' || r == 0x7f || r == '�' {
			return false
		}
	}
	return true
}

// listWriter keeps a small answer.
type listWriter struct {
	status int
	body   []byte
}

func (w *listWriter) Start(status int, _ []*iopv1.Header) error {
	w.status = status
	return nil
}

func (w *listWriter) Body(p []byte) error {
	if len(w.body)+len(p) > listBytes {
		return wire.Errorf(wire.Provider, "the model list is longer than %d bytes", listBytes)
	}
	w.body = append(w.body, p...)
	return nil
}

func (w *listWriter) Flush() error                    { return nil }
func (w *listWriter) Trailer(_ []*iopv1.Header) error { return nil }
