package broker

import (
	"bytes"
	"crypto/x509"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/identity"
	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/wire/iopv1"
)

// renewer is a Node in a session, that asks for a new certificate.
type renewer struct {
	f    *fixture
	key  *identity.NKey
	cert *identity.Certificate
	s    subjects.Session
	// connection is the session's.
	connection string
	nc         *nats.Conn
	sub        *nats.Subscription // of down.renew
	ask        func(*iopv1.RenewRequest) *iopv1.RenewResponse
}

func newRenewer(t *testing.T) *renewer {
	f := newFixture(t)
	f.enrols()
	r := &renewer{f: f, key: f.member("edge1", "node", "n1")}
	f.start()
	r.cert = f.ca.issue([]x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}, "spiffe://iop/edge1/node/n1")
	d := f.dialer("edge1", "node", "n1", r.key)
	d.tls.Certificates[0] = r.cert.TLS()
	nc, s := f.node(d)
	r.s, r.connection, r.nc = s, d.connection, nc
	sub := f.subscribe(nc, s.Down(subjects.Renew, ""))
	r.sub = sub
	r.ask = func(q *iopv1.RenewRequest) *iopv1.RenewResponse {
		t.Helper()
		f.offset.Add(int64(renewPause))
		data := must(q.MarshalVT())
		if err := nc.Publish(s.Up(subjects.Renew, ""), data); err != nil {
			t.Fatal(err)
		}
		var a iopv1.RenewResponse
		if err := a.UnmarshalVT(f.next(sub).Data); err != nil {
			t.Fatal(err)
		}
		return &a
	}
	return r
}

// later puts the broker's clock into the last third of a certificate's life.
func (f *fixture) later(c *identity.Certificate) {
	f.offset.Store(int64(time.Until(identity.RenewalDue(c.Leaf)) + time.Minute))
}

func (r *renewer) request() *iopv1.RenewRequest {
	return must(identity.SignRenew(r.cert, r.key, r.s.Edge, r.s.Node, r.s.Gen, identity.NewNonce()))
}

// The authority signs the Node's own name and key anew, for a year, and nothing else
// that is asked for; the answer serves at the next dial.
// Contract: B8 B11
func TestRenewal(t *testing.T) {
	r := newRenewer(t)
	r.f.later(r.cert)
	q := r.request()
	a := r.ask(q)
	renewed, err := r.cert.Renewed(r.f.roots(), a.GetCertificateChain())
	if err != nil || !bytes.Equal(a.GetNonce(), q.GetNonce()) {
		t.Fatalf("%v: %v", a, err)
	}
	if renewed.ID() != r.cert.ID() || len(renewed.Leaf.DNSNames)+len(renewed.Leaf.IPAddresses) > 0 || !bytes.Equal(renewed.Leaf.RawSubjectPublicKeyInfo, r.cert.Leaf.RawSubjectPublicKeyInfo) {
		t.Errorf("signed for %s", renewed.ID())
	}
	r.f.offset.Store(0)
	d := r.f.dialer("edge1", "node", "n1", r.key)
	d.tls.Certificates[0] = renewed.TLS()
	d.connection = r.connection // the same process
	d.inbox = subjects.NodeInbox("edge1", "n1", d.connection)
	if nc, err := d.dial(); err != nil {
		t.Errorf("the new certificate does not serve: %v", err)
	} else {
		nc.Close()
	}
	if n := testutil.ToFloat64(r.f.b.metrics.renewals.WithLabelValues(renewSigned)); n != 1 {
		t.Errorf("%v counted", n)
	}
}

// Each of these alone is refused, and the Node learns no more than that.
// Contract: B8 B11 Z5
func TestRenewalRefused(t *testing.T) {
	r := newRenewer(t)
	if a := r.ask(r.request()); len(a.GetCertificateChain()) > 0 {
		t.Error("renewed before its last third")
	}
	r.f.later(r.cert)
	member := configs.Member{Edge: "edge1", Role: "node", Name: "n1", NKey: r.key.Public()}
	other := r.f.ca.issue([]x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}, "spiffe://iop/edge1/node/n2")
	edge := r.f.ca.issue([]x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}, "spiffe://iop/edge1/edge/n1")
	domain := r.f.ca.issue([]x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}, "spiffe://other/edge1/node/n1")
	foreign := newTestCA().issue([]x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}, "spiffe://iop/edge1/node/n1")
	signed := func(c *identity.Certificate, k *identity.NKey, node string, gen uint64) *iopv1.RenewRequest {
		return must(identity.SignRenew(c, k, "edge1", node, gen, identity.NewNonce()))
	}
	stranger := must(identity.NewUserKey())
	for name, q := range map[string]*iopv1.RenewRequest{
		"nothing":              {},
		"another node's":       signed(other, r.key, "n1", r.s.Gen),
		"an edge's":            signed(edge, r.key, "n1", r.s.Gen),
		"another trust domain": signed(domain, r.key, "n1", r.s.Gen),
		"another CA":           signed(foreign, r.key, "n1", r.s.Gen),
		"another nkey":         signed(r.cert, stranger, "n1", r.s.Gen),
		"another generation":   signed(r.cert, r.key, "n1", r.s.Gen+1),
		"another name":         signed(r.cert, r.key, "n2", r.s.Gen),
		"another nonce": func() *iopv1.RenewRequest {
			q := r.request()
			q.Nonce = identity.NewNonce()
			return q
		}(),
		"the certificate's signature alone": func() *iopv1.RenewRequest {
			q := r.request()
			q.NkeySignature = nil
			return q
		}(),
		"the nkey's signature alone": func() *iopv1.RenewRequest {
			q := r.request()
			q.CertificateSignature = nil
			return q
		}(),
	} {
		if a := r.ask(q); len(a.GetCertificateChain()) > 0 || a.GetReason() != errNotRenewed.Error() {
			t.Errorf("%s: %v", name, a)
		}
	}
	if a := r.ask(r.request()); len(a.GetCertificateChain()) != 1 {
		t.Fatalf("what is right is refused: %v", a)
	}
	// An nkey that is not registered any more, and a session that is history.
	for range maxNKeys {
		member.NKey = must(identity.NewUserKey()).Public()
		if err := r.f.b.Register(t.Context(), member); err != nil {
			t.Fatal(err)
		}
	}
	if a := r.ask(r.request()); len(a.GetCertificateChain()) > 0 {
		t.Error("renewed for an nkey that is not registered")
	}
	member.NKey = r.key.Public()
	if err := r.f.b.Register(t.Context(), member); err != nil {
		t.Fatal(err)
	}
	if a := r.ask(r.request()); len(a.GetCertificateChain()) != 1 {
		t.Fatalf("registered again, and refused: %v", a)
	}
	gens := generations{kv: r.f.generations(), marks: &marks{kv: r.f.b.members.kv}}
	if _, err := gens.Next(t.Context(), "edge1", "n1", admission{NKey: r.key.Public()}, r.s.Gen); err != nil {
		t.Fatal(err)
	}
	if a := r.ask(r.request()); len(a.GetCertificateChain()) > 0 {
		t.Error("renewed for an older session")
	}
}

// A revoked Node has no session; were one still open, it would get nothing.
// Contract: B8
func TestRenewalOfTheRevoked(t *testing.T) {
	r := newRenewer(t)
	r.f.later(r.cert)
	svc := newRenewals(&r.f.b.authority, r.f.b.enrolment, nil)
	svc.s = &service{b: &r.f.b.authority, work: t.Context(), members: r.f.b.members, generations: generations{kv: r.f.generations(), marks: &marks{kv: r.f.b.members.kv}}}
	if _, _, err := svc.sign(r.s, r.request()); err != nil {
		t.Fatal(err)
	}
	if err := r.f.b.Revoke(t.Context(), "edge1", "node", "n1"); err != nil {
		t.Fatal(err)
	}
	if _, _, err := svc.sign(r.s, r.request()); err == nil {
		t.Error("a revoked node's certificate was renewed")
	}
}

// One that asks again and again is answered once in a while; others are not kept
// waiting by it, and strangers fill no memory.
// Contract: B8 Z5
func TestRenewalPace(t *testing.T) {
	r := newRenewals(nil, nil, nil)
	now := time.Now()
	one, two := memberID{Name: "one"}, memberID{Name: "two"}
	if !r.allow(one, now) || r.allow(one, now.Add(renewPause-1)) || !r.allow(two, now) || !r.allow(one, now.Add(renewPause)) {
		t.Error("the pace is another")
	}
	for i := range 2 * maxRenewed {
		r.allow(memberID{Name: string(rune(i))}, now.Add(renewPause))
	}
	if len(r.asked) != maxRenewed || len(r.order) != maxRenewed {
		t.Errorf("%d and %d are remembered", len(r.asked), len(r.order))
	}
	if !r.allow(one, now.Add(2*renewPause)) || len(r.order) != 1 || len(r.asked) != 1 {
		t.Errorf("%d are remembered long after", len(r.order))
	}
}
