package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"

	"github.com/spf13/cobra"

	"github.com/iop-fabric/iop/broker"
	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/adminapi"
	"github.com/iop-fabric/iop/internal/identity"
	"github.com/iop-fabric/iop/internal/up"
)

func newRotate() *cobra.Command {
	var (
		r      up.Rotation
		o      operator
		joined string
		force  bool
		// whom to ask: only a finish asks several
		files, urls []string
	)
	cmd := &cobra.Command{
		Use:   "rotate node|leaf|broker|service|edge [NAME] | ca|issuer begin|switch|finish",
		Short: "Exchange a certificate, a key, the issuer or the CA, while the fabric runs",
		Long: `Sign the certificate of a member anew, for another year, in the folder that "iop init --out" made, and say what to do
with it on the member's host. The old one is good until its end, so nothing that runs is lost.

  iop rotate node gpu1 --out fabric
  iop rotate broker broker-2 --out fabric --key    # a new key, too
  iop rotate node gpu1 --out fabric --nkey         # a new nkey, and nothing else
  iop rotate edge --out fabric

What renews itself needs none of this: "iop up", and every node of a fabric where a broker invites (broker.enrolment).
Such a node makes another nkey itself, on its own machine:

  iop rotate node --nkey                           # of the default folder of iop join; --dir names another

The CA, and the issuer of session tokens, are exchanged in three steps. Each says what to do before the next one:

  iop rotate ca begin --out fabric                 # the new CA beside the old one
  iop rotate ca switch --out fabric                # the new one signs
  iop rotate ca finish --out fabric --config broker-1.yaml   # the old one is trusted no more
  iop rotate ca status --config broker-1.yaml      # who shows a certificate of which

Without --out the steps are taken by the running "iop up" of the default data folder. To finish, every broker's admin
listener is asked whether it signs with the new one, and who still shows a certificate of the old CA: --config, on its
host, or --url with --token-file, once for each broker. Where nats-servers of your own are in the brokers' place
(iop init --stock), their services are asked: service-1.yaml.`,
		Args: func(_ *cobra.Command, args []string) error {
			switch {
			case len(args) == 0:
				return usageError{errors.New("rotate what? node NAME, leaf NAME, broker NAME, service NAME, edge, ca STEP or issuer STEP")}
			case args[0] == up.ExchangeCA || args[0] == up.ExchangeIssuer:
				if len(args) != 2 {
					return usageError{fmt.Errorf("rotate %s takes one step: begin, switch or finish; or status", args[0])}
				}
				if args[1] == stepStatus {
					return nil
				}
				if err := up.CheckExchange(args[0], args[1]); err != nil {
					return usageError{fmt.Errorf("rotate %w", err)}
				}
				return nil
			case args[0] == string(identity.RoleEdge) && len(args) == 1:
				return nil
			case args[0] == string(identity.RoleEdge):
				return usageError{errors.New("rotate edge takes no name: a folder is of one edge")}
			case takenBy(identity.Role(args[0]), false) == "":
				return usageError{fmt.Errorf("rotate %s: want node, leaf, broker, service, edge, ca or issuer", args[0])}
			case args[0] == string(identity.RoleNode) && len(args) == 1: // the machine's own; RunE looks
				return nil
			case len(args) != 2:
				return usageError{fmt.Errorf("rotate %s takes one NAME, got %d arguments", args[0], len(args)-1)}
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			exchanges := args[0] == up.ExchangeCA || args[0] == up.ExchangeIssuer
			asked, err := o.each(files, urls)
			switch {
			case err != nil:
				return err
			case len(asked) > 1 && (!exchanges || args[1] != up.StepFinish || r.Out == ""):
				return usageError{errors.New("several are asked by the step finish with --out alone: give one --config or --url")}
			case exchanges && args[1] == stepStatus:
				return rotateStatus(cmd, asked[0])
			case exchanges:
				return rotateExchange(cmd, asked, up.Exchange{Out: r.Out, What: args[0], Step: args[1], Force: force})
			}
			if force {
				return usageError{errors.New("--force is of rotate ca and rotate issuer")}
			}
			if r.Out == "" && r.NKey && args[0] == string(identity.RoleNode) && len(args) == 1 {
				return rotateOwnNKey(cmd, joined, o.asJSON)
			}
			switch {
			case joined != "" && !r.NKey:
				return usageError{errors.New("--dir goes with --nkey: a machine that joined has its certificate renewed by itself")}
			case joined != "":
				return usageError{errors.New("--dir is of a machine that joined: iop rotate node --nkey --dir DIR, without NAME and --out")}
			case r.Out == "":
				return usageError{errors.New("rotate needs the authority's folder: --out DIR")}
			case len(args) == 1 && args[0] == string(identity.RoleNode):
				return usageError{errors.New("rotate node takes one NAME, got 0 arguments")}
			case r.NKey && r.NewKey:
				return usageError{errors.New("--key and --nkey are two rotations: take one after the other")}
			}
			r.Role = identity.Role(args[0])
			if len(args) == 2 {
				r.Name = args[1]
			}
			done, err := r.Run()
			if err != nil {
				return err
			}
			_, stock, err := up.Authorities(r.Out)
			if err != nil {
				return err
			}
			return printRotated(cmd.OutOrStdout(), r, done, stock, o.asJSON)
		},
	}
	o.otherFlags(cmd)
	f := cmd.Flags()
	f.StringArrayVar(&files, "config", nil, "configuration file of the process to ask; to finish, once for each broker")
	f.StringArrayVar(&urls, "url", nil, "admin listener to ask, such as http://127.0.0.1:8401; to finish, once for each broker")
	cmd.MarkFlagsMutuallyExclusive("data-dir", "config", "url")
	f.StringVar(&r.Out, "out", "", "the folder that iop init --out made")
	f.BoolVar(&r.NewKey, "key", false, "make a new key, too")
	f.BoolVar(&r.NKey, "nkey", false, "make a new nkey, and leave the certificate")
	f.StringVar(&joined, "dir", "", "folder of a node that joined, whose nkey is exchanged")
	f.BoolVar(&force, "force", false, "take a step of ca or issuer though members would be locked out, or nobody could be asked")
	return cmd
}

// rotateOwnNKey makes the nkey that a node on this machine is to register.
func rotateOwnNKey(cmd *cobra.Command, dir string, asJSON bool) error {
	folder, err := joinFolder(dir)
	if err != nil {
		return err
	}
	if _, err := os.Stat(folder.NodeConfig()); errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%s holds no machine that has joined: name its folder with --dir, or take --out for a node whose files you copy", folder)
	}
	cfg, err := configs.Load(folder.NodeConfig())
	if err != nil {
		return err
	}
	public, err := up.NextNKey(*cfg.Node)
	if err != nil {
		return err
	}
	if asJSON {
		return json.NewEncoder(cmd.OutOrStdout()).Encode(map[string]any{"node": cfg.Node.Name, "nkey": public})
	}
	fmt.Fprintf(cmd.OutOrStdout(), `Made for node %s: %s

kill -HUP its process: it has it registered over its session, beside the one it has, dials anew with it once nothing runs,
and the old one is good for nothing from then on. Without that it does so after its next dial. It logs node.nkey_registered.
`, cfg.Node.Name, public)
	return nil
}

// stepStatus is no step: it shows where an exchange is.
const stepStatus = "status"

// rotateStatus shows what a broker knows of the exchanges.
func rotateStatus(cmd *cobra.Command, o operator) error {
	client, err := o.client()
	if err != nil {
		return err
	}
	k, err := client.Keys(cmd.Context())
	if err != nil {
		return err
	}
	out := cmd.OutOrStdout()
	if o.asJSON {
		return json.NewEncoder(out).Encode(k)
	}
	table(out, "CA\tSIGNS\tEXPIRES", func(row func(...any)) {
		for _, root := range k.Roots {
			signs := "no"
			if root.Signs {
				signs = "yes"
			}
			row(root.ID, signs, root.Expires.Local().Format("2006-01-02"))
		}
	})
	fmt.Fprintln(out)
	table(out, "MEMBER\tCAME LAST WITH A CERTIFICATE OF", func(row func(...any)) {
		for _, m := range k.Members {
			row(m.Role+" "+m.Name, dash(m.Root))
		}
	})
	fmt.Fprintf(out, "\nSession tokens are signed by %s.\n", k.Issuer)
	if k.PinnedIssuer != k.Issuer {
		fmt.Fprintf(out, "The server itself goes on with %s until it is restarted.\n", k.PinnedIssuer)
	}
	for _, m := range k.Members {
		if m.Issuer != "" && m.Issuer != k.Issuer {
			fmt.Fprintf(out, "Leaf %s pins %s.\n", m.Name, m.Issuer)
		}
	}
	return nil
}

// each is one operator for each process that is to be asked; without a flag the one that asks an iop up.
func (o operator) each(files, urls []string) (all []operator, err error) {
	if len(files)+len(urls) == 0 {
		return []operator{o}, nil
	}
	seen := map[string]bool{}
	for i, whom := range slices.Concat(files, urls) {
		if seen[whom] {
			return nil, usageError{fmt.Errorf("%s is named twice: name each broker once", whom)}
		}
		seen[whom] = true
		one := o
		if i < len(files) {
			one.file = whom
		} else {
			one.url = whom
		}
		all = append(all, one)
	}
	return all, nil
}

// rotateExchange takes one step of an exchange.
func rotateExchange(cmd *cobra.Command, asked []operator, e up.Exchange) error {
	out, first := cmd.OutOrStdout(), asked[0]
	if e.Out == "" {
		client, err := first.client()
		if err != nil {
			return err
		}
		done, err := client.Exchange(cmd.Context(), e.What, e.Step, adminapi.Step{Force: e.Force})
		if err != nil {
			return err
		}
		if first.asJSON {
			return json.NewEncoder(out).Encode(done)
		}
		fmt.Fprintln(out, upStepped(e.What, e.Step, first))
		return nil
	}
	if e.Step == up.StepFinish && !e.Force && (first.file != "" || first.url != "") {
		for _, o := range asked {
			a, err := o.keys(cmd)
			if err != nil {
				return err
			}
			e.Live = append(e.Live, a)
		}
	}
	done, err := e.Run()
	if err != nil {
		return err
	}
	folders, stock, err := up.Authorities(e.Out)
	if err != nil {
		return err
	}
	if first.asJSON {
		files := map[string][]string{}
		for _, f := range done.Files {
			files[f.Folder] = f.Names
		}
		line := map[string]any{"files": files}
		if done.Key != "" {
			line["key"] = done.Key
		}
		if e.Step == up.StepFinish {
			line["asked"], line["to_ask"] = whom(e), len(folders)
		}
		return json.NewEncoder(out).Encode(line)
	}
	printExchanged(out, e, done, len(folders), stock)
	return nil
}

// whom says who was asked.
func whom(e up.Exchange) []string {
	names := []string{}
	for _, a := range e.Live {
		names = append(names, a.Whom)
	}
	return names
}

// keys asks one broker or service.
func (o operator) keys(cmd *cobra.Command) (a up.Asked, err error) {
	client, err := o.client()
	if err != nil {
		return a, err
	}
	k, err := client.Keys(cmd.Context())
	if err != nil {
		return a, err
	}
	a.Whom, a.Issuer, a.Pinned = client.URL, k.Issuer, k.PinnedIssuer
	for _, root := range k.Roots {
		a.Roots = append(a.Roots, broker.Root(root))
	}
	for _, m := range k.Members {
		a.Members = append(a.Members, broker.Shown(m))
	}
	return a, nil
}
