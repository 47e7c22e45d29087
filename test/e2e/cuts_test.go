package e2e

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/iop-fabric/iop/internal/fakeprovider"
	"github.com/iop-fabric/iop/internal/ioptest"
)

// utf8Stream is what a real server streamed, characters of several bytes in it.
func utf8Stream(t *testing.T) string {
	t.Helper()
	all, err := fakeprovider.Captures("llama-server")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range all {
		if c.Name == "v1-chat-utf8-stream" {
			return c.Answer
		}
	}
	t.Fatal("the recording is gone")
	return ""
}

// However small the provider's writes are, and wherever they are cut, the caller gets
// the same bytes.
//
// Contract: T3 T4 E4 J9
func TestCutInvariance(t *testing.T) {
	f := ioptest.Start(t, ioptest.Options{})
	answer := utf8Stream(t)
	for _, size := range []int{1, 2, 3, 7, 1024} {
		steps := []fakeprovider.Step{fakeprovider.SSEHead()}
		for i := 0; i < len(answer); i += size {
			steps = append(steps, fakeprovider.Chunk(answer[i:min(i+size, len(answer))]))
		}
		f.Provider.Next(append(steps, fakeprovider.LastChunk())...)
		if _, got := f.Do(f.Request(t.Context(), http.MethodPost, "/v1/chat/completions", ioptest.Chat(true))); got != answer {
			t.Fatalf("writes of %d bytes: got %q", size, got)
		}
	}
	for i := range answer { // inside a character of several bytes
		if answer[i] < 0xc0 {
			continue
		}
		f.Provider.Next(fakeprovider.SSEHead(), fakeprovider.Chunk(answer[:i+1]), fakeprovider.Chunk(answer[i+1:]), fakeprovider.LastChunk())
		if _, got := f.Do(f.Request(t.Context(), http.MethodPost, "/v1/chat/completions", ioptest.Chat(true))); got != answer {
			t.Fatalf("cut at %d: got %q", i+1, got)
		}
	}
}

// Comments that keep a stream alive stay comments, byte for byte (A05), an empty one
// too (A06), and a stream with nothing else in between ends well.
//
// Contract: T4
func TestA05A06CommentsStayComments(t *testing.T) {
	f := ioptest.Start(t, ioptest.Options{})
	events := []string{": PROCESSING\n\n", chunkEvent(1), ":\n\n", ": keep-alive\r\n\r\n", ":\n\n", chunkEvent(2), doneEvent}
	f.Provider.Next(fakeprovider.SSE(events...)...)
	if _, got := f.Do(f.Request(t.Context(), http.MethodPost, "/v1/chat/completions", ioptest.Chat(true))); got != strings.Join(events, "") {
		t.Fatalf("got %q", got)
	}
	f.Log.AwaitEvent(t, "edge.request", "status=200")
}

// A Responses stream that its provider closes in the midst of a turn, properly, has its
// bytes, and a broken connection in the place of an end (A11).
//
// Contract: E6 T3
func TestA11ResponsesWithoutAnEnd(t *testing.T) {
	f := ioptest.Start(t, ioptest.Options{})
	events := []string{
		"event: response.created\ndata: {\"type\":\"response.created\",\"response\":{\"id\":\"r\",\"status\":\"in_progress\"}}\n\n",
		"event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"delta\":\"half\"}\n\n",
	}
	f.Provider.Next(fakeprovider.SSE(events...)...)
	resp, err := f.Client.Do(f.Request(t.Context(), http.MethodPost, "/v1/responses", `{"model":"m","stream":true,"input":"x"}`))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	got, err := io.ReadAll(resp.Body)
	if string(got) != strings.Join(events, "") || err == nil {
		t.Fatalf("got %q and %v: nobody can tell it from a whole answer", got, err)
	}
	f.Log.AwaitEvent(t, "edge.request", "class=provider")
}

// A prompt larger than one message of the broker passes; one over the configured
// bound is refused at once as too large: no time-out, and no provider is asked (A35).
//
// Contract: T7 E7
func TestA35TooLargeIsToldAtOnce(t *testing.T) {
	f := ioptest.Start(t, ioptest.Options{})
	prompt := func(n int) string {
		return `{"model":"m","messages":[{"content":"` + strings.Repeat("word ", n/5) + `"}]}`
	}
	f.Provider.Next(fakeprovider.JSON(200, `{"ok":1}`)...)
	if resp, got := f.Do(f.Request(t.Context(), http.MethodPost, "/v1/chat/completions", prompt(1_200_000))); resp.StatusCode != 200 {
		t.Fatalf("1.2 MB: %d %s", resp.StatusCode, got)
	}
	before := f.Provider.Executions()
	resp, got := f.Do(f.Request(t.Context(), http.MethodPost, "/v1/chat/completions", prompt(65<<20)))
	if resp.StatusCode != http.StatusRequestEntityTooLarge || !strings.Contains(got, "request_too_large") {
		t.Fatalf("65 MiB: %d %s", resp.StatusCode, got)
	}
	if n := f.Provider.Executions(); n != before {
		t.Fatalf("a provider was asked %d times", n-before)
	}
}

// A caller that stops reading an answer larger than every buffer on its way, and then
// goes on, loses nothing; calls beside it and after it are served (A68).
//
// Contract: J7
func TestA68StalledReaderGoesOn(t *testing.T) {
	f := ioptest.Start(t, ioptest.Options{})
	large := sized(24 << 20)
	f.Provider.Next(fakeprovider.Head(200, "Content-Type: application/json", fmt.Sprint("Content-Length: ", len(large))), fakeprovider.Split(1<<16, large))
	resp := open(t, f, t.Context(), ioptest.Chat(false))
	received(t, f)
	small := func() {
		f.Provider.Next(fakeprovider.JSON(200, `{"ok":1}`)...)
		if resp, got := f.Do(f.Request(t.Context(), http.MethodPost, "/v1/chat/completions", ioptest.Chat(false))); resp.StatusCode != 200 || got != `{"ok":1}` {
			t.Fatalf("beside it: %d %q", resp.StatusCode, got)
		}
		received(t, f)
	}
	for range 20 {
		small()
	}
	var got strings.Builder
	buf := make([]byte, 1<<20)
	for {
		n, err := resp.Body.Read(buf)
		got.Write(buf[:n])
		if err != nil {
			break
		}
	}
	if got.String() != large {
		t.Fatalf("%d bytes of %d", got.Len(), len(large))
	}
	small()
}
