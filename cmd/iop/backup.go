package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/iop-fabric/iop/broker"
	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/identity"
	"github.com/iop-fabric/iop/internal/up"
)

// authority says whose store is meant.
type authority struct{ dir, file string }

func (a *authority) flags(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&a.dir, "data-dir", "", `data folder of the "iop up" that is meant (default as that of iop up)`)
	f.StringVar(&a.file, "config", "", `configuration file of the broker or service that is meant, or, beside --data-dir, of the "iop up"`)
}

// service makes the service beside a server that is meant, without starting it;
// nil: it is a broker that is.
func (a authority) service() (*broker.Service, error) {
	if a.file == "" {
		return nil, nil //nolint:nilnil // no service is no error
	}
	parts, err := configs.LoadAny(a.file)
	if err != nil || parts.Broker != nil || parts.Service == nil {
		return nil, err
	}
	return broker.NewService(*parts.Service, broker.Deps{})
}

// broker makes the broker that is meant, without starting it.
func (a authority) broker() (*broker.Broker, error) {
	cfg, err := a.config()
	if err != nil {
		return nil, err
	}
	return broker.New(cfg, broker.Deps{})
}

func (a authority) config() (b configs.Broker, err error) {
	single, err := configs.NewSingle(os.Environ())
	if a.file != "" {
		var parts *configs.File
		if parts, err = configs.LoadAny(a.file); err != nil {
			return b, err
		}
		switch {
		case parts.Broker == nil:
			return b, fmt.Errorf("%s: has no section broker or service: is it the file of another process?", a.file)
		case parts.Edge == nil:
			return *parts.Broker, nil
		}
		single, err = configs.LoadSingle(a.file)
	}
	if err != nil {
		return b, err
	}
	folder, err := dataFolder(a.dir)
	if err != nil {
		return b, err
	}
	whole, err := up.Config(up.Options{Folder: folder, File: single})
	if err != nil {
		return b, err
	}
	return *whole.Broker, nil
}

func newBackup() *cobra.Command {
	var (
		a    authority
		o    operator
		show bool
	)
	cmd := &cobra.Command{
		Use:   "backup FILE",
		Short: "Write what the authority knows into one file",
		Long: `Write what the authority knows into one file of mode 0600: the members and their public keys, the invitations (hashes
of their secrets), the Edges' stores, and the highest generation. It holds no key of the fabric: those are files, see
docs/operations.md. Of an Edge's store it holds what the Edge keeps there, so keep it as you keep the store.

It asks the running process; where none runs, it reads the store itself. Beside a nats-server of its own it asks that
server, which must run. --show says what a file holds.

Without a flag it is the "iop up" of the default data folder; --data-dir names another folder, --config the file of a
broker or a service of its own. From another machine: --url, with the token in --token-file or in ` + tokenVariable + `.`,
		Args: oneFile,
		RunE: func(cmd *cobra.Command, args []string) error {
			if show {
				return showBackup(cmd.OutOrStdout(), args[0], o.asJSON)
			}
			o.dir, o.file = a.dir, a.file
			data, err := takeBackup(cmd.Context(), a, o)
			if err != nil {
				return err
			}
			if _, err := broker.ReadBackup(bytes.NewReader(data)); err != nil { // before an older one is replaced
				return err
			}
			if err := identity.WriteKeyFile(args[0], data); err != nil {
				return err
			}
			return showBackup(cmd.OutOrStdout(), args[0], o.asJSON)
		},
	}
	a.flags(cmd)
	f := cmd.Flags()
	f.BoolVar(&show, "show", false, "say what the file holds, and write nothing")
	f.StringVar(&o.url, "url", "", "admin listener to ask, such as http://127.0.0.1:8401")
	f.StringVar(&o.tokenFile, "token-file", "", "file with the admin token")
	f.BoolVar(&o.asJSON, "json", false, "print JSON")
	cmd.MarkFlagsMutuallyExclusive("url", "data-dir")
	cmd.MarkFlagsMutuallyExclusive("url", "config")
	return cmd
}

func oneFile(cmd *cobra.Command, args []string) error {
	if len(args) != 1 {
		return usageError{fmt.Errorf("%s takes one FILE, got %d arguments", cmd.Name(), len(args))}
	}
	return nil
}

// takeBackup reads the store of a process that does not run, or asks the one that
// does.
func takeBackup(ctx context.Context, a authority, o operator) ([]byte, error) {
	if o.url == "" {
		var out bytes.Buffer
		if s, err := a.service(); err != nil || s != nil {
			if err == nil {
				err = s.BackupDirect(ctx, &out)
			}
			return out.Bytes(), err
		}
		b, err := a.broker()
		if err != nil {
			return nil, err
		}
		switch err = b.BackupStopped(ctx, &out); {
		case err == nil:
			return out.Bytes(), nil
		case !errors.Is(err, broker.ErrLocked):
			return nil, err
		}
		if a.dir != "" { // its file says no address that it was not started with
			o.file = ""
		}
	}
	client, err := o.client()
	if err != nil {
		return nil, err
	}
	return client.Backup(ctx)
}

func readBackup(name string) (*broker.Backup, error) {
	f, err := os.Open(filepath.Clean(name))
	if err != nil {
		return nil, err
	}
	defer f.Close() // only read
	b, err := broker.ReadBackup(f)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return b, nil
}

func showBackup(w io.Writer, name string, asJSON bool) error {
	b, err := readBackup(name)
	if err != nil {
		return err
	}
	if asJSON {
		return json.NewEncoder(w).Encode(struct {
			broker.Header
			Names []broker.BackupMember `json:"member_names"`
		}{b.Header, b.Names()})
	}
	fmt.Fprintf(w, "%s: a backup of %s\n", name, b.Created.Local().Format("2006-01-02 15:04:05"))
	for _, line := range [][2]string{
		{"trust domain", b.TrustDomain},
		{"issuer", b.Issuer},
		{"edges", dash(strings.Join(b.Edges, ", "))},
		{"generations up to", fmt.Sprint(b.Generation)},
		{"members", fmt.Sprint(b.Members)},
		{"invitations", fmt.Sprint(b.Invitations)},
		{"keys of Edges' stores", fmt.Sprint(b.StoreKeys)},
	} {
		fmt.Fprintf(w, "  %-21s  %s\n", line[0], line[1])
	}
	for _, m := range b.Names() {
		revoked := ""
		if m.Revoked {
			revoked = " (revoked)"
		}
		fmt.Fprintf(w, "  member                 %s%s\n", m.Name, revoked)
	}
	return nil
}

func newRestore() *cobra.Command {
	var (
		a     authority
		above uint64
	)
	cmd := &cobra.Command{
		Use:   "restore [FILE]",
		Short: "Have a stopped broker begin with a backup, or with higher generations",
		Long: `Have a broker that is stopped begin with what a backup holds: its next start puts it into the stores before anybody is
admitted. The store must be empty, and the backup of this very fabric (its trust domain, its issuer key, its edges).

New generations are above all that the backup knows of, above --generation-above, and above those of a store that is there.
--generation-above N without a FILE changes nothing else: for a broker that says that a part of its store is lost, and
after an older copy of a store was put back.

Without a flag it is the "iop up" of the default data folder; --data-dir names another folder, --config the file of a
broker of its own. Of a cluster whose stores are all lost: for each broker, before the first is started.

Beside a nats-server of its own (--config with a section service) it is put into that server at once: the server runs,
no service does.`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 && above > 0 {
				return nil
			}
			if len(args) == 0 {
				return usageError{errors.New("restore takes a FILE, or --generation-above N, or both")}
			}
			return oneFile(cmd, args)
		},
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			var from *broker.Backup
			if len(args) > 0 {
				if from, err = readBackup(args[0]); err != nil {
					return err
				}
			}
			s, err := a.service()
			switch {
			case err != nil:
				return err
			case s != nil:
				if err := s.Restore(cmd.Context(), from, above); err != nil {
					return err
				}
				fmt.Fprintln(cmd.OutOrStdout(), "It is in the server. Start the service now.")
				return nil
			}
			b, err := a.broker()
			if err != nil {
				return err
			}
			if err := b.Restore(from, above); err != nil {
				if errors.Is(err, broker.ErrLocked) {
					return fmt.Errorf("it runs: stop it first: %w", err)
				}
				return err
			}
			fmt.Fprintln(cmd.OutOrStdout(), "Start it now: it restores before it admits anybody, and says broker.restored.")
			return nil
		},
	}
	a.flags(cmd)
	cmd.Flags().Uint64Var(&above, "generation-above", 0, "new generations are above this one, too")
	return cmd
}
