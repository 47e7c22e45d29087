package enrol

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"fmt"
	"time"

	"github.com/iop-fabric/iop/internal/secret"
	"github.com/iop-fabric/iop/wire"
)

// Bounds of an invitation.
const (
	DefaultLife = 24 * time.Hour
	MaxLife     = 30 * 24 * time.Hour
	// MaxWrong is how many wrong secrets close an invitation.
	MaxWrong = 10
	// RepeatFor is how long the machine that was let in is answered again, should
	// the first answer have been lost.
	RepeatFor = 15 * time.Minute
)

// Invitation is what the authority keeps of one, under its edge and name.
type Invitation struct {
	Secret    []byte    `json:"secret"` // SHA-256 (I1)
	Created   time.Time `json:"created"`
	Expires   time.Time `json:"expires"`
	Wrong     int       `json:"wrong,omitempty"`
	Cancelled bool      `json:"cancelled,omitempty"`
	Use       *Use      `json:"use,omitempty"`
	// BrokerURLs are what this machine is to dial; none: what every one is told.
	BrokerURLs []string `json:"broker_urls,omitempty"`
	// CA is the SHA-256 of the CA's certificate that the line names; none: made before
	// that was noted.
	CA []byte `json:"ca,omitempty"`
}

// Use is the request an invitation was used with.
type Use struct {
	At     time.Time `json:"at"`
	Digest []byte    `json:"digest"`
	NKey   string    `json:"nkey"`
	Curve  string    `json:"curve"`
}

// State is where an invitation stands.
type State string

// The states; an open one lets a machine in.
const (
	Open      State = "open"
	Used      State = "used"
	Expired   State = "expired"
	Cancelled State = "cancelled"
	Closed    State = "closed" // too many wrong secrets
	// OldCA is open, but its line names a CA that is trusted no more: for lists alone,
	// an invitation does not know.
	OldCA State = "old_ca"
)

// Outcome is what became of a request: a closed set, for logs and metrics alone.
type Outcome string

// The outcomes. Accepted and Repeated are answered with a certificate, Invalid
// with what is wrong, Limited and Failed with "later", and all others alike (I5).
const (
	Accepted      Outcome = "accepted"
	Repeated      Outcome = "repeated"
	WrongSecret   Outcome = "wrong_secret"
	WasUsed       Outcome = "used"
	WasExpired    Outcome = "expired"
	WasCancelled  Outcome = "cancelled"
	WasClosed     Outcome = "closed"
	UnknownName   Outcome = "unknown"
	NameTaken     Outcome = "taken"
	MemberRevoked Outcome = "revoked"
	Invalid       Outcome = "invalid"
	Limited       Outcome = "limited"
	Failed        Outcome = "failed"
)

// Outcomes are all there are.
var Outcomes = []Outcome{
	Accepted, Repeated, WrongSecret, WasUsed, WasExpired, WasCancelled, WasClosed, UnknownName, NameTaken, MemberRevoked, Invalid, Limited, Failed,
}

// New makes an invitation for the secret, good for life.
func New(name string, s secret.String, now time.Time, life time.Duration) (Invitation, error) {
	switch {
	case wire.CheckName(name) != nil:
		return Invitation{}, wire.CheckName(name)
	case len(s.Reveal()) != SecretSize:
		return Invitation{}, fmt.Errorf("a secret of %d bytes, want %d", len(s.Reveal()), SecretSize)
	case life < time.Minute || life > MaxLife:
		return Invitation{}, fmt.Errorf("an invitation for %s: want from 1m to %s", life, MaxLife)
	}
	return Invitation{Secret: hash(s), Created: now, Expires: now.Add(life)}, nil
}

func hash(s secret.String) []byte {
	sum := sha256.Sum256([]byte(s.Reveal()))
	return sum[:]
}

// State is the state at a time.
func (i Invitation) State(now time.Time) State {
	switch {
	case i.Cancelled:
		return Cancelled
	case i.Use != nil:
		return Used
	case i.Wrong >= MaxWrong:
		return Closed
	case !now.Before(i.Expires):
		return Expired
	}
	return Open
}

// Until is when nothing will be answered under the invitation any more; a time
// that has passed where that is so already.
func (i Invitation) Until(now time.Time) time.Time {
	switch i.State(now) {
	case Open:
		return i.Expires
	case Used:
		return earlier(i.Use.At.Add(RepeatFor), i.Expires)
	case Expired, Cancelled, Closed, OldCA:
	}
	return time.Time{}
}

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

// Cancel withdraws it; false: there was nothing to withdraw.
func (i Invitation) Cancel(now time.Time) (Invitation, bool) {
	if !now.Before(i.Until(now)) {
		return i, false
	}
	i.Cancelled = true
	return i, true
}

// Judge says what becomes of a request whose body came with mac, and the record
// that must stand, if another, before anybody is answered. found says whether
// there is an invitation of that name at all.
func (i Invitation) Judge(found bool, now time.Time, r Request, body, mac []byte) (next Invitation, changed bool, out Outcome) {
	if !found {
		i = Invitation{Secret: make([]byte, sha256.Size)} // as long a comparison as any other
	}
	right := hmac.Equal(mac, sum(i.Secret, body))
	switch {
	case !found:
		return i, false, UnknownName
	case !right:
		if i.State(now) != Open {
			return i, false, WrongSecret
		}
		i.Wrong++
		return i, true, WrongSecret
	}
	switch i.State(now) {
	case Cancelled, OldCA:
		return i, false, WasCancelled
	case Closed:
		return i, false, WasClosed
	case Expired:
		return i, false, WasExpired
	case Used:
		if !bytes.Equal(i.Use.Digest, r.Digest()) || !now.Before(i.Until(now)) {
			return i, false, WasUsed
		}
		return i, false, Repeated
	case Open:
	}
	i.Use = &Use{At: now, Digest: r.Digest(), NKey: r.NKey, Curve: r.Curve}
	return i, true, Accepted
}

// label keeps this MAC apart from whatever else a secret could be used for.
const label = "iop enrol v1\x00"

func sum(key, body []byte) []byte {
	m := hmac.New(sha256.New, key)
	m.Write([]byte(label))
	m.Write(body)
	return m.Sum(nil)
}
