package enrol

import (
	"crypto"
	"crypto/sha256"
	"crypto/x509"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"slices"

	"github.com/nats-io/nkeys"

	"github.com/iop-fabric/iop/internal/identity"
	"github.com/iop-fabric/iop/internal/secret"
	"github.com/iop-fabric/iop/wire"
)

// Path is where the authority is asked, and Header what carries the MAC, in
// base64url without padding.
const (
	Path   = "/enrol/v1"
	Header = "Iop-Enrol-Mac"
)

// Bounds of the two messages.
const (
	MaxRequest = 16 << 10
	MaxAnswer  = 256 << 10
)

// Request is what a machine sends. It holds nothing secret.
type Request struct {
	Name  string `json:"name"`
	CSR   []byte `json:"csr"`   // PKCS #10, DER
	NKey  string `json:"nkey"`  // public, U...
	Curve string `json:"curve"` // public, X...

	key crypto.PublicKey
}

// Seal encodes a request, and makes the MAC that proves the secret over it (I3).
func Seal(r Request, s secret.String) (body []byte, mac string, err error) {
	if body, err = json.Marshal(r); err != nil {
		return nil, "", fmt.Errorf("request: %w", err)
	}
	return body, encoding.EncodeToString(sum(hash(s), body)), nil
}

// Unseal reads a request and its MAC. What it refuses is wrong whatever is known of
// the name, so its errors may be told.
func Unseal(body []byte, header string) (r Request, mac []byte, err error) {
	if len(body) > MaxRequest {
		return r, nil, fmt.Errorf("the request is larger than %d bytes", MaxRequest)
	}
	if err := json.Unmarshal(body, &r); err != nil {
		return r, nil, errors.New("the request is not the JSON it should be")
	}
	if err := wire.CheckName(r.Name); err != nil {
		return r, nil, fmt.Errorf("name: %w", err)
	}
	if err := identity.CheckPublicUserKey(r.NKey); err != nil {
		return r, nil, fmt.Errorf("nkey: %w", err)
	}
	if err := identity.CheckPublicCurveKey(r.Curve); err != nil {
		return r, nil, fmt.Errorf("curve: %w", err)
	}
	if r.key, err = identity.ParseRequest(r.CSR); err != nil {
		return r, nil, fmt.Errorf("csr: %w", err)
	}
	if mac, err = encoding.DecodeString(header); err != nil || len(mac) != sha256.Size {
		return r, nil, fmt.Errorf("the header %s holds no MAC", Header)
	}
	return r, mac, nil
}

// Key is the key to be certified (I4).
func (r Request) Key() crypto.PublicKey { return r.key }

// Digest tells one machine's request from another's: it covers the name and the
// three keys, so the same machine may make its request anew.
func (r Request) Digest() []byte {
	spki, err := x509.MarshalPKIXPublicKey(r.key)
	if err != nil {
		panic("BUG: enrol: a request that was opened has a key: " + err.Error())
	}
	h := sha256.New()
	for _, part := range [][]byte{[]byte(r.Name), spki, []byte(r.NKey), []byte(r.Curve)} {
		h.Write(binary.BigEndian.AppendUint64(nil, uint64(len(part))))
		h.Write(part)
	}
	return h.Sum(nil)
}

// Answer is what a machine that was let in is given.
type Answer struct {
	Certificate string   `json:"certificate"` // PEM, leaf first
	CA          string   `json:"ca"`          // PEM
	Issuers     []string `json:"issuers"`     // public account nkeys, A...
	BrokerURLs  []string `json:"broker_urls"` // tls://host:port
	Edge        string   `json:"edge"`
	TrustDomain string   `json:"trust_domain"`
}

// Accept checks an answer against the token it was asked for with, and
// returns the certificate for the machine's key: of the pinned CA, or one that it
// vouches for, a node's, of the name invited; and the roots that the machine trusts.
func (a Answer) Accept(t Token, key *identity.Key) (*identity.Certificate, identity.Trust, error) {
	roots, err := a.roots(t)
	if err != nil {
		return nil, identity.Trust{}, err
	}
	chain, err := identity.DecodeChain([]byte(a.Certificate))
	if err != nil {
		return nil, identity.Trust{}, fmt.Errorf("the answer's certificate: %w", err)
	}
	id, _, err := identity.VerifyChain(roots.Pool(), chain, identity.RoleNode, false)
	if err != nil {
		return nil, identity.Trust{}, fmt.Errorf("the answer's certificate: %w", err)
	}
	if want := (identity.ID{TrustDomain: a.TrustDomain, Edge: a.Edge, Role: identity.RoleNode, Name: t.Name}); id != want {
		return nil, identity.Trust{}, fmt.Errorf("the answer's certificate is of %s, want %s", id, want)
	}
	if len(a.BrokerURLs) == 0 {
		return nil, identity.Trust{}, errors.New("the answer names no broker")
	}
	for _, raw := range a.BrokerURLs {
		if u, err := url.Parse(raw); err != nil || u.Scheme != "tls" || u.Hostname() == "" {
			return nil, identity.Trust{}, errors.New("the answer names a broker that is no tls://host:port")
		}
	}
	if len(a.Issuers) == 0 || slices.ContainsFunc(a.Issuers, func(k string) bool { return !nkeys.IsValidPublicAccountKey(k) }) {
		return nil, identity.Trust{}, errors.New("the answer names no issuer, or one that is no public account nkey")
	}
	cert, err := key.Certificate(chain)
	return cert, roots, err
}

// roots are those that the line vouches for: the one it names and, while the CA is
// exchanged, what that one has signed.
func (a Answer) roots(t Token) (identity.Trust, error) {
	all, err := identity.ParseTrust([]byte(a.CA))
	if err != nil {
		return identity.Trust{}, fmt.Errorf("the answer's CA: %w", err)
	}
	pinned, ok := all.Only(t.CA)
	switch {
	case !ok:
		return identity.Trust{}, errors.New("the answer's CA is not the one of the invite line")
	case all.Bundle() == nil && all.Exchanging():
		return identity.Trust{}, errors.New("the answer has more CAs than the invite line vouches for")
	case all.Bundle() == nil:
		return pinned, nil
	}
	switch learnt, _, err := pinned.Learn(all.Bundle()); {
	case errors.Is(err, identity.ErrPastTrust): // an older root is not needed
		return pinned, nil
	case err != nil:
		return identity.Trust{}, fmt.Errorf("the answer's CA: %w", err)
	default:
		return learnt, nil
	}
}

// Error is what an answer with a status of 400 or more holds.
type Error struct {
	Error struct {
		Code    string `json:"code"`
		Message string `json:"message"`
	} `json:"error"`
}

// Codes of Error.
const (
	CodeInvalid = "invalid_request" // 400, 413, 415: it would be refused whatever was invited
	CodeRefused = "refused"         // 403: every reason there is (I5)
	CodePath    = "unknown_path"    // 404, 405
	CodeLater   = "try_again"       // 429, 503
)
