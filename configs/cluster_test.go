package configs

import (
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// Contract: Y2 D3
func TestClusterSample(t *testing.T) {
	b := sample(t, "broker-cluster").Broker
	c := b.Cluster
	if c == nil || c.Name != "iop" || c.Listen != "0.0.0.0:6222" || len(c.Routes) != 3 || c.Replicas != 3 || c.TLS != b.TLS {
		t.Fatalf("%+v", c)
	}
	if want := filepath.Join("samples", "pki", "hub1.key"); c.TLS.Key != want {
		t.Errorf("the key of the routes is %q, want %q", c.TLS.Key, want)
	}
	s := sample(t, "service").Service
	if s.Name != "service1" || len(s.URLs) != 1 || s.Replicas != 3 || s.TLS.Key != filepath.Join("samples", "pki", "service1.key") || len(s.Members) != 1 {
		t.Errorf("%+v", s)
	}
}

func TestClusterDefaults(t *testing.T) {
	const head = "broker:\n  tls: {certificate: a, key: b, ca: c}\n  store_dir: s\n  issuer_key: i\n  system_key: s\n  callout_key: c\n  service_key: x\n  cluster:\n    listen: 127.0.0.1:1\n"
	for routes, replicas := range map[string]int{
		"[tls://a:1, tls://b:1]":                       1,
		"[tls://a:1, tls://b:1, tls://c:1]":            3,
		"[tls://a:1, tls://b:1, tls://c:1, tls://d:1]": 3,
	} {
		c := mustParse(t, head+"    routes: "+routes+"\n").Broker.Cluster
		if c.Replicas != replicas || c.Name != "iop" || c.TLS.Key != "b" {
			t.Errorf("%s: %+v", routes, c)
		}
	}
	s := mustParse(t, "service:\n  urls: [tls://h:1]\n  tls: {certificate: a, key: b, ca: c}\n  issuer_key: i\n  system_key: s\n  callout_key: c\n  service_key: x\n").Service
	if s.Name != "service" || s.TrustDomain != "iop" || s.Replicas != 1 || s.HeartbeatBound != 5*time.Second {
		t.Errorf("%+v", s)
	}
}

// Contract: Y2 D3
func TestClusterFaults(t *testing.T) {
	const broker = "broker:\n  listen: 0.0.0.0:1\nedge: {name: home}\n"
	cluster := func(lines ...string) string {
		return strings.Replace(broker, "edge:", "  cluster:\n    "+strings.Join(lines, "\n    ")+"\nedge:", 1)
	}
	const listen, routes = "listen: 0.0.0.0:2", "routes: [tls://a:1, tls://b:1, tls://c:1]"
	for name, c := range map[string]struct{ data, want string }{
		"no listen":      {cluster(routes), "broker.cluster.listen: is required"},
		"listen":         {cluster("listen: x", routes), "broker.cluster.listen: want host:port"},
		"one port":       {cluster("listen: 0.0.0.0:1", routes), "broker.cluster.listen: is the address of broker.listen"},
		"no routes":      {cluster(listen), "broker.cluster.routes: want every broker"},
		"one route":      {cluster(listen, "routes: [tls://a:1]"), "broker.cluster.routes: want every broker"},
		"plaintext":      {cluster(listen, "routes: [nats://a:1, tls://b:1, tls://c:1]"), "broker.cluster.routes[0]: want tls://host:port"},
		"password":       {cluster(listen, "routes: [tls://u:p@a:1, tls://b:1, tls://c:1]"), "broker.cluster.routes[0]: want tls://host:port"},
		"no port":        {cluster(listen, "routes: [tls://a, tls://b:1, tls://c:1]"), "broker.cluster.routes[0]: want a port"},
		"twice":          {cluster(listen, "routes: [tls://a:1, tls://a:1, tls://c:1]"), "broker.cluster.routes[1]: the address is already that of broker.cluster.routes[0]"},
		"two replicas":   {cluster(listen, routes, "replicas: 2"), "broker.cluster.replicas: want 1, 3 or 5"},
		"seven replicas": {cluster(listen, routes, "replicas: 7"), "broker.cluster.replicas: want 1, 3 or 5"},
		"five of three":  {cluster(listen, routes, "replicas: 5"), "broker.cluster.replicas: is 5, but broker.cluster.routes names 3 brokers"},
		"half a tls":     {cluster(listen, routes, "tls: {certificate: a}"), "broker.cluster.tls.key: is required"},
		"name":           {cluster(listen, routes, "name: A.B"), "broker.cluster.name: name"},
		"misspelt":       {cluster(listen, "rutes: []"), `broker.cluster.rutes: unknown key; did you mean "routes"?`},
		"empty service":  {"service:\n", "service.urls: is required"},
		"service key":    {"service:\n  urls: [tls://h:1]\n", "service.callout_key: is required"},
		"service, no URL": {
			"service:\n  admin_listen: 127.0.0.1:8401\n  admin_token: {file: t}\n  enrolment: {edge: home, url: h, ca_certificate: c, ca_key: k}\n",
			"service.enrolment.broker_urls: is required",
		},
		"service, nobody asks": {"service:\n  enrolment: {edge: home, url: h}\n", "service.enrolment: needs service.admin_listen and service.admin_token"},
		"service, no listener": {"service:\n  admin_token: {file: t}\n", "service.admin_token: needs service.admin_listen"},
		"service, no CA key":   {"service:\n  enrolment: {edge: home, url: h}\n", "service.enrolment.ca_key: is required"},
		"a leaf's name":        {"service:\n  enrolment: {leaves: {A.B: 'tls://h:1'}}\n", `service.enrolment.leaves.A.B: name "A.B"`},
		"a leaf's URL":         {"service:\n  enrolment: {leaves: {attic: 'http://h:1'}}\n", "service.enrolment.leaves.attic: want tls://host:port"},
		"service member":       {"service:\n  members: [{edge: a.b, role: node, name: n, nkey: x}]\n", "service.members[0].edge: name"},
	} {
		if _, err := Parse("f.yaml", []byte(c.data)); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: no %q in\n%v", name, c.want, err)
		}
	}
	_, err := parse("f.yaml", []byte(broker), []string{"IOP_BROKER_CLUSTER_NAME=x"}, false)
	if want := "environment: IOP_BROKER_CLUSTER_NAME: the file has no section broker.cluster"; err == nil || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
	f, err := parse("f.yaml", []byte(cluster(listen, routes)), []string{"IOP_BROKER_CLUSTER_REPLICAS=1"}, false)
	if err != nil || f.Broker.Cluster.Replicas != 1 {
		t.Errorf("override: %v", err)
	}
}
