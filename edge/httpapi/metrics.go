package httpapi

import (
	"bytes"
	"context"
	"log/slog"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/iop-fabric/iop/internal/obs"
	"github.com/iop-fabric/iop/wire"
	"github.com/iop-fabric/iop/wire/iopv1"
)

// The log's events, and the keys of the first.
const (
	EventRequest           = "edge.request"
	EventCertificate       = "edge.certificate"
	EventCertificateFailed = "edge.certificate_failed"
	EventHTTPError         = "edge.http_error"
	EventSpoolFailed       = "edge.spool_failed"

	keyRequest   = "request_id"
	keyRemote    = "remote"
	keyDir       = "dir"
	keyOperation = "operation"
	keyPrincipal = "principal"
	keyModel     = "model"
	keyProvider  = "provider"
	keyNode      = "node"
	keyAttempts  = "attempts"
	keyQueueWait = "queue_wait"
	keyFirstByte = "first_byte"
	keyDuration  = "duration"
	keyBytesIn   = "bytes_in"
	keyBytesOut  = "bytes_out"
	keyStatus    = "status"
	keyClass     = "class"
	keyTokensIn  = "input_tokens"
	keyTokensOut = "output_tokens"
)

// serverLog takes what net/http itself has to tell, which is text.
type serverLog struct{ log *slog.Logger }

func (s serverLog) Write(line []byte) (int, error) {
	level := slog.LevelWarn
	if bytes.HasPrefix(line, []byte("http: TLS handshake error")) {
		level = slog.LevelDebug // anybody can cause any number of them
	}
	s.log.LogAttrs(context.Background(), level, EventHTTPError, slog.String("error", string(bytes.TrimSpace(line))))
	return len(line), nil
}

// served is the class of what went well, in logs and metrics.
const served = "ok"

type metrics struct {
	requests  *prometheus.CounterVec
	attempts  *prometheus.CounterVec
	tokens    *prometheus.CounterVec
	models    *obs.Names
	inFlight  prometheus.Gauge
	duration  map[string]prometheus.Observer // by operation: looked up for each call
	firstByte map[string]prometheus.Observer
}

func newMetrics(reg prometheus.Registerer, held *bodies) *metrics {
	if reg == nil {
		reg = prometheus.NewRegistry()
	}
	m := &metrics{
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "iop_edge_http_requests_total",
			Help: "Requests of callers, by operation and by how they ended.",
		}, []string{"operation", "class"}),
		attempts: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "iop_edge_http_attempts_total",
			Help: "Attempts made for callers' requests, by how they ended.",
		}, []string{"class"}),
		tokens: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "iop_edge_tokens_total",
			Help: "Tokens that providers reported, by key, model and kind.",
		}, []string{"principal", "model", "kind"}),
		models: obs.NewNames(maxModels),
		inFlight: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "iop_edge_http_requests_in_flight",
			Help: "Requests of callers that are being served.",
		}),
		duration:  map[string]prometheus.Observer{},
		firstByte: map[string]prometheus.Observer{},
	}
	duration := prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name:    "iop_edge_http_request_duration_seconds",
		Help:    "Time from a request's header to the end of its answer.",
		Buckets: prometheus.ExponentialBuckets(0.001, 4, 11), // 1 ms to 17 min
	}, []string{"operation"})
	firstByte := prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name:    "iop_edge_http_first_byte_seconds",
		Help:    "Time from a request's header to the answer's first byte.",
		Buckets: prometheus.ExponentialBuckets(0.001, 4, 11),
	}, []string{"operation"})
	bodyBytes := prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "iop_edge_http_held_body_bytes",
		Help: "Bytes of request bodies held in memory and in files.",
	}, func() float64 { return float64(held.held.Load()) })
	reg.MustRegister(m.requests, m.attempts, m.tokens, m.inFlight, duration, firstByte, bodyBytes)
	for _, op := range operations() {
		m.duration[op] = duration.WithLabelValues(op)
		m.firstByte[op] = firstByte.WithLabelValues(op)
	}
	return m
}

// enter counts a request in and returns what counts it out.
func (m *metrics) enter() (leave func()) {
	m.inFlight.Inc()
	return m.inFlight.Dec
}

func (m *metrics) attempt(class string) { m.attempts.WithLabelValues(class).Inc() }

// class is how a request or its attempt ended, as logs and metrics have it. A
// provider that tells an error in its stream has failed, although its bytes passed.
func (x *exchange) class(why reason) string {
	switch {
	case why != "":
		return string(why)
	case x.events != nil && x.events.lines.failed:
		return string(wire.Provider)
	default:
		return served
	}
}

// maxModels bounds the label: a model's name may be a provider's word.
const maxModels = 500

// used counts what a provider reported; what it did not is never guessed (T3, D8).
func (m *metrics) used(principal, model string, u *iopv1.Usage) {
	if u == nil {
		return
	}
	model = m.models.Label(model)
	for _, c := range []struct {
		kind string
		n    int64
	}{{"input", u.GetInputTokens()}, {"output", u.GetOutputTokens()}} {
		if c.n > 0 { // a Node's word: never a counter that falls
			m.tokens.WithLabelValues(principal, model, c.kind).Add(float64(c.n))
		}
	}
}

// record logs and counts a request, once, after its answer.
func (a *API) record(ctx context.Context, x *exchange, why reason) {
	now := a.now()
	took := now.Sub(x.began)
	op := x.route.operation
	a.metrics.requests.WithLabelValues(op, x.class(why)).Inc()
	a.metrics.duration[op].Observe(took.Seconds())
	if !x.firstByte.IsZero() {
		a.metrics.firstByte[op].Observe(x.firstByte.Sub(x.began).Seconds())
	}
	if x.key != nil {
		a.metrics.used(x.key.principal, x.model, x.usage)
	}
	if !a.log.Enabled(ctx, slog.LevelInfo) {
		return
	}
	status := x.status
	if status == 0 && why != "" {
		status = statusOf(why)
	}
	attrs := make([]slog.Attr, 0, 16)
	attrs = append(attrs,
		slog.String(keyRequest, x.id),
		slog.String(keyOperation, op),
		slog.Int(keyStatus, status),
		slog.String(keyClass, x.class(why)),
		slog.Duration(keyDuration, took),
		slog.Int64(keyBytesIn, x.bodyIn),
		slog.Int64(keyBytesOut, x.sent),
	)
	if x.remote.IsValid() {
		attrs = append(attrs, slog.String(keyRemote, x.remote.String()))
	}
	if x.key != nil {
		attrs = append(attrs, slog.String(keyPrincipal, x.key.principal))
	}
	if !x.firstByte.IsZero() {
		attrs = append(attrs, slog.Duration(keyFirstByte, x.firstByte.Sub(x.began)))
	}
	if !x.asked.IsZero() {
		attrs = append(attrs, slog.Duration(keyQueueWait, x.waited))
	}
	if x.model != "" {
		attrs = append(attrs, slog.String(keyModel, x.model))
	}
	if x.tries > 0 {
		attrs = append(attrs,
			slog.String(keyProvider, x.granted.Slot.Provider),
			slog.String(keyNode, x.granted.Slot.Node),
			slog.Int(keyAttempts, x.tries),
		)
	}
	attrs = append(attrs, tokens(x.usage)...)
	a.log.LogAttrs(ctx, slog.LevelInfo, EventRequest, attrs...)
}

func tokens(u *iopv1.Usage) []slog.Attr {
	if u == nil {
		return nil
	}
	return []slog.Attr{slog.Int64(keyTokensIn, u.GetInputTokens()), slog.Int64(keyTokensOut, u.GetOutputTokens())}
}
