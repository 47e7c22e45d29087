package broker

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/iop-fabric/iop/internal/identity"
	"github.com/iop-fabric/iop/subjects"
)

const testBound = 5 * time.Second

var (
	epoch = time.Unix(1_000_000, 0)
	n1    = memberID{Edge: "edge1", Role: identity.RoleNode, Name: "n1"}
)

func gen(g uint64) subjects.Session { return subjects.Session{Edge: "edge1", Node: "n1", Gen: g} }
func conn(c uint64) connID          { return connID{Server: "S", Client: c} }
func at(d time.Duration) time.Time  { return epoch.Add(d) }

// show prints effects in a line.
func show(out []effect) string {
	var b []string
	for _, ef := range out {
		kind := "closed"
		if ef.kind == evict {
			kind = fmt.Sprintf("evict c%d", ef.conn.Client)
		}
		b = append(b, fmt.Sprintf("%s g%d %s", kind, ef.session.Gen, ef.reason))
	}
	return strings.Join(b, "; ")
}

func expect(t *testing.T, out []effect, want string) {
	t.Helper()
	if got := show(out); got != want {
		t.Errorf("effects %q, want %q", got, want)
	}
}

// Contract: B6
func TestI4OlderSessionsAreEvicted(t *testing.T) {
	t.Run("the newer is admitted", func(t *testing.T) {
		l := newLive(testBound)
		expect(t, l.Admitted(epoch, gen(1), "a"), "")
		expect(t, l.Connected(epoch, gen(1), conn(1), "a"), "")
		expect(t, l.Admitted(epoch, gen(2), "a"), "evict c1 g1 superseded")
		expect(t, l.Connected(epoch, gen(2), conn(2), "a"), "")
		expect(t, l.Disconnected(gen(1), conn(1), "kicked"), "closed g1 kicked")
	})
	t.Run("each once", func(t *testing.T) {
		l := newLive(testBound)
		l.Admitted(epoch, gen(1), "a")
		l.Connected(epoch, gen(1), conn(1), "a")
		expect(t, l.Admitted(epoch, gen(2), "a"), "evict c1 g1 superseded")
		expect(t, l.Admitted(epoch, gen(3), "a"), "")
	})
	t.Run("the older completes late", func(t *testing.T) {
		l := newLive(testBound)
		l.Admitted(epoch, gen(1), "a")
		expect(t, l.Admitted(epoch, gen(2), "a"), "")
		expect(t, l.Connected(epoch, gen(2), conn(2), "a"), "")
		expect(t, l.Connected(epoch, gen(1), conn(1), "a"), "evict c1 g1 superseded")
	})
	t.Run("seen for the first time at its connect", func(t *testing.T) {
		l := newLive(testBound)
		expect(t, l.Connected(epoch, gen(2), conn(2), "a"), "")
		expect(t, l.Connected(epoch, gen(1), conn(1), "a"), "evict c1 g1 superseded")
		expect(t, l.Connected(epoch, gen(3), conn(3), "a"), "evict c2 g2 superseded")
	})
}

// Contract: B12
func TestI5Duplicate(t *testing.T) {
	l := newLive(testBound)
	duplicate := func(d time.Duration, instance string, want bool) {
		t.Helper()
		since, got := l.Duplicate(at(d), n1, instance)
		if got != want || (got && !since.Equal(epoch)) {
			t.Errorf("after %v: %v since %v, want %v", d, got, since, want)
		}
	}
	duplicate(0, "b", false)
	l.Admitted(epoch, gen(1), "a")
	duplicate(time.Second, "b", true) // admitted, its connect on the way
	duplicate(time.Second, "a", false)
	l.Connected(at(time.Second), gen(1), conn(1), "a")
	duplicate(5*time.Second, "b", true)
	duplicate(6*time.Second, "b", false) // silent for the bound
	l.Heard(at(6*time.Second), gen(1))
	duplicate(10*time.Second, "b", true)
	l.Disconnected(gen(1), conn(1), "x")
	duplicate(10*time.Second, "b", false)

	// The silent one is heard again after the takeover: it counts no more.
	l.Admitted(at(20*time.Second), gen(2), "a")
	l.Admitted(at(26*time.Second), gen(3), "b")
	l.Heard(at(26*time.Second), gen(2))
	duplicate(27*time.Second, "b", false)
}

// A session ends with its own connection alone: the name stays taken.
// Contract: B12
func TestAReplacedConnectionEndsNothing(t *testing.T) {
	l := newLive(testBound)
	l.Admitted(epoch, gen(1), "a")
	l.Connected(epoch, gen(1), conn(1), "a")
	l.Disconnected(gen(1), conn(2), "x")
	if _, duplicate := l.Duplicate(at(time.Second), n1, "b"); !duplicate || l.Sessions() != 1 {
		t.Error("the session is gone with another's connection")
	}
}

// What was admitted and never came is told as closed, once.
// Contract: B7
func TestAbandonedSessions(t *testing.T) {
	l := newLive(testBound)
	l.Admitted(epoch, gen(1), "a")
	expect(t, l.Expire(at(connectBound-1)), "")
	expect(t, l.Expire(at(connectBound)), "closed g1 abandoned")
	expect(t, l.Expire(at(2*connectBound)), "")
	l.Connected(epoch, gen(2), conn(2), "a")
	expect(t, l.Expire(at(2*connectBound)), "")
}

// A revocation that races an admission finds the connection when it appears.
// Contract: B8
func TestRevokedWhileConnecting(t *testing.T) {
	l := newLive(testBound)
	l.Admitted(epoch, gen(1), "a")
	expect(t, l.MemberChanged(n1, true), "")
	expect(t, l.Connected(epoch, gen(1), conn(1), "a"), "evict c1 g1 revoked")
	e1 := memberID{Edge: "edge1", Role: identity.RoleEdge, Name: "e1"}
	expect(t, l.PeerConnected(e1, conn(7)), "")
	expect(t, l.MemberChanged(e1, true), "evict c7 g0 revoked")
	expect(t, l.PeerConnected(e1, conn(8)), "evict c8 g0 revoked")
	l.PeerDisconnected(e1, conn(7))
	l.PeerDisconnected(e1, conn(8))
	if len(l.peers) != 0 {
		t.Error("connections are kept for ever")
	}
	expect(t, l.MemberChanged(n1, false), "")
	expect(t, l.Connected(epoch, gen(2), conn(2), "a"), "")
}

func TestGrantsAreBounded(t *testing.T) {
	l := newLive(testBound)
	l.Admitted(epoch, gen(1), "a")
	for range maxGrants {
		if !l.Grant(gen(1)) {
			t.Fatal("refused too early")
		}
	}
	if l.Grant(gen(1)) {
		t.Error("a session may ask for ever")
	}
}

// Over any order of events: of a node's connected sessions at most the highest
// generation is not evicted, each connection is evicted at most once for each
// time it connects, a name with a live session is never free for another
// instance, and what has ended is forgotten.
// Contract: B6 B12
func TestLiveProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := newLive(testBound)
		now := epoch
		next := uint64(0)
		connected := map[uint64]bool{}
		evictions := map[uint64]int{}
		pending := []uint64{}
		take := func(out []effect) {
			for _, ef := range out {
				if ef.kind == evict {
					evictions[ef.session.Gen]++
				}
			}
		}
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			now = now.Add(time.Duration(rapid.IntRange(0, 3000).Draw(t, "ms")) * time.Millisecond)
			instance := rapid.SampledFrom([]string{"a", "b"}).Draw(t, "instance")
			switch rapid.IntRange(0, 4).Draw(t, "event") {
			case 0:
				if _, dup := l.Duplicate(now, n1, instance); !dup {
					next++
					take(l.Admitted(now, gen(next), instance))
					pending = append(pending, next)
				}
			case 1:
				if len(pending) > 0 {
					i := rapid.IntRange(0, len(pending)-1).Draw(t, "which")
					g := pending[i]
					pending = append(pending[:i], pending[i+1:]...)
					connected[g] = true
					take(l.Connected(now, gen(g), conn(g), instance))
				}
			case 2:
				for g := range connected {
					delete(connected, g)
					delete(evictions, g)
					take(l.Disconnected(gen(g), conn(g), "x"))
					break
				}
			case 3:
				l.Heard(now, gen(uint64(rapid.IntRange(0, int(next)).Draw(t, "gen"))))
			case 4:
				l.Expire(now)
			}
			high := uint64(0)
			for g := range connected {
				high = max(high, g)
			}
			for g := range connected {
				if g < high && evictions[g] != 1 {
					t.Fatalf("generation %d below %d was evicted %d times", g, high, evictions[g])
				}
				if evictions[g] > 1 {
					t.Fatalf("generation %d evicted %d times", g, evictions[g])
				}
			}
			if got := l.Sessions(); got != len(connected) {
				t.Fatalf("%d sessions, %d are connected", got, len(connected))
			}
		}
	})
}

// Who speaks is settled once every server that is reached has said who is
// connected to it; one that is new has to say it again.
// Contract: Y2
func TestLiveSettles(t *testing.T) {
	core := newLive(time.Second)
	core.Home("A")
	if core.Settled() {
		t.Error("settled before the home said whom it reaches")
	}
	core.Routes("A", []string{"B", "C"})
	core.Listed("B")
	if core.Settled() {
		t.Error("settled without C")
	}
	asked := 0
	for range 3 * askAgain {
		for _, ef := range core.Routes("A", []string{"B", "C"}) {
			if ef.kind != askServer || ef.conn.Server != "C" {
				t.Errorf("effect %+v", ef)
			}
			asked++
		}
	}
	if asked != 3 {
		t.Errorf("C was asked %d times more, want 3", asked)
	}
	core.Listed("C")
	if !core.Settled() {
		t.Error("not settled")
	}
	core.ServerGone("C", reasonServerStopped)
	core.Routes("A", []string{"B", "C"})
	if core.Settled() {
		t.Error("settled with what C said before it was gone")
	}
}

// A server that the home no longer reaches is given up once nobody reaches it, and not
// for a route that broke: as long as another one reaches it, its sessions live.
// Contract: J5 Y2 B7
func TestLostIsWhatNobodyReaches(t *testing.T) {
	s := subjects.Session{Edge: "home", Node: "n1", Gen: 7}
	begin := func() *live {
		core := newLive(time.Second)
		core.Home("A")
		core.Routes("A", []string{"B", "C"})
		core.Connected(time.Unix(1, 0), s, connID{Server: "C", Client: 1}, "i")
		return core
	}
	lost := func(out []effect) bool {
		return slices.ContainsFunc(out, func(ef effect) bool { return ef.kind == tellClosed && ef.session == s && ef.reason == reasonServerLost })
	}
	asked := func(out []effect) bool {
		return slices.ContainsFunc(out, func(ef effect) bool { return ef.kind == askRoutes && ef.conn.Server == "B" })
	}

	core := begin() // the route broke
	for range 3 * (lostAfter + patience) {
		if out := core.Routes("A", []string{"B"}); lost(out) || !asked(out) || lost(core.Reaches("B", []string{"A", "C"})) {
			t.Fatal("given up, or nobody was asked, while B reaches it")
		}
	}
	if out := core.Routes("A", []string{"B", "C"}); asked(out) {
		t.Error("B is asked about nobody")
	}
	core.Routes("A", []string{"B"})
	if lost(core.Routes("A", []string{"B"})) {
		t.Error("given up by what was said before it was there again")
	}
	if !lost(core.Reaches("B", []string{"A"})) {
		t.Error("not given up when B no longer reached it")
	}

	core = begin() // it was killed
	if lost(core.Routes("A", []string{"B"})) || lost(core.Reaches("B", []string{"A"})) {
		t.Error("given up at the first read")
	}
	if !lost(core.Routes("A", []string{"B"})) {
		t.Error("not given up at the second, though nobody reaches it")
	}

	for name, there := range map[string][]string{"B does not answer": {"B"}, "the home reaches nobody": nil} {
		core = begin()
		for i := range lostAfter + patience {
			if gone := lost(core.Routes("A", there)); gone != (i+1 == lostAfter+patience) {
				t.Fatalf("%s: given up %v at read %d", name, gone, i+1)
			}
		}
	}

	core = begin() // two brokers: the other one has no witness
	core.ServerGone("B", reasonServerStopped)
	core.Routes("A", nil)
	if !lost(core.Routes("A", nil)) {
		t.Error("the only other one is not given up")
	}
}

// A session that broke rules goes at once, and its node stays out for longer each time,
// up to a bound; once it has behaved for long enough, all is as it was.
//
// Contract: J8
func TestMisbehavedStaysOut(t *testing.T) {
	l := newLive(testBound)
	now, c := epoch, uint64(0)
	session := func() subjects.Session {
		c++
		l.Admitted(now, gen(c), "a")
		l.Connected(now, gen(c), conn(c), "a")
		return gen(c)
	}
	barred := func(want time.Duration) {
		t.Helper()
		until, got := l.Barred(now, n1)
		if got != (want > 0) || (got && until.Sub(now) != want) {
			t.Errorf("barred %v, for %v, want %v", got, until.Sub(now), want)
		}
	}
	barred(0)
	for _, want := range []time.Duration{2, 4, 8, 16, 32, 64, 120, 120} {
		want *= time.Second
		s := session()
		expect(t, l.Misbehaved(now, s), fmt.Sprintf("evict c%d g%d misbehaved", c, c))
		barred(want)
		// Said again, and of the sessions before: it counts once.
		expect(t, l.Misbehaved(now, s), "")
		expect(t, l.Misbehaved(now, gen(1)), "")
		l.Disconnected(s, conn(c), "kicked")
		expect(t, l.Misbehaved(now, s), "")
		barred(want)
		now = now.Add(want)
		barred(0)
	}
	now = now.Add(barForgiven)
	s := session()
	l.Disconnected(s, conn(c), "it left before it was told")
	expect(t, l.Misbehaved(now, s), "")
	barred(barFirst)
	expect(t, l.Misbehaved(now, gen(c+1)), "") // of a session that never was
	barred(barFirst)

	// Admitted and not there yet: it goes when it appears.
	c++
	l.Admitted(now, gen(c), "a")
	expect(t, l.Misbehaved(now, gen(c)), "")
	expect(t, l.Connected(now, gen(c), conn(c), "a"), fmt.Sprintf("evict c%d g%d misbehaved", c, c))
}
