package configs

import (
	"fmt"
	"net/url"
	"strings"
	"time"

	"github.com/iop-fabric/iop/wire"
)

// Cluster joins brokers into one (Y2).
type Cluster struct {
	Name   string `yaml:"name"`   // "iop"; the same in each of its brokers
	Listen string `yaml:"listen"` // for the other brokers, such as "0.0.0.0:6222"
	// Routes are the brokers of the cluster, tls://host:6222, this one too: the
	// same list in each file, so that each knows how many there are.
	Routes []string `yaml:"routes"`
	// TLS of the routes; left out, the broker's. Either side must show a broker's.
	TLS TLS `yaml:"tls"`
	// Replicas is how many brokers keep each store: 3 where there are as many
	// brokers, otherwise 1. A store goes on while more than half of them do.
	Replicas int `yaml:"replicas"`
}

// maxReplicas is JetStream's.
const maxReplicas = 5

func (b *Broker) clusterDefaults() {
	c := b.Cluster
	if c == nil {
		return
	}
	or(&c.Name, "iop")
	or(&c.TLS, b.TLS)
	or(&c.Replicas, defaultReplicas(len(c.Routes)))
}

func defaultReplicas(members int) int {
	if members >= 3 {
		return 3
	}
	return 1
}

func (c *Cluster) paths() []*string {
	return []*string{&c.TLS.Certificate, &c.TLS.Key, &c.TLS.CA}
}

func (c *Cluster) validate(v *validator, b *Broker) {
	v.name("broker.cluster.name", c.Name)
	if v.required("broker.cluster.listen", c.Listen) {
		v.listen("broker.cluster.listen", c.Listen)
		if c.Listen == b.Listen && !strings.HasSuffix(c.Listen, ":0") {
			v.fault("broker.cluster.listen", "is the address of broker.listen")
		}
	}
	if len(c.Routes) < 2 {
		v.fault("broker.cluster.routes", "want every broker of the cluster, this one too, such as tls://broker-1.example:6222")
	}
	v.brokerURLs("broker.cluster.routes", c.Routes)
	for i, raw := range c.Routes {
		if u, err := url.Parse(raw); err == nil && u.Scheme == "tls" && u.Port() == "" {
			v.fault(fmt.Sprintf("broker.cluster.routes[%d]", i), "want a port, such as :6222")
		}
	}
	v.tls("broker.cluster.tls", c.TLS, c.TLS == b.TLS) // a fault of the broker's own is told there
	v.replicas("broker.cluster.replicas", c.Replicas)
	if len(c.Routes) > 0 && c.Replicas > len(c.Routes) {
		v.fault("broker.cluster.replicas", "is %d, but broker.cluster.routes names %d brokers", c.Replicas, len(c.Routes))
	}
}

func (v *validator) replicas(path string, n int) {
	if n < 1 || n > maxReplicas || n%2 == 0 {
		v.fault(path, "want 1, 3 or 5")
	}
}

// Service configures a session service beside a nats-server of its own (B1).
type Service struct {
	Name        string `yaml:"name"`         // "service"; of this service, in the certificate
	TrustDomain string `yaml:"trust_domain"` // "iop"
	// URLs are where the server is, tls://host:4222: the one beside it, or several
	// of its cluster.
	URLs []string `yaml:"urls"`
	// TLS is this service's own certificate, of role service.
	TLS TLS `yaml:"tls"`
	// Seeds of nkeys, one file each, as of a Broker.
	IssuerKey  string   `yaml:"issuer_key"`
	SystemKey  string   `yaml:"system_key"`
	CalloutKey string   `yaml:"callout_key"`
	ServiceKey string   `yaml:"service_key"`
	Members    []Member `yaml:"members"` // as of a Broker
	// Replicas is how many servers keep each store; 1.
	Replicas       int           `yaml:"replicas"`
	HeartbeatBound time.Duration `yaml:"heartbeat_bound"` // 5s; as of a Broker
	AdminListen    string        `yaml:"admin_listen"`    // health and metrics; empty: none
	// AdminToken and Enrolment as of a Broker; broker_urls must be set.
	AdminToken AdminToken `yaml:"admin_token"`
	Enrolment  *Enrolment `yaml:"enrolment"`
}

func (s *Service) applyDefaults() {
	or(&s.Name, "service")
	or(&s.TrustDomain, defaultTrustDomain)
	or(&s.Replicas, 1)
	or(&s.HeartbeatBound, wire.HeartbeatBound)
	s.Enrolment.applyDefaults()
}

func (s *Service) paths() []*string {
	all := []*string{&s.TLS.Certificate, &s.TLS.Key, &s.TLS.CA, &s.IssuerKey, &s.SystemKey, &s.CalloutKey, &s.ServiceKey, &s.AdminToken.File}
	if s.Enrolment != nil {
		all = append(all, &s.Enrolment.CACertificate, &s.Enrolment.CAKey)
	}
	return all
}

func (s *Service) validate(v *validator) {
	v.name("service.name", s.Name)
	v.trustDomain("service.trust_domain", s.TrustDomain)
	if len(s.URLs) == 0 {
		v.fault("service.urls", "is required, such as tls://127.0.0.1:4222")
	}
	v.brokerURLs("service.urls", s.URLs)
	v.tls("service.tls", s.TLS, false)
	v.file("service.issuer_key", s.IssuerKey, false)
	v.file("service.system_key", s.SystemKey, false)
	v.file("service.callout_key", s.CalloutKey, false)
	v.file("service.service_key", s.ServiceKey, false)
	v.replicas("service.replicas", s.Replicas)
	v.positive("service.heartbeat_bound", s.HeartbeatBound)
	v.members("service.members", s.Members, unique{})
	v.optionalListen("service.admin_listen", s.AdminListen)
	v.adminToken("service", s.AdminListen, s.AdminToken, s.Enrolment, false)
	s.Enrolment.validate(v, "service", false)
	if s.Enrolment != nil && len(s.Enrolment.BrokerURLs) == 0 {
		v.fault("service.enrolment.broker_urls", "is required: what machines that joined dial, such as tls://hub.example:4222")
	}
}
