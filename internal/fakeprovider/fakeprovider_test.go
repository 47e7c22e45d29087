package fakeprovider

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const hang = 30 * time.Second

func dial(t *testing.T, p *Provider) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", strings.TrimPrefix(p.URL, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() }) // a second time, mostly
	return c
}

func write(t *testing.T, c net.Conn, s string) {
	t.Helper()
	if _, err := io.WriteString(c, s); err != nil {
		t.Fatal(err)
	}
}

func await(t *testing.T, ch <-chan struct{}) {
	t.Helper()
	select {
	case <-ch:
	case <-time.After(hang):
		t.Fatal("never came")
	}
}

func TestI1RequestsAreRecorded(t *testing.T) {
	p := New(t)
	c := dial(t, p)
	br := bufio.NewReader(c)
	const first = "POST /a%2Fb?x=1 HTTP/1.1\r\nHost: h\r\nX-A: 1\r\nx-a: 2\r\nContent-Length: 3\r\n\r\nabc"
	write(t, c, first[:20])
	write(t, c, first[20:])
	resp, err := http.ReadResponse(br, nil)
	if err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(resp.Body); err != nil || string(b) != "{}" {
		t.Fatalf("%q, %v", b, err)
	}
	write(t, c, "POST /c HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nde\r\n1\r\nf\r\n0\r\n\r\n")
	if _, err := http.ReadResponse(br, nil); err != nil { //nolint:bodyclose // the connection ends with the test
		t.Fatal(err)
	}
	got := p.Requests()
	if len(got) != 2 || p.Executions() != 2 || p.Connections() != 1 {
		t.Fatalf("%d requests on %d connections", len(got), p.Connections())
	}
	r := got[0]
	if r.Method != "POST" || r.Path != "/a%2Fb" || r.RawQuery != "x=1" || string(r.Body) != "abc" || r.Conn != 1 ||
		fmt.Sprint(r.Header["X-A"]) != "[1 2]" || string(r.Head)+"abc" != first {
		t.Fatalf("%+v", r)
	}
	if string(got[1].Body) != "def" || <-p.Received() != r {
		t.Fatalf("%+v", got[1])
	}
	_ = c.Close() // that is the event
	await(t, r.Gone)
	await(t, got[1].Gone)
}

func TestI2BytesLeaveAsWritten(t *testing.T) {
	for name, tc := range map[string]struct {
		steps []Step
		want  string
	}{
		"chunks": {SSE("a\n\n", "b\n\n"), "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n3\r\na\n\n\r\n3\r\nb\n\n\r\n0\r\n\r\n"},
		"raw":    {[]Step{Split(2, "not HTTP\r\r\n")}, "not HTTP\r\r\n"},
		"json":   {JSON(429, "x", "Retry-After: 7"), "HTTP/1.1 429 Too Many Requests\r\nContent-Type: application/json\r\nContent-Length: 1\r\nRetry-After: 7\r\n\r\nx"},
	} {
		p := New(t)
		p.Next(append(tc.steps, Close())...)
		c := dial(t, p)
		write(t, c, "GET / HTTP/1.1\r\nHost: h\r\n\r\n")
		if b, err := io.ReadAll(c); err != nil || string(b) != tc.want {
			t.Errorf("%s: got %q, %v", name, b, err)
		}
	}
}

func TestResetAndHang(t *testing.T) {
	p := New(t)
	p.Next(Reset())
	c := dial(t, p)
	write(t, c, "GET / HTTP/1.1\r\nHost: h\r\n\r\n")
	if _, err := io.ReadAll(c); !errors.Is(err, syscall.ECONNRESET) {
		t.Fatalf("got %v", err)
	}
	p.Next(Hang())
	c = dial(t, p)
	write(t, c, "GET / HTTP/1.1\r\nHost: h\r\n\r\n")
	<-p.Received()
	<-p.Received()
	_ = c.Close() // that is the event
	await(t, p.Requests()[1].Gone)
	p.Next(Hang())
	c = dial(t, p)
	write(t, c, "GET / HTTP/1.1\r\nHost: h\r\n\r\n")
	r := <-p.Received()
	p.Close() // a script that hangs does not hold it
	await(t, r.Gone)
}

func TestCloseIdle(t *testing.T) {
	p := New(t)
	c := dial(t, p)
	br := bufio.NewReader(c)
	for range 2 {
		write(t, c, "GET / HTTP/1.1\r\nHost: h\r\n\r\n")
		resp, err := http.ReadResponse(br, nil)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadAll(resp.Body); err != nil {
			t.Fatal(err)
		}
	}
	p.CloseIdle()
	await(t, func() <-chan struct{} {
		done := make(chan struct{})
		go func() {
			defer close(done)
			for p.CloseIdle() == 0 { // the script's end may be a moment behind its bytes
				if _, err := br.Peek(1); err != nil {
					return
				}
			}
		}()
		return done
	}())
}

func TestCapturesAreReplayedExactly(t *testing.T) {
	for _, server := range []string{"ollama", "llama-server"} {
		all, err := Captures(server)
		if err != nil {
			t.Fatal(err)
		}
		p := Imitate(t, server)
		for _, c := range all {
			if c.Note != "" {
				continue
			}
			conn := dial(t, p)
			write(t, conn, fmt.Sprintf("%s %s HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n%s", c.Method, c.Path, len(c.Body), c.Body))
			head := make([]byte, len(c.Head))
			if _, err := io.ReadFull(conn, head); err != nil || string(head) != c.Head {
				t.Fatalf("%s/%s: head %q, %v", server, c.Name, head, err)
			}
			resp, err := http.ReadResponse(bufio.NewReader(io.MultiReader(strings.NewReader(c.Head), conn)), nil)
			if err != nil {
				t.Fatal(err)
			}
			if b, err := io.ReadAll(resp.Body); err != nil || string(b) != c.Answer {
				t.Errorf("%s/%s: got %q, %v", server, c.Name, b, err)
			}
			_ = conn.Close() // done with it
		}
	}
}

func TestNearestCapture(t *testing.T) {
	for _, tc := range []struct{ server, path, body, want string }{
		{"ollama", "/v1/chat/completions", `{"model":"tiny","messages":[{"role":"user","content":"something else"}]}`, "v1-chat"},
		{"ollama", "/v1/chat/completions", `{"stream":true,"model":"tiny:latest","messages":[]}`, "v1-chat-stream"},
		{"ollama", "/v1/chat/completions", `{"stream":true,"model":"tiny","messages":[{}],"stream_options":{"include_usage":true},"temperature":0}`, "v1-chat-stream-usage"},
		{"ollama", "/v1/chat/completions", `{"model":"gpt","messages":[{}]}`, "v1-chat-missing"},
		{"ollama", "/v1/chat/completions", `nonsense`, "v1-chat-bad-json"},
		{"ollama", "/v1/nothing", ``, "unknown-path"},
		{"llama-server", "/v1/chat/completions", `{"model":"gpt","messages":[{"role":"user","content":"SAY-UTF8 please"}],"stream":true}`, "v1-chat-utf8-stream"},
		{"llama-server", "/v1/chat/completions", `{"model":"tiny","messages":[{"role":"user","content":"x"}],"max_tokens":2}`, "v1-chat-length"},
		{"llama-server", "/v1/chat/completions", `{"model":"tiny","messages":[{"role":"user","content":"x"}],"max_tokens":500,"tools":[{}],"stream":true}`, "v1-chat-tool-stream"},
	} {
		c, err := CaptureFor(tc.server, &Request{Method: "POST", Path: tc.path, Body: []byte(tc.body)})
		if err != nil || c.Name != tc.want {
			t.Errorf("%s %s: got %s, %v, want %s", tc.server, tc.body, c.Name, err, tc.want)
		}
	}
}
