package broker

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/jwt/v2"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/identity"
	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/wire"
	"github.com/iop-fabric/iop/wire/iopv1"
)

// site is a leaf beside a fixture's hub.
type site struct {
	f      *fixture
	cfg    configs.Leaf
	logs   *records
	leaf   *Leaf
	reg    *prometheus.Registry
	cancel context.CancelFunc
	done   chan error
}

// newHub is a fixture that listens for leaves, with its Nodes n1 and n2 of edge1
// and the leaf l1.
func newHub(t *testing.T) (f *fixture, leafKey, n1, n2 *identity.NKey) {
	f = newFixture(t)
	f.cfg.LeafListen = "127.0.0.1:0"
	leafKey, n1, n2 = f.member("edge1", "leaf", "l1"), f.member("edge1", "node", "n1"), f.member("edge1", "node", "n2")
	return f, leafKey, n1, n2
}

var bothUses = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}

// newSite makes the files of the leaf l1 of edge1.
func (f *fixture) newSite(key *identity.NKey) *site {
	f.t.Helper()
	dir := f.t.TempDir()
	in := func(name string) string { return filepath.Join(dir, name) }
	f.ca.write(in("ca.pem"))
	cert := f.ca.issue(bothUses, "spiffe://iop/edge1/leaf/l1")
	if err := cert.Save(in("leaf.pem"), in("leaf.key")); err != nil {
		f.t.Fatal(err)
	}
	if err := key.Save(in("leaf.nk")); err != nil {
		f.t.Fatal(err)
	}
	return &site{f: f, logs: newRecords(), cfg: configs.Leaf{
		Name: "l1", Edge: "edge1", Listen: "127.0.0.1:0", Issuer: f.issuer(),
		TLS:  configs.TLS{Certificate: in("leaf.pem"), Key: in("leaf.key"), CA: in("ca.pem")},
		NKey: in("leaf.nk"), HeartbeatBound: 5 * time.Second,
	}}
}

func (f *fixture) issuer() string { return must(identity.LoadNKey(f.cfg.IssuerKey)).Public() }

func (f *fixture) leafAddr() string { return strings.TrimPrefix(f.b.LeafURL(), "tls://") }

// run starts the leaf without waiting for the hub.
func (s *site) run() *site {
	s.f.t.Helper()
	if len(s.cfg.Hub) == 0 {
		s.cfg.Hub = []string{s.f.b.LeafURL()}
	}
	s.reg = prometheus.NewRegistry()
	leaf, err := NewLeaf(s.cfg, Deps{Log: slog.New(s.logs), Metrics: s.reg})
	if err != nil {
		s.f.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	s.leaf, s.cancel, s.done = leaf, cancel, make(chan error, 1)
	go func() { s.done <- leaf.Run(ctx) }()
	s.f.t.Cleanup(s.stop)
	return s
}

// start runs it and waits until Nodes can come in.
func (s *site) start() *site {
	s.f.t.Helper()
	s.run()
	select {
	case <-s.leaf.Ready():
	case err := <-s.done:
		s.f.t.Fatalf("Run: %v", err)
	case <-time.After(guard):
		s.logs.dump(s.f.t)
		s.f.t.Fatal("the leaf was not ready")
	}
	return s
}

func (s *site) stop() {
	if s.cancel == nil {
		return
	}
	s.cancel()
	s.cancel = nil
	if err := <-s.done; err != nil {
		s.f.t.Errorf("Run: %v", err)
	}
}

// dialer is a Node that has no other setting than the leaf's URL.
func (s *site) dialer(d *dialer) *dialer {
	d.url = s.leaf.ClientURL()
	return d
}

func (f *fixture) told(sub *nats.Subscription) *iopv1.SessionNotice {
	f.t.Helper()
	_, n := f.notice(sub)
	return n
}

// A Node behind a leaf: admitted by the hub, named by it, heard by its Edge,
// given its token, and missed when it goes.
//
// Contract: Y3 B5 B7 G1 G2
func TestLeafSession(t *testing.T) {
	f, key, n1, _ := newHub(t)
	f.start()
	s := f.newSite(key).start()
	edge := f.edge("edge1")
	ctl := f.subscribe(edge, subjects.CtlWildcard("edge1"))
	up := f.subscribe(edge, subjects.UpWildcard("edge1"))

	d := s.dialer(f.dialer("edge1", "node", "n1", n1))
	nc, session := f.node(d)
	if n := f.told(ctl); n.NodeId != "n1" || n.Generation != session.Gen || n.InstanceId != d.connection[:instanceLength] {
		t.Fatalf("admitted: %v", n)
	}
	down := f.subscribe(nc, session.DownWildcard())
	if err := nc.Publish(session.Up(subjects.SessionVerb, ""), nil); err != nil {
		t.Fatal(err)
	}
	var grant iopv1.SessionGrant
	if err := grant.UnmarshalVT(f.next(down).Data); err != nil {
		t.Fatal(err)
	}
	claims, err := identity.VerifyToken(f.issuer(), grant.Token)
	if err != nil || claims.Gen != session.Gen || claims.NKey != n1.Public() {
		t.Fatalf("token: %+v %v", claims, err)
	}
	if m := f.next(up); m.Subject != session.Up(subjects.SessionVerb, "") {
		t.Fatal(m.Subject)
	}
	run := wire.NewRunID()
	if err := edge.Publish(session.Down(subjects.Tunnel, run), []byte("request")); err != nil {
		t.Fatal(err)
	}
	if m := f.next(down); string(m.Data) != "request" {
		t.Fatal(m)
	}
	if err := nc.Publish(session.Up(subjects.Frame, run), []byte("frame")); err != nil {
		t.Fatal(err)
	}
	if m := f.next(up); string(m.Data) != "frame" || m.Subject != session.Up(subjects.Frame, run) {
		t.Fatal(m)
	}
	gone := time.Now()
	nc.Close()
	if n := f.told(ctl); n.NodeId != "n1" || n.Generation != session.Gen || n.Reason != "client_closed" {
		t.Fatalf("closed: %v", n)
	}
	t.Logf("the Edge knew %v after the Node had gone", time.Since(gone))
	// Another instance may come at once: the hub knows that the first has gone.
	if _, again := f.node(s.dialer(f.dialer("edge1", "node", "n1", n1))); again.Gen <= session.Gen {
		t.Fatalf("generation %d after %d", again.Gen, session.Gen)
	}
}

// The hub closes what is at a leaf: the older session of two, at the same leaf or
// moved to the hub, and the revoked one, each told why first. A second instance is
// told that it is one.
//
// Contract: Y3 B3 B6 B8 B12
func TestLeafKicks(t *testing.T) {
	f, key, n1, n2 := newHub(t)
	f.start()
	s := f.newSite(key).start()
	instance := wire.NewToken()
	first := s.dialer(f.instance(instance, "edge1", "node", "n1", n1))
	nc, s1 := f.node(first)
	fences := f.fences(nc, s1)

	second := s.dialer(f.instance(instance, "edge1", "node", "n1", n1))
	nc2, s2 := f.node(second)
	fences2 := f.fences(nc2, s2)
	if reason := f.fenced(fences); reason != reasonSuperseded {
		t.Fatalf("the older session is told %q", reason)
	}
	f.wait("the older session's end", first.closed)

	_, user := f.connect(s.dialer(f.dialer("edge1", "node", "n1", n1)))
	if !strings.HasPrefix(user, "!denied.duplicate.") {
		t.Fatalf("a second instance is %q", user)
	}

	_, s3 := f.node(f.instance(instance, "edge1", "node", "n1", n1)) // at the hub now
	if s3.Gen <= s2.Gen {
		t.Fatal(s3)
	}
	if reason := f.fenced(fences2); reason != reasonSuperseded {
		t.Fatalf("the session at the leaf is told %q", reason)
	}
	f.wait("the end of the session at the leaf", second.closed)

	d := s.dialer(f.dialer("edge1", "node", "n2", n2))
	nc4, s4 := f.node(d)
	fences4 := f.fences(nc4, s4)
	if err := f.b.Revoke(context.Background(), "edge1", "node", "n2"); err != nil {
		t.Fatal(err)
	}
	if reason := f.fenced(fences4); reason != string(refusedRevoked) {
		t.Fatalf("the revoked is told %q", reason)
	}
	f.wait("the end of the revoked", d.closed)
	if _, user := f.connect(s.dialer(f.dialer("edge1", "node", "n2", n2))); user != "!denied.revoked" {
		t.Fatalf("the revoked is %q", user)
	}
}

// Who may not come in at the hub may not come in at a leaf, and learns as much.
// An Edge does not, nor another edge's Node, nor anybody when the leaf's own name
// is revoked.
//
// Contract: Y3 B2 B3 Z6
func TestLeafRefusals(t *testing.T) {
	f, key, n1, _ := newHub(t)
	foreign, outside := f.member("edge2", "node", "n1"), f.member("edge1", "edge", "e1")
	f.start()
	s := f.newSite(key).start()
	stranger := must(identity.NewUserKey())
	for name, c := range map[string]struct {
		d      *dialer
		told   string // in the lobby
		reason refusal
	}{
		"another edge's node": {f.dialer("edge2", "node", "n1", foreign), "!denied.wrong_edge", refusedWrongEdge},
		"an edge":             {f.dialer("edge1", "edge", "e1", outside), "", refusedRole},
		"wrong nkey":          {f.dialer("edge1", "node", "n1", stranger), "", refusedNKey},
		"unknown":             {f.dialer("edge1", "node", "n9", stranger), "!denied.unknown_node", refusedUnknown},
		"bad signature": {func() *dialer {
			d := f.dialer("edge1", "node", "n1", n1)
			d.auth = nats.Nkey(n1.Public(), stranger.Sign)
			return d
		}(), "", refusedSignature},
	} {
		before := f.refused(c.reason)
		if c.told != "" {
			nc, user := f.connect(s.dialer(c.d))
			if user != c.told {
				t.Errorf("%s: is told %q", name, user)
			}
			nc.Close()
		} else if nc, err := s.dialer(c.d).dial(); err == nil {
			t.Errorf("%s: came in as %q", name, f.whoami(nc))
			nc.Close()
		}
		if f.refused(c.reason) == before {
			t.Errorf("%s: the hub did not count %s", name, c.reason)
		}
	}
	d := s.dialer(f.dialer("edge1", "node", "n1", n1))
	d.tls.Certificates[0] = newTestCA().client("spiffe://iop/edge1/node/n1")
	if _, err := d.dial(); err == nil {
		t.Error("a foreign certificate came in")
	}
}

// A leaf's key of its own is asked at each admission: once revoked, it brings in
// nobody, its link is cut, and its sessions are closed at the Edge.
//
// Contract: B8 Y3 Z6
func TestLeafRevoked(t *testing.T) {
	f, key, n1, _ := newHub(t)
	f.start()
	s := f.newSite(key)
	s.cfg.HeartbeatBound = time.Second
	s.start()
	edge := f.edge("edge1")
	ctl := f.subscribe(edge, subjects.CtlWildcard("edge1"))
	d := s.dialer(f.dialer("edge1", "node", "n1", n1))
	_, session := f.node(d)
	f.told(ctl)
	if err := f.b.Revoke(context.Background(), "edge1", "leaf", "l1"); err != nil {
		t.Fatal(err)
	}
	if n := f.told(ctl); n.Generation != session.Gen || n.Reason != string(refusedRevoked) {
		t.Fatalf("closed: %v", n)
	}
	s.logs.wait(t, 0, map[string]string{"msg": eventLeafAway})
	s.logs.wait(t, 0, map[string]string{"msg": eventLeafCut})
	f.wait("the end of its session", d.closed)
	if line := s.logs.wait(t, 0, map[string]string{"msg": eventLeafLink}); !strings.Contains(line["reason"], "not revoked") {
		t.Errorf("the leaf says %q", line["reason"])
	}
	if _, err := s.dialer(f.dialer("edge1", "node", "n1", n1)).dial(); err == nil {
		t.Error("it still brings Nodes in")
	}
}

// What is wrong with a leaf's own files is said before anything starts.
//
// Contract: B2 Y3
func TestNewLeafRefuses(t *testing.T) {
	f, key, _, _ := newHub(t)
	for name, c := range map[string]struct {
		edit func(s *site)
		want string
	}{
		"role":         {func(s *site) { s.certificate(f.ca, bothUses, "spiffe://iop/edge1/node/l1") }, "certificate of a node where a leaf is wanted"},
		"edge":         {func(s *site) { s.certificate(f.ca, bothUses, "spiffe://iop/edge2/leaf/l1") }, "spiffe://iop/edge1/leaf/l1 is configured"},
		"trust domain": {func(s *site) { s.certificate(f.ca, bothUses, "spiffe://other/edge1/leaf/l1") }, "spiffe://iop/edge1/leaf/l1 is configured"},
		"no hosts": {func(s *site) {
			s.certificate(f.ca, []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}, "spiffe://iop/edge1/leaf/l1")
		}, "made with the hosts"},
		"foreign CA": {func(s *site) { s.certificate(newTestCA(), bothUses, "spiffe://iop/edge1/leaf/l1") }, "under the CA in"},
		"account key": {func(s *site) {
			if err := must(identity.NewAccountKey()).Save(s.cfg.NKey); err != nil {
				t.Fatal(err)
			}
		}, "wrong kind of nkey"},
		"no nkey": {func(s *site) { s.cfg.NKey += "x" }, "nkey"},
		"name":    {func(s *site) { s.cfg.Name = "L.1" }, "leaf.name"},
		"no hub":  {func(s *site) { s.cfg.Hub = nil }, "leaf.hub: is required"},
	} {
		s := f.newSite(key)
		s.cfg.Hub = []string{"tls://127.0.0.1:1"}
		c.edit(s)
		if _, err := NewLeaf(s.cfg, Deps{}); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func (s *site) certificate(ca *testCA, usages []x509.ExtKeyUsage, uri string) {
	s.f.t.Helper()
	for _, file := range []string{s.cfg.TLS.Certificate, s.cfg.TLS.Key} {
		if err := os.Remove(file); err != nil {
			s.f.t.Fatal(err)
		}
	}
	if err := ca.issue(usages, uri).Save(s.cfg.TLS.Certificate, s.cfg.TLS.Key); err != nil {
		s.f.t.Fatal(err)
	}
}

// A hub that does not take the leaf, or is none: the leaf says so, and goes on
// trying until it does.
//
// Contract: B2 B3 Y3
func TestLeafWrongCredentials(t *testing.T) {
	f, key, n1, _ := newHub(t)
	f.start()
	check := func(name string, s *site, want string, counted refusal) {
		t.Helper()
		var before float64
		if counted != "" {
			before = f.refused(counted)
		}
		s.run()
		line := s.logs.wait(t, 0, map[string]string{"msg": eventLeafLink})
		if !strings.Contains(line["reason"], want) {
			t.Errorf("%s: the leaf says %q", name, line["reason"])
		}
		if counted != "" && f.refused(counted) == before {
			t.Errorf("%s: the hub did not count %s", name, counted)
		}
		s.stop()
		select {
		case <-s.leaf.Ready():
			t.Errorf("%s: ready", name)
		default:
		}
	}
	check("nkey", f.newSite(must(identity.NewUserKey())), "is its nkey registered", refusedNKey)

	stranger := newTestCA()
	s := f.newSite(key)
	s.certificate(stranger, bothUses, "spiffe://iop/edge1/leaf/l1")
	stranger.write(s.cfg.TLS.CA)
	check("another CA", s, "the hub's certificate is not to be trusted", "")

	// A server of our CA that is no broker: a Node's certificate with too many uses.
	fake := f.fakeHub("spiffe://iop/edge1/node/n1")
	s = f.newSite(key)
	s.cfg.Hub = []string{"tls://" + fake}
	check("no broker", s, "certificate of a node where a broker is wanted", "")

	s = f.newSite(key)
	s.cfg.Hub = []string{"tls://127.0.0.1:1"}
	check("nobody", s, "cannot be reached", "")

	// After all of that the good leaf is served.
	good := f.newSite(key).start()
	f.node(good.dialer(f.dialer("edge1", "node", "n1", n1)))
}

// fakeHub listens for leaves with a certificate of the CA that is no broker's.
func (f *fixture) fakeHub(uri string) (addr string) {
	f.t.Helper()
	chain, key := f.ca.issueRaw(bothUses, uri)
	ln, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{
		Certificates: []tls.Certificate{{Certificate: chain, PrivateKey: key}}, MinVersion: tls.VersionTLS13,
	})
	if err != nil {
		f.t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				b := make([]byte, 1)
				c.Read(b) // the handshake is all
			}()
		}
	}()
	f.t.Cleanup(func() { ln.Close(); <-done })
	return ln.Addr().String()
}

// hostile is a leaf's server with the leaf's good credentials and none of its
// manners: its account is open to the test.
func (f *fixture) hostile(s *site) (*server.Server, *nats.Conn) {
	f.t.Helper()
	return f.hostileWith(s, func(*server.RemoteLeafOpts) {})
}

// hostileWith is hostile, with another link.
func (f *fixture) hostileWith(s *site, edit func(*server.RemoteLeafOpts)) (*server.Server, *nats.Conn) {
	f.t.Helper()
	leaf := must(NewLeaf(s.cfg, Deps{}))
	opts, err := leaf.options()
	if err != nil {
		f.t.Fatal(err)
	}
	edit(opts.LeafNode.Remotes[0])
	open := &server.Options{
		ServerName: "hostile", Host: "127.0.0.1", Port: -1, NoSigs: true, NoLog: true, LeafNode: opts.LeafNode,
		Accounts: []*server.Account{server.NewAccount(accountFabric)},
	}
	open.Users = []*server.User{{Username: "u", Password: "p", Account: open.Accounts[0]}}
	srv, err := server.NewServer(open)
	if err != nil {
		f.t.Fatal(err)
	}
	srv.Start()
	f.t.Cleanup(func() { srv.Shutdown(); srv.WaitForShutdown() })
	nc, err := nats.Connect("", nats.InProcessServer(srv), nats.UserInfo("u", "p"), nats.NoEcho(), nats.ErrorHandler(quiet))
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(nc.Close)
	return srv, nc
}

// A leaf that turns hostile with good credentials: it reads and writes nothing
// but its own edge's sessions, brings in nobody of another edge, makes up no Node,
// and ends no session that is not its own.
//
// Contract: Z6 Y3 B2 B5
func TestZ6HostileLeaf(t *testing.T) {
	f, key, n1, _ := newHub(t)
	foreign := f.member("edge2", "node", "n1")
	f.member("edge1", "leaf", "l2")
	f.start()
	s := f.newSite(key)
	s.cfg.Hub = []string{f.b.LeafURL()}
	_, evil := f.hostile(s)
	edge1, edge2 := f.edge("edge1"), f.edge("edge2")
	ctl1, ctl2 := f.subscribe(edge1, subjects.CtlWildcard("edge1")), f.subscribe(edge2, subjects.CtlWildcard("edge2"))
	up1, up2 := f.subscribe(edge1, subjects.UpWildcard("edge1")), f.subscribe(edge2, subjects.UpWildcard("edge2"))
	hubNode, session := f.node(f.dialer("edge1", "node", "n1", n1))
	defer hubNode.Close()
	f.told(ctl1)
	_, session2 := f.node(f.dialer("edge2", "node", "n1", foreign))
	f.told(ctl2)

	everything := f.subscribe(evil, ">")
	say := func(subject string, data []byte) {
		t.Helper()
		if err := evil.Publish(subject, data); err != nil {
			t.Fatal(err)
		}
	}
	// through proves that all that was said before it has been dealt with.
	through := func() {
		t.Helper()
		marker := subjects.Session{Edge: "edge1", Node: "marker", Gen: 1}
		deadline := time.Now().Add(guard)
		for {
			say(marker.Up(subjects.Register, ""), nil)
			m, err := up1.NextMsg(100 * time.Millisecond)
			if err == nil && m.Subject == marker.Up(subjects.Register, "") {
				return
			}
			if time.Now().After(deadline) {
				t.Fatal("the link carries nothing")
			}
		}
	}
	through() // the link is up
	note := func(s subjects.Session, reason string) []byte {
		n := &iopv1.SessionNotice{NodeId: s.Node, Generation: s.Gen, Reason: reason}
		return must(n.MarshalVT())
	}
	before := testutil.ToFloat64(f.b.metrics.dropped)
	say(session2.Up(subjects.Frame, wire.NewRunID()), []byte("forged"))
	say(session2.Down(subjects.Fence, ""), nil)
	say(session.Down(subjects.Fence, ""), nil)
	say(subjects.Ctl("edge2", subjects.Closed), note(session2, "kicked"))
	say(subjects.Ctl("edge1", subjects.Closed), note(session, "kicked"))
	say(subjects.Ctl("edge1", subjects.Admitted), note(session, "kicked"))
	say(subjects.Ctl("edge1", subjects.Changed), note(subjects.Session{Node: "n1"}, string(refusedRevoked)))
	say(subjects.Store("edge1", subjects.Put), nil)
	say(subjects.Leaf("edge1", "l2", subjects.Beat), nil)
	say(subjects.Leaf("edge1", "l2", subjects.Ended), note(session, "kicked"))
	say(subjects.Leaf("edge2", "l1", subjects.Ended), note(session2, "kicked"))
	say(subjects.Leaf("edge1", "l1", subjects.Ended), note(session, "kicked")) // it may say so, and is not believed
	say("$SYS.REQ.USER.AUTH", []byte("x"))
	say("$JS.API.INFO", nil)
	through()
	f.logs.wait(t, 0, map[string]string{"msg": eventRefused, "reason": string(refusedLeaf), "node": "n1"})
	for deadline := time.Now().Add(guard); testutil.ToFloat64(f.b.metrics.dropped) < before+2; { // the books, and the Edge's notice
		if time.Now().After(deadline) {
			t.Fatal("its word is believed")
		}
		through()
	}
	// Notices come in order: had one of those passed, it would come before this.
	f.b.members.Revoke(context.Background(), memberID{"edge2", identity.RoleNode, "n1"}, time.Now(), false) // the notice below says
	if n := f.told(ctl2); n.NodeId != "n1" || n.Reason != string(refusedRevoked) || n.Generation != 0 {
		t.Errorf("edge2 was told %v", n)
	}
	if n := f.told(ctl2); n.Reason != "kicked" || n.Generation != session2.Gen {
		t.Errorf("edge2 was told %v", n)
	}
	hubNode.Close()
	if n := f.told(ctl1); n.Reason != "client_closed" {
		t.Errorf("edge1 was told %v", n)
	}
	if m, err := up2.NextMsg(0); err == nil {
		t.Errorf("edge2 heard %s", m.Subject)
	}

	// What it is sent: its own edge's sessions, and replies.
	if err := edge2.Publish(session2.Down(subjects.Tunnel, wire.NewRunID()), []byte("secret")); err != nil {
		t.Fatal(err)
	}
	if err := edge2.Publish(subjects.Store("edge2", subjects.Get), []byte("secret")); err != nil {
		t.Fatal(err)
	}
	if err := edge2.Flush(); err != nil {
		t.Fatal(err)
	}
	if err := edge1.Publish(session.Down(subjects.Heartbeat, ""), []byte("own")); err != nil {
		t.Fatal(err)
	}
	for {
		m := f.next(everything)
		if string(m.Data) == "own" {
			break
		}
		if strings.HasPrefix(m.Subject, "iop.v1.edge2.") || strings.Contains(m.Subject, ".ctl.") || string(m.Data) == "secret" {
			t.Errorf("it read %s", m.Subject)
		}
	}

	ask := func(leaf string, data []byte) {
		t.Helper()
		if err := evil.PublishRequest(subjects.Callout("edge1", leaf), nats.NewInbox(), data); err != nil {
			t.Fatal(err)
		}
	}
	// Callouts it makes up. The server key is its own, so the request is well signed.
	for name, c := range map[string]struct {
		edit func(ac *jwt.AuthorizationRequestClaims, sign func(*identity.NKey))
		r    refusal
	}{
		"another edge's node, with its own good proof": {func(ac *jwt.AuthorizationRequestClaims, sign func(*identity.NKey)) {
			ac.TLS.VerifiedChains[0] = f.chain("spiffe://iop/edge2/node/n1")
			sign(foreign)
		}, refusedWrongEdge},
		"a node whose key it does not have": {func(ac *jwt.AuthorizationRequestClaims, sign func(*identity.NKey)) {
			sign(must(identity.NewUserKey()))
			ac.ConnectOptions.Nkey = n1.Public()
		}, refusedSignature},
		"a node under a key of its own": {func(_ *jwt.AuthorizationRequestClaims, sign func(*identity.NKey)) {
			sign(must(identity.NewUserKey()))
		}, refusedNKey},
		"a certificate of its own making": {func(ac *jwt.AuthorizationRequestClaims, sign func(*identity.NKey)) {
			ac.TLS.VerifiedChains[0] = chainOf(newTestCA(), "spiffe://iop/edge1/node/n1")
			sign(n1)
		}, refusedChain},
		"itself as an Edge": {func(ac *jwt.AuthorizationRequestClaims, sign func(*identity.NKey)) {
			ac.TLS.VerifiedChains[0] = f.chain("spiffe://iop/edge1/edge/e1")
			sign(key)
		}, refusedRole},
		"itself as a leaf link": {func(ac *jwt.AuthorizationRequestClaims, sign func(*identity.NKey)) {
			ac.TLS.VerifiedChains[0] = f.chain("spiffe://iop/edge1/leaf/l1")
			ac.ClientInformation.Kind = "Leafnode"
			sign(key)
		}, refusedRole},
	} {
		was := f.refused(c.r)
		ask("l1", f.forge(c.edit))
		for deadline := time.Now().Add(guard); f.refused(c.r) == was; through() {
			if time.Now().After(deadline) {
				t.Fatalf("%s: not refused as %s", name, c.r)
			}
		}
	}
	forged, admitted := f.refused(refusedForged), testutil.ToFloat64(f.b.metrics.admitted.WithLabelValues("node"))
	ask("l2", f.forge(func(_ *jwt.AuthorizationRequestClaims, sign func(*identity.NKey)) { sign(n1) })) // in another's name
	ask("l1", []byte("nonsense"))
	for deadline := time.Now().Add(guard); f.refused(refusedForged) == forged; through() {
		if time.Now().After(deadline) {
			t.Fatal("nonsense was not refused")
		}
	}
	if got := testutil.ToFloat64(f.b.metrics.admitted.WithLabelValues("node")); got != admitted {
		t.Errorf("%v Nodes were made up", got-admitted)
	}
}

func (f *fixture) chain(uri string) jwt.StringList { return chainOf(f.ca, uri) }

// forge makes a callout request as the server of a hostile leaf would, with
// everything right that edit does not change.
func (f *fixture) forge(edit func(ac *jwt.AuthorizationRequestClaims, sign func(*identity.NKey))) []byte {
	f.t.Helper()
	kp := must(nkeys.CreateServer())
	user := must(must(nkeys.CreateUser()).PublicKey())
	ac := jwt.NewAuthorizationRequestClaims(user)
	ac.Server.ID = must(kp.PublicKey())
	ac.UserNkey = user
	ac.Expires = time.Now().Add(time.Minute).Unix()
	ac.ClientInformation.Kind, ac.ClientInformation.Nonce = "Client", "a nonce of its own"
	ac.ConnectOptions.Name = wire.NewToken() + wire.NewToken()
	ac.TLS = &jwt.ClientTLS{Version: "1.3", VerifiedChains: []jwt.StringList{f.chain("spiffe://iop/edge1/node/n1")}}
	edit(ac, func(k *identity.NKey) {
		ac.ConnectOptions.Nkey = k.Public()
		ac.ConnectOptions.SignedNonce = base64.RawURLEncoding.EncodeToString(must(k.Sign([]byte(ac.ClientInformation.Nonce))))
	})
	return []byte(must(ac.Encode(kp)))
}

// The hub goes away and comes back: short of the bound a session at the leaf
// stays, and the new hub knows of it; nobody new comes in meanwhile, and the leaf
// says why; after the bound the session is closed, and a Node comes back by itself
// under a higher generation.
//
// Contract: Y3 J5 B12
func TestLeafHubGoneAndBack(t *testing.T) {
	f, key, n1, n2 := newHub(t)
	f.start()
	// The hub comes back at the same address.
	f.cfg.LeafListen = f.leafAddr()
	s := f.newSite(key)
	s.cfg.HeartbeatBound = 2 * time.Second
	s.start()
	d := s.dialer(f.dialer("edge1", "node", "n1", n1))
	nc, first := f.node(d)

	mark := s.logs.mark()
	f.stop()
	s.logs.wait(t, mark, map[string]string{"msg": eventLeafAway})
	if err := s.leaf.Healthy(); err == nil {
		t.Error("healthy without a hub")
	}
	began := time.Now()
	if _, err := s.dialer(f.dialer("edge1", "node", "n2", n2)).dial(); err == nil {
		t.Error("somebody came in without the hub")
	}
	t.Logf("refused after %v", time.Since(began))
	s.logs.wait(t, mark, map[string]string{"msg": eventLeafDenied, "reason": string(refusedHubAway)})
	if err := nc.Flush(); err != nil {
		t.Fatalf("the session at the leaf: %v", err)
	}

	s.logs.wait(t, mark, map[string]string{"msg": eventLeafCut})
	f.wait("the end of the session after the bound", d.closed)
	mark = s.logs.mark()
	f.start()
	s.logs.wait(t, mark, map[string]string{"msg": eventLeafNear})
	nc, second := f.node(s.dialer(f.dialer("edge1", "node", "n1", n1)))
	if second.Gen <= first.Gen {
		t.Fatalf("generation %d after %d", second.Gen, first.Gen)
	}
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}
}

// A shorter absence of the hub: the session at the leaf stays, its frames pass
// again, and the new session service learns of it from the agent.
//
// Contract: Y3 J5 B12
func TestLeafSurvivesHubRestart(t *testing.T) {
	f, key, n1, _ := newHub(t)
	f.start()
	f.cfg.LeafListen = f.leafAddr()
	s := f.newSite(key)
	s.cfg.HeartbeatBound = guard
	s.start()
	d := s.dialer(f.dialer("edge1", "node", "n1", n1))
	nc, session := f.node(d)
	f.stop()
	if err := nc.Flush(); err != nil {
		t.Fatalf("the session at the leaf: %v", err)
	}
	f.start()
	up := f.subscribe(f.edge("edge1"), subjects.UpWildcard("edge1"))
	deadline := time.Now().Add(guard)
	for known := false; !known; known = testutil.ToFloat64(f.b.metrics.sessions) == 1 {
		if time.Now().After(deadline) {
			t.Fatal("the new hub does not know of the session")
		}
		if err := nc.Publish(session.Up(subjects.Heartbeat, ""), nil); err != nil {
			t.Fatal(err)
		}
		if m, err := up.NextMsg(100 * time.Millisecond); err == nil && m.Subject != session.Up(subjects.Heartbeat, "") {
			t.Fatal(m.Subject)
		}
	}
	if _, user := f.connect(f.dialer("edge1", "node", "n1", n1)); !strings.HasPrefix(user, "!denied.duplicate.") {
		t.Fatalf("the new hub does not know of the session: a second instance is %q", user)
	}
	select {
	case <-d.closed:
		t.Error("the session was closed")
	default:
	}
}

// A leaf that stops closes its sessions in order: the hub has heard of each.
//
// Contract: D7 B7 Y3
func TestLeafStops(t *testing.T) {
	f, key, n1, n2 := newHub(t)
	f.start()
	s := f.newSite(key).start()
	ctl := f.subscribe(f.edge("edge1"), subjects.Ctl("edge1", subjects.Closed))
	f.node(s.dialer(f.dialer("edge1", "node", "n1", n1)))
	f.node(s.dialer(f.dialer("edge1", "node", "n2", n2)))
	s.stop()
	names := map[string]bool{f.told(ctl).NodeId: true, f.told(ctl).NodeId: true}
	if !names["n1"] || !names["n2"] {
		t.Errorf("the Edge heard of %v", names)
	}
	if _, err := nats.Connect(s.leaf.ClientURL(), nats.NoReconnect()); err == nil {
		t.Error("it still listens")
	}
}

// Fifty Nodes dial a leaf at once, and all get in.
//
// Contract: B4 Y3
func TestLeafHerd(t *testing.T) {
	const n = 50
	f, key, _, _ := newHub(t)
	keys := make([]*identity.NKey, n)
	for i := range keys {
		keys[i] = f.member("edge1", "node", fmt.Sprintf("h%d", i))
	}
	f.start()
	s := f.newSite(key).start()
	began := time.Now()
	errs := make(chan error, n)
	for i := range keys {
		d := s.dialer(f.dialer("edge1", "node", fmt.Sprintf("h%d", i), keys[i]))
		go func() {
			nc, err := d.dial()
			if err == nil {
				f.t.Cleanup(nc.Close)
			}
			errs <- err
		}()
	}
	for range keys {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	t.Logf("%d Nodes in %v", n, time.Since(began))
}

// No secret stands in a leaf's log: neither its seed nor a client's.
//
// Contract: L5 Y3
func TestLeafKeepsItsSeed(t *testing.T) {
	f, key, n1, _ := newHub(t)
	f.start()
	s := f.newSite(key).start()
	f.node(s.dialer(f.dialer("edge1", "node", "n1", n1)))
	text, err := s.leaf.text()
	if err != nil {
		t.Fatal(err)
	}
	s.stop()
	for _, k := range []*identity.NKey{key, s.leaf.sysKey, s.leaf.authKey, s.leaf.agentKey} {
		seed := string(must(k.Pair().Seed()))
		if strings.Contains(text, seed) {
			t.Error("a seed stands in the configuration")
		}
		s.logs.mu.Lock()
		for _, line := range s.logs.all {
			for _, v := range line {
				if strings.Contains(v, seed) {
					t.Errorf("a seed stands in the log: %s", line["msg"])
				}
			}
		}
		s.logs.mu.Unlock()
	}
}

// A certificate that is read again serves from the next connection; a bad one
// changes nothing.
//
// Contract: B8 Y3
func TestLeafReload(t *testing.T) {
	f, key, n1, n2 := newHub(t)
	f.start()
	s := f.newSite(key).start()
	nc, _ := f.node(s.dialer(f.dialer("edge1", "node", "n1", n1)))
	shown := func(d *dialer) string {
		c, _ := f.node(d)
		state, err := c.TLSConnectionState()
		if err != nil {
			t.Fatal(err)
		}
		return state.PeerCertificates[0].SerialNumber.String()
	}
	old := must(identity.LoadCertificate(s.cfg.TLS.Certificate, s.cfg.TLS.Key)).Leaf.SerialNumber.String()
	s.certificate(f.ca, bothUses, "spiffe://iop/edge1/node/l1")
	if err := s.leaf.Reload(); err == nil {
		t.Error("a node's certificate was taken")
	}
	s.certificate(f.ca, bothUses, "spiffe://iop/edge1/leaf/l1")
	if err := s.leaf.Reload(); err != nil {
		t.Fatal(err)
	}
	if got := shown(s.dialer(f.dialer("edge1", "node", "n2", n2))); got == old {
		t.Error("the old certificate still serves")
	}
	if err := nc.Flush(); err != nil {
		t.Errorf("a connection that stood: %v", err)
	}
}

func (r *records) dump(t testing.TB) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, line := range r.all {
		t.Log(line)
	}
}
