package main

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/iop-fabric/iop/internal/adminapi"
)

func newStatus() *cobra.Command {
	return newOperator("status", "Show what every node is doing and why requests wait",
		`Show, on one page, what every node is doing, what its providers serve, and why requests wait.`,
		func(s adminapi.Snapshot) any { return s }, printStatus)
}

func printStatus(w io.Writer, s adminapi.Snapshot) {
	state := "ready"
	if !s.Ready {
		state = "not ready: " + s.Reason
	}
	fmt.Fprintf(w, "edge %s is %s, up for %s; %s served, %s waiting\n\n", s.Edge, state, ago(s.Time, s.Started),
		count(s.Queue.InFlight, "request is", "requests are"), fmt.Sprint(s.Queue.Waiting))
	printExpiring(w, s)
	printNodes(w, s)
	fmt.Fprintln(w)
	printProviders(w, s)
	fmt.Fprintln(w)
	printModels(w, s)
}
