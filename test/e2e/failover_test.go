package e2e

import (
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/fakeprovider"
	"github.com/iop-fabric/iop/internal/ioptest"
)

// pair is a fabric whose model has a first choice, the provider of node "other", and
// a second, that of node "here". first is the address of the first one's server.
func pair(t *testing.T, first string, edit func(*configs.Edge)) *ioptest.Fabric {
	t.Helper()
	f := ioptest.Start(t, ioptest.Options{
		Nodes: []configs.EdgeNode{{
			Name:      "other",
			Adapters:  []configs.Adapter{{Name: "p", Type: configs.TypeOpenAICompat, BaseURL: first, Capacity: 8}},
			Providers: []configs.Provider{{ID: "m", Adapter: "p", Target: "first"}},
		}},
		Edge: func(e *configs.Edge) {
			g := &e.Models.Groups[0]
			g.Providers[0].Priority = 1
			g.Providers = append(g.Providers, configs.ProviderReference{Provider: "other/m"})
			if edit != nil {
				edit(e)
			}
		},
	})
	return f
}

func chat(t *testing.T, f *ioptest.Fabric) (int, string, http.Header) {
	t.Helper()
	resp, body := f.Do(f.Request(t.Context(), http.MethodPost, "/v1/chat/completions", ioptest.Chat(false)))
	return resp.StatusCode, body, resp.Header
}

// closedPort is an address where nobody listens.
func closedPort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return "http://" + l.Addr().String()
}

// The first choice cannot be reached: the second serves, its body names its own
// target, and the caller notices nothing.
//
// Contract: Q5 H6 E12 T5
func TestFailoverConnectionRefused(t *testing.T) {
	f := pair(t, closedPort(t), nil)
	f.StartNode("other")
	f.WaitNode("other")
	f.Provider.Next(fakeprovider.JSON(200, `{"served":"second"}`)...)
	if status, body, _ := chat(t, f); status != 200 || body != `{"served":"second"}` {
		t.Errorf("%d %s", status, body)
	}
	if r := received(t, f); !strings.Contains(string(r.Body), `"model":"m"`) {
		t.Errorf("the second attempt's body: %s", r.Body)
	}
	f.Log.AwaitEvent(t, "edge.request", "attempts=2", "provider=here/m", "class=ok")
}

// The Node of the first choice is lost before it answered: the second serves. Once a
// byte went to the caller there is no second attempt, but one error.
//
// Contract: Q5 H6 F3 E6 J4
func TestFailoverNodeLost(t *testing.T) {
	first := fakeprovider.New(t)
	f := pair(t, first.URL, nil)
	kill := f.SpawnNode("other")
	before := f.WaitNode("other")
	first.Next(fakeprovider.Hang())
	f.Provider.Next(fakeprovider.JSON(200, `{"served":"second"}`)...)
	got := call(t, f)
	<-first.Received()
	kill()
	if r := get(t, f, got); r.status != 200 || r.body != `{"served":"second"}` {
		t.Errorf("lost before the answer: %+v", r)
	}

	kill = f.SpawnNode("other")
	f.Log.AwaitSession(t, "other", before)
	first.Next(fakeprovider.SSEHead(), fakeprovider.Chunk(chunkEvent(1)), fakeprovider.Hang())
	resp := open(t, f, t.Context(), ioptest.Chat(true))
	readUntil(t, resp.Body, chunkEvent(1))
	executions := f.Provider.Executions()
	kill()
	rest, _ := io.ReadAll(resp.Body)
	if strings.Count(string(rest), `"error"`) != 1 || strings.Contains(string(rest), "[DONE]") || f.Provider.Executions() != executions {
		t.Errorf("lost in mid-stream: %q, %d executions more", rest, f.Provider.Executions()-executions)
	}
}

// A Node that stops takes nothing new: what comes is served elsewhere, what runs
// ends as it should, and nobody gets an error.
//
// Contract: D7 Q5 E12
func TestFailoverDraining(t *testing.T) {
	first := fakeprovider.New(t)
	f := pair(t, first.URL, nil)
	_, stop := f.StartNode("other")
	f.WaitNode("other")
	release := make(chan struct{})
	first.Next(fakeprovider.SSEHead(), fakeprovider.Chunk(chunkEvent(1)), fakeprovider.Wait(release), fakeprovider.Chunk(doneEvent), fakeprovider.LastChunk())
	resp := open(t, f, t.Context(), ioptest.Chat(true))
	readUntil(t, resp.Body, chunkEvent(1))
	<-first.Received()
	stopped := make(chan struct{})
	go func() { stop(); close(stopped) }()
	f.Log.AwaitEvent(t, "node.draining", "node=other", "on=true")
	for range 3 {
		f.Provider.Next(fakeprovider.JSON(200, `{"served":"second"}`)...)
		if status, body, _ := chat(t, f); status != 200 || body != `{"served":"second"}` {
			t.Errorf("while the first choice stops: %d %s", status, body)
		}
	}
	close(release)
	if rest, err := io.ReadAll(resp.Body); err != nil || string(rest) != doneEvent {
		t.Errorf("what ran: %q %v", rest, err)
	}
	f.Wait(stopped, "the node to stop")
}

// A provider's answer is the caller's, unless the operator lists its status: then
// another one is asked, and when that fares no better the caller gets the last
// provider's own words.
//
// Contract: Q5 E12 T4
func TestFailoverProviderStatus(t *testing.T) {
	first := fakeprovider.New(t)
	busy := fakeprovider.JSON(429, `{"error":"busy"}`, "Retry-After: 7")
	f := pair(t, first.URL, nil)
	f.StartNode("other")
	f.WaitNode("other")
	first.Next(busy...)
	if status, body, h := chat(t, f); status != 429 || body != `{"error":"busy"}` || h.Get("Retry-After") != "7" {
		t.Errorf("without retry_on: %d %s %v", status, body, h)
	}

	f = pair(t, first.URL, func(e *configs.Edge) { e.RetryOn = configs.Statuses{{First: 429, Last: 429}, {First: 500, Last: 599}} })
	f.StartNode("other")
	f.WaitNode("other")
	first.Next(busy...)
	f.Provider.Next(fakeprovider.JSON(200, `{"served":"second"}`)...)
	if status, body, _ := chat(t, f); status != 200 || body != `{"served":"second"}` {
		t.Errorf("with it: %d %s", status, body)
	}
	first.Next(busy...)
	f.Provider.Next(fakeprovider.JSON(503, `{"error":"down"}`, "X-Own: yes")...)
	if status, body, h := chat(t, f); status != 503 || body != `{"error":"down"}` || h.Get("X-Own") != "yes" {
		t.Errorf("where the second fares no better: %d %s %v", status, body, h)
	}
	first.Next(fakeprovider.JSON(400, `{"error":"yours"}`)...)
	if status, body, _ := chat(t, f); status != 400 || body != `{"error":"yours"}` {
		t.Errorf("a status that is not listed: %d %s", status, body)
	}
}
