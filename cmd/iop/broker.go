package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/iop-fabric/iop/broker"
	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/up"
)

func newBroker() *cobra.Command {
	p := process{
		role:  "broker",
		short: "Run a broker of its own, alone or in a cluster",
		long: `Run a broker: an embedded NATS server with the session service beside it. Nodes and Edges dial it; it admits
them by certificate and nkey, and numbers their sessions.

SIGHUP reads its certificate, the CA, the issuer's key and broker.members again; connections that stand are not touched.
SIGTERM stops it gracefully, a second one at once.`,
		has: func(f *configs.File) bool { return f.Broker != nil },
		run: func(ctx context.Context, f *configs.File, again up.Again, log *slog.Logger, ready func(up.ProcessInfo)) error {
			hangup, stop := onHangup()
			defer stop()
			return up.RunBroker(ctx, *f.Broker, again, log, hangup, ready)
		},
	}
	cmd := p.command()
	cmd.AddCommand(newBrokerConfig(p))
	return cmd
}

// newService is for who runs a nats-server of their own.
func newService() *cobra.Command {
	return process{
		role:  "service",
		short: "Run the session service beside a nats-server of its own",
		long: `Run the session service beside a nats-server that runs with what "iop broker config --stock" prints. It admits
Nodes and Edges there, and numbers their sessions. SIGHUP reads its certificate, the CA, the issuer's key and service.members again.`,
		has: func(f *configs.File) bool { return f.Service != nil },
		run: func(ctx context.Context, f *configs.File, again up.Again, log *slog.Logger, ready func(up.ProcessInfo)) error {
			hangup, stop := onHangup()
			defer stop()
			return up.RunService(ctx, *f.Service, again, log, hangup, ready)
		},
	}.command()
}

func onHangup() (hangup chan os.Signal, stop func()) {
	hangup = make(chan os.Signal, 1) // one that waits stands for all
	signal.Notify(hangup, syscall.SIGHUP)
	return hangup, func() { signal.Stop(hangup) }
}

func newBrokerConfig(p process) *cobra.Command {
	var file string
	var stock bool
	cmd := &cobra.Command{
		Use:   "config",
		Short: "Print the text configuration of the NATS server in the broker",
		Long: `Print the text configuration of the NATS server in the broker; with --stock, the one that a nats-server of its own
runs with in its place (nats-server -c FILE). It holds no secret: keys are public, certificates are files.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := p.load(file)
			if err != nil {
				return err
			}
			form := broker.Embedded
			if stock {
				form = broker.Stock
			}
			text, err := broker.ConfigText(*cfg.Broker, form)
			if err != nil {
				return err
			}
			if _, err := io.WriteString(cmd.OutOrStdout(), text); err != nil {
				return fmt.Errorf("print: %w", err)
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&file, "config", "", "configuration file with a section broker (required)")
	cmd.Flags().BoolVar(&stock, "stock", false, "print it for a nats-server of its own")
	return cmd
}
