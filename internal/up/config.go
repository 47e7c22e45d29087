package up

import (
	"fmt"
	"net"
	"os"
	"strings"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/identity"
)

// Names that `iop up` gives where the configuration names nothing else.
const (
	DefaultEdge = configs.DefaultEdge
	DefaultNode = configs.DefaultNode
)

// Options are what the command line says.
type Options struct {
	Folder       Folder
	Listen       string // "127.0.0.1:8400"
	AdminListen  string // "127.0.0.1:8401"
	BrokerListen string // "127.0.0.1:4222"
	EnrolListen  string // port 8443 where the broker listens; while a machine is invited
	EnrolURL     string // what invited machines dial: HOST[:PORT]
	// Demo keeps the demo model also beside real ones.
	Demo bool
	// File is the operator's configuration, or nil.
	File *configs.File
	// Hangup has it read its keys again, as the separate processes do; nil: never. Again
	// reads the operator's configuration anew, to tell what needs a restart; nil: there
	// is none.
	Hangup <-chan os.Signal
	Again  Again
}

// Names returns the edge and node names of this fabric.
func (o Options) Names() (edge, node string) {
	edge, node = DefaultEdge, DefaultNode
	if o.File != nil {
		if o.File.Edge != nil && o.File.Edge.Name != "" {
			edge = o.File.Edge.Name
		}
		if o.File.Node != nil && o.File.Node.Name != "" {
			node = o.File.Node.Name
		}
	}
	return edge, node
}

// Config completes the operator's configuration with what one process knows of
// itself: keys, addresses, the members, the local providers.
func Config(o Options) (*configs.File, error) {
	f := o.Folder
	edgeName, nodeName := o.Names()
	out := configs.File{}
	if o.File != nil {
		out = *o.File
	}
	broker, edge, node := orNew(out.Broker), orNew(out.Edge), orNew(out.Node)
	out.Broker, out.Edge, out.Node = broker, edge, node

	public := map[string]string{}
	for _, name := range []string{"issuer", "edge", "node"} {
		k, err := identity.LoadNKey(f.NKey(name))
		if err != nil {
			return nil, err
		}
		public[name] = k.Public()
	}
	tls := func(role identity.Role, name string) configs.TLS {
		return configs.TLS{Certificate: f.Certificate(role, name), Key: f.key(role, name), CA: f.CA()}
	}

	set(&broker.Listen, o.BrokerListen)
	def(&broker.Listen, "127.0.0.1:4222")
	def(&broker.Name, "broker")
	def(&broker.StoreDir, f.Store())
	if broker.TLS == (configs.TLS{}) {
		broker.TLS = tls(identity.RoleBroker, "broker")
	}
	def(&broker.IssuerKey, f.NKey("issuer"))
	def(&broker.SystemKey, f.NKey("system"))
	def(&broker.CalloutKey, f.NKey("callout"))
	def(&broker.ServiceKey, f.NKey("service"))
	if err := enrolment(broker, edgeName, o); err != nil {
		return nil, err
	}
	broker.EdgeKeys = map[string]string{edgeName: public["edge"]}
	broker.Members = append(broker.Members, configs.Member{Edge: edgeName, Role: "node", Name: nodeName, NKey: public["node"]})

	set(&edge.Listen, o.Listen)
	def(&edge.Listen, "127.0.0.1:8400")
	set(&edge.AdminListen, o.AdminListen)
	def(&edge.AdminListen, "127.0.0.1:8401")
	def(&edge.Name, edgeName)
	if edge.Broker.TLS == (configs.TLS{}) {
		edge.Broker.TLS = tls(identity.RoleEdge, edgeName)
	}
	def(&edge.Broker.NKey, f.NKey("edge"))
	if len(edge.Issuers) == 0 {
		issuers, err := issuersIn(f.path("keys")) // two, while it is exchanged
		if err != nil {
			return nil, err
		}
		edge.Issuers = issuers
	}
	if !edge.AdminToken.Set() {
		edge.AdminToken.File = f.AdminToken()
	}
	if len(edge.Keys) == 0 {
		edge.Keys = []configs.APIKey{{Name: "local", File: f.APIKey()}}
	}
	if !edge.Models.Auto && len(edge.Models.Groups) == 0 {
		edge.Models.Auto = true
	}
	if edge.Invited == nil {
		edge.Invited = new(true)
	}
	if err := addLocalNode(edge, nodeName, o.Demo); err != nil {
		return nil, err
	}

	def(&node.Name, nodeName)
	def(&node.Edge, edgeName)
	if node.Broker.TLS == (configs.TLS{}) {
		node.Broker.TLS = tls(identity.RoleNode, nodeName)
	}
	def(&node.Broker.NKey, f.NKey("node"))
	def(&node.CurveKey, f.NKey("curve"))
	if err := out.Complete(); err != nil {
		return nil, err
	}
	return &out, nil
}

// enrolment lets machines join this fabric: the CA's key is at hand, unless the
// operator's certificates are of another CA.
func enrolment(b *configs.Broker, edge string, o Options) error {
	e := orNew(b.Enrolment)
	if b.TLS.Certificate != o.Folder.Certificate(identity.RoleBroker, "broker") && e.CAKey == "" {
		b.Enrolment = nil
		return nil
	}
	b.Enrolment = e
	host, _, err := net.SplitHostPort(b.Listen)
	if err != nil {
		return fmt.Errorf("broker.listen: want host:port, such as 127.0.0.1:4222")
	}
	e.Edge = edge
	set(&e.Listen, o.EnrolListen)
	def(&e.Listen, net.JoinHostPort(host, configs.DefaultEnrolPort))
	set(&e.URL, o.EnrolURL)
	if ip := net.ParseIP(host); host == "" || (ip != nil && ip.IsUnspecified()) {
		host = ownAddress()
	}
	def(&e.URL, host)
	def(&e.CACertificate, o.Folder.CA())
	def(&e.CAKey, o.Folder.CAKey())
	return nil
}

// ownAddress is this machine's, where others most likely reach it: the one it
// would use itself to reach the world. Nothing is sent to find out.
func ownAddress() string {
	if c, err := net.Dial("udp", "192.0.2.1:9"); err == nil { //nolint:noctx // it waits for nothing
		defer c.Close() // nothing was sent
		if a, ok := c.LocalAddr().(*net.UDPAddr); ok {
			return a.IP.String()
		}
	}
	if name, err := os.Hostname(); err == nil && name != "" {
		return name
	}
	return "127.0.0.1"
}

// addLocalNode gives this process's node the local providers, unless the
// operator named that node's adapters.
func addLocalNode(edge *configs.Edge, name string, demo bool) error {
	var known []string
	for _, n := range edge.Nodes {
		if n.Name == name {
			return nil
		}
		known = append(known, n.Name)
	}
	if len(known) > 0 {
		return fmt.Errorf("node.name %q is not among edge.nodes (%s): this process's node would have nothing to run", name, strings.Join(known, ", "))
	}
	edge.Nodes = append(edge.Nodes, configs.EdgeNode{Name: name, Adapters: configs.LocalAdapters(demo)})
	return nil
}

// Sample is the configuration `iop init` writes: what `iop up` does without a
// file, spelt out and with room to change it.
func Sample(f Folder) string {
	var adapters strings.Builder
	for _, p := range configs.LocalProviders() {
		fmt.Fprintf(&adapters, `        - name: %s
          type: openai_compat
          profile: %s
          base_url: %s
          capacity: 8 # requests at once; more wait
`, p.Name, p.Profile, p.BaseURL)
	}
	return fmt.Sprintf(`# iop on one host: iop up --data-dir %[1]s --config %[2]s
# This is what "iop up" does without a file. What is left out has its default.
log:
  level: warn # debug, info, warn, error
broker:
  listen: 127.0.0.1:4222 # 0.0.0.0:4222 lets machines join that "iop invite" has invited
edge:
  name: %[4]s
  listen: 127.0.0.1:8400
  admin_listen: 127.0.0.1:8401
  keys:
    - name: local # whoever has this key
      file: %[3]q
  models: auto # offer what the adapters list
  nodes:
    - name: %[5]s
      adapters:
%[6]s        - name: demo
          type: demo
          fallback: true # only while no other adapter lists a model
node:
  name: %[5]s
  edge: %[4]s
`, quote(string(f)), quote(f.Config()), f.APIKey(), DefaultEdge, DefaultNode, adapters.String())
}

// quote makes a path that can be pasted into a shell.
func quote(path string) string {
	if strings.ContainsFunc(path, func(r rune) bool {
		return !strings.ContainsRune("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789/._-+:@", r)
	}) {
		return "'" + strings.ReplaceAll(path, "'", "'\\''") + "'"
	}
	return path
}

// Quote makes a path that can be pasted into a shell.
func Quote(path string) string { return quote(path) }

// StartLine is the command that runs the folder's configuration.
func (f Folder) StartLine() string {
	return "iop up --data-dir " + quote(string(f)) + " --config " + quote(f.Config())
}

// DefaultFolder is $XDG_DATA_HOME/iop, or ~/.local/share/iop.
func DefaultFolder() (Folder, error) {
	if dir := os.Getenv("XDG_DATA_HOME"); dir != "" {
		return Folder(dir).join("iop"), nil
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return "", fmt.Errorf("no home folder: name a data folder with --data-dir: %w", err)
	}
	return Folder(home).join(".local", "share", "iop"), nil
}

func (f Folder) join(elem ...string) Folder { return Folder(f.path(elem...)) }

// orNew copies the section, so that the operator's file stays as it was read.
func orNew[T any](p *T) *T {
	if p == nil {
		return new(T)
	}
	c := *p
	return &c
}

func set(dst *string, v string) {
	if v != "" {
		*dst = v
	}
}

func def(dst *string, v string) {
	if *dst == "" {
		*dst = v
	}
}
