//go:build linux

// Package netns tests the fabric on hosts that have nothing in common but a
// network: each is a Linux network namespace with addresses of its own, all at
// one switch, and runs the real iop from the folder that `iop init --out` made
// for it. Hosts are killed, paused, cut off and made deaf in one direction.
//
// It needs root and the commands ip, iptables and ip6tables: `make netns`.
package netns

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

// binary is iop, built once, as `make build` does.
var binary string

func TestMain(m *testing.M) {
	if os.Getenv("IOP_NETNS") == "" {
		fmt.Println("needs root and network namespaces: make netns")
		return
	}
	os.Exit(run(m))
}

func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "iop-netns-*")
	if err == nil {
		defer os.RemoveAll(dir)
		binary = filepath.Join(dir, "iop")
		build := exec.Command("go", "build", "-o", binary, "../../cmd/iop")
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		build.Stderr = os.Stderr
		err = build.Run()
	}
	if err == nil {
		err = removeLeftovers()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	code := m.Run()
	if code == 0 {
		if err := goleak.Find(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
	}
	return code
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// Namespaces are called iop-<process>-<random>-<host>, so that those of a run
// that was killed are told from those of one that goes on.
const (
	prefix   = "iop-"
	handles  = "/var/run/netns"
	etcNetns = "/etc/netns" // <namespace>/hosts is that host's /etc/hosts
)

// removeLeftovers removes what runs that were killed have left. Their processes
// died with them.
func removeLeftovers() error {
	for _, dir := range []string{handles, etcNetns} {
		entries, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		for _, e := range entries {
			rest, ok := strings.CutPrefix(e.Name(), prefix)
			pid, _, _ := strings.Cut(rest, "-")
			if n, err := strconv.Atoi(pid); !ok || err != nil || syscall.Kill(n, 0) == nil {
				continue
			}
			if dir == handles {
				if _, err := ip("netns", "del", e.Name()); err != nil {
					return err
				}
			} else if err := os.RemoveAll(filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	return nil
}

func ip(args ...string) (string, error) { return command("ip", args...) }

func command(name string, args ...string) (string, error) {
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, out)
	}
	return string(out), nil
}

// lab is a switch and the hosts at it.
type lab struct {
	t     testing.TB
	tag   string // of its namespaces
	hosts map[string]*host
}

func newLab(t testing.TB) *lab {
	t.Helper()
	var random [3]byte
	rand.Read(random[:])
	l := &lab{t: t, tag: fmt.Sprintf("%s%d-%s-", prefix, os.Getpid(), hex.EncodeToString(random[:])), hosts: map[string]*host{}}
	l.namespace("switch")
	l.ip("-n", l.tag+"switch", "link", "add", "br0", "type", "bridge")
	l.ip("-n", l.tag+"switch", "link", "set", "br0", "up")
	return l
}

func (l *lab) ip(args ...string) {
	l.t.Helper()
	_, err := ip(args...)
	must(l.t, err)
}

// namespace makes one, with an /etc/hosts of its own, gone at the test's end.
func (l *lab) namespace(name string) string {
	l.t.Helper()
	ns := l.tag + name
	l.ip("netns", "add", ns)
	etc := filepath.Join(etcNetns, ns)
	l.t.Cleanup(func() {
		if _, err := ip("netns", "del", ns); err != nil {
			l.t.Error(err)
		}
		if err := os.RemoveAll(etc); err != nil {
			l.t.Error(err)
		}
	})
	must(l.t, os.MkdirAll(etc, 0o755))
	must(l.t, os.WriteFile(filepath.Join(etc, "hosts"), []byte("127.0.0.1 localhost\n"), 0o644))
	must(l.t, os.WriteFile(filepath.Join(etc, "resolv.conf"), []byte("nameserver 127.0.0.1\n"), 0o644)) // where nobody answers
	return ns
}

// host is a namespace with a link to the switch.
type host struct {
	l      *lab
	ns     string
	v4, v6 string
	port   string // of the switch
}

const link = "eth0" // of every host

// host returns the host of the name; it is made when first asked for.
func (l *lab) host(name string) *host {
	l.t.Helper()
	if h := l.hosts[name]; h != nil {
		return h
	}
	n := len(l.hosts) + 1
	h := &host{l: l, ns: l.namespace(name), v4: fmt.Sprintf("10.77.0.%d", n), v6: fmt.Sprintf("fd77::%x", n), port: fmt.Sprintf("port%d", n)}
	l.hosts[name] = h
	sw := l.tag + "switch"
	l.ip("-n", sw, "link", "add", h.port, "type", "veth", "peer", "name", link, "netns", h.ns)
	l.ip("-n", sw, "link", "set", h.port, "master", "br0", "up")
	l.ip("-n", h.ns, "link", "set", "lo", "up")
	l.ip("-n", h.ns, "link", "set", link, "up")
	l.ip("-n", h.ns, "address", "add", h.v4+"/24", "dev", link)
	l.ip("-n", h.ns, "address", "add", h.v6+"/64", "dev", link, "nodad")
	return h
}

// command is one that runs at the host, and dies with the test's process.
func (h *host) command(ctx context.Context, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "ip", append([]string{"netns", "exec", h.ns, name}, args...)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return cmd
}

// dial connects from the host, where the test's own process is not.
func (h *host) dial(ctx context.Context, network, address string) (conn net.Conn, err error) {
	err = h.there(func() error {
		conn, err = (&net.Dialer{}).DialContext(ctx, network, address) // of an address: in this goroutine
		return err
	})
	return conn, err
}

// listen listens at the host.
func (h *host) listen(address string) (l net.Listener, err error) {
	err = h.there(func() error {
		l, err = net.Listen("tcp", address)
		return err
	})
	return l, err
}

// there runs do in the host's namespace, which sockets keep.
func (h *host) there(do func() error) error {
	there, err := os.Open(filepath.Join(handles, h.ns))
	if err != nil {
		return err
	}
	defer there.Close()
	runtime.LockOSThread() // the namespace is the thread's
	here, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		runtime.UnlockOSThread()
		return err
	}
	defer here.Close()
	if err := unix.Setns(int(there.Fd()), unix.CLONE_NEWNET); err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("setns: %w", err)
	}
	err = do()
	if back := unix.Setns(int(here.Fd()), unix.CLONE_NEWNET); back != nil {
		return errors.Join(fmt.Errorf("setns: %w", back), err) // the thread ends with the goroutine
	}
	runtime.UnlockOSThread()
	return err
}

// rule adds a rule to the host's firewall, before all others, in both versions of
// IP: about one other host, or all.
func (h *host) rule(to *host, args ...string) {
	h.l.t.Helper()
	for tables, address := range map[string]func() string{
		"iptables": func() string { return to.v4 }, "ip6tables": func() string { return to.v6 },
	} {
		rule := append([]string{"-w", "-I"}, args...)
		if to != nil {
			rule = append(rule, "-d", address())
		}
		out, err := h.command(context.Background(), tables, rule...).CombinedOutput()
		if err != nil {
			h.l.t.Fatalf("%s %v: %v: %s", tables, args, err, out)
		}
	}
}

// deaf lets nothing in: what the host sends still arrives.
func (h *host) deaf() { h.rule(nil, "INPUT", "-i", link, "-j", "DROP") }

// mute lets nothing out: the host hears and nobody hears it.
func (h *host) mute() { h.rule(nil, "OUTPUT", "-o", link, "-j", "DROP") }

// blackHole is both, without a word to anybody: connections stay as they are.
func (h *host) blackHole() { h.mute(); h.deaf() }

// blackHoleTo is the same between two hosts alone: no answer comes without a
// question.
func (h *host) blackHoleTo(to *host) { h.rule(to, "OUTPUT", "-o", link, "-j", "DROP") }

// reset breaks every connection at its next packet, and refuses new ones: what is
// on its way is lost.
func (h *host) reset() {
	h.rule(nil, "INPUT", "-i", link, "-p", "tcp", "-j", "REJECT", "--reject-with", "tcp-reset")
	h.resetTo(nil)
}

// resetTo is the same of what goes to one other host.
func (h *host) resetTo(to *host) {
	h.rule(to, "OUTPUT", "-o", link, "-p", "tcp", "-j", "REJECT", "--reject-with", "tcp-reset")
}

// unplug takes the host's cable out of the switch.
func (h *host) unplug() {
	h.l.t.Helper()
	h.l.ip("-n", h.l.tag+"switch", "link", "set", h.port, "down")
}

// heal takes all of it back.
func (h *host) heal() {
	h.l.t.Helper()
	for _, tables := range []string{"iptables", "ip6tables"} {
		if out, err := h.command(context.Background(), tables, "-w", "-F").CombinedOutput(); err != nil {
			h.l.t.Fatalf("%s -F: %v: %s", tables, err, out)
		}
	}
	h.l.ip("-n", h.l.tag+"switch", "link", "set", h.port, "up")
}

// knows writes the host's /etc/hosts: name resolves to address from now on.
func (h *host) knows(name, address string) {
	h.l.t.Helper()
	f, err := os.OpenFile(filepath.Join(etcNetns, h.ns, "hosts"), os.O_APPEND|os.O_WRONLY, 0)
	must(h.l.t, err)
	_, err = fmt.Fprintf(f, "%s %s\n", address, name)
	must(h.l.t, errors.Join(err, f.Close()))
}
