package up

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/edge"
	"github.com/iop-fabric/iop/internal/bus"
	"github.com/iop-fabric/iop/internal/bus/natsbus"
	"github.com/iop-fabric/iop/internal/identity"
	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/wire"
)

// Edge's first dial is repeated for ever, as its later ones are: whatever a
// broker says or fails to say, it may say something else in a moment. The wait
// doubles from the first to the last, with full jitter (B4).
const (
	edgeWaitFirst = 250 * time.Millisecond
	edgeWaitLast  = 5 * time.Second
	edgeAskBound  = 3 * time.Second // asking the server who we are
)

// remote is how one process of its own reaches the broker.
type remote struct {
	cert  *identity.Certificate
	trust identity.Trust
	user  *identity.NKey
	urls  []string

	files configs.TLS
	nkey  string // the file
}

func loadRemote(r configs.Remote) (out remote, err error) {
	out.urls, out.files, out.nkey = r.URLs, r.TLS, r.NKey
	if out.cert, err = identity.LoadCertificate(r.TLS.Certificate, r.TLS.Key); err != nil {
		return out, err
	}
	if out.trust, err = identity.LoadTrust(r.TLS.CA); err != nil {
		return out, err
	}
	out.user, err = identity.LoadNKey(r.NKey)
	return out, err
}

// options are what every dial of this workload has in common.
func (r remote) options(name string) natsbus.Options {
	return natsbus.Options{
		URLs: r.urls, Name: name,
		TLS:        &tls.Config{Certificates: []tls.Certificate{r.cert.TLS()}, RootCAs: r.trust.Pool(), MinVersion: tls.VersionTLS13},
		NKeyPublic: r.user.Public(), Sign: r.user.Sign, Timeout: 10 * time.Second,
	}
}

// NewEdge makes an Edge in a process of its own: it dials the broker by mTLS and
// is admitted like everybody else (B2). issuers reads those it believes again; nil: never.
func NewEdge(cfg configs.Edge, issuers func() ([]string, error), log *slog.Logger, metrics *prometheus.Registry) (*edge.Edge, error) {
	r, err := loadRemote(cfg.Broker)
	if err != nil {
		return nil, err
	}
	instance := wire.NewToken()
	dial := func(ctx context.Context, onError func(error)) (bus.Conn, error) {
		wait := edgeWaitFirst
		for attempt := 1; ; attempt++ {
			conn, reason, err := r.dialEdge(ctx, cfg.Name, instance, onError)
			if err == nil {
				return conn, nil
			}
			if ctx.Err() != nil {
				return nil, context.Cause(ctx)
			}
			log.LogAttrs(ctx, slog.LevelWarn, EventDialFailed,
				slog.Int("attempt", attempt), slog.String("reason", reason), slog.String("error", err.Error()))
			select {
			case <-time.After(rand.N(wait)): //nolint:gosec // spreads dials; nothing secret hangs on it
			case <-ctx.Done():
				return nil, context.Cause(ctx)
			}
			wait = min(2*wait, edgeWaitLast)
		}
	}
	return edge.New(cfg, edge.Deps{Dial: dial, Issuers: issuers, Log: log, Metrics: metrics})
}

// dialEdge makes one attempt. An Edge that is refused can be told why in the
// lobby (B3), where only an inbox of its own is readable.
func (r remote) dialEdge(ctx context.Context, name, instance string, onError func(error)) (conn bus.Conn, reason string, err error) {
	o := r.options(instance + wire.NewToken())
	o.Inbox, o.Reconnect, o.OnError = subjects.EdgeInbox(name), true, onError
	o.TLS.Certificates, o.TLS.GetClientCertificate = nil, r.current
	o.Roots = func() *x509.CertPool {
		if t, err := identity.LoadTrust(r.files.CA); err == nil {
			return t.Pool()
		}
		return r.trust.Pool()
	}
	o.Keys = func() (string, func([]byte) ([]byte, error)) {
		user, err := identity.LoadNKey(r.nkey)
		if err != nil {
			user = r.user
		}
		return user.Public(), user.Sign
	}
	c, err := natsbus.Dial(ctx, o)
	if err != nil {
		refusal := natsbus.Classify(err)
		return nil, string(refusal.Reason), fmt.Errorf("%s: %w", refusal.Sentence, err)
	}
	if _, err = ask(ctx, c); err == nil {
		return c, "", nil
	}
	c.Close()
	o = r.options(instance + wire.NewToken())
	o.Inbox = subjects.NodeInbox(name, r.cert.ID().Name, o.Name)
	lobby, dialErr := natsbus.Dial(ctx, o)
	if dialErr != nil {
		return nil, string(natsbus.Timeout), err
	}
	defer lobby.Close()
	info, lobbyErr := ask(ctx, lobby)
	denied, ok := strings.CutPrefix(info.User, "!denied.")
	if lobbyErr != nil || !ok {
		return nil, string(natsbus.Timeout), err
	}
	return nil, denied, fmt.Errorf("the broker refused this edge: %s", denied)
}

// current is the certificate as it is now: a connection outlives the one it was made
// with, and shows the newer when it is made again. A pair that is being written, or no
// good, leaves the one there was.
func (r remote) current(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
	c, err := identity.LoadCertificate(r.files.Certificate, r.files.Key)
	if err != nil || c.ID() != r.cert.ID() {
		c = r.cert
	}
	pair := c.TLS()
	return &pair, nil
}

func ask(ctx context.Context, c *natsbus.Conn) (natsbus.UserInfo, error) {
	ctx, cancel := context.WithTimeout(ctx, edgeAskBound)
	defer cancel()
	return c.WhoAmI(ctx)
}
