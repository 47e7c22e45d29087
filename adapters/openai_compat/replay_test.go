package openai_compat

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/iop-fabric/iop/agent"
	fake "github.com/iop-fabric/iop/internal/fakeprovider"
)

// A provider that accepts, reads and closes has executed once, whatever the
// caller's headers invite net/http to do, on a fresh connection and on a used
// one, with a body and without.
func TestNothingIsSentTwice(t *testing.T) {
	for name, break_ := range map[string]fake.Step{"FIN": fake.Close(), "RST": fake.Reset()} {
		for _, used := range []bool{false, true} {
			for _, size := range []int{0, 10, 1 << 20} {
				p := fake.New(t)
				a := newAdapter(t, Options{BaseURL: p.URL})
				before := 0
				if used {
					if err := a.Exchange(t.Context(), post(`{}`), new(answer)); err != nil {
						t.Fatal(err)
					}
					before = 1
				}
				p.Next(break_)
				ex := post(strings.Repeat("x", size))
				ex.Header = []agent.Field{{Name: "Idempotency-Key", Value: []byte("k")}, {Name: "x-idempotency-key", Value: []byte("k")}}
				err := a.Exchange(t.Context(), ex, new(answer))
				wantFailure(t, err, agent.CodeProvider, "")
				if n := p.Executions() - before; n != 1 {
					t.Errorf("%s, used %v, %d bytes: %d executions", name, used, size, n)
				}
				if r := p.Requests()[before]; r.Header.Get("Idempotency-Key") != "k" || r.Header.Get("X-Idempotency-Key") != "k" {
					t.Errorf("the keys did not pass: %v", r.Header)
				}
			}
		}
	}
}

// The provider closes what is idle, at the worst moment: each request finds its
// connection closed. All are served, each executed once.
func TestA69ClosedWhileIdle(t *testing.T) {
	for _, size := range []int{0, 10, 1 << 20} {
		p := fake.New(t)
		a := newAdapter(t, Options{BaseURL: p.URL})
		const rounds = 50
		for i := range rounds {
			if err := a.Exchange(t.Context(), post(strings.Repeat("x", size)), new(answer)); err != nil {
				t.Fatalf("%d bytes, request %d: %v", size, i, err)
			}
			p.CloseIdle()
		}
		if n := p.Executions(); n != rounds {
			t.Fatalf("%d executions of %d requests", n, rounds)
		}
	}
}

// Two requests 6 s apart, to a server that closes idle connections after 5 s:
// the adapter has closed first, so no request can meet that close.
func TestA69SixSecondsApart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ln := newPipes()
		var conns, served int
		var opened, closed time.Time
		srv := &http.Server{
			IdleTimeout: 5 * time.Second,
			Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				served++
				_, _ = io.Copy(w, r.Body) // the test reads what came
			}),
			ConnState: func(_ net.Conn, s http.ConnState) {
				switch s {
				case http.StateNew:
					conns++
					opened = time.Now()
				case http.StateClosed:
					closed = time.Now()
				}
			},
		}
		done := make(chan error, 1)
		go func() { done <- srv.Serve(ln) }()
		a, err := New(Options{BaseURL: "http://provider.test", Dial: ln.dial})
		if err != nil {
			t.Fatal(err)
		}
		for range 3 {
			var got answer
			if err := a.Exchange(t.Context(), post(`{"n":1}`), &got); err != nil || got.body() != `{"n":1}` {
				t.Fatalf("%q, %v", got.body(), err)
			}
			<-time.After(6 * time.Second)
			synctest.Wait()
			if idle := closed.Sub(opened); idle != idleTimeout || idle >= srv.IdleTimeout {
				t.Errorf("the connection was closed after %v", idle)
			}
		}
		if conns != 3 || served != 3 {
			t.Errorf("%d connections, %d served", conns, served)
		}
		if err := a.Stop(t.Context()); err != nil {
			t.Error(err)
		}
		if err := srv.Close(); err != nil {
			t.Error(err)
		}
		<-done
	})
}

// pipes is a listener in memory.
type pipes struct {
	ch   chan net.Conn
	done chan struct{}
}

func newPipes() *pipes { return &pipes{make(chan net.Conn), make(chan struct{})} }

func (p *pipes) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	client, server := net.Pipe()
	select {
	case p.ch <- server:
		return client, nil
	case <-p.done:
	case <-ctx.Done():
	}
	return nil, errors.Join(client.Close(), server.Close(), net.ErrClosed)
}

func (p *pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.ch:
		return c, nil
	case <-p.done:
		return nil, net.ErrClosed
	}
}

func (p *pipes) Close() error   { close(p.done); return nil }
func (p *pipes) Addr() net.Addr { return &net.TCPAddr{} }

// A stream may be silent for hours before its first byte: no timeout of the
// adapter's ends it, the caller's alone do.
func TestSilenceIsNotTimedOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ln := newPipes()
		p := fake.Serve(ln)
		const hours = 3 * time.Hour
		p.Next(func(x *fake.Exchange) error {
			timer := time.NewTimer(hours)
			defer timer.Stop()
			<-timer.C
			return fake.Raw("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")(x)
		})
		a, err := New(Options{BaseURL: "http://provider.test", Dial: ln.dial})
		if err != nil {
			t.Fatal(err)
		}
		var got answer
		if err := a.Exchange(t.Context(), post(`{}`), &got); err != nil || got.body() != "ok" {
			t.Errorf("%q, %v", got.body(), err)
		}

		p.Next(fake.Hang())
		ctx, cancel := context.WithTimeout(t.Context(), hours)
		defer cancel()
		if err := a.Exchange(ctx, post(`{}`), new(answer)); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v, want the deadline", err)
		}
		if err := a.Stop(t.Context()); err != nil {
			t.Error(err)
		}
		p.Close()
	})
}

func TestUnreachable(t *testing.T) {
	p := fake.New(t)
	closed := p.URL
	p.Close()
	plain := fake.New(t)
	for _, tc := range []struct {
		name   string
		o      Options
		reason Reason
	}{
		{"refused", Options{BaseURL: closed}, ReasonRefused},
		{"tls to plain", Options{BaseURL: strings.Replace(plain.URL, "http:", "https:", 1)}, ReasonTLS},
		{"name", Options{BaseURL: "http://provider.test", Dial: func(context.Context, string, string) (net.Conn, error) {
			return nil, &net.OpError{Op: "dial", Err: &net.DNSError{Err: "no such host", Name: "provider.test", IsNotFound: true}}
		}}, ReasonName},
		{"timeout", Options{BaseURL: "http://provider.test", Dial: func(ctx context.Context, network, addr string) (net.Conn, error) {
			d := net.Dialer{Deadline: time.Unix(1, 0)}
			return d.DialContext(ctx, network, "127.0.0.1:1")
		}}, ReasonTimeout},
	} {
		t.Run(tc.name, func(t *testing.T) {
			a := newAdapter(t, tc.o)
			f := wantFailure(t, a.Exchange(t.Context(), post(`{}`), new(answer)), agent.CodeUnreachable, tc.reason)
			if !f.Retryable || strings.Contains(f.Error(), "127.0.0.1") || strings.Contains(f.Error(), "provider.test") {
				t.Fatalf("%+v", f)
			}
		})
	}
	if plain.Executions() != 0 {
		t.Fatal("TLS bytes were taken for a request")
	}
}

func TestBaseURL(t *testing.T) {
	for _, s := range []string{
		"", "localhost:11434", "ftp://h", "http://", "http:///v1", "http://u:CANARY@h", "http://h?x=1", "http://h?",
		"http://h#f", "http://h/a/../b", "http://h/%2e%2e", "http://h:port", "http://h/a b\\c",
	} {
		if _, err := New(Options{BaseURL: s}); err == nil {
			t.Errorf("%q was taken", s)
		} else if strings.Contains(err.Error(), "CANARY") {
			t.Errorf("%v", err)
		}
	}
	for s, loopback := range map[string]bool{
		"http://localhost:1/v1": true, "http://127.1.2.3": true, "http://[::1]:8080/": true,
		"https://api.example.com/v1": false, "http://10.0.0.5:8000": false,
	} {
		a, err := New(Options{BaseURL: s})
		if err != nil {
			t.Errorf("%q: %v", s, err)
			continue
		}
		if (a.transport.Proxy == nil) != loopback {
			t.Errorf("%q: a proxy of the environment is used: %v", s, a.transport.Proxy != nil)
		}
	}
}

func TestProfileIsChecked(t *testing.T) {
	for name, p := range map[string]Profile{
		"method":      {Operations: map[string]Operation{"x": {Method: "TRACE", Path: "/x"}}},
		"path":        {Operations: map[string]Operation{"x": {Method: "GET", Path: "//host/x"}}},
		"models path": {ModelsPath: "/../x"},
		"auth header": {AuthHeader: "A B"},
		"prefix":      {AuthHeader: "A", AuthPrefix: "a\nb"},
		"fixed":       {Fixed: []agent.Field{{Name: "A", Value: []byte("a\r\nb: c")}}},
	} {
		if _, err := New(Options{BaseURL: "http://localhost", Profile: p}); err == nil {
			t.Errorf("%s was taken", name)
		}
	}
}
