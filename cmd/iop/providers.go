package main

import (
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/iop-fabric/iop/internal/adminapi"
)

func newProviders() *cobra.Command {
	return newOperator("providers", "List the providers and what each serves",
		`List the providers: the state of each, how many of its places are in use, how many waiting requests it could serve,
and the models it is a candidate of. Long are those places and requests that need a long context.`,
		func(s adminapi.Snapshot) any { return map[string]any{"providers": s.Providers} }, printProviders)
}

func printProviders(w io.Writer, s adminapi.Snapshot) {
	table(w, "PROVIDER\tSTATUS\tHEALTH\tIN USE\tLONG\tQUEUED\tMODELS", func(row func(...any)) {
		for _, p := range s.Providers {
			long := "-"
			if p.LongCapacity > 0 {
				long = fmt.Sprintf("%d/%d", p.LongInFlight, p.LongCapacity)
			}
			row(p.ID, p.Status, p.Health, fmt.Sprintf("%d/%d", p.InFlight, p.Capacity), long, p.Queued, dash(strings.Join(p.Models, ", ")))
		}
	})
}

func ms(n int64) time.Duration { return time.Duration(n) * time.Millisecond }
