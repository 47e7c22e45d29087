package broker

import (
	"fmt"
	"testing"
	"time"

	"github.com/nats-io/jwt/v2"
	"github.com/nats-io/nats.go"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/iop-fabric/iop/internal/identity"
	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/wire"
	"github.com/iop-fabric/iop/wire/iopv1"
)

// linked waits until what a hostile leaf says reaches its Edge.
func (f *fixture) linked(evil *nats.Conn, up *nats.Subscription) {
	f.t.Helper()
	marker := subjects.Session{Edge: "edge1", Node: "marker", Gen: 1}.Up(subjects.Register, "")
	for deadline := time.Now().Add(guard); ; {
		if err := evil.Publish(marker, nil); err != nil {
			f.t.Fatal(err)
		}
		if m, err := up.NextMsg(100 * time.Millisecond); err == nil && m.Subject == marker {
			return
		}
		if time.Now().After(deadline) {
			f.t.Fatal("the link carries nothing")
		}
	}
}

// A leaf that keeps what a Node once signed for it can show that, now or again, under
// any connection name. It supersedes nobody by it who lives elsewhere, and admits
// nobody by showing it twice; a Node that has left the other place comes in through
// the leaf as ever.
//
// Contract: Z6 B2 B6 B12
func TestZ6LeafShowsAnOldProof(t *testing.T) {
	f, key, n1, _ := newHub(t)
	f.start()
	s := f.newSite(key)
	s.cfg.Hub = []string{f.b.LeafURL()}
	_, evil := f.hostile(s)
	edge := f.edge("edge1")
	ctl := f.subscribe(edge, subjects.CtlWildcard("edge1"))
	f.linked(evil, f.subscribe(edge, subjects.UpWildcard("edge1")))
	instance := wire.NewToken()
	d := f.instance(instance, "edge1", "node", "n1", n1)
	nc, session := f.node(d)
	fences := f.fences(nc, session)
	f.told(ctl)
	admitted := func() float64 { return testutil.ToFloat64(f.b.metrics.admitted.WithLabelValues("node")) }
	proof := func(nonce string) []byte {
		return f.forge(func(ac *jwt.AuthorizationRequestClaims, sign func(*identity.NKey)) {
			ac.ConnectOptions.Name = instance + wire.NewToken() // the leaf knows it from before
			ac.ClientInformation.Nonce = nonce
			sign(n1)
		})
	}
	// show has the leaf show a proof, and waits for what is counted.
	show := func(nonce string, counted func() float64) {
		t.Helper()
		was := counted()
		if err := evil.PublishRequest(subjects.Callout("edge1", "l1"), nats.NewInbox(), proof(nonce)); err != nil {
			t.Fatal(err)
		}
		for deadline := time.Now().Add(guard); counted() == was; evil.Flush() {
			if time.Now().After(deadline) {
				t.Fatalf("the proof of %q is not answered so", nonce)
			}
		}
	}
	duplicate := func() float64 { return f.refused(refusedDuplicate) }
	again := func() float64 { return f.refused(refusedSignature) }
	before := admitted()
	for _, nonce := range []string{"of old", "older", "oldest"} {
		show(nonce, duplicate)
	}
	if admitted() != before {
		t.Errorf("%v admitted by an old proof", admitted()-before)
	}
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}
	select {
	case m := <-fences:
		t.Errorf("the Node elsewhere is fenced: %q", m.Data)
	case <-d.closed:
		t.Error("the Node elsewhere is closed")
	default:
	}
	nc.Close()
	if n := f.told(ctl); n.Reason != "client_closed" {
		t.Errorf("the Edge was told %v first", n)
	}
	show("of now", admitted)
	for _, nonce := range []string{"of now", "of old", "oldest"} {
		show(nonce, again)
	}
	show("the next", admitted)
	if admitted() != before+2 {
		t.Errorf("%v admitted", admitted()-before)
	}
}

// Contract: Z6
func TestProofs(t *testing.T) {
	p := newProofs()
	if !p.fresh("U1", "a") || p.fresh("U1", "a") || !p.fresh("U2", "a") || !p.fresh("U1", "b") {
		t.Error("each member's proof is good once")
	}
	for i := range 2 * proofsKept {
		p.fresh("U2", fmt.Sprint(i))
	}
	if len(p.of["U2"]) > proofsKept || p.fresh("U2", fmt.Sprint(2*proofsKept-1)) || p.fresh("U1", "a") {
		t.Error("another's proofs have others forgotten, or memory grows")
	}
}

// The answer to a callout goes wherever the leaf says, beyond its own edge too, and
// so does a server's trace of a message. Neither is anybody's word there.
//
// Contract: Z6 B5
func TestZ6LeafSendsAnswersElsewhere(t *testing.T) {
	f, key, n1, _ := newHub(t)
	foreign := f.member("edge2", "node", "n1")
	f.start()
	s := f.newSite(key)
	s.cfg.Hub = []string{f.b.LeafURL()}
	_, evil := f.hostile(s)
	edge2 := f.edge("edge2")
	up, ctl := f.subscribe(edge2, subjects.UpWildcard("edge2")), f.subscribe(edge2, subjects.CtlWildcard("edge2"))
	f.linked(evil, f.subscribe(f.edge("edge1"), subjects.UpWildcard("edge1")))
	nc, victim := f.node(f.dialer("edge2", "node", "n1", foreign))
	down := f.subscribe(nc, victim.DownWildcard())
	f.told(ctl)
	heard := func(what string, sub *nats.Subscription, must bool) {
		t.Helper()
		wait := guard
		if !must {
			wait = 300 * time.Millisecond
		}
		m, err := sub.NextMsg(wait)
		switch {
		case err != nil && must:
			t.Fatalf("%s: %v", what, err)
		case err == nil && !wire.Redirected(m.Data):
			t.Errorf("%s is taken for a peer's word on %s: %.20q", what, m.Subject, m.Data)
		case err == nil:
			t.Logf("%s reached %s", what, m.Subject)
		}
	}
	stranger := must(identity.NewUserKey())
	for _, to := range []struct {
		subject string
		sub     *nats.Subscription
	}{{victim.Up(subjects.Ack, ""), up}, {victim.Down(subjects.Fence, ""), down}, {subjects.Ctl("edge2", subjects.Closed), ctl}} {
		// A refusal, a lobby and an admission are answered with a token alike.
		for _, sign := range []*identity.NKey{stranger, n1} {
			request := f.forge(func(_ *jwt.AuthorizationRequestClaims, by func(*identity.NKey)) { by(sign) })
			if err := evil.PublishRequest(subjects.Callout("edge1", "l1"), to.subject, request); err != nil {
				t.Fatal(err)
			}
			heard("a callout's answer", to.sub, true)
		}
		for _, encoding := range []string{"", "gzip"} {
			m := nats.NewMsg(subjects.Session{Edge: "edge1", Node: "marker", Gen: 1}.Up(subjects.Ready, ""))
			m.Header.Set("Nats-Trace-Dest", to.subject)
			if encoding != "" {
				m.Header.Set("Accept-Encoding", encoding)
			}
			if err := evil.PublishMsg(m); err != nil {
				t.Fatal(err)
			}
			heard("a trace "+encoding, to.sub, false)
		}
	}
}

// What a leaf says of itself concerns itself: it ends no session of the hub's or of
// another leaf's, whatever server it claims to be.
//
// Contract: Z6 Y3
func TestZ6LeafSpeaksOfItself(t *testing.T) {
	f, key, n1, n2 := newHub(t)
	f.member("edge1", "leaf", "l2")
	f.start()
	s := f.newSite(key)
	s.cfg.Hub = []string{f.b.LeafURL()}
	_, evil := f.hostile(s)
	edge := f.edge("edge1")
	ctl := f.subscribe(edge, subjects.CtlWildcard("edge1"))
	f.linked(evil, f.subscribe(edge, subjects.UpWildcard("edge1")))
	nc, session := f.node(f.dialer("edge1", "node", "n1", n1))
	f.told(ctl)
	say := func(verb subjects.Verb, n *iopv1.SessionNotice) {
		t.Helper()
		if err := evil.Publish(subjects.Leaf("edge1", "l1", verb), must(n.MarshalVT())); err != nil {
			t.Fatal(err)
		}
	}
	here := f.subscribe(evil, subjects.Leaf("edge1", "l1", subjects.Here))
	for _, server := range []string{f.b.server.ID(), "x", f.b.server.ID()} { // the hub's, and another process each time
		say(subjects.Beat, &iopv1.SessionNotice{InstanceId: server})
		f.next(here)
	}
	dropped := testutil.ToFloat64(f.b.metrics.dropped)
	for _, n := range []*iopv1.SessionNotice{
		{NodeId: "n1", Generation: session.Gen, Reason: "kicked"},       // the hub's
		{NodeId: "n1", Generation: session.Gen + 1, Reason: "kicked"},   // of the future
		{NodeId: "n2", Generation: 1, Reason: "kicked"},                 // of nobody yet
		{NodeId: "n1\x00", Generation: session.Gen, Reason: "kicked"},   // no name
		{NodeId: "*", Generation: session.Gen, Reason: "kicked"},        // all of them
		{NodeId: "n1", Generation: session.Gen, Reason: "kicked\r\nok"}, // words of its own
	} {
		say(subjects.Ended, n)
		say(subjects.Opened, n)
	}
	for deadline := time.Now().Add(guard); testutil.ToFloat64(f.b.metrics.dropped) < dropped+4; f.whoami(nc) {
		if time.Now().After(deadline) {
			t.Fatal("its word is believed")
		}
	}
	_, other := f.node(f.dialer("edge1", "node", "n2", n2)) // notices come in order
	if n := f.told(ctl); n.NodeId != "n2" || n.Generation != other.Gen {
		t.Errorf("the Edge was told %v", n)
	}
	if err := nc.Flush(); err != nil {
		t.Error(err)
	}
}
