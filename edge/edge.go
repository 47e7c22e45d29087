package edge

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/edge/dispatch"
	"github.com/iop-fabric/iop/edge/httpapi"
	"github.com/iop-fabric/iop/edge/pool"
	"github.com/iop-fabric/iop/edge/registry"
	"github.com/iop-fabric/iop/internal/bus"
	"github.com/iop-fabric/iop/internal/identity"
	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/wire"
)

// Deps are what an Edge works with and does not make itself.
type Deps struct {
	// Dial connects to the broker; onError gets the connection's asynchronous
	// errors. The connection comes back by itself when it is lost.
	Dial    func(ctx context.Context, onError func(error)) (bus.Conn, error)
	Log     *slog.Logger
	Metrics *prometheus.Registry
	// Issuers reads edge.issuers again, when the Edge is told to; nil: they never change.
	Issuers func() ([]string, error)
	// Admin serves further paths of the admin API, see admin.Config.Mount.
	Admin map[string]http.Handler
}

// Edge is one gateway.
type Edge struct {
	cfg      configs.Edge
	deps     Deps
	log      *slog.Logger
	metrics  *metrics
	cert     atomic.Pointer[identity.Certificate]
	trust    atomic.Pointer[identity.Trust]
	issuers  atomic.Pointer[[]string]
	nkey     string          // public, as it was last read; watchCertificate's
	given    map[string]bool // the nodes of the configuration, beside which others are taken in
	callers  httpapi.Config
	instance string

	adminToken [sha256.Size]byte
	now        func() time.Time

	// Made by Run.
	bus       bus.Conn
	loop      *loop
	dispatch  *dispatch.Dispatcher
	discovery *discovery
	verify    chan register

	budgets budgets // the bus callback's own

	// The loop's own.
	registered map[string]*registration
	beats      uint64

	onModels        func([]string)
	stopping        atomic.Bool
	listener, admin net.Listener
	ready           chan struct{}
	offers          chan struct{}
	asked           chan struct{} // one place: Reload was called
}

// New loads keys and certificates, and checks what can be checked before
// anything listens.
func New(cfg configs.Edge, deps Deps) (*Edge, error) {
	e := &Edge{
		cfg: cfg, deps: deps, log: deps.Log, instance: wire.NewToken(), now: time.Now,
		verify: make(chan register, verifyQueue), registered: map[string]*registration{}, given: map[string]bool{},
		budgets: budgets{of: map[string]*budget{}},
		ready:   make(chan struct{}), offers: make(chan struct{}), asked: make(chan struct{}, 1),
	}
	cert, err := e.loadCertificate()
	if err != nil {
		return nil, err
	}
	e.cert.Store(cert)
	trust, err := identity.LoadTrust(cfg.Broker.TLS.CA)
	if err != nil {
		return nil, err
	}
	e.trust.Store(&trust)
	e.issuers.Store(&cfg.Issuers)
	for _, n := range cfg.Nodes {
		e.given[n.Name] = true
	}
	var keys []httpapi.Key
	for _, k := range cfg.Keys {
		digest, err := k.Digest()
		if err != nil {
			return nil, fmt.Errorf("edge: %w", err)
		}
		keys = append(keys, httpapi.Key{Name: k.Name, Digest: digest, Models: k.Models})
	}
	if cfg.AdminToken.Set() {
		if e.adminToken, err = cfg.AdminToken.Digest(); err != nil {
			return nil, fmt.Errorf("edge: %w", err)
		}
	}
	if e.callers, err = httpapi.ConfigOf(&e.cfg, keys); err != nil {
		return nil, err
	}
	e.metrics = newMetrics(deps.Metrics)
	e.metrics.expiry.Set(float64(cert.Leaf.NotAfter.Unix()))
	deps.Metrics.MustRegister(newGauges(e.State, e.now))
	return e, nil
}

// Ready is closed once callers are served.
func (e *Edge) Ready() <-chan struct{} { return e.ready }

// Offers is closed once a node is ready and was asked what it offers, or a
// model is on offer for a second.
func (e *Edge) Offers() <-chan struct{} { return e.offers }

// Addr is where callers are served, after Ready.
func (e *Edge) Addr() string { return e.listener.Addr().String() }

// BaseURL is what a client library is given, after Ready.
func (e *Edge) BaseURL() string {
	scheme := "http://"
	if e.cfg.TLS != (configs.KeyPair{}) {
		scheme = "https://"
	}
	return scheme + e.Addr() + "/v1"
}

// AdminAddr is where health and metrics are, after Ready.
func (e *Edge) AdminAddr() string { return e.admin.Addr().String() }

// OnModels has fn called, on a goroutine of Edge's, with the names of the models
// on offer whenever they change. It is set before Run.
func (e *Edge) OnModels(fn func([]string)) { e.onModels = fn }

// Models lists what callers may ask for now.
func (e *Edge) Models() []httpapi.Model { return e.loop.Models() }

// Run serves until ctx ends, then stops in order (I4).
func (e *Edge) Run(ctx context.Context) error {
	var err error
	if e.listener, err = listen(ctx, "edge.listen", e.cfg.Listen); err != nil {
		return err
	}
	defer e.listener.Close()
	if e.admin, err = listen(ctx, "edge.admin_listen", e.cfg.AdminListen); err != nil {
		return err
	}
	defer e.admin.Close()
	var servers errgroup.Group
	failed := make(chan struct{}, 2)
	serve := func(s *http.Server, l net.Listener) {
		servers.Go(func() error {
			run := s.Serve
			if s.TLSConfig != nil {
				run = func(l net.Listener) error { return s.ServeTLS(l, "", "") }
			}
			err := run(l)
			failed <- struct{}{}
			if errors.Is(err, http.ErrServerClosed) {
				return nil
			}
			return err
		})
	}
	// Health is told from the start: the dial may take as long as the broker does.
	admin := &http.Server{
		Handler:           e.adminHandler(),
		ReadHeaderTimeout: 10 * time.Second, IdleTimeout: time.Minute,
	}
	serve(admin, e.admin)

	names := make([]string, len(e.cfg.Nodes))
	for i, n := range e.cfg.Nodes {
		names[i] = n.Name
	}
	reg := registry.New(registry.Config{Nodes: names, HeartbeatBound: e.cfg.HeartbeatBound, PendingBound: e.cfg.PendingBound})
	e.loop = newLoop(reg, pool.New(), e, e.cfg.HeartbeatInterval, e.log, e.metrics)
	e.loop.in.put(item{isPool: true, pool: pool.SetConfig(poolConfig(&e.cfg))}, false)
	// Callers too: they wait in the queue until a node is there (P9).
	api := httpapi.New(e.callers, httpapi.Deps{
		Pool: callersPool{e.loop, e.ready}, Runner: e, Log: e.log, Metrics: e.deps.Metrics, Now: e.now,
	})

	// Parts outlive ctx: stop ends them in order.
	base := context.WithoutCancel(ctx)
	partCtx, stopParts := context.WithCancel(base)
	defer stopParts()
	loopCtx, stopLoop := context.WithCancel(base)
	defer stopLoop()
	var parts, loops errgroup.Group
	loops.Go(func() error { return e.loop.run(loopCtx) })
	callers := api.Server(api.Handler())
	answers, cutAnswers := context.WithCancelCause(base)
	defer cutAnswers(nil)
	callers.BaseContext = func(net.Listener) context.Context { return answers }
	serve(callers, httpapi.Listener(e.listener, connectionLimit(e.cfg.Limits.Connections)))

	switch err = e.connect(ctx, partCtx, &parts); {
	case err == nil:
		e.log.LogAttrs(ctx, slog.LevelInfo, eventStarted, slog.String("listen", e.Addr()), slog.String("admin", e.AdminAddr()))
		close(e.ready)
		select {
		case <-ctx.Done():
		case <-failed:
		case <-e.bus.Closed():
			err = fmt.Errorf("edge: the connection to the broker ended for good: %w", e.bus.Err())
		}
	case ctx.Err() != nil: // told to stop while it dialled
		err = nil
	}
	e.log.LogAttrs(ctx, slog.LevelInfo, eventStopping)
	err = errors.Join(err, e.stop(base, callers, admin, cutAnswers), servers.Wait())
	stopParts()
	err = errors.Join(err, parts.Wait())
	stopLoop()
	err = errors.Join(err, loops.Wait())
	if e.bus != nil {
		e.bus.Close()
	}
	e.log.LogAttrs(base, slog.LevelInfo, eventStopped)
	return err
}

// connect dials the broker, however long it takes to appear, and starts what needs
// it. Nothing reads bus, dispatch or discovery before a node speaks, which is after.
func (e *Edge) connect(ctx, partCtx context.Context, parts *errgroup.Group) (err error) {
	if e.bus, err = e.deps.Dial(ctx, e.busError); err != nil {
		return fmt.Errorf("edge: broker: %w", err)
	}
	e.dispatch = dispatch.New(dispatch.Config{Edge: e.cfg.Name, StreamMemory: e.cfg.Limits.Streams, HeartbeatBound: e.cfg.HeartbeatBound}, dispatch.Deps{
		Bus: e.bus, Return: e.loop.returnSlot, Misbehaved: e.misbehaved, Draining: e.draining, Log: e.log, Metrics: e.deps.Metrics,
	})
	e.discovery = newDiscovery(e.dispatch, func(node string) []string { return listed(&e.cfg, node) },
		func(node string, gen uint64, adapter string, targets []string) {
			e.loop.in.put(item{isPool: true, pool: pool.AdoptTargets(node, gen, adapter, targets)}, false)
		}, e.cfg.DiscoverInterval, e.log)
	parts.Go(func() error { return e.dispatch.Run(partCtx) })
	e.discovery.open(partCtx)
	parts.Go(func() error { return e.discovery.run(partCtx) })
	parts.Go(func() error { return e.watchOffers(partCtx) })
	parts.Go(func() error { return e.watchCertificate(partCtx) })
	for range verifiers {
		parts.Go(func() error { return e.verifyRegistrations(partCtx) })
	}
	return e.subscribe(ctx)
}

// Do implements dispatch.Runner: a slot is granted only once a node is ready, so
// dispatch is there.
func (e *Edge) Do(ctx context.Context, a dispatch.Attempt, w dispatch.Writer) dispatch.Result {
	return e.dispatch.Do(ctx, a, w)
}

// callersPool is the loop as callers meet it: before the Edge has its broker no model
// is unknown, for nobody could have listed one.
type callersPool struct {
	*loop
	ready <-chan struct{}
}

// Acquire implements httpapi.Pool.
func (p callersPool) Acquire(ctx context.Context, want *httpapi.Want, grant *httpapi.Grant) error {
	err := p.loop.Acquire(ctx, want, grant)
	if errors.Is(err, pool.ErrUnknownModel) {
		select {
		case <-p.ready:
		default:
			return pool.ErrNoProvider
		}
	}
	return err
}

// cutGrace is how long an answer that was cut may take to say so.
const cutGrace = 2 * time.Second

// stop ends callers, then sessions (I4).
func (e *Edge) stop(base context.Context, callers, admin *http.Server, cut context.CancelCauseFunc) error {
	e.stopping.Store(true)
	e.loop.in.put(item{isPool: true, pool: pool.Stopping()}, false)
	e.loop.in.put(item{reg: registry.Stopping{}}, false)
	grace, cancel := context.WithTimeout(base, e.cfg.StopGrace)
	defer cancel()
	err := callers.Shutdown(grace)
	if errors.Is(err, context.DeadlineExceeded) {
		// What still runs ends with one terminal, which its caller is told (D7).
		cut(pool.ErrStopping)
		told, cancelTold := context.WithTimeout(base, cutGrace)
		defer cancelTold()
		if err = callers.Shutdown(told); errors.Is(err, context.DeadlineExceeded) {
			err = callers.Close()
		}
	}
	if err2 := admin.Close(); err == nil {
		err = err2
	}
	ask, cancelAsk := context.WithTimeout(base, time.Second)
	defer cancelAsk()
	e.loop.in.put(item{reg: registry.Stopped{}}, false)
	err = errors.Join(err, e.loop.ask(ask, func() {}))
	if e.bus != nil {
		_ = e.bus.Flush(ask) // where the broker is gone already, nobody is left to be told
	}
	return err
}

func (e *Edge) subscribe(ctx context.Context) error {
	for _, s := range []struct {
		subject string
		fn      func(bus.Msg)
	}{
		{subjects.CtlWildcard(e.cfg.Name), e.onCtl},
		{subjects.NoRespondersWildcard(e.cfg.Name), e.onNoResponders},
		{subjects.UpWildcard(e.cfg.Name), e.onUp},
	} {
		if _, err := e.bus.Subscribe(s.subject, s.fn); err != nil {
			return fmt.Errorf("edge: subscribe: %w", err)
		}
	}
	if err := e.bus.Flush(ctx); err != nil {
		return fmt.Errorf("edge: subscribe: %w", err)
	}
	return nil
}

// checkReady is /readyz: the broker is there, at least one node is ready, and one was
// asked what it offers, where that is the list of models.
func (e *Edge) checkReady() error {
	if e.stopping.Load() {
		return errors.New("stopping")
	}
	select {
	case <-e.ready:
	default:
		return errors.New("not connected to the broker yet")
	}
	select {
	case <-e.bus.Closed():
		return errors.New("no connection to the broker")
	default:
	}
	if len(*e.loop.live.Load()) == 0 {
		return errors.New("no node is ready")
	}
	select {
	case <-e.offers:
	default:
		return errors.New("no node was asked for its models yet")
	}
	return nil
}

// watchOffers closes offers and logs changes of the model list.
func (e *Edge) watchOffers(ctx context.Context) error {
	first := e.discovery.first
	var settle <-chan time.Time
	offered := false
	offer := func() {
		if !offered {
			offered = true
			close(e.offers)
		}
	}
	if !e.cfg.Models.Auto {
		offer()
	}
	var last []string
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-first:
			first = nil
			// What the lists led to is in the loop's inbox before this question.
			if e.loop.ask(ctx, func() {}) == nil {
				offer()
			}
		case <-settle:
			offer()
		case <-e.loop.changed:
			var names []string
			for _, m := range e.Models() {
				names = append(names, m.ID)
			}
			if slices.Equal(names, last) {
				continue
			}
			last = names
			if settle == nil {
				settle = time.After(time.Second)
			}
			e.log.LogAttrs(ctx, slog.LevelInfo, eventModelsChanged, slog.Any("models", names))
			if e.onModels != nil {
				e.onModels(names)
			}
		}
	}
}

func (e *Edge) misbehaved(node string, gen uint64, reason string) {
	e.log.LogAttrs(context.Background(), slog.LevelWarn, eventMisbehaved,
		slog.String("node", node), slog.Uint64("generation", gen), slog.String("reason", reason))
	e.loop.in.put(item{reg: registry.Misbehaved{Node: node, Gen: gen}}, true)
}

// draining: what refuses work because it drains says by that what its next heartbeat
// will say, and lives.
func (e *Edge) draining(node string, gen uint64) {
	e.loop.in.put(item{reg: registry.HeartbeatReceived{Node: node, Gen: gen, Draining: true}}, true)
}

func (e *Edge) busError(err error) {
	e.metrics.busErrors.Inc()
	e.log.LogAttrs(context.Background(), slog.LevelWarn, eventBusError, slog.String("error", err.Error()))
}

// listen opens a listener and says what is wrong with the address in words.
func listen(ctx context.Context, key, addr string) (net.Listener, error) {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", addr)
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return nil, fmt.Errorf("%s: %s is in use by another program: choose another address, or port 0 to have one picked", key, addr)
	case err != nil:
		return nil, fmt.Errorf("%s: %w", key, err)
	}
	return l, nil
}

// connectionLimit is how many callers' connections there may be at once: what is
// configured, or three quarters of the files this process may open.
func connectionLimit(configured int) int {
	if configured > 0 {
		return configured
	}
	return max(16, maxFiles()/4*3)
}
