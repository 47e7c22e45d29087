package demo

import (
	"encoding/json"
	"errors"
	"strings"
)

type modelList struct {
	Object string       `json:"object"`
	Data   []modelEntry `json:"data"`
}

type modelEntry struct {
	ID      string `json:"id"`
	Object  string `json:"object"`
	Created int64  `json:"created"`
	OwnedBy string `json:"owned_by"`
}

type chatRequest struct {
	Model         string       `json:"model"`
	Messages      []inMessage  `json:"messages"`
	Stream        bool         `json:"stream"`
	StreamOptions streamOption `json:"stream_options"`
	N             *int         `json:"n"`
	MaxTokens     *int         `json:"max_tokens"`
	MaxCompletion *int         `json:"max_completion_tokens"`
}

type streamOption struct {
	IncludeUsage bool `json:"include_usage"`
}

type inMessage struct {
	Role    string `json:"role"`
	Content text   `json:"content"`
}

// text is a message's content: a string, null, or parts of which the text ones count.
type text string

var errContent = errors.New("content is neither text nor parts")

func (t *text) UnmarshalJSON(b []byte) error {
	var s *string
	if json.Unmarshal(b, &s) == nil {
		if s != nil {
			*t = text(*s)
		}
		return nil
	}
	var parts []struct {
		Text string `json:"text"`
	}
	if json.Unmarshal(b, &parts) != nil {
		return errContent
	}
	texts := make([]string, 0, len(parts))
	for _, p := range parts {
		texts = append(texts, p.Text)
	}
	*t = text(strings.Join(texts, " "))
	return nil
}

// lastUser returns the last user message's text.
func (r *chatRequest) lastUser() string {
	for i := len(r.Messages) - 1; i >= 0; i-- {
		if r.Messages[i].Role == "user" {
			return string(r.Messages[i].Content)
		}
	}
	return ""
}

// limit returns how many tokens are allowed, -1 if none is named.
func (r *chatRequest) limit() int {
	switch {
	case r.MaxCompletion != nil:
		return max(*r.MaxCompletion, 0)
	case r.MaxTokens != nil:
		return max(*r.MaxTokens, 0)
	default:
		return -1
	}
}

func (r *chatRequest) tokens() int {
	n := 0
	for _, m := range r.Messages {
		n += count(string(m.Content))
	}
	return n
}

type completion struct {
	ID      string   `json:"id"`
	Object  string   `json:"object"`
	Created int64    `json:"created"`
	Model   string   `json:"model"`
	Choices []choice `json:"choices"`
	Usage   *usage   `json:"usage,omitempty"`
}

type choice struct {
	Index        int      `json:"index"`
	Message      *message `json:"message,omitempty"`
	Delta        *message `json:"delta,omitempty"`
	FinishReason *string  `json:"finish_reason"`
}

type message struct {
	Role    string  `json:"role,omitempty"`
	Content *string `json:"content,omitempty"`
}

type usage struct {
	Prompt     int `json:"prompt_tokens"`
	Completion int `json:"completion_tokens"`
	Total      int `json:"total_tokens"`
}

type errorAnswer struct {
	Error struct {
		Message string  `json:"message"`
		Type    string  `json:"type"`
		Param   *string `json:"param"`
		Code    *string `json:"code"`
	} `json:"error"`
}
