// Command iop is the whole fabric in one static binary: broker, Edge, Node and
// what an operator needs around them.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
)

// version is set by the build.
var version = "dev"

// Exit codes: 0 done or stopped when told to, 1 failed, 2 used wrongly.
const (
	exitFailed = 1
	exitUsage  = 2
)

type usageError struct{ error }

func main() {
	// Libraries that print by themselves could print what a peer sent (O2); what
	// matters is logged by us.
	log.SetOutput(io.Discard)
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	os.Exit(runTo(ctx, os.Stdout, os.Stderr, os.Args[1:]))
}

// runTo runs one command line and returns its exit code.
func runTo(ctx context.Context, stdout, stderr io.Writer, args []string) int {
	root := newRoot()
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	err := root.ExecuteContext(ctx)
	var usage usageError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &usage):
		fmt.Fprintf(stderr, "iop: %v\nRun 'iop --help' for usage.\n", err)
		return exitUsage
	default:
		fmt.Fprintf(stderr, "iop: %v\n", err)
		return exitFailed
	}
}

func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:   "iop",
		Short: "One OpenAI-compatible URL for the models on machines you own",
		Long: `iop gives the language models on machines you own one OpenAI-compatible URL.

  iop up        broker, edge and node in one process: the quickest start
  iop init      make the keys and a configuration file to edit
  iop validate  check a configuration file without starting anything

Environment variables IOP_<SECTION>_<KEY> override the configuration file.`,
		SilenceUsage: true, SilenceErrors: true,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usageError{fmt.Errorf("unknown command %q", args[0])}
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	root.AddCommand(newUp(), newInit(), newValidate(), newVersion())
	return root
}

// noArgs refuses arguments with the usage exit code.
func noArgs(_ *cobra.Command, args []string) error {
	if len(args) > 0 {
		return usageError{fmt.Errorf("unexpected argument %q", args[0])}
	}
	return nil
}
