package subjects

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/iop-fabric/iop/wire"
)

var (
	someSession = Session{Edge: "edge1", Node: "n1", Gen: 42}
	someRun     = strings.Repeat("a1", 13)
	someConn    = strings.Repeat("c3", 16)
)

func drawName(t *rapid.T, label string) string {
	return rapid.StringMatching(`[a-z0-9][a-z0-9_-]{0,62}`).Filter(ValidName).Draw(t, label)
}

func drawSession(t *rapid.T) Session {
	return Session{Edge: drawName(t, "edge"), Node: drawName(t, "node"), Gen: rapid.Uint64Min(1).Draw(t, "gen")}
}

func runFor(takesRun bool) string {
	if takesRun {
		return someRun
	}
	return ""
}

// What every builder makes parses back to what it was made of, and to nothing
// in the other direction.
// Contract: U1
func TestI1RoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := drawSession(t)
		if got, err := ParseSession(s.String()); err != nil || got != s {
			t.Fatalf("session %q: %v, %v", s, got, err)
		}
		for v, takesRun := range upVerbs {
			subject := s.Up(v, runFor(takesRun))
			got, err := ParseUp(subject)
			if want := (Message{Session: s, Verb: v, Run: runFor(takesRun)}); err != nil || got != want {
				t.Fatalf("%s: %+v, %v", subject, got, err)
			}
			if _, err := ParseDown(subject); err == nil {
				t.Fatalf("%s parses as down", subject)
			}
		}
		for v, takesRun := range downVerbs {
			subject := s.Down(v, runFor(takesRun))
			got, err := ParseDown(subject)
			if want := (Message{Session: s, Verb: v, Run: runFor(takesRun)}); err != nil || got != want {
				t.Fatalf("%s: %+v, %v", subject, got, err)
			}
			if _, err := ParseUp(subject); err == nil {
				t.Fatalf("%s parses as up", subject)
			}
		}
		for v := range ctlVerbs {
			if edge, got, err := ParseCtl(Ctl(s.Edge, v)); err != nil || edge != s.Edge || got != v {
				t.Fatalf("ctl %s: %s %s %v", v, edge, got, err)
			}
		}
		for v := range storeOps {
			if edge, got, err := ParseStore(Store(s.Edge, v)); err != nil || edge != s.Edge || got != v {
				t.Fatalf("store %s: %s %s %v", v, edge, got, err)
			}
		}
		if edge, leaf, err := ParseCallout(Callout(s.Edge, s.Node)); err != nil || edge != s.Edge || leaf != s.Node {
			t.Fatalf("callout: %s %s %v", edge, leaf, err)
		}
		for v := range leafVerbs {
			if edge, leaf, got, err := ParseLeaf(Leaf(s.Edge, s.Node, v)); err != nil || edge != s.Edge || leaf != s.Node || got != v {
				t.Fatalf("leaf %s: %s %s %s %v", v, edge, leaf, got, err)
			}
			if !match(LeafEverywhere(v), Leaf(s.Edge, s.Node, v)) {
				t.Fatalf("%s does not match", LeafEverywhere(v))
			}
		}
		if run, err := ParseNoResponders(NoResponders(s.Edge, someRun)); err != nil || run != someRun {
			t.Fatalf("no responders: %s %v", run, err)
		}
	})
}

// hostile values hold what could widen, split or end a subject.
var hostile = []string{
	"", ".", "*", ">", "a.b", "a*", "*a", ">a", "a.>", "a b", "a\tb", "a\r\nb", "a\x00b", "A", "ä", "а", "-a", "_a", "_edge", "_nr",
	"ctl", "store", "callout", "$SYS", strings.Repeat("a", 64), "a/b", `a"b`,
}

// A builder given a value that is no token panics rather than build (I2).
// Contract: U1 Z1
func TestI2BuildersRefuse(t *testing.T) {
	for _, bad := range hostile {
		for name, build := range map[string]func(string){
			"up edge":           func(s string) { Session{s, "n1", 1}.Up(Register, "") },
			"up node":           func(s string) { Session{"e1", s, 1}.Up(Register, "") },
			"up run":            func(s string) { Session{"e1", "n1", 1}.Up(Frame, s) },
			"up verb":           func(s string) { Session{"e1", "n1", 1}.Up(Verb(s), "") },
			"down edge":         func(s string) { Session{s, "n1", 1}.Down(Register, "") },
			"down node":         func(s string) { Session{"e1", s, 1}.Down(Register, "") },
			"down run":          func(s string) { Session{"e1", "n1", 1}.Down(Tunnel, s) },
			"down verb":         func(s string) { Session{"e1", "n1", 1}.Down(Verb(s), "") },
			"up wildcard":       func(s string) { UpWildcard(s) },
			"down wildcard":     func(s string) { Session{"e1", s, 1}.DownWildcard() },
			"ctl edge":          func(s string) { Ctl(s, Closed) },
			"ctl verb":          func(s string) { Ctl("e1", Verb(s)) },
			"ctl wildcard":      func(s string) { CtlWildcard(s) },
			"store edge":        func(s string) { Store(s, Get) },
			"store op":          func(s string) { Store("e1", Verb(s)) },
			"callout edge":      func(s string) { Callout(s, "l1") },
			"callout leaf":      func(s string) { Callout("e1", s) },
			"leaf edge":         func(s string) { Leaf(s, "l1", Beat) },
			"leaf leaf":         func(s string) { Leaf("e1", s, Beat) },
			"leaf verb":         func(s string) { Leaf("e1", "l1", Verb(s)) },
			"leaf everywhere":   func(s string) { LeafEverywhere(Verb(s)) },
			"node inbox edge":   func(s string) { NodeInbox(s, "n1", someConn) },
			"node inbox node":   func(s string) { NodeInbox("e1", s, someConn) },
			"node inbox conn":   func(s string) { NodeInbox("e1", "n1", s) },
			"edge inbox":        func(s string) { EdgeInbox(s) },
			"no responders":     func(s string) { NoResponders(s, someRun) },
			"no responders run": func(s string) { NoResponders("e1", s) },
			"node permissions":  func(s string) { NodePermissions(Session{s, "n1", 1}, someConn) },
			"node permissions2": func(s string) { NodePermissions(Session{"e1", s, 1}, someConn) },
			"node permissions3": func(s string) { NodePermissions(Session{"e1", "n1", 1}, s) },
			"edge permissions":  func(s string) { EdgePermissions(s) },
			"leaf permissions":  func(s string) { LeafPermissions(s, "l1") },
			"leaf permissions2": func(s string) { LeafPermissions("e1", s) },
			"lobby permissions": func(s string) { LobbyPermissions(s, "n1", someConn) },
		} {
			if !panics(func() { build(bad) }) {
				t.Errorf("%s took %q", name, bad)
			}
		}
	}
	for name, build := range map[string]func(){
		"generation 0":         func() { Session{"e1", "n1", 0}.Up(Register, "") },
		"a run too many":       func() { someSession.Up(Register, someRun) },
		"a run too few":        func() { someSession.Up(Frame, "") },
		"down's verb going up": func() { someSession.Up(Tunnel, someRun) },
		"up's verb going down": func() { someSession.Down(Frame, someRun) },
	} {
		if !panics(build) {
			t.Errorf("%s was built", name)
		}
	}
}

func panics(fn func()) (did bool) {
	defer func() { did = recover() != nil }()
	fn()
	return false
}

// Contract: U1
func TestParsersRefuse(t *testing.T) {
	for _, subject := range []string{
		"", ".", ">", "iop.v1", "iop.v1.", "iop.v2.e1.n1.1.up.register", "IOP.v1.e1.n1.1.up.register",
		"iop.v1.e1.n1.1.up", "iop.v1.e1.n1.1.up.", "iop.v1.e1.n1.1.up.register.", "iop.v1.e1.n1.1.up.nothing",
		"iop.v1.e1.n1.0.up.register", "iop.v1.e1.n1.01.up.register", "iop.v1.e1.n1.+1.up.register", "iop.v1.e1.n1.-1.up.register",
		"iop.v1.e1.n1.1_0.up.register", "iop.v1.e1.n1.0x1.up.register", "iop.v1.e1.n1.18446744073709551616.up.register", "iop.v1.e1.n1..up.register",
		"iop.v1.e1.n1.1.up.frame", "iop.v1.e1.n1.1.up.frame.short", "iop.v1.e1.n1.1.up.frame." + strings.Repeat("a", 41),
		"iop.v1.e1.n1.1.up.frame." + strings.Repeat("A", 26), "iop.v1.e1.n1.1.up.frame." + someRun + ".x", "iop.v1.e1.n1.1.up.register." + someRun,
		"iop.v1.*.n1.1.up.register", "iop.v1.e1.>.1.up.register", "iop.v1.e1.ctl.1.up.register", "iop.v1.e1.n1.1.sideways.register",
		"iop.v1.e1.n1.1.down.tunnel." + someRun,
	} {
		if m, err := ParseUp(subject); err == nil {
			t.Errorf("up %q: %+v", subject, m)
		}
	}
	for _, subject := range []string{"", "iop.v1.e1.ctl", "iop.v1.e1.ctl.nothing", "iop.v1.*.ctl.closed", "iop.v1.e1.ctl.closed.x", "iop.v1.ctl.ctl.closed", "iop.v1.e1.store.get"} {
		if edge, v, err := ParseCtl(subject); err == nil {
			t.Errorf("ctl %q: %s %s", subject, edge, v)
		}
	}
	for _, subject := range []string{"", "iop.v1.e1.store", "iop.v1.e1.store.delete", "iop.v1.*.store.get", "iop.v1.e1.ctl.closed"} {
		if edge, v, err := ParseStore(subject); err == nil {
			t.Errorf("store %q: %s %s", subject, edge, v)
		}
	}
	for _, subject := range []string{"", "iop.v1.callout.e1", "iop.v1.callout.e1.*", "iop.v1.callout.e1.l1.x", "iop.v1.callout..l1"} {
		if edge, leaf, err := ParseCallout(subject); err == nil {
			t.Errorf("callout %q: %s %s", subject, edge, leaf)
		}
	}
	for _, subject := range []string{"", "iop.v1.e1.leaf.l1", "iop.v1.e1.leaf.l1.nothing", "iop.v1.e1.leaf.*.beat", "iop.v1.e1.leaf.l1.beat.x", "iop.v1.e1.ctl.l1.beat", "iop.v1.callout.leaf.l1.beat"} {
		if edge, leaf, v, err := ParseLeaf(subject); err == nil {
			t.Errorf("leaf %q: %s %s %s", subject, edge, leaf, v)
		}
	}
	for _, subject := range []string{"", someRun, "_INBOX.e1._edge." + someRun, "_INBOX.e1._nr.short", "x._nr." + someRun} {
		if run, err := ParseNoResponders(subject); err == nil {
			t.Errorf("no responders %q: %s", subject, run)
		}
	}
	for _, name := range []string{"", "e1.n1", "e1.n1.1.x", "e1.n1.0", "e1.n1.01", "!denied.unknown", "!denied.duplicate.17", "e1._edge.1", "e1._edge.x", "*.n1.1"} {
		if s, err := ParseSession(name); err == nil {
			t.Errorf("session %q: %v", name, s)
		}
	}
}

// A subject that parses is exactly the one its parts build: there is one
// spelling of each.
// Contract: U1
func FuzzParse(f *testing.F) {
	f.Add(someSession.Up(Register, ""))
	f.Add(someSession.Up(Frame, someRun))
	f.Add(someSession.Down(Tunnel, someRun))
	f.Add(Ctl("e1", Closed))
	f.Add(Store("e1", Put))
	f.Add(Callout("e1", "l1"))
	f.Add(Leaf("e1", "l1", Opened))
	f.Add(NoResponders("e1", someRun))
	f.Add("iop.v1.e1.n1.01.up.register")
	f.Add(someSession.String())
	f.Fuzz(func(t *testing.T, subject string) {
		if m, err := ParseUp(subject); err == nil && m.Session.Up(m.Verb, m.Run) != subject {
			t.Errorf("up %q: %+v", subject, m)
		}
		if m, err := ParseDown(subject); err == nil && m.Session.Down(m.Verb, m.Run) != subject {
			t.Errorf("down %q: %+v", subject, m)
		}
		if edge, v, err := ParseCtl(subject); err == nil && Ctl(edge, v) != subject {
			t.Errorf("ctl %q", subject)
		}
		if edge, v, err := ParseStore(subject); err == nil && Store(edge, v) != subject {
			t.Errorf("store %q", subject)
		}
		if edge, leaf, err := ParseCallout(subject); err == nil && Callout(edge, leaf) != subject {
			t.Errorf("callout %q", subject)
		}
		if edge, leaf, v, err := ParseLeaf(subject); err == nil && Leaf(edge, leaf, v) != subject {
			t.Errorf("leaf %q", subject)
		}
		if s, err := ParseSession(subject); err == nil && s.String() != subject {
			t.Errorf("session %q", subject)
		}
		if run, err := ParseNoResponders(subject); err == nil && !wire.ValidRunID(run) {
			t.Errorf("run %q", run)
		}
	})
}

// Names put anywhere into a subject never let it parse as another's.
// Contract: U1
func FuzzInjection(f *testing.F) {
	for _, s := range hostile {
		f.Add(s, s, s)
	}
	f.Fuzz(func(t *testing.T, edge, node, run string) {
		s := Session{Edge: edge, Node: node, Gen: 7}
		var subject string
		built := !panics(func() { subject = s.Up(Frame, run) })
		valid := ValidName(edge) && ValidName(node) && wire.ValidRunID(run)
		if built != valid {
			t.Fatalf("built %v with %q %q %q", built, edge, node, run)
		}
		if built && strings.Count(subject, ".") != 7 {
			t.Fatalf("%q has another shape", subject)
		}
		// As a peer would spell it, without our builders.
		raw := "iop.v1." + edge + "." + node + ".7.up.frame." + run
		m, err := ParseUp(raw)
		if (err == nil) != valid || (err == nil && m != (Message{s, Frame, run})) {
			t.Fatalf("%q parses as %+v, %v", raw, m, err)
		}
	})
}

// match reports whether a NATS subject filter covers another subject or filter.
func match(filter, subject string) bool {
	f, s := strings.Split(filter, "."), strings.Split(subject, ".")
	for i, tok := range f {
		switch {
		case tok == ">":
			return len(s) > i
		case i >= len(s):
			return false
		case tok == "*" && s[i] != ">":
		case tok != s[i]:
			return false
		}
	}
	return len(f) == len(s)
}

// overlap reports whether some subject matches both filters.
func overlap(a, b string) bool {
	x, y := strings.Split(a, "."), strings.Split(b, ".")
	for i := 0; ; i++ {
		switch {
		case i == len(x) || i == len(y):
			return i == len(x) && i == len(y)
		case x[i] == ">" || y[i] == ">":
			return true
		case x[i] != "*" && y[i] != "*" && x[i] != y[i]:
			return false
		}
	}
}

func covers(set []string, subject string) bool {
	return slices.ContainsFunc(set, func(f string) bool { return match(f, subject) })
}

func touches(set []string, filter string) bool {
	return slices.ContainsFunc(set, func(f string) bool { return overlap(f, filter) })
}

func TestMatch(t *testing.T) {
	for _, c := range []struct {
		filter, subject string
		want            bool
	}{
		{"a.b", "a.b", true},
		{"a.*", "a.b", true},
		{"a.>", "a.b.c", true},
		{"a.>", "a", false},
		{"a.*", "a.b.c", false},
		{"a.*", "a.>", false},
		{"a.>", "a.>", true},
		{"a.b", "a.*", false},
		{"a.*.c", "a.b", false},
	} {
		if got := match(c.filter, c.subject); got != c.want {
			t.Errorf("%s covers %s: %v", c.filter, c.subject, got)
		}
	}
	if !overlap("a.*.c", "a.b.>") || overlap("a.b", "a.b.c") || overlap("a.*", "b.*") {
		t.Error("overlap")
	}
}

// Each role may publish and read what its builders make, and its set touches no
// session, node or edge but its own.
// Contract: U2 B5
func TestI3PermissionsFitTheBuilders(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s, other := drawSession(t), drawSession(t)
		node, edge := NodePermissions(s, someConn), EdgePermissions(s.Edge)
		lobby, service := LobbyPermissions(s.Edge, s.Node, someConn), ServicePermissions()
		leaf := LeafPermissions(s.Edge, "l1")

		check := func(role string, set []string, subject string, want bool) {
			if covers(set, subject) != want || (!want && touches(set, subject)) {
				t.Fatalf("%s covers %s: %v, want %v", role, subject, covers(set, subject), want)
			}
		}
		for v, takesRun := range upVerbs {
			up := s.Up(v, runFor(takesRun))
			service1 := v == SessionVerb || v == Renew || v == Heartbeat
			check("node publishes", node.Publish, up, true)
			check("node reads", node.Subscribe, up, false)
			check("edge reads", edge.Subscribe, up, true)
			check("edge publishes", edge.Publish, up, false)
			check("service reads", service.Subscribe, up, service1)
			check("leaf carries", leaf.Publish, up, true)
			if other != s {
				check("node publishes", node.Publish, other.Up(v, runFor(takesRun)), false)
			}
			if other.Edge != s.Edge {
				check("edge reads", edge.Subscribe, other.Up(v, runFor(takesRun)), false)
				check("leaf carries", leaf.Publish, other.Up(v, runFor(takesRun)), false)
			}
		}
		for v, takesRun := range downVerbs {
			down := s.Down(v, runFor(takesRun))
			check("node reads", node.Subscribe, down, true)
			check("node publishes", node.Publish, down, false)
			check("edge publishes", edge.Publish, down, true)
			check("edge reads", edge.Subscribe, down, false)
			check("service publishes", service.Publish, down, v == SessionVerb || v == Renew || v == Fence)
			check("leaf carries", leaf.Subscribe, down, true)
			if other != s {
				check("node reads", node.Subscribe, other.Down(v, runFor(takesRun)), false)
			}
			if other.Edge != s.Edge {
				check("edge publishes", edge.Publish, other.Down(v, runFor(takesRun)), false)
				check("leaf carries", leaf.Subscribe, other.Down(v, runFor(takesRun)), false)
			}
		}
		for v := range ctlVerbs {
			check("service publishes", service.Publish, Ctl(s.Edge, v), true)
			check("edge reads", edge.Subscribe, Ctl(s.Edge, v), true)
			check("edge publishes", edge.Publish, Ctl(s.Edge, v), false)
			check("node publishes", node.Publish, Ctl(s.Edge, v), false)
			check("node reads", node.Subscribe, Ctl(s.Edge, v), false)
			check("leaf publishes", leaf.Publish, Ctl(s.Edge, v), false)
		}
		for v := range leafVerbs {
			agents := v == Beat || v == Opened || v == Ended
			agent := LeafAgentPermissions(s.Edge, "l1")
			own := Leaf(s.Edge, "l1", v)
			check("leaf publishes", leaf.Publish, own, agents)
			check("leaf reads", leaf.Subscribe, own, !agents)
			check("agent publishes", agent.Publish, own, agents)
			check("agent reads", agent.Subscribe, own, !agents)
			check("service reads", service.Subscribe, own, agents)
			check("service publishes", service.Publish, own, !agents)
			for _, p := range []Permissions{node, edge, lobby} {
				check("no leaf", p.Publish, own, false)
				check("no leaf", p.Subscribe, own, false)
			}
			foreign := []string{Leaf(s.Edge, "l2", v)}
			if other.Edge != s.Edge {
				foreign = append(foreign, Leaf(other.Edge, "l1", v))
			}
			for _, subject := range foreign {
				for _, p := range []Permissions{leaf, agent} {
					check("another leaf", p.Publish, subject, false)
					check("another leaf", p.Subscribe, subject, false)
				}
			}
		}
		for v := range storeOps {
			check("edge publishes", edge.Publish, Store(s.Edge, v), true)
			check("service reads", service.Subscribe, Store(s.Edge, v), true)
			check("node publishes", node.Publish, Store(s.Edge, v), false)
			check("leaf publishes", leaf.Publish, Store(s.Edge, v), false)
			if other.Edge != s.Edge {
				check("edge publishes", edge.Publish, Store(other.Edge, v), false)
			}
		}
		own, nr := NodeInbox(s.Edge, s.Node, someConn)+".x", NoResponders(s.Edge, someRun)
		check("node reads", node.Subscribe, own, true)
		check("lobby reads", lobby.Subscribe, own, true)
		check("edge reads", edge.Subscribe, own, false)
		check("service publishes", service.Publish, own, false)
		check("edge reads", edge.Subscribe, nr, true)
		check("edge reads", edge.Subscribe, EdgeInbox(s.Edge)+".x", true)
		check("service publishes", service.Publish, EdgeInbox(s.Edge)+".x", true)
		check("node reads", node.Subscribe, EdgeInbox(s.Edge)+".x", false)
		check("node reads", node.Subscribe, nr, false)
		check("node reads", node.Subscribe, NodeInbox(s.Edge, s.Node, strings.Repeat("d", 32))+".x", false)
		check("leaf carries", leaf.Publish, Callout(s.Edge, "l1"), true)
		check("leaf carries", leaf.Publish, Callout(s.Edge, "l2"), false)
		for role, set := range map[string][]string{"node": node.Publish, "lobby": lobby.Publish, "edge": edge.Publish} {
			check(role, set, UserInfo, true)
		}
		if !slices.Equal(lobby.Publish, []string{UserInfo}) || len(lobby.Subscribe) != 1 {
			t.Fatalf("the lobby may do more than read: %+v", lobby)
		}
		for role, p := range map[string]Permissions{"node": node, "lobby": lobby, "edge": edge, "service": service, "leaf": leaf} {
			for _, far := range []string{"$JS.>", "$KV.>", "$SYS.REQ.USER.AUTH", "$SYS.REQ.SERVER.>", "$SYS.REQ.ACCOUNT.>", "$SYS.ACCOUNT.>"} {
				if touches(p.Publish, far) || touches(p.Subscribe, far) {
					t.Fatalf("%s touches %s", role, far)
				}
			}
		}
	})
}

// One filter covers all that a session may send to one Edge, and no other's.
// Contract: U3
func TestOneWildcardForUp(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := drawSession(t)
		for v, takesRun := range upVerbs {
			if !match(UpWildcard(s.Edge), s.Up(v, runFor(takesRun))) {
				t.Fatalf("%s is not covered", s.Up(v, runFor(takesRun)))
			}
			if match(UpWildcard("other"), s.Up(v, runFor(takesRun))) != (s.Edge == "other") {
				t.Fatal("another Edge's is covered")
			}
			if !takesRun && !match(UpEverywhere(v), s.Up(v, "")) {
				t.Fatalf("%s is not covered everywhere", v)
			}
		}
		for v, takesRun := range downVerbs {
			if !match(s.DownWildcard(), s.Down(v, runFor(takesRun))) || match(UpWildcard(s.Edge), s.Down(v, runFor(takesRun))) {
				t.Fatalf("down %s", v)
			}
		}
		if !match(CtlWildcard(s.Edge), Ctl(s.Edge, Closed)) || !match(StoreEverywhere(), Store(s.Edge, Get)) ||
			!match(CalloutEverywhere(), Callout(s.Edge, s.Node)) || !match(NoRespondersWildcard(s.Edge), NoResponders(s.Edge, someRun)) {
			t.Fatal("a wildcard covers less than it is for")
		}
	})
}

// Parsing allocates nothing: it runs for every frame.
func TestParseAllocatesNothing(t *testing.T) {
	subject := someSession.Up(Frame, someRun)
	if n := testing.AllocsPerRun(100, func() {
		if _, err := ParseUp(subject); err != nil {
			t.Fatal(err)
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkParseUp(b *testing.B) {
	subject := someSession.Up(Frame, someRun)
	for b.Loop() {
		if _, err := ParseUp(subject); err != nil {
			b.Fatal(err)
		}
	}
}

func ExampleSession_Up() {
	fmt.Println(Session{Edge: "home", Node: "gpu1", Gen: 7}.Up(Heartbeat, ""))
	// Output: iop.v1.home.gpu1.7.up.heartbeat
}

// Contract: U1 Z5
func TestUpOf(t *testing.T) {
	want := Session{Edge: "e", Node: "n", Gen: 7}
	for _, subject := range []string{"iop.v1.e.n.7.up.x", "iop.v1.e.n.7.up.frame", "iop.v1.e.n.7.up.a.b.c.d", want.Up(Ready, "")} {
		if s, err := UpOf(subject); err != nil || s != want {
			t.Errorf("%s: %v %v", subject, s, err)
		}
	}
	for _, subject := range []string{"", "iop.v1.e.n.7.up", "iop.v1.e.n.07.up.x", "iop.v1.e.n.0.up.x", "iop.v1.e.*.7.up.x", "iop.v1.e.n.7.down.x", "iop.v2.e.n.7.up.x", "iop.v1..n.7.up.x", "iop.v1.e.ctl.closed"} {
		if s, err := UpOf(subject); err == nil {
			t.Errorf("%s is %v's", subject, s)
		}
	}
}
