package edge

import (
	"context"
	"crypto/x509"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/iop-fabric/iop/internal/bus"
	"github.com/iop-fabric/iop/internal/identity"
)

const (
	certificateLook = time.Minute // between two looks at the file
	certificateWarn = 24 * time.Hour
)

// loadCertificate reads the Edge's own certificate, towards the broker and the Nodes.
func (e *Edge) loadCertificate() (*identity.Certificate, error) {
	files := e.cfg.Broker.TLS
	c, err := identity.LoadCertificate(files.Certificate, files.Key)
	if err != nil {
		return nil, err
	}
	if id := c.ID(); id.Role != identity.RoleEdge || id.Edge != e.cfg.Name {
		return nil, fmt.Errorf("%s: is the certificate of %s, but this is edge %q", files.Certificate, id, e.cfg.Name)
	}
	return c, nil
}

// watchCertificate reads it again once a minute: what is signed from then on is signed
// with the new one. The connection to the broker shows it when it is made anew, at the
// latest when the old one's time is over; streams outlive that (J5).
func (e *Edge) watchCertificate(ctx context.Context) error {
	tick := time.NewTicker(certificateLook)
	defer tick.Stop()
	if k, err := identity.LoadNKey(e.cfg.Broker.NKey); err == nil {
		e.nkey = k.Public()
	}
	var warned time.Time
	for {
		warned = e.lookAtCertificate(ctx, warned)
		e.lookAtTrust(ctx)
		select {
		case <-tick.C:
		case <-e.asked:
			e.lookAtIssuers(ctx)
			e.lookAtNKey(ctx)
		case <-ctx.Done():
			return nil
		}
	}
}

// Reload has the Edge read its certificate, its nkey, the CA and the issuers now.
// Nothing that runs is touched.
func (e *Edge) Reload() {
	select {
	case e.asked <- struct{}{}:
	default: // it is about to
	}
}

// lookAtCertificate returns when it last warned.
func (e *Edge) lookAtCertificate(ctx context.Context, warned time.Time) time.Time {
	used := e.cert.Load()
	switch c, err := e.loadCertificate(); {
	case err != nil:
		e.log.LogAttrs(ctx, slog.LevelWarn, eventKeysBad, slog.String("error", err.Error()))
	case !c.SameAs(used):
		// Of another root: the connection is to show it before the old one is trusted no
		// more. Streams outlive that (J5).
		if identity.IssuerOf(c.Leaf) != identity.IssuerOf(used.Leaf) {
			defer e.redial()
		}
		used = c
		e.cert.Store(c)
		e.metrics.expiry.Set(float64(c.Leaf.NotAfter.Unix()))
		e.log.LogAttrs(ctx, slog.LevelInfo, eventKeys, slog.Time("until", c.Leaf.NotAfter))
	}
	now := e.now()
	if now.Before(identity.RenewalDue(used.Leaf)) || now.Sub(warned) < certificateWarn {
		return warned
	}
	e.log.LogAttrs(ctx, slog.LevelWarn, eventExpiring, slog.Time("until", used.Leaf.NotAfter))
	return now
}

// lookAtTrust reads the CA file again: what is verified from then on is measured by it.
func (e *Edge) lookAtTrust(ctx context.Context) {
	t, err := identity.LoadTrust(e.cfg.Broker.TLS.CA)
	switch {
	case err != nil:
		e.log.LogAttrs(ctx, slog.LevelWarn, eventKeysBad, slog.String("error", err.Error()))
	case !t.SameAs(*e.trust.Load()):
		e.trust.Store(&t)
		e.log.LogAttrs(ctx, slog.LevelInfo, eventRoots, slog.Int("count", len(t.Roots())))
	}
}

// lookAtIssuers reads again whose session tokens are good.
func (e *Edge) lookAtIssuers(ctx context.Context) {
	if e.deps.Issuers == nil {
		return
	}
	issuers, err := e.deps.Issuers()
	switch {
	case err != nil:
		e.log.LogAttrs(ctx, slog.LevelWarn, eventKeysBad, slog.String("error", err.Error()))
	case !slices.Equal(issuers, *e.issuers.Load()):
		e.issuers.Store(&issuers)
		e.log.LogAttrs(ctx, slog.LevelInfo, eventIssuers, slog.Any("issuers", issuers))
	}
}

// lookAtNKey has the connection made anew where the file holds another nkey: it is
// shown at the next dial.
func (e *Edge) lookAtNKey(ctx context.Context) {
	k, err := identity.LoadNKey(e.cfg.Broker.NKey)
	switch {
	case err != nil:
		e.log.LogAttrs(ctx, slog.LevelWarn, eventKeysBad, slog.String("error", err.Error()))
	case k.Public() != e.nkey:
		e.nkey = k.Public()
		e.log.LogAttrs(ctx, slog.LevelInfo, eventKeys, slog.String("nkey", e.nkey))
		e.redial()
	}
}

func (e *Edge) redial() {
	if r, ok := e.bus.(bus.Redialer); ok {
		r.Redial()
	}
}

// expiry is the end of a chain that was verified.
func expiry(chain [][]byte) time.Time {
	if len(chain) == 0 {
		return time.Time{}
	}
	leaf, err := x509.ParseCertificate(chain[0])
	if err != nil {
		return time.Time{}
	}
	return leaf.NotAfter
}
