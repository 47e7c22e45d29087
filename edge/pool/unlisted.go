package pool

import (
	"container/heap"
	"slices"
	"time"
)

// firstNodes is how long after the start the configured nodes may take to connect.
const firstNodes = 30 * time.Second

// prospect says of a model that nobody offers whether it may yet come.
type prospect uint8

const (
	unknown prospect = iota // everybody has listed what there is
	away                    // a node that has not listed yet is not connected
	listing                 // a connected node has not listed yet
)

// prospect is the best that any adapter promises. The first list of an adapter is
// outstanding until AdoptTargets brings it, an empty one too.
func (p *Pool) prospect(now time.Time) prospect {
	best := unknown
	for _, a := range p.order {
		if _, listed := p.listings[adapterKey{a.Node, a.Name}]; listed || a.Disabled || !p.cfg.Auto {
			continue
		}
		switch {
		case a.node.gen != 0:
			return listing
		case a.node.seen != 0 || now.Before(p.began.Add(firstNodes)):
			best = away
		}
	}
	return best
}

// refusal is what a request for such a model is told at once; nil: it waits (P9).
func (s prospect) refusal() error {
	switch s {
	case listing:
		return nil
	case away:
		return ErrNoProvider
	default:
		return ErrUnknownModel
	}
}

// unserved says why no candidate of the group may ever serve the request; nil: one may.
func (g *group) unserved(c *class, op string, tokens int64) error {
	switch {
	case c.anyEnabled():
		return nil
	case len(g.candidates) > 0 && len(g.class(op, tokens, nil).candidates) == 0:
		return ErrUnsupported
	default:
		return ErrNoProvider
	}
}

// waitedFor is the group of a model that is not offered, kept for its waiters.
func (p *Pool) waitedFor(model string) *group {
	g := p.groups[model]
	if g == nil {
		g = &group{name: model, classes: map[classKey]*class{}, lines: map[string]*line{}}
		p.groups[model] = g
	}
	return g
}

// join puts a request into the queue, where there is room (Q3).
func (p *Pool) join(now time.Time, r *Request, model string, unlisted bool, out []Effect) []Effect {
	q := p.cfg.Queue
	waiting := 0
	if g := p.groups[model]; g != nil && g.lines[r.Principal] != nil {
		waiting = g.lines[r.Principal].waiting
	}
	if waiting >= orDefault(q.Depth, defaultDepth) || len(p.waiters) >= orDefault(q.Total, defaultTotal) {
		return append(out, Effect{Kind: Refused, Waiter: r.Waiter, Err: ErrQueueFull})
	}
	wait := orDefault(q.Wait, defaultWait)
	if r.MaxWait > 0 {
		wait = min(wait, r.MaxWait)
	}
	w := &waiter{
		id: r.Waiter, model: model, operation: r.Operation, principal: r.Principal, tokens: r.PromptTokens, affinity: r.Affinity,
		avoid: slices.Clone(r.Avoid), since: now, deadline: now.Add(wait), at: p.nextTick(), unlisted: unlisted,
	}
	if unlisted {
		p.unlisted++
	}
	p.waiters[w.id] = w
	heap.Push(&p.expiry, w)
	g := p.waitedFor(model)
	p.insert(g, g.class(w.operation, w.tokens, w.avoid), w)
	return out
}

// settle ends the waiting of those whose model came, or cannot come any more (I9).
func (p *Pool) settle(now time.Time, out []Effect) []Effect {
	if p.unlisted == 0 {
		return out
	}
	refusal := p.prospect(now).refusal()
	for _, w := range p.waitersByArrival() {
		if !w.unlisted {
			continue
		}
		c := w.entry.class
		if c.group.offered {
			if err := c.group.unserved(c, w.operation, w.tokens); err != nil {
				out = p.refuse(now, w, err, out)
				continue
			}
			w.unlisted = false
			p.unlisted--
		} else if refusal != nil {
			out = p.refuse(now, w, refusal, out)
		}
	}
	return out
}
