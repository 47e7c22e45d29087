package enrol

import (
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"strings"

	"github.com/iop-fabric/iop/internal/secret"
	"github.com/iop-fabric/iop/wire"
)

// SecretSize is how many random bytes an invitation's secret has.
const SecretSize = 16

const (
	tokenVersion = "iop1"
	checkSize    = 4 // bytes of the token's own SHA-256: finds what was mistyped
	tokenParts   = 5
)

// Token is what an invite line carries: iop1.<name>.<secret>.<CA>.<check>.
type Token struct {
	Name string
	// Secret is the one-time secret, SecretSize bytes.
	Secret secret.String
	// CA is the SHA-256 of the CA's certificate: all that the newcomer trusts.
	CA [sha256.Size]byte
}

var encoding = base64.RawURLEncoding

// Text is the token as it is told. It holds the secret.
func (t Token) Text() string {
	text := strings.Join([]string{tokenVersion, t.Name, encoding.EncodeToString([]byte(t.Secret.Reveal())), encoding.EncodeToString(t.CA[:])}, ".")
	return text + "." + check(text)
}

func check(text string) string {
	sum := sha256.Sum256([]byte(text))
	return encoding.EncodeToString(sum[:checkSize])
}

// ParseToken reads a token and says what is wrong with one that was cut or
// mistyped. Its errors hold nothing of it.
func ParseToken(text string) (Token, error) {
	var t Token
	parts := strings.Split(text, ".")
	switch {
	case text == "":
		return t, errors.New("the token is empty")
	case parts[0] != tokenVersion:
		return t, fmt.Errorf("it does not begin with %q: want the token of a line that iop invite printed", tokenVersion+".")
	case len(parts) < tokenParts:
		return t, errors.New("the token is cut short: copy the whole line")
	case len(parts) > tokenParts:
		return t, errors.New("the token is longer than one: copy the line alone")
	}
	t.Name = parts[1]
	key, err := decode(parts[2], SecretSize)
	if err != nil {
		return t, err
	}
	ca, err := decode(parts[3], sha256.Size)
	if err != nil {
		return t, err
	}
	want := check(strings.TrimSuffix(text, "."+parts[4]))
	if len(parts[4]) < len(want) {
		return t, errors.New("the token is cut short: copy the whole line")
	}
	if parts[4] != want || wire.CheckName(t.Name) != nil {
		return t, errMistyped
	}
	t.Secret = secret.New(string(key))
	copy(t.CA[:], ca)
	return t, nil
}

var errMistyped = errors.New("the token is mistyped: its check does not fit: copy the whole line")

func decode(text string, size int) ([]byte, error) {
	b, err := encoding.DecodeString(text)
	if err != nil || len(b) != size || encoding.EncodeToString(b) != text {
		return nil, errMistyped
	}
	return b, nil
}
