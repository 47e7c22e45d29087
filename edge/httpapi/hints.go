package httpapi

import (
	"net/http"
	"strings"
)

// What a caller is told beyond the table's message. It may hold what the caller
// sent, so it goes into the answer only, never into a log or a label.

const (
	// hintName is how many characters of a model's name are repeated.
	hintName = 100
	// hintModels is how many models are listed where there are no more.
	hintModels = 5
)

// modelHint names the model that was asked for, and the models there are for
// this key as long as they are few.
func (a *API) modelHint(k *keyState, model string, why reason) string {
	hint := "the model " + quote(clip(model)) + " does not exist here"
	if why == forbidden {
		hint = "this API key may not use the model " + quote(clip(model))
	}
	hint += "; GET /v1/models lists what "
	if why == forbidden {
		hint += "it may use"
	} else {
		hint += "does"
	}
	models := a.modelsOf(k)
	switch {
	case len(models) == 0:
		return hint + ": none at this time"
	case len(models) > hintModels:
		return hint
	}
	for i, m := range models {
		if i == 0 {
			hint += ": "
		} else {
			hint += ", "
		}
		hint += quote(clip(m.ID))
	}
	return hint
}

// clip keeps the first hintName characters of a name.
func clip(name string) string {
	n := 0
	for i := range name {
		if n++; n > hintName {
			return name[:i] + "…"
		}
	}
	return name
}

// elsewhere are the paths of OpenAI's and Anthropic's APIs that are not served
// here, each with all that is below it.
var elsewhere = []string{
	"/v1/assistants", "/v1/audio", "/v1/batches", "/v1/chat/completions", "/v1/chatkit", "/v1/complete", "/v1/containers",
	"/v1/conversations", "/v1/edits", "/v1/engines", "/v1/evals", "/v1/files", "/v1/fine-tunes", "/v1/fine_tuning", "/v1/images",
	"/v1/messages", "/v1/moderations", "/v1/organization", "/v1/organizations", "/v1/realtime", "/v1/responses", "/v1/skills",
	"/v1/threads", "/v1/uploads", "/v1/vector_stores", "/v1/videos",
}

// servedElsewhere reports whether a path that is not served here is one of
// those: its base URL was right.
func servedElsewhere(path string) bool {
	for _, p := range elsewhere {
		if rest, ok := strings.CutPrefix(path, p); ok && (rest == "" || (rest[0] == '/' && len(rest) > 1)) {
			return true
		}
	}
	return false
}

// servedHint lists what is served.
func servedHint() string {
	var b strings.Builder
	b.WriteString("this endpoint is not served here; what is: ")
	for i := range routes {
		r := &routes[i]
		if r.operation == opRoot {
			continue // tells nothing to who calls an API
		}
		if i > 0 {
			b.WriteString(", ")
		}
		b.WriteString(r.method + " " + r.path)
		if r.operation == opModel {
			b.WriteString("{id}")
		}
	}
	return b.String()
}

// pathHint says what is served, or names the base URL that the caller probably
// meant (A46). Anthropic's clients add /v1 themselves.
func pathHint(r *http.Request) string {
	if servedElsewhere(r.URL.EscapedPath()) {
		return servedHint()
	}
	base := ""
	if host := r.Host; host != "" && strings.Trim(host, hostChars) == "" {
		scheme := "http://"
		if r.TLS != nil {
			scheme = "https://"
		}
		base = scheme + host
	}
	hint := "nothing is served at this path; the base URL is " + base + "/v1"
	if base != "" && (strings.Contains(r.URL.Path, "/messages") || len(r.Header["Anthropic-Version"]) > 0) {
		hint = "nothing is served at this path; the base URL of Anthropic clients is " + base
	}
	if strings.HasPrefix(r.URL.Path, "/v1/v1") {
		hint += ", and the path holds /v1 twice"
	}
	return hint
}

const hostChars = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-:[]_"
