//go:build linux

package netns

import (
	"testing"
	"time"
)

const (
	tokens = 110
	pace   = 20 * time.Millisecond // so that a stream takes over 2 s
	bulk   = 20_000                // tokens, 4 MB
)

// three is a fabric with three brokers, started.
func three(t testing.TB, p plan) (f *fabric, brokers map[string]*process) {
	t.Helper()
	p.brokers = 3
	f, brokers = newFabric(t, p), map[string]*process{}
	for _, b := range []string{"broker-1", "broker-2", "broker-3"} {
		brokers[b] = f.start(b)
	}
	return f, brokers
}

// The broker that the Edge is at hangs, or is cut off without a word: no connection
// is closed, and what was on its way is lost, or comes too late. The Edge goes to
// another one in time; streams of Nodes elsewhere lose no byte, and take none twice
// when the broker wakes up.
//
// Contract: J5 J2 J4 Y2
func TestEdgesBrokerHangs(t *testing.T) {
	t.Parallel()
	f, brokers := three(t, plan{nodes: []string{"n1", "n2"}})
	f.knowing("edge", "broker-1", "broker-2")
	edge := f.start("edge")
	nodes := []string{"n1", "n2"}
	for _, n := range nodes {
		f.knowing("node-"+n, "broker-3")
		f.start("node-" + n)
	}
	for _, n := range nodes {
		edge.connected(n, 0)
	}
	for _, fault := range []struct {
		what     string
		do, heal func(*process)
	}{
		{"paused", (*process).pause, (*process).resume},
		{"cut off", func(p *process) { p.blackHole() }, func(p *process) { p.heal() }},
	} {
		var streams []*stream
		for range 4 {
			for _, n := range nodes {
				streams = append(streams, f.open(n, 4*tokens, pace))
			}
		}
		at := edge.broker()
		began := time.Now()
		fault.do(brokers[at])
		edge.until("at another broker", func() (string, bool) {
			now := edge.brokerNow()
			return now, now != "" && now != at
		})
		t.Logf("%s %s: the Edge was at another after %v", at, fault.what, time.Since(began).Round(time.Millisecond))
		running(streams...)
		fault.heal(brokers[at])
		f.whole(4*tokens, streams...)
		t.Logf("%d streams whole, the longest pause %v", len(streams), longest(streams...))
		brokers[at].ready()
	}
	if n := edge.log.Count("node.disconnected"); n != 0 {
		t.Errorf("%d sessions have ended", n)
	}
}
