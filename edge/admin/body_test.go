package admin

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// pipes is a listener of connections in memory, so that time can be made to pass.
type pipes chan net.Conn

func (p pipes) Accept() (net.Conn, error) {
	if c, ok := <-p; ok {
		return c, nil
	}
	return nil, http.ErrServerClosed
}
func (p pipes) Close() error   { return nil }
func (p pipes) Addr() net.Addr { return &net.TCPAddr{} }

// A body that does not come holds a connection for ten seconds and no longer, whoever
// asks; what comes whole is served, and may take its time.
//
// Contract: D4 Z3
func TestWholeBodies(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var got []byte
		s := &http.Server{Handler: WholeBodies(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			got, _ = io.ReadAll(r.Body)
			<-time.After(time.Minute)
			if r.Context().Err() != nil {
				t.Error("the answer was cut")
			}
		}))}
		l := make(pipes)
		go s.Serve(l)
		defer close(l)
		ask := func(request string) (status int, took time.Duration) {
			here, there := net.Pipe()
			l <- there
			began := time.Now()
			go io.WriteString(here, request)
			resp, err := http.ReadResponse(bufio.NewReader(here), nil)
			if err != nil {
				t.Fatal(err)
			}
			took = time.Since(began)
			if _, err := io.Copy(io.Discard, here); resp.StatusCode >= 400 && err != nil {
				t.Error(err)
			}
			if resp.StatusCode < 400 {
				here.Close()
			}
			return resp.StatusCode, took
		}
		head := "POST /api/v1/invitations HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
		if status, took := ask(head + "Content-Length: 1000\r\n\r\n{"); status != 408 || took != bodyWait {
			t.Errorf("%d after %v", status, took)
		}
		if status, _ := ask(head + "Content-Length: 2\r\n\r\n{}"); status != 200 || string(got) != "{}" {
			t.Errorf("%d %q", status, got)
		}
	})
	w := httptest.NewRecorder()
	WholeBodies(http.NotFoundHandler()).ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/", strings.NewReader(strings.Repeat("x", maxBody+1))))
	if w.Code != http.StatusRequestEntityTooLarge {
		t.Errorf("%d %s", w.Code, w.Body)
	}
}
