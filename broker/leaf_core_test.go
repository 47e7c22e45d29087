package broker

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/iop-fabric/iop/subjects"
)

func atNode(node string, gen uint64) subjects.Session {
	return subjects.Session{Edge: "edge1", Node: node, Gen: gen}
}

func kinds(orders []order) (out []orderKind) {
	for _, o := range orders {
		out = append(out, o.kind)
	}
	return out
}

const agentBound = 4 * time.Second // a beat each 500 ms

// L1: what has ended is said again until it is noted, and a word about another
// state of the session does not count as that.
// Contract: Y3
func TestL1EndedUntilNoted(t *testing.T) {
	now := time.Unix(1000, 0)
	a := newAgent(now, agentBound)
	a.Here(now, "s1")
	s := atNode("n1", 7)
	if got := kinds(a.Opened(now, s, 3, "i1")); !slices.Equal(got, []orderKind{sayOpened}) {
		t.Fatal(got)
	}
	if got := a.Ended(now, s, 4, "kicked"); got != nil {
		t.Fatalf("another client of the same session ended it: %v", got)
	}
	if got := kinds(a.Ended(now, s, 3, "kicked")); !slices.Equal(got, []orderKind{sayEnded}) {
		t.Fatal(got)
	}
	a.Noted(s, subjects.Opened) // late
	for range 3 {
		now = now.Add(beatEvery(agentBound))
		a.Here(now, "s1")
		got := a.Tick(now)
		if !slices.Equal(kinds(got), []orderKind{sayBeat, sayEnded}) || got[1].reason != "kicked" || got[1].session != s {
			t.Fatal(got)
		}
	}
	a.Noted(s, subjects.Ended)
	now = now.Add(beatEvery(agentBound))
	a.Here(now, "s1")
	if got := kinds(a.Tick(now)); !slices.Equal(got, []orderKind{sayBeat}) || !a.Settled() {
		t.Fatal(got)
	}
}

// L2: a session that must go goes, also if it appears after the word.
// Contract: Y3 B6
func TestL2KickBeforeConnect(t *testing.T) {
	now := time.Unix(1000, 0)
	a := newAgent(now, agentBound)
	s, other := atNode("n1", 7), atNode("n1", 8)
	if got := a.Kick(now, s); got != nil {
		t.Fatal(got)
	}
	if got := kinds(a.Opened(now, other, 2, "i")); slices.Contains(got, closeClient) {
		t.Fatal("it closed another generation")
	}
	got := a.Opened(now, s, 3, "i")
	if !slices.Equal(kinds(got), []orderKind{sayOpened, closeClient}) || got[1].client != 3 {
		t.Fatal(got)
	}
	if got := a.Kick(now, other); len(got) != 1 || got[0].client != 2 {
		t.Fatal(got)
	}
	// What never appears is forgotten.
	a.Kick(now, atNode("n2", 1))
	a.Tick(now.Add(kickMemory))
	if len(a.kicks) != 0 {
		t.Fatal(a.kicks)
	}
}

// L3: a session service that the agent has not met is told of every session.
// Contract: Y3 B12
func TestL3NewServiceIsTold(t *testing.T) {
	now := time.Unix(1000, 0)
	a := newAgent(now, agentBound)
	a.Here(now, "s1")
	for gen := range uint64(3) {
		a.Opened(now, atNode("n1", gen+1), gen, "i")
		a.Noted(atNode("n1", gen+1), subjects.Opened)
	}
	if got := a.Here(now, "s1"); got != nil {
		t.Fatal(got)
	}
	if got := kinds(a.Here(now, "s2")); !slices.Equal(got, []orderKind{sayOpened, sayOpened, sayOpened}) {
		t.Fatal(got)
	}
	for i := range 10 * maxServices {
		a.Here(now, fmt.Sprint(i))
		if len(a.services) > maxServices {
			t.Fatal("it remembers without bound")
		}
	}
}

// L4: a silence shorter than the bound closes nothing; at the bound every
// session is closed once, and the link each bound until the hub is heard.
// Contract: Y3 J5
func TestL4SilenceCuts(t *testing.T) {
	start := time.Unix(1000, 0)
	a := newAgent(start, agentBound)
	a.Here(start, "s1")
	a.Opened(start, atNode("n1", 1), 1, "i")
	a.Opened(start, atNode("n2", 2), 2, "i")
	var at []time.Duration
	closed := map[uint64]int{}
	var away time.Duration
	for d := time.Duration(0); d < 3*agentBound; d += 100 * time.Millisecond {
		for _, o := range a.Tick(start.Add(d)) {
			switch o.kind {
			case closeLink:
				at = append(at, d)
			case closeClient:
				closed[o.client]++
				a.Ended(start.Add(d), o.session, o.client, "kicked")
			case tellAway:
				away = d
			default:
			}
		}
	}
	if !slices.Equal(at, []time.Duration{agentBound, 2 * agentBound}) || closed[1] != 1 || closed[2] != 1 || away != agentBound/2 {
		t.Fatalf("cut at %v, closed %v, away at %v", at, closed, away)
	}
	// Back again: the hub hears of it.
	back := start.Add(3 * agentBound)
	if got := kinds(a.Here(back, "s1")); !slices.Equal(got, []orderKind{tellNear}) {
		t.Fatal(got)
	}
	if got := kinds(a.Tick(back)); !slices.Equal(got, []orderKind{sayBeat, sayEnded, sayEnded}) {
		t.Fatal(got)
	}
}

// Whatever happens in whatever order, no session the agent knows of is left
// unsaid, and nothing is kept of what is over and noted.
// Contract: Y3
func TestAgentSettles(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		now := time.Unix(1000, 0)
		a := newAgent(now, agentBound)
		client := uint64(0)
		clients := map[subjects.Session]uint64{}
		for range rapid.IntRange(0, 60).Draw(t, "events") {
			s := atNode(rapid.SampledFrom([]string{"n1", "n2"}).Draw(t, "node"), rapid.Uint64Range(1, 3).Draw(t, "gen"))
			now = now.Add(time.Duration(rapid.IntRange(0, 2000).Draw(t, "ms")) * time.Millisecond)
			switch rapid.IntRange(0, 5).Draw(t, "event") {
			case 0:
				client++
				clients[s] = client
				a.Opened(now, s, client, "i")
			case 1:
				a.Ended(now, s, clients[s], "kicked")
			case 2:
				a.Noted(s, rapid.SampledFrom([]subjects.Verb{subjects.Opened, subjects.Ended}).Draw(t, "verb"))
			case 3:
				a.Kick(now, s)
			case 4:
				a.Here(now, rapid.SampledFrom([]string{"s1", "s2"}).Draw(t, "service"))
			case 5:
				a.Tick(now)
			}
		}
		for _, o := range a.Stop() {
			a.Ended(now, o.session, o.client, "kicked")
		}
		now = now.Add(time.Hour)
		for _, o := range a.Tick(now) {
			switch o.kind {
			case sayOpened:
				a.Noted(o.session, subjects.Opened)
			case sayEnded:
				a.Noted(o.session, subjects.Ended)
			default:
			}
		}
		if !a.Settled() || len(a.kicks) != 0 {
			t.Fatalf("left: %v %v %v", a.sessions, a.words, a.kicks)
		}
	})
}

// What is at a leaf is alive by its heartbeats, whatever its agent could say.
// Contract: B12 Y3
func TestLiveAtALeaf(t *testing.T) {
	now := time.Unix(1000, 0)
	l := newLive(5 * time.Second)
	s := atNode("n1", 1)
	l.LeafBeat(leafID("edge1", "l1"), "server1")
	l.Admitted(now, s, "i1")
	l.AtLeaf(s, "l1", "server1")
	for range 60 { // longer than connectBound, and the agent's word never came
		now = now.Add(time.Second)
		l.Heard(now, s)
		if out := l.Expire(now); out != nil {
			t.Fatalf("a living session is closed: %+v", out)
		}
		if _, duplicate := l.Duplicate(now, nodeID(s), "i2"); !duplicate {
			t.Fatal("another instance may have the name")
		}
	}
	// A newer session: the older must go, though nobody said that it stands.
	newer := atNode("n1", 2)
	if out := l.Admitted(now, newer, "i1"); len(out) != 1 || out[0].kind != evict || out[0].session != s || out[0].leaf != "l1" {
		t.Fatalf("%+v", out)
	}
	l.AtLeaf(newer, "l1", "server1")
	// It is still heard: the kick was lost. It is told once a second at most.
	if out := l.Insist(now, s); len(out) != 1 || out[0].session != s || out[0].leaf != "l1" || out[0].reason != reasonSuperseded {
		t.Fatalf("%+v", out)
	}
	if out := l.Insist(now.Add(insistInterval-1), s); out != nil {
		t.Fatalf("%+v", out)
	}
	if out := l.Insist(now, newer); out != nil {
		t.Fatalf("a good session is told to go: %+v", out)
	}
	// It appears late, under its lower generation.
	if out := l.LeafOpened(now, s, "l1", "i1"); len(out) != 1 || out[0].kind != evict || out[0].session != s || out[0].leaf != "l1" {
		t.Fatalf("%+v", out)
	}
	// Another leaf cannot end it.
	l.LeafEnded(newer, "l2")
	if _, duplicate := l.Duplicate(now, nodeID(s), "i2"); !duplicate {
		t.Fatal("another leaf ended the session")
	}
	l.LeafEnded(s, "l1")
	l.LeafEnded(newer, "l1")
	if _, duplicate := l.Duplicate(now, nodeID(s), "i2"); duplicate {
		t.Fatal("it is still there")
	}
}

// A session that is revoked before its agent has said that it stands is told so
// each time, and nothing else.
// Contract: B3 B8 Y3
func TestLiveRevokedAtALeaf(t *testing.T) {
	now := time.Unix(1000, 0)
	l := newLive(5 * time.Second)
	s := atNode("n1", 1)
	l.LeafBeat(leafID("edge1", "l1"), "server1")
	l.Admitted(now, s, "i1")
	l.AtLeaf(s, "l1", "server1")
	for what, out := range map[string][]effect{
		"at once":          l.MemberChanged(nodeID(s), true),
		"when it appears":  l.LeafOpened(now, s, "l1", "i1"),
		"when it is heard": l.Insist(now, s),
	} {
		if len(out) != 1 || out[0].kind != evict || out[0].session != s || out[0].reason != string(refusedRevoked) {
			t.Errorf("%s: %+v", what, out)
		}
	}
}

// A leaf that begins anew, is revoked or falls silent takes its sessions with it,
// and no other's.
// Contract: Y3 B8
func TestLiveLeafGone(t *testing.T) {
	now := time.Unix(1000, 0)
	id := leafID("edge1", "l1")
	for name, gone := range map[string]func(l *live) []effect{
		"restarted": func(l *live) []effect { return l.LeafBeat(id, "server2") },
		"revoked":   func(l *live) []effect { return l.MemberChanged(id, true) },
		"silent":    func(l *live) []effect { return l.Expire(now.Add(connectBound)) },
	} {
		l := newLive(5 * time.Second)
		l.LeafBeat(id, "server1")
		l.LeafBeat(leafID("edge1", "l2"), "server9")
		l.LeafOpened(now, atNode("n1", 1), "l1", "i1")
		l.LeafOpened(now.Add(time.Second), atNode("n2", 2), "l2", "i2")
		l.Connected(now, atNode("n3", 3), connID{"hub", 1}, "i3")
		if out := l.LeafBeat(id, "server1"); out != nil {
			t.Fatalf("%s: the same process again: %+v", name, out)
		}
		out := gone(l)
		if len(out) != 1 || out[0].kind != tellClosed || out[0].session != atNode("n1", 1) {
			t.Errorf("%s: %+v", name, out)
		}
		if l.Sessions() != 2 {
			t.Errorf("%s: %d sessions are left", name, l.Sessions())
		}
	}
}
