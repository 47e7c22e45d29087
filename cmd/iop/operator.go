package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
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
}

// newOperator makes a command that shows a part of the snapshot: part as JSON,
// print for people.
func newOperator(use, short, long string, part func(adminapi.Snapshot) any, print func(io.Writer, adminapi.Snapshot)) *cobra.Command {
	var o operator
	cmd := &cobra.Command{
		Use: use, Short: short, Args: noArgs,
		Long: long + "\n" + whomToAsk,
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
const whomToAsk = `
Without a flag it asks the "iop up" of the default data folder; --data-dir names another folder, --config the file of
an Edge or a broker of its own. From another machine: --url, with the token in --token-file or in ` + tokenVariable + `.`

// flags are those that say whom to ask.
func (o *operator) flags(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&o.dir, "data-dir", "", `data folder of the "iop up" to ask`)
	f.StringVar(&o.file, "config", "", "configuration file of the process to ask")
	f.StringVar(&o.url, "url", "", "admin listener to ask, such as http://127.0.0.1:8401")
	f.StringVar(&o.tokenFile, "token-file", "", "file with the admin token")
	f.BoolVar(&o.asJSON, "json", false, "print JSON")
	cmd.MarkFlagsMutuallyExclusive("data-dir", "config", "url")
}

// client finds the Edge to ask and the token to ask with.
func (o operator) client() (c adminapi.Client, err error) {
	switch {
	case o.url != "":
		c.URL = o.url
	case o.file != "":
		c, err = clientOf(o.file)
	default:
		c, err = clientAt(o.dir)
	}
	if err != nil {
		return c, err
	}
	if token := os.Getenv(tokenVariable); token != "" && o.tokenFile == "" {
		c.Token = token
	}
	if o.tokenFile != "" {
		if c.Token, err = readToken(o.tokenFile); err != nil {
			return c, err
		}
	}
	if c.Token == "" {
		return c, usageError{fmt.Errorf("no admin token: name its file with --token-file, or set %s", tokenVariable)}
	}
	return c, nil
}

// clientAt is for the fabric of a data folder.
func clientAt(dir string) (c adminapi.Client, err error) {
	folder, err := dataFolder(dir)
	if err != nil {
		return c, err
	}
	url, err := os.ReadFile(folder.AdminURL())
	if errors.Is(err, fs.ErrNotExist) {
		return c, fmt.Errorf("no iop is running on the data folder %s (start it with iop up, or name another with --data-dir)", folder)
	}
	if err != nil {
		return c, err
	}
	c.URL = strings.TrimSpace(string(url))
	if token, err := readToken(folder.AdminToken()); err == nil {
		c.Token = token
	}
	return c, nil
}

// clientOf is for the Edge of a configuration file, or else its broker.
func clientOf(file string) (c adminapi.Client, err error) {
	cfg, err := configs.LoadAny(file)
	if err != nil {
		return c, err
	}
	var section, listen string
	var token configs.AdminToken
	switch {
	case cfg.Edge != nil:
		section, listen, token = "edge", cfg.Edge.AdminListen, cfg.Edge.AdminToken
	case cfg.Broker != nil:
		section, listen, token = "broker", cfg.Broker.AdminListen, cfg.Broker.AdminToken
	default:
		return c, fmt.Errorf("%s: has no section edge or broker, and only those can be asked", file)
	}
	host, port, err := net.SplitHostPort(listen)
	switch {
	case listen == "":
		return c, fmt.Errorf("%s: %s.admin_listen is not set, so there is nothing to ask", file, section)
	case err != nil:
		return c, fmt.Errorf("%s: %s.admin_listen: %w", file, section, err)
	case port == "0":
		return c, fmt.Errorf("%s: %s.admin_listen has port 0, so its address is known to the process alone: name it with --url", file, section)
	}
	if ip := net.ParseIP(host); host == "" || (ip != nil && ip.IsUnspecified()) {
		host = "127.0.0.1"
	}
	c.URL = "http://" + net.JoinHostPort(host, port)
	c.Token, _ = token.Value() // its digest alone is no token
	return c, nil
}

func readToken(file string) (string, error) {
	f, err := os.Open(filepath.Clean(file))
	if err != nil {
		return "", err
	}
	defer f.Close() // only read
	b, err := io.ReadAll(io.LimitReader(f, 4<<10))
	token := strings.TrimSpace(string(b))
	if err == nil && token == "" {
		err = fmt.Errorf("%s: holds no token", file)
	}
	return token, err
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
