package openai_compat

import (
	"net/url"
	"strings"
	"testing"
)

// Contract: Z2
func TestCleanPath(t *testing.T) {
	for in, want := range map[string]string{
		"/v1/chat/completions": "/v1/chat/completions", "v1/models": "/v1/models", "/api/tags/": "/api/tags/",
		"/v1/models/org%2Fname:8b": "/v1/models/org%2Fname:8b", "/a/%20b": "/a/%20b", "/a..b/c...": "/a..b/c...",
		"/100%25": "/100%25", "/caf%C3%A9": "/caf%C3%A9",
	} {
		if got, err := cleanPath(in); err != nil || got != want {
			t.Errorf("%q: got %q, %v", in, got, err)
		}
	}
	for _, in := range dirty {
		if got, err := cleanPath(in); err == nil {
			t.Errorf("%q was taken as %q", in, got)
		}
	}
}

var dirty = []string{
	"", "/", "//host/x", "///x", "http://host/x", "http:x", "/http://x", "javascript:x", "/a//b", "..", "/..", "../x", "/a/..",
	"/a/../b", "/./a", "/a/.", "/%2e%2e/x", "/%2E./x", "/.%2e/x", "/a/%2e%2e%2fb", "/%252e%252e/x", "/%25252e%25252e/x",
	"/%2525252525252e%2525252525252e/x", "/..%2fx", "/..;/x", "/..;a=b/x", "/%2e%2e;/x", "\\x", "/a\\b", "/a%5cb", "/a%255cb",
	"/a\r\nX: y", "/a%0d%0ab", "/a%250d", "/a\x00", "/a%00", "/a b", "/a\tb", "/a?b", "/a#b", "/a%", "/a%2", "/a%zz", "/caf\xc3\xa9", "/a\x7f",
	"/%2525252e", "/%25zz%252e%252e/x", "/a/%2f/b", "/%2f%2fhost/x",
}

// Whatever is taken stays below the base, however often a server unescapes it,
// and makes a URL of the base's own host.
// Contract: Z2
func FuzzCleanPath(f *testing.F) {
	for _, s := range dirty {
		f.Add(s)
	}
	f.Add("/v1/models/org%2Fname:8b")
	b, err := parseBase("http://localhost:1/base")
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, in string) {
		clean, err := cleanPath(in)
		if err != nil {
			return
		}
		if again, err := cleanPath(clean); err != nil || again != clean {
			t.Fatalf("%q: clean, but not clean again: %q, %v", in, again, err)
		}
		u, err := b.url(clean, "")
		if err != nil {
			t.Fatalf("%q: %v", in, err)
		}
		parsed, err := url.Parse(u.String())
		if err != nil || parsed.Host != "localhost:1" || !strings.HasPrefix(parsed.EscapedPath(), "/base/") {
			t.Fatalf("%q became %q", in, u.String())
		}
		for layer := clean; ; {
			if strings.ContainsAny(layer, "\\\r\n\x00") {
				t.Fatalf("%q holds a byte it must not: %q", in, layer)
			}
			for seg := range strings.SplitSeq(layer, "/") {
				if seg, _, _ = strings.Cut(seg, ";"); seg == ".." || seg == "." {
					t.Fatalf("%q climbs: %q", in, layer)
				}
			}
			next, err := url.PathUnescape(layer)
			if err != nil || next == layer {
				return
			}
			layer = next
		}
	})
}
