//go:build linux

package netns

import "testing"

// narrow gives what the host sends a rate: a queue forms before it.
func (h *host) narrow(rate string) {
	h.l.t.Helper()
	h.l.ip("netns", "exec", h.ns, "tc", "qdisc", "replace", "dev", link, "root", "tbf", "rate", rate, "burst", "32kbit", "latency", "1s")
}

// A Node behind a narrow uplink sends large answers and a stream of tokens at once:
// the large ones fill the link, and do not hold the tokens back until they are through.
// All is late and nothing is lost, so next to nothing is sent again.
//
// Contract: J2 J7
func TestNarrowLinkIsShared(t *testing.T) {
	f := newFabric(t, plan{brokers: 1, nodes: []string{"n1"}})
	f.start("broker-1")
	edge := f.start("edge")
	node := f.start("node-n1")
	edge.connected("n1", 0)
	node.narrow("10mbit")
	alone := f.open("n1", tokens, pace)
	_, _ = alone.end() // looked at below
	var large []*stream
	for range 3 { // 12 MB: ten seconds of the link
		large = append(large, f.open("n1", bulk, 0))
	}
	paced := f.open("n1", tokens, pace)
	_, _ = paced.end() // looked at below
	running(large...)
	again, sent := node.metric("iop_node_frames_resent_total"), node.metric("iop_node_frames_sent_total")
	t.Logf("a stream of tokens, the longest pause: alone %v, beside three large answers %v; %v frames sent, %v sent again",
		longest(alone), longest(paced), sent, again)
	if again > sent/50 {
		t.Errorf("%v of %v frames were sent again", again, sent)
	}
	node.narrow("1gbit")
	f.whole(tokens, alone, paced)
	f.whole(bulk, large...)
}
