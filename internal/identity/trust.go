package identity

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/iop-fabric/iop/wire/iopv1"
)

const (
	// blockTrust is the bundle's, at the end of a CA file: what knows nothing of it,
	// such as a nats-server of its own, reads the certificates before it.
	blockTrust = "IOP TRUST BUNDLE"
	labelTrust = "iop trust v1"
	// maxRoots of one fabric: the old and the new one, and room.
	maxRoots = 4
)

// Trust is a CA file: the roots that a party trusts and, once the fabric's CA was
// ever exchanged, the bundle that says so (I6).
type Trust struct {
	roots  []*x509.Certificate
	bundle *iopv1.TrustBundle
}

// LoadTrust reads a CA file.
func LoadTrust(file string) (Trust, error) {
	data, err := readFile(file)
	if err != nil {
		return Trust{}, fileError("CA certificates", file, err)
	}
	t, err := ParseTrust(data)
	if err != nil {
		return Trust{}, fileError("CA certificates", file, err)
	}
	return t, nil
}

// ParseTrust reads what PEM wrote, or certificates alone.
func ParseTrust(data []byte) (t Trust, err error) {
	certificates := data
	if at := bytes.Index(data, []byte("-----BEGIN "+blockTrust)); at >= 0 {
		block, rest := pem.Decode(data[at:])
		t.bundle = &iopv1.TrustBundle{}
		if block == nil || len(bytes.TrimSpace(rest)) > 0 || t.bundle.UnmarshalVT(block.Bytes) != nil {
			return Trust{}, errors.New("the trust bundle at its end is cut short, or something follows it: copy the whole file")
		}
		certificates = data[:at]
	}
	if t.roots, err = decodeCertificates(certificates); err != nil {
		return Trust{}, err
	}
	for i, c := range t.roots {
		if !isCA(c) {
			return Trust{}, fmt.Errorf("certificate %d is not of a CA", i+1)
		}
	}
	if t.bundle == nil {
		return t, nil
	}
	if !slices.EqualFunc(t.roots, t.bundle.GetRoots(), func(c *x509.Certificate, der []byte) bool { return bytes.Equal(c.Raw, der) }) || t.Signer() == nil {
		return Trust{}, errors.New("its certificates are not those of the trust bundle at its end: copy the whole file, from one source")
	}
	return t, nil
}

// PEM is the CA file.
func (t Trust) PEM() []byte {
	var out []byte
	for _, c := range t.roots {
		out = append(out, encodeCertificates([][]byte{c.Raw})...)
	}
	if t.bundle != nil {
		data, err := t.bundle.MarshalVT()
		if err != nil {
			panic("BUG: identity: a trust bundle cannot be written: " + err.Error())
		}
		out = append(out, pem.EncodeToMemory(&pem.Block{Type: blockTrust, Bytes: data})...)
	}
	return out
}

// Save replaces the CA file.
func (t Trust) Save(file string) error {
	if err := writeFile(file, t.PEM(), 0o644); err != nil {
		return fileError("save CA certificates", file, err)
	}
	return nil
}

// Pool trusts every root.
func (t Trust) Pool() *x509.CertPool {
	pool := x509.NewCertPool()
	for _, c := range t.roots {
		pool.AddCert(c)
	}
	return pool
}

// Roots are the trusted ones.
func (t Trust) Roots() []*x509.Certificate { return t.roots }

// Bundle is what others may Learn; nil: the CA was never exchanged.
func (t Trust) Bundle() *iopv1.TrustBundle { return t.bundle }

// Exchanging reports whether there are two roots: the time between the beginning
// and the end of a CA's exchange.
func (t Trust) Exchanging() bool { return len(t.roots) > 1 }

// Signer is the root that signs certificates now; nil where no bundle says so.
func (t Trust) Signer() *x509.Certificate {
	if t.bundle == nil {
		return nil
	}
	return byFingerprint(t.roots, t.bundle.GetSigner())
}

// Outdated reports whether a certificate is of another root than the one that signs
// now.
func (t Trust) Outdated(leaf *x509.Certificate) bool {
	signer := t.Signer()
	return signer != nil && IssuerOf(leaf) != RootOf(signer)
}

// IssuerOf names the key that signed a certificate, and RootOf a root's own key, so
// that the two can be compared.
func IssuerOf(leaf *x509.Certificate) string { return hex.EncodeToString(leaf.AuthorityKeyId) }

// RootOf names a root's own key; see IssuerOf.
func RootOf(root *x509.Certificate) string { return hex.EncodeToString(root.SubjectKeyId) }

func byFingerprint(certs []*x509.Certificate, sum []byte) *x509.Certificate {
	for _, c := range certs {
		if of := Fingerprint(c.Raw); bytes.Equal(of[:], sum) {
			return c
		}
	}
	return nil
}

func has(certs []*x509.Certificate, c *x509.Certificate) bool {
	return slices.ContainsFunc(certs, c.Equal)
}

// newest is the root that was made last.
func newest(certs []*x509.Certificate) *x509.Certificate {
	return slices.MaxFunc(certs, func(a, b *x509.Certificate) int { return a.NotBefore.Compare(b.NotBefore) })
}

// ErrPastTrust: the bundle is older than what is trusted, and changes nothing.
var ErrPastTrust = errors.New("trust bundle: it is older than what is trusted already")

// Learn is I6: what is trusted after a bundle that came from anywhere.
func (t Trust) Learn(b *iopv1.TrustBundle) (next Trust, changed bool, err error) {
	next.bundle = proto.CloneOf(b) // the message's own memory may be used again
	if n := len(b.GetRoots()); n == 0 || n > maxRoots || len(b.GetSignatures()) != n {
		return t, false, errors.New("trust bundle: no roots, too many, or not a place for a signature of each")
	}
	for _, der := range b.GetRoots() {
		c, err := x509.ParseCertificate(der)
		if err != nil || !isCA(c) || c.CheckSignatureFrom(c) != nil {
			return t, false, errors.New("trust bundle: a root is no CA's own certificate")
		}
		next.roots = append(next.roots, c)
	}
	if next.Signer() == nil {
		return t, false, errors.New("trust bundle: who signs now is none of its roots")
	}
	if !t.signed(next) {
		return t, false, errors.New("trust bundle: it is not signed by a root that is trusted here and stays so")
	}
	last := newest(t.roots)
	for _, c := range next.roots {
		switch {
		case has(t.roots, c):
		case !c.NotBefore.After(last.NotBefore):
			return t, false, ErrPastTrust
		case !slices.Equal(c.PermittedURIDomains, last.PermittedURIDomains):
			return t, false, errors.New("trust bundle: a root is of another trust domain")
		}
	}
	if newest(next.roots).NotBefore.Before(last.NotBefore) {
		return t, false, ErrPastTrust
	}
	if was := t.Signer(); was != nil && next.Signer().NotBefore.Before(was.NotBefore) {
		return t, false, ErrPastTrust
	}
	return next, !next.SameAs(t), nil
}

// signed reports whether one of our roots, that is among the next ones, signed them.
func (t Trust) signed(next Trust) bool {
	for i, c := range next.roots {
		if has(t.roots, c) && VerifySignature(c, next.bundle.GetSignatures()[i], labelTrust, trustParts(next.bundle)...) == nil {
			return true
		}
	}
	return false
}

// SameAs reports whether both trust the same roots, the same one of which signs.
func (t Trust) SameAs(o Trust) bool {
	return slices.EqualFunc(t.roots, o.roots, (*x509.Certificate).Equal) && bytes.Equal(t.bundle.GetSigner(), o.bundle.GetSigner())
}

// trustParts is what the signatures of a bundle cover.
func trustParts(b *iopv1.TrustBundle) [][]byte {
	roots := len(b.GetRoots())
	parts := append([][]byte{b.GetSigner(), {byte(roots)}}, b.GetRoots()...)
	return append(parts, b.GetCrosses()...)
}

// newTrust makes the CA file in which signer signs; keys are those at hand.
func newTrust(roots []*x509.Certificate, signer *CA, crosses [][]byte, keys ...*CA) (t Trust, err error) {
	sum := sha256.Sum256(signer.cert.Raw)
	t = Trust{roots: roots, bundle: &iopv1.TrustBundle{Signer: sum[:], Crosses: crosses}}
	for _, c := range roots {
		t.bundle.Roots = append(t.bundle.Roots, c.Raw)
	}
	digest := sha256.Sum256(transcript(labelTrust, trustParts(t.bundle)))
	for _, c := range roots {
		var sig []byte
		for _, k := range keys {
			if !k.cert.Equal(c) {
				continue
			}
			if sig, err = ecdsa.SignASN1(rand.Reader, k.key(), digest[:]); err != nil {
				return Trust{}, fmt.Errorf("trust bundle: %w", err)
			}
		}
		t.bundle.Signatures = append(t.bundle.Signatures, sig)
	}
	return t, nil
}

// successor makes the CA that is to follow: of the same trust domain, and newer.
func (ca *CA) successor(ttl time.Duration) (*CA, error) {
	begin := time.Now().Add(-backdate)
	if earliest := ca.cert.NotBefore.Add(time.Second); begin.Before(earliest) {
		begin = earliest
	}
	return newCA(ca.cert.PermittedURIDomains, ca.cert.Subject.CommonName, begin, time.Now().Add(ttl))
}

// cross certifies the key of another CA, so that who knows only this one believes it.
func (ca *CA) cross(next *CA) ([]byte, error) {
	template := *next.cert
	template.SerialNumber, template.AuthorityKeyId = newSerial(), nil
	der, err := x509.CreateCertificate(rand.Reader, &template, ca.cert, &next.key().PublicKey, ca.key())
	if err != nil {
		return nil, fmt.Errorf("cross-sign the new CA: %w", err)
	}
	return der, nil
}

// Chain is the chain of a certificate that this CA has signed: while the CA is being
// exchanged, with what leads those who know only the old one to the new.
func (ca *CA) Chain(der []byte) [][]byte { return append([][]byte{der}, ca.crosses...) }

// Certificate is the CA's own.
func (ca *CA) Certificate() *x509.Certificate { return ca.cert }

// Trust trusts this CA alone.
func (ca *CA) Trust() Trust { return Trust{roots: []*x509.Certificate{ca.cert}} }

// Only is the root of that fingerprint alone.
func (t Trust) Only(fingerprint [sha256.Size]byte) (Trust, bool) {
	c := byFingerprint(t.roots, fingerprint[:])
	return Trust{roots: []*x509.Certificate{c}}, c != nil
}
