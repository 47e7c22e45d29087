package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"

	openai "github.com/sashabaranov/go-openai"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/fakeprovider"
	"github.com/iop-fabric/iop/internal/ioptest"
)

// behind starts a fabric in front of an imitation of a real server.
func behind(t *testing.T, server string) *ioptest.Fabric {
	t.Helper()
	p := fakeprovider.Imitate(t, server)
	return ioptest.Start(t, ioptest.Options{Adapters: []configs.Adapter{
		{Name: server, Type: configs.TypeOpenAICompat, BaseURL: p.URL, Capacity: 4},
	}})
}

// What Ollama and llama.cpp's server were recorded to answer comes through as
// it was recorded: status, type, and every byte of the body.
//
// Contract: E1 E2 T4 P1
func TestRecordedAnswersPassUnchanged(t *testing.T) {
	for _, server := range []string{"ollama", "llama-server"} {
		f := behind(t, server)
		captures, err := fakeprovider.Captures(server)
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		for _, c := range captures {
			var body struct{ Model string }
			if c.Method != http.MethodPost || c.Path != "/v1/chat/completions" || json.Unmarshal([]byte(c.Body), &body) != nil || body.Model != "tiny" {
				continue // what Edge answers itself is tested elsewhere
			}
			n++
			t.Run(server+"/"+c.Name, func(t *testing.T) {
				resp, err := f.Client.Do(f.Request(t.Context(), c.Method, c.Path, string(c.Body)))
				if err != nil {
					t.Fatal(err)
				}
				defer resp.Body.Close()
				got, err := io.ReadAll(resp.Body)
				status := strings.Fields(c.Head)[1]
				if err != nil || strconv.Itoa(resp.StatusCode) != status || string(got) != c.Answer {
					t.Fatalf("%v\ngot  %d %q\nwant %s %q", err, resp.StatusCode, got, status, c.Answer)
				}
			})
		}
		if n < 7 {
			t.Errorf("%s: only %d recorded chats were replayed", server, n)
		}
	}
}

// A public SDK works unchanged with only base URL and key set.
//
// Contract: E1 E7
func TestGoOpenAIClient(t *testing.T) {
	for _, server := range []string{"ollama", "llama-server"} {
		t.Run(server, func(t *testing.T) {
			f := behind(t, server)
			cfg := openai.DefaultConfig(f.Info.APIKey)
			cfg.BaseURL = f.Info.BaseURL
			cfg.HTTPClient = f.Client
			c := openai.NewClientWithConfig(cfg)
			ctx := t.Context()
			models, err := c.ListModels(ctx)
			if err != nil || len(models.Models) == 0 {
				t.Fatalf("models: %v %v", models, err)
			}
			model := models.Models[0].ID
			for _, m := range models.Models {
				if m.ID == "tiny" || strings.HasPrefix(m.ID, "tiny:") {
					model = m.ID
					break
				}
			}
			req := openai.ChatCompletionRequest{Model: model, Messages: []openai.ChatCompletionMessage{{Role: "user", Content: "hi"}}}
			resp, err := c.CreateChatCompletion(ctx, req)
			if err != nil || !strings.HasPrefix(resp.Choices[0].Message.Content, "Hello!") {
				t.Fatalf("chat: %+v %v", resp, err)
			}
			stream, err := c.CreateChatCompletionStream(ctx, req)
			if err != nil {
				t.Fatal(err)
			}
			var text strings.Builder
			for {
				chunk, err := stream.Recv()
				if errors.Is(err, io.EOF) {
					break
				}
				if err != nil {
					t.Fatalf("after %q: %v", text.String(), err)
				}
				if len(chunk.Choices) > 0 {
					text.WriteString(chunk.Choices[0].Delta.Content)
				}
			}
			stream.Close()
			if text.String() != resp.Choices[0].Message.Content {
				t.Errorf("streamed %q, whole %q", text.String(), resp.Choices[0].Message.Content)
			}
			req.Model = "no-such-model"
			_, err = c.CreateChatCompletion(ctx, req)
			var api *openai.APIError
			if !errors.As(err, &api) || api.HTTPStatusCode != 404 || api.Code != "model_not_found" {
				t.Errorf("unknown model: %v", err)
			}
			cfg.HTTPClient = f.Client
			wrong := openai.DefaultConfig("sk-wrong")
			wrong.BaseURL, wrong.HTTPClient = cfg.BaseURL, f.Client
			_, err = openai.NewClientWithConfig(wrong).ListModels(ctx)
			if !errors.As(err, &api) || api.HTTPStatusCode != 401 {
				t.Errorf("wrong key: %v", err)
			}
		})
	}
}

// The demo model serves a machine without a model server, says that it is a
// demo, and leaves when a real provider appears (D2).
//
// Contract: D2 P1
func TestDemoLeavesWhenARealProviderAppears(t *testing.T) {
	p := fakeprovider.New(t)
	up := make(chan struct{})
	p.Handle(func(r *fakeprovider.Request) []fakeprovider.Step {
		select {
		case <-up:
			return fakeprovider.JSON(200, `{"object":"list","data":[{"id":"real/model:7b"}]}`)
		default:
			return fakeprovider.JSON(503, `{}`)
		}
	})
	f := ioptest.Start(t, ioptest.Options{Adapters: []configs.Adapter{
		{Name: "local", Type: configs.TypeOpenAICompat, BaseURL: p.URL},
		{Name: "demo", Type: configs.TypeDemo, Fallback: true},
	}})
	if got := names(t, f); got != "demo" {
		t.Fatalf("models %q, want the demo alone", got)
	}
	_, answer := f.Do(f.Request(t.Context(), http.MethodPost, "/v1/chat/completions", strings.Replace(ioptest.Chat(false), `"m"`, `"demo"`, 1)))
	if !strings.Contains(strings.ToLower(answer), "demo") {
		t.Errorf("the demo does not say that it is one: %s", answer)
	}
	close(up)
	f.Log.AwaitEvent(t, "models.changed", "real/model:7b")
	if got := names(t, f); got != "real/model:7b" {
		t.Fatalf("models %q, want the real one alone", got)
	}
	p.Close()
	f.Log.Await(t, func(string) bool { return strings.Count(f.Log.String(), "models=[demo]") >= 2 })
}

func names(t *testing.T, f *ioptest.Fabric) string {
	t.Helper()
	resp, body := f.Do(f.Request(t.Context(), http.MethodGet, "/v1/models", ""))
	var list struct {
		Data []struct{ ID string }
	}
	if err := json.Unmarshal([]byte(body), &list); err != nil || resp.StatusCode != 200 {
		t.Fatalf("%d %s", resp.StatusCode, body)
	}
	var ids []string
	for _, m := range list.Data {
		ids = append(ids, m.ID)
	}
	return strings.Join(ids, " ")
}

// Whatever a caller sends wrong ends in the right status and the OpenAI shape,
// and the next caller is served.
//
// Contract: E7 E12 Z3
func TestBadRequests(t *testing.T) {
	f := ioptest.Start(t, ioptest.Options{Edge: func(e *configs.Edge) { e.Limits.Body = 1 << 20 }})
	chat := "/v1/chat/completions"
	for _, c := range []struct {
		name, method, path, body string
		status                   int
		edit                     func(*http.Request)
	}{
		{"no key", "POST", chat, ioptest.Chat(false), 401, func(r *http.Request) { r.Header.Del("Authorization") }},
		{"wrong key", "POST", chat, ioptest.Chat(false), 401, func(r *http.Request) { r.Header.Set("Authorization", "Bearer sk-nope") }},
		{"no JSON", "POST", chat, "hello", 400, nil},
		{"half JSON", "POST", chat, `{"model":"m"`, 400, nil},
		{"something behind it", "POST", chat, `{"model":"m"} x`, 400, nil},
		{"an array", "POST", chat, `["model"]`, 400, nil},
		{"no model", "POST", chat, `{"messages":[]}`, 400, nil},
		{"model twice", "POST", chat, `{"model":"m","model":"m"}`, 400, nil},
		{"model a number", "POST", chat, `{"model":7}`, 400, nil},
		{"unknown model", "POST", chat, `{"model":"nope"}`, 404, nil},
		{"too large", "POST", chat, `{"model":"m","x":"` + strings.Repeat("y", 1<<20) + `"}`, 413, nil},
		{"unknown path", "POST", "/v1/nothing", `{}`, 404, nil},
		{"doubled /v1", "POST", "/v1/v1/chat/completions", ioptest.Chat(false), 404, nil},
		{"wrong method", "GET", chat, "", 405, nil},
		{"a model that is not there", "GET", "/v1/models/none", "", 404, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			req := f.Request(context.Background(), c.method, c.path, c.body)
			if c.edit != nil {
				c.edit(req)
			}
			resp, body := f.Do(req)
			var e struct {
				Error *struct {
					Message, Type string
					Code          any
				}
			}
			if resp.StatusCode != c.status {
				t.Fatalf("got %d %s, want %d", resp.StatusCode, body, c.status)
			}
			if err := json.NewDecoder(bytes.NewReader([]byte(body))).Decode(&e); err != nil || e.Error == nil || e.Error.Message == "" || e.Error.Type == "" {
				t.Errorf("no OpenAI error: %s", body)
			}
			if resp.Header.Get("X-Request-Id") == "" {
				t.Error("no x-request-id")
			}
		})
	}
	if n := f.Provider.Executions(); n != 0 {
		t.Errorf("%d of them reached the provider", n)
	}
	if resp, _ := f.Do(f.Request(t.Context(), "POST", chat, ioptest.Chat(false))); resp.StatusCode != 200 {
		t.Error("the next caller is not served")
	}
}
