package broker

import (
	"errors"
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/iop-fabric/iop/broker/enrol"
	"github.com/iop-fabric/iop/internal/identity"
	"github.com/iop-fabric/iop/subjects"
)

// metrics are bounded in their labels: roles, refusals and operations are
// closed sets, and each series is there from the start.
type metrics struct {
	admitted    *prometheus.CounterVec
	refused     *prometheus.CounterVec
	evicted     *prometheus.CounterVec
	store       *prometheus.CounterVec
	dropped     prometheus.Counter
	callout     prometheus.Histogram
	sessions    prometheus.Gauge
	certificate prometheus.Gauge
	enrolments  *prometheus.CounterVec
	renewals    *prometheus.CounterVec
}

// The outcomes of a store request.
const (
	storeOK       = "ok"
	storeConflict = "conflict"
	storeRefused  = "refused"
	storeFailed   = "failed"
)

// The outcomes of a renewal.
const (
	renewSigned  = "signed"
	renewRefused = "refused"
)

func newMetrics(r prometheus.Registerer) (*metrics, error) {
	m := &metrics{
		admitted: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "iop_broker_admitted_total", Help: "Connections admitted, by role.",
		}, []string{"role"}),
		refused: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "iop_broker_refused_total", Help: "Connections refused, by reason.",
		}, []string{"reason"}),
		evicted: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "iop_broker_evicted_total", Help: "Connections closed by the authority, by reason.",
		}, []string{"reason"}),
		store: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "iop_broker_store_requests_total", Help: "Requests to the Edges' store, by operation and outcome.",
		}, []string{"op", "outcome"}),
		dropped: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "iop_broker_dropped_total", Help: "Messages the session service could not take in time.",
		}),
		callout: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "iop_broker_callout_seconds", Help: "Time to decide about one connection.",
			Buckets: []float64{.0005, .001, .002, .005, .01, .02, .05, .1, .5, 1, 5},
		}),
		sessions: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "iop_broker_sessions", Help: "Sessions of Nodes that are connected.",
		}),
		certificate: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "iop_broker_certificate_expiry_timestamp_seconds", Help: "When the broker's certificate expires.",
		}),
		enrolments: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "iop_broker_enrolments_total", Help: "Requests of machines to join, by outcome.",
		}, []string{"outcome"}),
		renewals: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "iop_broker_renewals_total", Help: "Requests of nodes for a new certificate, by outcome.",
		}, []string{"outcome"}),
	}
	for _, outcome := range []string{renewSigned, renewRefused} {
		m.renewals.WithLabelValues(outcome)
	}
	for _, outcome := range enrol.Outcomes {
		m.enrolments.WithLabelValues(string(outcome))
	}
	for _, role := range []identity.Role{identity.RoleNode, identity.RoleEdge, identity.RoleLeaf} {
		m.admitted.WithLabelValues(string(role))
	}
	for _, reason := range refusals {
		m.refused.WithLabelValues(string(reason))
	}
	for _, reason := range []string{reasonSuperseded, string(refusedRevoked), reasonFenced} {
		m.evicted.WithLabelValues(reason)
	}
	for _, op := range []subjects.Verb{subjects.Get, subjects.Put, subjects.List} {
		for _, outcome := range []string{storeOK, storeConflict, storeRefused, storeFailed} {
			m.store.WithLabelValues(string(op), outcome)
		}
	}
	var errs []error
	for _, c := range []prometheus.Collector{m.admitted, m.refused, m.evicted, m.store, m.dropped, m.callout, m.sessions, m.certificate, m.enrolments, m.renewals} {
		errs = append(errs, r.Register(c))
	}
	return m, errors.Join(errs...)
}

// closeReasons are the words ctl.closed uses for the server's reasons; any
// other of them is "closed".
var closeReasons = map[string]string{
	"Client Closed":                 "client_closed",
	"Kicked":                        "kicked",
	"Stale Connection":              "stale",
	"Slow Consumer (Pending Bytes)": "slow_consumer", "Slow Consumer (Write Deadline)": "slow_consumer",
	"Authentication Expired": "expired",
	"Read Error":             "read_error", "Write Error": "write_error",
	"Server Shutdown": "broker_stopped",
}

func closeReason(server string) string {
	if word, ok := closeReasons[server]; ok {
		return word
	}
	return "closed"
}

// handshakeRefusal sorts what crypto/tls says of a handshake that failed at the
// server into the closed set.
func handshakeRefusal(err error) refusal {
	text := err.Error()
	switch {
	case strings.Contains(text, "first record does not look like"):
		return refusedNotSpeaking
	case strings.Contains(text, "unsupported version"), strings.Contains(text, "protocol version"):
		return refusedTLSVersion
	case strings.Contains(text, "didn't provide a certificate"), strings.Contains(text, "failed to verify certificate"):
		return refusedCertificate
	}
	return refusedHandshake
}
