package openai_compat

import (
	"errors"
	"net/http"
	"net/textproto"
	"slices"
	"strings"

	"github.com/iop-fabric/iop/agent"
)

var errHeader = errors.New("not a header")

// hopByHop headers belong to one connection and never pass, nor do those that
// a Connection header names (RFC 9110 7.6.1).
var hopByHop = map[string]bool{
	"Connection": true, "Keep-Alive": true, "Proxy-Authenticate": true, "Proxy-Authorization": true,
	"Proxy-Connection": true, "Te": true, "Trailer": true, "Transfer-Encoding": true, "Upgrade": true,
}

// ours are request headers that the adapter decides, or that were meant for
// whom the caller called: credentials of the caller's never reach a provider (A42).
var ours = map[string]bool{
	"Host": true, "Content-Length": true, "Expect": true,
	"Authorization": true, "Cookie": true, "X-Api-Key": true, "Api-Key": true, "X-Goog-Api-Key": true,
}

// replayKeys make net/http send a request a second time when a connection
// breaks, though the provider may have read it. It looks for the canonical
// spelling, so they leave in another; names have no case on the wire (I2).
var replayKeys = map[string]string{
	"Idempotency-Key": "idempotency-key", "X-Idempotency-Key": "x-idempotency-key",
}

// requestHeader builds what the provider gets, but for its credential.
func (a *Adapter) requestHeader(in []agent.Field) (http.Header, error) {
	h := make(http.Header, len(in)+2)
	named := map[string]bool(nil)
	for _, f := range in {
		if !validName(f.Name) || !validValue(string(f.Value)) {
			return nil, errHeader
		}
		if strings.EqualFold(f.Name, "Connection") {
			named = addNamed(named, string(f.Value))
		}
	}
	for _, f := range in {
		name := textproto.CanonicalMIMEHeaderKey(f.Name)
		if hopByHop[name] || ours[name] || named[name] || name == a.profile.AuthHeader {
			continue
		}
		if plain, ok := replayKeys[name]; ok {
			name = plain
		}
		h[name] = append(h[name], string(f.Value))
	}
	for _, f := range a.profile.Fixed {
		delete(h, f.Name)
	}
	for _, f := range a.profile.Fixed {
		h[f.Name] = append(h[f.Name], string(f.Value))
	}
	if _, ok := h["User-Agent"]; !ok {
		h["User-Agent"] = nil // net/http would name itself
	}
	return h, nil
}

// responseHeader returns the end-to-end headers, sorted by name. A value that
// no header may have is a malformed answer.
func responseHeader(h http.Header) ([]agent.Field, error) {
	var named map[string]bool
	for _, v := range h["Connection"] {
		named = addNamed(named, v)
	}
	names := make([]string, 0, len(h))
	n := 0
	for name, values := range h {
		if hopByHop[name] || named[name] {
			continue
		}
		names = append(names, name)
		n += len(values)
	}
	slices.Sort(names)
	fields := make([]agent.Field, 0, n)
	for _, name := range names {
		for _, v := range h[name] {
			if !validName(name) || !validValue(v) {
				return nil, errHeader
			}
			fields = append(fields, agent.Field{Name: name, Value: []byte(v)})
		}
	}
	return fields, nil
}

func addNamed(named map[string]bool, value string) map[string]bool {
	for name := range strings.SplitSeq(value, ",") {
		if named == nil {
			named = make(map[string]bool)
		}
		named[textproto.CanonicalMIMEHeaderKey(textproto.TrimString(name))] = true
	}
	return named
}

func validName(s string) bool {
	if s == "" {
		return false
	}
	for i := 0; i < len(s); i++ {
		c := s[i]
		switch {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9':
		case strings.IndexByte("!#$%&'*+-.^_`|~", c) >= 0:
		default:
			return false
		}
	}
	return true
}

// validValue refuses control characters; a tab and any byte from 0x80 pass (M4).
func validValue(s string) bool {
	for i := 0; i < len(s); i++ {
		if c := s[i]; (c < ' ' && c != '\t') || c == 0x7f {
			return false
		}
	}
	return true
}
