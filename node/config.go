package node

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/iop-fabric/iop/agent"
	"github.com/iop-fabric/iop/internal/identity"
	"github.com/iop-fabric/iop/wire"
	"github.com/iop-fabric/iop/wire/iopv1"
)

const maxAdapters = 1024 // of one configuration

// openConfig returns what a signed configuration holds, once it is proven to be
// Edge's own answer to our nonce (G3, L8).
func openConfig(id Identity, edge string, nonce []byte, after uint64, c *iopv1.SignedConfig) (*iopv1.NodeConfigPayload, error) {
	if c == nil {
		return nil, errors.New("config: none was sent")
	}
	if err := identity.VerifyConfig(id.Trust.Pool(), edge, nonce, after, c); err != nil {
		return nil, err
	}
	var p iopv1.NodeConfigPayload
	if err := p.UnmarshalVT(c.GetPayload()); err != nil {
		return nil, errors.New("config: the payload does not decode")
	}
	return &p, nil
}

// apply makes the adapters those of the payload, or changes nothing (R3). An
// adapter that is configured as before stays as it is, with all it runs; the
// slots in use stay counted in any case (P3).
func (h *host) apply(ctx context.Context, payload *iopv1.NodeConfigPayload) (err error) {
	wanted, err := checkAdapters(payload)
	if err != nil {
		return err
	}
	next := make(map[string]*adapter, len(wanted))
	set := make(map[string]agent.Provider, len(wanted))
	for name, c := range wanted {
		a, err := h.adapter(name, c)
		if err != nil {
			return fmt.Errorf("adapter %s: %w", name, err)
		}
		next[name], set[name] = a, a
	}
	if err := h.registry.Swap(ctx, set); err != nil {
		return err
	}

	h.mu.Lock()
	defer h.mu.Unlock()
	for name := range h.running {
		if next[name] == nil {
			h.gate.SetCapacity(name, 0)
		}
	}
	for name, c := range wanted {
		h.gate.SetCapacity(name, int(c.GetCapacity()))
	}
	h.running = next
	h.grace = wire.CloseGrace
	if ms := payload.GetRuntime().GetCloseGraceMs(); ms > 0 {
		h.grace = time.Duration(min(ms, time.Minute.Milliseconds())) * time.Millisecond
	}
	h.stall = wire.StallTimeout
	if ms := payload.GetRuntime().GetStallTimeoutMs(); ms > 0 {
		h.stall = time.Duration(min(ms, maxStallMillis)) * time.Millisecond
	}
	return nil
}

// adapter returns the running adapter of that name where its configuration is
// the same, else a new one that was not started yet.
func (h *host) adapter(name string, c *iopv1.AdapterConfig) (a *adapter, err error) {
	print, err := fingerprint(c)
	if err != nil {
		return nil, err
	}
	if a := h.running[name]; a != nil && a.fingerprint == print {
		return a, nil
	}
	defer func() {
		if recover() != nil {
			a, err = nil, errStartPanic
		}
	}()
	p, err := h.make(c)
	if err != nil {
		return nil, err
	}
	ex, _ := p.(agent.Exchanger)
	return &adapter{name: name, fingerprint: print, provider: p, exchanger: ex, log: h.log}, nil
}

// checkAdapters returns the enabled adapters by their resulting name (M1).
func checkAdapters(payload *iopv1.NodeConfigPayload) (map[string]*iopv1.AdapterConfig, error) {
	if len(payload.GetAdapters()) > maxAdapters {
		return nil, fmt.Errorf("config: more than %d adapters", maxAdapters)
	}
	seen := make(map[string]bool, len(payload.GetAdapters()))
	wanted := make(map[string]*iopv1.AdapterConfig, len(payload.GetAdapters()))
	for _, c := range payload.GetAdapters() {
		name := c.GetName()
		if name == "" {
			name = c.GetType()
		}
		switch {
		case name == "":
			return nil, errors.New("config: an adapter has neither name nor type")
		case len(name) > 128:
			return nil, errors.New("config: an adapter's name is longer than 128 bytes")
		case seen[name]:
			return nil, fmt.Errorf("config: two adapters are named %q", name)
		case c.GetCapacity() < 0, c.GetEnabled() && c.GetCapacity() == 0:
			return nil, fmt.Errorf("config: adapter %q: its capacity must be positive", name)
		}
		seen[name] = true
		if c.GetEnabled() {
			wanted[name] = c
		}
	}
	return wanted, nil
}

// fingerprint is what must stay the same for an adapter to be kept; its capacity
// is the gate's affair.
func fingerprint(c *iopv1.AdapterConfig) (string, error) {
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(&iopv1.AdapterConfig{
		Name: c.GetName(), Type: c.GetType(), Ollama: c.GetOllama(),
		OpenaiCompat: c.GetOpenaiCompat(), Vllm: c.GetVllm(), Demo: c.GetDemo(),
	})
	if err != nil {
		return "", errors.New("its configuration does not encode")
	}
	return string(b), nil
}
