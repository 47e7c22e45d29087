package openai_compat

import (
	"errors"
	"net/url"
	"strings"
)

var (
	errPath  = errors.New("the path is not a clean relative path")
	errQuery = errors.New("the query holds bytes that no query has")
)

// cleanPath returns p with one slash in front, or errPath unless p stays below
// the base URL however often it is unescaped: no scheme, authority, dot
// segment, empty segment, backslash, control character, query or fragment, and
// nothing escaped twice (Z2).
func cleanPath(p string) (string, error) {
	p = strings.TrimPrefix(p, "/")
	if p == "" {
		return "", errPath
	}
	for i := 0; i < len(p); i++ {
		if c := p[i]; c <= ' ' || c >= 0x7f || c == '?' || c == '#' {
			return "", errPath
		}
	}
	if first, _, _ := strings.Cut(p, "/"); strings.Contains(first, ":") {
		return "", errPath // a scheme
	}
	plain, err := url.PathUnescape(p)
	if err != nil || !cleanLayer(p) || !cleanLayer(plain) || holdsEscape(plain) {
		return "", errPath
	}
	return "/" + p, nil
}

// holdsEscape reports whether a server that unescapes twice would find anything.
func holdsEscape(s string) bool {
	for i := 0; i+2 < len(s); i++ {
		if s[i] == '%' && hex(s[i+1]) && hex(s[i+2]) {
			return true
		}
	}
	return false
}

func hex(c byte) bool {
	return '0' <= c && c <= '9' || 'a' <= c && c <= 'f' || 'A' <= c && c <= 'F'
}

func cleanLayer(s string) bool {
	for i := 0; i < len(s); i++ {
		if c := s[i]; c < ' ' || c == 0x7f || c == '\\' {
			return false
		}
	}
	segments := strings.Split(s, "/")
	for i, seg := range segments {
		seg, _, _ = strings.Cut(seg, ";") // "..;x" is ".." to some servers
		if seg == "." || seg == ".." {
			return false
		}
		if seg == "" && i < len(segments)-1 {
			return false // "//" may be an authority; one slash at the end is none
		}
	}
	return true
}

// checkQuery refuses what would end the request line or the query.
func checkQuery(q string) error {
	for i := 0; i < len(q); i++ {
		if c := q[i]; c <= ' ' || c >= 0x7f || c == '#' {
			return errQuery
		}
	}
	return nil
}
