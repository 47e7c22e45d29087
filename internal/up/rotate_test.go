package up

import (
	"bytes"
	"context"
	"crypto/x509"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/identity"
)

// A member's certificate is signed anew for the same name and hosts, and the same key
// unless a new one is asked for; nothing else of the folder changes.
//
// Contract: B8 D1
func TestRotate(t *testing.T) {
	out := filepath.Join(t.TempDir(), "fabric")
	if _, err := MakeHosts(Hosts{Out: out, Edge: "home", Brokers: []string{"hub.example", "10.0.0.2"}, Leaves: []string{"attic=attic.example"}, Nodes: []string{"n1"}}); err != nil {
		t.Fatal(err)
	}
	load := func(folder string) *identity.Certificate {
		t.Helper()
		c, err := identity.LoadCertificate(filepath.Join(out, folder, "cert.pem"), filepath.Join(out, folder, "cert.key"))
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	pool, err := identity.LoadPool(filepath.Join(out, "authority", "ca.pem"))
	if err != nil {
		t.Fatal(err)
	}
	for folder, r := range map[string]Rotation{
		"node-n1": {Role: identity.RoleNode, Name: "n1"}, "edge": {Role: identity.RoleEdge},
		"broker-2": {Role: identity.RoleBroker, Name: "broker-2"}, "leaf-attic": {Role: identity.RoleLeaf, Name: "attic"},
	} {
		for _, newKey := range []bool{false, true} {
			r.Out, r.NewKey = out, newKey
			was := load(folder)
			done, err := r.Run()
			if err != nil {
				t.Fatalf("%s: %v", folder, err)
			}
			is := load(folder)
			sameKey := bytes.Equal(was.Leaf.RawSubjectPublicKeyInfo, is.Leaf.RawSubjectPublicKeyInfo)
			if is.SameAs(was) || !is.SameAs(done.Certificate) || sameKey == newKey || is.ID() != was.ID() || !slices.Equal(is.Hosts(), was.Hosts()) {
				t.Errorf("%s, new key %v: %s for %v, the same key: %v", folder, newKey, is.ID(), is.Hosts(), sameKey)
			}
			if _, _, err := identity.VerifyChain(pool, is.Chain, r.Role, r.Role == identity.RoleBroker); err != nil {
				t.Errorf("%s: %v", folder, err)
			}
			if want := map[bool]int{false: 1, true: 2}[newKey]; len(done.Files) != want {
				t.Errorf("%s: %v", folder, done.Files)
			}
		}
	}
	for want, r := range map[string]Rotation{
		"there is no node of that name": {Out: out, Role: identity.RoleNode, Name: "n2"},
		"is of a node, not of a broker": {Out: out, Role: identity.RoleBroker, Name: "node-n1"},
		"is no folder of iop init":      {Out: t.TempDir(), Role: identity.RoleEdge},
		"name":                          {Out: out, Role: identity.RoleNode, Name: "../edge"},
		"want node, edge":               {Out: out, Role: "king", Name: "n1"},
	} {
		if _, err := r.Run(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v", r, err)
		}
	}
	unlock, err := lock(Folder(out))
	if err != nil {
		t.Fatal(err)
	}
	defer unlock()
	if _, err := (Rotation{Out: out, Role: identity.RoleEdge}).Run(); err == nil {
		t.Error("two at a time")
	}
}

// age replaces a certificate of a folder by one that ends in life, under the same key.
func age(t *testing.T, f Folder, role identity.Role, name string, life time.Duration) *identity.Certificate {
	t.Helper()
	files := configs.TLS{Certificate: f.Certificate(role, name), Key: f.key(role, name)}
	c, err := identity.LoadCertificate(files.Certificate, files.Key)
	if err != nil {
		t.Fatal(err)
	}
	ca, err := identity.LoadCA(f.path("pki"))
	if err != nil {
		t.Fatal(err)
	}
	if c, err = ca.Renew(c, c.Hosts(), life); err == nil {
		err = c.SaveChain(files.Certificate)
	}
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// An `iop up` signs its own certificates anew in the last third of their lives, each for
// the key and the hosts it has; those that are young, or the operator's, it lets be.
//
// Contract: B8
func TestUpRenewsItsOwn(t *testing.T) {
	f := Folder(t.TempDir())
	if err := Prepare(f, DefaultEdge, DefaultNode); err != nil {
		t.Fatal(err)
	}
	cfg, err := Config(Options{Folder: f})
	if err != nil {
		t.Fatal(err)
	}
	if renewed, err := renewOwn(f, cfg, time.Now()); err != nil || len(renewed) != 0 {
		t.Fatalf("of young ones %d are renewed: %v", len(renewed), err)
	}
	was := age(t, f, identity.RoleBroker, "broker", 10*time.Minute)
	renewed, err := renewOwn(f, cfg, time.Now())
	if err != nil || len(renewed) != 1 {
		t.Fatalf("%d are renewed: %v", len(renewed), err)
	}
	is, err := identity.LoadCertificate(f.Certificate(identity.RoleBroker, "broker"), f.key(identity.RoleBroker, "broker"))
	if err != nil {
		t.Fatal(err)
	}
	if is.ID() != was.ID() || !slices.Equal(is.Hosts(), was.Hosts()) || time.Until(is.Leaf.NotAfter) < certLife-time.Hour {
		t.Errorf("%s for %v until %v", is.ID(), is.Hosts(), is.Leaf.NotAfter)
	}
	later := is.Leaf.NotAfter.Add(-24 * time.Hour)
	if renewed, err = renewOwn(f, cfg, later); err != nil || len(renewed) != 3 {
		t.Errorf("a day before the end %d are renewed: %v", len(renewed), err)
	}
	age(t, f, identity.RoleBroker, "broker", 10*time.Minute)
	own := *cfg.Broker
	own.TLS.Certificate = filepath.Join(string(f), "mine.pem")
	cfg.Broker = &own
	if renewed, err = renewOwn(f, cfg, time.Now()); err != nil || len(renewed) != 0 {
		t.Errorf("the operator's own is signed: %d, %v", len(renewed), err)
	}
}

// What has expired while the process was off does not keep it from starting; while it
// runs the broker takes what is renewed.
//
// Contract: B8
func TestUpStartsWithWhatHasExpired(t *testing.T) {
	f := Folder(t.TempDir())
	if err := Prepare(f, DefaultEdge, DefaultNode); err != nil {
		t.Fatal(err)
	}
	for role, name := range map[identity.Role]string{identity.RoleBroker: "broker", identity.RoleEdge: DefaultEdge, identity.RoleNode: DefaultNode} {
		c := age(t, f, role, name, 1) // whole seconds are all a certificate knows: it is over
		if _, err := c.Leaf.Verify(x509.VerifyOptions{Roots: poolOf(t, f), KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}}); err == nil {
			t.Fatal("it has not expired")
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	ready := make(chan struct{})
	go func() {
		done <- Run(ctx, Options{Folder: f, Demo: true, Listen: "127.0.0.1:0", AdminListen: "127.0.0.1:0", BrokerListen: "127.0.0.1:0"},
			slog.New(slog.DiscardHandler), func(Info) { close(ready) }, nil)
	}()
	select {
	case <-ready:
	case err := <-done:
		t.Fatal(err)
	case <-time.After(30 * time.Second):
		t.Error("it does not serve")
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func poolOf(t *testing.T, f Folder) *x509.CertPool {
	t.Helper()
	pool, err := identity.LoadPool(f.CA())
	if err != nil {
		t.Fatal(err)
	}
	return pool
}

// The running broker takes a certificate that is signed anew, also where another of the
// folder's cannot be read, which is told.
//
// Contract: B8
func TestRunningUpTakesWhatItRenewed(t *testing.T) {
	f := Folder(t.TempDir())
	if err := Prepare(f, DefaultEdge, DefaultNode); err != nil {
		t.Fatal(err)
	}
	cfg, err := Config(Options{Folder: f})
	if err != nil {
		t.Fatal(err)
	}
	var logs bytes.Buffer
	fabric, err := Build(cfg, slog.New(slog.NewTextHandler(&logs, nil)))
	if err != nil {
		t.Fatal(err)
	}
	age(t, f, identity.RoleBroker, "broker", 10*time.Minute)
	edgeKey := f.key(identity.RoleEdge, DefaultEdge)
	if err := os.Rename(edgeKey, edgeKey+".away"); err != nil {
		t.Fatal(err)
	}
	fabric.renewOwn(f, time.Now())
	for _, want := range []string{eventOwnRenewed, "broker.rotated", eventOwnFailed} {
		if strings.Count(logs.String(), want) != 1 {
			t.Errorf("no %s in\n%s", want, logs.String())
		}
	}
}
