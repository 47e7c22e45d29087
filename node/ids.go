package node

import "time"

// ids remembers run ids, the newest up to a bound, each for a while. The oldest
// is forgotten first, so its memory has a fixed size.
type ids struct {
	keep time.Duration
	at   map[string]time.Time
	ring []string
	next int
}

func newIDs(bound int, keep time.Duration) *ids {
	return &ids{keep: keep, at: map[string]time.Time{}, ring: make([]string, 0, bound)}
}

func (m *ids) add(id string, now time.Time) {
	if _, ok := m.at[id]; ok {
		m.at[id] = now
		return
	}
	if len(m.ring) < cap(m.ring) {
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
