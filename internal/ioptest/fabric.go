package ioptest

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/fakeprovider"
	"github.com/iop-fabric/iop/internal/identity"
	"github.com/iop-fabric/iop/internal/up"
	"github.com/iop-fabric/iop/node"
)

// Model is what the scripted provider of a Fabric serves.
const Model = "m"

// Hang is how long a test waits for an event that must come. It is no
// measurement: only a broken fabric takes as long.
const Hang = 30 * time.Second

// Options change what Start starts.
type Options struct {
	// Edge and Broker edit the configuration before it is completed.
	Edge   func(*configs.Edge)
	Broker func(*configs.Broker)
	// Nodes are further nodes the Edge and the broker know; StartNode runs one.
	Nodes []configs.EdgeNode
	// Adapters of the fabric's own node; none: one for Provider.
	Adapters []configs.Adapter
	// Proxy stands between the fabric's own node and the broker.
	Proxy bool
	// Quiet logs warnings alone: for benchmarks.
	Quiet bool
	// NoWait returns once callers are served, whatever is on offer.
	NoWait bool
}

// Fabric is a running one.
type Fabric struct {
	*up.Fabric
	Info     up.Info
	Folder   up.Folder
	Provider *fakeprovider.Provider
	Proxy    *Proxy
	Client   *http.Client
	Log      *LogBuffer

	t    testing.TB
	cfg  *configs.File
	stop context.CancelFunc
	done chan struct{}
	err  error
}

// Start starts a fabric that serves Model from a scripted provider.
func Start(t testing.TB, o Options) *Fabric {
	t.Helper()
	f := &Fabric{t: t, Folder: up.Folder(t.TempDir()), done: make(chan struct{}), Log: &LogBuffer{}}
	f.Provider = fakeprovider.New(t)
	if o.Adapters == nil {
		o.Adapters = []configs.Adapter{{Name: "p", Type: configs.TypeOpenAICompat, BaseURL: f.Provider.URL, Capacity: 8}}
	}
	edge, nodeName := up.DefaultEdge, up.DefaultNode
	must(t, up.Prepare(f.Folder, edge, nodeName))
	file := &configs.File{
		Broker: &configs.Broker{},
		Edge: &configs.Edge{
			Nodes:  append([]configs.EdgeNode{{Name: nodeName, Adapters: o.Adapters}}, o.Nodes...),
			Models: configs.Models{Groups: []configs.ModelGroup{}}, DiscoverInterval: 100 * time.Millisecond,
		},
		Node: &configs.Node{},
	}
	if len(o.Adapters) > 0 && o.Adapters[0].BaseURL == f.Provider.URL {
		// The scripted provider lists nothing: its one target is configured.
		n := &file.Edge.Nodes[0]
		n.Providers = append(n.Providers, configs.Provider{ID: "m", Adapter: o.Adapters[0].Name, Target: Model})
		file.Edge.Models.Groups = append(file.Edge.Models.Groups, configs.ModelGroup{
			Name: Model, Providers: []configs.ProviderReference{{Provider: nodeName + "/m"}},
		})
	} else {
		file.Edge.Models = configs.Models{Auto: true}
	}
	if o.Edge != nil {
		o.Edge(file.Edge)
	}
	if o.Broker != nil {
		o.Broker(file.Broker)
	}
	for _, n := range o.Nodes {
		file.Broker.Members = append(file.Broker.Members, f.makeNode(edge, n.Name))
	}
	var running atomic.Pointer[up.Fabric]
	if o.Proxy {
		f.Proxy = NewProxy(t, func() string {
			if fabric := running.Load(); fabric != nil {
				return strings.TrimPrefix(fabric.Broker.ClientURL(), "tls://")
			}
			return ""
		})
		file.Node.Broker.URLs = []string{"tls://" + f.Proxy.Addr()}
	}
	cfg, err := up.Config(up.Options{
		Folder: f.Folder, File: file,
		Listen: "127.0.0.1:0", AdminListen: "127.0.0.1:0", BrokerListen: "127.0.0.1:0",
	})
	must(t, err)
	f.cfg = cfg
	level := slog.LevelDebug
	if o.Quiet {
		level = slog.LevelWarn
	}
	log := slog.New(slog.NewTextHandler(f.Log, &slog.HandlerOptions{Level: level}))
	f.Fabric, err = up.Build(cfg, log)
	must(t, err)
	running.Store(f.Fabric)
	ctx, cancel := context.WithCancel(context.Background())
	f.stop = cancel
	ready := make(chan struct{})
	go func() {
		defer close(f.done)
		f.err = f.Run(ctx, func() { close(ready) })
	}()
	t.Cleanup(f.Stop)
	served := ready
	if o.NoWait {
		served = nil
		select {
		case <-f.Edge.Ready():
		case <-f.done:
			t.Fatalf("the fabric ended: %v", f.err)
		}
	}
	if served != nil {
		f.Wait(ready, "the fabric to serve")
	}
	f.Info = f.Fabric.Info(f.Folder)
	f.Client = &http.Client{Transport: &http.Transport{DisableCompression: true, MaxIdleConnsPerHost: 64}}
	t.Cleanup(f.Client.CloseIdleConnections)
	if served != nil && !o.Quiet {
		f.WaitNode(nodeName)
	}
	return f
}

// Stop stops the fabric and waits until everything has ended.
func (f *Fabric) Stop() {
	f.stop()
	select {
	case <-f.done:
	case <-time.After(Hang):
		f.t.Error("the fabric does not stop")
		return
	}
	if f.err != nil {
		f.t.Errorf("the fabric ended with %v", f.err)
	}
	if f.t.Failed() {
		f.t.Log("log of the fabric:\n" + f.Log.String())
	}
}

// Wait waits for an event.
func (f *Fabric) Wait(ch <-chan struct{}, what string) {
	f.t.Helper()
	select {
	case <-ch:
	case <-f.done:
		f.t.Fatalf("waiting for %s, the fabric ended: %v\n%s", what, f.err, f.Log)
	case <-time.After(Hang):
		f.t.Fatalf("waiting for %s\n%s", what, f.Log)
	}
}

// WaitNode waits until the node's session is ready.
func (f *Fabric) WaitNode(name string) uint64 {
	f.t.Helper()
	return f.Log.AwaitSession(f.t, name, 0)
}

// Request makes a caller's request.
func (f *Fabric) Request(ctx context.Context, method, path, body string) *http.Request {
	f.t.Helper()
	base := strings.TrimSuffix(f.Info.BaseURL, "/v1")
	var r io.Reader
	if body != "" {
		r = strings.NewReader(body)
	}
	req, err := http.NewRequestWithContext(ctx, method, base+path, r)
	must(f.t, err)
	req.Header.Set("Authorization", "Bearer "+f.Info.APIKey)
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	return req
}

// Do sends it and reads the whole answer.
func (f *Fabric) Do(req *http.Request) (*http.Response, string) {
	f.t.Helper()
	resp, err := f.Client.Do(req)
	if err != nil {
		f.t.Fatalf("%v\n%s", err, f.Log)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		f.t.Fatalf("after %q: %v\n%s", b, err, f.Log)
	}
	return resp, string(b)
}

// Chat is the body of a small chat completion.
func Chat(stream bool) string {
	b, err := json.Marshal(map[string]any{
		"model": Model, "stream": stream,
		"messages": []map[string]string{{"role": "user", "content": "hello"}},
	})
	if err != nil {
		panic(err)
	}
	return string(b)
}

// makeNode makes a node's certificate and keys beside the fabric's own, and
// returns what the broker must know of it.
func (f *Fabric) makeNode(edge, name string) configs.Member {
	f.t.Helper()
	dir := f.nodeDir(name)
	must(f.t, os.MkdirAll(dir, 0o700))
	ca, err := identity.LoadCA(filepath.Join(string(f.Folder), "pki"))
	must(f.t, err)
	cert, err := ca.Issue(identity.ID{TrustDomain: identity.DefaultTrustDomain, Edge: edge, Role: identity.RoleNode, Name: name}, nil, time.Hour)
	must(f.t, err)
	must(f.t, cert.Save(filepath.Join(dir, "node.pem"), filepath.Join(dir, "node.key")))
	user, err := identity.NewUserKey()
	must(f.t, err)
	must(f.t, user.Save(filepath.Join(dir, "node.nk")))
	curve, err := identity.NewCurveKey()
	must(f.t, err)
	must(f.t, curve.Save(filepath.Join(dir, "curve.nk")))
	return configs.Member{Edge: edge, Role: "node", Name: name, NKey: user.Public()}
}

func (f *Fabric) nodeDir(name string) string { return filepath.Join(string(f.Folder), "nodes", name) }

// NodeConfig is the configuration of a node named in Options.Nodes.
func (f *Fabric) NodeConfig(name string) configs.Node {
	dir := f.nodeDir(name)
	c := configs.Node{
		Name: name, Edge: f.cfg.Edge.Name, CurveKey: filepath.Join(dir, "curve.nk"),
		Broker: configs.Remote{
			URLs: []string{f.Broker.ClientURL()}, NKey: filepath.Join(dir, "node.nk"),
			TLS: configs.TLS{Certificate: filepath.Join(dir, "node.pem"), Key: filepath.Join(dir, "node.key"), CA: f.Folder.CA()},
		},
		Reconnect: configs.Reconnect{MaxAttempts: new(0), IntervalSec: new(1)},
	}
	file := configs.File{Node: &c}
	must(f.t, file.Complete())
	return c
}

// StartNode runs a node of Options.Nodes in this process until the returned
// function is called.
func (f *Fabric) StartNode(name string) (n *node.Node, stop func()) {
	f.t.Helper()
	cfg := f.NodeConfig(name)
	log := slog.New(slog.NewTextHandler(f.Log, &slog.HandlerOptions{Level: slog.LevelDebug})).With(slog.String("daemon", name))
	n, err := up.NewNode(cfg, func() []string { return cfg.Broker.URLs }, log, nil)
	must(f.t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- n.Run(ctx) }()
	var once sync.Once
	stop = func() {
		once.Do(func() {
			cancel()
			if err := <-done; err != nil {
				f.t.Errorf("node %s: %v", name, err)
			}
		})
	}
	f.t.Cleanup(stop)
	return n, stop
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// LogBuffer keeps a log and lets a test wait for a line of it.
type LogBuffer struct {
	mu      sync.Mutex
	buf     bytes.Buffer
	changed chan struct{}
}

func (b *LogBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.changed != nil {
		close(b.changed)
		b.changed = nil
	}
	return b.buf.Write(p)
}

func (b *LogBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

// Await waits until a line satisfies ok, or one did before.
func (b *LogBuffer) Await(t testing.TB, ok func(line string) bool) {
	t.Helper()
	hang := time.After(Hang)
	for {
		b.mu.Lock()
		text := b.buf.String()
		if b.changed == nil {
			b.changed = make(chan struct{})
		}
		changed := b.changed
		b.mu.Unlock()
		for line := range strings.Lines(text) {
			if ok(line) {
				return
			}
		}
		select {
		case <-changed:
		case <-hang:
			t.Fatalf("a log line did not come:\n%s", text)
		}
	}
}

// AwaitEvent waits for a line of the event that holds all of the words.
func (b *LogBuffer) AwaitEvent(t testing.TB, event string, words ...string) {
	t.Helper()
	b.Await(t, func(line string) bool {
		if !strings.Contains(line, "msg="+event+" ") {
			return false
		}
		for _, w := range words {
			if !strings.Contains(line, w) {
				return false
			}
		}
		return true
	})
}

// AwaitSession waits until the Edge has a session of the node that is newer than
// generation after, and returns its generation.
func (b *LogBuffer) AwaitSession(t testing.TB, node string, after uint64) (gen uint64) {
	t.Helper()
	b.Await(t, func(line string) bool {
		gen, _ = generation(line, "node.connected", node)
		return gen > after
	})
	return gen
}

// LastSession is the newest generation of a node that the log speaks of; 0: none.
func (b *LogBuffer) LastSession(node string) (last uint64) {
	for line := range strings.Lines(b.String()) {
		if gen, ok := generation(line, "node.connected", node); ok {
			last = max(last, gen)
		}
	}
	return last
}

// Count counts the lines of an event.
func (b *LogBuffer) Count(event string) int {
	return strings.Count(b.String(), "msg="+event+" ")
}

// generation reads the generation from a log line of the event about a node.
func generation(line, event, node string) (uint64, bool) {
	if !strings.Contains(line, "msg="+event+" ") || !strings.Contains(line, "node="+node+" ") {
		return 0, false
	}
	_, rest, ok := strings.Cut(line, " generation=")
	if !ok {
		return 0, false
	}
	var n uint64
	for _, c := range rest {
		if c < '0' || c > '9' {
			break
		}
		n = n*10 + uint64(c-'0')
	}
	return n, n > 0
}

// EdgeConfig is the configuration of an Edge like the fabric's own, as a process of
// its own: its broker's URLs are for the test to set.
func (f *Fabric) EdgeConfig() configs.Edge {
	c := *f.cfg.Edge
	c.Listen, c.AdminListen = "127.0.0.1:0", "127.0.0.1:0"
	return c
}
