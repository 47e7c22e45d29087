package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"

	"github.com/spf13/cobra"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/up"
)

// process is what the commands that run one part have in common.
type process struct {
	role  string // the section of the file, and the command's name
	short string
	long  string
	// has reports whether the file has the section.
	has func(*configs.File) bool
	run func(ctx context.Context, f *configs.File, again up.Again, log *slog.Logger, ready func(up.ProcessInfo)) error
}

func (p process) command() *cobra.Command {
	var (
		file     string
		asJSON   bool
		logLevel string
	)
	cmd := &cobra.Command{
		Use: p.role, Short: p.short, Long: p.long, Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := p.load(file)
			if err != nil {
				return err
			}
			log, err := newLog(cmd.ErrOrStderr(), cfg, logLevel, false)
			if err != nil {
				return err
			}
			return p.run(cmd.Context(), cfg, func() (*configs.File, error) { return p.load(file) }, log.With(slog.String("role", p.role)), func(i up.ProcessInfo) {
				printProcess(cmd.OutOrStdout(), i, asJSON)
			})
		},
	}
	f := cmd.Flags()
	f.StringVar(&file, "config", "", "configuration file with a section "+p.role+" (required)")
	f.BoolVar(&asJSON, "json", false, "print one line of JSON when it runs")
	f.StringVar(&logLevel, "log-level", "", "debug, info, warn or error (default info, or the file's)")
	return cmd
}

// load reads a file that has the section of this process.
func (p process) load(file string) (*configs.File, error) {
	if file == "" {
		return nil, usageError{fmt.Errorf("iop %s needs a configuration: --config FILE (iop init --out DIR makes one for each host)", p.role)}
	}
	cfg, err := configs.Load(file)
	if err != nil {
		return nil, err
	}
	if !p.has(cfg) {
		return nil, fmt.Errorf("%s: has no section %s: is it the file of another process?", file, p.role)
	}
	return cfg, nil
}

func printProcess(w io.Writer, i up.ProcessInfo, asJSON bool) {
	if asJSON {
		if err := json.NewEncoder(w).Encode(i); err != nil {
			fmt.Fprintln(w, err)
		}
		return
	}
	fmt.Fprintf(w, "iop %s %s is up.\n", i.Role, i.Name)
	for _, line := range []struct{ what, url string }{
		{"base URL", i.BaseURL},
		{"nodes and edges dial", i.BrokerURL},
		{"admin", i.AdminURL},
	} {
		if line.url != "" {
			fmt.Fprintf(w, "  %-20s  %s\n", line.what, line.url)
		}
	}
}
