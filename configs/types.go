package configs

import "time"

// File is a whole configuration. A number that is left out is the default written at
// its field; a 0 that is written out is a fault where that default is another.
type File struct {
	Log    Log     `yaml:"log"`
	Broker *Broker `yaml:"broker"`
	Edge   *Edge   `yaml:"edge"`
	Node   *Node   `yaml:"node"`
	Leaf   *Leaf   `yaml:"leaf"`
	// Service is a session service beside a nats-server of its own.
	Service *Service `yaml:"service"`
}

// Log says how much is logged and in what form.
type Log struct {
	Level  string `yaml:"level"`  // debug, info (default), warn, error
	Format string `yaml:"format"` // text (default), json
}

// TLS names a certificate, its key and the CA that signed it and its peers.
type TLS struct {
	Certificate string `yaml:"certificate"`
	Key         string `yaml:"key"`
	CA          string `yaml:"ca"`
}

// Broker configures an embedded broker.
type Broker struct {
	Name        string `yaml:"name"`         // "broker"
	Listen      string `yaml:"listen"`       // "127.0.0.1:4222"
	LeafListen  string `yaml:"leaf_listen"`  // for leaf brokers, such as "0.0.0.0:7422"; empty: none
	StoreDir    string `yaml:"store_dir"`    // JetStream's folder
	TrustDomain string `yaml:"trust_domain"` // "iop"
	TLS         TLS    `yaml:"tls"`
	// Cluster joins this broker with others; left out: it is alone.
	Cluster *Cluster `yaml:"cluster"`
	// Seeds of nkeys, one file each.
	IssuerKey  string `yaml:"issuer_key"`  // account: signs callout answers and session tokens
	SystemKey  string `yaml:"system_key"`  // the session service in SYS
	CalloutKey string `yaml:"callout_key"` // the session service in AUTH
	ServiceKey string `yaml:"service_key"` // the session service in FABRIC
	// EdgeKeys are Edges in this very process: edge name to public nkey (U...).
	EdgeKeys map[string]string `yaml:"edge_keys"`
	// Members seeds what the authority knows (B9); more is learnt at run time.
	Members []Member `yaml:"members"`
	// HeartbeatBound is how long a silent session still counts as alive when a
	// second instance of its name asks to come in (B12); 5s.
	HeartbeatBound time.Duration `yaml:"heartbeat_bound"`
	// AdminListen is where /healthz, /readyz and /metrics are; empty: nowhere.
	AdminListen string `yaml:"admin_listen"`
	// AdminToken lets an operator invite and revoke there; left out: nobody may.
	AdminToken AdminToken `yaml:"admin_token"`
	// Enrolment lets this broker invite machines (B11); left out: it does not.
	Enrolment *Enrolment `yaml:"enrolment"`
}

// Member is one registered workload.
type Member struct {
	Edge string `yaml:"edge"`
	Role string `yaml:"role"` // node, edge, leaf
	Name string `yaml:"name"`
	NKey string `yaml:"nkey"` // public, U...
	// Revoked refuses it (B8).
	Revoked bool `yaml:"revoked"`
}

// Remote says how to reach the broker and who we are there.
type Remote struct {
	URLs []string `yaml:"urls"` // tls://host:4222; empty for an Edge in the broker's process
	TLS  TLS      `yaml:"tls"`
	NKey string   `yaml:"nkey"` // file with the user seed
}

// Edge configures the gateway.
type Edge struct {
	Name        string `yaml:"name"`         // the edge's name, a token of subjects
	Listen      string `yaml:"listen"`       // "127.0.0.1:8400"
	AdminListen string `yaml:"admin_listen"` // "127.0.0.1:8401"
	// AdminToken lets an operator ask /api/v1/ of the admin listener; left out:
	// nobody may.
	AdminToken  AdminToken `yaml:"admin_token"`
	TrustDomain string     `yaml:"trust_domain"` // "iop"
	Broker      Remote     `yaml:"broker"`
	// Issuers are the public account keys whose session tokens are good.
	Issuers []string `yaml:"issuers"`
	Keys    []APIKey `yaml:"keys"`
	Models  Models   `yaml:"models"`
	// RetryOn are the statuses of a provider's answer for which another provider is
	// asked before the caller is answered, such as [429, 5xx] (Q5): of every model
	// whose group does not say so itself. None.
	RetryOn Statuses   `yaml:"retry_on"`
	Nodes   []EdgeNode `yaml:"nodes"`
	// Invited takes in Nodes that are not in Nodes but prove themselves by a
	// certificate of our CA: those that were invited. false; of `iop up` true.
	Invited *bool `yaml:"invited"`
	// InvitedAdapters is what such a Node runs: left out, the model servers on their
	// usual ports, and the demo model while there is none.
	InvitedAdapters []Adapter `yaml:"invited_adapters"`
	Queue           Queue     `yaml:"queue"`
	Limits          Limits    `yaml:"limits"`
	// KeepAlive keeps slow streams from being taken for dead ones (E8).
	KeepAlive KeepAlive `yaml:"keep_alive"`
	CORS      CORS      `yaml:"cors"`
	// AnswerHeaders tell callers who answered: x-iop-node, x-iop-provider,
	// x-iop-attempts, x-iop-queue-ms (E11).
	AnswerHeaders bool `yaml:"answer_headers"`
	// TLS is the callers' listener's; left out, they come in clear text. The files
	// are read again when they change.
	TLS KeyPair `yaml:"tls"`
	// TrustedProxies are addresses and networks whose X-Forwarded-For is believed.
	TrustedProxies []string `yaml:"trusted_proxies"`

	HeartbeatInterval time.Duration `yaml:"heartbeat_interval"` // 1s
	HeartbeatBound    time.Duration `yaml:"heartbeat_bound"`    // 5s
	PendingBound      time.Duration `yaml:"pending_bound"`      // 30s
	DiscoverInterval  time.Duration `yaml:"discover_interval"`  // 5s; how often model lists are read
	StopGrace         time.Duration `yaml:"stop_grace"`         // 10s; how long running answers may take to end
}

// APIKey lets a principal in. Exactly one of SHA256, File and Env names the key.
type APIKey struct {
	Name   string   `yaml:"name"`   // the principal
	SHA256 string   `yaml:"sha256"` // hex of the key's SHA-256
	File   string   `yaml:"file"`
	Env    string   `yaml:"env"`
	Models []string `yaml:"models"` // empty: all
}

// AdminToken lets an operator in. At most one of its fields names the token.
type AdminToken struct {
	SHA256 string `yaml:"sha256"` // hex of the token's SHA-256
	File   string `yaml:"file"`
	Env    string `yaml:"env"`
}

// Models is either the word auto or a list of groups.
type Models struct {
	Auto   bool
	Groups []ModelGroup
}

// ModelGroup is one model that callers may name.
type ModelGroup struct {
	Name      string              `yaml:"name"`
	Providers []ProviderReference `yaml:"providers"`
	RetryOn   Statuses            `yaml:"retry_on"` // left out: the Edge's; [] is none
}

// ProviderReference names a provider of a node by "<node>/<id>".
type ProviderReference struct {
	Provider string `yaml:"provider"`
	Priority int    `yaml:"priority"` // lower is better; 0
	Weight   int    `yaml:"weight"`   // 1
}

// EdgeNode is what the Edge knows of one node: the adapters it is to run and
// the providers behind them.
type EdgeNode struct {
	Name      string     `yaml:"name"`
	Adapters  []Adapter  `yaml:"adapters"`
	Providers []Provider `yaml:"providers"`
}

// Adapter is one driver instance on a node.
type Adapter struct {
	Name    string `yaml:"name"` // empty: the type
	Type    string `yaml:"type"` // openai_compat, demo
	BaseURL string `yaml:"base_url"`
	// Profile is the kind of server behind an openai_compat adapter: openai
	// (default: nothing more is known of it), ollama, llamacpp, vllm.
	Profile  string `yaml:"profile"`
	Capacity int    `yaml:"capacity"` // 8 places at once; demo 64
	Disabled bool   `yaml:"disabled"`
	// StaticKeyName names a key in the Node's own environment (R7).
	StaticKeyName string `yaml:"static_key_name"`
	// Fallback: models of this adapter are offered only while no other adapter
	// of any node lists one (the demo model of `iop up`).
	Fallback bool `yaml:"fallback"`
	// ChunkDelay paces the demo adapter.
	ChunkDelay time.Duration `yaml:"chunk_delay"`
}

// Provider is a catalogue entry: an adapter and one target of it.
type Provider struct {
	ID       string `yaml:"id"` // empty: "<adapter>/<target>"
	Adapter  string `yaml:"adapter"`
	Target   string `yaml:"target"`
	Capacity int    `yaml:"capacity"` // left out: the adapter's
	Disabled bool   `yaml:"disabled"`
	// LongCapacity and LongThreshold (estimated prompt tokens) are Q2's; 0: no
	// distinction.
	LongCapacity  int           `yaml:"long_capacity"`
	LongThreshold int           `yaml:"long_threshold"`
	StallTimeout  time.Duration `yaml:"stall_timeout"` // 0: the Node's default
}

// Queue bounds the waiting (Q3).
type Queue struct {
	Depth int           `yaml:"depth"` // waiters per model and principal; 1000
	Wait  time.Duration `yaml:"wait"`  // 5m
}

// Limits bound what one caller may cost (Z3, T7).
type Limits struct {
	Body        int64         `yaml:"body"`         // bytes; 64 MiB
	BodyMemory  int64         `yaml:"body_memory"`  // per request, beyond it a temporary file; 1 MiB
	BodiesTotal int64         `yaml:"bodies_total"` // all held bodies; 4 GiB
	Header      int           `yaml:"header"`       // bytes; 64 KiB
	ReadHeader  time.Duration `yaml:"read_header"`  // 10s
	Idle        time.Duration `yaml:"idle"`         // keep-alive connections; 2m
	WriteStall  time.Duration `yaml:"write_stall"`  // 2m (E10)
	// Connections of callers at once; more wait to be accepted. 0: three quarters of
	// the files this process may open, so that the rest of it goes on (Z3).
	Connections   int   `yaml:"connections"`
	StreamsPerKey int   `yaml:"streams_per_key"` // 0: no bound
	Streams       int64 `yaml:"stream_memory"`   // bytes of all windows; 1 GiB (J7)
}

// Node configures a node daemon.
type Node struct {
	Name        string        `yaml:"name"`
	Edge        string        `yaml:"edge"`
	TrustDomain string        `yaml:"trust_domain"` // "iop"
	Broker      Remote        `yaml:"broker"`
	CurveKey    string        `yaml:"curve_key"` // file: the recipient of credential leases
	Reconnect   Reconnect     `yaml:"reconnect"`
	StopGrace   time.Duration `yaml:"stop_grace"` // 10s
	// AdminListen is where /healthz, /readyz and /metrics are; empty: nowhere.
	AdminListen string `yaml:"admin_listen"`
}

// Reconnect is S3's policy.
type Reconnect struct {
	MaxAttempts *int `yaml:"max_attempts"` // omitted: 10; 0: for ever
	IntervalSec *int `yaml:"interval_sec"` // omitted: 10
}
