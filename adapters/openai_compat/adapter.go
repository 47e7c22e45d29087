package openai_compat

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/iop-fabric/iop/agent"
)

const (
	dialTimeout = 5 * time.Second
	// idleTimeout is below what servers keep an idle connection for: uvicorn
	// (vLLM) and llama.cpp's server close after 5 s (A69).
	idleTimeout      = 4 * time.Second
	maxIdleConns     = 256
	maxHeaderBytes   = 64 << 10 // T3
	handshakeTimeout = 10 * time.Second
)

// Options configure an Adapter.
type Options struct {
	Name    string // the adapter's, for messages
	BaseURL string // http or https; may end in /v1 or not
	Profile Profile
	// StaticKey returns the provider's key at each exchange; nil: it needs none.
	// An error or an empty key fails the exchange.
	StaticKey func() (string, error)
	// Dial replaces the network, where the provider is not behind TCP.
	Dial func(ctx context.Context, network, addr string) (net.Conn, error)
}

// Adapter drives one provider endpoint.
type Adapter struct {
	name      string
	base      base
	profile   Profile
	staticKey func() (string, error)
	transport *http.Transport
	running   agent.Running
}

// New checks the options and returns the adapter. It calls nobody.
func New(o Options) (*Adapter, error) {
	b, err := parseBase(o.BaseURL)
	if err != nil {
		return nil, fmt.Errorf("adapter %q: base url: %w", o.Name, err)
	}
	p, err := o.Profile.complete()
	if err != nil {
		return nil, fmt.Errorf("adapter %q: profile: %w", o.Name, err)
	}
	return &Adapter{
		name:      o.Name,
		base:      b,
		profile:   p,
		staticKey: o.StaticKey,
		transport: newTransport(b, o.Dial),
	}, nil
}

func newTransport(b base, dial func(context.Context, string, string) (net.Conn, error)) *http.Transport {
	if dial == nil {
		dial = (&net.Dialer{Timeout: dialTimeout, KeepAlive: 15 * time.Second}).DialContext
	}
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	t := &http.Transport{
		DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			c, err := dial(ctx, network, addr)
			if err != nil {
				return nil, err
			}
			return &conn{Conn: c}, nil
		},
		Protocols:              protocols,
		TLSHandshakeTimeout:    handshakeTimeout,
		DisableCompression:     true, // I1: a gzip the caller asked for stays one (A31)
		MaxIdleConnsPerHost:    maxIdleConns,
		MaxIdleConns:           maxIdleConns,
		IdleConnTimeout:        idleTimeout,
		MaxResponseHeaderBytes: maxHeaderBytes,
		// ResponseHeaderTimeout stays 0: Ollama sends no header before the first
		// token, which may take minutes. The caller's stall watch decides.
	}
	if !b.loopback {
		t.Proxy = http.ProxyFromEnvironment
	}
	return t
}

// Start does nothing that can fail: the provider need not be reachable (R3).
func (a *Adapter) Start(context.Context) error { return nil }

// Stop takes nothing new, waits for the exchanges under way as long as ctx
// lets it, and closes what is idle. Stopping twice, or unstarted, is fine.
func (a *Adapter) Stop(ctx context.Context) error {
	err := a.running.Stop(ctx)
	a.transport.CloseIdleConnections()
	if err != nil {
		return fmt.Errorf("adapter %q: exchanges under way: %w", a.name, err)
	}
	return nil
}

// base is the parsed base URL.
type base struct {
	scheme, host string
	path         string // escaped, without a slash at the end
	loopback     bool
}

func parseBase(s string) (base, error) {
	u, err := url.Parse(s)
	switch {
	case err != nil:
		return base{}, errors.New("not a URL") // the error would quote it, and it may hold a password
	case u.Scheme != "http" && u.Scheme != "https":
		return base{}, errors.New("the scheme must be http or https")
	case u.Hostname() == "":
		return base{}, errors.New("no host")
	case u.User != nil:
		return base{}, errors.New("no user or password here; name a key instead")
	case u.RawQuery != "" || u.ForceQuery || u.Fragment != "":
		return base{}, errors.New("no query or fragment")
	}
	b := base{scheme: u.Scheme, host: u.Host, path: strings.TrimRight(u.EscapedPath(), "/")}
	if b.path != "" {
		if _, err := cleanPath(b.path); err != nil {
			return base{}, err
		}
	}
	ip := net.ParseIP(u.Hostname())
	b.loopback = strings.EqualFold(u.Hostname(), "localhost") || (ip != nil && ip.IsLoopback())
	return b, nil
}

// url puts a clean path below the base. A base that ends in /v1 takes the
// place of a path's own /v1.
func (b base) url(clean, rawQuery string) (*url.URL, error) {
	prefix := b.path
	if strings.HasSuffix(prefix, "/v1") && (clean == "/v1" || strings.HasPrefix(clean, "/v1/")) {
		prefix = strings.TrimSuffix(prefix, "/v1")
	}
	raw := prefix + clean
	path, err := url.PathUnescape(raw)
	if err != nil {
		return nil, errPath
	}
	return &url.URL{Scheme: b.scheme, Host: b.host, Path: path, RawPath: raw, RawQuery: rawQuery}, nil
}
