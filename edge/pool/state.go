package pool

import "time"

// Pool is the state. One goroutine owns it.
//
// What an operator configured and what adapters list is kept as it came (cfg,
// listings); the catalogue (adapters, providers, groups) is built from it, as a
// whole, and points to what outlives any catalogue: nodes and places.
type Pool struct {
	cfg      Config
	listings map[adapterKey][]string // of those that have listed, be it nothing
	began    time.Time               // when the first configuration came

	adapters  map[adapterKey]*adapter
	order     []*adapter // as configured: the order of pumps
	providers map[string]*provider
	groups    map[string]*group
	models    []Model // never changed, only replaced

	nodes          map[string]*node
	adapterPlaces  map[adapterKey]*places
	providerPlaces map[providerKey]*places
	overlays       map[string]overlay // by provider id
	firstSeen      map[string]time.Time

	affinity affinity

	held     map[uint64]*held
	spare    *held // returned records, used again
	lastSlot uint64

	waiters  map[WaiterID]*waiter
	expiry   expiryHeap
	unlisted int    // waiters whose model nobody offers yet
	tick     uint64 // counts grants and arrivals: what came before what
	stopping bool
}

type adapterKey struct{ node, name string }

type providerKey struct{ node, id string }

// node is what the pool knows of a node. An id stays known: seen must not fall.
type node struct {
	gen     uint64 // the active generation; 0: offline
	seen    uint64 // the highest that was active
	drain   uint64 // the generation that said it is draining
	drained bool   // by the operator

	first, last *held // its slots, in the order granted
}

func (n *node) draining() bool { return n.drained || (n.drain != 0 && n.drain == n.gen) }

// places counts what is in use of a provider or an adapter, over configurations
// and sessions.
type places struct {
	used, long int
	last       uint64 // tick of the last grant: ties rotate
	// An attempt failed there: see suspect.go.
	suspectUntil time.Time
	suspicion    time.Duration
}

// overlay is bound to what it was found out about: another binding, or another
// generation, does not have it (F7, C5).
type overlay struct {
	gen                   uint64
	node, adapter, target string
}

// held is a slot in use.
type held struct {
	slot              Slot
	provider, adapter *places
	node              *node
	prev, next        *held
}

// New makes an empty pool; step SetConfig first.
func New() *Pool {
	return &Pool{
		listings:       map[adapterKey][]string{},
		nodes:          map[string]*node{},
		adapterPlaces:  map[adapterKey]*places{},
		providerPlaces: map[providerKey]*places{},
		overlays:       map[string]overlay{},
		firstSeen:      map[string]time.Time{},
		held:           map[uint64]*held{},
		waiters:        map[WaiterID]*waiter{},
	}
}

// Deadline is when DeadlinePassed is due; zero: never.
func (p *Pool) Deadline() time.Time {
	if len(p.expiry) == 0 {
		return time.Time{}
	}
	return p.expiry[0].deadline
}

// Models lists what the groups offer, by name. The slice is never changed: it
// may be shared. A new one comes with each CatalogChanged.
func (p *Pool) Models() []Model { return p.models }

// node returns the record of a node, new if need be.
func (p *Pool) node(name string) *node {
	n := p.nodes[name]
	if n == nil {
		n = &node{}
		p.nodes[name] = n
	}
	return n
}

// nextTick is a time that only orders: later calls give higher ticks.
func (p *Pool) nextTick() uint64 {
	p.tick++
	return p.tick
}

// take makes a slot of v in use.
func (p *Pool) take(v *provider, long bool) Slot {
	h := p.spare
	if h == nil {
		h = &held{}
	} else {
		p.spare = h.next
	}
	p.lastSlot++
	*h = held{
		slot: Slot{
			ID: p.lastSlot, Provider: v.ID, Node: v.Node, Gen: v.node.gen,
			Adapter: v.Adapter, Target: v.Target, Long: long,
		},
		provider: v.places, adapter: v.adapter.places, node: v.node, prev: v.node.last,
	}
	h.count(+1)
	v.places.last = p.nextTick()
	p.link(h)
	return h.slot
}

func (p *Pool) link(h *held) {
	if h.prev != nil {
		h.prev.next = h
	} else {
		h.node.first = h
	}
	h.node.last = h
	p.held[h.slot.ID] = h
}

// drop makes a slot no longer in use. It is the only way out of held (I2).
func (p *Pool) drop(h *held) {
	delete(p.held, h.slot.ID)
	h.count(-1)
	if h.prev != nil {
		h.prev.next = h.next
	} else {
		h.node.first = h.next
	}
	if h.next != nil {
		h.next.prev = h.prev
	} else {
		h.node.last = h.prev
	}
	p.forget(providerKey{h.slot.Node, h.slot.Provider}, adapterKey{h.slot.Node, h.slot.Adapter})
	*h = held{next: p.spare}
	p.spare = h
}

// forget drops the counts of what is neither offered nor in use.
func (p *Pool) forget(provider providerKey, adapter adapterKey) {
	if c := p.providerPlaces[provider]; c != nil && c.used == 0 {
		if v := p.providers[provider.id]; v == nil || v.places != c {
			delete(p.providerPlaces, provider)
		}
	}
	if c := p.adapterPlaces[adapter]; c != nil && c.used == 0 && p.adapters[adapter] == nil {
		delete(p.adapterPlaces, adapter)
	}
}

func (h *held) count(by int) {
	h.provider.used += by
	h.adapter.used += by
	if h.slot.Long {
		h.provider.long += by
	}
}
