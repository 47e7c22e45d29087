package ioptest

import (
	"net"
	"sync"
	"testing"
)

// Proxy is a TCP link that can be broken: cut, held (nothing passes, nothing
// closes) and refused.
type Proxy struct {
	target func() string
	ln     net.Listener
	wg     sync.WaitGroup

	mu     sync.Mutex
	conns  map[net.Conn]struct{}
	hold   chan struct{} // closed while bytes may pass
	refuse bool
	closed bool
}

// NewProxy listens on loopback; target is asked at each connection.
func NewProxy(t testing.TB, target func() string) *Proxy {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	open := make(chan struct{})
	close(open)
	p := &Proxy{target: target, ln: ln, conns: map[net.Conn]struct{}{}, hold: open}
	p.wg.Go(p.accept)
	t.Cleanup(p.close)
	return p
}

// Addr is where it listens.
func (p *Proxy) Addr() string { return p.ln.Addr().String() }

func (p *Proxy) accept() {
	for {
		c, err := p.ln.Accept()
		if err != nil {
			return
		}
		p.mu.Lock()
		refuse := p.refuse
		p.mu.Unlock()
		if refuse {
			c.Close()
			continue
		}
		up, err := net.Dial("tcp", p.target())
		if err != nil {
			c.Close()
			continue
		}
		if !p.keep(c) || !p.keep(up) {
			c.Close()
			up.Close()
			continue
		}
		p.wg.Go(func() { p.pipe(c, up) })
		p.wg.Go(func() { p.pipe(up, c) })
	}
}

func (p *Proxy) keep(c net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return false
	}
	p.conns[c] = struct{}{}
	return true
}

func (p *Proxy) pipe(dst, src net.Conn) {
	defer func() {
		dst.Close()
		src.Close()
		p.mu.Lock()
		delete(p.conns, src)
		p.mu.Unlock()
	}()
	buf := make([]byte, 32<<10)
	for {
		n, err := src.Read(buf)
		p.mu.Lock()
		hold := p.hold
		p.mu.Unlock()
		<-hold
		if n > 0 {
			if _, err := dst.Write(buf[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

// Cut closes every connection there is; new ones pass.
func (p *Proxy) Cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.conns {
		c.Close()
	}
}

// Hold lets nothing pass until Release, and closes nothing.
func (p *Proxy) Hold() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.hold = make(chan struct{})
}

// Release ends Hold.
func (p *Proxy) Release() {
	p.mu.Lock()
	defer p.mu.Unlock()
	select {
	case <-p.hold:
	default:
		close(p.hold)
	}
}

// Refuse says whether new connections are closed at once.
func (p *Proxy) Refuse(on bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.refuse = on
}

func (p *Proxy) close() {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	p.ln.Close()
	p.Release()
	p.Cut()
	p.wg.Wait()
}
