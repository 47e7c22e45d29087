package httpapi

import (
	"net/http"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// AdminHandler serves what needs no token on the admin listener (D4): /healthz,
// /readyz and /metrics. health and ready return nil while all is well; what else
// they return is shown to the operator, so it names no address and no secret.
func AdminHandler(health, ready func() error, gatherer prometheus.Gatherer) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", probe(health))
	mux.HandleFunc("GET /readyz", probe(ready))
	mux.Handle("GET /metrics", promhttp.HandlerFor(gatherer, promhttp.HandlerOpts{}))
	return mux
}

func probe(check func() error) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		h := w.Header()
		h.Set("Content-Type", "text/plain; charset=utf-8")
		h.Set("Cache-Control", "no-store")
		h.Set("X-Content-Type-Options", "nosniff")
		status, text := http.StatusOK, "ok\n"
		if err := check(); err != nil {
			status, text = http.StatusServiceUnavailable, err.Error()+"\n"
		}
		w.WriteHeader(status)
		_, _ = w.Write([]byte(text)) // a prober that left needs no answer
	}
}
