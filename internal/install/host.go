package install

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// What keeps a plan from being carried out.
var (
	ErrInstalled    = errors.New("is installed already: take it away first with iop node uninstall")
	ErrNotInstalled = errors.New("is not installed")
	ErrForeign      = errors.New("is not of iop: it is left as it is; choose another name with --name")
)

// Host is the machine that a plan is carried out on.
type Host struct {
	Root string // where its files are; empty: this machine's
	// Run runs a command of the service manager.
	Run func(ctx context.Context, command []string) error
}

// Install writes the unit and starts it. What is there already, word for word, is
// only started.
func (h Host) Install(ctx context.Context, p Plan) error {
	what := p.File
	if what == "" {
		what = "It"
	}
	path := filepath.Join(h.Root, p.File)
	is, err := os.ReadFile(path)
	switch {
	case p.File == "":
	case err == nil && string(is) == p.Text:
	case err == nil && ours(is):
		return fmt.Errorf("%s, with other settings, %w", p.File, ErrInstalled)
	case err == nil:
		return fmt.Errorf("%s %w", p.File, ErrForeign)
	case !errors.Is(err, fs.ErrNotExist):
		return refused(err)
	default:
		if err := write(path, p.Text); err != nil {
			return refused(err)
		}
	}
	for _, c := range p.Start {
		if err := h.Run(ctx, c); err != nil {
			return fmt.Errorf("%s is written, but it does not start: %w (iop node uninstall takes it away)", what, err)
		}
	}
	return nil
}

// Uninstall stops the unit and takes its file away.
func (h Host) Uninstall(ctx context.Context, p Plan) error {
	if p.File == "" {
		var errs []error
		for _, c := range append(p.Stop, p.Stopped...) {
			errs = append(errs, h.Run(ctx, c))
		}
		return errs[len(errs)-1] // one that does not run cannot be stopped
	}
	path := filepath.Join(h.Root, p.File)
	switch is, err := os.ReadFile(path); {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%s %w", p.File, ErrNotInstalled)
	case err != nil:
		return refused(err)
	case !ours(is):
		return fmt.Errorf("%s %w", p.File, ErrForeign)
	}
	// One that does not run any more, or never did, goes all the same.
	var errs []error
	for _, c := range p.Stop {
		errs = append(errs, h.Run(ctx, c))
	}
	if err := os.Remove(path); err != nil {
		return errors.Join(append(errs, refused(err))...)
	}
	for _, c := range p.Stopped {
		errs = append(errs, h.Run(ctx, c))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("%s is taken away, but the service manager says: %w", p.File, err)
	}
	return nil
}

func ours(text []byte) bool { return bytes.Contains(text, []byte(mark)) }

func write(path, text string) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	// It holds no secret, and is read by who looks after the machine.
	if err := os.WriteFile(path+".new", []byte(text), 0o644); err != nil { //nolint:gosec // see above
		return err
	}
	return os.Rename(path+".new", path)
}

func refused(err error) error {
	if errors.Is(err, fs.ErrPermission) {
		return fmt.Errorf("%w (for the whole machine call it as root)", err)
	}
	return err
}

// Command runs one command and gives its words if it fails.
func Command(ctx context.Context, command []string) error {
	out, err := exec.CommandContext(ctx, command[0], command[1:]...).CombinedOutput() //nolint:gosec // of a Plan
	switch {
	case errors.Is(err, exec.ErrNotFound):
		return fmt.Errorf("%s is not on this machine", command[0])
	case err != nil:
		return fmt.Errorf("%s: %w: %s", strings.Join(command, " "), err, strings.TrimSpace(string(out)))
	}
	return nil
}

// Booted says why systemd cannot start anything here.
func Booted(root string, user bool, runtimeDir string) error {
	if _, err := os.Stat(filepath.Join(root, "/run/systemd/system")); err != nil {
		return errors.New("systemd does not run this machine (there is no /run/systemd/system): have what does start \"iop node --config FILE\", and again when it ends")
	}
	if user {
		if _, err := os.Stat(filepath.Join(root, runtimeDir, "systemd")); runtimeDir == "" || err != nil {
			return errors.New("systemd has no session of this user (no XDG_RUNTIME_DIR): log in as the user itself rather than by su, or run loginctl enable-linger USER as root; or install it as root, for the whole machine")
		}
	}
	return nil
}
