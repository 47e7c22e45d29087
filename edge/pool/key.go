package pool

import (
	"container/heap"
	"encoding/binary"
	"maps"
	"slices"
	"strings"
	"time"
)

// Clone copies the pool: the copy and the original share nothing that changes.
func (p *Pool) Clone() *Pool {
	c := New()
	c.cfg, c.stopping, c.lastSlot, c.tick = p.cfg, p.stopping, p.lastSlot, p.tick
	c.began, c.unlisted = p.began, p.unlisted
	c.listings, c.overlays, c.firstSeen = maps.Clone(p.listings), maps.Clone(p.overlays), maps.Clone(p.firstSeen)
	for name, n := range p.nodes {
		c.nodes[name] = &node{gen: n.gen, seen: n.seen, drain: n.drain, drained: n.drained}
	}
	c.affinity = p.affinity.clone()
	for key, n := range p.adapterPlaces {
		m := *n
		c.adapterPlaces[key] = &m
	}
	for key, n := range p.providerPlaces {
		m := *n
		c.providerPlaces[key] = &m
	}
	for name, n := range p.nodes {
		for h := n.first; h != nil; h = h.next {
			m := c.nodes[name]
			c.link(&held{
				slot: h.slot, node: m, prev: m.last,
				provider: c.providerPlaces[providerKey{h.slot.Node, h.slot.Provider}],
				adapter:  c.adapterPlaces[adapterKey{h.slot.Node, h.slot.Adapter}],
			})
		}
	}
	for _, w := range p.expiry {
		m := *w
		m.entry, m.prev, m.next = nil, nil, nil
		c.waiters[m.id] = &m
		c.expiry = append(c.expiry, &m)
	}
	c.groups = p.groups // rebuild reads the turns of groups there
	c.rebuild(time.Time{})
	for name, g := range p.groups {
		c.groups[name].copyTurns(g)
	}
	c.models, c.tick = p.models, p.tick
	return c
}

// copyTurns gives the entries of g the turns they have in from.
func (g *group) copyTurns(from *group) {
	for _, c := range g.busy {
		for _, e := range c.turns {
			for _, o := range from.lines[e.line.principal].entries {
				if o.class.key == c.key {
					e.turn, e.used = o.turn, o.used
				}
			}
		}
		heap.Init(&c.turns)
	}
}

// AppendKey appends the canonical form of the state: equal keys, equal
// behaviour. Ticks go in as ranks, for only their order matters.
func (p *Pool) AppendKey(b []byte) []byte {
	k := keyer{b: b, rank: p.ranks()}
	k.bool(p.stopping)
	k.num(p.lastSlot)
	k.config(&p.cfg)
	k.time(p.began)

	for _, key := range sortedKeys(p.listings, func(a adapterKey) string { return a.node + "\x00" + a.name }) {
		k.strings(key.node, key.name)
		k.list(p.listings[key])
	}
	k.mark()
	for _, name := range sortedKeys(p.nodes, func(s string) string { return s }) {
		n := p.nodes[name]
		k.strings(name)
		k.num(n.gen, n.seen, n.drain)
		k.bool(n.drained)
		for h := n.first; h != nil; h = h.next {
			k.slot(h.slot)
		}
		k.mark()
	}
	for _, id := range sortedKeys(p.providers, func(s string) string { return s }) {
		k.strings(id)
		k.tick(p.providers[id].places.last)
		k.time(p.providers[id].places.suspectUntil)
		k.num(uint64(p.providers[id].places.suspicion))
	}
	k.mark()
	for _, id := range sortedKeys(p.overlays, func(s string) string { return s }) {
		o := p.overlays[id]
		k.strings(id, o.node, o.adapter, o.target)
		k.num(o.gen)
	}
	k.mark()
	p.affinity.each(func(key uint64, provider string) {
		k.num(key)
		k.strings(provider)
	})
	k.mark()
	for _, w := range p.waitersByArrival() {
		k.num(uint64(w.id))
		k.strings(w.model, w.principal, w.operation)
		k.list(w.avoid)
		k.bool(w.unlisted)
		k.num(uint64(w.tokens), w.affinity)
		k.time(w.since)
		k.time(w.deadline)
		k.tick(w.entry.turn)
		k.num(uint64(w.entry.used))
	}
	k.mark()
	for _, a := range p.order {
		for _, s := range a.spots {
			k.tick(s.served)
		}
	}
	return k.b
}

// ranks maps every tick in the state to its place in their order.
func (p *Pool) ranks() map[uint64]uint64 {
	var ticks []uint64
	for _, v := range p.providers {
		ticks = append(ticks, v.places.last)
	}
	for _, w := range p.waiters {
		ticks = append(ticks, w.entry.turn)
	}
	for _, a := range p.order {
		for _, s := range a.spots {
			ticks = append(ticks, s.served)
		}
	}
	slices.Sort(ticks)
	rank := make(map[uint64]uint64, len(ticks))
	for _, t := range slices.Compact(ticks) {
		rank[t] = uint64(len(rank))
	}
	return rank
}

type keyer struct {
	b    []byte
	rank map[uint64]uint64
}

func (k *keyer) num(vs ...uint64) {
	for _, v := range vs {
		k.b = binary.AppendUvarint(k.b, v)
	}
}

func (k *keyer) tick(t uint64) { k.num(k.rank[t]) }

// mark ends a list; no string and no list has this length.
func (k *keyer) mark() { k.num(1 << 40) }

func (k *keyer) bool(vs ...bool) {
	for _, v := range vs {
		if v {
			k.b = append(k.b, 1)
		} else {
			k.b = append(k.b, 0)
		}
	}
}

func (k *keyer) strings(vs ...string) {
	for _, s := range vs {
		k.num(uint64(len(s)))
		k.b = append(k.b, s...)
	}
}

func (k *keyer) list(vs []string) {
	k.num(uint64(len(vs)))
	k.strings(vs...)
}

func (k *keyer) time(t time.Time) { k.b = binary.AppendVarint(k.b, t.UnixNano()) }

func (k *keyer) slot(s Slot) {
	k.num(s.ID, s.Gen)
	k.strings(s.Provider, s.Node, s.Adapter, s.Target)
	k.bool(s.Long)
}

func (k *keyer) config(c *Config) {
	k.bool(c.Auto)
	for _, a := range c.Adapters {
		k.strings(a.Node, a.Name)
		k.num(uint64(a.Capacity))
		k.list(a.Operations)
		k.bool(a.Fallback, a.Disabled, a.Held)
	}
	k.mark()
	for _, v := range c.Providers {
		k.strings(v.ID, v.Node, v.Adapter, v.Target)
		k.num(uint64(v.Capacity), uint64(v.LongCapacity), uint64(v.LongThreshold), uint64(v.StallTimeout))
		k.list(v.Operations)
		k.bool(v.Disabled)
	}
	k.mark()
	for _, g := range c.Groups {
		k.strings(g.Name)
		for _, d := range g.Candidates {
			k.strings(d.Provider)
			k.num(uint64(d.Priority), uint64(d.Weight))
		}
		k.mark()
	}
	k.mark()
	k.num(uint64(c.Queue.Depth), uint64(c.Queue.Total), uint64(c.Queue.Wait))
	for _, name := range sortedKeys(c.Queue.Weights, func(s string) string { return s }) {
		k.strings(name)
		k.num(uint64(c.Queue.Weights[name]))
	}
	k.mark()
}

func sortedKeys[K comparable, V any](m map[K]V, by func(K) string) []K {
	return slices.SortedFunc(maps.Keys(m), func(a, b K) int { return strings.Compare(by(a), by(b)) })
}
