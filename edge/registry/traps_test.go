package registry

import (
	"fmt"
	"slices"
	"testing"

	"github.com/iop-fabric/iop/edge/pool"
)

// Contract: R9 F2 F3 F4 F5 P8 P9
func TestTrap01TakeoverWithLeases(t *testing.T) {
	l := newLoop(t, 2)
	l.up("n1", 1)
	l.enqueue(1, "m")
	l.enqueue(2, "m")
	l.enqueue(3, "m")
	s1, s2 := l.slots[1], l.slots[2]
	if s1.ID == 0 || s2.ID == 0 || l.slots[3].ID != 0 {
		t.Fatalf("granted %v", l.slots)
	}
	l.register("n1", 2)
	for _, s := range []pool.Slot{s1, s2} {
		if l.back[s.ID] != 1 || l.ended[s.ID] != 1 {
			t.Errorf("at acceptance: slot %d returned %d times, ended %d times", s.ID, l.back[s.ID], l.ended[s.ID])
		}
	}
	if p := l.provider("p1"); p.Connected || p.Capacity != 0 || p.InFlight != 0 || p.Queued != 0 || p.Health != pool.HealthOffline {
		t.Errorf("at acceptance: %+v", p)
	}
	before := l.key()
	l.registry(MessageReceived{"n1", 1}) // a delta
	l.pool(pool.ReturnSlot(s1.ID, pool.ByTerminal))
	l.registry(Closed{Node: "n1", Gen: 1})
	if l.key() != before {
		t.Error("a word of g1 changed something")
	}
	l.ready("n1", 2)
	if l.slots[3].Gen != 2 {
		t.Errorf("the waiter has %+v", l.slots[3])
	}
	if p := l.provider("p1"); !p.Connected || p.Capacity != 2 || p.InFlight != 1 {
		t.Errorf("at ready: %+v", p)
	}
	connected := slices.DeleteFunc(slices.Clone(l.sent), func(s string) bool { return s[:min(len(s), 14)] != "node.connected" })
	if want := []string{"node.connected n1/1", "node.connected n1/2"}; !slices.Equal(connected, want) {
		t.Errorf("%v", connected)
	}
}

// Contract: R9 R10 F2
func TestTrap02CloseBeforeRegister(t *testing.T) {
	t.Run("close first", func(t *testing.T) {
		l := newLoop(t, 1)
		l.registry(Closed{Node: "n1", Gen: 2})
		l.register("n1", 2)
		if _, s := l.r.Owner("n1"); s.Owns() {
			t.Errorf("owner is %s", s)
		}
	})
	t.Run("pending ends", func(t *testing.T) {
		l := newLoop(t, 1)
		l.up("n1", 1)
		l.enqueue(1, "m")
		l.register("n1", 2)
		returned, sent := l.back[l.slots[1].ID], len(l.sent)
		l.registry(Closed{Node: "n1", Gen: 2})
		if l.provider("p1").Connected || len(l.r.LiveSessions()) > 0 {
			t.Error("g1 came back")
		}
		if len(l.sent) != sent || returned != 1 || l.back[l.slots[1].ID] != 1 {
			t.Errorf("g2's end did something: %v", l.sent[sent:])
		}
	})
	t.Run("below the highest", func(t *testing.T) {
		l := newLoop(t, 1)
		l.registry(Admitted{Node: "n1", Gen: 7})
		before := l.key()
		l.register("n1", 6)
		l.ready("n1", 6)
		if l.key() != before || len(l.r.LiveSessions()) > 0 {
			t.Error("a lower generation came in")
		}
	})
}

// Contract: R1 R4 R5
func TestTrap03ReadyVariants(t *testing.T) {
	l := newLoop(t, 1)
	l.up("n1", 1)
	l.sent = nil
	before := l.key()
	l.ready("n1", 1)
	if want := []string{"ready answer to n1/1: ready=true "}; !slices.Equal(l.sent, want) || l.key() != before {
		t.Errorf("ready again: %v", l.sent)
	}
	l.register("n1", 2)
	l.sent = nil
	l.ready("n1", 1)
	if want := []string{"ready answer to n1/1: ready=false superseded (session_ended)"}; !slices.Equal(l.sent, want) {
		t.Errorf("g1 ready: %v", l.sent)
	}
	l.registry(ReadyReceived{Node: "n1", Gen: 2, PayloadNode: "n2"})
	if _, s := l.r.Owner("n1"); s != Pending {
		t.Errorf("with another node's id: %s", s)
	}
}

// Contract: R4 R6
func TestTrap04AckFirst(t *testing.T) {
	l := newLoop(t, 5)
	for id := range pool.WaiterID(5) {
		l.enqueue(id+1, "m")
	}
	l.ackFail = true
	l.register("n1", 1)
	l.ready("n1", 1)
	if len(l.slots) > 0 || l.p.Snapshot().Waiting != 5 || len(l.sent) != 1 || l.provider("p1").Connected {
		t.Fatalf("the acknowledgement failed, and: %v", l.sent)
	}
	l.ackFail = false
	l.ready("n1", 1)
	want := []string{"register answer to n1/1: accepted=true repeat=false ", "ready answer to n1/1: ready=true "}
	for id := range 5 {
		want = append(want, fmt.Sprintf("dispatch %d to n1/1", id+1))
	}
	if want = append(want, "node.connected n1/1"); !slices.Equal(l.sent, want) {
		t.Errorf("sent in order %q", l.sent)
	}
}

// Contract: R4
func TestTrap04SessionEndsBeforeTheAcknowledgement(t *testing.T) {
	for name, end := range map[string]Event{
		"closed": Closed{Node: "n1", Gen: 1}, "superseded": Admitted{Node: "n1", Gen: 2},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLoop(t, 1)
			l.lateAck = true
			l.enqueue(1, "m")
			l.register("n1", 1)
			l.ready("n1", 1)
			l.registry(end)
			before := l.key()
			l.registry(ReadyAckSent{"n1", 1})
			if l.key() != before || len(l.slots) > 0 || l.p.Snapshot().Waiting != 1 {
				t.Error("the ready transition had effects")
			}
		})
	}
}

// The cores' half: what is new in B is held back until the Node applied it; the
// loop pushes after node.connected, which comes after the acknowledgement.
//
// Contract: R6 R11 C5
func TestTrap05ReloadWhilePending(t *testing.T) {
	l := newLoop(t, 1)
	l.register("n1", 1)
	b := pool.Config{
		Adapters: []pool.Adapter{{Node: "n1", Name: "a", Capacity: 1}, {Node: "n1", Name: "b", Capacity: 1, Held: true}},
		Providers: []pool.Provider{
			{ID: "p1", Node: "n1", Adapter: "a", Target: "m"}, {ID: "new", Node: "n1", Adapter: "b", Target: "m"},
		},
		Groups: []pool.Group{{Name: "m", Candidates: []pool.Candidate{{Provider: "p1"}, {Provider: "new"}}}},
	}
	l.pool(pool.SetConfig(b))
	l.registry(ConfigChanged{Nodes: []string{"n1"}})
	l.enqueue(1, "m")
	l.enqueue(2, "m")
	l.ready("n1", 1)
	if last := l.sent[len(l.sent)-1]; last != "node.connected n1/1" || l.slots[1].Provider != "p1" || l.slots[2].ID != 0 {
		t.Fatalf("granted %v, sent %q", l.slots, l.sent)
	}
	b.Adapters = []pool.Adapter{b.Adapters[0], {Node: "n1", Name: "b", Capacity: 1}}
	if l.pool(pool.SetConfig(b)); l.slots[2].Provider != "new" {
		t.Errorf("applied, and granted %v", l.slots)
	}
}

// Both orders of a release and a close at once, again and again.
//
// Contract: F3 P8 P9
func TestTrap06GrantAgainstFence(t *testing.T) {
	l := newLoop(t, 1)
	l.up("n2", 1)
	id := pool.WaiterID(0)
	for range 3 {
		id++
		l.enqueue(id, "m")
	}
	for round := range uint64(200) {
		gen := round + 2
		l.up("n1", gen)
		var slot pool.Slot
		for _, s := range l.slots {
			if s.Gen == gen && l.back[s.ID] == 0 {
				slot = s
			}
		}
		if slot.Gen != gen {
			t.Fatalf("round %d: nobody was granted", round)
		}
		release := func() { l.pool(pool.ReturnSlot(slot.ID, pool.ByTerminal)) }
		closed := func() { l.registry(Closed{Node: "n1", Gen: gen}) }
		id++
		l.enqueue(id, "m")
		if round%2 == 0 {
			release() // grants the next, which the close then ends
			closed()
		} else {
			closed()
			release()
		}
		granted := len(l.slots)
		release()
		closed()
		if len(l.slots) != granted {
			t.Fatal("a grant under the fenced generation")
		}
		if s := l.p.Snapshot(); s.Held != 0 || l.provider("p1").InFlight != 0 || s.Waiting == 0 {
			t.Fatalf("round %d: %+v", round, s)
		}
		// A close ends what runs and does not queue it again: two are gone in an
		// even round, one in an odd one.
		for s := l.p.Snapshot().Waiting; s < 3; s++ {
			id++
			l.enqueue(id, "m")
		}
	}
	for s, n := range l.back {
		if n != 1 {
			t.Errorf("slot %d returned %d times", s, n)
		}
	}
}

// Contract: Q4 P8
func TestTrap07GrantAgainstGoneCaller(t *testing.T) {
	l := newLoop(t, 1)
	l.up("n1", 1)
	l.enqueue(1, "m") // holds the place
	l.enqueue(2, "m") // A
	l.enqueue(3, "m") // B
	l.pool(pool.ReturnSlot(l.slots[1].ID, pool.ByTerminal))
	a := l.slots[2]
	if a.ID == 0 {
		t.Fatal("A was not granted")
	}
	// A's caller left in that instant: its cancel finds nobody in the queue, so the
	// slot that came too late is given back unsent.
	l.pool(pool.CancelWaiter(2))
	l.pool(pool.ReturnSlot(a.ID, pool.ByNotSent))
	l.pool(pool.ReturnSlot(a.ID, pool.ByNotSent))
	if l.back[a.ID] != 1 || l.slots[3].ID == 0 {
		t.Errorf("A's slot returned %d times, B has %+v", l.back[a.ID], l.slots[3])
	}
	// A leaves before: B is granted, nothing for A.
	l.enqueue(4, "m")
	l.enqueue(5, "m")
	l.pool(pool.CancelWaiter(4))
	l.pool(pool.ReturnSlot(l.slots[3].ID, pool.ByTerminal))
	if l.slots[4].ID != 0 || l.slots[5].ID == 0 {
		t.Errorf("granted %v", l.slots)
	}
}

// A release, or a ready node, between a request's "no place" and its place in
// the queue cannot be: both are one step. Every order ends with a grant, without
// a timer.
//
// Contract: Q4 F4
func TestTrap07NoLostWakeUp(t *testing.T) {
	for _, first := range []string{"release", "enqueue"} {
		l := newLoop(t, 1)
		l.up("n1", 1)
		l.enqueue(1, "m")
		release := func() { l.pool(pool.ReturnSlot(l.slots[1].ID, pool.ByTerminal)) }
		if first == "release" {
			release()
			l.enqueue(2, "m")
		} else {
			l.enqueue(2, "m")
			release()
		}
		if l.slots[2].ID == 0 {
			t.Errorf("%s first: not granted", first)
		}
	}
	off := map[string]pool.Event{
		"drain":          pool.SetDraining("n1", 1, false),
		"operator drain": pool.SetDraining("n1", 0, false),
		"overlay":        pool.Overlay("p1", 1, false),
	}
	for last, event := range off {
		l := newLoop(t, 1)
		l.up("n1", 1)
		l.pool(pool.SetDraining("n1", 1, true))
		l.pool(pool.SetDraining("n1", 0, true))
		l.pool(pool.Overlay("p1", 1, true))
		l.enqueue(1, "m")
		for name, e := range off {
			if name != last {
				l.pool(e)
			}
		}
		if l.slots[1].ID != 0 {
			t.Fatalf("granted before the end of the %s", last)
		}
		if l.pool(event); l.slots[1].ID == 0 {
			t.Errorf("the end of the %s did not pump", last)
		}
	}
}

// Contract: H2 Q4 P5
func TestTrap08VerdictBeforePump(t *testing.T) {
	l := newLoop(t, 1)
	l.up("n1", 1)
	l.enqueue(1, "m")
	l.enqueue(2, "m")
	l.pool(pool.Overlay("p1", 1, true))
	l.pool(pool.ReturnSlot(l.slots[1].ID, pool.ByTerminal))
	if p := l.provider("p1"); l.slots[2].ID != 0 || p.Status != pool.StatusUnavailable || p.Capacity != 0 || p.InFlight != 0 {
		t.Errorf("granted %+v, %+v", l.slots[2], p)
	}
	if l.pool(pool.Overlay("p1", 1, false)); l.slots[2].ID == 0 {
		t.Error("not granted when the overlay was cleared")
	}
}

// A node that is draining when it becomes ready gets nothing.
//
// Contract: D7
func TestDrainingNodeIsActivatedWithoutWork(t *testing.T) {
	l := newLoop(t, 1)
	l.enqueue(1, "m")
	l.register("n1", 1)
	l.registry(HeartbeatReceived{"n1", 1, true})
	l.ready("n1", 1)
	if l.slots[1].ID != 0 || !l.provider("p1").Connected || l.provider("p1").Status != pool.StatusDraining {
		t.Errorf("%+v, %+v", l.slots[1], l.provider("p1"))
	}
	if l.registry(HeartbeatReceived{"n1", 1, false}); l.slots[1].ID == 0 {
		t.Error("not granted when it took its word back")
	}
}
