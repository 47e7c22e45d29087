package broker

import (
	"sync"
	"sync/atomic"
	"testing"
)

// A broker stops while Nodes dial: the server would panic if it were asked to
// admit somebody by then.
func TestStopsWhileNodesDial(t *testing.T) {
	f := newFixture(t)
	key := f.member("edge1", "node", "n1")
	for range 5 {
		f.start()
		var dialled atomic.Int64
		enough, stopped := make(chan struct{}), make(chan struct{})
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				for {
					nc, err := f.dialer("edge1", "node", "n1", key).dial()
					if err == nil {
						nc.Close()
					}
					if dialled.Add(1) == 50 {
						close(enough)
					}
					select {
					case <-stopped:
						return
					default:
					}
				}
			})
		}
		<-enough
		f.stop()
		close(stopped)
		wg.Wait()
	}
}
