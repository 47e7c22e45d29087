// Package unit has a real systemd start a Node that joins, in a container that holds
// nothing but this machine's /usr. It needs root, systemd and Docker: `make unit`.
package unit

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/iop-fabric/iop/internal/adminapi"
	"github.com/iop-fabric/iop/internal/install"
	"github.com/iop-fabric/iop/internal/up"
)

func TestMain(m *testing.M) {
	if os.Getenv("IOP_UNIT") == "" {
		fmt.Println("needs root, systemd and Docker: make unit")
		return
	}
	goleak.VerifyTestMain(m)
}

const (
	guard   = 2 * time.Minute
	systemd = "/lib/systemd/systemd"
)

// box is the container.
type box struct {
	t    *testing.T
	name string
}

func run(ctx context.Context, name string, args ...string) (string, error) {
	out, err := exec.CommandContext(ctx, name, args...).CombinedOutput()
	if err != nil {
		err = fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, out)
	}
	return string(out), err
}

func must(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := run(t.Context(), name, args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// newBox boots systemd.
func newBox(t *testing.T, binary string) *box {
	t.Helper()
	b := &box{t: t, name: fmt.Sprintf("iop-unit-%d", os.Getpid())}
	root := t.TempDir()
	for _, dir := range []string{"etc/systemd/system", "var/lib", "var/log", "run", "tmp", "proc", "sys", "dev", "root", "usr", "opt"} {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, link := range []string{"bin", "sbin", "lib", "lib64"} {
		if err := os.Symlink("usr/"+link, filepath.Join(root, link)); err != nil {
			t.Fatal(err)
		}
	}
	for file, text := range map[string]string{
		"machine-id": "", "passwd": "root:x:0:0::/root:/bin/sh\n", "group": "root:x:0:\n", "nsswitch.conf": "passwd: files systemd\ngroup: files systemd\n",
	} {
		if err := os.WriteFile(filepath.Join(root, "etc", file), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	tar := exec.CommandContext(t.Context(), "tar", "-C", root, "-c", ".")
	files, err := tar.Output()
	if err != nil {
		t.Fatal(err)
	}
	load := exec.CommandContext(t.Context(), "docker", "import", "-", b.name)
	load.Stdin = bytes.NewReader(files)
	if out, err := load.CombinedOutput(); err != nil {
		t.Fatalf("docker takes no image: %v: %s", err, out)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), guard)
		defer cancel()
		if t.Failed() {
			out, _ := run(ctx, "docker", "exec", b.name, "journalctl", "--no-pager", "-n", "60")
			t.Log(out)
		}
		run(ctx, "docker", "rm", "-f", b.name)
		run(ctx, "docker", "rmi", b.name)
	})
	if _, err := run(t.Context(), "docker", "run", "-d", "--name", b.name, "--network", "host", "--cap-add", "SYS_ADMIN",
		"--security-opt", "seccomp=unconfined", "--security-opt", "apparmor=unconfined", "--cgroupns", "host",
		"--tmpfs", "/run", "--tmpfs", "/tmp", "-v", "/sys/fs/cgroup:/sys/fs/cgroup", "-v", "/usr:/usr:ro", "-v", filepath.Dir(binary)+":/opt:ro",
		"-e", "container=docker", b.name, systemd); err != nil {
		t.Fatalf("docker boots nothing: %v", err)
	}
	if out, err := run(t.Context(), "docker", "exec", b.name, "test", "-x", "/opt/"+filepath.Base(binary)); err != nil {
		t.Fatalf("docker does not see this machine's files: %s", out)
	}
	b.await("systemd", func() bool {
		out, _ := run(t.Context(), "docker", "exec", b.name, "systemctl", "is-system-running", "--wait")
		return strings.HasPrefix(out, "running") || strings.HasPrefix(out, "degraded")
	})
	return b
}

func (b *box) exec(args ...string) string {
	b.t.Helper()
	return must(b.t, "docker", append([]string{"exec", b.name}, args...)...)
}

// await asks again and again: what is waited for is in other processes.
func (b *box) await(what string, ok func() bool) {
	b.t.Helper()
	for deadline := time.Now().Add(guard); !ok(); {
		if time.Now().After(deadline) {
			b.t.Fatalf("%s: not within %v", what, guard)
		}
	}
}

// systemd itself finds no fault with the units.
//
// Contract: D1
func TestSystemdTakesTheUnits(t *testing.T) {
	machine := install.Spec{Name: "iop-node", Node: "gpu1", Binary: "/bin/true", Config: "/var/lib/iop-node/node.yaml", Stop: 20 * time.Second, Dynamic: true}
	owned := machine
	owned.Dynamic, owned.Owner, owned.Config = false, "alice", "/home/alice/my nodes/50%/node.yaml"
	user := owned
	user.User, user.Home, user.Owner = true, "/home/alice", "501"
	for name, s := range map[string]install.Spec{"machine": machine, "owned": owned, "user": user} {
		p, err := install.Systemd(s)
		if err != nil {
			t.Fatal(err)
		}
		file := filepath.Join(t.TempDir(), "iop-node.service")
		if err := os.WriteFile(file, []byte(p.Text), 0o600); err != nil {
			t.Fatal(err)
		}
		mode := "--system"
		if s.User {
			mode = "--user"
		}
		verify := exec.CommandContext(t.Context(), "systemd-analyze", mode, "verify", file)
		verify.Env = append(os.Environ(), "XDG_RUNTIME_DIR="+t.TempDir())
		if out, err := verify.CombinedOutput(); err != nil || strings.Contains(string(out), file) {
			t.Errorf("%s: %v\n%s", name, err, out)
		}
	}
}

// A machine joins and is installed in one command; systemd gives its folder to a user
// of its own and starts it; killed, it is back; taken away, it is gone and its keys
// are left; and it can be installed again.
//
// Contract: D1 S4 Z4
func TestJoinedNodeUnderSystemd(t *testing.T) {
	dir := t.TempDir()
	binary := filepath.Join(dir, "opt", "iop")
	build := exec.CommandContext(t.Context(), "go", "build", "-o", binary, "github.com/iop-fabric/iop/cmd/iop")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	b := newBox(t, binary)
	info := startUp(t, binary, filepath.Join(dir, "data"))
	node := func() (n adminapi.Node) {
		var v struct{ Nodes []adminapi.Node }
		if err := json.Unmarshal([]byte(must(t, binary, "nodes", "--data-dir", info.DataDir, "--json")), &v); err != nil {
			t.Fatal(err)
		}
		for _, is := range v.Nodes {
			if is.Name == "box1" {
				n = is
			}
		}
		return n
	}
	var i adminapi.Invited
	if err := json.Unmarshal([]byte(must(t, binary, "invite", "box1", "--data-dir", info.DataDir, "--json")), &i); err != nil {
		t.Fatal(err)
	}
	line := strings.Fields(i.Command)
	line[0] = "/opt/iop"
	if out := b.exec(append(line, "--install")...); !strings.Contains(out, "iop-node is installed and started") {
		t.Errorf("join says\n%s", out)
	}
	b.await("the node", func() bool { return node().Connected })
	pid := func() string { return strings.TrimSpace(b.exec("systemctl", "show", "-P", "MainPID", "iop-node")) }
	status := b.exec("cat", "/proc/"+pid()+"/status")
	for _, want := range []string{"NoNewPrivs:\t1", "CapEff:\t0000000000000000", "Seccomp:\t2"} {
		if !strings.Contains(status, want) {
			t.Errorf("no %q in\n%s", want, status)
		}
	}
	if strings.Contains(status, "Uid:\t0") {
		t.Error("it runs as root")
	}
	if key := b.exec("stat", "-L", "-c", "%a %U", "/var/lib/iop-node/user.nk"); strings.TrimSpace(key) != "600 iop-node" {
		t.Errorf("the key is %s", key)
	}
	before := node().Generation
	b.exec("kill", "-9", pid())
	b.await("the node, after it was killed", func() bool { n := node(); return n.Connected && n.Generation > before })
	if out, err := run(t.Context(), "docker", "exec", b.name, "/opt/iop", "node", "install"); err != nil || !strings.Contains(out, "installed and started") {
		t.Errorf("installed once more: %v", err)
	}
	b.exec("systemctl", "reload", "iop-node")
	b.exec("/opt/iop", "node", "uninstall")
	b.await("the node's end", func() bool { return !node().Connected })
	b.exec("test", "-s", "/var/lib/iop-node/user.nk")
	if out, err := run(t.Context(), "docker", "exec", b.name, "/opt/iop", "node", "uninstall"); err == nil || !strings.Contains(out, "is not installed") {
		t.Errorf("taken away twice: %s", out)
	}
	before = node().Generation
	b.exec("/opt/iop", "node", "install")
	b.await("the node, installed again", func() bool { n := node(); return n.Connected && n.Generation > before })
}

// startUp runs iop up on this machine.
func startUp(t *testing.T, binary, data string) (info up.Info) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), binary, "up", "--json", "--data-dir", data, "--listen", "127.0.0.1:0",
		"--admin-listen", "127.0.0.1:0", "--broker-listen", "127.0.0.1:0", "--enrol-listen", "127.0.0.1:0")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Wait() }) // it was told to stop
	if err := json.NewDecoder(out).Decode(&info); err != nil {
		t.Fatal(err)
	}
	return info
}
