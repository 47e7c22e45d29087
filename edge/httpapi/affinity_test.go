package httpapi

import (
	"strings"
	"testing"
)

// Contract: Q1
func TestWhatARequestBelongsToIsAHint(t *testing.T) {
	f := newFixture(t)
	const session = "session-canary-1"
	keyed := func(key string) string { return `{"model":"tiny","prompt_cache_key":"` + key + `"}` }
	for name, c := range map[string]struct {
		doc    string
		header []string
		like   string // what it must be equal to; empty: no hint at all
	}{
		"nothing":               {plainChat, nil, ""},
		"a cache key":           {keyed(session), nil, session},
		"before a session":      {keyed(session), []string{"X-Session-Id", "other"}, session},
		"opencode":              {plainChat, []string{"X-Session-Affinity", session}, session},
		"opencode, both":        {plainChat, []string{"X-Session-Affinity", session, "X-Session-Id", "other"}, session},
		"a session":             {plainChat, []string{"X-Session-Id", session}, session},
		"codex":                 {plainChat, []string{"Session-Id", session}, session},
		"claude code":           {plainChat, []string{"X-Claude-Code-Session-Id", session}, session},
		"a key of no use":       {`{"model":"tiny","prompt_cache_key":7}`, nil, ""},
		"a key inside":          {`{"model":"tiny","metadata":{"prompt_cache_key":"x"}}`, nil, ""},
		"a key that is a list":  {`{"model":"tiny","prompt_cache_key":["x"]}`, nil, ""},
		"a key without an end":  {keyed(strings.Repeat("k", maxCacheKey+1)), nil, ""},
		"the longest key":       {keyed(strings.Repeat("k", maxCacheKey)), nil, strings.Repeat("k", maxCacheKey)},
		"a key before the name": {`{"prompt_cache_key":"` + session + `","model":"tiny"}`, nil, session},
	} {
		f.pool.wants = nil
		if resp, body := f.do("POST", "/v1/responses", c.doc, c.header...); resp.StatusCode != 200 {
			t.Fatalf("%s: %d %s", name, resp.StatusCode, body)
		}
		want := ""
		if c.like != "" {
			want = affinityOf("alice", nil, c.like)
		}
		if got := f.pool.wants[0].Affinity; got != want || f.pool.wants[0].Model != "tiny" {
			t.Errorf("%s: %x, want %x", name, got, want)
		}
	}
	if affinityOf("alice", nil, session) == affinityOf("bob", nil, session) {
		t.Error("two principals share a hint")
	}
	f.logged(14)
	if strings.Contains(f.logs.String(), "canary") {
		t.Error("the session is in the log")
	}
}
