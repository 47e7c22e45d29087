package broker

import (
	"context"
	"crypto/tls"
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

// In a cluster a handshake waits until callouts are answered, and is then served.
// Contract: Y2 B4
func TestHandshakeWaits(t *testing.T) {
	until, release := context.WithCancel(t.Context())
	config := &tls.Config{MinVersion: tls.VersionTLS13}
	config.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) {
		if until.Err() == nil {
			t.Error("served before")
		}
		return config, nil
	}
	hold(until, config)
	served := make(chan *tls.Config)
	for range 3 {
		go func() {
			c, err := config.GetConfigForClient(nil)
			if err != nil {
				t.Error(err)
			}
			served <- c
		}()
	}
	release()
	for range 3 {
		if c := <-served; c != config {
			t.Error("served with something else")
		}
	}
}
