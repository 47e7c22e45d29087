package up

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"reflect"
	"strings"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/iop-fabric/iop/broker"
	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/edge/admin"
	"github.com/iop-fabric/iop/edge/httpapi"
)

// EventDialFailed: an Edge's attempt to reach the broker failed; it tries again.
const EventDialFailed = "edge.dial_failed"

// ProcessInfo is what a process with one part tells once it serves.
type ProcessInfo struct {
	Role      string `json:"role"`
	Name      string `json:"name"`
	BaseURL   string `json:"base_url,omitempty"`
	BrokerURL string `json:"broker_url,omitempty"`
	AdminURL  string `json:"admin_url,omitempty"`
}

// NewMetrics is a process's registry, with what every process tells of itself.
func NewMetrics() *prometheus.Registry {
	m := prometheus.NewRegistry()
	m.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

// server is a part that others dial, or that admits for one: broker, leaf and
// session service.
type server interface {
	Run(ctx context.Context) error
	Ready() <-chan struct{}
	Healthy() error // once ready: what is lacking now
	Reload() error  // certificates, for new connections (B8)
}

// Again reads the process's configuration anew.
type Again func() (*configs.File, error)

// membersOf reads the configured members of a section again; serves is the section as it
// was at the start, of gives it and its members, or nil.
func membersOf[T any](again Again, section string, log *slog.Logger, serves T, of func(*configs.File) (*T, []configs.Member)) func() ([]configs.Member, error) {
	return func() ([]configs.Member, error) {
		f, err := again()
		if err != nil {
			return nil, err
		}
		read, members := of(f)
		if read == nil {
			return nil, fmt.Errorf("the configuration has no section %s any more", section)
		}
		tellRestart(log, serves, *read, "members")
		return members, nil
	}
}

// RunBroker runs a broker until ctx ends. A hangup makes it read its keys, and of again
// its members; nil: never.
func RunBroker(ctx context.Context, cfg configs.Broker, again Again, log *slog.Logger, hangup <-chan os.Signal, ready func(ProcessInfo)) error {
	metrics := NewMetrics()
	b, err := broker.New(cfg, broker.Deps{Log: log, Metrics: metrics, Now: time.Now, Members: membersOf(again, "broker", log, cfg,
		func(f *configs.File) (*configs.Broker, []configs.Member) {
			if f.Broker == nil {
				return nil, nil
			}
			return f.Broker, f.Broker.Members
		})})
	if err != nil {
		return err
	}
	api, err := authorityHandler(b, "broker", cfg.AdminListen, cfg.AdminToken, configs.EdgeOf(cfg.Enrolment, cfg.Members))
	if err != nil {
		return err
	}
	return runServer(ctx, b, listener{"broker.admin_listen", cfg.AdminListen, api}, metrics, log, hangup, func(admin string) {
		ready(ProcessInfo{Role: "broker", Name: cfg.Name, BrokerURL: b.ClientURL(), AdminURL: admin})
	})
}

// RunLeaf runs a leaf broker until ctx ends, however long the hub takes to appear. A
// hangup makes it read its keys, and say what of again needs a restart; nil: never.
func RunLeaf(ctx context.Context, cfg configs.Leaf, again Again, log *slog.Logger, hangup <-chan os.Signal, ready func(ProcessInfo)) error {
	metrics := NewMetrics()
	l, err := broker.NewLeaf(cfg, broker.Deps{Log: log, Metrics: metrics, Now: time.Now})
	if err != nil {
		return err
	}
	s := leafServer{l, func() error {
		return readAgain(log, cfg, again, "leaf", func(f *configs.File) *configs.Leaf { return f.Leaf })
	}}
	return runServer(ctx, s, listener{key: "leaf.admin_listen", addr: cfg.AdminListen}, metrics, log, hangup, func(admin string) {
		ready(ProcessInfo{Role: "leaf", Name: cfg.Name, BrokerURL: l.ClientURL(), AdminURL: admin})
	})
}

// leafServer is a leaf whose Reload looks at its configuration, too.
type leafServer struct {
	*broker.Leaf
	read func() error
}

func (l leafServer) Reload() error { return errors.Join(l.Leaf.Reload(), l.read()) }

// RunService runs a session service beside a nats-server of its own. A hangup makes it
// read its keys, and of again its members.
func RunService(ctx context.Context, cfg configs.Service, again Again, log *slog.Logger, hangup <-chan os.Signal, ready func(ProcessInfo)) error {
	metrics := NewMetrics()
	s, err := broker.NewService(cfg, broker.Deps{Log: log, Metrics: metrics, Now: time.Now, Members: membersOf(again, "service", log, cfg,
		func(f *configs.File) (*configs.Service, []configs.Member) {
			if f.Service == nil {
				return nil, nil
			}
			return f.Service, f.Service.Members
		})})
	if err != nil {
		return err
	}
	api, err := authorityHandler(s, "service", cfg.AdminListen, cfg.AdminToken, configs.EdgeOf(cfg.Enrolment, cfg.Members))
	if err != nil {
		return err
	}
	return runServer(ctx, s, listener{"service.admin_listen", cfg.AdminListen, api}, metrics, log, hangup, func(admin string) {
		ready(ProcessInfo{Role: "service", Name: cfg.Name, AdminURL: admin})
	})
}

// authorityHandler is the admin API of what has an admin token; nil: it has none.
// section names it in the configuration, edge whose members are meant.
func authorityHandler(a authority, section, listen string, t configs.AdminToken, edge string) (http.Handler, error) {
	if !t.Set() || listen == "" {
		return nil, nil //nolint:nilnil // none is no error
	}
	token, err := t.Digest()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", section, err)
	}
	host, _, _ := net.SplitHostPort(listen) // it was validated
	return admin.Guard{Token: token, Host: host, Listener: section + ".admin_listen"}.Handler(authorityPaths(a, edge, "", nil)), nil
}

// listener is an admin listener to be: the setting that names it, its address,
// and what it serves below /api/.
type listener struct {
	key, addr string
	api       http.Handler
}

func runServer(ctx context.Context, s server, at listener, metrics *prometheus.Registry, log *slog.Logger,
	hangup <-chan os.Signal, tell func(admin string),
) error {
	own, err := listenAdmin(ctx, at, metrics, func() error {
		select {
		case <-s.Ready():
			return s.Healthy()
		default:
			return errors.New("it is starting")
		}
	})
	if err != nil {
		return err
	}
	return runPart(ctx, part{
		run: s.Run, ready: s.Ready(), admin: own, hangup: hangup,
		tell: func() { tell(own.url()) },
		reload: func() {
			if err := s.Reload(); err != nil {
				log.LogAttrs(ctx, slog.LevelError, EventReloadFailed, slog.String("error", err.Error()))
			}
		},
	})
}

// EventNeedsRestart: what SIGHUP has read differs from what serves in more than can
// change while it runs; it goes on as it was started.
const EventNeedsRestart = "process.needs_restart"

// tellRestart says which settings of a section are others than those that serve (B1);
// but is the one that changes in place.
func tellRestart[T any](log *slog.Logger, serves, read T, but string) {
	var names []string
	a, b := reflect.ValueOf(serves), reflect.ValueOf(read)
	for i := range a.NumField() {
		name, _, _ := strings.Cut(a.Type().Field(i).Tag.Get("yaml"), ",")
		if name != but && !reflect.DeepEqual(a.Field(i).Interface(), b.Field(i).Interface()) {
			names = append(names, name)
		}
	}
	if len(names) > 0 {
		log.LogAttrs(context.Background(), slog.LevelWarn, EventNeedsRestart, slog.Any("settings", names))
	}
}

// readAgain reads the configuration anew, and tells which settings of a section, of which
// none changes in place, need a restart.
func readAgain[T any](log *slog.Logger, serves T, again Again, name string, section func(*configs.File) *T) error {
	f, err := again()
	if err != nil {
		return err
	}
	read := section(f)
	if read == nil {
		return fmt.Errorf("the configuration has no section %s any more", name)
	}
	tellRestart(log, serves, *read, "")
	return nil
}

// EventReloadFailed: what was to be read anew is not good; what served goes on.
const EventReloadFailed = "process.reload_failed"

// RunEdge runs an Edge until ctx ends, however long the broker takes to appear. A hangup
// makes it read its keys towards the broker, and of again the issuers; nil: never.
func RunEdge(ctx context.Context, cfg configs.Edge, again Again, log *slog.Logger, hangup <-chan os.Signal, ready func(ProcessInfo)) error {
	e, err := NewEdge(cfg, func() ([]string, error) {
		f, err := again()
		if err != nil {
			return nil, err
		}
		if f.Edge == nil {
			return nil, errors.New("the configuration has no section edge any more")
		}
		tellRestart(log, cfg, *f.Edge, "issuers")
		return f.Edge.Issuers, nil
	}, log, NewMetrics())
	if err != nil {
		return err
	}
	return runPart(ctx, part{run: e.Run, ready: e.Ready(), hangup: hangup, reload: e.Reload, tell: func() {
		ready(ProcessInfo{Role: "edge", Name: cfg.Name, BaseURL: e.BaseURL(), AdminURL: "http://" + e.AdminAddr()})
	}})
}

// RunNode runs a Node until ctx ends, its attempts are exhausted or something
// local is broken (S4). It calls ready at once: a Node is up without any remote (S1).
// A hangup makes it dial anew with the keys that its files hold then, and say what of
// again needs a restart; nil: never.
func RunNode(ctx context.Context, cfg configs.Node, again Again, log *slog.Logger, hangup <-chan os.Signal, ready func(ProcessInfo)) error {
	metrics := NewMetrics()
	n, err := NewNode(cfg, func() []string { return cfg.Broker.URLs }, log, metrics)
	if err != nil {
		return err
	}
	own, err := listenAdmin(ctx, listener{key: "node.admin_listen", addr: cfg.AdminListen}, metrics, func() error {
		s := n.State()
		switch {
		case s.State == "ready":
			return nil
		case s.LastReason != "":
			return fmt.Errorf("the session is %s; before it: %s", s.State, s.LastReason)
		default:
			return fmt.Errorf("the session is %s", s.State)
		}
	})
	if err != nil {
		return err
	}
	started := make(chan struct{})
	close(started)
	reload := func() {
		n.Reload()
		if err := readAgain(log, cfg, again, "node", func(f *configs.File) *configs.Node { return f.Node }); err != nil {
			log.LogAttrs(ctx, slog.LevelError, EventReloadFailed, slog.String("error", err.Error()))
		}
	}
	return runPart(ctx, part{run: n.Run, ready: started, admin: own, hangup: hangup, reload: reload, tell: func() {
		ready(ProcessInfo{Role: "node", Name: cfg.Name, AdminURL: own.url()})
	}})
}

// part is the one thing a process runs.
type part struct {
	run    func(context.Context) error
	ready  <-chan struct{}
	tell   func() // once, when ready
	admin  *adminListener
	hangup <-chan os.Signal
	reload func()
}

// runPart runs it until it ends: ctx ending is how it is told to (D7).
func runPart(ctx context.Context, p part) error {
	var ended error
	done := make(chan struct{})
	go func() {
		defer close(done)
		ended = p.run(ctx)
	}()
	for ready := p.ready; ; {
		select {
		case <-ready:
			ready = nil
			p.tell()
		case <-p.hangup:
			p.reload()
		case <-done:
			if ctx.Err() != nil && errors.Is(ended, context.Canceled) {
				ended = nil // told to stop in the middle of starting
			}
			return errors.Join(ended, p.admin.close())
		}
	}
}

// adminListener serves health and metrics; nil serves nothing.
type adminListener struct {
	l      net.Listener
	server *http.Server
	done   chan struct{}
}

// listenAdmin starts one; an empty address is none.
func listenAdmin(ctx context.Context, at listener, metrics *prometheus.Registry, ready func() error) (*adminListener, error) {
	if at.addr == "" {
		return nil, nil //nolint:nilnil // a listener that is off is nil, and its methods know
	}
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", at.addr)
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return nil, fmt.Errorf("%s: %s is in use by another program: choose another address, or port 0 to have one picked", at.key, at.addr)
	case err != nil:
		return nil, fmt.Errorf("%s: %w", at.key, err)
	}
	mux := http.NewServeMux()
	mux.Handle("/", httpapi.AdminHandler(func() error { return nil }, ready, metrics))
	if at.api != nil {
		mux.Handle("/api/", at.api)
	}
	a := &adminListener{l: l, done: make(chan struct{}), server: &http.Server{
		Handler:           admin.WholeBodies(mux),
		ReadHeaderTimeout: 10 * time.Second, IdleTimeout: time.Minute,
	}}
	go func() {
		defer close(a.done)
		_ = a.server.Serve(l) // health is not worth the work it tells of: that goes on
	}()
	return a, nil
}

func (a *adminListener) url() string {
	if a == nil {
		return ""
	}
	return "http://" + a.l.Addr().String()
}

func (a *adminListener) close() error {
	if a == nil {
		return nil
	}
	err := a.server.Close()
	<-a.done
	return err
}
