package httpapi

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/edge/dispatch"
	"github.com/iop-fabric/iop/edge/pool"
	"github.com/iop-fabric/iop/wire"
)

const done = "data: [DONE]\n\n"

// after waits, then answers.
func after(d time.Duration, then answerFunc) answerFunc {
	return func(ctx context.Context, a dispatch.Attempt, w dispatch.Writer) dispatch.Result {
		select {
		case <-time.After(d):
			return then(ctx, a, w)
		case <-ctx.Done():
			return dispatch.Result{Err: wire.AsError(context.Cause(ctx))}
		}
	}
}

// slowEvents answers with pieces of a stream, each so long after the one before.
func slowEvents(d time.Duration, header []string, pieces ...string) answerFunc {
	return func(_ context.Context, _ dispatch.Attempt, w dispatch.Writer) dispatch.Result {
		_ = w.Start(200, fields(header...))
		for _, p := range pieces {
			<-time.After(d)
			_ = w.Body([]byte(p))
			_ = w.Flush()
		}
		<-time.After(d)
		return dispatch.Result{Started: true}
	}
}

// queued grants a slot after a wait, or refuses then.
func queuedFor(d time.Duration, err error) func(context.Context, Want) (Grant, error) {
	return func(ctx context.Context, w Want) (Grant, error) {
		select {
		case <-time.After(d):
		case <-ctx.Done():
			return Grant{}, context.Cause(ctx)
		}
		return Grant{Slot: pool.Slot{ID: 1, Provider: "p1", Node: "n1"}, Others: 1}, err
	}
}

func callAs(t *testing.T, c net.Conn, path, doc string) (*http.Response, string) {
	t.Helper()
	if _, err := fmt.Fprintf(c, "POST %s HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nContent-Length: %d\r\n\r\n%s", path, goodKey, len(doc), doc); err != nil {
		t.Fatal(err)
	}
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatalf("%q: %v", b, err)
	}
	return resp, string(b)
}

// Contract: E8 E6 T4
func TestASlowStreamIsKeptAlive(t *testing.T) {
	const interval, chat, messages = 15 * time.Second, "/v1/chat/completions", "/v1/messages"
	good := says(200, fields("Content-Type", "text/event-stream", "X-Own", "a"), chunk, done)
	busy := says(429, fields("Content-Type", "application/json", "Retry-After", "7"), `{"error":{"message":"slow down \"please\"","type":"x"}}`)
	always := queuedFor(0, nil)
	const own = `,"type":"server_error","param":null,"code":"provider_error"}}` + "\n\n"
	for name, c := range map[string]struct {
		queued  bool
		path    string
		doc     string
		acquire func(context.Context, Want) (Grant, error)
		answer  answerFunc
		want    string
		theirs  bool // the provider's own headers
	}{
		"a quick one":       {true, chat, streamChat, always, good, chunk + done, true},
		"before the answer": {false, chat, streamChat, always, after(40*time.Second, good), comment + comment + chunk + done, false},
		"between events":    {false, chat, streamChat, always, slowEvents(20*time.Second, eventStream, chunk, chunk, done), comment + chunk + comment + chunk + comment + done, true},
		"not within an event": {
			false, chat, streamChat, always, slowEvents(50*time.Second, eventStream, "data: {\"a\"", ":1}\n", "\r\n", done),
			comment + comment + comment + "data: {\"a\":1}\n\r\n" + comment + comment + comment + done, true,
		},
		"in the queue, not asked for": {false, chat, streamChat, queuedFor(40*time.Second, nil), good, chunk + done, true},
		"in the queue":                {true, chat, streamChat, queuedFor(40*time.Second, nil), good, comment + comment + chunk + done, false},
		"no stream":                   {true, chat, plainChat, queuedFor(40*time.Second, nil), after(40*time.Second, says(200, fields("X-Own", "a"), `{}`)), `{}`, true},
		"no operation that streams":   {true, "/v1/embeddings", streamChat, queuedFor(40*time.Second, nil), after(40*time.Second, says(200, fields("X-Own", "a"), `{}`)), `{}`, true},
		"an encoded stream":           {true, chat, streamChat, always, slowEvents(40*time.Second, []string{"Content-Type", "text/event-stream", "Content-Encoding", "gzip"}, "xx\n\n"), "xx\n\n", true},

		"a mark at the beginning": {false, chat, streamChat, always, slowEvents(0, eventStream, "\ufeff"+chunk, done), "\ufeff" + chunk + done, true},
		"a mark after a comment":  {false, chat, streamChat, always, after(20*time.Second, says(200, fields("Content-Type", "text/event-stream"), "\ufeff"+chunk, "\ufeff"+chunk, done)), comment + chunk + "\ufeff" + chunk + done, false},
		"a mark after a late beginning": {
			false, chat, streamChat, always, slowEvents(20*time.Second, eventStream, "\ufeff"+chunk, done), comment + chunk + comment + done, true,
		},
		"a mark in pieces":             {false, chat, streamChat, always, after(20*time.Second, says(200, fields("Content-Type", "text/event-stream"), "\xef", "\xbb", "\xbf"+chunk, done)), comment + chunk + done, false},
		"what begins like a mark":      {false, chat, streamChat, always, after(20*time.Second, says(200, fields("Content-Type", "text/event-stream"), "\xef", "\xbb:\n\n", done)), comment + "\xef\xbb:\n\n" + done, false},
		"a mark in an answer's length": {false, chat, streamChat, always, after(20*time.Second, says(200, fields("Content-Type", "text/event-stream", "Content-Length", strconv.Itoa(len("\ufeff"+chunk+done))), "\ufeff"+chunk+done)), comment + chunk + done, false},
		"then an error":                {false, chat, streamChat, always, after(20*time.Second, busy), comment + `data: {"error":{"message":"the provider answered 429: slow down \"please\""` + own, false},
		"then one without words":       {false, chat, streamChat, always, after(20*time.Second, says(500, nil, "<html>")), comment + `data: {"error":{"message":"the provider answered 500"` + own, false},
		"then one that is long":        {false, chat, streamChat, always, after(20*time.Second, says(500, nil, strings.Repeat("x", maxHeld), "y")), comment + `data: {"error":{"message":"the provider answered 500"` + own, false},
		"then what is no stream":       {false, chat, streamChat, always, after(20*time.Second, says(200, fields("Content-Type", "application/json"), "{}")), comment + `data: {"error":{"message":"the provider did not answer with a stream of events"` + own, false},
		"then a broken header":         {false, chat, streamChat, always, after(20*time.Second, says(200, fields("X Y", "1"), "")), comment + `data: {"error":{"message":"the provider's answer was broken","type":"server_error","param":null,"code":"protocol_error"}}` + "\n\n", false},
		"then nobody":                  {false, chat, streamChat, always, after(20*time.Second, unreachable), comment + `data: {"error":{"message":"the provider could not be reached","type":"server_error","param":null,"code":"provider_unreachable"}}` + "\n\n", false},
		"then no place":                {true, chat, streamChat, queuedFor(20*time.Second, pool.ErrWaitExpired), good, comment + `data: {"error":{"message":"no provider became free in time","type":"server_error","param":null,"code":"queue_timeout"}}` + "\n\n", false},
		"then an end of nothing":       {false, chat, streamChat, always, after(20*time.Second, func(context.Context, dispatch.Attempt, dispatch.Writer) dispatch.Result { return dispatch.Result{} }), comment + `data: {"error":{"message":"the provider's answer was broken","type":"server_error","param":null,"code":"protocol_error"}}` + "\n\n", false},
		"then an error, Anthropic":     {false, messages, streamChat, always, after(20*time.Second, busy), comment + "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"api_error\",\"message\":\"the provider answered 429: slow down \\\"please\\\"\"},\"request_id\":\"ID\"}\n\n", false},
		"then an error, responses":     {false, "/v1/responses", streamChat, always, after(20*time.Second, busy), comment + "event: error\ndata: {\"type\":\"error\",\"code\":\"provider_error\",\"message\":\"the provider answered 429: slow down \\\"please\\\"\",\"param\":null,\"error\":{\"message\":\"the provider answered 429: slow down \\\"please\\\"\"" + own, false},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := Config{KeepAlive: configs.KeepAlive{Interval: interval, Queued: c.queued}, RetryOn: configs.Statuses{{First: 400, Last: 599}}}
			inBubbleWith(t, cfg, &fakePool{acquire: c.acquire}, func(t *testing.T, p *pipes, runner *fakeRunner) {
				runner.answer = c.answer
				conn := p.dial()
				defer conn.Close()
				resp, body := callAs(t, conn, c.path, c.doc)
				if want := strings.Replace(c.want, "ID", resp.Header.Get("X-Request-Id"), 1); resp.StatusCode != 200 || body != want {
					t.Errorf("%d\n%q, want\n%q", resp.StatusCode, body, want)
				}
				if len(runner.all()) > 1 {
					t.Errorf("%d attempts", len(runner.all()))
				}
				if !c.theirs {
					h := resp.Header
					if h.Get("Content-Type") != "text/event-stream" || h.Get("Cache-Control") != "no-cache" || h.Get("X-Accel-Buffering") != "no" || h.Get("X-Request-Id") == "" || h.Get("X-Own") != "" {
						t.Errorf("%v", h)
					}
				}
			})
		})
	}
}

// Comments leave no deadline behind that would end the stream between them.
// Contract: E8 E10 E11
func TestHTTP2ASlowStreamIsKeptAlive(t *testing.T) {
	cfg := Config{KeepAlive: configs.KeepAlive{Interval: 10 * time.Minute}} // beyond the write stall
	inBubbleWith(t, cfg, &fakePool{}, func(t *testing.T, p *pipes, _ *fakeRunner) {
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
		b, err := io.ReadAll(resp.Body) // three events, an hour apart
		if n := strings.Count(string(b), comment); err != nil || n < 10 || strings.ReplaceAll(string(b), comment, "") != chunk+chunk+done {
			t.Errorf("%d comments in %q %v", n, b, err)
		}
	})
}

// An answer that is kept back for another provider's has a status of its own.
// Contract: E8 Q5
func TestNothingIsKeptAliveWhileAnAnswerIsKeptBack(t *testing.T) {
	cfg := Config{KeepAlive: configs.KeepAlive{Interval: 15 * time.Second, Queued: true}, RetryOn: configs.Statuses{{First: 429, Last: 429}}}
	fp := &fakePool{acquire: func(ctx context.Context, w Want) (Grant, error) {
		if len(w.Avoid) > 0 {
			return queuedFor(40*time.Second, pool.ErrWaitExpired)(ctx, w)
		}
		return queuedFor(0, nil)(ctx, w)
	}}
	inBubbleWith(t, cfg, fp, func(t *testing.T, p *pipes, runner *fakeRunner) {
		runner.answer = func(_ context.Context, _ dispatch.Attempt, w dispatch.Writer) dispatch.Result {
			_ = w.Start(429, fields("Retry-After", "7"))
			<-time.After(40 * time.Second)
			_ = w.Body([]byte("busy"))
			return dispatch.Result{Started: true}
		}
		conn := p.dial()
		defer conn.Close()
		resp, body := callAs(t, conn, "/v1/chat/completions", streamChat)
		if resp.StatusCode != 429 || body != "busy" || resp.Header.Get("Retry-After") != "7" {
			t.Errorf("%d %q %v", resp.StatusCode, body, resp.Header)
		}
	})
}

// Contract: E8 H6
func TestNothingIsKeptAliveBeforeAnotherAttempt(t *testing.T) {
	cfg := Config{KeepAlive: configs.KeepAlive{Interval: 15 * time.Second, Queued: true}}
	fp := &fakePool{acquire: func(ctx context.Context, w Want) (Grant, error) {
		return queuedFor(time.Duration(len(w.Avoid))*20*time.Second, nil)(ctx, w)
	}}
	inBubbleWith(t, cfg, fp, func(t *testing.T, p *pipes, runner *fakeRunner) {
		good := says(200, fields("Content-Type", "text/event-stream", "X-Own", "a"), chunk, done)
		runner.answer = func(ctx context.Context, a dispatch.Attempt, w dispatch.Writer) dispatch.Result {
			if len(runner.all()) < 2 {
				return unreachable(ctx, a, w)
			}
			return good(ctx, a, w)
		}
		conn := p.dial()
		defer conn.Close()
		if resp, body := callAs(t, conn, "/v1/chat/completions", streamChat); resp.Header.Get("X-Own") != "a" || body != chunk+done {
			t.Errorf("%d %q %v", resp.StatusCode, body, resp.Header)
		}
	})
}

// Contract: E8 E10 E5
func TestACallerWhoTakesNoCommentIsGone(t *testing.T) {
	for name, queued := range map[string]bool{"in the queue": true, "at a provider": false} {
		t.Run(name, func(t *testing.T) {
			fp := &fakePool{}
			cfg := Config{KeepAlive: configs.KeepAlive{Interval: 15 * time.Second, Queued: queued}}
			inBubbleWith(t, cfg, fp, func(t *testing.T, p *pipes, runner *fakeRunner) {
				left := make(chan time.Time, 1)
				wait := func(ctx context.Context) error {
					<-ctx.Done()
					left <- time.Now()
					return context.Cause(ctx)
				}
				if queued {
					fp.acquire = func(ctx context.Context, _ Want) (Grant, error) { return Grant{}, wait(ctx) }
				}
				runner.answer = func(ctx context.Context, _ dispatch.Attempt, _ dispatch.Writer) dispatch.Result {
					return dispatch.Result{Err: wire.AsError(wait(ctx))}
				}
				conn := p.dial()
				defer conn.Close()
				start := time.Now()
				writeRequest(t, conn, streamChat)
				if took := (<-left).Sub(start); took < 2*time.Minute || took > 3*time.Minute {
					t.Errorf("given up after %v", took)
				}
				if _, err := io.Copy(io.Discard, conn); err != nil {
					t.Error(err)
				}
			})
		})
	}
}
