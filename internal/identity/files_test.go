package identity

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

// namings are certificates with one, no and two names, their keys at hand.
func (w *world) namings(t testing.TB) (one, none, two *Certificate) {
	t.Helper()
	return w.ca.forge(t, func(*x509.Certificate) {}),
		w.ca.forge(t, func(c *x509.Certificate) { c.URIs = nil }),
		w.ca.forge(t, func(c *x509.Certificate) {
			c.URIs = append(c.URIs, &url.URL{Scheme: "spiffe", Host: "iop", Path: "/home/node/other"})
		})
}

// Contract: Z4
func TestI4KeyFilesAreOurs(t *testing.T) {
	w, dir := newWorld(t), t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	// One that stood there with a wide mode is replaced, not written into.
	if err := os.WriteFile(at("node.key"), []byte("old"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, err := range []error{w.ca.Save(at("ca")), w.node.Save(at("node.pem"), at("node.key")), w.user.Save(at("user.nk"))} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"ca/ca.key", "node.key", "user.nk"} {
		if info := ok(os.Stat(at(name))); runtime.GOOS != "windows" && info.Mode().Perm() != 0o600 {
			t.Errorf("%s has mode %#o", name, info.Mode().Perm())
		}
	}
	for _, entry := range ok(os.ReadDir(dir)) {
		if strings.HasPrefix(entry.Name(), ".iop-") {
			t.Errorf("%s was left behind", entry.Name())
		}
	}
	cert := ok(LoadCertificate(at("node.pem"), at("node.key")))
	if cert.ID() != w.node.ID() || !cert.Leaf.Equal(w.node.Leaf) {
		t.Errorf("loaded %s", cert.ID())
	}
	if err := VerifySignature(w.node.Leaf, ok(cert.Sign("l")), "l"); err != nil {
		t.Error(err)
	}
	if got := ok(LoadNKey(at("user.nk"))); got.Public() != w.user.Public() {
		t.Errorf("loaded %s", got.Public())
	}
	ca := ok(LoadCA(at("ca")))
	if _, _, err := VerifyChain(ok(LoadPool(at("ca/ca.pem"))), ok(ca.Issue(nodeID("home", "x"), nil, year)).Chain, RoleNode, false); err != nil {
		t.Error(err)
	}
	if _, err := ca.Issue(ID{"evil", "home", RoleNode, "x"}, nil, year); err == nil {
		t.Error("the loaded CA forgot its trust domain")
	}
	for _, key := range []*NKey{w.issuer, w.curve} {
		if err := key.Save(at("k.nk")); err != nil {
			t.Fatal(err)
		}
		if got := ok(LoadNKey(at("k.nk"))); got.Public() != key.Public() {
			t.Errorf("loaded %s, saved %s", got.Public(), key.Public())
		}
	}
}

func TestI4SaveWhereNobodyCan(t *testing.T) {
	w := newWorld(t)
	missing := filepath.Join(t.TempDir(), "none", "x")
	if err := w.node.Save(missing, missing); err == nil || !strings.Contains(err.Error(), missing) {
		t.Errorf("certificate: %v", err)
	}
	if err := w.user.Save(missing); err == nil || !strings.Contains(err.Error(), missing) {
		t.Errorf("nkey: %v", err)
	}
}

// A process's own key or certificate that is missing, unreadable or not a pair.
//
// Contract: S4 Z4
func TestI4LoadRefused(t *testing.T) {
	w := newWorld(t)
	one, none, two := w.namings(t)
	keyPEM := func(c *Certificate) []byte { return ok(encodeKey(c.key.key())) }
	certPEM := func(cs ...*Certificate) []byte {
		var chain [][]byte
		for _, c := range cs {
			chain = append(chain, c.Chain...)
		}
		return encodeCertificates(chain)
	}
	pkcs8 := func(key any) []byte {
		return pem.EncodeToMemory(&pem.Block{Type: blockKey, Bytes: ok(x509.MarshalPKCS8PrivateKey(key))})
	}
	seed := append(ok(w.user.pair().Seed()), '\n')
	server := ok(newServerSeed())
	goodCert, goodKey := certPEM(one), keyPEM(one)
	absent := []byte(nil)

	for name, c := range map[string]struct {
		cert, key []byte // nil: no such file
		mode      os.FileMode
		bad       string // the file at fault
		want      string
	}{
		"no certificate":         {absent, goodKey, 0o600, "c.pem", "no such file"},
		"empty certificate":      {[]byte("\n"), goodKey, 0o600, "c.pem", "empty"},
		"certificate not PEM":    {[]byte("hello"), goodKey, 0o600, "c.pem", "not PEM"},
		"certificate cut short":  {goodCert[:len(goodCert)/2], goodKey, 0o600, "c.pem", "cut short"},
		"certificate, then junk": {append(bytes.Clone(goodCert), "junk"...), goodKey, 0o600, "c.pem", "follows certificate 1"},
		"key in its place":       {goodKey, goodKey, 0o600, "c.pem", "want a PEM block CERTIFICATE"},
		"broken DER":             {pem.EncodeToMemory(&pem.Block{Type: blockCertificate, Bytes: []byte("x")}), goodKey, 0o600, "c.pem", "certificate 1"},
		"huge":                   {bytes.Repeat([]byte("a"), maxFile+1), goodKey, 0o600, "c.pem", "larger"},
		"no name":                {certPEM(none), keyPEM(none), 0o600, "c.pem", "0 URI"},
		"two names":              {certPEM(two), keyPEM(two), 0o600, "c.pem", "2 URI"},
		"no key":                 {goodCert, absent, 0o600, "c.key", "no such file"},
		"empty key":              {goodCert, []byte{}, 0o600, "c.key", "empty"},
		"key not PEM":            {goodCert, []byte("hello"), 0o600, "c.key", "not PEM"},
		"key cut short":          {goodCert, goodKey[:len(goodKey)/2], 0o600, "c.key", "cut short"},
		"key, then more":         {goodCert, append(bytes.Clone(goodKey), goodKey...), 0o600, "c.key", "alone"},
		"certificate as key":     {goodCert, goodCert, 0o600, "c.key", "want a PEM block PRIVATE KEY"},
		"key of another":         {goodCert, keyPEM(w.node), 0o600, "c.key", "not the key of the certificate"},
		"RSA key":                {goodCert, pkcs8(ok(rsa.GenerateKey(rand.Reader, 2048))), 0o600, "c.key", "P-256"},
		"P-384 key":              {goodCert, pkcs8(ok(ecdsa.GenerateKey(elliptic.P384(), rand.Reader))), 0o600, "c.key", "P-256"},
		"broken key":             {goodCert, pem.EncodeToMemory(&pem.Block{Type: blockKey, Bytes: []byte("x")}), 0o600, "c.key", "does not parse"},
		"key the group reads":    {goodCert, goodKey, 0o640, "c.key", "chmod 600"},
		"key all others read":    {goodCert, goodKey, 0o604, "c.key", "chmod 600"},
	} {
		t.Run(name, func(t *testing.T) {
			if c.mode != 0o600 && runtime.GOOS == "windows" {
				return // Windows has no such modes
			}
			dir := t.TempDir()
			write := func(name string, data []byte, mode os.FileMode) string {
				path := filepath.Join(dir, name)
				if data != nil {
					if err := os.WriteFile(path, data, mode); err != nil {
						t.Fatal(err)
					}
					if err := os.Chmod(path, mode); err != nil {
						t.Fatal(err)
					}
				}
				return path
			}
			_, err := LoadCertificate(write("c.pem", c.cert, 0o644), write("c.key", c.key, c.mode))
			refused(t, err, c.want)
			if err != nil && !strings.Contains(err.Error(), filepath.Join(dir, c.bad)) {
				t.Errorf("%q does not name %s", err, c.bad)
			}
			for _, secret := range []string{strings.Split(string(goodKey), "\n")[1], string(seed[:58])} {
				if err != nil && strings.Contains(err.Error(), secret) {
					t.Errorf("the error holds the key: %v", err)
				}
			}
		})
	}
	for name, c := range map[string]struct {
		data []byte
		mode os.FileMode
		want string
	}{
		"missing":     {absent, 0o600, "no such file"},
		"empty":       {[]byte{}, 0o600, "empty"},
		"not a seed":  {[]byte("hunter2"), 0o600, "want the seed"},
		"cut short":   {seed[:40], 0o600, "want the seed"},
		"public key":  {[]byte(w.user.Public()), 0o600, "want the seed"},
		"server seed": {server, 0o600, "account, user or curve"},
		"group reads": {seed, 0o640, "chmod 600"},
	} {
		t.Run("nkey "+name, func(t *testing.T) {
			if c.mode != 0o600 && runtime.GOOS == "windows" {
				return // Windows has no such modes
			}
			path := filepath.Join(t.TempDir(), "k.nk")
			if c.data != nil {
				if err := os.WriteFile(path, c.data, c.mode); err != nil {
					t.Fatal(err)
				}
			}
			_, err := LoadNKey(path)
			refused(t, err, c.want)
			if err != nil && (!strings.Contains(err.Error(), path) || strings.Contains(err.Error(), "hunter2")) {
				t.Errorf("got %v", err)
			}
		})
	}
}

func TestI4LoadCARefused(t *testing.T) {
	w, other := newWorld(t), ok(NewCA("iop", year))
	dir := t.TempDir()
	load := func() error { _, err := LoadCA(dir); return err }
	refused(t, load(), "ca.pem")
	if err := w.ca.Save(dir); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "ca.pem"), other.PEM(), 0o644); err != nil {
		t.Fatal(err)
	}
	refused(t, load(), "not the key of the certificate")
	if err := os.WriteFile(filepath.Join(dir, "ca.pem"), encodeCertificates(w.node.Chain), 0o644); err != nil {
		t.Fatal(err)
	}
	refused(t, load(), "is not of a CA")
	_, err := LoadPool(filepath.Join(dir, "ca.pem"))
	refused(t, err, "not of a CA")
	if err := os.Remove(filepath.Join(dir, "ca.key")); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "ca.pem"), w.ca.PEM(), 0o644); err != nil {
		t.Fatal(err)
	}
	refused(t, load(), "ca.key")
}

func TestEndedCertificateLoads(t *testing.T) {
	w, dir := newWorld(t), t.TempDir()
	old := w.ca.forge(t, func(c *x509.Certificate) { c.NotAfter = c.NotBefore.Add(1) })
	certFile, keyFile := filepath.Join(dir, "c.pem"), filepath.Join(dir, "c.key")
	if err := old.Save(certFile, keyFile); err != nil {
		t.Fatal(err)
	}
	if _, err := LoadCertificate(certFile, keyFile); err != nil {
		t.Errorf("a clock may be wrong, a local error it is not: %v", err)
	}
}

// Contract: Z4 L5
func TestI5NothingPrintsKeys(t *testing.T) {
	w := newWorld(t)
	d := w.node.key.key().D //nolint:staticcheck // the number a leak would show
	leaks := []string{
		d.String(), d.Text(16), string(ok(w.user.pair().Seed())), string(ok(w.curve.pair().Seed())),
		strings.Split(string(ok(encodeKey(w.node.key.key()))), "\n")[1], w.ca.key().D.String(), //nolint:staticcheck // as above
		fmt.Sprintf("%d", ok(w.user.pair().Seed())), fmt.Sprintf("%x", ok(w.user.pair().Seed())), fmt.Sprintf("%d", d.Bytes()), fmt.Sprint(d.Bits()),
	}
	hidden := struct {
		nkey NKey
		cert *Certificate
		full Certificate
		ca   CA
		key  Key
	}{*w.user, w.node, *w.node, *w.ca, Key{key: w.node.key.key}}
	values := []any{
		w.user, *w.user, w.curve, w.issuer, w.node, *w.node, w.ca, *w.ca, w.node.TLS(), hidden, &hidden, &Key{key: w.node.key.key},
		Key{key: w.node.key.key},
		[]*NKey{w.user},
		map[string]Certificate{"c": *w.node},
	}
	var out bytes.Buffer
	loggers := []*slog.Logger{slog.New(slog.NewTextHandler(&out, nil)), slog.New(slog.NewJSONHandler(&out, nil))}
	for _, v := range values {
		for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%d"} {
			fmt.Fprintf(&out, verb+"\n", v)
		}
		for _, l := range loggers {
			l.Info("event", slog.Any("value", v))
		}
	}
	for _, v := range []any{w.user, *w.user, w.node, *w.node, w.ca, hidden} {
		out.Write(ok(json.Marshal(v)))
		out.Write(ok(yaml.Marshal(v)))
	}
	for _, leak := range leaks {
		if strings.Contains(out.String(), leak) {
			t.Errorf("a key was printed as %q", leak)
		}
	}
	for _, v := range []any{w.user, *w.user, w.node, w.ca} {
		if got := fmt.Sprintf("%v|%+v|%#v", v, v, v); got != "[redacted]|[redacted]|[redacted]" {
			t.Errorf("%T prints %q", v, got)
		}
	}
}
