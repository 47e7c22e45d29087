package hosts

import (
	"io"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/iop-fabric/iop/internal/fakeprovider"
	"github.com/iop-fabric/iop/internal/ioptest"
)

// quick makes both sides notice a silent peer within a second.
var quick = []string{"IOP_EDGE_HEARTBEAT_INTERVAL=100ms", "IOP_EDGE_HEARTBEAT_BOUND=1s"}

const quickBroker = "IOP_BROKER_HEARTBEAT_BOUND=1s"

// patient is for tests in which a session that ends for a busy machine's sake would
// pass for a fault.
var patient = []string{"IOP_EDGE_HEARTBEAT_INTERVAL=300ms", "IOP_EDGE_HEARTBEAT_BOUND=3s"}

const patientBroker = "IOP_BROKER_HEARTBEAT_BOUND=3s"

// Node and Edge are up before their broker is, and wait for it; all of it streams;
// each stops well when it is told to.
//
// Contract: Y1 S1 S4 D7
func TestSeparateProcesses(t *testing.T) {
	f := newFabric(t, 1, "n1", "n2")
	edge, n1, n2 := f.start("edge"), f.start("node-n1"), f.start("node-n2")
	edge.log.AwaitEvent(t, "edge.dial_failed", "reason=unreachable")
	n1.log.AwaitEvent(t, "node.dial_failed", "reason=unreachable")
	if resp, err := f.client.Get("http://" + f.net + "100:8401/readyz"); err != nil {
		t.Error(err)
	} else if resp.Body.Close(); resp.StatusCode != http.StatusServiceUnavailable {
		t.Errorf("ready without a broker: %d", resp.StatusCode)
	}
	broker := f.start("broker-1")
	edge.connected("n1", 0)
	edge.connected("n2", 0)
	f.served("n1")
	f.served("n2")
	resp, _ := f.open("n1", fakeprovider.Chunk(doneEvent), fakeprovider.LastChunk())
	if got := rest([]*http.Response{resp})[0]; got != doneEvent {
		t.Errorf("the stream ended as %q", got)
	}
	for _, p := range []*process{n1, n2, edge, broker} {
		p.stop()
	}
}

// A broker that goes away under a living Edge and Node, and comes back: both are
// back by themselves, and both stop well while it is away.
//
// Contract: S2 S4 F1 D7
func TestBrokerRestarted(t *testing.T) {
	f := newFabric(t, 1, "n1")
	broker, edge, n1 := f.start("broker-1"), f.start("edge"), f.start("node-n1")
	before := edge.connected("n1", 0)
	broker.kill()
	broker = f.start("broker-1")
	edge.connected("n1", before)
	f.served("n1")
	broker.stop()
	n1.log.AwaitEvent(t, "node.session_ended")
	n1.stop()
	edge.stop()
}

// kill -9 of a Node: each of its streams ends with one error, those of others go on.
//
// Contract: B7 F3 J4
func TestNodeKilled(t *testing.T) {
	f := newFabric(t, 1, "n1", "n2")
	f.start("broker-1")
	edge, n1 := f.start("edge"), f.start("node-n1")
	f.start("node-n2")
	before := edge.connected("n1", 0)
	edge.connected("n2", 0)
	var streams []*http.Response
	for range 5 {
		s, _ := f.open("n1", fakeprovider.Hang())
		streams = append(streams, s)
	}
	finish := make(chan struct{})
	other, _ := f.open("n2", fakeprovider.Wait(finish), fakeprovider.Chunk(doneEvent), fakeprovider.LastChunk())
	begin := time.Now()
	n1.kill()
	for _, got := range rest(streams) {
		if strings.Count(got, `"error"`) != 1 || strings.Contains(got, "[DONE]") {
			t.Errorf("a stream of the killed node ended as %q", got)
		}
	}
	t.Logf("%d streams ended %v after kill -9", len(streams), time.Since(begin).Round(time.Millisecond))
	close(finish)
	if got := rest([]*http.Response{other})[0]; got != doneEvent {
		t.Errorf("the other node's stream ended as %q", got)
	}
	f.start("node-n1")
	edge.connected("n1", before)
	f.served("n1")
}

// The Edge is killed behind a living broker: the Node ends what ran for it within
// the heartbeat bound and redials; the new Edge gets it under a higher generation.
//
// Contract: F9 W8 S2 F1
func TestTrap18EdgeKilledBehindALivingBroker(t *testing.T) {
	f := newFabric(t, 1, "n1")
	broker := f.start("broker-1", quickBroker)
	edge := f.start("edge", quick...)
	n1 := f.start("node-n1")
	before := edge.connected("n1", 0)
	_, running := f.open("n1", fakeprovider.Hang())
	begin := time.Now()
	edge.kill()
	select {
	case <-running.Gone:
		t.Logf("the provider's call ended %v after the Edge's kill -9 (bound 1s)", time.Since(begin).Round(time.Millisecond))
	case <-time.After(ioptest.Hang):
		t.Fatal("the provider goes on for an Edge that is gone")
	}
	n1.log.AwaitEvent(t, "node.session_ended")
	edge = f.start("edge", quick...)
	edge.connected("n1", before)
	f.served("n1") // capacity is whole: no leftover slot
	for _, p := range []*process{edge, n1, broker} {
		p.stop()
	}
}

// A Node that hangs is fenced within the bound; when it wakes it finds itself
// fenced, and comes back as a new generation.
//
// Contract: F2 F10 B7 B12
func TestNodePaused(t *testing.T) {
	f := newFabric(t, 1, "n1")
	f.start("broker-1", quickBroker)
	edge := f.start("edge", quick...)
	n1 := f.start("node-n1")
	before := edge.connected("n1", 0)
	stream, running := f.open("n1", fakeprovider.Hang())
	begin := time.Now()
	n1.signal(syscall.SIGSTOP)
	if got := rest([]*http.Response{stream})[0]; strings.Count(got, `"error"`) != 1 {
		t.Errorf("the stream ended as %q", got)
	}
	t.Logf("fenced %v after SIGSTOP (bound 1s)", time.Since(begin).Round(time.Millisecond))
	edge.log.AwaitEvent(t, "node.fenced", "node=n1")
	n1.signal(syscall.SIGCONT)
	edge.connected("n1", before)
	select {
	case <-running.Gone:
	case <-time.After(ioptest.Hang):
		t.Error("the fenced session's call goes on")
	}
	f.served("n1")
}

// SIGTERM lets a running answer end, and takes no new one; the process ends with
// the last. A second signal ends it at once.
//
// Contract: D7 S4
func TestNodeFinishesWhatRuns(t *testing.T) {
	f := newFabric(t, 1, "n1")
	f.start("broker-1")
	edge, n1 := f.start("edge"), f.start("node-n1")
	before := edge.connected("n1", 0)
	finish := make(chan struct{})
	stream, _ := f.open("n1", fakeprovider.Wait(finish), fakeprovider.Chunk(doneEvent), fakeprovider.LastChunk())
	n1.signal(syscall.SIGTERM)
	n1.log.AwaitEvent(t, "node.state", "state=draining")
	close(finish)
	if got := rest([]*http.Response{stream})[0]; got != doneEvent {
		t.Errorf("the running stream ended as %q", got)
	}
	if code := n1.exit(); code != 0 {
		t.Errorf("exit code %d", code)
	}

	n1 = f.start("node-n1")
	edge.connected("n1", before)
	f.open("n1", fakeprovider.Hang())
	n1.signal(syscall.SIGTERM)
	n1.log.AwaitEvent(t, "node.state", "state=draining")
	n1.signal(syscall.SIGTERM)
	if code := n1.exit(); code != 1 {
		t.Errorf("told twice: exit code %d", code)
	}
}

// An Edge that is told to stop lets a running answer end.
//
// Contract: D7
func TestEdgeFinishesWhatRuns(t *testing.T) {
	f := newFabric(t, 1, "n1")
	f.start("broker-1")
	edge, n1 := f.start("edge"), f.start("node-n1")
	edge.connected("n1", 0)
	finish := make(chan struct{})
	stream, _ := f.open("n1", fakeprovider.Wait(finish), fakeprovider.Chunk(doneEvent), fakeprovider.LastChunk())
	edge.signal(syscall.SIGTERM)
	edge.log.AwaitEvent(t, "edge.stopping")
	close(finish)
	if got := rest([]*http.Response{stream})[0]; got != doneEvent {
		t.Errorf("the running stream ended as %q", got)
	}
	if code := edge.exit(); code != 0 {
		t.Errorf("exit code %d", code)
	}
	n1.stop()
}

// An Edge whose broker is not there yet answers its callers all the same: it lists
// what there is, and who names a model waits for it, and is served once broker and
// Node have come.
//
// Contract: P9 E7 S1
func TestCallersBeforeTheBroker(t *testing.T) {
	f := newFabric(t, 1, "n1")
	edge := f.start("edge")
	ask := func(path string) (*http.Response, error) {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+f.net+"100:8400"+path, nil)
		must(t, err)
		req.Header.Set("Authorization", "Bearer "+f.key)
		return f.client.Do(req)
	}
	edge.log.AwaitEvent(t, "edge.dial_failed")
	resp, err := ask("/v1/models")
	must(t, err)
	defer resp.Body.Close()
	if b, err := io.ReadAll(resp.Body); err != nil || resp.StatusCode != 200 || !strings.Contains(string(b), `"n1"`) {
		t.Errorf("%d %s %v", resp.StatusCode, b, err)
	}
	f.providers["n1"].Next(fakeprovider.JSON(200, `{"waited":1}`)...)
	type answer struct {
		status int
		body   string
		err    error
	}
	got := make(chan answer, 1)
	go func() {
		resp, err := f.call(t.Context(), "n1", false)
		if err != nil {
			got <- answer{err: err}
			return
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		got <- answer{resp.StatusCode, string(b), err}
	}()
	f.start("broker-1")
	f.start("node-n1")
	select {
	case a := <-got:
		if a.err != nil || a.status != 200 || a.body != `{"waited":1}` {
			t.Errorf("%+v", a)
		}
	case <-time.After(ioptest.Hang):
		t.Error("who came before the broker waits for ever")
	}
	edge.stop()
}
