package natsbus

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"math/big"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nkeys"

	"github.com/iop-fabric/iop/wire"
)

// ca is an authority made for one test.
type ca struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newCA(t *testing.T) *ca {
	t.Helper()
	a := &ca{key: newKey(t)}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test authority"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	a.cert = sign(t, template, template, a.key, a.key)
	return a
}

func newKey(t *testing.T) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func sign(t *testing.T, template, parent *x509.Certificate, key, by *ecdsa.PrivateKey) *x509.Certificate {
	t.Helper()
	der, err := x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, by)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return cert
}

// issue makes a certificate for a server of this name, or with none for a client.
func (a *ca) issue(t *testing.T, host string, ends time.Time) tls.Certificate {
	t.Helper()
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: "test"},
		NotBefore: time.Now().Add(-2 * time.Hour), NotAfter: ends,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}
	if host != "" {
		template.DNSNames = []string{host}
		template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	}
	key := newKey(t)
	cert := sign(t, template, a.cert, key, a.key)
	return tls.Certificate{Certificate: [][]byte{cert.Raw}, PrivateKey: key, Leaf: cert}
}

func (a *ca) pool() *x509.CertPool {
	pool := x509.NewCertPool()
	pool.AddCert(a.cert)
	return pool
}

// broker is a real server in this process, with mutual TLS and one nkey user.
type broker struct {
	*server.Server
	ca   *ca
	user nkeys.KeyPair
}

func newBroker(t *testing.T, change ...func(*server.Options)) *broker {
	t.Helper()
	b := &broker{ca: newCA(t)}
	var err error
	if b.user, err = nkeys.CreateUser(); err != nil {
		t.Fatal(err)
	}
	o := &server.Options{
		Host: "127.0.0.1", Port: -1, NoSigs: true, NoLog: true,
		MaxPayload: wire.MaxMessage, TLS: true, TLSVerify: true, TLSHandshakeFirst: true, TLSTimeout: 10,
		TLSConfig: &tls.Config{
			MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{b.ca.issue(t, "localhost", time.Now().Add(time.Hour))},
			ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: b.ca.pool(),
		},
		Nkeys: []*server.NkeyUser{{Nkey: public(t, b.user), Permissions: &server.Permissions{
			Publish:   &server.SubjectPermission{Allow: []string{"t.>", "_INBOX.>", "$SYS.REQ.USER.INFO"}},
			Subscribe: &server.SubjectPermission{Allow: []string{"t.>", "_INBOX.>"}},
		}}},
	}
	for _, f := range change {
		f(o)
	}
	if b.Server, err = server.NewServer(o); err != nil {
		t.Fatal(err)
	}
	b.Start()
	t.Cleanup(func() {
		b.Shutdown()
		b.WaitForShutdown()
	})
	if !b.ReadyForConnections(hang) {
		t.Fatal("the server did not start")
	}
	return b
}

// options are those of a client that is let in.
func (b *broker) options(t *testing.T) Options {
	t.Helper()
	return Options{
		URLs: []string{b.ClientURL()}, Name: wire.NewToken() + wire.NewToken(), Inbox: "_INBOX." + wire.NewToken(),
		TLS: &tls.Config{
			MinVersion: tls.VersionTLS13, ServerName: "localhost", RootCAs: b.ca.pool(),
			Certificates: []tls.Certificate{b.ca.issue(t, "", time.Now().Add(time.Hour))},
		},
		NKeyPublic: public(t, b.user), Sign: b.user.Sign,
	}
}

func public(t *testing.T, k nkeys.KeyPair) string {
	t.Helper()
	p, err := k.PublicKey()
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// hang bounds a failure, never a success.
const hang = 30 * time.Second
