// Package e2e tests the fabric as its users see it: real broker, Edge and Node
// over TLS on loopback, a provider that does what real ones do at their worst,
// and callers that are plain HTTP clients.
package e2e

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/iop-fabric/iop/internal/fakeprovider"
	"github.com/iop-fabric/iop/internal/ioptest"
)

func TestMain(m *testing.M) {
	if ioptest.IsNodeProcess() {
		os.Exit(ioptest.NodeProcess())
	}
	goleak.VerifyTestMain(m, ioptest.IgnoredGoroutines()...)
}

// chunkEvent is one event of a stream.
func chunkEvent(i int) string {
	return fmt.Sprintf("data: {\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"t%d\"},\"finish_reason\":null}]}\n\n", i)
}

const doneEvent = "data: [DONE]\n\n"

// open starts a streamed call and returns the answer once its head is here.
func open(t *testing.T, f *ioptest.Fabric, ctx context.Context, body string) *http.Response {
	t.Helper()
	resp, err := f.Client.Do(f.Request(ctx, http.MethodPost, "/v1/chat/completions", body))
	if err != nil {
		t.Fatalf("%v\n%s", err, f.Log)
	}
	t.Cleanup(func() { resp.Body.Close() })
	return resp
}

// succeeds makes a call that must succeed, from any goroutine, and reads its answer
// to the end.
func succeeds(ctx context.Context, f *ioptest.Fabric, body string) error {
	resp, err := f.Client.Do(f.Request(ctx, http.MethodPost, "/v1/chat/completions", body))
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if _, err := io.Copy(io.Discard, resp.Body); err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("status %d", resp.StatusCode)
	}
	return nil
}

// readUntil reads until what was read ends with want.
func readUntil(t testing.TB, r io.Reader, want string) string {
	t.Helper()
	br := bufio.NewReaderSize(r, 1)
	var got strings.Builder
	for !strings.HasSuffix(got.String(), want) {
		b, err := br.ReadByte()
		if err != nil {
			t.Fatalf("after %q: %v", got.String(), err)
		}
		got.WriteByte(b)
	}
	return got.String()
}

func received(t *testing.T, f *ioptest.Fabric) *fakeprovider.Request {
	t.Helper()
	ch := make(chan struct{})
	var r *fakeprovider.Request
	go func() {
		defer close(ch)
		r = <-f.Provider.Received()
	}()
	f.Wait(ch, "the provider to be called")
	return r
}
