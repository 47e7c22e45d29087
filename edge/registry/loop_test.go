package registry

import (
	"fmt"
	"testing"
	"time"

	"github.com/iop-fabric/iop/edge/pool"
)

// loop drives registry and pool as Edge's loop does: what one orders of the other
// is done before the next event is read. It keeps what it saw.
type loop struct {
	t       *testing.T
	now     time.Time
	r       *Registry
	p       *pool.Pool
	ackFail bool
	lateAck bool     // the test reports acknowledgements itself
	sent    []string // to nodes, and what is emitted, in order
	slots   map[pool.WaiterID]pool.Slot
	refused map[pool.WaiterID]error
	ended   map[uint64]int // by slot: error terminals
	back    map[uint64]int // by slot: returns
}

// newLoop has model m on n1 with the given places, and model other on n2.
func newLoop(t *testing.T, capacity int) *loop {
	l := &loop{
		t: t, now: epoch, r: New(Config{Nodes: []string{"n1", "n2"}}), p: pool.New(),
		slots: map[pool.WaiterID]pool.Slot{}, refused: map[pool.WaiterID]error{}, ended: map[uint64]int{}, back: map[uint64]int{},
	}
	l.pool(pool.SetConfig(pool.Config{
		Adapters: []pool.Adapter{{Node: "n1", Name: "a", Capacity: capacity}, {Node: "n2", Name: "a", Capacity: 1}},
		Providers: []pool.Provider{
			{ID: "p1", Node: "n1", Adapter: "a", Target: "m"}, {ID: "p2", Node: "n2", Adapter: "a", Target: "other"},
		},
		Groups: []pool.Group{
			{Name: "m", Candidates: []pool.Candidate{{Provider: "p1"}}},
			{Name: "other", Candidates: []pool.Candidate{{Provider: "p2"}}},
		},
	}))
	return l
}

func (l *loop) registry(ev Event) {
	for _, e := range l.r.Step(l.now, ev, nil) {
		switch e := e.(type) {
		case Activate:
			l.pool(pool.Activate(e.Node, e.Gen))
		case FenceGeneration:
			l.pool(pool.Fence(e.Node, e.Gen, string(e.Cause)))
		case Draining:
			l.pool(pool.SetDraining(e.Node, e.Gen, e.On))
		case SendReadyAnswer:
			if e.Ready && l.ackFail {
				l.registry(ReadyAckFailed{e.Node, e.Gen})
				continue
			}
			l.sent = append(l.sent, printEffect(e))
			if e.Ready && !l.lateAck {
				l.registry(ReadyAckSent{e.Node, e.Gen})
			}
		default:
			l.sent = append(l.sent, printEffect(e))
		}
	}
}

func (l *loop) pool(ev pool.Event) {
	for _, e := range l.p.Step(l.now, ev, nil) {
		switch e.Kind {
		case pool.Granted:
			if !l.r.Live(e.Slot.Node, e.Slot.Gen) {
				l.t.Fatalf("F3: granted %+v, which is not live", e.Slot)
			}
			l.slots[e.Waiter] = e.Slot
			l.sent = append(l.sent, fmt.Sprintf("dispatch %d to %s/%d", e.Waiter, e.Slot.Node, e.Slot.Gen))
		case pool.Refused:
			l.refused[e.Waiter] = e.Err
		case pool.EndAttempt:
			if l.back[e.Slot.ID] != 1 {
				l.t.Fatalf("F3: %+v ended before it was returned", e.Slot)
			}
			l.ended[e.Slot.ID]++
		case pool.SlotReturned:
			if l.back[e.Slot.ID]++; l.back[e.Slot.ID] > 1 {
				l.t.Fatalf("P8: %+v returned twice", e.Slot)
			}
		}
	}
}

func (l *loop) register(node string, gen uint64) {
	l.registry(RegisterReceived{Node: node, Gen: gen, PayloadNode: node, ProtocolMin: 1, ProtocolMax: 1})
}

func (l *loop) ready(node string, gen uint64) {
	l.registry(ReadyReceived{Node: node, Gen: gen, PayloadNode: node})
}

func (l *loop) up(node string, gen uint64) {
	l.registry(Admitted{Node: node, Gen: gen})
	l.register(node, gen)
	l.ready(node, gen)
}

func (l *loop) enqueue(id pool.WaiterID, model string) {
	l.pool(pool.Enqueue(&pool.Request{Waiter: id, Model: model, Principal: "alice"}))
}

func (l *loop) key() string { return string(l.p.AppendKey(l.r.AppendKey(nil))) }

func (l *loop) provider(id string) pool.ProviderState {
	for _, s := range l.p.Snapshot().Providers {
		if s.ID == id {
			return s
		}
	}
	l.t.Fatalf("no provider %s", id)
	return pool.ProviderState{}
}
