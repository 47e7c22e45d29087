package configs

import (
	"maps"
	"net"
	"slices"
	"strings"

	"github.com/iop-fabric/iop/wire"
)

// Enrolment is where machines that were invited have their certificate signed
// (B11). The broker that has it holds the CA's key: one of a fabric is enough.
type Enrolment struct {
	// Edge is the one that invited machines join.
	Edge string `yaml:"edge"`
	// Listen is open only while an invitation is; ":8443".
	Listen string `yaml:"listen"`
	// URL is what machines dial, host:port; the port may be left out where it is
	// that of Listen.
	URL string `yaml:"url"`
	// The CA's certificate and key; of `iop up` those of the data folder.
	CACertificate string `yaml:"ca_certificate"`
	CAKey         string `yaml:"ca_key"`
	// BrokerURLs are what joined machines dial, tls://host:4222; left out, this
	// broker at the host of URL.
	BrokerURLs []string `yaml:"broker_urls"`
	// Leaves are what machines at a leaf's site dial, by the leaf's name: for
	// `iop invite --leaf NAME`.
	Leaves map[string]string `yaml:"leaves"`
}

// EdgeOf is the edge whose members an operator means: the one that machines join,
// or the only one of the members; empty: it cannot be told.
func EdgeOf(e *Enrolment, members []Member) (edge string) {
	if e != nil {
		return e.Edge
	}
	for _, m := range members {
		if edge != "" && m.Edge != edge {
			return ""
		}
		edge = m.Edge
	}
	return edge
}

// DefaultEnrolPort is the port of an enrolment listener.
const DefaultEnrolPort = "8443"

func (e *Enrolment) applyDefaults() {
	if e != nil {
		or(&e.Listen, ":"+DefaultEnrolPort)
	}
}

// validate checks it in its section, "broker" or "service".
func (e *Enrolment) validate(v *validator, section string, made bool) {
	if e == nil {
		return
	}
	section += ".enrolment"
	if e.Edge != "" || !made {
		v.name(section+".edge", e.Edge)
	}
	v.listen(section+".listen", e.Listen)
	if e.URL != "" || !made {
		if v.required(section+".url", e.URL) && !e.validURL() {
			v.fault(section+".url", "want host or host:port, such as hub.example:8443")
		}
	}
	v.file(section+".ca_certificate", e.CACertificate, made)
	v.file(section+".ca_key", e.CAKey, made)
	v.brokerURLs(section+".broker_urls", e.BrokerURLs)
	for _, leaf := range slices.Sorted(maps.Keys(e.Leaves)) {
		path := section + ".leaves." + printable(leaf)
		v.check(path, wire.CheckName(leaf))
		v.check(path, CheckBrokerURL(e.Leaves[leaf]))
	}
}

func (e *Enrolment) validURL() bool {
	host, port := e.HostPort()
	return host != "" && isHost(host) && !strings.ContainsFunc(port, func(r rune) bool { return r < '0' || r > '9' }) && len(port) <= 5
}

// HostPort is URL in its parts; port is empty where it was left out.
func (e *Enrolment) HostPort() (host, port string) {
	if h, p, err := net.SplitHostPort(e.URL); err == nil {
		return h, p
	}
	return strings.Trim(e.URL, "[]"), ""
}

// LocalProviders are the model servers that may be beside a Node, on their usual
// ports. They are all adapters from the start; one that does not answer just
// lists no model (D2).
func LocalProviders() []Adapter {
	return []Adapter{
		{Name: "ollama", Type: TypeOpenAICompat, BaseURL: "http://127.0.0.1:11434", Profile: ProfileOllama},
		{Name: "vllm", Type: TypeOpenAICompat, BaseURL: "http://127.0.0.1:8000", Profile: ProfileVLLM},
		{Name: "llamacpp", Type: TypeOpenAICompat, BaseURL: "http://127.0.0.1:8080", Profile: ProfileLlamaCPP},
		{Name: "lmstudio", Type: TypeOpenAICompat, BaseURL: "http://127.0.0.1:1234", Profile: ProfileOpenAI},
	}
}

// LocalAdapters is what a Node runs of which nothing else is said: the local
// providers, and the demo model while none lists one, or always.
func LocalAdapters(demo bool) []Adapter {
	return append(LocalProviders(), Adapter{Name: "demo", Type: TypeDemo, Fallback: !demo})
}

// InvitedNode is the configuration of a Node that was invited, complete.
func (e *Edge) InvitedNode(name string) EdgeNode {
	n := EdgeNode{Name: name, Adapters: append([]Adapter{}, e.InvitedAdapters...)}
	if len(n.Adapters) == 0 {
		n.Adapters = LocalAdapters(false)
	}
	n.applyDefaults()
	return n
}

// TakesInvited reports whether Nodes that were invited are taken in.
func (e *Edge) TakesInvited() bool { return e.Invited != nil && *e.Invited }
