package broker

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/iop-fabric/iop/broker/enrol"
	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/identity"
)

// newEnrolFixture is a broker that invites for edge1.
func newEnrolFixture(t *testing.T) *fixture {
	f := newFixture(t)
	f.enrols()
	return f
}

// enrols makes this broker the one that invites.
func (f *fixture) enrols() {
	f.t.Helper()
	der := must(x509.MarshalPKCS8PrivateKey(f.ca.key))
	key := pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})
	if err := os.WriteFile(filepath.Join(f.dir, "ca.key"), key, 0o600); err != nil {
		f.t.Fatal(err)
	}
	f.cfg.Enrolment = &configs.Enrolment{
		Edge: "edge1", Listen: "127.0.0.1:0", URL: "127.0.0.1",
		CACertificate: filepath.Join(f.dir, "ca.pem"), CAKey: filepath.Join(f.dir, "ca.key"),
	}
}

func (f *fixture) invite(name string) (Line, enrol.Token) {
	f.t.Helper()
	l, err := f.b.Invite(context.Background(), name, time.Hour)
	if err != nil {
		f.t.Fatal(err)
	}
	return l, must(enrol.ParseToken(l.Token.Reveal()))
}

func (f *fixture) outcomes(o enrol.Outcome) float64 {
	return testutil.ToFloat64(f.b.metrics.enrolments.WithLabelValues(string(o)))
}

func (f *fixture) state(name string) enrol.State {
	f.t.Helper()
	for _, i := range must(f.b.Invitations(context.Background())) {
		if i.Name == name {
			return i.State
		}
	}
	return ""
}

// joiner is a machine that wants to join.
type joiner struct {
	key     *identity.Key
	nkey    *identity.NKey
	request enrol.Request
}

func newJoiner(name string) *joiner {
	j := &joiner{key: must(identity.NewKey()), nkey: must(identity.NewUserKey())}
	j.request = enrol.Request{
		Name: name, CSR: must(j.key.Request(name)), NKey: j.nkey.Public(), Curve: must(identity.NewCurveKey()).Public(),
	}
	return j
}

// enrolClient talks to the listener and checks nothing of it.
func enrolClient() *http.Client {
	return &http.Client{Timeout: guard, Transport: &http.Transport{
		DisableKeepAlives: true, TLSClientConfig: &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS13},
	}}
}

// post sends a body and returns the status and the error's code, or the answer.
func post(dial string, body io.Reader, mac string, change func(*http.Request)) (status int, code string, a enrol.Answer, err error) {
	req, err := http.NewRequest(http.MethodPost, "https://"+dial+enrol.Path, body)
	if err != nil {
		return 0, "", a, err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set(enrol.Header, mac)
	if change != nil {
		change(req)
	}
	resp, err := enrolClient().Do(req)
	if err != nil {
		return 0, "", a, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return 0, "", a, err
	}
	if resp.StatusCode == http.StatusOK {
		return resp.StatusCode, "", a, json.Unmarshal(b, &a)
	}
	var e enrol.Error
	err = json.Unmarshal(b, &e)
	return resp.StatusCode, e.Error.Code + ": " + e.Error.Message, a, err
}

func (j *joiner) ask(t *testing.T, dial string, tok enrol.Token) (status int, code string, a enrol.Answer) {
	t.Helper()
	body, mac, err := enrol.Seal(j.request, tok.Secret)
	if err != nil {
		t.Fatal(err)
	}
	status, code, a, err = post(dial, bytes.NewReader(body), mac, nil)
	if err != nil {
		t.Fatal(err)
	}
	return status, code, a
}

// connects dials the broker with what was joined.
func (f *fixture) connects(j *joiner, tok enrol.Token, a enrol.Answer) (user string, err error) {
	f.t.Helper()
	cert, _, err := a.Accept(tok, j.key)
	if err != nil {
		f.t.Fatal(err)
	}
	d := f.dialer("edge1", "node", tok.Name, j.nkey)
	d.url, d.tls.Certificates = a.BrokerURLs[0], []tls.Certificate{cert.TLS()}
	nc, err := d.dial()
	if err != nil {
		return "", err
	}
	f.t.Cleanup(nc.Close)
	return f.whoami(nc), nil
}

// From an invitation to an admitted connection; the line is good once, and the
// same machine is answered again.
//
// Contract: B11 B2
func TestEnrol(t *testing.T) {
	f := newEnrolFixture(t).start()
	line, tok := f.invite("gpu1")
	j := newJoiner("gpu1")
	status, code, a := j.ask(t, line.Dial, tok)
	if status != 200 || a.Edge != "edge1" || a.TrustDomain != "iop" || a.BrokerURLs[0] != f.b.ClientURL() || a.Issuers[0] != f.b.keys.issuer.Public() {
		t.Fatalf("%d %s %+v", status, code, a)
	}
	user, err := f.connects(j, tok, a)
	if err != nil || !strings.HasPrefix(user, "edge1.gpu1.") {
		t.Fatalf("%q %v", user, err)
	}
	if status, code, _ := newJoiner("gpu1").ask(t, line.Dial, tok); status != 403 {
		t.Errorf("another machine: %d %s", status, code)
	}
	if status, code, a := j.ask(t, line.Dial, tok); status != 200 {
		t.Errorf("its own request, once more: %d %s", status, code)
	} else if _, err := f.connects(j, tok, a); err != nil {
		t.Errorf("with the second answer: %v", err)
	}
	if n := f.outcomes(enrol.Accepted); n != 1 {
		t.Errorf("accepted %v times", n)
	}
	if f.outcomes(enrol.WasUsed) != 1 || f.outcomes(enrol.Repeated) != 1 {
		t.Error("what became of the others is not counted")
	}
	// In the log the reason stands; the secret stands nowhere.
	f.logs.wait(t, 0, map[string]string{"msg": eventNotJoined, "name": "gpu1", "reason": "used"})
	for _, rec := range f.logs.all {
		for k, v := range rec {
			if strings.Contains(v, tok.Secret.Reveal()) || strings.Contains(v, strings.Split(tok.Text(), ".")[2]) {
				t.Errorf("%s holds the secret: %s", k, v)
			}
		}
	}
}

// Of which root a machine's certificate is, is known from when it joined, though it never
// came; and after a restore, of one that came, though sessions are in no backup.
//
// Contract: B8 B9 B11
func TestRootsAreKept(t *testing.T) {
	f := newEnrolFixture(t)
	seeded := f.member("edge1", "node", "seeded")
	f.member("edge1", "node", "idle")
	f.start()
	line, tok := f.invite("gpu1")
	if status, code, _ := newJoiner("gpu1").ask(t, line.Dial, tok); status != 200 {
		t.Fatalf("%d %s", status, code)
	}
	f.admissions("seeded", seeded, 1)
	roots := func(when string) {
		t.Helper()
		keys := must(f.b.Keys(t.Context()))
		want := map[string]string{"gpu1": keys.Roots[0].ID, "seeded": keys.Roots[0].ID, "idle": ""}
		for _, m := range keys.Members {
			if root, ok := want[m.Name]; ok && m.Root != root {
				t.Errorf("%s: %s has %q, want %q", when, m.Name, m.Root, root)
			}
			delete(want, m.Name)
		}
		if len(want) > 0 {
			t.Errorf("%s: not listed: %v", when, want)
		}
	}
	roots("at first")
	var file bytes.Buffer
	if err := f.b.Backup(t.Context(), &file); err != nil {
		t.Fatal(err)
	}
	f.stop()
	if err := os.RemoveAll(f.cfg.StoreDir); err != nil {
		t.Fatal(err)
	}
	if err := must(New(f.cfg, Deps{})).Restore(must(ReadBackup(&file)), 0); err != nil {
		t.Fatal(err)
	}
	f.start()
	roots("restored")
}

// One machine may be told to dial others than every other is: a leaf of its site.
//
// Contract: B11 D1
func TestEnrolAtALeaf(t *testing.T) {
	f := newEnrolFixture(t)
	f.cfg.Enrolment.Leaves = map[string]string{"attic": "tls://attic.example:4222"}
	f.start()
	urls := must(f.b.LeafURLs("attic"))
	line, err := f.b.Invite(t.Context(), "box", time.Hour, urls...)
	if err != nil || !slices.Equal(line.BrokerURLs, urls) {
		t.Fatalf("%v %v", line.BrokerURLs, err)
	}
	other, otherToken := f.invite("gpu1")
	f.stop()
	f.cfg.Enrolment.Listen = line.Dial
	f.start() // the invitations stay, and what was said in them
	f.logs.wait(t, 0, map[string]string{"msg": eventEnrolOpen})
	if _, _, a := newJoiner("box").ask(t, line.Dial, must(enrol.ParseToken(line.Token.Reveal()))); !slices.Equal(a.BrokerURLs, urls) {
		t.Errorf("told to dial %v, want %v", a.BrokerURLs, urls)
	}
	if _, _, a := newJoiner("gpu1").ask(t, line.Dial, otherToken); len(a.BrokerURLs) != 1 || a.BrokerURLs[0] == urls[0] || other.BrokerURLs[0] == urls[0] {
		t.Errorf("another machine is told to dial %v", a.BrokerURLs)
	}
	if _, err := f.b.LeafURLs("cellar"); !errors.Is(err, ErrUnknownLeaf) || !strings.Contains(err.Error(), "attic") {
		t.Errorf("an unknown leaf: %v", err)
	}
}

// What the listener shows is what the line pins: the CA, and by it a broker.
//
// Contract: B11
func TestEnrolShowsTheCA(t *testing.T) {
	f := newEnrolFixture(t).start()
	line, tok := f.invite("gpu1")
	c, err := tls.Dial("tcp", line.Dial, &tls.Config{InsecureSkipVerify: true})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	chain := c.ConnectionState().PeerCertificates
	if last := chain[len(chain)-1]; identity.Fingerprint(last.Raw) != tok.CA {
		t.Error("the last certificate is not the pinned CA's")
	}
	if _, _, err := identity.VerifyChain(f.ca.pool(), [][]byte{chain[0].Raw}, identity.RoleBroker, true); err != nil {
		t.Error(err)
	}
	if c, err := tls.Dial("tcp", line.Dial, &tls.Config{InsecureSkipVerify: true, MaxVersion: tls.VersionTLS12}); err == nil {
		c.Close()
		t.Error("TLS 1.2 is spoken")
	}
}

// Every refusal reads the same to who is refused, takes as long, and is told apart
// in the log and by the counter alone.
//
// Contract: B11
func TestEnrolRefusalsAreAlike(t *testing.T) {
	f := newEnrolFixture(t)
	f.start()
	ctx := context.Background()
	_, expired := f.invite("expired")
	f.offset.Add(int64(2 * time.Hour))
	line, open := f.invite("open")
	_, cancelled := f.invite("cancelled")
	if err := f.b.CancelInvitation(ctx, "cancelled"); err != nil {
		t.Fatal(err)
	}
	_, used := f.invite("used")
	if status, code, _ := newJoiner("used").ask(t, line.Dial, used); status != 200 {
		t.Fatalf("%d %s", status, code)
	}
	_, revoked := f.invite("revoked")
	if err := f.b.Revoke(ctx, "edge1", "node", "revoked"); err != nil {
		t.Fatal(err)
	}
	_, early := f.invite("early") // and then a machine of that name came by another way
	if err := f.b.Register(ctx, configs.Member{Edge: "edge1", Role: "node", Name: "early", NKey: must(identity.NewUserKey()).Public()}); err != nil {
		t.Fatal(err)
	}
	wrong := open
	wrong.Secret = used.Secret
	unknown := open
	unknown.Name = "nobody"
	texts := map[string]bool{}
	for name, c := range map[string]struct {
		tok  enrol.Token
		want enrol.Outcome
	}{
		"expired":   {expired, enrol.WasExpired},
		"cancelled": {cancelled, enrol.WasCancelled},
		"used":      {used, enrol.WasUsed},
		"revoked":   {revoked, enrol.WasCancelled},
		"early":     {early, enrol.NameTaken},
		"wrong":     {wrong, enrol.WrongSecret},
		"unknown":   {unknown, enrol.UnknownName},
	} {
		before, began := f.outcomes(c.want), time.Now()
		status, text, _ := newJoiner(c.tok.Name).ask(t, line.Dial, c.tok)
		if status != 403 || f.outcomes(c.want) != before+1 {
			t.Errorf("%s: %d %s, counted as %s: %v", name, status, text, c.want, f.outcomes(c.want)-before)
		}
		if d := time.Since(began); d < refusalTime {
			t.Errorf("%s: refused after %v", name, d)
		}
		texts[text] = true
		f.offset.Add(int64(time.Second)) // the limiter forgets
	}
	if len(texts) != 1 {
		t.Errorf("refusals differ: %v", slices.Collect(maps.Keys(texts)))
	}
	if f.state("early") != enrol.Open {
		t.Error("a name that is taken used its invitation up")
	}
	// A stranger's name is not logged.
	f.logs.wait(t, 0, map[string]string{"msg": eventNotJoined, "reason": "unknown"})
	for _, rec := range f.logs.all {
		if rec["name"] == "nobody" {
			t.Errorf("a name that nobody invited is logged: %v", rec)
		}
	}
}

// Ten wrong secrets close an invitation, and nothing opens it again.
//
// Contract: B11
func TestEnrolWrongSecretsClose(t *testing.T) {
	f := newEnrolFixture(t).start()
	line, tok := f.invite("gpu1")
	_, other := f.invite("gpu2")
	wrong := tok
	wrong.Secret = other.Secret
	for range enrol.MaxWrong {
		newJoiner("gpu1").ask(t, line.Dial, wrong)
		f.offset.Add(int64(time.Second))
	}
	if status, code, _ := newJoiner("gpu1").ask(t, line.Dial, tok); status != 403 || f.state("gpu1") != enrol.Closed {
		t.Errorf("%d %s, %s", status, code, f.state("gpu1"))
	}
	if f.state("gpu2") != enrol.Open {
		t.Error("the other one is closed too")
	}
}

// Of many that use one line at once exactly one gets in.
//
// Contract: B11
func TestEnrolRace(t *testing.T) {
	f := newEnrolFixture(t).start()
	line, tok := f.invite("gpu1")
	const n = 8
	var wg sync.WaitGroup
	var mu sync.Mutex
	in := map[string]enrol.Answer{}
	machines := map[string]*joiner{}
	for range n {
		j := newJoiner("gpu1")
		machines[j.request.NKey] = j
		wg.Go(func() {
			body, mac, _ := enrol.Seal(j.request, tok.Secret)
			status, code, a, err := post(line.Dial, bytes.NewReader(body), mac, nil)
			mu.Lock()
			defer mu.Unlock()
			if status == 200 {
				in[j.request.NKey] = a
			} else if status != 403 {
				t.Errorf("%d %s %v", status, code, err)
			}
		})
	}
	wg.Wait()
	if len(in) != 1 || f.outcomes(enrol.Accepted) != 1 || f.outcomes(enrol.WasUsed) != n-1 {
		t.Fatalf("%d machines got in", len(in))
	}
	for nkey, a := range in {
		if _, err := f.connects(machines[nkey], tok, a); err != nil {
			t.Error(err)
		}
	}
	if list := must(f.b.Members(context.Background())); len(list) != 1 {
		t.Errorf("members: %+v", list)
	}
}

// Whatever a request asks a certificate for, it gets the one of its invitation.
//
// Contract: B11
func TestEnrolReadsTheKeyAlone(t *testing.T) {
	f := newEnrolFixture(t).start()
	line, tok := f.invite("gpu1")
	key := must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
	u := must(url.Parse("spiffe://iop/edge2/edge/edge2"))
	csr := must(x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{
		Subject: pkix.Name{CommonName: "root", Organization: []string{"everybody"}}, URIs: []*url.URL{u},
		DNSNames: []string{"hub.example"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		ExtraExtensions: []pkix.Extension{{Id: []int{2, 5, 29, 19}, Critical: true, Value: []byte{0x30, 3, 1, 1, 0xff}}}, // a CA's
	}, key))
	j := newJoiner("gpu1")
	j.request.CSR = csr
	status, code, a := j.ask(t, line.Dial, tok)
	if status != 200 {
		t.Fatalf("%d %s", status, code)
	}
	chain := must(identity.DecodeChain([]byte(a.Certificate)))
	leaf := must(x509.ParseCertificate(chain[0]))
	if len(leaf.URIs) != 1 || leaf.URIs[0].String() != "spiffe://iop/edge1/node/gpu1" || len(leaf.DNSNames)+len(leaf.IPAddresses) != 0 ||
		leaf.IsCA || leaf.Subject.CommonName != "gpu1" || len(leaf.Subject.Organization) != 0 {
		t.Errorf("%v %v %v %v", leaf.URIs, leaf.DNSNames, leaf.IsCA, leaf.Subject)
	}
	if !slices.Equal(leaf.ExtKeyUsage, []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}) {
		t.Errorf("usages %v", leaf.ExtKeyUsage)
	}
}

// What is no request of ours is refused as that, whatever is invited, and costs
// nobody an invitation.
//
// Contract: B11 Z3
func TestEnrolBadRequests(t *testing.T) {
	f := newEnrolFixture(t).start()
	line, tok := f.invite("gpu1")
	j := newJoiner("gpu1")
	body, mac, err := enrol.Seal(j.request, tok.Secret)
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		body   []byte
		mac    string
		change func(*http.Request)
		status int
		code   string
	}{
		"oversized":        {append(body, bytes.Repeat([]byte(" "), enrol.MaxRequest)...), mac, nil, 413, enrol.CodeInvalid},
		"oversized, huge":  {bytes.Repeat([]byte("a"), 8<<20), mac, nil, 413, enrol.CodeInvalid},
		"no JSON":          {[]byte("hello"), mac, nil, 400, enrol.CodeInvalid},
		"empty":            {nil, mac, nil, 400, enrol.CodeInvalid},
		"no MAC":           {body, "", nil, 400, enrol.CodeInvalid},
		"a form":           {body, mac, func(r *http.Request) { r.Header.Set("Content-Type", "application/x-www-form-urlencoded") }, 415, enrol.CodeInvalid},
		"another path":     {body, mac, func(r *http.Request) { r.URL.Path = "/" }, 404, enrol.CodePath},
		"GET":              {nil, mac, func(r *http.Request) { r.Method = http.MethodGet }, 405, enrol.CodePath},
		"a changed body":   {bytes.Replace(body, []byte(j.request.Curve), []byte(newJoiner("x").request.Curve), 1), mac, nil, 403, enrol.CodeRefused},
		"the MAC of zeros": {body, base64.RawURLEncoding.EncodeToString(make([]byte, 32)), nil, 403, enrol.CodeRefused},
	} {
		status, code, _, err := post(line.Dial, bytes.NewReader(c.body), c.mac, c.change)
		if err != nil && name == "oversized, huge" {
			continue // cut in the middle of what it sends
		}
		if err != nil || status != c.status || !strings.HasPrefix(code, c.code) {
			t.Errorf("%s: %d %s %v, want %d %s", name, status, code, err, c.status, c.code)
		}
		f.offset.Add(int64(time.Second))
	}
	if status, code, _ := j.ask(t, line.Dial, tok); status != 200 {
		t.Errorf("after all of them: %d %s", status, code)
	}
}

// Who sends slowly is cut, and who asks too often is told to wait.
//
// Contract: B11 Z3
func TestEnrolSlowAndOften(t *testing.T) {
	f := newEnrolFixture(t).start()
	line, tok := f.invite("gpu1")
	c, err := tls.Dial("tcp", line.Dial, &tls.Config{InsecureSkipVerify: true})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	began := time.Now()
	fmt.Fprintf(c, "POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{", enrol.Path)
	many := 0
	for range int(enrolBurst) + 5 {
		status, _, _, err := post(line.Dial, strings.NewReader("x"), "", nil)
		if err != nil {
			t.Fatal(err)
		}
		if status == http.StatusTooManyRequests {
			many++
		}
	}
	if many == 0 || f.outcomes(enrol.Limited) != float64(many) {
		t.Errorf("%d of many requests were put off", many)
	}
	f.offset.Add(int64(10 * time.Second))
	if status, code, _ := newJoiner("gpu1").ask(t, line.Dial, tok); status != 200 {
		t.Errorf("beside a slow one: %d %s", status, code)
	}
	_ = c.SetReadDeadline(time.Now().Add(guard))
	_, _ = io.Copy(io.Discard, c)
	if d := time.Since(began); d < enrolRead/2 || d > enrolRead+10*time.Second {
		t.Errorf("cut after %v", d)
	}
}

// The listener is open only while something would be answered: from an invitation
// to its use and a little longer, its end or its withdrawal, and again after a
// restart.
//
// Contract: B11 B9
func TestEnrolListensOnlyWhenInvited(t *testing.T) {
	f := newEnrolFixture(t)
	// One port for all, so that a line stays good over a restart.
	l := must(net.Listen("tcp", "127.0.0.1:0"))
	f.cfg.Enrolment.Listen = l.Addr().String()
	f.cfg.Enrolment.URL = l.Addr().String()
	l.Close()
	dial := f.cfg.Enrolment.URL
	open := func() bool {
		c, err := net.DialTimeout("tcp", dial, time.Second)
		if err == nil {
			c.Close()
		}
		return err == nil
	}
	becomes := func(what string, want bool) {
		t.Helper()
		// The last word of the log says how it is; the next one may be the wanted.
		msg := map[bool]string{true: eventEnrolOpen, false: eventEnrolShut}[want]
		if from := f.logs.last(eventEnrolOpen, eventEnrolShut); from < 0 || f.logs.lines()[from]["msg"] != msg {
			f.logs.wait(t, from+1, map[string]string{"msg": msg})
		}
		if open() != want {
			t.Fatalf("%s: open is not %v", what, want)
		}
	}
	f.start()
	if open() {
		t.Fatal("it is open though nobody was invited")
	}
	line, _ := f.invite("gpu1")
	if line.Dial != dial || !open() {
		t.Fatalf("%s is not open at once", line.Dial)
	}
	if err := f.b.CancelInvitation(context.Background(), "gpu1"); err != nil {
		t.Fatal(err)
	}
	becomes("withdrawn", false)

	_, tok := f.invite("gpu1")
	f.stop()
	if open() {
		t.Error("it is open though the broker has stopped")
	}
	f.start()
	becomes("after a restart", true)
	j := newJoiner("gpu1")
	if status, code, _ := j.ask(t, dial, tok); status != 200 {
		t.Fatalf("a line from before the restart: %d %s", status, code)
	}
	f.stop()
	f.start()
	becomes("used, and a restart", true)
	if status, code, _ := j.ask(t, dial, tok); status != 200 {
		t.Errorf("its own request again, after a restart: %d %s", status, code)
	}
	f.offset.Add(int64(enrol.RepeatFor))
	f.b.enrolment.changed()
	becomes("nobody would be answered", false)
	f.invite("gpu2")
	if !open() {
		t.Error("it does not open again")
	}
	f.offset.Add(int64(2 * time.Hour))
	f.b.enrolment.changed()
	becomes("expired", false)
}

// A port that is taken is told to who invites, and leaves no invitation behind.
//
// Contract: B11
func TestEnrolPortTaken(t *testing.T) {
	f := newEnrolFixture(t)
	l := must(net.Listen("tcp", "127.0.0.1:0"))
	defer l.Close()
	f.cfg.Enrolment.Listen = l.Addr().String()
	f.start()
	if _, err := f.b.Invite(context.Background(), "gpu1", time.Hour); err == nil || !strings.Contains(err.Error(), "enrolment.listen") {
		t.Errorf("%v", err)
	}
	if s := f.state("gpu1"); s != enrol.Cancelled {
		t.Errorf("the invitation is %q", s)
	}
}

// A store that does not answer is neither a yes nor a no.
//
// Contract: B11
func TestEnrolStoreGone(t *testing.T) {
	t.Parallel() // it waits out a bound
	f := newEnrolFixture(t).start()
	line, tok := f.invite("gpu1")
	if err := f.b.server.DisableJetStream(); err != nil {
		t.Fatal(err)
	}
	status, code, _ := newJoiner("gpu1").ask(t, line.Dial, tok)
	if status != 503 || !strings.HasPrefix(code, enrol.CodeLater) || f.outcomes(enrol.Failed) != 1 {
		t.Errorf("%d %s", status, code)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	if _, err := f.b.Invite(ctx, "gpu2", time.Hour); err == nil {
		t.Error("an invitation that nobody keeps")
	}
}

// A name is one machine's: it is invited anew only after it was revoked, the old
// machine stays out, and no line from before the revocation is good.
//
// Contract: B11 B8
func TestEnrolNames(t *testing.T) {
	f := newEnrolFixture(t)
	f.member("edge1", "node", "seeded")
	f.start()
	ctx := context.Background()
	f.invite("keep") // so that the listener stays open
	if _, err := f.b.Invite(ctx, "seeded", time.Hour); !errors.Is(err, ErrNameTaken) {
		t.Errorf("a name of the configuration: %v", err)
	}
	line, first := f.invite("gpu1")
	_, second := f.invite("gpu1")
	old := newJoiner("gpu1")
	if status, _, _ := old.ask(t, line.Dial, first); status != 403 {
		t.Error("the line that was replaced is good")
	}
	_, _, a := old.ask(t, line.Dial, second)
	if _, err := f.connects(old, second, a); err != nil {
		t.Fatal(err)
	}
	if _, err := f.b.Invite(ctx, "gpu1", time.Hour); !errors.Is(err, ErrNameTaken) {
		t.Errorf("a name in use: %v", err)
	}
	if err := f.b.Revoke(ctx, "edge1", "node", "gpu1"); err != nil {
		t.Fatal(err)
	}
	f.logs.wait(t, 0, map[string]string{"msg": eventEvicted, "node": "gpu1"})
	// The very request that was answered before is not answered after it.
	if status, _, _ := old.ask(t, line.Dial, second); status == 200 {
		t.Error("a revoked machine has itself let in again")
	}
	line, third := f.invite("gpu1")
	fresh := newJoiner("gpu1")
	_, _, b := fresh.ask(t, line.Dial, third)
	if user, err := f.connects(fresh, third, b); err != nil || !strings.HasPrefix(user, "edge1.gpu1.") {
		t.Errorf("the new machine: %q %v", user, err)
	}
	if user, err := f.connects(old, second, a); err == nil {
		t.Errorf("the old machine is let in: %q", user)
	}
	// Revoked while its invitation is open: neither works.
	line, fourth := f.invite("gpu2")
	if err := f.b.Revoke(ctx, "edge1", "node", "gpu2"); err != nil {
		t.Fatal(err)
	}
	if status, _, _ := newJoiner("gpu2").ask(t, line.Dial, fourth); status != 403 {
		t.Error("a revoked name's line is good")
	}
	if err := f.b.Revoke(ctx, "edge1", "node", "nobody"); !errors.Is(err, ErrUnknownMember) {
		t.Errorf("%v", err)
	}
}

// What a revocation meets half-way does not slip through: the invitation is used,
// the member not yet written.
//
// Contract: B11 B8
func TestEnrolMeetsRevocation(t *testing.T) {
	f := newEnrolFixture(t).start()
	ctx := context.Background()
	f.invite("gpu1")
	invited := f.b.now()
	id := memberID{"edge1", identity.RoleNode, "gpu1"}
	if err := f.b.Revoke(ctx, "edge1", "node", "gpu1"); err != nil {
		t.Fatal(err)
	}
	nkey := must(identity.NewUserKey()).Public()
	if err := f.b.members.Enrol(ctx, id, nkey, "root", invited); !errors.Is(err, errRevoked) {
		t.Errorf("%v", err)
	}
	if err := f.b.members.Enrol(ctx, id, nkey, "root", f.b.now().Add(time.Second)); err != nil {
		t.Errorf("an invitation from after it: %v", err)
	}
}

// The list tells what became of an invitation: used stays used when its node is revoked,
// and one whose CA is trusted no more is not open.
//
// Contract: B11 B8
func TestInvitationsAreListedAsTheyAre(t *testing.T) {
	f := newEnrolFixture(t).start()
	f.invite("gpu1")
	if s := f.state("gpu1"); s != enrol.Open {
		t.Fatalf("made: %s", s)
	}
	all := must(f.b.enrolment.list(t.Context()))
	i := all[0].record
	i.CA = make([]byte, len(i.CA))
	if s := f.b.enrolment.told("gpu1", i).State; len(i.CA) != 32 || s != enrol.OldCA {
		t.Errorf("its CA is gone: %s", s)
	}
	i.Use, i.Cancelled = &enrol.Use{At: f.b.now()}, true
	if s := f.b.enrolment.told("gpu1", i).State; s != enrol.Used || i.State(f.b.now()) != enrol.Cancelled {
		t.Errorf("used, and its node revoked: %s", s)
	}
}

// A configuration that cannot work is refused before anything runs.
//
// Contract: B11 D3
func TestEnrolConfiguration(t *testing.T) {
	for name, c := range map[string]struct {
		spoil func(f *fixture)
		want  string
	}{
		"another CA": {func(f *fixture) {
			other := newTestCA()
			other.write(f.cfg.Enrolment.CACertificate)
			der := must(x509.MarshalPKCS8PrivateKey(other.key))
			if err := os.WriteFile(f.cfg.Enrolment.CAKey, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), 0o600); err != nil {
				panic(err)
			}
			f.ca.write(filepath.Join(f.dir, "all.pem"))
			f.cfg.TLS.CA = filepath.Join(f.dir, "all.pem")
		}, "not of the CA"},
		"no key":         {func(f *fixture) { f.cfg.Enrolment.CAKey = "none" }, "none"},
		"a key for all":  {func(f *fixture) { os.Chmod(f.cfg.Enrolment.CAKey, 0o644) }, "chmod 600"},
		"no host":        {func(f *fixture) { f.cfg.Enrolment.URL = "" }, "url is empty"},
		"no edge":        {func(f *fixture) { f.cfg.Enrolment.Edge = "" }, "edge"},
		"another domain": {func(f *fixture) { f.cfg.TrustDomain = "else" }, "trust domain"},
	} {
		f := newEnrolFixture(t)
		c.spoil(f)
		if _, err := New(f.cfg, Deps{}); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want one that says %q", name, err, c.want)
		}
	}
	taken := must(net.Listen("tcp", "127.0.0.1:0"))
	defer taken.Close()
	for role, want := range map[identity.Role]string{identity.RoleBroker: "(broker.enrolment.listen, or", identity.RoleService: "(service.enrolment.listen names"} {
		l := enrolListener{e: &enrolment{a: &authority{role: role}, cfg: configs.Enrolment{Listen: taken.Addr().String()}}}
		if err := l.open(t.Context()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("a port that is taken, of a %s: %v", role, err)
		}
	}
	f := newFixture(t).start()
	if _, err := f.b.Invite(t.Context(), "gpu1", time.Hour); !errors.Is(err, ErrNoEnrolment) {
		t.Errorf("%v", err)
	}
	f.stop()
	// Its certificate is for 127.0.0.1.
	f = newEnrolFixture(t)
	f.cfg.Enrolment.URL = "hub.example"
	f.start()
	if _, err := f.b.Invite(t.Context(), "gpu1", time.Hour); !errors.Is(err, errHost) || f.state("gpu1") != "" {
		t.Errorf("a host that the broker's certificate is not good for: %v", err)
	}
	f.stop()
	f.cfg.Enrolment.BrokerURLs = []string{"tls://hub.example:4222"}
	f.start()
	if l, err := f.b.Invite(t.Context(), "gpu1", time.Hour); err != nil || !strings.HasPrefix(l.Dial, "hub.example:") {
		t.Errorf("%+v %v", l, err)
	}
}

// In a cluster one broker invites; who joined is admitted by all, and its
// revocation at any of them ends it for all, its invitation too.
//
// Contract: B11 B8 B9 Y2
func TestEnrolInACluster(t *testing.T) {
	c := newCluster(t)
	first := c.members[0]
	first.enrols()
	for _, m := range c.members {
		first.cfg.Enrolment.BrokerURLs = append(first.cfg.Enrolment.BrokerURLs, "tls://"+m.cfg.Listen)
	}
	c.start()
	line, tok := first.invite("gpu1")
	line2, tok2 := first.invite("gpu2")
	j, j2 := newJoiner("gpu1"), newJoiner("gpu2")
	_, _, a := j.ask(t, line.Dial, tok)
	status, code, a2 := j2.ask(t, line2.Dial, tok2)
	if status != 200 || len(a.BrokerURLs) != 3 {
		t.Fatalf("%d %s %v", status, code, a.BrokerURLs)
	}
	at := func(m *fixture, j *joiner, tok enrol.Token, a enrol.Answer) error {
		a.BrokerURLs = []string{"tls://" + m.cfg.Listen}
		user, err := m.connects(j, tok, a)
		if err == nil && !strings.HasPrefix(user, "edge1."+tok.Name+".") {
			err = errors.New(user)
		}
		return err
	}
	if err := at(c.members[2], j, tok, a); err != nil {
		t.Fatal(err)
	}
	if _, err := c.members[1].b.Invite(t.Context(), "gpu3", time.Hour); !errors.Is(err, ErrNoEnrolment) {
		t.Errorf("a broker without the CA's key: %v", err)
	}
	if err := c.members[1].b.Revoke(t.Context(), "edge1", "node", "gpu1"); err != nil {
		t.Fatal(err)
	}
	if status, code, _ := j.ask(t, line.Dial, tok); status != 403 {
		t.Errorf("revoked elsewhere, it is answered again: %d %s", status, code)
	}
	if err := at(c.members[0], j, tok, a); err == nil {
		t.Error("revoked elsewhere, it is let in")
	}
	first.stop()
	if err := at(c.members[2], j2, tok2, a2); err != nil {
		t.Errorf("without the broker that invited it: %v", err)
	}
}
