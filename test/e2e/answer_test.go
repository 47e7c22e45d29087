package e2e

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/fakeprovider"
	"github.com/iop-fabric/iop/internal/ioptest"
)

// The way of the whole: a caller's body goes to the provider with nothing
// changed, and the provider's bytes come back as they left it.
//
// Contract: E2 E4 T1 T3 T4 T5 Y1
func TestStreamedAnswerIsTheProvidersOwnBytes(t *testing.T) {
	f := ioptest.Start(t, ioptest.Options{})
	answer := ": a comment\r\n\r\n" + chunkEvent(1) + "event: odd\r\ndata: {\"x\": \"é\"}\r\n\r\n" + chunkEvent(2) + doneEvent
	// Cut at odd places: nothing may depend on where a provider's writes end.
	steps := []fakeprovider.Step{fakeprovider.SSEHead("X-Custom: a", "X-Custom: b")}
	for i := 0; i < len(answer); i += 7 {
		steps = append(steps, fakeprovider.Chunk(answer[i:min(i+7, len(answer))]))
	}
	f.Provider.Next(append(steps, fakeprovider.LastChunk())...)
	body := "{ \"stream\" : true,\n\t\"model\":\"m\", \"seed\": 18446744073709551615, \"messages\":[{\"role\":\"user\",\"content\":\"h\\u00e9llo\"}], \"unknown\":{\"b\":1,\"a\":1.50} }\n"
	resp, got := f.Do(f.Request(t.Context(), http.MethodPost, "/v1/chat/completions", body))
	if resp.StatusCode != 200 || got != answer {
		t.Fatalf("status %d, got\n%q\nwant\n%q", resp.StatusCode, got, answer)
	}
	if ct := resp.Header.Get("Content-Type"); ct != "text/event-stream" {
		t.Errorf("Content-Type %q", ct)
	}
	if v := resp.Header.Values("X-Custom"); len(v) != 2 || v[0] != "a" || v[1] != "b" {
		t.Errorf("X-Custom %q: order and duplicates must survive", v)
	}
	if resp.Header.Get("X-Request-Id") == "" {
		t.Error("no x-request-id")
	}
	r := received(t, f)
	if string(r.Body) != body {
		t.Errorf("the provider got\n%q\nwant\n%q", r.Body, body)
	}
	if r.Header.Get("Content-Length") != fmt.Sprint(len(body)) {
		t.Errorf("Content-Length %q, want %d", r.Header.Get("Content-Length"), len(body))
	}
}

// The caller's credentials never reach a provider (A42).
//
// Contract: E2 T4
func TestA42CallersKeyStaysAtEdge(t *testing.T) {
	f := ioptest.Start(t, ioptest.Options{})
	req := f.Request(t.Context(), http.MethodPost, "/v1/chat/completions", ioptest.Chat(false))
	req.Header.Set("X-Api-Key", f.Info.APIKey)
	req.Header.Set("Cookie", "session="+f.Info.APIKey)
	f.Do(req)
	if r := received(t, f); strings.Contains(string(r.Head)+string(r.Body), f.Info.APIKey) {
		t.Fatalf("the provider saw the caller's key:\n%s", r.Head)
	}
	if strings.Contains(f.Log.String(), f.Info.APIKey) {
		t.Fatal("the key stands in a log")
	}
}

// Contract: T4 E6
func TestProviderErrorsPassUnchanged(t *testing.T) {
	f := ioptest.Start(t, ioptest.Options{})
	for _, c := range []struct {
		name   string
		status int
		body   string
		header []string
	}{
		{"A25 stream asked, 400 answered", 400, `{"error":{"message":"max_tokens too large","type":"invalid_request_error"}}`, nil},
		{"A28 429 with Retry-After", 429, `{"error":"slow down"}`, []string{"Retry-After: 7"}},
		{"500 with a body that is no JSON", 500, "oops\n", nil},
		{"404", 404, `{"error":{"message":"model not found"}}`, nil},
		{"a redirect is not followed", 307, "", []string{"Location: http://192.0.2.1/"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			f.Provider.Next(fakeprovider.JSON(c.status, c.body, c.header...)...)
			req := f.Request(t.Context(), http.MethodPost, "/v1/chat/completions", ioptest.Chat(true))
			client := *f.Client
			client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
			resp, err := client.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			b, err := io.ReadAll(resp.Body)
			if err != nil || resp.StatusCode != c.status || string(b) != c.body {
				t.Fatalf("%v: got %d %q, want %d %q", err, resp.StatusCode, b, c.status, c.body)
			}
			if len(c.header) > 0 && strings.HasPrefix(c.header[0], "Retry-After") && resp.Header.Get("Retry-After") != "7" {
				t.Errorf("Retry-After %q", resp.Header.Get("Retry-After"))
			}
		})
	}
}

// A cut must not look like an end (A09, A10): after the first byte the caller
// gets the dialect's error event and no success marker.
//
// Contract: E6 T3
func TestA10CutStreamIsTold(t *testing.T) {
	f := ioptest.Start(t, ioptest.Options{})
	for _, c := range []struct {
		name string
		end  fakeprovider.Step
	}{
		{"FIN", fakeprovider.Close()},
		{"RST", fakeprovider.Reset()},
		{"A09 chunked body without its last chunk", fakeprovider.Close()},
	} {
		t.Run(c.name, func(t *testing.T) {
			f.Provider.Next(fakeprovider.SSEHead(), fakeprovider.Chunk(chunkEvent(1)), fakeprovider.Chunk(chunkEvent(2)), c.end)
			resp := open(t, f, t.Context(), ioptest.Chat(true))
			b, err := io.ReadAll(resp.Body)
			text := string(b)
			if !strings.Contains(text, `"error"`) && err == nil {
				t.Fatalf("the caller cannot tell: %q", text)
			}
			if strings.Contains(text, "[DONE]") {
				t.Fatalf("a success marker after a cut: %q", text)
			}
			if c.name == "FIN" && !strings.HasPrefix(text, chunkEvent(1)+chunkEvent(2)) {
				t.Fatalf("what was sent before the cut is missing: %q", text)
			}
			i := strings.LastIndex(text, "data: ")
			var ev struct {
				Error struct{ Message, Code string }
			}
			if err := json.Unmarshal([]byte(strings.TrimSpace(text[i+6:])), &ev); err != nil || ev.Error.Message == "" {
				t.Fatalf("the last event is no error of the dialect: %q %v", text[i:], err)
			}
		})
	}
	f.Provider.Next(fakeprovider.JSON(200, `{"ok":true}`)...)
	if resp, got := f.Do(f.Request(t.Context(), http.MethodPost, "/v1/chat/completions", ioptest.Chat(false))); resp.StatusCode != 200 || got != `{"ok":true}` {
		t.Fatalf("the next call: %d %q", resp.StatusCode, got)
	}
}

// CRLF events and events without a space pass byte for byte, and their usage is
// seen all the same (A04).
//
// Contract: T3 T4
func TestA04LineEndings(t *testing.T) {
	f := ioptest.Start(t, ioptest.Options{})
	for _, answer := range []string{
		"data: {\"choices\":[],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":4,\"total_tokens\":7}}\n\ndata: [DONE]\n\n",
		"data:{\"choices\":[],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":4,\"total_tokens\":7}}\r\n\r\ndata:[DONE]\r\n\r\n",
		"data: {\"choices\":[],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":4,\"total_tokens\":7}}\r\rdata: [DONE]\r\r",
	} {
		f.Provider.Next(fakeprovider.SSEHead(), fakeprovider.Chunk(answer), fakeprovider.LastChunk())
		before := f.Log.Count("edge.request")
		_, got := f.Do(f.Request(t.Context(), http.MethodPost, "/v1/chat/completions", ioptest.Chat(true)))
		if got != answer {
			t.Fatalf("got %q, want %q", got, answer)
		}
		f.Log.Await(t, func(string) bool { return f.Log.Count("edge.request") > before })
	}
}

// One event in two reads, cut before its blank line (A01), and a final event
// without one (A02): the bytes are the provider's.
//
// Contract: T3 T4 E4
func TestA01A02CutsInsideEvents(t *testing.T) {
	f := ioptest.Start(t, ioptest.Options{})
	ev := chunkEvent(1)
	answer := ev + "data: [DONE]"
	for cut := 1; cut < len(answer); cut += 11 {
		f.Provider.Next(fakeprovider.SSEHead(), fakeprovider.Chunk(answer[:cut]), fakeprovider.Chunk(answer[cut:]), fakeprovider.LastChunk())
		if _, got := f.Do(f.Request(t.Context(), http.MethodPost, "/v1/chat/completions", ioptest.Chat(true))); got != answer {
			t.Fatalf("cut at %d: got %q", cut, got)
		}
	}
}

// Providers that break HTTP end in one clear 502, and the next call is served.
//
// Contract: E6 E7 E12
func TestBrokenProviders(t *testing.T) {
	f := ioptest.Start(t, ioptest.Options{})
	for _, c := range []struct {
		name  string
		steps []fakeprovider.Step
	}{
		{"nonsense", []fakeprovider.Step{fakeprovider.Raw("SSH-2.0-OpenSSH_9.2\r\n\r\n"), fakeprovider.Close()}},
		{"closes without a word", []fakeprovider.Step{fakeprovider.Close()}},
		{"resets without a word", []fakeprovider.Step{fakeprovider.Reset()}},
		{"closes inside the head", []fakeprovider.Step{fakeprovider.Raw("HTTP/1.1 200 OK\r\nContent-Ty"), fakeprovider.Close()}},
		{"a line feed in a header", []fakeprovider.Step{fakeprovider.Raw("HTTP/1.1 200 OK\r\nX-A: b\x00c\r\nContent-Length: 2\r\n\r\n{}"), fakeprovider.Close()}},
		{"two lengths", []fakeprovider.Step{fakeprovider.Raw("HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}x"), fakeprovider.Close()}},
		{"a status of letters", []fakeprovider.Step{fakeprovider.Raw("HTTP/1.1 abc OK\r\nContent-Length: 2\r\n\r\n{}"), fakeprovider.Close()}},
	} {
		t.Run(c.name, func(t *testing.T) {
			f.Provider.Next(c.steps...)
			resp, got := f.Do(f.Request(t.Context(), http.MethodPost, "/v1/chat/completions", ioptest.Chat(false)))
			if resp.StatusCode != 502 {
				t.Fatalf("got %d %s, want 502", resp.StatusCode, got)
			}
			var e struct {
				Error struct{ Message, Type, Code string }
			}
			if err := json.Unmarshal([]byte(got), &e); err != nil || e.Error.Message == "" || e.Error.Code == "" {
				t.Fatalf("no OpenAI error: %q", got)
			}
			f.Provider.Next(fakeprovider.JSON(200, `{"ok":1}`)...)
			if resp, got := f.Do(f.Request(t.Context(), http.MethodPost, "/v1/chat/completions", ioptest.Chat(false))); resp.StatusCode != 200 {
				t.Fatalf("the next call: %d %s", resp.StatusCode, got)
			}
		})
	}
}

// A provider that is down is a 502 of its own, told from one that broke off.
//
// Contract: E7 E12
func TestProviderDown(t *testing.T) {
	f := ioptest.Start(t, ioptest.Options{})
	f.Provider.Close()
	resp, got := f.Do(f.Request(t.Context(), http.MethodPost, "/v1/chat/completions", ioptest.Chat(false)))
	if resp.StatusCode != 502 || !strings.Contains(got, "unreachable") {
		t.Fatalf("got %d %s", resp.StatusCode, got)
	}
}

// Bodies of every size around the limits of one message and of the broker's, as
// request and as answer, whole and streamed, byte for byte. The largest goes once each
// way, and not under the race detector: `make conformance` has it.
//
// Contract: J6 T7 T4
func TestBodySizes(t *testing.T) {
	f := ioptest.Start(t, ioptest.Options{Edge: func(e *configs.Edge) { e.Limits.Body = 128 << 20 }})
	const mib = 1 << 20
	for _, size := range []int{
		32, 60 << 10, 64<<10 - 1, 64 << 10, 64<<10 + 1, 200 << 10, 256 << 10, mib - 1, mib, mib + 1, 2 * mib, 10 * mib, 32 * mib,
	} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			body := sized(size)
			bothWays(t, f, body, body, false)
			bothWays(t, f, `{"model":"m","stream":true}`, body, true)
		})
	}
	t.Run(fmt.Sprint(100*mib), func(t *testing.T) {
		if raced {
			t.Skip("under the race detector it takes half a minute")
		}
		body := sized(100 * mib)
		bothWays(t, f, body, `{"ok":1}`, false)
		bothWays(t, f, `{"model":"m"}`, body, true)
	})
}

// sized is a request's body of exactly so many bytes. What fills it repeats after
// 65521 bytes, a prime: no two frames of it are alike.
func sized(n int) string {
	var unit strings.Builder
	for i := 0; unit.Len() < 65521; i++ {
		fmt.Fprintf(&unit, "%x.", i)
	}
	const head, tail = `{"model":"m","pad":"`, `"}`
	pad := strings.Repeat(unit.String()[:65521], n/65521+1)
	return head + pad[:n-len(head)-len(tail)] + tail
}

// bothWays makes one call and looks whether both sides got what was sent.
func bothWays(t *testing.T, f *ioptest.Fabric, request, answer string, streamed bool) {
	t.Helper()
	steps := []fakeprovider.Step{fakeprovider.Head(200, "Content-Type: application/json", fmt.Sprint("Content-Length: ", len(answer))), fakeprovider.Split(1<<16, answer)}
	if streamed {
		steps = []fakeprovider.Step{fakeprovider.SSEHead()}
		for rest := answer; rest != ""; {
			n := min(len(rest), 50_000)
			steps, rest = append(steps, fakeprovider.Chunk(rest[:n])), rest[n:]
		}
		steps = append(steps, fakeprovider.LastChunk())
	}
	f.Provider.Next(steps...)
	resp, got := f.Do(f.Request(t.Context(), http.MethodPost, "/v1/chat/completions", request))
	if resp.StatusCode != 200 || got != answer {
		t.Fatalf("status %d, %d bytes back of %d, streamed %v", resp.StatusCode, len(got), len(answer), streamed)
	}
	if r := received(t, f); string(r.Body) != request {
		t.Fatalf("the provider got %d bytes of %d", len(r.Body), len(request))
	}
}

// Many fast POST streams at once: none broken, short or out of order. A stock
// reverse proxy breaks about one in two hundred here.
//
// Contract: J2 T3 E4
func TestFastStreams(t *testing.T) {
	n := 2000
	if v, err := strconv.Atoi(os.Getenv("IOP_STREAMS")); err == nil {
		n = v
	}
	f := ioptest.Start(t, ioptest.Options{})
	var answer strings.Builder
	steps := []fakeprovider.Step{fakeprovider.SSEHead()}
	for i := range 20 {
		answer.WriteString(chunkEvent(i))
		steps = append(steps, fakeprovider.Chunk(chunkEvent(i)))
	}
	answer.WriteString(doneEvent)
	f.Provider.Always(append(steps, fakeprovider.Chunk(doneEvent), fakeprovider.LastChunk())...)
	var wg sync.WaitGroup
	work := make(chan int)
	for range 8 {
		wg.Go(func() {
			for range work {
				resp, err := f.Client.Do(f.Request(t.Context(), http.MethodPost, "/v1/chat/completions", ioptest.Chat(true)))
				if err != nil {
					t.Errorf("%v", err)
					continue
				}
				b, err := io.ReadAll(resp.Body)
				resp.Body.Close()
				if err != nil || string(b) != answer.String() {
					t.Errorf("%v: %d bytes of %d", err, len(b), answer.Len())
				}
			}
		})
	}
	for i := range n {
		work <- i
	}
	close(work)
	wg.Wait()
	if got := f.Provider.Executions(); got != n {
		t.Errorf("%d executions for %d calls", got, n)
	}
}
