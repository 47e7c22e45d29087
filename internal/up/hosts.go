package up

import (
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/identity"
	"github.com/iop-fabric/iop/wire"
)

// Ports of a broker: the others follow the one that Nodes dial, so that several
// brokers on one host never meet.
const (
	clientPort    = 4222
	routeOffset   = 2000 // 6222
	leafOffset    = 3200 // 7422
	highestClient = 65535 - leafOffset
)

// Hosts is what a fabric on many hosts consists of.
type Hosts struct {
	Out     string   // the authority's folder, with one folder for each member
	Edge    string   // the edge's name; empty: that of the folder
	Brokers []string // HOST[:PORT]; none: those of the folder
	Leaves  []string // NAME[=HOST[:PORT]]
	Nodes   []string // NAME, or NAME@LEAF for one that dials a leaf
	// Stock: beside each broker's folder one of the session service, for who runs a
	// nats-server of their own in the broker's place.
	Stock bool
	// Demo gives the Nodes the demo model and no other.
	Demo bool
	// Owner is who the members' folders are to belong to, UID:GID; empty: us.
	Owner string
}

// HostsReport says what MakeHosts did and what is left to do by hand.
type HostsReport struct {
	Made []string // folders that are new or were completed, in order
	Kept []string // folders that were whole already
	// Todo are settings that files which are never overwritten lack.
	Todo []HostsTodo
	// APIKey is the first caller's key.
	APIKey string
}

// HostsTodo is text to be put into files.
type HostsTodo struct {
	Files []string
	Key   string // below which: "broker.members"
	Text  string
}

const issuerFile = "issuer.nk"

// brokerKeys are the keys that every broker of a cluster shares: each admits for
// all of them.
var brokerKeys = []struct {
	file string
	make func() (*identity.NKey, error)
}{
	{issuerFile, identity.NewAccountKey},
	{"system.nk", identity.NewUserKey},
	{"callout.nk", identity.NewUserKey},
	{"service.nk", identity.NewUserKey},
}

// endpoint is a broker or leaf: its folder's name and where it is dialled.
type endpoint struct {
	name, host string
	port       int
}

// service is the folder of the session service beside a broker's server.
func (e endpoint) service() string { return strings.Replace(e.name, "broker", "service", 1) }

func (e endpoint) url(offset int) string {
	return "tls://" + net.JoinHostPort(e.host, strconv.Itoa(e.port+offset))
}

// listen is the address to listen at: all of the host, or the loopback alone.
func (e endpoint) listen(offset int) string {
	ip, host := net.ParseIP(e.host), "0.0.0.0"
	switch {
	case ip != nil && ip.IsLoopback(), e.host == "localhost":
		host = e.host
	case ip != nil && ip.To4() == nil:
		host = "::"
	}
	return net.JoinHostPort(host, strconv.Itoa(e.port+offset))
}

// member is an edge, node or leaf: who registers an nkey.
type member struct {
	role   identity.Role
	name   string
	folder string
	leaf   string // a node's, where it dials one
	nkey   string // public
}

// plan is Hosts made definite: with what the folder holds already.
type plan struct {
	Hosts
	ca      *identity.CA
	issuer  string
	brokers []endpoint
	leaves  []endpoint
	members []member
	report  HostsReport
}

func (p *plan) at(elem ...string) string {
	return filepath.Join(append([]string{p.Out}, elem...)...)
}

// MakeHosts makes what the folder lacks and overwrites nothing: a CA, and for each
// member a folder with exactly its own files and a configuration that is ready.
func MakeHosts(h Hosts) (HostsReport, error) {
	uid, gid, err := owner(h.Owner)
	if err != nil {
		return HostsReport{}, err
	}
	p := &plan{Hosts: h}
	if err := p.resolve(); err != nil {
		return HostsReport{}, err
	}
	if err := os.MkdirAll(h.Out, 0o700); err != nil {
		return HostsReport{}, err
	}
	unlock, err := lock(Folder(h.Out))
	if err != nil {
		return HostsReport{}, err
	}
	defer unlock()
	if p.ca, err = ensureCA(p.at("authority")); err != nil {
		return HostsReport{}, err
	}
	shared := map[string]*identity.NKey{}
	for _, k := range brokerKeys {
		if shared[k.file], err = ensureNKey(p.at("authority", k.file), k.make); err != nil {
			return HostsReport{}, err
		}
	}
	p.issuer = shared[issuerFile].Public()
	if err := p.makeKeys(shared); err != nil {
		return HostsReport{}, err
	}
	if err := p.makeConfigs(); err != nil {
		return HostsReport{}, err
	}
	if h.Owner != "" {
		for _, folder := range p.folders() {
			if err := chown(p.at(folder), uid, gid); err != nil {
				return HostsReport{}, err
			}
		}
	}
	return p.report, nil
}

// folders are the members' folders, brokers first.
func (p *plan) folders() []string {
	var out []string
	for _, b := range p.brokers {
		out = append(out, b.name)
		if p.Stock {
			out = append(out, b.service())
		}
	}
	for _, m := range p.members {
		out = append(out, m.folder)
	}
	return out
}

// resolve joins what was asked for with what the folder holds.
func (p *plan) resolve() error {
	known, err := p.known()
	if err != nil {
		return err
	}
	switch {
	case p.Edge == "" && known.Edge == "":
		return errors.New("a new fabric needs the name of its edge: --edge NAME")
	case p.Edge == "":
		p.Edge = known.Edge
	case known.Edge != "" && known.Edge != p.Edge:
		return fmt.Errorf("%s is of edge %q, not %q: use another folder for another edge", p.Out, known.Edge, p.Edge)
	}
	if err := wire.CheckName(p.Edge); err != nil {
		return fmt.Errorf("--edge: %w", err)
	}
	p.Stock = p.Stock || known.Stock
	if err := p.resolveBrokers(known.Brokers); err != nil {
		return err
	}
	p.members = append(p.members, member{role: identity.RoleEdge, name: p.Edge, folder: "edge"})
	if err := p.resolveLeaves(known.Leaves); err != nil {
		return err
	}
	return p.resolveNodes(known.Nodes)
}

func (p *plan) resolveBrokers(known []string) error {
	seen := map[string]bool{}
	for i, text := range slices.Concat(known, p.Brokers) {
		host, port, err := parseHost(text)
		if err != nil {
			return fmt.Errorf("--broker %s: %w", text, err)
		}
		e := endpoint{name: "broker-" + strconv.Itoa(len(p.brokers)+1), host: host, port: port}
		if seen[e.url(0)] {
			if i >= len(known) && slices.Contains(p.Brokers[:i-len(known)], text) {
				return fmt.Errorf("--broker %s: is named twice", text)
			}
			continue // asked for, and there already
		}
		seen[e.url(0)] = true
		p.brokers = append(p.brokers, e)
	}
	if len(p.brokers) == 0 {
		return errors.New("a new fabric needs the hosts of its brokers: --broker HOST[,HOST...]")
	}
	return nil
}

func (p *plan) resolveLeaves(known []string) error {
	for _, text := range slices.Concat(known, p.Leaves) {
		name, where, ok := strings.Cut(text, "=")
		if err := wire.CheckName(name); err != nil {
			return fmt.Errorf("--leaf: %w", err)
		}
		if p.has(identity.RoleLeaf, name) {
			continue
		}
		if !ok {
			where = name
		}
		host, port, err := parseHost(where)
		if err != nil {
			return fmt.Errorf("--leaf %s: %w", text, err)
		}
		p.leaves = append(p.leaves, endpoint{name: "leaf-" + name, host: host, port: port})
		p.members = append(p.members, member{role: identity.RoleLeaf, name: name, folder: "leaf-" + name})
	}
	return nil
}

func (p *plan) resolveNodes(known []string) error {
	asked := map[string]bool{}
	for _, text := range p.Nodes {
		name, leaf, ok := strings.Cut(text, "@")
		if err := wire.CheckName(name); err != nil {
			return fmt.Errorf("--node: %w", err)
		}
		if asked[name] {
			return fmt.Errorf("--node %s: is named twice", name)
		}
		asked[name] = true
		if ok && !p.has(identity.RoleLeaf, leaf) {
			return fmt.Errorf("--node %s: there is no leaf %q: name it with --leaf", text, leaf)
		}
		p.members = append(p.members, member{role: identity.RoleNode, name: name, folder: "node-" + name, leaf: leaf})
	}
	for _, name := range known {
		if !asked[name] {
			p.members = append(p.members, member{role: identity.RoleNode, name: name, folder: "node-" + name})
		}
	}
	return nil
}

func (p *plan) has(role identity.Role, name string) bool {
	return slices.ContainsFunc(p.members, func(m member) bool { return m.role == role && m.name == name })
}

// known reads which fabric the folder holds. A folder that a first run left half
// made tells nothing: that run's arguments complete it.
func (p *plan) known() (h Hosts, err error) {
	if file := p.at("edge", "edge.yaml"); present(file) {
		f, err := configs.Load(file)
		if err != nil {
			return h, err
		}
		if f.Edge == nil {
			return h, fmt.Errorf("%s: has no section edge", file)
		}
		h.Edge = f.Edge.Name
		for _, url := range f.Edge.Broker.URLs {
			h.Brokers = append(h.Brokers, strings.TrimPrefix(url, "tls://"))
		}
	}
	entries, err := os.ReadDir(p.Out)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return h, err
	}
	for _, e := range entries {
		if name, ok := strings.CutPrefix(e.Name(), "node-"); ok && present(p.at(e.Name(), e.Name()+".yaml")) {
			h.Nodes = append(h.Nodes, name)
		}
		h.Stock = h.Stock || (strings.HasPrefix(e.Name(), "service-") && present(p.at(e.Name(), e.Name()+".yaml")))
		if name, ok := strings.CutPrefix(e.Name(), "leaf-"); ok && present(p.at(e.Name(), e.Name()+".yaml")) {
			where, err := p.knownLeaf(e.Name())
			if err != nil {
				return h, err
			}
			h.Leaves = append(h.Leaves, name+"="+where)
		}
	}
	return h, nil
}

// knownLeaf reads where a leaf is dialled: the host of its certificate, the port
// of its configuration.
func (p *plan) knownLeaf(folder string) (string, error) {
	f, err := configs.Load(p.at(folder, folder+".yaml"))
	if err != nil {
		return "", err
	}
	if f.Leaf == nil {
		return "", fmt.Errorf("%s: has no section leaf", file(folder))
	}
	c, err := identity.LoadCertificate(p.at(folder, "cert.pem"), p.at(folder, "cert.key"))
	if err != nil {
		return "", err
	}
	leaf, err := x509.ParseCertificate(c.TLS().Certificate[0])
	if err != nil {
		return "", err
	}
	hosts := leaf.DNSNames
	for _, ip := range leaf.IPAddresses {
		hosts = append(hosts, ip.String())
	}
	_, port, err := net.SplitHostPort(f.Leaf.Listen)
	if err != nil || len(hosts) == 0 {
		return "", fmt.Errorf("%s: tells no host and port", file(folder))
	}
	return net.JoinHostPort(hosts[0], port), nil
}

// makeKeys makes each member's certificate and nkeys in its folder.
func (p *plan) makeKeys(shared map[string]*identity.NKey) error {
	for _, b := range p.brokers {
		if err := p.makeFolder(b.name, identity.ID{Edge: "-", Role: identity.RoleBroker, Name: b.name}, []string{b.host}); err != nil {
			return err
		}
		if err := p.share(b.name, shared); err != nil {
			return err
		}
		if !p.Stock {
			continue
		}
		if err := p.makeFolder(b.service(), identity.ID{Edge: "-", Role: identity.RoleService, Name: b.service()}, nil); err != nil {
			return err
		}
		if err := p.share(b.service(), shared); err != nil {
			return err
		}
	}
	for i := range p.members {
		m := &p.members[i]
		var hosts []string
		if m.role == identity.RoleLeaf {
			for _, l := range p.leaves {
				if l.name == m.folder {
					hosts = []string{l.host}
				}
			}
		}
		if err := p.makeFolder(m.folder, identity.ID{Edge: p.Edge, Role: m.role, Name: m.name}, hosts); err != nil {
			return err
		}
		key, err := ensureNKey(p.at(m.folder, "user.nk"), identity.NewUserKey)
		if err != nil {
			return err
		}
		m.nkey = key.Public()
		switch m.role {
		case identity.RoleNode:
			_, err = ensureNKey(p.at(m.folder, "curve.nk"), identity.NewCurveKey)
		case identity.RoleEdge:
			if err = ensureKey(p.at(m.folder, "admin-token"), adminTokenPrefix); err != nil {
				break
			}
			if err = ensureKey(p.at(m.folder, "api-key"), apiKeyPrefix); err == nil {
				p.report.APIKey, err = readKey(p.at(m.folder, "api-key"))
			}
		default: // no key but the connection's
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// share gives a folder the keys that all brokers share.
func (p *plan) share(folder string, shared map[string]*identity.NKey) error {
	for name, key := range shared {
		switch got, err := ensureNKey(p.at(folder, name), func() (*identity.NKey, error) { return key, nil }); {
		case err != nil:
			return err
		case got.Public() != key.Public():
			return fmt.Errorf("%s: is not the key in %s, which all brokers share: remove it to have it copied again", p.at(folder, name), p.at("authority", name))
		}
	}
	return nil
}

// makeFolder makes a member's folder with the CA's certificate and its own.
func (p *plan) makeFolder(folder string, id identity.ID, hosts []string) error {
	if err := os.MkdirAll(p.at(folder), 0o700); err != nil {
		return err
	}
	id.TrustDomain = identity.DefaultTrustDomain
	if file := p.at(folder, "ca.pem"); !present(file) {
		roots, err := identity.LoadTrust(p.at("authority", "ca.pem")) // two, while the CA is exchanged
		if err != nil {
			return err
		}
		if err := identity.WriteKeyFile(file, roots.PEM()); err != nil {
			return err
		}
	}
	return ensureCertificate(p.ca, id, hosts, p.at(folder, "cert.pem"), p.at(folder, "cert.key"))
}

func parseHost(text string) (host string, port int, err error) {
	host, port = strings.Trim(text, "[]"), clientPort
	digits := true
	if h, p, err := net.SplitHostPort(text); err == nil {
		n, err := strconv.Atoi(p)
		host, port, digits = h, n, err == nil
	}
	switch {
	case !digits, net.ParseIP(host) == nil && !validHost(host):
		return "", 0, errors.New("want a host name or an IP address, with :PORT where it is not 4222; an IPv6 address with a port in brackets")
	case port < 1 || port > highestClient:
		return "", 0, fmt.Errorf("want a port from 1 to %d after the colon: routes and leaves take higher ones", highestClient)
	}
	return host, port, nil
}

func validHost(host string) bool {
	return host != "" && len(host) <= 253 && !strings.ContainsFunc(host, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && r != '-' && r != '.'
	})
}

func owner(text string) (uid, gid int, err error) {
	if text == "" {
		return 0, 0, nil
	}
	u, g, ok := strings.Cut(text, ":")
	uid, uerr := strconv.Atoi(u)
	gid, gerr := strconv.Atoi(g)
	if !ok || uerr != nil || gerr != nil || uid < 0 || gid < 0 {
		return 0, 0, fmt.Errorf("--owner %s: want UID:GID in numbers, such as 65532:65532", text)
	}
	return uid, gid, nil
}

func chown(dir string, uid, gid int) error {
	return filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		return os.Lchown(path, uid, gid)
	})
}
