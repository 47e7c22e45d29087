package identity

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// A machine's key is made and kept there; what is signed for it, and what is
// renewed, is for that key.
//
// Contract: B11 Z4 B8
func TestRequest(t *testing.T) {
	w, dir := newWorld(t), t.TempDir()
	file := filepath.Join(dir, "cert.key")
	key := ok(NewKey())
	if err := key.Save(file); err != nil {
		t.Fatal(err)
	}
	if st := ok(os.Stat(file)); st.Mode().Perm() != 0o600 {
		t.Errorf("mode %v", st.Mode())
	}
	again := ok(LoadKey(file))
	pub := ok(ParseRequest(ok(again.Request("gpu1"))))
	id := ID{TrustDomain: DefaultTrustDomain, Edge: "home", Role: RoleNode, Name: "gpu1"}
	der := ok(w.ca.Sign(pub, id, nil, time.Hour))
	cert, err := key.Certificate([][]byte{der})
	if err != nil || cert.ID() != id {
		t.Fatal(err)
	}
	if _, err := ok(NewKey()).Certificate([][]byte{der}); err == nil {
		t.Error("another key's certificate is taken")
	}
	chain := ok(DecodeChain(EncodeChain(cert.Chain)))
	if len(chain) != 1 || !bytes.Equal(chain[0], der) {
		t.Error("a chain does not come back as it was")
	}
	broker := ok(w.ca.Issue(ID{TrustDomain: DefaultTrustDomain, Edge: "-", Role: RoleBroker, Name: "b"}, []string{"a.example"}, time.Hour))
	renewed := ok(w.ca.Renew(broker, []string{"b.example"}, 2*time.Hour))
	if renewed.ID() != broker.ID() || renewed.Leaf.VerifyHostname("b.example") != nil || !renewed.Leaf.NotAfter.After(broker.Leaf.NotAfter) {
		t.Errorf("%v %v", renewed.ID(), renewed.Leaf.DNSNames)
	}
	if !broker.key.key().Equal(renewed.key.key()) {
		t.Error("it has another key")
	}
	for name, der := range map[string][]byte{"nothing": nil, "a certificate": der, "noise": []byte("0123456789")} {
		if _, err := ParseRequest(der); err == nil {
			t.Errorf("%s is a request", name)
		}
	}
}
