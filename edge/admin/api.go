package admin

import (
	"context"
	"net/http"
	"time"

	"github.com/iop-fabric/iop/internal/adminapi"
)

// Config is what an operator set.
type Config struct {
	Guard
	Edge       string
	QueueDepth int
	QueueWait  time.Duration
	// Mount serves further paths below /api/ under the same guard; a POST must be JSON.
	Mount map[string]http.Handler
}

// Source takes the state at one instant; it fails where the Edge does not run.
type Source interface {
	State(ctx context.Context) (State, error)
}

// API serves /api/v1/. It is safe for concurrent use and starts no goroutine.
type API struct {
	cfg     Config
	source  Source
	now     func() time.Time
	started time.Time
	mux     *http.ServeMux
}

// New returns an API; now is the clock.
func New(cfg Config, source Source, now func() time.Time) *API {
	a := &API{cfg: cfg, source: source, now: now, started: now(), mux: http.NewServeMux()}
	for path, part := range map[string]func(adminapi.Snapshot) any{
		"snapshot":  func(s adminapi.Snapshot) any { return s },
		"nodes":     func(s adminapi.Snapshot) any { return map[string]any{"nodes": s.Nodes} },
		"providers": func(s adminapi.Snapshot) any { return map[string]any{"providers": s.Providers} },
		"models":    func(s adminapi.Snapshot) any { return map[string]any{"models": s.Models} },
		"queue":     func(s adminapi.Snapshot) any { return map[string]any{"queue": s.Queue} },
	} {
		a.mux.HandleFunc("/api/v1/"+path, a.serve(part))
	}
	mountAll(a.mux, cfg.Mount)
	for _, path := range admitted {
		if _, ours := cfg.Mount["/api/v1/"+path]; !ours { // an iop up has them all
			a.mux.HandleFunc("/api/v1/"+path, func(w http.ResponseWriter, _ *http.Request) {
				refuse(w, http.StatusNotFound, "wrong_process", "this is an Edge, which admits nobody and keeps no keys: ask the broker, or the service beside a stock nats-server, that has "+
					"enrolment (--config broker-1.yaml)")
			})
		}
	}
	a.mux.HandleFunc("/api/", func(w http.ResponseWriter, _ *http.Request) {
		refuse(w, http.StatusNotFound, "unknown_path", "nothing is served at this path; GET /api/v1/snapshot holds everything")
	})
	return a
}

// ServeHTTP answers what may be answered (I1, I2).
func (a *API) ServeHTTP(w http.ResponseWriter, r *http.Request) { a.cfg.Serve(w, r, a.mux) }

func (a *API) serve(part func(adminapi.Snapshot) any) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			w.Header().Set("Allow", "GET, HEAD")
			refuse(w, http.StatusMethodNotAllowed, "method_not_allowed", "this path takes GET")
			return
		}
		state, err := a.source.State(r.Context())
		if err != nil {
			refuse(w, http.StatusServiceUnavailable, "not_running", err.Error())
			return
		}
		write(w, http.StatusOK, part(a.view(state, a.now())))
	}
}
