//go:build linux

package netns

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/iop-fabric/iop/internal/ioptest"
)

// fabric is a lab, the folder that `iop init --out` made for its hosts, and the
// processes started from it. A host is named as its folder is.
type fabric struct {
	*lab
	dir    string
	key    string
	client *http.Client // at the Edge's own host: no fault is between
	v6     bool
	level  string               // of the logs
	also   map[string]io.Writer // who reads the log of a folder's process, too
}

// plan is what a fabric consists of.
type plan struct {
	brokers int
	names   bool     // the brokers are named by host name, which nobody knows yet
	v6      bool     // no host has an IPv4 address
	leaves  []string // their names
	nodes   []string // NAME or NAME@LEAF; each serves the model of its name
	bound   time.Duration
}

// newFabric makes hosts and folders, and starts nothing.
func newFabric(t testing.TB, p plan) *fabric {
	t.Helper()
	f := &fabric{lab: newLab(t), dir: filepath.Join(t.TempDir(), "fabric"), v6: p.v6, level: "debug", also: map[string]io.Writer{}}
	edge := f.host("edge")
	f.client = &http.Client{Transport: &http.Transport{
		DisableCompression: true, MaxIdleConnsPerHost: 64,
		DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return edge.dial(ctx, network, "127.0.0.1:8400")
		},
	}}
	t.Cleanup(f.client.CloseIdleConnections)
	args := []string{"init", "--out", f.dir, "--edge", "home", "--demo"}
	for i := range p.brokers {
		name := fmt.Sprintf("broker-%d", i+1)
		where := f.address(name)
		if p.names {
			where = name + ".example"
		}
		args = append(args, "--broker", where)
	}
	for _, leaf := range p.leaves {
		args = append(args, "--leaf", leaf+"="+f.address("leaf-"+leaf))
	}
	args = append(args, "--node", strings.Join(p.nodes, ","))
	f.iop(args...)
	var names []string
	for _, n := range p.nodes {
		name, _, _ := strings.Cut(n, "@")
		names = append(names, name)
		f.host("node-" + name)
	}
	key, err := os.ReadFile(f.path("edge/api-key"))
	must(t, err)
	f.key = strings.TrimSpace(string(key))

	if p.bound == 0 {
		p.bound = 5 * time.Second // the default
	}
	head, _, _ := strings.Cut(f.read("edge"), "  models: auto")
	head += fmt.Sprintf("  heartbeat_bound: %v\n  heartbeat_interval: %v\n  models:\n", p.bound, min(p.bound/5, time.Second))
	nodes := "  nodes:\n"
	for _, n := range names {
		head += fmt.Sprintf("    - {name: %s, providers: [{provider: %s/m}]}\n", n, n)
		nodes += fmt.Sprintf(demo, n)
	}
	f.write("edge", head+nodes)
	for i := range p.brokers {
		f.edit(fmt.Sprintf("broker-%d", i+1), "broker:\n", fmt.Sprintf("broker:\n  heartbeat_bound: %v\n", p.bound))
	}
	for _, leaf := range p.leaves {
		f.edit("leaf-"+leaf, "leaf:\n", fmt.Sprintf("leaf:\n  heartbeat_bound: %v\n", p.bound))
	}
	if p.v6 {
		for _, h := range f.hosts {
			f.ip("-n", h.ns, "-4", "address", "flush", "dev", link)
		}
	}
	return f
}

// demo is what a node runs, until it is told otherwise.
const demo = "    - name: %s\n      adapters: [{name: demo, type: demo, capacity: 64}]\n      providers: [{id: m, adapter: demo, target: demo}]\n"

// provide serves a provider at the node's host, on its loopback, and has the node call it.
func (f *fabric) provide(node string, capacity int, provider http.Handler) {
	f.t.Helper()
	l, err := f.host("node-" + node).listen("127.0.0.1:8000")
	must(f.t, err)
	s := httptest.NewUnstartedServer(provider)
	s.Listener.Close()
	s.Listener = l
	s.Config.ConnContext = func(ctx context.Context, c net.Conn) context.Context {
		_ = c.(*net.TCPConn).SetReadBuffer(32 << 10) // what is not read stays away, not in the kernel
		return ctx
	}
	s.Start()
	f.t.Cleanup(s.Close)
	f.edit("edge", fmt.Sprintf(demo, node),
		fmt.Sprintf("    - name: %s\n      adapters: [{name: p, type: openai_compat, base_url: \"http://127.0.0.1:8000/v1\", capacity: %d}]\n      providers: [{id: m, adapter: p, target: %s}]\n", node, capacity, node))
}

// address is where others reach the host.
func (f *fabric) address(name string) string {
	f.t.Helper()
	h := f.host(name)
	if f.v6 {
		return "[" + h.v6 + "]"
	}
	return h.v4
}

func (f *fabric) path(name string) string { return filepath.Join(f.dir, filepath.FromSlash(name)) }

func (f *fabric) config(folder string) string { return f.path(folder + "/" + folder + ".yaml") }

func (f *fabric) read(folder string) string {
	f.t.Helper()
	b, err := os.ReadFile(f.config(folder))
	must(f.t, err)
	return string(b)
}

func (f *fabric) write(folder, text string) {
	f.t.Helper()
	must(f.t, os.WriteFile(f.config(folder), []byte(text), 0o600))
}

// edit replaces the one place of a folder's configuration where was stands.
func (f *fabric) edit(folder, was, is string) {
	f.t.Helper()
	text := f.read(folder)
	if strings.Count(text, was) != 1 {
		f.t.Fatalf("%q is not in %s once:\n%s", was, folder, text)
	}
	f.write(folder, strings.Replace(text, was, is, 1))
}

var urls = regexp.MustCompile(`(?m)^    urls: \[.*\]$`)

// knowing gives an Edge or a Node these brokers to dial and no other.
func (f *fabric) knowing(folder string, brokers ...string) {
	f.t.Helper()
	var list []string
	for _, b := range brokers {
		list = append(list, strconv.Quote("tls://"+f.address(b)+":4222"))
	}
	f.write(folder, urls.ReplaceAllString(f.read(folder), "    urls: ["+strings.Join(list, ", ")+"]"))
}

// iop runs a command to its end.
func (f *fabric) iop(args ...string) string {
	f.t.Helper()
	out, err := command(binary, args...)
	must(f.t, err)
	return out
}

// plain are the lines of a log that say of one call among thousands how it went.
var plain = regexp.MustCompile(`(?m)^.* level=INFO msg=(edge\.request|node\.tunnel_ended) .*\n`)

// process is one running iop.
type process struct {
	*host
	f    *fabric
	name string
	cmd  *exec.Cmd
	log  *ioptest.LogBuffer
	done chan struct{} // closed when it has ended
}

// start runs the process of a folder on its host; env overrides its configuration.
func (f *fabric) start(folder string, env ...string) *process {
	f.t.Helper()
	role, _, _ := strings.Cut(folder, "-")
	p := &process{host: f.host(folder), f: f, name: folder, log: &ioptest.LogBuffer{}, done: make(chan struct{})}
	p.cmd = p.command(context.Background(), binary, role, "--config", f.config(folder), "--log-level", f.level)
	p.cmd.Env = append(append(os.Environ(), "IOP_"+strings.ToUpper(role)+"_ADMIN_LISTEN=127.0.0.1:8401"), env...)
	if role == "node" {
		p.cmd.Env = append(p.cmd.Env, fmt.Sprintf("IOP_NODE_RECONNECT_INTERVAL_SEC=%d", int(interval/time.Second)))
	}
	var log io.Writer = p.log
	if w := f.also[folder]; w != nil {
		log = io.MultiWriter(w, p.log)
	}
	p.cmd.Stdout, p.cmd.Stderr = log, log
	must(f.t, p.cmd.Start())
	go func() {
		defer close(p.done)
		_ = p.cmd.Wait() // how it ended is in ProcessState
	}()
	f.t.Cleanup(func() {
		p.kill()
		if f.t.Failed() {
			f.t.Logf("log of %s:\n%s", p.name, plain.ReplaceAllString(p.log.String(), ""))
		}
	})
	return p
}

// interval is the Nodes' reconnect.interval_sec.
const interval = time.Second

func (p *process) signal(s syscall.Signal) {
	if err := p.cmd.Process.Signal(s); err != nil && !errors.Is(err, os.ErrProcessDone) {
		p.f.t.Errorf("%s: %v", p.name, err)
	}
}

// kill is kill -9, and waits.
func (p *process) kill() {
	p.signal(syscall.SIGKILL)
	<-p.done
}

// stop is SIGTERM, and waits.
func (p *process) stop() {
	p.signal(syscall.SIGTERM)
	<-p.done
}

func (p *process) pause()  { p.signal(syscall.SIGSTOP) }
func (p *process) resume() { p.signal(syscall.SIGCONT) }

// slack is what a busy machine may take longer than a rule says.
const slack = 2 * time.Second

// startAt starts a process that knows every broker and finds only one of them.
func (f *fabric) startAt(folder, broker string) *process {
	f.t.Helper()
	h := f.host(folder)
	for name, other := range f.hosts {
		if strings.HasPrefix(name, "broker-") && name != broker {
			h.resetTo(other)
		}
	}
	p := f.start(folder)
	p.ready()
	if at := p.broker(); at != broker {
		f.t.Fatalf("%s is at %s", folder, at)
	}
	p.heal()
	return p
}

// alive says so if the process has ended by itself.
func (p *process) alive() {
	p.f.t.Helper()
	select {
	case <-p.done:
		p.f.t.Errorf("%s has ended: %v", p.name, p.cmd.ProcessState)
	default:
	}
}

// connected waits for a session of the node that is newer than after, and
// returns its generation. It is asked of the Edge.
func (p *process) connected(node string, after uint64) uint64 {
	p.f.t.Helper()
	return p.log.AwaitSession(p.f.t, node, after)
}

// get asks the process's admin listener, at its own host.
func (p *process) get(path string) (status int, body string, err error) {
	client := &http.Client{Timeout: time.Second, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return p.dial(ctx, network, "127.0.0.1:8401")
		},
	}}
	resp, err := client.Get("http://admin" + path)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(b), err
}

// ready waits until the process says that it is of use.
func (p *process) ready() {
	p.f.t.Helper()
	p.until("ready", func() (string, bool) {
		status, body, err := p.get("/readyz")
		return fmt.Sprint(status, body, err), err == nil && status == http.StatusOK
	})
}

// until asks again and again until the answer is yes.
func (p *process) until(what string, ask func() (string, bool)) {
	p.f.t.Helper()
	again := time.NewTicker(20 * time.Millisecond)
	defer again.Stop()
	for hang := time.After(ioptest.Hang); ; {
		last, ok := ask()
		if ok {
			return
		}
		select {
		case <-again.C:
		case <-hang:
			p.f.t.Fatalf("%s: not %s: %s", p.name, what, last)
		}
	}
}

// metric is the sum of a metric's series.
func (p *process) metric(name string) (sum float64) {
	p.f.t.Helper()
	_, body, err := p.get("/metrics")
	must(p.f.t, err)
	for line := range strings.Lines(body) {
		if rest, ok := strings.CutPrefix(line, name); ok && (rest[0] == ' ' || rest[0] == '{') {
			v, err := strconv.ParseFloat(strings.TrimSpace(rest[strings.LastIndexByte(rest, ' '):]), 64)
			must(p.f.t, err)
			sum += v
		}
	}
	return sum
}

// broker returns the name of the broker that the process is connected to, from
// the kernel's own tables: any one of a cluster may have admitted it.
func (p *process) broker() (name string) {
	p.f.t.Helper()
	p.until("connected to a broker", func() (string, bool) {
		name = p.brokerNow()
		return "", name != ""
	})
	return name
}

func (p *process) brokerNow() string {
	ours := map[string]bool{}
	fds := fmt.Sprintf("/proc/%d/fd", p.cmd.Process.Pid)
	entries, err := os.ReadDir(fds)
	must(p.f.t, err)
	for _, e := range entries {
		if to, err := os.Readlink(filepath.Join(fds, e.Name())); err == nil { // it may be closed by now
			if inode, ok := strings.CutPrefix(to, "socket:["); ok {
				ours[strings.TrimSuffix(inode, "]")] = true
			}
		}
	}
	table, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/tcp", p.cmd.Process.Pid))
	must(p.f.t, err)
	const remote, state, inode, established = 2, 3, 9, "01"
	for line := range strings.Lines(string(table)) {
		c := strings.Fields(line)
		if len(c) <= inode || c[state] != established || !ours[c[inode]] {
			continue
		}
		var a [4]byte // in the machine's order, little endian
		var port int
		if _, err := fmt.Sscanf(c[remote], "%02X%02X%02X%02X:%04X", &a[3], &a[2], &a[1], &a[0], &port); err != nil || port != 4222 && port != 7422 {
			continue
		}
		for name, h := range p.f.hosts {
			if h.v4 == net.IP(a[:]).String() {
				return name
			}
		}
	}
	return ""
}

// stream is a caller's stream of the demo model, read to its end beside the test.
type stream struct {
	f     *fabric
	model string

	mu      sync.Mutex
	changed chan struct{}
	events  int
	got     bytes.Buffer
	err     error
	over    bool
	gap     time.Duration // the longest wait between two events
}

// open starts a stream of tokens, one a delay, and returns once the first is here.
func (f *fabric) open(model string, tokens int, delay time.Duration) *stream {
	f.t.Helper()
	s := f.request(f.t.Context(), model, tokens, delay)
	s.reach(2) // the first names the role
	return s
}

func (f *fabric) request(ctx context.Context, model string, tokens int, delay time.Duration) *stream {
	f.t.Helper()
	s, err := f.send(ctx, model, fmt.Sprintf(`{"model":%q,"stream":true,"messages":[{"role":"user","content":"demo:tokens=%d demo:delay=%v"}]}`, model, tokens, delay))
	must(f.t, err)
	return s
}

// send posts a body, and returns once the answer has begun.
func (f *fabric) send(ctx context.Context, model, body string) (*stream, error) {
	s := &stream{f: f, model: model}
	resp, err := f.post(ctx, body)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		b, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		return nil, fmt.Errorf("%s: %d %s", model, resp.StatusCode, b)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer resp.Body.Close()
		s.readAll(resp.Body)
	}()
	f.t.Cleanup(func() { resp.Body.Close(); <-done })
	return s, nil
}

func (f *fabric) post(ctx context.Context, body string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://edge/v1/chat/completions", strings.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Authorization", "Bearer "+f.key)
	req.Header.Set("Content-Type", "application/json")
	return f.client.Do(req)
}

func (s *stream) readAll(body io.Reader) {
	r := bufio.NewReaderSize(body, 4<<10)
	last := time.Now()
	for {
		line, err := r.ReadSlice('\n')
		s.mu.Lock()
		s.got.Write(line)
		if bytes.HasPrefix(line, []byte("data:")) {
			s.events++
			s.gap = max(s.gap, time.Since(last))
			last = time.Now()
		}
		if err != nil {
			s.over = true
			if !errors.Is(err, io.EOF) {
				s.err = err
			}
		}
		if s.changed != nil {
			close(s.changed)
			s.changed = nil
		}
		over := s.over
		s.mu.Unlock()
		if over {
			return
		}
	}
}

// wait waits until ok, which is asked under the lock at every change.
func (s *stream) wait(what string, ok func() bool) {
	s.f.t.Helper()
	hang := time.After(ioptest.Hang)
	for {
		s.mu.Lock()
		if ok() {
			s.mu.Unlock()
			return
		}
		if s.changed == nil {
			s.changed = make(chan struct{})
		}
		changed := s.changed
		s.mu.Unlock()
		select {
		case <-changed:
		case <-hang:
			s.f.t.Fatalf("a stream of %s: no %s after %d events", s.model, what, s.events)
		}
	}
}

func (s *stream) reach(events int) {
	s.f.t.Helper()
	s.wait("more events", func() bool { return s.events >= events || s.over })
}

// running proves that none of the streams has ended yet.
func running(streams ...*stream) {
	for _, s := range streams {
		s.f.t.Helper()
		s.mu.Lock()
		if s.over {
			s.f.t.Errorf("a stream of %s has ended: %q", s.model, s.tail())
		}
		s.mu.Unlock()
	}
}

// end waits for the stream's end, and returns all of it.
func (s *stream) end() (string, error) {
	s.f.t.Helper()
	s.wait("end", func() bool { return s.over })
	return s.got.String(), s.err
}

func (s *stream) tail() string {
	b := s.got.Bytes()
	return string(b[max(0, len(b)-300):])
}

var (
	completion = regexp.MustCompile(`"id":"(chatcmpl-[0-9a-f]+)"`)
	created    = regexp.MustCompile(`"created":\d+`)
)

// same makes streams comparable: each has an id and a time of its own.
func same(text string) string {
	return created.ReplaceAllString(completion.ReplaceAllString(text, `"id":"X"`), `"created":0`)
}

// whole proves that the streams, which all asked for as much, are byte for byte
// what an undisturbed one is, and that none holds anything of another.
func (f *fabric) whole(tokens int, streams ...*stream) {
	f.t.Helper()
	for _, s := range streams {
		_, _ = s.end() // looked at below
	}
	quiet := f.open(streams[0].model, tokens, 0) // now that nothing disturbs any more
	text, err := quiet.end()
	want := same(text)
	if err != nil || !strings.HasSuffix(text, "\n\ndata: [DONE]\n\n") || strings.Count(text, "data: ") != tokens+3 {
		f.t.Fatalf("undisturbed: %d bytes, %v", len(text), err)
	}
	ids := map[string]bool{}
	for _, s := range streams {
		text, err := s.end()
		if err != nil || same(text) != want {
			f.t.Errorf("a stream of %s: %d bytes, %v, ends %q", s.model, len(text), err, s.tail())
			continue
		}
		id := completion.FindStringSubmatch(text)[1]
		if ids[id] || strings.Count(text, id) != tokens+2 {
			f.t.Errorf("a stream of %s holds events of another", s.model)
		}
		ids[id] = true
	}
}

// broken proves that the streams have ended with one terminal, an error.
func (f *fabric) broken(streams ...*stream) {
	f.t.Helper()
	for _, s := range streams {
		text, err := s.end()
		if err != nil || strings.Count(text, `"error"`) != 1 || strings.Contains(text, "[DONE]") {
			f.t.Errorf("a stream of %s: %v, ends %q", s.model, err, s.tail())
		}
	}
}

// served proves that a plain call to the model is answered.
func (f *fabric) served(models ...string) {
	f.t.Helper()
	for _, model := range models {
		resp, err := f.post(f.t.Context(), fmt.Sprintf(`{"model":%q,"messages":[{"role":"user","content":"hello %s"}]}`, model, model))
		must(f.t, err)
		b, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil || resp.StatusCode != http.StatusOK || !strings.Contains(string(b), "You said: hello "+model) {
			f.t.Fatalf("%s: %d %s %v", model, resp.StatusCode, b, err)
		}
	}
}

// for d is how long something is so: the one wait that is for no event.
func (f *fabric) elapse(d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	<-t.C
}

// longest is the longest pause of any of the streams.
func longest(streams ...*stream) (gap time.Duration) {
	for _, s := range streams {
		s.mu.Lock()
		gap = max(gap, s.gap)
		s.mu.Unlock()
	}
	return gap.Round(time.Millisecond)
}
