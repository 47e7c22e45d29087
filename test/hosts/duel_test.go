package hosts

import (
	"cmp"
	"net/http"
	"os"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/iop-fabric/iop/internal/fakeprovider"
)

// refusals waits until a process was refused as a duplicate so often, and returns
// its words.
func (p *process) refusals(times int) string {
	p.t.Helper()
	const what = "reason=duplicate"
	for n := 1; n <= times; n++ { // one by one: all of them may take longer than anything may hang
		p.log.Await(p.t, func(string) bool { return strings.Count(p.log.String(), what) >= n })
	}
	return p.log.String()
}

var tellsSince = regexp.MustCompile(`is connected since (\S+?)"`)

// Two machines have one identity: the first keeps it however often the other dials,
// and the other is told that it is a duplicate, and since when. Once the first is
// gone the other takes over; where the first only sleeps, within the bound, and it
// is the duplicate when it wakes. IOP_DUEL is how many refusals are looked at, about
// one a second.
//
// Contract: B12 B3 S2 S4 F5
func TestTwoMachinesOneIdentity(t *testing.T) {
	times, err := strconv.Atoi(cmp.Or(os.Getenv("IOP_DUEL"), "3"))
	must(t, err)
	f := newFabric(t, 1, "n1")
	f.start("broker-1", patientBroker)
	edge := f.start("edge", patient...)
	began := time.Now().Truncate(time.Second)
	first := f.start("node-n1")
	gen := edge.connected("n1", 0)
	finish := make(chan struct{})
	stream, _ := f.open("n1", fakeprovider.Wait(finish), fakeprovider.Chunk(doneEvent), fakeprovider.LastChunk())

	second := f.start("node-n1")
	at := time.Now()
	words := tellsSince.FindStringSubmatch(second.refusals(times))
	if words == nil {
		t.Fatal("it is not told since when")
	}
	if since, err := time.Parse(time.RFC3339, words[1]); err != nil || since.Before(began) || since.After(at) {
		t.Errorf("told %q, and the first came between %v and %v", words[1], began, at)
	}
	t.Logf("%d refusals in %v, %d evictions", times, time.Since(at).Round(time.Second), edge.log.Count("node.disconnected"))
	if n := edge.log.Count("node.connected") + edge.log.Count("node.disconnected"); n != 1 {
		t.Errorf("%d sessions have come and gone", n)
	}
	close(finish)
	if got := rest([]*http.Response{stream})[0]; got != doneEvent {
		t.Errorf("the first one's stream ended as %q", got)
	}

	// The first sleeps: its name is free after the bound.
	at = time.Now()
	first.signal(syscall.SIGSTOP)
	gen = edge.connected("n1", gen)
	t.Logf("the second took over %v after the first's SIGSTOP (bound 3s, interval 1s)", time.Since(at).Round(time.Millisecond))
	seen := edge.log.Count("node.disconnected")
	first.signal(syscall.SIGCONT)
	first.refusals(times)
	f.served("n1")
	if n := edge.log.Count("node.disconnected"); n != seen {
		t.Errorf("who woke up has ended %d sessions", n-seen)
	}

	// The second is killed: its connection ends, and nothing is waited for.
	at = time.Now()
	second.kill()
	edge.connected("n1", gen)
	t.Logf("the first is back %v after the second's kill -9 (interval 1s)", time.Since(at).Round(time.Millisecond))
	f.served("n1")
	first.stop()
}
