package natsbus

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"net"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
)

// dialer opens the sockets of one Conn. Until settle, abort closes them.
type dialer struct {
	ctx     context.Context //nolint:containedctx // the Conn's life: the library's dialer interface has no context
	timeout time.Duration
	inner   nats.InProcessConnProvider
	tls     *tls.Config
	roots   func() *x509.CertPool
	keys    func() (string, func([]byte) ([]byte, error))
	servers []string      // host:port, in an order of chance
	silence time.Duration // how long a server may send nothing

	mu      sync.Mutex
	nc      *nats.Conn // after settle
	aborted bool
	settled bool
	cancel  context.CancelFunc // of a dial in its midst
	opened  []net.Conn         // before settle
	last    string             // the server of the connection before
	conn    net.Conn           // the newest that the library was given

	up      atomic.Bool   // after settle: there is a connection
	dialled chan struct{} // closed when the race that is under way has ended; nil: there is none
	result  answer        // of it
}

var (
	errAborted = errors.New("dial abandoned")
	errNotYet  = errors.New("the dial is under way")
)

// glance is how long Dial looks for the outcome of a race (N6).
const glance = 50 * time.Millisecond

// patience is how long a server may take to answer by TLS before the next one is
// asked beside it (N5).
const patience = time.Second

// addresses are the servers of urls, shuffled.
func addresses(urls []string) []string {
	var out []string
	for _, raw := range urls {
		address := strings.TrimPrefix(raw, "tls://")
		if u, err := url.Parse(raw); err == nil && u.Host != "" {
			address = u.Host
			if u.Port() == "" {
				address = net.JoinHostPort(u.Hostname(), "4222")
			}
		}
		out = append(out, address)
	}
	rand.Shuffle(len(out), func(i, j int) { out[i], out[j] = out[j], out[i] })
	return out
}

// Dial is nats.CustomDialer. The library calls it for each server in turn until one
// admits us; which it asks for is no matter: all are tried, the one that was there
// last at the end.
func (d *dialer) Dial(network, _ string) (net.Conn, error) {
	d.mu.Lock()
	settled := d.settled
	d.mu.Unlock()
	if settled {
		return d.again(network)
	}
	ctx, cancel := context.WithTimeout(d.ctx, d.timeout)
	defer cancel()
	d.mu.Lock()
	if d.aborted {
		d.mu.Unlock()
		return nil, errAborted
	}
	d.cancel = cancel
	d.mu.Unlock()
	a := d.race(ctx, network)
	if a.err != nil {
		return nil, a.err
	}
	return d.keep(a.conn)
}

// again is Dial for a connection that comes back. The library calls it under the
// lock that every Publish needs, so it dials beside it and only looks, now and
// then, what has become of that (N6).
func (d *dialer) again(network string) (net.Conn, error) {
	first := d.up.Swap(false)
	d.mu.Lock()
	if d.dialled == nil {
		d.dialled = make(chan struct{})
		go d.beside(network, d.dialled) // ends with the Conn's life
	}
	dialled := d.dialled
	d.mu.Unlock()
	if first {
		return nil, errNotYet // who waits for the lock gets it, and is told
	}
	look := time.NewTimer(glance)
	defer look.Stop()
	select {
	case <-dialled:
	case <-look.C:
		return nil, errNotYet
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	a := d.result
	d.dialled, d.result, d.conn = nil, answer{}, a.conn
	if a.err == nil && d.keys != nil {
		// The library reads these next, under the lock that it called us with.
		public, sign := d.keys()
		d.nc.Opts.Nkey, d.nc.Opts.SignatureCB = public, sign
	}
	return a.conn, a.err
}

func (d *dialer) beside(network string, done chan<- struct{}) {
	ctx, cancel := context.WithTimeout(d.ctx, d.timeout)
	defer cancel()
	a := d.race(ctx, network)
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.result = a; d.ctx.Err() != nil {
		d.discardLocked()
	}
	close(done)
}

// discard closes what was dialled and not asked for.
func (d *dialer) discard() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.discardLocked()
}

func (d *dialer) discardLocked() {
	if d.result.conn != nil {
		d.result.conn.Close() // unused
	}
	d.result = answer{err: errAborted}
}

// SkipTLSHandshake tells the library that Dial has done it.
func (d *dialer) SkipTLSHandshake() bool { return true }

type answer struct {
	server string
	conn   net.Conn
	err    error
}

// race asks one server after the other, the next one as soon as the one before
// has failed or was silent for patience, and returns the first that answers by
// TLS. Only that one is told who we are (S2).
func (d *dialer) race(ctx context.Context, network string) answer {
	d.mu.Lock()
	order := slices.Clone(d.servers)
	if i := slices.Index(order, d.last); i >= 0 {
		order = append(slices.Delete(order, i, i+1), d.last)
	}
	d.mu.Unlock()
	answers := make(chan answer, len(order)) // room for all: none waits for who comes too late
	ctx, cancel := context.WithCancel(ctx)
	asked := 0
	defer func() {
		cancel()
		for range asked {
			if a := <-answers; a.err == nil {
				a.conn.Close() // it was too late
			}
		}
	}()
	next := time.NewTimer(0)
	defer next.Stop()
	var failures []error
	for {
		select {
		case <-next.C:
			if len(order) == 0 {
				continue
			}
			server := order[0]
			order = order[1:]
			asked++
			go func() {
				conn, err := d.open(ctx, network, server)
				answers <- answer{server, conn, err}
			}()
			next.Reset(patience)
		case a := <-answers:
			asked--
			if a.err == nil {
				d.mu.Lock()
				d.last = a.server
				d.mu.Unlock()
				return a
			}
			failures = append(failures, a.err)
			if len(order) > 0 {
				next.Reset(0)
			} else if asked == 0 {
				return answer{err: telling(failures)}
			}
		}
	}
}

// telling leaves out that nobody listens somewhere where something else failed
// elsewhere: the library would read it as all there is to say.
func telling(failures []error) error {
	more := slices.DeleteFunc(slices.Clone(failures), func(err error) bool {
		return strings.Contains(err.Error(), "connection refused")
	})
	if len(more) == 0 {
		return failures[0]
	}
	return errors.Join(more...)
}

func (d *dialer) open(ctx context.Context, network, server string) (net.Conn, error) {
	var nd net.Dialer
	conn, err := nd.DialContext(ctx, network, server)
	if unknown := new(net.DNSError); errors.As(err, &unknown) {
		// In words that are not those of a broker that is down: a resolver may be.
		return nil, fmt.Errorf("lookup %s: no such host", unknown.Name)
	}
	if err != nil {
		return nil, err
	}
	config := d.tls.Clone()
	if d.roots != nil {
		config.RootCAs = d.roots()
	}
	if config.ServerName == "" {
		if config.ServerName, _, err = net.SplitHostPort(server); err != nil {
			conn.Close() // unused
			return nil, err
		}
	}
	secure := tls.Client(newHeard(conn, d.silence), config)
	if err := secure.HandshakeContext(ctx); err != nil {
		conn.Close() // unused
		return nil, fmt.Errorf("%w: %w", nats.ErrTLS, err)
	}
	return secure, nil
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
	d.conn = conn
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

func (d *dialer) settle(nc *nats.Conn) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.nc = nc
	d.settled, d.opened, d.cancel = true, nil, nil
	d.isUpLocked()
}

// isUp: the broker has let us in.
func (d *dialer) isUp() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.isUpLocked()
}

func (d *dialer) isUpLocked() {
	d.up.Store(true)
	if t, ok := d.conn.(*tls.Conn); ok {
		t.NetConn().(*heard).start()
	}
}

// heard is a connection that ends when nothing comes for too long: not even an
// answer to the pings. Closing it needs no lock of the library's, which a blocked
// write may hold.
type heard struct {
	net.Conn
	silence time.Duration
	last    atomic.Int64 // since began
	began   time.Time
	watch   *time.Timer
}

func newHeard(conn net.Conn, silence time.Duration) *heard {
	h := &heard{Conn: conn, silence: silence, began: time.Now()}
	h.watch = time.AfterFunc(math.MaxInt64, h.look)
	return h
}

// start begins to watch: before, while the broker decides, it may be silent.
func (h *heard) start() {
	h.last.Store(int64(time.Since(h.began)))
	h.watch.Reset(h.silence)
}

func (h *heard) Read(p []byte) (int, error) {
	n, err := h.Conn.Read(p)
	if n > 0 {
		h.last.Store(int64(time.Since(h.began)))
	}
	return n, err
}

func (h *heard) look() {
	left := h.silence - (time.Since(h.began) - time.Duration(h.last.Load()))
	if left <= 0 {
		h.Conn.Close() // who reads finds out
		return
	}
	h.watch.Reset(left)
}

func (h *heard) Close() error {
	h.watch.Stop()
	return h.Conn.Close()
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
