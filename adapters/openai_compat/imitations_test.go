package openai_compat

import (
	"net/http"
	"strings"
	"testing"

	"github.com/iop-fabric/iop/agent"
	fake "github.com/iop-fabric/iop/internal/fakeprovider"
)

// Every answer that real servers gave passes as it was: status, headers, bytes.
// Contract: T4
func TestRealAnswersPass(t *testing.T) {
	for _, server := range []string{"ollama", "llama-server"} {
		all, err := fake.Captures(server)
		if err != nil {
			t.Fatal(err)
		}
		p := fake.Imitate(t, server)
		a := newAdapter(t, Options{BaseURL: p.URL + "/v1"})
		for _, c := range all {
			if !strings.HasPrefix(c.Path, "/v1/") {
				continue // below /v1 by this base
			}
			if c.Note != "" {
				p.Next(c.Steps()...)
			}
			ex := agent.Exchange{Method: c.Method, Path: c.Path, Body: strings.NewReader(c.Body), BodySize: int64(len(c.Body))}
			var got answer
			if err := a.Exchange(t.Context(), ex, &got); err != nil {
				t.Errorf("%s/%s: %v", server, c.Name, err)
				continue
			}
			if got.body() != c.Answer || got.status < 200 {
				t.Errorf("%s/%s: %d %q", server, c.Name, got.status, got.body())
			}
			for line := range strings.SplitSeq(strings.TrimSpace(c.Head), "\r\n") {
				name, value, ok := strings.Cut(line, ":")
				if !ok || hopByHop[http.CanonicalHeaderKey(name)] {
					continue
				}
				if v := got.values(name); len(v) != 1 || v[0] != strings.TrimSpace(value) {
					t.Errorf("%s/%s: %s is %q, not %q", server, c.Name, name, v, value)
				}
			}
		}
	}
}

// Contract: C3
func TestProbeOfRealServers(t *testing.T) {
	for server, models := range map[string]map[string]agent.Health{
		"ollama":       {"tiny:latest": agent.Available, "tiny": agent.Unavailable},
		"llama-server": {"tiny": agent.Available, "nope": agent.Unavailable},
	} {
		p := fake.Imitate(t, server)
		a := newAdapter(t, Options{BaseURL: p.URL})
		for target, want := range models {
			if got := a.Probe(t.Context(), target); got != want {
				t.Errorf("%s %s: %s, want %s", server, target, got, want)
			}
		}
	}
}
