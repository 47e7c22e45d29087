package httpapi

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/edge/dispatch"
	"github.com/iop-fabric/iop/edge/pool"
	"github.com/iop-fabric/iop/wire/iopv1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// hang is how long a test waits for what must come; it only guards against
// hanging for ever.
const hang = 20 * time.Second

const (
	goodKey    = "sk-iop-good-0123456789"
	narrowKey  = "sk-iop-narrow-0123456789"
	plainChat  = `{"model":"tiny","messages":[{"role":"user","content":"hi"}]}`
	streamChat = `{"model":"tiny","stream":true,"messages":[{"role":"user","content":"hi"}]}`
)

// fakePool grants the slots of acquire, or provider p1 at node n1.
type fakePool struct {
	acquire func(ctx context.Context, w Want) (Grant, error)
	models  []Model

	mu    sync.Mutex
	wants []Want
}

func (p *fakePool) Acquire(ctx context.Context, want *Want, grant *Grant) (err error) {
	w := *want
	p.mu.Lock()
	w.Avoid = append([]string(nil), w.Avoid...)
	p.wants = append(p.wants, w)
	p.mu.Unlock()
	if p.acquire != nil {
		*grant, err = p.acquire(ctx, w)
		return err
	}
	*grant = Grant{Slot: pool.Slot{ID: 1, Provider: "p1", Node: "n1", Target: "tiny:latest"}, StallTimeout: time.Minute}
	return nil
}

func (p *fakePool) Models() []Model { return p.models }

// seen is an attempt as the runner met it, its body read.
type seen struct {
	dispatch.Attempt
	body string
}

func (s seen) header(name string) (values []string) {
	for _, h := range s.Header {
		if strings.EqualFold(h.GetName(), name) {
			values = append(values, string(h.GetValue()))
		}
	}
	return values
}

// fakeRunner answers attempts with answer.
type fakeRunner struct {
	answer func(ctx context.Context, a dispatch.Attempt, w dispatch.Writer) dispatch.Result

	mu       sync.Mutex
	attempts []seen
}

func (f *fakeRunner) Do(ctx context.Context, a dispatch.Attempt, w dispatch.Writer) dispatch.Result {
	b, err := io.ReadAll(a.Body)
	if err != nil {
		panic(err)
	}
	f.mu.Lock()
	f.attempts = append(f.attempts, seen{a, string(b)})
	f.mu.Unlock()
	return f.answer(ctx, a, w)
}

func (f *fakeRunner) all() []seen {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]seen(nil), f.attempts...)
}

func fields(pairs ...string) (h []*iopv1.Header) {
	for i := 0; i+1 < len(pairs); i += 2 {
		h = append(h, &iopv1.Header{Name: pairs[i], Value: []byte(pairs[i+1])})
	}
	return h
}

// says answers with a status, headers and pieces of a body, then END.
func says(status int, header []*iopv1.Header, pieces ...string) func(context.Context, dispatch.Attempt, dispatch.Writer) dispatch.Result {
	return func(_ context.Context, _ dispatch.Attempt, w dispatch.Writer) dispatch.Result {
		res := dispatch.Result{Started: true, Status: status}
		if w.Start(status, header) != nil {
			return res
		}
		for _, p := range pieces {
			if w.Body([]byte(p)) != nil || w.Flush() != nil {
				return res
			}
		}
		return res
	}
}

// fixture is an API behind a real server on loopback.
type fixture struct {
	*testing.T
	pool   *fakePool
	runner *fakeRunner
	reg    *prometheus.Registry
	logs   *syncBuffer
	server *httptest.Server
	client *http.Client
}

func newFixture(t *testing.T, change ...func(*Config)) *fixture {
	t.Helper()
	f := &fixture{T: t, pool: &fakePool{}, runner: &fakeRunner{}, reg: prometheus.NewRegistry(), logs: &syncBuffer{}}
	f.runner.answer = says(200, fields("Content-Type", "application/json"), `{"ok":true}`)
	cfg := Config{SpoolDir: t.TempDir(), Keys: []Key{
		{Name: "alice", Digest: DigestOf(goodKey)},
		{Name: "bob", Digest: DigestOf(narrowKey), Models: []string{"small", "ns/name:13b"}},
	}}
	for _, c := range change {
		c(&cfg)
	}
	api := New(cfg, Deps{Pool: f.pool, Runner: f.runner, Log: slog.New(slog.NewJSONHandler(f.logs, nil)), Metrics: f.reg})
	f.server = httptest.NewUnstartedServer(api.Handler())
	f.server.Config = api.Server(api.Handler())
	f.server.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelWarn)
	f.server.Start()
	f.client = f.server.Client()
	t.Cleanup(func() {
		f.server.CloseClientConnections()
		f.server.Close()
	})
	return f
}

func limits(l configs.Limits) func(*Config) { return func(c *Config) { c.Limits = l } }

// do sends a request with the good key; header pairs replace.
func (f *fixture) do(method, path, body string, header ...string) (*http.Response, string) {
	f.Helper()
	resp, b, err := f.try(method, path, body, header...)
	if err != nil {
		f.Fatalf("%s %s: %v", method, path, err)
	}
	return resp, b
}

func (f *fixture) try(method, path, body string, header ...string) (*http.Response, string, error) {
	f.Helper()
	req, err := http.NewRequestWithContext(f.Context(), method, f.server.URL+path, strings.NewReader(body))
	if err != nil {
		f.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+goodKey)
	for i := 0; i+1 < len(header); i += 2 {
		if req.Header.Del(header[i]); header[i+1] != "" {
			req.Header.Set(header[i], header[i+1])
		}
	}
	resp, err := f.client.Do(req)
	if err != nil {
		return nil, "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return resp, string(b), err
}

func (f *fixture) chat(body string) (*http.Response, string) {
	f.Helper()
	return f.do("POST", "/v1/chat/completions", body)
}

// wantError checks status, code and that the answer is OpenAI's error object.
func (f *fixture) wantError(resp *http.Response, body string, status int, code string) errorDetail {
	f.Helper()
	var e errorBody
	if err := json.Unmarshal([]byte(body), &e); err != nil {
		f.Fatalf("not an error object: %q", body)
	}
	if resp.StatusCode != status || e.Error.Code != code || e.Error.Message == "" || e.Error.Type == "" {
		f.Fatalf("got %d %+v, want %d %s", resp.StatusCode, e.Error, status, code)
	}
	if resp.Header.Get("X-Request-Id") == "" {
		f.Fatal("no x-request-id")
	}
	if ct := resp.Header.Get("Content-Type"); ct != "application/json" {
		f.Fatalf("content-type %q", ct)
	}
	return e.Error
}

// logged waits for n request lines and returns the last; a line is written just
// after its answer.
func (f *fixture) logged(n int) map[string]any {
	f.Helper()
	f.logs.wait(f.T, n)
	lines := strings.Split(strings.TrimSpace(f.logs.String()), "\n")
	var m map[string]any
	if err := json.Unmarshal([]byte(lines[n-1]), &m); err != nil {
		f.Fatal(err)
	}
	return m
}

// raw opens a connection of its own.
func (f *fixture) raw() (net.Conn, *bufio.Reader) {
	f.Helper()
	c, err := net.Dial("tcp", f.server.Listener.Addr().String())
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { c.Close() })
	if err := c.SetDeadline(time.Now().Add(hang)); err != nil {
		f.Fatal(err)
	}
	return c, bufio.NewReader(c)
}

// syncBuffer is a log that can be waited for.
type syncBuffer struct {
	mu    sync.Mutex
	b     bytes.Buffer
	lines int
	more  chan struct{}
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lines += bytes.Count(p, []byte("\n"))
	if s.more != nil {
		close(s.more)
		s.more = nil
	}
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

func (s *syncBuffer) wait(t *testing.T, n int) {
	t.Helper()
	guard := time.After(hang)
	for {
		s.mu.Lock()
		if s.lines >= n {
			s.mu.Unlock()
			return
		}
		if s.more == nil {
			s.more = make(chan struct{})
		}
		more := s.more
		s.mu.Unlock()
		select {
		case <-more:
		case <-guard:
			t.Fatalf("waited for %d log lines", n)
		}
	}
}

// await waits for c.
func await[T any](t *testing.T, c <-chan T, what string) (v T) {
	t.Helper()
	select {
	case v = <-c:
	case <-time.After(hang):
		t.Fatal("waited for ", what)
	}
	return v
}
