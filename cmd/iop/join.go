package main

import (
	"fmt"
	"log/slog"

	"github.com/spf13/cobra"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/up"
)

func newJoin() *cobra.Command {
	var (
		dir, logLevel   string
		noStart, asJSON bool
		brokerURLs      []string
		installs        bool
	)
	cmd := &cobra.Command{
		Use:   "join HOST:PORT TOKEN",
		Short: "Join a fabric with the line that iop invite printed, and run its node",
		Long: `Join a fabric as a node, with the one line that "iop invite" printed, and run the node in the foreground.

The keys are made here, in the folder, and never leave it; the line is good once. Whom it dials is known by the line,
not by its name. The same command again just starts the node; so does "iop join" alone. One that was cut off goes on
where it was.

--install has the operating system run the node from now on, and ends: see "iop node install". As root on Linux the
folder is then ` + machineFolder + `.

--broker-url says what the node dials where the authority's word is not right here, such as behind a leaf.

HTTPS_PROXY is followed. To keep the line out of the list of processes, write - for TOKEN and give it on standard input.`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 0 && len(args) != 2 {
				return usageError{fmt.Errorf("join takes HOST:PORT and TOKEN, got %d arguments", len(args))}
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			own := unit{name: defaultUnit}
			if installs {
				if dir == "" && wholeMachine() {
					dir = machineFolder
				}
				if err := own.possible(); err != nil { // before the line is used up
					return err
				}
			}
			folder, err := joinFolder(dir)
			if err != nil {
				return err
			}
			errs := cmd.ErrOrStderr()
			j := up.Join{Folder: folder, BrokerURLs: brokerURLs, Tell: func(s string) { fmt.Fprintln(errs, "iop:", s) }}
			if len(args) == 2 {
				j.Authority, j.Token = args[0], args[1]
			}
			if j.Token == "-" {
				if _, err := fmt.Fscan(cmd.InOrStdin(), &j.Token); err != nil {
					return usageError{fmt.Errorf("no token on standard input: %w", err)}
				}
			}
			if err := j.Check(); err != nil {
				return err
			}
			unlock, err := up.Lock(folder)
			if err != nil {
				return err
			}
			defer unlock()
			if err := j.Run(cmd.Context()); err != nil {
				return err
			}
			cfg, err := configs.Load(folder.NodeConfig())
			if err != nil {
				return err
			}
			out := cmd.OutOrStdout()
			if !asJSON {
				fmt.Fprintf(out, "Joined as node %s of edge %s. Keys and configuration are in %s. For a service manager:\n\n  iop node --config %s\n\n",
					cfg.Node.Name, cfg.Node.Edge, folder, up.Quote(folder.NodeConfig()))
			}
			if installs {
				if err := own.install(cmd.Context(), out, folder.NodeConfig()); err != nil {
					return fmt.Errorf("it has joined, but is not installed: %w", err)
				}
			}
			if noStart || installs {
				if asJSON {
					printProcess(out, up.ProcessInfo{Role: "node", Name: cfg.Node.Name}, true)
				}
				return nil
			}
			log, err := newLog(errs, cfg, logLevel, false)
			if err != nil {
				return err
			}
			hangup, stop := onHangup()
			defer stop()
			again := func() (*configs.File, error) { return configs.Load(folder.NodeConfig()) }
			return up.RunNode(cmd.Context(), *cfg.Node, again, log.With(slog.String("role", "node")), hangup, func(i up.ProcessInfo) { printProcess(out, i, asJSON) })
		},
	}
	f := cmd.Flags()
	f.StringVar(&dir, "dir", "", "folder for keys and configuration (default $XDG_DATA_HOME/iop-node or ~/.local/share/iop-node)")
	f.StringArrayVar(&brokerURLs, "broker-url", nil, "dial this instead of what the authority says, such as tls://attic.example:4222; may be given again")
	f.BoolVar(&installs, "install", false, "have the operating system run the node, now and with the machine (as iop node install)")
	f.BoolVar(&noStart, "no-start", false, "join, and do not run the node")
	f.BoolVar(&asJSON, "json", false, "print one line of JSON when it runs, or has joined")
	f.StringVar(&logLevel, "log-level", "", "debug, info, warn or error (default info)")
	return cmd
}

func joinFolder(dir string) (up.Folder, error) {
	if dir == "" {
		return up.DefaultJoinFolder()
	}
	return dataFolder(dir)
}
