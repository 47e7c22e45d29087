package admin

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/iop-fabric/iop/edge/pool"
	"github.com/iop-fabric/iop/edge/registry"
	"github.com/iop-fabric/iop/internal/adminapi"
)

// State is what the Edge knows at one instant.
type State struct {
	Ready error // nil: it is
	Nodes []registry.NodeState
	Pool  pool.Snapshot
	// Certificate is the end of the Edge's own, Certificates those of its nodes.
	Certificate  time.Time
	Certificates map[string]time.Time
}

// view makes the answer.
func (a *API) view(s State, now time.Time) adminapi.Snapshot {
	out := adminapi.Snapshot{
		Edge: a.cfg.Edge, Time: now, Started: a.started, Ready: s.Ready == nil,
		Nodes: []adminapi.Node{}, Providers: []adminapi.Provider{}, Models: []adminapi.Model{},
		Certificates: []adminapi.Certificate{},
		Queue: adminapi.Queue{
			Waiting: s.Pool.Waiting, InFlight: s.Pool.Held, Depth: a.cfg.QueueDepth, WaitMs: a.cfg.QueueWait.Milliseconds(),
		},
	}
	if s.Ready != nil {
		out.Reason = s.Ready.Error()
	}
	busy := map[string]int{}
	for _, p := range s.Pool.Providers {
		busy[p.Node] += p.InFlight
		out.Providers = append(out.Providers, providerView(p))
	}
	for _, n := range s.Nodes {
		v := nodeView(n, busy[n.Node], now)
		if n.Connected {
			v.CertificateExpires = s.Certificates[n.Node]
		}
		out.Nodes = append(out.Nodes, v)
	}
	if !s.Certificate.IsZero() {
		out.Certificates = append(out.Certificates, adminapi.Certificate{Role: "edge", Name: a.cfg.Edge, Expires: s.Certificate})
	}
	for _, m := range s.Pool.Models {
		out.Models = append(out.Models, modelView(m, s.Pool, now))
	}
	return out
}

func nodeView(n registry.NodeState, inFlight int, now time.Time) adminapi.Node {
	v := adminapi.Node{
		Name: n.Node, Configured: n.Configured, Connected: n.Connected, State: stateName(n.State), Draining: n.Draining,
		Generation: n.Gen, Since: n.Since, Software: n.Software, InFlight: inFlight,
	}
	if n.Connected && !n.Heard.IsZero() {
		v.HeartbeatAgeMs = max(now.Sub(n.Heard).Milliseconds(), 0)
	}
	return v
}

// stateName folds the moment in which the ready answer is on its way into pending:
// until it went out, the node is not ready (R6).
func stateName(s registry.State) string {
	switch s {
	case registry.AdmittedState:
		return "admitted"
	case registry.Pending, registry.Acking:
		return "pending"
	case registry.Ready:
		return "ready"
	default:
		return "absent"
	}
}

func providerView(p pool.ProviderState) adminapi.Provider {
	return adminapi.Provider{
		ID: p.ID, Node: p.Node, Adapter: p.Adapter, Target: p.Target, Connected: p.Connected,
		Status: p.Status, Health: p.Health, Generation: p.Gen, Capacity: p.Capacity, InFlight: p.InFlight, Queued: p.Queued,
		LongCapacity: p.LongCapacity, LongInFlight: p.LongInFlight, LongQueued: p.LongQueued, Models: orEmpty(p.Models),
	}
}

func orEmpty(s []string) []string {
	if s == nil {
		return []string{}
	}
	return s
}

func modelView(m pool.ModelState, s pool.Snapshot, now time.Time) adminapi.Model {
	v := adminapi.Model{
		Name: m.Name, Since: m.Since, Offered: m.Offered, Source: "configured", Waiting: m.Waiting,
		Candidates: []adminapi.Candidate{}, WaitsFor: waitsFor(m, s),
	}
	if s.Auto {
		v.Source = "auto"
	}
	if !m.Oldest.IsZero() {
		v.OldestWaitMs = max(now.Sub(m.Oldest).Milliseconds(), 0)
	}
	for _, c := range m.Candidates {
		v.Candidates = append(v.Candidates, adminapi.Candidate(c))
	}
	for _, p := range m.Principals {
		v.Principals = append(v.Principals, adminapi.Wait(p))
	}
	return v
}

// Why a provider does not serve a request now, in the order in which they are told.
const (
	isBusy = "busy"
	// A long one, one for another operation, or one that has failed there already.
	isUnfit     = "not for what waits"
	isGone      = "not connected"
	isOverlaid  = "found unavailable"
	isDraining  = pool.StatusDraining
	isHeld      = "waiting for its node to apply the configuration"
	isSwitched  = pool.StatusDisabled
	isOrphaned  = "no provider offers it any more"
	isUnlisted  = "no provider has listed it yet"
	noneOfThese = ""
)

var whyNot = []string{isBusy, isUnfit, isGone, isOverlaid, isDraining, isHeld, isSwitched}

// waitsFor says why a request for the model waits, or would wait; empty: it would
// be served at once.
func waitsFor(m pool.ModelState, s pool.Snapshot) string {
	switch {
	case len(m.Candidates) > 0:
	case m.Since.IsZero():
		return isUnlisted
	default:
		return isOrphaned
	}
	because := map[string][]string{}
	for _, c := range m.Candidates {
		i, found := slices.BinarySearchFunc(s.Providers, c.Provider, func(p pool.ProviderState, id string) int { return strings.Compare(p.ID, id) })
		if !found {
			continue
		}
		p := s.Providers[i]
		why := whyNotAt(p, m.Waiting > 0)
		if why == noneOfThese {
			return ""
		}
		if why == isBusy {
			p.ID = fmt.Sprintf("%s %d/%d", p.ID, p.InFlight, p.Capacity)
		}
		because[why] = append(because[why], p.ID)
	}
	var parts []string
	for _, why := range whyNot {
		if ids := because[why]; len(ids) > 0 {
			parts = append(parts, why+": "+strings.Join(ids, ", "))
		}
	}
	return strings.Join(parts, "; ")
}

func whyNotAt(p pool.ProviderState, somebodyWaits bool) string {
	switch {
	case p.Health == pool.HealthOffline:
		return isGone
	case p.Status == pool.StatusUnavailable:
		return isOverlaid
	case p.Status == pool.StatusDraining:
		return isDraining
	case p.Status == pool.StatusHeld:
		return isHeld
	case p.Status == pool.StatusDisabled:
		return isSwitched
	case p.InFlight >= p.Capacity:
		return isBusy
	case somebodyWaits:
		return isUnfit
	default:
		return noneOfThese
	}
}
