package up

import (
	"fmt"
	"net"
	"slices"
	"strings"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/identity"
)

// makeConfigs writes the configurations that are not there, and notes what those
// that are there lack.
func (p *plan) makeConfigs() error {
	for _, b := range p.brokers {
		if err := p.write(b.name, p.brokerText(b)); err != nil {
			return err
		}
		if !p.Stock {
			continue
		}
		if err := p.write(b.service(), p.serviceText(b)); err != nil {
			return err
		}
	}
	for _, m := range p.members {
		text := ""
		switch m.role {
		case identity.RoleEdge:
			text = p.edgeText()
		case identity.RoleLeaf:
			text = p.leafText(m)
		default:
			text = p.nodeText(m)
		}
		if err := p.write(m.folder, text); err != nil {
			return err
		}
	}
	return p.missing()
}

func file(folder string) string { return folder + "/" + folder + ".yaml" }

// write writes a folder's configuration, proved to be a good one, unless there
// is one.
func (p *plan) write(folder, text string) error {
	path := p.at(folder, folder+".yaml")
	if present(path) {
		p.report.Kept = append(p.report.Kept, folder)
		return nil
	}
	if _, err := configs.Parse(path, []byte(text)); err != nil {
		return fmt.Errorf("BUG: the configuration made for %s: %w", folder, err)
	}
	p.report.Made = append(p.report.Made, folder)
	return identity.WriteKeyFile(path, []byte(text))
}

const tlsText = `certificate: cert.pem, key: cert.key, ca: ca.pem`

func (p *plan) brokerText(b endpoint) string {
	var s strings.Builder
	fmt.Fprintf(&s, `# A broker of edge %s. On its own host, with the files of this folder and no others:
#
#   iop broker --config %s.yaml
broker:
  name: %q
  listen: %q                 # nodes and edges dial it, by mTLS
  store_dir: data            # generations, and what the authority knows: keep it
  tls: {%s}
  issuer_key: issuer.nk
  system_key: system.nk
  callout_key: callout.nk
  service_key: service.nk
`, p.Edge, b.name, b.name, b.listen(0), tlsText)
	if len(p.leaves) > 0 {
		fmt.Fprintf(&s, "  leaf_listen: %q            # leaf brokers dial it, by mTLS\n", b.listen(leafOffset))
	}
	fmt.Fprintf(&s, "  # admin_listen: 127.0.0.1:8401   # /healthz, /readyz, /metrics; off by default\n")
	host, _, _ := net.SplitHostPort(b.listen(0)) // made of the two
	fmt.Fprintf(&s, `  # To invite machines ("iop invite") rather than name them below: set admin_listen, put authority/ca.key and a file
  # admin-token (16 or more random characters) beside this file, both mode 0600, and take the # away. One broker does.
  # admin_token: {file: admin-token}
  # enrolment: {edge: %q, listen: %q, url: %q, ca_certificate: ca.pem, ca_key: ca.key, broker_urls: [%s]}
`, p.Edge, net.JoinHostPort(host, configs.DefaultEnrolPort), net.JoinHostPort(b.host, configs.DefaultEnrolPort), p.urls(0))
	if len(p.brokers) > 1 {
		s.WriteString(p.clusterText(b))
	}
	s.WriteString("  members:                   # who may come in\n")
	for _, m := range p.members {
		s.WriteString(p.memberText(m))
	}
	return s.String()
}

// serviceText is the session service beside a nats-server that runs with what
// `iop broker config --stock` makes of the broker's file.
func (p *plan) serviceText(b endpoint) string {
	var s strings.Builder
	replicas := 1
	if len(p.brokers) >= 3 {
		replicas = 3
	}
	host, _, _ := net.SplitHostPort(b.listen(0)) // made of the two
	fmt.Fprintf(&s, `# The session service of edge %s beside the nats-server in the place of %s. On its host, with the files of this folder:
#
#   iop service --config %s.yaml
service:
  name: %q
  urls: [%q]
  tls: {%s}
  issuer_key: issuer.nk
  system_key: system.nk
  callout_key: callout.nk
  service_key: service.nk
  replicas: %d                # how many servers keep each store
  # admin_listen: 127.0.0.1:8401   # /healthz, /readyz, /metrics; off by default
  # To invite machines: as the broker's file says, and broker_urls must be there.
  # admin_token: {file: admin-token}
  # enrolment: {edge: %q, listen: %q, url: %q, ca_certificate: ca.pem, ca_key: ca.key, broker_urls: [%s]}
  members:                   # who may come in
`, p.Edge, b.name, b.service(), b.service(), b.url(0), tlsText, replicas, p.Edge, net.JoinHostPort(host, configs.DefaultEnrolPort), net.JoinHostPort(b.host, configs.DefaultEnrolPort), p.urls(0))
	for _, m := range p.members {
		s.WriteString(p.memberText(m))
	}
	return s.String()
}

func (p *plan) clusterText(b endpoint) string {
	var s strings.Builder
	fmt.Fprintf(&s, "  cluster:\n    listen: %q   # the other brokers dial it, by mTLS\n    routes:                  # all brokers, the same list in each\n", b.listen(routeOffset))
	for _, other := range p.brokers {
		s.WriteString(routeText(other))
	}
	return s.String()
}

func routeText(b endpoint) string { return fmt.Sprintf("      - %q\n", b.url(routeOffset)) }

func (p *plan) memberText(m member) string {
	return fmt.Sprintf("    - {edge: %q, role: %s, name: %q, nkey: %s}\n", p.Edge, m.role, m.name, m.nkey)
}

func (p *plan) edgeText() string {
	var s strings.Builder
	fmt.Fprintf(&s, `# Edge %s. On its own host, with the files of this folder and no others:
#
#   iop edge --config edge.yaml
edge:
  name: %q
  listen: 0.0.0.0:8400         # callers, in plain HTTP: put TLS in front where the network is not yours
  admin_listen: 127.0.0.1:8401 # /healthz, /readyz, /metrics, and /api/v1/ for who has the token
  admin_token: {file: admin-token}
  broker:
    urls: [%s]
    tls: {%s}
    nkey: user.nk
  issuers: [%s]
  keys:                        # who may call
    - name: first
      file: api-key
  models: auto                 # whatever the nodes' providers list
  # invited: true              # take in machines that joined by "iop invite"
`, p.Edge, p.Edge, p.urls(0), tlsText, p.issuer)
	const nodes = "nodes:                       # what each node is to run\n"
	none := true
	for _, m := range p.members {
		if m.role != identity.RoleNode {
			continue
		}
		if none {
			s.WriteString("  " + nodes)
			none = false
		}
		s.WriteString(p.edgeNodeText(m))
	}
	if none { // a list of nothing is no list
		s.WriteString("  # " + nodes)
	}
	return s.String()
}

// edgeNodeText gives a node the model servers that `iop up` would look for.
func (p *plan) edgeNodeText(m member) string {
	var s strings.Builder
	fmt.Fprintf(&s, "    - name: %q\n      adapters:\n", m.name)
	if p.Demo {
		s.WriteString("        - {name: demo, type: demo}\n")
		return s.String()
	}
	for _, l := range configs.LocalProviders() {
		fmt.Fprintf(&s, "        - {name: %s, type: openai_compat, profile: %s, base_url: %q}\n", l.Name, l.Profile, l.BaseURL)
	}
	s.WriteString("        - {name: demo, type: demo, fallback: true} # only while nothing else lists a model\n")
	return s.String()
}

func (p *plan) nodeText(m member) string {
	urls := p.urls(0)
	for _, l := range p.leaves {
		if m.leaf != "" && l.name == "leaf-"+m.leaf {
			urls = fmt.Sprintf("%q", l.url(0))
		}
	}
	return fmt.Sprintf(`# Node %s of edge %s. On its own host, with the files of this folder and no others:
#
#   iop node --config %s.yaml
node:
  name: %q
  edge: %q
  broker:
    urls: [%s]
    tls: {%s}
    nkey: user.nk
  curve_key: curve.nk
  reconnect: {max_attempts: 0, interval_sec: 5} # 0: it never gives up
  # admin_listen: 127.0.0.1:8401   # /healthz, /readyz, /metrics; off by default
`, m.name, p.Edge, m.folder, m.name, p.Edge, urls, tlsText)
}

func (p *plan) leafText(m member) string {
	listen := ""
	for _, l := range p.leaves {
		if l.name == m.folder {
			listen = l.listen(0)
		}
	}
	return fmt.Sprintf(`# Leaf broker %s of edge %s. On its own host, with the files of this folder and no others:
#
#   iop leaf --config %s.yaml
leaf:
  name: %q
  edge: %q
  listen: %q   # the site's nodes dial it, by mTLS
  hub: [%s]
  tls: {%s}
  nkey: user.nk
  issuer: %s
  # admin_listen: 127.0.0.1:8401   # /healthz, /readyz, /metrics; off by default
`, m.name, p.Edge, m.folder, m.name, p.Edge, listen, p.urls(leafOffset), tlsText, p.issuer)
}

func (p *plan) urls(offset int) string {
	var out []string
	for _, b := range p.brokers {
		out = append(out, fmt.Sprintf("%q", b.url(offset)))
	}
	return strings.Join(out, ", ")
}

// knows reports whether a list of members holds one as it is.
func (p *plan) knows(list []configs.Member, m member) bool {
	return slices.ContainsFunc(list, func(c configs.Member) bool {
		return c.Edge == p.Edge && c.Role == string(m.role) && c.Name == m.name && c.NKey == m.nkey
	})
}

// missing notes what the files that were there already do not say yet.
func (p *plan) missing() error {
	files := map[string][]string{} // where each text is to go
	var order []string
	todo := func(in, key, text string) {
		k := key + "\x00" + text
		if files[k] == nil {
			order = append(order, k)
		}
		files[k] = append(files[k], in)
	}
	for _, b := range p.brokers {
		f, err := configs.Load(p.at(b.name, b.name+".yaml"))
		if err != nil {
			return err
		}
		if f.Broker == nil {
			return fmt.Errorf("%s: has no section broker", file(b.name))
		}
		for _, m := range p.members {
			if !p.knows(f.Broker.Members, m) {
				todo(file(b.name), "broker.members", p.memberText(m))
			}
		}
		if p.Stock {
			s, err := configs.Load(p.at(b.service(), b.service()+".yaml"))
			if err != nil {
				return err
			}
			if s.Service == nil {
				return fmt.Errorf("%s: has no section service", file(b.service()))
			}
			for _, m := range p.members {
				if !p.knows(s.Service.Members, m) {
					todo(file(b.service()), "service.members", p.memberText(m))
				}
			}
		}
		if len(p.leaves) > 0 && f.Broker.LeafListen == "" {
			todo(file(b.name), "broker", fmt.Sprintf("  leaf_listen: %q\n", b.listen(leafOffset)))
		}
		for _, other := range p.brokers {
			switch c := f.Broker.Cluster; {
			case len(p.brokers) == 1, c != nil && slices.Contains(c.Routes, other.url(routeOffset)):
			case c != nil:
				todo(file(b.name), "broker.cluster.routes", routeText(other))
			case other == p.brokers[0]: // once
				todo(file(b.name), "broker", p.clusterText(b))
			}
		}
	}
	f, err := configs.Load(p.at("edge", "edge.yaml"))
	if err != nil {
		return err
	}
	for _, m := range p.members {
		if m.role == identity.RoleNode && !slices.ContainsFunc(f.Edge.Nodes, func(n configs.EdgeNode) bool { return n.Name == m.name }) {
			todo(file("edge"), "edge.nodes", p.edgeNodeText(m))
		}
	}
	for _, b := range p.brokers {
		if !slices.Contains(f.Edge.Broker.URLs, b.url(0)) {
			todo(file("edge"), "edge.broker.urls", fmt.Sprintf("      - %q\n", b.url(0)))
		}
	}
	for _, k := range order {
		key, text, _ := strings.Cut(k, "\x00")
		t := HostsTodo{Files: files[k], Key: key, Text: text}
		if n := len(p.report.Todo) - 1; n >= 0 && p.report.Todo[n].Key == key && slices.Equal(p.report.Todo[n].Files, t.Files) {
			p.report.Todo[n].Text += text
			continue
		}
		p.report.Todo = append(p.report.Todo, t)
	}
	return nil
}
