package edge

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/iop-fabric/iop/edge/admin"
	"github.com/iop-fabric/iop/edge/pool"
	"github.com/iop-fabric/iop/edge/registry"
)

// A scrape shows every configured node and every provider, waiting requests and how
// long; however many names a node lists, the series stay bounded and nothing is lost
// in the sums.
//
// Contract: O2 P4 P6
func TestGauges(t *testing.T) {
	now := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
	var s admin.State
	g := newGauges(func(context.Context) (admin.State, error) { return s, nil }, func() time.Time { return now })
	s.Nodes = []registry.NodeState{{Node: "n1", Configured: true, Connected: true}, {Node: "n2", Configured: true}, {Node: "stranger", Connected: true}}
	s.Pool = pool.Snapshot{
		Providers: []pool.ProviderState{{ID: "n1/a/m", Node: "n1", Status: pool.StatusAvailable, Capacity: 4, InFlight: 3, Queued: 2}},
		Models: []pool.ModelState{
			{Name: "m", Offered: true, Waiting: 2, Oldest: now.Add(-1500 * time.Millisecond)},
			{Name: "a caller's word", Waiting: 1, Oldest: now.Add(-time.Second)},
		},
	}
	want := `
# HELP iop_edge_model_oldest_wait_seconds How long the first request that waits for the model has waited.
# TYPE iop_edge_model_oldest_wait_seconds gauge
iop_edge_model_oldest_wait_seconds{model="m"} 1.5
iop_edge_model_oldest_wait_seconds{model="other"} 1
# HELP iop_edge_node_connected 1 while the node's session is ready for work.
# TYPE iop_edge_node_connected gauge
iop_edge_node_connected{node="n1"} 1
iop_edge_node_connected{node="n2"} 0
# HELP iop_edge_node_in_flight Requests that the node's providers serve.
# TYPE iop_edge_node_in_flight gauge
iop_edge_node_in_flight{node="n1"} 3
iop_edge_node_in_flight{node="n2"} 0
`
	if err := testutil.CollectAndCompare(g, strings.NewReader(want), "iop_edge_node_connected", "iop_edge_node_in_flight", "iop_edge_model_oldest_wait_seconds"); err != nil {
		t.Error(err)
	}
	for scrape := range 5 { // a node lists other models each time
		s.Pool = pool.Snapshot{}
		for i := range 1000 {
			name := fmt.Sprintf("%d-%d", scrape, i)
			s.Pool.Providers = append(s.Pool.Providers, pool.ProviderState{ID: name, Node: "n1", InFlight: 1})
			s.Pool.Models = append(s.Pool.Models, pool.ModelState{Name: name, Offered: true, Waiting: 1})
		}
		reg := prometheus.NewPedanticRegistry()
		reg.MustRegister(g)
		families, err := reg.Gather()
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range families {
			sum := 0.0
			for _, m := range f.GetMetric() {
				sum += m.GetGauge().GetValue()
			}
			if n := len(f.GetMetric()); n > maxNames+1 {
				t.Errorf("scrape %d: %s has %d series", scrape, f.GetName(), n)
			}
			if name := f.GetName(); (name == "iop_edge_model_waiting" || name == "iop_edge_provider_in_flight") && sum != 1000 {
				t.Errorf("%s adds up to %v", name, sum)
			}
		}
	}
}
