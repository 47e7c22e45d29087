package node

import (
	"bytes"
	"encoding/json"

	"github.com/iop-fabric/iop/wire/iopv1"
)

// tailSize is how much of an answer's end is kept to read its usage from (T3).
const tailSize = 16 << 10

// tail keeps the last tailSize bytes of what was written to it. It grows with
// the answer, so a short one costs little.
type tail struct {
	buf []byte
	pos int // where the oldest byte stands, once buf is full
}

func (t *tail) write(p []byte) {
	if len(p) > tailSize {
		p = p[len(p)-tailSize:]
	}
	if free := tailSize - len(t.buf); free > 0 {
		n := min(free, len(p))
		t.buf = append(t.buf, p[:n]...)
		p = p[n:]
	}
	for len(p) > 0 {
		n := copy(t.buf[t.pos:], p)
		t.pos = (t.pos + n) % tailSize
		p = p[n:]
	}
}

// bytes returns what is kept, in order.
func (t *tail) bytes() []byte {
	if t.pos == 0 {
		return t.buf
	}
	return append(append(make([]byte, 0, len(t.buf)), t.buf[t.pos:]...), t.buf[:t.pos]...)
}

// usage is what providers report, in every shape: chat completions, completions,
// embeddings and rerank count prompt and completion tokens, responses and messages
// input and output tokens.
type usage struct {
	Prompt     *int64 `json:"prompt_tokens"`
	Completion *int64 `json:"completion_tokens"`
	Input      *int64 `json:"input_tokens"`
	Output     *int64 `json:"output_tokens"`
	Total      *int64 `json:"total_tokens"`
	PromptD    struct {
		Cached int64 `json:"cached_tokens"`
	} `json:"prompt_tokens_details"`
	InputD struct {
		Cached int64 `json:"cached_tokens"`
	} `json:"input_tokens_details"`
	CompletionD struct {
		Reasoning int64 `json:"reasoning_tokens"`
	} `json:"completion_tokens_details"`
	OutputD struct {
		Reasoning int64 `json:"reasoning_tokens"`
	} `json:"output_tokens_details"`
	// Anthropic's input tokens leave out what a cache took part in.
	CacheRead  int64 `json:"cache_read_input_tokens"`
	CacheWrite int64 `json:"cache_creation_input_tokens"`
}

var usageKey = []byte(`"usage"`)

// readUsage finds the last usage object in the end of an answer. What it cannot
// read whole is absent. A messages stream may tell the output in its last event
// and the input only in its first; where that is still within the end, both count.
func readUsage(end []byte) *iopv1.Usage {
	u, end := lastUsage(end)
	if u == nil {
		return nil
	}
	for u.Output != nil && u.Input == nil && u.Prompt == nil {
		var first *usage
		if first, end = lastUsage(end); first == nil {
			break
		}
		u.Input, u.CacheRead, u.CacheWrite = first.Input, first.CacheRead, first.CacheWrite
	}
	return u.wire()
}

// lastUsage finds the last usage object and what stands before it; nil: there is
// none, or it cannot be read. The key cannot occur within a JSON string: its
// quotes would be escaped there.
func lastUsage(end []byte) (u *usage, before []byte) {
	for {
		i := bytes.LastIndex(end, usageKey)
		if i < 0 {
			return nil, nil
		}
		rest := bytes.TrimLeft(end[i+len(usageKey):], " \t\r\n")
		end = end[:i]
		if len(rest) == 0 || rest[0] != ':' {
			continue
		}
		rest = bytes.TrimLeft(rest[1:], " \t\r\n")
		if len(rest) == 0 || rest[0] != '{' {
			continue // null, in every event of a stream but the last
		}
		u = new(usage)
		if json.NewDecoder(bytes.NewReader(rest)).Decode(u) != nil {
			return nil, nil
		}
		return u, end
	}
}

// mostTokens is beyond any count that is one.
const mostTokens = 1 << 53

func (u *usage) wire() *iopv1.Usage {
	in, out := u.Prompt, u.Completion
	if in == nil {
		in = u.Input
	}
	if out == nil {
		out = u.Output
	}
	if in == nil && out == nil {
		return nil
	}
	for _, n := range []int64{
		value(in), value(out), value(u.Total), u.PromptD.Cached, u.InputD.Cached,
		u.CompletionD.Reasoning, u.OutputD.Reasoning, u.CacheRead, u.CacheWrite,
	} {
		if n < 0 || n > mostTokens {
			return nil
		}
	}
	w := &iopv1.Usage{
		OutputTokens:      value(out),
		CachedInputTokens: u.PromptD.Cached + u.InputD.Cached + u.CacheRead,
		ReasoningTokens:   u.CompletionD.Reasoning + u.OutputD.Reasoning,
	}
	if in != nil {
		w.InputTokens = *in + u.CacheRead + u.CacheWrite
	}
	switch {
	case u.Total != nil:
		w.TotalTokens = *u.Total
	case in != nil && out != nil: // of one alone there is no telling
		w.TotalTokens = w.InputTokens + w.OutputTokens
	}
	return w
}

func value(n *int64) int64 {
	if n == nil {
		return 0
	}
	return *n
}
