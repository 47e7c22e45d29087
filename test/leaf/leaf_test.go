// Package leaf tests a site behind a leaf broker as its callers see it: hub and
// Edge in one process as in `iop up`, a real leaf, and a Node that knows nothing
// but the leaf's address.
package leaf

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/iop-fabric/iop/broker"
	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/history"
	"github.com/iop-fabric/iop/internal/identity"
	"github.com/iop-fabric/iop/internal/ioptest"
	"github.com/iop-fabric/iop/internal/up"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, ioptest.IgnoredGoroutines()...) }

// The models, each with one provider: at the hub's own Node, and at the site's.
const (
	direct = "direct"
	behind = "behind"
)

// event is what the provider says as event i of the stream a caller named.
func event(name string, i int) string {
	pad := sha256.Sum256(fmt.Appendf(nil, "%s/%d", name, i))
	return fmt.Sprintf("data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"%s %d %x\"}}]}\n\n", name, i, pad)
}

func whole(name string, n int) string {
	var b strings.Builder
	for i := range n {
		b.WriteString(event(name, i))
	}
	return b.String() + "data: [DONE]\n\n"
}

// ask is a request's body; the provider streams as many events as it says, paced.
type ask struct {
	Model  string `json:"model"`
	User   string `json:"user"`
	Stream bool   `json:"stream"`
	Events int    `json:"max_tokens"`
}

func provide(pace time.Duration) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		var q ask
		if err := json.NewDecoder(r.Body).Decode(&q); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		if !q.Stream {
			w.Header().Set("Content-Type", "application/json")
			fmt.Fprintf(w, `{"user":%q}`, q.User)
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		tick := time.NewTicker(pace)
		defer tick.Stop()
		for i := range q.Events {
			select {
			case <-tick.C:
			case <-r.Context().Done():
				return
			}
			io.WriteString(w, event(q.User, i)) // the caller may be gone
			w.(http.Flusher).Flush()
		}
		io.WriteString(w, "data: [DONE]\n\n") // the same
	}
}

// site is a fabric with a leaf and a Node behind it.
type site struct {
	*ioptest.Fabric
	link *ioptest.Proxy // between leaf and hub
	leaf *broker.Leaf
	gen  uint64 // of the Node's first session
	seen *ioptest.History
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func start(t *testing.T, bound time.Duration) *site {
	t.Helper()
	seen := ioptest.NewHistory(t)
	provider := httptest.NewServer(seen.Provide(provide(20 * time.Millisecond)))
	t.Cleanup(provider.Close)
	key := must(identity.NewUserKey())
	adapters := []configs.Adapter{{Name: "p", Type: configs.TypeOpenAICompat, BaseURL: provider.URL, Capacity: 64}}
	providers := []configs.Provider{{ID: "m", Adapter: "p", Target: "m"}}
	f := ioptest.Start(t, ioptest.Options{
		Adapters: adapters,
		Nodes:    []configs.EdgeNode{{Name: "site", Adapters: adapters, Providers: providers}},
		Edge: func(e *configs.Edge) {
			e.Nodes[0].Providers = providers
			e.Models = configs.Models{Groups: []configs.ModelGroup{
				{Name: direct, Providers: []configs.ProviderReference{{Provider: up.DefaultNode + "/m"}}},
				{Name: behind, Providers: []configs.ProviderReference{{Provider: "site/m"}}},
			}}
			e.HeartbeatBound, e.HeartbeatInterval = bound, bound/5
		},
		Broker: func(b *configs.Broker) {
			b.LeafListen, b.HeartbeatBound = "127.0.0.1:0", bound
			b.Members = append(b.Members, configs.Member{Edge: up.DefaultEdge, Role: "leaf", Name: "l1", NKey: key.Public()})
		},
	})
	s := &site{Fabric: f, seen: seen}
	s.link = ioptest.NewProxy(t, func() string { return strings.TrimPrefix(f.Broker.LeafURL(), "tls://") })
	s.startLeaf(t, key, bound)
	s.startNode(t)
	s.gen = f.WaitNode("site")
	return s
}

func (s *site) startLeaf(t *testing.T, key *identity.NKey, bound time.Duration) {
	t.Helper()
	dir := t.TempDir()
	in := func(name string) string { return filepath.Join(dir, name) }
	ca := must(identity.LoadCA(filepath.Join(string(s.Folder), "pki")))
	id := identity.ID{TrustDomain: identity.DefaultTrustDomain, Edge: up.DefaultEdge, Role: identity.RoleLeaf, Name: "l1"}
	cert := must(ca.Issue(id, []string{"127.0.0.1"}, time.Hour))
	for _, err := range []error{cert.Save(in("leaf.pem"), in("leaf.key")), key.Save(in("leaf.nk"))} {
		if err != nil {
			t.Fatal(err)
		}
	}
	leaf, err := broker.NewLeaf(configs.Leaf{
		Name: "l1", Edge: up.DefaultEdge, Listen: "127.0.0.1:0", HeartbeatBound: bound,
		TLS: configs.TLS{Certificate: in("leaf.pem"), Key: in("leaf.key"), CA: s.Folder.CA()},
		Hub: []string{"tls://" + s.link.Addr()}, NKey: in("leaf.nk"),
		Issuer: must(identity.LoadNKey(s.Folder.NKey("issuer"))).Public(),
	}, broker.Deps{Log: s.logger("leaf")})
	if err != nil {
		t.Fatal(err)
	}
	s.leaf = leaf
	runUntilCleanup(t, "leaf", leaf.Run)
	s.Wait(leaf.Ready(), "the leaf")
}

func (s *site) startNode(t *testing.T) {
	t.Helper()
	cfg := s.NodeConfig("site")
	n, err := up.NewNode(cfg, func() []string { return []string{s.leaf.ClientURL()} }, s.logger("site"), nil)
	if err != nil {
		t.Fatal(err)
	}
	runUntilCleanup(t, "node", n.Run)
}

func (s *site) logger(who string) *slog.Logger {
	return slog.New(slog.NewTextHandler(s.Log, &slog.HandlerOptions{Level: slog.LevelDebug})).With(slog.String("daemon", who))
}

func runUntilCleanup(t *testing.T, what string, run func(context.Context) error) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("%s: %v", what, err)
		}
	})
}

// answer is what a caller got of a stream.
type answer struct {
	name string
	got  string
	err  error
	gap  time.Duration // the longest wait between two reads
}

// open starts a stream and returns once its first bytes are here; the rest is
// read beside and comes on the channel.
func (s *site) open(t *testing.T, model, name string, events int) <-chan answer {
	t.Helper()
	body := must(json.Marshal(ask{Model: model, User: name, Stream: true, Events: events}))
	req := s.Request(context.Background(), http.MethodPost, "/v1/chat/completions", string(body))
	id := s.seen.Invoke(req)
	resp, err := s.Client.Do(req)
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("%s: %v %v\n%s", name, resp, err, s.Log)
	}
	buf := make([]byte, 8<<10)
	n, err := resp.Body.Read(buf)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	out := make(chan answer, 1)
	go func() {
		defer resp.Body.Close()
		a := answer{name: name, got: string(buf[:n])}
		var all strings.Builder
		all.WriteString(a.got)
		last := time.Now()
		for {
			n, err := resp.Body.Read(buf)
			all.Write(buf[:n])
			a.gap = max(a.gap, time.Since(last))
			last = time.Now()
			if err != nil {
				if err != io.EOF {
					a.err = err
				}
				break
			}
		}
		a.got = all.String()
		outcome := history.OK
		if a.err != nil || !strings.HasSuffix(a.got, "data: [DONE]\n\n") {
			outcome = history.Fail
		}
		s.seen.Ended(id, ioptest.OwnBytes(a.got), outcome)
		out <- a
	}()
	return out
}

func (s *site) read(t *testing.T, ch <-chan answer) answer {
	t.Helper()
	select {
	case a := <-ch:
		return a
	case <-time.After(ioptest.Hang):
		t.Fatalf("a stream hangs\n%s", s.Log)
		return answer{}
	}
}

// cut takes the link away for d.
func (s *site) cut(d time.Duration) {
	defer s.seen.Fault("link")()
	timer := time.NewTimer(d)
	s.link.Refuse(true)
	s.link.Cut()
	<-timer.C
	s.link.Refuse(false)
}

const streams, events = 20, 150

// The link between leaf and hub is gone for a second while twenty streams run
// over it: every byte arrives, once and in order; the session stays.
//
// Contract: J5 J2 G4 Y3
func TestLinkDropLosesNoStream(t *testing.T) {
	s := start(t, 5*time.Second)
	var open []<-chan answer
	for i := range streams {
		open = append(open, s.open(t, behind, fmt.Sprintf("s%d", i), events))
	}
	s.cut(time.Second)
	var longest time.Duration
	for _, ch := range open {
		a := s.read(t, ch)
		if want := whole(a.name, events); a.err != nil || a.got != want {
			t.Errorf("%s: %d bytes of %d, %v: ends %q", a.name, len(a.got), len(want), a.err, a.got[max(0, len(a.got)-200):])
		}
		longest = max(longest, a.gap)
	}
	t.Logf("link gone for 1s: the longest pause of %d streams was %v", streams, longest)
	if n := strings.Count(s.Log.String(), "msg=node.disconnected node=site"); n != 0 {
		t.Errorf("the session ended %d times", n)
	}
	// It serves on, under the same generation.
	a := s.read(t, s.open(t, behind, "after", 3))
	if a.got != whole("after", 3) {
		t.Errorf("after it: %q %v", a.got, a.err)
	}
}

// A request that comes while the link is gone for a moment waits for it: nobody answers
// for the Node, and nobody else is there, but its session stands.
//
// Contract: G4 J5 H6 P9
func TestLinkDropRefusesNoRequest(t *testing.T) {
	s := start(t, 5*time.Second)
	defer s.seen.Fault("link")()
	s.link.Refuse(true)
	s.link.Cut()
	type reply struct {
		status int
		body   string
	}
	came := make(chan reply, 1)
	go func() {
		body := must(json.Marshal(ask{Model: behind, User: "new", Stream: true, Events: 3}))
		req := s.Request(context.Background(), http.MethodPost, "/v1/chat/completions", string(body))
		id := s.seen.Invoke(req)
		resp, err := s.Client.Do(req)
		if err != nil {
			came <- reply{body: err.Error()}
			return
		}
		defer resp.Body.Close()
		got, _ := io.ReadAll(resp.Body)
		outcome := history.OK
		if resp.StatusCode != http.StatusOK {
			outcome = history.Fail
		}
		s.seen.Ended(id, ioptest.OwnBytes(string(got)), outcome)
		came <- reply{resp.StatusCode, string(got)}
	}()
	scrape := func() string {
		resp, err := s.Client.Get("http://" + s.Edge.AdminAddr() + "/metrics")
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		return string(must(io.ReadAll(resp.Body)))
	}
	for !again.MatchString(scrape()) {
		select {
		case r := <-came:
			t.Fatalf("answered while the link was gone: %+v", r)
		default:
		}
	}
	s.link.Refuse(false)
	select {
	case r := <-came:
		if r.status != http.StatusOK || r.body != whole("new", 3) {
			t.Errorf("%+v", r)
		}
	case <-time.After(ioptest.Hang):
		t.Fatalf("the request hangs\n%s", s.Log)
	}
}

// again matches when a request of which nothing was heard went out again.
var again = regexp.MustCompile(`(?m)^iop_edge_request_repeats_total [1-9]`)

// A link that hangs for a second, so that nothing passes and nothing closes,
// loses no stream either.
//
// Contract: J5 Y3
func TestLinkHungLosesNoStream(t *testing.T) {
	s := start(t, 5*time.Second)
	open := s.open(t, behind, "hung", events)
	timer := time.NewTimer(time.Second)
	s.link.Hold()
	<-timer.C
	s.link.Release()
	if a := s.read(t, open); a.err != nil || a.got != whole("hung", events) {
		t.Errorf("%d bytes, %v", len(a.got), a.err)
	}
}

// The link is gone for longer than the bound: each stream ends with one error,
// the site's Node is fenced, and comes back by itself under a higher generation.
//
// Contract: Y3 F2 F9 J4 B7
func TestLinkGoneForLong(t *testing.T) {
	s := start(t, time.Second)
	var open []<-chan answer
	for i := range 5 {
		open = append(open, s.open(t, behind, fmt.Sprintf("s%d", i), 1<<20))
	}
	s.link.Refuse(true)
	s.link.Cut()
	for _, ch := range open {
		a := s.read(t, ch)
		if strings.Count(a.got, `"error"`) != 1 || strings.Contains(a.got, "[DONE]") {
			t.Errorf("%s: ends %q, %v", a.name, a.got[max(0, len(a.got)-200):], a.err)
		}
	}
	s.Log.AwaitEvent(t, "node.disconnected", "node=site")
	s.Log.AwaitEvent(t, "leaf.cut")
	s.link.Refuse(false)
	back := time.Now()
	s.Log.AwaitSession(t, "site", s.gen)
	t.Logf("the Node was back %v after the link", time.Since(back))
	if a := s.read(t, s.open(t, behind, "after", 3)); a.got != whole("after", 3) {
		t.Errorf("after it: %q %v", a.got, a.err)
	}
}

// What a leaf adds to a call, beside the same call without one. No bound: it is
// measured where everything shares a machine.
//
// Contract: Y3
func TestLatencyBesideDirect(t *testing.T) {
	s := start(t, 5*time.Second)
	took := map[string][]time.Duration{}
	for i := range 200 {
		for _, model := range []string{direct, behind} {
			body := must(json.Marshal(ask{Model: model, User: fmt.Sprint(i)}))
			began := time.Now()
			req := s.Request(t.Context(), http.MethodPost, "/v1/chat/completions", string(body))
			id := s.seen.Invoke(req)
			resp, got := s.Do(req)
			s.seen.Ended(id, []byte(got), history.OK)
			if resp.StatusCode != http.StatusOK || got != fmt.Sprintf(`{"user":"%d"}`, i) {
				t.Fatalf("%s: %d %s", model, resp.StatusCode, got)
			}
			took[model] = append(took[model], time.Since(began))
		}
	}
	for _, model := range []string{direct, behind} {
		slices.Sort(took[model])
		n := len(took[model])
		t.Logf("%s: p50 %v, p99 %v", model, took[model][n/2], took[model][n*99/100])
	}
}
