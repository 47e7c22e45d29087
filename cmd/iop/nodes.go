package main

import (
	"io"

	"github.com/spf13/cobra"

	"github.com/iop-fabric/iop/internal/adminapi"
)

func newNodes() *cobra.Command {
	return newOperator("nodes", "List the nodes and the state of each",
		`List the nodes: the state of each, since when, the generation of its session, and how many requests it serves.`,
		func(s adminapi.Snapshot) any { return map[string]any{"nodes": s.Nodes} }, printNodes)
}

func printNodes(w io.Writer, s adminapi.Snapshot) {
	table(w, "NODE\tSTATE\tSINCE\tGENERATION\tSERVES\tHEARTBEAT\tSOFTWARE", func(row func(...any)) {
		for _, n := range s.Nodes {
			state, heard := n.State, "-"
			switch {
			case !n.Configured:
				state += ", not configured"
			case n.Draining:
				state += ", draining"
			case n.State == "absent":
				state = "not connected"
			}
			if n.Connected {
				heard = short(ms(n.HeartbeatAgeMs)) + " ago"
			}
			row(n.Name, state, ago(s.Time, n.Since), n.Generation, n.InFlight, heard, dash(n.Software))
		}
	})
}
