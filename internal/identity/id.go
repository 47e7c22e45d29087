package identity

import (
	"errors"
	"fmt"
	"net/url"
	"strings"

	"github.com/iop-fabric/iop/wire"
)

// DefaultTrustDomain is the trust domain of a fabric that names none.
const DefaultTrustDomain = "iop"

// everyEdge stands for the edge of a workload that serves all of them.
const everyEdge = "-"

// URI is the name as it stands in a certificate's only URI SAN (B2).
func (id ID) URI() *url.URL {
	return &url.URL{Scheme: "spiffe", Host: id.TrustDomain, Path: "/" + id.Edge + "/" + string(id.Role) + "/" + id.Name}
}

// String is the URI in text.
func (id ID) String() string { return id.URI().String() }

// ParseID reads the name of a workload from a URI SAN.
func ParseID(u *url.URL) (ID, error) {
	if u == nil {
		return ID{}, errors.New("workload name: no URI")
	}
	parts := strings.Split(u.Path, "/")
	if len(parts) != 4 || parts[0] != "" {
		return ID{}, fmt.Errorf("workload name %.100q: want spiffe://<trust-domain>/<edge>/<role>/<name>", u.String())
	}
	id := ID{TrustDomain: u.Host, Edge: parts[1], Role: Role(parts[2]), Name: parts[3]}
	if err := id.check(); err != nil {
		return ID{}, err
	}
	// Scheme, user, port, query, fragment and escapes all show up here.
	if u.String() != id.String() {
		return ID{}, fmt.Errorf("workload name %.100q: want spiffe://<trust-domain>/<edge>/<role>/<name> and nothing else", u.String())
	}
	return id, nil
}

// check reports whether id is the name of a workload there may be. Its parts
// become tokens of subjects and must be names (Z1).
func (id ID) check() error {
	if err := wire.CheckTrustDomain(id.TrustDomain); err != nil {
		return fmt.Errorf("workload name: %w", err)
	}
	switch id.Role {
	case RoleBroker, RoleService:
		if id.Edge != everyEdge {
			return fmt.Errorf("workload name: a %s serves every edge, so its edge is %q, not %.80q", id.Role, everyEdge, id.Edge)
		}
	case RoleEdge, RoleNode, RoleLeaf:
		if err := wire.CheckName(id.Edge); err != nil {
			return fmt.Errorf("workload name: edge: %w", err)
		}
	default:
		return fmt.Errorf("workload name: role %.80q is none of broker, edge, node, leaf, service", string(id.Role))
	}
	if err := wire.CheckName(id.Name); err != nil {
		return fmt.Errorf("workload name: %w", err)
	}
	return nil
}
