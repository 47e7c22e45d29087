package edge

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/iop-fabric/iop/configs"
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
