package up

import (
	"github.com/iop-fabric/iop/adapters/openai_compat"
	"github.com/iop-fabric/iop/agent"
	"github.com/iop-fabric/iop/wire/iopv1"
)

// profileOf is the adapter's profile as the node's configuration gives it (T2).
// None at all is an Edge's that knows no profiles: the adapter's default. One
// without operations has none; it is not taken for the default.
func profileOf(c *iopv1.ConcreteProtocolProfile) openai_compat.Profile {
	if c == nil {
		return openai_compat.Profile{}
	}
	p := openai_compat.Profile{
		Operations: make(map[string]openai_compat.Operation, len(c.GetOperations())),
		AuthHeader: c.GetAuthHeader(), AuthPrefix: c.GetAuthPrefix(), ModelsPath: c.GetModelsPath(),
	}
	for _, op := range c.GetOperations() {
		p.Operations[op.GetName()] = openai_compat.Operation{
			Method: op.GetMethod(), Path: op.GetPath(), Streaming: op.GetStreaming(),
		}
	}
	for _, h := range c.GetFixedHeaders() {
		p.Fixed = append(p.Fixed, agent.Field{Name: h.GetName(), Value: h.GetValue()})
	}
	return p
}
