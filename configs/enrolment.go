package configs

import (
	"net"
	"strings"
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
}

// DefaultEnrolPort is the port of an enrolment listener.
const DefaultEnrolPort = "8443"

func (e *Enrolment) applyDefaults() {
	if e != nil {
		or(&e.Listen, ":"+DefaultEnrolPort)
	}
}

func (e *Enrolment) validate(v *validator, made bool) {
	if e == nil {
		return
	}
	if e.Edge != "" || !made {
		v.name("broker.enrolment.edge", e.Edge)
	}
	v.listen("broker.enrolment.listen", e.Listen)
	if e.URL != "" || !made {
		if v.required("broker.enrolment.url", e.URL) && !e.validURL() {
			v.fault("broker.enrolment.url", "want host or host:port, such as hub.example:8443")
		}
	}
	v.file("broker.enrolment.ca_certificate", e.CACertificate, made)
	v.file("broker.enrolment.ca_key", e.CAKey, made)
	v.brokerURLs("broker.enrolment.broker_urls", e.BrokerURLs)
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
