//go:build linux

package netns

import (
	"testing"
	"time"
)

// The broker that a Node is at is killed, stopped, paused, cut off: sessions elsewhere and
// the streams under them notice nothing; the Node's own end with one terminal
// each, and it is back at another broker, while the first is still away.
//
// Contract: Y2 S2 R9 F2 F9 F10 J4 G1
func TestNodeLosesItsBroker(t *testing.T) {
	const bound = 5 * time.Second
	f, brokers := three(t, plan{nodes: []string{"n1", "n2", "n3"}, bound: bound})
	f.knowing("edge", "broker-1", "broker-2")
	f.knowing("node-n2", "broker-1")
	f.knowing("node-n3", "broker-2")
	edge, n2, n3 := f.start("edge"), f.start("node-n2"), f.start("node-n3")
	edge.connected("n2", 0)
	edge.connected("n3", 0)
	ended := func() int { return n2.log.Count("node.session_ended") + n3.log.Count("node.session_ended") }
	before := ended() // while all of it started
	var gen uint64
	for _, fault := range []struct {
		what   string
		do     func(*process)
		heal   func()
		within time.Duration
	}{
		{
			"killed", (*process).kill,
			func() { brokers["broker-3"] = f.start("broker-3") },
			2 * time.Second,
		},
		{
			// Its streams would go on for ever, so they have all of the 8 s that it grants.
			"told to stop", (*process).stop,
			func() { brokers["broker-3"] = f.start("broker-3") },
			10 * time.Second,
		},
		{
			"paused", (*process).pause,
			func() { brokers["broker-3"].resume() },
			bound + time.Second,
		},
		{
			"cut off", func(p *process) { p.blackHole() },
			func() { brokers["broker-3"].heal() },
			bound + time.Second,
		},
	} {
		brokers["broker-3"].ready()
		n1 := f.startAt("node-n1", "broker-3")
		gen = edge.connected("n1", gen)
		var own, elsewhere []*stream
		for range 4 {
			own = append(own, f.open("n1", 100_000, pace))
			elsewhere = append(elsewhere, f.open("n2", 2*tokens, pace), f.open("n3", 2*tokens, pace))
		}
		began := time.Now()
		fault.do(brokers["broker-3"])
		gen = edge.connected("n1", gen)
		took := time.Since(began)
		f.broken(own...)
		f.served("n1", "n2", "n3")
		f.whole(2*tokens, elsewhere...)
		t.Logf("broker-3 %s: its Node was back after %v (bound %v), the longest pause elsewhere %v", fault.what, took.Round(time.Millisecond), bound, longest(elsewhere...))
		if took > fault.within+slack {
			t.Errorf("broker-3 %s: its Node was back after %v, not within %v", fault.what, took, fault.within)
		}
		fault.heal()
		n1.kill()
	}
	if n := ended() - before; n != 0 {
		t.Errorf("%d sessions elsewhere have ended", n)
	}
}

// The brokers of Edge and Node lose each other, and nobody else: both keep their
// connections, and nothing between them arrives. Each notices by the heartbeats
// within the bound; a Node at the third broker notices nothing, and after healing
// all is as before.
//
// Contract: F2 F9 F10 J4 B7
func TestRouteGone(t *testing.T) {
	t.Parallel()
	const bound = 5 * time.Second
	f, brokers := three(t, plan{nodes: []string{"n1", "n2"}, bound: bound})
	f.knowing("edge", "broker-1")
	f.knowing("node-n1", "broker-2")
	f.knowing("node-n2", "broker-3")
	edge, n1, n2 := f.start("edge"), f.start("node-n1"), f.start("node-n2")
	gen := edge.connected("n1", 0)
	edge.connected("n2", 0)
	var lost, kept []*stream
	for range 4 {
		lost = append(lost, f.open("n1", 100_000, pace))
		kept = append(kept, f.open("n2", 6*tokens, pace))
	}
	began := time.Now()
	brokers["broker-1"].blackHoleTo(f.host("broker-2"))
	brokers["broker-2"].blackHoleTo(f.host("broker-1"))
	f.broken(lost...)
	fenced := time.Since(began)
	n1.log.AwaitEvent(t, "node.session_ended")
	noticed := time.Since(began)
	f.served("n2")
	brokers["broker-1"].heal()
	brokers["broker-2"].heal()
	healed := time.Now()
	edge.connected("n1", gen)
	t.Logf("the Edge had fenced after %v, the Node ended its session after %v (bound %v); live again %v after healing; the longest pause elsewhere %v",
		fenced.Round(time.Millisecond), noticed.Round(time.Millisecond), bound, time.Since(healed).Round(time.Millisecond), longest(kept...))
	within(t, healed, interval+2*time.Second)
	if limit := bound + time.Second + slack; fenced > limit || noticed > limit {
		t.Errorf("that is more than the bound")
	}
	f.whole(6*tokens, kept...)
	f.served("n1", "n2")
	if n := n2.log.Count("node.session_ended"); n != 0 {
		t.Errorf("%d sessions elsewhere have ended", n)
	}
	edge.alive()
}
