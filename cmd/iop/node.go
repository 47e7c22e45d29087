package main

import (
	"context"
	"log/slog"

	"github.com/spf13/cobra"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/up"
)

func newNode() *cobra.Command {
	cmd := process{
		role:  "node",
		short: "Run a Node of its own: it sits beside the model servers and dials out",
		long: `Run a Node: it dials the broker, and runs the adapters its Edge tells it to run. It starts, and stays up,
without anything remote being reachable.

It exits 0 when it was told to stop, and 1 when something of its own is broken (configuration, key, certificate) or
reconnect.max_attempts dials in a row brought no session. SIGTERM stops it gracefully: new work is refused, what runs
may take stop_grace to end. A second one stops it at once. SIGHUP makes it dial anew with the keys that its files hold
then, at a moment with nothing under way or drained, and say what else of its configuration needs a restart.`,
		has: func(f *configs.File) bool { return f.Node != nil },
		run: func(ctx context.Context, f *configs.File, again up.Again, log *slog.Logger, ready func(up.ProcessInfo)) error {
			hangup, stop := onHangup()
			defer stop()
			return up.RunNode(ctx, *f.Node, again, log, hangup, ready)
		},
	}.command()
	cmd.AddCommand(newNodeInstall(), newNodeUninstall())
	return cmd
}
