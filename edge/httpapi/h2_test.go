package httpapi

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/edge/dispatch"
	"github.com/iop-fabric/iop/wire"
)

// newH2 is a fixture that speaks HTTP/2 over TLS.
func newH2(t *testing.T, l configs.Limits) *fixture {
	t.Helper()
	f := &fixture{T: t, pool: &fakePool{}, runner: &fakeRunner{}, logs: &syncBuffer{}}
	api := New(Config{Limits: l, Keys: []Key{{Name: "alice", Digest: DigestOf(goodKey)}}}, Deps{Pool: f.pool, Runner: f.runner})
	f.server = httptest.NewUnstartedServer(nil)
	f.server.Config = api.Server(api.Handler())
	f.server.EnableHTTP2 = true
	f.server.StartTLS()
	f.client = f.server.Client()
	t.Cleanup(func() {
		f.client.CloseIdleConnections()
		f.server.CloseClientConnections()
		f.server.Close()
	})
	return f
}

// Contract: E5 E10 E11
func TestHTTP2CallersLeaveOrStall(t *testing.T) {
	f := newH2(t, configs.Limits{WriteStall: 100 * time.Millisecond})
	ended := make(chan error, 1)
	f.runner.answer = func(ctx context.Context, _ dispatch.Attempt, w dispatch.Writer) dispatch.Result {
		_ = w.Start(200, fields(eventStream...))
		<-ctx.Done()
		ended <- context.Cause(ctx)
		return dispatch.Result{Started: true, Err: wire.Errorf(wire.Cancelled, "caller gone")}
	}
	open := func() (*http.Response, context.CancelFunc) {
		ctx, cancel := context.WithCancel(t.Context())
		req, err := http.NewRequestWithContext(ctx, "POST", f.server.URL+"/v1/chat/completions", strings.NewReader(streamChat))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+goodKey)
		resp, err := f.client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		return resp, cancel
	}
	resp, cancel := open()
	cancel()
	if err := await(t, ended, "the cancel"); !errors.Is(err, context.Canceled) {
		t.Errorf("cause %v", err)
	}
	resp.Body.Close()

	f.runner.answer = func(_ context.Context, _ dispatch.Attempt, w dispatch.Writer) dispatch.Result {
		err := w.Start(200, fields(eventStream...))
		for p := make([]byte, 1<<20); err == nil; err = w.Body(p) {
		}
		ended <- err
		return dispatch.Result{Started: true, Err: wire.Errorf(wire.Cancelled, "caller gone")}
	}
	resp, cancel = open() // and read nothing
	defer cancel()
	if await(t, ended, "the stalled write") == nil {
		t.Error("no error")
	}
	resp.Body.Close()
}

// Contract: E6
func TestHTTP2ACutIsNotAnEnd(t *testing.T) {
	f := newH2(t, configs.Limits{})
	f.runner.answer = failing(wire.SessionEnded, []string{"Content-Type", "application/json"}, "half of ")
	if _, body, err := f.try("POST", "/v1/chat/completions", plainChat); err == nil || body != "half of " {
		t.Errorf("%q %v", body, err)
	}
	f.runner.answer = failing(wire.SessionEnded, eventStream, chunk)
	if _, body := f.chat(streamChat); !strings.Contains(body, `"code":"node_lost"`) {
		t.Errorf("%q", body)
	}
	f.runner.answer = func(_ context.Context, _ dispatch.Attempt, w dispatch.Writer) dispatch.Result {
		_ = w.Start(200, nil)
		_ = w.Body([]byte("x"))
		_ = w.Trailer(fields("X-Sum", "1"))
		return dispatch.Result{Started: true}
	}
	resp, body := f.chat(plainChat)
	if body != "x" || resp.Trailer.Get("X-Sum") != "1" {
		t.Errorf("%q %v", body, resp.Trailer)
	}
	// A refused body must not hold up the answer here either.
	pr, pw := io.Pipe()
	defer pw.Close()
	req, err := http.NewRequestWithContext(t.Context(), "POST", f.server.URL+"/v1/chat/completions", pr)
	if err != nil {
		t.Fatal(err)
	}
	resp, err = f.client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != 401 {
		t.Errorf("%d", resp.StatusCode)
	}
}
