package pool

import (
	"cmp"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// What one adapter may list, and how many model names are remembered with the
// time they were first seen: a peer's word never grows memory without bound.
const (
	maxTargets    = 1024
	maxTargetName = 512
	maxFirstSeen  = 16384
)

// Defaults of Config.
const (
	defaultCapacity = 8
	defaultDepth    = 1000
	defaultTotal    = 100_000
	defaultWait     = 5 * time.Minute
)

// adapter is a configured adapter, resolved.
type adapter struct {
	Adapter
	node   *node
	places *places
	spots  []*spot // one for each group with a candidate here
}

// provider is a provider that is offered, resolved.
type provider struct {
	Provider
	adapter  *adapter
	node     *node
	places   *places
	overlaid bool
}

// enabled: the operator wants it used. It may be gone or overlaid all the same.
func (v *provider) enabled() bool { return !v.Disabled && !v.adapter.Disabled }

// live: it would take a request if it had a place.
func (v *provider) live() bool {
	return v.node.gen != 0 && v.enabled() && !v.adapter.Held && !v.overlaid && !v.node.draining()
}

// free: it has a place, of both kinds for a long request (I8), and its adapter
// has one (I1).
func (v *provider) free(long bool) bool {
	return v.places.used < v.Capacity && v.adapter.places.used < v.adapter.Capacity &&
		(!long || v.places.long < v.LongCapacity) && v.live()
}

// isLong: a request of that length needs a long-context place here.
func (v *provider) isLong(tokens int64) bool {
	return v.LongCapacity > 0 && v.LongThreshold > 0 && tokens >= v.LongThreshold
}

// can: it is able to do the operation.
func (v *provider) can(op string) bool {
	return len(v.Operations) == 0 || slices.Contains(v.Operations, op)
}

// group is a model. One that is no longer offered stays while requests wait.
type group struct {
	name       string
	offered    bool
	candidates []candidate         // best priority first
	thresholds []int64             // of its candidates, ascending: between two, all lengths are alike
	byOp       map[string][]*class // one for each length
	otherOps   []*class            // for an operation that no candidate names

	// The queue; see queue.go.
	classes map[classKey]*class
	busy    []*class // those with waiters
	lines   map[string]*line
	waiting int
}

type candidate struct {
	*provider
	priority int
	weight   int
}

// spot is a group's turn at an adapter.
type spot struct {
	group   *group
	adapter *adapter
	served  uint64 // tick of the last turn
}

// rebuild makes the catalogue anew, and puts the waiting requests into it in the
// order they came.
func (p *Pool) rebuild(now time.Time) {
	old := p.groups
	p.buildAdapters()
	p.buildGroups(old)
	p.buildModels(now)
	p.prune()
	for _, w := range p.waitersByArrival() {
		if g := p.find(w.model); w.unlisted && g != nil {
			w.model = g.name // it came
		}
		g := p.waitedFor(w.model)
		p.insert(g, g.class(w.operation, w.tokens, w.avoid), w)
	}
}

func (p *Pool) buildAdapters() {
	p.adapters = make(map[adapterKey]*adapter, len(p.cfg.Adapters))
	p.order = p.order[:0:0]
	for _, c := range p.cfg.Adapters {
		key := adapterKey{c.Node, c.Name}
		if p.adapters[key] != nil {
			continue
		}
		if c.Capacity <= 0 {
			c.Capacity = defaultCapacity
		}
		a := &adapter{Adapter: c, node: p.node(c.Node), places: p.adapterPlaces[key]}
		if a.places == nil {
			a.places = &places{}
			p.adapterPlaces[key] = a.places
		}
		p.adapters[key] = a
		p.order = append(p.order, a)
	}
	for key := range p.listings {
		if p.adapters[key] == nil {
			delete(p.listings, key)
		}
	}
}

// buildGroups makes providers and groups of the configuration, or of what the
// adapters list.
func (p *Pool) buildGroups(old map[string]*group) {
	providers, groups := p.cfg.Providers, p.cfg.Groups
	if p.cfg.Auto {
		providers, groups = p.adopted()
	}
	p.providers = make(map[string]*provider, len(providers))
	for _, c := range providers {
		p.addProvider(c)
	}
	p.groups = make(map[string]*group, len(groups))
	for _, c := range groups {
		if p.groups[c.Name] != nil {
			continue
		}
		g := &group{name: c.Name, offered: true, classes: map[classKey]*class{}, lines: map[string]*line{}}
		for _, k := range c.Candidates {
			v := p.providers[k.Provider]
			if v == nil || slices.ContainsFunc(g.candidates, func(o candidate) bool { return o.provider == v }) {
				continue
			}
			g.candidates = append(g.candidates, candidate{v, k.Priority, max(k.Weight, 1)})
		}
		slices.SortStableFunc(g.candidates, func(a, b candidate) int { return cmp.Compare(a.priority, b.priority) })
		p.groups[g.name] = g
		g.buildClasses()
		p.buildSpots(g, old[g.name])
	}
}

func (p *Pool) addProvider(c Provider) {
	a := p.adapters[adapterKey{c.Node, c.Adapter}]
	if c.ID == "" {
		c.ID = TargetID(c.Node, c.Adapter, c.Target)
	}
	if a == nil || p.providers[c.ID] != nil {
		return
	}
	if c.Capacity <= 0 {
		c.Capacity = a.Capacity
	}
	if len(c.Operations) == 0 {
		c.Operations = a.Operations
	}
	v := &provider{Provider: c, adapter: a, node: a.node}
	key := providerKey{c.Node, c.ID}
	if v.places = p.providerPlaces[key]; v.places == nil {
		v.places = &places{}
		p.providerPlaces[key] = v.places
	}
	o, ok := p.overlays[c.ID]
	v.overlaid = ok && o == overlay{v.node.gen, c.Node, c.Adapter, c.Target}
	p.providers[c.ID] = v
}

func (p *Pool) buildSpots(g, old *group) {
	for _, k := range g.candidates {
		a := k.adapter
		if slices.ContainsFunc(a.spots, func(s *spot) bool { return s.group == g }) {
			continue
		}
		s := &spot{group: g, adapter: a}
		if old != nil {
			s.served = old.servedAt(a.Node, a.Name)
		}
		a.spots = append(a.spots, s)
	}
}

// servedAt is the tick of the group's last turn at an adapter.
func (g *group) servedAt(node, name string) uint64 {
	for _, k := range g.candidates {
		if k.adapter.Node != node || k.adapter.Name != name {
			continue
		}
		for _, s := range k.adapter.spots {
			if s.group == g {
				return s.served
			}
		}
	}
	return 0
}

// adopted makes of what the adapters list one provider for each target, and one
// group for each name. A configured provider of that target says how it is used.
func (p *Pool) adopted() ([]Provider, []Group) {
	configured := make(map[[3]string]Provider, len(p.cfg.Providers))
	for _, c := range p.cfg.Providers {
		configured[[3]string{c.Node, c.Adapter, c.Target}] = c
	}
	listed := slices.ContainsFunc(p.order, func(a *adapter) bool {
		return !a.Fallback && !a.Disabled && len(p.listings[adapterKey{a.Node, a.Name}]) > 0
	})
	var (
		providers []Provider
		groups    []Group
		index     = map[string]int{}
	)
	for _, a := range p.order {
		if a.Disabled || (a.Fallback && listed) {
			continue
		}
		for _, target := range p.listings[adapterKey{a.Node, a.Name}] {
			c, ok := configured[[3]string{a.Node, a.Name, target}]
			if !ok {
				c = Provider{Node: a.Node, Adapter: a.Name, Target: target}
			}
			if c.ID == "" {
				c.ID = TargetID(a.Node, a.Name, target)
			}
			providers = append(providers, c)
			i, ok := index[target]
			if !ok {
				i = len(groups)
				index[target] = i
				groups = append(groups, Group{Name: target})
			}
			groups[i].Candidates = append(groups[i].Candidates, Candidate{Provider: c.ID})
		}
	}
	return providers, groups
}

func (p *Pool) buildModels(now time.Time) {
	models := make([]Model, 0, len(p.groups))
	for _, g := range p.groups {
		if !slices.ContainsFunc(g.candidates, func(k candidate) bool { return k.enabled() }) {
			continue
		}
		since, ok := p.firstSeen[g.name]
		if !ok {
			since = now
		}
		models = append(models, Model{Name: g.name, Since: since})
	}
	slices.SortFunc(models, func(a, b Model) int { return strings.Compare(a.Name, b.Name) })
	if len(p.firstSeen)+len(models) > maxFirstSeen {
		clear(p.firstSeen) // those that are gone are forgotten; those that are offered are put back
	}
	for _, m := range models {
		p.firstSeen[m.Name] = m.Since
	}
	p.models = models
}

// prune forgets the counts and verdicts of what is no longer offered.
func (p *Pool) prune() {
	for key := range p.adapterPlaces {
		p.forget(providerKey{}, key)
	}
	for key := range p.providerPlaces {
		p.forget(key, adapterKey{})
	}
	for id, o := range p.overlays {
		if v := p.providers[id]; v == nil || !v.overlaid || o.gen != v.node.gen {
			delete(p.overlays, id)
		}
	}
}

// cleanTargets is what may be adopted of a peer's list: clean names, each once,
// not too many.
func cleanTargets(in []string) []string {
	var out []string
	seen := map[string]bool{}
	for _, t := range in {
		ok := t != "" && len(t) <= maxTargetName && utf8.ValidString(t) &&
			!strings.ContainsFunc(t, unicode.IsControl) && !seen[t]
		if !ok {
			continue
		}
		if len(out) == maxTargets {
			break
		}
		seen[t] = true
		out = append(out, strings.Clone(t)) // it may alias a message
	}
	return out
}

// find returns the group that a caller's word for a model means: the one of that
// name, or, for a name without a tag, that of its ":latest", as Ollama has it.
func (p *Pool) find(model string) *group {
	if g := p.groups[model]; g != nil && g.offered {
		return g
	}
	if !strings.Contains(model, ":") {
		if g := p.groups[model+":latest"]; g != nil && g.offered {
			return g
		}
	}
	return nil
}
