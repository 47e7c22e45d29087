package edge

import (
	"slices"
	"time"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/edge/pool"
	"github.com/iop-fabric/iop/wire/iopv1"
)

// demoOperations is all the demo adapter can do.
var demoOperations = []string{"models", "chat_completions"}

// poolConfig turns the operator's words into the pool's.
func poolConfig(cfg *configs.Edge) pool.Config {
	out := pool.Config{
		Auto:  cfg.Models.Auto,
		Queue: pool.Queue{Depth: cfg.Queue.Depth, Wait: cfg.Queue.Wait},
	}
	for _, n := range cfg.Nodes {
		for _, a := range n.Adapters {
			pa := pool.Adapter{
				Node: n.Name, Name: adapterName(a), Capacity: a.Capacity, Fallback: a.Fallback, Disabled: a.Disabled,
			}
			switch a.Type {
			case configs.TypeDemo:
				pa.Operations = demoOperations
			case configs.TypeOpenAICompat:
				pa.Operations = profileOf(a).OperationNames()
			}
			out.Adapters = append(out.Adapters, pa)
		}
		for _, p := range n.Providers {
			out.Providers = append(out.Providers, pool.Provider{
				ID: providerID(n.Name, p), Node: n.Name, Adapter: p.Adapter, Target: p.Target,
				Capacity: p.Capacity, LongCapacity: p.LongCapacity, LongThreshold: int64(p.LongThreshold), StallTimeout: p.StallTimeout, Disabled: p.Disabled,
			})
		}
	}
	for _, g := range cfg.Models.Groups {
		pg := pool.Group{Name: g.Name}
		for _, r := range g.Providers {
			pg.Candidates = append(pg.Candidates, pool.Candidate{Provider: r.Provider, Priority: r.Priority, Weight: r.Weight})
		}
		out.Groups = append(out.Groups, pg)
	}
	return out
}

// adapterName is M1's: an empty name is the type's.
func adapterName(a configs.Adapter) string {
	if a.Name == "" {
		return a.Type
	}
	return a.Name
}

// providerID is "<node>/<id>", as models[].providers names it.
func providerID(node string, p configs.Provider) string {
	if p.ID == "" {
		return pool.TargetID(node, p.Adapter, p.Target)
	}
	return node + "/" + p.ID
}

// firstRevision is that of a session's first configuration; it rises within the
// session.
const firstRevision = 1

// nodePayload is what a node is told to run when it registers: adapters and limits,
// no secret and no path (R7).
func nodePayload(cfg *configs.Edge, name string) *iopv1.NodeConfigPayload {
	out := &iopv1.NodeConfigPayload{Revision: firstRevision, Runtime: &iopv1.NodeRuntimeConfig{}}
	i := slices.IndexFunc(cfg.Nodes, func(n configs.EdgeNode) bool { return n.Name == name })
	if i < 0 {
		return out
	}
	for _, a := range cfg.Nodes[i].Adapters {
		c := &iopv1.AdapterConfig{Name: adapterName(a), Type: a.Type, Capacity: int32(a.Capacity), Enabled: !a.Disabled}
		switch a.Type {
		case configs.TypeOpenAICompat:
			c.OpenaiCompat = &iopv1.OpenAICompatAdapterConfig{
				BaseUrl: a.BaseURL, StaticKeyName: a.StaticKeyName, ProtocolProfile: profilePayload(profileOf(a)),
			}
		case configs.TypeDemo:
			c.Demo = &iopv1.DemoAdapterConfig{ChunkDelayMs: int32(a.ChunkDelay / time.Millisecond)}
		}
		out.Adapters = append(out.Adapters, c)
	}
	return out
}

// profileOf is the profile of an adapter whose configuration was validated.
func profileOf(a configs.Adapter) configs.Profile {
	p, ok := configs.ProfileOf(a.Profile)
	if !ok {
		panic("BUG: edge: a validated adapter has a known profile")
	}
	return p
}

// profilePayload is a profile in the wire's words (T2).
func profilePayload(p configs.Profile) *iopv1.ConcreteProtocolProfile {
	out := &iopv1.ConcreteProtocolProfile{
		Id: p.ID, Revision: 1, AuthHeader: p.AuthHeader, AuthPrefix: p.AuthPrefix, ModelsPath: p.ModelsPath,
	}
	for _, op := range p.Operations {
		out.Operations = append(out.Operations, &iopv1.ConcreteProtocolProfile_Operation{
			Name: op.Name, Method: op.Method, Path: op.Path, Streaming: op.Streaming,
		})
	}
	return out
}

// listed are the adapters of a node whose models are read from themselves.
func listed(cfg *configs.Edge, node string) []string {
	if !cfg.Models.Auto {
		return nil
	}
	var out []string
	for _, n := range cfg.Nodes {
		if n.Name != node {
			continue
		}
		for _, a := range n.Adapters {
			if !a.Disabled {
				out = append(out, adapterName(a))
			}
		}
	}
	return out
}
