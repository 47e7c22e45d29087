package edge

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/edge/pool"
	"github.com/iop-fabric/iop/edge/registry"
	"github.com/iop-fabric/iop/internal/bus"
	"github.com/iop-fabric/iop/internal/identity"
	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/wire/iopv1"
)

// registers puts a registration into the inbox as the verifiers do.
func (l *loop) registers(node, payload string, gen uint64, verdict error) {
	l.in.put(item{reg: registry.RegisterReceived{
		Node: node, Gen: gen, PayloadNode: payload, Verified: verdict, ProtocolMin: 1, ProtocolMax: 1,
	}, regis: &registration{gen: gen}}, true)
}

// A node that is not configured is taken in once it has proved itself, and for
// nothing less; many that come at once are one change.
//
// Contract: B11 P1 R2
func TestInvitedNodesAreTakenIn(t *testing.T) {
	var asked [][]string
	var accepted atomic.Int64
	known := []string{"n"}
	p := &fakePort{invited: func(proved []string) ([]string, pool.Config, bool) {
		asked = append(asked, slices.Clone(proved))
		known = append(known, proved...)
		return known, pool.Config{Auto: true}, true
	}}
	l, stop := startLoop(t, p, 1)
	defer stop()
	sync := func() {
		t.Helper()
		if err := l.ask(t.Context(), func() {
			accepted.Store(0)
			for _, n := range []string{"a", "b", "c", "liar", "forger"} {
				if _, s := l.reg.Owner(n); s == registry.Pending {
					accepted.Add(1)
				}
			}
		}); err != nil {
			t.Fatal(err)
		}
	}
	l.registers("liar", "n", 3, nil)
	l.registers("forger", "forger", 4, errors.New("no proof"))
	sync()
	if len(asked) != 0 || accepted.Load() != 0 {
		t.Fatalf("taken in: %v, %d accepted", asked, accepted.Load())
	}
	// Held up, the loop finds them all at once.
	hold, held := make(chan struct{}), make(chan struct{})
	l.in.put(item{do: func() { close(held); <-hold }}, false)
	<-held
	l.registers("a", "a", 5, nil)
	l.registers("b", "b", 6, nil)
	l.registers("c", "c", 7, nil)
	close(hold)
	sync()
	if len(asked) != 1 || !slices.Equal(asked[0], []string{"a", "b", "c"}) || accepted.Load() != 3 {
		t.Errorf("taken in: %v, %d accepted", asked, accepted.Load())
	}
}

// Only where edge.invited says so, and each once; the operator's own words about a
// node stand, and so does the configuration that the Edge was given.
//
// Contract: B11 P1
func TestTakeIn(t *testing.T) {
	cfg := configs.Edge{Name: "home", Nodes: []configs.EdgeNode{{Name: "desk", Adapters: []configs.Adapter{{Type: configs.TypeDemo}}}}}
	f := &configs.File{Broker: &configs.Broker{}, Edge: &cfg}
	if err := f.Complete(); err != nil {
		t.Fatal(err)
	}
	given := f.Edge.Nodes
	e := &Edge{cfg: *f.Edge, log: slog.New(slog.DiscardHandler)}
	if _, _, ok := e.takeIn([]string{"gpu1"}); ok || len(e.cfg.Nodes) != 1 {
		t.Error("taken in though nobody said so")
	}
	e.cfg.Invited = new(true)
	if _, _, ok := e.takeIn([]string{"desk"}); ok {
		t.Error("what is configured is taken in again")
	}
	names, pc, ok := e.takeIn([]string{"gpu1", "desk", "gpu1", "gpu2"})
	if !ok || !slices.Equal(names, []string{"desk", "gpu1", "gpu2"}) || len(given) != 1 {
		t.Errorf("%v %v %v", ok, names, given)
	}
	count := map[string]int{}
	for _, a := range pc.Adapters {
		count[a.Node]++
		if a.Capacity == 0 || len(a.Operations) == 0 {
			t.Errorf("an adapter without its defaults: %+v", a)
		}
	}
	if all := len(configs.LocalAdapters(false)); count["desk"] != 1 || count["gpu1"] != all || count["gpu2"] != all {
		t.Errorf("adapters: %v", count)
	}
	if n := len(nodePayload(&e.cfg, "gpu1").GetAdapters()); n != len(configs.LocalAdapters(false)) {
		t.Errorf("it is told to run %d adapters", n)
	}
	e.cfg.InvitedAdapters = []configs.Adapter{{Name: "one", Type: configs.TypeDemo}}
	if e.takeIn([]string{"gpu3"}); len(nodePayload(&e.cfg, "gpu3").GetAdapters()) != 1 {
		t.Error("edge.invited_adapters is not what it runs")
	}
	if _, _, ok := e.takeIn([]string{"gpu1"}); ok {
		t.Error("it is taken in twice")
	}
}

// A node that was taken in leaves when it is revoked: it is not listed, its session is
// over, and it is taken in again when it comes back. One of the configuration stays.
//
// Contract: B8 B11
func TestRevokedNodeLeaves(t *testing.T) {
	cfg := configs.Edge{Name: "home", Invited: new(true), Nodes: []configs.EdgeNode{{Name: "desk", Adapters: []configs.Adapter{{Type: configs.TypeDemo}}}}}
	f := &configs.File{Broker: &configs.Broker{}, Edge: &cfg}
	if err := f.Complete(); err != nil {
		t.Fatal(err)
	}
	reg := registry.New(registry.Config{Nodes: []string{"desk"}})
	e := &Edge{cfg: *f.Edge, log: slog.New(slog.DiscardHandler), given: map[string]bool{"desk": true}, now: time.Now, ready: make(chan struct{}), metrics: newMetrics(prometheus.NewRegistry())}
	cert, err := identity.NewCA("iop", time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	own, err := cert.Issue(identity.ID{TrustDomain: "iop", Edge: "home", Role: identity.RoleEdge, Name: "home"}, nil, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	e.cert.Store(own)
	port := &fakePort{invited: e.takeIn}
	e.loop = newLoop(reg, pool.New(), port, time.Hour, e.log, e.metrics)
	done := make(chan error, 1)
	ctx, cancel := context.WithCancel(t.Context())
	go func() { done <- e.loop.run(ctx) }()
	defer func() { cancel(); <-done }()
	e.bus = &redialled{}
	listed := func() (names []string) {
		t.Helper()
		if err := e.loop.ask(t.Context(), func() {
			for _, n := range e.nodes() {
				names = append(names, n.Node)
			}
		}); err != nil {
			t.Fatal(err)
		}
		return names
	}
	notice := func(n *iopv1.SessionNotice) {
		t.Helper()
		data, err := n.MarshalVT()
		if err != nil {
			t.Fatal(err)
		}
		e.onCtl(bus.Msg{Subject: subjects.Ctl("home", subjects.Changed), Data: data})
	}
	e.loop.registers("gpu1", "gpu1", 3, nil)
	if got := listed(); !slices.Equal(got, []string{"desk", "gpu1"}) {
		t.Fatalf("listed: %v", got)
	}
	notice(&iopv1.SessionNotice{Key: "some/key", Revision: 4}) // of the store: another matter
	notice(&iopv1.SessionNotice{NodeId: "desk", Reason: "revoked"})
	notice(&iopv1.SessionNotice{NodeId: "nobody", Reason: "revoked"})
	if got := listed(); len(got) != 2 {
		t.Errorf("listed: %v", got)
	}
	notice(&iopv1.SessionNotice{NodeId: "gpu1", Reason: "revoked"})
	if got := listed(); !slices.Equal(got, []string{"desk"}) || port.count("fence") == 0 {
		t.Errorf("revoked, and listed: %v", got)
	}
	e.loop.registers("gpu1", "gpu1", 4, nil)
	if got := listed(); !slices.Equal(got, []string{"desk", "gpu1"}) {
		t.Errorf("back, and listed: %v", got)
	}
}
