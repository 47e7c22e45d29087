package broker

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/iop-fabric/iop/internal/identity"
	"github.com/iop-fabric/iop/subjects"
)

// Every check of B2 refuses alone, on the real server, and is counted under its
// own reason; the same dial without the fault is let in.
// Contract: B2
func TestEachCheckRefusesAlone(t *testing.T) {
	f := newFixture(t)
	n1, n2 := f.member("edge1", "node", "n1"), f.member("edge1", "node", "n2")
	f.start()
	stranger := must(identity.NewUserKey())
	foreign := newTestCA()

	// The signature of an older nonce, kept for later.
	var mu sync.Mutex
	var old []byte
	first := f.dialer("edge1", "node", "n1", n1)
	first.auth = nats.Nkey(n1.Public(), func(nonce []byte) ([]byte, error) {
		mu.Lock()
		defer mu.Unlock()
		sig, err := n1.Sign(nonce)
		old = sig
		return sig, err
	})
	nc, _ := f.node(first)
	nc.Close()

	const uri = "spiffe://iop/edge1/node/n1"
	for _, c := range []struct {
		name   string
		reason refusal
		spoil  func(d *dialer)
		auth   bool // the client sees an authorization violation
	}{
		{"no certificate", refusedCertificate, func(d *dialer) { d.tls.Certificates = nil }, false},
		{"foreign CA", refusedCertificate, func(d *dialer) {
			cert := foreign.client(uri)
			d.tls.Certificates = nil
			d.tls.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &cert, nil }
		}, false},
		{"server certificate only", refusedCertificate, func(d *dialer) {
			chain, key := f.ca.issueRaw([]x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, uri)
			d.tls.Certificates = []tls.Certificate{{Certificate: chain, PrivateKey: key}}
		}, false},
		{"TLS 1.2", refusedTLSVersion, func(d *dialer) {
			d.tls.MinVersion, d.tls.MaxVersion = tls.VersionTLS12, tls.VersionTLS12
		}, false},
		{"role service", refusedRole, func(d *dialer) { d.tls.Certificates[0] = f.ca.client("spiffe://iop/-/service/n1") }, true},
		{"role broker", refusedRole, func(d *dialer) { d.tls.Certificates[0] = f.ca.client("spiffe://iop/-/broker/n1") }, true},
		{"role leaf", refusedRole, func(d *dialer) { d.tls.Certificates[0] = f.ca.client("spiffe://iop/edge1/leaf/n1") }, true},
		{"another's name", refusedNKey, func(d *dialer) { d.tls.Certificates[0] = f.ca.client("spiffe://iop/edge1/node/n2") }, true},
		{"another's nkey", refusedNKey, func(d *dialer) { d.auth = nats.Nkey(n2.Public(), n2.Sign) }, true},
		{"unregistered nkey", refusedNKey, func(d *dialer) { d.auth = nats.Nkey(stranger.Public(), stranger.Sign) }, true},
		{"another trust domain", refusedDomain, func(d *dialer) { d.tls.Certificates[0] = f.ca.client("spiffe://other/edge1/node/n1") }, true},
		{"two SANs", refusedSAN, func(d *dialer) { d.tls.Certificates[0] = f.ca.client(uri, "spiffe://iop/edge1/node/n2") }, true},
		{"no SAN", refusedSAN, func(d *dialer) { d.tls.Certificates[0] = f.ca.client() }, true},
		{"SAN with a wildcard", refusedSAN, func(d *dialer) { d.tls.Certificates[0] = f.ca.client("spiffe://iop/edge1/node/*") }, true},
		{"SAN with a dot", refusedSAN, func(d *dialer) { d.tls.Certificates[0] = f.ca.client("spiffe://iop/edge1/node/a.b") }, true},
		{"bad signature", refusedSignature, func(d *dialer) {
			d.auth = nats.Nkey(n1.Public(), func(nonce []byte) ([]byte, error) { return n1.Sign(append(nonce, 'x')) })
		}, true},
		{"another's signature", refusedSignature, func(d *dialer) { d.auth = nats.Nkey(n1.Public(), stranger.Sign) }, true},
		{"replayed signature", refusedSignature, func(d *dialer) {
			d.auth = nats.Nkey(n1.Public(), func([]byte) ([]byte, error) { return old, nil })
		}, true},
		{"user and password", refusedPassword, func(d *dialer) { d.auth = nats.UserInfo("n1", "secret") }, true},
		{"token", refusedPassword, func(d *dialer) { d.auth = nats.Token("secret") }, true},
		{"anonymous", refusedAnonymous, func(d *dialer) { d.auth = nil }, true},
		{"connection name", refusedConnection, func(d *dialer) { d.connection = strings.Repeat("A", 32) }, true},
		{"short connection name", refusedConnection, func(d *dialer) { d.connection = d.connection[:16] }, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := f.dialer("edge1", "node", "n1", n1)
			c.spoil(d)
			before, mark := f.refused(c.reason), f.logs.mark()
			nc, err := d.dial()
			if err == nil {
				nc.Close()
				t.Fatal("let in")
			}
			if errors.Is(err, nats.ErrAuthorization) != c.auth {
				t.Errorf("error: %v", err)
			}
			f.logs.wait(t, mark, map[string]string{"msg": eventRefused, "reason": string(c.reason)})
			if got := f.refused(c.reason) - before; got != 1 {
				t.Errorf("counted %v times as %s", got, c.reason)
			}
		})
	}

	nc, _ = f.node(f.dialer("edge1", "node", "n1", n1))
	nc.Close()
}

// There is no plaintext way in.
// Contract: B2
func TestPlaintextRefused(t *testing.T) {
	f := newFixture(t)
	f.start()
	mark := f.logs.mark()
	conn, err := net.Dial("tcp", strings.TrimPrefix(f.b.ClientURL(), "tls://"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := conn.Write([]byte("CONNECT {\"verbose\":false}\r\nPING\r\n")); err != nil {
		t.Fatal(err)
	}
	conn.SetReadDeadline(time.Now().Add(guard))
	buf := make([]byte, 512)
	n, err := conn.Read(buf)
	if strings.Contains(string(buf[:n]), "PONG") || strings.Contains(string(buf[:n]), "INFO") {
		t.Fatalf("answered in clear: %q", buf[:n])
	}
	if n == 0 && err == nil {
		t.Fatal("neither an answer nor an end")
	}
	f.logs.wait(t, mark, map[string]string{"msg": eventRefused, "reason": string(refusedNotSpeaking)})
	if f.refused(refusedNotSpeaking) != 1 {
		t.Error("not counted")
	}
}

// The keys of this process's own connections are good inside it alone.
// Contract: B2
func TestStaticKeysInProcessOnly(t *testing.T) {
	f := newFixture(t)
	n1 := f.member("edge1", "node", "n1")
	f.start()
	for name, key := range map[string]*identity.NKey{
		"edge": f.edges["edge1"], "sys": f.b.keys.system, "callout": f.b.keys.callout, "service": f.b.keys.service,
	} {
		d := f.dialer("edge1", "node", "n1", n1)
		d.auth = nats.Nkey(key.Public(), key.Sign)
		if nc, err := d.dial(); err == nil {
			nc.Close()
			t.Errorf("%s: let in over TCP", name)
		}
	}
	if err := f.edge("edge1").Flush(); err != nil {
		t.Errorf("in process: %v", err)
	}
}

// An Edge outside the process is admitted like a Node, under its own edge's
// permissions.
// Contract: B2
func TestEdgeOverTCP(t *testing.T) {
	f := newFixture(t)
	key := f.member("edge3", "edge", "e1")
	f.start()
	d := f.dialer("edge3", "edge", "e1", key)
	d.inbox = subjects.EdgeInbox("edge3")
	if _, user := f.connect(d); user != "edge3._edge.e1" {
		t.Errorf("user %q", user)
	}
}

// What an honest peer must understand is told in the lobby, which can do
// nothing else and ends by itself.
// Contract: B3
func TestLobbyTellsTheReason(t *testing.T) {
	f := newFixture(t)
	n1, n2 := f.member("edge1", "node", "n1"), f.member("edge1", "node", "n2")
	f.cfg.Members[1].Revoked = true
	f.start()
	stranger := must(identity.NewUserKey())
	told := map[string]*dialer{
		"!denied.revoked":      f.dialer("edge1", "node", "n2", n2),
		"!denied.unknown_node": f.dialer("edge1", "node", "n9", stranger),
		"!denied.wrong_edge":   f.dialer("edge2", "node", "n1", n1),
	}
	for want, d := range told {
		if _, user := f.connect(d); user != want {
			t.Errorf("user %q, want %q", user, want)
		}
	}
	for _, d := range told {
		f.wait("end of the lobby", d.closed)
	}
	// To a revoked name's stranger nothing is told.
	d := f.dialer("edge1", "node", "n2", stranger)
	if nc, err := d.dial(); err == nil {
		nc.Close()
		t.Error("an unregistered nkey read the reason")
	}
}
