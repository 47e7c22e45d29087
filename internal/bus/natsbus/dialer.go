package natsbus

import (
	"bytes"
	"context"
	"errors"
	"net"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
)

// dialer opens the sockets of one Conn. Until settle, abort closes them.
type dialer struct {
	ctx     context.Context //nolint:containedctx // the Conn's life: the library's dialer interface has no context
	timeout time.Duration
	inner   nats.InProcessConnProvider

	mu      sync.Mutex
	aborted bool
	settled bool
	cancel  context.CancelFunc // of a dial in its midst
	opened  []net.Conn         // before settle
}

var errAborted = errors.New("dial abandoned")

// Dial is nats.CustomDialer.
func (d *dialer) Dial(network, address string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(d.ctx, d.timeout)
	defer cancel()
	d.mu.Lock()
	if d.aborted {
		d.mu.Unlock()
		return nil, errAborted
	}
	d.cancel = cancel
	d.mu.Unlock()
	var nd net.Dialer
	conn, err := nd.DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	return d.keep(conn)
}

// InProcessConn is nats.InProcessConnProvider.
func (d *dialer) InProcessConn() (net.Conn, error) {
	conn, err := d.inner.InProcessConn()
	if err != nil {
		return nil, err
	}
	if _, err := d.keep(conn); err != nil {
		return nil, err
	}
	return &pipeConn{Conn: conn, early: earlyWrites}, nil
}

func (d *dialer) keep(conn net.Conn) (net.Conn, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.aborted {
		conn.Close() // abandoned
		return nil, errAborted
	}
	if !d.settled {
		d.opened = append(d.opened, conn)
	}
	return conn, nil
}

func (d *dialer) abort() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.aborted = true
	if d.cancel != nil {
		d.cancel()
	}
	for _, conn := range d.opened {
		conn.Close() // abandoned
	}
	d.opened = nil
}

func (d *dialer) settle() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.settled, d.opened, d.cancel = true, nil, nil
}

const (
	earlyWrites = 8           // more than a handshake takes, TLS included
	lastWrites  = time.Second // how long Close waits for those still under way
)

// pipeConn keeps a refusal in process from hanging. The library writes CONNECT
// and PING apart; a server that refuses after the first writes its error while
// we write the second, and on an unbuffered pipe each would wait for the other
// to read until a deadline ends it. So the first writes do not wait.
type pipeConn struct {
	net.Conn
	mu    sync.Mutex
	early int
	last  chan struct{} // closed when the last early write ended
}

func (c *pipeConn) Write(p []byte) (int, error) {
	c.mu.Lock()
	before := c.last
	if c.early == 0 {
		c.last = nil
		c.mu.Unlock()
		if before != nil {
			<-before // order
		}
		return c.Conn.Write(p)
	}
	c.early--
	done, data := make(chan struct{}), bytes.Clone(p)
	c.last = done
	c.mu.Unlock()
	go func() { // ends with its write: Close ends that
		defer close(done)
		if before != nil {
			<-before
		}
		_, _ = c.Conn.Write(data) // a failure is the next reader's to find
	}()
	return len(p), nil
}

// Close sends what was written, as a socket's would.
func (c *pipeConn) Close() error {
	c.mu.Lock()
	last := c.last
	c.mu.Unlock()
	if last != nil {
		_ = c.SetWriteDeadline(time.Now().Add(lastWrites))
		<-last
	}
	return c.Conn.Close()
}
