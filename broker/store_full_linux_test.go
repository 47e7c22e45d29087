package broker

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/iop-fabric/iop/subjects"
)

// smallDisk mounts one that is soon full. Only root may.
func smallDisk(t *testing.T, size string) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("only root can mount a disk")
	}
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size="+size); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// fill takes all the room there is, and returns how to give it back.
func fill(t *testing.T, dir string) (free func()) {
	t.Helper()
	name := filepath.Join(dir, "ballast")
	f := must(os.Create(name))
	defer f.Close()
	for {
		if _, err := f.Write(make([]byte, 4096)); errors.Is(err, syscall.ENOSPC) {
			return func() {
				if err := os.Remove(name); err != nil {
					t.Error(err)
				}
			}
		} else if err != nil {
			t.Fatal(err)
		}
	}
}

// A full disk: who stands goes on, nobody new is let in, the log says why, and
// with room again all goes on by itself, generations above what they were.
// Contract: G1 B9
func TestStoreFull(t *testing.T) {
	f := newFixture(t)
	f.cfg.StoreDir = smallDisk(t, "96m")
	standing, key := f.member("edge1", "node", "n0"), f.member("edge1", "node", "n1")
	f.start()
	nc, _ := f.node(f.dialer("edge1", "node", "n0", standing))
	free := fill(t, f.cfg.StoreDir)

	// What is left of its last block may still take some.
	var last uint64
	instance := f.instance("0123456789abcdef", "edge1", "node", "n1", key)
	for mark := f.logs.mark(); ; {
		d := *instance
		d.closed = make(chan struct{})
		n1, err := d.dial()
		if errors.Is(err, nats.ErrAuthorization) {
			line := f.logs.wait(t, mark, map[string]string{"msg": eventStoreFull})
			if !strings.Contains(line["error"], "full") || line["store_dir"] != f.cfg.StoreDir {
				t.Errorf("logged: %v", line)
			}
			f.logs.wait(t, mark, map[string]string{"msg": eventRefused, "reason": string(refusedUnavailable), "edge": "edge1", "name": "n1"})
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		last = max(last, must(subjects.ParseSession(f.whoami(n1))).Gen)
		n1.Close()
	}
	if err := f.b.Healthy(); err == nil || !strings.Contains(err.Error(), "full") {
		t.Errorf("healthy: %v", err)
	}
	if user := f.whoami(nc); !strings.HasPrefix(user, "edge1.n0.") {
		t.Errorf("the session that stood is %q", user)
	}
	mark := f.logs.mark()
	free()
	f.logs.wait(t, mark, map[string]string{"msg": eventResumed})
	if err := f.b.Healthy(); err != nil {
		t.Errorf("healthy: %v", err)
	}
	if _, s := f.node(instance); s.Gen <= last {
		t.Errorf("generation %d after %d", s.Gen, last)
	}
	if nc.IsClosed() {
		t.Error("the session that stood was closed")
	}
}

// A disk that is too small for new stores is named, with what it takes, and one with just
// that is enough.
//
// Contract: B9
func TestStoreHasNoRoom(t *testing.T) {
	f := newFixture(t)
	f.cfg.StoreDir = smallDisk(t, "80m")
	if err := f.runFails(); err == nil || !strings.Contains(err.Error(), "store_dir "+f.cfg.StoreDir+" needs 86 MiB of room") {
		t.Errorf("error: %v", err)
	}
	f.cfg.StoreDir = smallDisk(t, "87m")
	f.start()
}

// One of three whose disk is full leaves the stores to the others, and all three go
// on admitting; with room it is a whole member from its next start on.
// Contract: Y2 G1 B9
func TestClusterStoreFull(t *testing.T) {
	c := newCluster(t)
	nodes := c.nodes(2)
	full := c.members[0]
	full.cfg.StoreDir = smallDisk(t, "96m")
	c.start()
	c.connectAll(nodes[:1], func(int) int { return 0 })
	free := fill(t, full.cfg.StoreDir)
	n := nodes[1]
	var last uint64
	admitted := func(at int) {
		t.Helper()
		if err := n.dial(at); err != nil || n.session.Gen <= last {
			t.Fatalf("generation %d after %d: %v", n.session.Gen, last, err)
		}
		last = n.session.Gen
		n.nc.Close()
	}
	for len(full.logs.seen(eventStoreFull)) == 0 {
		for at := range 3 {
			admitted(at)
		}
	}
	for at := range 3 {
		admitted(at)
	}
	if line := full.logs.seen(eventStoreFull)[0]; !strings.Contains(line["error"], "restart this broker") {
		t.Errorf("logged: %v", line)
	}
	if user := c.whoami(nodes[0].nc); user != nodes[0].session.String() {
		t.Errorf("the session that stood is %q", user)
	}
	free()
	full.stop()
	full.start()
	c.members[1].stop() // the one that was full is needed now
	for at := range 3 {
		admitted(at)
	}
}
