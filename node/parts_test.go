package node

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"pgregory.net/rapid"

	"github.com/iop-fabric/iop/agent"
	"github.com/iop-fabric/iop/internal/bus"
	"github.com/iop-fabric/iop/internal/bus/membus"
	"github.com/iop-fabric/iop/internal/fakeprovider"
	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/wire"
	"github.com/iop-fabric/iop/wire/iopv1"
)

// What cannot be read is absent, never guessed.
//
// Contract: T3
func TestReadUsage(t *testing.T) {
	for in, want := range map[string][5]int64{
		`{"usage":{"prompt_tokens":1,"completion_tokens":2,"total_tokens":3}}`:                                                                                                   {1, 2, 3},
		`{"usage" : { "prompt_tokens" : 1 , "completion_tokens" : 2 } }`:                                                                                                         {1, 2, 3},
		`{"usage":{"prompt_tokens":8,"total_tokens":8}}`:                                                                                                                         {8, 0, 8},
		`{"response":{"usage":{"input_tokens":5,"output_tokens":6,"total_tokens":11}}}`:                                                                                          {5, 6, 11},
		"data: {\"usage\":null}\n\ndata: {\"usage\":{\"prompt_tokens\":1,\"completion_tokens\":1}}":                                                                              {1, 1, 2},
		`{"usage":{"prompt_tokens":9,"completion_tokens":9}} {"usage":null}`:                                                                                                     {9, 9, 18},
		`{"usage":{"prompt_tokens":9,"completion_tokens":5,"total_tokens":14,"prompt_tokens_details":{"cached_tokens":3},"completion_tokens_details":{"reasoning_tokens":2}}}`:   {9, 5, 14, 3, 2},
		`{"usage":{"input_tokens":9,"output_tokens":5,"total_tokens":14,"input_tokens_details":{"cached_tokens":3},"output_tokens_details":{"reasoning_tokens":2}},"x":"usage"}`: {9, 5, 14, 3, 2},
		// Messages: Ollama tells all at the end, llama.cpp and others the input in front.
		`{"type":"message_delta","usage":{"input_tokens":32,"output_tokens":14}}`: {32, 14, 46},
		"data: {\"type\":\"message_start\",\"message\":{\"usage\":{\"input_tokens\":1,\"cache_read_input_tokens\":21,\"output_tokens\":0}}}\n\ndata: {\"type\":\"message_delta\",\"usage\":{\"output_tokens\":14}}": {22, 14, 36, 21},
		`{"type":"message","usage":{"input_tokens":5,"cache_creation_input_tokens":100,"cache_read_input_tokens":7,"output_tokens":3}}`:                                                                             {112, 3, 115, 7},
		`{"type":"message_delta","usage":{"output_tokens":14}}`:                                {0, 14, 0}, // its beginning is out of sight
		`{"object":"list","data":[],"model":"m","usage":{"prompt_tokens":3,"total_tokens":3}}`: {3, 0, 3},
	} {
		u := readUsage([]byte(in))
		got := [5]int64{u.GetInputTokens(), u.GetOutputTokens(), u.GetTotalTokens(), u.GetCachedInputTokens(), u.GetReasoningTokens()}
		if u == nil || got != want {
			t.Errorf("%s: %v", in, got)
		}
	}
	for _, in := range []string{
		``, `usage`, `"usage"`, `{"usage"`, `{"usage":`, `{"usage":{`, `{"usage":null}`, `{"usage":7}`, `{"usage":{}}`,
		`{"usage":{"prompt_tokens":"1"}}`, `{"usage":{"prompt_tokens":-1}}`,
		`{"usage":{"input_tokens":9007199254740993,"output_tokens":1}}`, `{"usage":{"input_tokens":1,"cache_read_input_tokens":-1}}`,
		`{"usage":{"input_tokens":9223372036854775807,"cache_read_input_tokens":9223372036854775807,"output_tokens":3}}`,
		`{"usage":{"prompt_tokens":1.5}}`,
		`{"usage":{"prompt_tokens":1,"completion_tok`, // cut
		`{"content":"{\"usage\":{\"prompt_tokens\":1,\"completion_tokens\":2}}"}`,
		`{"usage":{"prompt_tokens":1}} then {"usage":{"prompt_tokens":`, // the last one is what counts
	} {
		if u := readUsage([]byte(in)); u != nil {
			t.Errorf("%s: guessed %v", in, u)
		}
	}
}

// What Ollama and llama.cpp's server really answered, shape by shape.
//
// Contract: T3
func TestReadUsageOfRecordedAnswers(t *testing.T) {
	for _, c := range []struct {
		server, name   string
		in, out, total int64
	}{
		{"ollama", "v1-chat-stream-usage", 32, 14, 46},
		{"ollama", "v1-completions", 32, 14, 46},
		{"ollama", "v1-embeddings", 3, 0, 3},
		{"ollama", "v1-messages", 32, 14, 46},
		{"ollama", "v1-messages-stream", 32, 14, 46},
		{"ollama", "v1-responses", 32, 14, 46},
		{"ollama", "v1-responses-stream", 32, 14, 46},
		{"llama-server", "v1-messages", 22, 14, 36},
		{"llama-server", "v1-messages-stream", 22, 14, 36},
		{"llama-server", "v1-responses-stream", 22, 14, 36},
		{"llama-server", "v1-completions-stream", 3, 5, 8},
	} {
		all, err := fakeprovider.Captures(c.server)
		if err != nil {
			t.Fatal(err)
		}
		i := slices.IndexFunc(all, func(x fakeprovider.Capture) bool { return x.Name == c.name })
		if i < 0 {
			t.Fatalf("%s/%s is not recorded", c.server, c.name)
		}
		var end tail
		end.write([]byte(all[i].Answer))
		u := readUsage(end.bytes())
		if u.GetInputTokens() != c.in || u.GetOutputTokens() != c.out || u.GetTotalTokens() != c.total {
			t.Errorf("%s/%s: %v", c.server, c.name, u)
		}
	}
}

func FuzzReadUsage(f *testing.F) {
	f.Add([]byte(`data: {"usage":{"prompt_tokens":1,"completion_tokens":2}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		if u := readUsage(b); u != nil && (u.GetInputTokens() < 0 || u.GetTotalTokens() < 0) {
			t.Errorf("%v", u)
		}
	})
}

func TestTailKeepsTheEnd(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var tl tail
		var all []byte
		for i := range rapid.IntRange(1, 40).Draw(t, "writes") {
			p := bytes.Repeat([]byte{byte(i)}, rapid.IntRange(0, 5000).Draw(t, "n"))
			if rapid.IntRange(0, 9).Draw(t, "large") == 0 {
				p = bytes.Repeat([]byte{byte(i)}, 2*tailSize+i)
			}
			tl.write(p)
			all = append(all, p...)
		}
		if want := all[max(0, len(all)-tailSize):]; !bytes.Equal(tl.bytes(), want) || cap(tl.buf) > 2*tailSize {
			t.Fatalf("kept %d of %d", len(tl.bytes()), len(all))
		}
	})
}

func TestIDsAreBounded(t *testing.T) {
	m := newIDs(100, time.Minute)
	now := time.Now()
	for i := range 1000 {
		m.add(fmt.Sprint(i), now)
		m.add(fmt.Sprint(i), now)
	}
	if len(m.at) != 100 || len(m.ring) != 100 || !m.has("999", now) || !m.has("900", now) || m.has("899", now) {
		t.Errorf("%d ids", len(m.at))
	}
	if m.has("999", now.Add(time.Minute)) {
		t.Error("remembered for too long")
	}
}

func TestBuffersFit(t *testing.T) {
	var p buffers
	for _, n := range []int{0, 1, 512, 513, 5000, wire.MaxBody, wire.MaxBody + 400, wire.MaxMessage} {
		for range 3 {
			b := p.get(n)
			if len(b) != n {
				t.Errorf("%d bytes for %d", len(b), n)
			}
			p.put(b)
		}
	}
}

// Names, help texts and label values of the metrics.
//
// Contract: O2
func TestMetrics(t *testing.T) {
	reg := prometheus.NewRegistry()
	m, err := newMetrics(reg)
	must(t, err)
	if problems, err := testutil.GatherAndLint(reg); err != nil || len(problems) > 0 {
		t.Errorf("%v %v", problems, err)
	}
	if len(m.terminals) != len(wire.Classes)+1 {
		t.Errorf("%d classes", len(m.terminals))
	}
	if _, err := newMetrics(reg); err == nil {
		t.Error("registered twice without a word")
	}
}

// The server's own words for a connection.
//
// Contract: G2
func TestAskServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := membus.New()
		server, client := b.Connect("_INBOX.s"), b.Connect("_INBOX.c")
		defer server.Close()
		defer client.Close()
		answer := `{"server":{},"data":{"user":"edge1.node1.5","permissions":{}}}`
		_, err := server.Subscribe(subjects.UserInfo, func(m bus.Msg) { must(t, server.Publish(m.Reply, []byte(answer))) })
		must(t, err)
		user, err := AskServer(t.Context(), client)
		if err != nil || user != "edge1.node1.5" {
			t.Errorf("%q, %v", user, err)
		}
		answer = "no JSON"
		if _, err := AskServer(t.Context(), client); err == nil {
			t.Error("read what is unreadable")
		}
	})
}

// More streams than the Node may hold are refused, and remembered nowhere.
//
// Contract: J8
func TestTooManyStreams(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, options{exchange: hang}).ready()
		defer r.finish()
		s := r.node.link.streams
		s.mu.Lock()
		for len(s.byRun) < maxStreams {
			s.byRun[wire.NewRunID()] = &stream{}
		}
		s.mu.Unlock()
		_, a := r.edge.open(nil)
		synctest.Wait()
		r.edge.wantClass(a, string(wire.Capacity))
		if n := s.count(); n != maxStreams {
			t.Errorf("%d streams", n)
		}
		s.mu.Lock()
		clear(s.byRun)
		s.mu.Unlock()
	})
}

// A body's window shrinks where many share the memory.
//
// Contract: J7
func TestBodyWindowsShareTheirMemory(t *testing.T) {
	s := &streams{}
	for n, want := range map[int]uint64{0: wire.MaxWindow, 63: wire.MaxWindow, 127: 2 << 20, 100000: wire.MinWindow} {
		s.bodies = n
		if got := s.bodyWindow(); got != want {
			t.Errorf("%d bodies: %d", n, got)
		}
	}
}

// What the Node was given to keep to itself is in no log.
//
// Contract: L5
func TestSecretsStayOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const canary = "canary-7731"
		r := newRig(t, options{exchange: func(_ context.Context, _ agent.Exchange, sink agent.Sink) error {
			_ = sink.Start(200, []agent.Field{{Name: "Set-Cookie", Value: []byte(canary)}}, -1)
			_ = sink.Body([]byte(canary))
			panic(canary)
		}}).ready()
		_, a := r.edge.open(func(q *iopv1.ProviderTunnelRequest) {
			q.Headers = []*iopv1.Header{{Name: "Authorization", Value: []byte(canary)}}
			q.Body, q.Path, q.Metadata = []byte(canary), "/"+canary, map[string]string{"k": canary}
			q.BodySize = uint64(len(canary))
		})
		synctest.Wait()
		r.edge.wantClass(a, string(wire.Internal))
		if text := r.edge.got(a)[2].GetError(); strings.Contains(text, canary) {
			t.Errorf("told %q", text)
		}
		r.finish()
		seed, err := r.node.deps.Identity.User.Pair().Seed()
		must(t, err)
		families, err := r.reg.Gather()
		must(t, err)
		for name, where := range map[string]string{"log": r.logs.String(), "metrics": fmt.Sprint(families)} {
			if strings.Contains(where, canary) || strings.Contains(where, string(seed)) {
				t.Errorf("the %s holds a secret", name)
			}
		}
	})
}

// The fingerprint sees every change but the capacity's.
func TestFingerprint(t *testing.T) {
	print := func(c *iopv1.AdapterConfig) string {
		s, err := fingerprint(c)
		must(t, err)
		return s
	}
	base := func() *iopv1.AdapterConfig {
		return &iopv1.AdapterConfig{Name: "a", Type: "ollama", Capacity: 1, Enabled: true, Ollama: &iopv1.OllamaAdapterConfig{BaseUrl: "u", Options: map[string]string{"a": "1", "b": "2", "c": "3"}}}
	}
	var seen []string
	for _, change := range []func(c *iopv1.AdapterConfig){
		func(*iopv1.AdapterConfig) {},
		func(c *iopv1.AdapterConfig) { c.Type = "vllm" },
		func(c *iopv1.AdapterConfig) { c.Ollama.BaseUrl = "v" },
		func(c *iopv1.AdapterConfig) { c.Ollama.Options["a"] = "2" },
		func(c *iopv1.AdapterConfig) { c.Vllm = &iopv1.VllmAdapterConfig{} },
		func(c *iopv1.AdapterConfig) { c.OpenaiCompat = &iopv1.OpenAICompatAdapterConfig{StaticKeyName: "k"} },
	} {
		c := base()
		change(c)
		p := print(c)
		if slices.Contains(seen, p) {
			t.Errorf("unseen: %v", c)
		}
		seen = append(seen, p)
	}
	same := base()
	same.Capacity, same.Enabled = 9, false
	for range 20 {
		if print(same) != seen[0] {
			t.Fatal("the capacity makes another adapter")
		}
	}
}
