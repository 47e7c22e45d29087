package edge

import (
	"slices"
	"testing"

	"github.com/iop-fabric/iop/configs"
)

// The profile says what an adapter's models can do at Edge, and goes to the Node
// as it is; a request carries nothing of it.
//
// Contract: T2 P1 R7
func TestProfilesReachPoolAndNode(t *testing.T) {
	cfg := &configs.Edge{Nodes: []configs.EdgeNode{{Name: "n", Adapters: []configs.Adapter{
		{Name: "o", Type: configs.TypeOpenAICompat, BaseURL: "http://h", Profile: configs.ProfileOllama},
		{Name: "d", Type: configs.TypeDemo},
	}}}}
	adapters := poolConfig(cfg).Adapters
	if ops := adapters[0].Operations; slices.Contains(ops, "count_tokens") || slices.Contains(ops, "rerank") || !slices.Contains(ops, "messages") {
		t.Errorf("ollama: %v", ops)
	}
	if ops := adapters[1].Operations; !slices.Equal(ops, demoOperations) {
		t.Errorf("demo: %v", ops)
	}
	payload := nodePayload(cfg, "n")
	p := payload.GetAdapters()[0].GetOpenaiCompat().GetProtocolProfile()
	if p.GetId() != "ollama" || p.GetRevision() == 0 || p.GetAuthHeader() != "Authorization" || p.GetAuthPrefix() != "Bearer " || p.GetModelsPath() != "/v1/models" {
		t.Errorf("%v", p)
	}
	var sent []string
	for _, op := range p.GetOperations() {
		sent = append(sent, op.GetName())
		if op.GetName() == "messages" && (op.GetMethod() != "POST" || op.GetPath() != "/v1/messages" || !op.GetStreaming()) {
			t.Errorf("%v", op)
		}
	}
	if !slices.Equal(sent, adapters[0].Operations) {
		t.Errorf("the Node gets %v, the pool %v", sent, adapters[0].Operations)
	}
	if payload.GetAdapters()[1].GetOpenaiCompat() != nil {
		t.Error("demo has a profile")
	}
}
