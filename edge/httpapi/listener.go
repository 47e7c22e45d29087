package httpapi

import (
	"net"
	"sync"
)

// resetter is a connection that can end with a reset in place of a proper close.
type resetter interface{ SetLinger(sec int) error }

// Listener returns l with at most limit connections open at once. Those of TCP can
// still be reset, which a wrapper that shows no more than net.Conn takes away.
func Listener(l net.Listener, limit int) net.Listener {
	return &listener{Listener: l, places: make(chan struct{}, limit), closed: make(chan struct{})}
}

type listener struct {
	net.Listener
	places chan struct{} // one for each connection there may be
	closed chan struct{}
	once   sync.Once
}

// Accept implements net.Listener. Whoever is one too many waits in the system's queue.
func (l *listener) Accept() (net.Conn, error) {
	select {
	case l.places <- struct{}{}:
	case <-l.closed:
		return nil, net.ErrClosed
	}
	leave := sync.OnceFunc(func() { <-l.places })
	c, err := l.Listener.Accept()
	if err != nil {
		leave()
		return nil, err
	}
	if t, ok := c.(*net.TCPConn); ok {
		return &tcpCaller{t, leave}, nil
	}
	return &caller{c, leave}, nil
}

func (l *listener) Close() error {
	l.once.Do(func() { close(l.closed) })
	return l.Listener.Close()
}

type tcpCaller struct {
	*net.TCPConn
	leave func()
}

func (c *tcpCaller) Close() error {
	defer c.leave()
	return c.TCPConn.Close()
}

type caller struct {
	net.Conn
	leave func()
}

func (c *caller) Close() error {
	defer c.leave()
	return c.Conn.Close()
}

// reset ends the connection so that its caller can tell the cut from an end, where
// the close is all that tells an answer's end: to an HTTP/1.0 caller an answer without
// a length. Elsewhere net/http's own way to break a connection leaves a body that is
// not whole. It reports whether it did.
func (x *exchange) reset() bool {
	if x.h2 || x.chunks || !x.committed || x.length >= 0 || x.bodiless {
		return false
	}
	c, _, err := x.rc.Hijack()
	if err != nil {
		return false
	}
	if t, ok := c.(interface{ NetConn() net.Conn }); ok {
		c = t.NetConn() // closed in its own way, TLS would say that this is the end
	}
	if r, ok := c.(resetter); ok {
		_ = r.SetLinger(0) // of a connection that is gone, nobody is left to be told
	}
	_ = c.Close()
	return true
}
