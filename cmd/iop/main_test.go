package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/iop-fabric/iop/internal/up"
)

// hang is no measurement: only a broken command takes as long.
const hang = 30 * time.Second

// iop runs a command line; out gets what it prints to either stream.
func iop(ctx context.Context, out io.Writer, args ...string) int {
	return runTo(ctx, out, out, args)
}

// running is `iop up` in the background.
type running struct {
	info up.Info
	stop func() int
}

func start(t *testing.T, args ...string) *running {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	r, w := io.Pipe()
	var log bytes.Buffer
	code := make(chan int, 1)
	go func() {
		code <- runTo(ctx, w, &log, append([]string{
			"up", "--json", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0", "--broker-listen", "127.0.0.1:0",
		}, args...))
		w.Close()
	}()
	x := &running{}
	x.stop = func() int {
		cancel()
		go io.Copy(io.Discard, r)
		select {
		case c := <-code:
			code <- c
			return c
		case <-time.After(hang):
			t.Fatalf("iop up does not stop\n%s", log.String())
			return -1
		}
	}
	t.Cleanup(func() { x.stop() })
	if err := json.NewDecoder(r).Decode(&x.info); err != nil {
		t.Fatalf("no line of JSON: %v, exit code %d\n%s", err, x.stop(), log.String())
	}
	return x
}

func get(t *testing.T, url, key string) (int, string) {
	t.Helper()
	return send(t, http.MethodGet, url, key, "")
}

func send(t *testing.T, method, url, key, body string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	if key != "" {
		req.Header.Set("Authorization", "Bearer "+key)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	defer http.DefaultClient.CloseIdleConnections()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}

// One command, no file: keys, broker, edge, node, a model; again on the same
// folder: the same key.
//
// Contract: D2 Y1 D4
func TestUp(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "data")
	x := start(t, "--data-dir", dir, "--demo")
	if x.info.APIKey == "" || x.info.BaseURL == "" || x.info.AdminURL == "" || !strings.HasPrefix(x.info.BrokerURL, "tls://") || x.info.DataDir != dir {
		t.Fatalf("%+v", x.info)
	}
	if code, body := get(t, x.info.BaseURL+"/models", x.info.APIKey); code != 200 || !strings.Contains(body, `"demo"`) {
		t.Fatalf("%d %s", code, body)
	}
	for path, want := range map[string]int{"/healthz": 200, "/readyz": 200, "/metrics": 200} {
		if code, body := get(t, x.info.AdminURL+path, ""); code != want {
			t.Errorf("%s: %d %s", path, code, body)
		}
	}
	// Another on the same folder is refused, and says why.
	var out bytes.Buffer
	if code := iop(t.Context(), &out, "up", "--data-dir", dir, "--listen", "127.0.0.1:0"); code != exitFailed || !strings.Contains(out.String(), "another iop") {
		t.Errorf("a second process on the folder: %d %s", code, out.String())
	}
	if code := x.stop(); code != 0 {
		t.Errorf("exit code %d after a stop", code)
	}
	key := x.info.APIKey
	if x = start(t, "--data-dir", dir); x.info.APIKey != key {
		t.Error("another key after a restart")
	}
	for _, file := range []string{"api-key", "pki/ca.key", "pki/node-here.key", "keys/issuer.nk", "keys/curve.nk"} {
		st, err := os.Stat(filepath.Join(dir, file))
		if err != nil || st.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v %v", file, st.Mode(), err)
		}
	}
}

// A busy port, a damaged key, a key that others may read, a folder that is none:
// one clear error each, exit code 1, and nothing is replaced.
//
// Contract: D2 Z4 S4
func TestUpRefuses(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	busy := l.Addr().String()
	fresh := func(t *testing.T) string {
		dir := filepath.Join(t.TempDir(), "data")
		if err := up.Prepare(up.Folder(dir), up.DefaultEdge, up.DefaultNode); err != nil {
			t.Fatal(err)
		}
		return dir
	}
	spoil := func(file, content string, mode os.FileMode) func(*testing.T) []string {
		return func(t *testing.T) []string {
			dir := fresh(t)
			path := filepath.Join(dir, file)
			if err := os.WriteFile(path, []byte(content), mode); err != nil {
				t.Fatal(err)
			}
			if err := os.Chmod(path, mode); err != nil {
				t.Fatal(err)
			}
			return []string{"--data-dir", dir}
		}
	}
	for _, c := range []struct {
		name string
		args func(*testing.T) []string
		want []string
	}{
		{"callers' port busy", func(t *testing.T) []string { return []string{"--data-dir", fresh(t), "--listen", busy} }, []string{busy, "in use"}},
		{"admin port busy", func(t *testing.T) []string { return []string{"--data-dir", fresh(t), "--admin-listen", busy} }, []string{busy, "in use"}},
		{"broker port busy", func(t *testing.T) []string { return []string{"--data-dir", fresh(t), "--broker-listen", busy} }, []string{busy, "in use"}},
		{"half-written key", spoil("pki/node-here.key", "-----BEGIN EC PRIVATE KEY-----\nMHcC", 0o600), []string{"node-here.key"}},
		{"empty nkey", spoil("keys/edge.nk", "", 0o600), []string{"edge.nk", "empty"}},
		{"a key for all to read", spoil("keys/node.nk", "SUAxxxx\n", 0o644), []string{"node.nk", "chmod 600"}},
		{"an API key that is none", spoil("api-key", "\n", 0o600), []string{"api-key"}},
		{"half a CA", func(t *testing.T) []string {
			dir := fresh(t)
			if err := os.Remove(filepath.Join(dir, "pki/ca.key")); err != nil {
				t.Fatal(err)
			}
			return []string{"--data-dir", dir}
		}, []string{"ca.key", "belong together"}},
		{"a key of another certificate", func(t *testing.T) []string {
			dir := fresh(t)
			b, err := os.ReadFile(filepath.Join(dir, "pki/edge-local.key"))
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(dir, "pki/node-here.key"), b, 0o600); err != nil {
				t.Fatal(err)
			}
			return []string{"--data-dir", dir}
		}, []string{"node-here.key"}},
		{"an nkey that is gone", func(t *testing.T) []string {
			dir := fresh(t)
			if err := os.Remove(filepath.Join(dir, "keys/issuer.nk")); err != nil {
				t.Fatal(err)
			}
			return []string{"--data-dir", dir}
		}, []string{"issuer.nk", "missing"}},
		{"a folder for all to write", func(t *testing.T) []string {
			dir := fresh(t)
			if err := os.Chmod(dir, 0o777); err != nil {
				t.Fatal(err)
			}
			return []string{"--data-dir", dir}
		}, []string{"chmod 700"}},
		{"a folder that is a file", func(t *testing.T) []string {
			file := filepath.Join(t.TempDir(), "f")
			if err := os.WriteFile(file, nil, 0o600); err != nil {
				t.Fatal(err)
			}
			return []string{"--data-dir", file}
		}, []string{"data folder"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			args := append([]string{"up"}, c.args(t)...)
			for _, flag := range []string{"--listen", "--admin-listen", "--broker-listen"} {
				if !strings.Contains(strings.Join(args, " ")+" ", flag+" ") {
					args = append(args, flag, "127.0.0.1:0")
				}
			}
			ctx, cancel := context.WithTimeout(t.Context(), hang)
			defer cancel()
			var out bytes.Buffer
			code := iop(ctx, &out, args...)
			if code != exitFailed || ctx.Err() != nil {
				t.Fatalf("exit code %d: %s", code, out.String())
			}
			for _, want := range c.want {
				if !strings.Contains(out.String(), want) {
					t.Errorf("it does not say %q: %s", want, out.String())
				}
			}
		})
	}
}

// What init writes is valid and is what up takes; a second init changes nothing.
//
// Contract: D1 D3
func TestInitValidateUp(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "data")
	var out bytes.Buffer
	if code := iop(t.Context(), &out, "init", "--data-dir", dir); code != 0 {
		t.Fatal(out.String())
	}
	file := filepath.Join(dir, "iop.yaml")
	before, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	out.Reset()
	if code := iop(t.Context(), &out, "validate", file); code != 0 || !strings.Contains(out.String(), "valid") {
		t.Fatalf("%d %s", code, out.String())
	}
	out.Reset()
	if code := iop(t.Context(), &out, "init", "--data-dir", dir); code != 0 || !strings.Contains(out.String(), "left alone") {
		t.Fatalf("%d %s", code, out.String())
	}
	if after, err := os.ReadFile(file); err != nil || !bytes.Equal(before, after) {
		t.Error("a second init changed the file")
	}
	x := start(t, "--data-dir", dir, "--config", file)
	if len(x.info.Models) == 0 {
		t.Errorf("%+v", x.info)
	}
}

// Contract: D1 D3
func TestUsageAndFaults(t *testing.T) {
	bad := filepath.Join(t.TempDir(), "bad.yaml")
	if err := os.WriteFile(bad, []byte("broker: {}\nedge:\n  name: home\n  lisen: 127.0.0.1:1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"version"}, 0, "iop "},
		{[]string{"--help"}, 0, "iop up"},
		{[]string{"up", "--no-such-flag"}, exitUsage, "no-such-flag"},
		{[]string{"up", "extra"}, exitUsage, `"extra"`},
		{[]string{"validate"}, exitUsage, "one file"},
		{[]string{"nonsense"}, exitUsage, "nonsense"},
		{[]string{"validate", bad}, exitFailed, fmt.Sprintf(`%s:4: edge.lisen: unknown key; did you mean "listen"?`, bad)},
		{[]string{"validate", "/no/such/file"}, exitFailed, "/no/such/file"},
		{[]string{"up", "--config", bad, "--data-dir", t.TempDir()}, exitFailed, `did you mean "listen"?`},
		{[]string{"up", "--listen", "8400"}, exitUsage, `--listen "8400": want host:port`},
		{[]string{"--version"}, 0, "iop version"},
		{[]string{"up", "--log-level", "loud", "--data-dir", t.TempDir()}, exitUsage, "loud"},
	} {
		var out bytes.Buffer
		if code := iop(t.Context(), &out, c.args...); code != c.code || !strings.Contains(out.String(), c.want) {
			t.Errorf("%v: exit code %d, want %d with %q:\n%s", c.args, code, c.code, c.want, out.String())
		}
	}
}
