//go:build linux

package netns

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/iop-fabric/iop/wire"
)

// narrow gives what the host sends a rate, and narrowDown what is sent to it: a queue
// forms before the link.
func (h *host) narrow(rate string)     { h.shape(h.ns, link, rate) }
func (h *host) narrowDown(rate string) { h.shape(h.l.tag+"switch", h.port, rate) }

func (h *host) shape(ns, dev, rate string) {
	h.l.t.Helper()
	h.l.ip("netns", "exec", ns, "tc", "qdisc", "replace", "dev", dev, "root", "tbf", "rate", rate, "burst", "32kbit", "latency", "1s")
}

// A Node behind a narrow uplink sends large answers and a stream of tokens at once:
// the large ones fill the link, and do not hold the tokens back until they are through.
// All is late and nothing is lost, so next to nothing is sent again.
//
// Contract: J2 J7
func TestNarrowLinkIsShared(t *testing.T) {
	t.Parallel()
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

// What fills a slow link for longer than the heartbeat bound holds up heartbeats
// and answers to pings, not life: as long as anything comes through, nobody is
// declared dead. Answers fill a Node's uplink first, then bodies its downlink.
//
// Contract: F9 B7 J7
func TestFullLinkIsNoLoss(t *testing.T) {
	t.Parallel()
	const rate, large = "1mbit", 200 << 10
	f := newFabric(t, plan{brokers: 1, nodes: []string{"n1"}})
	f.start("broker-1")
	edge := f.start("edge")
	node := f.start("node-n1")
	edge.connected("n1", 0)
	sixfold := func(body string) (all []*stream) { // all of each on its way at once: ten seconds of the link
		got, failed := make(chan *stream, 6), make(chan error, 6)
		for range 6 {
			go func() {
				if s, err := f.send(t.Context(), "n1", body); err != nil {
					failed <- err
				} else {
					got <- s
				}
			}()
		}
		for range 6 {
			select {
			case s := <-got:
				all = append(all, s)
			case err := <-failed:
				t.Fatal(err)
			}
		}
		for _, s := range all {
			_, _ = s.end() // looked at below
		}
		return all
	}

	node.narrow(rate)
	began := time.Now()
	up := sixfold(fmt.Sprintf(`{"model":"n1","stream":true,"messages":[{"role":"user","content":"demo:tokens=%d"}]}`, large/200))
	t.Logf("answers: %v, %v frames sent, %v again", time.Since(began).Round(time.Millisecond),
		node.metric("iop_node_frames_sent_total"), node.metric("iop_node_frames_resent_total"))
	node.narrow("1gbit")
	f.whole(large/200, up...)

	node.narrowDown(rate)
	began = time.Now()
	for _, s := range sixfold(fmt.Sprintf(`{"model":"n1","messages":[{"role":"user","content":"%s"}]}`, strings.Repeat("x", large))) {
		if text, err := s.end(); err != nil || !strings.Contains(text, `"finish_reason":"stop"`) {
			t.Errorf("an answer to a large body: %v %.200q", err, text)
		}
	}
	t.Logf("bodies: %v", time.Since(began).Round(time.Millisecond))
	if n := edge.log.Count("node.disconnected"); n != 0 {
		t.Errorf("%d sessions have ended", n)
	}
}

// Many bodies at once for a Node behind a narrow downlink share it: none is given up,
// next to nothing is sent twice, and the Node, which can do nothing for its link, is
// blamed for none of it. A stream of tokens beside them goes on.
//
// Contract: J7 J2 J8
func TestBodiesShareANarrowDownlink(t *testing.T) {
	t.Parallel()
	const bodies, size = 8, 384 << 10 // twelve seconds of the link
	f := newFabric(t, plan{brokers: 1, nodes: []string{"n1"}})
	f.start("broker-1")
	edge := f.start("edge")
	node := f.start("node-n1")
	edge.connected("n1", 0)
	node.narrowDown("2mbit")
	began := time.Now()
	beside := f.open("n1", tokens, pace)
	body := fmt.Sprintf(`{"model":"n1","messages":[{"role":"user","content":"%s"}]}`, strings.Repeat("x", size))
	done := make(chan string, bodies)
	for range bodies {
		go func() {
			resp, err := f.post(t.Context(), body)
			if err != nil {
				done <- err.Error()
				return
			}
			defer resp.Body.Close()
			b, err := io.ReadAll(resp.Body)
			if err != nil || resp.StatusCode != http.StatusOK || !strings.Contains(string(b), "You said: xxx") {
				done <- fmt.Sprintf("%d %.300s %v", resp.StatusCode, b, err)
				return
			}
			done <- ""
		}()
	}
	for range bodies {
		if fault := <-done; fault != "" {
			t.Errorf("a body did not come through: %s", fault)
		}
	}
	again := edge.metric("iop_edge_body_frames_resent_total")
	t.Logf("%d bodies of %d KiB in %v; %v frames and %v requests sent again", bodies, size>>10, time.Since(began).Round(time.Millisecond), again, edge.metric("iop_edge_request_repeats_total"))
	if again > bodies*size/wire.MaxBody/4 {
		t.Errorf("%v of %d frames were sent again", again, bodies*size/wire.MaxBody)
	}
	node.narrowDown("1gbit")
	f.whole(tokens, beside)
	if n := edge.metric("iop_edge_stream_breaches_total"); n > 0 {
		t.Errorf("the Node is blamed %v times", n)
	}
	edge.connected("n1", 0)
	if n := edge.log.Count("node.disconnected"); n > 0 {
		t.Errorf("%d sessions have ended", n)
	}
}
