package main

import (
	"context"
	"log/slog"

	"github.com/spf13/cobra"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/up"
)

func newEdge() *cobra.Command {
	return process{
		role:  "edge",
		short: "Run an Edge of its own: HTTP in, dispatch out",
		long: `Run an Edge: it takes callers' HTTP, queues, picks a provider and streams the answer back.

It starts without its broker and waits for it; /readyz on the admin listener says what it lacks. SIGTERM stops it
gracefully: running answers may take stop_grace to end. A second one stops it at once. SIGHUP makes it read its own
certificate, the CA, its nkey and edge.issuers again; certificate and CA it reads once a minute anyway.`,
		has: func(f *configs.File) bool { return f.Edge != nil },
		run: func(ctx context.Context, f *configs.File, again up.Again, log *slog.Logger, ready func(up.ProcessInfo)) error {
			hangup, stop := onHangup()
			defer stop()
			return up.RunEdge(ctx, *f.Edge, again, log, hangup, ready)
		},
	}.command()
}
