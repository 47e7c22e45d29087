package admin

import (
	"crypto/sha256"
	"crypto/subtle"
	"encoding/json"
	"mime"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"

	"github.com/iop-fabric/iop/internal/adminapi"
)

// Guard says who may ask an admin API.
type Guard struct {
	// Token lets an operator in; zero: nobody is let in.
	Token [sha256.Size]byte
	// Host is the configured host name of the admin listener, if it is a name.
	Host string
	// Listener is the setting that names it, for people.
	Listener string
}

// Serve has next answer what may be answered (I1, I2).
func (g Guard) Serve(w http.ResponseWriter, r *http.Request, next http.Handler) {
	h := w.Header()
	h.Set("Cache-Control", "no-store")
	h.Set("X-Content-Type-Options", "nosniff")
	section, _, _ := strings.Cut(g.Listener, ".")
	switch {
	case !g.ourHost(r.Host):
		refuse(w, http.StatusMisdirectedRequest, "wrong_host", "the admin API answers to an IP address, localhost or the host of "+g.Listener)
	case !sameOrigin(r):
		refuse(w, http.StatusForbidden, "wrong_origin", "the admin API does not answer pages of other origins")
	case g.Token == [sha256.Size]byte{}:
		refuse(w, http.StatusForbidden, "no_admin_token", "no admin token is configured: set "+section+".admin_token")
	case !g.knows(r.Header):
		h.Set("Www-Authenticate", "Bearer")
		message := "the admin token is needed: Authorization: Bearer <token>"
		if scheme, given, _ := strings.Cut(r.Header.Get("Authorization"), " "); strings.EqualFold(scheme, "bearer") && strings.TrimSpace(given) != "" {
			message = "the admin token that was given is not the one of " + section + ".admin_token"
		}
		refuse(w, http.StatusUnauthorized, "invalid_token", message)
	default:
		next.ServeHTTP(w, r)
	}
}

// Handler serves the paths of mount, and nothing else, under the guard.
func (g Guard) Handler(mount map[string]http.Handler) http.Handler {
	mux := http.NewServeMux()
	mountAll(mux, mount)
	mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		refuse(w, http.StatusNotFound, "unknown_path", "nothing is served at this path")
	})
	section, _, _ := strings.Cut(g.Listener, ".")
	for _, path := range shown {
		mux.HandleFunc("/api/v1/"+path, func(w http.ResponseWriter, _ *http.Request) {
			refuse(w, http.StatusNotFound, "wrong_process", "this is a "+section+", which shows no nodes: ask the Edge (--config edge.yaml)")
		})
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { g.Serve(w, r, mux) })
}

// shown are the paths of an Edge alone, and admitted those of who admits members: of
// which process they are is said by the other.
var (
	shown    = []string{"snapshot", "nodes", "providers", "models", "queue"}
	admitted = []string{"invitations", "invitations/{name}", "members/{role}/{name}/revoke", "backup", "keys", "keys/{what}/{step}"}
)

// mountAll adds handlers. What a request that changes something has for a body is
// JSON and says so, which a form of a page cannot.
func mountAll(mux *http.ServeMux, mount map[string]http.Handler) {
	for pattern, next := range mount {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			if r.Method == http.MethodPost && !isJSON(r) {
				refuse(w, http.StatusUnsupportedMediaType, "unsupported_media_type", "want Content-Type: application/json")
				return
			}
			next.ServeHTTP(w, r)
		})
	}
}

func isJSON(r *http.Request) bool {
	media, _, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	return err == nil && media == "application/json"
}

func (g Guard) knows(h http.Header) bool {
	v := h["Authorization"]
	if len(v) != 1 {
		return false
	}
	scheme, token, ok := strings.Cut(v[0], " ")
	digest := sha256.Sum256([]byte(strings.TrimSpace(token)))
	return ok && strings.EqualFold(scheme, "bearer") && subtle.ConstantTimeCompare(digest[:], g.Token[:]) == 1
}

// ourHost: an address cannot be made to point here by who owns a name.
func (g Guard) ourHost(host string) bool {
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	host = strings.Trim(host, "[]")
	if _, err := netip.ParseAddr(host); err == nil {
		return true
	}
	return strings.EqualFold(host, "localhost") || (g.Host != "" && strings.EqualFold(host, g.Host))
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

func refuse(w http.ResponseWriter, status int, code, message string) {
	var e adminapi.Error
	e.Error.Code, e.Error.Message = code, message
	write(w, status, e)
}

// Refuse and Write answer as this API does, for handlers of Mount.
func Refuse(w http.ResponseWriter, status int, code, message string) {
	refuse(w, status, code, message)
}

// Write answers with JSON.
func Write(w http.ResponseWriter, status int, v any) { write(w, status, v) }

func write(w http.ResponseWriter, status int, v any) {
	b, err := json.Marshal(v)
	if err != nil {
		panic("BUG: admin: an answer cannot be written as JSON: " + err.Error())
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(append(b, '\n')) // who has left needs no answer
}
