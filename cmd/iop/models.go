package main

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/iop-fabric/iop/internal/adminapi"
)

func newModels() *cobra.Command {
	return newOperator("models", "List the models, why each is offered and who waits for it",
		`List the models that callers may name: why each is offered (auto: its providers list it; configured: edge.models
names it), which providers serve it, who waits for it, and what a request for it would wait for.`,
		func(s adminapi.Snapshot) any { return map[string]any{"models": s.Models} }, printModels)
}

func printModels(w io.Writer, s adminapi.Snapshot) {
	table(w, "MODEL\tOFFERED\tPROVIDERS\tWAITING\tOLDEST\tWAITS FOR", func(row func(...any)) {
		for _, m := range s.Models {
			oldest := "-"
			if m.Waiting > 0 {
				oldest = short(ms(m.OldestWaitMs))
			}
			row(m.Name, offered(m), candidates(m.Candidates), waiting(m), oldest, dash(m.WaitsFor))
		}
	})
}

func offered(m adminapi.Model) string {
	if !m.Offered {
		return "no more"
	}
	return m.Source
}

// candidates lists providers, and how they differ where they do.
func candidates(all []adminapi.Candidate) string {
	alike := !slices.ContainsFunc(all, func(c adminapi.Candidate) bool { return c.Priority != all[0].Priority || c.Weight != all[0].Weight })
	names := make([]string, len(all))
	for i, c := range all {
		if names[i] = c.Provider; !alike {
			names[i] += fmt.Sprintf(" (priority %d, weight %d)", c.Priority, c.Weight)
		}
	}
	return dash(strings.Join(names, ", "))
}

func waiting(m adminapi.Model) string {
	if len(m.Principals) < 2 {
		return fmt.Sprint(m.Waiting)
	}
	who := make([]string, len(m.Principals))
	for i, p := range m.Principals {
		who[i] = fmt.Sprintf("%s %d", p.Principal, p.Waiting)
	}
	return fmt.Sprintf("%d (%s)", m.Waiting, strings.Join(who, ", "))
}
