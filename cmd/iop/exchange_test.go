package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

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
