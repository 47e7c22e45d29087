package configs

import (
	"fmt"
	"net/netip"
	"net/url"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
)

// Status is one HTTP status, or a whole class of them such as 5xx.
type Status struct{ First, Last int }

// statusWord is what a Status of the class of server errors is written as.
const statusWord = "5xx"

const wantStatus = "want a status from 400 to 599, or the word " + statusWord

// ParseStatus reads a status of an error, or the word 5xx.
func ParseStatus(text string) (Status, error) {
	if text == statusWord {
		return Status{500, 599}, nil
	}
	n, err := strconv.Atoi(text)
	if err != nil || len(text) != 3 || n < 400 || n > 599 {
		return Status{}, fmt.Errorf("%s", wantStatus)
	}
	return Status{n, n}, nil
}

// Statuses is a list of them.
type Statuses []Status

// Has reports whether status is one of them.
func (s Statuses) Has(status int) bool {
	for _, r := range s {
		if status >= r.First && status <= r.Last {
			return true
		}
	}
	return false
}

// status decodes one; a number is the status itself.
func (d *decoder) status(n *yaml.Node, path string) Status {
	s, err := ParseStatus(n.Value)
	if n.Kind != yaml.ScalarNode || err != nil {
		d.fault(n, path, "%s, got %s", wantStatus, kind(n))
	}
	return s
}

// KeepAlive has ": keep-alive" comments written into the event streams of callers.
// They are not the provider's bytes, so they are off unless they are asked for. One
// that comes before the provider's answer makes its status 200: what the provider
// says instead is told in the stream, and no other provider is tried.
type KeepAlive struct {
	Interval time.Duration `yaml:"interval"` // between two bytes; 0s (default): off
	Queued   bool          `yaml:"queued"`   // also while the request waits for a provider
}

func (k KeepAlive) validate(v *validator) {
	if k.Interval != 0 && k.Interval < time.Second {
		v.fault("edge.keep_alive.interval", "must be at least 1s, or 0s for none")
	}
	if k.Queued && k.Interval == 0 {
		v.fault("edge.keep_alive.queued", "needs edge.keep_alive.interval, such as 15s")
	}
}

// CORS says which pages in browsers may call (E9).
type CORS struct {
	AllowedOrigins []string `yaml:"allowed_origins"` // such as https://app.example; "*" alone: all; empty: none
}

func (c CORS) validate(v *validator) {
	seen := unique{}
	for i, o := range c.AllowedOrigins {
		at := fmt.Sprintf("edge.cors.allowed_origins[%d]", i)
		seen.add(v, at, o, "the origin")
		switch {
		case o == "*" && len(c.AllowedOrigins) > 1:
			v.fault(at, "allows all; leave the others out")
		case o != "*" && !isOrigin(o):
			v.fault(at, "want an origin as browsers write it, such as https://app.example or http://localhost:3000, or \"*\" for all")
		}
	}
}

// isOrigin reports whether text is an origin spelt as a browser does it: what is
// compared with it is compared byte for byte.
func isOrigin(text string) bool {
	u, err := url.Parse(text)
	if err != nil || u.Scheme == "" || u.Hostname() == "" || !isHost(u.Hostname()) || u.Scheme+"://"+u.Host != text {
		return false
	}
	usual := map[string]string{"http": "80", "https": "443"}[u.Scheme]
	return strings.ToLower(text) == text && !strings.HasSuffix(u.Host, ":") && (u.Port() == "" || u.Port() != usual)
}

// KeyPair names the files of a certificate chain and its key.
type KeyPair struct {
	Certificate string `yaml:"certificate"`
	Key         string `yaml:"key"`
}

func (k KeyPair) validate(v *validator, path string) {
	if k == (KeyPair{}) {
		return
	}
	v.required(path+".certificate", k.Certificate)
	v.required(path+".key", k.Key)
}

// Proxies are the trusted ones, of a configuration that was validated.
func (e *Edge) Proxies() []netip.Prefix {
	var list []netip.Prefix
	for _, text := range e.TrustedProxies {
		if p, ok := parseNetwork(text); ok {
			list = append(list, p)
		}
	}
	return list
}

// parseNetwork reads a network, or an address alone.
func parseNetwork(text string) (netip.Prefix, bool) {
	p, err := netip.ParsePrefix(text)
	if err != nil {
		addr, err := netip.ParseAddr(text)
		if err != nil || addr.Zone() != "" {
			return netip.Prefix{}, false
		}
		p = netip.PrefixFrom(addr, addr.BitLen())
	}
	return p, !p.Addr().Is4In6() && p.Masked() == p
}

func (e *Edge) validateProxies(v *validator) {
	seen := unique{}
	for i, text := range e.TrustedProxies {
		at := fmt.Sprintf("edge.trusted_proxies[%d]", i)
		if _, ok := parseNetwork(text); !ok {
			v.fault(at, "want an address or a network, such as 10.0.0.0/8 or 192.0.2.7")
		}
		seen.add(v, at, text, "the network")
	}
}
