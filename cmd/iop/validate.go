package main

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/iop-fabric/iop/configs"
)

func newValidate() *cobra.Command {
	var noFiles bool
	cmd := &cobra.Command{
		Use:   "validate FILE",
		Short: "Check a configuration file without starting anything",
		Long: `Check a configuration file, and the files it names: that they are there, can be read, are of the right kind, fit
together and are good now. Every fault is printed with file, line and what was meant; the exit code is 0 when there is
none and 1 when there is one. Nobody is asked over the network. Call it as the user that is to run it.

--no-files leaves the other files alone: for a file of another host.`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return usageError{fmt.Errorf("validate takes one file, got %d arguments", len(args))}
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if noFiles {
				if _, err := configs.LoadAny(args[0]); err != nil {
					return err
				}
			} else {
				warnings, err := configs.Check(args[0], time.Now())
				for _, w := range warnings {
					fmt.Fprintln(cmd.ErrOrStderr(), "warning:", w)
				}
				if err != nil {
					return err
				}
			}
			fmt.Fprintf(cmd.OutOrStdout(), "%s is valid.\n", args[0])
			return nil
		},
	}
	cmd.Flags().BoolVar(&noFiles, "no-files", false, "do not open the files it names")
	return cmd
}
