// Package obs holds what observing needs everywhere: labels that stay bounded.
package obs

import "sync"

// Other is the label of all names that came too late.
const Other = "other"

// Names turns names that others choose into labels: the first ones seen keep their
// own, and all that come after max of them share one, so that nobody can grow the
// number of series without bound (O2). It is safe for concurrent use.
type Names struct {
	max  int
	mu   sync.Mutex
	seen map[string]struct{}
}

// NewNames returns labels for up to max names.
func NewNames(max int) *Names { return &Names{max: max, seen: map[string]struct{}{}} }

// Label returns the name's label.
func (n *Names) Label(name string) string {
	n.mu.Lock()
	defer n.mu.Unlock()
	if _, ok := n.seen[name]; ok {
		return name
	}
	if len(n.seen) >= n.max {
		return Other
	}
	n.seen[name] = struct{}{}
	return name
}
