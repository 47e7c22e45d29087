package node

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/iop-fabric/iop/internal/identity"
	"github.com/iop-fabric/iop/node/session"
	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/wire/iopv1"
)

// Renewal of the Node's own certificate (B8):
//
//	last third ─ asks over its session ─> authority ─ signs the same key ─> file
//	                                                                         │
//	  next dial <── session ends <── idle, or drained <── the file is newer <┘
//
// Whoever writes the file (the authority's answer, or an operator), the rest is one
// way. A moment with nothing under way is waited for during half of that third; after
// it the Node drains, for as long as the old certificate is good.
const (
	longestLook  = time.Minute // between two looks at the files
	shortestLook = time.Second
	longestAsk   = time.Hour // between two requests to the authority
	shortestAsk  = 15 * time.Second
	warnPause    = 24 * time.Hour
	// cutMargin is before the end of the certificate, with which the broker ends the
	// connection: what still runs is told so.
	cutMargin = 10 * time.Second
)

// keys are the identity in use, and what is known of its successor.
type keys struct {
	used   Identity // of the session, or the dial
	newest Identity // as it was last read
	asked  time.Time
	warned time.Time
	nonce  []byte // of the request under way; nil: none
}

func (k *keys) use(id Identity) { k.used, k.newest = id, id }

// third is a third of the certificate's life.
func (k *keys) third() time.Duration {
	c := k.used.Certificate.Leaf
	return c.NotAfter.Sub(c.NotBefore) / 3
}

func (k *keys) pause() time.Duration { return min(max(k.third()/100, shortestLook), longestLook) }

func (k *keys) askPause() time.Duration { return min(max(k.third()/100, shortestAsk), longestAsk) }

// replaced reports whether the files have a certificate that is good for longer.
func (k *keys) replaced() bool {
	return k.newest.Certificate.Leaf.NotAfter.After(k.used.Certificate.Leaf.NotAfter)
}

// changed reports whether the files hold another certificate or nkey than is in use.
func (k *keys) changed() bool {
	return !k.newest.Certificate.SameAs(k.used.Certificate) || k.newest.User.Public() != k.used.User.Public()
}

// readKeys reads the files again. Where they are no good, for instance because they are
// being written, what served goes on.
func (n *Node) readKeys() {
	if n.deps.Reload == nil {
		return
	}
	id, err := n.deps.Reload()
	if err != nil {
		n.log.Warn(evKeysBad, slog.Any(keyError, err))
		return
	}
	n.keys.newest = id
}

// reload makes the next dial one with the files as they are now.
func (n *Node) reload() {
	n.readKeys()
	id := n.keys.newest
	if n.keys.changed() {
		n.log.Info(evKeys, slog.Time(keyUntil, id.Certificate.Leaf.NotAfter))
	}
	n.keys.used, n.keys.nonce = id, nil
	n.metrics.expiry.Set(float64(id.Certificate.Leaf.NotAfter.Unix()))
}

// renewal does what the certificate's age asks for now. due says that it is one of the
// looks that come by the clock.
func (n *Node) renewal(now time.Time, due bool) session.Event {
	leaf := n.keys.used.Certificate.Leaf
	if n.deps.Reload == nil || n.core.Stopping() || now.Before(identity.RenewalDue(leaf)) {
		return session.Event{}
	}
	n.readKeys()
	if n.keys.replaced() {
		return n.replace(now)
	}
	if due && now.Sub(n.keys.warned) >= warnPause {
		n.keys.warned = now
		n.log.Warn(evExpiring, slog.Time(keyUntil, leaf.NotAfter))
	}
	if n.deps.Save != nil && n.core.State() == session.Ready && now.Sub(n.keys.asked) >= n.keys.askPause() {
		n.keys.asked = now
		n.askRenewal()
	}
	return session.Event{}
}

// replace ends the session for one with the newer certificate, as soon as that costs
// nothing, or when it may not wait any longer.
func (n *Node) replace(now time.Time) session.Event {
	if n.core.State() != session.Ready {
		return session.Event{} // the next dial takes it
	}
	left := n.keys.used.Certificate.Leaf.NotAfter.Sub(now)
	if n.host.open() > 0 && left > n.keys.third()/2 {
		return session.Event{}
	}
	return session.Event{Kind: session.LeaveAsked, Reason: session.Renewed, Gen: n.link.id.Gen, Bound: max(left-cutMargin, 0)}
}

// Reload has the Node read its files now and dial anew with them, if they are others:
// it takes nothing new, and what runs may end while the certificate in use is good.
func (n *Node) Reload() {
	select {
	case n.asked <- struct{}{}:
	default: // it is about to
	}
}

// taken does what Reload asked for.
func (n *Node) taken(now time.Time) session.Event {
	n.readKeys()
	if !n.keys.changed() || n.core.State() != session.Ready {
		return session.Event{} // nothing to do, or the next dial does it
	}
	left := n.keys.used.Certificate.Leaf.NotAfter.Sub(now)
	return session.Event{Kind: session.LeaveAsked, Reason: session.Renewed, Gen: n.link.id.Gen, Bound: max(left-cutMargin, 0)}
}

func (n *Node) askRenewal() {
	l, id := n.link, n.keys.used
	nonce := identity.NewNonce()
	req, err := identity.SignRenew(id.Certificate, id.User, l.id.Edge, l.id.Node, l.id.Gen, nonce)
	if err != nil {
		n.log.Warn(evNotRenewed, slog.Any(keyError, err))
		return
	}
	n.keys.nonce = nonce
	l.send(subjects.Renew, req)
}

// renewed takes the authority's answer: whoever carried it, only a certificate of our
// own CA for our own name and key is kept.
func (n *Node) renewed(data []byte) session.Event {
	var a iopv1.RenewResponse
	if a.UnmarshalVT(data) != nil {
		n.metrics.dropped[dropMalformed].Inc()
		return session.Event{}
	}
	if n.keys.nonce == nil || !bytes.Equal(a.GetNonce(), n.keys.nonce) {
		n.metrics.dropped[dropUnknown].Inc()
		return session.Event{}
	}
	n.keys.nonce = nil
	if err := n.keep(a.GetCertificateChain()); err != nil {
		n.log.LogAttrs(context.Background(), slog.LevelWarn, evNotRenewed, slog.Any(keyError, err))
		return session.Event{}
	}
	return n.renewal(time.Now(), false)
}

func (n *Node) keep(chain [][]byte) error {
	if len(chain) == 0 {
		return errors.New("the authority refused: its log says why")
	}
	cert, err := n.keys.used.Certificate.Renewed(n.keys.used.CA, chain)
	if err != nil {
		return err
	}
	if err := n.deps.Save(cert); err != nil {
		return err
	}
	n.log.Info(evRenewed, slog.Time(keyUntil, cert.Leaf.NotAfter))
	return nil
}
