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

// maxEscapes is how often a path may be unescaped until it no longer changes;
// a server behind a proxy may do it twice.
const maxEscapes = 4

// cleanPath returns p with one slash in front, or errPath unless p stays below
// the base URL however often it is unescaped: no scheme, authority, dot
// segment, empty segment, backslash, control character, query or fragment (Z2).
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
	layer := p
	for range maxEscapes {
		if !cleanLayer(layer) {
			return "", errPath
		}
		next, err := url.PathUnescape(layer)
		if err != nil {
			if layer == p {
				return "", errPath
			}
			break // a literal % that an escape stood for: nothing unescapes it again
		}
		if next == layer {
			return "/" + p, nil
		}
		layer = next
	}
	if strings.Contains(layer, "%") && layerChanges(layer) {
		return "", errPath // still not at its ground
	}
	return "/" + p, nil
}

func layerChanges(s string) bool {
	next, err := url.PathUnescape(s)
	return err == nil && next != s
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
