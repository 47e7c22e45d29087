package node

import (
	"math"
	"testing"
	"testing/synctest"
	"time"

	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/wire/iopv1"
)

// Edge's clock may be minutes off, or show nothing that is a time: what it says of it
// ends no session and starts none. A certificate is read by the Node's own clock, which
// may be behind the authority's.
//
// Contract: G3 F9
func TestEdgesClockIsNotCompared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, f := newKeysRig(t, nil)
		r.ready()
		defer r.finish()
		for _, at := range []int64{
			time.Now().Add(10 * time.Minute).UnixNano(), time.Now().Add(-10 * time.Minute).UnixNano(), 0, math.MinInt64, math.MaxInt64,
		} {
			r.edge.send(r.session(), subjects.Heartbeat, "", &iopv1.Heartbeat{EdgeInstance: r.edge.instance, SentUnixNanos: at})
			pass(time.Second)
		}
		r.wantState("ready")
		if n := r.dialled(); n != 1 {
			t.Errorf("%d dials", n)
		}
		if ahead := time.Since(f.id.Certificate.Leaf.NotBefore); ahead < 10*time.Minute {
			t.Errorf("a Node whose clock is %v behind would not take its own certificate", ahead)
		}
	})
}
