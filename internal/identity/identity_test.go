package identity

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"net/url"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/iop-fabric/iop/wire/iopv1"
)

const year = 365 * 24 * time.Hour

// world is one fabric's identities and a registration that is good in it.
type world struct {
	ca                         *CA
	node, edge                 *Certificate
	issuer, user, curve, other *NKey
	token                      []byte
	register                   *iopv1.RegisterRequest
}

func nodeID(edge, name string) ID { return ID{DefaultTrustDomain, edge, RoleNode, name} }
func edgeID(edge string) ID       { return ID{DefaultTrustDomain, edge, RoleEdge, "gw"} }

func ok[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func newWorld(t testing.TB) *world {
	t.Helper()
	w := &world{ca: ok(NewCA(DefaultTrustDomain, year))}
	w.node = ok(w.ca.Issue(nodeID("home", "desk"), nil, year))
	w.edge = ok(w.ca.Issue(edgeID("home"), nil, year))
	w.issuer, w.user, w.curve, w.other = ok(NewAccountKey()), ok(NewUserKey()), ok(NewCurveKey()), ok(NewUserKey())
	w.token = ok(IssueToken(w.issuer, w.claims()))
	w.register = w.request()
	if err := SignRegister(w.node, w.user, w.register); err != nil {
		t.Fatal(err)
	}
	return w
}

func (w *world) claims() SessionClaims {
	return SessionClaims{Edge: "home", Node: "desk", Gen: 1<<63 + 7, NKey: w.user.Public()}
}

func (w *world) request() *iopv1.RegisterRequest {
	return &iopv1.RegisterRequest{
		NodeId: "desk", SessionToken: w.token, Nonce: NewNonce(), RecipientKey: w.curve.Public(),
		InstanceId: "i1", ProtocolMin: 1, ProtocolMax: 2, Features: []string{"a", "b"}, Software: "iop/1",
	}
}

func (w *world) verify(r *iopv1.RegisterRequest) error {
	return VerifyRegister(w.ca.Pool(), w.issuer.Public(), "home", "desk", 1<<63+7, r)
}

// forge signs a certificate that Issue would refuse.
func (ca *CA) forge(t testing.TB, change func(*x509.Certificate)) *Certificate {
	t.Helper()
	key := ok(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
	template := ok(ca.template(key.Public(), nodeID("home", "desk"), nil, year))
	change(template)
	der := ok(x509.CreateCertificate(rand.Reader, template, ca.cert, key.Public(), ca.key()))
	return &Certificate{Chain: [][]byte{der}, Leaf: ok(x509.ParseCertificate(der)), key: signer{key: seal(key)}}
}

func refused(t *testing.T, err error, want string) {
	t.Helper()
	if err == nil {
		t.Error("it was accepted")
	} else if !strings.Contains(err.Error(), want) {
		t.Errorf("got %q, want something on %q", err, want)
	}
}

func TestIDRoundTrip(t *testing.T) {
	for _, id := range []ID{
		{"iop", "home", RoleNode, "desk"},
		{"a.example", "e-1", RoleEdge, "gw_1"},
		{"iop", "home", RoleLeaf, "l1"},
		{"iop", "-", RoleBroker, "hub1"},
		{"iop", "-", RoleService, "s"},
	} {
		got, err := ParseID(ok(url.Parse(id.String())))
		if err != nil || got != id {
			t.Errorf("%s: got %+v, %v", id, got, err)
		}
	}
}

// Contract: Z1
func TestIDRefused(t *testing.T) {
	for _, raw := range []string{
		"https://iop/home/node/desk", "spiffe://iop/home/node", "spiffe://iop/home/node/desk/x", "spiffe://iop/home/node/",
		"spiffe://iop//node/desk", "spiffe:///home/node/desk", "spiffe://u@iop/home/node/desk", "spiffe://iop:1/home/node/desk",
		"spiffe://iop/home/node/desk?x=1", "spiffe://iop/home/node/desk?", "spiffe://iop/home/node/desk#x", "spiffe://iop/home/node/d%65sk",
		"spiffe://iop/home/node/de.sk", "spiffe://iop/home/node/*", "spiffe://iop/ho>me/node/desk", "spiffe://iop/home/root/desk",
		"spiffe://iop/Home/node/desk", "spiffe://IOP/home/node/desk", "spiffe://iop/-/node/desk", "spiffe://iop/home/broker/hub",
		"spiffe://iop/home/node/ctl", "spiffe:iop/home/node/desk", "spiffe://iop/home/node/" + strings.Repeat("a", 64),
	} {
		u, err := url.Parse(raw)
		if err != nil {
			continue // x509 parses URIs the same way, so it never comes so far
		}
		if id, err := ParseID(u); err == nil {
			t.Errorf("%s: accepted as %+v", raw, id)
		}
	}
	if _, err := ParseID(nil); err == nil {
		t.Error("no URI: accepted")
	}
}

func TestIssueRefusesWhatItCannotVouchFor(t *testing.T) {
	ca := ok(NewCA("iop", year))
	ec := ok(ecdsa.GenerateKey(elliptic.P256(), rand.Reader)).Public()
	ed, _, _ := ed25519.GenerateKey(rand.Reader)
	p384 := ok(ecdsa.GenerateKey(elliptic.P384(), rand.Reader)).Public()
	for name, c := range map[string]struct {
		pub   crypto.PublicKey
		id    ID
		hosts []string
		ttl   time.Duration
		want  string
	}{
		"dot in the name":      {ec, nodeID("home", "a.b"), nil, year, "name"},
		"no role":              {ec, ID{"iop", "home", "", "desk"}, nil, year, "role"},
		"slash in the edge":    {ec, nodeID("a/b", "desk"), nil, year, "edge"},
		"another trust domain": {ec, ID{"evil", "home", RoleNode, "desk"}, nil, year, "trust domain"},
		"no lifetime":          {ec, nodeID("home", "desk"), nil, 0, "lifetime"},
		"hosts of a node":      {ec, nodeID("home", "desk"), []string{"h"}, year, "broker"},
		"broker without hosts": {ec, ID{"iop", "-", RoleBroker, "hub"}, nil, year, "at least one"},
		"an empty host":        {ec, ID{"iop", "-", RoleBroker, "hub"}, []string{""}, year, "empty"},
		"Ed25519":              {ed, nodeID("home", "desk"), nil, year, "P-256"},
		"P-384":                {p384, nodeID("home", "desk"), nil, year, "P-256"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := ca.Sign(c.pub, c.id, c.hosts, c.ttl)
			refused(t, err, c.want)
		})
	}
	if _, err := NewCA("not a domain", year); err == nil {
		t.Error("a CA of a trust domain with blanks")
	}
	if _, err := NewCA("iop", -1); err == nil {
		t.Error("a CA that has ended")
	}
}

func TestIssuedCertificates(t *testing.T) {
	ca := ok(NewCA("iop", year))
	broker := ok(ca.Issue(ID{"iop", "-", RoleBroker, "hub"}, []string{"127.0.0.1", "hub.example"}, 2*year))
	for _, server := range []bool{true, false} {
		if id, leaf, err := VerifyChain(ca.Pool(), broker.Chain, RoleBroker, server); err != nil || id != broker.ID() || !leaf.Equal(broker.Leaf) {
			t.Errorf("broker, server %v: %v %v", server, id, err)
		}
	}
	for _, host := range []string{"127.0.0.1", "hub.example"} {
		if err := broker.Leaf.VerifyHostname(host); err != nil {
			t.Error(err)
		}
	}
	if broker.Leaf.NotAfter.After(ca.cert.NotAfter) {
		t.Error("the certificate outlives its CA")
	}
	if since := time.Since(broker.Leaf.NotBefore); since < 59*time.Minute {
		t.Errorf("begins %s back, want an hour", since)
	}
	if broker.Leaf.SerialNumber.BitLen() < 64 || broker.Leaf.SerialNumber.Cmp(ca.cert.SerialNumber) == 0 {
		t.Error("the serial is not random")
	}
	leaf := ok(ca.Issue(ID{"iop", "home", RoleLeaf, "site"}, []string{"leaf.example"}, year))
	for _, server := range []bool{true, false} { // Nodes dial it, and it dials the hub
		if id, _, err := VerifyChain(ca.Pool(), leaf.Chain, RoleLeaf, server); err != nil || id != leaf.ID() {
			t.Errorf("leaf, server %v: %v %v", server, id, err)
		}
	}
	for _, role := range []Role{RoleEdge, RoleNode, RoleLeaf} {
		c := ok(ca.Issue(ID{"iop", "home", role, "x"}, nil, year))
		if _, _, err := VerifyChain(ca.Pool(), c.Chain, role, false); err != nil {
			t.Errorf("%s as client: %v", role, err)
		}
		_, _, err := VerifyChain(ca.Pool(), c.Chain, role, true)
		refused(t, err, "usage")
	}
}

// Every refusal alone: the certificate differs from a good one in one thing.
//
// Contract: B2 L8
func TestI1ChainRefused(t *testing.T) {
	w := newWorld(t)
	stranger := ok(NewCA("iop", year))
	uri := func(ss ...string) (us []*url.URL) {
		for _, s := range ss {
			us = append(us, ok(url.Parse(s)))
		}
		return us
	}
	good := "spiffe://iop/home/node/desk"
	if _, _, err := VerifyChain(w.ca.Pool(), w.ca.forge(t, func(*x509.Certificate) {}).Chain, RoleNode, false); err != nil {
		t.Fatalf("the unchanged one is refused: %v", err)
	}
	for name, c := range map[string]struct {
		chain [][]byte
		pool  *x509.CertPool
		want  string
	}{
		"no certificate":     {nil, w.ca.Pool(), "no certificate"},
		"no DER":             {[][]byte{[]byte("x")}, w.ca.Pool(), "certificate 1"},
		"cut short":          {[][]byte{w.node.Chain[0][:200]}, w.ca.Pool(), "certificate 1"},
		"too long":           {make([][]byte, 9), w.ca.Pool(), "at most"},
		"wrong CA":           {w.node.Chain, stranger.Pool(), "authority"},
		"no CA at all":       {w.node.Chain, nil, "no CA"},
		"wrong role":         {w.edge.Chain, w.ca.Pool(), "certificate of a edge"},
		"no SAN":             {w.ca.forge(t, func(c *x509.Certificate) { c.URIs = nil }).Chain, w.ca.Pool(), "0 URI"},
		"two SANs":           {w.ca.forge(t, func(c *x509.Certificate) { c.URIs = uri(good, "spiffe://iop/home/node/other") }).Chain, w.ca.Pool(), "2 URI"},
		"the same SAN twice": {w.ca.forge(t, func(c *x509.Certificate) { c.URIs = uri(good, good) }).Chain, w.ca.Pool(), "2 URI"},
		"https SAN":          {w.ca.forge(t, func(c *x509.Certificate) { c.URIs = uri("https://iop/home/node/desk") }).Chain, w.ca.Pool(), "spiffe"},
		"another domain":     {w.ca.forge(t, func(c *x509.Certificate) { c.URIs = uri("spiffe://evil/home/node/desk") }).Chain, w.ca.Pool(), "not permitted"},
		"expired":            {w.ca.forge(t, func(c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Minute) }).Chain, w.ca.Pool(), "expired"},
		"not yet good":       {w.ca.forge(t, func(c *x509.Certificate) { c.NotBefore = time.Now().Add(time.Hour) }).Chain, w.ca.Pool(), "not yet valid"},
		"no client usage":    {w.ca.forge(t, func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth} }).Chain, w.ca.Pool(), "usage"},
		"an unrelated leaf":  {[][]byte{ok(stranger.Issue(nodeID("home", "desk"), nil, year)).Chain[0], w.node.Chain[0]}, w.ca.Pool(), "authority"},
	} {
		t.Run(name, func(t *testing.T) {
			_, _, err := VerifyChain(c.pool, c.chain, RoleNode, false)
			refused(t, err, c.want)
		})
	}
}

// A workload's certificate is no CA: what it signs is nothing.
func TestI1LeafSignsNothing(t *testing.T) {
	w := newWorld(t)
	leafCA := &CA{cert: w.node.Leaf, key: w.node.key.key}
	forged := leafCA.forge(t, func(*x509.Certificate) {})
	_, _, err := VerifyChain(w.ca.Pool(), append(forged.Chain, w.node.Chain...), RoleNode, false)
	refused(t, err, "certificate chain")
}

func TestI3TranscriptMovesNothing(t *testing.T) {
	seen := map[string]string{}
	for _, c := range []struct {
		label string
		parts []string
	}{
		{"l", nil},
		{"l", []string{""}},
		{"l", []string{"", ""}},
		{"l", []string{"ab"}},
		{"l", []string{"a", "b"}},
		{"l", []string{"", "ab"}},
		{"l", []string{"ab", ""}},
		{"la", []string{"b"}},
		{"", []string{"lab"}},
		{"lab", nil},
	} {
		var parts [][]byte
		for _, p := range c.parts {
			parts = append(parts, []byte(p))
		}
		name := c.label + ":" + strings.Join(c.parts, "|")
		got := string(transcript(c.label, parts))
		if other, ok := seen[got]; ok {
			t.Errorf("%s and %s read alike", name, other)
		}
		seen[got] = name
		if !isTranscript([]byte(got)) {
			t.Errorf("%s does not begin as one", name)
		}
	}
}

func TestI3NonceIsNoTranscript(t *testing.T) {
	user := ok(NewUserKey())
	if sig, err := user.Sign([]byte("nonce")); err != nil || user.Pair().Verify([]byte("nonce"), sig) != nil {
		t.Errorf("a nonce: %v", err)
	}
	_, err := user.Sign(transcript(labelRegister, nil))
	refused(t, err, "refusing")
}

func TestSignaturesAreForTheirLabel(t *testing.T) {
	w := newWorld(t)
	part := []byte("part")
	byCert, byKey := ok(w.node.Sign("a", part)), ok(w.user.SignLabelled("a", part))
	if err := VerifySignature(w.node.Leaf, byCert, "a", part); err != nil {
		t.Error(err)
	}
	if err := VerifyNKey(w.user.Public(), byKey, "a", part); err != nil {
		t.Error(err)
	}
	for name, err := range map[string]error{
		"certificate, other label": VerifySignature(w.node.Leaf, byCert, "b", part),
		"certificate, other part":  VerifySignature(w.node.Leaf, byCert, "a", []byte("Part")),
		"certificate, other key":   VerifySignature(w.edge.Leaf, byCert, "a", part),
		"certificate, none":        VerifySignature(nil, byCert, "a", part),
		"nkey, other label":        VerifyNKey(w.user.Public(), byKey, "b", part),
		"nkey, other part":         VerifyNKey(w.user.Public(), byKey, "a", []byte("Part")),
		"nkey, other key":          VerifyNKey(w.other.Public(), byKey, "a", part),
		"nkey, no key":             VerifyNKey("U", byKey, "a", part),
		"nkey, curve key":          VerifyNKey(w.curve.Public(), byKey, "a", part),
	} {
		if err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	for i := range byCert {
		for bit := range 8 {
			flipped := flip(byCert, i, bit)
			if VerifySignature(w.node.Leaf, flipped, "a", part) == nil {
				t.Errorf("certificate signature with bit %d of byte %d turned: accepted", bit, i)
			}
		}
	}
	for i := range byKey {
		for bit := range 8 {
			if VerifyNKey(w.user.Public(), flip(byKey, i, bit), "a", part) == nil {
				t.Errorf("nkey signature with bit %d of byte %d turned: accepted", bit, i)
			}
		}
	}
}

func flip(b []byte, i, bit int) []byte {
	b = append([]byte(nil), b...)
	b[i] ^= 1 << bit
	return b
}

func clone(r *iopv1.RegisterRequest) *iopv1.RegisterRequest {
	return proto.Clone(r).(*iopv1.RegisterRequest)
}
