package edge

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/iop-fabric/iop/edge/pool"
)

// metrics of the loop. Labels are closed sets.
type metrics struct {
	ready         prometheus.Gauge
	registrations *prometheus.CounterVec
	fences        prometheus.Counter
	stale         prometheus.Counter
	dropped       prometheus.Counter
	wait          prometheus.Histogram
	returned      *prometheus.CounterVec
	refused       *prometheus.CounterVec
	busErrors     prometheus.Counter
	expiry        prometheus.Gauge
}

func newMetrics(reg prometheus.Registerer) *metrics {
	m := &metrics{
		ready: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "iop_edge_nodes_ready", Help: "Nodes whose session is ready for work.",
		}),
		registrations: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "iop_edge_registrations_total", Help: "Registrations by outcome.",
		}, []string{"outcome"}),
		fences: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "iop_edge_fenced_generations_total", Help: "Ready generations that ended.",
		}),
		stale: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "iop_edge_stale_messages_total", Help: "Messages of sessions that own no node; they changed nothing.",
		}),
		dropped: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "iop_edge_dropped_messages_total", Help: "Messages of peers dropped because a queue was full.",
		}),
		wait: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "iop_edge_pool_wait_seconds", Help: "Time a request waited for a slot.",
			Buckets: []float64{.001, .01, .1, .5, 1, 5, 15, 60, 300},
		}),
		returned: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "iop_edge_slots_returned_total", Help: "Slots returned, by the way they came back.",
		}, []string{"how"}),
		refused: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "iop_edge_pool_refused_total", Help: "Requests that got no slot, by reason.",
		}, []string{"reason"}),
		busErrors: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "iop_edge_bus_errors_total", Help: "Asynchronous errors of the connection to the broker.",
		}),
	}
	m.expiry = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "iop_edge_certificate_expiry_timestamp_seconds", Help: "When the certificate expires that the Edge proves itself with.",
	})
	reg.MustRegister(m.expiry, m.ready, m.registrations, m.fences, m.stale, m.dropped, m.wait, m.returned, m.refused, m.busErrors)
	for _, how := range []pool.Return{pool.ByTerminal, pool.ByFence, pool.ByNotSent, pool.ByCancelBound} {
		m.returned.WithLabelValues(how.String())
	}
	return m
}
