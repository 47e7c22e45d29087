package main

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/iop-fabric/iop/internal/adminapi"
)

// natsServer runs a nats-server of the version that is embedded, and waits until it
// listens; kill ends it.
func natsServer(t *testing.T, config, listen string) (kill func()) {
	t.Helper()
	binary := filepath.Join(filepath.Dir(config), "nats-server")
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-o", binary, "github.com/nats-io/nats-server/v2").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	cmd := exec.Command(binary, "-c", config)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	kill = func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }
	t.Cleanup(kill)
	await(t, func() bool {
		c, err := net.Dial("tcp", listen)
		if err == nil {
			c.Close()
		}
		return err == nil
	})
	return kill
}

// On nats-servers of their own all is as on brokers: the folders of iop init --stock
// run, a machine is invited, joins, serves and is revoked, and a backup is taken and
// put back.
//
// Contract: B1 B8 B9 B11 G1 D1
func TestStockServersFolders(t *testing.T) {
	dir, ip := filepath.Join(t.TempDir(), "fabric"), fmt.Sprintf("127.%d.251.1", 64+os.Getpid()%128)
	out := mustIOP(t, "init", "--out", dir, "--edge", "home", "--broker", ip, "--node", "a", "--demo", "--stock")
	if !strings.Contains(out, "nats-server -c broker-1/nats.conf") || !strings.Contains(out, "iop service --config service-1/service-1.yaml") {
		t.Errorf("init says\n%s", out)
	}
	if out := mustIOP(t, "init", "--out", dir); strings.Contains(out, "made") || strings.Contains(out, "below") {
		t.Errorf("a second init:\n%s", out)
	}
	if out := mustIOP(t, "init", "--out", dir, "--node", "b"); !strings.Contains(out, "below service.members in service-1/service-1.yaml") {
		t.Errorf("one more node:\n%s", out)
	}
	mustIOP(t, "rotate", "service", "service-1", "--out", dir)
	service := config(dir, "service-1")
	edit := func(file string, pairs ...string) { t.Helper(); replace(t, file, pairs...) }
	if text, err := os.ReadFile(service); err != nil || !strings.Contains(string(text), fmt.Sprintf(`enrolment: {edge: "home", listen: "%s:8443"`, ip)) {
		t.Errorf("the file of a service does not say where strangers reach it: %v\n%s", err, text)
	}
	edit(service, "# admin_listen: 127.0.0.1:8401", "admin_listen: "+ip+":8401", "# admin_token:", "admin_token:", "# enrolment:", "enrolment:")
	token := filepath.Join(dir, "service-1", "admin-token")
	if err := os.WriteFile(token, []byte("0123456789abcdef\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	ca, err := os.ReadFile(filepath.Join(dir, "authority", "ca.key"))
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "service-1", "ca.key"), ca, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	edit(config(dir, "edge"), "0.0.0.0:8400", "127.0.0.1:0", "127.0.0.1:8401", "127.0.0.1:0", "# invited: true", "invited: true\n  invited_adapters: [{type: demo}]")
	for _, folder := range []string{"broker-1", "service-1", "edge"} {
		mustIOP(t, "validate", config(dir, folder))
	}

	conf := filepath.Join(dir, "nats.conf")
	if err := os.WriteFile(conf, []byte(mustIOP(t, "broker", "config", "--stock", "--config", config(dir, "broker-1"))), 0o600); err != nil {
		t.Fatal(err)
	}
	kill := natsServer(t, conf, ip+":4222")
	_, stop := background(t, "service", "--config", service)
	edge, _ := background(t, "edge", "--config", config(dir, "edge"))
	nodeNamed := func(name string) (n adminapi.Node) {
		var v struct{ Nodes []adminapi.Node }
		if err := json.Unmarshal([]byte(mustIOP(t, "nodes", "--url", edge.AdminURL, "--token-file", filepath.Join(dir, "edge", "admin-token"), "--json")), &v); err != nil {
			t.Fatal(err)
		}
		for _, is := range v.Nodes {
			if is.Name == name {
				n = is
			}
		}
		return n
	}
	node := func() adminapi.Node { return nodeNamed("gpu1") }
	// Another nkey of a member: the service reads it at SIGHUP, and the Node is let in.
	var rotated struct{ Member string }
	if err := json.Unmarshal([]byte(mustIOP(t, "rotate", "node", "a", "--nkey", "--out", dir, "--json")), &rotated); err != nil {
		t.Fatal(err)
	}
	edit(service, "# who may come in\n", "# who may come in\n    "+rotated.Member+"\n")
	if self, err := os.FindProcess(os.Getpid()); err != nil {
		t.Fatal(err)
	} else if err := self.Signal(syscall.SIGHUP); err != nil { // all that runs here has it
		t.Fatal(err)
	}
	background(t, "node", "--config", config(dir, "node-a"))
	await(t, func() bool { return nodeNamed("a").Connected })
	var i adminapi.Invited
	if err := json.Unmarshal([]byte(mustIOP(t, "invite", "gpu1", "--config", service, "--json")), &i); err != nil {
		t.Fatal(err)
	}
	line := append(strings.Fields(i.Command)[1:], "--dir", filepath.Join(dir, "joined"))
	background(t, line...)
	await(t, func() bool { return node().Connected })
	before := node().Generation
	mustIOP(t, "revoke", "gpu1", "--config", service)
	began := time.Now()
	await(t, func() bool { return !node().Connected })
	t.Logf("closed within %v of the revocation", time.Since(began).Round(time.Millisecond))

	file := filepath.Join(dir, "backup")
	for name, args := range map[string][]string{"its file": {"--config", service}, "its URL": {"--url", "http://" + ip + ":8401", "--token-file", token}} {
		if h := header(t, append([]string{"backup", file}, args...)...); h.Members < 3 || h.Edges[0] != "home" || h.Generation < before {
			t.Errorf("%s: %+v", name, h)
		}
	}
	refused(t, exitFailed, "stop every one of it first", "restore", file, "--config", service)
	stop()
	refused(t, exitFailed, "holds stores already", "restore", file, "--config", service)
	refused(t, exitFailed, "has no section broker or service", "restore", file, "--config", config(dir, "node-a"))
	if out := mustIOP(t, "restore", "--generation-above", fmt.Sprint(before+1000), "--config", service); !strings.Contains(out, "It is in the server") {
		t.Errorf("restore says\n%s", out)
	}
	if h := header(t, "backup", file, "--config", service); h.Generation <= before+1000 {
		t.Errorf("generations up to %d, not above %d", h.Generation, before+1000)
	}
	kill()
	refused(t, exitFailed, "which must run, cannot be asked", "backup", file, "--config", service)
}
