package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/identity"
	"github.com/iop-fabric/iop/internal/ioptest"
	"github.com/iop-fabric/iop/internal/up"
)

// ended runs a command to its end.
func ended(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, err bytes.Buffer
	code = runTo(t.Context(), &out, &err, args)
	return code, out.String(), err.String()
}

func mustIOP(t *testing.T, args ...string) string {
	t.Helper()
	code, out, errs := ended(t, args...)
	if code != 0 {
		t.Fatalf("iop %v: exit code %d\n%s%s", args, code, out, errs)
	}
	return out
}

// background runs a command until the test ends or stop is called, and returns
// what it printed when it was up.
func background(t *testing.T, args ...string) (info up.ProcessInfo, stop func() int) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	r, w := io.Pipe()
	var log ioptest.LogBuffer
	code := make(chan int, 1)
	go func() {
		code <- runTo(ctx, w, &log, append(args, "--json"))
		w.Close()
	}()
	got := -1
	var once sync.Once
	stop = func() int {
		once.Do(func() { cancel(); got = <-code })
		return got
	}
	t.Cleanup(func() { stop() })
	if err := json.NewDecoder(r).Decode(&info); err != nil {
		t.Fatalf("iop %v: %v\n%s", args, err, &log)
	}
	go io.Copy(io.Discard, r) // ends with the command
	return info, stop
}

func TestHostsUsage(t *testing.T) {
	for name, c := range map[string]struct {
		args []string
		code int
		want string
	}{
		"unknown flag":        {[]string{"edge", "--confg", "x"}, exitUsage, "unknown flag: --confg"},
		"an argument":         {[]string{"node", "x"}, exitUsage, `unexpected argument "x"`},
		"no config":           {[]string{"edge"}, exitUsage, "--config FILE"},
		"no such file":        {[]string{"broker", "--config", "none.yaml"}, exitFailed, "none.yaml"},
		"another's file":      {[]string{"edge", "--config", "../../configs/samples/node.yaml"}, exitFailed, "has no section edge"},
		"bad level":           {[]string{"node", "--config", "../../configs/samples/node.yaml", "--log-level", "loud"}, exitUsage, "debug, info, warn or error"},
		"no key":              {[]string{"node", "--config", "../../configs/samples/node.yaml"}, exitFailed, "desk.pem"},
		"no URL":              {[]string{"healthcheck"}, exitUsage, "takes one URL"},
		"nobody answers":      {[]string{"healthcheck", "http://127.0.0.1:1/readyz"}, exitFailed, "refused"},
		"edge without out":    {[]string{"init", "--edge", "home"}, exitUsage, "--edge goes with --out"},
		"both forms":          {[]string{"init", "--out", "a", "--data-dir", "b"}, exitUsage, "give one of them"},
		"broker config, none": {[]string{"broker", "config"}, exitUsage, "--config FILE"},
	} {
		code, _, errs := ended(t, c.args...)
		if code != c.code || !strings.Contains(errs, c.want) {
			t.Errorf("%s: exit code %d, want %d; %q does not say %q", name, code, c.code, errs, c.want)
		}
	}
}

// names lists a folder's files.
func names(t *testing.T, dir string) string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, e := range entries {
		out = append(out, e.Name())
	}
	return strings.Join(out, " ")
}

// contents reads every file below dir.
func contents(t *testing.T, dir string) map[string]string {
	t.Helper()
	out := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		b, err := os.ReadFile(path)
		out[path] = string(b)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// Each member's folder holds its own files and nobody else's; each configuration
// loads; a second run changes nothing, and one that adds says what else is needed.
//
// Contract: D1 D3 D6 Z4
func TestInitHosts(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "fabric")
	out := mustIOP(t, "init", "--out", dir, "--edge", "home", "--broker", "hub1.example,10.0.0.2:443,fd00::3", "--node", "desk,true", "--leaf", "attic=attic.example", "--node", "box@attic")
	for folder, want := range map[string]string{
		"":          "authority broker-1 broker-2 broker-3 edge leaf-attic lock node-box node-desk node-true",
		"broker-1":  "broker-1.yaml ca.pem callout.nk cert.key cert.pem issuer.nk service.nk system.nk",
		"edge":      "admin-token api-key ca.pem cert.key cert.pem edge.yaml user.nk",
		"node-desk": "ca.pem cert.key cert.pem curve.nk node-desk.yaml user.nk",
	} {
		if got := names(t, filepath.Join(dir, folder)); got != want {
			t.Errorf("%q holds %s\nwant %s", folder, got, want)
		}
	}
	load := func(folder string) *configs.File {
		f, err := configs.Load(filepath.Join(dir, folder, folder+".yaml"))
		if err != nil {
			t.Fatal(err)
		}
		return f
	}
	if b := load("broker-3").Broker; b.Listen != "[::]:4222" || b.LeafListen != "[::]:7422" || len(b.Members) != 5 ||
		strings.Join(b.Cluster.Routes, " ") != "tls://hub1.example:6222 tls://10.0.0.2:2443 tls://[fd00::3]:6222" {
		t.Errorf("broker-3: %+v %+v", b, b.Cluster)
	}
	if e := load("edge").Edge; strings.Join(e.Broker.URLs, " ") != "tls://hub1.example:4222 tls://10.0.0.2:443 tls://[fd00::3]:4222" || len(e.Nodes) != 3 {
		t.Errorf("edge: %+v", e)
	}
	if n := load("node-box").Node; strings.Join(n.Broker.URLs, " ") != "tls://attic.example:4222" || *n.Reconnect.MaxAttempts != 0 {
		t.Errorf("node-box: %+v", n)
	}
	if l := load("leaf-attic").Leaf; strings.Join(l.Hub, " ") != "tls://hub1.example:7422 tls://10.0.0.2:3643 tls://[fd00::3]:7422" {
		t.Errorf("leaf-attic: %+v", l)
	}
	key, err := os.ReadFile(filepath.Join(dir, "edge", "api-key"))
	if err != nil || !strings.Contains(out, "Bearer "+strings.TrimSpace(string(key))) {
		t.Errorf("no line to try in\n%s (%v)", out, err)
	}
	for path := range contents(t, dir) {
		if info, err := os.Stat(path); err != nil || (info.Mode().Perm()&0o077 != 0 && !strings.HasSuffix(path, ".pem")) {
			t.Errorf("%s: %v %v", path, info.Mode(), err)
		}
	}

	before := contents(t, dir)
	mustIOP(t, "init", "--out", dir, "--edge", "home", "--broker", "hub1.example,10.0.0.2:443,fd00::3", "--node", "desk,true", "--leaf", "attic=attic.example", "--node", "box@attic")
	if out := mustIOP(t, "init", "--out", dir); strings.Contains(out, "made") || strings.Contains(out, "below") {
		t.Errorf("nothing was asked for, and it said\n%s", out)
	}
	added := mustIOP(t, "init", "--out", dir, "--node", "late@attic", "--broker", "hub4.example")
	after := contents(t, dir)
	for path, text := range before {
		if after[path] != text {
			t.Errorf("%s was changed", path)
		}
	}
	late, err := identity.LoadNKey(filepath.Join(dir, "node-late", "user.nk"))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"made  " + filepath.Join(dir, "broker-4"), "made  " + filepath.Join(dir, "node-late"), "kept  " + filepath.Join(dir, "node-desk"),
		"below broker.members in broker-1/broker-1.yaml", "nkey: " + late.Public(), "below edge.nodes in edge/edge.yaml", `name: "late"`,
		"below broker.cluster.routes in", "tls://hub4.example:6222", "below edge.broker.urls in edge/edge.yaml",
	} {
		if !strings.Contains(added, want) {
			t.Errorf("no %q in\n%s", want, added)
		}
	}
	if n := load("node-late").Node; strings.Join(n.Broker.URLs, " ") != "tls://attic.example:4222" {
		t.Errorf("node-late: %+v", n)
	}
	if b := load("broker-4").Broker; len(b.Members) != 6 {
		t.Errorf("broker-4: %+v", b)
	}
}

func TestInitHostsRefuses(t *testing.T) {
	dir := t.TempDir()
	made := filepath.Join(dir, "made")
	mustIOP(t, "init", "--out", made, "--edge", "home", "--broker", "h1", "--node", "a")
	damaged := filepath.Join(dir, "damaged")
	mustIOP(t, "init", "--out", damaged, "--edge", "home", "--broker", "h1", "--node", "a")
	if err := os.WriteFile(filepath.Join(damaged, "node-a", "cert.key"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	fresh := filepath.Join(dir, "fresh")
	for want, args := range map[string][]string{
		"needs the name of its edge":          {fresh, "--broker", "h1"},
		"needs the hosts of its brokers":      {fresh, "--edge", "home"},
		"--edge: name":                        {fresh, "--edge", "Home", "--broker", "h1"},
		"--broker tls://h1: want a host name": {fresh, "--edge", "home", "--broker", "tls://h1"},
		"want a port from 1 to 62335":         {fresh, "--edge", "home", "--broker", "h1:65000"},
		"--broker h1: is named twice":         {fresh, "--edge", "home", "--broker", "h1,h1"},
		"--node: name":                        {fresh, "--edge", "home", "--broker", "h1", "--node", "a.b"},
		"--node a: is named twice":            {fresh, "--edge", "home", "--broker", "h1", "--node", "a,a"},
		`there is no leaf "attic"`:            {fresh, "--edge", "home", "--broker", "h1", "--node", "a@attic"},
		"--owner me: want UID:GID":            {fresh, "--edge", "home", "--broker", "h1", "--owner", "me"},
		`is of edge "home", not "away"`:       {made, "--edge", "away"},
		filepath.Join("node-a", "cert.key"):   {damaged},
		"not a directory":                     {filepath.Join(made, "edge", "api-key")},
	} {
		code, _, errs := ended(t, append([]string{"init", "--out"}, args...)...)
		if code != exitFailed || !strings.Contains(errs, want) {
			t.Errorf("%v: exit code %d, %q does not say %q", args, code, errs, want)
		}
	}
	if _, err := os.Stat(fresh); !os.IsNotExist(err) {
		t.Errorf("a refused run made something: %v", err)
	}
}

// hostsFolder is a fabric of one broker at an address of its own.
func hostsFolder(t *testing.T) (dir, ip string) {
	t.Helper()
	dir, ip = filepath.Join(t.TempDir(), "fabric"), fmt.Sprintf("127.%d.250.1", 64+os.Getpid()%128)
	mustIOP(t, "init", "--out", dir, "--edge", "home", "--broker", ip, "--node", "a,b", "--demo")
	return dir, ip
}

func config(dir, folder string) string { return filepath.Join(dir, folder, folder+".yaml") }

// The commands over the files of init, in one process each; health tells what is
// lacking; every one exits 0 when it is told to stop.
//
// Contract: Y1 S1 S4 D4 D7
func TestProcesses(t *testing.T) {
	dir, ip := hostsFolder(t)
	t.Setenv("IOP_NODE_ADMIN_LISTEN", "127.0.0.1:0")
	node, stopNode := background(t, "node", "--config", config(dir, "node-a"))
	if code, text := get(t, node.AdminURL+"/readyz", ""); code != 503 || !strings.Contains(text, "the session is") {
		t.Errorf("a node without a broker: %d %s", code, text)
	}
	if code, _, errs := ended(t, "healthcheck", node.AdminURL+"/readyz"); code != exitFailed || !strings.Contains(errs, "503") {
		t.Errorf("healthcheck: %d %s", code, errs)
	}
	if out := mustIOP(t, "healthcheck", node.AdminURL+"/healthz"); out != "ok\n" {
		t.Errorf("healthcheck: %q", out)
	}
	os.Unsetenv("IOP_NODE_ADMIN_LISTEN") // it is set back at the end; other files have no section node

	t.Setenv("IOP_BROKER_ADMIN_LISTEN", "127.0.0.1:0")
	broker, stopBroker := background(t, "broker", "--config", config(dir, "broker-1"))
	os.Unsetenv("IOP_BROKER_ADMIN_LISTEN")
	if broker.BrokerURL != "tls://"+ip+":4222" || broker.Name != "broker-1" {
		t.Errorf("%+v", broker)
	}
	if code, text := get(t, broker.AdminURL+"/readyz", ""); code != 200 {
		t.Errorf("broker: %d %s", code, text)
	}
	if code, text := get(t, broker.AdminURL+"/metrics", ""); code != 200 || !strings.Contains(text, "iop_broker_sessions") || !strings.Contains(text, "go_goroutines") {
		t.Errorf("broker: %d %s", code, text)
	}

	t.Setenv("IOP_EDGE_LISTEN", "127.0.0.1:0")
	t.Setenv("IOP_EDGE_ADMIN_LISTEN", "127.0.0.1:0")
	edge, stopEdge := background(t, "edge", "--config", config(dir, "edge"))
	os.Unsetenv("IOP_EDGE_LISTEN")
	os.Unsetenv("IOP_EDGE_ADMIN_LISTEN")
	await(t, func() bool { code, _ := get(t, node.AdminURL+"/readyz", ""); return code == 200 })
	await(t, func() bool { code, _ := get(t, edge.AdminURL+"/readyz", ""); return code == 200 })

	// A second process of the same address says so and leaves the first alone.
	if code, _, errs := ended(t, "broker", "--config", config(dir, "broker-1")); code != exitFailed || !strings.Contains(errs, ip+":4222") && !strings.Contains(errs, "store") {
		t.Errorf("a second broker: %d %s", code, errs)
	}
	t.Setenv("IOP_EDGE_LISTEN", strings.TrimSuffix(strings.TrimPrefix(edge.BaseURL, "http://"), "/v1"))
	if code, _, errs := ended(t, "edge", "--config", config(dir, "edge")); code != exitFailed || !strings.Contains(errs, "in use by another program") {
		t.Errorf("a second edge: %d %s", code, errs)
	}
	os.Unsetenv("IOP_EDGE_LISTEN")

	for name, stop := range map[string]func() int{"node": stopNode, "edge": stopEdge, "broker": stopBroker} {
		if code := stop(); code != 0 {
			t.Errorf("%s: exit code %d", name, code)
		}
	}
}

// await polls what has no event to wait for.
func await(t *testing.T, ok func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), ioptest.Hang)
	defer cancel()
	for !ok() {
		select {
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
			t.Fatal("it does not come about")
		}
	}
}

// A Node ends with 1 for what is broken here and for exhausted attempts, and for
// nothing that a remote does.
//
// Contract: S3 S4
func TestNodeExitCodes(t *testing.T) {
	dir, _ := hostsFolder(t)
	file := config(dir, "node-a")
	t.Setenv("IOP_NODE_RECONNECT_MAX_ATTEMPTS", "3")
	t.Setenv("IOP_NODE_RECONNECT_INTERVAL_SEC", "0")
	code, _, errs := ended(t, "node", "--config", file)
	if code != exitFailed || strings.Count(errs, "node.dial_failed") != 3 {
		t.Errorf("exhausted: exit code %d\n%s", code, errs)
	}
	key := filepath.Join(dir, "node-a", "cert.key")
	other, err := os.ReadFile(filepath.Join(dir, "node-b", "cert.key"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(key, other, 0o600); err != nil {
		t.Fatal(err)
	}
	if code, _, errs := ended(t, "node", "--config", file); code != exitFailed || !strings.Contains(errs, key) {
		t.Errorf("not a pair: exit code %d\n%s", code, errs)
	}
	if err := os.Remove(key); err != nil {
		t.Fatal(err)
	}
	if code, _, errs := ended(t, "node", "--config", file); code != exitFailed || !strings.Contains(errs, key) {
		t.Errorf("no key: exit code %d\n%s", code, errs)
	}
	// Another's good files are a broken configuration, not a broker's refusal.
	for _, f := range []string{"cert.key", "cert.pem"} {
		b, err := os.ReadFile(filepath.Join(dir, "node-b", f))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "node-a", f), b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if code, _, errs := ended(t, "node", "--config", file); code != exitFailed || !strings.Contains(errs, `this is node "a"`) {
		t.Errorf("another's certificate: exit code %d\n%s", code, errs)
	}
}

// A host name that does not resolve yet, an address that nobody answers at and
// one of IPv6 are failed attempts; the Node stays up and says what it cannot reach.
//
// Contract: S1 S4 S3
func TestNodeWaitsForItsBroker(t *testing.T) {
	l, err := net.Listen("tcp", "[::1]:0")
	if err != nil {
		t.Fatal(err)
	}
	port := l.Addr().(*net.TCPAddr).Port
	l.Close()
	for _, url := range []string{"tls://nowhere.invalid:4222", "tls://127.0.0.1:1", fmt.Sprintf("tls://[::1]:%d", port)} {
		dir, ip := hostsFolder(t)
		text, err := os.ReadFile(config(dir, "node-a"))
		if err != nil {
			t.Fatal(err)
		}
		changed := strings.Replace(string(text), "tls://"+ip+":4222", url, 1)
		if err := os.WriteFile(config(dir, "node-a"), []byte(changed), 0o600); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		var log ioptest.LogBuffer
		code := make(chan int, 1)
		go func() { code <- runTo(ctx, io.Discard, &log, []string{"node", "--config", config(dir, "node-a")}) }()
		log.AwaitEvent(t, "node.dial_failed", "reason=unreachable")
		cancel()
		if got := <-code; got != 0 {
			t.Errorf("%s: exit code %d\n%s", url, got, &log)
		}
	}
}

// Contract: B1
func TestBrokerConfig(t *testing.T) {
	dir, ip := hostsFolder(t)
	for _, stock := range []bool{false, true} {
		args := []string{"broker", "config", "--config", config(dir, "broker-1")}
		if stock {
			args = append(args, "--stock")
		}
		out := mustIOP(t, args...)
		if !strings.Contains(out, "server_name: \"broker-1\"") || !strings.Contains(out, ip+":4222") || strings.Contains(out, "IN_PROCESS") == stock {
			t.Errorf("stock %v:\n%s", stock, out)
		}
		for _, name := range []string{"issuer.nk", "system.nk", "callout.nk", "service.nk"} {
			seed, err := os.ReadFile(filepath.Join(dir, "broker-1", name))
			if err != nil || strings.Contains(out, strings.TrimSpace(string(seed))) {
				t.Errorf("the seed of %s is printed (%v)", name, err)
			}
		}
	}
}

// A fabric may begin without a node: those that are invited, or made later.
//
// Contract: D1
func TestAFabricMayBeginWithoutNodes(t *testing.T) {
	for name, extra := range map[string][]string{"not asked for": nil, "an empty name": {"--node", ""}} {
		dir := filepath.Join(t.TempDir(), "fabric")
		out := mustIOP(t, append([]string{"init", "--out", dir, "--edge", "home", "--broker", "127.0.0.1"}, extra...)...)
		if !strings.Contains(out, "iop edge --config") || strings.Contains(out, "iop node --config") {
			t.Errorf("%s: %s", name, out)
		}
		file := filepath.Join(dir, "edge", "edge.yaml")
		f, err := configs.Load(file)
		if err != nil || len(f.Edge.Nodes) != 0 {
			t.Errorf("%s: %v", name, err)
		}
		// One that comes later is told where it goes.
		out = mustIOP(t, "init", "--out", dir, "--node", "desk")
		if !strings.Contains(out, "below edge.nodes in edge/edge.yaml") {
			t.Errorf("%s: %s", name, out)
		}
	}
}
