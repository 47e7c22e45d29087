package broker

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/iop-fabric/iop/broker/enrol"
	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/identity"
	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/wire"
)

// stock is a nats-server in a process of its own and the service beside it.
type stock struct {
	*fixture
	url     string
	cmd     *exec.Cmd
	service *Service
	stop    context.CancelFunc
	ended   chan error
}

func (s *stock) startServer() {
	s.t.Helper()
	text, err := ConfigText(s.cfg, Stock)
	if err != nil {
		s.t.Fatal(err)
	}
	file := filepath.Join(s.cfg.StoreDir+"-conf", "nats.conf")
	if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
		s.t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		s.t.Fatal(err)
	}
	binary := filepath.Join(s.dir, "nats-server")                                                                                // of the very version that is embedded
	if out, err := exec.Command("go", "build", "-o", binary, "github.com/nats-io/nats-server/v2").CombinedOutput(); err != nil { //nolint:gosec // our own folder
		s.t.Fatalf("%v: %s", err, out)
	}
	if out, err := exec.Command(binary, "-t", "-c", file).CombinedOutput(); err != nil { //nolint:gosec // as above
		s.t.Fatalf("nats-server -t: %v: %s", err, out)
	}
	s.cmd = exec.Command(binary, "-c", file) //nolint:gosec // as above
	if err := s.cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
}

func (s *stock) kill() {
	if s.cmd != nil {
		s.cmd.Process.Kill()
		s.cmd.Wait() // killed
		s.cmd = nil
	}
}

// newService makes a service, with logs and metrics of its own.
func (s *stock) newService(replicas int, urls ...string) *Service {
	s.t.Helper()
	c := s.ca.issue(nil, "spiffe://iop/-/service/s1")
	cert, key := filepath.Join(s.dir, "service.pem"), filepath.Join(s.dir, "service.key")
	if err := c.Save(cert, key); err != nil {
		s.t.Fatal(err)
	}
	s.reg, s.logs = prometheus.NewRegistry(), newRecords()
	service, err := NewService(configs.Service{
		URLs: urls, TLS: configs.TLS{Certificate: cert, Key: key, CA: s.cfg.TLS.CA}, TrustDomain: "iop",
		IssuerKey: s.cfg.IssuerKey, SystemKey: s.cfg.SystemKey, CalloutKey: s.cfg.CalloutKey, ServiceKey: s.cfg.ServiceKey,
		Members: s.cfg.Members, Replicas: replicas, Enrolment: s.cfg.Enrolment,
	}, Deps{Log: slog.New(s.logs), Metrics: s.reg, Members: func() ([]configs.Member, error) { return s.cfg.Members, nil }})
	if err != nil {
		s.t.Fatal(err)
	}
	return service
}

func (s *stock) startService(replicas int, urls ...string) {
	s.t.Helper()
	service := s.newService(replicas, urls...)
	ctx, cancel := context.WithCancel(context.Background())
	s.service, s.stop, s.ended = service, cancel, make(chan error, 1)
	go func() { s.ended <- service.Run(ctx) }()
}

func (s *stock) stopService() {
	if s.stop != nil {
		s.stop()
		s.stop = nil
		if err := <-s.ended; err != nil {
			s.t.Errorf("service: %v", err)
		}
	}
}

func (s *stock) served() {
	s.t.Helper()
	s.wait("the service", s.service.Ready())
}

// serverAt is a broker as the dialers of the fixture know it.
func serverAt(url string) *Broker {
	b := &Broker{url: url}
	b.ready = make(chan struct{})
	close(b.ready)
	return b
}

func (s *stock) edgeTCP(key *identity.NKey) *nats.Conn {
	s.t.Helper()
	d := s.dialer("edge1", "edge", "e1", key)
	d.inbox = subjects.EdgeInbox("edge1")
	nc, user := s.connect(d)
	if user != "edge1._edge.e1" {
		s.t.Fatalf("user %q", user)
	}
	return nc
}

// A nats-server of its own does with the service beside it what the embedded
// one does: Edge and Nodes are admitted by all of B2, generations rise, also
// over its death, and Edge is told. The service reads its members again.
// Contract: B1 B2 B6 B7 B8 G1
func TestStockServer(t *testing.T) {
	s := &stock{fixture: newFixture(t)}
	s.cfg.Listen = freePorts(t, 1)[0]
	s.url = "tls://" + s.cfg.Listen
	s.b = serverAt(s.url)
	edgeKey, nodeKey := s.member("edge1", "edge", "e1"), s.member("edge1", "node", "n1")
	t.Cleanup(s.kill)
	t.Cleanup(s.stopService)
	s.startService(1, s.url) // before its server: it waits
	s.logs.wait(t, 0, map[string]string{"msg": eventWaiting})
	if s.service.Healthy() == nil {
		t.Error("healthy without a server")
	}
	s.startServer()
	s.served()
	if err := s.service.Healthy(); err != nil {
		t.Errorf("healthy: %v", err)
	}

	edge := s.edgeTCP(edgeKey)
	ctl := s.subscribe(edge, subjects.CtlWildcard("edge1"))
	instance := wire.NewToken()
	d := s.instance(instance, "edge1", "node", "n1", nodeKey)
	nc, first := s.node(d)
	if verb, n := s.notice(ctl); verb != subjects.Admitted || n.Generation != first.Gen {
		t.Errorf("notice %s %v", verb, n)
	}
	fences := s.fences(nc, first)
	if _, user := s.connect(s.dialer("edge1", "node", "n1", nodeKey)); !strings.HasPrefix(user, "!denied.duplicate.") {
		t.Errorf("another instance: %q", user)
	}
	if nc, err := s.dialer("edge1", "node", "n1", must(identity.NewUserKey())).dial(); err == nil {
		nc.Close()
		t.Error("an unregistered nkey was let in")
	}
	newer, second := s.node(s.instance(instance, "edge1", "node", "n1", nodeKey))
	if second.Gen <= first.Gen {
		t.Errorf("generation %d after %d", second.Gen, first.Gen)
	}
	s.wait("the close of the older session", d.closed)
	if reason := s.fenced(fences); reason != reasonSuperseded {
		t.Errorf("fenced as %q", reason)
	}
	s.notice(ctl) // admitted
	if verb, n := s.notice(ctl); verb != subjects.Closed || n.Generation != first.Gen {
		t.Errorf("notice %s %v", verb, n)
	}
	sub := s.subscribe(newer, second.Down(subjects.SessionVerb, ""))
	if err := newer.Publish(second.Up(subjects.SessionVerb, ""), nil); err != nil {
		t.Fatal(err)
	}
	s.next(sub)

	// A second process of the Edge's name stays out while the first is there.
	other := s.dialer("edge1", "edge", "e1", edgeKey)
	other.inbox = subjects.NodeInbox("edge1", "e1", other.connection)
	if _, user := s.connect(other); !strings.HasPrefix(user, "!denied.duplicate.") {
		t.Errorf("another Edge of the name: %q", user)
	}

	// The service restarts: it finds who is connected, and tells of their end.
	s.stopService()
	s.startService(1, s.url)
	s.served()
	if _, user := s.connect(s.dialer("edge1", "node", "n1", nodeKey)); !strings.HasPrefix(user, "!denied.duplicate.") {
		t.Errorf("another instance, after the service's restart: %q", user)
	}
	newer.Close()
	if verb, n := s.notice(ctl); verb != subjects.Closed || n.Generation != second.Gen || n.Reason != "client_closed" {
		t.Errorf("notice %s %v", verb, n)
	}

	// At a hangup the service takes what its file says of members: here another nkey,
	// first beside the old one, then alone.
	old := nodeKey
	nodeKey = s.member("edge1", "node", "n1")
	for _, listed := range []bool{true, false} {
		if !listed {
			s.cfg.Members = slices.DeleteFunc(s.cfg.Members, func(m configs.Member) bool { return m.NKey == old.Public() })
		}
		if err := s.service.Reload(); err != nil {
			t.Fatal(err)
		}
		for key, want := range map[*identity.NKey]bool{old: listed, nodeKey: true} {
			nc, err := s.instance(instance, "edge1", "node", "n1", key).dial()
			if err == nil {
				nc.Close()
			}
			if (err == nil) != want {
				t.Errorf("the old nkey listed: %t, the old one dials: %t: %v", listed, key == old, err)
			}
		}
	}

	// The server is killed and comes back: the service goes on by itself.
	s.kill()
	s.startServer()
	deadline := time.Now().Add(guard)
	for {
		d := s.instance(instance, "edge1", "node", "n1", nodeKey)
		nc, err := d.dial()
		if err == nil {
			session, err := subjects.ParseSession(s.whoami(nc))
			nc.Close()
			if err != nil || session.Gen <= second.Gen {
				t.Errorf("after the kill: %v %v", session, err)
			}
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("after the kill: %v", err)
		}
	}
}

// The stock server's keys of the service are good with mTLS alone, and its
// routes take nobody without a broker's name.
// Contract: B1 B2
func TestStockClusterText(t *testing.T) {
	f := newFixture(t)
	f.cfg.Cluster = &configs.Cluster{Listen: "127.0.0.1:6222", Routes: []string{"tls://127.0.0.1:6222", "tls://b2:6222", "tls://b3:6222"}}
	if _, err := ConfigText(f.cfg, Stock); err == nil || !strings.Contains(err.Error(), "by their host's name") {
		t.Errorf("routes by address: %v", err)
	}
	f.cfg.Cluster.Routes[0] = "tls://b1:6222"
	for form, want := range map[Form]bool{Stock: true, Embedded: false} {
		text, err := ConfigText(f.cfg, form)
		if err != nil || strings.Contains(text, "verify_cert_and_check_known_urls: true") != want || !strings.Contains(text, "no_advertise: true") {
			t.Errorf("form %d: %v\n%s", form, err, text)
		}
	}
}

// Beside a nats-server of its own, too, a machine is invited, joins, is admitted and
// revoked; a backup is taken of the running server and put into an empty one.
//
// Contract: B9 B11 B8 G1
func TestStockInvitesRevokesAndRestores(t *testing.T) {
	s := &stock{fixture: newFixture(t)}
	s.cfg.Listen = freePorts(t, 1)[0]
	s.url = "tls://" + s.cfg.Listen
	s.b = serverAt(s.url)
	s.enrols()
	s.cfg.Enrolment.BrokerURLs = []string{s.url}
	s.cfg.Enrolment.Leaves = map[string]string{"attic": "tls://attic.example:4222"}
	nodeKey := s.member("edge1", "node", "n1")
	t.Cleanup(s.kill)
	t.Cleanup(s.stopService)
	s.startServer()
	s.startService(1, s.url)
	s.served()
	ctx := context.Background()

	line, err := s.service.Invite(ctx, "gpu1", time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	tok := must(enrol.ParseToken(line.Token.Reveal()))
	j := newJoiner("gpu1")
	status, code, a := j.ask(t, line.Dial, tok)
	if status != 200 || a.BrokerURLs[0] != s.url {
		t.Fatalf("%d %s %+v", status, code, a)
	}
	live := s.dialer("edge1", "node", "gpu1", j.nkey)
	cert, _, err := a.Accept(tok, j.key)
	if err != nil {
		t.Fatal(err)
	}
	live.tls.Certificates = []tls.Certificate{cert.TLS()}
	if _, user := s.connect(live); !strings.HasPrefix(user, "edge1.gpu1.") {
		t.Fatalf("%q", user)
	}
	if _, err := s.service.Invite(ctx, "box1", time.Hour, must(s.service.LeafURLs("attic"))...); err != nil {
		t.Fatal(err)
	}
	before := time.Now()
	if err := s.service.Revoke(ctx, "edge1", "node", "gpu1"); err != nil {
		t.Fatal(err)
	}
	s.wait("the close of who is revoked", live.closed)
	t.Logf("closed %v after the revocation (B8: within a second)", time.Since(before))
	if user, err := s.connects(j, tok, a); err == nil && !strings.HasPrefix(user, "!denied.revoked") {
		t.Errorf("revoked, and let in: %q", user)
	}
	_, session := s.node(s.dialer("edge1", "node", "n1", nodeKey))

	var running, direct bytes.Buffer
	if err := s.service.Backup(ctx, &running); err != nil {
		t.Fatal(err)
	}
	if err := s.newService(1, s.url).BackupDirect(ctx, &direct); err != nil {
		t.Fatal(err)
	}
	b := must(ReadBackup(&running))
	if other := must(ReadBackup(&direct)); b.Members != 2 || b.Invitations != 2 || other.Members != b.Members || b.Generation < session.Gen {
		t.Errorf("running %+v, direct %+v", b.Header, other.Header)
	}
	if err := s.newService(1, s.url).Restore(ctx, b, 0); !errors.Is(err, ErrServiceRuns) {
		t.Errorf("restored under a service that runs: %v", err)
	}
	s.stopService()
	if err := s.newService(1, s.url).Restore(ctx, b, 0); err == nil || !strings.Contains(err.Error(), "holds stores already") {
		t.Errorf("restored into what is there: %v", err)
	}
	s.kill()
	if err := os.RemoveAll(s.cfg.StoreDir); err != nil {
		t.Fatal(err)
	}
	s.startServer()
	above := b.Generation + 1<<40
	for deadline := time.Now().Add(guard); ; { // until the server listens
		err := s.newService(1, s.url).Restore(ctx, b, above)
		if err == nil {
			break
		}
		if !errors.Is(err, nats.ErrNoServers) || time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
	s.startService(1, s.url)
	s.served()
	if _, after := s.node(s.dialer("edge1", "node", "n1", nodeKey)); after.Gen <= above {
		t.Errorf("generation %d, not above %d", after.Gen, above)
	}
	if user, err := s.connects(j, tok, a); err == nil && !strings.HasPrefix(user, "!denied.revoked") {
		t.Errorf("revoked before the backup, and let in: %q", user)
	}
	if all := must(s.service.Invitations(ctx)); len(all) != 2 || all[0].Name != "box1" || all[0].State != enrol.Open {
		t.Errorf("%+v", all)
	}
	// What was said at the invitation came through it all.
	if _, err := s.service.Invite(ctx, "n1", time.Hour); !errors.Is(err, ErrNameTaken) {
		t.Errorf("a name that is taken: %v", err)
	}
}

// The issuer is exchanged beside a stock nats-server: at a hangup the service signs with
// the new one and the server is answered with the one it pins; then server and service
// are started anew, and Nodes come in by the new one alone.
//
// Contract: B1 B8 G3
func TestStockIssuerExchanged(t *testing.T) {
	s := &stock{fixture: newFixture(t)}
	s.cfg.Listen = freePorts(t, 1)[0]
	s.url = "tls://" + s.cfg.Listen
	s.b = serverAt(s.url)
	nodeKey := s.member("edge1", "node", "n1")
	t.Cleanup(s.kill)
	t.Cleanup(s.stopService)
	s.startServer()
	s.startService(1, s.url)
	s.served()
	instance := wire.NewToken()
	s.node(s.instance(instance, "edge1", "node", "n1", nodeKey))

	issuer := must(identity.NewAccountKey())
	was := must(identity.LoadNKey(s.cfg.IssuerKey))
	if err := errors.Join(was.Save(strings.TrimSuffix(s.cfg.IssuerKey, ".nk")+"-old.nk"), issuer.Save(s.cfg.IssuerKey), s.service.Reload()); err != nil {
		t.Fatal(err)
	}
	s.logs.wait(t, 0, map[string]string{"msg": eventIssuer, "issuer": issuer.Public()})
	s.node(s.instance(instance, "edge1", "node", "n1", nodeKey)) // the server pins the old one still
	s.kill()
	s.startServer() // its configuration is made anew of issuer.nk
	s.stopService()
	s.startService(1, s.url)
	s.served()
	s.node(s.instance(instance, "edge1", "node", "n1", nodeKey))
	if k := must(s.service.Keys(t.Context())); k.Issuer != issuer.Public() || k.Pinned != issuer.Public() {
		t.Errorf("%+v", k)
	}
}
