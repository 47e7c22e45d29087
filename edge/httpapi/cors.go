package httpapi

import (
	"net/http"
	"strings"
)

// cors says which pages a browser may let read our answers (E9). Keys come in a
// header, so no answer ever allows a browser's own credentials.
type cors struct {
	origins map[string]bool
	any     bool
}

func newCORS(origins []string) *cors {
	if len(origins) == 0 {
		return nil
	}
	c := &cors{origins: make(map[string]bool, len(origins))}
	for _, o := range origins {
		c.origins[o] = true
		c.any = c.any || o == "*"
	}
	return c
}

const (
	// exposed is what a page may read beside the headers that every page may.
	exposed = "x-request-id, request-id, retry-after, x-iop-node, x-iop-provider, x-iop-attempts, x-iop-queue-ms, x-iop-estimate"
	// preflightAge is how long a browser need not ask again, in seconds.
	preflightAge = "600"
	maxAsked     = 4 << 10
)

// allow puts what a page needs in order to read the answer into its headers. A nil
// cors does nothing.
func (c *cors) allow(h http.Header, origin []string) {
	if c == nil {
		return
	}
	allowed := "*"
	if !c.any {
		if !varies(h["Vary"]) {
			h["Vary"] = append(h["Vary"], "Origin")
		}
		if len(origin) != 1 || !c.origins[origin[0]] {
			return
		}
		allowed = origin[0]
	}
	h["Access-Control-Allow-Origin"] = []string{allowed}
	h["Access-Control-Expose-Headers"] = []string{exposed}
}

// varies reports whether an answer says already that it depends on the page.
func varies(values []string) bool {
	for _, v := range values {
		for name := range strings.SplitSeq(v, ",") {
			if name = strings.TrimSpace(name); name == "*" || strings.EqualFold(name, "Origin") {
				return true
			}
		}
	}
	return false
}

// preflight answers a browser that asks before it sends: any header may come, for
// client libraries send many, and what a provider gets of them is decided here.
func (c *cors) preflight(h, asked http.Header, methods string) {
	if c == nil || len(h["Access-Control-Allow-Origin"]) == 0 || len(asked["Access-Control-Request-Method"]) == 0 {
		return
	}
	h["Access-Control-Allow-Methods"] = []string{methods}
	h["Access-Control-Max-Age"] = []string{preflightAge}
	if names := strings.Join(asked["Access-Control-Request-Headers"], ","); names != "" && len(names) <= maxAsked && areNames(names) {
		h["Access-Control-Allow-Headers"] = []string{names}
		h["Vary"] = append(h["Vary"], "Access-Control-Request-Headers")
	}
}

func areNames(list string) bool {
	for name := range strings.SplitSeq(list, ",") {
		if !validName(strings.TrimSpace(name)) {
			return false
		}
	}
	return true
}

// isCORS reports whether a provider's header speaks of pages, which is this Edge's
// to do where its operator does.
func isCORS(name string) bool { return strings.HasPrefix(name, "Access-Control-") }
