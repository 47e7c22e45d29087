package hosts

import (
	"net/http"
	"syscall"
	"testing"

	"github.com/iop-fabric/iop/internal/fakeprovider"
	"github.com/iop-fabric/iop/internal/identity"
)

// Broker, Edge and Node are given new certificates and new keys while a stream is under
// way: it ends whole, so does what is asked for meanwhile, and the Node's next session
// is one with the new key.
//
// Contract: B8
func TestKeysRotatedUnderLoad(t *testing.T) {
	f := newFabric(t, 1, "n1")
	broker, edge, n1 := f.start("broker-1"), f.start("edge"), f.start("node-n1")
	before := edge.connected("n1", 0)
	finish := make(chan struct{})
	running, _ := f.open("n1", fakeprovider.Wait(finish), fakeprovider.Chunk(doneEvent), fakeprovider.LastChunk())

	old := map[string]*identity.Certificate{}
	load := func(folder string) *identity.Certificate {
		c, err := identity.LoadCertificate(f.path(folder+"/cert.pem"), f.path(folder+"/cert.key"))
		must(t, err)
		return c
	}
	for folder, args := range map[string][]string{"broker-1": {"broker", "broker-1"}, "edge": {"edge"}, "node-n1": {"node", "n1"}} {
		old[folder] = load(folder)
		f.iop(append([]string{"rotate", "--out", f.dir, "--key"}, args...)...)
		if c := load(folder); c.SameAs(old[folder]) || c.ID() != old[folder].ID() {
			t.Errorf("%s: %s", folder, c.ID())
		}
	}
	broker.signal(syscall.SIGHUP)
	broker.log.AwaitEvent(t, "broker.rotated")
	edge.signal(syscall.SIGHUP)
	edge.log.AwaitEvent(t, "edge.keys_renewed")
	n1.signal(syscall.SIGHUP)
	f.served("n1") // it waits for the stream, and nobody else does
	close(finish)
	if got := rest([]*http.Response{running})[0]; got != doneEvent {
		t.Errorf("what ran ended as %q", got)
	}
	edge.connected("n1", before)
	n1.log.AwaitEvent(t, "node.keys_renewed")
	f.served("n1")
	for _, p := range []*process{n1, edge, broker} {
		p.stop()
	}
}
