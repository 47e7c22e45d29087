package e2e

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/jwt/v2"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/identity"
	"github.com/iop-fabric/iop/internal/ioptest"
	"github.com/iop-fabric/iop/internal/up"
	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/wire"
	"github.com/iop-fabric/iop/wire/iopv1"
)

// evilBroker is a NATS server with a broker's good certificate, under an attacker who
// admits anyone, calls each connection what it likes, and reads and says everything.
type evilBroker struct {
	t    *testing.T
	url  string
	cert *identity.Certificate // the broker's
	nc   *nats.Conn            // the attacker

	mu   sync.Mutex
	name func(*jwt.AuthorizationRequestClaims) string
}

func newEvilBroker(t *testing.T, f *ioptest.Fabric, name func(*jwt.AuthorizationRequestClaims) string) *evilBroker {
	t.Helper()
	ca, err := identity.LoadCA(string(f.Folder) + "/pki")
	fatal(t, err)
	b := &evilBroker{t: t, name: name}
	b.cert, err = ca.Issue(identity.ID{TrustDomain: identity.DefaultTrustDomain, Edge: "-", Role: identity.RoleBroker, Name: "evil"}, []string{"127.0.0.1"}, time.Hour)
	fatal(t, err)
	issuer, err := identity.NewAccountKey() // its own, not the fabric's
	fatal(t, err)
	opts := &server.Options{NoSigs: true, NoLog: true}
	fatal(t, opts.ProcessConfigString(fmt.Sprintf(`listen: "127.0.0.1:-1"
accounts {
  SYS {}
  AUTH { users: [ { user: callout, password: p } ] }
  FABRIC { users: [ { user: attacker, password: p } ] }
}
system_account: SYS
authorization { auth_callout { issuer: %s, account: AUTH, auth_users: [ callout, attacker ] } }
`, issuer.Public())))
	opts.AlwaysEnableNonce = true
	opts.TLS, opts.TLSHandshakeFirst, opts.TLSTimeout = true, true, 15
	opts.TLSConfig = &tls.Config{Certificates: []tls.Certificate{b.cert.TLS()}, ClientAuth: tls.RequireAnyClientCert, MinVersion: tls.VersionTLS13}
	srv, err := server.NewServer(opts)
	fatal(t, err)
	srv.Start()
	t.Cleanup(func() { srv.Shutdown(); srv.WaitForShutdown() })
	if !srv.ReadyForConnections(ioptest.Hang) {
		t.Fatal("the server does not start")
	}
	b.url = "tls://" + srv.Addr().String()
	connect := func(user string) *nats.Conn {
		nc, err := nats.Connect("", nats.InProcessServer(srv), nats.UserInfo(user, "p"))
		fatal(t, err)
		t.Cleanup(nc.Close)
		return nc
	}
	b.nc = connect("attacker")
	callout := connect("callout")
	_, err = callout.Subscribe("$SYS.REQ.USER.AUTH", func(m *nats.Msg) {
		ac, err := jwt.DecodeAuthorizationRequestClaims(string(m.Data))
		if err != nil {
			return
		}
		b.mu.Lock()
		uc := jwt.NewUserClaims(ac.UserNkey)
		uc.Name, uc.Audience = b.name(ac), "FABRIC"
		b.mu.Unlock()
		user, err := uc.Encode(issuer.Pair())
		if err != nil {
			return
		}
		r := jwt.NewAuthorizationResponseClaims(ac.UserNkey)
		r.Audience, r.Jwt = ac.Server.ID, user
		if answer, err := r.Encode(issuer.Pair()); err == nil {
			_ = m.Respond([]byte(answer))
		}
	})
	fatal(t, err)
	fatal(t, callout.Flush())
	return b
}

func fatal(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// say publishes, as whoever owns the subject.
func (b *evilBroker) say(subject string, m interface{ MarshalVT() ([]byte, error) }) {
	data, err := m.MarshalVT()
	if err == nil {
		err = b.nc.Publish(subject, data)
	}
	if err != nil {
		b.t.Error(err)
	}
}

// honestly registers a node in the good fabric and returns all that a broker on the
// way has seen of it.
func honestly(t *testing.T, f *ioptest.Fabric, name string) (*iopv1.RegisterRequest, *iopv1.RegisterResponse, subjects.Session) {
	t.Helper()
	n := f.DialRaw(name, wire.NewToken())
	n.AskToken()
	req := n.RegisterRequest(nil)
	n.Say(subjects.Register, "", req)
	var resp iopv1.RegisterResponse
	fatal(t, resp.UnmarshalVT(n.Await(subjects.Register, 1).Data))
	if !resp.GetAccepted() {
		t.Fatalf("%v", &resp)
	}
	session := n.Session
	n.Conn.Close()
	f.Log.AwaitEvent(t, "broker.closed", "node="+name)
	return req, &resp, session
}

// A Node that comes to a hostile broker takes no configuration that its Edge did not
// sign for this very session: made up, replayed from before, another node's, changed,
// or signed by whoever else has a certificate.
//
// Contract: L8 Z6 G3 R3
func TestZ6HostileBrokerConfiguresNoNode(t *testing.T) {
	f := ioptest.Start(t, ioptest.Options{Nodes: []configs.EdgeNode{{Name: "raw"}, {Name: "other"}}})
	_, before, _ := honestly(t, f, "raw")
	_, others, _ := honestly(t, f, "other")
	gen := uint64(100)
	b := newEvilBroker(t, f, func(*jwt.AuthorizationRequestClaims) string {
		gen++
		return subjects.Session{Edge: up.DefaultEdge, Node: "raw", Gen: gen}.String()
	})
	nodeCert, err := identity.LoadCertificate(f.NodeConfig("other").Broker.TLS.Certificate, f.NodeConfig("other").Broker.TLS.Key)
	fatal(t, err)
	stranger, err := identity.NewCA(identity.DefaultTrustDomain, time.Hour)
	fatal(t, err)
	edgeID := identity.ID{TrustDomain: identity.DefaultTrustDomain, Edge: up.DefaultEdge, Role: identity.RoleEdge, Name: "e"}
	edgeCert, err := stranger.Issue(edgeID, nil, time.Hour)
	fatal(t, err)
	payload := before.GetConfig().GetPayload()
	by := func(c *identity.Certificate) func([]byte) *iopv1.SignedConfig {
		return func(nonce []byte) *iopv1.SignedConfig {
			s, err := identity.SignConfig(c, payload, nonce, 1)
			if err != nil {
				t.Error(err)
			}
			return s
		}
	}
	attacks := []struct {
		name   string
		config func(nonce []byte) *iopv1.SignedConfig
	}{
		{"none", func([]byte) *iopv1.SignedConfig { return nil }},
		{"of an earlier session", func([]byte) *iopv1.SignedConfig { return before.GetConfig() }},
		{"of an earlier session, this one's nonce", func(nonce []byte) *iopv1.SignedConfig {
			c := proto.Clone(before.GetConfig()).(*iopv1.SignedConfig)
			c.Nonce = nonce
			return c
		}},
		{"another node's", func([]byte) *iopv1.SignedConfig { return others.GetConfig() }},
		{"signed by the broker", by(b.cert)},
		{"signed by a node", by(nodeCert)},
		{"signed by another CA's Edge", by(edgeCert)},
		{"unsigned", func(nonce []byte) *iopv1.SignedConfig {
			return &iopv1.SignedConfig{Payload: payload, Nonce: nonce, Revision: 1, CertificateChain: before.GetConfig().GetCertificateChain()}
		}},
	}
	var mu sync.Mutex
	next, ready := 0, []string{}
	all := make(chan struct{})
	_, err = b.nc.Subscribe(subjects.UpWildcard(up.DefaultEdge), func(m *nats.Msg) {
		msg, err := subjects.ParseUp(m.Subject)
		if err != nil {
			return
		}
		mu.Lock()
		defer mu.Unlock()
		switch msg.Verb {
		case subjects.SessionVerb:
			b.say(msg.Session.Down(subjects.SessionVerb, ""), &iopv1.SessionGrant{Token: []byte("made up")})
		case subjects.Register:
			var req iopv1.RegisterRequest
			if req.UnmarshalVT(m.Data) != nil || next == len(attacks) {
				return
			}
			b.say(msg.Session.Down(subjects.Register, ""), &iopv1.RegisterResponse{
				Accepted: true, NodeId: "raw", Protocol: 1, EdgeInstance: "x", Config: attacks[next].config(req.GetNonce()),
			})
			// A Node that is told anything else starts to work.
			b.say(msg.Session.Down(subjects.Ready, ""), &iopv1.NodeReadyResponse{Ready: true})
			if next++; next == len(attacks) {
				close(all)
			}
		case subjects.Ready:
			ready = append(ready, attacks[next-1].name)
		default:
		}
	})
	fatal(t, err)

	cfg := f.NodeConfig("raw")
	cfg.Broker.URLs = []string{b.url}
	log := &ioptest.LogBuffer{}
	n, err := up.NewNode(cfg, func() []string { return cfg.Broker.URLs }, slog.New(slog.NewTextHandler(log, nil)), nil)
	fatal(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- n.Run(ctx) }()
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(log)
		}
	})
	f.Wait(all, "the last attack")
	log.Await(t, func(string) bool { return log.Count("node.config_refused") == len(attacks) })
	cancel()
	fatal(t, <-done)
	mu.Lock()
	defer mu.Unlock()
	if len(ready) > 0 || log.Count("node.config_applied") > 0 {
		t.Errorf("taken: %v\n%s", ready, log)
	}
}

// An Edge that comes to a hostile broker takes no Node that did not prove itself with
// both of its keys, for this very session.
//
// Contract: L8 Z6 G3 R1 R9
func TestZ6HostileBrokerRegistersNoNode(t *testing.T) {
	f := ioptest.Start(t, ioptest.Options{Nodes: []configs.EdgeNode{{Name: "raw"}, {Name: "other"}}})
	seen, _, s := honestly(t, f, "raw")
	_, _, so := honestly(t, f, "other")
	b := newEvilBroker(t, f, func(*jwt.AuthorizationRequestClaims) string { return "anybody" })

	cfg := f.EdgeConfig()
	cfg.Broker.URLs = []string{b.url}
	log := &ioptest.LogBuffer{}
	e, err := up.NewEdge(cfg, nil, slog.New(slog.NewTextHandler(log, nil)), up.NewMetrics())
	fatal(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- e.Run(ctx) }()
	f.Wait(e.Ready(), "the Edge")

	issuer, err := identity.NewAccountKey()
	fatal(t, err)
	user, err := identity.NewUserKey()
	fatal(t, err)
	ca, err := identity.NewCA(identity.DefaultTrustDomain, time.Hour)
	fatal(t, err)
	nodeID := identity.ID{TrustDomain: identity.DefaultTrustDomain, Edge: up.DefaultEdge, Role: identity.RoleNode, Name: "raw"}
	ownCert, err := ca.Issue(nodeID, nil, time.Hour)
	fatal(t, err)
	ownToken, err := identity.IssueToken(issuer, identity.SessionClaims{Edge: s.Edge, Node: s.Node, Gen: s.Gen, NKey: user.Public()})
	fatal(t, err)
	signed := func(cert *identity.Certificate, edit func(*iopv1.RegisterRequest)) *iopv1.RegisterRequest {
		r := proto.Clone(seen).(*iopv1.RegisterRequest)
		edit(r)
		fatal(t, identity.SignRegister(cert, user, r))
		return r
	}
	changed := func(edit func(*iopv1.RegisterRequest)) *iopv1.RegisterRequest {
		r := proto.Clone(seen).(*iopv1.RegisterRequest)
		edit(r)
		return r
	}
	curve, err := identity.NewCurveKey()
	fatal(t, err)
	newer := s
	newer.Gen += 1000
	for _, a := range []struct {
		name    string
		session subjects.Session
		r       *iopv1.RegisterRequest
		reason  string
	}{
		{"all its own", s, signed(ownCert, func(r *iopv1.RegisterRequest) { r.SessionToken = ownToken }), "issuer"},
		{"a stolen token, its own keys", s, signed(ownCert, func(*iopv1.RegisterRequest) {}), "authority"},
		{"a stolen token, its own certificate as a broker", s, signed(b.cert, func(*iopv1.RegisterRequest) {}), "certificate of a broker"},
		{"shown again under a newer generation", newer, seen, "another generation"},
		{"shown again for another node", so, changed(func(r *iopv1.RegisterRequest) { r.NodeId = so.Node }), "another node"},
		{"shown again, named another's", so, seen, "node"},
		{"another recipient of leases", s, changed(func(r *iopv1.RegisterRequest) { r.RecipientKey = curve.Public() }), "signature"},
		{"another nonce", s, changed(func(r *iopv1.RegisterRequest) { r.Nonce = identity.NewNonce() }), "signature"},
		{"the one signature twice", s, changed(func(r *iopv1.RegisterRequest) { r.NkeySignature = r.GetCertificateSignature() }), "nkey signature"},
		{"the other signature twice", s, changed(func(r *iopv1.RegisterRequest) { r.CertificateSignature = r.GetNkeySignature() }), "certificate signature"},
	} {
		answers, err := b.nc.SubscribeSync(a.session.Down(subjects.Register, ""))
		fatal(t, err)
		b.say(subjects.Ctl(s.Edge, subjects.Admitted), &iopv1.SessionNotice{NodeId: a.session.Node, Generation: a.session.Gen, InstanceId: "x"})
		b.say(a.session.Up(subjects.Register, ""), a.r)
		m, err := answers.NextMsg(ioptest.Hang)
		fatal(t, err)
		var resp iopv1.RegisterResponse
		if err := resp.UnmarshalVT(m.Data); err != nil || resp.GetAccepted() || resp.GetConfig() != nil {
			t.Errorf("%s: %v %v", a.name, &resp, err)
		}
		if !strings.Contains(log.String(), a.reason) {
			t.Errorf("%s: not refused for %q", a.name, a.reason)
		}
		b.say(a.session.Up(subjects.Ready, ""), &iopv1.NodeReadyRequest{NodeId: a.session.Node})
		fatal(t, answers.Unsubscribe())
	}
	fatal(t, b.nc.Flush())
	cancel()
	fatal(t, <-done)
	if n := log.Count("node.registered") + log.Count("node.connected"); n > 0 {
		t.Errorf("%d sessions were made up\n%s", n, log)
	}
}
