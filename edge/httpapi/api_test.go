package httpapi

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/iop-fabric/iop/wire"
)

// post writes a request on a connection of its own.
func (f *fixture) post(c net.Conn, doc string) {
	f.Helper()
	_, err := fmt.Fprintf(c, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nContent-Length: %d\r\n\r\n%s", goodKey, len(doc), doc)
	if err != nil {
		f.Fatal(err)
	}
}

// series gathers one metric of this API's registry.
func (f *fixture) series(name string, labels map[string]string) prometheus.Collector {
	f.Helper()
	all, err := f.reg.Gather()
	if err != nil {
		f.Fatal(err)
	}
	for _, family := range all {
		if family.GetName() != name {
			continue
		}
	next:
		for _, m := range family.GetMetric() {
			for _, l := range m.GetLabel() {
				if want, ok := labels[l.GetName()]; ok && want != l.GetValue() {
					continue next
				}
			}
			g := prometheus.NewGauge(prometheus.GaugeOpts{Name: "found"})
			g.Set(m.GetCounter().GetValue() + m.GetGauge().GetValue())
			return g
		}
	}
	return prometheus.NewGauge(prometheus.GaugeOpts{Name: "absent"})
}

func (f *fixture) counter(class string) prometheus.Collector {
	return f.series("iop_edge_http_requests_total", map[string]string{"class": class})
}

func (f *fixture) gauge() prometheus.Collector {
	return f.series("iop_edge_http_held_body_bytes", nil)
}

// Contract: E12
func TestEveryClassHasItsRow(t *testing.T) {
	retried := "unknown_adapter capacity draining unreachable stalled session_ended"
	status := map[wire.Class]int{
		wire.Invalid: 400, wire.UnknownAdapter: 502, wire.Capacity: 503, wire.Draining: 503, wire.Credential: 502, wire.Unreachable: 502,
		wire.Provider: 502, wire.Deadline: 504, wire.Cancelled: 499, wire.Stalled: 504, wire.SessionEnded: 502, wire.Protocol: 502, wire.Internal: 500,
	}
	for _, c := range wire.Classes {
		r, ok := table[reason(c)]
		if !ok || r.status != status[c] || r.code == "" || r.openAI == "" || r.anthropic == "" {
			t.Errorf("%s: %+v", c, r)
		}
		if want := strings.Contains(" "+retried+" ", " "+string(c)+" "); r.retry != want {
			t.Errorf("%s: retried %v", c, r.retry)
		}
		if (r.retryAfter > 0) != (c == wire.Capacity || c == wire.Draining) {
			t.Errorf("%s: Retry-After %d", c, r.retryAfter)
		}
	}
	codes := map[string]reason{}
	for why, r := range table {
		if (r.status == 429 || r.status == 503) != (r.retryAfter > 0) {
			t.Errorf("%s: status %d, Retry-After %d", why, r.status, r.retryAfter)
		}
		if other, twice := codes[r.code]; twice {
			t.Errorf("%s and %s have one code", why, other)
		}
		codes[r.code] = why
	}
}

// Contract: H6 E12
func TestNext(t *testing.T) {
	for _, c := range []struct {
		why              reason
		asked, committed bool
		attempts         int
		want             bool
	}{
		{reason(wire.Unreachable), false, false, 1, true},
		{reason(wire.Unreachable), false, false, maxAttempts - 1, true},
		{reason(wire.Unreachable), false, false, maxAttempts, false},
		{reason(wire.Unreachable), false, true, 1, false},
		{reason(wire.Stalled), false, false, 1, true},
		{reason(wire.Provider), false, false, 1, false},
		{reason(wire.Provider), true, false, 1, true},
		{reason(wire.Provider), true, true, 1, false},
		{reason(wire.Provider), true, false, maxAttempts, false},
		{reason(wire.Cancelled), false, false, 1, false},
		{queueFull, false, false, 1, false},
		{"", false, false, 1, false},
	} {
		if got := next(c.why, c.asked, c.committed, c.attempts); got != c.want {
			t.Errorf("%+v: %v", c, got)
		}
	}
}

// Contract: E1
func TestModels(t *testing.T) {
	f := newFixture(t)
	f.pool.models = []Model{{"big", 1700000000, "n1"}, {"ns/name:13b", 1700000001, "n2"}, {"small", 1700000002, "n1"}}
	resp, body := f.do("GET", "/v1/models", "")
	want := `{"object":"list","data":[{"id":"big","object":"model","created":1700000000,"owned_by":"n1"},` +
		`{"id":"ns/name:13b","object":"model","created":1700000001,"owned_by":"n2"},` +
		`{"id":"small","object":"model","created":1700000002,"owned_by":"n1"}]}` + "\n"
	if resp.StatusCode != 200 || body != want {
		t.Errorf("%d %s", resp.StatusCode, body)
	}
	_, body = f.do("GET", "/v1/models", "", "Authorization", "Bearer "+narrowKey)
	if strings.Contains(body, "big") || !strings.Contains(body, "small") {
		t.Errorf("a key sees what it may not name: %s", body)
	}
	f.pool.models = nil
	if _, body := f.do("GET", "/v1/models", ""); body != `{"object":"list","data":[]}`+"\n" {
		t.Errorf("%s", body)
	}
	resp, body = f.do("GET", "/v1/models", "", "Authorization", "")
	f.wantError(resp, body, 401, "invalid_api_key")
}

// Contract: E1
func TestA44EveryListedModelCanBeRetrieved(t *testing.T) {
	f := newFixture(t)
	f.pool.models = []Model{{"a b.c", 1, "x"}, {"ns/name:13b", 2, "x"}, {"per%cent", 3, "x"}}
	for path, id := range map[string]string{
		"ns/name:13b": "ns/name:13b", "ns%2Fname%3A13b": "ns/name:13b", "ns%2fname:13b": "ns/name:13b",
		"a%20b.c": "a b.c", "per%25cent": "per%cent",
	} {
		resp, body := f.do("GET", "/v1/models/"+path, "")
		var m modelObject
		if err := json.Unmarshal([]byte(body), &m); err != nil || resp.StatusCode != 200 || m.ID != id || m.Object != "model" {
			t.Errorf("%s: %d %s", path, resp.StatusCode, body)
		}
	}
	resp, body := f.do("GET", "/v1/models/nope", "")
	f.wantError(resp, body, 404, "model_not_found")
	resp, body = f.do("GET", "/v1/models/a%20b.c", "", "Authorization", "Bearer "+narrowKey)
	f.wantError(resp, body, 403, "model_not_allowed")
}

// Contract: E7
func TestA46AWrongPathNamesTheRightBase(t *testing.T) {
	f := newFixture(t)
	base := f.server.URL + "/v1"
	for _, path := range []string{
		"/v1/v1/chat/completions", "/chat/completions", "/v1/chat/completions/", "/v1//chat/completions", "/v1/chat%2fcompletions",
		"/v1/../v1/chat/completions", "/v1/chat/completions;x", "/v1", "/v1/", "/nothing", "//v1/models",
	} {
		resp, body := f.do("POST", path, plainChat)
		if e := f.wantError(resp, body, 404, "unknown_path"); !strings.Contains(e.Message, base) {
			t.Errorf("%s: %s", path, e.Message)
		}
	}
	c, r := f.raw()
	io.WriteString(c, "GET /nothing HTTP/1.1\r\nHost: evil\"<script>\r\n\r\n")
	resp, err := http.ReadResponse(r, nil)
	if err != nil {
		t.Fatal(err)
	}
	b, _ := io.ReadAll(resp.Body)
	resp.Body.Close()
	if strings.Contains(string(b), "script") {
		t.Errorf("%d %s", resp.StatusCode, b)
	}
	if n := len(f.runner.all()); n != 0 {
		t.Errorf("%d attempts", n)
	}
}

// Contract: E9
func TestMethods(t *testing.T) {
	f := newFixture(t)
	for _, c := range []struct {
		method, path string
		status       int
		allow        string
	}{
		{"HEAD", "/", 200, ""},
		{"GET", "/", 200, ""},
		{"HEAD", "/v1/models", 200, ""},
		{"OPTIONS", "/v1/chat/completions", 204, "POST, OPTIONS"},
		{"OPTIONS", "/v1/models", 204, "GET, HEAD, OPTIONS"},
		{"GET", "/v1/chat/completions", 405, "POST, OPTIONS"},
		{"HEAD", "/v1/chat/completions", 405, "POST, OPTIONS"},
		{"DELETE", "/v1/models/x", 405, "GET, HEAD, OPTIONS"},
		{"POST", "/v1/models", 405, "GET, HEAD, OPTIONS"},
		{"TRACE", "/", 405, "GET, HEAD, OPTIONS"},
	} {
		resp, body := f.do(c.method, c.path, "")
		if resp.StatusCode != c.status || resp.Header.Get("Allow") != c.allow || resp.Header.Get("X-Request-Id") == "" {
			t.Errorf("%s %s: %d %v", c.method, c.path, resp.StatusCode, resp.Header)
		}
		if c.status == 405 && c.method != "HEAD" {
			f.wantError(resp, body, 405, "method_not_allowed")
		}
		if c.method == "HEAD" && (body != "" || resp.Header.Get("Content-Length") == "0") {
			t.Errorf("HEAD %s: %q %v", c.path, body, resp.Header)
		}
	}
}

// rawStatus sends bytes and returns the status of the answer, and whether the
// connection was closed after it.
func (f *fixture) rawStatus(request string) (status int, closed bool) {
	f.Helper()
	c, r := f.raw()
	if _, err := io.WriteString(c, request); err != nil {
		f.Fatal(err)
	}
	resp, err := http.ReadResponse(r, nil)
	if err != nil {
		f.Fatalf("%q: %v", request[:min(len(request), 80)], err)
	}
	defer resp.Body.Close()
	if _, err := io.Copy(io.Discard, resp.Body); err != nil {
		f.Fatal(err)
	}
	if !resp.Close {
		return resp.StatusCode, false
	}
	_, err = r.ReadByte()
	return resp.StatusCode, err != nil
}

// Contract: Z3
func TestAmbiguousRequestsAreRefused(t *testing.T) {
	f := newFixture(t)
	head := "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + goodKey + "\r\n"
	small := strings.Builder{}
	for i := range 10_000 {
		fmt.Fprintf(&small, "a%d: b\r\n", i)
	}
	for name, c := range map[string]struct {
		request string
		status  int
	}{
		"two lengths":            {head + "Content-Length: 5\r\nContent-Length: 6\r\n\r\n{    }", 400},
		"signed length":          {head + "Content-Length: +5\r\n\r\n{   }", 400},
		"negative length":        {head + "Content-Length: -5\r\n\r\n{   }", 400},
		"list of lengths":        {head + "Content-Length: 5, 5\r\n\r\n{   }", 400},
		"TE with a space":        {head + "Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n", 400},
		"TE chunked, identity":   {head + "Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n", 501},
		"TE twice":               {head + "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n", 501},
		"TE x":                   {head + "Transfer-Encoding: xchunked\r\nContent-Length: 5\r\n\r\n{   }", 501},
		"bad chunk size":         {head + "Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n", 400},
		"huge chunk size":        {head + "Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n{}\r\n0\r\n\r\n", 400},
		"NUL in a value":         {head + "X-A: a\x00b\r\nContent-Length: 2\r\n\r\n{}", 400},
		"CR in a value":          {head + "X-A: a\rb\r\nContent-Length: 2\r\n\r\n{}", 400},
		"space in a name":        {head + "X A: b\r\nContent-Length: 2\r\n\r\n{}", 400},
		"empty name":             {head + ": b\r\nContent-Length: 2\r\n\r\n{}", 400},
		"no host":                {"POST /v1/chat/completions HTTP/1.1\r\nAuthorization: Bearer " + goodKey + "\r\nContent-Length: 2\r\n\r\n{}", 400},
		"two hosts":              {head + "Host: y\r\nContent-Length: 2\r\n\r\n{}", 400},
		"one large header":       {head + "X-A: " + strings.Repeat("a", 1<<20) + "\r\nContent-Length: 2\r\n\r\n{}", 431},
		"10,000 small headers":   {head + small.String() + "Content-Length: 2\r\n\r\n{}", 431},
		"websocket":              {head + "Connection: Upgrade\r\nUpgrade: websocket\r\nContent-Length: 2\r\n\r\n{}", 400},
		"CONNECT":                {"CONNECT evil:443 HTTP/1.1\r\nHost: evil:443\r\n\r\n", 405},
		"absolute form":          {"GET http://evil/v1/models HTTP/1.1\r\nHost: x\r\n\r\n", 421},
		"absolute with userinfo": {"GET http://x@evil/v1/models HTTP/1.1\r\nHost: x\r\n\r\n", 421},
		"authority in the path":  {"GET //evil/v1/models HTTP/1.1\r\nHost: x\r\n\r\n", 404},
	} {
		t.Run(name, func(t *testing.T) {
			f := &fixture{T: t, server: f.server}
			status, closed := f.rawStatus(c.request)
			if status != c.status {
				t.Errorf("status %d, want %d", status, c.status)
			}
			if needsClose := strings.Contains(c.request, "Content-Length: ") || strings.Contains(c.request, "chunked"); needsClose && !closed {
				t.Error("the connection stays open")
			}
		})
	}
	if n := len(f.runner.all()); n != 0 {
		t.Errorf("%d attempts", n)
	}
}

// Contract: Z3
func TestWhatNobodyCanReadTwoWays(t *testing.T) {
	f := newFixture(t)
	head := "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + goodKey + "\r\n"
	// Chunked wins over a length, as the standard has it; and since a proxy before
	// us may have thought otherwise, nothing more is read from that connection.
	c, r := f.raw()
	fmt.Fprintf(c, "%sContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n%x;ext=1\r\n%s\r\n0\r\nContent-Length: 1\r\nAuthorization: x\r\n\r\n%s", head, len(plainChat), plainChat, head)
	resp, err := http.ReadResponse(r, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(io.Discard, resp.Body); err != nil || resp.StatusCode != 200 || !resp.Close {
		t.Errorf("%d %v close %v", resp.StatusCode, err, resp.Close)
	}
	resp.Body.Close()
	if _, err := r.ReadByte(); err == nil {
		t.Error("the connection stays open")
	}
	a := f.runner.all()
	if len(a) != 1 || a[0].body != strings.Replace(plainChat, "tiny", "tiny:latest", 1) || a[0].header("Content-Length") != nil || a[0].header("Transfer-Encoding") != nil {
		t.Errorf("%+v", a)
	}
}

func TestAnOfferOfH2CIsLeftAlone(t *testing.T) {
	f := newFixture(t)
	resp, _ := f.do("POST", "/v1/chat/completions", plainChat, "Connection", "Upgrade, HTTP2-Settings", "Upgrade", "h2c", "Http2-Settings", "AAMAAABkAARAAAAAAAIAAAAA")
	if resp.StatusCode != 200 || f.runner.all()[0].header("Http2-Settings") != nil || f.runner.all()[0].header("Upgrade") != nil {
		t.Errorf("%d %v", resp.StatusCode, f.runner.all()[0].Header)
	}
}

func TestAbsoluteFormOfOurOwnAddress(t *testing.T) {
	f := newFixture(t)
	status, _ := f.rawStatus("GET " + f.server.URL + "/v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + goodKey + "\r\n\r\n")
	if status != 200 {
		t.Errorf("%d", status)
	}
}

// Contract: T3
func TestMoreHeadersThanTheWireCarries(t *testing.T) {
	f := newFixture(t, func(c *Config) { c.Limits.Header = 256 << 10 })
	resp, body := f.do("POST", "/v1/chat/completions", plainChat, "X-A", strings.Repeat("a", wire.MaxHeaders))
	f.wantError(resp, body, 431, "headers_too_large")
}

// Contract: O2 Z3
func TestLabelsAreClosed(t *testing.T) {
	f := newFixture(t)
	for i := range 50 {
		f.do("GET", fmt.Sprintf("/path%d", i), "")
		f.do("GET", fmt.Sprintf("/v1/models/m%d", i), "")
		f.do("POST", "/v1/chat/completions", fmt.Sprintf(`{"model":"m%d"}`, i), "X-Request-Id", fmt.Sprint("id", i))
	}
	f.logged(150)
	n, err := testutil.GatherAndCount(f.reg, "iop_edge_http_requests_total")
	if err != nil || n != 3 {
		t.Errorf("%d series, %v", n, err)
	}
	problems, err := testutil.GatherAndLint(f.reg)
	if err != nil || len(problems) > 0 {
		t.Errorf("%v %v", problems, err)
	}
	if strings.Contains(f.logs.String(), "/path1") || strings.Contains(f.logs.String(), "id17") {
		t.Error("what a caller chose is in the log")
	}
}

// Contract: E7 D5
func TestTheRequestLine(t *testing.T) {
	f := newFixture(t)
	resp, _ := f.chat(plainChat)
	l := f.logged(1)
	for k, want := range map[string]any{
		"msg": "edge.request", "level": "INFO", "operation": "chat_completions", "principal": "alice", "model": "tiny", "provider": "p1", "node": "n1",
		"remote": "127.0.0.1", "attempts": 1.0, "status": 200.0, "class": "ok", "bytes_in": float64(len(plainChat)), "bytes_out": 11.0, "request_id": resp.Header.Get("X-Request-Id"),
	} {
		if l[k] != want {
			t.Errorf("%s is %v, want %v", k, l[k], want)
		}
	}
	for _, k := range []string{"queue_wait", "first_byte", "duration"} {
		if _, ok := l[k].(float64); !ok {
			t.Errorf("%s is %v", k, l[k])
		}
	}
}

func TestServerHasLimits(t *testing.T) {
	s := New(Config{}, Deps{Pool: &fakePool{}, Runner: &fakeRunner{}}).Server(nil)
	if s.ReadHeaderTimeout <= 0 || s.IdleTimeout <= 0 || s.MaxHeaderBytes <= 0 || s.WriteTimeout != 0 || s.ReadTimeout != 0 {
		t.Errorf("%+v", s)
	}
}

// Contract: D4
func TestAdmin(t *testing.T) {
	reg := prometheus.NewRegistry()
	New(Config{}, Deps{Pool: &fakePool{}, Runner: &fakeRunner{}, Metrics: reg})
	var ready error
	h := AdminHandler(func() error { return nil }, func() error { return ready }, reg)
	get := func(method, path string) *httptest.ResponseRecorder {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(method, path, nil))
		return w
	}
	if w := get("GET", "/healthz"); w.Code != 200 || w.Body.String() != "ok\n" {
		t.Errorf("%d %q", w.Code, w.Body)
	}
	if w := get("GET", "/readyz"); w.Code != 200 {
		t.Errorf("%d %q", w.Code, w.Body)
	}
	ready = errors.New("no session with the broker")
	if w := get("GET", "/readyz"); w.Code != 503 || !strings.Contains(w.Body.String(), "no session") {
		t.Errorf("%d %q", w.Code, w.Body)
	}
	if w := get("GET", "/metrics"); w.Code != 200 || !strings.Contains(w.Body.String(), "iop_edge_http_requests_in_flight 0") {
		t.Errorf("%d %q", w.Code, w.Body)
	}
	if w := get("POST", "/healthz"); w.Code != 405 {
		t.Errorf("%d", w.Code)
	}
}
