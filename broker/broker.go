package broker

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/identity"
	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/wire"
)

// Deps are the collaborators; each may be left out.
type Deps struct {
	Log     *slog.Logger          // nil: nothing is logged
	Metrics prometheus.Registerer // nil: metrics of its own that nobody reads
	Now     func() time.Time      // nil: the wall clock
	// Members reads the configured members again, at Reload; nil: they never change.
	Members func() ([]configs.Member, error)
}

// Broker is an embedded NATS server and the session service beside it.
type Broker struct {
	authority
	text   string
	routes atomic.Pointer[certificates] // of the cluster's routes; nil where there are none
	door   door
	ran    atomic.Bool
	grace  time.Duration // retireGrace
	// Set before ready is closed, not changed afterwards.
	server     *server.Server
	url        string
	leafURL    string
	clusterURL string
}

// keys are the broker's nkeys: the issuer and the session service's three.
type keys struct {
	issuer, system, callout, service *identity.NKey
}

func (k keys) public() publicKeys {
	return publicKeys{
		issuer: k.issuer.Public(), system: k.system.Public(),
		callout: k.callout.Public(), service: k.service.Public(),
	}
}

// certificates are what one handshake uses; they are swapped as a whole.
type certificates struct {
	tls   *tls.Config
	trust trust
	roots identity.Trust
	leaf  *x509.Certificate // our own
	until time.Time
}

var errRan = errors.New("broker: it has run already; make a new one")

// ErrNotReady: the broker does not run yet.
var ErrNotReady = errors.New("broker: not ready")

// New loads keys and certificates and checks the configuration. It starts nothing.
func New(cfg configs.Broker, deps Deps) (*Broker, error) {
	cfg = withDefaults(cfg)
	b := &Broker{grace: retireGrace}
	if cfg.StoreDir == "" {
		return nil, errors.New("broker: store_dir is empty: generations must be kept somewhere")
	}
	if err := b.load(cfg, identity.RoleBroker, deps); err != nil {
		return nil, err
	}
	if err := checkEdgeKeys(cfg.EdgeKeys, b.keys.public()); err != nil {
		return nil, err
	}
	b.alone, b.embedded = cfg.Cluster == nil, true
	if !b.alone {
		if err := checkCluster(cfg); err != nil {
			return nil, err
		}
		b.replicas = cfg.Cluster.Replicas
		if err := b.loadRoutes(); err != nil {
			return nil, err
		}
	}
	err := b.invites()
	if err != nil {
		return nil, err
	}
	if b.text, err = configText(cfg, b.keys.public(), Embedded); err != nil {
		return nil, err
	}
	if _, err := newOptions(b.text, b.tlsConfig); err != nil {
		return nil, err
	}
	return b, b.measure(deps)
}

func withDefaults(cfg configs.Broker) configs.Broker {
	if cfg.Name == "" {
		cfg.Name = "broker"
	}
	if cfg.Listen == "" {
		cfg.Listen = "127.0.0.1:4222"
	}
	if cfg.TrustDomain == "" {
		cfg.TrustDomain = identity.DefaultTrustDomain
	}
	if cfg.HeartbeatBound <= 0 {
		cfg.HeartbeatBound = wire.HeartbeatBound
	}
	cfg.Cluster = clusterDefaults(cfg)
	return cfg
}

func loadKeys(cfg configs.Broker) (keys, error) {
	var k keys
	seen := map[string]string{}
	for _, want := range []struct {
		what, file string
		kind       nkeys.PrefixByte
		to         **identity.NKey
	}{
		{"issuer_key", cfg.IssuerKey, nkeys.PrefixByteAccount, &k.issuer},
		{"system_key", cfg.SystemKey, nkeys.PrefixByteUser, &k.system},
		{"callout_key", cfg.CalloutKey, nkeys.PrefixByteUser, &k.callout},
		{"service_key", cfg.ServiceKey, nkeys.PrefixByteUser, &k.service},
	} {
		if want.file == "" {
			return k, fmt.Errorf("broker: %s is not set: it names the file of an nkey seed", want.what)
		}
		key, err := identity.LoadNKey(want.file)
		if err != nil {
			return k, fmt.Errorf("broker: %s: %w", want.what, err)
		}
		if nkeys.Prefix(key.Public()) != want.kind {
			return k, fmt.Errorf("broker: %s: %s holds the wrong kind of nkey: want one for %s", want.what, want.file, want.kind)
		}
		if other, ok := seen[key.Public()]; ok {
			return k, fmt.Errorf("broker: %s and %s are the same key: each connection needs its own", other, want.what)
		}
		seen[key.Public()] = want.what
		*want.to = key
	}
	return k, nil
}

func checkEdgeKeys(edgeKeys map[string]string, own publicKeys) error {
	seen := map[string]bool{own.system: true, own.callout: true, own.service: true}
	for edge, key := range edgeKeys {
		if err := subjects.CheckName(edge); err != nil {
			return fmt.Errorf("broker: edge_keys: %w", err)
		}
		if !nkeys.IsValidPublicUserKey(key) {
			return fmt.Errorf("broker: edge_keys: %s: not a public user nkey (U...)", edge)
		}
		if seen[key] {
			return fmt.Errorf("broker: edge_keys: %s: the key is used twice", edge)
		}
		seen[key] = true
	}
	return nil
}

func loadCertificates(files configs.TLS, domain string, role identity.Role) (*certificates, error) {
	cert, err := identity.LoadCertificate(files.Certificate, files.Key)
	if err != nil {
		return nil, fmt.Errorf("broker: tls: %w", err)
	}
	roots, err := identity.LoadTrust(files.CA)
	if err != nil {
		return nil, fmt.Errorf("broker: tls: %w", err)
	}
	pool := roots.Pool()
	id, leaf, err := identity.VerifyChain(pool, cert.TLS().Certificate, role, role == identity.RoleBroker)
	if err != nil {
		return nil, fmt.Errorf("broker: tls: certificate %s is not a %s's of the CA in %s: %w", files.Certificate, role, files.CA, err)
	}
	if id.TrustDomain != domain {
		return nil, fmt.Errorf("broker: tls: certificate %s is of trust domain %q, trust_domain is %q", files.Certificate, id.TrustDomain, domain)
	}
	return &certificates{
		tls: &tls.Config{
			Certificates: []tls.Certificate{cert.TLS()},
			ClientAuth:   tls.RequireAndVerifyClientCert,
			ClientCAs:    pool,
			MinVersion:   tls.VersionTLS13,
			// A resumed handshake would trust a CA that has since been taken out.
			SessionTicketsDisabled: true,
		},
		trust: trust{pool: pool, domain: domain},
		roots: roots,
		leaf:  leaf,
		until: leaf.NotAfter,
	}, nil
}

// tlsConfig returns a copy of what serves now.
func (b *Broker) tlsConfig() *tls.Config { return b.certs.Load().tls.Clone() }

// Reload reads the certificate, its key and the CA again, the issuer's key, and the
// configured members. New
// connections use them; those that stand are not touched (B1, B8). Where anything is
// wrong, what served before goes on.
func (b *Broker) Reload() error {
	if !b.alone {
		if err := b.loadRoutes(); err != nil {
			return err
		}
	}
	return b.reload()
}

// ClientURL is where Nodes dial, tls://host:port, after Ready; empty before.
func (b *Broker) ClientURL() string {
	if !b.isReady() {
		return ""
	}
	return b.url
}

// InProcess is how an Edge in this process connects: no TLS, an nkey of
// EdgeKeys. Before Ready a connect fails with ErrNotReady.
func (b *Broker) InProcess() nats.InProcessConnProvider { return inProcess{b} }

type inProcess struct{ b *Broker }

// InProcessConn implements nats.InProcessConnProvider.
func (p inProcess) InProcessConn() (net.Conn, error) {
	if !p.b.isReady() {
		return nil, ErrNotReady
	}
	return p.b.server.InProcessConn()
}

// startBound is how long the server and its stores may take to come up; a
// large store is read once.
const startBound = 60 * time.Second

// Run starts the server and the session service, and returns when all of it has
// ended: nil if ctx ended it. A Broker runs once.
func (b *Broker) Run(ctx context.Context) (err error) {
	if b.ran.Swap(true) {
		return errRan
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	if err := checkStore(b.cfg.StoreDir); err != nil {
		return err
	}
	unlock, err := lockStore(b.cfg.StoreDir)
	if err != nil {
		return err
	}
	defer unlock()
	if err := b.loadRestore(); err != nil {
		return err
	}
	for _, listen := range []string{b.cfg.Listen, b.cfg.LeafListen, b.clusterListen()} {
		if err := checkListen(listen); err != nil {
			return err
		}
	}
	opts, err := newOptions(b.text, b.tlsConfig)
	if err != nil {
		return err
	}
	b.holdLeaves(opts)
	b.joinCluster(opts)
	b.door.guard(opts.TLSConfig)
	if opts.LeafNode.Port != 0 {
		b.door.guard(opts.LeafNode.TLSConfig)
	}
	held, release := context.WithTimeout(ctx, openPatience)
	defer release()
	if !opts.DontListen {
		hold(held, opts.TLSConfig)
	}
	srv, err := server.NewServer(opts)
	if err != nil {
		return fmt.Errorf("broker: %w", err)
	}
	broken := make(chan string, 1) // a signal; the first line says why
	// What the server calls fatal ends Run; the first such error is the reason.
	srv.SetLoggerV2(serverLog{
		log:       b.log,
		handshake: b.handshakeFailed,
		name: func(name string) {
			if err := b.nameTaken(name); name == b.cfg.Name && !b.isReady() {
				cancel(fmt.Errorf("%w: %w", errFatal, err)) // who came first stays
			}
		},
		store: func(line string) {
			select {
			case broken <- line:
			default: // known already
			}
		},
		fatal: func(err error) { cancel(fmt.Errorf("%w: %w", errFatal, err)) },
	}, true, false, false)
	var keep sync.WaitGroup
	defer func() { cancel(nil); keep.Wait() }()
	keep.Go(func() { b.keepStore(ctx, srv, opts, broken) })
	var stop sync.Once
	shutdown := func() { stop.Do(func() { b.door.close(); srv.Shutdown(); srv.WaitForShutdown() }) }
	defer shutdown()

	srv.Start()
	if fatal := fatalCause(ctx); fatal != nil {
		return fatal
	}
	if !srv.ReadyForConnections(startBound) {
		return fmt.Errorf("broker: the server was not ready within %v", startBound)
	}

	b.dial = func(key *identity.NKey, name string) (*nats.Conn, error) { return b.connect(srv, key, name) }
	s, err := newService(ctx, &b.authority)
	if err != nil {
		if ctx.Err() != nil { // stopped meanwhile
			return fatalCause(ctx)
		}
		return err
	}
	if err := s.waitOpen(ctx); err != nil {
		s.stop()
		if ctx.Err() != nil { // stopped while it waited
			return fatalCause(ctx)
		}
		return err
	}
	release()
	if err := s.waitCurrent(ctx); err != nil {
		s.stop()
		return fatalCause(ctx)
	}
	if opts.DontListen {
		listening := make(chan struct{})
		srv.AcceptLoop(listening)
		<-listening
	}
	if fatal := fatalCause(ctx); fatal != nil {
		s.stop()
		return fatal
	}
	b.server, b.url, b.leafURL = srv, clientURL(srv.Addr()), leafURL(opts)
	if addr := srv.ClusterAddr(); addr != nil {
		b.clusterURL = clientURL(addr)
	}
	enrolled, err := b.serves(s, b.url)
	if err != nil {
		s.stop()
		return err
	}
	b.health.set(nil)
	close(b.ready)
	b.log.Info(eventReady, slog.String("url", b.url))

	<-ctx.Done()
	b.health.set(errStopping)
	b.door.close()
	enrolled()
	retired := b.retire(srv)
	if !b.alone {
		s.sayStopped(srv)
	}
	s.stop()
	shutdown()
	<-retired
	b.log.Info(eventStopped)
	return fatalCause(ctx)
}

// retireGrace is how long a broker that is told to stop waits for its Nodes to leave:
// less than the ten seconds that those who stop processes grant them.
const (
	retireGrace = 8 * time.Second
	retireLook  = 100 * time.Millisecond
)

// retire tells the Nodes here that this broker stops, where they have another to go
// to, and returns once they have left, or the grace is over: they take nothing new,
// and what runs may end (Y6, D7). The channel is closed when the server has ended.
func (b *Broker) retire(srv *server.Server) <-chan struct{} {
	ended := make(chan struct{})
	if b.alone {
		close(ended)
		return ended
	}
	b.log.Info(eventRetiring)
	go func() { // the server's own end ends it
		defer close(ended)
		srv.LameDuckShutdown()
	}()
	// A server in this mode sends no more advisories, so it is looked at.
	look := time.NewTicker(retireLook)
	defer look.Stop()
	for range int(b.grace / retireLook) {
		<-look.C
		if nodesAt(srv) == 0 {
			break
		}
	}
	return ended
}

// nodesAt counts the sessions of Nodes at the server.
func nodesAt(srv *server.Server) (count int) {
	const all = 1 << 20
	list, err := srv.Connz(&server.ConnzOptions{Username: true, Account: accountFabric, Limit: all})
	if err != nil {
		return 0
	}
	for _, c := range list.Conns {
		if _, err := subjects.ParseSession(c.AuthorizedUser); err == nil {
			count++
		}
	}
	return count
}

var errStopping = errors.New("the broker is stopping")

// errFatal marks what the server itself could not go on with.
var errFatal = errors.New("broker: the server cannot go on")

func fatalCause(ctx context.Context) error {
	if cause := context.Cause(ctx); errors.Is(cause, errFatal) {
		return cause
	}
	return nil
}

// clientURL names the address in a form that can be dialled from here.
func clientURL(addr net.Addr) string {
	a, ok := addr.(*net.TCPAddr)
	if !ok {
		return ""
	}
	host := a.IP.String()
	if a.IP.IsUnspecified() {
		host = "127.0.0.1"
	}
	return "tls://" + net.JoinHostPort(host, strconv.Itoa(a.Port))
}

// handshakeFailed counts a peer that did not get as far as the callout. What it
// sent is not logged: it has proved nothing.
func (b *Broker) handshakeFailed(err error) {
	if errors.Is(err, errStarting) {
		return // a leaf, which comes again
	}
	r := handshakeRefusal(err)
	b.refuse(r)
	b.log.Info(eventRefused, slog.String("reason", string(r)))
}
