package hosts

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/iop-fabric/iop/internal/fakeprovider"
)

// dials returns the address of the broker that p is connected to, from the
// kernel's own tables: any broker of a cluster may have admitted it.
func (p *process) dials() string {
	p.t.Helper()
	sockets := map[string]bool{}
	fds := fmt.Sprintf("/proc/%d/fd", p.cmd.Process.Pid)
	entries, err := os.ReadDir(fds)
	must(p.t, err)
	for _, e := range entries {
		if to, err := os.Readlink(filepath.Join(fds, e.Name())); err == nil { // it may be closed by now
			if inode, ok := strings.CutPrefix(to, "socket:["); ok {
				sockets[strings.TrimSuffix(inode, "]")] = true
			}
		}
	}
	table, err := os.ReadFile("/proc/net/tcp")
	must(p.t, err)
	const remote, state, inode, established = 2, 3, 9, "01"
	for line := range strings.Lines(string(table)) {
		f := strings.Fields(line)
		if len(f) <= inode || f[state] != established || !sockets[f[inode]] {
			continue
		}
		var ip [4]byte // in the machine's order, little endian
		var port int
		if _, err := fmt.Sscanf(f[remote], "%02X%02X%02X%02X:%04X", &ip[3], &ip[2], &ip[1], &ip[0], &port); err == nil && port == 4222 {
			return fmt.Sprintf("%d.%d.%d.%d", ip[0], ip[1], ip[2], ip[3])
		}
	}
	p.t.Fatalf("%s has no connection to a broker", p.name)
	return ""
}

// Three brokers, each a process: whichever is killed, streams of Nodes on the
// others go on, its own Nodes are back under higher generations, and it joins
// again.
//
// Contract: Y2 J5 G1 B1 B4
func TestAnyBrokerOfThreeKilled(t *testing.T) {
	nodes := []string{"n1", "n2", "n3", "n4"}
	f := newFabric(t, 3, nodes...)
	brokers := make([]*process, 3)
	for i := range brokers {
		brokers[i] = f.start(fmt.Sprintf("broker-%d", i+1))
	}
	edge := f.start("edge")
	gens := map[string]uint64{}
	daemons := map[string]*process{}
	for _, n := range nodes {
		daemons[n] = f.start("node-" + n)
	}
	for _, n := range nodes {
		gens[n] = edge.connected(n, 0)
	}
	for i := range brokers {
		finish := make(chan struct{})
		var streams []*http.Response
		for _, n := range nodes {
			s, _ := f.open(n, fakeprovider.Wait(finish), fakeprovider.Chunk(doneEvent), fakeprovider.LastChunk())
			streams = append(streams, s)
		}
		address := fmt.Sprint(f.net, i+1)
		ours := map[string]bool{}
		for _, n := range nodes {
			ours[n] = daemons[n].dials() == address
		}
		edges := edge.dials() == address
		begin := time.Now()
		brokers[i].kill()
		var back []string
		for _, n := range nodes {
			if ours[n] {
				gens[n] = edge.connected(n, gens[n])
				back = append(back, fmt.Sprintf("%s %v", n, time.Since(begin).Round(time.Millisecond)))
			}
		}
		t.Logf("broker-%d killed (the Edge on it: %v), its sessions are back after: %v", i+1, edges, back)
		close(finish)
		for j, got := range rest(streams) {
			own := ours[nodes[j]]
			if own && strings.Count(got, `"error"`) != 1 || !own && got != doneEvent {
				t.Errorf("broker-%d killed: the stream of %s (on it: %v) ended as %q", i+1, nodes[j], own, got)
			}
		}
		for _, n := range nodes {
			f.served(n)
		}
		brokers[i] = f.start(fmt.Sprintf("broker-%d", i+1))
		brokers[i].log.AwaitEvent(t, "broker.ready")
	}
	for _, b := range brokers {
		b.stop()
	}
}

// One of three brokers is told to stop while its Nodes stream, and calls go on all the
// while: what runs ends whole, the Nodes are elsewhere by then, and nobody is refused.
//
// Contract: Y6 D7 Y2
func TestBrokerToldToStop(t *testing.T) {
	nodes := []string{"n1", "n2", "n3", "n4"}
	f := newFabric(t, 3, nodes...)
	brokers := make([]*process, 3)
	for i := range brokers {
		brokers[i] = f.start(fmt.Sprintf("broker-%d", i+1))
	}
	edge := f.start("edge")
	gens, daemons := map[string]uint64{}, map[string]*process{}
	for _, n := range nodes {
		daemons[n] = f.start("node-" + n)
	}
	for _, n := range nodes {
		gens[n] = edge.connected(n, 0)
	}
	// The one where most of them are: of four there is one with two.
	at := map[string][]string{}
	most := ""
	for _, n := range nodes {
		a := daemons[n].dials()
		if at[a] = append(at[a], n); len(at[a]) > len(at[most]) {
			most = a
		}
	}
	finish := make(chan struct{})
	var streams []*http.Response
	for _, n := range nodes {
		s, _ := f.open(n, fakeprovider.Wait(finish), fakeprovider.Chunk(doneEvent), fakeprovider.LastChunk())
		streams = append(streams, s)
	}
	var stopping *process
	for i, b := range brokers {
		if fmt.Sprint(f.net, i+1) == most {
			stopping = b
		}
	}
	begin := time.Now()
	stopping.signal(syscall.SIGTERM)
	for _, n := range at[most] {
		daemons[n].log.AwaitEvent(t, "node.state", "state=draining")
	}
	t.Logf("%s told to stop (the Edge on it: %v): its Nodes %v drain after %v", stopping.name, edge.dials() == most, at[most], time.Since(begin).Round(time.Millisecond))
	close(finish)
	for i, got := range rest(streams) {
		if got != doneEvent {
			t.Errorf("the stream of %s ended as %q", nodes[i], got)
		}
	}
	for _, n := range at[most] { // who comes meanwhile waits for the next session
		f.served(n)
		gens[n] = edge.connected(n, gens[n])
	}
	t.Logf("they are elsewhere, and serve, %v after the signal", time.Since(begin).Round(time.Millisecond))
	if code := stopping.exit(); code != 0 {
		t.Errorf("exit code %d", code)
	}
	t.Logf("it ended %v after the signal", time.Since(begin).Round(time.Millisecond))
	for _, n := range nodes {
		f.served(n)
		if lost := daemons[n].log.Count("node.session_ended"); lost > 1 {
			t.Errorf("%s has lost %d sessions", n, lost)
		}
	}
}
