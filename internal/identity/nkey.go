package identity

import (
	"bytes"
	"errors"
	"fmt"

	"github.com/nats-io/nkeys"
)

// keyKind is the first letter of a public nkey.
type keyKind byte

const (
	kindAccount keyKind = 'A' // the issuer: signs callout answers and session tokens
	kindUser    keyKind = 'U' // a connection
	kindCurve   keyKind = 'X' // the recipient of credential leases
)

func (k keyKind) String() string {
	switch k {
	case kindAccount:
		return "account"
	case kindUser:
		return "user"
	case kindCurve:
		return "curve"
	default:
		return "unknown"
	}
}

func (k keyKind) prefix() nkeys.PrefixByte {
	switch k {
	case kindAccount:
		return nkeys.PrefixByteAccount
	case kindCurve:
		return nkeys.PrefixByteCurve
	default:
		return nkeys.PrefixByteUser
	}
}

// publicNKeyLen is the length of every public nkey.
const publicNKeyLen = 56

// NKey is an nkey with its seed.
type NKey struct {
	redacted
	public string
	pair   func() nkeys.KeyPair // sealed
}

// NewUserKey makes the key of a connection.
func NewUserKey() (*NKey, error) { return newNKey(nkeys.CreateUser()) }

// NewAccountKey makes an issuer's key.
func NewAccountKey() (*NKey, error) { return newNKey(nkeys.CreateAccount()) }

// NewCurveKey makes a key that secrets are sealed to.
func NewCurveKey() (*NKey, error) { return newNKey(nkeys.CreateCurveKeys()) }

func newNKey(pair nkeys.KeyPair, err error) (*NKey, error) {
	if err != nil {
		return nil, fmt.Errorf("nkey: %w", err)
	}
	public, err := pair.PublicKey()
	if err != nil {
		return nil, fmt.Errorf("nkey: %w", err)
	}
	k := &NKey{public: public, pair: seal(pair)}
	switch k.kind() {
	case kindAccount, kindUser, kindCurve:
		return k, nil
	default:
		return nil, errors.New("want the seed of an account, user or curve nkey (SA..., SU..., SX...)")
	}
}

// LoadNKey reads the seed in file.
func LoadNKey(file string) (*NKey, error) {
	data, err := readSecret(file)
	if err != nil {
		return nil, fileError("nkey", file, err)
	}
	defer clear(data)
	pair, err := nkeys.FromSeed(bytes.TrimSpace(data))
	if err != nil {
		// What nkeys says may quote the file; the file may be another secret.
		return nil, fileError("nkey", file, errors.New("want the seed of an nkey (SA..., SU... or SX..., 58 characters); it is something else, or cut short"))
	}
	k, err := newNKey(pair, nil)
	if err != nil {
		return nil, fileError("nkey", file, err)
	}
	return k, nil
}

// Save writes the seed to file, mode 0600.
func (k *NKey) Save(file string) error {
	seed, err := k.pair().Seed()
	if err != nil {
		return fileError("save nkey", file, err)
	}
	line := append(bytes.Clone(seed), '\n')
	defer clear(line)
	if err := writeFile(file, line, 0o600); err != nil {
		return fileError("save nkey", file, err)
	}
	return nil
}

// Public is the public key: A..., U... or X...
func (k *NKey) Public() string { return k.public }

// Pair is the pair behind k, for libraries that want one. Print nothing of it.
func (k *NKey) Pair() nkeys.KeyPair { return k.pair() }

func (k *NKey) kind() keyKind { return keyKind(k.public[0]) }

func (k *NKey) want(kind keyKind) error {
	if k == nil || k.kind() != kind {
		return fmt.Errorf("want an nkey of kind %s (S%c...)", kind, kind)
	}
	return nil
}

// Sign signs raw bytes: the nonce of a NATS server. It refuses what could pass
// for a transcript, since a hostile server chooses its nonce (I3).
func (k *NKey) Sign(data []byte) ([]byte, error) {
	if isTranscript(data) {
		return nil, errors.New("nkey: refusing to sign a nonce that reads as a message of ours")
	}
	return k.pair().Sign(data)
}

// SignLabelled signs the transcript of label and parts.
func (k *NKey) SignLabelled(label string, parts ...[]byte) ([]byte, error) {
	return k.pair().Sign(transcript(label, parts))
}

// VerifyNKey checks what SignLabelled made; public is an account or user key.
func VerifyNKey(public string, sig []byte, label string, parts ...[]byte) error {
	pair, err := nkeys.FromPublicKey(public)
	if err != nil {
		return errors.New("nkey signature: the public key is none")
	}
	if err := pair.Verify(transcript(label, parts), sig); err != nil {
		return errors.New("nkey signature: it is not by this nkey over this message")
	}
	return nil
}

// CheckPublicUserKey says what is wrong with the public nkey of a connection.
func CheckPublicUserKey(s string) error { return checkPublic(s, kindUser) }

// CheckPublicCurveKey says what is wrong with the public key of a recipient.
func CheckPublicCurveKey(s string) error { return checkPublic(s, kindCurve) }

// checkPublic takes the one spelling of a whole public key of kind; nkeys itself
// looks at neither length nor spelling of a curve key.
func checkPublic(s string, kind keyKind) error {
	bad := fmt.Errorf("want a public nkey of kind %s (%c..., %d characters)", kind, kind, publicNKeyLen)
	if len(s) != publicNKeyLen || s[0] != byte(kind) {
		return bad
	}
	raw, err := nkeys.Decode(kind.prefix(), []byte(s))
	if err != nil {
		return bad
	}
	again, err := nkeys.Encode(kind.prefix(), raw)
	if err != nil || string(again) != s {
		return bad
	}
	// FromPublicKey also refuses Ed25519 points of small order.
	if _, err := nkeys.FromPublicKey(s); err != nil && kind != kindCurve {
		return bad
	}
	return nil
}
