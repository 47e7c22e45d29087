package pool

import (
	"maps"
	"slices"
)

// affinityMemory is how many recent affinities are remembered at least; twice as
// many at most.
const affinityMemory = 1 << 15

// affinity remembers which provider last served requests that belong together.
// What was not used for long is forgotten: when the young ones are many, they
// become the old ones.
type affinity struct {
	young, old map[uint64]string
}

// of is the provider that served key last; empty: none is known.
func (a *affinity) of(key uint64) string {
	if key == 0 {
		return ""
	}
	if id, ok := a.young[key]; ok {
		return id
	}
	return a.old[key]
}

func (a *affinity) note(key uint64, provider string) {
	if key == 0 || a.young[key] == provider {
		return
	}
	if a.young == nil || len(a.young) >= affinityMemory {
		a.young, a.old = map[uint64]string{}, a.young
	}
	a.young[key] = provider
}

func (a *affinity) clone() affinity { return affinity{maps.Clone(a.young), maps.Clone(a.old)} }

// each calls fn for all that is remembered, in one order.
func (a *affinity) each(fn func(key uint64, provider string)) {
	for _, m := range []map[uint64]string{a.young, a.old} {
		for _, key := range slices.Sorted(maps.Keys(m)) {
			fn(key, m[key])
		}
		fn(0, "")
	}
}
