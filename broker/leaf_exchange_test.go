package broker

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/iop-fabric/iop/internal/identity"
)

// takes gives the leaf the hub's CA file and, where the CA that signs is another, a
// certificate of it.
func (s *site) takes() {
	s.f.t.Helper()
	data := must(os.ReadFile(filepath.Join(s.f.dir, "ca.pem")))
	if err := os.WriteFile(s.cfg.TLS.CA, data, 0o600); err != nil {
		s.f.t.Fatal(err)
	}
	ca := must(identity.LoadCA(s.f.dir))
	own := must(identity.LoadCertificate(s.cfg.TLS.Certificate, s.cfg.TLS.Key))
	if identity.IssuerOf(own.Leaf) != identity.RootOf(ca.Certificate()) {
		if err := must(ca.Renew(own, own.Hosts(), 12*time.Hour)).SaveChain(s.cfg.TLS.Certificate); err != nil {
			s.f.t.Fatal(err)
		}
	}
	if err := s.leaf.Reload(); err != nil {
		s.f.t.Fatal(err)
	}
}

// A leaf goes through the exchange of the CA without a restart: it shows the new
// certificate to the hub and to Nodes, and takes the hub's.
//
// Contract: B1 B8 Y3
func TestLeafThroughAnExchangeOfTheCA(t *testing.T) {
	f, key, n1, _ := newHub(t)
	f.enrols()
	f.start()
	s := f.newSite(key).start()
	old := shownBy(t, f.b, "l1")
	f.step(begin)
	s.takes()
	f.step(identity.SwitchCA)
	mark := f.logs.mark()
	s.takes()
	f.logs.wait(t, mark, map[string]string{"msg": eventAdmitted, "user": "edge1._leaf.l1"})
	if is := shownBy(t, f.b, "l1"); is == old || is != identity.RootOf(f.roots().Signer()) {
		t.Errorf("the leaf shows %q, before it %q", is, old)
	}
	f.step(identity.FinishCA)
	s.takes()
	// A Node that knows the new root alone, and then a link that is made again.
	dial := func() {
		t.Helper()
		d := s.dialer(f.dialer("edge1", "node", "n1", n1))
		id := identity.ID{TrustDomain: "iop", Edge: "edge1", Role: identity.RoleNode, Name: "n1"}
		d.tls.RootCAs = f.roots().Pool()
		d.tls.Certificates[0] = must(must(identity.LoadCA(f.dir)).Issue(id, nil, time.Hour)).TLS()
		nc, _ := f.node(d)
		nc.Close()
		f.wait("the close", d.closed)
	}
	dial()
	mark = f.logs.mark()
	s.leaf.relink <- struct{}{}
	f.logs.wait(t, mark, map[string]string{"msg": eventAdmitted, "user": "edge1._leaf.l1"})
}

// Who asks is answered with the one that its server has pinned.
//
// Contract: B1 B8
func TestCalloutIssuer(t *testing.T) {
	old, next, other := must(identity.NewAccountKey()), must(identity.NewAccountKey()), must(identity.NewAccountKey())
	leaf := leafID("edge1", "l1")
	for name, c := range map[string]struct {
		pinned, file, old *identity.NKey // of the server here, and of the files
		says              *identity.NKey // the leaf
		leaf              memberID
		want              *identity.NKey
	}{
		"our own server, not restarted":       {old, next, old, nil, memberID{}, old},
		"our own server, restarted":           {next, next, old, nil, memberID{}, next},
		"a leaf that has said nothing yet":    {next, next, old, nil, leaf, old},
		"a leaf that pins the old one":        {next, next, old, old, leaf, old},
		"a leaf that pins the new one":        {old, next, old, next, leaf, next},
		"a leaf that pins another":            {next, next, old, other, leaf, old},
		"nothing is exchanged":                {old, old, nil, old, leaf, old},
		"nothing is exchanged, nothing said":  {old, old, nil, nil, leaf, old},
		"finished, our server not restarted":  {old, next, nil, next, leaf, next},
		"finished, the leaf has said nothing": {old, next, nil, nil, leaf, next},
	} {
		a := &authority{keys: keys{issuer: c.pinned}}
		a.issuer.Store(c.file)
		a.oldIssuer.Store(c.old)
		if c.says != nil {
			a.pins.Store(leaf, c.says.Public())
		}
		if got := a.calloutIssuer(c.leaf); got != c.want {
			t.Errorf("%s: another one", name)
		}
	}
}

// While the issuer is exchanged each server is answered with the one that it has pinned:
// a hub that was restarted answers a leaf that was not, and the other way round. Without
// the old one at hand the leaf lets nobody in.
//
// Contract: B1 B8 Y3
func TestLeafThroughAnExchangeOfTheIssuer(t *testing.T) {
	f, key, n1, n2 := newHub(t)
	f.start()
	f.cfg.LeafListen = f.leafAddr()
	s := f.newSite(key).start()
	old := must(identity.LoadNKey(f.cfg.IssuerKey))
	next := must(identity.NewAccountKey())
	oldFile := filepath.Join(filepath.Dir(f.cfg.IssuerKey), "issuer-old.nk")
	if filepath.Base(f.cfg.IssuerKey) != "issuer.nk" {
		t.Fatalf("the issuer's file is %s", f.cfg.IssuerKey)
	}
	for file, k := range map[string]*identity.NKey{oldFile: old, f.cfg.IssuerKey: next} {
		if err := k.Save(file); err != nil {
			t.Fatal(err)
		}
	}
	f.stop()
	f.start()
	f.logs.wait(t, 0, map[string]string{"msg": eventAdmitted, "user": "edge1._leaf.l1"})
	// A dial may meet the link while it is being made again, and is then repeated.
	for deadline := time.Now().Add(guard); ; {
		nc, err := s.dialer(f.dialer("edge1", "node", "n1", n1)).dial()
		if err == nil {
			nc.Close()
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("a node at the leaf: %v", err)
		}
	}
	if k := must(f.b.Keys(t.Context())); k.Pinned != next.Public() {
		t.Error("the hub goes on with the old one")
	}
	pin := func() string {
		for _, m := range must(f.b.Keys(t.Context())).Members {
			if m.Name == "l1" {
				return m.Issuer
			}
		}
		return ""
	}
	for deadline := time.Now().Add(guard); pin() != old.Public(); { // its beats say so
		if time.Now().After(deadline) {
			t.Fatalf("the leaf says it pins %q", pin())
		}
	}
	s.stop()
	s.cfg.Issuer = next.Public()
	s.start()
	f.node(s.dialer(f.dialer("edge1", "node", "n2", n2)))
	if got := pin(); got != next.Public() {
		t.Errorf("restarted, it says it pins %q", got)
	}
}
