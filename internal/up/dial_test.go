package up

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/identity"
)

// An Edge's connection that is made again shows the certificate that its files hold
// then; files that are no good, or another's, leave the one there was.
//
// Contract: B8
func TestEdgeShowsItsNewestCertificate(t *testing.T) {
	dir := t.TempDir()
	files := configs.TLS{Certificate: filepath.Join(dir, "cert.pem"), Key: filepath.Join(dir, "cert.key")}
	ca, err := identity.NewCA(identity.DefaultTrustDomain, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	issue := func(name string) *identity.Certificate {
		t.Helper()
		c, err := ca.Issue(identity.ID{TrustDomain: identity.DefaultTrustDomain, Edge: name, Role: identity.RoleEdge, Name: name}, nil, time.Minute)
		if err == nil {
			err = c.Save(files.Certificate, files.Key)
		}
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	shown := func(r remote, want *identity.Certificate, what string) {
		t.Helper()
		if pair, err := r.current(nil); err != nil || !bytes.Equal(pair.Certificate[0], want.Chain[0]) {
			t.Errorf("%s: another certificate is shown: %v", what, err)
		}
	}
	first := issue("home")
	r := remote{cert: first, files: files}
	shown(r, first, "at first")
	second := issue("home")
	shown(r, second, "replaced")
	issue("other")
	shown(r, first, "another edge's")
	if err := os.WriteFile(files.Key, []byte("half"), 0o600); err != nil {
		t.Fatal(err)
	}
	shown(r, first, "half written")
}
