package httpapi

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/iop-fabric/iop/configs"
)

// writePair writes a certificate of that serial number, and its key.
func writePair(t *testing.T, files configs.KeyPair, serial int64) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(serial), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		DNSNames: []string{"edge.example"}, IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	writePEM(t, files.Certificate, "CERTIFICATE", der)
	writePEM(t, files.Key, "PRIVATE KEY", keyDER)
}

func writePEM(t *testing.T, name, kind string, der []byte) {
	t.Helper()
	if err := os.WriteFile(name, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
		t.Fatal(err)
	}
}

func pairIn(dir string) configs.KeyPair {
	return configs.KeyPair{Certificate: filepath.Join(dir, "c.pem"), Key: filepath.Join(dir, "c.key")}
}

// Contract: E11
func TestCallersComeOverTLSAndHTTP2(t *testing.T) {
	files := pairIn(t.TempDir())
	writePair(t, files, 1)
	f := &fixture{T: t, pool: &fakePool{}, runner: &fakeRunner{}, logs: &syncBuffer{}}
	f.runner.answer = says(200, fields("Content-Type", "application/json"), `{"ok":true}`)
	cfg, err := ConfigOf(&configs.Edge{TLS: files, TrustedProxies: []string{"127.0.0.0/8"}}, []Key{{Name: "alice", Digest: DigestOf(goodKey)}})
	if err != nil {
		t.Fatal(err)
	}
	var clock atomic.Int64
	clock.Store(time.Now().UnixNano())
	now := func() time.Time { return time.Unix(0, clock.Load()) }
	api := New(cfg, Deps{Pool: f.pool, Runner: f.runner, Log: slog.New(slog.NewJSONHandler(f.logs, nil)), Now: now})
	server := api.Server(api.Handler())
	server.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelWarn)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- server.ServeTLS(listener, "", "") }()
	t.Cleanup(func() {
		server.Close()
		if err := <-served; !errors.Is(err, http.ErrServerClosed) {
			t.Error(err)
		}
	})
	base := "https://" + listener.Addr().String()
	// call makes a connection of its own and tells what it was served with.
	call := func(h2 bool, most uint16) (serial int64, proto int, body string, err error) {
		transport := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS10, MaxVersion: most}, ForceAttemptHTTP2: h2}
		defer transport.CloseIdleConnections()
		req, err := http.NewRequestWithContext(t.Context(), "POST", base+"/v1/chat/completions", strings.NewReader(plainChat))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+goodKey)
		req.Header.Set("X-Forwarded-For", "203.0.113.7")
		resp, err := transport.RoundTrip(req)
		if err != nil {
			return 0, 0, "", err
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		return resp.TLS.PeerCertificates[0].SerialNumber.Int64(), resp.ProtoMajor, string(b), err
	}
	for _, h2 := range []bool{true, false} {
		serial, proto, body, err := call(h2, 0)
		if err != nil || serial != 1 || (proto == 2) != h2 || body != `{"ok":true}` {
			t.Fatalf("%d HTTP/%d %q %v", serial, proto, body, err)
		}
	}
	if l := f.logged(2); l["remote"] != "203.0.113.7" {
		t.Errorf("logged %v", l)
	}
	if _, _, _, err := call(false, tls.VersionTLS11); err == nil {
		t.Error("TLS 1.1 is spoken")
	}

	// What is no good changes nothing and is told once; what is good serves at once.
	change := func(how func()) int64 {
		t.Helper()
		how()
		clock.Add(int64(recheck))
		for range 2 {
			if _, _, _, err := call(false, 0); err != nil {
				t.Fatal(err)
			}
			clock.Add(int64(recheck))
		}
		serial, _, _, err := call(true, 0)
		if err != nil {
			t.Fatal(err)
		}
		return serial
	}
	touch := func() { // another content of the same size, in the same instant, has another time
		if err := os.Chtimes(files.Certificate, now(), now()); err != nil {
			t.Fatal(err)
		}
	}
	if serial := change(func() { writePEM(t, files.Key, "PRIVATE KEY", []byte("none")) }); serial != 1 {
		t.Errorf("serial %d", serial)
	}
	if serial := change(func() { os.Remove(files.Certificate) }); serial != 1 {
		t.Errorf("serial %d", serial)
	}
	if n := strings.Count(f.logs.String(), EventCertificateFailed); n != 2 {
		t.Errorf("told %d times: %s", n, f.logs.String())
	}
	if serial := change(func() { writePair(t, files, 2); touch() }); serial != 2 {
		t.Errorf("serial %d", serial)
	}
	if n := strings.Count(f.logs.String(), `"msg":"`+EventCertificate+`"`); n != 1 {
		t.Errorf("told %d times", n)
	}
	if strings.Contains(f.logs.String(), "PRIVATE") {
		t.Error("a key is in the log")
	}
}

// Contract: E11
func TestACertificateThatIsNoGoodIsTold(t *testing.T) {
	files := pairIn(t.TempDir())
	if _, err := ConfigOf(&configs.Edge{TLS: files}, nil); err == nil || !strings.HasPrefix(err.Error(), "edge.tls: ") {
		t.Errorf("%v", err)
	}
	if c, err := ConfigOf(&configs.Edge{}, nil); err != nil || New(c, Deps{Pool: &fakePool{}}).Server(nil).TLSConfig != nil {
		t.Errorf("%v", err)
	}
}

// Contract: E11
func TestProxiesThatAreTrustedNameTheClient(t *testing.T) {
	proxies := (&configs.Edge{TrustedProxies: []string{"10.0.0.0/8", "192.0.2.7", "fd00::/8"}}).Proxies()
	for name, c := range map[string]struct {
		from string
		xff  []string
		want string
	}{
		"nobody between":          {"203.0.113.1:999", nil, "203.0.113.1"},
		"a stranger who claims":   {"203.0.113.1:999", []string{"198.51.100.1"}, "203.0.113.1"},
		"a proxy":                 {"10.1.2.3:999", []string{"198.51.100.1"}, "198.51.100.1"},
		"a proxy alone":           {"10.1.2.3:999", nil, "10.1.2.3"},
		"one address":             {"192.0.2.7:1", []string{"198.51.100.1"}, "198.51.100.1"},
		"beside it":               {"192.0.2.8:1", []string{"198.51.100.1"}, "192.0.2.8"},
		"the last is believed":    {"10.1.2.3:999", []string{"1.1.1.1, 198.51.100.1"}, "198.51.100.1"},
		"in two lines":            {"10.1.2.3:999", []string{"1.1.1.1", "198.51.100.1"}, "198.51.100.1"},
		"two proxies":             {"10.1.2.3:999", []string{"1.1.1.1, 198.51.100.1,10.9.9.9"}, "198.51.100.1"},
		"only proxies":            {"10.1.2.3:999", []string{"10.9.9.8,10.9.9.9"}, "10.9.9.8"},
		"what is none ends it":    {"10.1.2.3:999", []string{"198.51.100.1, unknown, 10.9.9.9"}, "10.9.9.9"},
		"an empty one":            {"10.1.2.3:999", []string{"198.51.100.1,"}, "10.1.2.3"},
		"with a port":             {"10.1.2.3:999", []string{"198.51.100.1:4711"}, "198.51.100.1"},
		"IPv6":                    {"[fd00::1]:999", []string{"2001:db8::1"}, "2001:db8::1"},
		"IPv6 with a port":        {"[fd00::1]:999", []string{"[2001:db8::1]:4711"}, "2001:db8::1"},
		"IPv6 in brackets":        {"[fd00::1]:999", []string{"[2001:db8::1]"}, "2001:db8::1"},
		"IPv4 in IPv6":            {"[::ffff:10.0.0.1]:999", []string{"::ffff:198.51.100.1"}, "198.51.100.1"},
		"a zone is not told":      {"[fe80::1%eth0]:999", nil, "fe80::1"},
		"a zone of a caller's":    {"10.1.2.3:999", []string{"fe80::1%" + "canary"}, "fe80::1"},
		"too long":                {"10.1.2.3:999", []string{"fe80::1%" + strings.Repeat("z", maxAddr)}, "10.1.2.3"},
		"a connection without it": {"pipe", []string{"198.51.100.1"}, "invalid IP"},
	} {
		got := remoteOf(&http.Request{RemoteAddr: c.from, Header: http.Header{"X-Forwarded-For": c.xff}}, proxies)
		if got.String() != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
	}
}
