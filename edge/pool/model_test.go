package pool

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// model is the pool written the slow and plain way: lists, and every rule as a
// scan. It does not know whose turn it is; it knows what no turn may break.
type model struct {
	cfg      Config
	now      time.Time
	gen      map[string]uint64
	seen     map[string]uint64
	draining map[string]bool
	overlaid map[string]bool
	slots    map[uint64]Slot
	order    []uint64 // of slots, as granted
	queue    []*Request
	until    map[WaiterID]time.Time
	returned map[uint64]bool
	served   map[uint64]string // by affinity
	// By node and provider, as places are.
	suspects  map[[2]string]time.Time
	suspicion map[[2]string]time.Duration
}

func (m *model) provider(id string) *Provider {
	for i, v := range m.cfg.Providers {
		if v.ID == id {
			return &m.cfg.Providers[i]
		}
	}
	return nil
}

func (m *model) adapterOf(v *Provider) Adapter {
	for _, a := range m.cfg.Adapters {
		if a.Node == v.Node && a.Name == v.Adapter {
			return a
		}
	}
	panic("the test's configuration has no such adapter")
}

// able lists the candidates of a request, live or not.
func (m *model) able(r *Request) (all []Candidate, known bool) {
	for _, g := range m.cfg.Groups {
		if g.Name != r.Model {
			continue
		}
		known = true
		for _, c := range g.Candidates {
			ops := m.provider(c.Provider).Operations
			if len(ops) > 0 && !slices.Contains(ops, r.Operation) {
				continue
			}
			all = append(all, c)
		}
	}
	return all, known
}

func (m *model) eligible(r *Request) []Candidate {
	all, _ := m.able(r)
	return slices.DeleteFunc(all, func(c Candidate) bool { return slices.Contains(r.Avoid, c.Provider) })
}

func (m *model) live(id string) bool {
	v := m.provider(id)
	return v != nil && !v.Disabled && m.gen[v.Node] != 0 && !m.draining[v.Node] && !m.overlaid[id]
}

func (m *model) load(id string) (used, long int) {
	v := m.provider(id)
	for _, s := range m.slots {
		if s.Node == v.Node && s.Provider == id {
			used++
			if s.Long {
				long++
			}
		}
	}
	return used, long
}

// long: a request of that length is long there.
func (m *model) long(id string, tokens int64) bool {
	v := m.provider(id)
	return v.LongCapacity > 0 && v.LongThreshold > 0 && tokens >= v.LongThreshold
}

func (m *model) free(id string, tokens int64) bool {
	if !m.live(id) {
		return false
	}
	v := m.provider(id)
	behind := 0
	for _, s := range m.slots {
		if s.Node == v.Node && s.Adapter == v.Adapter {
			behind++
		}
	}
	used, longs := m.load(id)
	return used < v.Capacity && behind < m.adapterOf(v).Capacity &&
		(!m.long(id, tokens) || longs < v.LongCapacity)
}

func (m *model) suspected(id string) bool {
	return m.now.Before(m.suspects[[2]string{m.provider(id).Node, id}])
}

// suspect is the plain rule: a second, and twice as long as before if that was not
// long ago.
func (m *model) suspect(r *Request) {
	if _, known := m.able(r); len(r.Avoid) == 0 || !known {
		return
	}
	id := r.Avoid[len(r.Avoid)-1]
	key := [2]string{m.provider(id).Node, id}
	long := time.Second
	if last := m.suspicion[key]; m.now.Before(m.suspects[key].Add(last)) {
		long = min(2*last, 30*time.Second)
	}
	m.suspicion[key], m.suspects[key] = long, m.now.Add(long)
}

func (m *model) find(id WaiterID) int {
	return slices.IndexFunc(m.queue, func(r *Request) bool { return r.Waiter == id })
}

// enqueue says what must come at once; nil: a grant, or the queue.
func (m *model) enqueue(r *Request) error {
	able, known := m.able(r)
	if !known {
		return ErrUnknownModel
	}
	if len(able) == 0 {
		return ErrUnsupported
	}
	candidates := m.eligible(r)
	if slices.ContainsFunc(candidates, func(c Candidate) bool { return m.free(c.Provider, r.PromptTokens) }) {
		return nil
	}
	if !slices.ContainsFunc(candidates, func(c Candidate) bool { return !m.provider(c.Provider).Disabled }) {
		return ErrNoProvider
	}
	mine := 0
	for _, o := range m.queue {
		if o.Model == r.Model && o.Principal == r.Principal {
			mine++
		}
	}
	if mine >= m.cfg.Queue.Depth || len(m.queue) >= m.cfg.Queue.Total {
		return ErrQueueFull
	}
	return nil
}

// granted checks one grant against every rule, in the order effects come.
func (m *model) granted(e Effect) error {
	i := m.find(e.Waiter)
	if i < 0 {
		return fmt.Errorf("I7: %d was granted and does not wait", e.Waiter)
	}
	r, s := m.queue[i], e.Slot
	candidates := m.eligible(r)
	at := slices.IndexFunc(candidates, func(c Candidate) bool { return c.Provider == s.Provider })
	if at < 0 {
		return fmt.Errorf("%s is no candidate of %+v", s.Provider, *r)
	}
	got, v := candidates[at], m.provider(s.Provider)
	if s.Node != v.Node || s.Adapter != v.Adapter || s.Target != v.Target || s.Gen != m.gen[v.Node] ||
		s.Long != m.long(v.ID, r.PromptTokens) || e.StallTimeout != v.StallTimeout {
		return fmt.Errorf("I5: slot %+v of %+v under %d", s, *v, m.gen[v.Node])
	}
	if !m.free(s.Provider, r.PromptTokens) {
		return fmt.Errorf("I1, I8: no place at %s for %d", s.Provider, e.Waiter)
	}
	used, _ := m.load(s.Provider)
	for _, c := range candidates {
		if !m.free(c.Provider, r.PromptTokens) {
			continue
		}
		other, _ := m.load(c.Provider)
		if c.Priority < got.Priority {
			return fmt.Errorf("Q1: %s comes before %s", c.Provider, s.Provider)
		}
		if mine, theirs := m.suspected(s.Provider), m.suspected(c.Provider); c.Priority == got.Priority && mine != theirs {
			if mine {
				return fmt.Errorf("A39: %s is no suspect, %s is", c.Provider, s.Provider)
			}
			continue
		}
		if prefers := m.served[r.Affinity]; c.Priority == got.Priority && prefers != s.Provider &&
			(prefers == c.Provider || other*got.Weight < used*c.Weight) {
			return fmt.Errorf("Q1: %s is better than %s", c.Provider, s.Provider)
		}
	}
	for _, o := range m.queue[:i] {
		if o.Model != r.Model || o.Principal != r.Principal {
			continue
		}
		for _, c := range m.eligible(o) {
			if c.Provider == s.Provider && m.free(c.Provider, o.PromptTokens) {
				return fmt.Errorf("I4: %d goes before %d", r.Waiter, o.Waiter)
			}
		}
	}
	if m.slots[s.ID].ID != 0 || m.returned[s.ID] || s.ID == 0 {
		return fmt.Errorf("slot id %d is used twice", s.ID)
	}
	others := 0
	for _, c := range candidates {
		if c.Provider != s.Provider && m.live(c.Provider) {
			others++
		}
	}
	if e.Others != others {
		return fmt.Errorf("%d others are live, not %d", others, e.Others)
	}
	if r.Affinity != 0 {
		m.served[r.Affinity] = s.Provider
	}
	m.queue = slices.Delete(m.queue, i, i+1)
	m.slots[s.ID] = s
	m.order = append(m.order, s.ID)
	return nil
}

func (m *model) giveBack(e Effect) error {
	if s, ok := m.slots[e.Slot.ID]; !ok || s != e.Slot {
		return fmt.Errorf("I2: %+v came back and is not held", e.Slot)
	}
	delete(m.slots, e.Slot.ID)
	m.returned[e.Slot.ID] = true
	m.order = slices.DeleteFunc(m.order, func(id uint64) bool { return id == e.Slot.ID })
	return nil
}

// after checks what must hold after every step (I3, P4-P6).
func (m *model) after(p *Pool) error {
	for key := range m.suspects { // what is neither offered nor in use is forgotten
		used := slices.ContainsFunc(slices.Collect(maps.Values(m.slots)), func(s Slot) bool { return s.Node == key[0] && s.Provider == key[1] })
		if v := m.provider(key[1]); (v == nil || v.Node != key[0]) && !used {
			delete(m.suspects, key)
			delete(m.suspicion, key)
		}
	}
	queued, longQueued := map[string]int{}, map[string]int{}
	for _, r := range m.queue {
		for _, c := range m.eligible(r) {
			if m.free(c.Provider, r.PromptTokens) {
				return fmt.Errorf("I3: %d waits though %s is free", r.Waiter, c.Provider)
			}
			if m.live(c.Provider) {
				queued[c.Provider]++
				if m.long(c.Provider, r.PromptTokens) {
					longQueued[c.Provider]++
				}
			}
		}
	}
	snap := p.Snapshot()
	if snap.Waiting != len(m.queue) || snap.Held != len(m.slots) || len(snap.Providers) != len(m.cfg.Providers) {
		return fmt.Errorf("snapshot %+v, want %d waiting, %d held", snap, len(m.queue), len(m.slots))
	}
	for _, s := range snap.Providers {
		v := m.provider(s.ID)
		used, long := m.load(s.ID)
		capacity, longCapacity := v.Capacity, v.LongCapacity
		if m.gen[v.Node] == 0 || m.overlaid[s.ID] {
			used, long, capacity, longCapacity = 0, 0, 0, 0
		}
		if s.InFlight != used || s.LongInFlight != long || s.Queued != queued[s.ID] || s.LongQueued != longQueued[s.ID] ||
			s.Capacity != capacity || s.LongCapacity != longCapacity || s.Connected != (m.gen[v.Node] != 0) {
			return fmt.Errorf("snapshot %+v, want in use %d/%d, queued %d/%d", s, used, long, queued[s.ID], longQueued[s.ID])
		}
	}
	return check(p)
}

// step steps the pool and a clone of it, which must do the same, and lets the
// model follow the effects.
func (m *model) step(t *rapid.T, p *Pool, ev Event, refuse map[WaiterID]error, back []uint64, cause string) {
	clone := p.Clone()
	out := p.Step(m.now, ev, nil)
	again := clone.Step(m.now, ev, nil)
	if !slices.Equal(out, again) {
		t.Fatalf("a clone does otherwise: %v and %v", out, again)
	}
	if string(p.AppendKey(nil)) != string(clone.AppendKey(nil)) {
		t.Fatalf("a clone is in another state")
	}
	var ended []uint64
	for _, e := range out {
		var err error
		switch e.Kind {
		case Granted:
			err = m.granted(e)
		case Refused:
			want, ok := refuse[e.Waiter]
			if !ok || !errors.Is(e.Err, want) {
				err = fmt.Errorf("%d refused with %w, want %w", e.Waiter, e.Err, want)
			}
			delete(refuse, e.Waiter)
		case SlotReturned:
			if len(back) == 0 || back[0] != e.Slot.ID {
				err = fmt.Errorf("I2: slot %d came back, want %v", e.Slot.ID, back)
				break
			}
			if back = back[1:]; cause != "" {
				ended = append(ended, e.Slot.ID)
			}
			err = m.giveBack(e)
		case EndAttempt:
			if len(ended) == 0 || ended[0] != e.Slot.ID || e.Cause != cause {
				err = fmt.Errorf("F3: attempt %d ended with %q, want %v %q", e.Slot.ID, e.Cause, ended, cause)
				break
			}
			ended = ended[1:]
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if len(refuse) > 0 || len(back) > 0 || len(ended) > 0 {
		t.Fatalf("missing: refused %v, returned %v, ended %v", refuse, back, ended)
	}
	if err := m.after(p); err != nil {
		t.Fatal(err)
	}
}

var (
	testNodes      = []string{"n1", "n2", "n3"}
	testModels     = []string{"x", "y", "z"}
	testPrincipals = []string{"alice", "bob", "carol"}
	testOperations = []string{"chat", "embed"}
)

func drawConfig(t *rapid.T) Config {
	c := Config{Queue: Queue{
		Depth: rapid.IntRange(1, 6).Draw(t, "depth"), Total: rapid.IntRange(4, 20).Draw(t, "total"),
		Wait: 10 * time.Second, Weights: map[string]int{"bob": 2},
	}}
	for _, n := range testNodes {
		c.Adapters = append(c.Adapters, Adapter{Node: n, Name: "a", Capacity: rapid.IntRange(1, 4).Draw(t, "adapter")})
		for _, target := range rapid.SliceOfNDistinct(rapid.SampledFrom(testModels), 1, 3, rapid.ID).Draw(t, "targets") {
			v := Provider{
				ID: TargetID(n, "a", target), Node: n, Adapter: "a", Target: target,
				Capacity:     rapid.IntRange(1, 3).Draw(t, "capacity"),
				LongCapacity: rapid.IntRange(0, 1).Draw(t, "long"), LongThreshold: rapid.Int64Range(0, 3).Draw(t, "threshold"),
				Disabled: rapid.IntRange(0, 9).Draw(t, "disabled") == 0,
			}
			if op := rapid.SampledFrom([]string{"", "", "chat", "embed"}).Draw(t, "op"); op != "" {
				v.Operations = []string{op}
			}
			c.Providers = append(c.Providers, v)
		}
	}
	for _, name := range testModels[:2] {
		g := Group{Name: name}
		for _, v := range c.Providers {
			// A group may hold targets of other names, so models share providers.
			if v.Target == name || rapid.IntRange(0, 3).Draw(t, "other") == 0 {
				g.Candidates = append(g.Candidates, Candidate{
					Provider: v.ID, Priority: rapid.IntRange(0, 1).Draw(t, "priority"), Weight: rapid.IntRange(1, 3).Draw(t, "weight"),
				})
			}
		}
		if len(g.Candidates) > 0 {
			c.Groups = append(c.Groups, g)
		}
	}
	return c
}

// Contract: Q1 Q2 Q3 Q4 F3 F4 P4 P6 P8 P9
func TestAgainstModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := New()
		m := &model{
			now: epoch, gen: map[string]uint64{}, seen: map[string]uint64{}, draining: map[string]bool{},
			overlaid: map[string]bool{}, slots: map[uint64]Slot{}, until: map[WaiterID]time.Time{}, returned: map[uint64]bool{}, served: map[uint64]string{},
			suspects: map[[2]string]time.Time{}, suspicion: map[[2]string]time.Duration{},
		}
		m.cfg = drawConfig(t)
		m.step(t, p, SetConfig(m.cfg), nil, nil, "")
		lastID, lastGen := WaiterID(0), uint64(0)
		node := rapid.SampledFrom(testNodes)
		t.Repeat(map[string]func(*rapid.T){
			"enqueue": func(t *rapid.T) {
				lastID++
				r := &Request{
					Waiter: lastID, Model: rapid.SampledFrom(testModels).Draw(t, "model"),
					Principal:    rapid.SampledFrom(testPrincipals).Draw(t, "principal"),
					Operation:    rapid.SampledFrom(testOperations).Draw(t, "operation"),
					PromptTokens: rapid.Int64Range(0, 4).Draw(t, "tokens"),
					Affinity:     rapid.Uint64Range(0, 3).Draw(t, "affinity"),
					MaxWait:      time.Duration(rapid.IntRange(0, 12).Draw(t, "wait")) * time.Second,
				}
				if rapid.IntRange(0, 3).Draw(t, "avoids") == 0 {
					r.Avoid = []string{rapid.SampledFrom(m.cfg.Providers).Draw(t, "avoid").ID}
				}
				refuse := map[WaiterID]error{}
				m.suspect(r)
				if err := m.enqueue(r); err != nil {
					refuse[r.Waiter] = err
				} else {
					m.queue = append(m.queue, r)
					m.until[r.Waiter] = m.now.Add(min(cmpOr(r.MaxWait, 10*time.Second), 10*time.Second))
				}
				m.step(t, p, Enqueue(r), refuse, nil, "")
			},
			"cancel": func(t *rapid.T) {
				id := WaiterID(rapid.Uint64Range(0, uint64(lastID)+1).Draw(t, "id"))
				if i := m.find(id); i >= 0 {
					m.queue = slices.Delete(m.queue, i, i+1)
				}
				m.step(t, p, CancelWaiter(id), nil, nil, "")
			},
			"return": func(t *rapid.T) {
				id := rapid.Uint64Range(0, p.lastSlot+1).Draw(t, "slot")
				if len(m.order) > 0 && rapid.Bool().Draw(t, "held") {
					id = rapid.SampledFrom(m.order).Draw(t, "which")
				}
				var back []uint64
				if _, ok := m.slots[id]; ok {
					back = []uint64{id}
				}
				before := p.AppendKey(nil)
				m.step(t, p, ReturnSlot(id, ByTerminal), nil, back, "")
				if back == nil && string(before) != string(p.AppendKey(nil)) {
					t.Fatal("I2: a slot that is not held changed something")
				}
			},
			"activate": func(t *rapid.T) {
				n := node.Draw(t, "node")
				if m.gen[n] != 0 {
					return // the registry fences first
				}
				lastGen++
				m.gen[n], m.seen[n] = lastGen, lastGen
				m.step(t, p, Activate(n, lastGen), nil, nil, "")
			},
			"fence": func(t *rapid.T) {
				n := node.Draw(t, "node")
				gen := m.gen[n]
				if gen == 0 {
					return
				}
				var back []uint64
				for _, id := range m.order {
					if m.slots[id].Node == n {
						back = append(back, id)
					}
				}
				m.gen[n], m.draining[n] = 0, false
				for _, v := range m.cfg.Providers {
					if v.Node == n {
						delete(m.overlaid, v.ID)
					}
				}
				m.step(t, p, Fence(n, gen, "closed"), nil, back, "closed")
			},
			"stale": func(t *rapid.T) {
				n := node.Draw(t, "node")
				gen := rapid.Uint64Range(0, m.seen[n]).Draw(t, "gen")
				if gen == m.gen[n] && gen != 0 {
					return
				}
				before := p.AppendKey(nil)
				evs := []Event{
					Activate(n, gen), Fence(n, gen, "late"), AdoptTargets(n, gen, "a", []string{"other"}),
					Overlay(TargetID(n, "a", "x"), gen, true), Overlay(TargetID(n, "a", "x"), gen, false),
				}
				if gen != 0 {
					evs = append(evs, SetDraining(n, gen, true), SetDraining(n, gen, false))
				}
				m.step(t, p, rapid.SampledFrom(evs).Draw(t, "event"), nil, nil, "")
				if string(before) != string(p.AppendKey(nil)) {
					t.Fatal("I6: a stale event changed something")
				}
			},
			"drain": func(t *rapid.T) {
				n := node.Draw(t, "node")
				if m.gen[n] == 0 {
					return
				}
				m.draining[n] = rapid.Bool().Draw(t, "on")
				m.step(t, p, SetDraining(n, m.gen[n], m.draining[n]), nil, nil, "")
			},
			"overlay": func(t *rapid.T) {
				v := rapid.SampledFrom(m.cfg.Providers).Draw(t, "provider")
				if m.gen[v.Node] == 0 {
					return
				}
				on := rapid.Bool().Draw(t, "on")
				if m.overlaid[v.ID] = on; !on {
					delete(m.overlaid, v.ID)
				}
				m.step(t, p, Overlay(v.ID, m.gen[v.Node], on), nil, nil, "")
			},
			"time": func(t *rapid.T) {
				m.now = m.now.Add(time.Duration(rapid.IntRange(1, 5000).Draw(t, "ms")) * time.Millisecond)
				refuse := map[WaiterID]error{}
				for _, r := range m.queue {
					if !m.until[r.Waiter].After(m.now) {
						refuse[r.Waiter] = ErrWaitExpired
					}
				}
				if due := p.Deadline(); (len(refuse) > 0) != (!due.IsZero() && !due.After(m.now)) {
					t.Fatalf("deadline %v at %v, expired %v", due, m.now, slices.Collect(maps.Keys(refuse)))
				}
				m.queue = slices.DeleteFunc(m.queue, func(r *Request) bool { return refuse[r.Waiter] != nil })
				m.step(t, p, DeadlinePassed(), refuse, nil, "")
			},
			"config": func(t *rapid.T) {
				if rapid.IntRange(0, 4).Draw(t, "often") > 0 {
					return
				}
				m.cfg = drawConfig(t)
				for id := range m.overlaid {
					if m.provider(id) == nil {
						delete(m.overlaid, id)
					}
				}
				m.step(t, p, SetConfig(m.cfg), nil, nil, "")
			},
		})
	})
}

func cmpOr(a, b time.Duration) time.Duration {
	if a == 0 {
		return b
	}
	return a
}

// While others keep coming, whoever waits is passed over a bounded number of
// times only: short requests, other models, other operations and other principals
// do not hold anybody back for ever (I4).
//
// Contract: Q2 Q3
func TestNobodyStarves(t *testing.T) {
	for seed := range 20 {
		t.Run(fmt.Sprint(seed), func(t *testing.T) { starve(t, seed) })
	}
}

func starve(t *testing.T, seed int) {
	const depth = 4
	cfg := rapid.Custom(drawConfig).Example(seed)
	cfg.Queue.Depth, cfg.Queue.Total = depth, 1000
	for i := range cfg.Providers {
		cfg.Providers[i].Disabled = false
	}
	m := &model{
		cfg: cfg, gen: map[string]uint64{}, draining: map[string]bool{}, overlaid: map[string]bool{},
		slots: map[uint64]Slot{}, returned: map[uint64]bool{}, served: map[uint64]string{},
		suspects: map[[2]string]time.Time{}, suspicion: map[[2]string]time.Duration{},
	}
	p := New()
	p.Step(epoch, SetConfig(cfg), nil)
	for i, n := range testNodes {
		m.gen[n] = uint64(i + 1)
		p.Step(epoch, Activate(n, uint64(i+1)), nil)
	}
	// Of its line at most depth requests are served before it and with it, and each
	// time all entries may come first: both models in turn, each with three
	// principals (one of weight 2: four turns) in up to eight classes (two operations, four lengths).
	const bound = depth * 2 * 4 * 8
	passed := map[WaiterID]int{}
	follow := func(out []Effect) {
		for _, e := range out {
			switch e.Kind {
			case Granted:
				for _, o := range m.queue {
					ok := slices.ContainsFunc(m.eligible(o), func(c Candidate) bool { return c.Provider == e.Slot.Provider })
					if o.Waiter == e.Waiter || !ok || !m.free(e.Slot.Provider, o.PromptTokens) {
						continue
					}
					if passed[o.Waiter]++; passed[o.Waiter] > bound {
						t.Fatalf("%+v was passed over %d times", *o, passed[o.Waiter])
					}
				}
				if err := m.granted(e); err != nil {
					t.Fatal(err)
				}
			case Refused:
				m.queue = slices.DeleteFunc(m.queue, func(r *Request) bool { return r.Waiter == e.Waiter })
			case SlotReturned:
				if err := m.giveBack(e); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	rnd := rand.New(rand.NewPCG(uint64(seed), 1))
	last := WaiterID(0)
	for range 500 {
		for range 6 {
			last++
			r := &Request{
				Waiter: last, Model: testModels[rnd.IntN(2)], Principal: testPrincipals[rnd.IntN(3)],
				Operation: testOperations[rnd.IntN(2)], PromptTokens: int64(rnd.IntN(4)),
			}
			m.queue = append(m.queue, r)
			follow(p.Step(epoch, Enqueue(r), nil))
		}
		if len(m.order) == 0 {
			return // this configuration serves nobody
		}
		follow(p.Step(epoch, ReturnSlot(m.order[rnd.IntN(len(m.order))], ByTerminal), nil))
	}
}
