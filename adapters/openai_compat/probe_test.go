package openai_compat

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/iop-fabric/iop/agent"
	fake "github.com/iop-fabric/iop/internal/fakeprovider"
)

// Contract: C3
func TestProbe(t *testing.T) {
	const list = `{"object":"list","data":[{"id":"other"},{"id":"tiny"}]}`
	for _, tc := range []struct {
		name  string
		steps []fake.Step
		want  agent.Health
	}{
		{"listed", fake.JSON(200, list), agent.Available},
		{"not listed", fake.JSON(200, `{"data":[{"id":"tiny:latest"},{"id":"Tiny"},{"id":"tiny "}]}`), agent.Unavailable},
		{"none", fake.JSON(200, `{"data":[]}`), agent.Unavailable},
		{"unauthorized", fake.JSON(401, list), agent.Unknown},
		{"forbidden", fake.JSON(403, list), agent.Unknown},
		{"no such listing", fake.JSON(404, list), agent.Unknown},
		{"too many", fake.JSON(429, list), agent.Unknown},
		{"moved", fake.JSON(302, list, "Location: /"), agent.Unknown},
		{"unreadable", fake.JSON(200, `<html>`), agent.Unknown},
		{"other shape", fake.JSON(200, `{"models":[{"name":"tiny"}]}`), agent.Unknown},
		{"null", fake.JSON(200, `{"data":null}`), agent.Unknown},
		{"endless", fake.JSON(200, `{"data":[`+strings.Repeat(" ", maxListing)+`]}`), agent.Unknown},
		{"error", fake.JSON(500, list), agent.Unavailable},
		{"loading", fake.JSON(503, `{"error":{"message":"Loading model"}}`), agent.Unavailable},
		{"cut", []fake.Step{fake.Head(200, "Content-Length: 1000"), fake.Raw(list), fake.Close()}, agent.Unavailable},
		{"no HTTP", []fake.Step{fake.Raw("hello\r\n"), fake.Close()}, agent.Unavailable},
		{"closes", []fake.Step{fake.Close()}, agent.Unavailable},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := fake.New(t)
			p.Always(tc.steps...)
			a := newAdapter(t, Options{BaseURL: p.URL + "/v1"})
			if got := a.Probe(t.Context(), "tiny"); got != tc.want {
				t.Fatalf("got %s, want %s", got, tc.want)
			}
			if r := p.Requests()[0]; r.Method != "GET" || r.Path != "/v1/models" {
				t.Fatalf("asked %s %s", r.Method, r.Path)
			}
		})
	}
}

// Contract: C3
func TestProbeRefusedAndTimeout(t *testing.T) {
	p := fake.New(t)
	here := make(chan struct{})
	p.Next(fake.Tell(here), fake.Hang())
	a := newAdapter(t, Options{BaseURL: p.URL})
	ctx, cancel := context.WithCancelCause(t.Context())
	got := make(chan agent.Health, 1)
	go func() { got <- a.Probe(ctx, "tiny") }()
	await(t, "the probe", here)
	cancel(context.DeadlineExceeded) // what a timeout's cause is
	if h := <-got; h != agent.Unavailable {
		t.Fatalf("no answer in time: %s", h)
	}
	p.Close()
	if h := a.Probe(t.Context(), "tiny"); h != agent.Unavailable {
		t.Fatalf("refused: %s", h)
	}
	if h := a.Probe(t.Context(), ""); h != agent.Unknown {
		t.Fatalf("no target: %s", h)
	}
	gone, cancelGone := context.WithCancel(t.Context())
	cancelGone()
	if h := a.Probe(gone, "tiny"); h != agent.Unknown {
		t.Fatalf("nobody waits: %s", h)
	}
}

// A probe uses the adapter's own key, and says unknown without it.
func TestProbeKey(t *testing.T) {
	p := fake.New(t)
	p.Always(fake.JSON(200, `{"data":[{"id":"tiny"}]}`)...)
	var missing error
	a := newAdapter(t, Options{BaseURL: p.URL, StaticKey: func() (string, error) { return "k", missing }})
	if h := a.Probe(t.Context(), "tiny"); h != agent.Available || p.Requests()[0].Header.Get("Authorization") != "Bearer k" {
		t.Fatalf("%s, %v", h, p.Requests()[0].Header)
	}
	missing = errors.New("missing")
	if h := a.Probe(t.Context(), "tiny"); h != agent.Unknown || p.Executions() != 1 {
		t.Fatalf("%s", h)
	}
}
