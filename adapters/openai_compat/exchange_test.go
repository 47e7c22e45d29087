package openai_compat

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/iop-fabric/iop/agent"
	fake "github.com/iop-fabric/iop/internal/fakeprovider"
)

// listening is an answer that hears of 1xx responses.
type listening struct {
	answer
	heard chan struct{}
}

func (l *listening) Heard() { l.heard <- struct{}{} }

// Each 1xx response is a sign of life, however many come, and none is the answer.
//
// Contract: W2 T4
func TestInformationalResponsesAreHeard(t *testing.T) {
	const many = 40
	p := fake.New(t)
	var steps []fake.Step
	for range many {
		steps = append(steps, fake.Head(102))
	}
	p.Next(append(steps, fake.JSON(200, `ok`)...)...)
	a := newAdapter(t, Options{BaseURL: p.URL})
	got := listening{heard: make(chan struct{}, many+1)}
	if err := a.Exchange(t.Context(), post(`{}`), &got); err != nil {
		t.Fatal(err)
	}
	if n := len(got.heard); n != many || got.status != 200 || got.starts != 1 || got.body() != "ok" {
		t.Errorf("heard %d times, then %d %q", n, got.status, got.body())
	}
}

// Contract: T4
func TestAnswerPassesUnchanged(t *testing.T) {
	for _, tc := range []struct {
		name   string
		steps  []fake.Step
		status int
		body   string
		size   int64
	}{
		{"json", fake.JSON(200, `{"a": 1.0,"b":[ ]}`), 200, `{"a": 1.0,"b":[ ]}`, 18},
		{"error status", fake.JSON(400, `{"error":{"message":"max_tokens too large"}}`), 400, `{"error":{"message":"max_tokens too large"}}`, 44},
		{"server error", fake.JSON(500, `no json`), 500, `no json`, 7},
		{"empty", fake.JSON(200, ``), 200, ``, 0},
		{"chunked", fake.SSE("data: a\n\n", ": ping\n\n", ":\n\n", "data: [DONE]\n\n"), 200, "data: a\n\n: ping\n\n:\n\ndata: [DONE]\n\n", -1},
		{"until close", []fake.Step{fake.Head(200, "Content-Type: text/plain"), fake.Raw("to the end"), fake.Close()}, 200, "to the end", -1},
		{"http 1.0", []fake.Step{fake.Raw("HTTP/1.0 200 OK\r\n\r\nold"), fake.Close()}, 200, "old", -1},
		{"redirect", fake.JSON(307, `moved`, "Location: http://192.0.2.1/elsewhere"), 307, `moved`, 5},
		{"no content", []fake.Step{fake.Head(204)}, 204, "", 0},
		{"continue first", append([]fake.Step{fake.Head(100), fake.Head(103, "Link: </x>")}, fake.JSON(200, `ok`)...), 200, "ok", 2},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := fake.New(t)
			p.Next(tc.steps...)
			a := newAdapter(t, Options{BaseURL: p.URL})
			var got answer
			if err := a.Exchange(t.Context(), post(`{}`), &got); err != nil {
				t.Fatal(err)
			}
			if got.status != tc.status || got.body() != tc.body || got.size != tc.size || got.starts != 1 {
				t.Fatalf("got %d %q size %d, %d starts", got.status, got.body(), got.size, got.starts)
			}
			if n := p.Executions(); n != 1 {
				t.Fatalf("%d executions", n)
			}
		})
	}
}

// The redirect's target is called by nobody, also where it is the provider itself.
// Contract: Z2
func TestRedirectIsNotFollowed(t *testing.T) {
	p := fake.New(t)
	p.Always(fake.JSON(302, "", "Location: "+p.URL+"/v1/models")...)
	a := newAdapter(t, Options{BaseURL: p.URL})
	var got answer
	if err := a.Exchange(t.Context(), agent.Exchange{Operation: "models"}, &got); err != nil {
		t.Fatal(err)
	}
	if p.Executions() != 1 || got.status != 302 || len(got.values("Location")) != 1 {
		t.Fatalf("%d executions, status %d, header %v", p.Executions(), got.status, got.header)
	}
}

func TestA04LineEndsAreBytes(t *testing.T) {
	for _, stream := range []string{"data: {\"a\":1}\n\n", "data:{\"a\":1}\r\n\r\n", "data: {\"a\":1}\r\r"} {
		p := fake.New(t)
		p.Next(fake.SSE(stream)...)
		a := newAdapter(t, Options{BaseURL: p.URL})
		var got answer
		if err := a.Exchange(t.Context(), post(`{}`), &got); err != nil || got.body() != stream {
			t.Fatalf("got %q, %v, want %q", got.body(), err, stream)
		}
	}
}

func TestA08CutCharacters(t *testing.T) {
	const text = "data: {\"c\":\"世🚀é\"}\n\n"
	p := fake.New(t)
	steps := []fake.Step{fake.SSEHead()}
	for i := range len(text) {
		steps = append(steps, fake.Chunk(text[i:i+1]))
	}
	p.Next(append(steps, fake.LastChunk())...)
	a := newAdapter(t, Options{BaseURL: p.URL})
	var got answer
	if err := a.Exchange(t.Context(), post(`{}`), &got); err != nil || got.body() != text {
		t.Fatalf("got %q, %v", got.body(), err)
	}
}

// A stream that a real server gave, characters of several bytes in it, cut at every
// one of its offsets, and in writes of 1, 2, 3, 7 and 1024 bytes. A line of 40 kB in
// two writes, as newline-delimited JSON has them (A03), is no other case.
// Contract: T4
func TestCutAtEveryOffset(t *testing.T) {
	all, err := fake.Captures("llama-server")
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(all, func(c fake.Capture) bool { return c.Name == "v1-chat-utf8-stream" })
	text := all[i].Answer
	p := fake.New(t)
	a := newAdapter(t, Options{BaseURL: p.URL})
	check := func(what, text string, chunks ...string) {
		steps := []fake.Step{fake.SSEHead()}
		for _, c := range chunks {
			steps = append(steps, fake.Chunk(c))
		}
		p.Next(append(steps, fake.LastChunk())...)
		var got answer
		if err := a.Exchange(t.Context(), post(`{}`), &got); err != nil || got.body() != text {
			t.Fatalf("%s: got %q, %v", what, got.body(), err)
		}
	}
	for i := 1; i < len(text); i++ {
		check(fmt.Sprint("cut at ", i), text, text[:i], text[i:])
	}
	for _, size := range []int{1, 2, 3, 7, 1024} {
		var chunks []string
		for rest := text; rest != ""; {
			n := min(size, len(rest))
			chunks, rest = append(chunks, rest[:n]), rest[n:]
		}
		check(fmt.Sprint("writes of ", size), text, chunks...)
	}
	line := `{"message":{"tool_calls":"` + strings.Repeat("é", 20_000) + "\"}}\n"
	check("A03", line, line[:20_001], line[20_001:])
}

// Whatever the body and wherever it is cut, the same bytes arrive, in order.
// Contract: T4
func TestByteExactUnderAllCuts(t *testing.T) {
	p := fake.New(t)
	a := newAdapter(t, Options{BaseURL: p.URL})
	rapid.Check(t, func(rt *rapid.T) {
		body := rapid.SliceOfN(rapid.Byte(), 0, 2000).Draw(rt, "body")
		framing := rapid.SampledFrom([]string{"chunked", "length", "close"}).Draw(rt, "framing")
		write := rapid.IntRange(1, 700).Draw(rt, "write")
		var raw bytes.Buffer
		switch framing {
		case "chunked":
			raw.WriteString("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
			for rest := body; len(rest) > 0; {
				n := rapid.IntRange(1, len(rest)).Draw(rt, "chunk")
				fmt.Fprintf(&raw, "%x\r\n%s\r\n", n, rest[:n])
				rest = rest[n:]
			}
			raw.WriteString("0\r\n\r\n")
		case "length":
			fmt.Fprintf(&raw, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
		case "close":
			fmt.Fprintf(&raw, "HTTP/1.1 200 OK\r\n\r\n%s", body)
		}
		steps := []fake.Step{fake.Split(write, raw.String())}
		if framing == "close" {
			steps = append(steps, fake.Close())
		}
		p.Next(steps...)
		var got answer
		if err := a.Exchange(t.Context(), post(`{}`), &got); err != nil {
			rt.Fatal(err)
		}
		if got.body() != string(body) {
			rt.Fatalf("got %q, want %q", got.body(), body)
		}
	})
}

// A large answer grows the buffer, and a trickle after it gives it back: in
// both directions nothing changes in the bytes.
func TestLargeAndTrickle(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	big := make([]byte, 3<<20)
	for i := range big {
		big[i] = byte(r.Uint32())
	}
	p := fake.New(t)
	steps := []fake.Step{fake.SSEHead(), fake.Chunk(string(big))}
	for range 20 {
		steps = append(steps, fake.Chunk("x"))
	}
	p.Next(append(append(steps, fake.Chunk(string(big))), fake.LastChunk())...)
	a := newAdapter(t, Options{BaseURL: p.URL})
	want := string(big) + strings.Repeat("x", 20) + string(big)
	var got answer
	if err := a.Exchange(t.Context(), post(`{}`), &got); err != nil || got.body() != want {
		t.Fatalf("%d bytes, %v", len(got.body()), err)
	}
	for _, read := range got.reads {
		if len(read) > largeBuffer {
			t.Fatalf("one read of %d bytes", len(read))
		}
	}
}

// The first event is delivered while the second does not exist yet.
// Contract: J9
func TestEachReadIsDeliveredAtOnce(t *testing.T) {
	p := fake.New(t)
	seen := make(chan struct{})
	p.Next(fake.SSEHead(), fake.Chunk("data: 1\n\n"), fake.Wait(seen), fake.Chunk("data: 2\n\n"), fake.LastChunk())
	a := newAdapter(t, Options{BaseURL: p.URL})
	var got answer
	got.onBody = func([]byte) error {
		if len(got.reads) == 1 {
			close(seen)
		}
		return nil
	}
	if err := a.Exchange(t.Context(), post(`{}`), &got); err != nil {
		t.Fatal(err)
	}
	if len(got.reads) != 2 || string(got.reads[0]) != "data: 1\n\n" {
		t.Fatalf("reads: %q", got.reads)
	}
}

// Headers are delivered before the first byte of the body exists (vLLM and
// llama.cpp send them long before the first token).
func TestHeadersComeAtOnce(t *testing.T) {
	p := fake.New(t)
	seen := make(chan struct{})
	p.Next(fake.SSEHead(), fake.Wait(seen), fake.Chunk("data: 1\n\n"), fake.LastChunk())
	a := newAdapter(t, Options{BaseURL: p.URL})
	got := answer{onStart: func() error { close(seen); return nil }}
	if err := a.Exchange(t.Context(), post(`{}`), &got); err != nil || got.body() != "data: 1\n\n" {
		t.Fatalf("%q, %v", got.body(), err)
	}
}

func TestA25ErrorStatusOfAStream(t *testing.T) {
	const body = `{"error":{"message":"max_tokens","type":"BadRequestError","param":null,"code":400}}`
	p := fake.New(t)
	p.Next(fake.JSON(400, body)...)
	a := newAdapter(t, Options{BaseURL: p.URL})
	ex := post(`{"stream":true}`)
	ex.Stream = true
	var got answer
	if err := a.Exchange(t.Context(), ex, &got); err != nil {
		t.Fatal(err)
	}
	if got.status != 400 || got.body() != body || got.values("Content-Type")[0] != "application/json" {
		t.Fatalf("%d %q %v", got.status, got.body(), got.header)
	}
}

// Contract: T4
func TestResponseHeaders(t *testing.T) {
	p := fake.New(t)
	p.Next(fake.JSON(429, `{}`, "Retry-After: 7", "X-Dup: one", "X-Dup: two", "X-Latin: caf\xe9",
		"Connection: keep-alive, X-Hop", "Keep-Alive: timeout=5", "X-Hop: secret", "Upgrade: h2c", "X-Empty:")...)
	a := newAdapter(t, Options{BaseURL: p.URL})
	var got answer
	if err := a.Exchange(t.Context(), post(`{}`), &got); err != nil {
		t.Fatal(err)
	}
	want := "[{Content-Length 2} {Content-Type application/json} {Retry-After 7} {X-Dup one} {X-Dup two} {X-Empty } {X-Latin caf\xe9}]"
	var b strings.Builder
	for i, f := range got.header {
		if i > 0 {
			b.WriteByte(' ')
		}
		fmt.Fprintf(&b, "{%s %s}", f.Name, f.Value)
	}
	if s := "[" + b.String() + "]"; s != want {
		t.Fatalf("got  %q\nwant %q", s, want)
	}
}

func TestA28RetryAfterKeepsItsName(t *testing.T) {
	p := fake.New(t)
	p.Next(fake.JSON(429, `{}`, "retry-after: 7")...)
	a := newAdapter(t, Options{BaseURL: p.URL})
	var got answer
	if err := a.Exchange(t.Context(), post(`{}`), &got); err != nil || got.status != 429 {
		t.Fatalf("%d, %v", got.status, err)
	}
	if v := got.values("Retry-After"); len(v) != 1 || v[0] != "7" {
		t.Fatalf("retry-after: %q in %v", v, got.header)
	}
}

func TestA31NothingIsInflated(t *testing.T) {
	var z bytes.Buffer
	w := gzip.NewWriter(&z)
	if _, err := w.Write([]byte(`{"ok":true}`)); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	for _, accept := range []bool{true, false} {
		p := fake.New(t)
		p.Next(fake.JSON(200, z.String(), "Content-Encoding: gzip")...)
		a := newAdapter(t, Options{BaseURL: p.URL})
		ex := post(`{}`)
		if accept {
			ex.Header = []agent.Field{{Name: "accept-encoding", Value: []byte("gzip, br")}}
		}
		var got answer
		if err := a.Exchange(t.Context(), ex, &got); err != nil {
			t.Fatal(err)
		}
		if got.body() != z.String() || len(got.values("Content-Encoding")) != 1 {
			t.Fatalf("%q, %v", got.body(), got.header)
		}
		if _, sent := p.Requests()[0].Header["Accept-Encoding"]; sent != accept {
			t.Fatalf("accept-encoding sent: %v, caller's: %v", sent, accept)
		}
	}
}

// What a buffering proxy in front is told not to do is told by the provider's
// own header, which passes (A70), and no read waits for the next one.
func TestA70AntiBufferingHeaderPasses(t *testing.T) {
	p := fake.New(t)
	p.Next(fake.SSEHead("X-Accel-Buffering: no", "Cache-Control: no-cache"), fake.LastChunk())
	a := newAdapter(t, Options{BaseURL: p.URL})
	var got answer
	if err := a.Exchange(t.Context(), post(`{}`), &got); err != nil {
		t.Fatal(err)
	}
	if len(got.values("X-Accel-Buffering")) != 1 || len(got.values("Cache-Control")) != 1 {
		t.Fatalf("%v", got.header)
	}
}

// Contract: T3
func TestTrailersPass(t *testing.T) {
	p := fake.New(t)
	p.Next(fake.Head(200, "Transfer-Encoding: chunked", "Trailer: X-Sum"), fake.Chunk("a"), fake.LastChunk("X-Sum: 1", "X-Late: 2"))
	a := newAdapter(t, Options{BaseURL: p.URL})
	var got answer
	if err := a.Exchange(t.Context(), post(`{}`), &got); err != nil {
		t.Fatal(err)
	}
	if v := values(got.trailer, "X-Sum"); len(v) != 1 || v[0] != "1" {
		t.Fatalf("trailer %v", got.trailer)
	}
	if len(got.values("Trailer")) != 0 {
		t.Fatalf("header %v", got.header)
	}
}

func TestHeadHasNoBody(t *testing.T) {
	p := fake.New(t)
	p.Next(fake.Head(200, "Content-Length: 1000"))
	a := newAdapter(t, Options{BaseURL: p.URL})
	var got answer
	if err := a.Exchange(t.Context(), agent.Exchange{Method: "HEAD", Path: "/v1/models"}, &got); err != nil {
		t.Fatal(err)
	}
	if got.size != 0 || got.body() != "" || got.values("Content-Length")[0] != "1000" {
		t.Fatalf("size %d, %q, %v", got.size, got.body(), got.header)
	}
}

// Each bends one rule of HTTP or breaks off; the sink keeps what came before.
func TestBrokenAnswers(t *testing.T) {
	for _, tc := range []struct {
		name   string
		steps  []fake.Step
		reason Reason
		starts int
		body   string
	}{
		{"A09 closed in a chunked stream", []fake.Step{fake.SSEHead(), fake.Chunk("data: reasoning\n\n"), fake.Close()}, ReasonClosed, 1, "data: reasoning\n\n"},
		{"A10 cut in a chunk", []fake.Step{fake.SSEHead(), fake.Chunk("data: 40\n\n"), fake.Raw("9\r\ndata"), fake.Close()}, ReasonClosed, 1, "data: 40\n\ndata"},
		{"A10 cut before the last chunk's end", []fake.Step{fake.SSEHead(), fake.Chunk("data: 60\n\n"), fake.Raw("0\r\n"), fake.Close()}, ReasonClosed, 1, "data: 60\n\n"},
		{"shorter than its length", []fake.Step{fake.Head(200, "Content-Length: 100"), fake.Raw("ninety"), fake.Close()}, ReasonClosed, 1, "ninety"},
		{"reset in the body", []fake.Step{fake.Head(200, "Content-Length: 100"), fake.Reset()}, "", -1, ""},
		{"closed after the request", []fake.Step{fake.Close()}, ReasonClosed, 0, ""},
		{"reset after the request", []fake.Step{fake.Reset()}, ReasonReset, 0, ""},
		{"closed in the head", []fake.Step{fake.Raw("HTTP/1.1 200 OK\r\nContent-"), fake.Close()}, "", 0, ""},
		{"no HTTP", []fake.Step{fake.Raw("SSH-2.0-OpenSSH_9.2\r\n"), fake.Close()}, ReasonNotHTTP, 0, ""},
		{"binary", []fake.Step{fake.Raw("\x16\x03\x01\x00\xff\r\n\r\n"), fake.Close()}, ReasonNotHTTP, 0, ""},
		{"no status", []fake.Step{fake.Raw("HTTP/1.1 abc OK\r\n\r\n"), fake.Close()}, ReasonNotHTTP, 0, ""},
		{"header without colon", []fake.Step{fake.Raw("HTTP/1.1 200 OK\r\nnonsense\r\n\r\n"), fake.Close()}, ReasonNotHTTP, 0, ""},
		{"control in a header", []fake.Step{fake.Raw("HTTP/1.1 200 OK\r\nX-A: a\x00b\r\nContent-Length: 0\r\n\r\n")}, ReasonNotHTTP, 0, ""},
		{"bare CR in a header", []fake.Step{fake.Raw("HTTP/1.1 200 OK\r\nX-A: a\rX-B: b\r\nContent-Length: 0\r\n\r\n")}, ReasonNotHTTP, 0, ""},
		{"two lengths", []fake.Step{fake.Raw("HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab"), fake.Close()}, "", 0, ""},
		{"bad chunk size", []fake.Step{fake.SSEHead(), fake.Raw("zz\r\nab\r\n"), fake.Close()}, ReasonNotHTTP, 1, ""},
		{"switching protocols", []fake.Step{fake.Head(101, "Upgrade: websocket", "Connection: Upgrade"), fake.Close()}, ReasonProtocol, 0, ""},
		{"headers over 64 KiB", []fake.Step{fake.Head(200, "X-Big: "+strings.Repeat("x", 66<<10), "Content-Length: 0"), fake.Close()}, ReasonHeaders, 0, ""},
		{"trailer over its bound", []fake.Step{fake.SSEHead(), fake.Chunk("a"), fake.LastChunk("X-Big: " + strings.Repeat("x", 70<<10)), fake.Close()}, ReasonHeaders, 1, "a"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := fake.New(t)
			p.Next(tc.steps...)
			a := newAdapter(t, Options{BaseURL: p.URL})
			var got answer
			f := wantFailure(t, a.Exchange(t.Context(), post(`{}`), &got), agent.CodeProvider, tc.reason)
			if (tc.starts >= 0 && got.starts != tc.starts) || got.body() != tc.body {
				t.Fatalf("%d starts, body %q", got.starts, got.body())
			}
			if f.Retryable || strings.Contains(f.Error(), "127.0.0.1") {
				t.Fatalf("%+v", f)
			}
			if p.Executions() != 1 {
				t.Fatalf("%d executions", p.Executions())
			}
		})
	}
}

func TestHeadersUpTo64KiB(t *testing.T) {
	p := fake.New(t)
	p.Next(fake.JSON(200, "ok", "X-Big: "+strings.Repeat("x", 63<<10))...)
	a := newAdapter(t, Options{BaseURL: p.URL})
	var got answer
	if err := a.Exchange(t.Context(), post(`{}`), &got); err != nil || got.body() != "ok" {
		t.Fatalf("%q, %v", got.body(), err)
	}
}

// The request's body streams through with its exact length, however large.
// Contract: T7
func TestRequestBodyHasItsExactLength(t *testing.T) {
	for _, size := range []int{0, 1, 4096, 65536, 5 << 20} {
		p := fake.New(t)
		a := newAdapter(t, Options{BaseURL: p.URL})
		body := bytes.Repeat([]byte("abcdefg\n"), size/8+1)[:size]
		// Not a bytes.Reader, whose length net/http would find by itself.
		src := struct{ io.Reader }{bytes.NewReader(body)}
		err := a.Exchange(t.Context(), agent.Exchange{Operation: "chat_completions", Body: src, BodySize: int64(size)}, new(answer))
		if err != nil {
			t.Fatal(err)
		}
		r := p.Requests()[0]
		if !bytes.Equal(r.Body, body) || r.Header.Get("Content-Length") != fmt.Sprint(size) || r.Header.Get("Transfer-Encoding") != "" {
			t.Fatalf("size %d: %d bytes, header %v", size, len(r.Body), r.Header)
		}
	}
}

func TestRequestLine(t *testing.T) {
	for _, tc := range []struct {
		base string
		ex   agent.Exchange
		want string
	}{
		{"", agent.Exchange{Operation: "models"}, "GET /v1/models"},
		{"/", agent.Exchange{Operation: "models"}, "GET /v1/models"},
		{"/v1", agent.Exchange{Operation: "models"}, "GET /v1/models"},
		{"/v1/", agent.Exchange{Operation: "messages"}, "POST /v1/messages"},
		{"/openai/v1", agent.Exchange{Operation: "count_tokens"}, "POST /openai/v1/messages/count_tokens"},
		{"/gateway", agent.Exchange{Operation: "embeddings"}, "POST /gateway/v1/embeddings"},
		{"", agent.Exchange{Operation: "responses", RawQuery: "a=b&c=%20d"}, "POST /v1/responses?a=b&c=%20d"},
		// An operation wins over method and path.
		{"", agent.Exchange{Operation: "rerank", Method: "GET", Path: "/v1/models"}, "POST /v1/rerank"},
		{"", agent.Exchange{Method: "GET", Path: "/api/tags"}, "GET /api/tags"},
		{"", agent.Exchange{Method: "GET", Path: "v1/models/org%2Fname:8b"}, "GET /v1/models/org%2Fname:8b"},
		{"/v1", agent.Exchange{Method: "DELETE", Path: "/v1/files/1"}, "DELETE /v1/files/1"},
	} {
		p := fake.New(t)
		a := newAdapter(t, Options{BaseURL: p.URL + tc.base})
		if err := a.Exchange(t.Context(), tc.ex, new(answer)); err != nil {
			t.Fatal(err)
		}
		line, _, _ := strings.Cut(string(p.Requests()[0].Head), " HTTP/1.1\r\n")
		if line != tc.want {
			t.Errorf("base %q, %+v: got %q, want %q", tc.base, tc.ex, line, tc.want)
		}
	}
}

// Contract: T2
func TestUnknownOperationIsRefusedBeforeAnyCall(t *testing.T) {
	p := fake.New(t)
	a := newAdapter(t, Options{BaseURL: p.URL, Profile: Profile{Operations: map[string]Operation{"models": {Method: "GET", Path: "/v1/models"}}}})
	ex := post(`{}`)
	ex.Method, ex.Path = "POST", "/v1/chat/completions"
	wantFailure(t, a.Exchange(t.Context(), ex, new(answer)), agent.CodeInvalid, ReasonRequest)
	if p.Connections() != 0 {
		t.Fatal("the provider was called")
	}
}

func TestWhatIsNoRequestIsRefusedBeforeAnyCall(t *testing.T) {
	p := fake.New(t)
	a := newAdapter(t, Options{BaseURL: p.URL})
	for name, ex := range map[string]agent.Exchange{
		"nothing":            {},
		"no path":            {Method: "GET"},
		"dots":               {Method: "GET", Path: "/v1/../admin"},
		"method":             {Method: "GET / HTTP/1.1\r\nX: y", Path: "/v1/models"},
		"connect":            {Method: "CONNECT", Path: "/v1/models"},
		"query":              {Operation: "models", RawQuery: "a=b HTTP/1.1\r\nX: y"},
		"fragment":           {Operation: "models", RawQuery: "a#b"},
		"header name":        {Operation: "models", Header: []agent.Field{{Name: "X:Y", Value: []byte("a")}}},
		"header value":       {Operation: "models", Header: []agent.Field{{Name: "X", Value: []byte("a\r\nY: b")}}},
		"size without body":  {Operation: "chat_completions", BodySize: 3},
		"size below nothing": {Operation: "chat_completions", Body: strings.NewReader(""), BodySize: -1},
	} {
		err := a.Exchange(t.Context(), ex, new(answer))
		var f *agent.Failure
		if !errors.As(err, &f) || f.Code != agent.CodeInvalid {
			t.Errorf("%s: %v", name, err)
		}
	}
	if p.Connections() != 0 {
		t.Fatal("the provider was called")
	}
}

func TestRequestHeaders(t *testing.T) {
	p := fake.New(t)
	a := newAdapter(t, Options{BaseURL: p.URL, Profile: Profile{Fixed: []agent.Field{{Name: "x-fixed", Value: []byte("ours")}}}})
	ex := post(`{}`)
	for _, h := range []string{
		"Content-Type: application/json", "X-A: 1", "x-a: 2", "X-Latin: caf\xe9", "User-Agent: sdk/1",
		"Connection: X-Named", "X-Named: gone", "TE: trailers", "Transfer-Encoding: chunked", "Upgrade: h2c",
		"Content-Length: 99", "Host: elsewhere", "Expect: 100-continue", "X-Fixed: theirs", "Accept: text/event-stream",
	} {
		name, value, _ := strings.Cut(h, ": ")
		ex.Header = append(ex.Header, agent.Field{Name: name, Value: []byte(value)})
	}
	if err := a.Exchange(t.Context(), ex, new(answer)); err != nil {
		t.Fatal(err)
	}
	got := p.Requests()[0].Header
	want := http.Header{
		"Content-Type": {"application/json"}, "X-A": {"1", "2"}, "X-Latin": {"caf\xe9"}, "User-Agent": {"sdk/1"},
		"X-Fixed": {"ours"}, "Accept": {"text/event-stream"}, "Content-Length": {"2"},
		"Host": {strings.TrimPrefix(p.URL, "http://")},
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Fatalf("got  %v\nwant %v", got, want)
	}
}

var credentials = []agent.Field{
	{Name: "authorization", Value: []byte("Bearer CANARY-caller")},
	{Name: "Authorization", Value: []byte("Basic CANARY-caller")},
	{Name: "x-api-key", Value: []byte("CANARY-caller")},
	{Name: "api-key", Value: []byte("CANARY-caller")},
	{Name: "Cookie", Value: []byte("s=CANARY-caller")},
	{Name: "Proxy-Authorization", Value: []byte("CANARY-caller")},
	{Name: "X-Provider-Key", Value: []byte("CANARY-caller")},
}

func TestA42CallersCredentialNeverPasses(t *testing.T) {
	for name, o := range map[string]Options{
		"no key":         {Profile: Profile{AuthHeader: "X-Provider-Key"}},
		"key":            {StaticKey: func() (string, error) { return "ours", nil }},
		"another header": {Profile: Profile{AuthHeader: "x-provider-key"}, StaticKey: func() (string, error) { return "ours", nil }},
	} {
		t.Run(name, func(t *testing.T) {
			p := fake.New(t)
			o.BaseURL = p.URL
			if o.Profile.AuthHeader == "" {
				o.Profile.Fixed = []agent.Field{{Name: "X-Provider-Key", Value: []byte("fixed")}}
			}
			a := newAdapter(t, o)
			ex := post(`{}`)
			ex.Header = credentials
			if err := a.Exchange(t.Context(), ex, new(answer)); err != nil {
				t.Fatal(err)
			}
			r := p.Requests()[0]
			if bytes.Contains(r.Head, []byte("CANARY")) {
				t.Fatalf("the caller's credential passed:\n%s", r.Head)
			}
			switch {
			case o.StaticKey == nil:
				if _, ok := r.Header["Authorization"]; ok {
					t.Fatalf("%v", r.Header)
				}
			case o.Profile.AuthHeader == "":
				if v := r.Header["Authorization"]; len(v) != 1 || v[0] != "Bearer ours" {
					t.Fatalf("%v", r.Header)
				}
			default:
				if v := r.Header["X-Provider-Key"]; len(v) != 1 || v[0] != "ours" {
					t.Fatalf("%v", r.Header)
				}
			}
		})
	}
}

func TestA43MissingKeyFailsClosed(t *testing.T) {
	for name, key := range map[string]func() (string, error){
		"error": func() (string, error) { return "", errors.New("no variable CANARY_NAME") },
		"empty": func() (string, error) { return "", nil },
		"lines": func() (string, error) { return "CANARY\r\nX: y", nil },
	} {
		t.Run(name, func(t *testing.T) {
			p := fake.New(t)
			a := newAdapter(t, Options{BaseURL: p.URL, StaticKey: key})
			ex := post(`{}`)
			ex.Header = credentials
			f := wantFailure(t, a.Exchange(t.Context(), ex, new(answer)), agent.CodeCredential, ReasonKey)
			if p.Connections() != 0 || strings.Contains(fmt.Sprint(f, f.Metadata), "CANARY") {
				t.Fatalf("%d connections, %v", p.Connections(), f)
			}
		})
	}
}

// A leased secret replaces every header of the auth header's name, and the
// adapter's own key with it.
func TestLeasedCredentialWins(t *testing.T) {
	p := fake.New(t)
	a := newAdapter(t, Options{BaseURL: p.URL, StaticKey: func() (string, error) { return "static", nil }})
	ex := post(`{}`)
	ex.Header = []agent.Field{{Name: "AUTHORIZATION", Value: []byte("1")}, {Name: "authorization", Value: []byte("2")}}
	ex.Credential = []byte("leased")
	if err := a.Exchange(t.Context(), ex, new(answer)); err != nil {
		t.Fatal(err)
	}
	if v := p.Requests()[0].Header["Authorization"]; len(v) != 1 || v[0] != "Bearer leased" {
		t.Fatalf("%q", v)
	}
}

func TestSinkErrorsComeBackAndCloseTheConnection(t *testing.T) {
	enough := errors.New("enough")
	for name, got := range map[string]*answer{
		"start": {onStart: func() error { return enough }},
		"body":  {onBody: func([]byte) error { return enough }},
	} {
		t.Run(name, func(t *testing.T) {
			p := fake.New(t)
			p.Next(fake.SSEHead(), fake.Chunk("data: 1\n\n"), fake.Hang())
			a := newAdapter(t, Options{BaseURL: p.URL})
			if err := a.Exchange(t.Context(), post(`{}`), got); !errors.Is(err, enough) {
				t.Fatalf("got %v", err)
			}
			await(t, "the close", p.Requests()[0].Gone)
		})
	}
}

// The provider sees the close whether it is silent before its headers, between
// events, or with the request's body not yet read.
// Contract: T6
func TestA19CancelClosesTheConnection(t *testing.T) {
	gone := errors.New("the caller has gone")
	for _, tc := range []struct {
		name  string
		steps []fake.Step
	}{
		{"before headers", nil},
		{"after headers", []fake.Step{fake.SSEHead()}},
		{"between events", []fake.Step{fake.SSEHead(), fake.Chunk("data: 1\n\n")}},
		{"in a chunk", []fake.Step{fake.SSEHead(), fake.Raw("ff\r\nhalf")}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := fake.New(t)
			here := make(chan struct{})
			p.Next(append(tc.steps, fake.Tell(here), fake.Hang())...)
			a := newAdapter(t, Options{BaseURL: p.URL})
			ctx, cancel := context.WithCancelCause(t.Context())
			defer cancel(nil)
			done := make(chan error, 1)
			go func() { done <- a.Exchange(ctx, post(`{"stream":false}`), new(answer)) }()
			await(t, "the script", here)
			cancel(gone)
			if err := <-done; !errors.Is(err, gone) {
				t.Fatalf("got %v, want the cause", err)
			}
			await(t, "the close", p.Requests()[0].Gone)
		})
	}
}

// A small body is waited for before the provider is called, a large one after.
// Contract: T6
func TestCancelWhileTheRequestsBodyWaits(t *testing.T) {
	for _, size := range []int64{100, 1 << 20} {
		p := fake.New(t)
		a := newAdapter(t, Options{BaseURL: p.URL})
		r, w := io.Pipe()
		gone := errors.New("the caller has gone")
		ctx, cancel := context.WithCancelCause(t.Context())
		done := make(chan error, 1)
		go func() {
			done <- a.Exchange(ctx, agent.Exchange{Operation: "chat_completions", Body: r, BodySize: size}, new(answer))
		}()
		if _, err := w.Write(make([]byte, size/2)); err != nil { // it is being read
			t.Fatal(err)
		}
		cancel(gone)
		select {
		case err := <-done:
			if !errors.Is(err, gone) {
				t.Fatalf("%d bytes: got %v", size, err)
			}
		case <-time.After(hang):
			t.Fatalf("%d bytes: the exchange does not end", size)
		}
		if _, err := w.Write([]byte("x")); !errors.Is(err, io.ErrClosedPipe) {
			t.Fatalf("%d bytes: the body can still be written: %v", size, err)
		}
	}
}

// 413 before the body was read: the answer comes through, and nobody reads the
// body any more.
func TestEarlyAnswerEndsTheBody(t *testing.T) {
	p := fake.New(t)
	p.NextEarly(append(fake.JSON(413, `{}`), fake.Hang())...)
	a := newAdapter(t, Options{BaseURL: p.URL})
	r, w := io.Pipe()
	wrote := make(chan error, 1)
	go func() {
		for {
			if _, err := w.Write(make([]byte, 8192)); err != nil {
				wrote <- err
				return
			}
		}
	}()
	var got answer
	err := a.Exchange(t.Context(), agent.Exchange{Operation: "chat_completions", Body: r, BodySize: 1 << 30}, &got)
	if err != nil || got.status != 413 {
		t.Fatalf("%d, %v", got.status, err)
	}
	if err := <-wrote; !errors.Is(err, io.ErrClosedPipe) {
		t.Fatalf("the body's writer got %v", err)
	}
}

func TestShortBodyIsOurFault(t *testing.T) {
	p := fake.New(t)
	a := newAdapter(t, Options{BaseURL: p.URL})
	for _, src := range []io.Reader{strings.NewReader("short"), io.MultiReader(strings.NewReader("short"), broken{})} {
		err := a.Exchange(t.Context(), agent.Exchange{Operation: "chat_completions", Body: src, BodySize: 10}, new(answer))
		wantFailure(t, err, agent.CodeInternal, ReasonBody)
	}
	if p.Executions() != 0 {
		t.Fatalf("%d executions of half a request", p.Executions())
	}
}

type broken struct{}

func (broken) Read([]byte) (int, error) { return 0, errors.New("broken") }

func TestA61ManyCancelledStreamsLeaveNothing(t *testing.T) {
	p := fake.New(t)
	p.Always(fake.SSEHead(), fake.Chunk("data: 1\n\n"), fake.Hang())
	a := newAdapter(t, Options{BaseURL: p.URL})
	const streams, batch = 1000, 50
	for range streams / batch {
		ctx, cancel := context.WithCancel(t.Context())
		first, done := make(chan struct{}, batch), make(chan error, batch)
		for range batch {
			go func() {
				got := answer{onBody: func([]byte) error { first <- struct{}{}; return nil }}
				done <- a.Exchange(ctx, post(`{}`), &got)
			}()
		}
		for range batch {
			await(t, "a first event", first)
		}
		cancel()
		for range batch {
			if err := <-done; !errors.Is(err, context.Canceled) {
				t.Fatal(err)
			}
		}
	}
	for _, r := range p.Requests() {
		await(t, "a close", r.Gone)
	}
	// TestMain finds a goroutine that stayed.
}

func TestStopWaitsForExchanges(t *testing.T) {
	p := fake.New(t)
	here, goOn := make(chan struct{}), make(chan struct{})
	p.Next(fake.Tell(here), fake.Wait(goOn), fake.JSON(200, "ok")[0], fake.Raw("ok"))
	a := newAdapter(t, Options{BaseURL: p.URL})
	var got answer
	done := make(chan error, 1)
	go func() { done <- a.Exchange(t.Context(), post(`{}`), &got) }()
	await(t, "the request", here)

	now, cancel := context.WithCancel(t.Context())
	cancel()
	if err := a.Stop(now); !errors.Is(err, context.Canceled) {
		t.Fatalf("stop did not wait: %v", err)
	}
	wantFailure(t, a.Exchange(t.Context(), post(`{}`), new(answer)), agent.CodeUnreachable, ReasonStopped)
	close(goOn)
	if err := a.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil || got.body() != "ok" {
		t.Fatalf("%q, %v", got.body(), err)
	}
}
