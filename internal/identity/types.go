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
