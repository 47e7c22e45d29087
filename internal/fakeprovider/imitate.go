package fakeprovider

import (
	"bytes"
	"embed"
	"encoding/json"
	"fmt"
	"io/fs"
	"path"
	"reflect"
	"strconv"
	"strings"
	"testing"
)

// What Ollama 0.17.4 and llama.cpp's server b10573 answered, recorded by curl.
//
//go:embed testdata/captures
var captured embed.FS

// Capture is one recorded exchange.
type Capture struct {
	Name   string // the file's, without .txt
	Note   string // what the request line says beside method and path
	Method string
	Path   string
	Body   string // the request's
	Head   string // the answer's status line and headers, to the blank line
	Answer string // the answer's body, without its framing
	// Chunked answers go out one event per chunk, as both servers send them.
	Chunked bool
}

// Captures returns the recorded exchanges of "ollama" or "llama-server".
func Captures(server string) ([]Capture, error) {
	dir := path.Join("testdata/captures", server)
	entries, err := fs.ReadDir(captured, dir)
	if err != nil {
		return nil, fmt.Errorf("captures: %w", err)
	}
	all := make([]Capture, 0, len(entries))
	for _, e := range entries {
		b, err := fs.ReadFile(captured, path.Join(dir, e.Name()))
		if err != nil {
			return nil, fmt.Errorf("captures: %w", err)
		}
		c, err := parseCapture(string(b))
		if err != nil {
			return nil, fmt.Errorf("capture %s/%s: %w", server, e.Name(), err)
		}
		c.Name = strings.TrimSuffix(e.Name(), ".txt")
		all = append(all, c)
	}
	return all, nil
}

// parseCapture reads what the recorder wrote: "> METHOD PATH", "> BODY" where
// there is one, a blank line, the answer as curl -i shows it, and a newline.
func parseCapture(s string) (Capture, error) {
	var c Capture
	lines, answer, ok := strings.Cut(s, "HTTP/1.1 ")
	if !ok {
		return c, fmt.Errorf("no answer")
	}
	for i, line := range strings.Split(strings.TrimRight(lines, "\n"), "\n") {
		line, ok := strings.CutPrefix(line, "> ")
		if !ok {
			return c, fmt.Errorf("line %d is none of the request's", i+1)
		}
		if i > 0 {
			c.Body += line
			continue
		}
		c.Method, line, _ = strings.Cut(line, " ")
		c.Path, c.Note, _ = strings.Cut(line, " ")
		c.Path = strings.TrimSuffix(c.Path, ",")
	}
	head, body, ok := strings.Cut("HTTP/1.1 "+answer, "\r\n\r\n")
	if !ok {
		return c, fmt.Errorf("the answer's head has no end")
	}
	c.Head = head + "\r\n\r\n"
	if n := headValue([]byte(head), "Content-Length"); n != "" {
		size, err := strconv.Atoi(strings.TrimSpace(n))
		if err != nil || size > len(body) {
			return c, fmt.Errorf("announced %q, holds %d bytes", n, len(body))
		}
		c.Answer = body[:size]
		return c, nil
	}
	c.Chunked = strings.Contains(headValue([]byte(head), "Transfer-Encoding"), "chunked")
	c.Answer = strings.TrimSuffix(body, "\n")
	return c, nil
}

// Steps answers as the server did: its very head, its bytes, its framing.
func (c Capture) Steps() []Step {
	steps := []Step{Raw(c.Head)}
	if c.Chunked {
		for _, event := range c.Chunks() {
			steps = append(steps, Chunk(event))
		}
		steps = append(steps, LastChunk())
	} else if c.Answer != "" {
		steps = append(steps, Raw(c.Answer))
	}
	if strings.EqualFold(strings.TrimSpace(headValue([]byte(c.Head), "Connection")), "close") {
		steps = append(steps, Close())
	}
	return steps
}

// Chunks returns the answer as it was chunked, one event each.
func (c Capture) Chunks() []string {
	chunks := strings.SplitAfter(c.Answer, "\n\n")
	if chunks[len(chunks)-1] == "" {
		chunks = chunks[:len(chunks)-1]
	}
	return chunks
}

// Imitate starts a provider that answers as server ("ollama" or "llama-server")
// did: a recorded request gets its very answer, another one of its path the
// answer of the one that is most like it.
func Imitate(t testing.TB, server string) *Provider {
	t.Helper()
	all, err := Captures(server)
	if err != nil {
		t.Fatal(err)
	}
	p := New(t)
	p.Handle(func(r *Request) []Step { return choose(server, all, r).Steps() })
	return p
}

// CaptureFor returns the exchange that Imitate would answer r from.
func CaptureFor(server string, r *Request) (Capture, error) {
	all, err := Captures(server)
	if err != nil {
		return Capture{}, err
	}
	return choose(server, all, r), nil
}

func choose(server string, all []Capture, r *Request) Capture {
	best, bestScore := -1, 0
	for i, c := range all {
		if c.Note != "" || c.Method != r.Method || c.Path != r.Path {
			continue
		}
		if equalJSON([]byte(c.Body), r.Body) {
			return c
		}
		score := difference(features(server, []byte(c.Body)), features(server, r.Body))
		if best < 0 || score < bestScore {
			best, bestScore = i, score
		}
	}
	if best >= 0 {
		return all[best]
	}
	for _, c := range all {
		if c.Name == "unknown-path" {
			return c
		}
	}
	panic("BUG: fakeprovider: the captures lack unknown-path")
}

func equalJSON(a, b []byte) bool {
	if bytes.Equal(a, b) {
		return true
	}
	var va, vb any
	return json.Unmarshal(a, &va) == nil && json.Unmarshal(b, &vb) == nil && reflect.DeepEqual(va, vb)
}

// scripted is how many tokens the recorded model says hello in: a lower limit
// cuts it off.
const scripted = 14

// features are what an answer depends on.
func features(server string, body []byte) map[string]bool {
	f := map[string]bool{}
	var v struct {
		Model         string          `json:"model"`
		Messages      json.RawMessage `json:"messages"`
		Stream        bool            `json:"stream"`
		StreamOptions struct {
			IncludeUsage bool `json:"include_usage"`
		} `json:"stream_options"`
		Tools          []json.RawMessage `json:"tools"`
		MaxTokens      *int              `json:"max_tokens"`
		MaxCompletion  *int              `json:"max_completion_tokens"`
		N              int               `json:"n"`
		Logprobs       bool              `json:"logprobs"`
		ResponseFormat struct {
			Type string `json:"type"`
		} `json:"response_format"`
	}
	if json.Unmarshal(body, &v) != nil {
		f["broken"] = true
		return f
	}
	set := func(name string, on bool) {
		if on {
			f[name] = true
		}
	}
	set("no messages", len(v.Messages) == 0)
	set("messages of a wrong type", len(v.Messages) > 0 && v.Messages[0] != '[')
	set("unknown model", server == "ollama" && !strings.HasPrefix(v.Model, "tiny"))
	set("stream", v.Stream)
	set("usage", v.StreamOptions.IncludeUsage)
	set("tools", len(v.Tools) > 0)
	set("tool result", bytes.Contains(v.Messages, []byte(`"tool_call_id"`)))
	set("limit", (v.MaxTokens != nil && *v.MaxTokens < scripted) || (v.MaxCompletion != nil && *v.MaxCompletion < scripted))
	set("n", v.N > 1)
	set("logprobs", v.Logprobs)
	set("json", v.ResponseFormat.Type != "" && v.ResponseFormat.Type != "text")
	for _, say := range []string{"SAY-THINK", "SAY-UTF8", "SAY-JSON"} {
		set(say, bytes.Contains(v.Messages, []byte(say)))
	}
	return f
}

func difference(a, b map[string]bool) int {
	n := 0
	for k := range a {
		if !b[k] {
			n++
		}
	}
	for k := range b {
		if !a[k] {
			n++
		}
	}
	return n
}
