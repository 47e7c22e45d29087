package configs

import (
	"net/http"
	"slices"
)

// Profile says what a kind of OpenAI-compatible server can do and how it is
// spoken to. The Edge takes the operations from it (a provider that lacks one is
// no candidate for it), and sends it to the Node, which refuses the rest (T2).
type Profile struct {
	ID         string
	Operations []Operation
	AuthHeader string // which header its key goes in
	AuthPrefix string
	ModelsPath string
}

// Operation is one thing a profile can do.
type Operation struct {
	Name      string
	Method    string
	Path      string
	Streaming bool // its answer may be a stream
}

// The profiles an adapter of type openai_compat can have.
const (
	ProfileOpenAI   = "openai"
	ProfileOllama   = "ollama"
	ProfileLlamaCPP = "llamacpp"
	ProfileVLLM     = "vllm"
)

// operations is every operation there is, in the order of the documents.
var operations = []Operation{
	{"models", http.MethodGet, "/v1/models", false},
	{"chat_completions", http.MethodPost, "/v1/chat/completions", true},
	{"completions", http.MethodPost, "/v1/completions", true},
	{"responses", http.MethodPost, "/v1/responses", true},
	{"embeddings", http.MethodPost, "/v1/embeddings", false},
	{"rerank", http.MethodPost, "/v1/rerank", false},
	{"messages", http.MethodPost, "/v1/messages", true},
	{"count_tokens", http.MethodPost, "/v1/messages/count_tokens", false},
}

// lacks is what a server of that profile is known not to have. Of a server that
// only calls itself compatible nothing is known, so nothing is held against it:
// what it lacks it says itself.
var lacks = map[string][]string{
	ProfileOpenAI:   nil,
	ProfileOllama:   {"rerank", "count_tokens"},
	ProfileLlamaCPP: nil,
	ProfileVLLM:     nil,
}

// ProfileIDs names the profiles.
func ProfileIDs() []string {
	return []string{ProfileOpenAI, ProfileOllama, ProfileLlamaCPP, ProfileVLLM}
}

// ProfileOf returns the profile of that name; "" is the default, openai.
func ProfileOf(id string) (Profile, bool) {
	if id == "" {
		id = ProfileOpenAI
	}
	without, ok := lacks[id]
	if !ok {
		return Profile{}, false
	}
	p := Profile{ID: id, AuthHeader: "Authorization", AuthPrefix: "Bearer ", ModelsPath: "/v1/models"}
	for _, op := range operations {
		if !slices.Contains(without, op.Name) {
			p.Operations = append(p.Operations, op)
		}
	}
	return p, true
}

// OperationNames are the names of the profile's operations.
func (p Profile) OperationNames() []string {
	names := make([]string, len(p.Operations))
	for i, op := range p.Operations {
		names[i] = op.Name
	}
	return names
}
