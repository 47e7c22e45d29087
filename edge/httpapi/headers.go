package httpapi

import (
	"net/http"
	"net/textproto"
	"strconv"
	"strings"

	"github.com/iop-fabric/iop/wire"
	"github.com/iop-fabric/iop/wire/iopv1"
)

// policy says what becomes of a header between caller and provider. What has no
// row passes.
type policy uint8

const (
	pass        policy = iota
	hop                // belongs to one connection: dropped both ways
	credential         // the caller's own: never reaches a provider
	callerOnly         // between the caller and this Edge: never reaches a provider
	recomputed         // Host, lengths, digests: made anew for the changed body
	ours               // this Edge says it: a provider's own is replaced
	answerCheck        // the answer's length: passed on only when it is a number
)

// requestPolicy and answerPolicy are the one place that says which header goes
// where. Keys are canonical.
var requestPolicy = map[string]policy{
	"Connection":          hop,
	"Keep-Alive":          hop,
	"Proxy-Connection":    hop,
	"Proxy-Authenticate":  hop,
	"Proxy-Authorization": hop,
	"Te":                  hop,
	"Trailer":             hop,
	"Transfer-Encoding":   hop,
	"Upgrade":             hop,
	"Http2-Settings":      hop,
	"Expect":              hop,

	"Authorization":  credential,
	"Cookie":         credential,
	"X-Api-Key":      credential,
	"Api-Key":        credential,
	"X-Goog-Api-Key": credential,
	"X-Auth-Token":   credential,

	// Who asked, and from which page, is nothing the provider needs; some refuse
	// pages they do not know, which is this Edge's to decide.
	"Forwarded":                      callerOnly,
	"X-Forwarded-For":                callerOnly,
	"X-Forwarded-Host":               callerOnly,
	"X-Forwarded-Port":               callerOnly,
	"X-Forwarded-Proto":              callerOnly,
	"X-Real-Ip":                      callerOnly,
	"Via":                            callerOnly,
	"Origin":                         callerOnly,
	"Referer":                        callerOnly,
	"Access-Control-Request-Method":  callerOnly,
	"Access-Control-Request-Headers": callerOnly,

	"Host":             recomputed,
	"Content-Length":   recomputed,
	"Content-Encoding": recomputed, // it was decoded here (E9)
	"Content-Md5":      recomputed,
	"Content-Digest":   recomputed,
	"Repr-Digest":      recomputed,
	"Digest":           recomputed,

	"X-Request-Id":   ours,
	"X-Iop-Node":     ours,
	"X-Iop-Provider": ours,
	"X-Iop-Attempts": ours,
	"X-Iop-Queue-Ms": ours,
	"X-Iop-Estimate": ours,
}

var answerPolicy = map[string]policy{
	"Connection":          hop,
	"Keep-Alive":          hop,
	"Proxy-Connection":    hop,
	"Proxy-Authenticate":  hop,
	"Proxy-Authorization": hop,
	"Te":                  hop,
	"Trailer":             hop,
	"Transfer-Encoding":   hop,
	"Upgrade":             hop,

	"Content-Length": answerCheck,

	"X-Request-Id":   ours,
	"X-Iop-Node":     ours,
	"X-Iop-Provider": ours,
	"X-Iop-Attempts": ours,
	"X-Iop-Queue-Ms": ours,
	"X-Iop-Estimate": ours,
}

// trailerNever are fields that change how a message is read or who may read it;
// none may come after the body (RFC 9110, 6.5.1).
var trailerNever = map[string]bool{
	"Host": true, "Authorization": true, "Set-Cookie": true, "Cookie": true,
	"Content-Encoding": true, "Content-Type": true, "Content-Range": true, "Cache-Control": true,
}

// namedInConnection lists the headers that Connection makes hop-by-hop.
func namedInConnection(values []string) []string {
	var names []string
	for _, v := range values {
		for f := range strings.SplitSeq(v, ",") {
			if f = textproto.TrimString(f); f != "" {
				names = append(names, http.CanonicalHeaderKey(f))
			}
		}
	}
	return names
}

// toProvider returns the headers a provider gets, or why there are none.
func toProvider(h http.Header) ([]*iopv1.Header, reason) {
	dropped := namedInConnection(h["Connection"])
	var fields, size int
	for name, values := range h {
		for _, v := range values {
			if !validName(name) || !validValue(v) {
				return nil, badHeader
			}
			fields++
			size += len(name) + len(v) + 4 // as HTTP/1 writes it: ": " and CRLF
		}
	}
	if size > wire.MaxHeaders {
		return nil, largeHeader
	}
	// One array for the fields and one for the values: this runs for each call.
	slab := make([]iopv1.Header, fields)
	buf := make([]byte, 0, size)
	out := make([]*iopv1.Header, 0, fields)
	for name, values := range h {
		if requestPolicy[name] != pass || contains(dropped, name) {
			continue
		}
		for _, v := range values {
			f := &slab[len(out)]
			at := len(buf)
			buf = append(buf, v...)
			f.Name, f.Value = name, buf[at:len(buf):len(buf)]
			out = append(out, f)
		}
	}
	return out, ""
}

// fromProvider copies a provider's headers into dst. The provider, or the Node
// before it, may be hostile: a field that could split the answer is a breach of
// protocol. length is the Content-Length, or -1.
func fromProvider(dst http.Header, fields []*iopv1.Header) (length int64, err *wire.Error) {
	length = -1
	var dropped []string
	for _, f := range fields {
		if strings.EqualFold(f.GetName(), "Connection") {
			dropped = append(dropped, namedInConnection([]string{string(f.GetValue())})...)
		}
	}
	for _, f := range fields {
		if !validName(f.GetName()) || !validValue(f.GetValue()) {
			return -1, wire.Errorf(wire.Protocol, "the answer has a malformed header")
		}
		name := http.CanonicalHeaderKey(f.GetName())
		value := string(f.GetValue())
		switch p := answerPolicy[name]; {
		case p == hop || p == ours || contains(dropped, name):
			continue
		case p == answerCheck:
			n, ok := parseLength(value)
			if !ok || (length >= 0 && n != length) {
				return -1, wire.Errorf(wire.Protocol, "the answer has a malformed Content-Length")
			}
			if length = n; len(dst[name]) > 0 {
				continue // the same length said twice is said once
			}
		}
		dst[name] = append(dst[name], value)
	}
	return length, nil
}

// parseLength reads 1*DIGIT, which is less than ParseInt takes.
func parseLength(s string) (int64, bool) {
	if s == "" {
		return 0, false
	}
	for i := range len(s) {
		if s[i] < '0' || s[i] > '9' {
			return 0, false
		}
	}
	n, err := strconv.ParseInt(s, 10, 64)
	return n, err == nil
}

// validName reports whether s is a token (RFC 9110, 5.6.2).
func validName(s string) bool {
	if s == "" {
		return false
	}
	for i := range len(s) {
		if !tokenChar[s[i]] {
			return false
		}
	}
	return true
}

// validValue refuses what could end a header line or a string. Other bytes pass
// as they are (M4).
func validValue[T string | []byte](v T) bool {
	for i := range len(v) {
		if c := v[i]; c == '\r' || c == '\n' || c == 0 {
			return false
		}
	}
	return true
}

var tokenChar = func() (t [256]bool) {
	for _, c := range "!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ" {
		t[c] = true
	}
	return t
}()

func contains(names []string, name string) bool {
	for _, n := range names {
		if n == name {
			return true
		}
	}
	return false
}

// maxRequestID is the longest x-request-id of a caller that is echoed.
const maxRequestID = 64

// cleanRequestID returns the caller's x-request-id if it may be echoed.
func cleanRequestID(h http.Header) (string, bool) {
	v := h["X-Request-Id"]
	if len(v) != 1 || v[0] == "" || len(v[0]) > maxRequestID {
		return "", false
	}
	for i := range len(v[0]) {
		c := v[0][i]
		if (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && c != '.' && c != '_' && c != '-' {
			return "", false
		}
	}
	return v[0], true
}
