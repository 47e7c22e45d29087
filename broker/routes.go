package broker

import (
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/identity"
	"github.com/iop-fabric/iop/wire"
)

// clusterDefaults is a copy, with what may be left out.
func clusterDefaults(cfg configs.Broker) *configs.Cluster {
	if cfg.Cluster == nil {
		return nil
	}
	c := *cfg.Cluster
	if c.Name == "" {
		c.Name = "iop"
	}
	if c.TLS == (configs.TLS{}) {
		c.TLS = cfg.TLS
	}
	if c.Replicas == 0 {
		c.Replicas = 1
		if len(c.Routes) >= 3 {
			c.Replicas = 3
		}
	}
	return &c
}

// checkCluster says what cannot work, before anything starts.
func checkCluster(cfg configs.Broker) error {
	c := cfg.Cluster
	if len(c.Routes) < 2 {
		return errors.New("broker: cluster: routes must name every broker of the cluster, this one too")
	}
	for _, route := range c.Routes {
		if u, err := url.Parse(route); err != nil || u.Scheme != "tls" || u.Port() == "" || u.User != nil {
			return fmt.Errorf("broker: cluster: route %q: want tls://host:port", route)
		}
	}
	if c.Replicas > len(c.Routes) {
		return fmt.Errorf("broker: cluster: %d replicas, but routes names %d brokers", c.Replicas, len(c.Routes))
	}
	// JetStream would not find in a cluster what it kept alone, and begin anew.
	alone := filepath.Join(cfg.StoreDir, "jetstream", accountAuth, "streams", "KV_"+bucketGenerations)
	meta := filepath.Join(cfg.StoreDir, "jetstream", accountSystem, "_js_", "_meta_")
	if exists(alone) && !exists(meta) {
		return fmt.Errorf("broker: store_dir %s was written by a broker without a cluster: its generations would be lost; "+
			"give the cluster a folder of its own", cfg.StoreDir)
	}
	return nil
}

func (b *Broker) loadRoutes() error {
	certs, err := loadCertificates(b.cfg.Cluster.TLS, b.cfg.TrustDomain, identity.RoleBroker)
	if err != nil {
		return fmt.Errorf("%w (of the cluster's routes)", err)
	}
	b.routes.Store(certs)
	return nil
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

func (b *Broker) clusterListen() string {
	if b.cfg.Cluster == nil {
		return ""
	}
	return b.cfg.Cluster.Listen
}

// ClusterURL is where the other brokers of the cluster dial, after Ready; empty
// before, and where there is no cluster.
func (b *Broker) ClusterURL() string {
	if !b.isReady() {
		return ""
	}
	return b.clusterURL
}

// clusterText is the cluster's section of the server's configuration. A stock
// server cannot read a peer's role; it takes only a peer whose certificate is
// for a host of routes, and among ours brokers alone have hosts. So a stock
// server needs routes by name: of addresses it makes no such comparison.
func clusterText(cfg configs.Broker, form Form) (string, error) {
	c := cfg.Cluster
	if c == nil {
		return "", nil
	}
	host, port, err := splitListen(c.Listen)
	if err != nil {
		return "", fmt.Errorf("broker: cluster: %w", err)
	}
	if port == 0 {
		port = server.RANDOM_PORT
	}
	known := ""
	if form == Stock {
		known = "\n    verify_cert_and_check_known_urls: true  # only who has the name of a route"
		for _, route := range c.Routes {
			if u, err := url.Parse(route); err == nil && net.ParseIP(u.Hostname()) != nil {
				return "", fmt.Errorf("broker: cluster: route %s: a nats-server of its own knows brokers by their host's name; "+
					"want a name that stands in its certificate", route)
			}
		}
	}
	for _, s := range append([]string{c.Name, c.TLS.Certificate, c.TLS.Key, c.TLS.CA}, c.Routes...) {
		if strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r == 0x7f }) {
			return "", fmt.Errorf("broker: %q holds a control character", s)
		}
	}
	return fmt.Sprintf(`cluster {
  name: %s
  listen: %s
  no_advertise: true  # clients dial what they were told, and nothing else
  ping_interval: %q
  ping_max: 2
  tls {
    cert_file: %s
    key_file: %s
    ca_file: %s
    verify: true%s
    min_version: "1.3"
    timeout: 15
  }
  routes: %s
}
`, strconv.Quote(c.Name), strconv.Quote(net.JoinHostPort(host, strconv.Itoa(port))), routePing(cfg),
		strconv.Quote(c.TLS.Certificate), strconv.Quote(c.TLS.Key), strconv.Quote(c.TLS.CA), known, list(c.Routes)), nil
}

// routePing has the others give up a broker that is silent, at the third ping,
// within three quarters of the bound: when its Nodes have waited for the bound and
// dial them, no callout goes to it any more, and the stores have a leader.
func routePing(cfg configs.Broker) string {
	bound := cfg.HeartbeatBound
	if bound <= 0 {
		bound = wire.HeartbeatBound
	}
	return max(bound/4, 500*time.Millisecond).Round(time.Millisecond).String()
}

// joinCluster gives the routes their handshake: certificates that can be
// swapped, and a peer that proves to be a broker of ours, whoever dialled.
func (b *Broker) joinCluster(opts *server.Options) {
	if b.cfg.Cluster == nil {
		return
	}
	current := func() *certificates { return b.routes.Load() }
	opts.Cluster.TLSConfig = &tls.Config{
		MinVersion: tls.VersionTLS13,
		// This side of the configuration dials. It checks the peer itself, by the CA
		// that serves now; which of our brokers answers does not matter, since any of
		// them may just as well dial us.
		InsecureSkipVerify: true,
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			return &current().tls.Certificates[0], nil
		},
		VerifyConnection: func(cs tls.ConnectionState) error { return b.checkRoute(cs, true) },
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
			accept := current().tls.Clone()
			accept.VerifyConnection = func(cs tls.ConnectionState) error { return b.checkRoute(cs, false) }
			return accept, nil
		},
	}
}

// checkRoute admits a peer of a route. dialled says which end of it we are.
func (b *Broker) checkRoute(cs tls.ConnectionState, dialled bool) error {
	chain := make([][]byte, len(cs.PeerCertificates))
	for i, c := range cs.PeerCertificates {
		chain[i] = c.Raw
	}
	t := b.routes.Load().trust
	id, _, err := identity.VerifyChain(t.pool, chain, identity.RoleBroker, dialled)
	if err == nil && id.TrustDomain != t.domain {
		err = fmt.Errorf("certificate of trust domain %q, this is %q", id.TrustDomain, t.domain)
	}
	if err != nil {
		b.refuse(refusedRoute)
		b.log.Warn(eventRefused, slog.String("reason", string(refusedRoute)), slog.String("error", err.Error()))
		return fmt.Errorf("route: %w", err)
	}
	return nil
}

// nameTaken: a broker of the cluster has this one's name. Its store would be
// taken for ours, so the server has cut the route. One that is not ready yet ends.
func (b *Broker) nameTaken(name string) error {
	err := fmt.Errorf("another broker of the cluster is called %q too: give each its own broker.name", name)
	b.health.mu.Lock()
	known := b.health.name != nil
	b.health.name = err
	b.health.mu.Unlock()
	if !known {
		b.log.Error(eventName, slog.String("error", err.Error()))
	}
	return err
}

// ErrLocked: another process works on the store.
var ErrLocked = errors.New("another broker is running on it")

// lockStore keeps a second broker off the folder: both would write it to pieces.
func lockStore(dir string) (unlock func(), err error) {
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("broker: store_dir %s cannot be locked: %w", dir, reason(err))
	}
	if err := lockFile(f); err != nil {
		f.Close() // nothing was written
		return nil, fmt.Errorf("broker: store_dir %s: %w", dir, ErrLocked)
	}
	return func() { f.Close() }, nil
}
