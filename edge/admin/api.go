package admin

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/json"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"time"

	"github.com/iop-fabric/iop/internal/adminapi"
)

// Config is what an operator set.
type Config struct {
	Edge string
	// Token lets an operator in; zero: nobody is let in.
	Token [sha256.Size]byte
	// Host is the configured host name of the admin listener, if it is a name.
	Host       string
	QueueDepth int
	QueueWait  time.Duration
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
	a.mux.HandleFunc("/api/", func(w http.ResponseWriter, _ *http.Request) {
		refuse(w, http.StatusNotFound, "unknown_path", "nothing is served at this path; GET /api/v1/snapshot holds everything")
	})
	return a
}

// ServeHTTP answers what may be answered (I1, I2).
func (a *API) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	h.Set("Cache-Control", "no-store")
	h.Set("X-Content-Type-Options", "nosniff")
	switch {
	case !a.ourHost(r.Host):
		refuse(w, http.StatusMisdirectedRequest, "wrong_host", "the admin API answers to an IP address, localhost or the host of edge.admin_listen")
	case !sameOrigin(r):
		refuse(w, http.StatusForbidden, "wrong_origin", "the admin API does not answer pages of other origins")
	case a.cfg.Token == [sha256.Size]byte{}:
		refuse(w, http.StatusForbidden, "no_admin_token", "no admin token is configured: set edge.admin_token")
	case !a.knows(r.Header):
		h.Set("Www-Authenticate", "Bearer")
		refuse(w, http.StatusUnauthorized, "invalid_token", "the admin token is needed: Authorization: Bearer <token>")
	default:
		a.mux.ServeHTTP(w, r)
	}
}

func (a *API) knows(h http.Header) bool {
	v := h["Authorization"]
	if len(v) != 1 {
		return false
	}
	scheme, token, ok := strings.Cut(v[0], " ")
	digest := sha256.Sum256([]byte(strings.TrimSpace(token)))
	return ok && strings.EqualFold(scheme, "bearer") && subtle.ConstantTimeCompare(digest[:], a.cfg.Token[:]) == 1
}

// ourHost: an address cannot be made to point here by who owns a name.
func (a *API) ourHost(host string) bool {
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	host = strings.Trim(host, "[]")
	if _, err := netip.ParseAddr(host); err == nil {
		return true
	}
	return strings.EqualFold(host, "localhost") || (a.cfg.Host != "" && strings.EqualFold(host, a.cfg.Host))
}

// sameOrigin: what is no page has no origin.
func sameOrigin(r *http.Request) bool {
	values := r.Header["Origin"]
	if len(values) == 0 {
		site := r.Header.Get("Sec-Fetch-Site")
		return site == "" || site == "same-origin" || site == "none"
	}
	u, err := url.Parse(values[0])
	return len(values) == 1 && err == nil && u.Host != "" && strings.EqualFold(u.Host, r.Host)
}

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

func refuse(w http.ResponseWriter, status int, code, message string) {
	var e adminapi.Error
	e.Error.Code, e.Error.Message = code, message
	write(w, status, e)
}

func write(w http.ResponseWriter, status int, v any) {
	b, err := json.Marshal(v)
	if err != nil {
		panic("BUG: admin: an answer cannot be written as JSON: " + err.Error())
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(append(b, '\n')) // who has left needs no answer
}
