package identity

// Role is what a workload may be.
type Role string

// The roles of the fabric.
const (
	RoleBroker  Role = "broker"
	RoleEdge    Role = "edge"
	RoleNode    Role = "node"
	RoleLeaf    Role = "leaf"
	RoleService Role = "service" // the session service beside a stock server
)

// ID is a workload's name: spiffe://<trust-domain>/<edge>/<role>/<name>.
// A broker serves every edge; its edge is "-".
type ID struct {
	TrustDomain string
	Edge        string
	Role        Role
	Name        string
}

// What the other files of this package provide (names are fixed, callers exist):
//
//	func (id ID) URI() *url.URL
//	func (id ID) String() string
//	func ParseID(u *url.URL) (ID, error)
//	const DefaultTrustDomain = "iop"
//
//	// CA. Files: ca.pem, ca.key. Certificates are ECDSA P-256.
//	func NewCA(trustDomain string, ttl time.Duration) (*CA, error)
//	func LoadCA(dir string) (*CA, error)
//	func (ca *CA) Save(dir string) error
//	func (ca *CA) Pool() *x509.CertPool
//	func (ca *CA) PEM() []byte
//	func (ca *CA) Issue(id ID, hosts []string, ttl time.Duration) (*Certificate, error) // key made here
//	func (ca *CA) Sign(pub crypto.PublicKey, id ID, hosts []string, ttl time.Duration) ([]byte, error)
//
//	// Certificate is a chain and its private key. Files: <name>.pem, <name>.key.
//	type Certificate struct{ Chain [][]byte; Leaf *x509.Certificate; ... }
//	func LoadCertificate(certFile, keyFile string) (*Certificate, error)
//	func (c *Certificate) Save(certFile, keyFile string) error
//	func (c *Certificate) TLS() tls.Certificate
//	func (c *Certificate) ID() ID
//	func (c *Certificate) Sign(label string, parts ...[]byte) ([]byte, error)
//	func LoadPool(caFile string) (*x509.CertPool, error)
//
//	// VerifyChain checks I1. chain is DER, leaf first; role is the role required.
//	func VerifyChain(pool *x509.CertPool, chain [][]byte, role Role, server bool) (ID, *x509.Certificate, error)
//	func VerifySignature(leaf *x509.Certificate, sig []byte, label string, parts ...[]byte) error
//
//	// nkeys. Kinds: account (issuer), user, curve.
//	type NKey struct{...}                       // prints redacted
//	func NewUserKey() (*NKey, error); NewAccountKey; NewCurveKey
//	func LoadNKey(file string) (*NKey, error); func (k *NKey) Save(file string) error
//	func (k *NKey) Public() string
//	func (k *NKey) Sign(data []byte) ([]byte, error)       // raw: the NATS nonce
//	func (k *NKey) SignLabelled(label string, parts ...[]byte) ([]byte, error)
//	func (k *NKey) Pair() nkeys.KeyPair
//	func VerifyNKey(public string, sig []byte, label string, parts ...[]byte) error
//
//	// Session token (G3).
//	type SessionClaims struct{ Edge, Node string; Gen uint64; NKey string }
//	func IssueToken(issuer *NKey, c SessionClaims) ([]byte, error)
//	func VerifyToken(issuerPublic string, token []byte) (SessionClaims, error)
//
//	// Registration proof (G3, L8). Transcript = node id, token, nonce, recipient
//	// key, instance id, protocol range and features, software.
//	func SignRegister(cert *Certificate, nkey *NKey, r *iopv1.RegisterRequest) error      // fills chain and both signatures
//	func VerifyRegister(pool *x509.CertPool, issuerPublic string, edge, node string, gen uint64, r *iopv1.RegisterRequest) error
//	// Configuration proof: over payload, nonce, revision.
//	func SignConfig(cert *Certificate, payload, nonce []byte, revision uint64) (*iopv1.SignedConfig, error)
//	func VerifyConfig(pool *x509.CertPool, edge string, nonce []byte, after uint64, c *iopv1.SignedConfig) error
