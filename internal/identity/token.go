package identity

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/nats-io/jwt/v2"
	"github.com/nats-io/nkeys"

	"github.com/iop-fabric/iop/wire"
)

// SessionClaims is what a session token says: this nkey is connected as this
// node of this edge under this generation (G3).
type SessionClaims struct {
	Edge, Node string
	Gen        uint64
	NKey       string // public, U...
}

const (
	// tokenAudience keeps a session token apart from everything else the issuer
	// signs: the users and answers of the auth callout.
	tokenAudience = "iop.session.v1"
	maxToken      = 4 << 10
)

// tokenHeader is the first part of every token that jwt writes. Another header
// is refused before anything is parsed: jwt knows an older form, which signs
// less.
var tokenHeader = base64.RawURLEncoding.EncodeToString([]byte(`{"typ":"JWT","alg":"ed25519-nkey"}`))

// tokenBody is the part of a token that is read. Gen is text: JSON's numbers do
// not hold 64 bits everywhere.
type tokenBody struct {
	Issuer   string `json:"iss"`
	Audience string `json:"aud"`
	Subject  string `json:"sub"`
	Data     struct {
		Edge string `json:"edge"`
		Node string `json:"node"`
		Gen  string `json:"gen"`
		NKey string `json:"nkey"`
	} `json:"nats"`
}

// IssueToken makes the token for one session. It has no end: it is good for its
// generation alone, and generations end.
func IssueToken(issuer *NKey, c SessionClaims) ([]byte, error) {
	if err := issuer.want(kindAccount); err != nil {
		return nil, fmt.Errorf("issue token: %w", err)
	}
	if err := c.check(); err != nil {
		return nil, fmt.Errorf("issue token: %w", err)
	}
	claims := jwt.NewGenericClaims(c.NKey)
	claims.Audience = tokenAudience
	claims.Data["edge"] = c.Edge
	claims.Data["node"] = c.Node
	claims.Data["gen"] = strconv.FormatUint(c.Gen, 10)
	claims.Data["nkey"] = c.NKey
	token, err := claims.Encode(issuer.Pair())
	if err != nil {
		return nil, fmt.Errorf("issue token: %w", err)
	}
	return []byte(token), nil
}

// VerifyToken checks that token is by the issuer whose public key the caller has
// pinned, and returns what it says. The signature is checked, with that key,
// before anything of the token is parsed, and every part must be spelt in the one
// way it has: no token that differs in a single bit is good. No clock is read.
func VerifyToken(issuerPublic string, token []byte) (SessionClaims, error) {
	if err := checkPublic(issuerPublic, kindAccount); err != nil {
		return SessionClaims{}, fmt.Errorf("session token: issuer: %w", err)
	}
	issuer, err := nkeys.FromPublicKey(issuerPublic)
	if err != nil {
		return SessionClaims{}, errors.New("session token: the issuer's public key is none")
	}
	body, err := openToken(issuer, token)
	if err != nil {
		return SessionClaims{}, fmt.Errorf("session token: %w", err)
	}
	return body.claims(issuerPublic)
}

func openToken(issuer nkeys.KeyPair, token []byte) (tokenBody, error) {
	if len(token) > maxToken {
		return tokenBody{}, fmt.Errorf("longer than %d bytes", maxToken)
	}
	parts := strings.Split(string(token), ".")
	if len(parts) != 3 || parts[0] != tokenHeader {
		return tokenBody{}, errors.New("it has not the form of one")
	}
	payload, err := decodeExact(parts[1])
	if err != nil {
		return tokenBody{}, err
	}
	sig, err := decodeExact(parts[2])
	if err != nil {
		return tokenBody{}, err
	}
	if issuer.Verify([]byte(parts[0]+"."+parts[1]), sig) != nil {
		return tokenBody{}, errors.New("not signed by the issuer we trust")
	}
	var body tokenBody
	if err := json.Unmarshal(payload, &body); err != nil {
		return tokenBody{}, errors.New("what it says does not parse")
	}
	return body, nil
}

// decodeExact refuses the other spellings base64 allows: line ends, loose bits.
func decodeExact(s string) ([]byte, error) {
	b, err := base64.RawURLEncoding.DecodeString(s)
	if err != nil || base64.RawURLEncoding.EncodeToString(b) != s {
		return nil, errors.New("it has not the form of one")
	}
	return b, nil
}

func (b tokenBody) claims(issuerPublic string) (SessionClaims, error) {
	if b.Issuer != issuerPublic || b.Audience != tokenAudience || b.Subject != b.Data.NKey {
		return SessionClaims{}, errors.New("session token: signed by the issuer for another use")
	}
	gen, err := strconv.ParseUint(b.Data.Gen, 10, 64)
	if err != nil || strconv.FormatUint(gen, 10) != b.Data.Gen {
		return SessionClaims{}, errors.New("session token: the generation is no number")
	}
	c := SessionClaims{Edge: b.Data.Edge, Node: b.Data.Node, Gen: gen, NKey: b.Data.NKey}
	if err := c.check(); err != nil {
		return SessionClaims{}, fmt.Errorf("session token: %w", err)
	}
	return c, nil
}

func (c SessionClaims) check() error {
	if err := wire.CheckName(c.Edge); err != nil {
		return fmt.Errorf("edge: %w", err)
	}
	if err := wire.CheckName(c.Node); err != nil {
		return fmt.Errorf("node: %w", err)
	}
	if c.Gen == 0 {
		return errors.New("generation 0 is none")
	}
	return checkPublic(c.NKey, kindUser)
}
