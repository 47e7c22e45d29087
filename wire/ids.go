package wire

import (
	"crypto/rand"
	"encoding/base32"
)

// Lengths a run id may have; NewRunID makes 26 characters.
const (
	MinRunID = 20
	MaxRunID = 40
)

var idEncoding = base32.NewEncoding("abcdefghijklmnopqrstuvwxyz234567").WithPadding(base32.NoPadding)

// NewRunID mints the id of one attempt: 128 random bits (X6).
func NewRunID() string {
	var b [16]byte
	rand.Read(b[:]) // never fails
	return idEncoding.EncodeToString(b[:])
}

// ValidRunID reports whether s is 20 to 40 of [a-z0-9] (U1).
func ValidRunID(s string) bool {
	if len(s) < MinRunID || len(s) > MaxRunID {
		return false
	}
	for i := 0; i < len(s); i++ {
		if c := s[i]; (c < 'a' || c > 'z') && (c < '0' || c > '9') {
			return false
		}
	}
	return true
}

// NewToken returns 16 random characters of [a-z2-7]: an instance id, or the
// random part of a connection's name (B5, B12).
func NewToken() string {
	var b [10]byte
	rand.Read(b[:]) // never fails
	return idEncoding.EncodeToString(b[:])
}
