package node

import (
	"context"
	"crypto/x509"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/iop-fabric/iop/agent"
	"github.com/iop-fabric/iop/internal/bus"
	"github.com/iop-fabric/iop/internal/identity"
	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/wire/iopv1"
)

// exchanging is a rig whose Node is told of another CA, or is to take another nkey.
type exchanging struct {
	*rig
	f   *files
	dir string // the CA's

	mu     sync.Mutex
	asked  []*iopv1.RenewRequest
	trusts int // kept
	users  int
}

func newExchanging(t *testing.T, exchange func(context.Context, agent.Exchange, agent.Sink) error) *exchanging {
	r, f := newKeysRig(t, exchange)
	e := &exchanging{rig: r, f: f, dir: t.TempDir()}
	must(t, r.edge.ca.Save(e.dir))
	d := &r.node.deps
	d.Save = func(c *identity.Certificate) error { f.put(c); return nil }
	d.SaveTrust = func(b *iopv1.TrustBundle) error {
		f.mu.Lock()
		defer f.mu.Unlock()
		next, _, err := f.id.Trust.Learn(b)
		f.id.Trust = next
		e.trusts++ // whatever it is: the Node has looked at it before
		return err
	}
	d.SaveUser = func() error {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.id.User, f.id.NextUser = f.id.NextUser, nil
		e.users++
		return nil
	}
	conn := r.bus.Connect("_INBOX.authority")
	t.Cleanup(conn.Close)
	_, err := conn.Subscribe(subjects.UpEverywhere(subjects.Renew), func(m bus.Msg) {
		q := &iopv1.RenewRequest{}
		r.edge.decode(m.Data, q)
		e.mu.Lock()
		defer e.mu.Unlock()
		e.asked = append(e.asked, q)
	})
	must(t, err)
	return e
}

func (e *exchanging) requests() []*iopv1.RenewRequest {
	synctest.Wait()
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.asked
}

func (e *exchanging) tell(a *iopv1.RenewResponse) {
	e.edge.send(e.session(), subjects.Renew, "", a)
	synctest.Wait()
}

// step takes one of the CA's exchange and tells the Node.
func (e *exchanging) step(step func(string) (identity.Trust, error)) identity.Trust {
	t, err := step(e.dir)
	must(e.t, err)
	e.tell(&iopv1.RenewResponse{Trust: t.Bundle()})
	return t
}

func begin(dir string) (identity.Trust, error) { return identity.BeginCA(dir, 200*time.Hour) }

// The Node learns the new root over its session, has its certificate signed anew once
// that one signs, at any age, and dials with it; nobody who only carries its messages
// has it believe anything.
//
// Contract: B8 G3 L8 Z6
func TestNodeFollowsTheCA(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newExchanging(t, nil)
		e.ready()
		defer e.finish()
		stranger := t.TempDir()
		ca, err := identity.NewCA("iop", 100*time.Hour)
		must(t, err)
		must(t, ca.Save(stranger))
		strange, err := begin(stranger)
		must(t, err)
		for range 5 { // told of once, however often it comes
			e.tell(&iopv1.RenewResponse{Trust: strange.Bundle()})
		}
		if e.trusts != 0 || !strings.Contains(e.logs.String(), evTrustRefused) {
			t.Fatalf("a stranger's roots: kept %d", e.trusts)
		}
		begun := e.step(begin)
		e.tell(&iopv1.RenewResponse{Trust: begun.Bundle()}) // said again
		if e.trusts != 1 || len(e.requests()) != 0 || !e.node.keys.used.Trust.SameAs(begun) {
			t.Fatalf("begin: kept %d, asked %d", e.trusts, len(e.requests()))
		}
		switched := e.step(identity.SwitchCA)
		if e.trusts != 2 || len(e.requests()) != 1 {
			t.Fatalf("switch: kept %d, asked %d", e.trusts, len(e.requests()))
		}
		e.tell(&iopv1.RenewResponse{Trust: begun.Bundle()}) // a word of the past
		if e.trusts != 2 || strings.Count(e.logs.String(), evTrustRefused) != 1 {
			t.Errorf("a word of the past: kept %d", e.trusts)
		}
		q := e.requests()[len(e.requests())-1]
		_, leaf, err := identity.VerifyRenew(begun.Pool(), e.edge.user, testEdge, testNode, e.session().Gen, q)
		must(t, err)
		next, err := identity.LoadCA(e.dir)
		must(t, err)
		der, err := next.Sign(leaf.PublicKey, e.f.id.Certificate.ID(), nil, 30*time.Minute) // good for less long than the old one
		must(t, err)
		e.tell(&iopv1.RenewResponse{Nonce: q.GetNonce(), CertificateChain: next.Chain(der)})
		pass(2 * time.Second)
		e.wantState("ready")
		if n := e.dialled(); n != 2 {
			t.Fatalf("%d dials\n%s", n, e.logs)
		}
		e.edge.with(func() {
			leaf, err := x509.ParseCertificate(e.edge.request.GetCertificateChain()[0])
			if must(t, err); switched.Outdated(leaf) {
				t.Error("it proved itself with a certificate of the old CA")
			}
		})
		cert, err := next.Issue(identity.ID{TrustDomain: "iop", Edge: testEdge, Role: identity.RoleEdge, Name: "edge-a"}, nil, 90*time.Hour)
		must(t, err)
		old := e.edge.cert
		e.edge.with(func() { e.edge.cert = cert })
		end := e.step(identity.FinishCA)
		if e.trusts != 3 || !e.node.keys.used.Trust.SameAs(end) {
			t.Errorf("finish: kept %d", e.trusts)
		}
		e.tell(&iopv1.RenewResponse{Trust: switched.Bundle()})
		if e.trusts != 3 {
			t.Error("the old root was brought back")
		}
		e.edge.with(func() { e.edge.cert = old })
		e.rig.mu.Lock()
		conn := e.conn
		e.rig.mu.Unlock()
		conn.Close()
		pass(time.Second)
		if !strings.Contains(e.logs.String(), evBadConfig) {
			t.Error("a configuration by the old CA's Edge was applied after the end")
		}
		e.edge.with(func() { e.edge.cert = cert })
		pass(time.Minute)
		e.wantState("ready")
	})
}

// Where nobody answers, since all Nodes ask at once, it asks again soon, and not when a
// certificate of a year would have it.
//
// Contract: B4 B8
func TestNodeAsksAgainForTheNewCA(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newExchanging(t, nil)
		c, err := e.edge.ca.Issue(e.f.id.Certificate.ID(), nil, 90*time.Hour)
		must(t, err)
		e.f.put(c)
		e.node.keys.use(e.f.id)
		e.ready()
		defer e.finish()
		e.step(begin)
		e.step(identity.SwitchCA)
		pass(10*outdatedAsk + 10*time.Second)
		if n := len(e.requests()); n < 9 || n > 12 {
			t.Errorf("it asked %d times in ten minutes", n)
		}
	})
}

// untilReleased answers at once where target "short" is asked for, and else a byte a
// minute until release.
func untilReleased(release <-chan struct{}) func(context.Context, agent.Exchange, agent.Sink) error {
	return func(ctx context.Context, ex agent.Exchange, sink agent.Sink) error {
		if ex.Target == "short" {
			return small("hello")(ctx, ex, sink)
		}
		err := sink.Start(200, jsonHeader, -1)
		for err == nil {
			select {
			case <-time.After(time.Minute):
				err = sink.Body([]byte("x"))
			case <-release:
				return nil
			case <-ctx.Done():
				err = context.Cause(ctx)
			}
		}
		return err
	}
}

// drains waits until the Node drains, and until it takes work again.
func (r *rig) drains() (after, d time.Duration) {
	r.t.Helper()
	in := func(state string) (d time.Duration) {
		for ; r.node.State().State == state; d += time.Second {
			if d > time.Hour {
				r.t.Fatalf("%s for an hour", state)
			}
			pass(time.Second)
		}
		return d
	}
	return in("ready"), in("draining")
}

func (r *rig) wantDrain(after, want time.Duration) {
	r.t.Helper()
	waited, d := r.drains()
	if d < want || d > want+2*beat || waited < after-beat || waited > after+longestLook {
		r.t.Errorf("it drained for %s after %s, want %s after %s", d, waited, want, after)
	}
	r.wantState("ready")
}

// A busy Node waits for a moment with nothing under way; now and then it drains for one,
// ever longer, and takes work again where none came: nobody waits for its longest stream,
// and what runs ends as it would have.
//
// Contract: B8 D7
func TestBusyNodeFollowsTheCA(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		e := newExchanging(t, untilReleased(release))
		e.ready()
		defer e.finish()
		_, a := e.edge.open(nil)
		e.step(begin)
		e.step(identity.SwitchCA)
		next, err := identity.LoadCA(e.dir)
		must(t, err)
		renewed, err := next.Renew(e.f.id.Certificate, nil, time.Hour)
		must(t, err)
		e.tell(&iopv1.RenewResponse{Nonce: e.requests()[0].GetNonce(), CertificateChain: renewed.Chain})
		for _, want := range []time.Duration{firstDrain, 2 * firstDrain, 4 * firstDrain, 8 * firstDrain, longestDrain, longestDrain} {
			e.wantDrain(outdatedPatience, want)
			_, b := e.edge.open(func(q *iopv1.ProviderTunnelRequest) { q.Target = "short" })
			synctest.Wait()
			e.edge.wantClass(b, "END")
		}
		if n := e.dialled(); n != 1 {
			t.Fatalf("%d dials", n)
		}
		close(release)
		pass(2 * time.Second)
		e.edge.wantClass(a, "END")
		e.wantState("ready")
		if n := e.dialled(); n != 2 {
			t.Errorf("%d dials", n)
		}
	})
}

// What is in the files serves without being asked for only where it was made for that: an
// nkey that an operator has copied waits until it is told to.
//
// Contract: B8
func TestReplaced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newExchanging(t, nil)
		e.ready()
		defer e.finish()
		next, err := identity.NewUserKey()
		must(t, err)
		e.f.mu.Lock()
		e.f.id.User = next
		e.f.mu.Unlock()
		e.due() // its certificate is in its last third, and so its files are looked at
		e.wantState("ready")
		if e.dialled() != 1 || e.node.keys.newest.User.Public() != next.Public() {
			t.Fatalf("%d dials", e.dialled())
		}
		e.edge.with(func() { e.edge.user = next.Public() })
		e.node.Reload()
		pass(2 * time.Second)
		e.wantState("ready")
		if e.dialled() != 2 {
			t.Errorf("told to: %d dials", e.dialled())
		}
	})
}

// An nkey that waits beside the one in use is registered over the session, and takes
// its place once the authority has said so, and not before.
//
// Contract: B8 Z6
func TestNodeTakesAnotherNKey(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newExchanging(t, nil)
		e.ready()
		defer e.finish()
		next, err := identity.NewUserKey()
		must(t, err)
		e.f.mu.Lock()
		e.f.id.NextUser = next
		old := e.f.id.User
		e.f.mu.Unlock()
		pass(time.Minute)
		if len(e.requests()) != 0 {
			t.Fatal("it asked before it was told to")
		}
		e.node.Reload()
		if len(e.requests()) != 1 {
			t.Fatalf("it asked %d times", len(e.requests()))
		}
		q := e.requests()[0]
		if _, _, err := identity.VerifyRenew(e.edge.ca.Pool(), old.Public(), testEdge, testNode, e.session().Gen, q); err != nil || q.GetNewNkey() != next.Public() {
			t.Fatalf("%v", err)
		}
		e.tell(&iopv1.RenewResponse{NewNkey: next.Public()})                             // unasked
		e.tell(&iopv1.RenewResponse{Nonce: identity.NewNonce(), NewNkey: next.Public()}) // of another
		e.tell(&iopv1.RenewResponse{Nonce: q.GetNonce(), NewNkey: old.Public()})         // another nkey
		e.tell(&iopv1.RenewResponse{Nonce: q.GetNonce(), NewNkey: next.Public()})        // used up by that one
		if e.users != 0 || e.dialled() != 1 {
			t.Fatal("it took the other one before it was registered")
		}
		e.node.Reload()
		q = e.requests()[1]
		e.tell(&iopv1.RenewResponse{Nonce: q.GetNonce(), Reason: "no"})
		if e.users != 0 {
			t.Fatal("it took the other one though it was refused")
		}
		e.node.Reload()
		q = e.requests()[2]
		e.edge.with(func() { e.edge.user = next.Public() })
		e.tell(&iopv1.RenewResponse{Nonce: q.GetNonce(), NewNkey: next.Public()})
		pass(2 * time.Second)
		e.wantState("ready")
		if e.users != 1 || e.dialled() != 2 || e.node.keys.used.User.Public() != next.Public() {
			t.Errorf("taken %d times, %d dials\n%s", e.users, e.dialled(), e.logs)
		}
		pass(time.Minute)
		if n := len(e.requests()); n != 3 {
			t.Errorf("it asked %d times", n)
		}
	})
}

// An nkey that waits there when the Node dials is asked for as soon as it is ready, however
// short a time ago it asked for something else.
//
// Contract: B8
func TestNodeAsksForANKeyAfterADial(t *testing.T) {
	for name, again := range map[string]func(*exchanging){
		"told to": func(e *exchanging) { e.node.Reload() },
		"lost": func(e *exchanging) {
			e.rig.mu.Lock()
			defer e.rig.mu.Unlock()
			e.conn.Close()
		},
	} {
		t.Run(name, func(t *testing.T) { synctest.Test(t, func(t *testing.T) { asksAfterADial(t, again) }) })
	}
}

func asksAfterADial(t *testing.T, again func(*exchanging)) {
	e := newExchanging(t, nil)
	e.ready()
	defer e.finish()
	e.due()
	before := len(e.requests())
	if before == 0 {
		t.Fatal("it did not ask for a certificate")
	}
	next, err := identity.NewUserKey()
	must(t, err)
	e.f.mu.Lock()
	e.f.id.NextUser = next
	e.f.mu.Unlock()
	e.f.renew()
	again(e) // finds a newer certificate and an nkey at once
	pass(2 * time.Second)
	if n := len(e.requests()); e.dialled() != 2 || n <= before || e.requests()[n-1].GetNewNkey() != next.Public() {
		t.Errorf("%d dials, %d requests, %d before", e.dialled(), n, before)
	}
}

// So it is of a Node that begins with one, and where nobody answers it asks again soon.
//
// Contract: B8
func TestNodeBeginsWithANextNKey(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newExchanging(t, nil)
		c, err := e.edge.ca.Issue(e.f.id.Certificate.ID(), nil, 90*time.Hour)
		must(t, err)
		e.f.put(c)
		next, err := identity.NewUserKey()
		must(t, err)
		e.f.mu.Lock()
		e.f.id.NextUser = next
		e.f.mu.Unlock()
		e.node.keys.use(e.f.id)
		e.ready()
		defer e.finish()
		if q := e.requests(); len(q) != 1 || q[0].GetNewNkey() != next.Public() {
			t.Fatalf("%d requests", len(q))
		}
		pass(5 * shortestAsk)
		if n := len(e.requests()); n < 4 || n > 6 {
			t.Errorf("it asked %d times in %s", n, 5*shortestAsk)
		}
	})
}
