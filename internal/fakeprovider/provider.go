package fakeprovider

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"net/textproto"
	"strconv"
	"strings"
	"sync"
	"testing"
)

// maxHead bounds a request's head; a test that sends more fails by itself.
const maxHead = 1 << 20

// Provider is a fake provider.
type Provider struct {
	URL string // http://127.0.0.1:port

	ln       net.Listener
	done     chan struct{}
	handlers sync.WaitGroup
	received chan *Request

	mu       sync.Mutex
	next     []script
	always   func(*Request) []Step
	requests []*Request
	conns    map[*link]struct{}
	accepted int
	closed   bool
}

type script struct {
	steps []Step
	early bool
}

// Request is one request as it came in.
type Request struct {
	Method   string
	Path     string // as sent, without the query
	RawQuery string
	Header   http.Header
	Head     []byte // the very bytes, to the blank line
	Body     []byte
	Conn     int // number of the connection, from 1
	// Gone is closed when the connection of this request is.
	Gone <-chan struct{}
}

// New starts a provider that stops at the test's end. Until it is told
// otherwise it answers 200 with `{}`.
func New(t testing.TB) *Provider {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatalf("listen on loopback: %v", err)
	}
	p := Serve(ln)
	t.Cleanup(p.Close)
	return p
}

// Serve starts a provider on a listener of the caller's: a pipe's, in a bubble.
// Who calls it calls Close.
func Serve(ln net.Listener) *Provider {
	p := &Provider{
		URL:  "http://" + ln.Addr().String(),
		ln:   ln,
		done: make(chan struct{}),
		// Nobody need listen; a test that does falls behind by less than this.
		received: make(chan *Request, 1<<16),
		conns:    map[*link]struct{}{},
	}
	p.Always(JSON(200, "{}")...)
	p.handlers.Go(p.accept)
	return p
}

// Next queues the script of the next request that has none yet.
func (p *Provider) Next(steps ...Step) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.next = append(p.next, script{steps: steps})
}

// NextEarly is Next, but the script starts as soon as the head was read; the
// body is read only by a ReadBody step.
func (p *Provider) NextEarly(steps ...Step) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.next = append(p.next, script{steps: steps, early: true})
}

// Always sets the script of requests for which none is queued.
func (p *Provider) Always(steps ...Step) {
	p.Handle(func(*Request) []Step { return steps })
}

// Handle sets how a script is chosen where none is queued.
func (p *Provider) Handle(f func(*Request) []Step) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.always = f
}

// Received tells of each request when it was recorded.
func (p *Provider) Received() <-chan *Request { return p.received }

// Requests returns all recorded so far.
func (p *Provider) Requests() []*Request {
	p.mu.Lock()
	defer p.mu.Unlock()
	return append([]*Request(nil), p.requests...)
}

// Executions returns how many requests were recorded.
func (p *Provider) Executions() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.requests)
}

// Connections returns how many connections were accepted.
func (p *Provider) Connections() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.accepted
}

// CloseIdle closes, as a server's idle timeout would, every connection that
// waits for a request, and returns how many those were.
func (p *Provider) CloseIdle() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := 0
	for l := range p.conns {
		if l.idle {
			_ = l.c.Close() // it is closed either way
			n++
		}
	}
	return n
}

// Close stops it. Closing twice is fine.
func (p *Provider) Close() {
	p.mu.Lock()
	if !p.closed {
		p.closed = true
		close(p.done)
		_ = p.ln.Close() // it only listens
	}
	for l := range p.conns {
		_ = l.c.Close() // its handler ends by this
	}
	p.mu.Unlock()
	p.handlers.Wait()
}

func (p *Provider) accept() {
	for {
		c, err := p.ln.Accept()
		if err != nil {
			return
		}
		p.mu.Lock()
		if p.closed {
			p.mu.Unlock()
			_ = c.Close() // came too late
			return
		}
		p.accepted++
		l := &link{p: p, c: c, br: bufio.NewReader(c), number: p.accepted, gone: make(chan struct{}), idle: true}
		p.conns[l] = struct{}{}
		p.handlers.Go(l.serve)
		p.mu.Unlock()
	}
}

// link is one connection.
type link struct {
	p      *Provider
	c      net.Conn
	br     *bufio.Reader
	number int
	over   sync.Once
	gone   chan struct{} // closed when the peer has gone, or the connection is closed
	idle   bool          // guarded by Provider.mu
}

func (l *link) end() { l.over.Do(func() { close(l.gone) }) }

func (l *link) setIdle(idle bool) {
	l.p.mu.Lock()
	l.idle = idle
	l.p.mu.Unlock()
}

var errOver = errors.New("the connection is over")

func (l *link) serve() {
	defer func() {
		_ = l.c.Close() // or it was
		l.end()
		l.p.mu.Lock()
		delete(l.p.conns, l)
		l.p.mu.Unlock()
	}()
	for l.one() == nil {
	}
}

// one serves one request; an error ends the connection.
func (l *link) one() error {
	first, err := l.br.Peek(1)
	if err != nil {
		return err
	}
	l.setIdle(false)
	if c := first[0]; c < 'A' || c > 'Z' { // a TLS hello, for one
		_, err = io.WriteString(l.c, "HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
		return errors.Join(err, errOver)
	}
	req, err := l.head()
	if err != nil {
		return err
	}
	s := l.p.script()
	x := &Exchange{Request: req, link: l}
	if !s.early {
		if err := x.readBody(); err != nil {
			return err
		}
	}
	steps := l.p.record(req, s)
	if !s.early {
		x.watch()
	}
	for _, step := range steps {
		if err = step(x); err != nil {
			break
		}
	}
	if err == nil && x.watched == nil {
		if err = x.readBody(); err == nil { // an early answer leaves the rest of the body on the wire
			x.watch()
		}
	}
	if err != nil {
		_ = l.c.Close() // ends the watch
		if x.watched != nil {
			<-x.watched
		}
		return err
	}
	l.setIdle(true)
	return <-x.watched // the next request's first byte, or the end
}

func (p *Provider) script() script {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.next) == 0 {
		return script{}
	}
	s := p.next[0]
	p.next = p.next[1:]
	if s.steps == nil {
		s.steps = []Step{}
	}
	return s
}

func (p *Provider) record(r *Request, s script) []Step {
	p.mu.Lock()
	p.requests = append(p.requests, r)
	always := p.always
	p.mu.Unlock()
	select {
	case p.received <- r:
	default: // nobody listens
	}
	if s.steps != nil {
		return s.steps
	}
	return always(r)
}

// head reads a request's head; the body stays on the wire.
func (l *link) head() (*Request, error) {
	var head []byte
	for !bytes.HasSuffix(head, []byte("\r\n\r\n")) {
		line, err := l.br.ReadSlice('\n')
		head = append(head, line...)
		if err != nil && !errors.Is(err, bufio.ErrBufferFull) {
			return nil, err
		}
		if len(head) > maxHead {
			return nil, fmt.Errorf("a head over %d bytes", maxHead)
		}
	}
	r, err := http.ReadRequest(bufio.NewReader(bytes.NewReader(head)))
	if err != nil {
		return nil, fmt.Errorf("parse head: %w", err)
	}
	path, query, _ := strings.Cut(r.RequestURI, "?")
	if r.Host != "" {
		r.Header.Set("Host", r.Host)
	}
	if n := textproto.TrimString(headValue(head, "content-length")); n != "" {
		r.Header.Set("Content-Length", n)
	}
	if len(r.TransferEncoding) > 0 {
		r.Header["Transfer-Encoding"] = r.TransferEncoding
	}
	return &Request{Method: r.Method, Path: path, RawQuery: query, Header: r.Header, Head: head, Conn: l.number, Gone: l.gone}, nil
}

func headValue(head []byte, name string) string {
	for line := range strings.SplitSeq(string(head), "\r\n") {
		if k, v, ok := strings.Cut(line, ":"); ok && strings.EqualFold(k, name) {
			return v
		}
	}
	return ""
}

// readBody reads what the head announced.
func (x *Exchange) readBody() error {
	if x.bodyRead {
		return nil
	}
	x.bodyRead = true
	br := x.link.br
	if x.Request.Header.Get("Transfer-Encoding") != "" {
		b, err := io.ReadAll(httputil.NewChunkedReader(br))
		x.Request.Body = b
		if err != nil {
			return err
		}
		_, err = br.ReadString('\n') // no trailers are expected here
		return err
	}
	n, err := strconv.Atoi(x.Request.Header.Get("Content-Length"))
	if err != nil || n == 0 {
		return nil
	}
	x.Request.Body = make([]byte, n)
	_, err = io.ReadFull(br, x.Request.Body)
	return err
}

// watch tells when the peer has gone.
func (x *Exchange) watch() {
	watched := make(chan error, 1) // one value, read by one
	x.watched = watched
	l := x.link
	l.p.handlers.Go(func() {
		_, err := l.br.Peek(1)
		if err != nil {
			l.end()
		}
		watched <- err
	})
}
