package e2e

import (
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/fakeprovider"
	"github.com/iop-fabric/iop/internal/ioptest"
)

// The Node's connection is lost in mid-stream: the caller gets one error, the
// provider's call is ended, the Node comes back under a higher generation and
// the next call is served.
//
// Contract: F1 F2 F3 F4 S2 W8 B7 J4
func TestNodeConnectionLost(t *testing.T) {
	f := ioptest.Start(t, ioptest.Options{Proxy: true})
	before := f.WaitNode("here")
	f.Provider.Next(fakeprovider.SSEHead(), fakeprovider.Chunk(chunkEvent(1)), fakeprovider.Hang())
	resp := open(t, f, t.Context(), ioptest.Chat(true))
	readUntil(t, resp.Body, chunkEvent(1))
	r := received(t, f)
	f.Proxy.Cut()
	rest, err := io.ReadAll(resp.Body)
	if !strings.Contains(string(rest), `"error"`) || strings.Contains(string(rest), "[DONE]") {
		t.Fatalf("after the loss: %q %v", rest, err)
	}
	f.Wait(r.Gone, "the provider's call to be ended")
	f.Log.AwaitEvent(t, "node.disconnected", "node=here")
	f.Log.AwaitSession(t, "here", before)
	f.Provider.Next(fakeprovider.JSON(200, `{"back":1}`)...)
	if resp, got := f.Do(f.Request(t.Context(), http.MethodPost, "/v1/chat/completions", ioptest.Chat(false))); resp.StatusCode != 200 || got != `{"back":1}` {
		t.Fatalf("after it came back: %d %s", resp.StatusCode, got)
	}
}

// A waiter that loses its last candidate keeps its place and is served when the
// Node is back.
//
// Contract: P9 F4 Q4
func TestWaiterSurvivesLossOfItsNode(t *testing.T) {
	f := ioptest.Start(t, ioptest.Options{Proxy: true})
	f.WaitNode("here")
	f.Proxy.Refuse(true)
	f.Proxy.Cut()
	f.Log.AwaitEvent(t, "node.disconnected", "node=here")
	f.Provider.Next(fakeprovider.JSON(200, `{"waited":1}`)...)
	got := make(chan string, 1)
	go func() {
		resp, err := f.Client.Do(f.Request(t.Context(), http.MethodPost, "/v1/chat/completions", ioptest.Chat(false)))
		if err != nil {
			got <- err.Error()
			return
		}
		defer resp.Body.Close()
		b, _ := io.ReadAll(resp.Body)
		got <- string(b)
	}()
	f.Proxy.Refuse(false)
	select {
	case s := <-got:
		if s != `{"waited":1}` {
			t.Fatal(s)
		}
	case <-time.After(ioptest.Hang):
		t.Fatalf("it waits for ever\n%s", f.Log)
	}
}

// A link that hangs (nothing passes, nothing closes) is noticed by missed
// heartbeats on both sides, and the Node comes back by itself.
//
// Contract: F2 F9 B7 B12
func TestHungLink(t *testing.T) {
	f := ioptest.Start(t, ioptest.Options{
		Proxy: true,
		Edge: func(e *configs.Edge) {
			e.HeartbeatInterval, e.HeartbeatBound = 100*time.Millisecond, time.Second
		},
		Broker: func(b *configs.Broker) { b.HeartbeatBound = time.Second },
	})
	before := f.WaitNode("here")
	f.Provider.Next(fakeprovider.SSEHead(), fakeprovider.Chunk(chunkEvent(1)), fakeprovider.Hang())
	resp := open(t, f, t.Context(), ioptest.Chat(true))
	readUntil(t, resp.Body, chunkEvent(1))
	f.Proxy.Hold()
	rest, _ := io.ReadAll(resp.Body)
	if !strings.Contains(string(rest), `"error"`) {
		t.Fatalf("the stream ended as %q", rest)
	}
	f.Proxy.Release()
	f.Log.AwaitSession(t, "here", before)
}

// A Node process is killed: its streams end with one terminal each, at once.
//
// Contract: B7 F3 J4
func TestKilledNodeProcess(t *testing.T) {
	f := otherNode(t)
	kill := f.SpawnNode("other")
	f.WaitNode("other")
	const n = 5
	var bodies []io.Reader
	for range n {
		f.Provider.Next(fakeprovider.SSEHead(), fakeprovider.Chunk(chunkEvent(1)), fakeprovider.Hang())
		resp := open(t, f, t.Context(), ioptest.Chat(true))
		readUntil(t, resp.Body, chunkEvent(1))
		bodies = append(bodies, resp.Body)
	}
	killed := time.Now()
	kill()
	for _, b := range bodies {
		rest, _ := io.ReadAll(b)
		if strings.Count(string(rest), `"error"`) != 1 || strings.Contains(string(rest), "[DONE]") {
			t.Errorf("a stream of the killed node ended as %q", rest)
		}
	}
	t.Logf("%d streams ended %v after the kill", n, time.Since(killed))
}

// otherNode is a fabric whose model is served by node "other", a process of its
// own.
func otherNode(t testing.TB) *ioptest.Fabric {
	t.Helper()
	return ioptest.Start(t, ioptest.Options{
		Nodes: []configs.EdgeNode{{Name: "other"}},
		Edge: func(e *configs.Edge) {
			e.Nodes[1].Adapters = e.Nodes[0].Adapters
			e.Nodes[1].Providers = e.Nodes[0].Providers
			e.Nodes[0].Adapters, e.Nodes[0].Providers = nil, nil
			e.Models.Groups[0].Providers[0].Provider = "other/m"
		},
	})
}
