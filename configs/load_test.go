package configs

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"
	"pgregory.net/rapid"
)

func mustParse(t *testing.T, data string) *File {
	t.Helper()
	f, err := Parse("test.yaml", []byte(data))
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func TestSamplesParse(t *testing.T) {
	paths, err := filepath.Glob("samples/*.yaml")
	if err != nil || len(paths) < 5 {
		t.Fatalf("samples: %v, %v", paths, err)
	}
	for _, path := range paths {
		if _, err := Load(path); err != nil {
			t.Errorf("%s:\n%v", path, err)
		}
	}
}

func sample(t *testing.T, name string) *File {
	t.Helper()
	f, err := Load("samples/" + name + ".yaml")
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func TestSampleSaysWhatItMeans(t *testing.T) {
	e := sample(t, "edge").Edge
	p := e.Nodes[0].Providers[0]
	if p.ID != "vllm/Qwen/Qwen3-32B" || p.Capacity != 32 || p.LongCapacity != 4 || p.LongThreshold != 16000 || p.StallTimeout != 5*time.Minute {
		t.Errorf("provider: %+v", p)
	}
	if e.Models.Auto || len(e.Models.Groups) != 1 || e.Models.Groups[0].Providers[0].Weight != 3 || e.Models.Groups[0].Providers[1].Weight != 1 {
		t.Errorf("models: %+v", e.Models)
	}
	if r := e.Models.Groups[0].RetryOn; !r.Has(429) || !r.Has(503) || r.Has(400) || e.RetryOn != nil {
		t.Errorf("retry_on: %v, %v", r, e.RetryOn)
	}
	if want := filepath.Join("samples", "pki", "callers.key"); e.TLS.Key != want || len(e.Proxies()) != 1 || e.Proxies()[0].String() != "10.0.0.0/8" {
		t.Errorf("callers: %+v, %v", e.TLS, e.Proxies())
	}
	if want := filepath.Join("samples", "pki", "gateway.key"); e.Broker.TLS.Key != want {
		t.Errorf("key path %q, want %q", e.Broker.TLS.Key, want)
	}
	if n := sample(t, "node").Node; *n.Reconnect.MaxAttempts != 0 || *n.Reconnect.IntervalSec != 10 {
		t.Errorf("reconnect: %d, %d", *n.Reconnect.MaxAttempts, *n.Reconnect.IntervalSec)
	}
	if s := sample(t, "single"); !s.Edge.Models.Auto || !s.Edge.Nodes[0].Adapters[1].Fallback || s.Edge.Nodes[0].Adapters[1].Capacity != 64 {
		t.Errorf("single: %+v", s.Edge)
	}
}

// The comments in types.go say the defaults; this says them once more, so that
// neither changes alone.
func TestDefaults(t *testing.T) {
	f := mustParse(t, `
broker:
edge: {name: home, nodes: [{name: desk, adapters: [{type: demo}, {type: openai_compat, base_url: "http://h/v1"}], providers: [{adapter: openai_compat, target: m}]}]}
node: {name: desk, edge: home}
`)
	want := &File{
		Log:    Log{Level: "info", Format: "text"},
		Broker: &Broker{Name: "broker", Listen: "127.0.0.1:4222", TrustDomain: "iop", HeartbeatBound: 5 * time.Second},
		Edge: &Edge{
			Name: "home", Listen: "127.0.0.1:8400", AdminListen: "127.0.0.1:8401", TrustDomain: "iop",
			Models: Models{Auto: true},
			Nodes: []EdgeNode{{
				Name: "desk",
				Adapters: []Adapter{
					{Name: "demo", Type: "demo", Capacity: 64},
					{Name: "openai_compat", Type: "openai_compat", BaseURL: "http://h/v1", Profile: ProfileOpenAI, Capacity: 8},
				},
				Providers: []Provider{{ID: "openai_compat/m", Adapter: "openai_compat", Target: "m", Capacity: 8}},
			}},
			Queue: Queue{Depth: 1000, Wait: 5 * time.Minute},
			Limits: Limits{
				Body: 64 << 20, BodyMemory: 1 << 20, BodiesTotal: 4 << 30, Header: 64 << 10, ReadHeader: 10 * time.Second,
				Idle: 2 * time.Minute, WriteStall: 2 * time.Minute, Streams: 1 << 30,
			},
			HeartbeatInterval: time.Second, HeartbeatBound: 5 * time.Second, PendingBound: 30 * time.Second,
			DiscoverInterval: 5 * time.Second, StopGrace: 10 * time.Second,
		},
		Node: &Node{
			Name: "desk", Edge: "home", TrustDomain: "iop", StopGrace: 10 * time.Second,
			Reconnect: Reconnect{MaxAttempts: new(0), IntervalSec: new(2)},
		},
	}
	if !reflect.DeepEqual(f, want) {
		t.Errorf("got  %+v\n     %+v\n     %+v\nwant %+v\n     %+v\n     %+v", *f.Broker, *f.Edge, *f.Node, *want.Broker, *want.Edge, *want.Node)
	}
}

func TestCompleteIsWhatParseDoes(t *testing.T) {
	f := &File{Broker: new(Broker), Edge: &Edge{Name: "home"}}
	if err := f.Complete(); err != nil {
		t.Fatal(err)
	}
	if want := mustParse(t, "broker:\nedge: {name: home}\n"); !reflect.DeepEqual(f, want) {
		t.Errorf("got %+v, want %+v", f, want)
	}
	f.Edge.Name = "No"
	err := f.Validate()
	if err == nil || !strings.HasPrefix(err.Error(), "edge.name: ") {
		t.Errorf("got %v", err)
	}
}

// I3: the order of keys means nothing.
func TestI3OrderOfKeys(t *testing.T) {
	data, err := os.ReadFile("samples/edge.yaml")
	if err != nil {
		t.Fatal(err)
	}
	want, err := Parse("edge.yaml", data)
	if err != nil {
		t.Fatal(err)
	}
	rapid.Check(t, func(t *rapid.T) {
		var doc yaml.Node
		if err := yaml.Unmarshal(data, &doc); err != nil {
			t.Fatal(err)
		}
		shuffle(t, &doc)
		shuffled, err := yaml.Marshal(&doc)
		if err != nil {
			t.Fatal(err)
		}
		got, err := Parse("edge.yaml", shuffled)
		if err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(got, want) {
			t.Fatalf("another value from\n%s", shuffled)
		}
	})
}

func shuffle(t *rapid.T, n *yaml.Node) {
	if n.Kind == yaml.MappingNode {
		var pairs [][2]*yaml.Node
		for i := 0; i < len(n.Content); i += 2 {
			pairs = append(pairs, [2]*yaml.Node{n.Content[i], n.Content[i+1]})
		}
		n.Content = n.Content[:0]
		for _, p := range rapid.Permutation(pairs).Draw(t, "order") {
			n.Content = append(n.Content, p[0], p[1])
		}
	}
	for _, c := range n.Content {
		shuffle(t, c)
	}
}

func TestLoadSaysThatTheFileIsMissing(t *testing.T) {
	path := filepath.Join(t.TempDir(), "none.yaml")
	if _, err := Load(path); err == nil || !strings.Contains(err.Error(), path) {
		t.Errorf("got %v", err)
	}
}

// The Node of an iop up never gives up, whatever else its section says; one of its own
// process does after ten dials.
//
// Contract: S3
func TestTheNodeOfAnUpNeverGivesUp(t *testing.T) {
	one := &File{Broker: &Broker{}, Edge: &Edge{}, Node: &Node{Name: "here"}}
	one.applyDefaults()
	alone := &File{Node: &Node{Name: "here"}}
	alone.applyDefaults()
	if a, b := *one.Node.Reconnect.MaxAttempts, *alone.Node.Reconnect.MaxAttempts; a != 0 || b != 10 {
		t.Errorf("%d and %d attempts", a, b)
	}
}
