package identity

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"math/big"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"time"

	"github.com/iop-fabric/iop/wire"
)

// Files of a CA within its folder.
const (
	caCertFile = "ca.pem"
	caKeyFile  = "ca.key"
)

// backdate lets a certificate serve at once where the peer's clock is behind.
const backdate = time.Hour

// CA signs the certificates of one trust domain. Only the authority holds one.
type CA struct {
	redacted
	cert    *x509.Certificate
	key     func() *ecdsa.PrivateKey // sealed
	crosses [][]byte                 // its key, certified by the CA before it
}

// NewCA makes a CA for trustDomain that is good for ttl. Its certificate carries
// the trust domain as a name constraint, so it can vouch for no other.
func NewCA(trustDomain string, ttl time.Duration) (*CA, error) {
	if err := wire.CheckTrustDomain(trustDomain); err != nil {
		return nil, fmt.Errorf("new CA: %w", err)
	}
	if ttl <= 0 {
		return nil, fmt.Errorf("new CA: lifetime %s is not positive", ttl)
	}
	now := time.Now()
	return newCA([]string{trustDomain}, "iop CA "+trustDomain, now.Add(-backdate), now.Add(ttl))
}

func newCA(domains []string, name string, begin, end time.Time) (*CA, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("new CA: %w", err)
	}
	template := &x509.Certificate{
		SerialNumber:                newSerial(),
		Subject:                     pkix.Name{CommonName: name},
		NotBefore:                   begin,
		NotAfter:                    end,
		KeyUsage:                    x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
		BasicConstraintsValid:       true,
		IsCA:                        true,
		MaxPathLen:                  1, // room for its successor, which it certifies
		PermittedURIDomains:         domains,
		PermittedDNSDomainsCritical: true, // the whole extension is critical
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("new CA: %w", err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("new CA: %w", err)
	}
	return &CA{cert: cert, key: seal(key)}, nil
}

// loadCA reads a CA: of the certificates in certFile it is the one whose key is in
// keyFile.
func loadCA(certFile, keyFile string) (*CA, error) {
	t, err := LoadTrust(certFile)
	if err != nil {
		return nil, err
	}
	key, err := loadKey(keyFile)
	if err != nil {
		return nil, fileError("CA key", keyFile, err)
	}
	ca, err := t.ca(key)
	if err != nil {
		return nil, fileError("CA key", keyFile, fmt.Errorf("%w in %s", err, certFile))
	}
	return ca, nil
}

// Save writes ca.pem and ca.key into dir, which it makes if need be.
func (ca *CA) Save(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("save CA: %w", err)
	}
	if err := ca.saveKey(filepath.Join(dir, caKeyFile)); err != nil {
		return err
	}
	if err := writeFile(filepath.Join(dir, caCertFile), ca.PEM(), 0o644); err != nil {
		return fmt.Errorf("save CA certificate: %w", err)
	}
	return nil
}

// Pool trusts this CA alone.
func (ca *CA) Pool() *x509.CertPool {
	pool := x509.NewCertPool()
	pool.AddCert(ca.cert)
	return pool
}

// PEM is the CA's certificate as it stands in ca.pem.
func (ca *CA) PEM() []byte { return encodeCertificates([][]byte{ca.cert.Raw}) }

// Issue makes a key and signs its certificate; see Sign for id and hosts.
func (ca *CA) Issue(id ID, hosts []string, ttl time.Duration) (*Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("issue %s: %w", id, err)
	}
	der, err := ca.Sign(key.Public(), id, hosts, ttl)
	if err != nil {
		return nil, err
	}
	return NewCertificate(ca.Chain(der), key)
}

// Sign signs a certificate for a key that stays with its owner and returns it in
// DER. hosts are the DNS names and IP addresses a broker or a leaf is dialled at;
// no other role serves TLS to peers, so no other role may have any. The
// certificate ends no later than the CA.
func (ca *CA) Sign(pub crypto.PublicKey, id ID, hosts []string, ttl time.Duration) ([]byte, error) {
	template, err := ca.template(pub, id, hosts, ttl)
	if err != nil {
		return nil, fmt.Errorf("sign certificate of %s: %w", id, err)
	}
	der, err := x509.CreateCertificate(rand.Reader, template, ca.cert, pub, ca.key())
	if err != nil {
		return nil, fmt.Errorf("sign certificate of %s: %w", id, err)
	}
	return der, nil
}

func (ca *CA) template(pub crypto.PublicKey, id ID, hosts []string, ttl time.Duration) (*x509.Certificate, error) {
	if err := id.check(); err != nil {
		return nil, err
	}
	if domains := ca.cert.PermittedURIDomains; len(domains) > 0 && domains[0] != id.TrustDomain {
		return nil, fmt.Errorf("this CA vouches for trust domain %q only", domains[0])
	}
	if ec, ok := pub.(*ecdsa.PublicKey); !ok || ec.Curve != elliptic.P256() {
		return nil, errors.New("the public key is of another kind; want ECDSA P-256")
	}
	if ttl <= 0 {
		return nil, fmt.Errorf("lifetime %s is not positive", ttl)
	}
	now := time.Now()
	end := now.Add(ttl)
	if end.After(ca.cert.NotAfter) {
		end = ca.cert.NotAfter
	}
	template := &x509.Certificate{
		SerialNumber:          newSerial(),
		Subject:               pkix.Name{CommonName: id.Name},
		NotBefore:             now.Add(-backdate),
		NotAfter:              end,
		KeyUsage:              x509.KeyUsageDigitalSignature,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
		BasicConstraintsValid: true,
		URIs:                  []*url.URL{id.URI()},
	}
	switch {
	case id.Role != RoleBroker && id.Role != RoleLeaf && len(hosts) > 0:
		return nil, fmt.Errorf("only a broker and a leaf are dialled at a host, a %s is not", id.Role)
	case id.Role != RoleBroker && len(hosts) == 0:
		return template, nil
	case len(hosts) == 0:
		return nil, errors.New("a broker needs at least one DNS name or IP address it is dialled at")
	}
	template.ExtKeyUsage = append(template.ExtKeyUsage, x509.ExtKeyUsageServerAuth)
	for _, host := range hosts {
		if host == "" {
			return nil, errors.New("a host is empty")
		}
		if ip := net.ParseIP(host); ip != nil {
			template.IPAddresses = append(template.IPAddresses, ip)
		} else {
			template.DNSNames = append(template.DNSNames, host)
		}
	}
	return template, nil
}

// newSerial returns 128 random bits, never zero.
func newSerial() *big.Int {
	var b [16]byte
	rand.Read(b[:]) // never fails
	n := new(big.Int).SetBytes(b[:])
	if n.Sign() == 0 {
		n.SetInt64(1)
	}
	return n
}

func isCA(c *x509.Certificate) bool { return c.BasicConstraintsValid && c.IsCA }

// LoadPool reads the CA certificates of a trust store.
func LoadPool(caFile string) (*x509.CertPool, error) {
	t, err := LoadTrust(caFile)
	if err != nil {
		return nil, err
	}
	return t.Pool(), nil
}
