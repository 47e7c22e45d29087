package httpapi

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"syscall"
	"testing"
	"time"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/edge/dispatch"
	"github.com/iop-fabric/iop/wire"
)

// An HTTP/1.0 caller learns from the close alone that an answer without a length is
// whole. So one that was cut is reset, also through TLS, which would say goodbye.
//
// Contract: E6 T3
func TestAnOldCallerCanTellACutFromAnEnd(t *testing.T) {
	const half = `{"half":`
	files := pairIn(t.TempDir())
	writePair(t, files, 1)
	for _, c := range []struct {
		name, version, length string
		tls, cut              bool
		want                  error
	}{
		{"cut", "1.0", "", false, true, syscall.ECONNRESET},
		{"cut through TLS", "1.0", "", true, true, syscall.ECONNRESET},
		{"whole", "1.0", "", false, false, nil},
		{"whole through TLS", "1.0", "", true, false, nil},
		{"cut, with a length that tells it", "1.0", "100", false, true, nil},
		{"cut in chunks", "1.1", "", false, true, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			runner := &fakeRunner{answer: func(_ context.Context, _ dispatch.Attempt, w dispatch.Writer) dispatch.Result {
				header := fields("Content-Type", "application/json")
				if c.length != "" {
					header = append(header, fields("Content-Length", c.length)...)
				}
				res := dispatch.Result{Acked: true, Started: true, Status: 200}
				if err := errors.Join(w.Start(200, header), w.Body([]byte(half)), w.Flush()); err != nil {
					t.Error(err)
				}
				if c.cut {
					res.Err = wire.Errorf(wire.Provider, "the provider broke off")
				}
				return res
			}}
			edge := configs.Edge{}
			if c.tls {
				edge.TLS = files
			}
			cfg, err := ConfigOf(&edge, []Key{{Name: "alice", Digest: DigestOf(goodKey)}})
			if err != nil {
				t.Fatal(err)
			}
			api := New(cfg, Deps{Pool: &fakePool{}, Runner: runner})
			server := api.Server(api.Handler())
			server.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelWarn)
			tcp, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			serve := server.Serve
			if c.tls {
				serve = func(l net.Listener) error { return server.ServeTLS(l, "", "") }
			}
			served := make(chan error, 1)
			go func() { served <- serve(Listener(tcp, 1)) }()
			t.Cleanup(func() {
				server.Close()
				if err := <-served; !errors.Is(err, http.ErrServerClosed) {
					t.Error(err)
				}
			})
			for range 2 { // the second comes in once the first gave its place back
				conn, err := net.Dial("tcp", tcp.Addr().String())
				if err != nil {
					t.Fatal(err)
				}
				if err := conn.SetDeadline(time.Now().Add(hang)); err != nil {
					t.Fatal(err)
				}
				if c.tls {
					conn = tls.Client(conn, &tls.Config{InsecureSkipVerify: true})
				}
				fmt.Fprintf(conn, "POST /v1/chat/completions HTTP/%s\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer %s\r\nContent-Length: %d\r\n\r\n%s",
					c.version, goodKey, len(plainChat), plainChat)
				got, err := io.ReadAll(conn)
				conn.Close()
				if !bytes.Contains(got, []byte(half)) || !errors.Is(err, c.want) {
					t.Fatalf("%q, %v, want %v", got, err, c.want)
				}
				if _, body, _ := bytes.Cut(got, []byte("\r\n\r\n")); c.version == "1.1" && bytes.HasSuffix(body, []byte("0\r\n\r\n")) {
					t.Fatalf("the chunks have an end: %q", body)
				}
			}
		})
	}
}

// Contract: Z3
func TestAListenerThatIsFullEnds(t *testing.T) {
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := Listener(tcp, 1)
	conn, err := net.Dial("tcp", tcp.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	first, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer first.Close()
	second := make(chan error, 1)
	go func() {
		_, err := l.Accept()
		second <- err
	}()
	l.Close()
	if err := await(t, second, "the end of Accept"); !errors.Is(err, net.ErrClosed) {
		t.Error(err)
	}
}
