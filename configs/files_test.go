package configs

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/iop-fabric/iop/internal/identity"
)

// A certificate is good at a time, and soon will not be; who serves callers shows one
// of any CA; a file that a variable names is told by the variable's name.
//
// Contract: D3
func TestCheckInTime(t *testing.T) {
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	ca, err := identity.NewCA("iop", 3*365*24*time.Hour)
	must(err)
	must(ca.Save(dir))
	node, err := ca.Issue(identity.ID{TrustDomain: "iop", Edge: "home", Role: identity.RoleNode, Name: "desk"}, nil, 365*24*time.Hour)
	must(err)
	must(node.Save(at("cert.pem"), at("cert.key")))
	user, err := identity.NewUserKey()
	must(err)
	must(user.Save(at("user.nk")))
	curve, err := identity.NewCurveKey()
	must(err)
	must(curve.Save(at("curve.nk")))
	const text = "node:\n  name: desk\n  edge: home\n  curve_key: curve.nk\n  broker:\n    urls: ['tls://h:1']\n    nkey: user.nk\n" +
		"    tls:\n      certificate: cert.pem\n      key: cert.key\n      ca: ca.pem\n"
	file := at("node.yaml")
	must(os.WriteFile(file, []byte(text), 0o600))
	now := time.Now()
	line := func(n int, path string) string { return fmt.Sprintf("%s:%d: %s: ", file, n, path) }
	for name, c := range map[string]struct {
		now        time.Time
		fault, say string // with which line it begins, and what it says
		warns      bool
	}{
		"now":               {now, "", "", false},
		"in its last month": {now.Add(340 * 24 * time.Hour), line(9, "node.broker.tls.certificate"), "expires on ", true},
		"over":              {now.Add(366 * 24 * time.Hour), line(9, "node.broker.tls.certificate"), "has expired on ", false},
		"a clock behind":    {now.Add(-2 * time.Hour), line(9, "node.broker.tls.certificate"), "is good only from ", false},
	} {
		warnings, err := Check(file, c.now)
		got := fmt.Sprint(err)
		if c.warns {
			got = fmt.Sprint(warnings)
		}
		switch {
		case c.fault == "" && (err != nil || len(warnings) > 0):
			t.Errorf("%s: %v, %v", name, err, warnings)
		case c.fault != "" && ((err == nil) != c.warns || !strings.HasPrefix(got, c.fault) || !strings.Contains(got, c.say)):
			t.Errorf("%s: %v, %v", name, err, warnings)
		}
	}
	edge := at("edge.yaml")
	must(os.WriteFile(edge, []byte("broker:\nedge:\n  name: home\n  tls: {certificate: cert.pem, key: curve.nk}\n"), 0o600))
	if _, err := Check(edge, now); err == nil || !strings.HasPrefix(err.Error(), edge+":4: edge.tls: ") {
		t.Errorf("no pair for callers: %v", err)
	}
	must(os.WriteFile(edge, []byte("broker:\nedge:\n  name: home\n  tls: {certificate: cert.pem, key: cert.key}\n"), 0o600))
	if warnings, err := Check(edge, now); err != nil || len(warnings) > 0 {
		t.Errorf("a pair: %v, %v", err, warnings)
	}
	if _, err := Check(edge, now.Add(400*24*time.Hour)); err == nil || !strings.Contains(err.Error(), "has expired") {
		t.Errorf("a pair that is over: %v", err)
	}
	t.Setenv("IOP_NODE_CURVE_KEY", at("none.nk"))
	if _, err := Check(file, now); err == nil || !strings.HasPrefix(err.Error(), "environment: IOP_NODE_CURVE_KEY: ") {
		t.Errorf("a variable: %v", err)
	}
}
