package pool

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

// one returns a pool of model m on node n1 with some places.
func one(places int, q Queue) *Pool {
	p := New()
	p.Step(epoch, SetConfig(Config{
		Adapters:  []Adapter{{Node: "n1", Name: "a", Capacity: places}},
		Providers: []Provider{{Node: "n1", Adapter: "a", Target: "m"}},
		Groups:    []Group{{Name: "m", Candidates: []Candidate{{Provider: "n1/a/m"}}}},
		Queue:     q,
	}), nil)
	return p
}

// Contract: Q3 E7
func TestA38QueueLimitHoldsInEveryState(t *testing.T) {
	states := map[string]func(p *Pool){
		"nobody there yet": func(*Pool) {},
		"served already": func(p *Pool) {
			p.Step(epoch, Activate("n1", 1), nil)
			p.Step(epoch, Enqueue(&Request{Waiter: 100, Model: "m", Principal: "alice"}), nil)
		},
		"node gone": func(p *Pool) {
			p.Step(epoch, Activate("n1", 1), nil)
			p.Step(epoch, Fence("n1", 1, "closed"), nil)
		},
		"draining": func(p *Pool) {
			p.Step(epoch, Activate("n1", 1), nil)
			p.Step(epoch, SetDraining("n1", 0, true), nil)
		},
		"overlaid": func(p *Pool) {
			p.Step(epoch, Activate("n1", 1), nil)
			p.Step(epoch, Overlay("n1/a/m", 1, true), nil)
		},
	}
	for name, prepare := range states {
		t.Run(name, func(t *testing.T) {
			p := one(1, Queue{Depth: 1})
			prepare(p)
			full := 0
			for i := range 6 {
				for _, e := range p.Step(epoch, Enqueue(&Request{Waiter: WaiterID(i), Model: "m", Principal: "alice"}), nil) {
					if !errors.Is(e.Err, ErrQueueFull) {
						t.Errorf("%+v", e)
					}
					full++
				}
			}
			if full != 5 || p.Snapshot().Waiting != 1 {
				t.Errorf("%d refused at once, %d wait", full, p.Snapshot().Waiting)
			}
		})
	}
}

// What a peer lists is cleaned and bounded.
//
// Contract: Z5 P1
func TestAdoptedTargetsAreBounded(t *testing.T) {
	p := New()
	p.Step(epoch, SetConfig(Config{Auto: true, Adapters: []Adapter{{Node: "n1", Name: "a"}}}), nil)
	p.Step(epoch, Activate("n1", 1), nil)
	good := []string{"llama3.2:3b", "org/model name", "modèle"}
	bad := []string{"", "a\nb", "a\x00", "\xff", strings.Repeat("x", maxTargetName+1), good[0]}
	p.Step(epoch, AdoptTargets("n1", 1, "a", slices.Concat(bad, good, good)), nil)
	var names []string
	for _, m := range p.Models() {
		names = append(names, m.Name)
	}
	if want := slices.Sorted(slices.Values(good)); !slices.Equal(names, want) {
		t.Errorf("%q", names)
	}
	for round := range 40 {
		many := make([]string, 2*maxTargets)
		for i := range many {
			many[i] = fmt.Sprintf("m-%d-%d", round, i)
		}
		p.Step(epoch.Add(time.Hour), AdoptTargets("n1", 1, "a", many), nil)
		if len(p.Models()) != maxTargets || len(p.firstSeen) > maxFirstSeen || len(p.providerPlaces) > maxTargets {
			t.Fatalf("%d models, %d names, %d places", len(p.Models()), len(p.firstSeen), len(p.providerPlaces))
		}
	}
}

// A model that comes back keeps the time it was first seen.
func TestModelsKeepTheirTime(t *testing.T) {
	p := New()
	p.Step(epoch, SetConfig(Config{Auto: true, Adapters: []Adapter{{Node: "n1", Name: "a"}}}), nil)
	p.Step(epoch, Activate("n1", 1), nil)
	p.Step(epoch, AdoptTargets("n1", 1, "a", []string{"b", "a"}), nil)
	first := p.Models()
	p.Step(epoch.Add(time.Hour), AdoptTargets("n1", 1, "a", nil), nil)
	if len(p.Models()) != 0 || len(first) != 2 || first[0].Name != "a" {
		t.Fatalf("%v, then %v", first, p.Models())
	}
	p.Step(epoch.Add(2*time.Hour), AdoptTargets("n1", 1, "a", []string{"a", "c"}), nil)
	want := []Model{{"a", epoch}, {"c", epoch.Add(2 * time.Hour)}}
	if !slices.Equal(p.Models(), want) {
		t.Errorf("%v", p.Models())
	}
}

// A long request and the short ones that keep coming: it is served in its turn.
//
// Contract: Q2
func TestShortRequestsDoNotStarveLongOnes(t *testing.T) {
	p := New()
	p.Step(epoch, SetConfig(Config{
		Adapters:  []Adapter{{Node: "n1", Name: "a", Capacity: 2}},
		Providers: []Provider{{Node: "n1", Adapter: "a", Target: "m", LongCapacity: 1, LongThreshold: 100}},
		Groups:    []Group{{Name: "m", Candidates: []Candidate{{Provider: "n1/a/m"}}}},
	}), nil)
	p.Step(epoch, Activate("n1", 1), nil)
	id := WaiterID(0)
	var busy []Slot
	follow := func(out []Effect) (long bool) {
		for _, e := range out {
			if e.Kind == Granted {
				busy = append(busy, e.Slot)
				long = long || e.Slot.Long
			}
		}
		return long
	}
	add := func(principal string, tokens int64) bool {
		id++
		return follow(p.Step(epoch, Enqueue(&Request{Waiter: id, Model: "m", Principal: principal, PromptTokens: tokens}), nil))
	}
	add("short", 0)
	add("short", 0)
	for range 5 {
		add("short", 0)
		add("long", 100)
	}
	longs := 0
	for range 40 {
		add("short", 0)
		s := busy[0]
		busy = busy[1:]
		if follow(p.Step(epoch, ReturnSlot(s.ID, ByTerminal), nil)) {
			longs++
		}
	}
	if longs != 5 {
		t.Errorf("%d of 5 long requests were served", longs)
	}
}

func TestBreachesPanic(t *testing.T) {
	for name, breach := range map[string]func(p *Pool){
		"an id twice": func(p *Pool) {
			for range 2 {
				p.Step(epoch, Enqueue(&Request{Waiter: 1, Model: "m"}), nil)
			}
		},
		"no event": func(p *Pool) { p.Step(epoch, Event{}, nil) },
	} {
		t.Run(name, func(t *testing.T) {
			defer func() {
				if msg, _ := recover().(string); !strings.HasPrefix(msg, "BUG: pool") {
					t.Errorf("recovered %q", msg)
				}
			}()
			breach(one(1, Queue{}))
		})
	}
}

// Who says "llama" means "llama:latest" where that is what a provider lists, and
// no other tag.
func TestImpliedTag(t *testing.T) {
	p := New()
	now := time.Unix(0, 0)
	p.Step(now, SetConfig(Config{Auto: true, Adapters: []Adapter{{Node: "n", Name: "a"}}}), nil)
	p.Step(now, Activate("n", 1), nil)
	p.Step(now, AdoptTargets("n", 1, "a", []string{"llama:latest", "llama:7b", "bare"}), nil)
	for id, c := range []struct{ model, target string }{
		{"llama", "llama:latest"},
		{"llama:latest", "llama:latest"},
		{"llama:7b", "llama:7b"},
		{"bare", "bare"},
		{"bare:latest", ""},
		{"llama:8b", ""},
		{"", ""},
	} {
		got := p.Step(now, Enqueue(&Request{Waiter: WaiterID(id + 1), Model: c.model}), nil)
		if len(got) != 1 || got[0].Slot.Target != c.target || (c.target == "") != errors.Is(got[0].Err, ErrUnknownModel) {
			t.Errorf("%q: %+v, want %q", c.model, got, c.target)
		}
	}
}

// What a person reads of a model: who could serve it, who waits and since when.
func TestSnapshotOfAModel(t *testing.T) {
	p := New()
	p.Step(epoch, SetConfig(Config{
		Adapters:  []Adapter{{Node: "n1", Name: "a", Capacity: 1}},
		Providers: []Provider{{Node: "n1", Adapter: "a", Target: "m"}},
		Groups:    []Group{{Name: "m", Candidates: []Candidate{{Provider: "n1/a/m", Priority: 1, Weight: 2}}}},
	}), nil)
	p.Step(epoch, Activate("n1", 1), nil)
	for i, who := range []string{"alice", "bob", "alice", "bob", "bob"} {
		p.Step(epoch.Add(time.Duration(i)*time.Second), Enqueue(&Request{Waiter: WaiterID(i + 1), Model: "m", Principal: who}), nil)
	}
	got := p.Snapshot().Models
	want := []ModelState{{
		Name: "m", Since: epoch, Offered: true, Candidates: []CandidateState{{"n1/a/m", 1, 2}},
		Waiting: 4, Oldest: epoch.Add(time.Second), Principals: []PrincipalWait{{"alice", 1}, {"bob", 3}},
	}}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v\nwant %+v", got, want)
	}
	p.Step(epoch, SetConfig(Config{}), nil)
	if got := p.Snapshot().Models; len(got) != 1 || got[0].Offered || got[0].Waiting != 4 || len(got[0].Candidates) != 0 {
		t.Errorf("a model that is gone with its requests left: %+v", got)
	}
}

// Contract: F5 F7
func TestI6StaleChangesNothing(t *testing.T) {
	const id = "n1/a/m"
	stale := func(gen uint64) map[string]Event {
		return map[string]Event{
			"activate": Activate("n1", gen), "fence": Fence("n1", gen, "late"),
			"targets": AdoptTargets("n1", gen, "a", []string{"other"}),
			"overlay": Overlay(id, gen, true), "overlay ends": Overlay(id, gen, false),
			"drain": SetDraining("n1", gen, true), "drain ends": SetDraining("n1", gen, false),
		}
	}
	for _, live := range []bool{true, false} {
		p := one(2, Queue{})
		p.Step(epoch, Activate("n1", 1), nil)
		p.Step(epoch, Enqueue(&Request{Waiter: 1, Model: "m"}), nil)
		p.Step(epoch, Activate("n1", 2), nil)
		gens := []uint64{1}
		if live {
			p.Step(epoch, Enqueue(&Request{Waiter: 2, Model: "m"}), nil)
			p.Step(epoch, Overlay(id, 2, true), nil)
			p.Step(epoch, SetDraining("n1", 2, true), nil)
		} else {
			p.Step(epoch, Fence("n1", 2, "closed"), nil)
			gens = append(gens, 2)
		}
		p.Step(epoch, Enqueue(&Request{Waiter: 3, Model: "m"}), nil)
		before := string(p.AppendKey(nil))
		for _, gen := range gens {
			for name, ev := range stale(gen) {
				if out := p.Step(epoch, ev, nil); len(out) > 0 || string(p.AppendKey(nil)) != before {
					t.Errorf("live %v: %s of %d changed something: %v", live, name, gen, out)
				}
			}
		}
	}
}
