package httpapi

import (
	"net/http"
	"net/netip"
	"strings"
)

// remoteOf is the address a request comes from, without its port: that of the
// connection, or, as long as it is a trusted proxy's, the one before it that the
// proxy names. What an untrusted one names is not looked at.
func remoteOf(r *http.Request, proxies []netip.Prefix) netip.Addr {
	addr, ok := parseAddr(r.RemoteAddr)
	if !ok {
		return netip.Addr{}
	}
	before := strings.Join(r.Header["X-Forwarded-For"], ",")
	for before != "" && trusted(proxies, addr) {
		last := strings.LastIndexByte(before, ',')
		next, ok := parseAddr(strings.TrimSpace(before[last+1:]))
		if !ok {
			break
		}
		addr, before = next, before[:max(last, 0)]
	}
	return addr
}

func trusted(proxies []netip.Prefix, addr netip.Addr) bool {
	for _, p := range proxies {
		if p.Contains(addr) {
			return true
		}
	}
	return false
}

// parseAddr reads an address, with or without a port.
func parseAddr(text string) (netip.Addr, bool) {
	if len(text) > maxAddr {
		return netip.Addr{}, false
	}
	addr, err := netip.ParseAddr(strings.Trim(text, "[]"))
	if err != nil {
		ap, err := netip.ParseAddrPort(text)
		if err != nil {
			return netip.Addr{}, false
		}
		addr = ap.Addr()
	}
	return addr.WithZone("").Unmap(), true
}

// maxAddr is more than an address, a zone and a port take.
const maxAddr = 80
