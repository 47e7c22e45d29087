package broker

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"log/slog"
	"math/big"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"go.uber.org/goleak"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/identity"
	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/wire"
	"github.com/iop-fabric/iop/wire/iopv1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// guard is how long a test waits for an event before it says that there was none.
const guard = 30 * time.Second

// testCA signs whatever a test asks for, right or wrong.
type testCA struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func newTestCA() *testCA {
	key := must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: "test CA"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der := must(x509.CreateCertificate(rand.Reader, template, template, key.Public(), key))
	return &testCA{cert: must(x509.ParseCertificate(der)), key: key}
}

func (ca *testCA) issue(usages []x509.ExtKeyUsage, uris ...string) *identity.Certificate {
	chain, key := ca.issueRaw(usages, uris...)
	return must(identity.NewCertificate(chain, key))
}

func (ca *testCA) issueRaw(usages []x509.ExtKeyUsage, uris ...string) ([][]byte, *ecdsa.PrivateKey) {
	key := must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: "test"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(12 * time.Hour),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: usages, BasicConstraintsValid: true,
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	for _, u := range uris {
		template.URIs = append(template.URIs, must(url.Parse(u)))
	}
	der := must(x509.CreateCertificate(rand.Reader, template, ca.cert, key.Public(), ca.key))
	return [][]byte{der}, key
}

// client is a certificate for dialling, with the SANs given.
func (ca *testCA) client(uris ...string) tls.Certificate {
	chain, key := ca.issueRaw([]x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}, uris...)
	return tls.Certificate{Certificate: chain, PrivateKey: key}
}

func (ca *testCA) pool() *x509.CertPool {
	p := x509.NewCertPool()
	p.AddCert(ca.cert)
	return p
}

func (ca *testCA) write(file string) {
	data := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: ca.cert.Raw})
	if err := os.WriteFile(file, data, 0o600); err != nil {
		panic(err)
	}
}

// roots are what the fixture's CA file says now.
func (f *fixture) roots() identity.Trust {
	return must(identity.LoadTrust(filepath.Join(f.dir, "ca.pem")))
}

// records collects what is logged, and wakes who waits for a line of it.
type records struct {
	mu   sync.Mutex
	all  []map[string]string
	more chan struct{}
}

func newRecords() *records { return &records{more: make(chan struct{})} }

func (r *records) Enabled(context.Context, slog.Level) bool { return true }
func (r *records) WithAttrs([]slog.Attr) slog.Handler       { return r }
func (r *records) WithGroup(string) slog.Handler            { return r }
func (r *records) Handle(_ context.Context, rec slog.Record) error {
	line := map[string]string{"msg": rec.Message, "level": rec.Level.String()}
	rec.Attrs(func(a slog.Attr) bool { line[a.Key] = a.Value.String(); return true })
	r.mu.Lock()
	defer r.mu.Unlock()
	r.all = append(r.all, line)
	close(r.more)
	r.more = make(chan struct{})
	return nil
}

func (r *records) mark() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.all)
}

func (r *records) lines() []map[string]string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.all
}

// seen are the lines of one event.
func (r *records) seen(event string) []map[string]string {
	return slices.DeleteFunc(slices.Clone(r.lines()), func(l map[string]string) bool { return l["msg"] != event })
}

// wait returns the first line at or after from that has all of want.
func (r *records) wait(t *testing.T, from int, want map[string]string) map[string]string {
	t.Helper()
	timeout := time.After(guard)
	for {
		r.mu.Lock()
		lines, more := r.all, r.more
		r.mu.Unlock()
		for ; from < len(lines); from++ {
			if matches(lines[from], want) {
				return lines[from]
			}
		}
		select {
		case <-more:
		case <-timeout:
			t.Fatalf("no log line %v", want)
		}
	}
}

// last is the number of the last line with one of the messages; -1: there is none.
func (r *records) last(messages ...string) int {
	lines := r.lines()
	for i := len(lines) - 1; i >= 0; i-- {
		if slices.Contains(messages, lines[i]["msg"]) {
			return i
		}
	}
	return -1
}

func matches(line, want map[string]string) bool {
	for k, v := range want {
		if line[k] != v {
			return false
		}
	}
	return true
}

// fixture is a broker and everything needed to dial it.
type fixture struct {
	t      testing.TB
	ca     *testCA
	dir    string
	cfg    configs.Broker
	edges  map[string]*identity.NKey
	reg    *prometheus.Registry
	logs   *records
	again  func() ([]configs.Member, error)
	offset atomic.Int64 // added to the broker's clock
	b      *Broker
	cancel context.CancelFunc
	done   chan error
}

// newFixture makes the files of a broker without starting it.
func newFixture(t testing.TB) *fixture {
	t.Helper()
	f := &fixture{t: t, ca: newTestCA(), dir: t.TempDir(), edges: map[string]*identity.NKey{}}
	f.ca.write(filepath.Join(f.dir, "ca.pem"))
	f.writeCertificate()
	f.cfg = fileConfig(f.dir)
	save := func(k *identity.NKey, err error, file string) *identity.NKey {
		if err := errors.Join(err, k.Save(file)); err != nil {
			t.Fatal(err)
		}
		return k
	}
	k, err := identity.NewAccountKey()
	save(k, err, f.cfg.IssuerKey)
	for _, file := range []string{f.cfg.SystemKey, f.cfg.CalloutKey, f.cfg.ServiceKey} {
		k, err := identity.NewUserKey()
		save(k, err, file)
	}
	for _, edge := range []string{"edge1", "edge2"} {
		f.edges[edge] = must(identity.NewUserKey())
		f.cfg.EdgeKeys[edge] = f.edges[edge].Public()
	}
	return f
}

// fileConfig is the configuration over the files that newFixture makes.
func fileConfig(dir string) configs.Broker {
	in := func(name string) string { return filepath.Join(dir, name) }
	return configs.Broker{
		Name: "b1", Listen: "127.0.0.1:0", StoreDir: in("js"), TrustDomain: "iop",
		TLS:       configs.TLS{Certificate: in("broker.pem"), Key: in("broker.key"), CA: in("ca.pem")},
		IssuerKey: in("issuer.nk"), SystemKey: in("sys.nk"), CalloutKey: in("auth.nk"), ServiceKey: in("fabric.nk"),
		EdgeKeys: map[string]string{}, HeartbeatBound: 5 * time.Second,
	}
}

// generations opens the bucket beside the broker that runs.
func (f *fixture) generations() bucket {
	return must(bindBucket(context.Background(), f.streams(), newElections(&sync.RWMutex{}), bucketGenerations))
}

// gives hands out generations beside the broker that runs.
func (f *fixture) gives() generations {
	return generations{kv: f.generations(), marks: &marks{kv: f.b.members.kv}}
}

// streams are the account's that has them.
func (f *fixture) streams() jetstream.JetStream {
	nc := must(f.b.connect(f.b.server, f.b.keys.callout, "test"))
	f.t.Cleanup(nc.Close)
	return must(jetstream.New(nc))
}

func (f *fixture) writeCertificate() {
	c := f.ca.issue([]x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}, "spiffe://iop/-/broker/b1")
	if err := c.Save(filepath.Join(f.dir, "broker.pem"), filepath.Join(f.dir, "broker.key")); err != nil {
		f.t.Fatal(err)
	}
}

// member adds a member to the configuration and returns its key.
func (f *fixture) member(edge, role, name string) *identity.NKey {
	k := must(identity.NewUserKey())
	f.cfg.Members = append(f.cfg.Members, configs.Member{Edge: edge, Role: role, Name: name, NKey: k.Public()})
	return k
}

// start runs the broker until the test ends.
func (f *fixture) start() *fixture {
	f.t.Helper()
	return f.launch().served()
}

// launch is start without the wait.
func (f *fixture) launch() *fixture {
	f.t.Helper()
	f.reg, f.logs = prometheus.NewRegistry(), newRecords()
	b, err := New(f.cfg, Deps{
		Log: slog.New(f.logs), Metrics: f.reg,
		Now: func() time.Time { return time.Now().Add(time.Duration(f.offset.Load())) }, Members: f.again,
	})
	if err != nil {
		f.t.Fatal(err)
	}
	b.grace = time.Second // the Nodes of these tests do not leave for that
	ctx, cancel := context.WithCancel(context.Background())
	f.b, f.cancel, f.done = b, cancel, make(chan error, 1)
	go func() { f.done <- b.Run(ctx) }()
	f.t.Cleanup(f.stop)
	return f
}

func (f *fixture) served() *fixture {
	f.t.Helper()
	select {
	case <-f.b.Ready():
	case err := <-f.done:
		f.cancel = nil
		f.t.Fatalf("Run: %v", err)
	case <-time.After(guard):
		f.t.Fatal("the broker was not ready")
	}
	return f
}

func (f *fixture) stop() {
	if f.cancel == nil {
		return
	}
	f.cancel()
	f.cancel = nil
	if err := <-f.done; err != nil {
		f.t.Errorf("Run: %v", err)
	}
}

func (f *fixture) refused(r refusal) float64 {
	return testutil.ToFloat64(f.b.metrics.refused.WithLabelValues(string(r)))
}

// edge connects an Edge of this process.
func (f *fixture) edge(name string) *nats.Conn {
	f.t.Helper()
	k := f.edges[name]
	nc, err := nats.Connect("", nats.InProcessServer(f.b.InProcess()), nats.Nkey(k.Public(), k.Sign),
		nats.CustomInboxPrefix(subjects.EdgeInbox(name)), nats.NoReconnect(), nats.ErrorHandler(quiet))
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(nc.Close)
	return nc
}

func quiet(*nats.Conn, *nats.Subscription, error) {}

// dialer is one attempt to connect over TCP; a test changes what it wants wrong.
type dialer struct {
	url        string
	tls        *tls.Config
	connection string
	inbox      string
	auth       nats.Option
	closed     chan struct{}
	expired    *atomic.Bool // the connection ran out: it was a lobby's
}

func (f *fixture) dialer(edge, role, name string, key *identity.NKey) *dialer {
	return f.instance(wire.NewToken(), edge, role, name, key)
}

func (f *fixture) instance(instance, edge, role, name string, key *identity.NKey) *dialer {
	connection := instance + wire.NewToken()
	return &dialer{
		url: f.b.ClientURL(),
		tls: &tls.Config{
			RootCAs: f.ca.pool(), MinVersion: tls.VersionTLS13,
			Certificates: []tls.Certificate{f.ca.client("spiffe://iop/" + edge + "/" + role + "/" + name)},
		},
		connection: connection, inbox: subjects.NodeInbox(edge, name, connection),
		auth: nats.Nkey(key.Public(), key.Sign), closed: make(chan struct{}),
	}
}

func (d *dialer) dial() (*nats.Conn, error) {
	expired, closed := &atomic.Bool{}, d.closed
	d.expired = expired
	opts := []nats.Option{
		nats.Secure(d.tls), nats.TLSHandshakeFirst(), nats.NoReconnect(), nats.Timeout(guard), nats.Name(d.connection),
		nats.CustomInboxPrefix(d.inbox),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) {
			if errors.Is(err, nats.ErrAuthExpired) {
				expired.Store(true)
			}
		}),
		nats.ClosedHandler(func(*nats.Conn) { close(closed) }),
	}
	if d.auth != nil {
		opts = append(opts, d.auth)
	}
	return nats.Connect(d.url, opts...)
}

// connect dials what must be let in (or into the lobby) and returns who it is. A
// lobby that ran out before a busy machine could ask is entered again.
func (f *fixture) connect(d *dialer) (*nats.Conn, string) {
	f.t.Helper()
	for {
		nc, err := d.dial()
		if err != nil {
			f.t.Fatalf("dial: %v", err)
		}
		f.t.Cleanup(nc.Close)
		user, err := userOf(nc)
		if err == nil {
			return nc, user
		}
		f.wait("the close of a connection that answers nothing", d.closed)
		if !d.expired.Load() {
			f.t.Fatalf("user info: %v", err)
		}
		d.closed = make(chan struct{})
	}
}

// firstWord of the connection's user is its edge, or "!denied": of a lobby that ran
// out before a busy machine could ask, too.
func (f *fixture) firstWord(d *dialer, nc *nats.Conn) string {
	user, err := userOf(nc)
	if err != nil {
		f.wait("the close of a connection that answers nothing", d.closed)
		if !d.expired.Load() {
			f.t.Errorf("user info: %v", err)
		}
		return "!denied"
	}
	word, _, _ := strings.Cut(user, ".")
	return word
}

func (f *fixture) whoami(nc *nats.Conn) string {
	f.t.Helper()
	user, err := userOf(nc)
	if err != nil {
		f.t.Fatalf("user info: %v", err)
	}
	return user
}

func userOf(nc *nats.Conn) (string, error) {
	m, err := nc.Request(subjects.UserInfo, nil, guard)
	if err != nil {
		return "", err
	}
	var info struct {
		Data struct {
			User string `json:"user"`
		} `json:"data"`
	}
	err = json.Unmarshal(m.Data, &info)
	return info.Data.User, err
}

// node connects a node that must be admitted.
func (f *fixture) node(d *dialer) (*nats.Conn, subjects.Session) {
	f.t.Helper()
	nc, user := f.connect(d)
	s, err := subjects.ParseSession(user)
	if err != nil {
		f.t.Fatalf("user %q is no session", user)
	}
	return nc, s
}

func (f *fixture) subscribe(nc *nats.Conn, subject string) *nats.Subscription {
	f.t.Helper()
	sub, err := nc.SubscribeSync(subject)
	if err == nil {
		err = nc.Flush()
	}
	if err != nil {
		f.t.Fatal(err)
	}
	return sub
}

// fences are what a session is told before it is closed. They go to a channel
// from the connection's read loop itself: what waits in a subscription is lost
// with the connection.
func (f *fixture) fences(nc *nats.Conn, s subjects.Session) <-chan *nats.Msg {
	f.t.Helper()
	ch := make(chan *nats.Msg, 8)
	_, err := nc.ChanSubscribe(s.Down(subjects.Fence, ""), ch)
	if err == nil {
		err = nc.Flush()
	}
	if err != nil {
		f.t.Fatal(err)
	}
	return ch
}

// fenced reads one, and its reason.
func (f *fixture) fenced(ch <-chan *nats.Msg) string {
	f.t.Helper()
	select {
	case m := <-ch:
		var fence iopv1.Fence
		if err := fence.UnmarshalVT(m.Data); err != nil || fence.ErrorClass != string(wire.SessionEnded) {
			f.t.Errorf("fence %v: %v", &fence, err)
		}
		return fence.Reason
	case <-time.After(guard):
		f.t.Fatal("no fence")
		return ""
	}
}

func (f *fixture) next(sub *nats.Subscription) *nats.Msg {
	f.t.Helper()
	m, err := sub.NextMsg(guard)
	if err != nil {
		f.t.Fatalf("no message on %s: %v", sub.Subject, err)
	}
	return m
}

func (f *fixture) wait(what string, done <-chan struct{}) {
	f.t.Helper()
	select {
	case <-done:
	case <-time.After(guard):
		f.t.Fatalf("%s: not within %v", what, guard)
	}
}
