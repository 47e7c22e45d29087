package main

import (
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/iop-fabric/iop/broker"
)

// header reads what a backup says of itself.
func header(t *testing.T, args ...string) (h broker.Header) {
	t.Helper()
	if err := json.Unmarshal([]byte(mustIOP(t, append(args, "--json")...)), &h); err != nil {
		t.Fatal(err)
	}
	return h
}

// A backup of an `iop up` that runs, and of one that is stopped, holds no key of
// the fabric and is for its owner alone; after the store is lost it is there again,
// under higher generations.
//
// Contract: B9 G1 D1
func TestBackupRestoreUp(t *testing.T) {
	x := fabric(t)
	dir, config := x.info.DataDir, filepath.Join(filepath.Dir(x.info.DataDir), "iop.yaml")
	x.invite(t, "gpu1")
	file := filepath.Join(t.TempDir(), "backup")
	// An older one, which anybody could read, is replaced.
	if err := os.WriteFile(file, []byte("old"), 0o644); err != nil { //nolint:gosec // what the test is about
		t.Fatal(err)
	}
	running := header(t, "backup", file, "--data-dir", dir)
	if running.Members != 1 || running.Invitations != 1 || running.Generation == 0 || len(running.Edges) != 1 {
		t.Errorf("%+v", running)
	}
	if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	shown := mustIOP(t, "backup", "--show", file)
	for what, secret := range secrets(t, dir) {
		if strings.Contains(string(data), secret) || strings.Contains(shown, secret) {
			t.Errorf("it holds %s", what)
		}
	}
	_, hash, _ := strings.Cut(string(data), `"secret":"`)
	if hash, _, _ = strings.Cut(hash, `"`); len(hash) < 40 || strings.Contains(shown, hash) {
		t.Errorf("--show tells the hash %q of an invitation's secret", hash)
	}
	refused(t, exitFailed, "stop it first", "restore", file, "--data-dir", dir)
	if code := x.stop(); code != 0 {
		t.Fatalf("exit code %d", code)
	}

	stopped := header(t, "backup", filepath.Join(dir, "later"), "--data-dir", dir)
	if stopped.Members != 1 || stopped.Invitations != 1 || stopped.Generation < running.Generation {
		t.Errorf("%+v after %+v", stopped, running)
	}
	refused(t, exitFailed, "holds stores already", "restore", file, "--data-dir", dir)
	if err := os.RemoveAll(filepath.Join(dir, "store")); err != nil {
		t.Fatal(err)
	}
	if out := mustIOP(t, "restore", file, "--data-dir", dir, "--config", config, "--generation-above", "1900000000000"); !strings.Contains(out, "Start it now") {
		t.Error(out)
	}
	x = start(t, "--data-dir", dir, "--config", config, "--enrol-listen", "127.0.0.1:0")
	for name, n := range x.nodes(t) {
		if n.Generation <= 1900000000000 {
			t.Errorf("%s has generation %d", name, n.Generation)
		}
	}
	if out := mustIOP(t, "invite", "--list", "--data-dir", dir); !strings.Contains(out, "gpu1") || !strings.Contains(out, "open") {
		t.Errorf("invitations:\n%s", out)
	}
	http.DefaultClient.CloseIdleConnections()
}

// secrets are what is in the folder and must not leave it.
func secrets(t *testing.T, dir string) map[string]string {
	t.Helper()
	out := map[string]string{}
	for _, pattern := range []string{"keys/*", "pki/*.key", "api-key", "admin-token"} {
		files, err := filepath.Glob(filepath.Join(dir, pattern))
		if err != nil || len(files) == 0 {
			t.Fatalf("%s: %v, %v", pattern, files, err)
		}
		for _, file := range files {
			b, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			text := strings.TrimSpace(string(b))
			if _, rest, ok := strings.Cut(text, "\n"); ok { // PEM: its first line is everybody's
				text, _, _ = strings.Cut(rest, "\n")
			}
			out[file] = text
		}
	}
	return out
}

// Of a broker of its own it is asked with the admin token, and of nobody else.
//
// Contract: B9 D1
func TestBackupOfABroker(t *testing.T) {
	dir, ip := hostsFolder(t)
	replace(t, config(dir, "broker-1"), "# admin_listen: 127.0.0.1:8401", "admin_listen: "+ip+":8401", "# admin_token:", "admin_token:")
	token := filepath.Join(dir, "broker-1", "admin-token")
	if err := os.WriteFile(token, []byte("0123456789abcdef\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, stop := background(t, "broker", "--config", config(dir, "broker-1"))
	file := filepath.Join(dir, "backup")
	url := "http://" + ip + ":8401"
	for name, args := range map[string][]string{
		"its file": {"--config", config(dir, "broker-1")},
		"its URL":  {"--url", url, "--token-file", token},
	} {
		if h := header(t, append([]string{"backup", file}, args...)...); h.Members == 0 || h.Edges[0] != "home" {
			t.Errorf("%s: %+v", name, h)
		}
	}
	mustIOP(t, "revoke", "a", "--config", config(dir, "broker-1"))
	header(t, "backup", file, "--config", config(dir, "broker-1"))
	says(t, mustIOP(t, "backup", "--show", file), []string{"home.node.a (revoked)\n", "home.node.b\n"})
	says(t, mustIOP(t, "backup", "--show", "--json", file), []string{`{"name":"home.node.a","revoked":true}`, `{"name":"home.node.b","revoked":false}`})
	for _, wrong := range []string{"", "wrong"} {
		if code, body := get(t, url+"/api/v1/backup", wrong); code != 401 || strings.Contains(body, "iop_backup") {
			t.Errorf("with token %q: %d", wrong, code)
		}
	}
	stop()
	if h := header(t, "backup", file, "--config", config(dir, "broker-1")); h.Members == 0 {
		t.Errorf("stopped: %+v", h)
	}
	// Cut short, it is neither shown nor restored.
	data, err := os.ReadFile(file)
	if err == nil {
		err = os.WriteFile(file, data[:len(data)-20], 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	refused(t, exitFailed, "cut short or altered", "backup", "--show", file)
	refused(t, exitFailed, "cut short or altered", "restore", file, "--config", config(dir, "broker-1"))

	refused(t, exitUsage, "takes one FILE", "backup")
	refused(t, exitUsage, "--generation-above N", "restore")
	refused(t, exitFailed, "has no section broker", "backup", file, "--config", "../../configs/samples/node.yaml")
	refused(t, exitFailed, "beyond all that can have been given", "restore", "--generation-above", "18446744073709551615", "--config", config(dir, "broker-1"))
	http.DefaultClient.CloseIdleConnections()
}
