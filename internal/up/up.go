package up

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/iop-fabric/iop/adapters/demo"
	"github.com/iop-fabric/iop/adapters/openai_compat"
	"github.com/iop-fabric/iop/agent"
	"github.com/iop-fabric/iop/broker"
	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/edge"
	"github.com/iop-fabric/iop/internal/bus"
	"github.com/iop-fabric/iop/internal/bus/natsbus"
	"github.com/iop-fabric/iop/internal/identity"
	"github.com/iop-fabric/iop/node"
	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/wire"
	"github.com/iop-fabric/iop/wire/iopv1"
)

// Version is what this build is called; main sets it before anything runs.
var Version = "dev"

// software says who a Node is, for people.
func software() string { return "iop/" + Version + " " + runtime.GOOS + "/" + runtime.GOARCH }

// Info is what `iop up` tells once it serves.
type Info struct {
	BaseURL   string `json:"base_url"`
	APIKey    string `json:"api_key"`
	AdminURL  string `json:"admin_url"`
	BrokerURL string `json:"broker_url"`
	DataDir   string `json:"data_dir"`
	// Models is what may be asked for right now.
	Models []string `json:"models"`
	// Principal is whose key APIKey is. Where the configuration knows only the
	// key's digest, APIKey is empty.
	Principal string `json:"-"`
	// FoundNone says that local model servers were looked for, and none answered.
	FoundNone bool `json:"-"`
}

// eventNoAdminURL: commands that ask this fabric must be told its admin listener.
const eventNoAdminURL = "up.admin_url_not_written"

// ErrLocked says that another process owns the folder.
var ErrLocked = errors.New("another iop is running on this data folder")

// Run starts the fabric and calls ready once callers are served. It returns
// when ctx has ended and everything has stopped, or when a part failed.
// models, if it is not nil, is called with what is on offer whenever that changes.
func Run(ctx context.Context, o Options, log *slog.Logger, ready func(Info), models func([]string)) error {
	edgeName, nodeName := o.Names()
	unlock, err := Lock(o.Folder)
	if err != nil {
		return err
	}
	defer unlock()
	if err := Prepare(o.Folder, edgeName, nodeName); err != nil {
		return err
	}
	cfg, err := Config(o)
	if err != nil {
		return err
	}
	if e := cfg.Broker.Enrolment; e != nil && cfg.Broker.TLS.Certificate == o.Folder.Certificate(identity.RoleBroker, "broker") {
		host, _ := e.HostPort()
		if err := renewBroker(o.Folder, host); err != nil {
			return err
		}
	}
	if _, err := renewOwn(o.Folder, cfg, time.Now()); err != nil { // what has expired would not start
		return err
	}
	fabric, err := build(cfg, o.Folder, log)
	if err != nil {
		return err
	}
	defer fabric.lookAfter(o.Folder)()
	fabric.hangup, fabric.again = o.Hangup, func() (*configs.File, error) {
		next := o
		if o.Again != nil {
			if next.File, err = o.Again(); err != nil {
				return nil, err
			}
		}
		return Config(next)
	}
	fabric.Edge.OnModels(models)
	// Who asks for the status finds the listener there, whatever its port.
	adminURL := o.Folder.AdminURL()
	defer os.Remove(adminURL)
	return fabric.Run(ctx, func() {
		info := fabric.Info(o.Folder)
		if err := os.WriteFile(adminURL, []byte(info.AdminURL+"\n"), 0o600); err != nil {
			log.LogAttrs(ctx, slog.LevelWarn, eventNoAdminURL, slog.String("error", err.Error()))
		}
		ready(info)
	})
}

// Info describes the running fabric; its key is the first of the configuration.
func (f *Fabric) Info(folder Folder) Info {
	info := Info{
		BaseURL: f.Edge.BaseURL(), AdminURL: "http://" + f.Edge.AdminAddr(),
		BrokerURL: f.Broker.ClientURL(), DataDir: string(folder),
	}
	if keys := f.cfg.Edge.Keys; len(keys) > 0 {
		info.Principal = keys[0].Name
		info.APIKey, _ = keys[0].Value()
	}
	for _, m := range f.Edge.Models() {
		info.Models = append(info.Models, m.ID)
	}
	info.FoundNone = slices.Equal(info.Models, []string{demo.Model}) && len(f.cfg.Edge.Nodes) == 1 &&
		len(f.cfg.Edge.Nodes[0].Adapters) == len(configs.LocalProviders())+1
	return info
}

func lock(f Folder) (unlock func(), err error) {
	file, err := os.OpenFile(f.path("lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("data folder: %w", err)
	}
	if err := lockFile(file); err != nil {
		file.Close()
		return nil, fmt.Errorf("%s: %w", f, ErrLocked)
	}
	return func() { file.Close() }, nil
}

// Fabric is broker, Edge and Node of one process.
type Fabric struct {
	Broker  *broker.Broker
	Edge    *edge.Edge
	Node    *node.Node
	Metrics *prometheus.Registry

	cfg        *configs.File
	log        *slog.Logger
	exchanging sync.Mutex // one step of an exchange at a time
	hangup     <-chan os.Signal
	again      Again
}

// Build makes the parts; nothing listens yet.
func Build(cfg *configs.File, log *slog.Logger) (*Fabric, error) { return build(cfg, "", log) }

// build is Build of a data folder, whose keys can be exchanged.
func build(cfg *configs.File, folder Folder, log *slog.Logger) (*Fabric, error) {
	f := &Fabric{cfg: cfg, log: log, Metrics: NewMetrics()}
	var err error
	if f.Broker, err = broker.New(*cfg.Broker, broker.Deps{Log: log.With(slog.String("role", "broker")), Metrics: f.Metrics, Now: time.Now}); err != nil {
		return nil, err
	}
	if f.Edge, err = edge.New(*cfg.Edge, edge.Deps{
		Dial: f.dialEdge, Log: log.With(slog.String("role", "edge")), Metrics: f.Metrics, Admin: authorityPaths(f.Broker, cfg.Edge.Name, cfg.Node.Name, f.exchanger(folder)),
		Issuers: f.issuers(folder),
	}); err != nil {
		return nil, err
	}
	urls := func() []string {
		if len(cfg.Node.Broker.URLs) > 0 {
			return cfg.Node.Broker.URLs
		}
		return []string{f.Broker.ClientURL()}
	}
	if f.Node, err = NewNode(*cfg.Node, urls, log.With(slog.String("role", "node")), f.Metrics); err != nil {
		return nil, err
	}
	return f, nil
}

// Run starts the parts in order, calls ready once, and stops them in order.
func (f *Fabric) Run(ctx context.Context, ready func()) error {
	part := func(name string, run func(context.Context) error) *running {
		r := &running{name: name, done: make(chan struct{})}
		var partCtx context.Context
		// Each part has a context of its own: the order of stopping is ours (I4).
		partCtx, r.cancel = context.WithCancel(context.WithoutCancel(ctx))
		go func() {
			defer close(r.done)
			r.err = run(partCtx)
		}()
		return r
	}
	var brokerPart, edgePart, nodePart *running
	stop := func(err error) error {
		for _, p := range []*running{edgePart, nodePart, brokerPart} { // I4
			if p != nil {
				err = errors.Join(err, p.stop())
			}
		}
		return err
	}
	// up waits until a part serves; false: it ended, or we were told to stop.
	up := func(p *running, ready <-chan struct{}) bool {
		select {
		case <-ready:
			return true
		case <-p.done:
		case <-ctx.Done():
		}
		return false
	}
	brokerPart = part("broker", f.Broker.Run)
	if !up(brokerPart, f.Broker.Ready()) {
		return stop(brokerPart.ended(ctx))
	}
	edgePart = part("edge", f.Edge.Run)
	if !up(edgePart, f.Edge.Ready()) {
		return stop(edgePart.ended(ctx))
	}
	nodePart = part("node", f.Node.Run)
	offers := f.Edge.Offers()
	for {
		select {
		case <-offers:
			offers = nil
			ready()
		case <-f.hangup:
			f.hungUp()
		case <-ctx.Done():
			return stop(nil)
		case <-brokerPart.done:
			return stop(brokerPart.ended(ctx))
		case <-nodePart.done:
			return stop(nodePart.ended(ctx))
		case <-edgePart.done:
			return stop(edgePart.ended(ctx))
		}
	}
}

// reload has every part read its keys. The Edge believes a new issuer before anybody
// shows it.
func (f *Fabric) reload() error {
	f.Edge.Reload()
	err := f.Broker.Reload()
	f.Node.Reload()
	return err
}

// hungUp does that at SIGHUP, and says what of the configuration needs a restart.
func (f *Fabric) hungUp() {
	f.exchanging.Lock()
	defer f.exchanging.Unlock()
	err := f.reload()
	read, unread := f.again()
	if err = errors.Join(err, unread); err != nil {
		f.log.LogAttrs(context.Background(), slog.LevelError, EventReloadFailed, slog.String("error", err.Error()))
	}
	if unread == nil {
		tellRestart(f.log.With(slog.String("role", "broker")), *f.cfg.Broker, *read.Broker, "")
		tellRestart(f.log.With(slog.String("role", "edge")), *f.cfg.Edge, *read.Edge, "issuers")
		tellRestart(f.log.With(slog.String("role", "node")), *f.cfg.Node, *read.Node, "")
	}
}

type running struct {
	name   string
	cancel context.CancelFunc
	done   chan struct{}
	err    error
}

// ended is the error of a part that stopped by itself without one of its own;
// its own is reported by stop.
func (r *running) ended(ctx context.Context) error {
	if ctx.Err() != nil || r.err != nil {
		return nil
	}
	return fmt.Errorf("%s ended unasked", r.name)
}

func (r *running) stop() error {
	r.cancel()
	<-r.done
	return r.err
}

func (f *Fabric) dialEdge(ctx context.Context, onError func(error)) (bus.Conn, error) {
	key, err := identity.LoadNKey(f.cfg.Edge.Broker.NKey)
	if err != nil {
		return nil, err
	}
	return natsbus.Dial(ctx, natsbus.Options{
		InProcess: f.Broker.InProcess(), Name: wire.NewToken() + wire.NewToken(),
		Inbox:      subjects.EdgeInbox(f.cfg.Edge.Name),
		NKeyPublic: key.Public(), Sign: key.Sign, Reconnect: true, OnError: onError,
	})
}

// NewNode makes a node daemon that dials the URLs that urls returns.
func NewNode(cfg configs.Node, urls func() []string, log *slog.Logger, metrics prometheus.Registerer) (*node.Node, error) {
	r, id, err := loadNode(cfg)
	if err != nil {
		return nil, err
	}
	instance := wire.NewToken()
	dial := func(ctx context.Context) (bus.Conn, error) {
		o := r.options(instance + wire.NewToken())
		o.URLs, o.Inbox = urls(), subjects.NodeInbox(cfg.Edge, cfg.Name, o.Name)
		conn, err := natsbus.Dial(ctx, o)
		if err != nil { // in words, with what to do about it
			return nil, fmt.Errorf("%s: %w", natsbus.Classify(err).Sentence, err)
		}
		return conn, nil
	}
	return node.New(cfg, node.Deps{
		Dial: dial, Adapters: NewAdapter, InstanceID: instance, Software: software(), Identity: id,
		Reload: func() (node.Identity, error) { // by the goroutine that dials
			newer, id, err := loadNode(cfg)
			if err == nil {
				r = newer
			}
			return id, err
		},
		Save:      func(c *identity.Certificate) error { return saveRenewed(cfg.Broker.TLS, c) },
		SaveTrust: func(b *iopv1.TrustBundle) error { return learnTrust(cfg.Broker.TLS.CA, b) },
		SaveUser:  func() error { return os.Rename(nextNKey(cfg.Broker.NKey), cfg.Broker.NKey) },
		Log:       log, Metrics: metrics,
	})
}

// nextNKey is the file of the nkey that is to follow the one in file.
func nextNKey(file string) string { return file + ".next" }

// learnTrust writes what a bundle says into a CA file, measured by what stands there:
// in an iop up it is the authority's own.
func learnTrust(file string, b *iopv1.TrustBundle) error {
	t, err := identity.LoadTrust(file)
	if err != nil {
		return err
	}
	next, changed, err := t.Learn(b)
	if err != nil || !changed {
		return err
	}
	return next.Save(file)
}

// loadNode reads what a node daemon dials and proves itself with.
func loadNode(cfg configs.Node) (r remote, id node.Identity, err error) {
	if r, err = loadRemote(cfg.Broker); err != nil {
		return r, id, err
	}
	curve, err := identity.LoadNKey(cfg.CurveKey)
	if err != nil {
		return r, id, err
	}
	if id := r.cert.ID(); id.Role != identity.RoleNode || id.Edge != cfg.Edge || id.Name != cfg.Name {
		return r, node.Identity{}, fmt.Errorf("%s: is the certificate of %s, but this is node %q of edge %q", cfg.Broker.TLS.Certificate, id, cfg.Name, cfg.Edge)
	}
	var next *identity.NKey
	if file := nextNKey(cfg.Broker.NKey); present(file) {
		if next, err = identity.LoadNKey(file); err != nil {
			return r, id, err
		}
	}
	return r, node.Identity{Certificate: r.cert, User: r.user, NextUser: next, Curve: curve, Trust: r.trust}, nil
}

// saveRenewed keeps a certificate that was signed anew for the key that is there.
func saveRenewed(files configs.TLS, c *identity.Certificate) error {
	if err := identity.SettleKey(files.Certificate, files.Key); err != nil { // of a copy that was cut off
		return err
	}
	key, err := identity.LoadKey(files.Key)
	if err != nil {
		return err
	}
	if _, err := key.Certificate(c.Chain); err != nil {
		return fmt.Errorf("%s: another key was put there meanwhile: %w", files.Key, err)
	}
	return c.SaveChain(files.Certificate)
}

// NewAdapter makes an adapter of the type its configuration names.
func NewAdapter(c *iopv1.AdapterConfig) (agent.Provider, error) {
	switch c.GetType() {
	case "openai_compat":
		o := openai_compat.Options{
			Name: c.GetName(), BaseURL: c.GetOpenaiCompat().GetBaseUrl(),
			Profile: profileOf(c.GetOpenaiCompat().GetProtocolProfile()),
		}
		if key := c.GetOpenaiCompat().GetStaticKeyName(); key != "" {
			o.StaticKey = func() (string, error) {
				v := os.Getenv(key)
				if v == "" {
					return "", fmt.Errorf("the key %s is not set on this node", key)
				}
				return v, nil
			}
		}
		return openai_compat.New(o)
	case "demo":
		return demo.New(demo.Options{ChunkDelay: time.Duration(c.GetDemo().GetChunkDelayMs()) * time.Millisecond}), nil
	default:
		return nil, fmt.Errorf("adapter %q: type %q is not one of openai_compat, demo", c.GetName(), c.GetType())
	}
}
