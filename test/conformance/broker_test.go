package conformance

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/bus"
	"github.com/iop-fabric/iop/internal/identity"
	"github.com/iop-fabric/iop/internal/ioptest"
	"github.com/iop-fabric/iop/internal/up"
	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/wire"
)

// members is a broker with two members of an edge name of their own: an Edge, "player",
// and a Node, "tested".
type members struct {
	t   testing.TB
	f   *ioptest.Fabric
	ca  *identity.CA
	dir string
}

const confEdge = "conf"

func newMembers(t testing.TB) *members {
	t.Helper()
	m := &members{t: t, dir: t.TempDir()}
	member := func(role identity.Role, name string) configs.Member {
		key, err := identity.NewUserKey()
		must(t, err)
		must(t, key.Save(m.file(name+".nk")))
		return configs.Member{Edge: confEdge, Role: string(role), Name: name, NKey: key.Public()}
	}
	m.f = ioptest.Start(t, ioptest.Options{Quiet: true, Broker: func(b *configs.Broker) {
		b.Members = append(b.Members, member(identity.RoleEdge, "player"), member(identity.RoleNode, "tested"))
	}})
	var err error
	m.ca, err = identity.LoadCA(filepath.Join(string(m.f.Folder), "pki"))
	must(t, err)
	return m
}

func (m *members) file(name string) string { return filepath.Join(m.dir, name) }

func (m *members) cert(role identity.Role, name string) *identity.Certificate {
	m.t.Helper()
	c, err := m.ca.Issue(identity.ID{TrustDomain: identity.DefaultTrustDomain, Edge: confEdge, Role: role, Name: name}, nil, time.Hour)
	must(m.t, err)
	return c
}

func (m *members) key(name string) *identity.NKey {
	m.t.Helper()
	k, err := identity.LoadNKey(m.file(name + ".nk"))
	must(m.t, err)
	return k
}

// player connects as the Edge.
func (m *members) player() *RemoteNode {
	m.t.Helper()
	w, err := Connect(m.t.Context(), Remote{
		Broker: m.f.Broker.ClientURL(), Edge: confEdge, Cert: m.cert(identity.RoleEdge, "player"), NKey: m.key("player"),
		CA: m.f.Folder.CA(), Provider: "127.0.0.1:0",
	})
	must(m.t, err)
	m.t.Cleanup(w.Close)
	return w
}

// node runs our Node, as it is, until the test ends.
func (m *members) node() {
	m.t.Helper()
	must(m.t, m.cert(identity.RoleNode, "tested").Save(m.file("node.pem"), m.file("node.key")))
	curve, err := identity.NewCurveKey()
	must(m.t, err)
	must(m.t, curve.Save(m.file("curve.nk")))
	url := m.f.Broker.ClientURL()
	n, err := up.NewNode(configs.Node{
		Name: "tested", Edge: confEdge, CurveKey: m.file("curve.nk"), Reconnect: configs.Reconnect{MaxAttempts: new(0), IntervalSec: new(1)},
		Broker: configs.Remote{
			URLs: []string{url}, NKey: m.file("tested.nk"),
			TLS: configs.TLS{Certificate: m.file("node.pem"), Key: m.file("node.key"), CA: m.f.Folder.CA()},
		},
	}, func() []string { return []string{url} }, slog.New(slog.NewTextHandler(m.f.Log, nil)), nil)
	must(m.t, err)
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- n.Run(ctx) }()
	m.t.Cleanup(func() {
		stop()
		if err := <-done; err != nil {
			m.t.Error(err)
		}
	})
}

// Every case that needs no virtual time against our Node as it is: its daemon on the
// real broker, its adapter in front of a server over HTTP.
//
// Contract: J1 J2 J3 J6 J8 T3 T6 T7 C1 M3
func TestNodeOverBroker(t *testing.T) {
	m := newMembers(t)
	w := m.player()
	m.node()
	must(t, w.Wait())
	playAll(t, "our Node over the broker", Node, func(*testing.T) World { return w })
}

// The command, as somebody with a Node of their own runs it.
func TestCommand(t *testing.T) {
	m := newMembers(t)
	must(t, m.cert(identity.RoleEdge, "player").Save(m.file("edge.pem"), m.file("edge.key")))
	m.node()
	run := func(more ...string) (string, error) {
		args := append([]string{
			"run", "./cmd", "-broker", m.f.Broker.ClientURL(), "-edge", confEdge, "-cert", m.file("edge.pem"),
			"-key", m.file("edge.key"), "-nkey", m.file("player.nk"), "-ca", m.f.Folder.CA(),
		}, more...)
		out, err := exec.CommandContext(t.Context(), "go", args...).CombinedOutput() //nolint:gosec // our own command
		return string(out), err
	}
	out, err := run("-run", "^order-")
	if err != nil || !strings.Contains(out, "\nok   order-01 ") || !strings.HasSuffix(out, "\nconformance: 4 of 4\n") {
		t.Fatalf("%v\n%s", err, out)
	}
	if out, err = run("-ca", ""); err == nil || !strings.Contains(out, "conformance: -ca is needed (-help lists all flags)") {
		t.Fatalf("%v\n%s", err, out)
	}
}

// playAll plays every case of a role that real time allows.
func playAll(t *testing.T, where string, role Role, world func(*testing.T) World) {
	t.Helper()
	cases := load(t, func(c *Case) bool { return c.Role == role && c.Short() })
	good := 0
	for i := range cases {
		t.Run(cases[i].ID, func(t *testing.T) {
			if err := Play(&cases[i], world(t)); err != nil {
				t.Error(err)
				return
			}
			good++
		})
	}
	tell(where, good, len(cases))
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// Every case that needs no virtual time against our Edge as it is: HTTP in, the real
// broker, and the player as a Node on the other side of it.
//
// Contract: J1 J2 J3 J4 J6 J8 T3 T6 T7 M3 V1
func TestEdgeOverBroker(t *testing.T) {
	f := ioptest.Start(t, ioptest.Options{
		NoWait: true, Nodes: []configs.EdgeNode{{Name: "raw"}, {Name: "raw2"}, {Name: "raw3"}},
		Edge: func(e *configs.Edge) {
			e.Nodes[0].Adapters[0].Capacity = 64
			group := &e.Models.Groups[0]
			group.Providers = nil
			for i := range e.Nodes[1:] {
				n := &e.Nodes[1+i]
				n.Adapters, n.Providers = e.Nodes[0].Adapters, e.Nodes[0].Providers
				group.Providers = append(group.Providers, configs.ProviderReference{Provider: n.Name + "/m"})
			}
			e.Nodes[0].Adapters, e.Nodes[0].Providers = nil, nil
			e.HeartbeatBound = ioptest.Hang // no session ends by being slow
		},
	})
	w := &edgeWorld{f: f, instance: wire.NewToken(), names: []string{"raw", "raw2", "raw3"}}
	playAll(t, "our Edge over the broker", Edge, func(t *testing.T) World { w.join(t); return w })
}

// edgeWorld is our Edge behind HTTP.
type edgeWorld struct {
	f        *ioptest.Fabric
	instance string
	names    []string // one that lost its session stays out for a while: the next is used
	n        *ioptest.RawNode

	mu       sync.Mutex
	receiver func(v subjects.Verb, run string, data []byte)
	lost     bool
}

// join makes the player the Node, in a new session: the rules that a case breaks
// count against the one it has.
func (w *edgeWorld) join(t *testing.T) {
	t.Helper()
	w.mu.Lock()
	if w.lost {
		w.names = w.names[1:]
	}
	w.lost = false
	w.mu.Unlock()
	if w.n != nil {
		w.n.Conn.Close()
	}
	name := w.names[0]
	w.n = w.f.DialRaw(name, w.instance)
	if a := w.n.Register(1, nil); !a.GetAccepted() {
		t.Fatalf("not accepted: %s", a.GetReason())
	}
	if a := w.n.Ready(1, name); !a.GetReady() {
		t.Fatalf("not ready: %s", a.GetReason())
	}
	// The answer comes before its effects (R4), and a case may begin with a frame.
	w.f.Log.AwaitSession(t, name, w.n.Session.Gen-1)
	_, err := w.n.Conn.Subscribe(w.n.Session.DownWildcard(), func(m bus.Msg) {
		msg, err := subjects.ParseDown(m.Subject)
		if err != nil {
			return
		}
		w.mu.Lock()
		fn := w.receiver
		w.lost = w.lost || msg.Verb == subjects.Fence
		w.mu.Unlock()
		if fn != nil {
			fn(msg.Verb, msg.Run, m.Data)
		}
	})
	must(t, err)
	w.n.Flush()
}

func (*edgeWorld) Settle()         {}
func (*edgeWorld) Virtual() bool   { return false }
func (*edgeWorld) Fence()          {}
func (*edgeWorld) Connection(bool) {}

func (w *edgeWorld) Publish(_ int, v subjects.Verb, run string, data []byte) error {
	return w.n.Conn.Publish(w.n.Session.Up(v, run), data)
}

func (w *edgeWorld) Receive(fn func(v subjects.Verb, run string, data []byte)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.receiver = fn
}

func (w *edgeWorld) Lost() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.lost
}

// httpCaller is a caller of the HTTP surface.
type httpCaller struct {
	w      *edgeWorld
	cancel context.CancelFunc

	mu      sync.Mutex
	status  int
	body    []byte
	over    bool
	class   string
	stopped chan struct{} // closed: it reads
}

// Call implements EdgeWorld.
func (w *edgeWorld) Call(_ string, body []byte, _ time.Duration, changed func()) Caller {
	ctx, cancel := context.WithCancel(context.Background())
	c := &httpCaller{w: w, cancel: cancel, stopped: make(chan struct{})}
	close(c.stopped)
	req := w.f.Request(ctx, http.MethodPost, "/v1/chat/completions", string(body))
	go func() {
		c.do(req, changed)
		c.mu.Lock()
		c.over = true
		c.mu.Unlock()
		changed()
	}()
	return c
}

// classes are the wire's, by the code a caller is told.
var classes = map[string]wire.Class{
	"invalid_request": wire.Invalid, "credential_refused": wire.Credential, "provider_error": wire.Provider,
	"deadline_exceeded": wire.Deadline, "cancelled": wire.Cancelled, "protocol_error": wire.Protocol,
	"internal_error": wire.Internal, "node_lost": wire.SessionEnded, "provider_unreachable": wire.Unreachable,
}

func (c *httpCaller) do(req *http.Request, changed func()) {
	set := func(status int, class string) {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.status, c.class = status, class
	}
	resp, err := c.w.f.Client.Do(req)
	if err != nil {
		set(0, string(wire.Cancelled)) // only who leaves has no answer at all
		return
	}
	defer resp.Body.Close()
	if resp.Header.Get("Content-Type") == "application/json" { // ours: the player's Node says text
		b, _ := io.ReadAll(resp.Body)
		var e struct {
			Error struct{ Code string }
		}
		_ = json.Unmarshal(b, &e)
		set(resp.StatusCode, string(classes[e.Error.Code]))
		return
	}
	set(resp.StatusCode, "")
	changed()
	buf := make([]byte, 32<<10)
	for {
		c.mu.Lock()
		read := c.stopped
		c.mu.Unlock()
		<-read
		n, err := resp.Body.Read(buf)
		c.mu.Lock()
		c.body = append(c.body, buf[:n]...)
		if err != nil && err != io.EOF {
			c.class = "?" // broken off: no byte can tell why
		}
		c.mu.Unlock()
		changed()
		if err != nil {
			return
		}
	}
}

func (c *httpCaller) State() (status int, body []byte, over bool, class string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.status, c.body, c.over, c.class
}

func (c *httpCaller) Leave() { c.cancel() }

func (c *httpCaller) Stop(stop bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	select {
	case <-c.stopped:
		if stop {
			c.stopped = make(chan struct{})
		}
	default:
		if !stop {
			close(c.stopped)
		}
	}
}

// Slot asks the admin API whether any place is in use.
func (c *httpCaller) Slot() string {
	token, err := os.ReadFile(c.w.f.Folder.AdminToken())
	if err != nil {
		return err.Error()
	}
	req, err := http.NewRequestWithContext(context.Background(), http.MethodGet, c.w.f.Info.AdminURL+"/api/v1/providers", nil)
	if err != nil {
		return err.Error()
	}
	req.Header.Set("Authorization", "Bearer "+string(bytes.TrimSpace(token)))
	resp, err := c.w.f.Client.Do(req)
	if err != nil {
		return err.Error()
	}
	defer resp.Body.Close()
	var answer struct {
		Providers []struct {
			InFlight int `json:"in_flight"`
		} `json:"providers"`
	}
	if err := json.NewDecoder(resp.Body).Decode(&answer); err != nil {
		return err.Error()
	}
	for _, p := range answer.Providers {
		if p.InFlight > 0 {
			return ""
		}
	}
	return "?"
}
