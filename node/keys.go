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
//
// Where there is no such hurry (another CA signs, another nkey was registered, an
// operator has told it to look) that moment is waited for during outdatedPatience, then
// the Node drains for a bounded time. What still runs then was not worth keeping others
// waiting for: it takes work again and tries later, with twice the time.
//
// While the fabric's CA is exchanged the authority tells so, unasked and again and
// again: what it says proves itself by a root that is trusted here already (identity
// I6). Once another root signs than the certificate is of, the way above begins at
// once. Another nkey, that an operator had made here, goes it too: it is registered
// beside the old one, and becomes the file that is read.
const (
	// outdatedPatience is how long a moment with nothing under way is waited for where
	// it is not the certificate's end that asks for another.
	outdatedPatience = 2 * time.Minute
	// The first time to drain without hurry, and the longest. It doubles from one to
	// the next, or a Node that is never idle would follow only at its certificate's end.
	firstDrain   = 10 * time.Second
	longestDrain = 2 * time.Minute
	// outdatedAsk is between two requests then: a herd that asks at once is not all
	// answered.
	outdatedAsk = time.Minute
	// refusedPause is between two lines of the log about roots that are not believed:
	// who carries our messages can make up any number of them.
	refusedPause = time.Minute

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
	// since is when the files first held what is to serve in the place of used,
	// though used is not near its end; zero: they do not.
	since   time.Time
	drain   time.Duration // how long the last without hurry was; 0: there was none
	told    bool          // whatever other keys the files hold are to serve
	refused time.Time     // when roots that are not believed were last told of
	// registered: the files' other nkey is registered.
	registered bool
}

func (k *keys) use(id Identity) { k.used, k.newest = id, id }

// third is a third of the certificate's life.
func (k *keys) third() time.Duration {
	c := k.used.Certificate.Leaf
	return c.NotAfter.Sub(c.NotBefore) / 3
}

func (k *keys) pause() time.Duration {
	longest := longestLook
	if k.newest.NextUser != nil {
		longest = shortestAsk
	}
	return min(max(k.third()/100, shortestLook), longest)
}

func (k *keys) askPause() time.Duration {
	longest := longestAsk
	switch {
	case k.newest.NextUser != nil:
		longest = shortestAsk // an operator made it for this Node: no herd asks
	case k.outdated():
		longest = outdatedAsk
	}
	return min(max(k.third()/100, shortestAsk), longest)
}

// outdated reports whether the certificate in use is of a root that does not sign any
// more.
func (k *keys) outdated() bool { return k.newest.Trust.Outdated(k.used.Certificate.Leaf) }

// replaced reports whether the files have what is to serve in the place of what does:
// a certificate that is good for longer, or of the root that signs now, or an nkey
// that was registered for it, or whatever an operator has told it to take.
func (k *keys) replaced() bool {
	next := k.newest.Certificate.Leaf
	return next.NotAfter.After(k.used.Certificate.Leaf.NotAfter) || (k.outdated() && !k.newest.Trust.Outdated(next)) ||
		(k.registered && k.newest.User.Public() != k.used.User.Public()) || (k.told && k.changed())
}

// wanting reports whether anything is to be done at this time.
func (k *keys) wanting(now time.Time) bool {
	return !now.Before(identity.RenewalDue(k.used.Certificate.Leaf)) || k.outdated() || k.newest.NextUser != nil || k.registered || k.told
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
	n.keys.used, n.keys.nonce, n.keys.since, n.keys.registered = id, nil, time.Time{}, false
	n.keys.drain, n.keys.told = 0, false
	if id.NextUser != nil {
		n.keys.asked = time.Time{} // whatever it asked for last was something else, or is lost
	}
	n.metrics.expiry.Set(float64(id.Certificate.Leaf.NotAfter.Unix()))
}

// renewal does what the certificate's age asks for now. due says that it is one of the
// looks that come by the clock.
func (n *Node) renewal(now time.Time, due bool) session.Event {
	leaf := n.keys.used.Certificate.Leaf
	if n.deps.Reload == nil || n.core.Stopping() || !n.keys.wanting(now) {
		return session.Event{}
	}
	n.readKeys()
	if n.keys.replaced() {
		return n.replace(now)
	}
	if due && !now.Before(identity.RenewalDue(leaf)) && now.Sub(n.keys.warned) >= warnPause {
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
	if n.keys.since.IsZero() {
		n.keys.since = now
	}
	leave := session.Event{Kind: session.LeaveAsked, Reason: session.Renewed, Gen: n.link.id.Gen}
	left := n.keys.used.Certificate.Leaf.NotAfter.Sub(now)
	impatient := (n.keys.outdated() || n.keys.registered || n.keys.told) && now.Sub(n.keys.since) >= outdatedPatience
	switch {
	case left <= n.keys.third()/2:
		leave.Bound = max(left-cutMargin, 0)
	case n.host.open() == 0 || impatient: // idle, too: a long answer may be asked for at this very moment
		n.keys.since = time.Time{} // should it come back, it is as patient again
		n.keys.drain = min(max(2*n.keys.drain, firstDrain), longestDrain)
		leave.Bound, leave.Resume = n.keys.drain, true
	default:
		return session.Event{}
	}
	return leave
}

// quiet takes a moment with nothing under way, if one is waited for.
func (n *Node) quiet(now time.Time) session.Event {
	if n.keys.since.IsZero() || n.core.Stopping() {
		return session.Event{}
	}
	return n.replace(now)
}

// Reload has the Node read its files now and dial anew with them, if they are others:
// at a moment with nothing under way, or drained.
func (n *Node) Reload() {
	select {
	case n.asked <- struct{}{}:
	default: // it is about to
	}
}

// taken does what Reload asked for.
func (n *Node) taken(now time.Time) session.Event {
	n.readKeys()
	if n.core.State() != session.Ready {
		return session.Event{} // the next dial does it
	}
	n.keys.used.Trust = n.keys.newest.Trust // it measures what comes from now on
	n.keys.told = n.keys.changed()
	if n.keys.nonce == nil || now.Sub(n.keys.asked) >= shortestAsk {
		n.keys.asked = time.Time{} // who had us look here wants it now, and no answer is on its way
	}
	return n.renewal(now, false)
}

// askRenewal asks for another nkey to be registered, where there is one, or else for
// the certificate to be signed anew.
func (n *Node) askRenewal() {
	l, id, next := n.link, n.keys.used, n.keys.newest.NextUser
	nonce := identity.NewNonce()
	var req *iopv1.RenewRequest
	var err error
	if next != nil && n.deps.SaveUser != nil {
		req, err = identity.SignNewNKey(id.Certificate, id.User, next, l.id.Edge, l.id.Node, l.id.Gen, nonce)
	} else {
		req, err = identity.SignRenew(id.Certificate, id.User, l.id.Edge, l.id.Node, l.id.Gen, nonce)
	}
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
	learnt := n.learn(a.GetTrust())
	if n.keys.nonce == nil || !bytes.Equal(a.GetNonce(), n.keys.nonce) {
		if len(a.GetNonce()) > 0 || a.GetTrust() == nil {
			n.metrics.dropped[dropUnknown].Inc()
		}
		if !learnt {
			return session.Event{}
		}
		return n.renewal(time.Now(), false)
	}
	n.keys.nonce = nil
	var err error
	if next := a.GetNewNkey(); next != "" {
		err = n.keepUser(next)
	} else {
		err = n.keep(a.GetCertificateChain())
	}
	if err != nil {
		n.log.LogAttrs(context.Background(), slog.LevelWarn, evNotRenewed, slog.Any(keyError, err))
		return session.Event{}
	}
	return n.renewal(time.Now(), false)
}

func (n *Node) keep(chain [][]byte) error {
	if len(chain) == 0 {
		return errors.New("the authority refused: its log says why")
	}
	cert, err := n.keys.used.Certificate.Renewed(n.keys.newest.Trust, chain)
	if err != nil {
		return err
	}
	if err := n.deps.Save(cert); err != nil {
		return err
	}
	n.log.Info(evRenewed, slog.Time(keyUntil, cert.Leaf.NotAfter))
	return nil
}

// learn takes what the authority says of the roots, whoever carried it, if a root that
// is trusted already says so. From then on they measure what comes.
func (n *Node) learn(b *iopv1.TrustBundle) bool {
	if b == nil || n.deps.SaveTrust == nil {
		return false
	}
	next, changed, err := n.keys.newest.Trust.Learn(b)
	if err == nil && changed {
		err = n.deps.SaveTrust(b)
	}
	switch {
	case errors.Is(err, identity.ErrPastTrust):
		return false // a late word
	case err != nil:
		if now := time.Now(); now.Sub(n.keys.refused) >= refusedPause {
			n.keys.refused = now
			n.log.Warn(evTrustRefused, slog.Any(keyError, err))
		}
		return false
	case !changed:
		return false
	}
	n.log.Info(evTrust, slog.Int(keyCount, len(next.Roots())), slog.String(keySigner, identity.RootOf(next.Signer())))
	n.readKeys()
	n.keys.newest.Trust, n.keys.used.Trust = next, next
	return true
}

// keepUser makes the nkey that was registered the one that is read.
func (n *Node) keepUser(public string) error {
	next := n.keys.newest.NextUser
	if next == nil || next.Public() != public {
		return errors.New("another nkey was registered than was asked for")
	}
	if err := n.deps.SaveUser(); err != nil {
		return err
	}
	n.keys.registered = true
	n.log.Info(evUser, slog.String(keyNKey, public))
	return nil
}
