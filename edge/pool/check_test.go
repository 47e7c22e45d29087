package pool

import "fmt"

// check looks at I1-I5, I9 and at the shape of the state, the slow and plain way.
// Capacity (I1) is checked where no configuration shrank it, by the model.
func check(p *Pool) error {
	used, long := map[*places]int{}, map[*places]int{}
	for id, h := range p.held {
		if h.slot.ID != id {
			return fmt.Errorf("slot %d is held as %d", h.slot.ID, id)
		}
		if h.node.gen != h.slot.Gen {
			return fmt.Errorf("I5: slot %d is held under generation %d of %d", id, h.slot.Gen, h.node.gen)
		}
		used[h.provider]++
		used[h.adapter]++
		if h.slot.Long {
			long[h.provider]++
		}
	}
	for key, c := range p.providerPlaces {
		if c.used != used[c] || c.long != long[c] {
			return fmt.Errorf("%v counts %d/%d, has %d/%d", key, c.used, c.long, used[c], long[c])
		}
	}
	for key, c := range p.adapterPlaces {
		if c.used != used[c] {
			return fmt.Errorf("%v counts %d, has %d", key, c.used, used[c])
		}
	}
	waiting := 0
	for _, g := range p.groups {
		n := 0
		for _, l := range g.lines {
			for _, e := range l.entries {
				last := uint64(0)
				for w := e.first; w != nil; w = w.next {
					if w.at <= last || w.entry != e || p.waiters[w.id] != w {
						return fmt.Errorf("waiter %d is misplaced", w.id)
					}
					last = w.at
					n++
				}
				if e.class.choose(epoch, "") != nil {
					return fmt.Errorf("I3: waiter %d waits though %s is free", e.first.id, e.class.choose(epoch, "").ID)
				}
			}
		}
		if n != g.waiting {
			return fmt.Errorf("group %s counts %d, has %d", g.name, g.waiting, n)
		}
		waiting += n
	}
	if waiting != len(p.waiters) || waiting != len(p.expiry) {
		return fmt.Errorf("%d waiters, %d in groups, %d with a deadline", len(p.waiters), waiting, len(p.expiry))
	}
	unlisted := 0
	for _, w := range p.waiters {
		if !w.unlisted {
			continue
		}
		if unlisted++; w.entry.class.group.offered {
			return fmt.Errorf("I9: waiter %d waits for a list though %s is offered", w.id, w.model)
		}
	}
	if unlisted != p.unlisted {
		return fmt.Errorf("I9: %d wait for a list, %d are counted", unlisted, p.unlisted)
	}
	return nil
}
