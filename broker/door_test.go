package broker

import (
	"context"
	"crypto/tls"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
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

// In a cluster a handshake waits until callouts are answered, and is then served.
// Contract: Y2 B4
func TestHandshakeWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		until, release := context.WithCancel(t.Context())
		want := &tls.Config{MinVersion: tls.VersionTLS13}
		config := &tls.Config{
			MinVersion:         tls.VersionTLS13,
			GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) { return want, nil },
		}
		hold(until, config)
		var served atomic.Int64
		for range 3 {
			go func() {
				if c, err := config.GetConfigForClient(nil); c != want || err != nil {
					t.Errorf("served with %v, %v", c, err)
				}
				served.Add(1)
			}()
		}
		synctest.Wait()
		if n := served.Load(); n != 0 {
			t.Errorf("%d served before", n)
		}
		release()
		synctest.Wait()
		if n := served.Load(); n != 3 {
			t.Errorf("%d of 3 served", n)
		}
	})
}
