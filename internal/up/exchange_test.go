package up

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/iop-fabric/iop/broker"
	"github.com/iop-fabric/iop/internal/identity"
)

// exchangeFolder is one of iop init --out.
func exchangeFolder(t *testing.T) (out string, read func(name string) string) {
	t.Helper()
	out = filepath.Join(t.TempDir(), "fabric")
	h := Hosts{Out: out, Edge: "home", Brokers: []string{"hub.example"}, Leaves: []string{"attic=attic.example"}, Nodes: []string{"n1"}}
	if _, err := MakeHosts(h); err != nil {
		t.Fatal(err)
	}
	return out, func(name string) string {
		t.Helper()
		b, err := os.ReadFile(filepath.Join(out, filepath.FromSlash(name)))
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
}

func put(t *testing.T, out, name, text string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(out, filepath.FromSlash(name)), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// asked is what one broker says; nil: nobody is asked.
func asked(k *broker.Keys) []Asked {
	if k == nil {
		return nil
	}
	return []Asked{{Whom: "b1", Keys: *k}}
}

// Every step of the CA's exchange gives each host's folder what it needs and nothing
// else; one that was cut off does the rest when it is taken again. A member that is made
// in between gets the roots of then.
//
// Contract: B8 D1 Z4
func TestExchangeOfTheCAInFiles(t *testing.T) {
	out, read := exchangeFolder(t)
	folders := []string{"broker-1", "edge", "leaf-attic", "node-n1"}
	put(t, out, "broker-1/ca.key", read("authority/ca.key")) // the one that invites
	run := func(step string, live *broker.Keys, force bool) (Exchanged, error) {
		return Exchange{Out: out, What: ExchangeCA, Step: step, Live: asked(live), Force: force}.Run()
	}
	same := func(step string) {
		t.Helper()
		for _, f := range folders {
			if read(f+"/ca.pem") != read("authority/ca.pem") {
				t.Errorf("%s: %s has another ca.pem", step, f)
			}
		}
	}
	load := func(folder string) *identity.Certificate {
		t.Helper()
		c, err := identity.LoadCertificate(filepath.Join(out, folder, "cert.pem"), filepath.Join(out, folder, "cert.key"))
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	before, key, cert := read("node-n1/ca.pem"), read("node-n1/cert.key"), load("node-n1")
	if _, err := run(StepSwitch, nil, false); err == nil {
		t.Error("a switch before the beginning")
	}
	for range 2 {
		done, err := run(StepBegin, nil, false)
		if err != nil || len(done.Files) != len(folders) {
			t.Fatalf("begin: %+v %v", done, err)
		}
		same(StepBegin)
		put(t, out, "node-n1/ca.pem", before) // cut off before that one: again
	}
	if _, err := MakeHosts(Hosts{Out: out, Nodes: []string{"n2"}}); err != nil {
		t.Fatal(err)
	}
	folders = append(folders, "node-n2")
	for range 2 {
		done, err := run(StepSwitch, nil, false)
		if err != nil {
			t.Fatal(err)
		}
		same(StepSwitch)
		if read("broker-1/ca.key") != read("authority/ca.key") || read("node-n1/cert.key") != key {
			t.Error("switch: the broker that invites has another CA key, or the node another key")
		}
		roots, err := identity.LoadTrust(filepath.Join(out, "authority", "ca.pem"))
		if err != nil {
			t.Fatal(err)
		}
		for i, f := range folders {
			if c := load(f); roots.Outdated(c.Leaf) {
				t.Errorf("switch: the certificate of %s is of the old CA", f)
			}
			want := "ca.pem cert.pem"
			if f == "broker-1" {
				want = "ca.pem ca.key cert.pem"
			}
			if got := strings.Join(done.Files[i].Names, " "); done.Files[i].Folder != f || got != want {
				t.Errorf("switch: %s gets %s", done.Files[i].Folder, got)
			}
		}
		if err := cert.SaveChain(filepath.Join(out, "node-n1", "cert.pem")); err != nil { // cut off before that one
			t.Fatal(err)
		}
	}
	roots, err := identity.LoadTrust(filepath.Join(out, "authority", "ca.pem"))
	if err != nil {
		t.Fatal(err)
	}
	signs := identity.RootOf(roots.Signer())
	was := identity.IssuerOf(cert.Leaf)
	live := func(root string, members ...broker.Shown) *broker.Keys {
		return &broker.Keys{Roots: []broker.Root{{ID: was, Signs: root == was}, {ID: signs, Signs: root == signs}}, Members: members}
	}
	for want, k := range map[string]*broker.Keys{
		"nobody was asked":  nil,
		"does not know yet": live(was, broker.Shown{Role: "node", Name: "n1", Root: signs}),
		"node n1":           live(signs, broker.Shown{Role: "node", Name: "n1", Root: was}, broker.Shown{Role: "edge", Name: "home", Root: signs}),
		"leaf attic":        live(signs, broker.Shown{Role: "leaf", Name: "attic", Root: was}),
		"edge home, node n1, node n2 (never came). A ": live(signs, broker.Shown{Role: "edge", Name: "home", Root: was}, broker.Shown{Role: "node", Name: "n1", Root: was}, broker.Shown{Role: "node", Name: "n2"}),
	} {
		if _, err := run(StepFinish, k, false); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("finish: %v, want %q", err, want)
		}
		if read("authority/ca.pem") != string(roots.PEM()) {
			t.Fatal("finish: refused, and done")
		}
	}
	if _, err := run(StepFinish, live(signs, broker.Shown{Role: "node", Name: "n1", Root: signs}, broker.Shown{Role: "node", Name: "n2", Root: signs}), false); err != nil {
		t.Fatal(err)
	}
	same(StepFinish)
	if _, err := run(StepFinish, nil, true); err != nil { // again
		t.Error(err)
	}
	same(StepFinish)
}

// A switch in a data folder that was cut off is carried on by the next start; in an
// authority's folder finish says that the switch is to be taken again, and asks nobody.
//
// Contract: B8
func TestSwitchCutOff(t *testing.T) {
	cut := func(t *testing.T, dir string) (signer string) {
		t.Helper()
		if _, err := stepCA(dir, StepBegin); err != nil {
			t.Fatal(err)
		}
		kept := map[string][]byte{}
		for _, name := range []string{"ca.key", "ca-next.key"} {
			b, err := os.ReadFile(filepath.Join(dir, name))
			if err != nil {
				t.Fatal(err)
			}
			kept[name] = b
		}
		after, err := stepCA(dir, StepSwitch)
		if err != nil {
			t.Fatal(err)
		}
		for name, b := range kept {
			put(t, dir, name, string(b))
		}
		return identity.RootOf(after.Signer())
	}
	f := Folder(t.TempDir())
	if err := Prepare(f, DefaultEdge, DefaultNode); err != nil {
		t.Fatal(err)
	}
	signer := cut(t, filepath.Dir(f.CA()))
	if err := Prepare(f, DefaultEdge, DefaultNode); err != nil {
		t.Fatal(err)
	}
	if ca, err := identity.LoadCA(filepath.Dir(f.CA())); err != nil || identity.RootOf(ca.Certificate()) != signer {
		t.Errorf("the old CA signs after the next start: %v", err)
	}

	out, _ := exchangeFolder(t)
	cut(t, filepath.Join(out, "authority"))
	if _, err := (Exchange{Out: out, What: ExchangeCA, Step: StepFinish}).Run(); !errors.Is(err, identity.ErrSwitchCut) {
		t.Errorf("finish: %v", err)
	}
}

// The issuer's exchange never has a broker sign what no Edge believes, as far as the
// folder and the broker that is asked can tell.
//
// Contract: B8 G3 Z4
func TestExchangeOfTheIssuerInFiles(t *testing.T) {
	out, read := exchangeFolder(t)
	run := func(step string, live *broker.Keys, force bool) (Exchanged, error) {
		return Exchange{Out: out, What: ExchangeIssuer, Step: step, Live: asked(live), Force: force}.Run()
	}
	public := func(file string) string {
		t.Helper()
		k, err := identity.LoadNKey(filepath.Join(out, file))
		if err != nil {
			t.Fatal(err)
		}
		return k.Public()
	}
	old := public("authority/issuer.nk")
	if _, err := run(StepSwitch, nil, false); err == nil || !strings.Contains(err.Error(), "begin one first") {
		t.Errorf("switch: %v", err)
	}
	begun, err := run(StepBegin, nil, false)
	if err != nil || begun.Key == old || len(begun.Files) != 0 {
		t.Fatalf("begin: %+v %v", begun, err)
	}
	if again, err := run(StepBegin, nil, false); err != nil || again.Key != begun.Key {
		t.Errorf("begin, again: %v", err)
	}
	if _, err := run(StepFinish, &broker.Keys{Issuer: old, Pinned: old}, false); err == nil {
		t.Error("finish before the switch")
	}
	if _, err := run(StepSwitch, nil, false); err == nil || !strings.Contains(err.Error(), begun.Key) {
		t.Errorf("switch before the Edge knows it: %v", err)
	}
	put(t, out, "edge/edge.yaml", strings.Replace(read("edge/edge.yaml"), old, old+", "+begun.Key, 1))
	for range 2 {
		done, err := run(StepSwitch, nil, false)
		if err != nil || len(done.Files) != 1 || done.Files[0].Folder != "broker-1" || public("broker-1/issuer.nk") != begun.Key || public("authority/issuer.nk") != begun.Key || public("broker-1/issuer-old.nk") != old {
			t.Fatalf("switch: %+v %v", done, err)
		}
	}
	for want, k := range map[string]*broker.Keys{
		"nobody was asked": nil,
		"still signs with": {Issuer: old, Pinned: old},
		"still at attic":   {Issuer: begun.Key, Pinned: old, Members: []broker.Shown{{Role: "leaf", Name: "attic", Issuer: old}, {Role: "node", Name: "n1"}}},
	} {
		if _, err := run(StepFinish, k, false); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("finish: %v, want %q", err, want)
		}
	}
	two := append(asked(&broker.Keys{Issuer: begun.Key, Pinned: begun.Key}), Asked{Whom: "b2", Keys: broker.Keys{Issuer: old, Pinned: old}})
	if _, err := (Exchange{Out: out, What: ExchangeIssuer, Step: StepFinish, Live: two}).Run(); err == nil || !strings.Contains(err.Error(), "b2 still signs with") {
		t.Errorf("finish while the second of two signs with the old one: %v", err)
	}
	left := read("broker-1/issuer-old.nk")
	if _, err := run(StepFinish, &broker.Keys{Issuer: begun.Key, Pinned: begun.Key}, false); err != nil {
		t.Error(err)
	}
	put(t, out, "authority/issuer-old.nk", left) // cut off before its last write
	if _, err := run(StepFinish, nil, true); err != nil {
		t.Errorf("finish, again: %v", err)
	}
	if _, err := run(StepFinish, nil, true); err == nil || !strings.Contains(err.Error(), "under way") {
		t.Errorf("finish, twice: %v", err)
	}
	for _, name := range []string{nextIssuerFile, oldIssuerFile} {
		if present(filepath.Join(out, "authority", name)) || present(filepath.Join(out, "broker-1", name)) {
			t.Errorf("%s is left", name)
		}
	}
}

// iop rotate --key that was cut off between its files is done by the next iop rotate,
// with --key or without.
//
// Contract: B8
func TestRotateAfterACut(t *testing.T) {
	for _, newKey := range []bool{false, true} {
		out, read := exchangeFolder(t)
		key, cert := read("node-n1/cert.key"), read("node-n1/cert.pem")
		if _, err := (Rotation{Out: out, Role: identity.RoleNode, Name: "n1", NewKey: true}).Run(); err != nil {
			t.Fatal(err)
		}
		next := read("node-n1/cert.key")
		if next == key || read("node-n1/cert.pem") == cert {
			t.Fatal("it made no new pair")
		}
		put(t, out, "node-n1/cert.key.next", next) // as a cut before the last of its writes leaves it
		put(t, out, "node-n1/cert.key", key)
		if _, err := (Rotation{Out: out, Role: identity.RoleNode, Name: "n1", NewKey: newKey}).Run(); err != nil {
			t.Errorf("new key, too: %v: %v", newKey, err)
		}
		if present(filepath.Join(out, "node-n1", "cert.key.next")) || (read("node-n1/cert.key") == next) == newKey {
			t.Errorf("new key, too: %v: the files are not in their places", newKey)
		}
	}
}
