package gate

import (
	"testing"

	"pgregory.net/rapid"
)

// TestGate compares the gate with a naive one under any calls.
//
// Contract: P3 W9
func TestGate(t *testing.T) {
	names := []string{"a", "b", "c"}
	rapid.Check(t, func(t *rapid.T) {
		g := New()
		capacity := map[string]int{}
		held := map[Slot]string{}
		var ever []Slot
		used := func(name string) (n int) {
			for _, h := range held {
				if h == name {
					n++
				}
			}
			return n
		}
		for range rapid.IntRange(1, 80).Draw(t, "calls") {
			name := rapid.SampledFrom(names).Draw(t, "name")
			switch rapid.IntRange(0, 3).Draw(t, "call") {
			case 0:
				n := rapid.IntRange(-1, 3).Draw(t, "capacity")
				g.SetCapacity(name, n)
				capacity[name] = max(n, 0)
			case 1, 2:
				s, ok := g.Acquire(name)
				if want := used(name) < capacity[name]; ok != want {
					t.Fatalf("I2: %s gave %v with %d of %d held", name, ok, used(name), capacity[name])
				}
				if ok {
					held[s] = name
					ever = append(ever, s)
				}
			case 3:
				if len(ever) == 0 {
					continue
				}
				s := rapid.SampledFrom(ever).Draw(t, "slot")
				_, was := held[s]
				if g.Release(s) != was {
					t.Fatalf("I1: release of a slot that was held: %v", was)
				}
				delete(held, s)
			}
			for _, n := range names {
				if g.InUse(n) != used(n) {
					t.Fatalf("I3: %s has %d in use, not %d", n, g.InUse(n), used(n))
				}
			}
		}
		for s := range held {
			g.Release(s)
		}
		for _, n := range names {
			g.SetCapacity(n, 0)
		}
		if len(g.adapters) != 0 || len(g.held) != 0 {
			t.Fatalf("something is left: %v %v", g.adapters, g.held)
		}
	})
}
