//go:build linux

package netns

import (
	"slices"
	"testing"
	"time"
)

// Only one direction of a link is gone. It ends in a fence within the heartbeat
// bound, with one terminal for each stream, and after healing every node is live
// again within F10's bound.
//
// Contract: F2 F9 F10 J4
func TestOneDirectionGone(t *testing.T) {
	t.Parallel()
	const bound = 3 * time.Second
	f := newFabric(t, plan{brokers: 1, nodes: []string{"n1", "n2"}, bound: bound})
	hub := f.start("broker-1")
	edge, n1, n2 := f.start("edge"), f.start("node-n1"), f.start("node-n2")
	gens := map[string]uint64{"n1": edge.connected("n1", 0), "n2": edge.connected("n2", 0)}
	for _, fault := range []struct {
		what string
		do   func()
		heal func()
		hit  []string // the nodes it is about
	}{
		{"the Edge is deaf", edge.deaf, edge.heal, []string{"n1", "n2"}},
		{"the Edge is mute", edge.mute, edge.heal, []string{"n1", "n2"}},
		{"a Node is deaf", n1.deaf, n1.heal, []string{"n1"}},
		{"a Node is mute", n1.mute, n1.heal, []string{"n1"}},
	} {
		var lost, kept []*stream
		for range 3 {
			for n := range gens {
				if slices.Contains(fault.hit, n) {
					lost = append(lost, f.open(n, 100_000, pace))
				} else {
					kept = append(kept, f.open(n, 3*tokens, pace))
				}
			}
		}
		began := time.Now()
		fault.do()
		f.broken(lost...)
		took := time.Since(began)
		for _, n := range fault.hit {
			p := map[string]*process{"n1": n1, "n2": n2}[n]
			p.until("out of its session", func() (string, bool) { return "", p.metric("iop_node_ready") == 0 })
		}
		ended := time.Since(began)
		fault.heal()
		healed := time.Now()
		for _, n := range fault.hit {
			gens[n] = edge.connected(n, gens[n])
		}
		t.Logf("%s: its streams had ended after %v, its Nodes' sessions after %v (bound %v), all live again %v after healing",
			fault.what, took.Round(time.Millisecond), ended.Round(time.Millisecond), bound, time.Since(healed).Round(time.Millisecond))
		within(t, healed, interval+2*time.Second)
		if limit := bound + time.Second + slack; took > limit || ended > limit {
			t.Errorf("%s: that is more than the bound", fault.what)
		}
		f.served("n1", "n2")
		if len(kept) > 0 {
			f.whole(3*tokens, kept...)
		}
	}
	for _, p := range []*process{hub, edge, n1, n2} {
		p.alive()
	}
}

// Whatever the last fault was, after it every node that is up is live again within
// reconnect.interval_sec and two seconds, and every stream has its terminal.
//
// Contract: F10 S2 J4 B12
func TestLiveAgainAfterTheLastFault(t *testing.T) {
	t.Parallel()
	f := newFabric(t, plan{brokers: 1, nodes: []string{"n1", "n2", "n3", "n4"}, bound: 2 * time.Second})
	hub, edge := f.start("broker-1"), f.start("edge")
	gens, nodes := map[string]uint64{}, map[string]*process{}
	for _, n := range []string{"n1", "n2", "n3", "n4"} {
		nodes[n] = f.start("node-" + n)
	}
	for n := range nodes {
		gens[n] = edge.connected(n, 0)
	}
	var streams []*stream
	for n := range nodes {
		streams = append(streams, f.open(n, 100_000, pace))
	}
	// A fault of each kind, at once; nobody is left with a session.
	nodes["n1"].pause()
	nodes["n2"].blackHole()
	nodes["n3"].reset()
	nodes["n4"].kill()
	edge.mute()
	f.broken(streams...)
	hub.kill()
	hub = f.start("broker-1")
	hub.ready()

	nodes["n1"].resume()
	nodes["n2"].heal()
	nodes["n3"].heal()
	nodes["n4"] = f.start("node-n4")
	edge.heal()
	last := time.Now()
	for n := range nodes {
		gens[n] = edge.connected(n, gens[n])
	}
	t.Logf("all are live again %v after the last fault (bound %v)", time.Since(last).Round(time.Millisecond), interval+2*time.Second)
	within(t, last, interval+2*time.Second)
	f.served("n1", "n2", "n3", "n4")
	if n := edge.metric("iop_edge_attempts_open"); n != 0 {
		t.Errorf("%v attempts are open", n)
	}
	for _, p := range append([]*process{hub, edge}, nodes["n1"], nodes["n2"], nodes["n3"], nodes["n4"]) {
		p.alive()
	}
}
