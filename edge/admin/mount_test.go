package admin

import (
	"crypto/sha256"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
)

// What is mounted stands behind the same guard, and takes no form of a page.
//
// Contract: D4
func TestMountedPathsAreGuarded(t *testing.T) {
	served := 0
	mount := map[string]http.Handler{"/api/v1/more/{name}": http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		served++
		Write(w, http.StatusOK, r.PathValue("name"))
	})}
	guard := Guard{Token: sha256.Sum256([]byte(token)), Host: "edge.example", Listener: "edge.admin_listen"}
	for what, h := range map[string]http.Handler{
		"beside the Edge's own": New(Config{Guard: guard, Edge: "home", Mount: mount}, &fixedState{}, time.Now),
		"alone":                 guard.Handler(mount),
	} {
		for name, c := range map[string]struct {
			change func(*http.Request)
			status int
		}{
			"POST of JSON":     {func(*http.Request) {}, 200},
			"with a charset":   {func(r *http.Request) { r.Header.Set("Content-Type", "application/json; charset=utf-8") }, 200},
			"GET":              {func(r *http.Request) { r.Method = http.MethodGet; r.Header.Del("Content-Type") }, 200},
			"DELETE":           {func(r *http.Request) { r.Method = http.MethodDelete; r.Header.Del("Content-Type") }, 200},
			"no content type":  {func(r *http.Request) { r.Header.Del("Content-Type") }, 415},
			"a form":           {func(r *http.Request) { r.Header.Set("Content-Type", "text/plain") }, 415},
			"no token":         {func(r *http.Request) { r.Header.Del("Authorization") }, 401},
			"a wrong token":    {func(r *http.Request) { r.Header.Set("Authorization", "Bearer x") }, 401},
			"another origin":   {func(r *http.Request) { r.Header.Set("Origin", "http://evil.example") }, 403},
			"another host":     {func(r *http.Request) { r.Host = "evil.example" }, 421},
			"an unknown path":  {func(r *http.Request) { r.URL.Path = "/api/v1/less" }, 404},
			"from a page of 3": {func(r *http.Request) { r.Header.Set("Sec-Fetch-Site", "cross-site") }, 403},
		} {
			r := httptest.NewRequest(http.MethodPost, "http://127.0.0.1:8401/api/v1/more/x", strings.NewReader("{}"))
			r.Header.Set("Authorization", "Bearer "+token)
			r.Header.Set("Content-Type", "application/json")
			c.change(r)
			before := served
			w := httptest.NewRecorder()
			h.ServeHTTP(w, r)
			if w.Code != c.status || (served != before) != (c.status == 200) {
				t.Errorf("%s: %s: %d %s", what, name, w.Code, w.Body)
			}
		}
	}
}

// A path that another process answers is said to be that one's, behind the same guard;
// where all is in one process nothing is in the way.
//
// Contract: D4
func TestAnotherProcessIsNamed(t *testing.T) {
	guard := func(section string) Guard {
		return Guard{Token: sha256.Sum256([]byte(token)), Listener: section + ".admin_listen"}
	}
	mount := map[string]http.Handler{}
	for _, path := range admitted {
		mount["/api/v1/"+path] = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { Write(w, http.StatusOK, "mounted") })
	}
	edge := New(Config{Guard: guard("edge"), Edge: "home"}, &fixedState{}, time.Now)
	whole := New(Config{Guard: guard("edge"), Edge: "home", Mount: mount}, &fixedState{}, time.Now)
	for name, c := range map[string]struct {
		h           http.Handler
		path, token string
		status      int
		want        string
	}{
		"a broker's nodes":    {guard("broker").Handler(mount), "snapshot", token, 404, "this is a broker, which shows no nodes: ask the Edge"},
		"a service's nodes":   {guard("service").Handler(mount), "nodes", token, 404, "this is a service"},
		"an Edge invites":     {edge, "invitations", token, 404, "ask the broker"},
		"an Edge's keys":      {edge, "keys/ca/begin", token, 404, "ask the broker"},
		"an iop up invites":   {whole, "invitations", token, 200, "mounted"},
		"an iop up is shown":  {whole, "snapshot", token, 200, "home"},
		"a wrong token":       {edge, "invitations", "x", 401, "that was given is not the one of edge.admin_token"},
		"no token in another": {guard("broker").Handler(mount), "snapshot", "", 401, "is needed"},
	} {
		r := httptest.NewRequest(http.MethodGet, "http://127.0.0.1:8401/api/v1/"+c.path, nil)
		r.Header.Set("Authorization", "Bearer "+c.token)
		w := httptest.NewRecorder()
		c.h.ServeHTTP(w, r)
		if w.Code != c.status || !strings.Contains(w.Body.String(), c.want) {
			t.Errorf("%s: %d %s", name, w.Code, w.Body)
		}
	}
}
