package demo

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/iop-fabric/iop/agent"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type record struct {
	status int
	header map[string]string
	size   int64
	reads  []string
	onBody func() error
}

func (a *record) Start(status int, h []agent.Field, size int64) error {
	a.status, a.size, a.header = status, size, map[string]string{}
	for _, f := range h {
		a.header[f.Name] = string(f.Value)
	}
	return nil
}

func (a *record) Body(p []byte) error {
	a.reads = append(a.reads, string(p))
	if a.onBody != nil {
		return a.onBody()
	}
	return nil
}

func (*record) Trailer([]agent.Field) error { return errors.New("no trailers") }

func (a *record) body() string { return strings.Join(a.reads, "") }

func ask(t *testing.T, ctx context.Context, o Options, body string) (*record, error) {
	t.Helper()
	o.Now = func() time.Time { return time.Unix(1700000000, 0) }
	var got record
	err := New(o).Exchange(ctx, agent.Exchange{
		Operation: "chat_completions", Body: strings.NewReader(body), BodySize: int64(len(body)),
	}, &got)
	return &got, err
}

func chat(user, more string) string {
	b, _ := json.Marshal(user) //nolint:errchkjson // a string
	return `{"model":"demo","messages":[{"role":"user","content":` + string(b) + `}]` + more + `}`
}

func TestModels(t *testing.T) {
	for _, ex := range []agent.Exchange{{Operation: "models"}, {Method: "GET", Path: "/v1/models"}} {
		var got record
		if err := New(Options{Now: func() time.Time { return time.Unix(7, 0) }}).Exchange(t.Context(), ex, &got); err != nil {
			t.Fatal(err)
		}
		const want = `{"object":"list","data":[{"id":"demo","object":"model","created":7,"owned_by":"iop"}]}`
		if got.status != 200 || got.body() != want || got.size != int64(len(want)) || got.header["Content-Type"] != "application/json" {
			t.Fatalf("%+v", got)
		}
	}
}

// Contract: T2
func TestNotOffered(t *testing.T) {
	for _, ex := range []agent.Exchange{
		{Operation: "completions"},
		{Operation: "embeddings", Method: "GET", Path: "/v1/models"},
		{Method: "POST", Path: "/v1/embeddings"},
		{},
	} {
		var f *agent.Failure
		if err := New(Options{}).Exchange(t.Context(), ex, new(record)); !errors.As(err, &f) || f.Code != agent.CodeInvalid {
			t.Errorf("%+v: %v", ex, err)
		}
	}
}

func TestProbe(t *testing.T) {
	a := New(Options{})
	if a.Probe(t.Context(), "demo") != agent.Available || a.Probe(t.Context(), "Demo") != agent.Unavailable {
		t.Fatal("the demo model is there, and no other")
	}
}

func TestWholeAnswer(t *testing.T) {
	got, err := ask(t, t.Context(), Options{}, chat("hello there", ""))
	if err != nil {
		t.Fatal(err)
	}
	var c struct {
		ID, Object, Model string
		Created           int64
		Choices           []struct {
			Index        int
			Message      struct{ Role, Content string }
			FinishReason string `json:"finish_reason"`
		}
		Usage struct {
			Prompt     int `json:"prompt_tokens"`
			Completion int `json:"completion_tokens"`
			Total      int `json:"total_tokens"`
		}
	}
	if err := json.Unmarshal([]byte(got.body()), &c); err != nil {
		t.Fatal(err)
	}
	text := "I am the demo model of iop, no language model. You said: hello there"
	if c.Object != "chat.completion" || c.Model != "demo" || c.Created != 1700000000 || !strings.HasPrefix(c.ID, "chatcmpl-") ||
		len(c.Choices) != 1 || c.Choices[0].Message.Content != text || c.Choices[0].Message.Role != "assistant" ||
		c.Choices[0].FinishReason != "stop" || c.Usage.Prompt != 2 || c.Usage.Completion != 14 || c.Usage.Total != 16 {
		t.Fatalf("%s", got.body())
	}
	if got.size != int64(len(got.body())) {
		t.Fatalf("announced %d, came %d", got.size, len(got.body()))
	}
}

// The shape is OpenAI's, byte for byte but for the id.
func TestStream(t *testing.T) {
	for _, withUsage := range []bool{false, true} {
		more := `,"stream":true,"stream_options":{"include_usage":true}`
		if !withUsage {
			more = `,"stream":true`
		}
		got, err := ask(t, t.Context(), Options{}, chat("demo:tokens=2 hi", more))
		if err != nil {
			t.Fatal(err)
		}
		if got.status != 200 || got.size != -1 || got.header["Content-Type"] != "text/event-stream" {
			t.Fatalf("%+v", got)
		}
		_, id, _ := strings.Cut(got.body(), `"id":"`)
		id, _, _ = strings.Cut(id, `"`)
		head := `data: {"id":"` + id + `","object":"chat.completion.chunk","created":1700000000,"model":"demo","choices":[`
		want := head + `{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}` + "\n\n" +
			head + `{"index":0,"delta":{"content":"word "},"finish_reason":null}]}` + "\n\n" +
			head + `{"index":0,"delta":{"content":"word "},"finish_reason":null}]}` + "\n\n" +
			head + `{"index":0,"delta":{},"finish_reason":"stop"}]}` + "\n\n"
		if withUsage {
			want += head + `],"usage":{"prompt_tokens":2,"completion_tokens":2,"total_tokens":4}}` + "\n\n"
		}
		want += "data: [DONE]\n\n"
		if got.body() != want {
			t.Fatalf("got\n%s\nwant\n%s", got.body(), want)
		}
	}
}

func TestTokensAreKept(t *testing.T) {
	for _, more := range []string{`,"max_tokens":3`, `,"max_completion_tokens":3,"max_tokens":50`} {
		got, err := ask(t, t.Context(), Options{}, chat("demo:tokens=10", more))
		if err != nil || !strings.Contains(got.body(), `"word word word "`) || !strings.Contains(got.body(), `"finish_reason":"length"`) ||
			!strings.Contains(got.body(), `"completion_tokens":3,`) {
			t.Fatalf("%s, %v", got.body(), err)
		}
	}
}

func TestRefusals(t *testing.T) {
	for body, status := range map[string]int{
		``: 400, `{`: 400, `[]`: 400, `{"model":"demo","messages":"x"}`: 400, `{"model":"demo","messages":[]}`: 400,
		`{"model":"demo","messages":[{"role":"user","content":7}]}`: 400, `{"model":"gpt","messages":[{"role":"user","content":"x"}]}`: 404,
		chat("x", `,"n":2`): 400, chat("demo:tokens=x", ""): 400, chat("demo:delay=-1s", ""): 400, chat("demo:delay=11m", ""): 400,
		chat("demo:status=200", ""): 400, chat("demo:cut=-1", ""): 400, chat("demo:tokens=100001", ""): 400, chat("demo:nonsense", ""): 400,
		chat("demo:status=429", ""): 429, chat("demo:status=503", `,"stream":true`): 503, chat("demo:status=418", ""): 418,
	} {
		got, err := ask(t, t.Context(), Options{}, body)
		if err != nil {
			t.Errorf("%s: %v", body, err)
			continue
		}
		var e errorAnswer
		if json.Unmarshal([]byte(got.body()), &e) != nil || e.Error.Message == "" || e.Error.Type == "" || got.status != status {
			t.Errorf("%s: %d %s", body, got.status, got.body())
		}
		if _, ok := got.header["Retry-After"]; ok != (status == 429 || status == 503) {
			t.Errorf("%s: %v", body, got.header)
		}
	}
}

func TestCut(t *testing.T) {
	var f *agent.Failure
	got, err := ask(t, t.Context(), Options{}, chat("demo:cut=5 demo:tokens=20", `,"stream":true`))
	if !errors.As(err, &f) || f.Code != agent.CodeProvider || len(got.reads) != 5 {
		t.Fatalf("%d chunks, %v", len(got.reads), err)
	}
	// Cut behind the last chunk: no [DONE].
	got, err = ask(t, t.Context(), Options{}, chat("demo:cut=3 demo:tokens=1", `,"stream":true`))
	if !errors.As(err, &f) || len(got.reads) != 3 || strings.Contains(got.body(), "DONE") {
		t.Fatalf("%q, %v", got.reads, err)
	}
	got, err = ask(t, t.Context(), Options{}, chat("demo:cut=0", ""))
	if !errors.As(err, &f) || int64(len(got.body())) >= got.size || got.body() == "" {
		t.Fatalf("%d of %d, %v", len(got.body()), got.size, err)
	}
}

func TestHelpAndParts(t *testing.T) {
	got, err := ask(t, t.Context(), Options{}, chat("Help?", ""))
	if err != nil {
		t.Fatal(err)
	}
	for _, word := range []string{"demo:delay=", "demo:tokens=", "demo:status=", "demo:cut=", "no language model"} {
		if !strings.Contains(got.body(), word) {
			t.Errorf("help does not tell %s", word)
		}
	}
	got, err = ask(t, t.Context(), Options{}, `{"model":"demo","messages":[{"role":"system","content":null},{"role":"user","content":[{"type":"text","text":"first part"},{"type":"image_url"}]},{"role":"assistant","content":"x"}]}`)
	if err != nil || !strings.Contains(got.body(), "You said: first part") {
		t.Fatalf("%s, %v", got.body(), err)
	}
	got, err = ask(t, t.Context(), Options{}, chat(strings.Repeat("世", 1000), ""))
	if err != nil || len(got.body()) > 1000 || strings.Contains(got.body(), "�") {
		t.Fatalf("%s, %v", got.body(), err)
	}
}

func TestDelayAndCancel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		if _, err := ask(t, t.Context(), Options{ChunkDelay: time.Second}, chat("demo:tokens=4", `,"stream":true`)); err != nil {
			t.Fatal(err)
		}
		if d := time.Since(start); d != 4*time.Second {
			t.Errorf("four tokens took %v", d)
		}
		start = time.Now()
		if _, err := ask(t, t.Context(), Options{ChunkDelay: time.Second}, chat("demo:tokens=4 demo:delay=1m", "")); err != nil {
			t.Fatal(err)
		}
		if d := time.Since(start); d != 4*time.Minute {
			t.Errorf("four tokens took %v", d)
		}
		start = time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), 90*time.Second)
		defer cancel()
		got, err := ask(t, ctx, Options{}, chat("demo:tokens=4 demo:delay=1m", `,"stream":true`))
		if !errors.Is(err, context.DeadlineExceeded) || len(got.reads) != 2 || time.Since(start) != 90*time.Second {
			t.Errorf("%v after %v, %q", err, time.Since(start), got.reads)
		}
	})
}

func TestCancelWhileTheBodyWaits(t *testing.T) {
	r, w := io.Pipe()
	gone := errors.New("gone")
	ctx, cancel := context.WithCancelCause(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- New(Options{}).Exchange(ctx, agent.Exchange{Operation: "chat_completions", Body: r, BodySize: 100}, new(record))
	}()
	if _, err := w.Write([]byte("{")); err != nil {
		t.Fatal(err)
	}
	cancel(gone)
	if err := <-done; !errors.Is(err, gone) {
		t.Fatal(err)
	}
}

func TestSinkErrorEndsIt(t *testing.T) {
	enough := errors.New("enough")
	got := record{onBody: func() error { return enough }}
	body := chat("demo:tokens=100", `,"stream":true`)
	err := New(Options{}).Exchange(t.Context(), agent.Exchange{Operation: "chat_completions", Body: strings.NewReader(body), BodySize: int64(len(body))}, &got)
	if !errors.Is(err, enough) || len(got.reads) != 1 {
		t.Fatalf("%d, %v", len(got.reads), err)
	}
}

func TestStop(t *testing.T) {
	a := New(Options{})
	if err := errors.Join(a.Start(t.Context()), a.Stop(t.Context()), a.Stop(t.Context())); err != nil {
		t.Fatal(err)
	}
	var f *agent.Failure
	if err := a.Exchange(t.Context(), agent.Exchange{Operation: "models"}, new(record)); !errors.As(err, &f) || f.Code != agent.CodeUnreachable {
		t.Fatal(err)
	}
}

func TestTooLarge(t *testing.T) {
	var got record
	err := New(Options{}).Exchange(t.Context(), agent.Exchange{Operation: "chat_completions", Body: bytes.NewReader(nil), BodySize: maxRequest + 1}, &got)
	if err != nil || got.status != 413 {
		t.Fatalf("%d, %v", got.status, err)
	}
}

// Whatever the body, it is answered in shape and nothing panics.
func FuzzChat(f *testing.F) {
	f.Add(chat("hello", ""))
	f.Add(chat("demo:tokens=3 demo:cut=1", `,"stream":true`))
	f.Add(`{"model":"demo","messages":[{"role":"user","content":[{"text":"x"},null]}],"max_tokens":-5}`)
	f.Fuzz(func(t *testing.T, body string) {
		if strings.Contains(body, "delay") {
			return // it would wait
		}
		got, err := ask(t, t.Context(), Options{}, body)
		var fail *agent.Failure
		if err != nil && !errors.As(err, &fail) {
			t.Fatal(err)
		}
		if err == nil && got.size >= 0 && got.size != int64(len(got.body())) {
			t.Fatalf("announced %d, came %d", got.size, len(got.body()))
		}
	})
}
