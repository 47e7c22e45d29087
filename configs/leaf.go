package configs

import (
	"time"

	"github.com/nats-io/nkeys"

	"github.com/iop-fabric/iop/wire"
)

// Leaf configures a leaf broker: the Nodes of one site dial it, and it dials the
// hub, over one link (Y3).
type Leaf struct {
	Name        string `yaml:"name"`         // its name, a token of subjects
	Edge        string `yaml:"edge"`         // the one edge whose Nodes it carries
	Listen      string `yaml:"listen"`       // "127.0.0.1:4222"
	TrustDomain string `yaml:"trust_domain"` // "iop"
	// TLS is the leaf's own certificate: Nodes are shown it, and so is the hub.
	TLS TLS `yaml:"tls"`
	// Hub are the leaf listeners of the hub's brokers, tls://host:7422.
	Hub []string `yaml:"hub"`
	// NKey is the file of the leaf's user seed; the hub knows its public half.
	NKey string `yaml:"nkey"`
	// Issuer is the public account key (A...) that signs the hub's admissions.
	Issuer string `yaml:"issuer"`
	// HeartbeatBound is how long the hub may be silent before the leaf closes its
	// Nodes, so that they come back as new sessions; 5s, as at the Edge.
	HeartbeatBound time.Duration `yaml:"heartbeat_bound"`
	AdminListen    string        `yaml:"admin_listen"` // health and metrics; empty: none
}

func (l *Leaf) applyDefaults() {
	or(&l.Listen, "127.0.0.1:4222")
	or(&l.TrustDomain, defaultTrustDomain)
	or(&l.HeartbeatBound, wire.HeartbeatBound)
}

func (l *Leaf) paths() []*string {
	return []*string{&l.TLS.Certificate, &l.TLS.Key, &l.TLS.CA, &l.NKey}
}

func (l *Leaf) validate(v *validator) {
	v.name("leaf.name", l.Name)
	v.name("leaf.edge", l.Edge)
	v.listen("leaf.listen", l.Listen)
	v.trustDomain("leaf.trust_domain", l.TrustDomain)
	v.tls("leaf.tls", l.TLS, false)
	if len(l.Hub) == 0 {
		v.fault("leaf.hub", "is required, such as tls://broker.example:7422")
	}
	v.brokerURLs("leaf.hub", l.Hub)
	v.file("leaf.nkey", l.NKey, false)
	if v.required("leaf.issuer", l.Issuer) && (len(l.Issuer) != 56 || !nkeys.IsValidPublicAccountKey(l.Issuer)) {
		v.fault("leaf.issuer", "want a public account nkey (A..., 56 characters)")
	}
	v.positive("leaf.heartbeat_bound", l.HeartbeatBound)
	v.optionalListen("leaf.admin_listen", l.AdminListen)
}
