package httpapi

import (
	"log"
	"log/slog"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/edge/dispatch"
	"github.com/iop-fabric/iop/wire"
)

// Config is what an operator set.
type Config struct {
	Limits configs.Limits
	// Keys let callers in; without one nobody comes in.
	Keys []Key
	// OptInHeaders adds x-iop-node, x-iop-provider, x-iop-attempts and
	// x-iop-queue-ms to answers (E11).
	OptInHeaders bool
	// RetryOn are the statuses of a provider's answer for which another one is
	// asked (Q5), of every model that Models does not name with its own.
	RetryOn configs.Statuses
	Models  []configs.ModelGroup
	// KeepAlive has comments written into streams that are slow (E8).
	KeepAlive configs.KeepAlive
	// Origins are the pages that may read answers; "*": all (E9).
	Origins []string
	// Proxies are trusted to name the client they speak for (E11).
	Proxies []netip.Prefix
	// SpoolDir is where large bodies are kept; empty: the system's.
	SpoolDir string

	certificate *certificate // nil: clear text
}

// ConfigOf is what an Edge's configuration says of its callers, whose keys were
// read already. It reads the certificate, where there is one.
func ConfigOf(cfg *configs.Edge, keys []Key) (Config, error) {
	if err := checkKeys(keys); err != nil {
		return Config{}, err
	}
	c := Config{
		Limits: cfg.Limits, Keys: keys, RetryOn: cfg.RetryOn, Models: cfg.Models.Groups, KeepAlive: cfg.KeepAlive,
		Origins: cfg.CORS.AllowedOrigins, OptInHeaders: cfg.AnswerHeaders, Proxies: cfg.Proxies(),
	}
	if cfg.TLS == (configs.KeyPair{}) {
		return c, nil
	}
	var err error
	c.certificate, err = openCertificate(cfg.TLS)
	return c, err
}

// Deps are the API's collaborators. Log, Metrics and Now may be left out.
type Deps struct {
	Pool    Pool
	Runner  dispatch.Runner
	Log     *slog.Logger
	Metrics prometheus.Registerer
	Now     func() time.Time
}

// API is the callers' surface. It is safe for concurrent use; a goroutine it
// starts ends with its request.
type API struct {
	cfg     Config
	pool    Pool
	runner  dispatch.Runner
	log     *slog.Logger
	now     func() time.Time
	keys    []*keyState
	bodies  *bodies
	retry   retryPolicy
	cors    *cors // nil: no page reads anything
	metrics *metrics
}

// New returns an API. Zero limits mean the defaults that configs.Limits names.
func New(cfg Config, deps Deps) *API {
	cfg.Limits = withDefaults(cfg.Limits)
	a := &API{cfg: cfg, pool: deps.Pool, runner: deps.Runner, log: deps.Log, now: deps.Now}
	if a.log == nil {
		a.log = slog.New(slog.DiscardHandler)
	}
	if a.now == nil {
		a.now = time.Now
	}
	for _, k := range cfg.Keys {
		a.keys = append(a.keys, newKeyState(k))
	}
	l := cfg.Limits
	a.bodies = &bodies{max: l.Body, memory: l.BodyMemory, total: l.BodiesTotal, dir: cfg.SpoolDir, log: a.log}
	if c := cfg.certificate; c != nil {
		c.log, c.now = a.log, a.now
	}
	a.cors = newCORS(cfg.Origins)
	a.retry = newRetryPolicy(cfg.RetryOn, cfg.Models)
	a.metrics = newMetrics(deps.Metrics, a.bodies)
	return a
}

func withDefaults(l configs.Limits) configs.Limits {
	or(&l.Body, 64<<20)
	or(&l.BodyMemory, 1<<20)
	or(&l.BodiesTotal, 4<<30)
	or(&l.Header, 64<<10)
	or(&l.ReadHeader, 10*time.Second)
	or(&l.Idle, 2*time.Minute)
	or(&l.WriteStall, 2*time.Minute)
	return l
}

func or[T comparable](v *T, fallback T) {
	var zero T
	if *v == zero {
		*v = fallback
	}
}

// Handler returns the surface as a handler. To end what runs, cancel the base
// context of its server with a cause, such as pool.ErrStopping: a cancelled
// request context without one means that the caller left.
func (a *API) Handler() http.Handler { return http.HandlerFunc(a.serve) }

// Server returns a server for h with the limits of Z3 set, for the shell to run
// on its listener: with TLS, and HTTP/2 over it, where TLSConfig is set.
func (a *API) Server(h http.Handler) *http.Server {
	return &http.Server{
		Handler:           h,
		TLSConfig:         a.tlsConfig(),
		ReadHeaderTimeout: a.cfg.Limits.ReadHeader,
		IdleTimeout:       a.cfg.Limits.Idle,
		MaxHeaderBytes:    a.cfg.Limits.Header,
		ErrorLog:          log.New(serverLog{a.log}, "", 0),
		// A stream's own deadline only queues a reset, which on a connection that takes
		// no byte never goes out: the connection needs a bound of its own (E10).
		HTTP2: &http.HTTP2Config{WriteByteTimeout: a.cfg.Limits.WriteStall},
		// OPTIONS * is answered by h too, with its x-request-id.
		DisableGeneralOptionsHandler: true,
	}
}

// route is one thing that is served.
type route struct {
	operation string // also the metrics' label
	method    string // GET includes HEAD
	path      string // exact, or with a '/' at its end a prefix
	dialect   dialect
	serve     func(*API, *exchange, *http.Request) reason
}

// The operations of this surface, as labels and as profiles name them.
const (
	opChat        = "chat_completions"
	opCompletions = "completions"
	opResponses   = "responses"
	opEmbeddings  = "embeddings"
	opRerank      = "rerank"
	opMessages    = "messages"
	opCountTokens = "count_tokens"
	opModels      = "models"
	opModel       = "model"
	opRoot        = "root"
	opOther       = "other"
)

// routes is the whole surface. A path is matched as the caller spelt it, before
// any decoding; the query has no part in it (A52). What a provider gets is its
// profile's path for the operation.
var routes = []route{
	{opChat, http.MethodPost, "/v1/chat/completions", openAI, (*API).relay},
	{opResponses, http.MethodPost, "/v1/responses", responses, (*API).relay},
	{opMessages, http.MethodPost, "/v1/messages", anthropic, (*API).relay},
	{opCountTokens, http.MethodPost, "/v1/messages/count_tokens", anthropic, (*API).relay},
	{opCompletions, http.MethodPost, "/v1/completions", openAI, (*API).relay},
	{opEmbeddings, http.MethodPost, "/v1/embeddings", openAI, (*API).relay},
	{opRerank, http.MethodPost, "/v1/rerank", openAI, (*API).relay},
	{opModels, http.MethodGet, "/v1/models", openAI, (*API).listModels},
	{opModel, http.MethodGet, "/v1/models/", openAI, (*API).getModel},
	{opRoot, http.MethodGet, "/", openAI, (*API).root},
}

var otherRoute = route{operation: opOther}

// operations are the labels there can be.
func operations() []string {
	all := []string{opOther}
	for i := range routes {
		all = append(all, routes[i].operation)
	}
	return all
}

func match(path string) (*route, bool) {
	for i := range routes {
		r := &routes[i]
		if path == r.path || (r.operation == opModel && strings.HasPrefix(path, r.path)) {
			return r, true
		}
	}
	return &otherRoute, false
}

func (r *route) allow() string {
	if r.method == http.MethodGet {
		return "GET, HEAD, OPTIONS"
	}
	return r.method + ", OPTIONS"
}

func (r *route) takes(method string) bool {
	return method == r.method || (method == http.MethodHead && r.method == http.MethodGet)
}

// serve is the life of one request.
func (a *API) serve(w http.ResponseWriter, r *http.Request) {
	x := newExchange(a, w, r)
	defer a.metrics.enter()()
	why := a.admit(x, r)
	abort := x.conclude(r, why)
	a.record(r.Context(), x, why)
	if abort && !x.reset() {
		panic(http.ErrAbortHandler) // net/http's way to break the connection
	}
}

// admit finds the route, checks what comes before any key, and serves.
func (a *API) admit(x *exchange, r *http.Request) reason {
	path := r.URL.EscapedPath()
	rt, known := match(path)
	if x.route, x.dialect = rt, rt.dialect; !known {
		x.dialect = dialectOf(path)
	}
	switch {
	case r.Method == http.MethodConnect:
		return x.refuseMethod(rt)
	case !addressedToUs(r):
		return misdirected
	case asksUpgrade(r.Header):
		return upgradeAsked
	case r.Method == http.MethodOptions && (known || path == "*"):
		return x.options(rt, r.Header)
	case !known:
		x.detail = pathHint(r)
		return unknownPath
	case !rt.takes(r.Method):
		return x.refuseMethod(rt)
	}
	return rt.serve(a, x, r)
}

// addressedToUs refuses a request line with another server's authority: nothing
// is proxied here. An absolute form that names the very address it came to is
// the origin form in other words.
func addressedToUs(r *http.Request) bool {
	if r.URL.Scheme == "" && r.URL.Host == "" && r.URL.User == nil {
		return true
	}
	local, ok := r.Context().Value(http.LocalAddrContextKey).(interface{ String() string })
	return ok && r.URL.User == nil && r.URL.Host == local.String()
}

// asksUpgrade reports whether the caller wants another protocol. An offer of
// HTTP/2 in clear text may be left alone (RFC 9113, 3.1 and RFC 9110, 7.8), and
// some clients make it with every request.
func asksUpgrade(h http.Header) bool {
	for _, v := range h["Upgrade"] {
		if !strings.EqualFold(strings.TrimSpace(v), "h2c") {
			return true
		}
	}
	return false
}

// modelID returns the id in a path of opModel, with its slashes plain or encoded.
func modelID(path string) (string, bool) {
	id, err := url.PathUnescape(strings.TrimPrefix(path, "/v1/models/"))
	return id, err == nil
}

// requestID is minted for each request; a clean one of the caller's is what the
// answer shows.
func requestID(h http.Header) (minted, shown string) {
	minted = wire.NewRunID()
	if own, ok := cleanRequestID(h); ok {
		return minted, own
	}
	return minted, minted
}
