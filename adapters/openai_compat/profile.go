package openai_compat

import (
	"fmt"
	"maps"
	"net/http"
	"net/textproto"

	"github.com/iop-fabric/iop/agent"
)

// Operation is one thing a profile can do.
type Operation struct {
	Method    string
	Path      string
	Streaming bool // informs; the body asks for the stream
}

// Profile says how a provider is spoken to. Zero fields mean DefaultProfile's.
type Profile struct {
	Operations map[string]Operation
	AuthHeader string
	AuthPrefix string // goes with AuthHeader: both given, or both defaults
	ModelsPath string // what Probe reads
	Fixed      []agent.Field
}

// DefaultProfile is the OpenAI API as Ollama, vLLM and llama.cpp serve it.
func DefaultProfile() Profile {
	return Profile{
		Operations: map[string]Operation{
			"models":           {Method: http.MethodGet, Path: "/v1/models"},
			"chat_completions": {Method: http.MethodPost, Path: "/v1/chat/completions", Streaming: true},
			"completions":      {Method: http.MethodPost, Path: "/v1/completions", Streaming: true},
			"embeddings":       {Method: http.MethodPost, Path: "/v1/embeddings"},
			"responses":        {Method: http.MethodPost, Path: "/v1/responses", Streaming: true},
			"rerank":           {Method: http.MethodPost, Path: "/v1/rerank"},
			"messages":         {Method: http.MethodPost, Path: "/v1/messages", Streaming: true},
			"count_tokens":     {Method: http.MethodPost, Path: "/v1/messages/count_tokens"},
		},
		AuthHeader: "Authorization",
		AuthPrefix: "Bearer ",
		ModelsPath: "/v1/models",
	}
}

// complete fills in the defaults and returns a checked copy.
func (p Profile) complete() (Profile, error) {
	d := DefaultProfile()
	if p.Operations == nil {
		p.Operations = d.Operations
	}
	p.Operations = maps.Clone(p.Operations)
	if p.AuthHeader == "" {
		p.AuthHeader, p.AuthPrefix = d.AuthHeader, d.AuthPrefix
	}
	if p.ModelsPath == "" {
		p.ModelsPath = d.ModelsPath
		if op, ok := p.Operations["models"]; ok {
			p.ModelsPath = op.Path
		}
	}
	var err error
	for name, op := range p.Operations {
		if !methods[op.Method] {
			return Profile{}, fmt.Errorf("operation %q: unknown method", name)
		}
		if op.Path, err = cleanPath(op.Path); err != nil {
			return Profile{}, fmt.Errorf("operation %q: %w", name, err)
		}
		p.Operations[name] = op
	}
	if p.ModelsPath, err = cleanPath(p.ModelsPath); err != nil {
		return Profile{}, fmt.Errorf("models path: %w", err)
	}
	if !validName(p.AuthHeader) || !validValue(p.AuthPrefix) {
		return Profile{}, fmt.Errorf("auth header: %w", errHeader)
	}
	p.AuthHeader = textproto.CanonicalMIMEHeaderKey(p.AuthHeader)
	fixed := make([]agent.Field, len(p.Fixed))
	for i, f := range p.Fixed {
		if !validName(f.Name) || !validValue(string(f.Value)) {
			return Profile{}, fmt.Errorf("fixed header %d: %w", i, errHeader)
		}
		fixed[i] = agent.Field{Name: textproto.CanonicalMIMEHeaderKey(f.Name), Value: append([]byte(nil), f.Value...)}
	}
	p.Fixed = fixed
	return p, nil
}

// methods are what may be asked of a provider. CONNECT and TRACE are not.
var methods = map[string]bool{
	http.MethodGet: true, http.MethodHead: true, http.MethodPost: true, http.MethodPut: true,
	http.MethodPatch: true, http.MethodDelete: true, http.MethodOptions: true,
}
