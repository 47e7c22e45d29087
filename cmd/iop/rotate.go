package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/iop-fabric/iop/internal/identity"
	"github.com/iop-fabric/iop/internal/up"
)

func newRotate() *cobra.Command {
	var (
		r      up.Rotation
		asJSON bool
	)
	cmd := &cobra.Command{
		Use:   "rotate node|leaf|broker|service|edge [NAME]",
		Short: "Sign a certificate anew, in a folder that iop init --out made",
		Long: `Sign the certificate of a member anew, for another year, in the folder that "iop init --out" made, and say what to do
with it on the member's host. The old one is good until its end, so nothing that runs is lost.

  iop rotate node gpu1 --out fabric
  iop rotate broker broker-2 --out fabric --key    # a new key, too
  iop rotate edge --out fabric

What renews itself needs none of this: "iop up", and every node of a fabric where a broker invites (broker.enrolment).`,
		Args: func(_ *cobra.Command, args []string) error {
			switch {
			case len(args) == 0:
				return usageError{errors.New("rotate what? node NAME, leaf NAME, broker NAME, service NAME or edge")}
			case args[0] == string(identity.RoleEdge) && len(args) == 1:
				return nil
			case args[0] == string(identity.RoleEdge):
				return usageError{errors.New("rotate edge takes no name: a folder is of one edge")}
			case takenBy[identity.Role(args[0])] == "":
				return usageError{fmt.Errorf("rotate %s: want node, leaf, broker, service or edge", args[0])}
			case len(args) != 2:
				return usageError{fmt.Errorf("rotate %s takes one NAME, got %d arguments", args[0], len(args)-1)}
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if r.Out == "" {
				return usageError{errors.New("rotate needs the authority's folder: --out DIR")}
			}
			r.Role = identity.Role(args[0])
			if len(args) == 2 {
				r.Name = args[1]
			}
			done, err := r.Run()
			if err != nil {
				return err
			}
			out := cmd.OutOrStdout()
			until := done.Certificate.Leaf.NotAfter
			if asJSON {
				return json.NewEncoder(out).Encode(map[string]any{"files": done.Files, "expires": until})
			}
			fmt.Fprintf(out, `Signed anew for %s, until %s.

1. Copy to its host, over the files there: %s
2. %s
`, done.Certificate.ID(), until.Local().Format("2006-01-02"), strings.Join(done.Files, ", "), takenBy[r.Role])
			return nil
		},
	}
	f := cmd.Flags()
	f.StringVar(&r.Out, "out", "", "the folder that iop init --out made (required)")
	f.BoolVar(&r.NewKey, "key", false, "make a new key, too")
	f.BoolVar(&asJSON, "json", false, "print one line of JSON")
	return cmd
}

// takenBy says how each process takes what was copied.
var takenBy = map[identity.Role]string{
	identity.RoleNode:    "kill -HUP its process: it lets what runs end, and dials anew. Without that its next dial takes it.",
	identity.RoleEdge:    "kill -HUP its process, or wait a minute: it signs with it then; its connection to the broker shows it when that is made anew.",
	identity.RoleBroker:  "kill -HUP its process: new connections see it, those that stand are not touched.",
	identity.RoleService: "kill -HUP its process: its next connection shows it.",
	identity.RoleLeaf:    "kill -HUP its process: new connections see it, those that stand are not touched.",
}
