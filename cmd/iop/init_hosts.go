package main

import (
	"fmt"
	"io"
	"path/filepath"
	"strings"

	"github.com/iop-fabric/iop/internal/up"
)

// initHosts is `iop init --out`.
func initHosts(w io.Writer, h up.Hosts) error {
	report, err := up.MakeHosts(h)
	if err != nil {
		return err
	}
	for _, folder := range report.Made {
		fmt.Fprintf(w, "made  %s\n", filepath.Join(h.Out, folder))
	}
	for _, folder := range report.Kept {
		fmt.Fprintf(w, "kept  %s\n", filepath.Join(h.Out, folder))
	}
	if len(report.Made) > 0 {
		fmt.Fprintf(w, `
Give each host its own folder and no other. %s stays here: it holds the CA's key.
On each host:

`, filepath.Join(h.Out, "authority"))
		for _, folder := range report.Made {
			role, _, _ := strings.Cut(folder, "-")
			if h.Stock && role == "broker" {
				fmt.Fprintf(w, "  iop broker config --stock --config %s/%s.yaml > %s/nats.conf && nats-server -c %s/nats.conf\n", folder, folder, folder, folder)
				continue
			}
			fmt.Fprintf(w, "  iop %s --config %s/%s.yaml\n", role, folder, folder)
		}
	}
	_, stock, err := up.Authorities(h.Out)
	if err != nil {
		return err
	}
	for i, t := range report.Todo {
		if i == 0 {
			fmt.Fprint(w, "\nFiles that were there were left as they are. Put into them, here and on their hosts:\n")
		}
		fmt.Fprintf(w, "\nbelow %s in %s:\n\n%s\n%s\n", t.Key, strings.Join(t.Files, ", "), t.Text, readBy(t.Key, stock))
	}
	if len(report.Todo) == 0 {
		fmt.Fprintf(w, `
A caller's key is in %s. Once all runs, on the edge's host:

  curl -N http://127.0.0.1:8400/v1/chat/completions -H 'Authorization: Bearer %s' -H 'Content-Type: application/json' \
    -d '{"model":"demo","stream":true,"messages":[{"role":"user","content":"Hello!"}]}'
`, filepath.Join(h.Out, "edge", "api-key"), report.APIKey)
	}
	return nil
}

// readBy says how a process takes what was put below a key of its file.
func readBy(key string, stock bool) string {
	section, _, _ := strings.Cut(key, ".")
	switch {
	case key == "broker.members" && stock:
		return "A nats-server needs none of it: its service admits."
	case key == "broker.members", key == "service.members":
		return "Then kill -HUP the " + section + "s: they read it again, and nothing that runs is touched."
	case section == "broker" && stock:
		return "Then write each nats.conf anew (iop broker config --stock), and restart the nats-servers, one at a time: streams on one end with it,\nand a reload (kill -HUP) would close every Node on it."
	case section == "broker":
		return "Then restart the brokers, one at a time: where there are others each sends its Nodes to them first, and a stream that\nstill runs on it after 8 s ends."
	default:
		return "Then restart the Edge: it reads this when it starts. Running answers get its stop_grace to end."
	}
}
