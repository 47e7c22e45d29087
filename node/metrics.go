package node

import (
	"errors"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/iop-fabric/iop/node/session"
	"github.com/iop-fabric/iop/wire"
)

// metrics are the Node's counters. Every label is of a closed list (O2) and its
// series is made at the start, so that counting on the hot path is one add.
type metrics struct {
	ready     prometheus.Gauge
	open      prometheus.Gauge
	expiry    prometheus.Gauge
	dials     prometheus.Counter
	sent      prometheus.Counter
	resent    prometheus.Counter
	terminals map[wire.Class]prometheus.Counter // "" is END
	ends      map[session.Reason]prometheus.Counter
	dropped   map[drop]prometheus.Counter
}

// drop says why something a peer sent was dropped.
type drop string

const (
	dropMalformed drop = "malformed" // it does not decode, or contradicts its subject
	dropUnknown   drop = "unknown"   // a verb we never named a feature for
	dropEarly     drop = "early"     // work before ready was asked for
	dropDuplicate drop = "duplicate" // a request of a known run id
	dropFlood     drop = "flood"     // more than a session may have waiting
)

func newMetrics(reg prometheus.Registerer) (*metrics, error) {
	terminals := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "iop_node_terminals_total", Help: "Tunnels by the class of their terminal; complete is END.",
	}, []string{"class"})
	ends := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "iop_node_session_ends_total", Help: "Failed dials and ended sessions by reason.",
	}, []string{"reason"})
	dropped := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "iop_node_dropped_total", Help: "Messages from the fabric that were dropped, by reason.",
	}, []string{"reason"})
	m := &metrics{
		ready:     prometheus.NewGauge(prometheus.GaugeOpts{Name: "iop_node_ready", Help: "1 while a session is ready."}),
		open:      prometheus.NewGauge(prometheus.GaugeOpts{Name: "iop_node_exchanges", Help: "Exchanges with providers under way."}),
		expiry:    prometheus.NewGauge(prometheus.GaugeOpts{Name: "iop_node_certificate_expiry_timestamp_seconds", Help: "When the certificate expires that the Node dials with."}),
		dials:     prometheus.NewCounter(prometheus.CounterOpts{Name: "iop_node_dials_total", Help: "Dials to the broker."}),
		sent:      prometheus.NewCounter(prometheus.CounterOpts{Name: "iop_node_frames_sent_total", Help: "Frames sent to Edge, repetitions not counted."}),
		resent:    prometheus.NewCounter(prometheus.CounterOpts{Name: "iop_node_frames_resent_total", Help: "Frames sent to Edge again."}),
		terminals: map[wire.Class]prometheus.Counter{"": terminals.WithLabelValues("complete")},
		ends:      map[session.Reason]prometheus.Counter{},
		dropped:   map[drop]prometheus.Counter{},
	}
	for _, c := range wire.Classes {
		m.terminals[c] = terminals.WithLabelValues(string(c))
	}
	for _, r := range session.Reasons {
		m.ends[r] = ends.WithLabelValues(string(r))
	}
	for _, d := range []drop{dropMalformed, dropUnknown, dropEarly, dropDuplicate, dropFlood} {
		m.dropped[d] = dropped.WithLabelValues(string(d))
	}
	if reg == nil {
		return m, nil
	}
	var errs []error
	for _, c := range []prometheus.Collector{m.ready, m.open, m.expiry, m.dials, m.sent, m.resent, terminals, ends, dropped} {
		errs = append(errs, reg.Register(c))
	}
	return m, errors.Join(errs...)
}
