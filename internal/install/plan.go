package install

import (
	"errors"
	"fmt"
	"path/filepath"
	"regexp"
	"strings"
	"time"
)

// Spec is what is to be started.
type Spec struct {
	Name   string // of the unit, such as iop-node
	Node   string // the Node's name, for people
	Binary string // absolute
	Config string // absolute; the keys are in its folder
	// Owner is who owns the folder, whom the process runs as; empty: whoever installs.
	Owner string
	// Dynamic: systemd makes a user for it and gives it the folder, which is below
	// /var/lib.
	Dynamic bool
	// User: of one user, not of the machine.
	User bool
	Home string // of that user
	// Stop is how long stopping may take.
	Stop time.Duration
}

// Plan is what is to be written, and the commands around it.
type Plan struct {
	Manager string // systemd, launchd, windows
	File    string // empty: the commands are all of it
	Text    string
	// Start follows the writing; Stop goes before the removal, Stopped after it.
	Start, Stop, Stopped [][]string
	// Notes are for who installed it.
	Notes []string
}

// mark begins each file: what has it not is not ours (I1).
const mark = "Made by iop node install"

// stateRoot is where systemd keeps the folders of services.
const stateRoot = "/var/lib"

var unitName = regexp.MustCompile(`^[a-z0-9][a-z0-9_-]{0,62}$`)

// Check says what cannot be written into a unit.
func (s Spec) Check() error {
	if !unitName.MatchString(s.Name) {
		return fmt.Errorf("unit name %q: use a-z, 0-9, '-' and '_', beginning with a letter or digit", s.Name)
	}
	for what, path := range map[string]string{"the binary": s.Binary, "the configuration": s.Config} {
		switch {
		case !filepath.IsAbs(path):
			return fmt.Errorf("%s %q: want an absolute path", what, path)
		case strings.ContainsAny(path, "\n\r\x00"):
			return fmt.Errorf("%s %q: no unit can name such a path", what, path)
		}
	}
	return nil
}

// DynamicFolder reports whether systemd can give a folder to a user of its own: it
// stands right below /var/lib.
func DynamicFolder(folder string) bool { return filepath.Dir(folder) == stateRoot }

// below reports whether a path is in one of the folders.
func below(path string, folders ...string) bool {
	for _, f := range folders {
		if rel, err := filepath.Rel(f, path); f != "" && err == nil && rel != ".." && !strings.HasPrefix(rel, ".."+string(filepath.Separator)) {
			return true
		}
	}
	return false
}

// homes are what a confined unit does not see.
var homes = []string{"/home", "/root", "/run/user"}

// Temporary says that a binary will not be there after a restart of the machine.
func Temporary(binary string, folders ...string) error {
	if below(binary, append(folders, "/tmp", "/var/tmp", "/dev/shm", "/run")...) || strings.Contains(binary, "go-build") {
		return fmt.Errorf("%s is in a temporary folder, and would not be there when the machine starts: copy it to /usr/local/bin and call it from there", binary)
	}
	return nil
}

// Hidden says that a confined unit does not see the binary.
func (s Spec) Hidden() error {
	if !s.User && below(s.Binary, homes...) {
		return fmt.Errorf("%s is in somebody's home, which a service of the machine does not see: copy it to /usr/local/bin and call it from there", s.Binary)
	}
	return nil
}

// Systemd is a unit of systemd 232 or newer (August 2016 and on; what an older one
// does not know it ignores, but for DynamicUser).
func Systemd(s Spec) (Plan, error) {
	if err := errors.Join(s.Check(), s.Hidden()); err != nil {
		return Plan{}, err
	}
	folder := filepath.Dir(s.Config)
	var u strings.Builder
	fmt.Fprintf(&u, "# %s; iop node uninstall takes it away.\n[Unit]\nDescription=iop node %s\n", mark, unit(s.Node))
	if !s.User {
		u.WriteString("Wants=network-online.target\nAfter=network-online.target\n")
	}
	u.WriteString("StartLimitIntervalSec=0\n\n[Service]\n")
	fmt.Fprintf(&u, "ExecStart=%s node --config %s\n", word(s.Binary), word(s.Config))
	u.WriteString("ExecReload=/bin/kill -HUP $MAINPID\n")
	fmt.Fprintf(&u, "# Keys of providers, as NAME=value: what static_key_name names. Mode 0600.\nEnvironmentFile=-%s\n", unit(filepath.Join(folder, "environment")))
	u.WriteString("Restart=always\nRestartSec=5\n# Used wrongly: starting again helps nothing.\nRestartPreventExitStatus=2\n")
	fmt.Fprintf(&u, "TimeoutStopSec=%d\n\n", int(s.Stop/time.Second))
	u.WriteString("# It dials out, and writes to its own folder.\nNoNewPrivileges=yes\nLockPersonality=yes\nMemoryDenyWriteExecute=yes\n" +
		"RestrictRealtime=yes\nRestrictSUIDSGID=yes\nRestrictNamespaces=yes\nRestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK\n" +
		"SystemCallArchitectures=native\nSystemCallFilter=@system-service\nSystemCallErrorNumber=EPERM\nUMask=0077\n")
	p := Plan{Manager: "systemd"}
	ctl, target := []string{"systemctl"}, "multi-user.target"
	if s.User {
		ctl, target = append(ctl, "--user"), "default.target"
		p.File = filepath.Join(s.Home, ".config/systemd/user", s.Name+".service")
		p.Notes = append(p.Notes, "It ends with the last session of its user. To have it run without one: loginctl enable-linger")
	} else {
		p.File = filepath.Join("/etc/systemd/system", s.Name+".service")
		s.confine(&u, folder)
	}
	fmt.Fprintf(&u, "\n[Install]\nWantedBy=%s\n", target)
	p.Text = u.String()
	do := func(words ...string) []string { return append(append([]string{}, ctl...), words...) }
	p.Start = [][]string{do("daemon-reload"), do("enable", s.Name+".service"), do("restart", s.Name+".service")}
	p.Stop = [][]string{do("disable", "--now", s.Name+".service")}
	p.Stopped = [][]string{do("daemon-reload")}
	log := "journalctl -u " + s.Name
	if s.User {
		log = "journalctl --user -u " + s.Name
	}
	p.Notes = append(p.Notes, "Its log: "+log)
	return p, nil
}

// confine adds what only the manager of the machine can do.
func (s Spec) confine(u *strings.Builder, folder string) {
	if s.Dynamic {
		fmt.Fprintf(u, "DynamicUser=yes\nStateDirectory=%s\nStateDirectoryMode=0700\n", unit(filepath.Base(folder)))
	} else {
		if s.Owner != "" {
			fmt.Fprintf(u, "User=%s\n", unit(s.Owner))
		}
		fmt.Fprintf(u, "ReadWritePaths=%s\n", word(folder))
	}
	home := "yes"
	if below(folder, homes...) {
		home = "tmpfs"
		fmt.Fprintf(u, "BindPaths=%s\n", word(folder))
	}
	fmt.Fprintf(u, "ProtectHome=%s\n", home)
	u.WriteString("ProtectSystem=strict\nPrivateTmp=yes\nPrivateDevices=yes\nProtectClock=yes\nProtectControlGroups=yes\n" +
		"ProtectHostname=yes\nProtectKernelLogs=yes\nProtectKernelModules=yes\nProtectKernelTunables=yes\nProtectProc=invisible\n" +
		"CapabilityBoundingSet=\nRemoveIPC=yes\n")
}

// unit doubles what systemd would expand.
func unit(text string) string { return strings.ReplaceAll(text, "%", "%%") }

// word is one word of a command line or of a list of paths.
func word(text string) string {
	text = strings.ReplaceAll(unit(text), "$", "$$")
	if strings.ContainsAny(text, " \t\"'\\;#") {
		return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(text) + `"`
	}
	return text
}

// Launchd is a job of launchd: a daemon of the machine, or an agent of a user.
func Launchd(s Spec) (Plan, error) {
	if err := s.Check(); err != nil {
		return Plan{}, err
	}
	label := "fabric.iop." + s.Name
	domain, dir := "system", "/Library/LaunchDaemons"
	if s.User {
		domain, dir = "gui/"+s.Owner, filepath.Join(s.Home, "Library/LaunchAgents")
	}
	log := filepath.Join(filepath.Dir(s.Config), "node.log")
	p := Plan{Manager: "launchd", File: filepath.Join(dir, label+".plist"), Notes: []string{"Its log: " + log}}
	var u strings.Builder
	fmt.Fprintf(&u, `<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE plist PUBLIC "-//Apple//DTD PLIST 1.0//EN" "http://www.apple.com/DTDs/PropertyList-1.0.dtd">
<!-- %s; iop node uninstall takes it away. -->
<plist version="1.0">
<dict>
	<key>Label</key><string>%s</string>
	<key>ProgramArguments</key>
	<array><string>%s</string><string>node</string><string>--config</string><string>%s</string></array>
	<key>RunAtLoad</key><true/>
	<key>KeepAlive</key><true/>
	<key>ThrottleInterval</key><integer>5</integer>
	<key>ExitTimeOut</key><integer>%d</integer>
	<key>ProcessType</key><string>Background</string>
	<key>Umask</key><integer>63</integer>
	<key>StandardErrorPath</key><string>%s</string>
`, mark, xml(label), xml(s.Binary), xml(s.Config), int(s.Stop/time.Second), xml(log))
	if !s.User && s.Owner != "" {
		fmt.Fprintf(&u, "\t<key>UserName</key><string>%s</string>\n", xml(s.Owner))
	}
	u.WriteString("</dict>\n</plist>\n")
	p.Text = u.String()
	p.Start = [][]string{{"launchctl", "bootstrap", domain, p.File}}
	p.Stop = [][]string{{"launchctl", "bootout", domain + "/" + label}}
	return p, nil
}

func xml(text string) string {
	return strings.NewReplacer("&", "&amp;", "<", "&lt;", ">", "&gt;", `"`, "&quot;").Replace(text)
}

// Windows is a service of Windows, which needs no file: it runs as LocalService, who
// may then write to the folder.
func Windows(s Spec) (Plan, error) {
	if err := s.Check(); err != nil {
		return Plan{}, err
	}
	folder := filepath.Dir(s.Config)
	return Plan{
		Manager: "windows",
		Start: [][]string{
			{"icacls.exe", folder, "/grant", "*S-1-5-19:(OI)(CI)M"},
			{
				"sc.exe", "create", s.Name, "binPath=", fmt.Sprintf(`"%s" node --config "%s"`, s.Binary, s.Config), "start=", "delayed-auto",
				"obj=", `NT AUTHORITY\LocalService`, "DisplayName=", "iop node " + s.Node,
			},
			{"sc.exe", "description", s.Name, mark + "; iop node uninstall takes it away."},
			{"sc.exe", "failure", s.Name, "reset=", "86400", "actions=", "restart/5000/restart/5000/restart/5000"},
			{"sc.exe", "start", s.Name},
		},
		Stop:    [][]string{{"sc.exe", "stop", s.Name}},
		Stopped: [][]string{{"sc.exe", "delete", s.Name}},
		Notes:   []string{"Its log: " + filepath.Join(folder, "node.log")},
	}, nil
}
