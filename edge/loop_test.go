package edge

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"github.com/iop-fabric/iop/edge/httpapi"
	"github.com/iop-fabric/iop/edge/pool"
	"github.com/iop-fabric/iop/edge/registry"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fakePort records what the loop orders. Its methods run on the loop's goroutine.
type fakePort struct {
	mu    sync.Mutex
	order []string
	ended []pool.Slot
	beat  func()
	ack   error
	// invited is what takeIn answers with; nil: nobody is taken in.
	invited func([]string) ([]string, pool.Config, bool)
}

func (p *fakePort) note(s string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.order = append(p.order, s)
}

func (p *fakePort) count(s string) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := 0
	for _, o := range p.order {
		if o == s {
			n++
		}
	}
	return n
}

func (p *fakePort) sendRegisterAnswer(registry.SendRegisterAnswer, *registration) { p.note("register") }

func (p *fakePort) sendReadyAnswer(registry.SendReadyAnswer) error { p.note("ready"); return p.ack }

func (p *fakePort) sendFence(registry.SendFence) { p.note("fence") }

func (p *fakePort) connected(string, uint64) { p.note("connected") }

func (p *fakePort) disconnected(string, uint64, registry.Reason) { p.note("disconnected") }

func (p *fakePort) sendHeartbeat(string, uint64) {
	if p.beat != nil {
		p.beat()
	}
}

func (p *fakePort) takeIn(proved []string) ([]string, pool.Config, bool) {
	if p.invited == nil {
		return nil, pool.Config{}, false
	}
	return p.invited(proved)
}

func (p *fakePort) endAttempt(s pool.Slot, _ string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ended = append(p.ended, s)
}

// startLoop runs a loop with one node "n" whose one provider serves "m".
func startLoop(t *testing.T, p *fakePort, capacity int) (l *loop, stop func()) {
	t.Helper()
	reg := registry.New(registry.Config{Nodes: []string{"n"}, HeartbeatBound: 5 * time.Second})
	l = newLoop(reg, pool.New(), p, time.Second, slog.New(slog.DiscardHandler), newMetrics(prometheus.NewRegistry()))
	l.in.put(item{isPool: true, pool: pool.SetConfig(pool.Config{
		Adapters:  []pool.Adapter{{Node: "n", Name: "a", Capacity: capacity}},
		Providers: []pool.Provider{{ID: "p", Node: "n", Adapter: "a", Target: "m"}},
		Groups:    []pool.Group{{Name: "m", Candidates: []pool.Candidate{{Provider: "p"}}}},
	})}, false)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); l.run(ctx) }()
	return l, func() { cancel(); <-done }
}

func (l *loop) join(gen uint64) {
	l.in.put(item{reg: registry.Admitted{Node: "n", Gen: gen}}, false)
	l.in.put(item{reg: registry.RegisterReceived{Node: "n", Gen: gen, PayloadNode: "n", ProtocolMin: 1, ProtocolMax: 1}}, false)
	l.in.put(item{reg: registry.ReadyReceived{Node: "n", Gen: gen, PayloadNode: "n"}}, false)
}

func (l *loop) acquire(ctx context.Context, want httpapi.Want) (g httpapi.Grant, err error) {
	err = l.Acquire(ctx, &want, &g)
	return g, err
}

// The caller leaves in the instant it is granted: the slot is returned once and
// the one behind it is served; nobody waits for a timer (trap 7).
//
// Contract: P8 Q4 E5
func TestTrap07GrantAgainstGoneCaller(t *testing.T) {
	l, stop := startLoop(t, &fakePort{}, 1)
	defer stop()
	l.join(1)
	var wg sync.WaitGroup
	var held, most atomic.Int64
	for range 16 {
		wg.Go(func() {
			for i := range 200 {
				ctx, cancel := context.WithCancel(t.Context())
				if i%2 == 0 {
					go cancel()
				}
				g, err := l.acquire(ctx, httpapi.Want{Model: "m", Principal: "k"})
				if err == nil {
					most.Store(max(most.Load(), held.Add(1)))
					held.Add(-1)
					l.returnSlot(g.Slot, pool.ByTerminal)
				} else if !errors.Is(err, context.Canceled) {
					t.Errorf("%v", err)
				}
				cancel()
			}
		})
	}
	wg.Wait()
	var snap pool.Snapshot
	if err := l.ask(t.Context(), func() { snap = l.pool.Snapshot() }); err != nil {
		t.Fatal(err)
	}
	if snap.Held != 0 || snap.Waiting != 0 || most.Load() > 1 {
		t.Errorf("held %d, waiting %d, at once %d", snap.Held, snap.Waiting, most.Load())
	}
	if len(l.waiters) != 0 { // the loop is idle: the question above was its last event
		t.Errorf("%d waiters are remembered", len(l.waiters))
	}
}

// A release and the end of the session at once, in both orders: no grant under
// the fenced generation, each slot returned once, the waiters stay (trap 6).
//
// Contract: F3 F5 P8 P9
func TestTrap06GrantAgainstFence(t *testing.T) {
	p := &fakePort{}
	l, stop := startLoop(t, p, 1)
	defer stop()
	for gen := uint64(1); gen <= 50; gen++ {
		l.join(gen)
		first, err := l.acquire(t.Context(), httpapi.Want{Model: "m"})
		if err != nil || first.Slot.Gen != gen {
			t.Fatalf("%+v %v", first, err)
		}
		got := make(chan httpapi.Grant, 1)
		go func() {
			g, err := l.acquire(t.Context(), httpapi.Want{Model: "m"})
			if err != nil {
				t.Error(err)
			}
			got <- g
		}()
		var wg sync.WaitGroup
		wg.Go(func() { l.returnSlot(first.Slot, pool.ByTerminal) })
		wg.Go(func() { l.in.put(item{reg: registry.Closed{Node: "n", Gen: gen}}, false) })
		wg.Wait()
		l.join(gen + 1)
		g := <-got
		if err := l.ask(t.Context(), func() {}); err != nil { // the close was read
			t.Fatal(err)
		}
		if g.Slot.Gen == gen {
			// It was granted before the close; then the close ended it, once.
			p.mu.Lock()
			ended := 0
			for _, s := range p.ended {
				if s.ID == g.Slot.ID {
					ended++
				}
			}
			p.mu.Unlock()
			if ended != 1 {
				t.Fatalf("generation %d: the attempt was ended %d times", gen, ended)
			}
		}
		l.returnSlot(g.Slot, pool.ByTerminal)
		l.in.put(item{reg: registry.Closed{Node: "n", Gen: gen + 1}}, false)
		gen++
	}
	var snap pool.Snapshot
	if err := l.ask(t.Context(), func() { snap = l.pool.Snapshot() }); err != nil || snap.Held != 0 {
		t.Errorf("%d slots are still held, %v", snap.Held, err)
	}
}

// The acknowledgement could not be sent: nothing is granted, nobody is
// connected, the waiter keeps its place (trap 4, variant).
//
// Contract: R4 R6
func TestTrap04AckFails(t *testing.T) {
	p := &fakePort{ack: errors.New("no connection")}
	l, stop := startLoop(t, p, 1)
	defer stop()
	ctx, cancel := context.WithCancel(t.Context())
	granted := make(chan error, 1)
	go func() {
		_, err := l.acquire(ctx, httpapi.Want{Model: "m"})
		granted <- err
	}()
	l.join(1)
	if err := l.ask(t.Context(), func() {}); err != nil {
		t.Fatal(err)
	}
	if p.count("ready") != 1 || p.count("connected") != 0 || l.isLive("n", 1) != nil {
		t.Errorf("%v", p.order)
	}
	cancel()
	if err := <-granted; !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
}

// The process did not run for longer than the heartbeat bound: what the living
// sent meanwhile is read before anybody is declared silent.
//
// Contract: F2
func TestPauseDoesNotFenceTheLiving(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		paused := false
		p := &fakePort{beat: func() {
			if !paused {
				paused = true
				<-time.After(10 * time.Second)
			}
		}}
		l, stop := startLoop(t, p, 1)
		defer stop()
		l.join(1)
		<-time.After(11*time.Second + 500*time.Millisecond) // half a second after it runs again
		l.in.put(item{reg: registry.HeartbeatReceived{Node: "n", Gen: 1}}, true)
		<-time.After(2 * time.Second)
		if p.count("disconnected") != 0 || l.isLive("n", 1) == nil {
			t.Errorf("the node was fenced: %v", p.order)
		}
		<-time.After(5 * time.Second) // now it really is silent
		synctest.Wait()
		if p.count("disconnected") != 1 {
			t.Errorf("a silent node stays: %v", p.order)
		}
	})
}

// Who only watches may be full, fail or not be there: with nobody who reads that the
// models changed, and a log that takes nothing, a session is fenced and the next one
// served as ever.
//
// Contract: F6 F3 F4
func TestFencingNeedsNobodyWhoWatches(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &fakePort{}
		l, stop := startLoop(t, p, 1)
		defer stop()
		l.join(1)
		first, err := l.acquire(t.Context(), httpapi.Want{Model: "m"})
		if err != nil {
			t.Fatal(err)
		}
		if len(l.changed) != cap(l.changed) {
			t.Fatal("somebody reads that the models changed")
		}
		second := make(chan httpapi.Grant, 1)
		go func() {
			g, err := l.acquire(t.Context(), httpapi.Want{Model: "m"})
			if err != nil {
				t.Error(err)
			}
			second <- g
		}()
		synctest.Wait()
		l.in.put(item{reg: registry.Closed{Node: "n", Gen: 1}}, false)
		synctest.Wait()
		if len(p.ended) != 1 || p.ended[0].ID != first.Slot.ID || l.isLive("n", 1) != nil || len(second) != 0 {
			t.Errorf("fenced: %+v, live %v, granted %d", p.ended, l.isLive("n", 1), len(second))
		}
		l.join(2)
		if g := <-second; g.Slot.Gen != 2 {
			t.Errorf("granted %+v", g.Slot)
		}
	})
}

// What peers send is bounded; what callers ask for is not dropped.
func TestInboxIsBoundedForPeers(t *testing.T) {
	b := newInbox()
	for range peerQueue {
		if !b.put(item{reg: registry.HeartbeatReceived{}}, true) {
			t.Fatal("refused below the bound")
		}
	}
	if b.put(item{reg: registry.HeartbeatReceived{}}, true) {
		t.Error("a peer's event above the bound was taken")
	}
	if !b.put(item{do: func() {}}, false) || len(b.take()) != peerQueue+1 {
		t.Error("our own was refused")
	}
}

// Contract: P1
func TestParseModels(t *testing.T) {
	got, _ := parseModels([]byte(`{"object":"list","data":[{"id":"a/b:7b"},{"id":""},{"id":"line\nfeed"},{"id":"sp ace"}]}`))
	if len(got) != 2 || got[0] != "a/b:7b" || got[1] != "sp ace" {
		t.Errorf("%q", got)
	}
	for _, bad := range []string{"", "<html>", `{"data":"x"}`, `[]`} {
		if got, _ := parseModels([]byte(bad)); got != nil {
			t.Errorf("%q: %q", bad, got)
		}
	}
}
