package broker

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"strconv"
	"strings"
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
	"github.com/iop-fabric/iop/wire/iopv1"
)

const (
	// leafAuthTimeout is how long an admission may take at a leaf: below a Node's
	// own patience of 10 s, so that the Node is told.
	leafAuthTimeout    = 9
	leafReconnectDelay = 200 * time.Millisecond // the server adds as much again at random
	leafRefusalPause   = 10 * time.Second       // the same refusal of the hub is told once in it
	leafStopBound      = 2 * time.Second        // for the hub to hear what a leaf that stops has closed
	leafInbox          = 4096                   // advisories of a herd
)

// Leaf is a leaf broker: an embedded NATS server with one link to the hub, and
// the agent beside it.
type Leaf struct {
	door    door
	cfg     configs.Leaf
	log     *slog.Logger
	now     func() time.Time
	metrics *leafMetrics
	nkey    *identity.NKey
	// Keys of this process's own connections to its own server; nobody keeps them.
	sysKey, authKey, agentKey *identity.NKey
	certs                     atomic.Pointer[certificates]
	relink                    chan struct{} // one place: the link is to be made anew
	near                      atomic.Bool   // the hub is there; false: nobody comes in
	stopping                  atomic.Bool
	ran                       atomic.Bool
	ready                     chan struct{}
	url                       string // set before ready is closed
	refusals                  refusalLog
}

type leafMetrics struct {
	sessions prometheus.Gauge
	near     prometheus.Gauge
	cuts     prometheus.Counter
	refused  *prometheus.CounterVec
}

// NewLeaf loads key and certificate and checks the configuration. It starts nothing.
func NewLeaf(cfg configs.Leaf, deps Deps) (*Leaf, error) {
	file := configs.File{Leaf: &cfg}
	if err := file.Complete(); err != nil {
		return nil, fmt.Errorf("leaf: %w", err)
	}
	l := &Leaf{cfg: cfg, log: deps.Log, now: deps.Now, ready: make(chan struct{}), relink: make(chan struct{}, 1)}
	if l.log == nil {
		l.log = slog.New(slog.DiscardHandler)
	}
	if l.now == nil {
		l.now = time.Now
	}
	if deps.Metrics == nil {
		deps.Metrics = prometheus.NewRegistry()
	}
	var err error
	if l.nkey, err = identity.LoadNKey(cfg.NKey); err != nil {
		return nil, fmt.Errorf("leaf: nkey: %w", err)
	}
	if nkeys.Prefix(l.nkey.Public()) != nkeys.PrefixByteUser {
		return nil, fmt.Errorf("leaf: nkey: %s holds the wrong kind of nkey: want one for a user", cfg.NKey)
	}
	for _, key := range []**identity.NKey{&l.sysKey, &l.authKey, &l.agentKey} {
		if *key, err = identity.NewUserKey(); err != nil {
			return nil, fmt.Errorf("leaf: %w", err)
		}
	}
	certs, err := loadLeafCertificates(cfg)
	if err != nil {
		return nil, err
	}
	l.certs.Store(certs)
	if _, err := l.options(); err != nil {
		return nil, err
	}
	if l.metrics, err = newLeafMetrics(deps.Metrics); err != nil {
		return nil, fmt.Errorf("leaf: metrics: %w", err)
	}
	return l, nil
}

// loadLeafCertificates reads what the leaf shows to Nodes and to the hub alike,
// and says here what the hub would refuse without a word.
func loadLeafCertificates(cfg configs.Leaf) (*certificates, error) {
	cert, err := identity.LoadCertificate(cfg.TLS.Certificate, cfg.TLS.Key)
	if err != nil {
		return nil, fmt.Errorf("leaf: tls: %w", err)
	}
	roots, err := identity.LoadTrust(cfg.TLS.CA)
	if err != nil {
		return nil, fmt.Errorf("leaf: tls: %w", err)
	}
	pool := roots.Pool()
	chain := cert.TLS().Certificate
	var leaf *x509.Certificate
	for _, use := range []struct {
		server bool
		what   string
	}{{true, "shown to Nodes (was it made with the hosts they dial?)"}, {false, "shown to the hub"}} {
		id, c, err := identity.VerifyChain(pool, chain, identity.RoleLeaf, use.server)
		if err != nil {
			return nil, fmt.Errorf("leaf: tls: certificate %s cannot be %s under the CA in %s: %w", cfg.TLS.Certificate, use.what, cfg.TLS.CA, err)
		}
		if want := (identity.ID{TrustDomain: cfg.TrustDomain, Edge: cfg.Edge, Role: identity.RoleLeaf, Name: cfg.Name}); id != want {
			return nil, fmt.Errorf("leaf: tls: certificate %s is %s, but %s is configured", cfg.TLS.Certificate, id, want)
		}
		leaf = c
	}
	return &certificates{
		tls: &tls.Config{
			Certificates: []tls.Certificate{cert.TLS()},
			ClientAuth:   tls.RequireAndVerifyClientCert, ClientCAs: pool,
			MinVersion: tls.VersionTLS13, SessionTicketsDisabled: true,
		},
		trust: trust{pool: pool, domain: cfg.TrustDomain}, roots: roots, leaf: leaf,
		until: leaf.NotAfter,
	}, nil
}

func newLeafMetrics(r prometheus.Registerer) (*leafMetrics, error) {
	m := &leafMetrics{
		sessions: prometheus.NewGauge(prometheus.GaugeOpts{Name: "iop_leaf_sessions", Help: "Sessions of Nodes that are connected to this leaf."}),
		near:     prometheus.NewGauge(prometheus.GaugeOpts{Name: "iop_leaf_hub_near", Help: "1 while the hub answers, 0 while it does not."}),
		cuts:     prometheus.NewCounter(prometheus.CounterOpts{Name: "iop_leaf_cuts_total", Help: "Times the hub was silent for the heartbeat bound."}),
		refused: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "iop_leaf_refused_total", Help: "Connections of Nodes that were refused here, by reason.",
		}, []string{"reason"}),
	}
	for _, reason := range []refusal{refusedHubAway, refusedCertificate, refusedTLSVersion, refusedNotSpeaking, refusedHandshake} {
		m.refused.WithLabelValues(string(reason))
	}
	return m, errors.Join(r.Register(m.sessions), r.Register(m.near), r.Register(m.cuts), r.Register(m.refused))
}

// refusedHubAway: the hub decides who comes in, and it is not there.
const refusedHubAway refusal = "hub_away"

var errHubAway = errors.New("the hub is away")

// text is the server's configuration. It holds no secret: the link's key is put
// into the options in memory (there is no file form of it but the seed itself).
func (l *Leaf) text() (string, error) {
	host, port, err := splitListen(l.cfg.Listen)
	if err != nil {
		return "", err
	}
	if port == 0 {
		port = server.RANDOM_PORT
	}
	user := func(nkey *identity.NKey, more string) string {
		return fmt.Sprintf(`{ nkey: %s, allowed_connection_types: ["IN_PROCESS"]%s }`, nkey.Public(), more)
	}
	p := subjects.LeafAgentPermissions(l.cfg.Edge, l.cfg.Name)
	callout := strconv.Quote(subjects.Callout(l.cfg.Edge, l.cfg.Name))
	return fmt.Sprintf(`server_name: %s
listen: %s
max_connections: 16384
max_control_line: 4KB
max_payload: 1MB
max_pending: 64MB
write_deadline: "30s"
ping_interval: "15s"
ping_max: 2
system_account: %s
accounts {
  %s { users: [ %s ] }
  %s {
    users: [ %s ]
    imports: [ { service: { account: %s, subject: %s }, to: %s } ]
  }
  %s {
    limits { max_payload: %d }
    exports: [ { service: %s, accounts: [%s] } ]
    users: [ %s ]
  }
}
authorization {
  timeout: %d
  auth_callout { issuer: %s, account: %s, auth_users: [ %s, %s, %s ] }
}
`,
		strconv.Quote(l.cfg.Edge+"."+l.cfg.Name), strconv.Quote(net.JoinHostPort(host, strconv.Itoa(port))),
		accountSystem,
		accountSystem, user(l.sysKey, ""),
		accountAuth, user(l.authKey, ""), accountFabric, callout, strconv.Quote(calloutSubject),
		accountFabric, wire.MaxMessage, callout, accountAuth,
		user(l.agentKey, fmt.Sprintf(", permissions: { publish: %s, subscribe: %s }", list(p.Publish), list(p.Subscribe))),
		leafAuthTimeout, l.cfg.Issuer, accountAuth, l.sysKey.Public(), l.authKey.Public(), l.agentKey.Public()), nil
}

// options are the server's: the text, and what has no word in it.
func (l *Leaf) options() (*server.Options, error) {
	text, err := l.text()
	if err != nil {
		return nil, err
	}
	opts := &server.Options{NoSigs: true, NoLog: true}
	if err := opts.ProcessConfigString(text); err != nil {
		return nil, fmt.Errorf("leaf: configuration: %w", err)
	}
	opts.NoLog = false
	opts.DisableShortFirstPing = true // a callout goes to the hub and back
	opts.DontListen = true            // until the hub was heard
	opts.TLS, opts.TLSHandshakeFirst = true, true
	opts.TLSTimeout = 15 // a herd of dials shares two cores
	opts.TLSConfig = l.certs.Load().tls.Clone()
	opts.TLSConfig.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) {
		if !l.near.Load() || l.stopping.Load() {
			return nil, errHubAway // a callout would only time out
		}
		return l.certs.Load().tls.Clone(), nil
	}
	l.door.guard(opts.TLSConfig)

	remote := &server.RemoteLeafOpts{
		LocalAccount: accountFabric, TLS: true, TLSHandshakeFirst: true, TLSTimeout: 10,
		FirstInfoTimeout: 10 * time.Second, DialTimeout: 5 * time.Second,
	}
	for _, raw := range l.cfg.Hub {
		u, err := url.Parse(raw)
		if err != nil {
			return nil, fmt.Errorf("leaf: hub: %w", err)
		}
		remote.URLs = append(remote.URLs, u)
	}
	seed, err := l.nkey.Pair().Seed()
	if err != nil {
		return nil, fmt.Errorf("leaf: nkey: %w", err)
	}
	remote.Nkey = string(seed) // the pair keeps the slice itself: not ours to clear
	remote.TLSConfig = &tls.Config{
		MinVersion: tls.VersionTLS13,
		// The hub is checked below, by the CA that serves now.
		InsecureSkipVerify: true,
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			return &l.certs.Load().tls.Certificates[0], nil
		},
		// A certificate of our CA is not enough: the hub is a broker.
		VerifyConnection: func(cs tls.ConnectionState) error {
			var chain [][]byte
			for _, c := range cs.PeerCertificates {
				chain = append(chain, c.Raw)
			}
			t := l.certs.Load().trust
			id, leaf, err := identity.VerifyChain(t.pool, chain, identity.RoleBroker, true)
			switch {
			case err != nil:
				return err
			case id.TrustDomain != t.domain:
				return fmt.Errorf("the hub is of trust domain %q", id.TrustDomain)
			case cs.ServerName != "": // none is shown of an address; any of our brokers may be there
				return leaf.VerifyHostname(cs.ServerName)
			}
			return nil
		},
	}
	opts.LeafNode.Remotes = []*server.RemoteLeafOpts{remote}
	opts.LeafNode.ReconnectInterval = leafReconnectDelay
	return opts, nil
}

// Reload reads the leaf's certificate, its key and the CA again. New connections
// are shown the new certificate, and Nodes and the hub measured by the new CA. The
// link is made anew where the certificate is of another root than the one it shows.
func (l *Leaf) Reload() error {
	certs, err := loadLeafCertificates(l.cfg)
	if err != nil {
		return err
	}
	nkey, err := identity.LoadNKey(l.cfg.NKey)
	if err != nil {
		return fmt.Errorf("leaf: nkey: %w", err)
	}
	if nkey.Public() != l.nkey.Public() { // the server's options hold it, and never change while it runs
		l.log.Warn(eventRestart, slog.Any("keys", []string{"nkey"}))
	}
	was := l.certs.Swap(certs)
	if identity.IssuerOf(was.leaf) != identity.IssuerOf(certs.leaf) {
		select {
		case l.relink <- struct{}{}:
		default: // it is about to be
		}
	}
	l.log.Info(eventRotated, slog.Time("until", certs.until))
	return nil
}

// Ready is closed once the hub was heard and Nodes can come in.
func (l *Leaf) Ready() <-chan struct{} { return l.ready }

// ClientURL is where Nodes dial, tls://host:port, after Ready; empty before.
func (l *Leaf) ClientURL() string {
	select {
	case <-l.ready:
		return l.url
	default:
		return ""
	}
}

// Healthy says why nobody could come in now.
func (l *Leaf) Healthy() error {
	if !l.near.Load() {
		return errHubAway
	}
	return nil
}

// Run starts the server and the agent, and returns when both have ended: nil if
// ctx ended them. It waits for the hub as long as it takes. A Leaf runs once.
func (l *Leaf) Run(ctx context.Context) error {
	if l.ran.Swap(true) {
		return errors.New("leaf: it has run already; make a new one")
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	if err := checkListen(l.cfg.Listen); err != nil {
		return err
	}
	opts, err := l.options()
	if err != nil {
		return err
	}
	srv, err := server.NewServer(opts)
	if err != nil {
		return fmt.Errorf("leaf: %w", err)
	}
	srv.SetLoggerV2(leafLog{
		serverLog: serverLog{
			log: l.log, handshake: l.handshakeFailed,
			fatal: func(err error) { cancel(fmt.Errorf("%w: %w", errFatal, err)) },
		},
		link: l.linkRefused, near: l.near.Load, timeout: l.calloutFailed,
	}, true, false, false)
	defer func() { l.door.close(); srv.Shutdown(); srv.WaitForShutdown() }()
	srv.Start()
	if fatal := fatalCause(ctx); fatal != nil {
		return fatal
	}
	if !srv.ReadyForConnections(startBound) {
		return fmt.Errorf("leaf: the server was not ready within %v", startBound)
	}
	s, err := l.startAgent(ctx, srv)
	switch {
	case err != nil && ctx.Err() != nil: // stopped while it started
		return fatalCause(ctx)
	case err != nil:
		return err
	}
	defer s.close()

	near := make(chan struct{})
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.loop(ctx, near)
	}()
	select {
	case <-near:
		listening := make(chan struct{})
		srv.AcceptLoop(listening)
		<-listening
		if fatalCause(ctx) == nil {
			l.url = clientURL(srv.Addr())
			close(l.ready)
			l.log.Info(eventLeafReady, slog.String("url", l.url))
		}
	case <-ctx.Done():
	}
	<-done
	l.log.Info(eventStopped)
	return fatalCause(ctx)
}

// handshakeFailed counts a peer of the listener that got no further.
func (l *Leaf) handshakeFailed(err error) {
	r := handshakeRefusal(err)
	if errors.Is(err, errHubAway) {
		r = refusedHubAway
	}
	l.metrics.refused.WithLabelValues(string(r)).Inc()
	l.log.Info(eventLeafDenied, slog.String("reason", string(r)))
}

// calloutFailed: the server gave a connection up whose callout was not answered.
func (l *Leaf) calloutFailed() {
	if l.near.Load() {
		return // the hub has refused it and logs why
	}
	l.metrics.refused.WithLabelValues(string(refusedHubAway)).Inc()
	l.log.Info(eventLeafDenied, slog.String("reason", string(refusedHubAway)))
}

// linkRefused tells why the hub does not take this leaf; a dial that fails the
// same way again and again is told now and then.
func (l *Leaf) linkRefused(reason string) {
	if l.refusals.again(l.now(), reason) {
		l.log.Warn(eventLeafLink, slog.String("reason", reason), slog.String("leaf", l.cfg.Edge+"."+l.cfg.Name))
	}
}

type refusalLog struct {
	mu   sync.Mutex
	last string
	at   time.Time
}

func (r *refusalLog) again(now time.Time, reason string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if reason == r.last && now.Sub(r.at) < leafRefusalPause {
		return false
	}
	r.last, r.at = reason, now
	return true
}

// leafLog reads what the server says of its link to the hub, which it tells
// nowhere else.
type leafLog struct {
	serverLog
	link    func(reason string)
	near    func() bool
	timeout func()
}

// Noticef implements server.Logger. A hub that refuses the leaf's certificate does
// so after the handshake, as TLS 1.3 has it, and the server only notices an end.
func (l leafLog) Noticef(format string, v ...any) {
	l.serverLog.Noticef(format, v...)
	if strings.Contains(format, " - lid:") && !l.near() && strings.Contains(fmt.Sprintf(format, v...), "connection closed: Read Error") {
		l.link("the hub closed the link without a word: is this leaf's certificate of a CA that the hub trusts? The hub's log has the reason")
	}
}

// Errorf implements server.Logger.
func (l leafLog) Errorf(format string, v ...any) {
	line := fmt.Sprintf(format, v...)
	switch {
	case strings.Contains(format, " - lid:") && strings.Contains(line, "handshake error: "):
		_, text, _ := strings.Cut(line, "handshake error: ")
		l.link(linkHandshake(text))
	case strings.Contains(line, "Leafnode Error") && strings.Contains(line, "Authorization Violation"),
		strings.Contains(line, "Leafnode Error") && strings.Contains(line, "Authentication Timeout"):
		l.link("the hub does not admit this leaf: is its nkey registered there, for this edge and name with role leaf, and not revoked? The hub's log has the reason")
	case strings.Contains(line, "Error trying to connect as leafnode"):
		l.link("the hub cannot be reached at its address")
	case strings.Contains(line, "authentication error"), strings.Contains(line, "authentication timeout"):
		l.timeout()
		l.line(slog.LevelDebug, "%s", []any{line})
	default:
		l.serverLog.Errorf(format, v...)
	}
}

// linkHandshake puts a failed handshake with the hub into words.
func linkHandshake(err string) string {
	switch {
	case strings.Contains(err, "remote error"):
		if strings.Contains(err, "internal error") {
			return "the hub is starting"
		}
		return "the hub refused this leaf's certificate: " + err
	case strings.Contains(err, "certificate"):
		return "the hub's certificate is not to be trusted: " + err
	}
	return "no TLS with the hub: " + err
}

// leafAgent is the shell of the agent: the leaf server's own advisories in, words
// to the hub out.
type leafAgent struct {
	l       *Leaf
	srv     *server.Server
	sys, nc *nats.Conn
	inbox   chan agentEvent
	ctx     context.Context //nolint:containedctx // the life of the callbacks; ends with close
	cancel  context.CancelFunc
	closing sync.WaitGroup
}

type agentEvent struct {
	verb    subjects.Verb // of the hub; or Opened, Ended of the server
	session subjects.Session
	client  uint64
	text    string // instance, reason or verb
}

func (l *Leaf) startAgent(ctx context.Context, srv *server.Server) (_ *leafAgent, err error) {
	s := &leafAgent{l: l, srv: srv, inbox: make(chan agentEvent, leafInbox)}
	s.ctx, s.cancel = context.WithCancel(context.WithoutCancel(ctx))
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	for _, c := range []struct {
		to   **nats.Conn
		key  *identity.NKey
		name string
	}{{&s.sys, l.sysKey, "iop-leaf-sys"}, {&s.nc, l.agentKey, "iop-leaf-agent"}} {
		*c.to, err = nats.Connect("", nats.InProcessServer(srv), nats.Name(c.name), nats.Nkey(c.key.Public(), c.key.Sign),
			nats.MaxReconnects(-1), nats.ReconnectWait(50*time.Millisecond), nats.Timeout(10*time.Second),
			nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) {
				l.log.Warn(eventFault, slog.String("connection", c.name), slog.String("error", err.Error()))
			}))
		if err != nil {
			return nil, fmt.Errorf("leaf: agent %s: %w", c.name, err)
		}
	}
	if _, err := s.sys.Subscribe(advisorySubject, s.advisory); err != nil {
		return nil, fmt.Errorf("leaf: subscribe advisories: %w", err)
	}
	for _, verb := range []subjects.Verb{subjects.Here, subjects.Noted, subjects.Kick} {
		if _, err := s.nc.Subscribe(subjects.Leaf(l.cfg.Edge, l.cfg.Name, verb), s.heard); err != nil {
			return nil, fmt.Errorf("leaf: subscribe the hub: %w", err)
		}
	}
	flush, done := context.WithTimeout(ctx, operationBound)
	defer done()
	return s, errors.Join(s.sys.FlushWithContext(flush), s.nc.FlushWithContext(flush))
}

func (s *leafAgent) close() {
	s.cancel()
	s.closing.Wait()
	for _, nc := range []*nats.Conn{s.nc, s.sys} {
		if nc != nil {
			nc.Close()
		}
	}
}

func (s *leafAgent) send(ev agentEvent) {
	select {
	case s.inbox <- ev:
	case <-s.ctx.Done():
	}
}

// advisory reads the leaf server's own notices about its clients.
func (s *leafAgent) advisory(m *nats.Msg) {
	var client server.ClientInfo
	var ev agentEvent
	switch {
	case strings.HasSuffix(m.Subject, ".CONNECT"):
		var msg server.ConnectEventMsg
		if json.Unmarshal(m.Data, &msg) != nil {
			return
		}
		client, ev.verb, ev.text = msg.Client, subjects.Opened, instanceOf(msg.Client.Name)
	case strings.HasSuffix(m.Subject, ".DISCONNECT"):
		var msg server.DisconnectEventMsg
		if json.Unmarshal(m.Data, &msg) != nil {
			return
		}
		client, ev.verb, ev.text = msg.Client, subjects.Ended, closeReason(msg.Reason)
	default:
		return
	}
	session, err := subjects.ParseSession(client.User)
	if err != nil || session.Edge != s.l.cfg.Edge {
		return // the agent itself, and the lobby's guests
	}
	ev.session, ev.client = session, client.ID
	s.send(ev)
}

// heard reads what the session service says.
func (s *leafAgent) heard(m *nats.Msg) {
	_, _, verb, err := subjects.ParseLeaf(m.Subject)
	var n iopv1.SessionNotice
	if err != nil || wire.Redirected(m.Data) || n.UnmarshalVT(m.Data) != nil {
		return
	}
	if verb == subjects.Here {
		s.send(agentEvent{verb: verb, text: n.InstanceId})
		return
	}
	if !subjects.ValidName(n.NodeId) || n.Generation == 0 {
		return
	}
	s.send(agentEvent{
		verb: verb, text: n.Reason,
		session: subjects.Session{Edge: s.l.cfg.Edge, Node: n.NodeId, Gen: n.Generation},
	})
}

// loop owns the agent. When ctx ends it closes the sessions and waits a little
// for the hub to hear of it. near is closed when the hub is heard first.
func (s *leafAgent) loop(ctx context.Context, near chan<- struct{}) {
	core := newAgent(s.l.now(), s.l.cfg.HeartbeatBound)
	tick := time.NewTicker(beatEvery(s.l.cfg.HeartbeatBound))
	defer tick.Stop()
	defer s.l.near.Store(false)
	var last <-chan time.Time
	stop := ctx.Done()
	for {
		var out []order
		select {
		case ev := <-s.inbox:
			out = step(core, s.l.now(), ev)
		case <-tick.C:
			out = core.Tick(s.l.now())
		case <-s.l.relink:
			s.closeLink()
		case <-stop:
			stop = nil
			s.l.stopping.Store(true)
			out = core.Stop()
			timer := time.NewTimer(leafStopBound)
			defer timer.Stop()
			last = timer.C
		case <-last:
			return
		}
		for _, o := range out {
			s.apply(o)
			if o.kind == tellNear && near != nil {
				close(near)
				near = nil
			}
		}
		s.l.metrics.sessions.Set(float64(len(core.sessions)))
		if stop == nil && (core.Settled() || !core.near) {
			return
		}
	}
}

func step(core *agent, now time.Time, ev agentEvent) []order {
	switch ev.verb {
	case subjects.Opened:
		return core.Opened(now, ev.session, ev.client, ev.text)
	case subjects.Ended:
		return core.Ended(now, ev.session, ev.client, ev.text)
	case subjects.Here:
		return core.Here(now, ev.text)
	case subjects.Noted:
		core.Noted(ev.session, subjects.Verb(ev.text))
	case subjects.Kick:
		return core.Kick(now, ev.session)
	default: // no other is subscribed
	}
	return nil
}

func (s *leafAgent) apply(o order) {
	switch o.kind {
	case sayBeat:
		s.say(subjects.Beat, &iopv1.SessionNotice{InstanceId: s.srv.ID(), Key: s.l.cfg.Issuer})
	case sayOpened:
		s.say(subjects.Opened, &iopv1.SessionNotice{NodeId: o.session.Node, Generation: o.session.Gen, InstanceId: o.instance})
	case sayEnded:
		s.say(subjects.Ended, &iopv1.SessionNotice{NodeId: o.session.Node, Generation: o.session.Gen, Reason: o.reason})
	case closeClient:
		s.l.log.Info(eventLeafKick, slog.String("node", o.session.Node), slog.Uint64("generation", o.session.Gen))
		s.closing.Go(func() { s.kick(o.client) })
	case closeLink:
		s.l.metrics.cuts.Inc()
		s.l.log.Warn(eventLeafCut)
		s.closeLink()
	case tellNear:
		s.l.near.Store(true)
		s.l.metrics.near.Set(1)
		s.l.log.Info(eventLeafNear)
	case tellAway:
		s.l.near.Store(false)
		s.l.metrics.near.Set(0)
		s.l.log.Warn(eventLeafAway)
	}
}

func (s *leafAgent) say(verb subjects.Verb, n *iopv1.SessionNotice) {
	data, err := n.MarshalVT()
	if err == nil {
		err = s.nc.Publish(subjects.Leaf(s.l.cfg.Edge, s.l.cfg.Name, verb), data)
	}
	if err != nil {
		s.l.log.Warn(eventFault, slog.String("operation", "say"), slog.String("error", err.Error()))
	}
}

// kick closes a connection; the fence before it has the time it needs to arrive (B6).
func (s *leafAgent) kick(client uint64) {
	wait := time.NewTimer(kickDelay)
	defer wait.Stop()
	select {
	case <-wait.C:
	case <-s.ctx.Done():
	}
	_ = s.srv.DisconnectClientByID(client) // one that is gone is gone
}

// closeLink ends the link, so that it is dialled anew: one that hangs would do so
// for as long as the server's pings take.
func (s *leafAgent) closeLink() {
	links, err := s.srv.Leafz(nil)
	if err != nil {
		return
	}
	for _, link := range links.Leafs {
		_ = s.srv.DisconnectClientByID(link.ID) // the same
	}
}
