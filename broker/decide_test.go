package broker

import (
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/nats-io/jwt/v2"
	"github.com/nats-io/nkeys"

	"github.com/iop-fabric/iop/internal/identity"
	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/wire"
)

const testNonce = "nonce-of-this-connection"

// request is a callout request in which everything is right.
func request(ca *testCA, key *identity.NKey, uri string) *jwt.AuthorizationRequestClaims {
	ac := jwt.NewAuthorizationRequestClaims("subject")
	ac.Issuer, ac.Server.ID = "SERVER", "SERVER"
	ac.ClientInformation.Kind, ac.ClientInformation.Nonce = "Client", testNonce
	ac.ConnectOptions.Nkey = key.Public()
	ac.ConnectOptions.SignedNonce = base64.RawURLEncoding.EncodeToString(must(key.Sign([]byte(testNonce))))
	ac.ConnectOptions.Name = wire.NewToken() + wire.NewToken()
	ac.TLS = &jwt.ClientTLS{Version: "1.3", VerifiedChains: []jwt.StringList{chainOf(ca, uri)}}
	return ac
}

func chainOf(ca *testCA, uris ...string) jwt.StringList {
	chain, _ := ca.issueRaw([]x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}, uris...)
	return pems(append(chain, ca.cert.Raw))
}

func pems(chain [][]byte) (out jwt.StringList) {
	for _, der := range chain {
		out = append(out, string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})))
	}
	return out
}

// Each check of decide refuses alone, also where the server would have refused
// before: the callout relies on nobody's check but its own.
// Contract: B2
func TestDecide(t *testing.T) {
	ca, foreign := newTestCA(), newTestCA()
	key := must(identity.NewUserKey())
	const uri = "spiffe://iop/edge1/node/n1"
	tr := trust{pool: ca.pool(), domain: "iop"}
	for _, c := range []struct {
		name  string
		spoil func(ac *jwt.AuthorizationRequestClaims)
		want  refusal
	}{
		{"nothing wrong", func(*jwt.AuthorizationRequestClaims) {}, ""},
		{"issuer", func(ac *jwt.AuthorizationRequestClaims) { ac.Issuer = "OTHER" }, refusedForged},
		{"no issuer", func(ac *jwt.AuthorizationRequestClaims) { ac.Issuer, ac.Server.ID = "", "" }, refusedForged},
		{"user", func(ac *jwt.AuthorizationRequestClaims) { ac.ConnectOptions.Username = "u" }, refusedPassword},
		{"password", func(ac *jwt.AuthorizationRequestClaims) { ac.ConnectOptions.Password = "p" }, refusedPassword},
		{"token", func(ac *jwt.AuthorizationRequestClaims) { ac.ConnectOptions.Token = "t" }, refusedPassword},
		{"bearer", func(ac *jwt.AuthorizationRequestClaims) { ac.ConnectOptions.JWT = "j" }, refusedPassword},
		{"no nkey", func(ac *jwt.AuthorizationRequestClaims) { ac.ConnectOptions.Nkey = "" }, refusedAnonymous},
		{"no signature", func(ac *jwt.AuthorizationRequestClaims) { ac.ConnectOptions.SignedNonce = "" }, refusedAnonymous},
		{"no nonce", func(ac *jwt.AuthorizationRequestClaims) { ac.ClientInformation.Nonce = "" }, refusedSignature},
		{"another nonce", func(ac *jwt.AuthorizationRequestClaims) { ac.ClientInformation.Nonce = "older" }, refusedSignature},
		{"signature no base64", func(ac *jwt.AuthorizationRequestClaims) { ac.ConnectOptions.SignedNonce = "%" }, refusedSignature},
		{"an account's nkey", func(ac *jwt.AuthorizationRequestClaims) {
			k := must(identity.NewAccountKey())
			ac.ConnectOptions.Nkey = k.Public()
			ac.ConnectOptions.SignedNonce = base64.RawURLEncoding.EncodeToString(must(k.Pair().Sign([]byte(testNonce))))
		}, refusedSignature},
		{"no TLS", func(ac *jwt.AuthorizationRequestClaims) { ac.TLS = nil }, refusedNoTLS},
		{"TLS 1.2", func(ac *jwt.AuthorizationRequestClaims) { ac.TLS.Version = "1.2" }, refusedTLSVersion},
		{"no verified chain", func(ac *jwt.AuthorizationRequestClaims) {
			ac.TLS.Certs, ac.TLS.VerifiedChains = ac.TLS.VerifiedChains[0], nil
		}, refusedCertificate},
		{"an empty chain", func(ac *jwt.AuthorizationRequestClaims) { ac.TLS.VerifiedChains[0] = nil }, refusedCertificate},
		{"no PEM", func(ac *jwt.AuthorizationRequestClaims) { ac.TLS.VerifiedChains[0][0] = "x" }, refusedCertificate},
		{"no certificate in it", func(ac *jwt.AuthorizationRequestClaims) { ac.TLS.VerifiedChains[0] = pems([][]byte{{1, 2}}) }, refusedCertificate},
		{"foreign CA", func(ac *jwt.AuthorizationRequestClaims) { ac.TLS.VerifiedChains[0] = chainOf(foreign, uri) }, refusedChain},
		{"server's usage", func(ac *jwt.AuthorizationRequestClaims) {
			chain, _ := ca.issueRaw([]x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, uri)
			ac.TLS.VerifiedChains[0] = pems(chain)
		}, refusedChain},
		{"two SANs", func(ac *jwt.AuthorizationRequestClaims) { ac.TLS.VerifiedChains[0] = chainOf(ca, uri, uri) }, refusedSAN},
		{"no SAN", func(ac *jwt.AuthorizationRequestClaims) { ac.TLS.VerifiedChains[0] = chainOf(ca) }, refusedSAN},
		{"no name of ours", func(ac *jwt.AuthorizationRequestClaims) {
			ac.TLS.VerifiedChains[0] = chainOf(ca, "https://iop/edge1/node/n1")
		}, refusedSAN},
		{"reserved name", func(ac *jwt.AuthorizationRequestClaims) {
			ac.TLS.VerifiedChains[0] = chainOf(ca, "spiffe://iop/edge1/node/ctl")
		}, refusedSAN},
		{"trust domain", func(ac *jwt.AuthorizationRequestClaims) {
			ac.TLS.VerifiedChains[0] = chainOf(ca, "spiffe://other/edge1/node/n1")
		}, refusedDomain},
		{"broker", func(ac *jwt.AuthorizationRequestClaims) {
			ac.TLS.VerifiedChains[0] = chainOf(ca, "spiffe://iop/-/broker/b1")
		}, refusedRole},
		{"leaf as a client", func(ac *jwt.AuthorizationRequestClaims) {
			ac.TLS.VerifiedChains[0] = chainOf(ca, "spiffe://iop/edge1/leaf/l1")
		}, refusedRole},
		{"node as a leaf link", func(ac *jwt.AuthorizationRequestClaims) { ac.ClientInformation.Kind = "Leafnode" }, refusedRole},
		{"no kind", func(ac *jwt.AuthorizationRequestClaims) { ac.ClientInformation.Kind = "" }, refusedRole},
		{"connection name", func(ac *jwt.AuthorizationRequestClaims) { ac.ConnectOptions.Name = "x.*" }, refusedConnection},
		{"no connection name", func(ac *jwt.AuthorizationRequestClaims) { ac.ConnectOptions.Name = "" }, refusedConnection},
		{"leaf as a leaf link", func(ac *jwt.AuthorizationRequestClaims) {
			ac.ClientInformation.Kind = "Leafnode"
			ac.TLS.VerifiedChains[0] = chainOf(ca, "spiffe://iop/edge1/leaf/l1")
		}, ""},
	} {
		ac := request(ca, key, uri)
		c.spoil(ac)
		a, got := decide(ac, tr)
		if got != c.want {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
		if (got == "") != (a.id != identity.ID{}) {
			t.Errorf("%s: refused and named at once: %+v", c.name, a)
		}
		if got != "" && !slices.Contains(refusals, got) {
			t.Errorf("%s: %q is not in the closed set", c.name, got)
		}
	}
}

// Contract: B2 B3
func TestJudge(t *testing.T) {
	a := applicant{id: identity.ID{Edge: "edge1", Role: identity.RoleNode, Name: "n1"}, nkey: "U1"}
	known := member{NKeys: []string{"U2", "U1"}}
	for _, c := range []struct {
		name             string
		m                member
		found, elsewhere bool
		want             refusal
	}{
		{"registered", known, true, false, ""},
		{"unknown", member{}, false, false, refusedUnknown},
		{"elsewhere", member{}, false, true, refusedWrongEdge},
		{"another nkey", member{NKeys: []string{"U2"}}, true, false, refusedNKey},
		{"no nkey", member{}, true, false, refusedNKey},
		{"revoked", member{NKeys: []string{"U1"}, Revoked: true}, true, false, refusedRevoked},
		{"revoked, another nkey", member{NKeys: []string{"U2"}, Revoked: true}, true, false, refusedNKey},
	} {
		if got := judge(a, c.m, c.found, c.elsewhere); got != c.want {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
}

// The lobby is for refusals that are told, reads its own inbox and ends.
// Contract: B3
func TestLobby(t *testing.T) {
	a := applicant{id: identity.ID{Edge: "edge1", Role: identity.RoleNode, Name: "n1"}, connection: wire.NewToken() + wire.NewToken()}
	now := time.Unix(1000, 0)
	for _, r := range refusals {
		g, ok := a.lobby(r, time.Unix(77, 0), now)
		if ok != r.told() {
			t.Errorf("%s: told %v", r, ok)
		}
		if !ok {
			continue
		}
		want := "!denied." + string(r)
		if r == refusedDuplicate || r == refusedMisbehaved {
			want += ".77"
		}
		if g.user != want || g.expires != now.Add(2*time.Second) {
			t.Errorf("%s: %+v", r, g)
		}
		if _, err := subjects.ParseSession(g.user); err == nil {
			t.Errorf("%s reads as a session", g.user)
		}
	}
	a.connection = "edge"
	if _, ok := a.lobby(refusedRevoked, now, now); ok {
		t.Error("a lobby without an inbox of its own")
	}
}

// The user of an Edge or a leaf never reads as a session, whatever its name.
func TestPeerUserIsNoSession(t *testing.T) {
	for _, role := range []identity.Role{identity.RoleEdge, identity.RoleLeaf} {
		id := memberID{Edge: "edge1", Role: role, Name: "12"}
		if _, err := subjects.ParseSession(peerUser(id)); err == nil {
			t.Errorf("%s reads as a session", peerUser(id))
		}
		if got, ok := parsePeerUser(peerUser(id)); !ok || got != id {
			t.Errorf("%s reads as %+v, %v", peerUser(id), got, ok)
		}
	}
	if _, ok := parsePeerUser("edge1.n1.12"); ok {
		t.Error("a session reads as a peer")
	}
}

// Nothing a connection sends makes decide panic or let it in.
func FuzzDecide(f *testing.F) {
	ca := newTestCA()
	key := must(identity.NewUserKey())
	tr := trust{pool: ca.pool(), domain: "iop"}
	kp := must(nkeys.CreateServer())
	good := must(request(ca, key, "spiffe://iop/edge1/node/n1").Encode(kp))
	f.Add(good, "", "", "")
	f.Add("", "n", "sig", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
	f.Fuzz(func(t *testing.T, token, name, sig, chain string) {
		if ac, err := jwt.DecodeAuthorizationRequestClaims(token); err == nil {
			// The server's signature is not to be had by guessing; its issuer is.
			if _, r := decide(ac, tr); r == "" && token != good {
				t.Fatal("let in")
			}
		}
		ac := request(ca, key, "spiffe://iop/edge1/node/n1")
		ac.ConnectOptions.Name, ac.ConnectOptions.SignedNonce = name, sig
		ac.TLS.VerifiedChains[0] = jwt.StringList{chain}
		if _, r := decide(ac, tr); r == "" {
			t.Fatal("let in")
		}
	})
}

func TestHandshakeReasonsAreClosed(t *testing.T) {
	for text, want := range map[string]refusal{
		"tls: first record does not look like a TLS handshake":                      refusedNotSpeaking,
		"tls: client offered only unsupported versions: [303]":                      refusedTLSVersion,
		"tls: client didn't provide a certificate":                                  refusedCertificate,
		"tls: failed to verify certificate: x509: certificate signed by unknown...": refusedCertificate,
		"EOF": refusedHandshake,
	} {
		if got := handshakeRefusal(errors.New(text)); got != want {
			t.Errorf("%s: %q, want %q", text, got, want)
		}
	}
	if closeReason("anything a later server says") != "closed" {
		t.Error("an unknown reason travels")
	}
}
