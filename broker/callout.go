package broker

import (
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"slices"
	"strconv"
	"time"

	"github.com/nats-io/jwt/v2"
	"github.com/nats-io/nkeys"

	"github.com/iop-fabric/iop/internal/identity"
	"github.com/iop-fabric/iop/subjects"
)

// refusal is why a connection was not admitted. The set is closed: it is a
// metric's label. Empty means admitted.
type refusal string

// Refusals nobody is told: the peer has not proved who it is, or must not know.
const (
	refusedForged      refusal = "forged"       // the request is not the server's own
	refusedPassword    refusal = "password"     // user and password, token or bearer
	refusedAnonymous   refusal = "anonymous"    // no nkey
	refusedSignature   refusal = "signature"    // not the nkey's signature of this nonce, or one that was shown before
	refusedNoTLS       refusal = "no_tls"       // no handshake at all
	refusedTLSVersion  refusal = "tls_version"  // older than 1.3
	refusedCertificate refusal = "certificate"  // none, or none that the server verified
	refusedSAN         refusal = "san"          // not exactly one URI SAN, or not a name of ours
	refusedDomain      refusal = "trust_domain" // another trust domain
	refusedRole        refusal = "role"         // the role does not fit the use
	refusedChain       refusal = "chain"        // does not verify against our CA
	refusedConnection  refusal = "connection"   // the connection's name is not 32 of [a-z0-9]
	refusedNKey        refusal = "nkey"         // not the one registered for that name
	refusedRoute       refusal = "route"        // a peer of a route that is no broker of ours
	refusedLeaf        refusal = "leaf"         // the leaf it came through is not, or no longer, registered
	refusedUnavailable refusal = "unavailable"  // the authority could not be asked
	refusedLate        refusal = "late"         // the server has given the connection up by now
	refusedNotSpeaking refusal = "not_tls"      // the first bytes are no handshake
	refusedHandshake   refusal = "handshake"    // any other failure of the handshake
)

// Refusals an honest peer must understand: they are told in the lobby (B3).
const (
	refusedUnknown   refusal = "unknown_node"
	refusedWrongEdge refusal = "wrong_edge"
	refusedRevoked   refusal = "revoked"
	refusedDuplicate refusal = "duplicate"
	refusedDraining  refusal = "draining"
	// refusedMisbehaved: its Edge fenced it for breaking rules, and the time is not over.
	refusedMisbehaved refusal = "misbehaved"
)

func (r refusal) told() bool {
	switch r {
	case refusedUnknown, refusedWrongEdge, refusedRevoked, refusedDuplicate, refusedDraining, refusedMisbehaved:
		return true
	default:
		return false // the rest is told to nobody (I7)
	}
}

// refusals is the closed set, for the metric.
var refusals = []refusal{
	refusedForged, refusedPassword, refusedAnonymous, refusedSignature, refusedNoTLS, refusedTLSVersion,
	refusedCertificate, refusedSAN, refusedDomain, refusedRole, refusedChain, refusedConnection,
	refusedNKey, refusedRoute, refusedLeaf, refusedUnavailable, refusedLate, refusedNotSpeaking, refusedHandshake,
	refusedUnknown, refusedWrongEdge, refusedRevoked, refusedDuplicate, refusedDraining, refusedMisbehaved,
}

// connectionLength is the length of a Node's connection name: 16 characters of
// the process's instance id, 16 of the connection's own.
const (
	connectionLength = 32
	instanceLength   = 16
)

// trust is what a certificate is measured by.
type trust struct {
	pool   *x509.CertPool
	domain string
}

// applicant is who has proved to be there.
type applicant struct {
	id         identity.ID
	nkey       string
	connection string
	nonce      string
	notAfter   time.Time // of the certificate: the connection does not outlive it
	root       string    // whose key signed it
	server     string    // the id of the server that asks for it
	leaf       memberID  // the leaf that server is; zero: it is a broker
}

func (a applicant) member() memberID {
	return memberID{Edge: a.id.Edge, Role: a.id.Role, Name: a.id.Name}
}

func (a applicant) instance() string { return instanceOf(a.connection) }

func instanceOf(connection string) string {
	if len(connection) < instanceLength {
		return ""
	}
	return connection[:instanceLength]
}

// decide is I1: the checks in their order, each of which alone refuses. What it
// cannot know, whether the name is registered and free, comes after it.
func decide(ac *jwt.AuthorizationRequestClaims, t trust) (applicant, refusal) {
	opts := ac.ConnectOptions
	var a applicant

	// The server signs its requests with the key that is its id; jwt has checked
	// the signature against the issuer named inside and nothing else.
	if ac.Issuer == "" || ac.Issuer != ac.Server.ID {
		return a, refusedForged
	}
	if opts.Username != "" || opts.Password != "" || opts.Token != "" || opts.JWT != "" {
		return a, refusedPassword
	}
	if opts.Nkey == "" || opts.SignedNonce == "" {
		return a, refusedAnonymous
	}

	// The server does not check the signature of a key it does not know.
	sig, err := base64.RawURLEncoding.DecodeString(opts.SignedNonce)
	if err != nil || ac.ClientInformation.Nonce == "" || !nkeys.IsValidPublicUserKey(opts.Nkey) {
		return a, refusedSignature
	}
	key, err := nkeys.FromPublicKey(opts.Nkey)
	if err != nil || key.Verify([]byte(ac.ClientInformation.Nonce), sig) != nil {
		return a, refusedSignature
	}

	switch {
	case ac.TLS == nil:
		return a, refusedNoTLS
	case ac.TLS.Version != "1.3":
		return a, refusedTLSVersion
	case len(ac.TLS.VerifiedChains) == 0:
		return a, refusedCertificate
	}
	chain, leaf := parseChain(ac.TLS.VerifiedChains[0])
	if leaf == nil {
		return a, refusedCertificate
	}
	if len(leaf.URIs) != 1 {
		return a, refusedSAN
	}
	id, err := identity.ParseID(leaf.URIs[0]) // edge and name are good tokens of subjects
	if err != nil {
		return a, refusedSAN
	}
	if id.TrustDomain != t.domain {
		return a, refusedDomain
	}
	if !roleFits(id.Role, ac.ClientInformation.Kind) {
		return a, refusedRole
	}
	if verified, _, err := identity.VerifyChain(t.pool, chain, id.Role, false); err != nil || verified != id {
		return a, refusedChain
	}
	if id.Role == identity.RoleNode && !validConnection(opts.Name) {
		return a, refusedConnection
	}
	return applicant{
		id: id, nkey: opts.Nkey, connection: opts.Name, nonce: ac.ClientInformation.Nonce,
		notAfter: leaf.NotAfter, root: identity.IssuerOf(leaf),
	}, ""
}

func validConnection(name string) bool {
	return len(name) == connectionLength && subjects.ValidConnection(name)
}

// roleFits: Nodes and Edges come as clients, leaves as leaf links, and nobody
// else comes this way.
func roleFits(role identity.Role, kind string) bool {
	switch role {
	case identity.RoleNode, identity.RoleEdge:
		return kind == "Client"
	case identity.RoleLeaf:
		return kind == "Leafnode"
	default:
		return false
	}
}

func parseChain(pems jwt.StringList) (chain [][]byte, leaf *x509.Certificate) {
	for _, text := range pems {
		block, _ := pem.Decode([]byte(text))
		if block == nil || block.Type != "CERTIFICATE" {
			return nil, nil
		}
		chain = append(chain, block.Bytes)
	}
	if len(chain) == 0 {
		return nil, nil
	}
	leaf, err := x509.ParseCertificate(chain[0])
	if err != nil {
		return nil, nil
	}
	return chain, leaf
}

// judge says what the authority's record of the name makes of the applicant.
// elsewhere: the same name and nkey are registered under another edge.
func judge(a applicant, m member, found, elsewhere bool) refusal {
	switch {
	case !found && elsewhere:
		return refusedWrongEdge
	case !found:
		return refusedUnknown
	case !slices.Contains(m.NKeys, a.nkey):
		return refusedNKey
	case m.Revoked:
		return refusedRevoked
	}
	return ""
}

// grant is what an admitted connection is called and may do.
type grant struct {
	user        string
	permissions subjects.Permissions
	expires     time.Time
}

// peerUser names the connection of an Edge or a leaf. The underscore keeps it
// from ever reading as a session: no node is called "_edge".
func peerUser(id memberID) string { return id.Edge + "._" + string(id.Role) + "." + id.Name }

func (a applicant) nodeGrant(s subjects.Session) grant {
	// The session service ends it in time, with a word; the server a little later,
	// whatever has become of the service.
	return grant{user: s.String(), permissions: subjects.NodePermissions(s, a.connection), expires: a.notAfter.Add(expiryGrace)}
}

func (a applicant) peerGrant() grant {
	g := grant{user: peerUser(a.member()), expires: a.notAfter}
	if a.id.Role == identity.RoleEdge {
		g.permissions = subjects.EdgePermissions(a.id.Edge)
	} else {
		g.permissions = subjects.LeafPermissions(a.id.Edge, a.id.Name)
	}
	return g
}

// expiryGrace is how long after the end of a Node's certificate the server cuts the
// connection, if the session service has not closed it by then.
const expiryGrace = 3 * time.Second

// lobbyTime is how long a refused peer may read its reason.
const lobbyTime = 2 * time.Second

// lobby is the grant that tells a refusal and allows nothing else. It needs a
// connection name to build the one inbox from. when is since when another has the
// name, or until when the node stays out.
func (a applicant) lobby(r refusal, when, now time.Time) (grant, bool) {
	if !r.told() || !subjects.ValidConnection(a.connection) {
		return grant{}, false
	}
	user := "!denied." + string(r)
	if r == refusedDuplicate || r == refusedMisbehaved {
		user += "." + strconv.FormatInt(when.Unix(), 10)
	}
	return grant{
		user:        user,
		permissions: subjects.LobbyPermissions(a.id.Edge, a.id.Name, a.connection),
		expires:     now.Add(lobbyTime),
	}, true
}

// encodeGrant makes the answer the server expects: a user under the one-time
// key it asked for, signed by the issuer.
func encodeGrant(issuer nkeys.KeyPair, ac *jwt.AuthorizationRequestClaims, g grant) (string, error) {
	uc := jwt.NewUserClaims(ac.UserNkey)
	uc.Name, uc.Audience = g.user, accountFabric
	uc.Pub.Allow.Add(g.permissions.Publish...)
	uc.Sub.Allow.Add(g.permissions.Subscribe...)
	uc.Expires = g.expires.Add(time.Second - 1).Unix() // whole seconds, and none too few: the lobby has but two
	user, err := uc.Encode(issuer)
	if err != nil {
		return "", err
	}
	return encodeAnswer(issuer, ac, func(r *jwt.AuthorizationResponseClaims) { r.Jwt = user })
}

// encodeRefusal makes the answer of a plain refusal: the client is told
// "Authorization Violation", the text stays in the server's log.
func encodeRefusal(issuer nkeys.KeyPair, ac *jwt.AuthorizationRequestClaims, r refusal) (string, error) {
	return encodeAnswer(issuer, ac, func(c *jwt.AuthorizationResponseClaims) { c.Error = string(r) })
}

func encodeAnswer(issuer nkeys.KeyPair, ac *jwt.AuthorizationRequestClaims, fill func(*jwt.AuthorizationResponseClaims)) (string, error) {
	r := jwt.NewAuthorizationResponseClaims(ac.UserNkey)
	r.Audience = ac.Server.ID
	fill(r)
	return r.Encode(issuer)
}
