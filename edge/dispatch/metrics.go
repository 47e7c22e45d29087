package dispatch

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/iop-fabric/iop/edge/pool"
	"github.com/iop-fabric/iop/wire"
)

// Why a message changed nothing; a closed set.
const (
	dropStale   = "stale"   // of another session than the attempt's (F5)
	dropForeign = "foreign" // of another node than the attempt's
	dropUnknown = "unknown" // of an attempt nobody knows
	dropLate    = "late"    // of an attempt that has ended
	dropAck     = "ack"     // an acknowledgement that is none
)

type metrics struct {
	terminals map[wire.Class]prometheus.Counter // "" is END
	returns   map[pool.Return]prometheus.Counter
	dropped   map[string]prometheus.Counter
	breaches  []prometheus.Counter
	bytes     prometheus.Counter
	acks      prometheus.Counter
	repeats   prometheus.Counter
	resent    prometheus.Counter
	lost      prometheus.Counter
}

func newMetrics(reg prometheus.Registerer, open func() int) *metrics {
	vec := func(name, label, help string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, []string{label})
	}
	one := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	}
	terminals := vec("iop_edge_terminals_total", "class", "Attempts ended, by class; complete is the provider's whole answer.")
	returns := vec("iop_edge_slot_returns_total", "how", "Slots given back by attempts, by reason.")
	dropped := vec("iop_edge_frames_dropped_total", "reason", "Messages of Nodes that changed nothing.")
	breaches := vec("iop_edge_stream_breaches_total", "reason", "Rules of the stream that Nodes broke.")
	m := &metrics{
		terminals: map[wire.Class]prometheus.Counter{"": terminals.WithLabelValues("complete")},
		returns:   map[pool.Return]prometheus.Counter{},
		dropped:   map[string]prometheus.Counter{},
		bytes:     one("iop_edge_answer_bytes_total", "Body bytes delivered to callers."),
		acks:      one("iop_edge_ack_messages_total", "Messages of acknowledgements sent to Nodes."),
		repeats:   one("iop_edge_request_repeats_total", "Requests published again because nothing was heard of them."),
		resent:    one("iop_edge_body_frames_resent_total", "Frames of requests' bodies sent again."),
		lost:      one("iop_edge_sessions_misbehaved_total", "Sessions given up because their Node went on breaking rules."),
	}
	for _, c := range wire.Classes {
		m.terminals[c] = terminals.WithLabelValues(string(c))
	}
	for _, how := range []pool.Return{pool.ByTerminal, pool.ByNotSent, pool.ByCancelBound} {
		m.returns[how] = returns.WithLabelValues(how.String())
	}
	for _, why := range []string{dropStale, dropForeign, dropUnknown, dropLate, dropAck} {
		m.dropped[why] = dropped.WithLabelValues(why)
	}
	for _, name := range breachNames {
		m.breaches = append(m.breaches, breaches.WithLabelValues(name))
	}
	if reg != nil {
		reg.MustRegister(terminals, returns, dropped, breaches, m.bytes, m.acks, m.repeats, m.resent, m.lost,
			prometheus.NewGaugeFunc(prometheus.GaugeOpts{
				Name: "iop_edge_attempts_open", Help: "Attempts that have not ended, those of callers who left included.",
			}, func() float64 { return float64(open()) }))
	}
	return m
}

func (m *metrics) terminal(err *wire.Error) {
	if err == nil {
		m.terminals[""].Inc()
		return
	}
	if c := m.terminals[err.Class]; c != nil { // a cause from outside may have a class of its own
		c.Inc()
	} else {
		m.terminals[wire.Internal].Inc()
	}
}
