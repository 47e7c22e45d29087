package main

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/iop-fabric/iop/internal/adminapi"
	"github.com/iop-fabric/iop/internal/up"
)

// fabric is `iop up` that gives invited nodes a provider of their own.
func fabric(t *testing.T) *running {
	t.Helper()
	mux := http.NewServeMux()
	provider := newProvider(t, mux)
	mux.HandleFunc("/v1/models", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{"data":[{"id":"far"}]}`) })
	mux.HandleFunc("/v1/chat/completions", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprint(w, `{"choices":[{"message":{"content":"hello from afar"}}]}`)
	})
	dir := t.TempDir()
	file := filepath.Join(dir, "iop.yaml")
	text := fmt.Sprintf(`
broker: {}
edge:
  discover_interval: 100ms
  nodes: [{name: here, adapters: [{type: demo}]}]
  invited_adapters: [{name: fake, type: openai_compat, base_url: %q}]
`, provider)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return start(t, "--data-dir", filepath.Join(dir, "data"), "--config", file, "--enrol-listen", "127.0.0.1:0")
}

// invite returns the command line for the new machine.
func (x *running) invite(t *testing.T, name string, more ...string) []string {
	t.Helper()
	var i adminapi.Invited
	out := mustIOP(t, append([]string{"invite", name, "--data-dir", x.info.DataDir, "--json"}, more...)...)
	if err := json.Unmarshal([]byte(out), &i); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if !strings.HasPrefix(i.Command, "iop join 127.0.0.1:") || i.Warning == "" {
		t.Fatalf("%+v", i)
	}
	return strings.Fields(i.Command)[1:]
}

func (x *running) nodes(t *testing.T) map[string]adminapi.Node {
	t.Helper()
	var v struct{ Nodes []adminapi.Node }
	if err := json.Unmarshal([]byte(mustIOP(t, "nodes", "--data-dir", x.info.DataDir, "--json")), &v); err != nil {
		t.Fatal(err)
	}
	out := map[string]adminapi.Node{}
	for _, n := range v.Nodes {
		out[n.Name] = n
	}
	return out
}

// A machine is invited, joins with the one line from an empty folder, answers a
// caller, is restarted by the same line, and is revoked.
//
// Contract: B11 B8 B9 D1 Y1 P1 Z4
func TestInviteJoinRevoke(t *testing.T) {
	x := fabric(t)
	line := x.invite(t, "gpu1")
	dir := filepath.Join(t.TempDir(), "node")
	line = append(line, "--dir", dir)
	node, stop := background(t, line...)
	if node.Name != "gpu1" || node.Role != "node" {
		t.Fatalf("%+v", node)
	}
	await(t, func() bool {
		_, body := get(t, x.info.BaseURL+"/models", x.info.APIKey)
		return strings.Contains(body, `"far"`)
	})
	if out := mustIOP(t, "models", "--data-dir", x.info.DataDir); !strings.Contains(out, "gpu1/fake/far") {
		t.Errorf("iop models does not say who serves it:\n%s", out)
	}
	if code, body := post(t, x.info.BaseURL+"/chat/completions", x.info.APIKey, `{"model":"far","messages":[{"role":"user","content":"hi"}]}`); code != 200 || !strings.Contains(body, "hello from afar") {
		t.Fatalf("%d %s", code, body)
	}
	for _, file := range []string{"cert.key", "user.nk", "curve.nk"} {
		if st, err := os.Stat(filepath.Join(dir, file)); err != nil || st.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v %v", file, st, err)
		}
	}
	// Nobody else uses the line.
	if code, _, errs := ended(t, append(line[:3:3], "--dir", filepath.Join(t.TempDir(), "thief"))...); code != exitFailed || !strings.Contains(errs, "not good") {
		t.Errorf("used twice: %d %s", code, errs)
	}
	// The same line, and none at all, start what has joined; another does not.
	if code := stop(); code != 0 {
		t.Errorf("exit code %d", code)
	}
	for _, again := range [][]string{line, {"join", "--dir", dir}} {
		_, stop := background(t, again...)
		await(t, func() bool { return x.nodes(t)["gpu1"].Connected })
		stop()
	}
	if code, _, errs := ended(t, append(x.invite(t, "gpu2"), "--dir", dir)...); code != exitFailed || !strings.Contains(errs, "joined already") {
		t.Errorf("another line on the folder: %d %s", code, errs)
	}
	background(t, "node", "--config", filepath.Join(dir, "node.yaml"))
	await(t, func() bool { return x.nodes(t)["gpu1"].Connected })
	before := time.Now()
	mustIOP(t, "revoke", "gpu1", "--data-dir", x.info.DataDir)
	await(t, func() bool { return !x.nodes(t)["gpu1"].Connected })
	if d := time.Since(before); d > time.Second+500*time.Millisecond { // the second of B8, and two commands
		t.Errorf("closed after %v", d)
	}
	await(t, func() bool { _, listed := x.nodes(t)["gpu1"]; return !listed })
}

// Contract: B11 D1
func TestInvitations(t *testing.T) {
	x := fabric(t)
	data := []string{"--data-dir", x.info.DataDir}
	with := func(args ...string) []string { return append(args, data...) }
	line := x.invite(t, "gpu1")
	x.invite(t, "gpu2", "--expires", "1h")
	out := mustIOP(t, with("invite", "--list")...)
	if !strings.Contains(out, "gpu1  open") || !strings.Contains(out, "in 59m") {
		t.Errorf("the list:\n%s", out)
	}
	var i adminapi.Invited
	far := mustIOP(t, with("invite", "gpu4", "--json", "--broker-url", "tls://attic.example:4222", "--broker-url", "tls://attic.example:4223")...)
	if err := json.Unmarshal([]byte(far), &i); err != nil || len(i.BrokerURLs) != 2 || i.BrokerURLs[1] != "tls://attic.example:4223" || i.Warning != "" {
		t.Errorf("%v: %s", err, far)
	}
	mustIOP(t, with("invite", "--cancel", "gpu1")...)
	if code, _, errs := ended(t, append(line, "--dir", t.TempDir())...); code != exitFailed || !strings.Contains(errs, "not good") {
		t.Errorf("a withdrawn line: %d %s", code, errs)
	}
	for name, c := range map[string]struct {
		args []string
		code int
		want string
	}{
		"cancelled twice":     {with("invite", "--cancel", "gpu1"), exitFailed, "no invitation of that name is open"},
		"our own node":        {with("invite", "here"), exitFailed, "registered already"},
		"a bad name":          {with("invite", "GPU 1"), exitUsage, `"GPU 1"`},
		"no name":             {with("invite"), exitUsage, "takes one NAME"},
		"too short":           {with("invite", "gpu3", "--expires", "1s"), exitFailed, "one minute to 30 days"},
		"too long":            {with("invite", "gpu3", "--expires", "1000h"), exitFailed, "one minute to 30 days"},
		"two in one":          {with("invite", "--list", "--cancel", "gpu1"), exitUsage, "give one of them"},
		"two to dial":         {with("invite", "gpu3", "--leaf", "attic", "--broker-url", "tls://h:1"), exitUsage, "give one of them"},
		"not to be dialled":   {with("invite", "gpu3", "--broker-url", "nats://h:1"), exitUsage, "want tls://host:port"},
		"an unknown leaf":     {with("invite", "gpu3", "--leaf", "attic"), exitFailed, "attic: broker.enrolment.leaves names no such leaf: it names none"},
		"join, not a URL":     {[]string{"join", line[1], line[2], "--dir", t.TempDir(), "--broker-url", "h:1"}, exitFailed, "want tls://host:port"},
		"revoked, unknown":    {with("revoke", "nobody"), exitFailed, "no such member"},
		"revoked, no role":    {with("revoke", "here", "--role", "king"), exitFailed, "want the role node, edge or leaf"},
		"nobody runs":         {[]string{"invite", "gpu1", "--data-dir", t.TempDir()}, exitFailed, "no iop is running"},
		"join, no token":      {[]string{"join", "127.0.0.1:8443"}, exitUsage, "takes HOST:PORT and TOKEN"},
		"join, nothing there": {[]string{"join", "--dir", t.TempDir()}, exitFailed, "holds no machine that has joined"},
		"join, cut line":      {[]string{"join", line[1], line[2][:len(line[2])-3], "--dir", t.TempDir()}, exitFailed, "cut short"},
		"join, mistyped":      {[]string{"join", line[1], strings.Replace(line[2], ".gpu1.", ".gpu9.", 1), "--dir", t.TempDir()}, exitFailed, "mistyped"},
		"join, data folder":   {[]string{"join", line[1], line[2], "--dir", x.info.DataDir}, exitFailed, "another iop"},
	} {
		if code, out, errs := ended(t, c.args...); code != c.code || !strings.Contains(errs, c.want) {
			t.Errorf("%s: exit code %d, want %d; %q does not say %q (%s)", name, code, c.code, errs, c.want, out)
		}
	}
}

// replace changes a file, which must hold something of it.
func replace(t *testing.T, file string, pairs ...string) {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	text := strings.NewReplacer(pairs...).Replace(string(b))
	if text == string(b) {
		t.Fatalf("%s holds nothing of %q:\n%s", file, pairs, text)
	}
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func newProvider(t *testing.T, h http.Handler) string {
	t.Helper()
	s := httptest.NewServer(h)
	t.Cleanup(s.Close)
	return s.URL + "/v1"
}

func post(t *testing.T, url, key, body string) (int, string) {
	t.Helper()
	return send(t, http.MethodPost, url, key, body)
}

// On a fabric of separate hosts one broker invites, once its file says so; the Edge
// takes in who joined only where its own says so.
//
// Contract: B11 D1
func TestInviteFromABroker(t *testing.T) {
	dir, ip := hostsFolder(t)
	edit := func(folder string, pairs ...string) { t.Helper(); replace(t, config(dir, folder), pairs...) }
	admin := ip + ":8401"
	edit("broker-1", "# admin_listen: 127.0.0.1:8401", "admin_listen: "+admin, "# admin_token:", "admin_token:", "# enrolment:", "enrolment:")
	b, err := os.ReadFile(filepath.Join(dir, "authority", "ca.key"))
	if err != nil {
		t.Fatal(err)
	}
	for file, text := range map[string]string{"ca.key": string(b), "admin-token": "0123456789abcdef\n"} {
		if err := os.WriteFile(filepath.Join(dir, "broker-1", file), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	edit("edge", "0.0.0.0:8400", "127.0.0.1:0", "127.0.0.1:8401", "127.0.0.1:0", "models: auto", "invited_adapters: [{type: demo}]\n  models: auto")
	background(t, "broker", "--config", config(dir, "broker-1"))
	var i adminapi.Invited
	if err := json.Unmarshal([]byte(mustIOP(t, "invite", "gpu1", "--config", config(dir, "broker-1"), "--json")), &i); err != nil {
		t.Fatal(err)
	}
	joined := filepath.Join(t.TempDir(), "gpu1")
	line := append(strings.Fields(i.Command)[1:], "--dir", joined, "--no-start")
	if line[1] != ip+":8443" || i.BrokerURLs[0] != "tls://"+ip+":4222" {
		t.Fatalf("%+v", i)
	}
	if out := mustIOP(t, line...); !strings.Contains(out, "iop node --config "+filepath.Join(joined, "node.yaml")) {
		t.Errorf("no line for a service manager:\n%s", out)
	}
	replace(t, filepath.Join(joined, "node.yaml"), "interval_sec: 5", "interval_sec: 1") // for the test's sake
	background(t, "join", "--dir", joined)

	node := func(edge up.ProcessInfo) adminapi.Node {
		var v struct{ Nodes []adminapi.Node }
		out := mustIOP(t, "nodes", "--url", edge.AdminURL, "--token-file", filepath.Join(dir, "edge", "admin-token"), "--json")
		if err := json.Unmarshal([]byte(out), &v); err != nil {
			t.Fatal(err)
		}
		for _, n := range v.Nodes {
			if n.Name == "gpu1" {
				return n
			}
		}
		return adminapi.Node{}
	}
	edge, stop := background(t, "edge", "--config", config(dir, "edge"))
	await(t, func() bool { return node(edge).State == "admitted" })
	if n := node(edge); n.Connected || n.Configured {
		t.Errorf("taken in though the Edge's file says nothing: %+v", n)
	}
	stop()
	edit("edge", "# invited: true", "invited: true")
	edge, _ = background(t, "edge", "--config", config(dir, "edge"))
	await(t, func() bool { return node(edge).Connected })

	// A node of the configuration is revoked there too; without the token nothing is.
	mustIOP(t, "revoke", "a", "--config", config(dir, "broker-1"))
	if code, _ := get(t, "http://"+admin+"/api/v1/invitations", "wrong"); code != 401 {
		t.Errorf("with a wrong token: %d", code)
	}
	if code, _ := get(t, "http://"+admin+"/readyz", ""); code != 200 {
		t.Errorf("/readyz: %d", code)
	}
}

// Where other machines reach a fabric by another address, its certificate is made
// good for it, also in a folder that was made before.
//
// Contract: B11 Y1
func TestJoinAtAnotherAddress(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "data")
	if code := start(t, "--data-dir", dir).stop(); code != 0 {
		t.Fatalf("exit code %d", code)
	}
	host := fmt.Sprintf("127.%d.250.2", 64+os.Getpid()%128)
	x := start(t, "--data-dir", dir, "--broker-listen", "0.0.0.0:0", "--enrol-listen", "0.0.0.0:0", "--enrol-url", host)
	var i adminapi.Invited
	if err := json.Unmarshal([]byte(mustIOP(t, "invite", "gpu1", "--data-dir", dir, "--json")), &i); err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(i.Command, "iop join "+host+":") || !strings.HasPrefix(i.BrokerURLs[0], "tls://"+host+":") {
		t.Fatalf("%+v", i)
	}
	background(t, append(strings.Fields(i.Command)[1:], "--dir", filepath.Join(t.TempDir(), "n"))...)
	await(t, func() bool { return x.nodes(t)["gpu1"].Connected })
}

// A restart of the fabric loses neither who has joined nor who is invited.
//
// Contract: B11 B9 R3
func TestJoinedSurvivesARestart(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "data")
	free := func() string {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		return l.Addr().String()
	}
	args := []string{"--data-dir", dir, "--demo", "--broker-listen", free(), "--enrol-listen", free()}
	x := start(t, args...)
	first, second := filepath.Join(t.TempDir(), "gpu1"), filepath.Join(t.TempDir(), "gpu2")
	mustIOP(t, append(x.invite(t, "gpu1"), "--dir", first, "--no-start")...)
	replace(t, filepath.Join(first, "node.yaml"), "interval_sec: 5", "interval_sec: 1")
	background(t, "join", "--dir", first)
	await(t, func() bool { return x.nodes(t)["gpu1"].Connected })
	before := x.nodes(t)["gpu1"].Generation
	later := x.invite(t, "gpu2")
	x.stop()
	x = start(t, args...)
	await(t, func() bool { n := x.nodes(t)["gpu1"]; return n.Connected && n.Generation > before })
	background(t, append(later, "--dir", second)...)
	await(t, func() bool { return x.nodes(t)["gpu2"].Connected })
}

// What would be installed is shown for every machine, and nothing is done where it
// cannot be: the line is not used up then.
//
// Contract: D1
func TestNodeInstallSaysWhatItWould(t *testing.T) {
	dir, _ := hostsFolder(t)
	mustIOP(t, "init", "--out", dir, "--node", "gpu7")
	file := config(dir, "node-gpu7")
	for manager, want := range map[string]string{"systemd": "ExecStart=", "launchd": "<key>ProgramArguments</key>", "windows": "sc.exe create iop-node"} {
		out := mustIOP(t, "node", "install", "--dry-run", "--config", file, "--manager", manager)
		if !strings.Contains(out, want) || !strings.Contains(out, file) {
			t.Errorf("%s:\n%s", manager, out)
		}
		if out := mustIOP(t, "node", "uninstall", "--dry-run", "--manager", manager, "--name", "second"); !strings.Contains(out, "second") {
			t.Errorf("%s:\n%s", manager, out)
		}
	}
	if out := mustIOP(t, "node", "install", "--dry-run", "--config", file); !strings.Contains(out, "Without --dry-run it would be refused: ") {
		t.Errorf("a test's binary is in a temporary folder:\n%s", out)
	}
	empty := t.TempDir()
	for name, c := range map[string]struct {
		args []string
		code int
		want string
	}{
		"a binary that will go": {[]string{"node", "install", "--config", file}, exitFailed, "is in a temporary folder"},
		"before it joins":       {[]string{"join", "127.0.0.1:8443", "iop1.x", "--install", "--dir", empty}, exitFailed, "is in a temporary folder"},
		"two folders":           {[]string{"node", "install", "--dir", dir, "--config", file}, exitUsage, "[config dir]"},
		"nothing has joined":    {[]string{"node", "install", "--dir", empty}, exitFailed, "holds no machine that has joined"},
		"no node":               {[]string{"node", "install", "--dry-run", "--config", config(dir, "edge")}, exitFailed, "has no section node"},
		"no such manager":       {[]string{"node", "install", "--dry-run", "--config", file, "--manager", "upstart"}, exitUsage, "want systemd, launchd or windows"},
		"another machine's":     {[]string{"node", "uninstall", "--manager", "windows"}, exitUsage, "goes with --dry-run alone"},
		"a name of no unit":     {[]string{"node", "install", "--dry-run", "--config", file, "--name", "a/b"}, exitFailed, `unit name "a/b"`},
		"never installed":       {[]string{"node", "uninstall", "--name", "iop-never"}, exitFailed, "is not installed"},
	} {
		if code, out, errs := ended(t, c.args...); code != c.code || !strings.Contains(errs, c.want) {
			t.Errorf("%s: exit code %d, want %d; %q does not say %q (%s)", name, code, c.code, errs, c.want, out)
		}
	}
}
