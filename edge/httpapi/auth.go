package httpapi

import (
	"crypto/sha256"
	"crypto/subtle"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
)

// Key lets a principal in. Only the digest of the key itself is ever held.
type Key struct {
	Name   string // the principal
	Digest [sha256.Size]byte
	Models []string // what it may name; empty: all
}

// checkKeys refuses one key for two principals: whom a request is then of, whose limits
// hold and who is counted would be chance.
func checkKeys(keys []Key) error {
	of := make(map[[sha256.Size]byte]string, len(keys))
	for _, k := range keys {
		if first, ok := of[k.Digest]; ok {
			return fmt.Errorf("edge: keys: %.128q and %.128q have the same key; each principal needs its own", first, k.Name)
		}
		of[k.Digest] = k.Name
	}
	return nil
}

// DigestOf returns what Key.Digest holds for an API key.
func DigestOf(apiKey string) [sha256.Size]byte { return sha256.Sum256([]byte(apiKey)) }

// keyState is a Key and what runs under it.
type keyState struct {
	principal string
	digest    [sha256.Size]byte
	models    map[string]bool // untagged; nil: all
	streams   atomic.Int64
}

func newKeyState(k Key) *keyState {
	s := &keyState{principal: k.Name, digest: k.Digest}
	if len(k.Models) > 0 {
		s.models = make(map[string]bool, len(k.Models))
		for _, m := range k.Models {
			s.models[untagged(m)] = true
		}
	}
	return s
}

func (k *keyState) allows(model string) bool { return k.models == nil || k.models[untagged(model)] }

// untagged is the one spelling of a model that may be named with and without its
// ":latest", as the pool finds it.
func untagged(model string) string {
	if name, ok := strings.CutSuffix(model, ":latest"); ok && !strings.Contains(name, ":") {
		return name
	}
	return model
}

// enter takes one of limit streams (0: no bound); leave gives it back.
func (k *keyState) enter(limit int) bool {
	if n := k.streams.Add(1); limit > 0 && n > int64(limit) {
		k.streams.Add(-1)
		return false
	}
	return true
}

func (k *keyState) leave() { k.streams.Add(-1) }

// authenticate finds the key a request carries, as a bearer token or as
// x-api-key. Without a configured key nobody is let in. Every key is compared,
// each in constant time, so that the time tells nothing of which one fits.
func (a *API) authenticate(h http.Header) *keyState {
	if k := a.lookup(bearer(h["Authorization"])); k != nil {
		return k
	}
	if v := h["X-Api-Key"]; len(v) == 1 {
		return a.lookup(v[0])
	}
	return nil
}

func (a *API) lookup(secret string) *keyState {
	if secret == "" {
		return nil
	}
	digest := DigestOf(secret)
	var found *keyState
	for _, k := range a.keys {
		if subtle.ConstantTimeCompare(k.digest[:], digest[:]) == 1 {
			found = k
		}
	}
	return found
}

// bearer returns the token of the one Authorization value there may be.
func bearer(values []string) string {
	if len(values) != 1 {
		return ""
	}
	scheme, token, ok := strings.Cut(values[0], " ")
	if !ok || !strings.EqualFold(scheme, "bearer") {
		return ""
	}
	return strings.TrimSpace(token)
}
