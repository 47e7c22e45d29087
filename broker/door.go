package broker

import (
	"context"
	"crypto/tls"
	"errors"
	"sync/atomic"
	"time"
)

// door stands before a server's listeners. A nats-server that is asked to admit
// somebody while it shuts down panics, and takes the process with it: it looks
// for its system account, which has gone first. So before that nobody gets
// through a handshake any more, and who just did has had time to ask.
type door struct {
	shut atomic.Bool
	last atomic.Int64 // when the last handshake ended, Unix nanoseconds
}

// askTime is how long after its handshake a client may still ask to be admitted.
const askTime = 300 * time.Millisecond

var errShut = errors.New("the server is stopping")

// guard has every handshake of a listener pass the door; serve gives the
// configuration of each, which must be a copy.
func (d *door) guard(config *tls.Config) {
	serve := config.GetConfigForClient
	config.GetConfigForClient = func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
		if d.shut.Load() {
			return nil, errShut
		}
		c, err := serve(hello)
		if err != nil {
			return nil, err
		}
		c.VerifyConnection = func(tls.ConnectionState) error {
			if d.shut.Load() {
				return errShut
			}
			d.last.Store(time.Now().UnixNano())
			return nil
		}
		return c, nil
	}
}

// hold lets handshakes wait until the context ends: the session service is
// there then, or does not come so soon. In a cluster the listener is open before,
// and a callout sent while the routes are being made may reach nobody.
func hold(until context.Context, config *tls.Config) {
	serve := config.GetConfigForClient
	config.GetConfigForClient = func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
		<-until.Done()
		return serve(hello)
	}
}

// close shuts the door and waits until the server may stop.
func (d *door) close() {
	d.shut.Store(true)
	if wait := time.Until(time.Unix(0, d.last.Load()).Add(askTime)); wait > 0 {
		time.Sleep(wait)
	}
}
