package httpapi

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/iop-fabric/iop/edge/dispatch"
	"github.com/iop-fabric/iop/wire"
)

// pipes is a listener whose connections are unbuffered pipes, so that a bubble's
// clock rules their deadlines.
type pipes struct {
	conns  chan net.Conn
	closed chan struct{}
}

func (p *pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.conns:
		return c, nil
	case <-p.closed:
		return nil, net.ErrClosed
	}
}

func (p *pipes) Close() error   { close(p.closed); return nil }
func (p *pipes) Addr() net.Addr { return pipeAddr{} }

func (p *pipes) dial() net.Conn {
	ours, theirs := net.Pipe()
	p.conns <- theirs
	return ours
}

type pipeAddr struct{}

func (pipeAddr) Network() string { return "pipe" }
func (pipeAddr) String() string  { return "pipe" }

// inBubble runs test with an API of default limits behind pipes.
func inBubble(t *testing.T, test func(t *testing.T, p *pipes, runner *fakeRunner)) {
	synctest.Test(t, func(t *testing.T) {
		runner := &fakeRunner{answer: slowly}
		api := New(Config{Keys: []Key{{Name: "alice", Digest: DigestOf(goodKey)}}}, Deps{Pool: &fakePool{}, Runner: runner})
		server := api.Server(api.Handler())
		server.Protocols = new(http.Protocols)
		server.Protocols.SetHTTP1(true)
		server.Protocols.SetUnencryptedHTTP2(true)
		p := &pipes{conns: make(chan net.Conn), closed: make(chan struct{})}
		served := make(chan error, 1)
		go func() { served <- server.Serve(p) }()
		test(t, p, runner)
		if err := server.Close(); err != nil {
			t.Error(err)
		}
		if err := <-served; !errors.Is(err, http.ErrServerClosed) {
			t.Error(err)
		}
	})
}

func writeRequest(t *testing.T, c net.Conn, doc string) {
	t.Helper()
	if _, err := fmt.Fprintf(c, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nContent-Length: %d\r\n\r\n%s", goodKey, len(doc), doc); err != nil {
		t.Fatal(err)
	}
}

// Contract: E10 T6
func TestACallerWhoTakesNothingIsGone(t *testing.T) {
	inBubble(t, func(t *testing.T, p *pipes, runner *fakeRunner) {
		began, ended := make(chan time.Time, 1), make(chan error, 1)
		runner.answer = func(_ context.Context, _ dispatch.Attempt, w dispatch.Writer) dispatch.Result {
			began <- time.Now()
			ended <- w.Start(200, fields(eventStream...)) // an event stream is flushed at once
			return dispatch.Result{Started: true, Err: wire.Errorf(wire.Cancelled, "caller gone")}
		}
		c := p.dial()
		defer c.Close()
		writeRequest(t, c, streamChat)
		start := <-began
		if err := <-ended; !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%v", err)
		}
		if took := time.Since(start); took < 2*time.Minute || took > 3*time.Minute {
			t.Errorf("given up after %v", took)
		}
		if _, err := io.Copy(io.Discard, c); err != nil {
			t.Errorf("the connection is not closed: %v", err)
		}
	})
}

// slowly answers with three events, an hour apart.
func slowly(ctx context.Context, _ dispatch.Attempt, w dispatch.Writer) dispatch.Result {
	res := dispatch.Result{Started: true}
	if w.Start(200, fields(eventStream...)) != nil {
		return res
	}
	for _, p := range []string{chunk, chunk, "data: [DONE]\n\n"} {
		select {
		case <-time.After(time.Hour):
		case <-ctx.Done():
			res.Err = wire.Errorf(wire.Cancelled, "caller gone")
			return res
		}
		if w.Body([]byte(p)) != nil || w.Flush() != nil {
			return res
		}
	}
	return res
}

// Contract: E10
func TestASlowProviderIsNotTheCallersStall(t *testing.T) {
	inBubble(t, func(t *testing.T, p *pipes, _ *fakeRunner) {
		c := p.dial()
		defer c.Close()
		for range 2 { // on one connection
			writeRequest(t, c, streamChat)
			resp, err := http.ReadResponse(bufio.NewReader(c), nil)
			if err != nil {
				t.Fatal(err)
			}
			if b, err := io.ReadAll(resp.Body); err != nil || string(b) != chunk+chunk+"data: [DONE]\n\n" {
				t.Fatalf("%q %v", b, err)
			}
			resp.Body.Close()
		}
	})
}

// Contract: E10 E11
func TestHTTP2ASlowProviderIsNotTheCallersStall(t *testing.T) {
	inBubble(t, func(t *testing.T, p *pipes, _ *fakeRunner) {
		transport := &http.Transport{
			Protocols:   new(http.Protocols),
			DialContext: func(context.Context, string, string) (net.Conn, error) { return p.dial(), nil },
		}
		transport.Protocols.SetUnencryptedHTTP2(true)
		defer transport.CloseIdleConnections()
		req, err := http.NewRequestWithContext(t.Context(), "POST", "http://x/v1/chat/completions", strings.NewReader(streamChat))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+goodKey)
		resp, err := transport.RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		if b, err := io.ReadAll(resp.Body); err != nil || resp.ProtoMajor != 2 || string(b) != chunk+chunk+"data: [DONE]\n\n" {
			t.Fatalf("%q %v", b, err)
		}
	})
}

// Contract: Z3
func TestABodyThatDoesNotCome(t *testing.T) {
	inBubble(t, func(t *testing.T, p *pipes, _ *fakeRunner) {
		c := p.dial()
		defer c.Close()
		start := time.Now()
		if _, err := fmt.Fprintf(c, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nContent-Length: 60\r\n\r\n{", goodKey); err != nil {
			t.Fatal(err)
		}
		resp, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		if took := time.Since(start); resp.StatusCode != 408 || took < 2*time.Minute || took > 3*time.Minute {
			t.Errorf("%d after %v", resp.StatusCode, took)
		}
	})
}

// Contract: Z3
func TestAHeaderThatDoesNotCome(t *testing.T) {
	inBubble(t, func(t *testing.T, p *pipes, _ *fakeRunner) {
		for name, sent := range map[string]string{"slow": "GET / HTTP/1.1\r\nHost:", "idle": "GET / HTTP/1.1\r\nHost: x\r\n\r\n"} {
			c := p.dial()
			defer c.Close()
			start := time.Now()
			if _, err := io.WriteString(c, sent); err != nil {
				t.Fatal(err)
			}
			if _, err := io.Copy(io.Discard, c); err != nil {
				t.Fatal(err)
			}
			if took := time.Since(start); took < 10*time.Second || took > 3*time.Minute {
				t.Errorf("%s: closed after %v", name, took)
			}
		}
	})
}
