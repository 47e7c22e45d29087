package identity

import (
	"crypto/x509"
	"path/filepath"
	"testing"
	"time"

	"github.com/iop-fabric/iop/wire/iopv1"
)

// The proof of a renewal is of one session and one nonce, and no other signature of
// ours stands in for it.
//
// Contract: B8 G3
func TestRenewProof(t *testing.T) {
	ca := try(NewCA("iop", time.Hour))(t)
	cert := try(ca.Issue(ID{TrustDomain: "iop", Edge: "edge1", Role: RoleNode, Name: "n1"}, nil, time.Minute))(t)
	key := try(NewUserKey())(t)
	nonce := NewNonce()
	good := try(SignRenew(cert, key, "edge1", "n1", 7, nonce))(t)
	id, leaf, err := VerifyRenew(ca.Pool(), key.Public(), "edge1", "n1", 7, good)
	if err != nil || id != cert.ID() || !leaf.Equal(cert.Leaf) {
		t.Fatalf("%v %v", id, err)
	}
	register := &iopv1.RegisterRequest{NodeId: "n1", Nonce: nonce, RecipientKey: try(NewCurveKey())(t).Public()}
	if err := SignRegister(cert, key, register); err != nil {
		t.Fatal(err)
	}
	for name, r := range map[string]struct {
		edge, node string
		gen        uint64
		change     func(*iopv1.RenewRequest)
	}{
		"edge":       {edge: "edge2"},
		"node":       {node: "n2"},
		"generation": {gen: 8},
		"nonce":      {change: func(r *iopv1.RenewRequest) { r.Nonce = NewNonce() }},
		"no nonce":   {change: func(r *iopv1.RenewRequest) { r.Nonce = nil }},
		"a register": {change: func(r *iopv1.RenewRequest) {
			r.CertificateSignature, r.NkeySignature = register.GetCertificateSignature(), register.GetNkeySignature()
		}},
		"swapped": {change: func(r *iopv1.RenewRequest) {
			r.CertificateSignature, r.NkeySignature = r.GetNkeySignature(), r.GetCertificateSignature()
		}},
	} {
		q := try(SignRenew(cert, key, "edge1", "n1", 7, nonce))(t)
		if r.change != nil {
			r.change(q)
		}
		edge, node, gen := "edge1", "n1", uint64(7)
		if r.edge != "" {
			edge = r.edge
		}
		if r.node != "" {
			node = r.node
		}
		if r.gen != 0 {
			gen = r.gen
		}
		if _, _, err := VerifyRenew(ca.Pool(), key.Public(), edge, node, gen, q); err == nil {
			t.Errorf("%s: taken", name)
		}
	}
	if _, _, err := VerifyRenew(ca.Pool(), try(NewUserKey())(t).Public(), "edge1", "n1", 7, good); err == nil {
		t.Error("another nkey: taken")
	}
}

// A chain takes the place of another under the same key alone, in one write.
//
// Contract: B8
func TestSaveChain(t *testing.T) {
	ca := try(NewCA("iop", 100*time.Hour))(t)
	cert := try(ca.Issue(ID{TrustDomain: "iop", Edge: "edge1", Role: RoleNode, Name: "n1"}, nil, time.Hour))(t)
	dir := t.TempDir()
	certFile, keyFile := filepath.Join(dir, "cert.pem"), filepath.Join(dir, "cert.key")
	if err := cert.Save(certFile, keyFile); err != nil {
		t.Fatal(err)
	}
	signed := try(ca.Renew(cert, nil, 50*time.Hour))(t)
	renewed := try(cert.Renewed(Trust{roots: []*x509.Certificate{ca.cert}}, signed.Chain))(t)
	if renewed.SameAs(cert) || !renewed.SameAs(signed) {
		t.Error("which is which?")
	}
	if err := renewed.SaveChain(certFile); err != nil {
		t.Fatal(err)
	}
	if got := try(LoadCertificate(certFile, keyFile))(t); !got.SameAs(renewed) {
		t.Error("another one was read")
	}
	if due := RenewalDue(cert.Leaf); !due.After(cert.Leaf.NotBefore) || cert.Leaf.NotAfter.Sub(due)*3 != cert.Leaf.NotAfter.Sub(cert.Leaf.NotBefore) {
		t.Errorf("due %v of %v to %v", due, cert.Leaf.NotBefore, cert.Leaf.NotAfter)
	}
}

func try[T any](v T, err error) func(testing.TB) T {
	return func(t testing.TB) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

// A new nkey is registered on the proof of the certificate, of the nkey there is, and
// of the new one; each of them alone is missed, and a renewal is none.
//
// Contract: B8 G3
func TestNewNKeyProof(t *testing.T) {
	ca := try(NewCA("iop", time.Hour))(t)
	cert := try(ca.Issue(ID{TrustDomain: "iop", Edge: "edge1", Role: RoleNode, Name: "n1"}, nil, time.Minute))(t)
	key, next, other := try(NewUserKey())(t), try(NewUserKey())(t), try(NewUserKey())(t)
	nonce := NewNonce()
	verify := func(r *iopv1.RenewRequest) error {
		_, _, err := VerifyRenew(ca.Pool(), key.Public(), "edge1", "n1", 7, r)
		return err
	}
	request := func() *iopv1.RenewRequest { return try(SignNewNKey(cert, key, next, "edge1", "n1", 7, nonce))(t) }
	if err := verify(request()); err != nil {
		t.Fatal(err)
	}
	renew := try(SignRenew(cert, key, "edge1", "n1", 7, nonce))(t)
	for name, change := range map[string]func(r *iopv1.RenewRequest){
		"another new one": func(r *iopv1.RenewRequest) { r.NewNkey = other.Public() },
		"a renewal's signatures": func(r *iopv1.RenewRequest) {
			r.CertificateSignature, r.NkeySignature = renew.CertificateSignature, renew.NkeySignature
		},
		"taken for a renewal":             func(r *iopv1.RenewRequest) { r.NewNkey = "" },
		"the certificate's of a renewal":  func(r *iopv1.RenewRequest) { r.CertificateSignature = renew.CertificateSignature },
		"the nkey's of a renewal":         func(r *iopv1.RenewRequest) { r.NkeySignature = renew.NkeySignature },
		"no proof of the new one":         func(r *iopv1.RenewRequest) { r.NewNkeySignature = nil },
		"the old one's proof for the new": func(r *iopv1.RenewRequest) { r.NewNkeySignature = r.NkeySignature },
		"an issuer's key":                 func(r *iopv1.RenewRequest) { r.NewNkey = try(NewAccountKey())(t).Public() },
	} {
		r := request()
		if change(r); verify(r) == nil {
			t.Errorf("%s: taken", name)
		}
	}
	if _, err := SignNewNKey(cert, key, try(NewCurveKey())(t), "edge1", "n1", 7, nonce); err == nil {
		t.Error("a curve key is asked for")
	}
}
