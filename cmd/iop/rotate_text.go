package main

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/iop-fabric/iop/internal/identity"
	"github.com/iop-fabric/iop/internal/up"
)

// admitting is what an operator calls those who admit members: brokers or, where
// nats-servers of an operator's own are in their place, the services beside them.
func admitting(stock bool) string {
	if stock {
		return string(identity.RoleService)
	}
	return string(identity.RoleBroker)
}

// restartsStock is how a nats-server takes other files. What iop reads at a hangup it
// reads at its start alone (B1).
const restartsStock = "restart the nats-servers, one at a time: each reads its files when it starts, streams on it end, and a reload (kill -HUP) would close every Node on it"

func printRotated(out io.Writer, r up.Rotation, done up.Rotated, stock, asJSON bool) error {
	until := done.Certificate.Leaf.NotAfter
	if asJSON {
		line := map[string]any{"files": done.Files, "expires": until}
		if r.NKey {
			line["member"], line["replaces"] = strings.TrimSpace(done.Member), done.Replaces
		}
		return json.NewEncoder(out).Encode(line)
	}
	if r.NKey {
		who := admitting(stock)
		fmt.Fprintf(out, `A new nkey for %s.

1. Put this line into %s.members of every %s, beside the one there, and then kill -HUP the %ss:
%s2. Copy to its host, over the file there: %s
3. %s
4. When it has logged that it is back, take the line with %s out of every %s's file, and kill -HUP the %ss.
`, done.Certificate.ID(), who, who, who, done.Member, strings.Join(done.Files, ", "), nkeyTakenBy[r.Role], done.Replaces, who, who)
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
`, done.Certificate.ID(), until.Local().Format("2006-01-02"), how, takenBy(r.Role, stock))
	return nil
}

// takenBy says how a process takes what was copied; empty: there is none of that role.
func takenBy(r identity.Role, stock bool) string {
	if stock && r == identity.RoleBroker {
		return "Restart its nats-server, while no other is being restarted: it reads its files when it starts, streams on it end, and a reload\n" +
			"   (kill -HUP) would close every Node on it."
	}
	return map[identity.Role]string{
		identity.RoleNode:    "kill -HUP its process: it lets what runs end, and dials anew. Without that its next dial takes it.",
		identity.RoleEdge:    "kill -HUP its process, or wait a minute: it signs with it then; its connection to the broker shows it when that is made anew.",
		identity.RoleBroker:  "kill -HUP its process: new connections see it, those that stand are not touched.",
		identity.RoleService: "kill -HUP its process: its next connection shows it.",
		identity.RoleLeaf:    "kill -HUP its process: new connections see it, those that stand are not touched.",
	}[r]
}

// nkeyTakenBy says the same of an nkey.
var nkeyTakenBy = map[identity.Role]string{
	identity.RoleNode: "kill -HUP its process: it lets what runs end, and dials anew.",
	identity.RoleEdge: "kill -HUP its process: its connection to the broker is made anew, and streams go on.",
	identity.RoleLeaf: "Restart it: the link's nkey is part of its server's configuration. The streams of its site end with it.",
}

// upStepped says what a step did in an iop up, and what is next, with whom o asks.
func upStepped(what, step string, o operator) string {
	again := func(step string) string {
		line := "iop rotate " + what + " " + step
		for _, f := range []struct{ flag, value string }{{"--data-dir", o.dir}, {"--config", o.file}, {"--url", o.url}, {"--token-file", o.tokenFile}} {
			if f.value != "" {
				line += " " + f.flag + " " + f.value
			}
		}
		return line
	}
	switch what + " " + step {
	case "ca begin":
		return "There is a new CA beside the old one. Nodes that are connected learn it within seconds. Next: " + again(up.StepSwitch)
	case "ca switch":
		return "The new CA signs. Nodes follow by themselves, once nothing runs on them. Then this, which says who has not followed: " + again(up.StepFinish)
	case "ca finish":
		return "The old CA is trusted no more. Take a backup of the data folder."
	case "issuer begin":
		return "There is a new issuer beside the old one, and the Edge believes both. Next: " + again(up.StepSwitch)
	case "issuer switch":
		return "The new issuer signs session tokens. Next: " + again(up.StepFinish)
	default: // issuer finish
		return "The old issuer is believed no more. The broker itself goes on with it for its own connections until iop up is restarted, which ends the streams on it. Take a backup."
	}
}

// printExchanged says what to do after a step in a folder where that many brokers, or
// services, are.
func printExchanged(out io.Writer, e up.Exchange, done up.Exchanged, many int, stock bool) {
	who := admitting(stock)
	if e.Step == up.StepFinish {
		printAsked(out, e, many, who)
	}
	if len(done.Files) > 0 {
		table(out, "HOST\tCOPY, OVER WHAT IS THERE", func(row func(...any)) {
			for _, f := range done.Files {
				row(f.Folder, strings.Join(f.Names, " "))
			}
		})
		fmt.Fprintln(out)
	}
	again := func(step string) string { return fmt.Sprintf("iop rotate %s %s --out %s", e.What, step, e.Out) }
	finish := fmt.Sprintf("%s --config %s-1.yaml", again(up.StepFinish), who)
	if many > 1 {
		finish += fmt.Sprintf("\n   Name each of the %d %ss: --config for each, or --url for each, with --token-file.", many, who)
	}
	invites := slices.ContainsFunc(done.Files, func(f up.HostFiles) bool { return slices.Contains(f.Names, "ca.key") })
	hangup := "kill -HUP its process: brokers first, then the Edge, leaves, and Nodes."
	if stock {
		hangup = "kill -HUP its process: services first, then the Edge, leaves, and Nodes; but\n   " + restartsStock + "."
	}
	switch e.What + " " + e.Step {
	case "ca begin":
		fmt.Fprintf(out, `There is a new CA beside the old one, which still signs.

1. Copy each host its file, and %s
   Nodes of a fabric where a %s invites need nothing: they learn it over their sessions (node.trust_learnt).
2. When the %ss and the Edge have logged broker.rotated and edge.roots_renewed: %s
`, hangup, who, who, again(up.StepSwitch))
	case "ca switch":
		fmt.Fprintf(out, `The new CA signs.

1. Copy each host its files, and %s
`, hangup)
		if invites {
			fmt.Fprintf(out, "   Machines that joined follow by themselves, and so do Nodes here: once nothing runs on them.\n")
		}
		fmt.Fprintf(out, `2. %s
   It says who has not followed. A machine that is off until after that has to be given its files by hand, or be invited anew.
`, finish)
	case "ca finish":
		fmt.Fprintf(out, `The old CA is to be trusted no more.

1. Copy each host its file, and %s
   Nodes of a fabric where a %s invites learn it over their sessions.
`, hangup, who)
	case "issuer begin":
		fmt.Fprintf(out, `There is a new issuer: %s

1. Add it to edge.issuers of edge/edge.yaml, beside the one there, on each Edge's host too, and kill -HUP the Edges
   (edge.issuers_renewed). Do the same with whatever else pins the issuer.
2. %s
`, done.Key, again(up.StepSwitch))
	case "issuer switch":
		pins := `A broker's own server, and a leaf's, pin the old one until they are restarted (broker.needs_restart), and are answered with
   it. Restart brokers one at a time: each sends its Nodes to the others first, and a stream that still runs on it after 8 s ends.
   A single one at a quiet hour: the sessions on it end.`
		if stock {
			pins = `Each nats-server pins the old one in its nats.conf, and the service beside it answers it with that. One such pair at a time, at
   a quiet hour, since streams on it end: write nats.conf anew with issuer.nk of the switch (iop broker config --stock
   --config broker-1.yaml > nats.conf), and restart the nats-server and then its service. No reload (kill -HUP) of a
   nats-server: it would close every Node on it.`
		}
		fmt.Fprintf(out, `The new issuer, %s, is to sign.

1. Copy each %s its files, and kill -HUP it: session tokens are signed by the new issuer from then on
   (broker.issuer_rotated), and nothing that runs is touched.
2. %s
   Of a leaf set leaf.issuer to the new one, and restart it: the streams of its site end.
3. %s
`, done.Key, who, pins, finish)
	case "issuer finish":
		fmt.Fprintf(out, `1. Remove issuer-old.nk from the host of every %s, and kill -HUP the %ss.
2. Leave %s alone in edge.issuers of edge/edge.yaml, on each Edge's host too, and kill -HUP the Edges.
3. Take a backup: one from before is signed by the old issuer.
`, who, who, done.Key)
	}
}

// printAsked says who was asked before the old one goes, and that all have to be.
func printAsked(out io.Writer, e up.Exchange, many int, who string) {
	switch n := len(e.Live); {
	case n == 0:
		fmt.Fprintf(out, "Nobody was asked. Each %s is to be asked before you go on: iop rotate %s status.\n\n", who, e.What)
	case n < many:
		fmt.Fprintf(out, "%d of %d %ss were asked: %s. Ask each of the others before you go on: iop rotate %s status.\n\n", n, many, who, strings.Join(whom(e), ", "), e.What)
	default:
		fmt.Fprintf(out, "Asked: %s.\n\n", strings.Join(whom(e), ", "))
	}
}
