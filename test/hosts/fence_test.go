package hosts

import (
	"cmp"
	"fmt"
	"net/http"
	"os"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/iop-fabric/iop/internal/adminapi"
	"github.com/iop-fabric/iop/internal/fakeprovider"
)

// disconnected waits until the Edge has fenced a session, and returns when that was
// by the Edge's own log, to the millisecond, and for what reason.
func (p *process) disconnected(node string, gen uint64) (at time.Time, reason string) {
	p.t.Helper()
	p.log.Await(p.t, func(line string) bool {
		if !strings.Contains(line, fmt.Sprintf("msg=node.disconnected role=edge node=%s generation=%d ", node, gen)) {
			return false
		}
		stamp, _, _ := strings.Cut(strings.TrimPrefix(line, "time="), " ")
		var err error
		at, err = time.Parse(time.RFC3339Nano, stamp)
		must(p.t, err)
		_, reason, _ = strings.Cut(strings.TrimSpace(line), "reason=")
		return true
	})
	return at, strings.Trim(reason, `"`)
}

// times logs how long something took, again and again.
func times(t *testing.T, what string, all []time.Duration) (p99 time.Duration) {
	t.Helper()
	slices.Sort(all)
	p99 = all[(len(all)*99+99)/100-1]
	t.Logf("%s: %d times, p50 %v, p99 %v, longest %v", what, len(all), all[len(all)/2], p99, all[len(all)-1])
	return p99
}

// How soon a Node's end is a fence at the Edge: killed, its connection tells the
// broker; stopped, it is missed after the heartbeat bound. IOP_FENCES is how often,
// and has the goals checked; they are of a quiet machine. Each stream ends with one
// error, each place comes back once, and what was stopped comes back by itself as a
// new generation.
//
// Contract: B7 F2 F3 F10 J4 P8
func TestFencedHowSoon(t *testing.T) {
	rounds, err := strconv.Atoi(cmp.Or(os.Getenv("IOP_FENCES"), "2"))
	must(t, err)
	goal := func(t *testing.T, what string, got, most time.Duration) {
		if os.Getenv("IOP_FENCES") != "" && got > most {
			t.Errorf("%s: %v, the goal is %v", what, got, most)
		}
	}
	bound, quickly, broker := 3*time.Second, patient, patientBroker
	if os.Getenv("IOP_FENCES") != "" {
		bound, quickly, broker = time.Second, quick, quickBroker
	}
	f := newFabric(t, 1, "n1")
	f.start("broker-1", broker)
	edge := f.start("edge", quickly...)
	var gen uint64
	open := func(n int) (streams []*http.Response) {
		for range n {
			s, _ := f.open("n1", fakeprovider.Hang())
			streams = append(streams, s)
		}
		return streams
	}
	told := func(t *testing.T, streams []*http.Response) {
		t.Helper()
		for _, got := range rest(streams) {
			if strings.Count(got, `"error"`) != 1 || strings.Contains(got, "[DONE]") {
				t.Errorf("a stream ended as %q", got)
			}
		}
	}
	for _, c := range []struct {
		what    string
		streams int
	}{{"idle", 0}, {"in mid-stream", 4}} {
		t.Run("killed "+c.what, func(t *testing.T) {
			var took []time.Duration
			for range rounds {
				n1 := f.start("node-n1")
				gen = edge.connected("n1", gen)
				streams := open(c.streams)
				began := time.Now()
				n1.kill()
				at, reason := edge.disconnected("n1", gen)
				if reason != "closed" {
					t.Errorf("fenced for %q", reason)
				}
				took = append(took, at.Sub(began.Truncate(time.Millisecond)))
				told(t, streams)
			}
			goal(t, "killed "+c.what, times(t, "kill -9 "+c.what+" to the fence", took), 50*time.Millisecond)
		})
	}
	t.Run("stopped", func(t *testing.T) {
		n1 := f.start("node-n1")
		gen = edge.connected("n1", gen)
		var took, back []time.Duration
		for range max(rounds/5, 1) {
			streams := open(2)
			began := time.Now()
			n1.signal(syscall.SIGSTOP)
			at, reason := edge.disconnected("n1", gen)
			if reason != "heartbeat missed" {
				t.Errorf("fenced for %q", reason)
			}
			took = append(took, at.Sub(began.Truncate(time.Millisecond)))
			told(t, streams)
			began = time.Now()
			n1.signal(syscall.SIGCONT)
			gen = edge.connected("n1", gen)
			back = append(back, time.Since(began).Round(time.Millisecond))
			f.served("n1")
		}
		goal(t, "stopped", times(t, fmt.Sprintf("SIGSTOP to the fence (bound %v)", bound), took), bound+500*time.Millisecond)
		times(t, "SIGCONT to the next generation", back)
	})
	if n := edge.log.Count("node.disconnected"); n != 2*rounds+max(rounds/5, 1) {
		t.Errorf("%d fences for %d ends", n, 2*rounds+max(rounds/5, 1))
	}
	if s := f.snapshot(); s.Queue.InFlight != 0 || s.Nodes[0].InFlight != 0 || s.Providers[0].InFlight != 0 {
		t.Errorf("places are in use: %+v", s)
	}
}

// snapshot is the Edge's live state as its admin API tells it, without what changes
// by itself as time passes.
func (f *fabric) snapshot() adminapi.Snapshot {
	f.t.Helper()
	s, err := adminapi.Client{URL: "http://" + f.net + "100:8401", Token: strings.TrimSpace(f.read("edge/admin-token"))}.Snapshot(f.t.Context())
	must(f.t, err)
	s.Time = time.Time{}
	for i := range s.Nodes {
		s.Nodes[i].HeartbeatAgeMs = 0
	}
	for i := range s.Models {
		s.Models[i].OldestWaitMs = 0
	}
	return s
}

// A Node is stopped in mid-stream, and another machine takes its place: whatever it
// still has to say when it wakes changes nothing of what is there by then, a stream
// and a request that waits included.
//
// Contract: F5 F10 B6 B12
func TestAZombieChangesNothing(t *testing.T) {
	f := newFabric(t, 1, "n1")
	f.start("broker-1", patientBroker)
	edge := f.start("edge", patient...)
	zombie := f.start("node-n1")
	gen := edge.connected("n1", 0)
	late := make(chan struct{})
	lost, _ := f.open("n1", fakeprovider.Wait(late), fakeprovider.Chunk(doneEvent), fakeprovider.LastChunk())
	zombie.signal(syscall.SIGSTOP)
	edge.disconnected("n1", gen)
	if got := rest([]*http.Response{lost})[0]; strings.Count(got, `"error"`) != 1 {
		t.Errorf("the zombie's stream ended as %q", got)
	}
	f.start("node-n1")
	gen = edge.connected("n1", gen)
	finish := make(chan struct{})
	stream, _ := f.open("n1", fakeprovider.Wait(finish), fakeprovider.Chunk(doneEvent), fakeprovider.LastChunk())
	before := f.snapshot()
	if before.Queue.InFlight != 1 || before.Nodes[0].Generation != gen {
		t.Errorf("before it wakes: %+v", before)
	}
	close(late) // its provider has an answer for it
	zombie.signal(syscall.SIGCONT)
	zombie.refusals(1) // it has ended its session, and dialled anew
	if after := f.snapshot(); !reflect.DeepEqual(before, after) {
		t.Errorf("the zombie changed the live state:\n%+v\n%+v", before, after)
	}
	close(finish)
	if got := rest([]*http.Response{stream})[0]; got != doneEvent {
		t.Errorf("the living one's stream ended as %q", got)
	}
	if connected, ended := edge.log.Count("node.connected"), edge.log.Count("node.disconnected"); connected != 2 || ended != 1 {
		t.Errorf("%d sessions came and %d went", connected, ended)
	}
}
