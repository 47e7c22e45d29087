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

// openAIUsage is the two shapes that OpenAI-compatible providers report.
type openAIUsage struct {
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
}

var usageKey = []byte(`"usage"`)

// readUsage finds the last usage object in the end of an answer. What it cannot
// read whole is absent. The key cannot occur within a JSON string: its quotes
// would be escaped there.
func readUsage(end []byte) *iopv1.Usage {
	for {
		i := bytes.LastIndex(end, usageKey)
		if i < 0 {
			return nil
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
		var u openAIUsage
		if json.NewDecoder(bytes.NewReader(rest)).Decode(&u) != nil {
			return nil
		}
		return u.wire()
	}
}

func (u *openAIUsage) wire() *iopv1.Usage {
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
	w := &iopv1.Usage{
		CachedInputTokens: u.PromptD.Cached + u.InputD.Cached,
		ReasoningTokens:   u.CompletionD.Reasoning + u.OutputD.Reasoning,
	}
	if in != nil {
		w.InputTokens = *in
	}
	if out != nil {
		w.OutputTokens = *out
	}
	w.TotalTokens = w.InputTokens + w.OutputTokens
	if u.Total != nil {
		w.TotalTokens = *u.Total
	}
	for _, n := range []int64{w.InputTokens, w.OutputTokens, w.TotalTokens, w.CachedInputTokens, w.ReasoningTokens} {
		if n < 0 {
			return nil
		}
	}
	return w
}
