//go:build linux

package netns

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/iop-fabric/iop/internal/history"
	"github.com/iop-fabric/iop/internal/ioptest"
)

var (
	chaosTime    = flag.Duration("chaos", 0, "go on with faults, with a new seed for each tour, for so long; 0: one tour")
	chaosSeed    = flag.Uint64("chaos-seed", 1, "of the first tour")
	chaosStreams = flag.Int("chaos-streams", 1000, "how many streams each fault meets, at least")
	chaosOnly    = flag.String("chaos-only", "", "the faults whose names have this in them, and no other")
)

// tour is a fabric which one fault after another meets: three brokers and a leaf, an
// Edge, two Nodes at the third broker and one behind the leaf. Their provider is this
// process.
type tour struct {
	*fabric
	seed     uint64
	rnd      *rand.Rand
	edge     *process
	leaf     *process
	brokers  map[string]*process
	nodes    map[string]*process
	sessions *sessions
	client   *http.Client
	filler   string
	calls    sync.Map // by id
	n        int      // calls so far
	sum      sums
}

var nodeNames = []string{"n1", "n2", "far"}

// sums are what a tour came to.
type sums struct {
	faults, streams, ok, failed int
	bytes                       int64
	again                       float64
	pauses                      []time.Duration
}

func newTour(t *testing.T, seed uint64) *tour {
	f := newFabric(t, plan{brokers: 3, leaves: []string{"attic"}, nodes: []string{"n1", "n2", "far@attic"}})
	f.level = "info"
	tr := &tour{
		fabric: f, seed: seed, rnd: rand.New(rand.NewPCG(seed, 0)),
		brokers: map[string]*process{}, nodes: map[string]*process{},
		sessions: &sessions{live: map[string]uint64{}}, filler: strings.Repeat("0123456789abcdef", uploadSize/16),
	}
	dials := make(chan struct{}, 16) // each keeps a thread
	edge := f.client.Transport.(*http.Transport).DialContext
	transport := &http.Transport{DisableCompression: true, MaxIdleConnsPerHost: 2 * *chaosStreams}
	transport.DialContext = func(ctx context.Context, network, address string) (net.Conn, error) {
		dials <- struct{}{}
		defer func() { <-dials }()
		return edge(ctx, network, address)
	}
	tr.client = &http.Client{Transport: transport}
	t.Cleanup(tr.client.CloseIdleConnections)
	for _, n := range nodeNames {
		f.provide(n, 2**chaosStreams, tr.provider(n))
	}
	f.knowing("edge", "broker-1", "broker-2")
	f.knowing("node-n1", "broker-3")
	f.knowing("node-n2", "broker-3")
	f.also["edge"] = tr.sessions
	for _, b := range []string{"broker-1", "broker-2", "broker-3"} {
		tr.brokers[b] = f.start(b)
	}
	tr.edge, tr.leaf = f.start("edge"), f.start("leaf-attic")
	for _, n := range nodeNames {
		tr.nodes[n] = f.start("node-" + n)
	}
	for _, n := range nodeNames {
		tr.edge.connected(n, 0)
	}
	for _, b := range tr.brokers {
		b.ready()
	}
	return tr
}

func (t *tour) provider(node string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c, ok := t.calls.Load(r.Header.Get(callHeader))
		if !ok { // the Node looks what there is
			w.Header().Set("Content-Type", "application/json")
			_, _ = w.Write([]byte(`{"data":[{"id":"m"}]}`)) // it asks again
			return
		}
		c.(*call).serve(node, w, r)
	})
}

// fault is what happens to a tour, and what must come of it.
type fault struct {
	name   string
	lasts  time.Duration
	do     func(t *tour, at string) (heal func()) // at: the Edge's broker
	loses  []string                               // Nodes whose frames are lost for sure
	ends   []string                               // Nodes whose sessions end, and no others
	claims time.Duration                          // the p99 of the pauses, published
	alone  bool                                   // it is not combined with another
}

var (
	near = []string{"n1", "n2"}
	far  = []string{"far"}
)

// outlived are the faults that sessions outlive, each shorter than the heartbeat
// bound less two seconds: so do all streams (J5).
var outlived = []fault{
	{name: "Edge's link silent", lasts: time.Second, claims: 4 * time.Second, do: func(t *tour, _ string) func() {
		t.edge.blackHole()
		return t.edge.heal
	}},
	{name: "Edge's cable out", lasts: time.Second, claims: 4 * time.Second, do: func(t *tour, _ string) func() {
		t.edge.unplug()
		return t.edge.heal
	}},
	{name: "Edge's link reset", lasts: time.Second, loses: near, do: func(t *tour, _ string) func() {
		t.edge.reset()
		return t.edge.heal
	}},
	{name: "Edge's broker killed", lasts: time.Second, claims: time.Second, alone: true, do: func(t *tour, at string) func() {
		t.brokers[at].kill()
		return func() { t.restart(at) }
	}},
	{name: "Edge's broker paused", lasts: 2 * time.Second, claims: 4 * time.Second, do: func(t *tour, at string) func() {
		t.brokers[at].pause()
		return func() { t.brokers[at].resume() }
	}},
	{name: "leaf's link silent", lasts: time.Second, claims: 4 * time.Second, do: func(t *tour, _ string) func() {
		t.uplink(t.leaf.blackHoleTo)
		return t.leaf.heal
	}},
	{name: "leaf's link reset", lasts: time.Second, loses: far, do: func(t *tour, _ string) func() {
		t.uplink(t.leaf.resetTo)
		return t.leaf.heal
	}},
	{name: "leaf's hub out of its reach", lasts: time.Second, loses: far, do: func(t *tour, _ string) func() {
		t.leaf.resetTo(t.host(t.leaf.broker()))
		return t.leaf.heal
	}},
	{name: "the brokers' route silent", lasts: 2 * time.Second, claims: 4 * time.Second, do: func(t *tour, at string) func() {
		return t.between(at, "broker-3", (*host).blackHoleTo)
	}},
	// Of its connections the last breaks at the next ping, after at most 1.25 s.
	{name: "the brokers' route reset", lasts: 1500 * time.Millisecond, loses: near, do: func(t *tour, at string) func() {
		return t.between(at, "broker-3", (*host).resetTo)
	}},
}

// ending are faults that sessions do not outlive, and the Nodes whose do not.
var ending = []fault{
	{name: "a Node killed", lasts: 500 * time.Millisecond, ends: []string{"n2"}, do: func(t *tour, _ string) func() {
		t.nodes["n2"].kill()
		return func() { t.nodes["n2"] = t.start("node-n2") }
	}},
	{name: "the Nodes' broker killed", lasts: 500 * time.Millisecond, ends: near, do: func(t *tour, _ string) func() {
		t.brokers["broker-3"].kill()
		return func() { t.restart("broker-3") }
	}},
}

func (t *tour) restart(broker string) {
	t.brokers[broker] = t.start(broker)
	t.brokers[broker].ready()
}

func (t *tour) uplink(rule func(to *host)) {
	for b := range t.brokers {
		rule(t.host(b))
	}
}

func (t *tour) between(a, b string, rule func(from, to *host)) (heal func()) {
	rule(t.host(a), t.host(b))
	rule(t.host(b), t.host(a))
	return func() { t.host(a).heal(); t.host(b).heal() }
}

// combined is two of those that are outlived, at once.
func (t *tour) combined() fault {
	pair := slices.DeleteFunc(slices.Clone(outlived), func(f fault) bool { return f.alone })
	t.rnd.Shuffle(len(pair), func(i, j int) { pair[i], pair[j] = pair[j], pair[i] })
	a, b := pair[0], pair[1]
	return fault{name: a.name + " and " + b.name, lasts: max(a.lasts, b.lasts), do: func(t *tour, at string) func() {
		healA := a.do(t, at)
		healB := b.do(t, at)
		return func() { healA(); healB() }
	}}
}

// faults are those of the tour, in its order. All but the first tour's last as long as
// the seed says.
func (t *tour) faults() (all []fault) {
	for _, f := range append(append(slices.Clone(outlived), t.combined()), ending...) {
		if strings.Contains(f.name, *chaosOnly) {
			all = append(all, f)
		}
	}
	if t.seed == 1 {
		return all
	}
	t.rnd.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	for i, f := range all {
		if len(f.loses) == 0 { // what loses for sure does so in its time
			all[i].lasts = f.lasts/4 + time.Duration(t.rnd.Int64N(int64(f.lasts)))
		}
	}
	return all
}

// A thousand streams at a time, paced ones, bursts and large bodies, between callers
// and providers over real processes, meet one fault after the other. Whatever does
// not end their session, every one of them comes whole; what does, ends each of that
// session's with one error after an exact beginning, and no other. The history of
// both ends is judged as a simulated one is.
//
// Contract: J5 J1 J2 J4 J7 Y2 Y3 F2 F10 G4
func TestChaos(t *testing.T) {
	var sum sums
	began := time.Now()
	for seed := *chaosSeed; ; seed++ {
		t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) {
			tr := newTour(t, seed)
			for _, f := range tr.faults() {
				tr.meet(t, f)
			}
			for _, p := range append([]*process{tr.edge, tr.leaf}, tr.nodes["n1"], tr.nodes["far"]) {
				p.alive()
			}
			sum.add(tr.sum)
		})
		if t.Failed() || time.Since(began) >= *chaosTime {
			break
		}
	}
	t.Logf("%d faults, %d streams under way: %d ok, %d failed as they must; %.1f MB, %.0f frames again, pause %s", sum.faults, sum.streams, sum.ok, sum.failed, float64(sum.bytes)/1e6, sum.again, shares(sum.pauses))
}

func (s *sums) add(o sums) {
	s.faults += o.faults
	s.streams += o.streams
	s.ok += o.ok
	s.failed += o.failed
	s.bytes += o.bytes
	s.again += o.again
	s.pauses = append(s.pauses, o.pauses...)
}

// shares are the percentiles of pauses, which it sorts.
func shares(p []time.Duration) string {
	slices.Sort(p)
	return fmt.Sprintf("p50 %v, p99 %v, max %v", percentile(p, 50), percentile(p, 99), percentile(p, 100))
}

// percentile is one of sorted pauses.
func percentile(sorted []time.Duration, percent int) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[(len(sorted)-1)*percent/100].Round(time.Millisecond)
}

// load makes the calls of a round: two fifths of them at each Node at the brokers, a
// fifth behind the leaf.
func (t *tour) load(r *round) (all []*call) {
	add := func(n int, node string, k kind) {
		for range n {
			all = append(all, t.call(r, node, k))
		}
	}
	for node, fifths := range map[string]int{"n1": 2, "n2": 2, "far": 1} {
		add(fifths**chaosStreams/5, node, paced)
		add(max(1, fifths**chaosStreams/100), node, burst)
		add(max(1, fifths**chaosStreams/1000), node, held)
		add(fifths, node, upload)
		all[len(all)-1].hurries = true
	}
	return all
}

func (t *tour) call(r *round, node string, k kind) *call {
	t.n++
	c := r.newCall(fmt.Sprintf("q%d", t.n), node, k, t.seed<<32+uint64(t.n), t.filler)
	t.calls.Store(c.id, c)
	return c
}

// meet has one fault meet a load of streams, and judges all of it.
func (tr *tour) meet(t *testing.T, f fault) {
	t.Helper()
	var file bytes.Buffer
	r := &round{client: tr.client, key: tr.key, w: history.NewWriter(&file), fault: make(chan struct{}), mended: make(chan struct{}), over: make(chan struct{})}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	for _, n := range nodeNames {
		r.w.Add(history.Event{Kind: history.Up, Node: n})
	}
	gens, ended := tr.sessions.begin(r.w)
	tr.probe(ctx, r)
	calls := tr.load(r)
	var callers sync.WaitGroup
	for _, c := range calls {
		callers.Go(func() { c.make(ctx) })
	}
	for _, c := range calls {
		c.reaches(t, c.begun)
	}

	at, before := tr.edge.broker(), tr.resent(f.loses)
	r.w.Add(history.Event{Kind: history.Start, Fault: f.name})
	close(r.fault)
	began := time.Now()
	heal := f.do(tr, at)
	tr.elapse(f.lasts - time.Since(began))
	heal()
	r.healed.Store(time.Now().UnixNano())
	close(r.mended)
	r.w.Add(history.Event{Kind: history.Stop, Fault: f.name})
	for _, c := range calls {
		c.reaches(t, c.again)
	}
	for _, n := range f.ends {
		tr.edge.connected(n, gens[n])
	}
	close(r.over)
	hang := time.AfterFunc(ioptest.Hang, cancel)
	callers.Wait()
	hang.Stop()
	again := tr.resent(f.loses) - before
	r.w.Add(history.Event{Kind: history.Resent, N: int64(again)})
	probes := tr.probe(ctx, r)
	lost := tr.sessions.finish() - ended
	r.w.Add(history.Event{Kind: history.End})
	tr.judge(t, f, r, &file, lost)
	tr.tell(t, f, calls, again)
	for _, c := range append(calls, probes...) {
		tr.calls.Delete(c.id)
	}
}

// probe has every Node serve a call.
func (t *tour) probe(ctx context.Context, r *round) (all []*call) {
	for _, n := range nodeNames {
		c := t.call(r, n, probe)
		c.make(ctx)
		all = append(all, c)
	}
	return all
}

// reaches waits until a call has reached the mark, or has ended.
func (c *call) reaches(t *testing.T, m *mark) {
	t.Helper()
	select {
	case <-m.ch:
	case <-c.ended:
	case <-time.After(ioptest.Hang):
		t.Fatalf("%s of %s hangs", c.id, c.node)
	}
}

// resent is how many frames went out again: of the Nodes named, or of all.
func (t *tour) resent(nodes []string) (n float64) {
	if nodes == nil {
		nodes = []string{"n1", "far"} // n2 may be another process by now
	}
	for _, name := range nodes {
		n += t.nodes[name].metric("iop_node_frames_resent_total")
	}
	return n
}

// judge has the checker look at the history.
func (tr *tour) judge(t *testing.T, f fault, r *round, file *bytes.Buffer, lost int) {
	t.Helper()
	must(t, r.w.Err())
	kept := slices.Clone(file.Bytes())
	c := history.NewChecker(history.Options{Partial: true, Outlived: f.ends == nil, LiveBound: interval + 2*time.Second + slack})
	must(t, history.Read(file, c.Add))
	floors := history.Floors{OKCalm: 1, OKFaulted: 1, FaultsHit: 1, Fences: int64(len(f.ends))}
	if f.loses != nil {
		floors.Resent = 1
	}
	if f.ends != nil {
		floors.OKFaulted = 0.1
	}
	breaches := append(c.Breaches(), c.Counts().Void(floors)...)
	for _, b := range breaches {
		t.Errorf("%s: %v", f.name, b)
	}
	if n := c.Counts().Redispatched; n != 0 {
		t.Errorf("%s: %d requests were served twice", f.name, n)
	}
	if lost != len(f.ends) {
		t.Errorf("%s: %d sessions have ended, not %d", f.name, lost, len(f.ends))
	}
	if len(breaches) > 0 {
		name := filepath.Join(t.ArtifactDir(), strings.ReplaceAll(f.name, " ", "-")+".jsonl")
		must(t, os.WriteFile(name, kept, 0o600))
	}
}

// tell looks at what each call was to come to, and prints the fault's line.
func (tr *tour) tell(t *testing.T, f fault, calls []*call, again float64) {
	t.Helper()
	var (
		s   = sums{faults: 1, streams: len(calls), again: again}
		bad []string
	)
	for _, c := range calls {
		s.bytes += c.got
		want := history.OK
		if slices.Contains(f.ends, c.node) {
			want = history.Fail
		}
		switch {
		case c.wrong != "" || c.outcome != want:
			bad = append(bad, fmt.Sprintf("%s of %s, kind %d: %s, %s %s", c.id, c.node, c.kind, c.outcome, c.why, c.wrong))
		case want == history.OK:
			s.ok++
			if c.pause > 0 {
				s.pauses = append(s.pauses, c.pause)
			}
		default:
			s.failed++
		}
	}
	for _, b := range bad[:min(len(bad), 5)] {
		t.Errorf("%s: %s", f.name, b)
	}
	if s.streams < *chaosStreams {
		t.Errorf("%s: only %d streams were under way", f.name, s.streams)
	}
	pauses := shares(s.pauses)
	if p99 := percentile(s.pauses, 99); f.claims > 0 && p99 > 0 {
		pauses += fmt.Sprintf(" (claim: p99 < %v", f.claims)
		if p99 >= f.claims {
			pauses += ", missed"
		}
		pauses += ")"
	}
	t.Logf("%s for %v: %d streams under way, %d whole, %d failed as they must, %d wrong; pause %s; %.1f MB, %.0f frames again",
		f.name, f.lasts.Round(time.Millisecond), s.streams, s.ok, s.failed, len(bad), pauses, float64(s.bytes)/1e6, again)
	tr.sum.add(s)
}
