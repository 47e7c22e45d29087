package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/iop-fabric/iop/internal/up"
)

func newInit() *cobra.Command {
	var dir string
	cmd := &cobra.Command{
		Use:   "init",
		Short: "Make the CA, certificates, nkeys, an API key and a configuration to edit",
		Long: `Make, in the data folder, what "iop up" would make at its first start: a CA, a certificate each
for broker, edge and node, their nkeys, and an API key; and beside them iop.yaml, to be edited and given to
"iop up --config". What is there already is checked and left alone.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			folder, err := dataFolder(dir)
			if err != nil {
				return err
			}
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
			fmt.Fprintf(out, "Keys are in %s. Start with: iop up --data-dir %s --config %s\n", folder, folder, folder.Config())
			return nil
		},
	}
	cmd.Flags().StringVar(&dir, "data-dir", "", "folder for keys and state (default $XDG_DATA_HOME/iop or ~/.local/share/iop)")
	return cmd
}
