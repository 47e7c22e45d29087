package e2e

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/fakeprovider"
	"github.com/iop-fabric/iop/internal/ioptest"
)

// toolCall is a request that a coding tool was recorded to send, at its full
// size: testdata holds it with its long texts cut out and their lengths told.
type toolCall struct {
	method, target string
	header         http.Header
	size           int // of the body, as recorded
	body           string
}

// recorded reads what one tool sent.
func recorded(t *testing.T, tool string) []toolCall {
	t.Helper()
	text, err := os.ReadFile("testdata/" + tool + ".txt")
	if err != nil {
		t.Fatal(err)
	}
	var calls []toolCall
	for _, part := range strings.Split(string(text), "### request\n")[1:] {
		head, rest, _ := strings.Cut(part, "\n(transfer-encoding")
		lines := strings.Split(head, "\n")
		first := strings.Fields(lines[0])
		c := toolCall{method: first[0], target: first[1], header: http.Header{}}
		for _, l := range lines[1:] {
			name, value, _ := strings.Cut(l, ": ")
			switch name {
			case "Host", "Connection", "Authorization": // the test's own
			case "Content-Length":
				c.size, err = strconv.Atoi(value)
			default:
				c.header.Add(name, value)
			}
		}
		if _, doc, _ := strings.Cut(rest, "\n"); c.size > 0 {
			c.body = atFullSize(t, doc, c.size)
		}
		if err != nil || len(c.body) != c.size {
			t.Fatalf("%s %s: %v, %d bytes, want %d", c.method, c.target, err, len(c.body), c.size)
		}
		calls = append(calls, c)
	}
	return calls
}

var (
	cutText  = regexp.MustCompile(`"<string of ([0-9]+) chars>"`)
	cutItems = regexp.MustCompile(`"<[0-9]+ more items: ([^>]*)>"`)
)

// atFullSize puts the texts back, of their lengths, and the items that were left
// out. What then lacks of the recorded size the longest text gets: its characters
// were not all of one byte.
func atFullSize(t *testing.T, doc string, size int) string {
	t.Helper()
	var b bytes.Buffer
	if err := json.Compact(&b, []byte(doc)); err != nil {
		t.Fatal(err)
	}
	body := cutItems.ReplaceAllStringFunc(b.String(), func(m string) string {
		return items(strings.Split(cutItems.FindStringSubmatch(m)[1], ", "), strings.Contains(doc, `"input_schema"`), strings.Contains(doc, `"function": {`))
	})
	longest, missing := 0, size-len(body)
	for _, m := range cutText.FindAllStringSubmatch(body, -1) {
		n, err := strconv.Atoi(m[1])
		if err != nil {
			t.Fatal(err)
		}
		longest = max(longest, n)
		missing -= n - (len(m[0]) - len(`""`))
	}
	if longest+missing < 0 {
		t.Fatalf("%d bytes too many", -missing)
	}
	return cutText.ReplaceAllStringFunc(body, func(m string) string {
		n, _ := strconv.Atoi(cutText.FindStringSubmatch(m)[1])
		if n == longest {
			n += missing
			longest = -1 // only the first of that length
		}
		return `"` + filler(n) + `"`
	})
}

// items are tools, or messages, in the words of the API at hand.
func items(names []string, messages, chat bool) string {
	all := make([]string, len(names))
	for i, name := range names {
		switch {
		case name == "message":
			all[i] = `{"type":"message","role":"user","content":[{"type":"input_text","text":"<string of 400 chars>"}]}`
		case name == "web_search":
			all[i] = `{"type":"web_search","external_web_access":false}`
		case messages:
			all[i] = `{"name":"` + name + `","description":"<string of 900 chars>","input_schema":{"type":"object","properties":{}}}`
		case chat:
			all[i] = `{"type":"function","function":{"name":"` + name + `","description":"<string of 900 chars>","parameters":{"type":"object","properties":{}}}}`
		default:
			all[i] = `{"type":"function","name":"` + name + `","description":"<string of 900 chars>","strict":false,"parameters":{"type":"object","properties":{}}}`
		}
	}
	return strings.Join(all, ",")
}

// filler is n bytes of what such texts hold inside their quotes: line ends,
// quotes, escapes of every kind, characters of several bytes, nested JSON.
func filler(n int) string {
	const text = `# Tools\n\nUse \"bash\" with care; paths like C:\\dir\\u0041 stay. \u00e9\ud83d\ude00 é 漢字 😀 {\"model\":\"tiny\",\"stream\":false} </system>\t& `
	var b strings.Builder
	for b.Len()+len(text) <= n {
		b.WriteString(text)
	}
	b.WriteString(strings.Repeat("x", n-b.Len()))
	return b.String()
}

// served starts a fabric whose model tiny is target at the imitation of a server.
func served(t *testing.T, server, profile, target string) (*ioptest.Fabric, *fakeprovider.Provider) {
	t.Helper()
	p := fakeprovider.Imitate(t, server)
	return ioptest.Start(t, ioptest.Options{
		Adapters: []configs.Adapter{{Name: "p", Type: configs.TypeOpenAICompat, BaseURL: p.URL, Profile: profile}},
		Edge: func(e *configs.Edge) {
			n := &e.Nodes[0]
			n.Providers = []configs.Provider{{ID: "tiny", Adapter: "p", Target: target}}
			e.Models = configs.Models{Groups: []configs.ModelGroup{{Name: "tiny", Providers: []configs.ProviderReference{{Provider: n.Name + "/tiny"}}}}}
		},
	}), p
}

func (c toolCall) send(t *testing.T, f *ioptest.Fabric, body, encoding string) (*http.Response, string) {
	t.Helper()
	req := f.Request(t.Context(), c.method, c.target, body)
	for name, values := range c.header {
		req.Header[name] = values
	}
	if encoding != "" {
		req.Header.Set("Content-Encoding", encoding)
	}
	return f.Do(req)
}

// What Claude Code, Codex and opencode send goes to a provider with every byte
// of the body but the model's name, in whatever encoding it came, and with the
// tool's own headers and query; the provider's answer comes back as it was.
//
// Contract: E1 E2 E9 T2 T4 J6
func TestCodingToolsRequestsPass(t *testing.T) {
	const target = "tiny:latest"
	for server, profile := range map[string]string{"ollama": configs.ProfileOllama, "llama-server": configs.ProfileLlamaCPP} {
		f, p := served(t, server, profile, target)
		for _, tool := range []string{"claude-code", "codex", "opencode"} {
			for i, c := range recorded(t, tool) {
				if c.size == 0 {
					if resp, body := c.send(t, f, "", ""); c.method != http.MethodHead || resp.StatusCode != 200 || body != "" {
						t.Errorf("%s: %s %s: %d %q", tool, c.method, c.target, resp.StatusCode, body)
					}
					continue
				}
				for encoding, body := range map[string]string{"": c.body, "gzip": gzipped(t, c.body), "zstd": zstandard(t, c.body)} {
					t.Run(fmt.Sprintf("%s/%s/%d%s", server, tool, i, encoding), func(t *testing.T) {
						before := p.Executions()
						resp, got := c.send(t, f, body, encoding)
						if p.Executions() != before+1 {
							t.Fatalf("the provider was called %d times: %d %s", p.Executions()-before, resp.StatusCode, got)
						}
						r := p.Requests()[before]
						if want := strings.Replace(c.body, `"model":"tiny"`, `"model":"`+target+`"`, 1); string(r.Body) != want {
							t.Errorf("the provider got %d bytes, want %d; they differ from %q on", len(r.Body), len(want), differ(string(r.Body), want))
						}
						path, query, _ := strings.Cut(c.target, "?")
						if r.Method != c.method || r.Path != path || r.RawQuery != query {
							t.Errorf("the provider was asked %s %s?%s", r.Method, r.Path, r.RawQuery)
						}
						if n := r.Header.Get("Content-Length"); n != strconv.Itoa(len(r.Body)) || r.Header.Get("Content-Encoding") != "" || r.Header.Get("Transfer-Encoding") != "" {
							t.Errorf("Content-Length %q for %d bytes, Content-Encoding %q", n, len(r.Body), r.Header.Get("Content-Encoding"))
						}
						for name, values := range c.header {
							if got := r.Header.Values(name); strings.Join(got, "\n") != strings.Join(values, "\n") {
								t.Errorf("%s: %q, want %q", name, got, values)
							}
						}
						want, err := fakeprovider.CaptureFor(server, r)
						if err != nil {
							t.Fatal(err)
						}
						if strconv.Itoa(resp.StatusCode) != strings.Fields(want.Head)[1] || got != want.Answer {
							t.Errorf("%d\ngot  %q\nwant %q", resp.StatusCode, got, want.Answer)
						}
						if want.Answer == "" || !strings.HasPrefix(resp.Header.Get("Content-Type"), "text/event-stream") {
							t.Errorf("no stream was recorded for this: %s", want.Name)
						}
					})
				}
			}
		}
	}
}

// Claude Code counts tokens again and again: a provider that can is asked, and
// where none can the Edge estimates at once.
//
// Contract: E1 E3 E7 T2
func TestA52CountTokens(t *testing.T) {
	call := toolCall{method: http.MethodPost, target: "/v1/messages/count_tokens?beta=true", header: http.Header{"Anthropic-Version": {"2023-06-01"}}}
	const body = `{"model":"tiny","messages":[{"role":"user","content":"hi"}]}`
	f, p := served(t, "llama-server", configs.ProfileLlamaCPP, "tiny")
	if resp, got := call.send(t, f, body, ""); resp.StatusCode != 200 || got != `{"input_tokens":22}` {
		t.Errorf("llama.cpp: %d %s", resp.StatusCode, got)
	}
	if r := p.Requests()[p.Executions()-1]; r.Path != "/v1/messages/count_tokens" || r.RawQuery != "beta=true" {
		t.Errorf("%s?%s", r.Path, r.RawQuery)
	}
	f, p = served(t, "ollama", configs.ProfileOllama, "tiny")
	resp, got := call.send(t, f, body, "")
	if resp.StatusCode != 200 || got != "{\"input_tokens\":15}\n" || resp.Header.Get("X-Iop-Estimate") != "true" {
		t.Errorf("Ollama: %d %s", resp.StatusCode, got)
	}
	if resp, got := f.Do(f.Request(t.Context(), http.MethodPost, "/v1/rerank", body)); resp.StatusCode != 400 || !strings.Contains(got, `"code":"unsupported_operation"`) {
		t.Errorf("Ollama: %d %s", resp.StatusCode, got)
	}
	if n := p.Executions(); n != 0 {
		t.Errorf("Ollama was called %d times", n)
	}
}

// Where some providers of a model can do an operation, only they are asked.
//
// Contract: E3 P1 T2
func TestOnlyWhoCanIsACandidate(t *testing.T) {
	ollama, llama := fakeprovider.Imitate(t, "ollama"), fakeprovider.Imitate(t, "llama-server")
	f := ioptest.Start(t, ioptest.Options{Adapters: []configs.Adapter{
		{Name: "ollama", Type: configs.TypeOpenAICompat, BaseURL: ollama.URL, Profile: configs.ProfileOllama},
		{Name: "llamacpp", Type: configs.TypeOpenAICompat, BaseURL: llama.URL, Profile: configs.ProfileLlamaCPP},
	}})
	for range 6 {
		resp, got := f.Do(f.Request(t.Context(), http.MethodPost, "/v1/messages/count_tokens", `{"model":"tiny","messages":[]}`))
		if resp.StatusCode != 200 {
			t.Fatalf("%d %s", resp.StatusCode, got)
		}
	}
	for _, r := range ollama.Requests() {
		if strings.Contains(r.Path, "count_tokens") {
			t.Fatal("Ollama was asked to count tokens")
		}
	}
}

// Every endpoint's recorded answers pass as they are: those of embeddings with
// the encoding that was asked for, whoever asks.
//
// Contract: E1 E2 T4
func TestA49RecordedAnswersOfEveryEndpoint(t *testing.T) {
	paths := map[string]bool{
		"/v1/completions": true, "/v1/responses": true, "/v1/embeddings": true, "/v1/messages": true, "/v1/messages/count_tokens": true,
	}
	for server, profile := range map[string]string{"ollama": "ollama", "llama-server": "llamacpp"} {
		f, p := served(t, server, profile, "tiny")
		all, err := fakeprovider.Captures(server)
		if err != nil {
			t.Fatal(err)
		}
		seen := map[string]int{}
		for _, c := range all {
			var body struct{ Model string }
			if c.Note != "" || !paths[c.Path] || json.Unmarshal([]byte(c.Body), &body) != nil || body.Model != "tiny" || (server == "ollama" && c.Path == "/v1/messages/count_tokens") {
				continue
			}
			seen[c.Path]++
			resp, got := f.Do(f.Request(t.Context(), c.Method, c.Path, c.Body))
			if strconv.Itoa(resp.StatusCode) != strings.Fields(c.Head)[1] || got != c.Answer {
				t.Errorf("%s/%s: %d\ngot  %q\nwant %q", server, c.Name, resp.StatusCode, got, c.Answer)
			}
		}
		want := len(paths)
		if server == "ollama" {
			want--
		}
		if len(seen) != want {
			t.Errorf("%s: %v", server, seen)
		}
		body := `{"model":"tiny","input":["a"],"encoding_format":"base64"}`
		f.Do(f.Request(t.Context(), http.MethodPost, "/v1/embeddings", body))
		if r := p.Requests()[p.Executions()-1]; string(r.Body) != body {
			t.Errorf("%s: %s", server, r.Body)
		}
	}
}

// Bodies far beyond one message of the broker pass, up to the configured bound.
//
// Contract: T7 J6 E7
func TestA33A34LargeBodies(t *testing.T) {
	f, p := served(t, "llama-server", configs.ProfileLlamaCPP, "tiny")
	for _, size := range []int{1<<20 + 1, 5 << 20} {
		body := `{"model":"tiny","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,` + strings.Repeat("iVBORw0KGgo", size/11) + `"}}]}]}`
		for _, c := range []struct{ path, sent, encoding string }{
			{"/v1/messages", body, ""}, {"/v1/responses", zstandard(t, `{"model":"tiny","input":"`+filler(size)+`"}`), "zstd"},
		} {
			call := toolCall{method: http.MethodPost, target: c.path}
			if resp, got := call.send(t, f, c.sent, c.encoding); resp.StatusCode != 200 {
				t.Fatalf("%s: %d %s", c.path, resp.StatusCode, got)
			}
			if r := p.Requests()[p.Executions()-1]; r.Path != c.path || len(r.Body) < size-11 {
				t.Errorf("%s: %d bytes of %d", r.Path, len(r.Body), size)
			}
		}
	}
	n := p.Executions()
	bomb := gzipped(t, `{"model":"tiny","input":"`+strings.Repeat("0", 65<<20)+`"}`)
	call := toolCall{method: http.MethodPost, target: "/v1/responses"}
	if resp, got := call.send(t, f, bomb, "gzip"); resp.StatusCode != 413 || !strings.Contains(got, "request_too_large") {
		t.Errorf("%d %s", resp.StatusCode, got)
	}
	if p.Executions() != n {
		t.Error("a bomb reached the provider")
	}
}

func gzipped(t *testing.T, s string) string {
	t.Helper()
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	_, err := w.Write([]byte(s))
	if cerr := w.Close(); err != nil || cerr != nil {
		t.Fatal(err, cerr)
	}
	return b.String()
}

func zstandard(t *testing.T, s string) string {
	t.Helper()
	w, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1))
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	return string(w.EncodeAll([]byte(s), nil))
}

// differ is where two texts begin to differ.
func differ(a, b string) string {
	i := 0
	for i < len(a) && i < len(b) && a[i] == b[i] {
		i++
	}
	return a[i:min(len(a), i+40)]
}
