package edge

import (
	"bytes"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/bus"
	"github.com/iop-fabric/iop/internal/identity"
)

// A newer certificate in the files is what the Edge signs with from then on; one that
// is no good, or another's, changes nothing and is told; one that ends is told once a
// day.
//
// Contract: B8 D8
func TestOwnCertificate(t *testing.T) {
	dir := t.TempDir()
	files := configs.TLS{Certificate: filepath.Join(dir, "cert.pem"), Key: filepath.Join(dir, "cert.key")}
	ca, err := identity.NewCA("iop", 10*365*24*time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	issue := func(name string) *identity.Certificate {
		t.Helper()
		c, err := ca.Issue(identity.ID{TrustDomain: "iop", Edge: name, Role: identity.RoleEdge, Name: name}, nil, 365*24*time.Hour)
		if err == nil {
			err = c.Save(files.Certificate, files.Key)
		}
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	first := issue("home")
	var logs bytes.Buffer
	now := time.Now()
	e := &Edge{
		cfg: configs.Edge{Name: "home", Broker: configs.Remote{TLS: files}}, log: slog.New(slog.NewTextHandler(&logs, nil)),
		metrics: newMetrics(prometheus.NewRegistry()), now: func() time.Time { return now },
	}
	e.cert.Store(first)
	var warned time.Time
	look := func() string {
		logs.Reset()
		warned = e.lookAtCertificate(t.Context(), warned)
		return logs.String()
	}
	if said := look(); said != "" {
		t.Errorf("the same: %s", said)
	}
	second := issue("home")
	if said := look(); !strings.Contains(said, eventKeys) || !e.cert.Load().SameAs(second) {
		t.Errorf("a newer one: %s", said)
	}
	if at := testutil.ToFloat64(e.metrics.expiry); int64(at) != second.Leaf.NotAfter.Unix() {
		t.Errorf("it tells that it expires at %v", at)
	}
	issue("other")
	if said := look(); !strings.Contains(said, eventKeysBad) || !e.cert.Load().SameAs(second) {
		t.Errorf("another edge's: %s", said)
	}
	if err := os.Remove(files.Key); err != nil {
		t.Fatal(err)
	}
	if said := look(); !strings.Contains(said, eventKeysBad) || !e.cert.Load().SameAs(second) {
		t.Errorf("no key: %s", said)
	}
	if err := second.Save(files.Certificate, files.Key); err != nil {
		t.Fatal(err)
	}
	now = identity.RenewalDue(second.Leaf).Add(time.Second)
	if said := look(); !strings.Contains(said, eventExpiring) {
		t.Errorf("in its last third: %s", said)
	}
	now = now.Add(23 * time.Hour)
	if said := look(); said != "" {
		t.Errorf("within a day: %s", said)
	}
	now = now.Add(time.Hour)
	if said := look(); !strings.Contains(said, eventExpiring) {
		t.Errorf("the next day: %s", said)
	}
}

// redialled is a connection that counts how often it is made anew.
type redialled struct {
	bus.Conn
	n int
}

func (r *redialled) Redial() { r.n++ }

// The CA file, the issuers and the nkey are read again in place; what is no good changes
// nothing. The connection is made anew where the broker is to see something else.
//
// Contract: B1 B8 G3
func TestTrustIssuersAndNKeyAreReadAgain(t *testing.T) {
	dir := t.TempDir()
	in := func(name string) string { return filepath.Join(dir, name) }
	files := configs.TLS{Certificate: in("cert.pem"), Key: in("cert.key"), CA: in("ca.pem")}
	ca, err := identity.NewCA("iop", time.Hour)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(err)
	must(ca.Save(dir))
	issue := func() {
		t.Helper()
		ca, err := identity.LoadCA(dir)
		must(err)
		c, err := ca.Issue(identity.ID{TrustDomain: "iop", Edge: "home", Role: identity.RoleEdge, Name: "home"}, nil, time.Minute)
		must(err)
		must(c.Save(files.Certificate, files.Key))
	}
	nkey := func() *identity.NKey {
		t.Helper()
		k, err := identity.NewUserKey()
		must(err)
		must(k.Save(in("user.nk")))
		return k
	}
	issue()
	key := nkey()
	issuers := []string{"A1"}
	var failing error
	conn := &redialled{}
	var logs bytes.Buffer
	e, err := New(configs.Edge{Name: "home", Broker: configs.Remote{TLS: files, NKey: in("user.nk")}, Issuers: issuers}, Deps{
		Log: slog.New(slog.NewTextHandler(&logs, nil)), Metrics: prometheus.NewRegistry(),
		Issuers: func() ([]string, error) { return issuers, failing },
	})
	must(err)
	e.bus, e.nkey = conn, key.Public()
	look := func() string {
		logs.Reset()
		e.lookAtCertificate(t.Context(), time.Now())
		e.lookAtTrust(t.Context())
		e.lookAtIssuers(t.Context())
		e.lookAtNKey(t.Context())
		return logs.String()
	}
	if said := look(); said != "" || conn.n != 0 {
		t.Errorf("the same: %d redials, %s", conn.n, said)
	}
	issue()
	if said := look(); !strings.Contains(said, eventKeys) || conn.n != 0 {
		t.Errorf("another certificate of the same CA: %d redials, %s", conn.n, said)
	}
	begun, err := identity.BeginCA(dir, time.Hour)
	must(err)
	if said := look(); !strings.Contains(said, eventRoots) || !e.trust.Load().SameAs(begun) || conn.n != 0 {
		t.Errorf("begin: %d redials, %s", conn.n, said)
	}
	_, err = identity.SwitchCA(dir)
	must(err)
	issue()
	if look(); conn.n != 1 {
		t.Errorf("a certificate of the new CA: %d redials", conn.n)
	}
	issuers = []string{"A1", "A2"}
	if said := look(); !strings.Contains(said, eventIssuers) || !slices.Equal(*e.issuers.Load(), issuers) || conn.n != 1 {
		t.Errorf("issuers: %s", said)
	}
	nkey()
	if look(); conn.n != 2 {
		t.Errorf("another nkey: %d redials", conn.n)
	}
	trust := *e.trust.Load()
	failing = errors.New("the file is being written")
	must(os.WriteFile(files.CA, []byte("half"), 0o600))
	must(os.WriteFile(in("user.nk"), []byte("half"), 0o600))
	if said := look(); strings.Count(said, eventKeysBad) != 3 || !e.trust.Load().SameAs(trust) || len(*e.issuers.Load()) != 2 || conn.n != 2 {
		t.Errorf("no good: %d redials, %s", conn.n, said)
	}
}
