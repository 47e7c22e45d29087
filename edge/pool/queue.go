package pool

import (
	"container/heap"
	"slices"
	"time"
)

// The queue of a group. Requests that the same candidates could serve are of one
// class: either all of a class are blocked, or none. A line is one principal's
// requests; an entry is its part in a class, a FIFO. A class keeps its entries by
// whose turn it is, so that no step looks at waiters one by one.
//
//	group --- class A: entries by turn   P1: w1 w4 w7      line of P1: entries in A, B
//	      |                              P2: w2            line of P2: entry in A
//	      +-- class B: entries by turn   P1: w3 w9

// classKey tells classes of a group apart: what each of its candidates is to the
// request, one byte each.
type classKey string

const (
	notOne   = iota // no candidate
	shortOne        // a candidate that sees no long request in it
	longOne         // a candidate where it needs a long-context place too
)

type class struct {
	group      *group
	key        classKey
	candidates []classCandidate // of the group's, in its order
	waiting    int
	turns      turnHeap
}

// classCandidate is a candidate as a class sees it.
type classCandidate struct {
	candidate
	long bool // the requests of the class need a long-context place there
}

func (k *classCandidate) hasPlace() bool { return k.free(k.long) }

type line struct {
	principal string
	waiting   int
	entries   []*entry
}

type entry struct {
	class       *class
	line        *line
	turn        uint64 // tick of its line's last turn, or of its start: the lowest is next
	used        int    // grants of this turn
	index       int    // in class.turns
	first, last *waiter
}

// waiter is a request in the queue.
type waiter struct {
	id         WaiterID
	model      string
	operation  string
	principal  string
	tokens     int64
	affinity   uint64
	avoid      []string
	since      time.Time
	deadline   time.Time
	at         uint64 // tick of its arrival
	unlisted   bool   // nobody offered the model yet: it waits for the lists
	index      int    // in the expiry heap
	entry      *entry
	prev, next *waiter
}

// buildClasses makes the classes of requests that avoid nothing.
func (g *group) buildClasses() {
	for _, k := range g.candidates {
		if k.LongCapacity > 0 && k.LongThreshold > 0 {
			g.thresholds = append(g.thresholds, k.LongThreshold)
		}
	}
	slices.Sort(g.thresholds)
	g.thresholds = slices.Compact(g.thresholds)
	each := func(op string, named bool) []*class {
		ok := func(v *provider) bool { return len(v.Operations) == 0 || (named && v.can(op)) }
		out := []*class{g.makeClass(ok, 0)}
		for _, tokens := range g.thresholds {
			out = append(out, g.makeClass(ok, tokens))
		}
		return out
	}
	g.otherOps = each("", false)
	g.byOp = map[string][]*class{}
	for _, k := range g.candidates {
		for _, op := range k.Operations {
			if _, ok := g.byOp[op]; !ok {
				g.byOp[op] = each(op, true)
			}
		}
	}
}

// makeClass returns the class of the candidates that ok says yes to, for requests
// of a length. A new one is kept by the group only once it has waiters, or by
// buildClasses.
func (g *group) makeClass(ok func(*provider) bool, tokens int64) *class {
	set := make([]byte, len(g.candidates))
	for i, k := range g.candidates {
		switch {
		case !ok(k.provider):
			set[i] = notOne
		case k.isLong(tokens):
			set[i] = longOne
		default:
			set[i] = shortOne
		}
	}
	key := classKey(set)
	if c := g.classes[key]; c != nil {
		return c
	}
	c := &class{group: g, key: key}
	for i, k := range g.candidates {
		if set[i] != notOne {
			c.candidates = append(c.candidates, classCandidate{k, set[i] == longOne})
		}
	}
	return c
}

// class returns the class of a request.
func (g *group) class(op string, tokens int64, avoid []string) *class {
	lengths, ok := g.byOp[op]
	if !ok {
		lengths = g.otherOps
	}
	if lengths == nil { // a group without candidates, kept for its waiters
		return g.makeClass(func(*provider) bool { return false }, tokens)
	}
	at := 0
	for at < len(g.thresholds) && g.thresholds[at] <= tokens {
		at++
	}
	base := lengths[at]
	if c := g.classes[base.key]; c != nil {
		base = c // several operations share it
	}
	if len(avoid) == 0 {
		return base
	}
	return g.makeClass(func(v *provider) bool {
		return !slices.Contains(avoid, v.ID) && slices.ContainsFunc(base.candidates, func(k classCandidate) bool { return k.provider == v })
	}, tokens)
}

// choose picks by Q1: the best priority with a free place; in it one that is no
// suspect; then the preferred one, or else the least loaded relative to weight, of
// equals the one that was granted longest ago.
func (c *class) choose(now time.Time, preferred string) *classCandidate {
	var best *classCandidate
	for i := range c.candidates {
		k := &c.candidates[i]
		if best != nil && k.priority != best.priority {
			break // they are in order: a better priority has a free place
		}
		if k.hasPlace() && (best == nil || k.before(best, now, preferred)) {
			best = k
		}
	}
	return best
}

// before reports whether k comes before o, of the same priority.
func (k *classCandidate) before(o *classCandidate, now time.Time, preferred string) bool {
	if s := k.places.suspected(now); s != o.places.suspected(now) {
		return !s
	}
	if k.ID == preferred || o.ID == preferred {
		return k.ID == preferred
	}
	l, r := k.places.used*o.weight, o.places.used*k.weight
	return l < r || (l == r && k.places.last < o.places.last)
}

// grant gives a request of the class a place at k.
func (p *Pool) grant(c *class, k *classCandidate, id WaiterID, affinity uint64) Effect {
	ef := Effect{Kind: Granted, Waiter: id, Slot: p.take(k.provider, k.long), StallTimeout: k.StallTimeout}
	for i := range c.candidates {
		if o := &c.candidates[i]; o.provider != k.provider && o.live() {
			ef.Others++
		}
	}
	p.affinity.note(affinity, k.ID)
	return ef
}

// freeAt reports whether a candidate behind the adapter could serve the class.
func (c *class) freeAt(a *adapter) bool {
	for i := range c.candidates {
		if k := &c.candidates[i]; k.adapter == a && k.hasPlace() {
			return true
		}
	}
	return false
}

// anyEnabled reports whether the class has a candidate that may come back (P9).
func (c *class) anyEnabled() bool {
	return slices.ContainsFunc(c.candidates, func(k classCandidate) bool { return k.enabled() })
}

// insert puts w at the end of its line, in class c of group g.
func (p *Pool) insert(g *group, c *class, w *waiter) {
	l := g.lines[w.principal]
	if l == nil {
		l = &line{principal: w.principal}
		g.lines[w.principal] = l
	}
	i := slices.IndexFunc(l.entries, func(e *entry) bool { return e.class == c })
	if i < 0 {
		e := &entry{class: c, line: l, turn: p.nextTick()}
		i = len(l.entries)
		l.entries = append(l.entries, e)
		heap.Push(&c.turns, e)
	}
	e := l.entries[i]
	w.entry, w.prev, w.next = e, e.last, nil
	if e.last != nil {
		e.last.next = w
	} else {
		e.first = w
	}
	e.last = w
	l.waiting++
	g.waiting++
	if c.waiting++; c.waiting == 1 {
		g.busy = append(g.busy, c)
		g.classes[c.key] = c
	}
}

// remove takes w out of the queue. It is the only way out of waiters (I7).
func (p *Pool) remove(w *waiter) {
	delete(p.waiters, w.id)
	if w.unlisted {
		p.unlisted--
	}
	heap.Remove(&p.expiry, w.index)
	e := w.entry
	c, l, g := e.class, e.line, e.class.group
	if w.prev != nil {
		w.prev.next = w.next
	} else {
		e.first = w.next
	}
	if w.next != nil {
		w.next.prev = w.prev
	} else {
		e.last = w.prev
	}
	if e.first == nil {
		heap.Remove(&c.turns, e.index)
		l.entries = slices.DeleteFunc(l.entries, func(o *entry) bool { return o == e })
	}
	if l.waiting--; l.waiting == 0 {
		delete(g.lines, l.principal)
	}
	if c.waiting--; c.waiting == 0 {
		g.busy = slices.DeleteFunc(g.busy, func(o *class) bool { return o == c })
		delete(g.classes, c.key)
	}
	if g.waiting--; g.waiting == 0 && !g.offered {
		delete(p.groups, g.name)
	}
}

// pump grants what the adapter has free to whoever's turn it is (Q3, Q4).
func (p *Pool) pump(now time.Time, a *adapter, out []Effect) []Effect {
	for a.node.gen != 0 && a.places.used < a.Capacity {
		w := p.next(a)
		if w == nil {
			break
		}
		c := w.entry.class
		k := c.choose(now, p.affinity.of(w.affinity))
		p.remove(w)
		ef := p.grant(c, k, w.id, w.affinity)
		ef.Waited = now.Sub(w.since)
		out = append(out, ef)
	}
	return out
}

// next picks the waiter whose turn it is at the adapter, and ends that turn.
// Groups take turns there; in a group, principals; in a line, the one that came
// first of those that can be served.
func (p *Pool) next(a *adapter) *waiter {
	var (
		turn *spot
		pick *entry
	)
	for _, s := range a.spots {
		if s.group.waiting == 0 || (turn != nil && s.served >= turn.served) {
			continue
		}
		if e := s.group.first(a); e != nil {
			turn, pick = s, e
		}
	}
	if pick == nil {
		return nil
	}
	tick := p.nextTick()
	turn.served = tick
	weight := max(p.cfg.Queue.Weights[pick.line.principal], 1)
	var w *waiter
	for _, e := range pick.line.entries {
		if !e.class.freeAt(a) {
			continue
		}
		if w == nil || e.first.at < w.at {
			w = e.first
		}
		// The line had its turn at this adapter, in all classes it serves.
		if e.used++; e.used >= weight {
			e.used, e.turn = 0, tick
			heap.Fix(&e.class.turns, e.index)
		}
	}
	return w
}

// first is the entry of the group whose turn it is among those that the adapter
// can serve now.
func (g *group) first(a *adapter) *entry {
	var first *entry
	for _, c := range g.busy {
		if e := c.turns[0]; (first == nil || e.turn < first.turn) && c.freeAt(a) {
			first = e
		}
	}
	return first
}

// waitersByArrival lists all waiters in the order they came.
func (p *Pool) waitersByArrival() []*waiter {
	all := make([]*waiter, 0, len(p.waiters))
	for _, w := range p.waiters {
		all = append(all, w)
	}
	slices.SortFunc(all, func(a, b *waiter) int {
		if a.at < b.at {
			return -1
		}
		return 1
	})
	return all
}

// turnHeap orders the entries of a class by whose turn it is.
type turnHeap []*entry

func (h turnHeap) Len() int           { return len(h) }
func (h turnHeap) Less(i, j int) bool { return h[i].turn < h[j].turn }
func (h turnHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].index, h[j].index = i, j
}

func (h *turnHeap) Push(x any) {
	e := x.(*entry)
	e.index = len(*h)
	*h = append(*h, e)
}

func (h *turnHeap) Pop() any {
	last := len(*h) - 1
	e := (*h)[last]
	(*h)[last] = nil
	*h = (*h)[:last]
	return e
}

// expiryHeap orders the waiters by when their wait ends.
type expiryHeap []*waiter

func (h expiryHeap) Len() int { return len(h) }
func (h expiryHeap) Less(i, j int) bool {
	if h[i].deadline.Equal(h[j].deadline) {
		return h[i].at < h[j].at
	}
	return h[i].deadline.Before(h[j].deadline)
}

func (h expiryHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].index, h[j].index = i, j
}

func (h *expiryHeap) Push(x any) {
	w := x.(*waiter)
	w.index = len(*h)
	*h = append(*h, w)
}

func (h *expiryHeap) Pop() any {
	last := len(*h) - 1
	w := (*h)[last]
	(*h)[last] = nil
	*h = (*h)[:last]
	return w
}
