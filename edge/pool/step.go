package pool

import (
	"slices"
	"time"
)

// Step takes one event, and appends what must follow to out.
func (p *Pool) Step(now time.Time, ev Event, out []Effect) []Effect {
	switch ev.kind {
	case evEnqueue:
		return p.enqueue(now, ev.request, out)
	case evReturnSlot:
		return p.returnSlot(now, ev.slot, ev.how, out)
	case evCancelWaiter:
		if w := p.waiters[ev.waiter]; w != nil {
			p.remove(w)
		}
		return out
	case evDeadlinePassed:
		for len(p.expiry) > 0 && !p.expiry[0].deadline.After(now) {
			out = p.refuse(now, p.expiry[0], ErrWaitExpired, out)
		}
		return out
	case evActivate:
		return p.activate(now, ev.node, ev.gen, out)
	case evFence:
		return p.settle(now, p.fence(ev.node, ev.gen, ev.cause, out))
	case evSetDraining:
		return p.setDraining(now, ev.node, ev.gen, ev.on, out)
	case evOverlay:
		return p.overlay(now, ev.name, ev.gen, ev.on, out)
	case evSetConfig:
		p.cfg = *ev.config
		if p.began.IsZero() {
			p.began = now
		}
		return p.renew(now, out)
	case evAdoptTargets:
		return p.adoptTargets(now, ev, out)
	case evStopping:
		p.stopping = true
		for _, w := range p.waitersByArrival() {
			out = p.refuse(now, w, ErrStopping, out)
		}
		return out
	}
	panic("BUG: pool: an event that no function of this package made")
}

func (p *Pool) enqueue(now time.Time, r *Request, out []Effect) []Effect {
	refuse := func(err error) []Effect {
		return append(out, Effect{Kind: Refused, Waiter: r.Waiter, Err: err})
	}
	if p.waiters[r.Waiter] != nil {
		panic("BUG: pool I7: a waiter's id is used twice")
	}
	if p.stopping {
		return refuse(ErrStopping)
	}
	g := p.find(r.Model)
	if g == nil {
		if err := p.prospect(now).refusal(); err != nil {
			return refuse(err)
		}
		return p.join(now, r, r.Model, true, out)
	}
	p.suspectLast(now, r.Avoid)
	c := g.class(r.Operation, r.PromptTokens, r.Avoid)
	// By I3 nobody waits who could have the place that is free now.
	if k := c.choose(now, p.affinity.of(r.Affinity)); k != nil {
		return append(out, p.grant(c, k, r.Waiter, r.Affinity))
	}
	if err := g.unserved(c, r.Operation, r.PromptTokens); err != nil {
		return refuse(err)
	}
	return p.join(now, r, g.name, false, out)
}

func (p *Pool) refuse(now time.Time, w *waiter, err error, out []Effect) []Effect {
	p.remove(w)
	return append(out, Effect{Kind: Refused, Waiter: w.id, Err: err, Waited: now.Sub(w.since)})
}

func (p *Pool) returnSlot(now time.Time, id uint64, how Return, out []Effect) []Effect {
	h := p.held[id]
	if h == nil {
		return out
	}
	slot := h.slot
	p.drop(h)
	out = append(out, Effect{Kind: SlotReturned, How: how, Slot: slot})
	a := p.adapters[adapterKey{slot.Node, slot.Adapter}]
	if a != nil {
		out = p.pump(now, a, out)
	}
	// A later configuration may have put the provider behind another adapter.
	if v := p.providers[slot.Provider]; v != nil && v.adapter != a {
		out = p.pump(now, v.adapter, out)
	}
	return out
}

func (p *Pool) activate(now time.Time, name string, gen uint64, out []Effect) []Effect {
	n := p.node(name)
	if gen <= n.seen {
		return out
	}
	if n.gen != 0 {
		out = p.fence(name, n.gen, "superseded", out)
	}
	n.gen, n.seen = gen, gen
	return p.pumpNode(now, n, out)
}

// fence ends a generation, in F3's order. Nothing is pumped: all places it frees
// are of providers that are offline now.
func (p *Pool) fence(name string, gen uint64, cause string, out []Effect) []Effect {
	n := p.nodes[name]
	if n == nil || gen == 0 || n.gen != gen {
		return out
	}
	n.gen = 0
	if n.drain == gen {
		n.drain = 0
	}
	first := len(out)
	for h := n.first; h != nil; h = n.first {
		out = append(out, Effect{Kind: SlotReturned, How: ByFence, Slot: h.slot})
		p.drop(h)
	}
	for _, v := range p.providers {
		if v.node == n {
			v.overlaid = false
		}
	}
	for id, o := range p.overlays {
		if o.node == name {
			delete(p.overlays, id)
		}
	}
	for _, ef := range out[first:len(out):len(out)] {
		out = append(out, Effect{Kind: EndAttempt, Slot: ef.Slot, Cause: cause})
	}
	return out
}

func (p *Pool) setDraining(now time.Time, name string, gen uint64, on bool, out []Effect) []Effect {
	n := p.node(name)
	switch {
	case gen == 0:
		n.drained = on
	case gen != n.gen && gen <= n.seen: // of a generation that is over
		return out
	case on:
		n.drain = gen
	case n.drain == gen:
		n.drain = 0
	}
	return p.pumpNode(now, n, out)
}

func (p *Pool) overlay(now time.Time, id string, gen uint64, on bool, out []Effect) []Effect {
	v := p.providers[id]
	if v == nil || gen == 0 || v.node.gen != gen || v.overlaid == on {
		return out
	}
	v.overlaid = on
	if on {
		p.overlays[id] = overlay{gen, v.Node, v.Adapter, v.Target}
		return out
	}
	delete(p.overlays, id)
	return p.pump(now, v.adapter, out)
}

func (p *Pool) adoptTargets(now time.Time, ev Event, out []Effect) []Effect {
	key := adapterKey{ev.node, ev.name}
	a := p.adapters[key]
	if a == nil || ev.gen == 0 || a.node.gen != ev.gen {
		return out
	}
	targets := cleanTargets(ev.targets)
	if old, listed := p.listings[key]; listed && slices.Equal(targets, old) {
		return out
	}
	p.listings[key] = targets
	if !p.cfg.Auto {
		return out // kept for a configuration that wants it
	}
	return p.renew(now, out)
}

// renew makes the catalogue anew, grants what it allows and ends what waited for it.
func (p *Pool) renew(now time.Time, out []Effect) []Effect {
	p.rebuild(now)
	out = append(out, Effect{Kind: CatalogChanged})
	out = p.pumpNode(now, nil, out)
	return p.settle(now, out)
}

// pumpNode pumps the adapters of a node; nil: of all.
func (p *Pool) pumpNode(now time.Time, n *node, out []Effect) []Effect {
	for _, a := range p.order {
		if n == nil || a.node == n {
			out = p.pump(now, a, out)
		}
	}
	return out
}

func orDefault[T int | time.Duration](v, def T) T {
	if v <= 0 {
		return def
	}
	return v
}
