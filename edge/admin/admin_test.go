package admin

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/iop-fabric/iop/edge/pool"
	"github.com/iop-fabric/iop/edge/registry"
	"github.com/iop-fabric/iop/internal/adminapi"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var epoch = time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)

const token = "iop-admin-secret"

type fixedState struct {
	state State
	err   error
}

func (f *fixedState) State(context.Context) (State, error) { return f.state, f.err }

func newAPI(source Source) *API {
	return New(Config{Guard: Guard{Token: sha256.Sum256([]byte(token)), Host: "edge.example", Listener: "edge.admin_listen"}, Edge: "home", QueueDepth: 10, QueueWait: time.Minute},
		source, func() time.Time { return epoch })
}

func ask(a *API, change func(*http.Request)) *httptest.ResponseRecorder {
	r := httptest.NewRequest(http.MethodGet, "http://127.0.0.1:8401/api/v1/snapshot", nil)
	r.Header.Set("Authorization", "Bearer "+token)
	if change != nil {
		change(r)
	}
	w := httptest.NewRecorder()
	a.ServeHTTP(w, r)
	return w
}

// Without the token nothing is told, and no page in a browser gets an answer: not
// one of another origin, not one whose name was made to point here.
//
// Contract: D4
func TestWhoMayAsk(t *testing.T) {
	a := newAPI(&fixedState{})
	for name, c := range map[string]struct {
		change func(*http.Request)
		status int
		code   string
	}{
		"the operator":              {nil, 200, ""},
		"HEAD":                      {func(r *http.Request) { r.Method = http.MethodHead }, 200, ""},
		"by localhost":              {func(r *http.Request) { r.Host = "localhost:8401" }, 200, ""},
		"by IPv6":                   {func(r *http.Request) { r.Host = "[::1]:8401" }, 200, ""},
		"by the configured name":    {func(r *http.Request) { r.Host = "Edge.example" }, 200, ""},
		"our own page":              {func(r *http.Request) { r.Header.Set("Origin", "http://127.0.0.1:8401") }, 200, ""},
		"no token":                  {func(r *http.Request) { r.Header.Del("Authorization") }, 401, "invalid_token"},
		"a wrong token":             {func(r *http.Request) { r.Header.Set("Authorization", "Bearer x") }, 401, "invalid_token"},
		"a longer token":            {func(r *http.Request) { r.Header.Set("Authorization", "Bearer "+token+"x") }, 401, "invalid_token"},
		"an empty token":            {func(r *http.Request) { r.Header.Set("Authorization", "Bearer ") }, 401, "invalid_token"},
		"another scheme":            {func(r *http.Request) { r.Header.Set("Authorization", "Basic "+token) }, 401, "invalid_token"},
		"two tokens":                {func(r *http.Request) { r.Header.Add("Authorization", "Bearer x") }, 401, "invalid_token"},
		"the token in the query":    {func(r *http.Request) { r.Header.Del("Authorization"); r.URL.RawQuery = "token=" + token }, 401, "invalid_token"},
		"a name made to point here": {func(r *http.Request) { r.Host = "evil.example:8401" }, 421, "wrong_host"},
		"no host":                   {func(r *http.Request) { r.Host = "" }, 421, "wrong_host"},
		"a page of another origin":  {func(r *http.Request) { r.Header.Set("Origin", "http://evil.example") }, 403, "wrong_origin"},
		"a page of another port":    {func(r *http.Request) { r.Header.Set("Origin", "http://127.0.0.1:3000") }, 403, "wrong_origin"},
		"a page without an origin":  {func(r *http.Request) { r.Header.Set("Origin", "null") }, 403, "wrong_origin"},
		"an image of another site":  {func(r *http.Request) { r.Header.Set("Sec-Fetch-Site", "cross-site") }, 403, "wrong_origin"},
		"POST":                      {func(r *http.Request) { r.Method = http.MethodPost }, 405, "method_not_allowed"},
		"an unknown path":           {func(r *http.Request) { r.URL.Path = "/api/v1/secrets" }, 404, "unknown_path"},
	} {
		w := ask(a, c.change)
		var e adminapi.Error
		if err := json.Unmarshal(w.Body.Bytes(), &e); err != nil || w.Code != c.status || e.Error.Code != c.code {
			t.Errorf("%s: %d %s", name, w.Code, w.Body)
		}
		if w.Header().Get("Cache-Control") != "no-store" || w.Header().Get("Access-Control-Allow-Origin") != "" {
			t.Errorf("%s: %v", name, w.Header())
		}
	}
	open := New(Config{Guard: Guard{Listener: "edge.admin_listen"}, Edge: "home"}, &fixedState{}, time.Now)
	if w := ask(open, func(r *http.Request) { r.Header.Set("Authorization", "Bearer ") }); w.Code != 403 || !strings.Contains(w.Body.String(), "edge.admin_token") {
		t.Errorf("without a configured token: %d %s", w.Code, w.Body)
	}
	down := newAPI(&fixedState{err: errors.New("not connected to the broker yet")})
	if w := ask(down, nil); w.Code != 503 || !strings.Contains(w.Body.String(), "not connected") {
		t.Errorf("an Edge that does not run: %d %s", w.Code, w.Body)
	}
}

// one is a state with a node of each kind and a model that waits.
func one() State {
	return State{
		Nodes: []registry.NodeState{
			{
				Node: "gpu1", Configured: true, Gen: 7, State: registry.Ready, Connected: true,
				Since: epoch.Add(-time.Hour), Heard: epoch.Add(-300 * time.Millisecond), Software: "iop 1.0",
			},
			{Node: "gpu2", Configured: true, State: registry.Absent},
		},
		Pool: pool.Snapshot{
			Auto: true, Waiting: 2, Held: 4,
			Providers: []pool.ProviderState{
				{ID: "gpu1/a/m", Node: "gpu1", Adapter: "a", Target: "m", Gen: 7, Connected: true, Status: pool.StatusAvailable, Health: pool.HealthAvailable, Capacity: 4, InFlight: 4, Queued: 2, Models: []string{"m"}},
				{ID: "gpu2/a/m", Node: "gpu2", Adapter: "a", Target: "m", Status: pool.StatusUnavailable, Health: pool.HealthOffline, Models: []string{"m"}},
			},
			Models: []pool.ModelState{{
				Name: "m", Offered: true, Since: epoch.Add(-time.Hour), Waiting: 2, Oldest: epoch.Add(-1500 * time.Millisecond),
				Candidates: []pool.CandidateState{{Provider: "gpu1/a/m", Weight: 1}, {Provider: "gpu2/a/m", Weight: 1}},
				Principals: []pool.PrincipalWait{{Principal: "alice", Waiting: 2}},
			}},
		},
	}
}

// One page says what every node is doing and why a request waits; a node that is
// gone keeps its place with numbers of 0.
//
// Contract: P4 P6 P1
func TestView(t *testing.T) {
	w := ask(newAPI(&fixedState{state: one()}), nil)
	var got adminapi.Snapshot
	dec := json.NewDecoder(w.Body)
	dec.DisallowUnknownFields()
	if err := dec.Decode(&got); err != nil {
		t.Fatal(err)
	}
	if !got.Ready || got.Edge != "home" || got.Queue != (adminapi.Queue{Waiting: 2, InFlight: 4, Depth: 10, WaitMs: 60_000}) {
		t.Errorf("%+v", got)
	}
	gpu1, gpu2 := got.Nodes[0], got.Nodes[1]
	if gpu1.State != "ready" || !gpu1.Connected || gpu1.Generation != 7 || gpu1.InFlight != 4 || gpu1.HeartbeatAgeMs != 300 {
		t.Errorf("%+v", gpu1)
	}
	if gpu2.State != "absent" || gpu2.Connected || gpu2.InFlight != 0 || gpu2.HeartbeatAgeMs != 0 {
		t.Errorf("%+v", gpu2)
	}
	if p := got.Providers[1]; p.Status != "unavailable" || p.Health != "offline" || p.Capacity != 0 || p.Connected {
		t.Errorf("%+v", p)
	}
	m := got.Models[0]
	if m.Source != "auto" || m.Waiting != 2 || m.OldestWaitMs != 1500 || len(m.Candidates) != 2 || m.Principals[0].Principal != "alice" {
		t.Errorf("%+v", m)
	}
	if want := "busy: gpu1/a/m 4/4; not connected: gpu2/a/m"; m.WaitsFor != want {
		t.Errorf("it waits for %q, want %q", m.WaitsFor, want)
	}
	for part, want := range map[string]string{
		"nodes": `{"nodes":[`, "providers": `{"providers":[`, "models": `{"models":[`, "queue": `{"queue":{`,
	} {
		w := ask(newAPI(&fixedState{state: one()}), func(r *http.Request) { r.URL.Path = "/api/v1/" + part })
		if w.Code != 200 || !strings.HasPrefix(w.Body.String(), want) {
			t.Errorf("%s: %d %s", part, w.Code, w.Body)
		}
	}
	if w := ask(newAPI(&fixedState{state: State{Ready: errors.New("no node is ready")}}), nil); !strings.Contains(w.Body.String(), `"ready":false,"reason":"no node is ready","nodes":[],"providers":[],"models":[]`) {
		t.Errorf("an Edge with nothing: %s", w.Body)
	}
}

// Each state that keeps a provider from serving is told in words of its own.
func TestWhyARequestWaits(t *testing.T) {
	ok := func(used int) pool.ProviderState {
		return pool.ProviderState{Status: pool.StatusAvailable, Health: pool.HealthAvailable, Capacity: 2, InFlight: used}
	}
	with := func(status, health string) pool.ProviderState {
		return pool.ProviderState{Status: status, Health: health}
	}
	for _, c := range []struct {
		p    []pool.ProviderState
		wait int
		want string
	}{
		{nil, 1, "no provider offers it any more"},
		{[]pool.ProviderState{ok(0)}, 0, ""},
		{[]pool.ProviderState{ok(2), ok(1)}, 0, ""},
		{[]pool.ProviderState{ok(2)}, 3, "busy: a 2/2"},
		{[]pool.ProviderState{ok(1)}, 3, "not for what waits: a"},
		{[]pool.ProviderState{with(pool.StatusUnavailable, pool.HealthUnavailable), with(pool.StatusUnavailable, pool.HealthOffline)}, 0, "not connected: b; found unavailable: a"},
		{
			[]pool.ProviderState{with(pool.StatusDisabled, pool.HealthAvailable), with(pool.StatusHeld, pool.HealthAvailable), with(pool.StatusDraining, pool.HealthAvailable)},
			0, "draining: c; waiting for its node to apply the configuration: b; disabled: a",
		},
	} {
		m, s := pool.ModelState{Waiting: c.wait, Since: time.Unix(1, 0)}, pool.Snapshot{}
		for i, p := range c.p {
			p.ID = string(rune('a' + i))
			s.Providers = append(s.Providers, p)
			m.Candidates = append(m.Candidates, pool.CandidateState{Provider: p.ID})
		}
		if got := waitsFor(m, s); got != c.want {
			t.Errorf("%+v: %q, want %q", c.p, got, c.want)
		}
	}
	if got := waitsFor(pool.ModelState{Waiting: 1}, pool.Snapshot{}); got != "no provider has listed it yet" {
		t.Errorf("of a model that was never offered: %q", got)
	}
}
