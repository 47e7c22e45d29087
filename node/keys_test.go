package node

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/iop-fabric/iop/agent"
	"github.com/iop-fabric/iop/internal/bus"
	"github.com/iop-fabric/iop/internal/identity"
	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/wire/iopv1"
)

// files are what the Node of a rig reads its keys from.
type files struct {
	r    *rig
	mu   sync.Mutex
	id   Identity
	err  error
	kept int // by Save
}

// withFiles makes the rig's Node one that reads them; its certificate is good for an
// hour, with an hour behind it.
func withFiles(r *rig) *files {
	f := &files{r: r, id: r.node.deps.Identity}
	r.node.deps.Reload = func() (Identity, error) {
		f.mu.Lock()
		defer f.mu.Unlock()
		return f.id, f.err
	}
	return f
}

// renew puts a certificate there that is good for longer.
func (f *files) renew() *identity.Certificate {
	c, err := f.r.edge.ca.Renew(f.id.Certificate, nil, 50*time.Hour)
	must(f.r.t, err)
	f.put(c)
	return c
}

func (f *files) put(c *identity.Certificate) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.id.Certificate = c
}

func (r *rig) dialled() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.dials
}

// due lets time pass until the certificate is in its last third.
func (r *rig) due() {
	pass(time.Until(identity.RenewalDue(r.node.deps.Identity.Certificate.Leaf)) + 2*longestLook)
}

// newKeysRig is a rig whose Node reads its keys from files; its CA outlives them.
func newKeysRig(t *testing.T, exchange func(context.Context, agent.Exchange, agent.Sink) error) (*rig, *files) {
	r := newRig(t, options{exchange: exchange})
	ca, err := identity.NewCA("iop", 100*time.Hour)
	must(t, err)
	cert, err := ca.Issue(identity.ID{TrustDomain: "iop", Edge: testEdge, Role: identity.RoleNode, Name: testNode}, nil, time.Hour)
	must(t, err)
	edge, err := ca.Issue(identity.ID{TrustDomain: "iop", Edge: testEdge, Role: identity.RoleEdge, Name: "edge-a"}, nil, 90*time.Hour)
	must(t, err)
	r.edge.ca, r.edge.cert = ca, edge
	id := r.node.deps.Identity
	id.Certificate, id.Trust = cert, ca.Trust()
	r.node.deps.Identity = id
	r.node.keys.use(id)
	return r, withFiles(r)
}

// A newer certificate in the files serves from the next dial; in the last third of the
// old one's life the Node dials for it, once, and nothing that runs is lost.
//
// Contract: B8
func TestNewerCertificate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, f := newKeysRig(t, nil)
		r.ready()
		defer r.finish()
		newer := f.renew()
		pass(5 * time.Minute)
		if r.dialled() != 1 {
			t.Fatal("it dialled before its last third")
		}
		r.due()
		r.wantState("ready")
		if n := r.dialled(); n != 2 {
			t.Fatalf("%d dials\n%s", n, r.logs)
		}
		r.edge.with(func() {
			if string(r.edge.request.GetCertificateChain()[0]) != string(newer.Chain[0]) {
				t.Error("it proved itself with the old certificate")
			}
		})
		if at := testutil.ToFloat64(r.node.metrics.expiry); int64(at) != newer.Leaf.NotAfter.Unix() {
			t.Errorf("it tells that it expires at %v", at)
		}
		if strings.Contains(r.logs.String(), evExpiring) {
			t.Error("it warned")
		}
		r.mu.Lock()
		conn := r.conn
		r.mu.Unlock()
		conn.Close() // whatever the reason of the next dial
		pass(time.Second)
		if n := strings.Count(r.logs.String(), evKeys); n != 1 {
			t.Errorf("new keys were told %d times", n)
		}
	})
}

// While something runs the Node waits for a better moment; when half of the third is
// over it drains, and still ends nothing.
//
// Contract: B8 D7
func TestNewerCertificateOfABusyNode(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		r, f := newKeysRig(t, untilReleased(release))
		r.ready()
		defer r.finish()
		_, a := r.edge.open(nil)
		f.renew()
		r.due()
		r.wantState("ready")
		leaf := r.node.deps.Identity.Certificate.Leaf
		pass(time.Until(leaf.NotAfter.Add(-leaf.NotAfter.Sub(leaf.NotBefore)/6)) + 2*longestLook)
		r.wantState("draining")
		pass(10 * time.Minute) // far beyond the grace of a stop
		r.wantState("draining")
		if n := r.dialled(); n != 1 {
			t.Fatalf("%d dials", n)
		}
		close(release)
		pass(time.Second)
		r.edge.wantClass(a, "END")
		r.wantState("ready")
		if n := r.dialled(); n != 2 {
			t.Errorf("%d dials", n)
		}
	})
}

// Told to, it takes other keys at any age of the old ones, at a moment with nothing under
// way; it drains for one a little, and in the meantime others are answered. Where there
// are none it does nothing.
//
// Contract: B8 D7
func TestReload(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		r, f := newKeysRig(t, untilReleased(release))
		r.ready()
		defer r.finish()
		r.node.Reload()
		pass(5 * time.Second)
		if r.dialled() != 1 {
			t.Fatal("it dialled for nothing")
		}
		_, a := r.edge.open(nil)
		synctest.Wait()
		user, err := identity.NewUserKey()
		must(t, err)
		r.edge.with(func() { r.edge.user = user.Public() })
		f.mu.Lock()
		f.id.User = user
		f.mu.Unlock()
		r.node.Reload()
		r.node.Reload()
		for _, want := range []time.Duration{firstDrain, 2 * firstDrain} {
			_, b := r.edge.open(func(q *iopv1.ProviderTunnelRequest) { q.Target = "short" })
			synctest.Wait()
			r.edge.wantClass(b, "END")
			r.wantDrain(outdatedPatience, want)
		}
		close(release)
		pass(2 * time.Second)
		r.edge.wantClass(a, "END")
		r.wantState("ready")
		if n := r.dialled(); n != 2 {
			t.Errorf("%d dials", n)
		}
	})
}

// What is asked for while an idle Node leaves for newer keys is answered, and does not keep
// others waiting until its end.
//
// Contract: B8 D7
func TestLongAnswerWhileLeaving(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		r, f := newKeysRig(t, untilReleased(release))
		r.ready()
		defer r.finish()
		f.renew()
		r.node.Reload()
		synctest.Wait()
		_, a := r.edge.open(nil) // Edge has not heard of it
		r.wantDrain(0, firstDrain)
		close(release)
		pass(2 * time.Second)
		r.edge.wantClass(a, "END")
		if r.wantState("ready"); r.dialled() != 2 {
			t.Errorf("%d dials", r.dialled())
		}
	})
}

// Files that are being written, or are no good, cost nothing: what served goes on.
//
// Contract: B8 S4
func TestUnreadableKeys(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, f := newKeysRig(t, nil)
		r.ready()
		defer r.finish()
		f.mu.Lock()
		f.err = errors.New("the key is not the key of the certificate")
		f.mu.Unlock()
		r.mu.Lock()
		conn := r.conn
		r.mu.Unlock()
		conn.Close()
		pass(time.Second)
		r.wantState("ready")
		if !strings.Contains(r.logs.String(), evKeysBad) {
			t.Error("nobody is told")
		}
	})
}

// In its last third a certificate that nobody renews is told of once a day.
//
// Contract: B8 D8
func TestExpiringIsTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, f := newKeysRig(t, nil)
		c, err := r.edge.ca.Issue(f.id.Certificate.ID(), nil, 90*time.Hour)
		must(t, err)
		f.put(c)
		r.node.keys.use(f.id)
		r.edge.tamper = func(a *iopv1.RegisterResponse) { // days of heartbeats take their time
			a.HeartbeatIntervalMs, a.HeartbeatBoundMs = 30_000, 600_000
		}
		r.ready()
		defer r.finish()
		pass(59 * time.Hour)
		if n := strings.Count(r.logs.String(), evExpiring); n != 0 {
			t.Errorf("told %d times before the last third", n)
		}
		pass(26 * time.Hour)
		if n := strings.Count(r.logs.String(), evExpiring); n != 2 {
			t.Errorf("told %d times in 25 hours", n)
		}
		if r.dialled() != 1 {
			t.Error("it dialled for nothing")
		}
	})
}

// The authority's answer is believed for what it proves alone.
//
// Contract: B8 Z6
func TestRenewalAnswers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, f := newKeysRig(t, nil)
		r.node.deps.Save = func(c *identity.Certificate) error {
			f.put(c)
			f.kept++
			return nil
		}
		var mu sync.Mutex
		var all []*iopv1.RenewRequest
		asked := func() []*iopv1.RenewRequest {
			mu.Lock()
			defer mu.Unlock()
			return all
		}
		conn := r.bus.Connect("_INBOX.authority")
		defer conn.Close()
		_, err := conn.Subscribe(subjects.UpEverywhere(subjects.Renew), func(m bus.Msg) {
			q := &iopv1.RenewRequest{}
			r.edge.decode(m.Data, q)
			mu.Lock()
			defer mu.Unlock()
			all = append(all, q)
		})
		must(t, err)
		r.ready()
		defer r.finish()
		pass(10 * time.Minute)
		if len(asked()) > 0 {
			t.Fatal("it asked before its last third")
		}
		r.due()
		if len(asked()) == 0 {
			t.Fatal("it did not ask")
		}
		ca, id := r.edge.ca, f.id.Certificate.ID()
		_, leaf, err := identity.VerifyRenew(ca.Pool(), r.edge.user, testEdge, testNode, r.session().Gen, asked()[0])
		must(t, err)
		sign := func(by *identity.CA, id identity.ID, key any, ttl time.Duration) [][]byte {
			der, err := by.Sign(key, id, nil, ttl)
			must(t, err)
			return [][]byte{der}
		}
		stranger, err := identity.NewCA("iop", 100*time.Hour)
		must(t, err)
		other, err := ca.Issue(id, nil, 50*time.Hour)
		must(t, err)
		elsewhere := id
		elsewhere.Name = "node2"
		last := func() []byte { return asked()[len(asked())-1].GetNonce() }
		for name, a := range map[string]func() *iopv1.RenewResponse{
			"a refusal":    func() *iopv1.RenewResponse { return &iopv1.RenewResponse{Nonce: last(), Reason: "no"} },
			"another CA":   func() *iopv1.RenewResponse { return renewal(last(), sign(stranger, id, leaf.PublicKey, 50*time.Hour)) },
			"another name": func() *iopv1.RenewResponse { return renewal(last(), sign(ca, elsewhere, leaf.PublicKey, 50*time.Hour)) },
			"another key":  func() *iopv1.RenewResponse { return renewal(last(), other.Chain) },
			"no longer":    func() *iopv1.RenewResponse { return renewal(last(), sign(ca, id, leaf.PublicKey, time.Minute)) },
			"an answer unasked": func() *iopv1.RenewResponse {
				return renewal(identity.NewNonce(), sign(ca, id, leaf.PublicKey, 50*time.Hour))
			},
			"an answer of old": func() *iopv1.RenewResponse {
				return renewal(asked()[0].GetNonce(), sign(ca, id, leaf.PublicKey, 50*time.Hour))
			},
			"no nonce, no chain": func() *iopv1.RenewResponse { return &iopv1.RenewResponse{} },
		} {
			pass(2 * longestLook) // it has asked again
			r.edge.send(r.session(), subjects.Renew, "", a())
			synctest.Wait()
			if f.kept > 0 || r.dialled() > 1 {
				t.Fatalf("%s: kept", name)
			}
		}
		pass(2 * longestLook)
		good := renewal(last(), sign(ca, id, leaf.PublicKey, 50*time.Hour))
		r.edge.send(r.session(), subjects.Renew, "", good)
		r.edge.send(r.session(), subjects.Renew, "", good)
		pass(2 * time.Second)
		r.wantState("ready")
		if f.kept != 1 || r.dialled() != 2 {
			t.Errorf("kept %d times, %d dials\n%s", f.kept, r.dialled(), r.logs)
		}
	})
}

func renewal(nonce []byte, chain [][]byte) *iopv1.RenewResponse {
	return &iopv1.RenewResponse{Nonce: nonce, CertificateChain: chain}
}
