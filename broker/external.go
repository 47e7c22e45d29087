package broker

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/identity"
)

// Service is a session service in a process of its own, beside a nats-server
// that runs with ConfigText's Stock form. It does there what a Broker does for
// its embedded server.
type Service struct {
	authority
	urls string
	ran  atomic.Bool
}

// NewService loads keys and certificates and checks the configuration. It
// starts nothing.
func NewService(cfg configs.Service, deps Deps) (*Service, error) {
	s := &Service{urls: strings.Join(cfg.URLs, ",")}
	if len(cfg.URLs) == 0 {
		return nil, errors.New("broker: service: urls is empty: it names where the nats-server is")
	}
	err := s.load(withDefaults(configs.Broker{
		Name: cfg.Name, TrustDomain: cfg.TrustDomain, TLS: cfg.TLS, Members: cfg.Members, HeartbeatBound: cfg.HeartbeatBound,
		IssuerKey: cfg.IssuerKey, SystemKey: cfg.SystemKey, CalloutKey: cfg.CalloutKey, ServiceKey: cfg.ServiceKey,
		Enrolment: cfg.Enrolment,
	}), identity.RoleService, deps)
	if err != nil {
		return nil, err
	}
	if cfg.Enrolment != nil && len(cfg.Enrolment.BrokerURLs) == 0 {
		return nil, errors.New("broker: service: enrolment.broker_urls is empty: it names what machines that joined dial")
	}
	if err := s.invites(); err != nil {
		return nil, err
	}
	s.replicas = max(cfg.Replicas, 1)
	s.dial = s.connect
	return s, s.measure(deps)
}

// connect makes one of the service's connections, over mTLS.
func (s *Service) connect(key *identity.NKey, name string) (*nats.Conn, error) {
	config := &tls.Config{
		MinVersion: tls.VersionTLS13,
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			return &s.certs.Load().tls.Certificates[0], nil
		},
		// The server is checked by the CA that serves now, and by its host's name.
		InsecureSkipVerify: true,
		VerifyConnection:   s.checkServer,
	}
	return nats.Connect(s.urls, append(s.connectOptions(key, name),
		nats.Secure(config), nats.TLSHandshakeFirst(), nats.IgnoreDiscoveredServers(), nats.IgnoreAuthErrorAbort(),
		nats.PingInterval(servicePing), nats.MaxPingsOutstanding(2))...)
}

// servicePing: a server that has gone silent is left within three of them.
const servicePing = 2 * time.Second

// checkServer admits a server that is a broker of ours, of the name dialled.
func (s *Service) checkServer(cs tls.ConnectionState) error {
	chain := make([][]byte, len(cs.PeerCertificates))
	for i, c := range cs.PeerCertificates {
		chain[i] = c.Raw
	}
	t := s.certs.Load().trust
	id, leaf, err := identity.VerifyChain(t.pool, chain, identity.RoleBroker, true)
	switch {
	case err != nil:
		return err
	case id.TrustDomain != t.domain:
		return fmt.Errorf("certificate of trust domain %q, this is %q", id.TrustDomain, t.domain)
	case cs.ServerName != "":
		return leaf.VerifyHostname(cs.ServerName)
	}
	return nil
}

// Reload reads the certificate, its key and the CA again, which the next dials use,
// the issuer's key, and the configured members (B8).
func (s *Service) Reload() error { return s.reload() }

// Run connects and answers until ctx ends. A server that is not there yet, or
// goes and comes back, is waited for. A Service runs once.
func (s *Service) Run(ctx context.Context) error {
	if s.ran.Swap(true) {
		return errRan
	}
	svc, err := s.begin(ctx)
	if svc == nil {
		return err
	}
	defer func() { s.health.set(errStopping); svc.stop() }()
	if svc.waitOpen(ctx) != nil { // ctx has ended
		return nil
	}
	enrolled, err := s.serves(svc, "")
	if err != nil {
		return err
	}
	defer enrolled()
	close(s.ready)
	s.log.Info(eventReady, slog.String("url", s.urls))
	<-ctx.Done()
	s.log.Info(eventStopped)
	return nil
}

// begin connects, as soon as there is a server that lets us in.
func (s *Service) begin(ctx context.Context) (*service, error) {
	told := time.Time{}
	for wait := openBackoff / 8; ; wait = min(2*wait, openBackoff) {
		svc, err := newService(ctx, &s.authority)
		if err == nil {
			return svc, nil
		}
		var verify *tls.CertificateVerificationError
		var unknown x509.UnknownAuthorityError
		if errors.As(err, &verify) || errors.As(err, &unknown) {
			return nil, err // another fabric's server: waiting helps nothing
		}
		s.health.set(err)
		if now := s.now(); now.Sub(told) >= waitingLog {
			told = now
			s.log.Warn(eventWaiting, slog.String("reason", err.Error()))
		}
		pause := time.NewTimer(wait)
		select {
		case <-pause.C:
		case <-ctx.Done():
			pause.Stop()
			return nil, nil //nolint:nilnil // stopped before there was one: no error
		}
	}
}

// BackupDirect writes what the stores in the server hold, whether a service runs or
// not. It counts as the service's one run.
func (s *Service) BackupDirect(ctx context.Context, w io.Writer) error {
	if s.ran.Swap(true) {
		return errRan
	}
	nc, err := s.reach("iop-backup")
	if err != nil {
		return err
	}
	defer nc.Close()
	return s.backupOver(ctx, nc, "the server at "+s.urls, w)
}

// ErrServiceRuns: it would go on with what it knew before.
var ErrServiceRuns = errors.New("broker: a session service runs at that server: stop every one of it first, and leave the server running")

// Restore puts a backup, which may be nil, into the stores of the server, which
// runs, while no service does. Generations go on above that of the backup and above the number.
func (s *Service) Restore(ctx context.Context, from *Backup, above uint64) error {
	if s.ran.Swap(true) {
		return errRan
	}
	from, err := s.restores(from, above)
	if err != nil {
		return err
	}
	nc, err := s.reach("iop-restore")
	if err != nil {
		return err
	}
	defer nc.Close()
	ctx, cancel := context.WithTimeout(ctx, backupBound)
	defer cancel()
	if err := unserved(ctx, nc); err != nil {
		return err
	}
	led := newElections(&s.storeOpen)
	defer led.end()
	if len(from.records) > 0 {
		js, err := jetstream.New(nc)
		if err != nil {
			return fmt.Errorf("broker: jetstream: %w", err)
		}
		switch _, err = bindBucket(ctx, js, led, bucketMembers); {
		case err == nil:
			return fmt.Errorf("broker: the server at %s %w", s.urls, errServerNotEmpty)
		case !errors.Is(err, jetstream.ErrBucketNotFound):
			return fmt.Errorf("broker: bucket %s: %w", bucketMembers, err)
		}
	}
	s.restore = from
	return (&service{b: &s.authority, auth: nc, led: led, ctx: ctx}).openStores(ctx)
}

var errServerNotEmpty = errors.New("holds stores already: a backup is restored where there are none (stop the server and move its store_dir away first, after a restore that was cut off too; --generation-above N alone needs no empty one)")

// reach connects to where the stores are.
func (s *Service) reach(name string) (*nats.Conn, error) {
	nc, err := s.connect(s.keys.callout, name)
	if err != nil {
		return nil, fmt.Errorf("broker: the server at %s, which must run, cannot be asked: %w", s.urls, err)
	}
	return nc, nil
}

// unserved makes sure that no service is there, by asking for one.
func unserved(ctx context.Context, nc *nats.Conn) error {
	ctx, cancel := context.WithTimeout(ctx, operationBound)
	defer cancel()
	switch _, err := nc.RequestWithContext(ctx, presenceSubject, nil); {
	case errors.Is(err, nats.ErrNoResponders):
		return nil
	case err == nil, errors.Is(err, context.DeadlineExceeded):
		return ErrServiceRuns
	default:
		return fmt.Errorf("broker: is a session service running? %w", err)
	}
}
