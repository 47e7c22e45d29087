package broker

import (
	"testing"
	"time"

	"github.com/nats-io/jwt/v2"

	"github.com/iop-fabric/iop/internal/identity"
)

// A request is late by the clock of who asks, however far it is from ours, and
// also after that one was set.
// Contract: B4
func TestClocksApart(t *testing.T) {
	now := time.Unix(1_700_000_000, 0)
	request := func(issuer string, asked time.Time) *jwt.AuthorizationRequestClaims {
		ac := jwt.NewAuthorizationRequestClaims("U")
		ac.Issuer, ac.IssuedAt, ac.Expires = issuer, asked.Unix(), asked.Add(15*time.Second).Unix()
		return ac
	}
	for _, apart := range []time.Duration{0, 10 * time.Minute, -10 * time.Minute, 20 * time.Second, -20 * time.Second} {
		var c clocks
		theirs := now.Add(apart)
		if c.late(request("N1", theirs), now) {
			t.Errorf("clocks %v apart: late at once", apart)
		}
		if c.late(request("N1", theirs), now.Add(14*time.Second)) {
			t.Errorf("clocks %v apart: late after 14 s", apart)
		}
		if !c.late(request("N1", theirs), now.Add(17*time.Second)) {
			t.Errorf("clocks %v apart: not late after 17 s", apart)
		}
		if got := c.at(request("N1", theirs), now.Add(time.Second)); !got.Equal(theirs.Add(time.Second)) {
			t.Errorf("clocks %v apart: it is %v there, want %v", apart, got, theirs.Add(time.Second))
		}
		if c.late(request("N2", now), now) {
			t.Error("another server's clock counts")
		}
		for range 5 { // it was set right
			now = now.Add(clockWindow)
			c.late(request("N1", now), now)
		}
		if c.late(request("N1", now), now) {
			t.Errorf("clocks %v apart: late once it was set", apart)
		}
		own := clocks{home: "N1"}
		if !own.late(request("N1", now), now.Add(17*time.Second)) {
			t.Error("the own clock needs no second request")
		}
	}
}

// A hub whose clock is ten minutes behind its leaf's admits there all the same,
// and what it tells in the lobby can be read.
// Contract: Y3 B3
func TestLeafClockApart(t *testing.T) {
	f, key, n1, _ := newHub(t)
	f.offset.Store(-int64(10 * time.Minute))
	f.start()
	s := f.newSite(key).start()
	nc, session := f.node(s.dialer(f.dialer("edge1", "node", "n1", n1)))
	if user := f.whoami(nc); user != session.String() {
		t.Errorf("user %q", user)
	}
	nc, user := f.connect(s.dialer(f.dialer("edge1", "node", "n9", must(identity.NewUserKey()))))
	if user != "!denied.unknown_node" {
		t.Errorf("a stranger is told %q", user)
	}
	nc.Close()
}
