package identity

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"path/filepath"
	"time"
)

// Key is a certificate's key that has no certificate yet: a machine makes it
// itself, has its certificate signed, and never gives it away (B11).
type Key struct {
	redacted
	key func() *ecdsa.PrivateKey // sealed
}

// NewKey makes one.
func NewKey() (*Key, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("new key: %w", err)
	}
	return &Key{key: seal(key)}, nil
}

// LoadKey reads one that Save wrote.
func LoadKey(file string) (*Key, error) {
	key, err := loadKey(file)
	if err != nil {
		return nil, fileError("key", file, err)
	}
	return &Key{key: seal(key)}, nil
}

// Save writes it to file, mode 0600.
func (k *Key) Save(file string) error {
	data, err := encodeKey(k.key())
	if err != nil {
		return fileError("save key", file, err)
	}
	defer clear(data)
	if err := writeFile(file, data, 0o600); err != nil {
		return fileError("save key", file, err)
	}
	return nil
}

// Request asks for a certificate, in DER (PKCS #10). Who signs decides what it
// says; name is for people.
func (k *Key) Request(name string) ([]byte, error) {
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: pkix.Name{CommonName: name}}, k.key())
	if err != nil {
		return nil, fmt.Errorf("certificate request: %w", err)
	}
	return der, nil
}

// Certificate joins the key with the chain that was signed for it.
func (k *Key) Certificate(chain [][]byte) (*Certificate, error) {
	return NewCertificate(chain, k.key())
}

// ParseRequest returns the key that a certificate request proves to hold, of the
// one kind that CA.Sign takes. Whatever else it asks for is not read.
func ParseRequest(der []byte) (crypto.PublicKey, error) {
	r, err := x509.ParseCertificateRequest(der)
	if err != nil {
		return nil, errors.New("certificate request: it does not parse as PKCS #10")
	}
	if ec, ok := r.PublicKey.(*ecdsa.PublicKey); !ok || ec.Curve != elliptic.P256() {
		return nil, errors.New("certificate request: the key is of another kind; want ECDSA P-256")
	}
	if r.CheckSignature() != nil {
		return nil, errors.New("certificate request: it is not signed by its own key")
	}
	return r.PublicKey, nil
}

// Fingerprint is what a certificate is pinned by: the SHA-256 of its DER.
func Fingerprint(der []byte) [sha256.Size]byte { return sha256.Sum256(der) }

// LoadCAFiles reads a CA from files of any name; see LoadCA.
func LoadCAFiles(certFile, keyFile string) (*CA, error) { return loadCA(certFile, keyFile) }

// LoadCA reads ca.pem and ca.key from dir.
func LoadCA(dir string) (*CA, error) {
	return loadCA(filepath.Join(dir, caCertFile), filepath.Join(dir, caKeyFile))
}

// DER is the CA's certificate.
func (ca *CA) DER() []byte { return ca.cert.Raw }

// TrustDomain is the one the CA vouches for; empty where its certificate is
// constrained to none.
func (ca *CA) TrustDomain() string {
	if len(ca.cert.PermittedURIDomains) == 0 {
		return ""
	}
	return ca.cert.PermittedURIDomains[0]
}

// Renew signs a certificate anew: the same name and key, other hosts or a later
// end. A crash while it is saved leaves a pair that fits.
func (ca *CA) Renew(c *Certificate, hosts []string, ttl time.Duration) (*Certificate, error) {
	der, err := ca.Sign(c.key.Public(), c.ID(), hosts, ttl)
	if err != nil {
		return nil, err
	}
	return NewCertificate(ca.Chain(der), c.key.key())
}

// EncodeChain writes a chain, DER and leaf first, as PEM.
func EncodeChain(chain [][]byte) []byte { return encodeCertificates(chain) }

// DecodeChain reads what EncodeChain wrote.
func DecodeChain(pem []byte) ([][]byte, error) {
	certs, err := decodeCertificates(pem)
	if err != nil {
		return nil, err
	}
	chain := make([][]byte, len(certs))
	for i, c := range certs {
		chain[i] = c.Raw
	}
	return chain, nil
}
