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
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/iop-fabric/iop/configs"
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
	inBubbleWith(t, Config{}, &fakePool{}, test)
}

func inBubbleWith(t *testing.T, cfg Config, fp *fakePool, test func(t *testing.T, p *pipes, runner *fakeRunner)) {
	synctest.Test(t, func(t *testing.T) {
		runner := &fakeRunner{answer: slowly}
		cfg.Keys = []Key{{Name: "alice", Digest: DigestOf(goodKey)}}
		api := New(cfg, Deps{Pool: fp, Runner: runner})
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

// h2Client speaks HTTP/2 over p.
func h2Client(p *pipes) *http.Transport {
	transport := &http.Transport{
		Protocols:   new(http.Protocols),
		DialContext: func(context.Context, string, string) (net.Conn, error) { return p.dial(), nil },
	}
	transport.Protocols.SetUnencryptedHTTP2(true)
	return transport
}

// Contract: E10 E11
func TestHTTP2ASlowProviderIsNotTheCallersStall(t *testing.T) {
	inBubble(t, func(t *testing.T, p *pipes, _ *fakeRunner) {
		transport := h2Client(p)
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

// unread is a connection whose reader stops once told to.
type unread struct {
	net.Conn
	stop chan struct{}
	once sync.Once
	shut chan struct{}
}

func (u *unread) Read(p []byte) (int, error) {
	select {
	case <-u.stop:
		<-u.shut
		return 0, net.ErrClosed
	default:
		return u.Conn.Read(p)
	}
}

func (u *unread) Close() error {
	u.once.Do(func() { close(u.shut) })
	return u.Conn.Close()
}

// A caller that reads nothing of its connection any more, not even what tells it that
// its streams are over, holds no place.
//
// Contract: E10 T6
func TestHTTP2ACallerWhoReadsNothingOfItsConnectionIsGone(t *testing.T) {
	inBubble(t, func(t *testing.T, p *pipes, runner *fakeRunner) {
		conn := &unread{stop: make(chan struct{}), shut: make(chan struct{})}
		transport := h2Client(p)
		transport.DialContext = func(context.Context, string, string) (net.Conn, error) {
			conn.Conn = p.dial()
			return conn, nil
		}
		defer transport.CloseIdleConnections()
		ended := make(chan error, 2)
		runner.answer = func(_ context.Context, _ dispatch.Attempt, w dispatch.Writer) dispatch.Result {
			err := w.Start(200, fields(eventStream...))
			<-conn.stop
			for p := make([]byte, 1<<16); err == nil; err = w.Body(p) {
			}
			ended <- err
			return dispatch.Result{Started: true, Err: wire.Errorf(wire.Cancelled, "caller gone")}
		}
		for range 2 {
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
		}
		start := time.Now()
		close(conn.stop)
		for range 2 {
			if err := <-ended; err == nil {
				t.Error("no error")
			}
		}
		if took := time.Since(start); took < 2*time.Minute || took > 6*time.Minute {
			t.Errorf("given up after %v", took)
		}
		conn.Close()
	})
}

// trickle sends pieces of a body until the answer comes. It returns the answer's
// status, and when it came.
func trickle(t *testing.T, p *pipes, head string, piece string, every time.Duration) (status int, took time.Duration) {
	t.Helper()
	c := p.dial()
	start := time.Now()
	sending := make(chan struct{})
	go func() {
		defer close(sending)
		_, err := fmt.Fprintf(c, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n%s\r\n\r\n", goodKey, head)
		for ; err == nil && piece != "" && time.Since(start) < time.Hour; _, err = io.WriteString(c, piece) {
			<-time.After(every)
		}
	}()
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		t.Fatal(err)
	}
	took = time.Since(start)
	if _, err := io.Copy(io.Discard, c); err != nil {
		t.Errorf("the connection is not closed: %v", err)
	}
	<-sending
	c.Close()
	return resp.StatusCode, took
}

const (
	oneByte  = "1\r\n \r\n"
	chunked  = "Transfer-Encoding: chunked"
	announce = "Content-Length: "
)

// The bound on a whole body is not reached by sending a little of it at a time,
// and what is announced or came counts at 64 KiB/s.
// Contract: Z3
func TestABodyThatDoesNotCome(t *testing.T) {
	largest := 64 << 20
	kilobyte := strings.Repeat(" ", 1<<10)
	for name, c := range map[string]struct {
		head, piece    string
		every          time.Duration
		earliest, last time.Duration
	}{
		"nothing of a small one":         {announce + "60", "", 0, 30 * time.Second, 30 * time.Second},
		"a small one, byte by byte":      {announce + "60", " ", time.Second, 30 * time.Second, 30 * time.Second},
		"nothing of a large one":         {announce + strconv.Itoa(largest), "", 0, 2 * time.Minute, 150 * time.Second},
		"a large one, byte by byte":      {announce + strconv.Itoa(largest), " ", time.Minute, 30*time.Second + 1024*time.Second, 30*time.Second + 1024*time.Second},
		"of unknown size, nothing":       {chunked, "", 0, 30 * time.Second, 40 * time.Second},
		"of unknown size, byte by byte":  {chunked, oneByte, time.Second, 30 * time.Second, 40 * time.Second},
		"of unknown size, at 32 KiB/s":   {chunked, "8000\r\n" + strings.Repeat(" ", 32<<10) + "\r\n", time.Second, 59 * time.Second, 70 * time.Second},
		"encoded, byte by byte":          {"Content-Encoding: gzip\r\n" + announce + "6000", "\x1f", time.Second, 0, 30 * time.Second},
		"no body yet, but a skipped one": {"Content-Encoding: zstd\r\n" + announce + "6000", "\x50\x2a\x4d\x18\x00\x00\x00\x00", time.Second, 30 * time.Second, 30 * time.Second},
		"of a size never reached":        {announce + "131072", kilobyte, time.Second, 32 * time.Second, 32 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, p *pipes, runner *fakeRunner) {
				status, took := trickle(t, p, c.head, c.piece, c.every)
				want := http.StatusRequestTimeout
				if c.earliest == 0 {
					want = http.StatusBadRequest // what is no gzip is refused before
				}
				if status != want || took < c.earliest || took > c.last {
					t.Errorf("%d after %v", status, took)
				}
				if n := len(runner.all()); n != 0 {
					t.Errorf("%d attempts", n)
				}
			})
		})
	}
}

// Contract: Z3
func TestASlowBodyThatComesIsTaken(t *testing.T) {
	for name, c := range map[string]struct{ head, open, end string }{
		"announced":       {announce, "", ""},
		"of unknown size": {chunked, "10000\r\n", "\r\n"},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, p *pipes, runner *fakeRunner) {
				runner.answer = says(200, fields("Content-Type", "application/json"), `{"ok":true}`)
				conn := p.dial()
				defer conn.Close()
				head, pieces := c.head, 400
				if c.head == announce {
					head += strconv.Itoa(pieces<<16 + len(plainChat))
				}
				sending := make(chan error, 1)
				go func() {
					_, err := fmt.Fprintf(conn, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n%s\r\n\r\n", goodKey, head)
					for range pieces { // 64 KiB/s, which is just what it must be
						<-time.After(time.Second)
						_, _ = io.WriteString(conn, c.open+strings.Repeat(" ", 1<<16)+c.end)
					}
					end := plainChat
					if c.head == chunked {
						end = fmt.Sprintf("%x\r\n%s\r\n0\r\n\r\n", len(plainChat), plainChat)
					}
					_, _ = io.WriteString(conn, end)
					sending <- err
				}()
				resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
				if err != nil {
					t.Fatal(err)
				}
				defer resp.Body.Close()
				if resp.StatusCode != 200 {
					t.Errorf("%d", resp.StatusCode)
				}
				if err := <-sending; err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// Contract: Z3
func TestHTTP2ABodyThatTricklesIn(t *testing.T) {
	inBubble(t, func(t *testing.T, p *pipes, _ *fakeRunner) {
		client := h2Client(p)
		defer client.CloseIdleConnections()
		body, sender := io.Pipe()
		sending := make(chan struct{})
		go func() {
			defer close(sending)
			var err error
			for start := time.Now(); err == nil && time.Since(start) < time.Hour; _, err = io.WriteString(sender, " ") {
				<-time.After(time.Second)
			}
		}()
		req, err := http.NewRequestWithContext(t.Context(), "POST", "http://x/v1/chat/completions", body)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+goodKey)
		start := time.Now()
		resp, err := client.RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		if took := time.Since(start); resp.StatusCode != 408 || took < 30*time.Second || took > 40*time.Second {
			t.Errorf("%d after %v", resp.StatusCode, took)
		}
		body.Close()
		<-sending
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

// A byte now and then buys no time: neither in a head nor in a handshake.
// Contract: Z3 E11
func TestSlowloris(t *testing.T) {
	for name, c := range map[string]struct {
		overTLS bool
		bytes   string
	}{
		"a head":              {false, "GET / HTTP/1.1\r\nHost: x\r\nX-A: "},
		"half a request line": {false, "GET /a"},
		"no handshake":        {true, ""},
		"a slow handshake":    {true, "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			synctest.Test(t, func(t *testing.T) {
				cfg := Config{}
				if c.overTLS {
					writePair(t, pairIn(dir), 1)
					var err error
					if cfg, err = ConfigOf(&configs.Edge{TLS: pairIn(dir)}, nil); err != nil {
						t.Fatal(err)
					}
				}
				api := New(cfg, Deps{Pool: &fakePool{}, Runner: &fakeRunner{}})
				server := api.Server(api.Handler())
				p := &pipes{conns: make(chan net.Conn), closed: make(chan struct{})}
				served := make(chan error, 1)
				go func() {
					if c.overTLS {
						served <- server.ServeTLS(p, "", "")
						return
					}
					served <- server.Serve(p)
				}()
				conn := p.dial()
				defer conn.Close()
				start := time.Now()
				sent := make(chan struct{})
				go func() { // a byte a second, and the last one again and again
					defer close(sent)
					for i := 0; c.bytes != "" && time.Since(start) < time.Hour; i++ {
						if _, err := conn.Write([]byte{c.bytes[min(i, len(c.bytes)-1)]}); err != nil {
							return
						}
						<-time.After(time.Second)
					}
				}()
				if _, err := io.Copy(io.Discard, conn); err != nil {
					t.Error(err)
				}
				if took := time.Since(start); took < 9*time.Second || took > 11*time.Second {
					t.Errorf("closed after %v", took)
				}
				<-sent
				server.Close()
				if err := <-served; !errors.Is(err, http.ErrServerClosed) {
					t.Error(err)
				}
			})
		})
	}
}
