package up_test

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/ioptest"
	"github.com/iop-fabric/iop/internal/up"
)

// At SIGHUP a Node and a leaf of their own say which settings need a restart, and what is
// wrong with a file that is not good; nothing where nothing differs.
//
// Contract: B1 B8
func TestSettingsThatNeedARestart(t *testing.T) {
	out := filepath.Join(t.TempDir(), "fabric")
	if _, err := up.MakeHosts(up.Hosts{Out: out, Edge: "home", Brokers: []string{"hub.example"}, Leaves: []string{"attic=attic.example"}, Nodes: []string{"n1"}}); err != nil {
		t.Fatal(err)
	}
	for role, c := range map[string]struct {
		folder, setting string
		change          func(*configs.File)
		without         func(*configs.File)
		run             func(ctx context.Context, f *configs.File, again up.Again, log *slog.Logger, hangup <-chan os.Signal) error
	}{
		"node": {
			"node-n1", "settings=[stop_grace]", func(f *configs.File) { f.Node.StopGrace *= 2 }, func(f *configs.File) { f.Node = nil },
			func(ctx context.Context, f *configs.File, again up.Again, log *slog.Logger, hangup <-chan os.Signal) error {
				return up.RunNode(ctx, *f.Node, again, log, hangup, func(up.ProcessInfo) {})
			},
		},
		"leaf": {
			"leaf-attic", "settings=[issuer]", func(f *configs.File) { f.Leaf.Issuer = "another" }, func(f *configs.File) { f.Leaf = nil },
			func(ctx context.Context, f *configs.File, again up.Again, log *slog.Logger, hangup <-chan os.Signal) error {
				return up.RunLeaf(ctx, *f.Leaf, again, log, hangup, func(up.ProcessInfo) {})
			},
		},
	} {
		t.Run(role, func(t *testing.T) {
			load := func() *configs.File {
				f, err := configs.Load(filepath.Join(out, c.folder, c.folder+".yaml"))
				if err != nil {
					t.Fatal(err)
				}
				if f.Leaf != nil {
					f.Leaf.Listen = "127.0.0.1:0"
				}
				return f
			}
			ctx, stop := context.WithCancel(t.Context())
			var log ioptest.LogBuffer
			next := make(chan func() (*configs.File, error))
			hangup := make(chan os.Signal)
			done := make(chan error, 1)
			go func() {
				done <- c.run(ctx, load(), func() (*configs.File, error) { return (<-next)() }, slog.New(slog.NewTextHandler(&log, nil)), hangup)
			}()
			hup := func(read func() (*configs.File, error)) {
				t.Helper()
				select {
				case hangup <- os.Interrupt: // whichever: the channel is what matters
				case err := <-done:
					t.Fatalf("ended: %v\n%s", err, &log)
				}
				next <- read
			}
			edited := func(change func(*configs.File)) func() (*configs.File, error) {
				f := load()
				change(f)
				return func() (*configs.File, error) { return f, nil }
			}
			hup(edited(func(*configs.File) {}))
			hup(func() (*configs.File, error) { return nil, errors.New("line 3 is no good") })
			log.AwaitEvent(t, up.EventReloadFailed, "line 3 is no good")
			hup(edited(c.without))
			log.AwaitEvent(t, up.EventReloadFailed, "no section "+role)
			if n := log.Count(up.EventNeedsRestart); n != 0 {
				t.Errorf("told %d times\n%s", n, &log)
			}
			hup(edited(c.change))
			log.AwaitEvent(t, up.EventNeedsRestart, c.setting)
			stop()
			if err := <-done; err != nil {
				t.Error(err)
			}
		})
	}
}
