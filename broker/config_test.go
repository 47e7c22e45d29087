package broker

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"

	"github.com/iop-fabric/iop/internal/identity"
	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/wire"
)

// The text is what a stock nats-server takes, holds no seed, and has the
// settings the fabric relies on.
// Contract: B1 B4
func TestConfigText(t *testing.T) {
	f := newFixture(t)
	for _, form := range []Form{Embedded, Stock} {
		text, err := ConfigText(f.cfg, form)
		if err != nil {
			t.Fatal(err)
		}
		file := filepath.Join(t.TempDir(), "nats.conf")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		opts, err := server.ProcessConfigFile(file)
		if err != nil {
			t.Fatalf("form %d: %v", form, err)
		}
		if !opts.TLSHandshakeFirst || opts.TLSConfig.ClientAuth != tls.RequireAndVerifyClientCert || opts.TLSConfig.MinVersion != tls.VersionTLS13 || opts.AllowNonTLS {
			t.Error("TLS is not required from the first byte")
		}
		if opts.AuthTimeout != 15 || opts.AuthCallout == nil || len(opts.AuthCallout.AuthUsers) != map[Form]int{Embedded: 5, Stock: 3}[form] || opts.NoAuthUser != "" {
			t.Errorf("authorization: %v, %+v", opts.AuthTimeout, opts.AuthCallout)
		}
		for _, u := range opts.Nkeys {
			way := map[Form]string{Embedded: "IN_PROCESS", Stock: "STANDARD"}[form]
			if _, ok := u.AllowedConnectionTypes[way]; !ok || len(u.AllowedConnectionTypes) != 1 {
				t.Errorf("form %d: %s may come as %v", form, u.Nkey, u.AllowedConnectionTypes)
			}
			if u.Account.Name == accountFabric && u.Permissions == nil {
				t.Errorf("%s may do anything in FABRIC", u.Nkey)
			}
		}
		for _, file := range []string{f.cfg.IssuerKey, f.cfg.SystemKey, f.cfg.CalloutKey, f.cfg.ServiceKey} {
			seed, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if strings.Contains(text, strings.TrimSpace(string(seed))) {
				t.Errorf("the seed of %s is in the text", filepath.Base(file))
			}
		}
	}
	opts, err := newOptions(must(ConfigText(f.cfg, Embedded)), func() *tls.Config { return &tls.Config{MinVersion: tls.VersionTLS13} })
	if err != nil || !opts.DisableShortFirstPing {
		t.Errorf("DisableShortFirstPing is off: %v", err)
	}
}

// A quote or a line's end in a path cannot add a line to the configuration.
func TestConfigTextQuotes(t *testing.T) {
	f := newFixture(t)
	f.cfg.StoreDir = filepath.Join(f.dir, `a" } authorization { users: [] }`)
	opts := &server.Options{}
	if err := opts.ProcessConfigString(must(ConfigText(f.cfg, Embedded))); err != nil || opts.StoreDir != f.cfg.StoreDir || opts.AuthCallout == nil {
		t.Errorf("store_dir %q, %v", opts.StoreDir, err)
	}
	f.cfg.StoreDir = "a\nb"
	if _, err := ConfigText(f.cfg, Embedded); err == nil {
		t.Error("a line's end was taken")
	}
}

// What is wrong with the configuration is said before anything starts.
func TestNewRefuses(t *testing.T) {
	for name, c := range map[string]struct {
		spoil func(f *fixture)
		want  string
	}{
		"no store":           {func(f *fixture) { f.cfg.StoreDir = "" }, "store_dir"},
		"no issuer":          {func(f *fixture) { f.cfg.IssuerKey = "" }, "issuer_key is not set"},
		"missing key file":   {func(f *fixture) { f.cfg.SystemKey = filepath.Join(f.dir, "gone.nk") }, "gone.nk"},
		"wrong kind of key":  {func(f *fixture) { f.cfg.IssuerKey = f.cfg.SystemKey }, "wrong kind of nkey"},
		"one key for two":    {func(f *fixture) { f.cfg.SystemKey = f.cfg.CalloutKey }, "same key"},
		"edge key is ours":   {func(f *fixture) { f.cfg.EdgeKeys["edge1"] = must(identity.LoadNKey(f.cfg.SystemKey)).Public() }, "used twice"},
		"edge key is no key": {func(f *fixture) { f.cfg.EdgeKeys["edge1"] = "UNO" }, "edge1"},
		"edge's name":        {func(f *fixture) { f.cfg.EdgeKeys["a.b"] = must(identity.NewUserKey()).Public() }, "a.b"},
		"member's name":      {func(f *fixture) { f.member("edge1", "node", "*") }, `"*"`},
		"member's role":      {func(f *fixture) { f.member("edge1", "broker", "n1") }, "want node, edge or leaf"},
		"member's key":       {func(f *fixture) { f.member("edge1", "node", "n1"); f.cfg.Members[0].NKey = "x" }, "public user key"},
		"three nkeys": {func(f *fixture) {
			f.member("edge1", "node", "n1")
			f.member("edge1", "node", "n1")
			f.member("edge1", "node", "n1")
		}, "more than 2"},
		"listen":               {func(f *fixture) { f.cfg.Listen = "4222" }, "want host:port"},
		"port":                 {func(f *fixture) { f.cfg.Listen = "127.0.0.1:x" }, "port"},
		"trust domain":         {func(f *fixture) { f.cfg.TrustDomain = "other" }, `trust domain "iop"`},
		"another CA":           {func(f *fixture) { newTestCA().write(f.cfg.TLS.CA) }, "is not a broker's of the CA"},
		"another's key":        {func(f *fixture) { mismatch(f) }, "broker.key"},
		"a node's certificate": {func(f *fixture) { nodeCertificate(f) }, "is not a broker's"},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			c.spoil(f)
			_, err := New(f.cfg, Deps{})
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v, want one with %q", err, c.want)
			}
		})
	}
}

func mismatch(f *fixture) {
	old := must(os.ReadFile(f.cfg.TLS.Key))
	f.writeCertificate()
	if err := os.WriteFile(f.cfg.TLS.Key, old, 0o600); err != nil {
		f.t.Fatal(err)
	}
}

func nodeCertificate(f *fixture) {
	c := f.ca.issue(nil, "spiffe://iop/edge1/node/n1")
	if err := c.Save(f.cfg.TLS.Certificate, f.cfg.TLS.Key); err != nil {
		f.t.Fatal(err)
	}
}

// What the machine refuses is said by Run, in words that name it.
func TestRunRefuses(t *testing.T) {
	t.Run("busy port", func(t *testing.T) {
		f := newFixture(t)
		l := must(net.Listen("tcp", "127.0.0.1:0"))
		defer l.Close()
		f.cfg.Listen = l.Addr().String()
		err := must(New(f.cfg, Deps{})).Run(t.Context())
		if err == nil || !strings.Contains(err.Error(), f.cfg.Listen) || !strings.Contains(err.Error(), "in use") {
			t.Errorf("error: %v", err)
		}
	})
	t.Run("store dir", func(t *testing.T) {
		f := newFixture(t)
		f.cfg.StoreDir = filepath.Join(f.cfg.TLS.CA, "js") // below a file
		err := must(New(f.cfg, Deps{})).Run(t.Context())
		if err == nil || !strings.Contains(err.Error(), f.cfg.StoreDir) {
			t.Errorf("error: %v", err)
		}
	})
	t.Run("twice", func(t *testing.T) {
		f := newFixture(t).start()
		if err := f.b.Run(t.Context()); err == nil {
			t.Error("it ran twice")
		}
	})
	t.Run("stopped before it began", func(t *testing.T) {
		f := newFixture(t)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		b := must(New(f.cfg, Deps{}))
		if _, err := b.InProcess().InProcessConn(); !errors.Is(err, ErrNotReady) {
			t.Errorf("in process before Run: %v", err)
		}
		b.Run(ctx) // it must end; how is its own affair
	})
}

// New certificates and a new CA serve from the next dial; what stands stays.
// Contract: B8
func TestCertificatesSwapInPlace(t *testing.T) {
	f := newFixture(t)
	key := f.member("edge1", "node", "n1")
	f.start()
	instance := wire.NewToken()
	old := f.instance(instance, "edge1", "node", "n1", key)
	nc, _ := f.node(old)

	oldCA := f.ca
	f.ca = newTestCA()
	if err := os.WriteFile(f.cfg.TLS.CA, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := f.b.Reload(); err == nil {
		t.Error("an empty CA file was taken")
	}
	f.ca.write(f.cfg.TLS.CA)
	f.writeCertificate()
	if err := f.b.Reload(); err != nil {
		t.Fatal(err)
	}
	if f.whoami(nc) == "" {
		t.Error("the connection that stood is gone")
	}
	again := f.instance(instance, "edge1", "node", "n1", key)
	again.tls.Certificates = []tls.Certificate{oldCA.client("spiffe://iop/edge1/node/n1")}
	if nc, err := again.dial(); err == nil {
		nc.Close()
		t.Error("a certificate of the CA that was taken out is still good")
	}
	f.node(f.instance(instance, "edge1", "node", "n1", key))
}

// No seed, signature or nonce of any connection is ever logged.
func TestNoSecretIsLogged(t *testing.T) {
	f := newFixture(t)
	key := f.member("edge1", "node", "n1")
	f.start()
	nc, s := f.node(f.dialer("edge1", "node", "n1", key))
	sub := f.subscribe(nc, s.Down(subjects.SessionVerb, ""))
	if err := nc.Publish(s.Up(subjects.SessionVerb, ""), nil); err != nil {
		t.Fatal(err)
	}
	token := f.next(sub)
	f.stop()
	secrets := []string{string(must(key.Pair().Seed())), string(token.Data)}
	for _, k := range []*identity.NKey{f.b.keys.issuer, f.b.keys.system, f.b.keys.callout, f.b.keys.service, f.edges["edge1"]} {
		secrets = append(secrets, string(must(k.Pair().Seed())))
	}
	for _, line := range f.logs.all {
		for _, value := range line {
			for _, secret := range secrets {
				if strings.Contains(value, secret) {
					t.Fatalf("a secret in %s", line["msg"])
				}
			}
		}
	}
}

// Metric names keep the conventions, and every series is there from the start.
func TestMetrics(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	if _, err := newMetrics(reg); err != nil {
		t.Fatal(err)
	}
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	problems, err := promlint.NewWithMetricFamilies(families).Lint()
	if err != nil || len(problems) > 0 {
		t.Errorf("%v %v", problems, err)
	}
	if _, err := newMetrics(reg); err == nil {
		t.Error("the same registry twice")
	}
}
