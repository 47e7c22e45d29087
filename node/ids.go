package node

import "time"

// ids remembers run ids, the newest up to a bound, each for a while. The oldest
// is forgotten first, so its memory is bounded.
type ids struct {
	keep  time.Duration
	bound int
	at    map[string]time.Time
	ring  []string
	next  int
}

func newIDs(bound int, keep time.Duration) *ids {
	return &ids{keep: keep, bound: bound, at: map[string]time.Time{}}
}

func (m *ids) add(id string, now time.Time) {
	if _, ok := m.at[id]; ok {
		m.at[id] = now
		return
	}
	if len(m.ring) < m.bound {
		m.ring = append(m.ring, id)
	} else {
		delete(m.at, m.ring[m.next])
		m.ring[m.next] = id
		m.next = (m.next + 1) % len(m.ring)
	}
	m.at[id] = now
}

func (m *ids) has(id string, now time.Time) bool {
	t, ok := m.at[id]
	return ok && now.Sub(t) < m.keep
}
