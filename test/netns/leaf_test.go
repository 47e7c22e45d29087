//go:build linux

package netns

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"
)

// hubGone is how long TestHubGone takes the hub away: longer than every bound
// there is between leaf, hub, Edge and Node.
var hubGone = flag.Duration("hub-gone", 20*time.Second, "how long the hub is away under a living leaf")

// The hub is gone under a living leaf, for longer than any bound, killed and
// unreachable: the site's streams end with one terminal each, and when the hub is
// back the site's Node is, too, within F10's bound.
//
// Contract: Y3 F2 F9 F10 J4 S1 S4
func TestHubGone(t *testing.T) {
	t.Parallel()
	f := newFabric(t, plan{brokers: 1, leaves: []string{"attic"}, nodes: []string{"far@attic"}})
	hub, edge, leaf, far := f.start("broker-1"), f.start("edge"), f.start("leaf-attic"), f.start("node-far")
	gen := edge.connected("far", 0)
	f.served("far")
	streams := []*stream{f.open("far", 100_000, pace), f.open("far", 100_000, pace)}
	hub.kill()
	f.broken(streams...)
	f.elapse(*hubGone)
	hub = f.start("broker-1")
	hub.ready()
	live := time.Now()
	gen = edge.connected("far", gen)
	t.Logf("killed for %v: the Node behind the leaf was back %v after the hub", *hubGone, time.Since(live).Round(time.Millisecond))
	within(t, live, interval+2*time.Second)
	f.served("far")

	streams = []*stream{f.open("far", 100_000, pace)}
	hub.blackHole()
	f.broken(streams...)
	leaf.log.AwaitEvent(t, "leaf.cut")
	hub.heal()
	live = time.Now()
	edge.connected("far", gen)
	t.Logf("unreachable until the leaf closed its Nodes: back %v after the hub", time.Since(live).Round(time.Millisecond))
	f.served("far")
	for _, p := range []*process{hub, edge, leaf, far} {
		p.alive()
	}
}

// within proves that no more than d has passed since, for which a busy machine
// has some slack.
func within(t testing.TB, since time.Time, d time.Duration) {
	t.Helper()
	if took := time.Since(since); took > d+slack {
		t.Errorf("it took %v, not %v", took, d)
	}
}

// A leaf of another CA is refused, and both ends say why; so is one whose key is
// not the one that is registered, and one that claims another edge. The hub and
// its Nodes notice nothing.
//
// Contract: Y3 B2 B3
func TestLeafRefused(t *testing.T) {
	t.Parallel()
	f := newFabric(t, plan{brokers: 1, leaves: []string{"attic", "cellar"}, nodes: []string{"n1", "far@attic"}})
	// The same names under another authority.
	foreign := f.path("foreign")
	f.iop("init", "--out", foreign, "--edge", "home", "--demo", "--broker", f.address("broker-1"),
		"--leaf", "attic="+f.address("leaf-attic"), "--leaf", "cellar="+f.address("leaf-cellar"), "--node", "n1")
	away := f.path("away") // and of another edge under our own authority
	own := func(dir, member, file string) {
		b, err := os.ReadFile(f.path(member + "/" + file))
		must(t, err)
		must(t, os.MkdirAll(dir+"/"+member, 0o700))
		must(t, os.WriteFile(dir+"/"+member+"/"+file, b, 0o600))
	}
	for _, file := range []string{"ca.key", "ca.pem", "issuer.nk", "system.nk", "callout.nk", "service.nk"} {
		own(away, "authority", file)
	}
	f.iop("init", "--out", away, "--edge", "elsewhere", "--demo", "--broker", f.address("broker-1"), "--leaf", "attic="+f.address("leaf-attic"), "--node", "n1")

	// The hub knows the node of the other edge, which will come through our leaf.
	b, err := os.ReadFile(away + "/broker-1/broker-1.yaml")
	must(t, err)
	for line := range strings.Lines(string(b)) {
		if strings.Contains(line, "role: node") {
			f.edit("broker-1", "  members:", "  members:\n"+line+"  #")
		}
	}
	must(t, os.Rename(away+"/node-n1", f.path("node-alien")))
	must(t, os.Rename(f.path("node-alien/node-n1.yaml"), f.config("node-alien")))
	f.knowing("node-alien", "leaf-attic")

	hub, edge := f.start("broker-1"), f.start("edge")
	f.start("node-n1")
	edge.connected("n1", 0)
	stream := f.open("n1", tokens, pace)

	// A CA that trusts both, or the leaf would refuse the hub first.
	foreignCA, err := os.ReadFile(foreign + "/leaf-attic/ca.pem")
	must(t, err)
	ownCA, err := os.ReadFile(f.path("leaf-attic/ca.pem"))
	must(t, err)
	must(t, os.WriteFile(foreign+"/leaf-attic/ca.pem", append(ownCA, foreignCA...), 0o600))

	swap := func(from string, files ...string) func() {
		var back []func()
		for _, file := range files {
			path := f.path("leaf-attic/" + file)
			was, err := os.ReadFile(path)
			must(t, err)
			is, err := os.ReadFile(from + "/" + file)
			must(t, err)
			must(t, os.WriteFile(path, is, 0o600))
			back = append(back, func() { must(t, os.WriteFile(path, was, 0o600)) })
		}
		return func() {
			for _, b := range back {
				b()
			}
		}
	}
	for _, c := range []struct {
		what  string
		from  string
		files []string
		leaf  string // what its log says
		hub   string // and the hub's
	}{
		{"a certificate of another CA", foreign + "/leaf-attic", []string{"cert.pem", "cert.key", "ca.pem"}, "of a CA that the hub trusts", "reason=certificate"},
		{"a key that is not registered", foreign + "/leaf-attic", []string{"user.nk"}, "", "reason=nkey"},
		{"of another edge", away + "/leaf-attic", []string{"cert.pem", "cert.key", "user.nk", "leaf-attic.yaml"}, "", "edge=elsewhere"},
	} {
		back := swap(c.from, c.files...)
		seen := len(hub.log.String())
		leaf := f.start("leaf-attic")
		leaf.log.AwaitEvent(t, "leaf.link_refused", c.leaf)
		var told string
		hub.log.Await(t, func(line string) bool {
			told = line
			return strings.Contains(hub.log.String()[seen:], line) && strings.Contains(line, "msg=broker.refused ") && strings.Contains(line, c.hub)
		})
		for line := range strings.Lines(leaf.log.String()) {
			if strings.Contains(line, "leaf.link_refused") {
				t.Logf("%s:\n  leaf: %s  hub:  %s", c.what, line, told)
				break
			}
		}
		if status, body, err := leaf.get("/readyz"); err == nil && status == 200 {
			t.Errorf("%s: the leaf calls itself ready: %s", c.what, body)
		}
		leaf.alive()
		leaf.kill()
		back()
	}
	f.whole(tokens, stream)
	f.served("n1")
	if edge.log.Count("node.disconnected") != 0 {
		t.Error("the hub's own Node has lost its session")
	}
	f.start("leaf-attic")
	f.start("node-far")
	edge.connected("far", 0)
	f.served("far")
	alien := f.start("node-alien")
	alien.log.AwaitEvent(t, "node.dial_failed", "wrong_edge")
	hub.log.AwaitEvent(t, "broker.refused", "reason=wrong_edge", "edge=elsewhere", "name=n1")
	f.served("far", "n1")
	hub.alive()
}

// A leaf at a cluster: the broker its link leads to is killed. It takes another,
// and streams through it lose nothing; where the killed one is the Edge's too, it
// is the same.
//
// Contract: Y2 Y3 J5
func TestLeafAtACluster(t *testing.T) {
	f, brokers := three(t, plan{leaves: []string{"attic"}, nodes: []string{"far@attic"}})
	edge := f.start("edge")
	for _, b := range brokers {
		b.ready()
	}
	leaf, far := f.start("leaf-attic"), f.start("node-far")
	edge.connected("far", 0)
	hub := leaf.broker()
	for round := range 2 {
		var streams []*stream
		for range 8 {
			streams = append(streams, f.open("far", tokens, pace))
		}
		sent := far.metric("iop_node_frames_resent_total")
		what := fmt.Sprintf("%s killed, which the leaf is at", hub)
		if at := edge.broker(); at == hub {
			what += ", and the Edge"
		}
		running(streams...)
		brokers[hub].kill()
		f.whole(tokens, streams...)
		t.Logf("%s: %d streams whole, the longest pause %v, %v frames sent again",
			what, len(streams), longest(streams...), far.metric("iop_node_frames_resent_total")-sent)
		if edge.log.Count("node.disconnected") != 0 {
			t.Fatalf("%s: the session has ended", what)
		}
		if round == 0 {
			brokers[hub] = f.start(hub)
			brokers[hub].ready()
			hub = leaf.broker()
		}
	}
}
