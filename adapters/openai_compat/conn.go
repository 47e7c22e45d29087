package openai_compat

import (
	"crypto/tls"
	"errors"
	"net"
	"net/http/httptrace"
	"net/textproto"
	"sync"
	"sync/atomic"
)

var errIdleClosed = errors.New("the provider closed the connection while it was idle")

// conn counts what was written, which is how the adapter knows whether a
// request may have been read (I2, I3), and looks whether the provider has
// closed before it is used again.
type conn struct {
	net.Conn
	wrote  atomic.Int64
	reused atomic.Bool // the next Write is the first of a further request
}

func (c *conn) Write(p []byte) (int, error) {
	if c.reused.Swap(false) && !quiet(c.Conn) {
		return 0, errIdleClosed
	}
	// Counted before it is done: the answer may be here sooner than the count.
	c.wrote.Add(int64(len(p)))
	n, err := c.Conn.Write(p)
	c.wrote.Add(int64(n - len(p)))
	return n, err
}

// attempt watches one RoundTrip.
type attempt struct {
	mu     sync.Mutex
	c      *conn
	start  int64 // c.wrote when the request got c
	wrote  bool  // on a connection before c
	reused bool
	heard  func() // by a 1xx response; nil: nobody wants to know
}

func (a *attempt) trace() *httptrace.ClientTrace {
	t := &httptrace.ClientTrace{}
	if heard := a.heard; heard != nil {
		t.Got1xxResponse = func(int, textproto.MIMEHeader) error {
			heard()
			return nil
		}
	}
	t.GotConn = func(info httptrace.GotConnInfo) {
		nc := info.Conn
		if t, ok := nc.(*tls.Conn); ok {
			nc = t.NetConn()
		}
		c, ok := nc.(*conn)
		if !ok {
			panic("BUG: openai_compat I3: a connection that was not dialled here")
		}
		a.mu.Lock()
		defer a.mu.Unlock()
		a.wrote = a.written()
		a.c, a.start, a.reused = c, c.wrote.Load(), info.Reused
		c.reused.Store(info.Reused)
	}
	return t
}

// sent reports whether any byte of the request was written.
func (a *attempt) sent() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.written()
}

func (a *attempt) written() bool {
	return a.wrote || (a.c != nil && a.c.wrote.Load() > a.start)
}

// stale reports whether the request met a connection that had died idle.
func (a *attempt) stale() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.reused && !a.written()
}
