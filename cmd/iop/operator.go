package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/adminapi"
)

// tokenVariable holds the admin token where no file does.
const tokenVariable = "IOP_ADMIN_TOKEN"

// operator is what the commands that ask a running Edge have in common.
type operator struct {
	dir, file, url, tokenFile string
	asJSON                    bool
	// shows: what is asked for is what an Edge shows; else it is the affair of who
	// admits members, a broker or a service.
	shows bool
}

// newOperator makes a command that shows a part of the snapshot: part as JSON,
// print for people.
func newOperator(use, short, long string, part func(adminapi.Snapshot) any, print func(io.Writer, adminapi.Snapshot)) *cobra.Command {
	o := operator{shows: true}
	cmd := &cobra.Command{
		Use: use, Short: short, Args: noArgs,
		Long: long + "\n" + whomToAsk("an Edge (edge.yaml), which alone knows the nodes"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			client, err := o.client()
			if err != nil {
				return err
			}
			s, err := client.Snapshot(cmd.Context())
			if err != nil {
				return err
			}
			if o.asJSON {
				return json.NewEncoder(cmd.OutOrStdout()).Encode(part(s))
			}
			var page bytes.Buffer // so that what cannot be written is told
			print(&page, s)
			_, err = page.WriteTo(cmd.OutOrStdout())
			return err
		},
	}
	o.flags(cmd)
	return cmd
}

// whomToAsk ends the help of what asks a running process.
// whose is the process whose file --config takes.
func whomToAsk(whose string) string {
	return `
Without a flag it asks the "iop up" of the default data folder; --data-dir names another folder. --config names the file of
` + whose + `.
From another machine: --url, with the token in --token-file or in ` + tokenVariable + `.`
}

// ofAuthority is whom those ask that are about members.
const ofAuthority = "a broker (broker-1.yaml) or, beside a stock nats-server, of a service (service-1.yaml)"

// flags are those that say whom to ask.
func (o *operator) flags(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&o.file, "config", "", "configuration file of the process to ask")
	f.StringVar(&o.url, "url", "", "admin listener to ask, such as http://127.0.0.1:8401")
	o.otherFlags(cmd)
	cmd.MarkFlagsMutuallyExclusive("data-dir", "config", "url")
}

// otherFlags are those but --config and --url, for who takes these more than once.
func (o *operator) otherFlags(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&o.dir, "data-dir", "", `data folder of the "iop up" to ask`)
	f.StringVar(&o.tokenFile, "token-file", "", "file with the admin token")
	f.BoolVar(&o.asJSON, "json", false, "print JSON")
}

// client finds whom to ask and the token to ask with.
func (o operator) client() (c adminapi.Client, err error) {
	var token configs.AdminToken
	switch {
	case o.url != "":
		if u, bad := url.Parse(o.url); bad != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Host == "" {
			return c, usageError{fmt.Errorf("--url %q: want http://HOST:PORT, such as http://127.0.0.1:8401", o.url)}
		}
		c.URL = strings.TrimRight(o.url, "/")
	case o.file != "":
		c.URL, token, err = surfaceOf(o.file, o.shows)
	default:
		c.URL, token, err = surfaceAt(o.dir)
	}
	if err != nil {
		return c, err
	}
	switch {
	case o.tokenFile != "":
		token = configs.AdminToken{File: filepath.Clean(o.tokenFile)}
	case os.Getenv(tokenVariable) != "":
		token = configs.AdminToken{Env: tokenVariable}
	}
	if token.File == "" && token.Env == "" { // a digest is no token
		return c, usageError{fmt.Errorf("no admin token: name its file with --token-file, or set %s", tokenVariable)}
	}
	c.Token, err = token.Read()
	return c, err
}

// surfaceAt is where the fabric of a data folder is asked, and with what.
func surfaceAt(dir string) (url string, token configs.AdminToken, err error) {
	folder, err := dataFolder(dir)
	if err != nil {
		return "", token, err
	}
	b, err := os.ReadFile(folder.AdminURL())
	if errors.Is(err, fs.ErrNotExist) {
		return "", token, fmt.Errorf("no iop is running on the data folder %s (start it with iop up, or name another with --data-dir)", folder)
	}
	if _, none := os.Stat(folder.AdminToken()); none == nil { // else it was started with another
		token.File = folder.AdminToken()
	}
	return strings.TrimSpace(string(b)), token, err
}

// surfaceOf is where the Edge of a configuration file, or else its broker or its
// service, is asked; what an Edge shows the Edge alone, and nothing else an Edge alone.
func surfaceOf(file string, shows bool) (url string, token configs.AdminToken, err error) {
	cfg, err := configs.LoadAny(file)
	if err != nil {
		return "", token, err
	}
	var section, listen string
	admits := cfg.Broker != nil || cfg.Service != nil
	switch {
	case shows && cfg.Edge == nil && admits:
		return "", token, fmt.Errorf("%s: is of a broker or a service, which shows no nodes: ask the Edge (--config edge.yaml)", file)
	case !shows && cfg.Edge != nil && !admits:
		return "", token, fmt.Errorf("%s: is of an Edge, which admits nobody and keeps no keys: ask a broker, or the service beside a stock nats-server; to invite, the one that has enrolment (--config broker-1.yaml)", file)
	case cfg.Edge != nil:
		section, listen, token = "edge", cfg.Edge.AdminListen, cfg.Edge.AdminToken
	case cfg.Broker != nil:
		section, listen, token = "broker", cfg.Broker.AdminListen, cfg.Broker.AdminToken
	case cfg.Service != nil:
		section, listen, token = "service", cfg.Service.AdminListen, cfg.Service.AdminToken
	default:
		return "", token, fmt.Errorf("%s: has no section edge, broker or service, and only those can be asked", file)
	}
	host, port, err := net.SplitHostPort(listen)
	switch {
	case listen == "":
		return "", token, fmt.Errorf("%s: %s.admin_listen is not set, so there is nothing to ask", file, section)
	case err != nil:
		return "", token, fmt.Errorf("%s: %s.admin_listen: %w", file, section, err)
	case port == "0":
		return "", token, fmt.Errorf("%s: %s.admin_listen has port 0, so its address is known to the process alone: name it with --url", file, section)
	}
	if ip := net.ParseIP(host); host == "" || (ip != nil && ip.IsUnspecified()) {
		host = "127.0.0.1"
	}
	return "http://" + net.JoinHostPort(host, port), token, nil
}

// table prints rows in columns.
func table(w io.Writer, head string, rows func(row func(cells ...any))) {
	t := tabwriter.NewWriter(w, 0, 4, 2, ' ', 0)
	fmt.Fprintln(t, head)
	rows(func(cells ...any) {
		for i, c := range cells {
			if i > 0 {
				fmt.Fprint(t, "\t")
			}
			fmt.Fprint(t, c)
		}
		fmt.Fprintln(t)
	})
	t.Flush()
}

// ago is a time's distance in words that fit a column.
func ago(now, then time.Time) string {
	if then.IsZero() {
		return "-"
	}
	return short(now.Sub(then))
}

func short(d time.Duration) string {
	switch {
	case d < time.Second:
		return fmt.Sprintf("%dms", d.Milliseconds())
	case d < time.Minute:
		return fmt.Sprintf("%.1fs", d.Seconds())
	case d < time.Hour:
		return fmt.Sprintf("%dm%02ds", int(d.Minutes()), int(d.Seconds())%60)
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh%02dm", int(d.Hours()), int(d.Minutes())%60)
	default:
		return fmt.Sprintf("%dd", int(d.Hours())/24)
	}
}

// dash stands where there is nothing to say.
func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

func count(n int, one, many string) string {
	if n == 1 {
		return fmt.Sprintf("1 %s", one)
	}
	return fmt.Sprintf("%d %s", n, many)
}
