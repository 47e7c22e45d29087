package configs

import (
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// Contract: Y3 D3
func TestLeafSample(t *testing.T) {
	l := sample(t, "leaf").Leaf
	if l.Name != "site1" || l.Edge != "home" || len(l.Hub) != 2 || l.HeartbeatBound != 5*time.Second || l.Issuer != publicAccount {
		t.Errorf("%+v", l)
	}
	if want := filepath.Join("samples", "keys", "site1.nk"); l.NKey != want {
		t.Errorf("nkey %q, want %q", l.NKey, want)
	}
	const least = "leaf:\n  name: l1\n  edge: home\n  hub: [tls://h:7422]\n  tls: {certificate: a, key: b, ca: c}\n  nkey: n\n  issuer: " + publicAccount + "\n"
	if l := mustParse(t, least).Leaf; l.Listen != "127.0.0.1:4222" || l.TrustDomain != "iop" || l.HeartbeatBound != 5*time.Second {
		t.Errorf("defaults: %+v", l)
	}
}

// Contract: Y3 D3 Z1
func TestLeafFaults(t *testing.T) {
	const rest = "  tls: {certificate: a, key: b, ca: c}\n  nkey: n\n  issuer: " + publicAccount + "\n"
	for name, c := range map[string]struct {
		data string
		want []string
	}{
		"empty": {"leaf:\n", []string{
			"leaf.name: is required", "leaf.edge: is required", "leaf.tls.certificate: is required", "leaf.tls.key: is required",
			"leaf.tls.ca: is required", "leaf.hub: is required, such as tls://broker.example:7422", "leaf.nkey: is required", "leaf.issuer: is required",
		}},
		"misspelt":  {"leaf:\n  name: l1\n  edge: home\n  hub: [tls://h:1]\n  lisen: 127.0.0.1:1\n" + rest, []string{`leaf.lisen: unknown key; did you mean "listen"?`}},
		"names":     {"leaf:\n  name: L1\n  edge: callout\n  hub: [tls://h:1]\n" + rest, []string{"leaf.name: name", "leaf.edge: name \"callout\" is reserved"}},
		"hub":       {"leaf:\n  name: l1\n  edge: home\n  hub: [nats://h:1, tls://u:p@h:1, tls://h:1, tls://h:1]\n" + rest, []string{"leaf.hub[0]: want tls://host:port", "leaf.hub[1]: want tls://host:port", "leaf.hub[3]: the address is already that of leaf.hub[2]"}},
		"listen":    {"leaf:\n  name: l1\n  edge: home\n  listen: nowhere\n  hub: [tls://h:1]\n" + rest, []string{"leaf.listen: want host:port"}},
		"bound":     {"leaf:\n  name: l1\n  edge: home\n  heartbeat_bound: -1s\n  hub: [tls://h:1]\n" + rest, []string{"leaf.heartbeat_bound: must be positive"}},
		"user key":  {"leaf:\n  name: l1\n  edge: home\n  hub: [tls://h:1]\n" + strings.Replace(rest, publicAccount, publicUser, 1), []string{"leaf.issuer: want a public account nkey"}},
		"one port":  {"broker:\n  listen: 0.0.0.0:1\n  leaf_listen: 0.0.0.0:1\nedge: {name: home}\n", []string{"broker.leaf_listen: is the address of broker.listen"}},
		"leaf port": {"broker:\n  leaf_listen: 0.0.0.0\nedge: {name: home}\n", []string{"broker.leaf_listen: want host:port"}},
	} {
		_, err := Parse("f.yaml", []byte(c.data))
		for _, want := range c.want {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: no %q in\n%v", name, want, err)
			}
		}
		if err != nil && strings.Count(err.Error(), "\n")+1 != len(c.want) {
			t.Errorf("%s: want %d faults, got\n%v", name, len(c.want), err)
		}
	}
}
