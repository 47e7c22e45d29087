package e2e

import (
	"bufio"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"io"
	"math/big"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/fakeprovider"
	"github.com/iop-fabric/iop/internal/ioptest"
	"github.com/iop-fabric/iop/internal/up"
)

// A silent provider's stream is kept alive through the whole fabric, and what the
// provider says then still reaches the caller.
//
// Contract: E8 E6 T4
func TestASilentProvidersStreamIsKeptAlive(t *testing.T) {
	f := ioptest.Start(t, ioptest.Options{Edge: func(e *configs.Edge) { e.KeepAlive.Interval = time.Second }})
	for name, c := range map[string]struct {
		answer []fakeprovider.Step
		want   string
	}{
		"a stream": {fakeprovider.SSE("data: {}\n\n", "data: [DONE]\n\n"), "data: {}\n\ndata: [DONE]\n\n"},
		"an error": {
			fakeprovider.JSON(429, `{"error":{"message":"too busy"}}`, "Retry-After: 7"),
			`data: {"error":{"message":"the provider answered 429: too busy","type":"server_error","param":null,"code":"provider_error"}}` + "\n\n",
		},
	} {
		seen := make(chan struct{})
		f.Provider.Next(append([]fakeprovider.Step{fakeprovider.Wait(seen)}, c.answer...)...)
		resp, err := f.Client.Do(f.Request(t.Context(), http.MethodPost, "/v1/chat/completions", `{"model":"`+ioptest.Model+`","stream":true}`))
		if err != nil {
			t.Fatal(err)
		}
		r := bufio.NewReader(resp.Body)
		line, err := r.ReadString('\n')
		if err != nil || line != ": keep-alive\n" || resp.StatusCode != 200 {
			t.Fatalf("%s: %d %q %v", name, resp.StatusCode, line, err)
		}
		close(seen)
		rest, err := io.ReadAll(r)
		resp.Body.Close()
		if got := strings.TrimLeft(strings.ReplaceAll(string(rest), ": keep-alive\n\n", ""), "\n"); err != nil || got != c.want {
			t.Errorf("%s: %q %v", name, got, err)
		}
	}
}

// Contract: E9 E11
func TestCallersOverTLSFromAPage(t *testing.T) {
	files := callersPair(t)
	const page = "https://chat.example"
	f := ioptest.Start(t, ioptest.Options{NoWait: true, Edge: func(e *configs.Edge) {
		e.TLS, e.CORS.AllowedOrigins, e.TrustedProxies, e.AnswerHeaders = files, []string{page}, []string{"127.0.0.1"}, true
	}})
	f.WaitNode(up.DefaultNode)
	if !strings.HasPrefix(f.Info.BaseURL, "https://") {
		t.Errorf("the base URL that is told is %s", f.Info.BaseURL)
	}
	f.Provider.Next(fakeprovider.JSON(200, `{"ok":true}`, "Access-Control-Allow-Origin: *")...)
	transport := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, ForceAttemptHTTP2: true}
	defer transport.CloseIdleConnections()
	req := f.Request(t.Context(), http.MethodPost, "/v1/chat/completions", `{"model":"`+ioptest.Model+`"}`)
	req.Header.Set("Origin", page)
	req.Header.Set("X-Forwarded-For", "203.0.113.9")
	resp, err := (&http.Client{Transport: transport}).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	h := resp.Header
	if err != nil || resp.StatusCode != 200 || resp.ProtoMajor != 2 || string(b) != `{"ok":true}` || h.Get("Access-Control-Allow-Origin") != page || h.Get("X-Iop-Node") != up.DefaultNode {
		t.Errorf("%s %d %q %v %v", resp.Proto, resp.StatusCode, b, h, err)
	}
	f.Log.AwaitEvent(t, "edge.request", "remote=203.0.113.9")
}

// callersPair makes a certificate for the callers' listener.
func callersPair(t *testing.T) configs.KeyPair {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	files := configs.KeyPair{Certificate: filepath.Join(dir, "callers.pem"), Key: filepath.Join(dir, "callers.key")}
	for name, block := range map[string]*pem.Block{files.Certificate: {Type: "CERTIFICATE", Bytes: der}, files.Key: {Type: "PRIVATE KEY", Bytes: keyDER}} {
		if err := os.WriteFile(name, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return files
}
