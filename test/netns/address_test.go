//go:build linux

package netns

import (
	"context"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"
)

// No host has an IPv4 address: brokers, routes, leaf, Edge, Nodes and callers find
// each other by IPv6 literals, as `iop init` writes them.
//
// Contract: Y2 Y3
func TestIPv6(t *testing.T) {
	t.Parallel()
	f, brokers := three(t, plan{v6: true, leaves: []string{"attic"}, nodes: []string{"n1", "far@attic"}})
	edge := f.start("edge", "IOP_EDGE_LISTEN=[::]:8400")
	for _, b := range brokers {
		b.ready()
	}
	f.start("leaf-attic")
	f.start("node-n1")
	f.start("node-far")
	edge.connected("n1", 0)
	edge.connected("far", 0)
	edge.ready()
	f.whole(20, f.open("n1", 20, time.Millisecond), f.open("far", 20, time.Millisecond))

	// A caller on another host.
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return f.host("caller").dial(ctx, "tcp6", f.address("edge")+":8400")
	}}}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+f.address("edge")+":8400/v1/models", nil)
	must(t, err)
	req.Header.Set("Authorization", "Bearer "+f.key)
	resp, err := client.Do(req)
	must(t, err)
	defer resp.Body.Close()
	if b, err := io.ReadAll(resp.Body); err != nil || resp.StatusCode != http.StatusOK || !strings.Contains(string(b), `"far"`) {
		t.Errorf("%d %s %v", resp.StatusCode, b, err)
	}
}

// The brokers' names do not resolve yet: Node and Edge are up, keep trying, and
// connect once they do.
//
// Contract: S1 S2 S4
func TestNamesThatDoNotResolveYet(t *testing.T) {
	t.Parallel()
	f := newFabric(t, plan{brokers: 1, names: true, nodes: []string{"n1"}})
	edge, node, hub := f.start("edge"), f.start("node-n1"), f.start("broker-1")
	hub.ready()
	edge.log.AwaitEvent(t, "edge.dial_failed", "reason=unreachable", "attempt=2", "no such host")
	node.log.AwaitEvent(t, "node.dial_failed", "reason=unreachable", "attempt=2", "no such host")
	for _, p := range []*process{edge, node} {
		p.alive()
		if status, body, err := p.get("/readyz"); err != nil || status != http.StatusServiceUnavailable {
			t.Errorf("%s: /readyz: %d %q %v", p.name, status, body, err)
		}
		if status, body, err := p.get("/healthz"); err != nil || status != http.StatusOK {
			t.Errorf("%s: /healthz: %d %q %v", p.name, status, body, err)
		}
	}
	edge.knows("broker-1.example", f.host("broker-1").v4)
	node.knows("broker-1.example", f.host("broker-1").v4)
	edge.connected("n1", 0)
	node.ready()
	edge.ready()
	f.served("n1")
}
