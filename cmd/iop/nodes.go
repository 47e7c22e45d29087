package main

import (
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/iop-fabric/iop/internal/adminapi"
)

func newNodes() *cobra.Command {
	return newOperator("nodes", "List the nodes and the state of each",
		`List the nodes: the state of each, since when, the generation of its session, and how many requests it serves, and how
long its certificate is good.`,
		func(s adminapi.Snapshot) any { return map[string]any{"nodes": s.Nodes} }, printNodes)
}

func printNodes(w io.Writer, s adminapi.Snapshot) {
	table(w, "NODE\tSTATE\tSINCE\tGENERATION\tSERVES\tHEARTBEAT\tEXPIRES\tSOFTWARE", func(row func(...any)) {
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
			row(n.Name, state, ago(s.Time, n.Since), n.Generation, n.InFlight, heard, expires(s.Time, n.CertificateExpires), dash(n.Software))
		}
	})
}

// expires is how long a certificate is good yet.
func expires(now, at time.Time) string {
	switch {
	case at.IsZero():
		return "-"
	case !at.After(now):
		return "over"
	}
	return "in " + short(at.Sub(now))
}

// expirySoon is when the end of a certificate is worth a line of its own (B8).
const expirySoon = 30 * 24 * time.Hour

// printExpiring warns of certificates that end soon.
func printExpiring(w io.Writer, s adminapi.Snapshot) {
	warn := func(role, name string, at time.Time) {
		if !at.IsZero() && at.Sub(s.Time) < expirySoon {
			verb := "expires "
			if !at.After(s.Time) {
				verb = "is "
			}
			fmt.Fprintf(w, "WARNING: the certificate of %s %s %s (%s)\n", role, name, verb+expires(s.Time, at), at.Local().Format("2006-01-02 15:04"))
		}
	}
	for _, c := range s.Certificates {
		warn(c.Role, c.Name, c.Expires)
	}
	for _, n := range s.Nodes {
		warn("node", n.Name, n.CertificateExpires)
	}
}
