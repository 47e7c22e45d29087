package registry

import (
	"encoding/binary"
	"maps"
	"slices"
	"time"
)

// NodeState is one node in a snapshot. It holds no address, token or subject (N4).
type NodeState struct {
	Node       string
	Configured bool
	Gen        uint64
	State      State
	Connected  bool // State is Ready (R6)
	Draining   bool
	Since      time.Time // when State was entered
	Heard      time.Time // the last heartbeat of a ready session
	Instance   string
	Software   string
	Features   []string
	Protocol   uint32
}

// Snapshot lists the configured nodes, and those that are seen though they are
// not configured, by name.
func (r *Registry) Snapshot() []NodeState {
	names := r.names()
	for name := range r.configured {
		if r.nodes[name] == nil {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	all := make([]NodeState, 0, len(names))
	for _, name := range names {
		s := NodeState{Node: name, Configured: r.configured[name]}
		if n := r.nodes[name]; n != nil {
			s.Gen, s.State, s.Connected, s.Draining = n.gen, n.state, n.state == Ready, n.draining
			s.Since, s.Heard, s.Instance, s.Software = n.since, n.heard, n.instance, n.software
			s.Features, s.Protocol = slices.Clone(n.features), n.protocol
		}
		all = append(all, s)
	}
	return all
}

// Clone copies the registry.
func (r *Registry) Clone() *Registry {
	c := *r
	c.configured = maps.Clone(r.configured)
	c.nodes = make(map[string]*node, len(r.nodes))
	for name, n := range r.nodes {
		m := *n // features are replaced as a whole, never changed
		c.nodes[name] = &m
	}
	c.fences.last = maps.Clone(r.fences.last)
	return &c
}

// AppendKey appends the canonical form of the state: equal keys, equal
// behaviour, but for the rate of fences.
func (r *Registry) AppendKey(b []byte) []byte {
	b = appendBool(b, r.stopping)
	for _, s := range r.Snapshot() {
		b = appendString(b, s.Node)
		b = appendBool(b, s.Configured)
		b = binary.AppendUvarint(b, s.Gen)
		b = append(b, byte(s.State))
		b = appendBool(b, s.Draining)
		b = appendTime(b, s.Heard)
		b = appendString(appendString(b, s.Instance), s.Software)
		b = binary.AppendUvarint(b, uint64(len(s.Features)))
		for _, f := range s.Features {
			b = appendString(b, f)
		}
		if n := r.nodes[s.Node]; n != nil {
			b = appendTime(b, n.due)
		}
	}
	return b
}

func appendString(b []byte, s string) []byte {
	return append(binary.AppendUvarint(b, uint64(len(s))), s...)
}

func appendBool(b []byte, v bool) []byte {
	if v {
		return append(b, 1)
	}
	return append(b, 0)
}

func appendTime(b []byte, t time.Time) []byte {
	if t.IsZero() {
		return append(b, 0)
	}
	return binary.AppendVarint(append(b, 1), t.UnixNano())
}
