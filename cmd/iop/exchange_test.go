package main

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/iop-fabric/iop/internal/identity"
)

// An `iop up` exchanges its CA and its issuer while it runs, and a machine that joined
// follows; to finish before everybody has followed is refused by name. After a restart
// everything is as it was left.
//
// Contract: B1 B8 B11 G3
func TestUpExchangesItsKeys(t *testing.T) {
	x := fabric(t)
	data := x.info.DataDir
	dir := filepath.Join(t.TempDir(), "node")
	_, stop := background(t, append(x.invite(t, "gpu1"), "--dir", dir)...)
	await(t, func() bool { return x.nodes(t)["gpu1"].Connected })
	rotate := func(args ...string) string {
		t.Helper()
		return mustIOP(t, append(append([]string{"rotate"}, args...), "--data-dir", data)...)
	}
	answers := func() {
		t.Helper()
		if code, body := post(t, x.info.BaseURL+"/chat/completions", x.info.APIKey, `{"model":"far","messages":[{"role":"user","content":"hi"}]}`); code != 200 || !strings.Contains(body, "hello from afar") {
			t.Fatalf("%d %s", code, body)
		}
	}
	await(t, func() bool {
		_, body := get(t, x.info.BaseURL+"/models", x.info.APIKey)
		return strings.Contains(body, `"far"`)
	})
	for _, step := range []string{"switch", "finish"} {
		if code, _, errs := ended(t, "rotate", "ca", step, "--data-dir", data); code != exitFailed || !strings.Contains(errs, "begin one first") {
			t.Errorf("%s before it has begun: %d %s", step, code, errs)
		}
	}
	old, err := identity.LoadCA(filepath.Join(data, "pki"))
	if err != nil {
		t.Fatal(err)
	}
	rotate("ca", "begin")
	rotate("ca", "begin") // again: the same
	trust := func(file string) identity.Trust {
		t.Helper()
		got, err := identity.LoadTrust(file)
		if err != nil {
			t.Fatal(err)
		}
		return got
	}
	await(t, func() bool { return trust(filepath.Join(dir, "ca.pem")).Exchanging() })
	if code, _, errs := ended(t, "rotate", "ca", "finish", "--data-dir", data); code != exitFailed || !strings.Contains(errs, "switch first") {
		t.Errorf("finish before the switch: %d %s", code, errs)
	}
	answers()
	stop() // it is off while the switch is made
	rotate("ca", "switch")
	if out := rotate("ca", "status"); !strings.Contains(out, "node gpu1") || !strings.Contains(out, identity.RootOf(old.Certificate())) || strings.Count(out, "yes") != 1 || strings.Count(out, "no ") < 1 {
		t.Errorf("status:\n%s", out)
	}
	if code, _, errs := ended(t, "rotate", "ca", "finish", "--data-dir", data); code != exitFailed || !strings.Contains(errs, "node gpu1") {
		t.Errorf("finish while one has not followed: %d %s", code, errs)
	}
	_, stop = background(t, "node", "--config", filepath.Join(dir, "node.yaml"))
	await(t, func() bool {
		code, _, _ := ended(t, "rotate", "ca", "finish", "--data-dir", data)
		return code == 0
	})
	await(t, func() bool { return !trust(filepath.Join(dir, "ca.pem")).Exchanging() })
	for _, file := range []string{filepath.Join(dir, "ca.pem"), filepath.Join(data, "pki", "ca.pem")} {
		if got := trust(file); got.Roots()[0].Equal(old.Certificate()) {
			t.Errorf("%s: the old root is there still", file)
		}
	}
	await(t, func() bool { n := x.nodes(t); return n["gpu1"].Connected && n["here"].Connected })
	answers()

	rotate("issuer", "begin")
	rotate("issuer", "switch")
	if _, err := os.Stat(filepath.Join(data, "keys", "issuer-old.nk")); err != nil {
		t.Error(err)
	}
	stop()
	_, stop = background(t, "node", "--config", filepath.Join(dir, "node.yaml"))
	await(t, func() bool { return x.nodes(t)["gpu1"].Connected })
	if out := rotate("issuer", "status"); !strings.Contains(out, "until it is restarted") {
		t.Errorf("status:\n%s", out)
	}
	rotate("issuer", "finish")
	stop()
	background(t, "node", "--config", filepath.Join(dir, "node.yaml"))
	await(t, func() bool { return x.nodes(t)["gpu1"].Connected })
	for _, bad := range [][]string{{"rotate", "ca"}, {"rotate", "ca", "back"}, {"rotate", "issuer", "begin", "now"}, {"rotate", "node", "n1", "--force", "--out", dir}} {
		if code, _, errs := ended(t, bad...); code != exitUsage {
			t.Errorf("%v: %d %s", bad, code, errs)
		}
	}
}

// While a long answer runs, an `iop up` whose CA is exchanged answers others, and cuts
// nothing.
//
// Contract: B8 D7
func TestUpExchangesItsCABesideALongAnswer(t *testing.T) {
	mux := http.NewServeMux()
	release := make(chan struct{})
	provider := newProvider(t, mux)
	mux.HandleFunc("/v1/models", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{"data":[{"id":"m"}]}`) })
	mux.HandleFunc("/v1/chat/completions", func(w http.ResponseWriter, r *http.Request) {
		if body, _ := io.ReadAll(r.Body); !strings.Contains(string(body), `"stream":true`) {
			w.Header().Set("Content-Type", "application/json")
			fmt.Fprint(w, `{"choices":[{"message":{"content":"short"}}]}`)
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		fmt.Fprint(w, "data: {\"choices\":[{\"delta\":{\"content\":\"begun\"}}]}\n\n")
		_ = http.NewResponseController(w).Flush()
		select {
		case <-release:
			fmt.Fprint(w, "data: {\"choices\":[{\"delta\":{\"content\":\"whole\"}}]}\n\ndata: [DONE]\n\n")
		case <-r.Context().Done():
		}
	})
	dir := t.TempDir()
	file := filepath.Join(dir, "iop.yaml")
	text := fmt.Sprintf("broker: {}\nedge:\n  discover_interval: 100ms\n  nodes: [{name: here, adapters: [{name: fake, type: openai_compat, base_url: %q}]}]\n", provider)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	x := start(t, "--data-dir", filepath.Join(dir, "data"), "--config", file)
	ask := func(body string) *http.Response {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, x.info.BaseURL+"/chat/completions", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+x.info.APIKey)
		req.Header.Set("Content-Type", "application/json")
		client := http.Client{Transport: &http.Transport{ResponseHeaderTimeout: 30 * time.Second, DisableKeepAlives: true}}
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		return resp
	}
	short := func() {
		t.Helper()
		resp := ask(`{"model":"m","messages":[{"role":"user","content":"hi"}]}`)
		defer resp.Body.Close()
		if b, _ := io.ReadAll(resp.Body); resp.StatusCode != 200 || !strings.Contains(string(b), "short") {
			t.Errorf("%d %s", resp.StatusCode, b)
		}
	}
	await(t, func() bool {
		_, body := get(t, x.info.BaseURL+"/models", x.info.APIKey)
		return strings.Contains(body, `"m"`)
	})
	long := ask(`{"model":"m","stream":true,"messages":[{"role":"user","content":"hi"}]}`)
	defer long.Body.Close()
	for _, step := range []string{"begin", "switch"} {
		mustIOP(t, "rotate", "ca", step, "--data-dir", x.info.DataDir)
		begun := time.Now()
		short()
		t.Logf("after %s: %s", step, time.Since(begun))
	}
	for range 20 { // the Node has looked at its files by the last
		short()
	}
	close(release)
	if b, _ := io.ReadAll(long.Body); !strings.Contains(string(b), "whole") || !strings.Contains(string(b), "[DONE]") {
		t.Errorf("the long answer: %s", b)
	}
	short()
}
