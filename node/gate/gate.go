// Package gate owns a Node's local capacity: how many exchanges each adapter may
// have at once (P3). It is a pure core.
//
//	slot:  free --Acquire--> held --Release--> free
//
// Invariants:
//
//	I1  A slot is held from its Acquire to its one Release; releasing it again,
//	    or one that never was, changes nothing (W9).
//	I2  Acquire succeeds only while fewer slots of that adapter are held than its
//	    capacity.
//	I3  A slot belongs to the adapter's identity, its name: no new session, no
//	    new configuration and no smaller capacity frees one in use (P3).
//
// Left to others: which work needs a slot, and the lock around it all.
package gate

// Slot is one held place. The zero Slot is none.
type Slot uint64

// Gate is the state; New makes one.
type Gate struct {
	last     Slot
	held     map[Slot]string
	adapters map[string]*places
}

type places struct{ capacity, used int }

// New returns a gate without adapters: it lets nothing through.
func New() *Gate {
	return &Gate{held: map[Slot]string{}, adapters: map[string]*places{}}
}

// SetCapacity says how many slots the adapter of that name has from now on. One
// that is gone has none; what it still holds stays counted, should it come back.
func (g *Gate) SetCapacity(adapter string, capacity int) {
	p := g.adapters[adapter]
	switch {
	case p == nil && capacity > 0:
		g.adapters[adapter] = &places{capacity: capacity}
	case p != nil:
		p.capacity = max(capacity, 0)
		g.forget(adapter, p)
	}
}

// Acquire takes a slot, or says that the adapter has none to give.
func (g *Gate) Acquire(adapter string) (Slot, bool) {
	p := g.adapters[adapter]
	if p == nil || p.used >= p.capacity {
		return 0, false
	}
	p.used++
	g.last++
	g.held[g.last] = adapter
	return g.last, true
}

// Release gives a slot back and reports whether it was held.
func (g *Gate) Release(s Slot) bool {
	adapter, ok := g.held[s]
	if !ok {
		return false
	}
	delete(g.held, s)
	p := g.adapters[adapter]
	p.used--
	g.forget(adapter, p)
	return true
}

// InUse is how many slots the adapter holds.
func (g *Gate) InUse(adapter string) int {
	if p := g.adapters[adapter]; p != nil {
		return p.used
	}
	return 0
}

// forget drops an adapter that has no capacity and holds nothing.
func (g *Gate) forget(adapter string, p *places) {
	if p.capacity == 0 && p.used == 0 {
		delete(g.adapters, adapter)
	}
}
