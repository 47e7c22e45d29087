package openai_compat

import (
	"context"
	"io"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"sync"

	"github.com/iop-fabric/iop/agent"
)

// maxAttempts bounds the tries of one request over connections that had died
// idle. The second already gets a fresh one, unless an exchange beside it has
// just put another back.
const maxAttempts = 3

// Exchange runs one HTTP exchange with the provider.
func (a *Adapter) Exchange(ctx context.Context, ex agent.Exchange, sink agent.Sink) error {
	if !a.running.Enter() {
		return &agent.Failure{
			Code: agent.CodeUnreachable, Message: "the adapter is stopped",
			Retryable: true, Metadata: reason(ReasonStopped),
		}
	}
	defer a.running.Leave()

	c, err := a.prepare(ex)
	if err != nil {
		return err
	}
	if l, ok := sink.(agent.Listener); ok {
		c.heard = l.Heard
	}
	if c.body != nil {
		defer c.body.end()
		defer context.AfterFunc(ctx, c.body.interrupt)()
		if err := c.body.load(); err != nil {
			return failure(ctx, new(attempt), c.body, err)
		}
	}
	resp, at, err := a.send(ctx, c)
	if err != nil {
		return failure(ctx, at, c.body, err)
	}
	// Closing an answer that was not read to its end closes the connection (I6).
	defer resp.Body.Close() // the answer was delivered, or something worse is returned
	return deliver(ctx, resp, sink, func(err error) error { return failure(ctx, at, c.body, err) })
}

// call is an exchange made ready to send.
type call struct {
	method string
	url    *url.URL
	header http.Header
	body   *body  // nil: none
	heard  func() // of what is no part of the answer; nil: nobody wants to know
}

// prepare checks everything that can be checked before the provider is called.
func (a *Adapter) prepare(ex agent.Exchange) (*call, error) {
	c := &call{method: ex.Method}
	path := ex.Path
	if ex.Operation != "" {
		op, ok := a.profile.Operations[ex.Operation]
		if !ok {
			return nil, invalid("the provider's profile has no such operation")
		}
		c.method, path = op.Method, op.Path
	}
	if !methods[c.method] {
		return nil, invalid("the method is not one a provider is asked with")
	}
	clean, err := cleanPath(path)
	if err != nil {
		return nil, invalid(err.Error())
	}
	if err := checkQuery(ex.RawQuery); err != nil {
		return nil, invalid(err.Error())
	}
	if c.url, err = a.base.url(clean, ex.RawQuery); err != nil {
		return nil, invalid(err.Error())
	}
	if ex.BodySize < 0 || (ex.Body == nil && ex.BodySize > 0) {
		return nil, invalid("the body is not of the size announced")
	}
	if c.header, err = a.requestHeader(ex.Header); err != nil {
		return nil, invalid("a header holds bytes that no header has")
	}
	if err := a.authorize(c.header, ex.Credential); err != nil {
		return nil, err
	}
	if ex.Body != nil {
		c.body = newBody(ex.Body, ex.BodySize)
	}
	return c, nil
}

// authorize sets the one credential of this request (I5).
func (a *Adapter) authorize(h http.Header, leased []byte) error {
	var key string
	switch {
	case leased != nil:
		key = string(leased)
	case a.staticKey != nil:
		k, err := a.staticKey()
		if err != nil {
			return noKey()
		}
		key = k
	default:
		return nil
	}
	if key == "" || !validValue(key) {
		return noKey()
	}
	h[a.profile.AuthHeader] = []string{a.profile.AuthPrefix + key}
	return nil
}

// noKey tells nothing of the key, nor where it was looked for.
func noKey() *agent.Failure {
	return &agent.Failure{Code: agent.CodeCredential, Message: "the provider's key is missing or unusable", Metadata: reason(ReasonKey)}
}

// send sends the request until it is on its way: a further attempt follows only
// where the one before met a connection that had died idle, and nothing of the
// request was written to it (I2).
func (a *Adapter) send(ctx context.Context, c *call) (*http.Response, *attempt, error) {
	for n := 1; ; n++ {
		at := &attempt{heard: c.heard}
		req := (&http.Request{
			Method: c.method, URL: c.url, Host: a.base.host, Header: c.header,
			Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		}).WithContext(httptrace.WithClientTrace(ctx, at.trace()))
		if c.body != nil && c.body.size > 0 {
			req.Body, req.ContentLength = c.body.reader(), c.body.size
		}
		resp, err := a.transport.RoundTrip(req) //nolint:bodyclose // Exchange and Probe close it
		if err == nil {
			return resp, at, nil
		}
		if ctx.Err() != nil || n == maxAttempts || !at.stale() || (c.body != nil && !c.body.again()) {
			return nil, at, err
		}
		a.transport.CloseIdleConnections() // its neighbours are as old
	}
}

// deliver hands the answer to the sink, one read of the provider at a time.
func deliver(ctx context.Context, resp *http.Response, sink agent.Sink, fail func(error) error) error {
	if resp.StatusCode == http.StatusSwitchingProtocols {
		return broke(ReasonProtocol, "the provider changed the protocol unasked")
	}
	header, err := responseHeader(resp.Header)
	if err != nil {
		return fail(err)
	}
	size := resp.ContentLength
	if resp.Body == http.NoBody {
		size = 0 // an answer to HEAD announces what a GET would get
	}
	if err := sink.Start(resp.StatusCode, header, size); err != nil {
		return err
	}
	if err := copyBody(ctx, resp.Body, sink, fail); err != nil {
		return err
	}
	if len(resp.Trailer) == 0 {
		return nil
	}
	trailer, err := responseHeader(resp.Trailer)
	if err != nil {
		return fail(err)
	}
	if len(trailer) == 0 {
		return nil
	}
	return sink.Trailer(trailer)
}

// A stream of tokens reads into a small buffer; one whose reads fill it gets a
// large one, and gives it back when it trickles again. So a stream that waits
// holds little.
const (
	smallBuffer = 4 << 10
	largeBuffer = 64 << 10
)

var (
	smallBuffers = sync.Pool{New: func() any { return new([smallBuffer]byte) }}
	largeBuffers = sync.Pool{New: func() any { return new([largeBuffer]byte) }}
)

func copyBody(ctx context.Context, r io.Reader, sink agent.Sink, fail func(error) error) error {
	small := smallBuffers.Get().(*[smallBuffer]byte)
	defer smallBuffers.Put(small)
	var large *[largeBuffer]byte
	defer func() {
		if large != nil {
			largeBuffers.Put(large)
		}
	}()
	buf := small[:]
	for {
		n, err := r.Read(buf)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if n > 0 {
			if serr := sink.Body(buf[:n]); serr != nil {
				return serr
			}
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return fail(err)
		}
		switch {
		case large == nil && n == len(buf):
			large = largeBuffers.Get().(*[largeBuffer]byte)
			buf = large[:]
		case large != nil && n <= smallBuffer/2:
			largeBuffers.Put(large)
			large, buf = nil, small[:]
		}
	}
}
