package broker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/identity"
)

// authority is what a session service works with, in a broker's process or
// beside a nats-server of its own.
type authority struct {
	cfg     configs.Broker
	keys    keys
	seeds   []seed
	again   func() ([]configs.Member, error) // Deps.Members
	log     *slog.Logger
	now     func() time.Time
	metrics *metrics
	certs   atomic.Pointer[certificates]
	// issuer signs session tokens. It is keys.issuer, which the server's configuration
	// pins for callouts, until another one is read while the server runs.
	issuer atomic.Pointer[identity.NKey]
	// oldIssuer is there while the issuer is exchanged, and pins what each leaf's server
	// has in its configuration: memberID to a public key.
	oldIssuer atomic.Pointer[identity.NKey]
	pins      sync.Map
	replicas  int
	role      identity.Role // of this process's own certificate
	// alone: no other server and no other service is part of this.
	alone bool
	// embedded: the server is in this process, and the service connects to no other.
	embedded bool
	// dial makes one of the service's connections.
	dial func(key *identity.NKey, name string) (*nats.Conn, error)

	// ready is closed once connections are admitted. What stands below it is set
	// before that, and not changed afterwards.
	ready   chan struct{}
	members members
	stores  stores // of which backups are made

	enrolment *enrolment // nil where nobody is invited here; made by enrols
	// restore is what is to be restored before anybody is admitted; nil: nothing.
	restore *Backup

	health health
	// storeOpen: who asks the stores holds it to read. The server cannot open them
	// anew while it is asked.
	storeOpen sync.RWMutex
}

// load reads keys, seeds and this process's own certificate, which is of role.
func (a *authority) load(cfg configs.Broker, role identity.Role, deps Deps) (err error) {
	a.cfg, a.role, a.log, a.now, a.replicas, a.ready = cfg, role, deps.Log, deps.Now, 1, make(chan struct{})
	a.again = deps.Members
	if a.log == nil {
		a.log = slog.New(slog.DiscardHandler)
	}
	if a.now == nil {
		a.now = time.Now
	}
	a.health.set(ErrNotReady)
	if a.keys, err = loadKeys(cfg); err != nil {
		return err
	}
	a.issuer.Store(a.keys.issuer)
	old, err := loadOldIssuer(cfg)
	if err != nil {
		return err
	}
	a.oldIssuer.Store(old)
	if a.seeds, err = seeds(cfg.Members); err != nil {
		return err
	}
	certs, err := loadCertificates(cfg.TLS, cfg.TrustDomain, role)
	if err != nil {
		return err
	}
	a.certs.Store(certs)
	return nil
}

// invites makes this the one that invites, if the configuration says so.
func (a *authority) invites() (err error) {
	if a.cfg.Enrolment != nil {
		a.enrolment, err = newEnrolment(a)
	}
	return err
}

// Ready is closed once connections are admitted.
func (a *authority) Ready() <-chan struct{} { return a.ready }

func (a *authority) isReady() bool {
	select {
	case <-a.ready:
		return true
	default:
		return false
	}
}

// serves hands out what s has opened, and lets invited machines ask. url is where
// Nodes dial if the configuration does not say; stop ends the asking.
func (a *authority) serves(s *service, url string) (stop func(), err error) {
	a.members = s.members
	a.stores = stores{members: &s.members.kv, store: &s.store.kv, generations: &s.generations.kv}
	if s.invitations.KeyValue != nil {
		a.stores.invitations = &s.invitations
	}
	if a.enrolment == nil {
		return func() {}, nil
	}
	if err := a.enrolment.renew(s); err != nil {
		return nil, err
	}
	return a.enrolment.start(s, url), nil
}

// Register adds a member, or a second nkey to one (B8). It is admitted from the
// moment Register returns.
func (a *authority) Register(ctx context.Context, m configs.Member) error {
	if !a.isReady() {
		return ErrNotReady
	}
	return a.members.Register(ctx, m)
}

// Revoke refuses a member from the moment it returns and closes its connections;
// an invitation of its name is withdrawn.
func (a *authority) Revoke(ctx context.Context, edge, role, name string) error {
	if !a.isReady() {
		return ErrNotReady
	}
	id := memberID{Edge: edge, Role: identity.Role(role), Name: name}
	if err := checkMemberID(id); err != nil {
		return fmt.Errorf("broker: revoke: %w", err)
	}
	invited := false
	if a.enrolment != nil && id.Edge == a.enrolment.cfg.Edge && id.Role == identity.RoleNode {
		var err error
		if invited, err = a.enrolment.cancel(ctx, id.Name); err != nil {
			return err
		}
	}
	return a.members.Revoke(ctx, id, a.now(), invited)
}

// Members lists what the authority knows, one entry for each nkey.
func (a *authority) Members(ctx context.Context) ([]configs.Member, error) {
	if !a.isReady() {
		return nil, ErrNotReady
	}
	return a.members.List(ctx)
}

// measure makes the metrics, once nothing else can fail.
func (a *authority) measure(deps Deps) (err error) {
	if deps.Metrics == nil {
		deps.Metrics = prometheus.NewRegistry()
	}
	if a.metrics, err = newMetrics(deps.Metrics); err != nil {
		return fmt.Errorf("broker: metrics: %w", err)
	}
	a.metrics.certificate.Set(float64(a.certs.Load().until.Unix()))
	return nil
}

// reload reads the certificate, its key, the CA, the issuer's key and the configured
// members again.
func (a *authority) reload() error {
	var ca *signing
	if a.enrolment != nil {
		var err error
		if ca, err = a.enrolment.load(); err != nil {
			return err
		}
	}
	certs, err := loadCertificates(a.cfg.TLS, a.cfg.TrustDomain, a.role)
	if err != nil {
		return err
	}
	read, err := loadKeys(a.cfg)
	if err != nil {
		return err
	}
	old, err := loadOldIssuer(a.cfg)
	if err != nil {
		return err
	}
	a.oldIssuer.Store(old)
	a.certs.Store(certs)
	if ca != nil {
		a.enrolment.signing.Store(ca)
	}
	if was := a.issuer.Swap(read.issuer); was.Public() != read.issuer.Public() {
		a.log.Info(eventIssuer, slog.String("issuer", read.issuer.Public()))
	}
	// The server pins these four in its configuration, which never changes while it
	// runs (B1).
	if was, is := a.keys.public(), read.public(); was != is {
		a.log.Warn(eventRestart, slog.Any("keys", was.differing(is)))
	}
	a.metrics.certificate.Set(float64(certs.until.Unix()))
	a.log.Info(eventRotated, slog.Time("until", certs.until))
	return a.reseed()
}

// loadOldIssuer reads the issuer that is being exchanged, which lies beside the new one
// with -old in its name; nil: none is.
func loadOldIssuer(cfg configs.Broker) (*identity.NKey, error) {
	file := strings.TrimSuffix(cfg.IssuerKey, ".nk") + "-old.nk"
	if !exists(file) {
		return nil, nil //nolint:nilnil // none is no error
	}
	k, err := identity.LoadNKey(file)
	if err != nil {
		return nil, fmt.Errorf("broker: issuer_key: the old one: %w", err)
	}
	return k, nil
}

// calloutIssuer answers a callout: the one that the server which asks has pinned. What
// a leaf has pinned it says itself; of one that has not said so yet it is the old one.
func (a *authority) calloutIssuer(leaf memberID) *identity.NKey {
	if leaf == (memberID{}) {
		return a.keys.issuer
	}
	pin, _ := a.pins.Load(leaf)
	old := a.oldIssuer.Load()
	for _, k := range []*identity.NKey{old, a.keys.issuer, a.issuer.Load()} {
		if k != nil && k.Public() == pin {
			return k
		}
	}
	if old != nil {
		return old
	}
	return a.issuer.Load()
}

// health is why nobody can be admitted right now, in words for an operator.
type health struct {
	mu  sync.Mutex
	err error
	// store: it cannot be written.
	store error
	// name: another broker of the cluster has this one's, which it must not.
	name error
}

func (h *health) set(err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !errors.Is(h.err, errStopping) { // nothing is better after that
		h.err = err
	}
}

func (h *health) setStore(err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.store = err
}

func (h *health) storeFailed() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.store != nil
}

func (h *health) get() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.store != nil {
		return h.store
	}
	if h.err != nil && h.name != nil {
		return h.name // the likelier reason
	}
	return h.err
}

// Healthy says why nobody is admitted here at the moment; nil: all is well.
func (a *authority) Healthy() error { return a.health.get() }

func (a *authority) refuse(r refusal) {
	a.metrics.refused.WithLabelValues(string(r)).Inc()
}
