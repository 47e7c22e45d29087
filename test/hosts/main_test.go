// Package hosts tests broker, Edge and Nodes as processes of their own, each with
// an address of its own, started from the very folders that `iop init --out` makes.
package hosts

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/iop-fabric/iop/internal/fakeprovider"
	"github.com/iop-fabric/iop/internal/ioptest"
)

// binary is iop, built once.
var binary string

func TestMain(m *testing.M) {
	if attack := os.Getenv(flooderAttack); attack != "" {
		fmt.Fprintln(os.Stderr, flood(attack, os.Getenv(flooderConfig)))
		os.Exit(1)
	}
	dir, err := os.MkdirTemp("", "iop-hosts-*")
	if err == nil {
		binary = filepath.Join(dir, "iop")
		build := exec.Command("go", "build", "-o", binary, "../../cmd/iop")
		build.Stderr = os.Stderr
		err = build.Run()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code := m.Run()
	if err := os.RemoveAll(dir); err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	if code == 0 {
		if err := goleak.Find(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

// nets numbers the fabrics of this process: each has addresses of its own in
// 127.0.0.0/8, so that the usual ports are free.
var nets atomic.Uint32

// fabric is a folder of `iop init --out` and the processes started from it.
type fabric struct {
	t         *testing.T
	dir       string
	net       string // "127.64.1."
	providers map[string]*fakeprovider.Provider
	key       string
	client    *http.Client
}

// newFabric makes the folders of brokers and nodes; each node has a scripted
// provider of its own that serves the model of the node's name.
func newFabric(t *testing.T, brokers int, nodes ...string) *fabric {
	t.Helper()
	f := &fabric{
		t: t, dir: filepath.Join(t.TempDir(), "fabric"), providers: map[string]*fakeprovider.Provider{},
		net:    fmt.Sprintf("127.%d.%d.", 64+os.Getpid()%128, nets.Add(1)),
		client: &http.Client{Transport: &http.Transport{DisableCompression: true, MaxIdleConnsPerHost: 64}},
	}
	t.Cleanup(f.client.CloseIdleConnections)
	var hosts []string
	for i := range brokers {
		hosts = append(hosts, fmt.Sprint(f.net, i+1))
	}
	f.iop("init", "--out", f.dir, "--edge", "home", "--broker", strings.Join(hosts, ","), "--node", strings.Join(nodes, ","), "--demo")
	key, err := os.ReadFile(filepath.Join(f.dir, "edge", "api-key"))
	must(t, err)
	f.key = strings.TrimSpace(string(key))

	text := f.read("edge/edge.yaml")
	head, _, _ := strings.Cut(text, "  models: auto")
	var models, list strings.Builder
	for _, n := range nodes {
		fmt.Fprintf(&models, "    - {name: %s, providers: [{provider: %s/m}]}\n", n, n)
		list.WriteString(f.node(n))
	}
	f.write("edge/edge.yaml", head+"  models:\n"+models.String()+"  nodes:\n"+list.String())
	return f
}

// node is the Edge's entry of a node, and makes its provider.
func (f *fabric) node(name string) string {
	p := fakeprovider.New(f.t)
	f.providers[name] = p
	return fmt.Sprintf("    - name: %s\n      adapters: [{name: p, type: openai_compat, base_url: %q}]\n      providers: [{id: m, adapter: p, target: m}]\n", name, p.URL)
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func (f *fabric) path(name string) string { return filepath.Join(f.dir, filepath.FromSlash(name)) }

func (f *fabric) read(name string) string {
	f.t.Helper()
	b, err := os.ReadFile(f.path(name))
	must(f.t, err)
	return string(b)
}

func (f *fabric) write(name, text string) {
	f.t.Helper()
	must(f.t, os.WriteFile(f.path(name), []byte(text), 0o600))
}

// iop runs a command to its end.
func (f *fabric) iop(args ...string) string {
	f.t.Helper()
	out, err := exec.Command(binary, args...).CombinedOutput()
	if err != nil {
		f.t.Fatalf("iop %v: %v\n%s", args, err, out)
	}
	return string(out)
}

// process is one running iop.
type process struct {
	t    *testing.T
	name string
	// config is its file.
	config string
	cmd    *exec.Cmd
	log    *ioptest.LogBuffer
	done   chan struct{} // closed when it has ended
}

// start runs the process of a folder; env overrides its configuration.
func (f *fabric) start(folder string, env ...string) *process {
	f.t.Helper()
	role, _, _ := strings.Cut(folder, "-")
	return f.run(folder, role, f.path(folder+"/"+folder+".yaml"), env...)
}

// run is start of any configuration.
func (f *fabric) run(name, role, config string, env ...string) *process {
	f.t.Helper()
	env = append(os.Environ(), env...)
	switch role {
	case "edge":
		env = append(env, "IOP_EDGE_LISTEN="+f.net+"100:8400", "IOP_EDGE_ADMIN_LISTEN="+f.net+"100:8401")
	case "node":
		env = append(env, "IOP_NODE_RECONNECT_INTERVAL_SEC=1")
	}
	p := f.launch(name, nil, env, role, "--config", config, "--log-level", "debug")
	p.config = config
	return p
}

// launch runs a command until it is told to stop; out takes what it prints, nil: its
// log does.
func (f *fabric) launch(name string, out io.Writer, env []string, args ...string) *process {
	f.t.Helper()
	p := &process{t: f.t, name: name, log: &ioptest.LogBuffer{}, done: make(chan struct{})}
	p.cmd = exec.Command(binary, args...)
	p.cmd.Env = env
	p.cmd.Stdout, p.cmd.Stderr = p.log, p.log
	if out != nil {
		p.cmd.Stdout = out
	}
	must(f.t, p.cmd.Start())
	go func() {
		defer close(p.done)
		_ = p.cmd.Wait() // its code is in ProcessState
	}()
	f.t.Cleanup(func() {
		p.signal(syscall.SIGKILL)
		<-p.done
		if f.t.Failed() {
			f.t.Logf("log of %s:\n%s", p.name, p.log)
		}
	})
	return p
}

func (p *process) signal(s syscall.Signal) {
	if err := p.cmd.Process.Signal(s); err != nil && !errors.Is(err, os.ErrProcessDone) {
		p.t.Errorf("%s: %v", p.name, err)
	}
}

// kill is kill -9, and waits.
func (p *process) kill() {
	p.signal(syscall.SIGKILL)
	<-p.done
}

// exit waits for the end and returns the code.
func (p *process) exit() int {
	p.t.Helper()
	select {
	case <-p.done:
	case <-time.After(ioptest.Hang):
		p.t.Fatalf("%s does not end", p.name)
	}
	return p.cmd.ProcessState.ExitCode()
}

// stop is SIGTERM; it must end well.
func (p *process) stop() {
	p.t.Helper()
	begin := time.Now()
	p.signal(syscall.SIGTERM)
	if code := p.exit(); code != 0 {
		p.t.Errorf("%s: SIGTERM: exit code %d", p.name, code)
	}
	p.t.Logf("%s ended %v after SIGTERM", p.name, time.Since(begin).Round(time.Millisecond))
}

// connected waits for a session of the node that is newer than after, and
// returns its generation.
func (p *process) connected(node string, after uint64) uint64 {
	p.t.Helper()
	return p.log.AwaitSession(p.t, node, after)
}

func (f *fabric) call(ctx context.Context, model string, stream bool) (*http.Response, error) {
	body := fmt.Sprintf(`{"model":%q,"stream":%v,"messages":[{"role":"user","content":"hello"}]}`, model, stream)
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+f.net+"100:8400/v1/chat/completions", strings.NewReader(body))
	must(f.t, err)
	req.Header.Set("Authorization", "Bearer "+f.key)
	req.Header.Set("Content-Type", "application/json")
	return f.client.Do(req)
}

func event(i int) string {
	return fmt.Sprintf("data: {\"id\":\"c\",\"object\":\"chat.completion.chunk\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"t%d\"},\"finish_reason\":null}]}\n\n", i)
}

const doneEvent = "data: [DONE]\n\n"

// open starts a stream of the node's model whose provider sends one event and
// then does what steps say, and returns once the caller has that event.
func (f *fabric) open(node string, steps ...fakeprovider.Step) (*http.Response, *fakeprovider.Request) {
	f.t.Helper()
	p := f.providers[node]
	p.Next(append([]fakeprovider.Step{fakeprovider.SSEHead(), fakeprovider.Chunk(event(1))}, steps...)...)
	resp, err := f.call(f.t.Context(), node, true)
	must(f.t, err)
	f.t.Cleanup(func() { resp.Body.Close() })
	first := make([]byte, len(event(1)))
	if n, err := io.ReadFull(resp.Body, first); err != nil || string(first) != event(1) {
		f.t.Fatalf("%d %q %v", resp.StatusCode, first[:n], err)
	}
	select {
	case r := <-p.Received():
		return resp, r
	case <-time.After(ioptest.Hang):
		f.t.Fatal("the provider was not called")
		return nil, nil
	}
}

// served proves that a plain call to the node's model is answered.
func (f *fabric) served(node string) {
	f.t.Helper()
	p := f.providers[node]
	p.Next(fakeprovider.JSON(200, `{"served":1}`)...)
	resp, err := f.call(f.t.Context(), node, false)
	must(f.t, err)
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != 200 || string(b) != `{"served":1}` {
		f.t.Fatalf("%s: %d %q %v", node, resp.StatusCode, b, err)
	}
	<-p.Received()
}

// rest reads what is left of every stream, all at once.
func rest(streams []*http.Response) []string {
	out := make([]string, len(streams))
	var all sync.WaitGroup
	for i, s := range streams {
		all.Go(func() {
			b, _ := io.ReadAll(s.Body) // a cut shows in what was read
			out[i] = string(b)
		})
	}
	all.Wait()
	return out
}
