package up

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/iop-fabric/iop/internal/identity"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// order is the order in which Prepare writes: what a kill may leave is a prefix.
var order = []string{
	"pki/ca.key", "pki/ca.pem", "pki/broker-broker.key", "pki/broker-broker.pem", "pki/edge-local.key", "pki/edge-local.pem",
	"pki/node-here.key", "pki/node-here.pem", "keys/issuer.nk", "keys/system.nk", "keys/callout.nk", "keys/service.nk",
	"keys/edge.nk", "keys/node.nk", "keys/curve.nk", "api-key", "made",
}

// A first start that was cut off at any point is finished by the next.
//
// Contract: D2 Z4
func TestFirstStartCutOff(t *testing.T) {
	whole := Folder(t.TempDir())
	if err := Prepare(whole, DefaultEdge, DefaultNode); err != nil {
		t.Fatal(err)
	}
	for n := range order {
		f := Folder(filepath.Join(t.TempDir(), "d"))
		for _, dir := range []string{"pki", "keys"} {
			if err := os.MkdirAll(f.path(dir), 0o700); err != nil {
				t.Fatal(err)
			}
		}
		for _, file := range order[:n] {
			b, err := os.ReadFile(whole.path(file))
			if err != nil {
				t.Fatalf("Prepare no longer writes %s: %v", file, err)
			}
			if err := os.WriteFile(f.path(file), b, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.WriteFile(f.path("pki", ".iop-123"), []byte("half"), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := Prepare(f, DefaultEdge, DefaultNode); err != nil {
			t.Errorf("cut off before %s: %v", order[n], err)
			continue
		}
		if present(f.path("pki", ".iop-123")) {
			t.Errorf("cut off before %s: half a file stays", order[n])
		}
		pool, err := identity.LoadPool(f.CA())
		if err != nil {
			t.Fatal(err)
		}
		c, err := identity.LoadCertificate(f.Certificate(identity.RoleNode, DefaultNode), f.key(identity.RoleNode, DefaultNode))
		if err != nil {
			t.Fatal(err)
		}
		if _, _, err := identity.VerifyChain(pool, c.Chain, identity.RoleNode, false); err != nil {
			t.Errorf("cut off before %s: %v", order[n], err)
		}
	}
}

// What a folder had and has lost is never replaced in silence.
//
// Contract: D2 S4
func TestLostKeysAreNotReplaced(t *testing.T) {
	for _, file := range []string{"pki/ca.pem", "pki/ca.key", "keys/issuer.nk", "keys/curve.nk"} {
		f := Folder(t.TempDir())
		if err := Prepare(f, DefaultEdge, DefaultNode); err != nil {
			t.Fatal(err)
		}
		if err := os.Remove(f.path(file)); err != nil {
			t.Fatal(err)
		}
		if err := Prepare(f, DefaultEdge, DefaultNode); err == nil || !strings.Contains(err.Error(), filepath.Base(file)) {
			t.Errorf("without %s: %v", file, err)
		}
	}
	f := Folder(t.TempDir())
	if err := Prepare(f, DefaultEdge, DefaultNode); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(f.NKey("node"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(f.NKey("curve"), b, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := Prepare(f, DefaultEdge, DefaultNode); err == nil || !strings.Contains(err.Error(), "swapped") {
		t.Errorf("a user key where the curve key belongs: %v", err)
	}
}

func TestLock(t *testing.T) {
	f := Folder(filepath.Join(t.TempDir(), "d"))
	unlock, err := Lock(f)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Lock(f); !errors.Is(err, ErrLocked) {
		t.Errorf("locked twice: %v", err)
	}
	unlock()
	if unlock, err = Lock(f); err != nil {
		t.Errorf("after unlock: %v", err)
	}
	unlock()
}
