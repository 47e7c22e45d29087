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

	"github.com/iop-fabric/iop/internal/install"
	"github.com/iop-fabric/iop/internal/up"
)

// version is set by the build.
var version = "dev"

// Exit codes: 0 done or stopped when told to, 1 failed, 2 used wrongly.
const (
	exitFailed = 1
	exitUsage  = 2
)

// usageError is what a command says of how it was called; what is found before it runs
// needs no such mark.
type usageError struct{ error }

func main() {
	// Libraries that print by themselves could print what a peer sent (O2); what
	// matters is logged by us.
	log.SetOutput(io.Discard)
	up.Version = version
	ctx, cancel := context.WithCancel(context.Background())
	stop := make(chan os.Signal, 2) // two are told apart, a third means the same
	signal.Notify(stop, os.Interrupt, syscall.SIGTERM)
	go func() {
		<-stop
		cancel() // gracefully
		<-stop
		fmt.Fprintln(os.Stderr, "iop: told twice to stop: stopping at once")
		os.Exit(exitFailed)
	}()
	os.Exit(install.Managed(cancel, func() int { return runTo(ctx, os.Stdout, os.Stderr, os.Args[1:]) }))
}

// runTo runs one command line and returns its exit code.
func runTo(ctx context.Context, stdout, stderr io.Writer, args []string) int {
	root := newRoot()
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	began := false
	beforeRun(root, func() { began = true })
	err := root.ExecuteContext(ctx)
	var usage usageError
	switch {
	case err == nil:
		return 0
	case !began || errors.As(err, &usage):
		fmt.Fprintf(stderr, "iop: %v\nRun 'iop --help' for usage.\n", err)
		return exitUsage
	default:
		fmt.Fprintf(stderr, "iop: %v\n", err)
		return exitFailed
	}
}

// beforeRun has do called when a command runs: its line was understood.
func beforeRun(cmd *cobra.Command, do func()) {
	if run := cmd.RunE; run != nil {
		cmd.RunE = func(cmd *cobra.Command, args []string) error { do(); return run(cmd, args) }
	}
	for _, c := range cmd.Commands() {
		beforeRun(c, do)
	}
}

func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:   "iop",
		Short: "One OpenAI-compatible URL for the models on machines you own",
		Long: `iop gives the language models on machines you own one OpenAI-compatible URL.

  iop up        broker, edge and node in one process: the quickest start
  iop init      make the keys and a configuration file to edit; with --out, a folder for each of many hosts
  iop validate  check a configuration file without starting anything
  iop invite    print the one line with which another machine joins; iop join is that line, iop revoke takes it out
  iop node install   have the operating system start a node; iop join --install does so at once
  iop rotate    sign a certificate of a fabric of many hosts anew; exchange the CA, the issuer or an nkey while all runs
  iop backup    one file with what the authority knows; iop restore puts it back
  iop status    what every node is doing, and why requests wait; iop nodes, iop providers, iop models: its parts

  iop broker, iop edge, iop node   the same three, each a process of its own
  iop leaf                         a broker for a site, with one link to the others
  iop service                      beside a nats-server of your own: what a broker does there

Environment variables IOP_<SECTION>_<KEY> override the configuration file.`,
		Version:      version,
		SilenceUsage: true, SilenceErrors: true,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 0 {
				return fmt.Errorf("unknown command %q", args[0])
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.AddCommand(newUp(), newBroker(), newEdge(), newNode(), newLeaf(), newService(),
		newStatus(), newNodes(), newProviders(), newModels(), newInvite(), newJoin(), newRevoke(), newRotate(), newBackup(), newRestore(), newInit(), newValidate(), newVersion(), newHealthcheck())
	return root
}

// noArgs refuses arguments.
func noArgs(_ *cobra.Command, args []string) error {
	if len(args) > 0 {
		return fmt.Errorf("unexpected argument %q", args[0])
	}
	return nil
}
