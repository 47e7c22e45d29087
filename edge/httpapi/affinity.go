package httpapi

import (
	"crypto/sha256"
	"net/http"
)

// sessionHeaders are those in which coding tools name their conversation, the
// most telling first.
var sessionHeaders = [...]string{"X-Session-Affinity", "X-Session-Id", "Session-Id", "X-Claude-Code-Session-Id"}

// affinityOf names what a request belongs to: the prompt cache it names, or else
// its session (Q1). It is hashed with whose it is, so that nobody's hint meets
// another's and what the caller sent is kept nowhere.
func affinityOf(principal string, h http.Header, cacheKey string) string {
	hint := cacheKey
	for i := 0; hint == "" && i < len(sessionHeaders); i++ {
		if v := h[sessionHeaders[i]]; len(v) == 1 {
			hint = v[0]
		}
	}
	if hint == "" {
		return ""
	}
	sum := sha256.Sum256([]byte(principal + "\x00" + hint))
	return string(sum[:16])
}
