package registry

import (
	"errors"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/iop-fabric/iop/wire"
)

// ledger follows the effects and checks I1-I6 on them alone.
type ledger struct {
	active   map[string]uint64 // by Activate, until FenceGeneration
	last     map[string]uint64 // the last generation activated
	sentBack map[session]bool  // ReadyAckSent was reported after a Ready answer
	fenced   map[session]time.Time
}

func (l *ledger) follow(t *rapid.T, now time.Time, effects []Effect) {
	for i, e := range effects {
		switch e := e.(type) {
		case Activate:
			if l.active[e.Node] != 0 || e.Gen <= l.last[e.Node] {
				t.Fatalf("I2: %+v over %d, last %d", e, l.active[e.Node], l.last[e.Node])
			}
			if !l.sentBack[session{e.Node, e.Gen}] {
				t.Fatalf("I2: %+v before its acknowledgement", e)
			}
			l.active[e.Node], l.last[e.Node] = e.Gen, e.Gen
			if want := Effect(NodeConnected(e)); effects[i+1] != want {
				t.Fatalf("%+v is not followed by %+v", e, want)
			}
		case FenceGeneration:
			if l.active[e.Node] != e.Gen {
				t.Fatalf("I3: %+v, active is %d", e, l.active[e.Node])
			}
			l.active[e.Node] = 0
			if want := Effect(NodeDisconnected(e)); effects[i+1] != want {
				t.Fatalf("%+v is not followed by %+v", e, want)
			}
		case SendRegisterAnswer:
			if e.Accepted && l.active[e.Node] != 0 && l.active[e.Node] != e.Gen {
				t.Fatalf("I1: %+v while %d is active", e, l.active[e.Node])
			}
			if e.Accepted != (e.Reason == "") || e.Accepted != (e.Class == "") {
				t.Fatalf("%+v", e)
			}
		case SendReadyAnswer:
			if e.Ready != (e.Reason == "") || e.Ready != (e.Class == "") {
				t.Fatalf("%+v", e)
			}
		case SendFence:
			s := session{e.Node, e.Gen}
			if (e.Reason == Misbehaving) != (e.Class == wire.Protocol) {
				t.Fatalf("%+v: the broker closes by the class", e)
			}
			if at, ok := l.fenced[s]; ok && now.Sub(at) < time.Second && e.Reason != Misbehaving {
				t.Fatalf("I6: fenced after %v", now.Sub(at))
			}
			l.fenced[s] = now
		}
	}
}

// Contract: R1 R4 R5 R9 R10 F2 F5 F10
func TestProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := New(Config{Nodes: []string{"n1", "n2"}})
		now := epoch
		l := ledger{map[string]uint64{}, map[string]uint64{}, map[session]bool{}, map[session]time.Time{}}
		step := func(ev Event) []Effect {
			clone := r.Clone()
			out := r.Step(now, ev, nil)
			if !slices.Equal(out, clone.Step(now, ev, nil)) || string(r.AppendKey(nil)) != string(clone.AppendKey(nil)) {
				t.Fatalf("a clone does otherwise at %+v", ev)
			}
			l.follow(t, now, out)
			for node, gen := range l.active {
				if gen != 0 && !r.Live(node, gen) {
					t.Fatalf("I2: %s/%d is active and not live", node, gen)
				}
			}
			if live := r.LiveSessions(); len(live) != func() (n int) {
				for _, gen := range l.active {
					if gen != 0 {
						n++
					}
				}
				return n
			}() {
				t.Fatalf("I2, I3: live %v, active %v", live, l.active)
			}
			return out
		}
		t.Repeat(map[string]func(*rapid.T){
			"event": func(t *rapid.T) {
				node := rapid.SampledFrom([]string{"n1", "n2", "n3"}).Draw(t, "node")
				highest, state := r.Owner(node)
				gen := rapid.Uint64Range(max(highest, 3)-2, highest+2).Draw(t, "gen")
				id := rapid.SampledFrom([]string{node, node, node, "n2"}).Draw(t, "id")
				register := RegisterReceived{Node: node, Gen: gen, PayloadNode: id, ProtocolMin: 1, ProtocolMax: 2}
				if rapid.IntRange(0, 4).Draw(t, "unproved") == 0 {
					register.Verified = errors.New("bad signature")
				}
				ev := rapid.SampledFrom([]Event{
					Admitted{Node: node, Gen: gen},
					Closed{Node: node, Gen: gen},
					register, register, register,
					ReadyReceived{node, gen, id},
					ReadyReceived{node, highest, node},
					ReadyAckSent{node, gen},
					ReadyAckSent{node, highest},
					ReadyAckSent{node, highest},
					ReadyAckFailed{node, gen},
					HeartbeatReceived{node, gen, false},
					HeartbeatReceived{node, gen, true},
					MessageReceived{node, gen},
					Misbehaved{node, gen},
				}).Draw(t, "event")
				stale := gen < highest
				switch e := ev.(type) {
				case ReadyAckSent:
					if stale = e.Gen < highest; state == Acking && e.Gen == highest {
						l.sentBack[session{node, e.Gen}] = true
					}
				case ReadyReceived:
					stale = e.Gen < highest
				}
				before := r.AppendKey(nil)
				for _, e := range step(ev) {
					if !stale {
						continue
					}
					switch e := e.(type) {
					case SendFence:
					case SendRegisterAnswer:
						if e.Accepted {
							t.Fatalf("R9: %+v below %d", e, highest)
						}
					case SendReadyAnswer:
						if e.Ready {
							t.Fatalf("R5: %+v below %d", e, highest)
						}
					default:
						t.Fatalf("I5: %+v for a generation below %d", e, highest)
					}
				}
				if stale && string(before) != string(r.AppendKey(nil)) {
					t.Fatalf("I5: %+v changed something below %d", ev, highest)
				}
			},
			"time": func(t *rapid.T) {
				now = now.Add(time.Duration(rapid.IntRange(1, 6000).Draw(t, "ms")) * time.Millisecond)
				if d := r.Deadline(); !d.IsZero() && !d.After(now) {
					step(DeadlinePassed{})
					if d := r.Deadline(); !d.IsZero() && !d.After(now) {
						t.Fatalf("the deadline %v did not move at %v", d, now)
					}
				}
				for _, s := range r.Snapshot() {
					if s.Connected && !now.Before(s.Heard.Add(wire.HeartbeatBound)) {
						t.Fatalf("F2: %+v is connected at %v", s, now)
					}
				}
			},
			"config": func(t *rapid.T) {
				nodes := rapid.SliceOfDistinct(rapid.SampledFrom([]string{"n1", "n2", "n3"}), rapid.ID).Draw(t, "nodes")
				step(ConfigChanged{nodes})
				r.EachOwner(func(node string, gen uint64, s State) {
					if !slices.Contains(nodes, node) {
						t.Fatalf("%s/%d is %s and not configured", node, gen, s)
					}
				})
			},
		})
		step(Stopped{})
		if len(r.LiveSessions()) > 0 {
			t.Fatal("live after Stopped")
		}
	})
}

// A registration that is not proved changes nothing, whatever its generation: a
// hostile leaf must not raise it out of the node's reach.
//
// Contract: Z6 R1
func TestUnprovedChangesNothing(t *testing.T) {
	r := New(Config{Nodes: []string{"n1"}})
	good := RegisterReceived{Node: "n1", Gen: 5, PayloadNode: "n1", ProtocolMin: 1, ProtocolMax: 1}
	r.Step(epoch, good, nil)
	before := r.AppendKey(nil)
	bad := good
	bad.Gen, bad.Verified = 1<<63, errors.New("bad signature")
	out := r.Step(epoch, bad, nil)
	if a, ok := out[0].(SendRegisterAnswer); len(out) != 1 || !ok || a.Accepted || a.Class != wire.Credential {
		t.Fatalf("%+v", out)
	}
	if string(before) != string(r.AppendKey(nil)) {
		t.Error("an unproved registration changed the state")
	}
}

// The fence of one that misbehaves waits for nobody, and counts for those after it.
//
// Contract: F10 J8
func TestMisbehavingFenceCounts(t *testing.T) {
	r := New(Config{Nodes: []string{"n1"}})
	for _, c := range []struct {
		after  time.Duration
		event  Event
		fences int
	}{
		{0, MessageReceived{"n1", 5}, 1},
		{0, RegisterReceived{Node: "n1", Gen: 5, PayloadNode: "n1", ProtocolMin: 1, ProtocolMax: 1}, 0},
		{900 * time.Millisecond, Misbehaved{"n1", 5}, 1},
		{1100 * time.Millisecond, MessageReceived{"n1", 5}, 0},
		{1900 * time.Millisecond, MessageReceived{"n1", 5}, 1},
	} {
		fences := 0
		for _, e := range r.Step(epoch.Add(c.after), c.event, nil) {
			if _, ok := e.(SendFence); ok {
				fences++
			}
		}
		if fences != c.fences {
			t.Errorf("%+v after %v: %d fences", c.event, c.after, fences)
		}
	}
}

// What strangers say costs bounded memory.
//
// Contract: Z5
func TestFenceLimiterIsBounded(t *testing.T) {
	r := New(Config{})
	fences := 0
	for gen := range uint64(3 * maxLimited) {
		fences += len(r.Step(epoch, MessageReceived{"n1", gen + 1}, nil))
	}
	if len(r.fences.last) > maxLimited || fences != maxLimited {
		t.Errorf("%d sessions remembered, %d fences", len(r.fences.last), fences)
	}
	if out := r.Step(epoch.Add(time.Second), MessageReceived{"n1", 1}, nil); len(out) != 1 {
		t.Errorf("a second later: %v", out)
	}
	if len(r.nodes) != 0 {
		t.Errorf("strangers have %d records", len(r.nodes))
	}
}

// What a peer says about itself is clipped.
func TestSelfDescriptionIsClipped(t *testing.T) {
	r := New(Config{Nodes: []string{"n1"}})
	long := string(make([]byte, 10_000))
	features := slices.Repeat([]string{long}, 1000)
	r.Step(epoch, RegisterReceived{
		Node: "n1", Gen: 1, PayloadNode: "n1", ProtocolMin: 1, ProtocolMax: 1,
		Features: features, Instance: long, Software: long,
	}, nil)
	s := r.Snapshot()[0]
	if len(s.Instance) > maxText || len(s.Software) > maxText || len(s.Features) > maxItems || len(s.Features[0]) > maxText {
		t.Errorf("%d %d %d", len(s.Instance), len(s.Software), len(s.Features))
	}
}
