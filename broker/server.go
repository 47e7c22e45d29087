package broker

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/wire"
)

// The accounts (B1). Only AUTH has JetStream.
const (
	accountSystem = "SYS"
	accountAuth   = "AUTH"
	accountFabric = "FABRIC"
)

// Form says what kind of server a configuration is for.
type Form int

const (
	// Embedded is this process's own server: the session service and the Edges in
	// this process come through memory, and their keys are good nowhere else.
	Embedded Form = iota
	// Stock is a nats-server of its own, to which the session service dials like
	// everybody else.
	Stock
)

// publicKeys are the public halves of the broker's nkeys.
type publicKeys struct {
	issuer, system, callout, service string
}

// differing names the settings of the keys that are not the same.
func (k publicKeys) differing(other publicKeys) (names []string) {
	for name, same := range map[string]bool{
		"issuer_key": k.issuer == other.issuer, "system_key": k.system == other.system,
		"callout_key": k.callout == other.callout, "service_key": k.service == other.service,
	} {
		if !same {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// ConfigText returns the configuration of the server, the same text for the
// embedded and for a stock nats-server but for where keys may be used. It holds
// no secret: keys are public, certificates are files.
func ConfigText(cfg configs.Broker, form Form) (string, error) {
	keys, err := loadKeys(cfg)
	if err != nil {
		return "", err
	}
	return configText(withDefaults(cfg), keys.public(), form)
}

func configText(cfg configs.Broker, keys publicKeys, form Form) (string, error) {
	host, port, err := splitListen(cfg.Listen)
	if err != nil {
		return "", err
	}
	if port == 0 {
		port = server.RANDOM_PORT
	}
	where := `, allowed_connection_types: ["STANDARD"]`
	if form == Embedded {
		where = `, allowed_connection_types: ["IN_PROCESS"]`
	} else {
		cfg.EdgeKeys = nil // no Edge is in that process
	}
	user := func(nkey string, p *subjects.Permissions) string {
		if p == nil {
			return fmt.Sprintf("{ nkey: %s%s }", nkey, where)
		}
		return fmt.Sprintf("{ nkey: %s%s, permissions: {\n        publish: %s,\n        subscribe: %s } }",
			nkey, where, list(p.Publish), list(p.Subscribe))
	}
	service := subjects.ServicePermissions()
	fabric := []string{user(keys.service, &service)}
	static := []string{keys.system, keys.callout, keys.service}
	for _, edge := range slices.Sorted(maps.Keys(cfg.EdgeKeys)) {
		p := subjects.EdgePermissions(edge)
		fabric = append(fabric, user(cfg.EdgeKeys[edge], &p))
		static = append(static, cfg.EdgeKeys[edge])
	}
	leaf, err := leafText(cfg)
	if err != nil {
		return "", err
	}
	cluster, err := clusterText(cfg, form)
	if err != nil {
		return "", err
	}
	for _, s := range []string{cfg.Name, cfg.TLS.Certificate, cfg.TLS.Key, cfg.TLS.CA, cfg.StoreDir} {
		if strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r == 0x7f }) {
			return "", fmt.Errorf("broker: %q holds a control character", s)
		}
	}
	return fmt.Sprintf(`# The broker of an iop fabric. No secret is in this file: keys are public.
server_name: %s
listen: %s
max_connections: 16384
max_control_line: 4KB
max_payload: 1MB
max_pending: 64MB
write_deadline: "30s"  # what is on its way to a Node behind a narrow link may take a while
ping_interval: "15s"  # a callout may take as long; shorter cuts the time to connect
ping_max: 2
tls {
  cert_file: %s
  key_file: %s
  ca_file: %s
  verify: true
  min_version: "1.3"
  handshake_first: true
  timeout: 15  # a herd of dials shares two cores
}
system_account: %s
accounts {
  %s { users: [ %s ] }
  %s { jetstream: enabled, users: [ %s ]%s }
  %s {
    limits { max_payload: %d }
    users: [
      %s
    ]%s
  }
}
authorization {
  timeout: 15
  auth_callout { issuer: %s, account: %s, auth_users: [ %s ] }
}
jetstream { store_dir: %s, sync_interval: always }
%s`,
		strconv.Quote(cfg.Name), strconv.Quote(net.JoinHostPort(host, strconv.Itoa(port))),
		strconv.Quote(cfg.TLS.Certificate), strconv.Quote(cfg.TLS.Key), strconv.Quote(cfg.TLS.CA),
		accountSystem,
		accountSystem, user(keys.system, nil),
		accountAuth, user(keys.callout, nil), leaf.exports,
		accountFabric, wire.MaxMessage, strings.Join(fabric, "\n      "), leaf.imports,
		keys.issuer, accountAuth, strings.Join(static, ", "),
		strconv.Quote(cfg.StoreDir), leaf.listener+cluster), nil
}

func list(subjects []string) string {
	quoted := make([]string, len(subjects))
	for i, s := range subjects {
		quoted[i] = strconv.Quote(s)
	}
	return "[ " + strings.Join(quoted, ", ") + " ]"
}

func splitListen(listen string) (host string, port int, err error) {
	host, text, err := net.SplitHostPort(listen)
	if err != nil {
		return "", 0, fmt.Errorf("broker: listen %q: want host:port, such as 127.0.0.1:4222", listen)
	}
	port, err = strconv.Atoi(text)
	if err != nil || port < 0 || port > 65535 {
		return "", 0, fmt.Errorf("broker: listen %q: port %q is no number from 0 to 65535", listen, text)
	}
	if host == "" {
		host = "0.0.0.0"
	}
	return host, port, nil
}

// newOptions parses the text and adds what has no word in it: the short first
// ping off (B4), and certificates that can be swapped (B1).
func newOptions(text string, certs func() *tls.Config) (*server.Options, error) {
	opts := &server.Options{NoSigs: true, NoLog: true}
	if err := opts.ProcessConfigString(text); err != nil {
		return nil, fmt.Errorf("broker: configuration: %w", err)
	}
	opts.NoLog = false
	opts.DisableShortFirstPing = true
	opts.LameDuckGracePeriod = retireGrace + time.Second // its end is ours to say
	// The listener opens once the session service answers: a Node that dials
	// earlier would wait for a callout that nobody heard.
	// Routes are made only where it is open, so in a cluster callouts wait instead.
	opts.DontListen = opts.Cluster.Port == 0
	// The handshake's own configuration comes from the pointer each time; the
	// outer one is what GetConfigForClient hangs on.
	opts.TLSConfig = certs()
	opts.TLSConfig.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) {
		return certs(), nil
	}
	if opts.LeafNode.Port != 0 {
		opts.LeafNode.TLSConfig = opts.TLSConfig.Clone()
	}
	return opts, nil
}

// checkStore proves that the folder can be written, before JetStream says so
// less clearly.
func checkStore(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("broker: store_dir %s cannot be made: %w", dir, reason(err))
	}
	f, err := os.CreateTemp(dir, ".write-*")
	if err != nil {
		return fmt.Errorf("broker: store_dir %s cannot be written: %w", dir, reason(err))
	}
	name := f.Name()
	return errors.Join(f.Close(), os.Remove(filepath.Clean(name)))
}

// checkListen says in words why a port cannot be had; an empty one is not wanted.
func checkListen(listen string) error {
	if listen == "" {
		return nil
	}
	l, err := net.Listen("tcp", listen) //nolint:noctx // closed at once
	if err != nil {
		return fmt.Errorf("broker: cannot listen on %s (is another broker running there? broker.listen, or --broker-listen, names another address): %w", listen, reason(err))
	}
	return l.Close()
}

// reason strips the path or address that the caller already named.
func reason(err error) error {
	var p *fs.PathError
	var o *net.OpError
	switch {
	case errors.As(err, &p):
		return p.Err
	case errors.As(err, &o):
		return o.Err
	}
	return err
}

// serverLog passes the server's own lines on to slog and watches for what is told
// nowhere else: a failed handshake, a name that is taken, a store that cannot be
// written, and a fatal error.
type serverLog struct {
	log       *slog.Logger
	handshake func(error)
	name      func(string)
	store     func(string)
	fatal     func(error)
}

func (l serverLog) line(level slog.Level, format string, v []any) {
	l.log.LogAttrs(context.Background(), level, eventServer, slog.String("line", fmt.Sprintf(format, v...)))
}

// handshakeFormat ends the server's line about a failed TLS handshake: of a
// client, and with a word in it, of a leaf or a route.
const handshakeFormat = " handshake error: %v%s"

// nameFormat ends the server's line about a peer that has its own name.
const nameFormat = "Remote server has a duplicate name: %q"

// storeFormats are in the server's lines about a store that takes nothing any
// more until it is opened again.
var storeFormats = []string{"ritical write error", "will be DISABLED", "disabling JetStream"}

func storeBroken(format string) bool {
	return slices.ContainsFunc(storeFormats, func(part string) bool { return strings.Contains(format, part) })
}

func (l serverLog) failed(format string, v []any) bool {
	if !strings.HasSuffix(format, handshakeFormat) {
		return false
	}
	for _, arg := range v {
		if err, ok := arg.(error); ok {
			l.handshake(err)
			return true
		}
	}
	return false
}

// Noticef implements server.Logger.
func (l serverLog) Noticef(format string, v ...any) { l.line(slog.LevelDebug, format, v) }

// Warnf implements server.Logger.
func (l serverLog) Warnf(format string, v ...any) { l.line(slog.LevelDebug, format, v) }

// Errorf implements server.Logger.
func (l serverLog) Errorf(format string, v ...any) {
	switch {
	case l.failed(format, v):
	case l.name != nil && strings.HasSuffix(format, nameFormat) && len(v) > 0:
		l.name(fmt.Sprint(v[len(v)-1]))
	case l.store != nil && storeBroken(format):
		l.line(slog.LevelWarn, format, v)
		l.store(fmt.Sprintf(format, v...))
	default:
		l.line(slog.LevelWarn, format, v)
	}
}

// Debugf implements server.Logger. A peer that speaks no TLS at all is told of
// at this level only; other lines are not even formatted.
func (l serverLog) Debugf(format string, v ...any) { l.failed(format, v) }

// Tracef implements server.Logger; tracing is never on, it would show payloads.
func (l serverLog) Tracef(string, ...any) {}

// Fatalf implements server.Logger. The server means the process to end; here
// Run ends and says why.
func (l serverLog) Fatalf(format string, v ...any) { l.fatal(fmt.Errorf(format, v...)) }
