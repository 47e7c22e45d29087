package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/adminapi"
	"github.com/iop-fabric/iop/wire"
)

func newInvite() *cobra.Command {
	var (
		o          operator
		list       bool
		cancel     string
		expires    time.Duration
		brokerURLs []string
		leaf       string
	)
	cmd := &cobra.Command{
		Use:   "invite NAME",
		Short: "Print the one line with which a new machine joins as node NAME",
		Long: `Print the one line with which a new machine joins as node NAME: it is good once, for this name, and for a day.
A second invitation of a name replaces the first. The line holds the secret: give it to the new machine alone.

The machine is told what to dial: the broker, or what broker.enrolment.broker_urls says. For one behind a leaf, say
--leaf NAME (of broker.enrolment.leaves) or --broker-url, once for each address.

--list shows the invitations, --cancel NAME withdraws one; iop revoke NAME takes a machine out that has joined.
` + whomToAsk(ofAuthority),
		Args: func(_ *cobra.Command, args []string) error {
			switch {
			case list || cancel != "":
				return noArgs(nil, args)
			case len(args) != 1:
				return usageError{fmt.Errorf("invite takes one NAME, got %d arguments", len(args))}
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if leaf != "" && len(brokerURLs) > 0 {
				return usageError{errors.New("--leaf and --broker-url both say what the machine dials: give one of them")}
			}
			for _, u := range brokerURLs {
				if err := configs.CheckBrokerURL(u); err != nil {
					return usageError{fmt.Errorf("--broker-url %q: %w", u, err)}
				}
			}
			if list && cancel != "" {
				return usageError{errors.New("--list and --cancel are two commands: give one of them")}
			}
			client, err := o.client()
			if err != nil {
				return err
			}
			out := cmd.OutOrStdout()
			switch {
			case list:
				return listInvitations(cmd, client, o.asJSON)
			case cancel != "":
				if err := client.CancelInvitation(cmd.Context(), cancel); err != nil {
					return err
				}
				fmt.Fprintf(out, "The invitation of %s is withdrawn.\n", cancel)
				return nil
			}
			if err := wire.CheckName(args[0]); err != nil {
				return usageError{err}
			}
			i, err := client.Invite(cmd.Context(), adminapi.Invite{Name: args[0], ExpiresInMs: expires.Milliseconds(), BrokerURLs: brokerURLs, Leaf: leaf})
			if err != nil {
				return err
			}
			if o.asJSON {
				return json.NewEncoder(out).Encode(i)
			}
			fmt.Fprintf(out, "On the new machine, once, before %s:\n\n  %s\n\n", i.Expires.Local().Format("2006-01-02 15:04"), i.Command)
			if i.Warning != "" {
				fmt.Fprintf(cmd.ErrOrStderr(), "Note: %s.\n", i.Warning)
			}
			return nil
		},
	}
	f := cmd.Flags()
	f.DurationVar(&expires, "expires", 24*time.Hour, "how long it is good, such as 1h")
	f.StringArrayVar(&brokerURLs, "broker-url", nil, "what the machine is to dial, such as tls://attic.example:4222; may be given again")
	f.StringVar(&leaf, "leaf", "", "the leaf the machine is to dial, by its name in enrolment.leaves")
	f.BoolVar(&list, "list", false, "list the invitations")
	f.StringVar(&cancel, "cancel", "", "withdraw the invitation of that name")
	o.flags(cmd)
	return cmd
}

func listInvitations(cmd *cobra.Command, client adminapi.Client, asJSON bool) error {
	all, err := client.Invitations(cmd.Context())
	if err != nil {
		return err
	}
	if asJSON {
		return json.NewEncoder(cmd.OutOrStdout()).Encode(map[string]any{"invitations": all})
	}
	printInvitations(cmd.OutOrStdout(), all, time.Now())
	return nil
}

func printInvitations(w io.Writer, all []adminapi.Invitation, now time.Time) {
	table(w, "NAME\tSTATE\tINVITED\tEXPIRES\tUSED", func(row func(...any)) {
		for _, i := range all {
			expires, used := "-", "-"
			if i.State == "open" {
				expires = "in " + short(i.Expires.Sub(now))
			}
			if !i.Used.IsZero() {
				used = ago(now, i.Used) + " ago"
			}
			row(i.Name, i.State, ago(now, i.Created)+" ago", expires, used)
		}
	})
}

func newRevoke() *cobra.Command {
	var (
		o    operator
		role string
	)
	cmd := &cobra.Command{
		Use:   "revoke NAME",
		Short: "Refuse a node from now on, and close its connection",
		Long: `Refuse a node from now on, close its connection, and withdraw its invitation. Its name can be invited again; its
keys are good for nothing any more.
` + whomToAsk(ofAuthority),
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return usageError{fmt.Errorf("revoke takes one NAME, got %d arguments", len(args))}
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := wire.CheckName(args[0]); err != nil {
				return usageError{err}
			}
			client, err := o.client()
			if err != nil {
				return err
			}
			if err := client.Revoke(cmd.Context(), role, args[0]); err != nil {
				return err
			}
			fmt.Fprintf(cmd.OutOrStdout(), "%s %s is revoked.\n", role, args[0])
			return nil
		},
	}
	f := cmd.Flags()
	f.StringVar(&role, "role", "node", "node, edge or leaf")
	o.flags(cmd)
	return cmd
}
