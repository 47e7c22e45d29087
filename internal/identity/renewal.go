package identity

import (
	"bytes"
	"crypto/x509"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/iop-fabric/iop/wire/iopv1"
)

// labelRenew is that of the proof with which a Node asks for a new certificate.
const labelRenew = "iop renew v1"

// labelNKey is that of the proof with which a Node asks for another nkey of its own.
const labelNKey = "iop nkey v1"

// RenewalDue is when a certificate comes into the last third of its life, and is
// to be replaced (B8).
func RenewalDue(c *x509.Certificate) time.Time {
	return c.NotAfter.Add(-c.NotAfter.Sub(c.NotBefore) / 3)
}

func renewParts(edge, node string, gen uint64, nonce []byte) [][]byte {
	return [][]byte{[]byte(edge), []byte(node), binary.BigEndian.AppendUint64(nil, gen), nonce}
}

// SignRenew makes the request of the session's Node for a new certificate: the same
// name and the same key, so that none has to leave the Node, and none can be put in
// its place on the way.
func SignRenew(cert *Certificate, nkey *NKey, edge, node string, gen uint64, nonce []byte) (*iopv1.RenewRequest, error) {
	return signRenewal(cert, nkey, nil, labelRenew, renewParts(edge, node, gen, nonce), nonce)
}

// SignNewNKey makes the request of the session's Node to register another nkey beside
// the one it has: proved by the certificate and by both.
func SignNewNKey(cert *Certificate, nkey, next *NKey, edge, node string, gen uint64, nonce []byte) (*iopv1.RenewRequest, error) {
	if err := next.want(kindUser); err != nil {
		return nil, fmt.Errorf("sign renewal: new nkey: %w", err)
	}
	return signRenewal(cert, nkey, next, labelNKey, append(renewParts(edge, node, gen, nonce), []byte(next.Public())), nonce)
}

func signRenewal(cert *Certificate, nkey, next *NKey, label string, parts [][]byte, nonce []byte) (*iopv1.RenewRequest, error) {
	if err := nkey.want(kindUser); err != nil {
		return nil, fmt.Errorf("sign renewal: %w", err)
	}
	byCert, err := cert.Sign(label, parts...)
	if err != nil {
		return nil, fmt.Errorf("sign renewal: %w", err)
	}
	byNKey, err := nkey.SignLabelled(label, parts...)
	if err != nil {
		return nil, fmt.Errorf("sign renewal: %w", err)
	}
	r := &iopv1.RenewRequest{Nonce: nonce, CertificateChain: cert.Chain, CertificateSignature: byCert, NkeySignature: byNKey}
	if next == nil {
		return r, nil
	}
	r.NewNkey = next.Public()
	if r.NewNkeySignature, err = next.SignLabelled(label, parts...); err != nil {
		return nil, fmt.Errorf("sign renewal: %w", err)
	}
	return r, nil
}

// VerifyRenew checks that r was made by the workload node of edge in the session of
// generation gen, all three known from the transport, with the certificate it has
// now and the nkey that is given. It returns that certificate.
func VerifyRenew(pool *x509.CertPool, nkeyPublic, edge, node string, gen uint64, r *iopv1.RenewRequest) (ID, *x509.Certificate, error) {
	if n := len(r.GetNonce()); n != NonceSize {
		return ID{}, nil, fmt.Errorf("renewal: nonce of %d bytes, want %d", n, NonceSize)
	}
	id, leaf, err := VerifyChain(pool, r.GetCertificateChain(), RoleNode, false)
	switch {
	case err != nil:
		return ID{}, nil, fmt.Errorf("renewal: %w", err)
	case id.Edge != edge:
		return ID{}, nil, errors.New("renewal: certificate of another edge")
	case id.Name != node:
		return ID{}, nil, errors.New("renewal: certificate of another node")
	}
	label, parts := labelRenew, renewParts(edge, node, gen, r.GetNonce())
	if next := r.GetNewNkey(); next != "" {
		if err := CheckPublicUserKey(next); err != nil {
			return ID{}, nil, fmt.Errorf("renewal: new nkey: %w", err)
		}
		label, parts = labelNKey, append(parts, []byte(next))
		if err := VerifyNKey(next, r.GetNewNkeySignature(), label, parts...); err != nil {
			return ID{}, nil, fmt.Errorf("renewal: new nkey: %w", err)
		}
	}
	if err := VerifySignature(leaf, r.GetCertificateSignature(), label, parts...); err != nil {
		return ID{}, nil, fmt.Errorf("renewal: %w", err)
	}
	if err := VerifyNKey(nkeyPublic, r.GetNkeySignature(), label, parts...); err != nil {
		return ID{}, nil, fmt.Errorf("renewal: %w", err)
	}
	return id, leaf, nil
}

// Renewed checks the answer to a renewal: a chain of our own CA, for our name and our
// key, that is good for longer, or by the root that signs now where ours is not. It
// returns the certificate to be used from now on.
func (c *Certificate) Renewed(t Trust, chain [][]byte) (*Certificate, error) {
	id, leaf, err := VerifyChain(t.Pool(), chain, c.id.Role, false)
	switch {
	case err != nil:
		return nil, fmt.Errorf("renewal: %w", err)
	case id != c.id:
		return nil, fmt.Errorf("renewal: a certificate of %s, want %s", id, c.id)
	case t.Outdated(c.Leaf) && !t.Outdated(leaf):
	case !leaf.NotAfter.After(c.Leaf.NotAfter):
		return nil, errors.New("renewal: a certificate that is good no longer than the one there is")
	}
	return NewCertificate(chain, c.key.key())
}

// SameAs reports whether both are one certificate.
func (c *Certificate) SameAs(other *Certificate) bool {
	return slices.EqualFunc(c.Chain, other.Chain, bytes.Equal)
}

// SaveChain replaces the certificate's file alone: its key stays as it is, so there
// is no moment in which the two do not fit.
func (c *Certificate) SaveChain(certFile string) error {
	if err := writeFile(certFile, encodeCertificates(c.Chain), 0o644); err != nil {
		return fileError("save certificate", certFile, err)
	}
	return nil
}

// Hosts are the names and addresses that a certificate is good for.
func (c *Certificate) Hosts() []string {
	hosts := append([]string(nil), c.Leaf.DNSNames...)
	for _, ip := range c.Leaf.IPAddresses {
		hosts = append(hosts, ip.String())
	}
	return hosts
}

// Until is when the CA's own certificate ends.
func (ca *CA) Until() time.Time { return ca.cert.NotAfter }
