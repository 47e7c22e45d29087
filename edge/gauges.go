package edge

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/iop-fabric/iop/edge/admin"
	"github.com/iop-fabric/iop/internal/obs"
)

// maxNames bounds the labels that names of models and providers make.
const maxNames = 500

// scrapeBound is how long a scrape waits for the loop.
const scrapeBound = time.Second

// gauges are read off the cores when somebody scrapes; nothing is kept up to date
// for nobody. A scrape of an Edge that does not run shows none.
type gauges struct {
	state  func(context.Context) (admin.State, error)
	now    func() time.Time
	models *obs.Names
	names  *obs.Names // of providers

	connected, nodeInFlight             *prometheus.Desc
	capacity, inFlight, queued, healthy *prometheus.Desc
	waiting, oldest                     *prometheus.Desc
}

func newGauges(state func(context.Context) (admin.State, error), now func() time.Time) *gauges {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc(name, help, labels, nil)
	}
	return &gauges{
		state: state, now: now, models: obs.NewNames(maxNames), names: obs.NewNames(maxNames),
		connected:    desc("iop_edge_node_connected", "1 while the node's session is ready for work.", "node"),
		nodeInFlight: desc("iop_edge_node_in_flight", "Requests that the node's providers serve.", "node"),
		capacity:     desc("iop_edge_provider_capacity", "Places of the provider; 0 while it is gone or found unavailable.", "provider"),
		inFlight:     desc("iop_edge_provider_in_flight", "Requests that the provider serves.", "provider"),
		queued:       desc("iop_edge_provider_queued", "Waiting requests that the provider could serve; one may count at several.", "provider"),
		healthy:      desc("iop_edge_provider_available", "1 while the provider would take a request if it had a place.", "provider"),
		waiting:      desc("iop_edge_model_waiting", "Requests that wait for the model.", "model"),
		oldest:       desc("iop_edge_model_oldest_wait_seconds", "How long the first request that waits for the model has waited.", "model"),
	}
}

// Describe implements prometheus.Collector.
func (g *gauges) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{g.connected, g.nodeInFlight, g.capacity, g.inFlight, g.queued, g.healthy, g.waiting, g.oldest} {
		out <- d
	}
}

// Collect implements prometheus.Collector.
func (g *gauges) Collect(out chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), scrapeBound)
	defer cancel()
	s, err := g.state(ctx)
	if err != nil {
		return
	}
	// Names that share a label are added up: no series may come twice.
	sums := map[*prometheus.Desc]map[string]float64{}
	add := func(d *prometheus.Desc, label string, v float64) {
		if sums[d] == nil {
			sums[d] = map[string]float64{}
		}
		sums[d][label] += v
	}
	for _, n := range s.Nodes {
		if n.Configured {
			add(g.connected, n.Node, one(n.Connected))
			add(g.nodeInFlight, n.Node, 0)
		}
	}
	for _, p := range s.Pool.Providers {
		label := g.names.Label(p.ID)
		add(g.nodeInFlight, p.Node, float64(p.InFlight))
		add(g.capacity, label, float64(p.Capacity))
		add(g.inFlight, label, float64(p.InFlight))
		add(g.queued, label, float64(p.Queued))
		add(g.healthy, label, one(p.Status == "available"))
	}
	now := g.now()
	for _, m := range s.Pool.Models {
		label := obs.Other // a name that only callers know is no label
		if m.Offered || !m.Since.IsZero() {
			label = g.models.Label(m.Name)
		}
		add(g.waiting, label, float64(m.Waiting))
		wait := 0.0
		if !m.Oldest.IsZero() {
			wait = max(now.Sub(m.Oldest).Seconds(), 0)
		}
		add(g.oldest, label, wait)
	}
	for d, of := range sums {
		for label, v := range of {
			out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, label)
		}
	}
}

func one(yes bool) float64 {
	if yes {
		return 1
	}
	return 0
}
