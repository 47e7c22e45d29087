package main

import (
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/up"
)

func newUp() *cobra.Command {
	var (
		o        up.Options
		dir      string
		file     string
		asJSON   bool
		logLevel string
	)
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Run broker, edge and node in one process",
		Long: `Run broker, edge and node in one process, with the full security of the real ones.

It needs no file: keys are made in the data folder at the first start, local model servers
(Ollama, vLLM, llama.cpp, LM Studio on their usual ports) are found as they come and go, and a
built-in demo model is offered while there is none. It prints the URL, a key and a line to try.

SIGTERM stops it gracefully, a second one at once. SIGHUP makes its parts read their certificates and keys again, and
says what of its configuration needs a restart.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			folder, err := dataFolder(dir)
			if err != nil {
				return err
			}
			o.Folder = folder
			for flag, addr := range map[string]string{"listen": o.Listen, "admin-listen": o.AdminListen, "broker-listen": o.BrokerListen, "enrol-listen": o.EnrolListen} {
				if _, _, err := net.SplitHostPort(addr); addr != "" && err != nil {
					return usageError{fmt.Errorf("--%s %q: want host:port, such as 127.0.0.1:8400, or port 0 to have one picked", flag, addr)}
				}
			}
			o.Again = func() (*configs.File, error) {
				if file == "" {
					return configs.NewSingle(os.Environ())
				}
				return configs.LoadSingle(file)
			}
			if o.File, err = o.Again(); err != nil {
				return err
			}
			log, err := newLog(cmd.ErrOrStderr(), o.File, logLevel, true)
			if err != nil {
				return err
			}
			hangup, stop := onHangup()
			defer stop()
			o.Hangup = hangup
			out := cmd.OutOrStdout()
			var models func([]string)
			if !asJSON {
				models = func(names []string) { fmt.Fprintf(out, "models now: %s\n", strings.Join(names, ", ")) }
			}
			return up.Run(cmd.Context(), o, log, func(i up.Info) { printInfo(out, i, asJSON) }, models)
		},
	}
	f := cmd.Flags()
	f.StringVar(&dir, "data-dir", "", "folder for keys and state (default $XDG_DATA_HOME/iop or ~/.local/share/iop)")
	f.StringVar(&file, "config", "", "configuration file; what it leaves out is filled in")
	f.StringVar(&o.Listen, "listen", "", "address for callers (default 127.0.0.1:8400; port 0 picks one)")
	f.StringVar(&o.AdminListen, "admin-listen", "", "address for health and metrics (default 127.0.0.1:8401)")
	f.StringVar(&o.BrokerListen, "broker-listen", "", "address nodes dial (default 127.0.0.1:4222)")
	f.StringVar(&o.EnrolListen, "enrol-listen", "", "address invited machines dial to join; open only while one is invited (default port 8443, where nodes dial)")
	f.StringVar(&o.EnrolURL, "enrol-url", "", "HOST[:PORT] at which other machines reach this one (default its own address)")
	f.BoolVar(&o.Demo, "demo", false, "offer the demo model also beside real ones")
	f.BoolVar(&asJSON, "json", false, "print one line of JSON when ready")
	f.StringVar(&logLevel, "log-level", "", "debug, info, warn or error (default warn, or the file's)")
	return cmd
}

func dataFolder(dir string) (up.Folder, error) {
	if dir == "" {
		return up.DefaultFolder()
	}
	// Files in it are named in configurations, which have folders of their own.
	abs, err := filepath.Abs(dir)
	return up.Folder(abs), err
}

func printInfo(w io.Writer, i up.Info, asJSON bool) {
	if asJSON {
		if err := json.NewEncoder(w).Encode(i); err != nil {
			fmt.Fprintln(w, err)
		}
		return
	}
	model := "demo"
	if len(i.Models) > 0 {
		model = i.Models[0]
	}
	key, try := i.APIKey, i.APIKey
	if key == "" {
		key, try = "yours: that of "+strconv.Quote(i.Principal)+" in the configuration", "$KEY"
	}
	fmt.Fprintf(w, `iop is up.

  base URL  %s
  API key   %s
  admin     %s
  data      %s
  models    %s

Try:

  curl -N %s/chat/completions -H 'Authorization: Bearer %s' -H 'Content-Type: application/json' \
    -d '{"model":%s,"stream":true,"messages":[{"role":"user","content":"Hello!"}]}'

`, i.BaseURL, key, i.AdminURL, i.DataDir, strings.Join(i.Models, ", "), i.BaseURL, try, strconv.Quote(model))
	if i.FoundNone {
		fmt.Fprint(w, "No model server was found on this machine, so only the built-in demo model is offered.\nStart one (Ollama, vLLM, llama.cpp, LM Studio): its models appear by themselves, and the demo model\nleaves (--demo keeps it).\n\n")
	}
}

// newLog makes the process's logger. People at a terminal get warnings, the
// rest on request; scripts (--json) get info.
func newLog(w io.Writer, file *configs.File, flag string, quiet bool) (*slog.Logger, error) {
	level, format := slog.LevelInfo, "text"
	if quiet {
		level = slog.LevelWarn
	}
	text := flag
	if file != nil {
		if text == "" {
			text = file.Log.Level
		}
		format = file.Log.Format
	}
	if text != "" {
		if err := level.UnmarshalText([]byte(text)); err != nil {
			return nil, usageError{fmt.Errorf("log level %q: want debug, info, warn or error", text)}
		}
	}
	if format == "json" {
		return slog.New(slog.NewJSONHandler(w, &slog.HandlerOptions{Level: level})), nil
	}
	return slog.New(slog.NewTextHandler(w, &slog.HandlerOptions{Level: level})), nil
}
