package main

import (
	"context"
	"log/slog"

	"github.com/spf13/cobra"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/up"
)

func newLeaf() *cobra.Command {
	return process{
		role:  "leaf",
		short: "Run a leaf broker: a site's Nodes dial it, one link goes out",
		long: `Run a leaf broker: the Nodes of one site dial it, and it dials the hub over a single link. It admits nobody itself;
the hub does, and keeps it to its one edge. It starts, and stays up, without the hub being reachable.

SIGHUP reads its certificate and CA again, and says what else of its configuration needs a restart. SIGTERM stops it gracefully, a second one at once.`,
		has: func(f *configs.File) bool { return f.Leaf != nil },
		run: func(ctx context.Context, f *configs.File, again up.Again, log *slog.Logger, ready func(up.ProcessInfo)) error {
			hangup, stop := onHangup()
			defer stop()
			return up.RunLeaf(ctx, *f.Leaf, again, log, hangup, ready)
		},
	}.command()
}
