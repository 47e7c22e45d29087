package install

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

var update = flag.Bool("update", false, "write what is rendered into testdata")

func specs() map[string]Spec {
	machine := Spec{Name: "iop-node", Node: "gpu1", Binary: "/usr/local/bin/iop", Config: "/var/lib/iop-node/node.yaml", Stop: 20 * time.Second, Dynamic: true}
	owned := machine
	owned.Dynamic, owned.Owner, owned.Config = false, "alice", "/home/alice/my nodes/50%/node.yaml"
	user := owned
	user.User, user.Home, user.Owner = true, "/home/alice", "501"
	return map[string]Spec{"machine": machine, "owned": owned, "user": user}
}

var managers = map[string]func(Spec) (Plan, error){"systemd": Systemd, "launchd": Launchd, "windows": Windows}

func rendered(p Plan) string {
	text := fmt.Sprintf("file %s\n%s", p.File, p.Text)
	for i, all := range [][][]string{p.Start, p.Stop, p.Stopped} {
		for _, c := range all {
			text += fmt.Sprintf("%s %q\n", [...]string{"start", "stop", "stopped"}[i], c)
		}
	}
	for _, n := range p.Notes {
		text += "note " + n + "\n"
	}
	return text
}

// What is written for each manager and each owner is as it stands in testdata.
//
// Contract: D1 S4 Z4
func TestPlans(t *testing.T) {
	for manager, plan := range managers {
		for name, s := range specs() {
			p, err := plan(s)
			if err != nil {
				t.Errorf("%s, %s: %v", manager, name, err)
				continue
			}
			golden := filepath.Join("testdata", manager+"-"+name+".txt")
			if *update {
				if err := os.WriteFile(golden, []byte(rendered(p)), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil || string(want) != rendered(p) {
				t.Errorf("%s: %v; rendered\n%s", golden, err, rendered(p))
			}
		}
	}
}

// What no unit can say is refused, with what to do.
//
// Contract: D1
func TestSpecRefused(t *testing.T) {
	good := specs()["machine"]
	for name, c := range map[string]struct {
		spoil func(s *Spec)
		want  string
	}{
		"a bad name":        {func(s *Spec) { s.Name = "../x" }, `unit name "../x"`},
		"a relative binary": {func(s *Spec) { s.Binary = "iop" }, "the binary"},
		"a newline":         {func(s *Spec) { s.Config = "/a\nb/node.yaml" }, "no unit can name such a path"},
		"in a home":         {func(s *Spec) { s.Binary = "/root/bin/iop" }, "copy it to /usr/local/bin"},
	} {
		s := good
		c.spoil(&s)
		if _, err := Systemd(s); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want one that says %q", name, err, c.want)
		}
	}
	for binary, temporary := range map[string]bool{
		"/tmp/iop": true, "/var/tmp/x/iop": true, "/tmpx/iop": false, "/usr/local/bin/iop": false, "/home/a/go-build123/b001/exe/iop": true, "/scratch/iop": true,
	} {
		if err := Temporary(binary, "/scratch"); (err != nil) != temporary {
			t.Errorf("%s: %v", binary, err)
		}
	}
	root := t.TempDir()
	if err := Booted(root, false, ""); err == nil || !strings.Contains(err.Error(), "iop node --config") {
		t.Errorf("no systemd: %v", err)
	}
	for _, dir := range []string{"run/systemd/system", "run/user/1000/systemd"} {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := Booted(root, false, ""); err != nil {
		t.Error(err)
	}
	if err := Booted(root, true, "/run/user/1000"); err != nil {
		t.Error(err)
	}
	for _, dir := range []string{"", "/run/user/1001"} {
		if err := Booted(root, true, dir); err == nil || !strings.Contains(err.Error(), "enable-linger") {
			t.Errorf("no session in %q: %v", dir, err)
		}
	}
}

// manager notes what it is told, and fails at what begins with fail.
type manager struct {
	told []string
	fail string
}

var errManager = errors.New("the manager says no")

func (m *manager) run(_ context.Context, c []string) error {
	line := strings.Join(c, " ")
	m.told = append(m.told, line)
	if m.fail != "" && strings.HasPrefix(line, m.fail) {
		return errManager
	}
	return nil
}

// Installed, started, taken away, on a folder that stands for the machine; what is
// another's stays as it is.
//
// Contract: D1
func TestInstallAndUninstall(t *testing.T) {
	p, err := Systemd(specs()["machine"])
	if err != nil {
		t.Fatal(err)
	}
	m := &manager{}
	h := Host{Root: t.TempDir(), Run: m.run}
	file := filepath.Join(h.Root, p.File)
	if err := h.Uninstall(t.Context(), p); !errors.Is(err, ErrNotInstalled) || len(m.told) != 0 {
		t.Errorf("nothing there: %v, told %v", err, m.told)
	}
	for range 2 { // the second time it is only started
		m.told = nil
		if err := h.Install(t.Context(), p); err != nil {
			t.Fatal(err)
		}
		if got := strings.Join(m.told, "; "); got != "systemctl daemon-reload; systemctl enable iop-node.service; systemctl restart iop-node.service" {
			t.Error(got)
		}
	}
	if b, err := os.ReadFile(file); err != nil || string(b) != p.Text {
		t.Errorf("%v\n%s", err, b)
	}
	other := p
	other.Text += "# changed\n"
	if err := h.Install(t.Context(), other); !errors.Is(err, ErrInstalled) || !strings.Contains(err.Error(), "iop node uninstall") {
		t.Errorf("other settings: %v", err)
	}
	m.told, m.fail = nil, "systemctl disable" // it was stopped by hand
	if err := h.Uninstall(t.Context(), p); !errors.Is(err, errManager) || !strings.Contains(err.Error(), "is taken away") {
		t.Errorf("a manager that fails: %v", err)
	}
	if _, err := os.Stat(file); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the file is still there: %v", err)
	}
	if got := strings.Join(m.told, "; "); got != "systemctl disable --now iop-node.service; systemctl daemon-reload" {
		t.Error(got)
	}
	m.fail = "systemctl restart"
	if err := h.Install(t.Context(), p); !errors.Is(err, errManager) || !strings.Contains(err.Error(), "does not start") {
		t.Errorf("it does not start: %v", err)
	}
	m.told = nil
	if err := os.WriteFile(file, []byte("[Service]\nExecStart=/bin/other\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(h.Install(t.Context(), p), h.Uninstall(t.Context(), p)); strings.Count(err.Error(), "is not of iop") != 2 || len(m.told) != 0 {
		t.Errorf("another's unit: %v, told %v", err, m.told)
	}
	if b, err := os.ReadFile(file); err != nil || !strings.Contains(string(b), "/bin/other") {
		t.Errorf("%v %s", err, b)
	}
	// A manager without files takes commands alone.
	w, err := Windows(specs()["machine"])
	if err != nil {
		t.Fatal(err)
	}
	m.told, m.fail = nil, "sc.exe stop" // it does not run
	if err := errors.Join(h.Install(t.Context(), w), h.Uninstall(t.Context(), w)); err != nil || m.told[len(m.told)-1] != "sc.exe delete iop-node" {
		t.Errorf("%v, told %v", err, m.told)
	}
}
