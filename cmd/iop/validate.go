package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/iop-fabric/iop/configs"
)

func newValidate() *cobra.Command {
	return &cobra.Command{
		Use:   "validate FILE",
		Short: "Check a configuration file without starting anything",
		Long: `Check a configuration file. Every fault is printed with file, line and what was meant; the exit
code is 0 when there is none and 1 when there is one.`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return usageError{fmt.Errorf("validate takes one file, got %d arguments", len(args))}
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if _, err := configs.LoadAny(args[0]); err != nil {
				return err
			}
			fmt.Fprintf(cmd.OutOrStdout(), "%s is valid.\n", args[0])
			return nil
		},
	}
}
