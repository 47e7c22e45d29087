package broker

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/iop-fabric/iop/broker/enrol"
	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/identity"
	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/wire"
	"github.com/iop-fabric/iop/wire/iopv1"
)

// step takes one of an exchange of the CA, and has the broker take its files. From the
// switch on the broker's own certificate is of the new one.
func (f *fixture) step(step func(dir string) (identity.Trust, error)) {
	f.t.Helper()
	if _, err := step(f.dir); err != nil {
		f.t.Fatal(err)
	}
	ca := must(identity.LoadCA(f.dir))
	own := must(identity.LoadCertificate(f.cfg.TLS.Certificate, f.cfg.TLS.Key))
	if identity.IssuerOf(own.Leaf) != identity.RootOf(ca.Certificate()) {
		if err := must(ca.Renew(own, own.Hosts(), 12*time.Hour)).SaveChain(f.cfg.TLS.Certificate); err != nil {
			f.t.Fatal(err)
		}
	}
	if err := f.b.Reload(); err != nil {
		f.t.Fatal(err)
	}
}

func begin(dir string) (identity.Trust, error) { return identity.BeginCA(dir, 24*time.Hour) }

// beats says a heartbeat and returns what comes back of the roots.
func (r *renewer) beats() *iopv1.TrustBundle {
	r.f.t.Helper()
	if err := r.nc.Publish(r.s.Up(subjects.Heartbeat, ""), must((&iopv1.Heartbeat{}).MarshalVT())); err != nil {
		r.f.t.Fatal(err)
	}
	var a iopv1.RenewResponse
	if err := a.UnmarshalVT(r.f.next(r.sub).Data); err != nil || len(a.GetNonce()) > 0 || len(a.GetCertificateChain()) > 0 {
		r.f.t.Fatalf("%v: %v", &a, err)
	}
	return a.GetTrust()
}

// redial dials as the same process with a certificate, knowing the given roots alone.
func (r *renewer) redial(c *identity.Certificate, roots *x509.CertPool) (*nats.Conn, error) {
	r.f.offset.Store(0) // or the broker takes the dial for one of long ago
	d := r.f.dialer("edge1", "node", "n1", r.key)
	d.tls.Certificates, d.tls.RootCAs = []tls.Certificate{c.TLS()}, roots
	d.connection = r.connection
	d.inbox = subjects.NodeInbox("edge1", "n1", d.connection)
	nc, err := d.dial()
	if err == nil {
		r.f.t.Cleanup(nc.Close)
	}
	return nc, err
}

func shownBy(t *testing.T, b *Broker, name string) (root string) {
	t.Helper()
	for _, m := range must(b.Keys(t.Context())).Members {
		if m.Name == name {
			return m.Root
		}
	}
	t.Fatalf("%s is no member", name)
	return ""
}

// While the CA is exchanged a session is told of the new root as soon as it is heard;
// once the new one signs, its certificate is signed anew at any age; who shows which
// is known; and in the end the old one is good for nothing.
//
// Contract: B1 B8 G3 L8
func TestCAExchanged(t *testing.T) {
	r := newRenewer(t)
	before := r.f.roots()
	r.f.step(begin)
	begun, changed, err := before.Learn(r.beats())
	if err != nil || !changed || !begun.Exchanging() {
		t.Fatalf("begin: %v", err)
	}
	if a := r.ask(r.request()); len(a.GetCertificateChain()) > 0 {
		t.Error("begin: a certificate was signed anew")
	}
	r.f.step(identity.SwitchCA)
	switched, changed, err := begun.Learn(r.beats())
	if err != nil || !changed || !switched.Outdated(r.cert.Leaf) {
		t.Fatalf("switch: %v", err)
	}
	renewed, err := r.cert.Renewed(switched, r.ask(r.request()).GetCertificateChain())
	if err != nil || switched.Outdated(renewed.Leaf) {
		t.Fatalf("switch: %v", err)
	}
	old, now := identity.IssuerOf(r.cert.Leaf), identity.IssuerOf(renewed.Leaf)
	if got := shownBy(t, r.f.b, "n1"); got != old {
		t.Errorf("before it dials anew it shows %q", got)
	}
	// Who has heard nothing of it finds the broker all the same, with the old certificate.
	if nc, err := r.redial(r.cert, before.Pool()); err != nil {
		t.Errorf("switch, and nothing heard of it: %v", err)
	} else {
		nc.Close()
	}
	nc, err := r.redial(renewed, switched.Pool())
	if err != nil {
		t.Fatalf("switch, the new certificate: %v", err)
	}
	nc.Close()
	if got := shownBy(t, r.f.b, "n1"); got != now {
		t.Errorf("after that it shows %q", got)
	}
	k := must(r.f.b.Keys(t.Context()))
	if i := slices.IndexFunc(k.Roots, func(r Root) bool { return r.ID == now }); len(k.Roots) != 2 || !k.Roots[i].Signs || k.Roots[1-i].Signs {
		t.Errorf("roots: %+v", k.Roots)
	}
	r.f.step(identity.FinishCA)
	end, changed, err := switched.Learn(r.f.b.certs.Load().roots.Bundle())
	if err != nil || !changed {
		t.Fatalf("finish: %v", err)
	}
	if _, err := r.redial(renewed, end.Pool()); err != nil {
		t.Errorf("finish, the new certificate: %v", err)
	}
	mark := r.f.logs.mark()
	if _, err := r.redial(r.cert, end.Pool()); err == nil {
		t.Error("finish: a certificate of the old CA is taken")
	}
	r.f.logs.wait(t, mark, map[string]string{"msg": eventRefused, "reason": string(refusedCertificate)})
}

// The bundle is told once to each session, and again when it may have been lost, or is
// another one; nothing is told where no CA was ever exchanged.
//
// Contract: B8
func TestRootsAreToldAgain(t *testing.T) {
	r := newRenewer(t)
	beat := func() {
		t.Helper()
		if err := r.nc.Publish(r.s.Up(subjects.Heartbeat, ""), nil); err != nil {
			t.Fatal(err)
		}
	}
	// answered: an answer that is no word of the roots comes after all before it.
	told := func() (n int) {
		t.Helper()
		q := r.request()
		r.f.offset.Add(int64(renewPause))
		if err := r.nc.Publish(r.s.Up(subjects.Renew, ""), must(q.MarshalVT())); err != nil {
			t.Fatal(err)
		}
		for {
			var a iopv1.RenewResponse
			if err := a.UnmarshalVT(r.f.next(r.sub).Data); err != nil {
				t.Fatal(err)
			}
			if len(a.GetNonce()) > 0 {
				return n
			}
			n++
		}
	}
	beat()
	if n := told(); n != 0 {
		t.Errorf("told %d times, and there is nothing to tell", n)
	}
	r.f.step(begin)
	r.beats()
	beat()
	beat()
	if n := told(); n != 0 {
		t.Errorf("told %d times more", n)
	}
	r.f.offset.Add(int64(tellPause))
	r.beats()
	r.f.step(identity.SwitchCA)
	r.beats()
}

// A machine joins at every moment of an exchange, with a line from before it too, as
// long as the old root is trusted; it ends up with the roots of that moment.
//
// Contract: B8 B11
func TestEnrolDuringAnExchange(t *testing.T) {
	f := newEnrolFixture(t).start()
	line, tok := f.invite("early")
	late, lateTok := f.invite("late")
	join := func(name string, line Line, tok enrol.Token, want int) {
		t.Helper()
		j := newJoiner(name)
		status, code, a := j.ask(t, line.Dial, tok)
		if status != 200 {
			t.Fatalf("%s: %d %s", name, status, code)
		}
		_, roots, err := a.Accept(tok, j.key)
		if err != nil || len(roots.Roots()) != want {
			t.Fatalf("%s: %d roots: %v", name, len(roots.Roots()), err)
		}
		if user, err := f.connects(j, tok, a); err != nil || !strings.HasPrefix(user, "edge1."+name+".") {
			t.Errorf("%s: %q %v", name, user, err)
		}
	}
	f.step(begin)
	l, k := f.invite("begun")
	join("begun", l, k, 2)
	f.step(identity.SwitchCA)
	join("early", line, tok, 2)
	l, k = f.invite("switched")
	join("switched", l, k, 2)
	f.step(identity.FinishCA)
	f.ca = nil // nobody knows the old one any more
	j := newJoiner("late")
	if status, _, a := j.ask(t, late.Dial, lateTok); status == 200 {
		if _, _, err := a.Accept(lateTok, j.key); err == nil {
			t.Error("a line that names the old CA is good after the end")
		}
	}
	l, k = f.invite("finished")
	if k.CA != identity.Fingerprint(must(identity.LoadCA(f.dir)).DER()) {
		t.Error("a new line names the old CA")
	}
	j = newJoiner("finished")
	_, _, a := j.ask(t, l.Dial, k)
	if _, roots, err := a.Accept(k, j.key); err != nil || len(roots.Roots()) != 1 {
		t.Errorf("finished: %v", err)
	}
}

// A Node has another nkey of its own registered over its session: from then on both
// serve, and once it has come with the new one, the old one is good for nothing.
//
// Contract: B8 B2
func TestNodeExchangesItsNKey(t *testing.T) {
	r := newRenewer(t)
	next := must(identity.NewUserKey())
	q := must(identity.SignNewNKey(r.cert, r.key, next, r.s.Edge, r.s.Node, r.s.Gen, identity.NewNonce()))
	for range 2 { // asked again, since the answer was lost: the same
		if a := r.ask(q); a.GetNewNkey() != next.Public() || a.GetReason() != "" {
			t.Fatalf("%v", a)
		}
	}
	r.f.offset.Store(0) // as redial does
	instance := instanceOf(r.connection)
	if _, s := r.f.node(r.f.instance(instance, "edge1", "node", "n1", r.key)); s.Gen <= r.s.Gen {
		t.Error("the old nkey does not serve in between")
	}
	_, s := r.f.node(r.f.instance(instance, "edge1", "node", "n1", next))
	r.f.logs.wait(t, 0, map[string]string{"msg": eventNKey, "taken": "true", "nkey": next.Public()})
	if _, err := r.f.instance(instance, "edge1", "node", "n1", r.key).dial(); !errors.Is(err, nats.ErrAuthorization) {
		t.Errorf("the old nkey, after the new one was shown: %v", err)
	}
	list := must(r.f.b.Members(t.Context()))
	if i := slices.IndexFunc(list, func(m configs.Member) bool { return m.Name == "n1" }); list[i].NKey != next.Public() || len(list) != 1 {
		t.Errorf("members: %v", list)
	}
	r.f.node(r.f.instance(instance, "edge1", "node", "n1", next))

	// Of an older session, whose nkey is no member's any more, nothing is registered.
	third := must(identity.NewUserKey())
	svc := newRenewals(&r.f.b.authority, r.f.b.enrolment, &service{b: &r.f.b.authority, work: t.Context(), members: r.f.b.members, generations: r.f.gives()})
	if err := svc.register(r.s, must(identity.SignNewNKey(r.cert, r.key, third, r.s.Edge, r.s.Node, r.s.Gen, identity.NewNonce()))); err == nil {
		t.Error("registered for an older session")
	}
	if err := svc.register(s, must(identity.SignNewNKey(r.cert, r.key, third, s.Edge, s.Node, s.Gen, identity.NewNonce()))); err == nil {
		t.Error("registered by the old nkey")
	}
	id := memberID{Edge: "edge1", Role: identity.RoleNode, Name: "n1"}
	if err := r.f.b.members.Replace(t.Context(), id, r.key.Public(), third.Public()); !errors.Is(err, ErrUnknownMember) {
		t.Errorf("in the place of one that is not registered: %v", err)
	}
	if err := r.f.b.Revoke(t.Context(), "edge1", "node", "n1"); err != nil {
		t.Fatal(err)
	}
	if err := r.f.b.members.Replace(t.Context(), id, next.Public(), third.Public()); !errors.Is(err, ErrUnknownMember) {
		t.Errorf("of one that is revoked: %v", err)
	}
}

// A session does not outlive its certificate: it is told so and closed; and nothing but
// that closes it.
//
// Contract: B8 B2
func TestSessionEndsWithItsCertificate(t *testing.T) {
	f := newEnrolFixture(t)
	short, long := f.member("edge1", "node", "short"), f.member("edge1", "node", "long")
	f.start()
	ctl := f.subscribe(f.edge("edge1"), subjects.CtlWildcard("edge1"))
	// The certificates are good for longer than the test; the broker's clock moves on.
	dial := func(name string, key *identity.NKey, life time.Duration) (*dialer, *nats.Conn, subjects.Session) {
		d := f.dialer("edge1", "node", name, key)
		ca := must(identity.LoadCAFiles(filepath.Join(f.dir, "ca.pem"), filepath.Join(f.dir, "ca.key")))
		d.tls.Certificates[0] = must(ca.Issue(identity.ID{TrustDomain: "iop", Edge: "edge1", Role: identity.RoleNode, Name: name}, nil, life)).TLS()
		nc, s := f.node(d)
		f.told(ctl) // admitted
		return d, nc, s
	}
	d, nc, s := dial("short", short, time.Hour)
	d2, nc2, _ := dial("long", long, 2*time.Hour)
	fences := f.fences(nc, s)
	f.offset.Store(int64(time.Hour + 10*time.Second))
	if why := f.fenced(fences); why != reasonExpired {
		t.Errorf("told %q", why)
	}
	f.wait("the close", d.closed)
	if n := f.told(ctl); n.NodeId != "short" || n.Generation != s.Gen {
		t.Errorf("the Edge was told %v", n)
	}
	f.logs.wait(t, 0, map[string]string{"msg": eventEvicted, "node": "short", "reason": reasonExpired})
	select {
	case <-d2.closed:
		t.Error("the other one was closed too")
	default:
		if user := f.whoami(nc2); !strings.HasPrefix(user, "edge1.long.") {
			t.Error(user)
		}
	}
}

// The core alone: at the end of its certificate, once, and not before; and the server
// would do it a little later.
//
// Contract: B8
func TestExpireOfACertificate(t *testing.T) {
	l := newLive(time.Minute)
	now := time.Now()
	s := subjects.Session{Edge: "edge1", Node: "n1", Gen: 7}
	l.Admitted(now, s, "i")
	l.Until(s, now.Add(time.Hour))
	l.Connected(now, s, connID{"s", 1}, "i")
	if out := l.Expire(now.Add(time.Hour - 1)); len(out) != 0 {
		t.Errorf("before: %v", out)
	}
	out := l.Expire(now.Add(time.Hour))
	if len(out) != 1 || out[0].kind != evict || out[0].session != s || out[0].conn != (connID{"s", 1}) || out[0].reason != reasonExpired {
		t.Errorf("at its end: %+v", out)
	}
	if out := l.Expire(now.Add(time.Hour + time.Second)); len(out) != 0 {
		t.Errorf("twice: %v", out)
	}
	if _, duplicate := l.Duplicate(now.Add(time.Hour), nodeID(s), "other"); duplicate {
		t.Error("it keeps its name from its successor")
	}
	a := applicant{id: identity.ID{Edge: "edge1", Role: identity.RoleNode, Name: "n1"}, connection: wire.NewToken() + wire.NewToken(), notAfter: now}
	if g := a.nodeGrant(s); !g.expires.Equal(now.Add(expiryGrace)) {
		t.Errorf("the server's end: %v", g.expires)
	}
}

// At a hangup the broker takes what its file says of members, and another issuer: that
// signs tokens from then on, while callouts go on as the server pins them, which is told. A
// change in what it knows of members is logged, what it starts with is not.
//
// Contract: B1 B8 B9 G3
func TestReloadedMembersAndIssuer(t *testing.T) {
	f := newFixture(t)
	old := f.member("edge1", "node", "n1")
	list := slices.Clone(f.cfg.Members)
	f.again = func() ([]configs.Member, error) { return list, nil }
	f.start()
	instance := wire.NewToken()
	dial := func(k *identity.NKey) error {
		nc, err := f.instance(instance, "edge1", "node", "n1", k).dial()
		if err == nil {
			nc.Close()
		}
		return err
	}
	reload := func() {
		t.Helper()
		if err := f.b.Reload(); err != nil {
			t.Fatal(err)
		}
	}
	next := must(identity.NewUserKey())
	list = append(list, configs.Member{Edge: "edge1", Role: "node", Name: "n1", NKey: next.Public()})
	f.logs.wait(t, 0, map[string]string{"msg": eventMember, "level": "DEBUG", "name": "n1"})
	if slices.ContainsFunc(f.logs.seen(eventMember), func(l map[string]string) bool { return l["level"] != "DEBUG" }) {
		t.Error("a member of the start is told as a change")
	}
	reload()
	f.logs.wait(t, 0, map[string]string{"msg": eventMember, "level": "INFO", "name": "n1"})
	if err := errors.Join(dial(old), dial(next)); err != nil {
		t.Errorf("during the overlap: %v", err)
	}
	list = list[1:]
	reload()
	if err := dial(next); err != nil {
		t.Errorf("the new one: %v", err)
	}
	if err := dial(old); !errors.Is(err, nats.ErrAuthorization) {
		t.Errorf("the old one, taken out: %v", err)
	}
	if slices.ContainsFunc(f.logs.lines(), func(l map[string]string) bool { return l["msg"] == eventRestart }) {
		t.Error("a restart is asked for, and nothing needs one")
	}

	issuer := must(identity.NewAccountKey())
	if err := issuer.Save(f.cfg.IssuerKey); err != nil {
		t.Fatal(err)
	}
	reload()
	f.logs.wait(t, 0, map[string]string{"msg": eventIssuer, "issuer": issuer.Public()})
	f.logs.wait(t, 0, map[string]string{"msg": eventRestart, "keys": "[issuer_key]"})
	nc, s := f.node(f.instance(instance, "edge1", "node", "n1", next)) // the server still believes
	sub := f.subscribe(nc, s.Down(subjects.SessionVerb, ""))
	if err := nc.Publish(s.Up(subjects.SessionVerb, ""), nil); err != nil {
		t.Fatal(err)
	}
	var g iopv1.SessionGrant
	if err := g.UnmarshalVT(f.next(sub).Data); err != nil {
		t.Fatal(err)
	}
	if _, err := identity.VerifyToken(issuer.Public(), g.GetToken()); err != nil {
		t.Errorf("the token: %v", err)
	}
	if k := must(f.b.Keys(t.Context())); k.Issuer != issuer.Public() || k.Pinned == k.Issuer {
		t.Errorf("%+v", k)
	}
	var copied bytes.Buffer
	if err := f.b.Backup(t.Context(), &copied); err != nil {
		t.Fatal(err)
	}
	if b := must(ReadBackup(&copied)); b.Issuer != issuer.Public() {
		t.Error("a backup is signed by the old issuer")
	}
	f.stop()
	f.cfg.Members = list
	f.start() // by now server and service agree on the new one
	f.node(f.instance(instance, "edge1", "node", "n1", next))
	if k := must(f.b.Keys(t.Context())); k.Pinned != issuer.Public() {
		t.Errorf("after the restart: %+v", k)
	}
}

// A backup from before an exchange of the issuer can be restored until its end.
//
// Contract: B9
func TestBackupOfTheOldIssuer(t *testing.T) {
	f := newFixture(t)
	f.member("edge1", "node", "n1")
	f.start()
	var copied bytes.Buffer
	if err := f.b.Backup(t.Context(), &copied); err != nil {
		t.Fatal(err)
	}
	from := must(ReadBackup(&copied))
	f.stop()
	old := must(identity.LoadNKey(f.cfg.IssuerKey))
	if err := must(identity.NewAccountKey()).Save(f.cfg.IssuerKey); err != nil {
		t.Fatal(err)
	}
	f.cfg.StoreDir = t.TempDir()
	if err := must(New(f.cfg, Deps{})).Restore(from, 0); !errors.Is(err, ErrBackupOther) || !strings.Contains(err.Error(), "from before iop rotate issuer") {
		t.Errorf("after the end: %v", err)
	}
	if err := old.Save(filepath.Join(filepath.Dir(f.cfg.IssuerKey), "issuer-old.nk")); err != nil {
		t.Fatal(err)
	}
	if err := must(New(f.cfg, Deps{})).Restore(from, 0); err != nil {
		t.Errorf("before it: %v", err)
	}
	f.start()
	f.logs.wait(t, 0, map[string]string{"msg": eventRestored})
}

// The Edge is told that a node is revoked, whether it is connected or not.
//
// Contract: B8
func TestEdgeIsToldOfARevocation(t *testing.T) {
	f := newFixture(t)
	f.member("edge1", "node", "n1")
	f.start()
	ctl := f.subscribe(f.edge("edge1"), subjects.Ctl("edge1", subjects.Changed))
	if err := f.b.Revoke(t.Context(), "edge1", "node", "n1"); err != nil {
		t.Fatal(err)
	}
	if n := f.told(ctl); n.NodeId != "n1" || n.Reason != string(refusedRevoked) {
		t.Errorf("%v", n)
	}
}
