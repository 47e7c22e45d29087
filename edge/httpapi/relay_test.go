package httpapi

import (
	"context"
	"encoding/hex"
	"errors"
	"io"
	"net/http"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/edge/dispatch"
	"github.com/iop-fabric/iop/edge/pool"
	"github.com/iop-fabric/iop/wire"
)

// Contract: E1 E2 T5
func TestChatGoesToTheProviderWithOnlyTheModelChanged(t *testing.T) {
	f := newFixture(t)
	f.runner.answer = says(200, fields("Content-Type", "application/json", "X-A", "1", "x-a", "2", "Set-Cookie", "s=1"), `{"é":"`, "\xc3", "\xa9", `"}`)
	const doc = "{ \"temperature\":0.10,\r\n \"model\" : \"tiny\", \"seed\":12345678901234567890, \"zzz\":[null]}"
	resp, body := f.do("POST", "/v1/chat/completions?a=b%20c&d", doc, "User-Agent", "sdk/1", "Accept-Encoding", "gzip")
	if resp.StatusCode != 200 || body != `{"é":"é"}` {
		t.Fatalf("%d %q", resp.StatusCode, body)
	}
	if got := resp.Header["X-A"]; !slices.Equal(got, []string{"1", "2"}) {
		t.Errorf("repeated header %q", got)
	}
	a := f.runner.all()[0]
	if want := strings.Replace(doc, `"tiny"`, `"tiny:latest"`, 1); a.body != want || a.BodySize != int64(len(want)) {
		t.Errorf("body %q, size %d", a.body, a.BodySize)
	}
	if a.Operation != "chat_completions" || a.Method != "POST" || a.Path != "/v1/chat/completions" || a.RawQuery != "a=b%20c&d" ||
		a.Stream || a.StallTimeout != time.Minute || !wire.ValidRunID(a.RunID) || a.Slot.Provider != "p1" {
		t.Errorf("attempt %+v", a.Attempt)
	}
	if got := a.header("User-Agent"); !slices.Equal(got, []string{"sdk/1"}) {
		t.Errorf("user agent %q", got)
	}
	if got := a.header("Accept-Encoding"); !slices.Equal(got, []string{"gzip"}) {
		t.Errorf("accept-encoding %q", got)
	}
	if w := f.pool.wants[0]; w.Model != "tiny" || w.Principal != "alice" || w.Operation != "chat_completions" {
		t.Errorf("want %+v", w)
	}
}

// Contract: E2
func TestA42CallersCredentialsStayAtTheEdge(t *testing.T) {
	f := newFixture(t)
	f.do("POST", "/v1/chat/completions", plainChat, "X-Api-Key", goodKey, "Cookie", "sid="+goodKey, "Api-Key", goodKey,
		"Proxy-Authorization", "Basic "+goodKey, "Connection", "keep-alive, X-Secret", "X-Secret", goodKey, "Te", "trailers",
		"X-Request-Id", "mine", "X-Forwarded-For", "10.0.0.1", "Origin", "http://page", "Content-Type", "application/json", "Anthropic-Beta", "b")
	a := f.runner.all()[0]
	var names []string
	for _, h := range a.Header {
		if strings.Contains(string(h.GetValue()), goodKey) {
			t.Errorf("%s carries the key", h.GetName())
		}
		names = append(names, h.GetName())
	}
	slices.Sort(names)
	if want := []string{"Accept-Encoding", "Anthropic-Beta", "Content-Type", "User-Agent"}; !slices.Equal(names, want) {
		t.Errorf("the provider gets %q, want %q", names, want)
	}
	if strings.Contains(f.logs.String()+strings.Join(names, ""), goodKey) {
		t.Error("the key is in the log")
	}
}

// Contract: E7
func TestKeys(t *testing.T) {
	f := newFixture(t)
	for name, c := range map[string]struct {
		header []string
		status int
		code   string
	}{
		"none":          {[]string{"Authorization", ""}, 401, "invalid_api_key"},
		"wrong":         {[]string{"Authorization", "Bearer nope"}, 401, "invalid_api_key"},
		"empty":         {[]string{"Authorization", "Bearer "}, 401, "invalid_api_key"},
		"other scheme":  {[]string{"Authorization", "Basic " + goodKey}, 401, "invalid_api_key"},
		"digest itself": {[]string{"Authorization", "Bearer " + hexDigest(goodKey)}, 401, "invalid_api_key"},
		"bearer":        {[]string{"Authorization", "bearer " + goodKey}, 200, ""},
		"x-api-key":     {[]string{"Authorization", "", "X-Api-Key", goodKey}, 200, ""},
		"forbidden":     {[]string{"Authorization", "Bearer " + narrowKey}, 403, "model_not_allowed"},
	} {
		resp, body := f.do("POST", "/v1/chat/completions", plainChat, c.header...)
		if c.code == "" {
			if resp.StatusCode != c.status {
				t.Errorf("%s: %d %s", name, resp.StatusCode, body)
			}
			continue
		}
		t.Run(name, func(t *testing.T) { f.wantError(resp, body, c.status, c.code) })
	}
	if n := len(f.runner.all()); n != 2 {
		t.Errorf("%d attempts, want 2", n)
	}
}

func hexDigest(key string) string {
	d := DigestOf(key)
	return hex.EncodeToString(d[:])
}

// Contract: E9
func TestNoConfiguredKeyLetsNobodyIn(t *testing.T) {
	f := newFixture(t, func(c *Config) { c.Keys = nil })
	for _, h := range []string{"Bearer " + goodKey, "Bearer ", ""} {
		resp, body := f.do("GET", "/v1/models", "", "Authorization", h)
		f.wantError(resp, body, 401, "invalid_api_key")
	}
}

// Contract: E7 E12 P9
func TestRefusals(t *testing.T) {
	for err, c := range map[error]struct {
		status     int
		code       string
		retryAfter bool
	}{
		pool.ErrUnknownModel: {404, "model_not_found", false},
		pool.ErrUnsupported:  {400, "unsupported_operation", false},
		pool.ErrQueueFull:    {429, "queue_full", true},
		pool.ErrWaitExpired:  {503, "queue_timeout", true},
		pool.ErrNoProvider:   {503, "no_provider", true},
		pool.ErrStopping:     {503, "draining", true},
		errors.New("secret"): {500, "internal_error", false},
	} {
		t.Run(c.code, func(t *testing.T) {
			f := newFixture(t)
			f.pool.acquire = func(context.Context, Want) (Grant, error) { return Grant{}, err }
			resp, body := f.chat(plainChat)
			f.wantError(resp, body, c.status, c.code)
			if strings.Contains(body, "secret") {
				t.Error("an inner error's text reached the caller")
			}
			if got := resp.Header.Get("Retry-After") != ""; got != c.retryAfter {
				t.Errorf("Retry-After: %v", got)
			}
			known := c.code != "model_not_found" && c.code != "draining" && c.code != "internal_error"
			if l := f.logged(1); (l["model"] == "tiny") != known || (!known && l["model"] != nil) || l["queue_wait"] == nil || l["attempts"] != nil {
				t.Errorf("logged %v", l)
			}
		})
	}
}

// Contract: E7
func TestA29OwnRefusalsCarryRetryAfterAndACode(t *testing.T) {
	f := newFixture(t)
	f.pool.acquire = func(context.Context, Want) (Grant, error) { return Grant{}, pool.ErrQueueFull }
	resp, body := f.chat(plainChat)
	f.wantError(resp, body, 429, "queue_full")
	if resp.Header.Get("Retry-After") != "1" {
		t.Errorf("Retry-After %q", resp.Header.Get("Retry-After"))
	}
}

// Contract: E12 H6
func TestAttempts(t *testing.T) {
	for _, class := range wire.Classes {
		t.Run(string(class), func(t *testing.T) {
			f := newFixture(t)
			var n uint64
			f.pool.acquire = func(_ context.Context, w Want) (Grant, error) {
				n++
				return Grant{Slot: pool.Slot{ID: n, Provider: string(rune('a' + n - 1)), Target: "t" + string(rune('0'+n))}}, nil
			}
			f.runner.answer = func(context.Context, dispatch.Attempt, dispatch.Writer) dispatch.Result {
				return dispatch.Result{Err: wire.FromPeer(string(class), "secret text of a peer")}
			}
			resp, body := f.chat(plainChat)
			r := rowOf(reason(class))
			f.wantError(resp, body, r.status, r.code)
			if strings.Contains(body, "secret") {
				t.Error("a peer's text reached the caller")
			}
			attempts := f.runner.all()
			want := 1
			if r.retry {
				want = maxAttempts
			}
			if len(attempts) != want {
				t.Fatalf("%d attempts, want %d", len(attempts), want)
			}
			ids := map[string]bool{}
			for i, a := range attempts {
				ids[a.RunID] = true
				if a.Slot.ID != uint64(i+1) || !strings.Contains(a.body, `"model":"`+a.Slot.Target+`"`) {
					t.Errorf("attempt %d: slot %d, body %q", i, a.Slot.ID, a.body)
				}
				if got := strings.Join(f.pool.wants[i].Avoid, ""); got != "abc"[:i] {
					t.Errorf("attempt %d avoids %q", i, got)
				}
			}
			if len(ids) != want {
				t.Error("a run id was used twice")
			}
			if l := f.logged(1); l["class"] != string(class) || l["attempts"] != float64(want) {
				t.Errorf("logged %v", l)
			}
		})
	}
}

// Contract: H6
func TestASecondAttemptServes(t *testing.T) {
	f := newFixture(t)
	good := f.runner.answer
	f.runner.answer = func(ctx context.Context, a dispatch.Attempt, w dispatch.Writer) dispatch.Result {
		if len(f.runner.all()) == 1 {
			return dispatch.Result{Err: wire.Errorf(wire.Unreachable, "refused")}
		}
		return good(ctx, a, w)
	}
	resp, body := f.chat(plainChat)
	if resp.StatusCode != 200 || body != `{"ok":true}` {
		t.Fatalf("%d %q", resp.StatusCode, body)
	}
	if l := f.logged(1); l["attempts"] != 2.0 || l["class"] != "ok" {
		t.Errorf("logged %v", l)
	}
}

// Contract: H6
func TestTheFirstFailureIsToldWhenNobodyElseIsThere(t *testing.T) {
	f := newFixture(t)
	f.pool.acquire = func(_ context.Context, w Want) (Grant, error) {
		if len(w.Avoid) > 0 {
			return Grant{}, pool.ErrNoProvider
		}
		return Grant{Slot: pool.Slot{ID: 1, Provider: "p1"}}, nil
	}
	f.runner.answer = func(context.Context, dispatch.Attempt, dispatch.Writer) dispatch.Result {
		return dispatch.Result{Err: wire.Errorf(wire.Unreachable, "refused")}
	}
	resp, body := f.chat(plainChat)
	f.wantError(resp, body, 502, "provider_unreachable")
}

// That nobody answers for a node is borne where no other candidate is left, and once for
// each request: elsewhere the next one is asked at once.
//
// Contract: G4 E12 H6
func TestPatienceWhereNobodyElseIsLeft(t *testing.T) {
	for name, c := range map[string]struct {
		others []int // of each attempt's grant
		acked  bool  // the Node said so itself: the provider is not there
		want   []time.Duration
	}{
		"one candidate":               {[]int{0, 0}, false, []time.Duration{unheardWait, 0}},
		"one candidate, but answered": {[]int{0, 0}, true, []time.Duration{unheardWait, unheardWait}},
		"two of them":                 {[]int{1, 0}, false, []time.Duration{0, unheardWait}},
		"more than attempts":          {[]int{9, 8, 7}, false, []time.Duration{0, 0, unheardWait}},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			n := 0
			f.pool.acquire = func(context.Context, Want) (Grant, error) {
				if n == len(c.others) {
					return Grant{}, pool.ErrNoProvider
				}
				n++
				return Grant{Slot: pool.Slot{ID: uint64(n), Provider: strconv.Itoa(n)}, Others: c.others[n-1]}, nil
			}
			f.runner.answer = func(context.Context, dispatch.Attempt, dispatch.Writer) dispatch.Result {
				return dispatch.Result{Acked: c.acked, Err: wire.Errorf(wire.Unreachable, "nobody")}
			}
			resp, body := f.chat(plainChat)
			f.wantError(resp, body, 502, "provider_unreachable")
			var got []time.Duration
			for _, a := range f.runner.all() {
				got = append(got, a.Patience)
			}
			if !slices.Equal(got, c.want) {
				t.Errorf("%v, want %v", got, c.want)
			}
		})
	}
}

// Contract: H6 E6
func TestNoSecondAttemptAfterCommitment(t *testing.T) {
	f := newFixture(t)
	f.runner.answer = func(_ context.Context, _ dispatch.Attempt, w dispatch.Writer) dispatch.Result {
		_ = w.Start(200, fields("Content-Type", "application/json"))
		return dispatch.Result{Started: true, Err: wire.Errorf(wire.SessionEnded, "lost")}
	}
	if _, body, err := f.try("POST", "/v1/chat/completions", plainChat); err == nil {
		t.Errorf("a cut answer ended well: %q", body)
	}
	if n := len(f.runner.all()); n != 1 {
		t.Errorf("%d attempts", n)
	}
}

// Contract: E6 T4
func TestA25ProvidersOwnErrorPasses(t *testing.T) {
	f := newFixture(t)
	const refusal = `{"object":"error","message":"max_tokens is too large","code":400}`
	f.runner.answer = says(400, fields("Content-Type", "application/json; charset=x", "Content-Length", "65"), refusal)
	resp, body := f.chat(streamChat)
	if resp.StatusCode != 400 || body != refusal || resp.Header.Get("Content-Type") != "application/json; charset=x" {
		t.Errorf("%d %q %v", resp.StatusCode, body, resp.Header)
	}
	if n := len(f.runner.all()); n != 1 {
		t.Errorf("%d attempts", n)
	}
}

// Contract: T4
func TestA28RetryAfterOfTheProviderPasses(t *testing.T) {
	f := newFixture(t)
	f.runner.answer = says(429, fields("Retry-After", "7", "X-RateLimit-Remaining", "0"), `{"error":{}}`)
	resp, body := f.chat(plainChat)
	if resp.StatusCode != 429 || resp.Header.Get("Retry-After") != "7" || resp.Header.Get("X-Ratelimit-Remaining") != "0" || body != `{"error":{}}` {
		t.Errorf("%d %v %q", resp.StatusCode, resp.Header, body)
	}
	if _, guessed := resp.Header["Content-Type"]; guessed {
		t.Errorf("a content type was made up: %v", resp.Header)
	}
}

const chunk = `data: {"id":"c","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"x"}}]}` + "\n\n"

func failing(class wire.Class, header []string, pieces ...string) func(context.Context, dispatch.Attempt, dispatch.Writer) dispatch.Result {
	return func(ctx context.Context, a dispatch.Attempt, w dispatch.Writer) dispatch.Result {
		res := says(200, fields(header...), pieces...)(ctx, a, w)
		res.Err = wire.Errorf(class, "broken")
		return res
	}
}

var eventStream = []string{"Content-Type", "text/event-stream; charset=utf-8"}

// Contract: E6
func TestA10ACutStreamEndsInAnErrorEvent(t *testing.T) {
	for name, c := range map[string]struct{ sent, between string }{
		"between events":     {chunk + chunk, ""},
		"CRLF":               {"data: 1\r\n\r\n", ""},
		"after a line":       {"data: {}\n", "\n"},
		"inside a line":      {chunk + `data: {"id`, "\n\n"},
		"nothing but header": {"", ""},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			f.runner.answer = failing(wire.SessionEnded, eventStream, c.sent)
			resp, body := f.chat(streamChat)
			tail, ok := strings.CutPrefix(body, c.sent+c.between)
			const event = `data: {"error":{"message":"the connection to the provider's node was lost","type":"server_error","param":null,"code":"node_lost"}}` + "\n\n"
			if resp.StatusCode != 200 || !ok || tail != event || strings.Contains(body, "[DONE]") {
				t.Errorf("%d %q", resp.StatusCode, body)
			}
			if l := f.logged(1); l["class"] != "session_ended" || l["status"] != 200.0 {
				t.Errorf("logged %v", l)
			}
			if n := testutil.ToFloat64(f.counter("session_ended")); n != 1 {
				t.Errorf("counted %v", n)
			}
		})
	}
}

// Contract: E6
func TestA10WhatCannotSayItBreaksTheConnection(t *testing.T) {
	for name, header := range map[string][]string{
		"json":           {"Content-Type", "application/json"},
		"with length":    {"Content-Type", "text/event-stream", "Content-Length", "9000"},
		"encoded stream": {"Content-Type", "text/event-stream", "Content-Encoding", "gzip"},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			f.runner.answer = failing(wire.Provider, header, "half of ")
			resp, body, err := f.try("POST", "/v1/chat/completions", streamChat, "Accept-Encoding", "gzip")
			if err == nil || resp == nil || body != "half of " {
				t.Errorf("%v %q", err, body)
			}
		})
	}
}

// Contract: E6
func TestA09AStreamWithoutItsEndIsACut(t *testing.T) {
	f := newFixture(t)
	f.runner.answer = says(200, fields(eventStream...), chunk, chunk)
	_, body, err := f.try("POST", "/v1/chat/completions", streamChat)
	if !errors.Is(err, io.ErrUnexpectedEOF) || body != chunk+chunk {
		t.Errorf("%v %q", err, body)
	}
	if l := f.logged(1); l["class"] != "provider" {
		t.Errorf("logged %v", l)
	}
	f.runner.answer = says(200, fields(eventStream...), chunk, "data: [DO", "NE]\n\n: bye\n\n")
	if _, body := f.chat(streamChat); !strings.HasSuffix(body, ": bye\n\n") {
		t.Errorf("%q", body)
	}
	f.runner.answer = says(200, fields(eventStream...), ": odd\r\n\r\nevent: x\r\ndata: y\r\n\r\n")
	if _, body := f.chat(streamChat); body != ": odd\r\n\r\nevent: x\r\ndata: y\r\n\r\n" {
		t.Errorf("%q", body)
	}
}

// Contract: E4
func TestEachChunkArrivesBeforeTheNextIsThere(t *testing.T) {
	f := newFixture(t)
	proceed := make(chan struct{})
	wait := func() {
		select {
		case <-proceed:
		case <-time.After(hang):
		}
	}
	f.runner.answer = func(_ context.Context, a dispatch.Attempt, w dispatch.Writer) dispatch.Result {
		if !a.Stream {
			t.Error("not marked as a stream")
		}
		_ = w.Start(200, fields(eventStream...))
		for _, p := range []string{"data: \xe2\x82", "\xac\n\n", "data: [DONE]\n\n"} {
			wait() // the header, and then each piece, was seen by the caller
			_ = w.Body([]byte(p))
			_ = w.Flush()
		}
		return dispatch.Result{Started: true}
	}
	req, err := http.NewRequestWithContext(t.Context(), "POST", f.server.URL+"/v1/chat/completions", strings.NewReader(streamChat))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+goodKey)
	resp, err := f.client.Do(req) // returns with the header alone
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	for _, p := range []string{"data: \xe2\x82", "\xac\n\n", "data: [DONE]\n\n"} {
		proceed <- struct{}{}
		got := make([]byte, len(p))
		if _, err := io.ReadFull(resp.Body, got); err != nil || string(got) != p {
			t.Fatalf("%q %v", got, err)
		}
	}
}

// Contract: E4
func TestA70ProxiesAreToldNotToBuffer(t *testing.T) {
	f := newFixture(t)
	for name, c := range map[string]struct {
		header []string
		want   string
	}{
		"a stream":           {eventStream, "no"},
		"the provider's own": {append([]string{"X-Accel-Buffering", "yes"}, eventStream...), "yes"},
		"no stream":          {[]string{"Content-Type", "application/json"}, ""},
	} {
		f.runner.answer = says(200, fields(c.header...), "data: [DONE]\n\n")
		if resp, _ := f.chat(plainChat); strings.Join(resp.Header["X-Accel-Buffering"], ",") != c.want {
			t.Errorf("%s: %v", name, resp.Header)
		}
	}
}

// Contract: T3
func TestTrailersPass(t *testing.T) {
	f := newFixture(t)
	f.runner.answer = func(_ context.Context, _ dispatch.Attempt, w dispatch.Writer) dispatch.Result {
		_ = w.Start(200, fields("Content-Type", "text/plain", "Trailer", "X-Sum"))
		_ = w.Body([]byte("body"))
		_ = w.Trailer(fields("X-Sum", "1", "x-sum", "2", "Content-Length", "3", "Authorization", "x", "Transfer-Encoding", "chunked"))
		return dispatch.Result{Started: true}
	}
	resp, body := f.chat(plainChat)
	if body != "body" || !reflect.DeepEqual(resp.Trailer, http.Header{"X-Sum": {"1", "2"}}) {
		t.Errorf("%q %v", body, resp.Trailer)
	}
}

// Contract: E6
func TestABrokenAnswerIsNeverWritten(t *testing.T) {
	for name, answer := range map[string]func(context.Context, dispatch.Attempt, dispatch.Writer) dispatch.Result{
		"CRLF in a value":     says(200, fields("X-A", "1\r\nSet-Cookie: evil=1"), "x"),
		"CRLF in a name":      says(200, fields("X-A\r\nX-B", "1"), "x"),
		"NUL":                 says(200, fields("X-A", "a\x00b"), "x"),
		"empty name":          says(200, fields("", "1"), "x"),
		"two lengths":         says(200, fields("Content-Length", "1", "Content-Length", "2"), "x"),
		"signed length":       says(200, fields("Content-Length", "+1"), "x"),
		"interim status":      says(100, nil, ""),
		"switching":           says(101, fields("Upgrade", "websocket"), ""),
		"no status":           says(0, nil, ""),
		"endless status":      says(1000, nil, ""),
		"end without a start": func(context.Context, dispatch.Attempt, dispatch.Writer) dispatch.Result { return dispatch.Result{} },
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			f.runner.answer = answer
			resp, body := f.chat(plainChat)
			f.wantError(resp, body, 502, "protocol_error")
			if resp.Header.Get("X-A") != "" || resp.Header.Get("Set-Cookie") != "" {
				t.Errorf("%v", resp.Header)
			}
			if n := len(f.runner.all()); n != 1 {
				t.Errorf("%d attempts", n)
			}
		})
	}
}

// Contract: E6
func TestAnAnswerOfTheWrongLengthIsACut(t *testing.T) {
	for name, pieces := range map[string][]string{"short": {"abc"}, "long": {"abcd", "efgh"}} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			f.runner.answer = says(200, fields("Content-Length", "6"), pieces...)
			_, body, err := f.try("POST", "/v1/chat/completions", plainChat)
			if err == nil || len(body) > 6 {
				t.Errorf("%q %v", body, err)
			}
			if l := f.logged(1); l["class"] != "protocol" {
				t.Errorf("logged %v", l)
			}
		})
	}
}

func TestHopByHopOfTheProviderIsDropped(t *testing.T) {
	f := newFixture(t)
	f.runner.answer = says(200, fields("Connection", "close, X-Hop", "X-Hop", "1", "Keep-Alive", "timeout=5", "Transfer-Encoding", "chunked",
		"Proxy-Authenticate", "Basic", "Upgrade", "h2c", "X-Request-Id", "theirs", "X-Iop-Node", "theirs", "X-End", "stays"), "ok")
	resp, body := f.chat(plainChat)
	for _, h := range []string{"X-Hop", "Keep-Alive", "Proxy-Authenticate", "Upgrade", "X-Iop-Node"} {
		if resp.Header.Get(h) != "" {
			t.Errorf("%s passed", h)
		}
	}
	if resp.Close || body != "ok" || resp.Header.Get("X-End") != "stays" || !wire.ValidRunID(resp.Header.Get("X-Request-Id")) {
		t.Errorf("%v %q", resp.Header, body)
	}
}

// Contract: E7
func TestRequestID(t *testing.T) {
	f := newFixture(t)
	for i, c := range []struct {
		own  string
		echo bool
	}{
		{"abc-DEF_1.2", true}, {strings.Repeat("a", 64), true}, {strings.Repeat("a", 65), false}, {"a b", false}, {"é", false}, {"", false}, {"{}", false},
	} {
		resp, _ := f.do("POST", "/v1/chat/completions", plainChat, "X-Request-Id", c.own)
		got := resp.Header.Get("X-Request-Id")
		if c.echo != (got == c.own) || got == "" {
			t.Errorf("%q: answered %q", c.own, got)
		}
		id, _ := f.logged(i + 1)["request_id"].(string)
		if !wire.ValidRunID(id) || (!c.echo && id != got) {
			t.Errorf("%q: logged %q, answered %q", c.own, id, got)
		}
		if run := f.runner.all()[i].RunID; run == id || run == c.own {
			t.Errorf("the run id %q is the request's", run)
		}
	}
}

// Contract: E11
func TestOptInHeaders(t *testing.T) {
	for _, on := range []bool{false, true} {
		f := newFixture(t, func(c *Config) { c.OptInHeaders = on })
		resp, _ := f.chat(plainChat)
		got := map[string]string{}
		for _, h := range []string{"X-Iop-Node", "X-Iop-Provider", "X-Iop-Attempts", "X-Iop-Queue-Ms"} {
			if v := resp.Header.Get(h); v != "" {
				got[h] = v
			}
		}
		want := map[string]string{}
		if on {
			want = map[string]string{"X-Iop-Node": "n1", "X-Iop-Provider": "p1", "X-Iop-Attempts": "1", "X-Iop-Queue-Ms": "0"}
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("on %v: %v", on, got)
		}
	}
}

// Contract: E5 T6
func TestA19ACallerWhoLeavesCancelsTheAttempt(t *testing.T) {
	for name, doc := range map[string]string{"whole": plainChat, "stream": streamChat, "large": `{"model":"tiny","x":"` + strings.Repeat("y", 3<<20) + `"}`} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			began, ended := make(chan struct{}), make(chan error, 1)
			f.runner.answer = func(ctx context.Context, _ dispatch.Attempt, _ dispatch.Writer) dispatch.Result {
				close(began)
				<-ctx.Done()
				ended <- context.Cause(ctx)
				return dispatch.Result{Err: wire.Errorf(wire.Cancelled, "caller gone")}
			}
			c, _ := f.raw()
			f.post(c, doc)
			await(t, began, "the attempt")
			c.Close()
			if err := await(t, ended, "the cancel"); !errors.Is(err, context.Canceled) {
				t.Errorf("cause %v", err)
			}
			if l := f.logged(1); l["status"] != 499.0 || l["class"] != "cancelled" {
				t.Errorf("logged %v", l)
			}
			if n := len(f.runner.all()); n != 1 {
				t.Errorf("%d attempts", n)
			}
		})
	}
}

// Contract: E5
func TestACallerWhoLeavesTheQueueIsGone(t *testing.T) {
	f := newFixture(t)
	began := make(chan struct{})
	f.pool.acquire = func(ctx context.Context, _ Want) (Grant, error) {
		close(began)
		<-ctx.Done()
		return Grant{}, context.Cause(ctx)
	}
	c, _ := f.raw()
	f.post(c, plainChat)
	await(t, began, "the queue")
	c.Close()
	if l := f.logged(1); l["status"] != 499.0 || l["class"] != "cancelled" {
		t.Errorf("logged %v", l)
	}
}

// Contract: E5
func TestA20ACallerWhoLeavesAStreamEndsIt(t *testing.T) {
	f := newFixture(t)
	ended := make(chan error, 1)
	f.runner.answer = func(ctx context.Context, _ dispatch.Attempt, w dispatch.Writer) dispatch.Result {
		_ = w.Start(200, fields(eventStream...))
		_ = w.Body([]byte(chunk))
		_ = w.Flush()
		<-ctx.Done()
		ended <- w.Body([]byte(chunk)) // may or may not fail; it must not block or panic
		return dispatch.Result{Started: true, Err: wire.Errorf(wire.Cancelled, "caller gone")}
	}
	c, r := f.raw()
	f.post(c, streamChat)
	for {
		if line, err := r.ReadString('\n'); err != nil || strings.HasPrefix(line, "data:") {
			break
		}
	}
	c.Close()
	await(t, ended, "the cancel")
	if l := f.logged(1); l["class"] != "cancelled" {
		t.Errorf("logged %v", l)
	}
}

// Contract: D7
func TestWhoStopsTheEdgeSaysSo(t *testing.T) {
	f := newFixture(t)
	api := New(Config{Keys: []Key{{Name: "a", Digest: DigestOf(goodKey)}}}, Deps{Pool: f.pool, Runner: f.runner})
	ctx, stop := context.WithCancelCause(t.Context())
	f.runner.answer = func(ctx context.Context, _ dispatch.Attempt, w dispatch.Writer) dispatch.Result {
		stop(pool.ErrStopping)
		return dispatch.Result{Err: wire.AsError(context.Cause(ctx))}
	}
	f.server.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		api.Handler().ServeHTTP(w, r.WithContext(ctx))
	})
	resp, body := f.chat(plainChat)
	f.wantError(resp, body, 503, "draining")
}

// A stream that a stop cuts is told so, and not that nothing new is taken.
//
// Contract: D7 E6
func TestStreamCutByAStopIsToldSo(t *testing.T) {
	f := newFixture(t)
	api := New(Config{Keys: []Key{{Name: "a", Digest: DigestOf(goodKey)}}}, Deps{Pool: f.pool, Runner: f.runner})
	ctx, stop := context.WithCancelCause(t.Context())
	f.runner.answer = func(ctx context.Context, _ dispatch.Attempt, w dispatch.Writer) dispatch.Result {
		_ = w.Start(200, fields(eventStream...))
		_ = w.Body([]byte(chunk))
		stop(pool.ErrStopping)
		return dispatch.Result{Started: true, Err: wire.AsError(context.Cause(ctx))}
	}
	f.server.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		api.Handler().ServeHTTP(w, r.WithContext(ctx))
	})
	_, body := f.chat(streamChat)
	if !strings.HasPrefix(body, chunk) || !strings.Contains(body, `"draining"`) || !strings.Contains(body, "this answer was cut") || strings.Contains(body, "nothing new") {
		t.Errorf("%s", body)
	}
}

// Contract: T7 E7
func TestBodyTooLarge(t *testing.T) {
	for _, memory := range []int64{1 << 20, 16} {
		f := newFixture(t, limits(configs.Limits{Body: 100, BodyMemory: memory}))
		c, r := f.raw()
		// Not one byte of the body follows: the answer comes at once.
		io.WriteString(c, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer "+goodKey+"\r\nContent-Length: 101\r\n\r\n")
		resp, err := http.ReadResponse(r, nil)
		if err != nil {
			t.Fatal(err)
		}
		b, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		f.wantError(resp, string(b), 413, "request_too_large")
		if !resp.Close {
			t.Error("the connection is kept")
		}
		// The length is not told: the bound is met on the way.
		c, r = f.raw()
		io.WriteString(c, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer "+goodKey+"\r\nTransfer-Encoding: chunked\r\n\r\n65\r\n"+strings.Repeat(" ", 0x65))
		resp, err = http.ReadResponse(r, nil)
		if err != nil {
			t.Fatal(err)
		}
		b, _ = io.ReadAll(resp.Body)
		resp.Body.Close()
		f.wantError(resp, string(b), 413, "request_too_large")
		// The bound itself is fine.
		doc := plainChat + strings.Repeat(" ", 100-len(plainChat))
		if resp, body := f.chat(doc); resp.StatusCode != 200 {
			t.Errorf("%d %s", resp.StatusCode, body)
		}
		if n := testutil.ToFloat64(f.gauge()); n != 0 {
			t.Errorf("%v bytes still held", n)
		}
	}
}

// Contract: T7
func TestLargeBodiesGoToAFileWithoutAName(t *testing.T) {
	var dir string
	f := newFixture(t, func(c *Config) { dir = c.SpoolDir })
	good := f.runner.answer
	f.runner.answer = func(ctx context.Context, a dispatch.Attempt, w dispatch.Writer) dispatch.Result {
		if left, _ := filepath.Glob(filepath.Join(dir, "*")); len(left) != 0 {
			t.Errorf("a name is left: %q", left)
		}
		if n := testutil.ToFloat64(f.gauge()); n < 2<<20 {
			t.Errorf("%v bytes held", n)
		}
		if len(f.runner.all()) < 3 {
			return dispatch.Result{Err: wire.Errorf(wire.Capacity, "full")}
		}
		return good(ctx, a, w)
	}
	for _, pad := range []int{2 << 20, 2<<20 + 12345} {
		f.runner.attempts = nil
		doc := `{"x":"` + strings.Repeat("y", pad) + `","model":"tiny","z":"` + strings.Repeat("é", pad) + `"}`
		if resp, body := f.chat(doc); resp.StatusCode != 200 {
			t.Fatalf("%d %s", resp.StatusCode, body)
		}
		want := strings.Replace(doc, `"tiny"`, `"tiny:latest"`, 1)
		for i, a := range f.runner.all() {
			if a.body != want || a.BodySize != int64(len(want)) {
				t.Errorf("attempt %d got another body: %d bytes", i, len(a.body))
			}
		}
	}
	f.logged(2)
	if n := testutil.ToFloat64(f.gauge()); n != 0 {
		t.Errorf("%v bytes still held", n)
	}
}

// Contract: T7
func TestTheSumOfBodiesIsBounded(t *testing.T) {
	f := newFixture(t, limits(configs.Limits{BodiesTotal: 200}))
	began, proceed := make(chan struct{}), make(chan struct{})
	good := f.runner.answer
	f.runner.answer = func(ctx context.Context, a dispatch.Attempt, w dispatch.Writer) dispatch.Result {
		if a.BodySize > 150 {
			close(began)
			<-proceed
		}
		return good(ctx, a, w)
	}
	done := make(chan int, 1)
	go func() {
		resp, _, err := f.try("POST", "/v1/chat/completions", plainChat+strings.Repeat(" ", 100))
		if err != nil {
			done <- 0
			return
		}
		done <- resp.StatusCode
	}()
	await(t, began, "the first")
	resp, body := f.chat(plainChat)
	f.wantError(resp, body, 503, "server_busy")
	if resp.Header.Get("Retry-After") == "" {
		t.Error("no Retry-After")
	}
	close(proceed)
	if s := await(t, done, "the first's end"); s != 200 {
		t.Errorf("the first: %d", s)
	}
	if resp, body := f.chat(plainChat); resp.StatusCode != 200 {
		t.Errorf("afterwards: %d %s", resp.StatusCode, body)
	}
}

// Contract: Z3
func TestStreamsPerKey(t *testing.T) {
	f := newFixture(t, limits(configs.Limits{StreamsPerKey: 1}))
	began, proceed := make(chan struct{}), make(chan struct{})
	good := f.runner.answer
	f.runner.answer = func(ctx context.Context, a dispatch.Attempt, w dispatch.Writer) dispatch.Result {
		if a.Stream {
			close(began)
			<-proceed
		}
		return good(ctx, a, w)
	}
	done := make(chan struct{})
	go func() { defer close(done); _, _, _ = f.try("POST", "/v1/chat/completions", streamChat) }()
	await(t, began, "the first")
	resp, body := f.chat(plainChat)
	f.wantError(resp, body, 429, "too_many_streams")
	if resp, _ := f.do("POST", "/v1/chat/completions", `{"model":"small"}`, "Authorization", "Bearer "+narrowKey); resp.StatusCode != 200 {
		t.Errorf("another key: %d", resp.StatusCode)
	}
	close(proceed)
	await(t, done, "the first's end")
	f.logged(3)
	if resp, body := f.chat(plainChat); resp.StatusCode != 200 {
		t.Errorf("afterwards: %d %s", resp.StatusCode, body)
	}
}

// Contract: E7
func TestBadBodies(t *testing.T) {
	f := newFixture(t)
	for doc, code := range map[string]string{
		"":                               "invalid_json",
		`{"model":`:                      "invalid_json",
		`[]`:                             "invalid_json",
		`{"messages":[]}`:                "invalid_model",
		`{"model":1}`:                    "invalid_model",
		`{"model":"tiny","model":"big"}`: "invalid_model",
	} {
		resp, body := f.chat(doc)
		f.wantError(resp, body, 400, code)
	}
	resp, body := f.do("POST", "/v1/chat/completions", plainChat, "Content-Encoding", "br")
	f.wantError(resp, body, 415, "unsupported_content_encoding")
	if resp, _ := f.do("POST", "/v1/chat/completions", plainChat, "Content-Encoding", "identity"); resp.StatusCode != 200 {
		t.Errorf("identity: %d", resp.StatusCode)
	}
	if n := len(f.runner.all()); n != 1 {
		t.Errorf("%d attempts", n)
	}
}

// Contract: Q2
func TestThePoolIsToldHowLongThePromptIs(t *testing.T) {
	f := newFixture(t)
	f.chat(plainChat)
	f.chat(plainChat + strings.Repeat(" ", 400))
	short, long := f.pool.wants[0].PromptTokens, f.pool.wants[1].PromptTokens
	if short != (int64(len(plainChat))+3)/4 || long != short+100 || promptTokens(1) != 1 {
		t.Errorf("%d and %d", short, long)
	}
}

func TestConnectionsAreUsedAgain(t *testing.T) {
	f := newFixture(t)
	c, r := f.raw()
	for range 3 {
		f.post(c, plainChat)
		resp, err := http.ReadResponse(r, nil)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(io.Discard, resp.Body); err != nil || resp.Close {
			t.Fatal(err, resp.Close)
		}
		resp.Body.Close()
	}
}

// A folder that takes no body is named to the operator, and to no caller.
//
// Contract: T7 D5
func TestAFolderThatTakesNoBodyIsNamed(t *testing.T) {
	missing := filepath.Join(t.TempDir(), "missing")
	f := newFixture(t, func(c *Config) { c.SpoolDir = missing }, limits(configs.Limits{BodyMemory: 1 << 10}))
	doc := `{"model":"tiny","x":"` + strings.Repeat("x", 2<<10) + `"}`
	resp, body := f.chat(doc)
	f.wantError(resp, body, 503, "server_busy")
	if resp.Header.Get("Retry-After") == "" || strings.Contains(body, missing) {
		t.Errorf("%q %v", body, resp.Header)
	}
	f.logs.wait(t, 2)
	if first, _, _ := strings.Cut(f.logs.String(), "\n"); !strings.Contains(first, `"msg":"edge.spool_failed"`) || !strings.Contains(first, `"dir":"`+missing+`"`) || !strings.Contains(first, `"error":"no such file or directory"`) {
		t.Error(first)
	}
}
