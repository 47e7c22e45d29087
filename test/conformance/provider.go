package conformance

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"

	"github.com/iop-fabric/iop/agent"
)

// Providers is the model server beside a Node under test: every request it gets
// waits for what the script says. A request names its run in its query, which a Node
// passes on unchanged (T2).
type Providers struct {
	mu      sync.Mutex
	calls   map[string]*call
	changed func()
	stop    chan struct{}  // closed by Close
	serving sync.WaitGroup // requests
}

// call is one request at the provider.
type call struct {
	mu    sync.Mutex
	queue []order
	kick  chan struct{}
	callState
}

type callState struct {
	gone bool // the Node ended it, or it is over
	read int  // bytes of the request's body read and checked
	eof  bool // and that was all
	err  error
}

// order is one thing the script tells the provider to do.
type order struct {
	what string // answer, body, end, fail, read
	n    int
	size int
}

// responder is how a provider answers: by an HTTP server, or by an adapter.
type responder interface {
	start(status, size int) error
	body(p []byte) error
	request() io.Reader
}

var errProviderFails = errors.New("the script says so")

func newProviders(changed func()) *Providers {
	return &Providers{calls: map[string]*call{}, changed: changed, stop: make(chan struct{})}
}

// setChanged sets who is told of what happens at the provider.
func (p *Providers) setChanged(fn func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.changed = fn
}

// told wakes whoever plays now.
func (p *Providers) told() {
	p.mu.Lock()
	changed := p.changed
	p.mu.Unlock()
	changed()
}

func (p *Providers) get(run string) *call {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.calls[run]
}

func (c *call) order(o order) {
	c.mu.Lock()
	c.queue = append(c.queue, o)
	c.mu.Unlock()
	select {
	case c.kick <- struct{}{}:
	default:
	}
}

func (c *call) state() callState {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.callState
}

func (c *call) next() (order, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.queue) == 0 {
		return order{}, false
	}
	o := c.queue[0]
	c.queue = c.queue[1:]
	return o, true
}

// serve plays one request's orders until its answer is over or nobody wants it.
func (p *Providers) serve(ctx context.Context, query string, r responder) error {
	_, run, _ := strings.Cut(query, "run=")
	c := &call{kick: make(chan struct{}, 1)}
	p.mu.Lock()
	if p.calls[run] != nil {
		c = p.calls[run]
		c.mu.Lock()
		c.err = errors.New("the provider was called twice")
		c.mu.Unlock()
		p.mu.Unlock()
		p.told()
		return errProviderFails
	}
	p.calls[run] = c
	p.mu.Unlock()
	p.told()
	defer func() {
		c.mu.Lock()
		c.gone = true
		c.mu.Unlock()
		p.told()
	}()
	sent := 0
	for {
		o, ok := c.next()
		if !ok {
			select {
			case <-c.kick:
				continue
			case <-ctx.Done():
				return context.Cause(ctx)
			case <-p.stop:
				return errProviderFails
			}
		}
		var err error
		switch o.what {
		case "answer":
			err = r.start(o.n, o.size)
		case "body":
			err = r.body(pattern(sent, o.n))
			sent += o.n
		case "end":
			return nil
		case "fail":
			return errProviderFails
		case "read":
			err = c.take(r.request(), o.n, p.told)
		case "drain":
			_, err = io.Copy(io.Discard, r.request())
		}
		if err != nil {
			return err
		}
	}
}

// take reads so much of the request's body and checks it; less than 0: all of it.
func (c *call) take(r io.Reader, n int, changed func()) error {
	buf := make([]byte, 32<<10)
	for n != 0 {
		p := buf
		if n > 0 {
			p = buf[:min(n, len(buf))]
		}
		k, err := r.Read(p)
		c.mu.Lock()
		if c.err == nil && !bytes.Equal(p[:k], pattern(c.read, k)) {
			c.err = fmt.Errorf("the request's body from byte %d on is not what was sent", c.read)
		}
		c.read += k
		c.eof = c.eof || err == io.EOF
		c.mu.Unlock()
		changed()
		if n > 0 {
			n -= k
		}
		switch {
		case err == io.EOF && n <= 0:
			return nil
		case err != nil:
			return err
		}
	}
	return nil
}

// patternAt is the byte at an offset of every body: the next in turn of 251, a prime,
// so that whatever is lost, repeated or moved shows.
func patternAt(i int) byte { return byte(i % 251) }

// pattern is what stands there; it is not to be changed.
func pattern(from, n int) []byte {
	if i := from % 251; i+n <= len(patternTable) {
		return patternTable[i : i+n : i+n]
	}
	p := make([]byte, 0, n)
	for len(p) < n {
		i := (from + len(p)) % 251
		p = append(p, patternTable[i:min(len(patternTable), i+n-len(p))]...)
	}
	return p
}

var patternTable = func() []byte {
	p := make([]byte, 256<<10)
	for i := range p {
		p[i] = patternAt(i)
	}
	return p
}()

// exchanger is the provider as an adapter.
type exchanger struct{ *Providers }

func (exchanger) Start(context.Context) error { return nil }
func (exchanger) Stop(context.Context) error  { return nil }

func (e exchanger) Exchange(ctx context.Context, ex agent.Exchange, sink agent.Sink) error {
	err := e.serve(ctx, ex.RawQuery, adapterResponder{ex, sink})
	if errors.Is(err, errProviderFails) {
		return &agent.Failure{Code: agent.CodeProvider, Message: err.Error()}
	}
	return err
}

type adapterResponder struct {
	ex   agent.Exchange
	sink agent.Sink
}

var answerHeader = []agent.Field{{Name: "Content-Type", Value: []byte("text/plain")}}

func (r adapterResponder) start(status, size int) error {
	return r.sink.Start(status, answerHeader, int64(size))
}
func (r adapterResponder) body(p []byte) error { return r.sink.Body(p) }

func (r adapterResponder) request() io.Reader {
	if r.ex.Body == nil {
		return strings.NewReader("")
	}
	return r.ex.Body
}

// close ends what is still there.
func (p *Providers) close() {
	close(p.stop)
	p.serving.Wait()
}

// ServeHTTP is the provider as a server.
func (p *Providers) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	p.serving.Add(1)
	defer p.serving.Done()
	err := p.serve(r.Context(), r.URL.RawQuery, httpResponder{w, r})
	if err != nil {
		panic(http.ErrAbortHandler) // the connection is broken: no end of an answer
	}
}

type httpResponder struct {
	w http.ResponseWriter
	r *http.Request
}

func (h httpResponder) start(status, size int) error {
	// Else the server reads the request whole before it answers.
	_ = http.NewResponseController(h.w).EnableFullDuplex() // HTTP/1.1 has it
	h.w.Header().Set("Content-Type", "text/plain")
	if size >= 0 {
		h.w.Header().Set("Content-Length", strconv.Itoa(size))
	}
	h.w.WriteHeader(status)
	if size >= 0 {
		return nil // with its body, as servers do
	}
	return http.NewResponseController(h.w).Flush()
}

func (h httpResponder) body(p []byte) error {
	if _, err := h.w.Write(p); err != nil {
		return err
	}
	return http.NewResponseController(h.w).Flush()
}

func (h httpResponder) request() io.Reader { return h.r.Body }
