package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"

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

Without --out the steps are taken by the running "iop up" of the default data folder. To finish, a broker's admin
listener is asked who still shows a certificate of the old CA: --config, or --url with --token-file.`,
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
			case takenBy[identity.Role(args[0])] == "":
				return usageError{fmt.Errorf("rotate %s: want node, leaf, broker, service, edge, ca or issuer", args[0])}
			case args[0] == string(identity.RoleNode) && len(args) == 1: // the machine's own; RunE looks
				return nil
			case len(args) != 2:
				return usageError{fmt.Errorf("rotate %s takes one NAME, got %d arguments", args[0], len(args)-1)}
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if (args[0] == up.ExchangeCA || args[0] == up.ExchangeIssuer) && args[1] == stepStatus {
				return rotateStatus(cmd, o)
			}
			if args[0] == up.ExchangeCA || args[0] == up.ExchangeIssuer {
				return rotateExchange(cmd, o, up.Exchange{Out: r.Out, What: args[0], Step: args[1], Force: force})
			}
			if force {
				return usageError{errors.New("--force is of rotate ca and rotate issuer")}
			}
			if r.Out == "" && r.NKey && args[0] == string(identity.RoleNode) && len(args) == 1 {
				return rotateOwnNKey(cmd, joined, o.asJSON)
			}
			switch {
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
			return printRotated(cmd.OutOrStdout(), r, done, o.asJSON)
		},
	}
	o.flags(cmd)
	f := cmd.Flags()
	f.StringVar(&r.Out, "out", "", "the folder that iop init --out made")
	f.BoolVar(&r.NewKey, "key", false, "make a new key, too")
	f.BoolVar(&r.NKey, "nkey", false, "make a new nkey, and leave the certificate")
	f.StringVar(&joined, "dir", "", "folder of a node that joined, whose nkey is exchanged")
	f.BoolVar(&force, "force", false, "take a step of ca or issuer though members would be locked out, or nobody could be asked")
	return cmd
}

func printRotated(out io.Writer, r up.Rotation, done up.Rotated, asJSON bool) error {
	until := done.Certificate.Leaf.NotAfter
	if asJSON {
		line := map[string]any{"files": done.Files, "expires": until}
		if r.NKey {
			line["member"], line["replaces"] = strings.TrimSpace(done.Member), done.Replaces
		}
		return json.NewEncoder(out).Encode(line)
	}
	if r.NKey {
		fmt.Fprintf(out, `A new nkey for %s.

1. Put this line into broker.members of every broker, beside the one there, and kill -HUP the brokers:
%s2. Copy to its host, over the file there: %s
3. %s
4. When it has logged that it is back, take the line with %s out of every broker's file, and kill -HUP the brokers.
`, done.Certificate.ID(), done.Member, strings.Join(done.Files, ", "), nkeyTakenBy[r.Role], done.Replaces)
		return nil
	}
	how := "Copy to its host, over the file there: " + strings.Join(done.Files, ", ")
	if r.NewKey {
		how = fmt.Sprintf(`Copy to its host, in this order: %s as cert.key.next, beside the key there; %s over the file there;
   then rename cert.key.next to cert.key. There is a pair at every moment`, done.Files[1], done.Files[0])
	}
	fmt.Fprintf(out, `Signed anew for %s, until %s.

1. %s
2. %s
`, done.Certificate.ID(), until.Local().Format("2006-01-02"), how, takenBy[r.Role])
	return nil
}

// takenBy says how each process takes what was copied.
var takenBy = map[identity.Role]string{
	identity.RoleNode:    "kill -HUP its process: it lets what runs end, and dials anew. Without that its next dial takes it.",
	identity.RoleEdge:    "kill -HUP its process, or wait a minute: it signs with it then; its connection to the broker shows it when that is made anew.",
	identity.RoleBroker:  "kill -HUP its process: new connections see it, those that stand are not touched.",
	identity.RoleService: "kill -HUP its process: its next connection shows it.",
	identity.RoleLeaf:    "kill -HUP its process: new connections see it, those that stand are not touched.",
}

// nkeyTakenBy says the same of an nkey.
var nkeyTakenBy = map[identity.Role]string{
	identity.RoleNode: "kill -HUP its process: it lets what runs end, and dials anew.",
	identity.RoleEdge: "kill -HUP its process: its connection to the broker is made anew, and streams go on.",
	identity.RoleLeaf: "It needs a restart: the link's nkey is part of the server's configuration. Its site's sessions end with it.",
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

// rotateExchange takes one step of an exchange.
func rotateExchange(cmd *cobra.Command, o operator, e up.Exchange) error {
	out := cmd.OutOrStdout()
	if e.Out == "" {
		client, err := o.client()
		if err != nil {
			return err
		}
		done, err := client.Exchange(cmd.Context(), e.What, e.Step, adminapi.Step{Force: e.Force})
		if err != nil {
			return err
		}
		if o.asJSON {
			return json.NewEncoder(out).Encode(done)
		}
		fmt.Fprintln(out, upStepped[e.What+" "+e.Step])
		return nil
	}
	if e.Step == up.StepFinish && !e.Force && (o.file != "" || o.url != "") {
		client, err := o.client()
		if err != nil {
			return err
		}
		k, err := client.Keys(cmd.Context())
		if err != nil {
			return err
		}
		e.Live = &broker.Keys{Issuer: k.Issuer, Pinned: k.PinnedIssuer}
		for _, root := range k.Roots {
			e.Live.Roots = append(e.Live.Roots, broker.Root(root))
		}
		for _, m := range k.Members {
			e.Live.Members = append(e.Live.Members, broker.Shown(m))
		}
	}
	done, err := e.Run()
	if err != nil {
		return err
	}
	if o.asJSON {
		files := map[string][]string{}
		for _, f := range done.Files {
			files[f.Folder] = f.Names
		}
		return json.NewEncoder(out).Encode(map[string]any{"files": files, "key": done.Key})
	}
	printExchanged(out, e, done)
	return nil
}

// upStepped says what a step did in an iop up, and what is next.
var upStepped = map[string]string{
	"ca begin":      "There is a new CA beside the old one. Nodes that are connected learn it within seconds. Next: iop rotate ca switch",
	"ca switch":     "The new CA signs. Nodes follow by themselves, when nothing runs on them, or within three minutes. Next: iop rotate ca finish, which says who has not followed.",
	"ca finish":     "The old CA is trusted no more. Take a backup of the data folder.",
	"issuer begin":  "There is a new issuer beside the old one, and the Edge believes both. Next: iop rotate issuer switch",
	"issuer switch": "The new issuer signs session tokens. Next: iop rotate issuer finish",
	"issuer finish": "The old issuer is believed no more. The broker itself goes on with it for its own connections until iop up is restarted. Take a backup.",
}

func printExchanged(out io.Writer, e up.Exchange, done up.Exchanged) {
	if len(done.Files) > 0 {
		table(out, "HOST\tCOPY, OVER WHAT IS THERE", func(row func(...any)) {
			for _, f := range done.Files {
				row(f.Folder, strings.Join(f.Names, " "))
			}
		})
		fmt.Fprintln(out)
	}
	again := func(step string) string { return fmt.Sprintf("iop rotate %s %s --out %s", e.What, step, e.Out) }
	invites := slices.ContainsFunc(done.Files, func(f up.HostFiles) bool { return slices.Contains(f.Names, "ca.key") })
	switch e.What + " " + e.Step {
	case "ca begin":
		fmt.Fprintf(out, `There is a new CA beside the old one, which still signs.

1. Copy each host its file, and kill -HUP its process: brokers first. Nodes of a fabric where a broker invites need nothing:
   they learn it over their sessions (node.trust_learnt).
2. When the brokers and the Edge have logged broker.rotated and edge.roots_renewed: %s
`, again(up.StepSwitch))
	case "ca switch":
		fmt.Fprintf(out, `The new CA signs.

1. Copy each host its files, and kill -HUP its process: brokers first, then the Edge, leaves, and Nodes.
`)
		if invites {
			fmt.Fprintf(out, "   Machines that joined follow by themselves, and so do Nodes here: within minutes, when nothing runs on them.\n")
		}
		fmt.Fprintf(out, `2. %s --config broker-1.yaml
   It says who has not followed. A machine that is off until after that has to be given its files by hand, or be invited anew.
`, again(up.StepFinish))
	case "ca finish":
		fmt.Fprintf(out, `The old CA is to be trusted no more.

1. Copy each host its file, and kill -HUP its process. Nodes of a fabric where a broker invites learn it over their sessions.
`)
	case "issuer begin":
		fmt.Fprintf(out, `There is a new issuer: %s

1. Add it to edge.issuers of edge/edge.yaml, beside the one there, on each Edge's host too, and kill -HUP the Edges
   (edge.issuers_renewed). Do the same with whatever else pins the issuer.
2. %s
`, done.Key, again(up.StepSwitch))
	case "issuer switch":
		fmt.Fprintf(out, `The new issuer, %s, is to sign.

1. Copy each broker its files, and kill -HUP it: session tokens are signed by the new issuer from then on
   (broker.issuer_rotated), and nothing that runs is touched.
2. A broker's own server, and a leaf's, pin the old one until they are restarted (broker.needs_restart), and are answered with
   it. Restart brokers one at a time: each sends its Nodes to the others first. A single one at a quiet hour, since the sessions
   on it end. Of a leaf set leaf.issuer to
   the new one, and restart it.
3. %s --config broker-1.yaml
`, done.Key, again(up.StepFinish))
	case "issuer finish":
		fmt.Fprintf(out, `1. Remove issuer-old.nk from every broker's host, and kill -HUP the brokers.
2. Leave %s alone in edge.issuers of edge/edge.yaml, on each Edge's host too, and kill -HUP the Edges.
3. Take a backup: one from before is signed by the old issuer.
`, done.Key)
	}
}
