package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/iop-fabric/iop/internal/adminapi"
)

// An operator asks the running fabric without a flag beyond its folder, in words
// and in JSON; who has no token, no fabric or another program's port is told what
// is missing.
//
// Contract: D1 D4 P1
func TestStatus(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "data")
	x := start(t, "--data-dir", dir, "--demo")
	for command, want := range map[string][]string{
		"status":    {"edge local is ready", "NODE", "PROVIDER", "MODEL", "here", "here/demo/demo", "0/64"},
		"nodes":     {"NODE", "here", "ready", "iop/"},
		"providers": {"here/demo/demo", "available", "0/64"},
		"models":    {"demo", "auto", "here/demo/demo"},
	} {
		var out bytes.Buffer
		if code := iop(t.Context(), &out, command, "--data-dir", dir); code != 0 {
			t.Errorf("%s: %d %s", command, code, out.String())
		}
		for _, w := range want {
			if !strings.Contains(out.String(), w) {
				t.Errorf("%s: no %q in\n%s", command, w, out.String())
			}
		}
		out.Reset()
		if code := iop(t.Context(), &out, command, "--data-dir", dir, "--json"); code != 0 || !json.Valid(out.Bytes()) {
			t.Errorf("%s --json: %d %s", command, code, out.String())
		}
	}
	var out bytes.Buffer
	if iop(t.Context(), &out, "status", "--data-dir", dir, "--json"); !strings.Contains(out.String(), `"generation":`) {
		t.Error(out.String())
	}
	var s adminapi.Snapshot
	if err := json.Unmarshal(out.Bytes(), &s); err != nil || len(s.Nodes) != 1 || !s.Nodes[0].Connected || s.Nodes[0].Generation == 0 {
		t.Errorf("%v %+v", err, s)
	}
	// By URL, with the token in a file and in the environment.
	if code := iop(t.Context(), &out, "nodes", "--url", x.info.AdminURL, "--token-file", filepath.Join(dir, "admin-token")); code != 0 {
		t.Error(code, out.String())
	}
	token, err := os.ReadFile(filepath.Join(dir, "admin-token"))
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv(tokenVariable, strings.TrimSpace(string(token)))
	if code := iop(t.Context(), &out, "nodes", "--url", x.info.AdminURL); code != 0 {
		t.Error(code, out.String())
	}
	t.Setenv(tokenVariable, "wrong")
	refused(t, exitFailed, "is not the one of edge.admin_token", "nodes", "--url", x.info.AdminURL)
	t.Setenv(tokenVariable, "")
	refused(t, exitUsage, "no admin token", "nodes", "--url", x.info.AdminURL)
	refused(t, exitFailed, "nothing is served at this path", "nodes", "--url", x.info.BaseURL[:len(x.info.BaseURL)-len("/v1")], "--token-file", filepath.Join(dir, "admin-token"))
	// A caller's key is no operator's.
	refused(t, exitFailed, "is not the one of edge.admin_token", "nodes", "--url", x.info.AdminURL, "--token-file", filepath.Join(dir, "api-key"))
	if code, _ := get(t, x.info.AdminURL+"/api/v1/snapshot", ""); code != http.StatusUnauthorized {
		t.Errorf("without a token: %d", code)
	}
	// A token is read as the process that is asked reads it, and what is wrong with it is told.
	crlf, empty := filepath.Join(dir, "crlf"), filepath.Join(dir, "empty")
	for file, text := range map[string]string{crlf: strings.TrimSpace(string(token)) + "\r\n", empty: "\n"} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if code := iop(t.Context(), &out, "nodes", "--url", x.info.AdminURL, "--token-file", crlf); code != 0 {
		t.Error(code, out.String())
	}
	refused(t, exitFailed, "admin_token: file "+empty+" is empty", "nodes", "--url", x.info.AdminURL, "--token-file", empty)
	refused(t, exitFailed, "admin_token: open ", "nodes", "--url", x.info.AdminURL, "--token-file", filepath.Join(dir, "none"))
	x.stop()
	refused(t, exitFailed, "no iop is running on the data folder", "status", "--data-dir", dir)
	refused(t, exitFailed, "has no section edge", "status", "--config", "../../configs/samples/node.yaml")
	http.DefaultClient.CloseIdleConnections()
}

// refused runs a command that must fail with words that help.
func refused(t *testing.T, code int, words string, args ...string) {
	t.Helper()
	var out bytes.Buffer
	if got := iop(t.Context(), &out, args...); got != code || !strings.Contains(out.String(), words) {
		t.Errorf("%v: exit code %d (want %d), no %q in %s", args, got, code, words, out.String())
	}
}

// What is no snapshot of an Edge is not shown as an empty one, and a page that could
// not be written is no success.
//
// Contract: D1
func TestStatusOfNoEdgeIsNone(t *testing.T) {
	const whole = `{"edge":"home","time":"2026-01-02T03:04:05Z","ready":true}`
	var answer string
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, answer) }))
	defer server.Close()
	defer http.DefaultClient.CloseIdleConnections()
	t.Setenv(tokenVariable, "a-token")
	for _, answer = range []string{`{}`, `{"models":[]}`, `{"edge":"home"}`, `{"time":"2026-01-02T03:04:05Z"}`} {
		refused(t, exitFailed, "the answer is not what iop gives", "status", "--url", server.URL)
		refused(t, exitFailed, "the answer is not what iop gives", "nodes", "--url", server.URL, "--json")
	}
	answer = whole
	if code, out, errs := ended(t, "status", "--url", server.URL); code != 0 || !strings.Contains(out, "edge home is ready") {
		t.Error(code, out, errs)
	}
	for _, form := range [][]string{nil, {"--json"}} {
		var errs bytes.Buffer
		if code := runTo(t.Context(), full{}, &errs, append([]string{"status", "--url", server.URL}, form...)); code != exitFailed || !strings.Contains(errs.String(), errFull.Error()) {
			t.Errorf("%v: %d %q", form, code, errs.String())
		}
	}
}

// full is a device that is.
type full struct{}

var errFull = errors.New("no space left on device")

func (full) Write([]byte) (int, error) { return 0, errFull }

// A certificate that ends within 30 days has a line of its own, whoever's it is; one
// of a year has not.
//
// Contract: B8 D8
func TestExpiringCertificatesAreWarnedOf(t *testing.T) {
	now := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
	s := adminapi.Snapshot{
		Edge: "home", Time: now, Ready: true,
		Certificates: []adminapi.Certificate{{Role: "edge", Name: "home", Expires: now.Add(20 * 24 * time.Hour)}},
		Nodes: []adminapi.Node{
			{Name: "near", Connected: true, CertificateExpires: now.Add(29 * 24 * time.Hour)},
			{Name: "far", Connected: true, CertificateExpires: now.Add(31 * 24 * time.Hour)},
			{Name: "past", Connected: true, CertificateExpires: now},
			{Name: "away"},
		},
	}
	var out bytes.Buffer
	printStatus(&out, s)
	for _, want := range []string{
		"the certificate of edge home expires in 20d", "the certificate of node near expires in 29d",
		"the certificate of node past is over",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, out.String())
		}
	}
	if n := strings.Count(out.String(), "WARNING"); n != 3 {
		t.Errorf("%d warnings in\n%s", n, out.String())
	}
	out.Reset()
	printNodes(&out, s)
	for _, want := range []string{"EXPIRES", "in 31d"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, out.String())
		}
	}
}
