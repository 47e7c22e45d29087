package e2e

import (
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/fakeprovider"
	"github.com/iop-fabric/iop/internal/ioptest"
)

// A provider that hangs ends in one clear error, its connection is closed, and
// the one place serves the next call.
//
// Contract: W1 W2 E12
func TestProviderThatHangs(t *testing.T) {
	f := ioptest.Start(t, ioptest.Options{Edge: func(e *configs.Edge) {
		e.Nodes[0].Adapters[0].Capacity = 1
		e.Nodes[0].Providers[0].StallTimeout = 300 * time.Millisecond
	}})
	for _, c := range []struct {
		name   string
		steps  []fakeprovider.Step
		status int
		sent   string // what the caller got before the error
	}{
		{"before the head", nil, 504, ""},
		{"after the head of a small answer", []fakeprovider.Step{fakeprovider.Head(200, "Content-Type: application/json", "Content-Length: 9")}, 504, ""},
		{"after the head of a stream", []fakeprovider.Step{fakeprovider.SSEHead()}, 200, ""},
		{"after a chunk", []fakeprovider.Step{fakeprovider.SSEHead(), fakeprovider.Chunk(chunkEvent(1))}, 200, chunkEvent(1)},
	} {
		t.Run(c.name, func(t *testing.T) {
			f.Provider.Next(append(c.steps, fakeprovider.Hang())...)
			resp := open(t, f, t.Context(), ioptest.Chat(true))
			b, err := io.ReadAll(resp.Body)
			text := string(b)
			if err != nil || resp.StatusCode != c.status || !strings.HasPrefix(text, c.sent) || strings.Contains(text, "[DONE]") {
				t.Fatalf("%d %q %v", resp.StatusCode, text, err)
			}
			text = strings.TrimPrefix(text[len(c.sent):], "data: ")
			var e struct {
				Error struct{ Message, Code string }
			}
			if err := json.Unmarshal([]byte(strings.TrimSpace(text)), &e); err != nil || e.Error.Code != "provider_stalled" || e.Error.Message == "" {
				t.Fatalf("%q: %v", text, err)
			}
			r := received(t, f)
			f.Wait(r.Gone, "the provider's connection to be closed")
			f.Provider.Next(fakeprovider.JSON(200, `{"next":1}`)...)
			if resp, got := f.Do(f.Request(t.Context(), http.MethodPost, "/v1/chat/completions", ioptest.Chat(false))); resp.StatusCode != 200 || got != `{"next":1}` {
				t.Fatalf("the next call: %d %s", resp.StatusCode, got)
			}
			received(t, f)
		})
	}
}
