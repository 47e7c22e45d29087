// Package herd tests what many Nodes cost: broker and Edge as processes of their own,
// and a crowd of real Node daemons that dial at once.
package herd

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/adminapi"
	"github.com/iop-fabric/iop/internal/ioptest"
	"github.com/iop-fabric/iop/internal/up"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// A herd of Nodes dials at once: every one of them gets ready under a generation of
// its own, and none is lost. Then, with HERD_IDLE, what broker and Edge cost while
// nothing happens.
//
// Contract: B4 R4 S2
func TestHerd(t *testing.T) {
	nodes := 50
	if n, err := strconv.Atoi(os.Getenv("HERD")); err == nil && n > 0 {
		nodes = n
	}
	idle, _ := time.ParseDuration(os.Getenv("HERD_IDLE")) // left out: not measured
	dir := t.TempDir()
	binary := filepath.Join(dir, "iop")
	run(t, "go", "build", "-o", binary, "../../cmd/iop")
	names := make([]string, nodes)
	for i := range names {
		names[i] = fmt.Sprintf("n%d", i)
	}
	fabric := filepath.Join(dir, "fabric")
	brokerAddr, edgeAddr, adminAddr := freeAddr(t), freeAddr(t), freeAddr(t)
	run(t, binary, "init", "--out", fabric, "--edge", "home", "--broker", brokerAddr, "--node", strings.Join(names, ","), "--demo")

	broker := start(t, binary, fabric, "broker-1")
	edge := start(t, binary, fabric, "edge", "IOP_EDGE_LISTEN="+edgeAddr, "IOP_EDGE_ADMIN_LISTEN="+adminAddr, "IOP_EDGE_DISCOVER_INTERVAL=1m")
	token, err := os.ReadFile(filepath.Join(fabric, "edge", "admin-token"))
	if err != nil {
		t.Fatal(err)
	}
	client := adminapi.Client{URL: "http://" + adminAddr, Token: strings.TrimSpace(string(token))}
	await(t, client, func(s adminapi.Snapshot) bool { return len(s.Nodes) == nodes })
	brokerCPU, edgeCPU := broker.cpu(t), edge.cpu(t)

	ctx, stop := context.WithCancel(context.Background())
	var daemons sync.WaitGroup
	defer func() { stop(); daemons.Wait() }()
	began := time.Now()
	for _, name := range names {
		cfg := load(t, filepath.Join(fabric, "node-"+name, "node-"+name+".yaml"))
		n, err := up.NewNode(cfg, func() []string { return cfg.Broker.URLs }, slog.New(slog.DiscardHandler), nil)
		if err != nil {
			t.Fatal(err)
		}
		daemons.Go(func() {
			if err := n.Run(ctx); err != nil {
				t.Errorf("%s: %v", cfg.Name, err)
			}
		})
	}
	s := await(t, client, func(s adminapi.Snapshot) bool { return connected(s) == nodes })
	took := time.Since(began)
	generations := map[uint64]bool{}
	for _, n := range s.Nodes {
		generations[n.Generation] = true
	}
	if len(generations) != nodes {
		t.Errorf("%d generations for %d nodes", len(generations), nodes)
	}
	t.Logf("%d nodes ready %v after the first dial; CPU of the broker %v, of the Edge %v", nodes, took.Round(time.Millisecond),
		broker.cpu(t)-brokerCPU, edge.cpu(t)-edgeCPU)
	if idle == 0 {
		return
	}
	brokerCPU, edgeCPU = broker.cpu(t), edge.cpu(t)
	select { // the measurement itself
	case <-time.After(idle):
	case <-t.Context().Done():
	}
	if s := await(t, client, func(adminapi.Snapshot) bool { return true }); connected(s) != nodes {
		t.Errorf("after %v of nothing %d of %d nodes are there", idle, connected(s), nodes)
	}
	share := func(d time.Duration) string { return fmt.Sprintf("%.2f %% of a core", 100*d.Seconds()/idle.Seconds()) }
	t.Logf("%d idle nodes: broker %s, %d MiB; Edge %s, %d MiB", nodes, share(broker.cpu(t)-brokerCPU), broker.memory(t)>>20,
		share(edge.cpu(t)-edgeCPU), edge.memory(t)>>20)
}

func connected(s adminapi.Snapshot) (n int) {
	for _, node := range s.Nodes {
		if node.Connected {
			n++
		}
	}
	return n
}

// await asks until the answer is good.
func await(t *testing.T, c adminapi.Client, ok func(adminapi.Snapshot) bool) adminapi.Snapshot {
	t.Helper()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	hang := time.After(4 * ioptest.Hang)
	for {
		s, err := c.Snapshot(t.Context())
		if err == nil && ok(s) {
			return s
		}
		select {
		case <-tick.C:
		case <-hang:
			t.Fatalf("%d nodes are ready, %v", connected(s), err)
		}
	}
}

func run(t *testing.T, name string, args ...string) {
	t.Helper()
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s %v: %v\n%s", name, args[:1], err, out)
	}
}

func load(t *testing.T, file string) configs.Node {
	t.Helper()
	f, err := configs.Load(file)
	if err != nil {
		t.Fatal(err)
	}
	return *f.Node
}

func freeAddr(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

type process struct{ cmd *exec.Cmd }

func start(t *testing.T, binary, fabric, folder string, env ...string) process {
	t.Helper()
	role, _, _ := strings.Cut(folder, "-")
	p := process{exec.Command(binary, role, "--config", filepath.Join(fabric, folder, folder+".yaml"), "--log-level", "error")}
	p.cmd.Env = append(os.Environ(), env...)
	p.cmd.Stdout, p.cmd.Stderr = io.Discard, os.Stderr
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.cmd.Process.Kill()
		p.cmd.Wait()
	})
	return p
}

// cpu is what the process has used so far: fields 14 and 15 of its stat, in ticks of
// a hundredth of a second.
func (p process) cpu(t *testing.T) time.Duration {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.cmd.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	fields := strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+2:]))
	user, err1 := strconv.Atoi(fields[11])
	system, err2 := strconv.Atoi(fields[12])
	if err1 != nil || err2 != nil {
		t.Fatal(err1, err2)
	}
	return time.Duration(user+system) * 10 * time.Millisecond
}

// memory is the process's resident set in bytes.
func (p process) memory(t *testing.T) int {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", p.cmd.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	pages, err := strconv.Atoi(strings.Fields(string(b))[1])
	if err != nil {
		t.Fatal(err)
	}
	return pages * os.Getpagesize()
}
