package pool

import (
	"slices"
	"strings"
	"time"
)

// Model is one row of what the groups offer.
type Model struct {
	Name  string
	Since time.Time // when this pool first offered it
}

// Status of a provider in a snapshot.
const (
	StatusAvailable   = "available"
	StatusUnavailable = "unavailable" // its node is gone, or it is overlaid
	StatusDraining    = "draining"
	StatusDisabled    = "disabled"
	StatusHeld        = "held" // its node has not applied it yet (C5)
)

// Health of a provider in a snapshot.
const (
	HealthAvailable   = "available"
	HealthUnavailable = "unavailable" // overlaid (P5)
	HealthOffline     = "offline"     // its node is gone (P6)
)

// ProviderState is one provider in a snapshot (P4-P6).
type ProviderState struct {
	ID, Node, Adapter, Target string
	Gen                       uint64 // 0: not connected
	Connected                 bool
	Status, Health            string
	Capacity, InFlight        int
	Queued                    int
	LongCapacity              int
	LongInFlight, LongQueued  int
	Models                    []string // the groups it is a candidate of, sorted
}

// ModelState is one model in a snapshot.
type ModelState struct {
	Name string
	// Since is when it was first offered.
	Since time.Time
	// Offered: callers may name it. One that is not only has requests left that wait.
	Offered    bool
	Candidates []CandidateState // best priority first
	Waiting    int
	Oldest     time.Time       // since when the first of them waits; zero: none does
	Principals []PrincipalWait // who waits, by name
}

// CandidateState is a provider's part in a model.
type CandidateState struct {
	Provider         string
	Priority, Weight int
}

// PrincipalWait is how many requests of a principal wait for a model.
type PrincipalWait struct {
	Principal string
	Waiting   int
}

// Snapshot is the state of the pool for people and metrics.
type Snapshot struct {
	Providers []ProviderState // by id
	Models    []ModelState    // by name; every model that is offered or waited for
	Auto      bool            // the models are those the adapters list (P1)
	Waiting   int             // requests in the queue
	Held      int             // slots in use, also of providers that are no longer offered
}

// Snapshot computes the numbers of now.
func (p *Pool) Snapshot() Snapshot {
	s := Snapshot{Waiting: len(p.waiters), Held: len(p.held), Auto: p.cfg.Auto}
	states := make(map[*provider]*ProviderState, len(p.providers))
	for _, v := range p.providers {
		states[v] = v.state()
	}
	for _, g := range p.groups {
		s.Models = append(s.Models, p.modelState(g))
		for _, k := range g.candidates {
			states[k.provider].Models = append(states[k.provider].Models, g.name)
		}
		for _, c := range g.busy {
			for _, k := range c.candidates {
				if !k.live() {
					continue // a stranded request counts under none (P4)
				}
				states[k.provider].Queued += c.waiting
				if k.long {
					states[k.provider].LongQueued += c.waiting
				}
			}
		}
	}
	for _, st := range states {
		slices.Sort(st.Models)
		s.Providers = append(s.Providers, *st)
	}
	slices.SortFunc(s.Providers, func(a, b ProviderState) int { return strings.Compare(a.ID, b.ID) })
	slices.SortFunc(s.Models, func(a, b ModelState) int { return strings.Compare(a.Name, b.Name) })
	return s
}

func (p *Pool) modelState(g *group) ModelState {
	m := ModelState{Name: g.name, Since: p.firstSeen[g.name], Offered: g.offered, Waiting: g.waiting}
	for _, k := range g.candidates {
		m.Candidates = append(m.Candidates, CandidateState{k.ID, k.priority, k.weight})
	}
	for _, c := range g.busy {
		for _, e := range c.turns {
			if m.Oldest.IsZero() || e.first.since.Before(m.Oldest) {
				m.Oldest = e.first.since
			}
		}
	}
	for _, l := range g.lines {
		m.Principals = append(m.Principals, PrincipalWait{l.principal, l.waiting})
	}
	slices.SortFunc(m.Principals, func(a, b PrincipalWait) int { return strings.Compare(a.Principal, b.Principal) })
	return m
}

// state is what the provider shows without its queue. Gone beats overlaid (P6).
func (v *provider) state() *ProviderState {
	s := &ProviderState{
		ID: v.ID, Node: v.Node, Adapter: v.Adapter, Target: v.Target,
		Gen: v.node.gen, Connected: v.node.gen != 0,
		Status: StatusAvailable, Health: HealthAvailable,
	}
	switch {
	case !s.Connected:
		s.Status, s.Health = StatusUnavailable, HealthOffline
		return s
	case v.overlaid:
		s.Status, s.Health = StatusUnavailable, HealthUnavailable
		return s
	case !v.enabled():
		s.Status = StatusDisabled
	case v.adapter.Held:
		s.Status = StatusHeld
	case v.node.draining():
		s.Status = StatusDraining
	}
	s.Capacity, s.InFlight = v.Capacity, v.places.used
	s.LongCapacity, s.LongInFlight = v.LongCapacity, v.places.long
	return s
}
