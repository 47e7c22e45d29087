package httpapi

import (
	"context"
	"net/http"
	"strings"
	"testing"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/edge/dispatch"
	"github.com/iop-fabric/iop/wire"
)

const page, otherPage = "https://chat.example", "https://evil.example"

func origins(list ...string) func(*Config) { return func(c *Config) { c.Origins = list } }

// preflighted asks as a browser does before it sends: without a key.
func (f *fixture) preflighted(path, origin, headers string) *http.Response {
	f.Helper()
	resp, body := f.do("OPTIONS", path, "", "Authorization", "", "Origin", origin,
		"Access-Control-Request-Method", "POST", "Access-Control-Request-Headers", headers)
	if body != "" {
		f.Errorf("%q", body)
	}
	return resp
}

// corsOf are the headers of an answer that speak of pages, sorted.
func corsOf(h http.Header) string {
	var b strings.Builder
	for _, name := range []string{"Allow-Origin", "Allow-Methods", "Allow-Headers", "Max-Age", "Allow-Credentials"} {
		if v := h["Access-Control-"+name]; len(v) > 0 {
			b.WriteString(name + "=" + strings.Join(v, "|") + " ")
		}
	}
	return strings.TrimSpace(b.String())
}

// Contract: E9
func TestA36A37ABrowserMayAskWithoutAKey(t *testing.T) {
	const headers = "authorization,content-type,x-stainless-lang,anthropic-version"
	for name, c := range map[string]struct {
		origins              []string
		path, page, headers  string
		status               int
		want                 string
		varyOrigin, varyName bool
	}{
		"nobody is allowed":  {nil, "/v1/chat/completions", page, headers, 204, "", false, false},
		"allowed":            {[]string{"http://a", page}, "/v1/chat/completions", page, headers, 204, "Allow-Origin=" + page + " Allow-Methods=POST, OPTIONS Allow-Headers=" + headers + " Max-Age=600", true, true},
		"not this one":       {[]string{page}, "/v1/chat/completions", otherPage, headers, 204, "", true, false},
		"one that begins so": {[]string{page}, "/v1/chat/completions", page + ".evil.example", headers, 204, "", true, false},
		"an opaque one":      {[]string{page}, "/v1/chat/completions", "null", headers, 204, "", true, false},
		"all":                {[]string{"*"}, "/v1/messages", otherPage, headers, 204, "Allow-Origin=* Allow-Methods=POST, OPTIONS Allow-Headers=" + headers + " Max-Age=600", false, true},
		"the model list":     {[]string{page}, "/v1/models", page, "", 204, "Allow-Origin=" + page + " Allow-Methods=GET, HEAD, OPTIONS Max-Age=600", true, false},
		"what is no name":    {[]string{page}, "/v1/models", page, "a b", 204, "Allow-Origin=" + page + " Allow-Methods=GET, HEAD, OPTIONS Max-Age=600", true, false},
		"too many names":     {[]string{page}, "/v1/models", page, strings.Repeat("a,", maxAsked/2) + "a", 204, "Allow-Origin=" + page + " Allow-Methods=GET, HEAD, OPTIONS Max-Age=600", true, false},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, origins(c.origins...))
			resp := f.preflighted(c.path, c.page, c.headers)
			vary := strings.Join(resp.Header["Vary"], ",")
			if got := corsOf(resp.Header); resp.StatusCode != c.status || got != c.want || resp.Header.Get("X-Request-Id") == "" {
				t.Errorf("%d %q, want %q", resp.StatusCode, got, c.want)
			}
			if strings.Contains(vary, "Origin") != c.varyOrigin || strings.Contains(vary, "Access-Control-Request-Headers") != c.varyName {
				t.Errorf("Vary %q", vary)
			}
		})
	}
	f := newFixture(t, origins(page))
	resp, _ := f.do("OPTIONS", "/v1/models", "", "Origin", page) // asks for nothing
	if got := corsOf(resp.Header); got != "Allow-Origin="+page {
		t.Errorf("%q", got)
	}
}

// A page must be able to read every answer of ours, errors included, and what it
// waits for.
// Contract: E9 E7
func TestA37EveryAnswerCanBeReadByThePage(t *testing.T) {
	f := newFixture(t, origins(page))
	f.runner.answer = func() answerFunc {
		ok := says(200, fields("Content-Type", "application/json"), `{}`)
		bad := says(200, fields("X Y", "1"), "")
		return func(ctx context.Context, a dispatch.Attempt, w dispatch.Writer) dispatch.Result {
			switch a.Operation {
			case opResponses:
				return bad(ctx, a, w)
			case opEmbeddings:
				return dispatch.Result{Err: wire.Errorf(wire.Deadline, "late")}
			}
			return ok(ctx, a, w)
		}
	}()
	for _, c := range []struct {
		method, path, body string
		header             []string
		status             int
	}{
		{"POST", "/v1/chat/completions", plainChat, nil, 200},
		{"POST", "/v1/chat/completions", plainChat, []string{"Authorization", "x"}, 401},
		{"POST", "/v1/chat/completions", "{", nil, 400},
		{"POST", "/v1/messages", "{", nil, 400},
		{"POST", "/v1/responses", plainChat, nil, 502},
		{"POST", "/v1/embeddings", plainChat, nil, 504},
		{"GET", "/v1/models", "", nil, 200},
		{"GET", "/v1/models/nope", "", nil, 404},
		{"GET", "/nothing", "", nil, 404},
		{"DELETE", "/v1/models", "", nil, 405},
		{"GET", "/", "", nil, 200},
	} {
		for _, from := range []string{page, otherPage, ""} {
			resp, _ := f.do(c.method, c.path, c.body, append([]string{"Origin", from}, c.header...)...)
			want := ""
			if from == page {
				want = page
			}
			h := resp.Header
			if resp.StatusCode != c.status || strings.Join(h["Access-Control-Allow-Origin"], "|") != want || strings.Join(h["Vary"], "|") != "Origin" {
				t.Errorf("%s %s from %q: %d %v", c.method, c.path, from, resp.StatusCode, h)
			}
			for _, name := range []string{"x-request-id", "retry-after", "request-id"} {
				if got := strings.Contains(h.Get("Access-Control-Expose-Headers"), name); got != (from == page) {
					t.Errorf("%s %s from %q: %s readable: %v", c.method, c.path, from, name, got)
				}
			}
			if h["Access-Control-Allow-Credentials"] != nil {
				t.Errorf("%v", h)
			}
		}
	}
}

// Contract: E9 T4
func TestAProvidersWordAboutPagesIsReplaced(t *testing.T) {
	theirs := fields("access-control-allow-origin", "*", "Access-Control-Allow-Credentials", "true", "Access-Control-Expose-Headers", "x", "Vary", "Accept, origin")
	for name, c := range map[string]struct {
		change func(*Config)
		status int
		want   string
	}{
		"configured":      {origins(page), 200, "Allow-Origin=" + page},
		"kept back":       {func(c *Config) { c.Origins, c.RetryOn = []string{page}, configs.Statuses{{First: 503, Last: 503}} }, 503, "Allow-Origin=" + page},
		"nothing is ours": {origins(), 200, "Allow-Origin=* Allow-Credentials=true"},
		"of another page": {origins(otherPage), 200, ""},
		"an error passes": {origins(page), 429, "Allow-Origin=" + page},
	} {
		t.Run(name, func(t *testing.T) {
			f := choosing(t, []answerFunc{says(c.status, theirs, "x"), unreachable}, c.change)
			resp, body := f.do("POST", "/v1/chat/completions", plainChat, "Origin", page)
			if got := corsOf(resp.Header); resp.StatusCode != c.status || body != "x" || got != c.want || strings.Join(resp.Header["Vary"], "|") != "Accept, origin" {
				t.Errorf("%d %q, want %q, Vary %q", resp.StatusCode, got, c.want, resp.Header["Vary"])
			}
		})
	}
}
