package ioptest

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"sync"
	"syscall"

	"go.uber.org/goleak"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/up"
)

// nodeProcess marks a child that is to be a Node daemon; its value is the
// configuration.
const nodeProcess = "IOPTEST_NODE"

// IsNodeProcess reports whether this process was started by SpawnNode: TestMain
// then calls NodeProcess instead of the tests.
func IsNodeProcess() bool { return os.Getenv(nodeProcess) != "" }

// NodeProcess is the child: a Node daemon until SIGTERM.
func NodeProcess() int {
	var cfg configs.Node
	if err := json.Unmarshal([]byte(os.Getenv(nodeProcess)), &cfg); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug})).With(slog.String("process", cfg.Name))
	n, err := up.NewNode(cfg, func() []string { return cfg.Broker.URLs }, log, nil)
	if err == nil {
		err = n.Run(ctx)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// SpawnNode runs a node of Options.Nodes as a process of its own, and returns
// what kills it (SIGKILL).
func (f *Fabric) SpawnNode(name string) (kill func()) {
	f.t.Helper()
	p := f.SpawnNodeProcess(name)
	var once sync.Once
	kill = func() {
		once.Do(func() {
			p.Signal(syscall.SIGKILL) // it may be gone already
		})
	}
	f.t.Cleanup(kill)
	return kill
}

// SpawnNodeProcess is SpawnNode for tests that stop and continue it, too.
func (f *Fabric) SpawnNodeProcess(name string) *os.Process {
	f.t.Helper()
	cfg, err := json.Marshal(f.NodeConfig(name))
	must(f.t, err)
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), nodeProcess+"="+string(cfg))
	stderr, err := cmd.StderrPipe()
	must(f.t, err)
	must(f.t, cmd.Start())
	copied := make(chan struct{})
	go func() {
		defer close(copied)
		io.Copy(f.Log, stderr) // ends with the process
	}()
	f.t.Cleanup(func() {
		cmd.Process.Kill() // it may be gone already
		<-copied
		cmd.Wait() // it was killed
	})
	return cmd.Process
}

// IgnoredGoroutines are those that libraries leave behind after a stop.
func IgnoredGoroutines() []goleak.Option {
	return []goleak.Option{
		// nats-server keeps its file descriptor semaphore and its clock for the process.
		goleak.IgnoreTopFunction("github.com/nats-io/nats-server/v2/server/stree.init"),
		goleak.IgnoreAnyFunction("github.com/nats-io/nats-server/v2/server/ats.Register.func1"),
	}
}
