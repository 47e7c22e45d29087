package main

import (
	"errors"
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/iop-fabric/iop/internal/up"
)

func newInit() *cobra.Command {
	var dir string
	var hosts up.Hosts
	cmd := &cobra.Command{
		Use:   "init",
		Short: "Make the CA, certificates, nkeys, an API key and a configuration to edit",
		Long: `Make, in the data folder, what "iop up" would make at its first start: a CA, a certificate each
for broker, edge and node, their nkeys, and an API key; and beside them iop.yaml, to be edited and given to
"iop up --config". What is there already is checked and left alone.

With --out, make the same for many hosts: one CA, and for each member a folder with exactly its own files and a
configuration that is ready, so that each host gets only its own folder:

  iop init --out fabric --edge home --broker hub1.example,hub2.example,hub3.example --node desk,gpu1

Run it again to add to it (iop init --out fabric --node gpu2): it overwrites nothing, and prints what the files
that are there need. A node behind a leaf broker is named with it: --leaf attic=attic.example --node box@attic.
--stock is for who runs nats-servers of their own: a folder service-N goes beside each broker-N.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := checkInitFlags(cmd); err != nil {
				return err
			}
			if hosts.Out != "" {
				return initHosts(cmd.OutOrStdout(), hosts)
			}
			folder, err := dataFolder(dir)
			if err != nil {
				return err
			}
			unlock, err := up.Lock(folder)
			if err != nil {
				return err
			}
			defer unlock()
			if err := up.Prepare(folder, up.DefaultEdge, up.DefaultNode); err != nil {
				return err
			}
			out := cmd.OutOrStdout()
			file, err := os.OpenFile(folder.Config(), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
			switch {
			case os.IsExist(err):
				fmt.Fprintf(out, "%s is there already and was left alone.\n", folder.Config())
			case err != nil:
				return err
			default:
				if _, err := file.WriteString(up.Sample(folder)); err != nil {
					file.Close()
					return err
				}
				if err := file.Close(); err != nil {
					return err
				}
				fmt.Fprintf(out, "Wrote %s.\n", folder.Config())
			}
			fmt.Fprintf(out, "Keys are in %s. Start with:\n\n  %s\n", folder, folder.StartLine())
			return nil
		},
	}
	cmd.Flags().StringVar(&dir, "data-dir", "", "folder for keys and state (default $XDG_DATA_HOME/iop or ~/.local/share/iop)")
	f := cmd.Flags()
	f.StringVar(&hosts.Out, "out", "", "make a folder for each of many hosts in this one")
	f.StringVar(&hosts.Edge, "edge", "", "with --out: the edge's name")
	f.StringSliceVar(&hosts.Brokers, "broker", nil, "with --out: HOST[:PORT] of each broker, as it is dialled (port 4222)")
	f.StringSliceVar(&hosts.Nodes, "node", nil, "with --out: name of each node; NAME@LEAF for one behind a leaf")
	f.StringSliceVar(&hosts.Leaves, "leaf", nil, "with --out: NAME=HOST[:PORT] of each leaf broker")
	f.BoolVar(&hosts.Stock, "stock", false, "with --out: nats-servers of their own in the brokers' place, each with iop service beside it")
	f.BoolVar(&hosts.Demo, "demo", false, "with --out: the nodes offer the demo model and no other")
	f.StringVar(&hosts.Owner, "owner", "", "with --out: UID:GID that the members' folders are to belong to")
	return cmd
}

// checkInitFlags refuses flags of the one form with the other.
func checkInitFlags(cmd *cobra.Command) error {
	f := cmd.Flags()
	if f.Changed("out") {
		if f.Changed("data-dir") {
			return usageError{errors.New("--data-dir is for one host, --out for many: give one of them")}
		}
		return nil
	}
	for _, name := range []string{"edge", "broker", "node", "leaf", "stock", "demo", "owner"} {
		if f.Changed(name) {
			return usageError{fmt.Errorf("--%s goes with --out DIR", name)}
		}
	}
	return nil
}
