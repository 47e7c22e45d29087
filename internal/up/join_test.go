package up

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/iop-fabric/iop/broker/enrol"
	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/identity"
	"github.com/iop-fabric/iop/internal/secret"
)

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// office is an authority made for a test, with a CA and certificates as a real one
// has.
type office struct {
	t      *testing.T
	ca     *identity.CA
	cert   *identity.Certificate
	token  enrol.Token
	issuer string
	addr   string

	mu       sync.Mutex
	requests []enrol.Request
	answer   func(w http.ResponseWriter, attempt int, good enrol.Answer) // nil: the good one
}

func newOffice(t *testing.T, role identity.Role) *office {
	t.Helper()
	o := &office{t: t, ca: must(identity.NewCA("iop", time.Hour)), issuer: must(identity.NewAccountKey()).Public()}
	id := identity.ID{TrustDomain: "iop", Edge: "-", Role: role, Name: "hub"}
	if role == identity.RoleLeaf {
		id.Edge = "home"
	}
	o.cert = must(o.ca.Issue(id, []string{"hub.example"}, time.Hour)) // not the host that is dialled
	o.token = enrol.Token{Name: "gpu1", Secret: secret.New(strings.Repeat("s", enrol.SecretSize)), CA: identity.Fingerprint(o.ca.DER())}
	s := httptest.NewUnstartedServer(http.HandlerFunc(o.serve))
	c := o.cert.TLS()
	c.Certificate = append(c.Certificate[:1:1], o.ca.DER())
	s.TLS = &tls.Config{Certificates: []tls.Certificate{c}, MinVersion: tls.VersionTLS13}
	s.Config.ErrorLog = log.New(io.Discard, "", 0)
	s.StartTLS()
	t.Cleanup(s.Close)
	o.addr = strings.TrimPrefix(s.URL, "https://")
	return o
}

func (o *office) serve(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	req, _, err := enrol.Unseal(body, r.Header.Get(enrol.Header))
	if err != nil || r.URL.Path != enrol.Path {
		o.t.Errorf("what arrived is no request: %v", err)
		return
	}
	der := must(o.ca.Sign(req.Key(), identity.ID{TrustDomain: "iop", Edge: "home", Role: identity.RoleNode, Name: req.Name}, nil, time.Hour))
	good := enrol.Answer{
		Certificate: string(identity.EncodeChain([][]byte{der})), CA: string(o.ca.PEM()), Issuers: []string{o.issuer},
		BrokerURLs: []string{"tls://hub.example:4222"}, Edge: "home", TrustDomain: "iop",
	}
	o.mu.Lock()
	o.requests = append(o.requests, req)
	attempt, answer := len(o.requests), o.answer
	o.mu.Unlock()
	if answer != nil {
		answer(w, attempt, good)
		return
	}
	json.NewEncoder(w).Encode(good)
}

func (o *office) join(dir string) Join {
	return Join{Folder: Folder(dir), Authority: o.addr, Token: o.token.Text()}
}

func fails(w http.ResponseWriter, status int, code string) {
	var e enrol.Error
	e.Error.Code, e.Error.Message = code, "because"
	w.WriteHeader(status)
	json.NewEncoder(w).Encode(e)
}

// drop ends the connection without an answer.
func drop(w http.ResponseWriter) {
	c, _, err := w.(http.Hijacker).Hijack()
	if err == nil {
		c.Close()
	}
}

// The whole of it: keys of mode 0600, a configuration that is one, no key in
// anything that was sent, and a second run that asks nobody.
//
// Contract: B11 Z4
func TestJoin(t *testing.T) {
	o := newOffice(t, identity.RoleBroker)
	dir := t.TempDir()
	j := o.join(dir)
	if err := j.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	f, err := configs.Load(j.Folder.NodeConfig())
	if err != nil || f.Node.Name != "gpu1" || f.Node.Edge != "home" || *f.Node.Reconnect.MaxAttempts != 0 || f.Node.Broker.URLs[0] != "tls://hub.example:4222" {
		t.Fatalf("%+v %v", f, err)
	}
	if c, err := identity.LoadCertificate(f.Node.Broker.TLS.Certificate, f.Node.Broker.TLS.Key); err != nil || c.ID().Name != "gpu1" {
		t.Error(err)
	}
	for _, file := range []string{"cert.key", "user.nk", "curve.nk", "joined.json", "node.yaml"} {
		if st := must(os.Stat(filepath.Join(dir, file))); st.Mode().Perm() != 0o600 {
			t.Errorf("%s has mode %v", file, st.Mode())
		}
	}
	if text := must(os.ReadFile(filepath.Join(dir, "joined.json"))); bytes.Contains(text, []byte(o.token.Text())) || bytes.Contains(text, []byte(o.token.Secret.Reveal())) {
		t.Error("the folder keeps the secret")
	}
	if err := j.Run(t.Context()); err != nil || len(o.requests) != 1 {
		t.Errorf("a second run: %v, asked %d times", err, len(o.requests))
	}
	if err := (Join{Folder: j.Folder}).Run(t.Context()); err != nil {
		t.Errorf("without the line: %v", err)
	}
	other := j
	other.Token = enrol.Token{Name: "gpu1", Secret: secret.New(strings.Repeat("o", enrol.SecretSize)), CA: o.token.CA}.Text()
	if err := other.Run(t.Context()); err == nil || !strings.Contains(err.Error(), "joined already") {
		t.Errorf("another line on the folder: %v", err)
	}
}

// What the machine dials may be said at the join, and only then.
//
// Contract: B11 D1 Y3
func TestJoinDials(t *testing.T) {
	o := newOffice(t, identity.RoleBroker)
	j := o.join(t.TempDir())
	j.BrokerURLs = []string{"https://attic.example"}
	if err := j.Check(); err == nil || !strings.Contains(err.Error(), "--broker-url") || !strings.Contains(err.Error(), "want tls://host:port") {
		t.Errorf("what is no URL: %v", err)
	}
	j.BrokerURLs = []string{"tls://attic.example:4222", "tls://cellar.example:4222"}
	if err := errors.Join(j.Check(), j.Run(t.Context())); err != nil {
		t.Fatal(err)
	}
	if f, err := configs.Load(j.Folder.NodeConfig()); err != nil || !slices.Equal(f.Node.Broker.URLs, j.BrokerURLs) {
		t.Errorf("it dials %+v: %v", f, err)
	}
	j.BrokerURLs = j.BrokerURLs[:1]
	if err := j.Run(t.Context()); err == nil || !strings.Contains(err.Error(), "node.broker.urls") {
		t.Errorf("on a folder that has joined: %v", err)
	}
}

// An answer that was lost, an authority that is busy: the same machine asks again,
// with the same keys, in this run and in the next.
//
// Contract: B11
func TestJoinAsksAgain(t *testing.T) {
	o := newOffice(t, identity.RoleBroker)
	o.answer = func(w http.ResponseWriter, attempt int, good enrol.Answer) {
		switch attempt {
		case 1:
			drop(w)
		case 2:
			fails(w, 503, enrol.CodeLater)
		default:
			json.NewEncoder(w).Encode(good)
		}
	}
	j := o.join(t.TempDir())
	var told []string
	j.Tell = func(s string) { told = append(told, s) }
	if err := j.Run(t.Context()); err != nil || len(told) != 1 {
		t.Fatalf("%v, told %v", err, told)
	}
	// Cut off half-way: the next run goes on with the same keys.
	o.requests = nil
	ctx, cancel := context.WithCancel(t.Context())
	o.answer = func(w http.ResponseWriter, _ int, _ enrol.Answer) { cancel(); drop(w) }
	j = o.join(t.TempDir())
	if err := j.Run(ctx); err == nil || !strings.Contains(err.Error(), "told to stop") {
		t.Fatalf("%v", err)
	}
	o.answer = nil
	if err := j.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	if a, b := o.requests[0], o.requests[1]; len(o.requests) != 2 || !bytes.Equal(a.Digest(), b.Digest()) {
		t.Error("the second run is another machine")
	}
	// Half-way, and then another invitation: nothing of the first is used.
	o.requests, o.answer = nil, func(w http.ResponseWriter, _ int, _ enrol.Answer) { fails(w, 403, enrol.CodeRefused) }
	j = o.join(t.TempDir())
	if err := j.Run(t.Context()); err == nil || !strings.Contains(err.Error(), "because") {
		t.Fatalf("%v", err)
	}
	o.answer = nil
	j.Token = enrol.Token{Name: "gpu1", Secret: secret.New(strings.Repeat("n", enrol.SecretSize)), CA: o.token.CA}.Text()
	if err := j.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	if a, b := o.requests[0], o.requests[1]; len(o.requests) != 2 || a.NKey == b.NKey || a.Curve == b.Curve {
		t.Error("keys that were refused are used again")
	}
}

// Cut off before any of its files: the next run finishes.
//
// Contract: B11 Z4
func TestJoinCutOffAnywhere(t *testing.T) {
	o := newOffice(t, identity.RoleBroker)
	whole := t.TempDir()
	if err := o.join(whole).Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	order := []string{"joining", "cert.key", "user.nk", "curve.nk", "cert.pem", "ca.pem", "joined.json", "node.yaml"}
	mark := []byte(o.join(whole).invitation() + "\n")
	for n := range order {
		dir := t.TempDir()
		for _, file := range order[:n] {
			b := mark
			if file != "joining" {
				b = must(os.ReadFile(filepath.Join(whole, file)))
			}
			if err := os.WriteFile(filepath.Join(dir, file), b, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if err := o.join(dir).Run(t.Context()); err != nil {
			t.Errorf("cut off before %s: %v", order[n], err)
			continue
		}
		if _, err := configs.Load(filepath.Join(dir, "node.yaml")); err != nil || present(filepath.Join(dir, "joining")) {
			t.Errorf("cut off before %s: %v", order[n], err)
		}
		a, b := must(os.ReadFile(filepath.Join(dir, "user.nk"))), must(os.ReadFile(filepath.Join(whole, "user.nk")))
		if n > 2 && !bytes.Equal(a, b) {
			t.Errorf("cut off before %s: other keys", order[n])
		}
	}
}

// Whoever is not the authority of the line gets nothing, and the folder no
// configuration.
//
// Contract: B11 L8
func TestJoinPins(t *testing.T) {
	o := newOffice(t, identity.RoleBroker)
	stranger, leaf := newOffice(t, identity.RoleBroker), newOffice(t, identity.RoleLeaf)
	expired := newOffice(t, identity.RoleBroker)
	for name, c := range map[string]struct {
		join func(dir string) Join
		want string
	}{
		"another CA": {func(dir string) Join {
			j := stranger.join(dir)
			j.Token = o.token.Text()
			return j
		}, "its CA is another"},
		"a leaf of our CA": {leaf.join, "certificate of a leaf"},
		"an answer of another CA": {func(dir string) Join {
			expired.answer = func(w http.ResponseWriter, _ int, good enrol.Answer) {
				good.CA = string(o.ca.PEM())
				json.NewEncoder(w).Encode(good)
			}
			return expired.join(dir)
		}, "not the one of the invite line"},
		"nothing like TLS": {func(dir string) Join {
			l := must(net.Listen("tcp", "127.0.0.1:0"))
			t.Cleanup(func() { l.Close() })
			go func() {
				for {
					c, err := l.Accept()
					if err != nil {
						return
					}
					io.WriteString(c, "SSH-2.0-hello\r\n")
					c.Close()
				}
			}()
			j := o.join(dir)
			j.Authority = l.Addr().String()
			return j
		}, "does not answer"},
	} {
		dir := t.TempDir()
		began := time.Now()
		err := c.join(dir).Run(t.Context())
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want one that says %q", name, err, c.want)
		}
		if time.Since(began) > 10*time.Second {
			t.Errorf("%s: told after %v", name, time.Since(began))
		}
		if present(filepath.Join(dir, "node.yaml")) {
			t.Errorf("%s: there is a configuration", name)
		}
	}
	if len(o.requests)+len(stranger.requests)+len(leaf.requests) != 0 {
		t.Error("a request was sent to who is not the authority")
	}
}

// A line or a folder that cannot do is told before anything is dialled or made.
//
// Contract: B11 D1
func TestJoinRefuses(t *testing.T) {
	o := newOffice(t, identity.RoleBroker)
	good := o.token.Text()
	for name, c := range map[string]struct {
		spoil func(j *Join, dir string)
		want  string
	}{
		"cut short":       {func(j *Join, _ string) { j.Token = good[:len(good)-5] }, "cut short"},
		"mistyped":        {func(j *Join, _ string) { j.Token = strings.Replace(good, "gpu1", "gpu7", 1) }, "mistyped"},
		"swapped":         {func(j *Join, _ string) { j.Token, j.Authority = j.Authority, j.Token }, `does not begin with "iop1."`},
		"no host":         {func(j *Join, _ string) { j.Authority = "http://hub" }, "HOST:PORT"},
		"a data folder":   {func(_ *Join, dir string) { writeFile(t, dir, "pki/ca.pem", 0o600) }, "data folder of an iop up"},
		"another's keys":  {func(_ *Join, dir string) { writeFile(t, dir, "user.nk", 0o600) }, "no machine was joining"},
		"another's roots": {func(_ *Join, dir string) { writeFile(t, dir, "ca.pem", 0o600) }, "no machine was joining"},
		"an authority": {func(_ *Join, dir string) {
			writeFile(t, dir, "ca.key", 0o600)
			writeFile(t, dir, "joining", 0o600)
		}, "holds the keys of an authority"},
		"open to others":  {func(_ *Join, dir string) { os.Chmod(dir, 0o777) }, "chmod 700"},
		"nothing at all":  {func(j *Join, _ string) { j.Token, j.Authority = "", "" }, "no machine that has joined"},
		"a damaged mark":  {func(_ *Join, dir string) { writeFile(t, dir, "node.yaml", 0o600) }, "joined.json"},
		"half a key file": {func(j *Join, dir string) { j.begin(); writeFile(t, dir, "cert.key", 0o600) }, "cert.key"},
	} {
		dir := t.TempDir()
		j := o.join(dir)
		c.spoil(&j, dir)
		if err := j.Run(t.Context()); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want one that says %q", name, err, c.want)
		}
	}
	if len(o.requests) != 0 {
		t.Error("something was dialled")
	}
}

func writeFile(t *testing.T, dir, name string, mode os.FileMode) {
	t.Helper()
	path := filepath.Join(dir, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte("x"), mode); err != nil {
		t.Fatal(err)
	}
}

// The broker's certificate is good for what machines are told to dial, under the
// same key, and is left alone where it is.
//
// Contract: Y1 B8
func TestRenewBroker(t *testing.T) {
	f := Folder(t.TempDir())
	if err := Prepare(f, DefaultEdge, DefaultNode); err != nil {
		t.Fatal(err)
	}
	cert, key := f.Certificate(identity.RoleBroker, "broker"), f.key(identity.RoleBroker, "broker")
	before, beforeKey := must(os.ReadFile(cert)), must(os.ReadFile(key))
	if err := renewBroker(f, "127.0.0.1"); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(before, must(os.ReadFile(cert))) {
		t.Error("a certificate that will do was replaced")
	}
	for _, host := range []string{"desk.example", "192.0.2.7"} {
		if err := renewBroker(f, host); err != nil {
			t.Fatal(err)
		}
	}
	c := must(identity.LoadCertificate(cert, key))
	for _, host := range []string{"desk.example", "192.0.2.7", "127.0.0.1", "localhost"} {
		if err := c.Leaf.VerifyHostname(host); err != nil {
			t.Error(err)
		}
	}
	if !bytes.Equal(beforeKey, must(os.ReadFile(key))) {
		t.Error("it has another key")
	}
	if _, _, err := identity.VerifyChain(must(identity.LoadPool(f.CA())), c.Chain, identity.RoleBroker, true); err != nil {
		t.Error(err)
	}
}

// Where the certificates are the operator's own, of another CA than the folder's,
// nothing is invited, and what worked before goes on.
//
// Contract: B11 D2
func TestOwnCertificatesInviteNobody(t *testing.T) {
	f := Folder(t.TempDir())
	if err := Prepare(f, DefaultEdge, DefaultNode); err != nil {
		t.Fatal(err)
	}
	cfg, err := Config(Options{Folder: f})
	if err != nil || cfg.Broker.Enrolment == nil || !cfg.Edge.TakesInvited() {
		t.Fatalf("%+v %v", cfg, err)
	}
	if e := cfg.Broker.Enrolment; e.Listen != "127.0.0.1:8443" || e.URL != "127.0.0.1" || e.Edge != DefaultEdge {
		t.Errorf("%+v", e)
	}
	own := &configs.File{Broker: &configs.Broker{TLS: configs.TLS{Certificate: "a", Key: "b", CA: "c"}}, Edge: &configs.Edge{Invited: new(false)}}
	if cfg, err = Config(Options{Folder: f, File: own}); err != nil || cfg.Broker.Enrolment != nil || cfg.Edge.TakesInvited() {
		t.Errorf("%+v %v", cfg.Broker, err)
	}
	own.Broker.Enrolment = &configs.Enrolment{CACertificate: "c", CAKey: "d"}
	if cfg, err = Config(Options{Folder: f, File: own}); err != nil || cfg.Broker.Enrolment == nil || cfg.Broker.Enrolment.CAKey != "d" {
		t.Errorf("%+v %v", cfg.Broker, err)
	}
	for listen, want := range map[string]string{"0.0.0.0:4222": "0.0.0.0:8443", ":4222": ":8443", "[::]:4222": "[::]:8443", "192.0.2.7:4222": "192.0.2.7:8443"} {
		cfg, err := Config(Options{Folder: f, BrokerListen: listen})
		if err != nil || cfg.Broker.Enrolment.Listen != want || cfg.Broker.Enrolment.URL == "" || cfg.Broker.Enrolment.URL == "0.0.0.0" {
			t.Errorf("%s: %+v %v", listen, cfg.Broker.Enrolment, err)
		}
	}
	if _, err := Config(Options{Folder: f, BrokerListen: "4222"}); err == nil {
		t.Error("an address without a host")
	}
}
