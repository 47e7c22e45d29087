package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/install"
	"github.com/iop-fabric/iop/internal/up"
)

const (
	defaultUnit = "iop-node"
	// machineFolder is where root's node is, by default: systemd can give it to a
	// user of its own.
	machineFolder = "/var/lib/" + defaultUnit
	// stopMargin is what stopping may take beyond the node's stop_grace.
	stopMargin = 10 * time.Second
)

// unit is a node as something that the operating system starts.
type unit struct {
	dir, file, name, manager string
	dryRun                   bool
}

func (u *unit) flags(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&u.name, "name", defaultUnit, "name of the unit: another one for each further node of a machine")
	f.BoolVar(&u.dryRun, "dry-run", false, "print what would be written and run, and do nothing")
	f.StringVar(&u.manager, "manager", "", "with --dry-run, that of another machine: systemd, launchd or windows")
}

const aboutUnits = `
As root it is one of the whole machine, which starts with it, confined to its own folder; as anybody else one of that
user. On Linux it is a unit of systemd, on macOS a job of launchd, on Windows a service.`

func newNodeInstall() *cobra.Command {
	var u unit
	cmd := &cobra.Command{
		Use:   "install",
		Short: "Have the operating system start this node, now and with the machine",
		Long: `Have the operating system start this node, now and whenever the machine starts. Keys and configuration stay where they
are. The node reconnects by itself whatever starts it.
` + aboutUnits + `

A folder right below /var/lib that is root's is given to a user that systemd makes for it; any other keeps its owner, and
the node runs as that owner. Keys of providers (static_key_name) go into the file environment in the folder, as NAME=value.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			file, err := u.config()
			if err != nil {
				return err
			}
			if !u.dryRun {
				unlock, err := up.Lock(up.Folder(filepath.Dir(file)))
				if errors.Is(err, up.ErrLocked) {
					return fmt.Errorf("iop runs on %s: stop it first, or there would be two of one name", filepath.Dir(file))
				}
				if err != nil {
					return err
				}
				defer unlock()
			}
			return u.install(cmd.Context(), cmd.OutOrStdout(), file)
		},
	}
	cmd.Flags().StringVar(&u.dir, "dir", "", "folder of a machine that joined (default as that of iop join)")
	cmd.Flags().StringVar(&u.file, "config", "", "configuration file with a section node, in place of --dir")
	cmd.MarkFlagsMutuallyExclusive("dir", "config")
	u.flags(cmd)
	return cmd
}

func newNodeUninstall() *cobra.Command {
	var u unit
	cmd := &cobra.Command{
		Use:   "uninstall",
		Short: "Stop what iop node install made, and take it away",
		Long: `Stop what "iop node install" (or "iop join --install") made, and take it away. Keys and configuration stay: the node can be
started again, or installed.
` + aboutUnits,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			// What is taken away is known by its name alone.
			p, err := u.plan(install.Spec{Name: u.name, Binary: systemPath("iop"), Config: systemPath("node.yaml")})
			if err != nil {
				return err
			}
			out := cmd.OutOrStdout()
			if u.dryRun {
				commands(out, p.Stop)
				if p.File != "" {
					fmt.Fprintf(out, "remove %s\n", p.File)
				}
				commands(out, p.Stopped)
				return nil
			}
			if err := (install.Host{Run: install.Command}).Uninstall(cmd.Context(), p); err != nil {
				return err
			}
			fmt.Fprintf(out, "%s is taken away; its keys and configuration are left.\n", u.name)
			return nil
		},
	}
	u.flags(cmd)
	return cmd
}

// systemPath is an absolute path of this kind of machine.
func systemPath(name string) string {
	abs, err := filepath.Abs(string(filepath.Separator) + name)
	if err != nil {
		return string(filepath.Separator) + name
	}
	return abs
}

// config is the file of the node that is meant.
func (u unit) config() (string, error) {
	if u.file != "" {
		return filepath.Abs(u.file)
	}
	if u.dir == "" && wholeMachine() {
		if _, err := os.Stat(filepath.Join(machineFolder, "node.yaml")); err == nil {
			return filepath.Join(machineFolder, "node.yaml"), nil
		}
	}
	folder, err := joinFolder(u.dir)
	if err == nil {
		if _, none := os.Stat(folder.NodeConfig()); none != nil {
			err = fmt.Errorf("%s holds no machine that has joined: name its folder with --dir, a configuration with --config, or join first (iop join HOST:PORT TOKEN --install)", folder)
		}
	}
	return folder.NodeConfig(), err
}

// wholeMachine: root installs for the machine.
func wholeMachine() bool { return os.Geteuid() == 0 && runtime.GOOS == "linux" }

// install makes the node of a configuration one that the operating system starts.
func (u unit) install(ctx context.Context, out io.Writer, file string) error {
	cfg, err := configs.Load(file)
	switch {
	case err != nil:
		return err
	case cfg.Node == nil:
		return fmt.Errorf("%s: has no section node: is it the file of another process?", file)
	}
	refused := u.possible()
	if refused == nil {
		_, refused = configs.Check(file, time.Now()) // or it would only be started again and again
	}
	if refused != nil && !u.dryRun {
		return refused
	}
	binary, err := ownBinary()
	if err != nil {
		return err
	}
	s := install.Spec{Name: u.name, Node: cfg.Node.Name, Binary: binary, Config: file, Stop: cfg.Node.StopGrace + stopMargin}
	root, err := s.Own()
	if err != nil {
		return err
	}
	p, err := u.plan(s)
	if err != nil {
		return err
	}
	if root && p.Manager == "systemd" {
		p.Notes = append(p.Notes, fmt.Sprintf("It runs as root, whose the keys in %s are; in %s it would have a user of its own", filepath.Dir(file), machineFolder))
	}
	if u.dryRun {
		if p.File != "" {
			fmt.Fprintf(out, "write %s:\n\n%s\n", p.File, p.Text)
		}
		commands(out, p.Start)
		if refused != nil && u.manager == "" {
			fmt.Fprintf(out, "\nWithout --dry-run it would be refused: %v\n", refused)
		}
		return nil
	}
	if err := (install.Host{Run: install.Command}).Install(ctx, p); err != nil {
		return err
	}
	fmt.Fprintf(out, "%s is installed and started: it runs now, and whenever the machine starts.\n", u.name)
	for _, n := range p.Notes {
		fmt.Fprintf(out, "  %s\n", n)
	}
	return nil
}

// possible says what keeps this machine from starting this iop.
func (u unit) possible() error {
	binary, err := ownBinary()
	if err != nil {
		return err
	}
	if err := install.Temporary(binary, os.TempDir()); err != nil {
		return err
	}
	user := os.Geteuid() > 0
	if runtime.GOOS != "linux" {
		return nil
	}
	if err := (install.Spec{Binary: binary, User: user}).Hidden(); err != nil {
		return err
	}
	return install.Booted("", user, os.Getenv("XDG_RUNTIME_DIR"))
}

// ownBinary is this very program.
func ownBinary() (string, error) {
	binary, err := os.Executable()
	if err == nil {
		binary, err = filepath.EvalSymlinks(binary)
	}
	if err != nil {
		return "", fmt.Errorf("where this iop is cannot be told: %w", err)
	}
	return binary, nil
}

// plan is what this machine's service manager takes, or the one that is named.
func (u unit) plan(s install.Spec) (install.Plan, error) {
	own := map[string]string{"linux": "systemd", "darwin": "launchd", "windows": "windows"}[runtime.GOOS]
	manager := u.manager
	switch {
	case manager == "":
		manager = own
	case manager != own && !u.dryRun:
		return install.Plan{}, usageError{fmt.Errorf("--manager %s is not this machine's: it goes with --dry-run alone", manager)}
	}
	s.User = os.Geteuid() > 0
	var err error
	if s.User {
		if s.Home, err = os.UserHomeDir(); err != nil {
			return install.Plan{}, err
		}
	}
	switch manager {
	case "systemd":
		return install.Systemd(s)
	case "launchd":
		if s.User {
			s.Owner = fmt.Sprint(os.Geteuid()) // its domain is by number
		}
		return install.Launchd(s)
	case "windows":
		return install.Windows(s)
	case "":
		return install.Plan{}, fmt.Errorf("no service manager of %s is known: have yours start \"iop node --config FILE\"", runtime.GOOS)
	}
	return install.Plan{}, usageError{fmt.Errorf("--manager %q: want systemd, launchd or windows", manager)}
}

func commands(out io.Writer, all [][]string) {
	for _, c := range all {
		words := make([]string, len(c))
		for i, w := range c {
			words[i] = up.Quote(w)
		}
		fmt.Fprintln(out, strings.Join(words, " "))
	}
}
