package identity

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
)

// maxChain bounds the certificates a peer may show.
const maxChain = 8

// Certificate is a workload's chain and its private key.
type Certificate struct {
	redacted
	Chain [][]byte          // DER, leaf first
	Leaf  *x509.Certificate // Chain[0], parsed
	id    ID
	key   signer
}

// signer keeps the key out of what prints a tls.Certificate (I5).
type signer struct {
	redacted
	key func() *ecdsa.PrivateKey // sealed
}

// Public returns the public half.
func (s signer) Public() crypto.PublicKey { return s.key().Public() }

// Sign signs a digest.
func (s signer) Sign(r io.Reader, digest []byte, opts crypto.SignerOpts) ([]byte, error) {
	return s.key().Sign(r, digest, opts)
}

// NewCertificate joins a chain (DER, leaf first) and the key its leaf is for:
// what a machine does that made its key itself and had it signed (B11).
func NewCertificate(chain [][]byte, key *ecdsa.PrivateKey) (*Certificate, error) {
	certs, err := parseChain(chain)
	if err != nil {
		return nil, err
	}
	if key == nil || !key.PublicKey.Equal(certs[0].PublicKey) {
		return nil, errors.New("the key is not the key of the certificate")
	}
	id, err := leafID(certs[0])
	if err != nil {
		return nil, err
	}
	return &Certificate{Chain: chain, Leaf: certs[0], id: id, key: signer{key: seal(key)}}, nil
}

// LoadCertificate reads a chain and its key. Every error names the file at fault;
// all of them are fatal local errors (S4). That a certificate has expired is not:
// the clock may be wrong, and peers will say so.
func LoadCertificate(certFile, keyFile string) (*Certificate, error) {
	certs, _, err := LoadChain(certFile)
	if err != nil {
		return nil, err
	}
	chain := make([][]byte, len(certs))
	for i, c := range certs {
		chain[i] = c.Raw
	}
	key, err := loadKey(keyFile)
	if err != nil {
		err = fileError("key", keyFile, err)
	} else if cert, mismatch := NewCertificate(chain, key); mismatch == nil {
		return cert, nil
	} else {
		err = fileError("key", keyFile, fmt.Errorf("%w in %s", mismatch, certFile))
	}
	// A new pair is written as Save does it: where that was cut off, the key is here.
	if key, next := loadKey(keyFile + nextSuffix); next == nil {
		if cert, mismatch := NewCertificate(chain, key); mismatch == nil {
			return cert, nil
		}
	}
	return nil, err
}

// LoadChain reads a chain, leaf first, without its key, and who it names.
func LoadChain(certFile string) ([]*x509.Certificate, ID, error) {
	certs, err := loadCertificates(certFile)
	if err != nil {
		return nil, ID{}, fileError("certificate", certFile, err)
	}
	id, err := leafID(certs[0])
	if err != nil {
		return nil, ID{}, fileError("certificate", certFile, err)
	}
	return certs, id, nil
}

func loadCertificates(file string) ([]*x509.Certificate, error) {
	data, err := readFile(file)
	if err != nil {
		return nil, err
	}
	return decodeCertificates(data)
}

func loadKey(file string) (*ecdsa.PrivateKey, error) {
	data, err := readSecret(file)
	if err != nil {
		return nil, err
	}
	defer clear(data)
	return decodeKey(data)
}

// nextSuffix is that of a key whose certificate is not in its place yet.
const nextSuffix = ".next"

// Save writes the chain and, mode 0600, the key. It may be cut off anywhere: the key
// waits beside the one it follows until its certificate is there, and LoadCertificate
// finds it.
func (c *Certificate) Save(certFile, keyFile string) error {
	for _, step := range c.saving(certFile, keyFile) {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

// saving are the steps of Save; after each of them there is a pair, if there was one.
func (c *Certificate) saving(certFile, keyFile string) []func() error {
	return []func() error{
		func() error { return SettleKey(certFile, keyFile) }, // or the next step would overwrite the key that serves
		func() error {
			key, err := encodeKey(c.key.key())
			if err != nil {
				return fileError("save key", keyFile, err)
			}
			defer clear(key)
			if err := writeFile(keyFile+nextSuffix, key, 0o600); err != nil {
				return fileError("save key", keyFile, err)
			}
			return nil
		},
		func() error { return c.SaveChain(certFile) },
		func() error { return moveKey(keyFile) },
	}
}

// SettleKey puts the key of the certificate into its place, where a Save was cut off.
func SettleKey(certFile, keyFile string) error {
	next, err := loadKey(keyFile + nextSuffix)
	if err != nil {
		return nil //nolint:nilerr // there is none, or it is no key: nothing to settle
	}
	certs, err := loadCertificates(certFile)
	if err != nil || !next.PublicKey.Equal(certs[0].PublicKey) {
		return nil //nolint:nilerr // its certificate was never written: the next Save replaces it
	}
	return moveKey(keyFile)
}

func moveKey(keyFile string) error {
	if err := os.Rename(keyFile+nextSuffix, keyFile); err != nil {
		return fileError("save key", keyFile, err)
	}
	return syncDir(filepath.Dir(keyFile))
}

// TLS is the certificate for crypto/tls.
func (c *Certificate) TLS() tls.Certificate {
	return tls.Certificate{Certificate: c.Chain, PrivateKey: c.key, Leaf: c.Leaf}
}

// ID is the workload the certificate names.
func (c *Certificate) ID() ID { return c.id }

// Sign signs the transcript of label and parts with the certificate's key: ECDSA
// in ASN.1 over SHA-256.
func (c *Certificate) Sign(label string, parts ...[]byte) ([]byte, error) {
	digest := sha256.Sum256(transcript(label, parts))
	return c.key.Sign(rand.Reader, digest[:], crypto.SHA256)
}

// VerifySignature checks what Certificate.Sign made.
func VerifySignature(leaf *x509.Certificate, sig []byte, label string, parts ...[]byte) error {
	if leaf == nil {
		return errors.New("certificate signature: no certificate")
	}
	pub, ok := leaf.PublicKey.(*ecdsa.PublicKey)
	if !ok {
		return errors.New("certificate signature: the certificate's key is not ECDSA")
	}
	digest := sha256.Sum256(transcript(label, parts))
	if !ecdsa.VerifyASN1(pub, digest[:], sig) {
		return errors.New("certificate signature: it is not by the certificate's key over this message")
	}
	return nil
}

// VerifyChain checks I1 and returns who the chain names. chain is DER, leaf
// first; role is the role required; server says that the peer was dialled and
// must be good for server authentication, otherwise for client authentication.
func VerifyChain(pool *x509.CertPool, chain [][]byte, role Role, server bool) (ID, *x509.Certificate, error) {
	certs, err := parseChain(chain)
	if err != nil {
		return ID{}, nil, err
	}
	if pool == nil {
		// x509 would take the system's roots instead.
		return ID{}, nil, errors.New("certificate chain: no CA to check it against")
	}
	usage := x509.ExtKeyUsageClientAuth
	if server {
		usage = x509.ExtKeyUsageServerAuth
	}
	between := x509.NewCertPool()
	for _, c := range certs[1:] {
		between.AddCert(c)
	}
	opts := x509.VerifyOptions{Roots: pool, Intermediates: between, KeyUsages: []x509.ExtKeyUsage{usage}}
	if _, err := certs[0].Verify(opts); err != nil {
		return ID{}, nil, fmt.Errorf("certificate chain: %w", err)
	}
	id, err := leafID(certs[0])
	if err != nil {
		return ID{}, nil, err
	}
	if id.Role != role {
		return ID{}, nil, fmt.Errorf("certificate of a %s where a %s is wanted", id.Role, role)
	}
	return id, certs[0], nil
}

func parseChain(chain [][]byte) ([]*x509.Certificate, error) {
	if len(chain) == 0 {
		return nil, errors.New("certificate chain: no certificate")
	}
	if len(chain) > maxChain {
		return nil, fmt.Errorf("certificate chain: %d certificates, at most %d are allowed", len(chain), maxChain)
	}
	certs := make([]*x509.Certificate, len(chain))
	for i, der := range chain {
		c, err := x509.ParseCertificate(der)
		if err != nil {
			return nil, fmt.Errorf("certificate chain: certificate %d: %w", i+1, err)
		}
		certs[i] = c
	}
	return certs, nil
}

// leafID returns the one name of a certificate; two names are as bad as none (B2).
func leafID(leaf *x509.Certificate) (ID, error) {
	if n := len(leaf.URIs); n != 1 {
		return ID{}, fmt.Errorf("certificate with %d URI names, want exactly one spiffe:// name", n)
	}
	return ParseID(leaf.URIs[0])
}
