package httpapi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/iop-fabric/iop/edge/dispatch"
	"github.com/iop-fabric/iop/edge/pool"
	"github.com/iop-fabric/iop/internal/fakeprovider"
	"github.com/iop-fabric/iop/wire"
)

// wantAnthropic checks status and type, and that the answer is Anthropic's error
// object.
func (f *fixture) wantAnthropic(resp *http.Response, body string, status int, kind string) anthropicDetail {
	f.Helper()
	var e anthropicBody
	d := json.NewDecoder(strings.NewReader(body))
	d.DisallowUnknownFields()
	if err := d.Decode(&e); err != nil {
		f.Fatalf("not Anthropic's error object: %q", body)
	}
	id := resp.Header.Get("X-Request-Id")
	if resp.StatusCode != status || e.Type != "error" || e.Error.Type != kind || e.Error.Message == "" {
		f.Fatalf("got %d %s, want %d %s", resp.StatusCode, body, status, kind)
	}
	if id == "" || e.RequestID != id || resp.Header.Get("Request-Id") != id {
		f.Fatalf("request id %q, in the body %q, in request-id %q", id, e.RequestID, resp.Header.Get("Request-Id"))
	}
	if ct := resp.Header.Get("Content-Type"); ct != "application/json" {
		f.Fatalf("content-type %q", ct)
	}
	return e.Error
}

// Each endpoint goes to a provider that can do its operation, with the body but
// for the model and the query as they came.
//
// Contract: E1 E2 E9 T2
func TestEveryEndpointIsTunnelled(t *testing.T) {
	for path, operation := range map[string]string{
		"/v1/chat/completions":      "chat_completions",
		"/v1/completions":           "completions",
		"/v1/responses":             "responses",
		"/v1/embeddings":            "embeddings",
		"/v1/rerank":                "rerank",
		"/v1/messages":              "messages",
		"/v1/messages/count_tokens": "count_tokens",
	} {
		t.Run(operation, func(t *testing.T) {
			f := newFixture(t)
			resp, body := f.do("POST", path+"?beta=true&x=%2f+a", `{ "input":"hi", "model":"tiny","n":1e400}`)
			if resp.StatusCode != 200 || body != `{"ok":true}` {
				t.Fatalf("%d %s", resp.StatusCode, body)
			}
			a := f.runner.all()[0]
			if a.Operation != operation || a.Method != "POST" || a.Path != path || a.RawQuery != "beta=true&x=%2f+a" {
				t.Errorf("%s: %s %s ?%s", a.Operation, a.Method, a.Path, a.RawQuery)
			}
			if a.body != `{ "input":"hi", "model":"tiny:latest","n":1e400}` || a.BodySize != int64(len(a.body)) {
				t.Errorf("%s", a.body)
			}
			if w := f.pool.wants[0]; w.Operation != operation {
				t.Errorf("asked the pool for %q", w.Operation)
			}
			if l := f.logged(1); l["operation"] != operation || l["class"] != served {
				t.Errorf("logged %v", l)
			}
			for _, method := range []string{"GET", "HEAD", "PUT", "DELETE", "PATCH"} {
				if resp, _ := f.do(method, path, ""); resp.StatusCode != 405 || resp.Header.Get("Allow") != "POST, OPTIONS" {
					t.Errorf("%s: %d, Allow %q", method, resp.StatusCode, resp.Header.Get("Allow"))
				}
			}
			if resp, _ := f.do("OPTIONS", path, ""); resp.StatusCode != 204 || resp.Header.Get("Allow") != "POST, OPTIONS" {
				t.Errorf("OPTIONS: %d", resp.StatusCode)
			}
		})
	}
}

// Contract: E1 T2
func TestA52TheQueryDoesNotChangeTheRoute(t *testing.T) {
	f := newFixture(t)
	f.runner.answer = says(200, fields("Content-Type", "application/json"), `{"input_tokens":22}`)
	resp, body := f.do("POST", "/v1/messages/count_tokens?beta=true", plainChat, "Anthropic-Version", "2023-06-01", "X-Api-Key", goodKey, "Authorization", "")
	if resp.StatusCode != 200 || body != `{"input_tokens":22}` {
		t.Fatalf("%d %s", resp.StatusCode, body)
	}
	if a := f.runner.all()[0]; a.Operation != opCountTokens || a.RawQuery != "beta=true" || len(a.header("X-Api-Key")) != 0 || len(a.header("Anthropic-Version")) != 1 {
		t.Errorf("%+v", a)
	}
}

// Contract: E7 E12
func TestAnthropicErrors(t *testing.T) {
	f := newFixture(t)
	errs := map[error]struct {
		status int
		kind   string
		retry  bool
	}{
		pool.ErrUnknownModel: {404, "not_found_error", false},
		pool.ErrUnsupported:  {400, "invalid_request_error", false},
		pool.ErrQueueFull:    {429, "rate_limit_error", true},
		pool.ErrWaitExpired:  {503, "overloaded_error", true},
		pool.ErrNoProvider:   {503, "overloaded_error", true},
		pool.ErrStopping:     {503, "overloaded_error", true},
	}
	for _, path := range []string{"/v1/messages?beta=true", "/v1/messages/count_tokens"} {
		for err, want := range errs {
			if path == "/v1/messages/count_tokens" && errors.Is(err, pool.ErrUnsupported) {
				continue // is answered with an estimate
			}
			f.pool.acquire = refusing(err)
			resp, body := f.do("POST", path, plainChat)
			f.wantAnthropic(resp, body, want.status, want.kind)
			if got := resp.Header.Get("Retry-After") != ""; got != want.retry {
				t.Errorf("%v: Retry-After %q", err, resp.Header.Get("Retry-After"))
			}
		}
	}
	f.pool.acquire = nil
	for class, want := range map[wire.Class]struct {
		status int
		kind   string
	}{
		wire.Unreachable: {502, "api_error"}, wire.Stalled: {504, "timeout_error"}, wire.Deadline: {504, "timeout_error"},
		wire.Capacity: {503, "overloaded_error"}, wire.Internal: {500, "api_error"}, wire.Invalid: {400, "invalid_request_error"},
	} {
		f.runner.answer = ends(class)
		resp, body := f.do("POST", "/v1/messages", plainChat)
		f.wantAnthropic(resp, body, want.status, want.kind)
	}
	for _, c := range []struct {
		method, path, body string
		header             []string
		status             int
		kind               string
	}{
		{"POST", "/v1/messages", plainChat, []string{"Authorization", ""}, 401, "authentication_error"},
		{"POST", "/v1/messages", plainChat, []string{"Authorization", "", "X-Api-Key", "sk-wrong"}, 401, "authentication_error"},
		{"POST", "/v1/messages", plainChat, []string{"Authorization", "", "X-Api-Key", narrowKey}, 403, "permission_error"},
		{"POST", "/v1/messages", `{"model":`, nil, 400, "invalid_request_error"},
		{"POST", "/v1/messages", `{}`, nil, 400, "invalid_request_error"},
		{"POST", "/v1/messages", plainChat, []string{"Content-Encoding", "br"}, 415, "invalid_request_error"},
		{"GET", "/v1/messages", "", nil, 405, "invalid_request_error"},
		{"POST", "/v1/messages/batches", plainChat, nil, 404, "not_found_error"},
	} {
		resp, body := f.do(c.method, c.path, c.body, c.header...)
		f.wantAnthropic(resp, body, c.status, c.kind)
	}
	// What only begins like it is none of Anthropic's.
	resp, body := f.do("POST", "/v1/messages2", plainChat)
	f.wantError(resp, body, 404, "unknown_path")
}

// Contract: E7
func TestA46AnthropicsBaseHasNoV1(t *testing.T) {
	f := newFixture(t)
	resp, body := f.do("POST", "/v1/v1/messages?beta=true", plainChat)
	if e := f.wantError(resp, body, 404, "unknown_path"); !strings.Contains(e.Message, "Anthropic clients is "+f.server.URL+", and") {
		t.Error(e.Message)
	}
	resp, body = f.do("POST", "/messages", plainChat)
	if e := f.wantError(resp, body, 404, "unknown_path"); !strings.HasSuffix(e.Message, "is "+f.server.URL) {
		t.Error(e.Message)
	}
}

const (
	messageStart    = "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{}}\n\n"
	messageDelta    = "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"delta\":{\"type\":\"text_delta\",\"text\":\"say \\\"type\\\":\\\"message_stop\\\" event: message_stop\"}}\n\n"
	messageStop     = "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n"
	responseCreated = "event: response.created\ndata: {\"type\":\"response.created\",\"sequence_number\":0}\n\n"
	responseDelta   = "event: response.reasoning_text.delta\ndata: {\"type\":\"response.reasoning_text.delta\",\"delta\":\"response.completed\"}\n\n"
)

// A failure after the first byte ends in an event of the dialect, and without
// what would say that the answer is whole.
//
// Contract: E6
func TestEachDialectHasItsErrorEvent(t *testing.T) {
	const object = `"error":{"message":"the connection to the provider's node was lost","type":"server_error","param":null,"code":"node_lost"}`
	for path, c := range map[string]struct{ sent, event string }{
		"/v1/messages": {
			messageStart + messageDelta,
			`event: error` + "\n" + `data: {"type":"error","error":{"type":"api_error","message":"the connection to the provider's node was lost"},"request_id":"caller-1"}` + "\n\n",
		},
		"/v1/responses": {
			responseCreated + responseDelta,
			`event: error` + "\n" + `data: {"type":"error","code":"node_lost","message":"the connection to the provider's node was lost","param":null,` + object + `}` + "\n\n",
		},
		"/v1/completions": {
			`data: {"object":"text_completion"}` + "\n\n",
			`data: {` + object + `}` + "\n\n",
		},
	} {
		for name, between := range map[string]string{"between events": "", "inside a line": "\n\n"} {
			t.Run(path+" "+name, func(t *testing.T) {
				f := newFixture(t)
				sent := c.sent
				if between != "" {
					sent += "event: cont"
				}
				f.runner.answer = failing(wire.SessionEnded, eventStream, sent)
				resp, body := f.do("POST", path, streamChat, "X-Request-Id", "caller-1")
				if resp.StatusCode != 200 || body != sent+between+c.event {
					t.Errorf("%d %q", resp.StatusCode, body)
				}
				if l := f.logged(1); l["class"] != "session_ended" {
					t.Errorf("logged %v", l)
				}
			})
		}
	}
}

// A stream that ended without the event that makes it whole is a cut, in
// whatever pieces it came; one of another look is not judged.
//
// Contract: E6
func TestA09EveryDialectHasItsEnd(t *testing.T) {
	completed := func(status string) string {
		// The event holds the whole response: its name is far from the end.
		return "event: response." + status + "\ndata: {\"type\":\"response." + status + "\",\"response\":{\"output\":\"" + strings.Repeat("x", 4000) + "\"}}\n\n"
	}
	for _, c := range []struct {
		name, path, sent string
		whole            bool
	}{
		{"messages cut", "/v1/messages", messageStart + messageDelta, false},
		{"messages whole", "/v1/messages", messageStart + messageDelta + messageStop, true},
		{"messages whole, CRLF", "/v1/messages", strings.ReplaceAll(messageStart+messageStop, "\n", "\r\n"), true},
		{"messages whole, no event lines", "/v1/messages", "data: {\"type\": \"message_start\"}\n\ndata: {\"type\": \"message_stop\"}\n\n", true},
		{"messages cut, no event lines", "/v1/messages", "data: {\"type\": \"message_start\"}\n\n", false},
		{"messages whole, last line open", "/v1/messages", messageStart + "event: message_stop", true},
		{"messages whole, a comment after", "/v1/messages", messageStart + messageStop + ": bye\n\n", true},
		{"messages that ended in the provider's own error", "/v1/messages", messageStart + "event: error\ndata: {\"type\":\"error\"}\n\n", true},
		{"messages of another look", "/v1/messages", "data: hello\n\n", true},
		{"chat's end is none of messages'", "/v1/messages", messageStart + "data: [DONE]\n\n", false},
		{"responses cut", "/v1/responses", responseCreated + responseDelta, false},
		{"responses completed", "/v1/responses", responseCreated + completed("completed"), true},
		{"responses incomplete", "/v1/responses", responseCreated + completed("incomplete"), true},
		{"responses failed", "/v1/responses", responseCreated + completed("failed"), true},
		{"responses of another look", "/v1/responses", "data: {}\n\n", true},
		{"completions cut", "/v1/completions", "data: {\"object\":\"text_completion\"}\n\n", false},
		{"messages cut, CR", "/v1/messages", strings.ReplaceAll(messageStart+messageDelta, "\n", "\r"), false},
		{"messages whole, CR", "/v1/messages", strings.ReplaceAll(messageStart+messageStop, "\n", "\r"), true},
		{"messages cut, after a BOM", "/v1/messages", "\ufeff" + messageStart, false},
		{"chat cut, after a BOM", "/v1/chat/completions", "\ufeff" + chunk, false},
		{"chat whole, CR", "/v1/chat/completions", strings.ReplaceAll(chunk+done, "\n", "\r"), true},
		{"chat whole, many comments after", "/v1/chat/completions", chunk + done + strings.Repeat(": ping\n\n", 40), true},
		{"chat whole, no blank", "/v1/chat/completions", chunk + "data:[DONE]\n\n", true},
		{"chat whole, last line open", "/v1/chat/completions", chunk + "data: [DONE]", true},
		{"chat cut, its text says the end", "/v1/chat/completions", chunk + "data: {\"choices\":[{\"delta\":{\"content\":\"data: [DONE]\"}}]}\n\n", false},
		{"chat cut, a comment says the end", "/v1/chat/completions", chunk + ": data: [DONE]\n\n", false},
		{"completions whole", "/v1/completions", "data: {\"object\":\"text_completion\"}\n\ndata: [DONE]\n\n", true},
	} {
		for _, size := range []int{1, 7, 100_000} {
			t.Run(fmt.Sprintf("%s by %d", c.name, size), func(t *testing.T) {
				f := newFixture(t)
				var pieces []string
				for p := range slices.Chunk([]byte(c.sent), size) {
					pieces = append(pieces, string(p))
				}
				f.runner.answer = says(200, fields(eventStream...), pieces...)
				_, body, err := f.try("POST", c.path, streamChat)
				if body != c.sent || (err == nil) != c.whole || (err != nil && !errors.Is(err, io.ErrUnexpectedEOF)) {
					t.Errorf("%v %q", err, body)
				}
				want := served
				if !c.whole || strings.HasSuffix(c.name, "own error") || c.name == "responses failed" {
					want = "provider"
				}
				if l := f.logged(1); l["class"] != want {
					t.Errorf("logged %v", l)
				}
			})
		}
	}
}

// A stream of which nothing comes but its end tells its caller that it failed: in an
// event where its head is out, and else by its status.
//
// Contract: E4 E6 E12
func TestAStreamOfNothingIsAFailure(t *testing.T) {
	for path, event := range map[string]string{
		"/v1/chat/completions": `data: {"error":{`, "/v1/completions": `data: {"error":{`,
		"/v1/responses": "event: error\ndata: {", "/v1/messages": "event: error\ndata: {",
	} {
		f := newFixture(t)
		f.runner.answer = says(200, fields(eventStream...))
		resp, body := f.do("POST", path, streamChat)
		if resp.StatusCode != 200 || !strings.HasPrefix(body, event) || !strings.HasSuffix(body, "\n\n") {
			t.Errorf("%s: %d %q", path, resp.StatusCode, body)
		}
		if l := f.logged(1); l["class"] != "provider" {
			t.Errorf("%s: logged %v", path, l)
		}
	}
	f := newFixture(t)
	f.runner.answer = says(200, fields("Content-Type", "text/event-stream", "Content-Length", "0", "X-Own", "a"))
	resp, body := f.chat(streamChat)
	if f.wantError(resp, body, 502, "provider_error"); resp.Header.Get("X-Own") != "" {
		t.Errorf("%v", resp.Header)
	}
	// Of an error the status says enough: it is the provider's answer.
	f.runner.answer = says(503, fields(eventStream...))
	if resp, body := f.chat(streamChat); resp.StatusCode != 503 || body != "" {
		t.Errorf("%d %q", resp.StatusCode, body)
	}
}

// What the real servers streamed is whole, and each beginning of it is not.
//
// Contract: E6
func TestRecordedStreamsAreJudgedRightly(t *testing.T) {
	dialects := map[string]dialect{
		"v1-chat-stream": openAI, "v1-chat-tool-stream": openAI, "v1-chat-stream-usage": openAI, "v1-completions-stream": openAI,
		"v1-responses-stream": responses, "v1-messages-stream": anthropic, "v1-messages-tool-stream": anthropic,
	}
	for _, server := range []string{"ollama", "llama-server"} {
		all, err := fakeprovider.Captures(server)
		if err != nil {
			t.Fatal(err)
		}
		seen := 0
		for _, c := range all {
			d, ok := dialects[c.Name]
			if !ok {
				continue
			}
			seen++
			chunks := c.Chunks()
			for n := 1; n <= len(chunks); n++ {
				w := newEventWatch(d)
				for _, p := range chunks[:n] {
					w.add([]byte(p))
				}
				// Behind the event that ends it a stream may say more.
				if whole := n == len(chunks); w.unfinished() == whole {
					t.Errorf("%s/%s: %d of %d events: unfinished %v", server, c.Name, n, len(chunks), !whole)
				}
			}
		}
		if seen < 6 {
			t.Errorf("%s: %d streams", server, seen)
		}
	}
}

// Contract: E1
func TestModelsInAnthropicsShape(t *testing.T) {
	f := newFixture(t)
	f.pool.models = []Model{{"a", 1700000000, "n1"}, {"ns/name:13b", 1700000001, "n2"}, {"small", 1700000002, "n1"}}
	get := func(path string) (string, int) {
		resp, body := f.do("GET", path, "", "Anthropic-Version", "2023-06-01", "Authorization", "", "X-Api-Key", goodKey)
		return body, resp.StatusCode
	}
	body, status := get("/v1/models?limit=1000")
	want := `{"data":[{"type":"model","id":"a","display_name":"a","created_at":"2023-11-14T22:13:20Z"},` +
		`{"type":"model","id":"ns/name:13b","display_name":"ns/name:13b","created_at":"2023-11-14T22:13:21Z"},` +
		`{"type":"model","id":"small","display_name":"small","created_at":"2023-11-14T22:13:22Z"}],` +
		`"has_more":false,"first_id":"a","last_id":"small"}` + "\n"
	if status != 200 || body != want {
		t.Errorf("%d %s", status, body)
	}
	if body, status := get("/v1/models/ns/name:13b"); status != 200 || body != `{"type":"model","id":"ns/name:13b","display_name":"ns/name:13b","created_at":"2023-11-14T22:13:21Z"}`+"\n" {
		t.Errorf("%d %s", status, body)
	}
	for query, c := range map[string]struct {
		ids  string
		more bool
	}{
		"": {"a ns/name:13b small", false}, "?limit=2": {"a ns/name:13b", true}, "?limit=2&after_id=ns%2Fname:13b": {"small", false},
		"?after_id=small": {"", false}, "?limit=1&before_id=small": {"ns/name:13b", true}, "?before_id=a": {"", false}, "?after_id=gone&limit=1": {"a", true},
	} {
		var list anthropicList
		body, status := get("/v1/models" + query)
		if err := json.Unmarshal([]byte(body), &list); err != nil || status != 200 {
			t.Fatalf("%s: %d %s", query, status, body)
		}
		var ids []string
		for _, m := range list.Data {
			ids = append(ids, m.ID)
		}
		if got := strings.Join(ids, " "); got != c.ids || list.HasMore != c.more {
			t.Errorf("%s: %q, more %v", query, got, list.HasMore)
		}
	}
	for _, bad := range []string{"0", "1001", "x", "-1"} {
		if body, status := get("/v1/models?limit=" + bad); status != 400 || !strings.Contains(body, "limit") {
			t.Errorf("limit %s: %d %s", bad, status, body)
		}
	}
	f.pool.models = nil
	if body, _ := get("/v1/models"); body != `{"data":[],"has_more":false,"first_id":null,"last_id":null}`+"\n" {
		t.Error(body)
	}
}

// A name that a call may use without its tag is found without it too.
//
// Contract: E1
func TestA44AModelIsFoundAsACallWouldName(t *testing.T) {
	f := newFixture(t)
	f.pool.models = []Model{{"qwen3:latest", 1, "x"}, {"other:8b", 1, "x"}}
	if resp, body := f.do("GET", "/v1/models/qwen3", ""); resp.StatusCode != 200 || !strings.Contains(body, `"qwen3:latest"`) {
		t.Errorf("%d %s", resp.StatusCode, body)
	}
	resp, body := f.do("GET", "/v1/models/other", "")
	f.wantError(resp, body, 404, "model_not_found")
}

// refusing is a pool that grants nothing.
// What a provider tells in its stream passes as it is, ends it, and counts as the
// provider's failure.
// Contract: T4 E6 D5
func TestA24A26A27AProvidersErrorInItsStreamIsCounted(t *testing.T) {
	const done = "data: [DONE]\n\n"
	for name, c := range map[string]struct {
		path, stream string
		class        string
	}{
		"llama.cpp":            {"/v1/chat/completions", chunk + `data: {"error":{"code":400,"message":"the context is full"}}` + "\n\n", "provider"},
		"and then its end":     {"/v1/chat/completions", `data:{ "error" : {"code":400}}` + "\n\n" + done, "provider"},
		"A27":                  {"/v1/chat/completions", chunk + `error: {"code":400}` + "\n\n" + done, "provider"},
		"Ollama":               {"/v1/completions", `data: {"error":"out of memory"}` + "\n\n", "provider"},
		"vLLM":                 {"/v1/chat/completions", `data: {"object":"error","message":"x"}` + "\n\n" + done, "provider"},
		"without a line end":   {"/v1/chat/completions", chunk + `data: {"error":{}}`, "provider"},
		"responses, an error":  {"/v1/responses", "event: response.created\ndata: {}\n\nevent: error\ndata: {\"type\":\"error\",\"code\":\"x\"}\n\n", "provider"},
		"responses, failed":    {"/v1/responses", "data: {\"type\":\"response.created\"}\n\ndata: {\"type\":\"response.failed\"}\n\n", "provider"},
		"messages":             {"/v1/messages", "event: message_start\ndata: {}\n\nevent: error\ndata: {}\n\n", "provider"},
		"no error":             {"/v1/chat/completions", `data: {"error":null,"choices":[]}` + "\n\n" + done, "ok"},
		"an error in the text": {"/v1/chat/completions", `data: {"choices":[{"delta":{"content":"{\"error\":{"}}]}` + "\n\n" + done, "ok"},
		"a comment":            {"/v1/chat/completions", `: data: {"error":{}}` + "\n\n" + done, "ok"},
		"a word of the model":  {"/v1/messages", "event: message_start\ndata: {}\n\ndata: {\"text\":\"event: error\"}\n\nevent: message_stop\ndata: {}\n\n", "ok"},
		"incomplete":           {"/v1/responses", "event: response.created\ndata: {}\n\nevent: response.incomplete\ndata: {}\n\n", "ok"},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			f.runner.answer = says(200, fields(eventStream...), c.stream[:7], c.stream[7:])
			if _, body := f.do("POST", c.path, streamChat); body != c.stream {
				t.Errorf("%q", body)
			}
			if l := f.logged(1); l["class"] != c.class || l["status"] != 200.0 {
				t.Errorf("logged %v", l)
			}
			if n := f.attemptsOf(c.class); n != 1 {
				t.Errorf("counted %v", n)
			}
		})
	}
}

// Contract: E1 E3
func TestA52TokensAreEstimatedWhereNobodyCanCount(t *testing.T) {
	f := newFixture(t)
	f.pool.acquire = refusing(pool.ErrUnsupported)
	doc := plainChat + strings.Repeat(" ", 399)
	const path = "/v1/messages/count_tokens"
	want := fmt.Sprintf("{\"input_tokens\":%d}\n", (len(doc)+3)/4)
	resp, body := f.do("POST", path+"?beta=true", doc)
	if resp.StatusCode != 200 || body != want || resp.Header.Get("X-Iop-Estimate") != "true" || resp.Header.Get("Content-Type") != "application/json" {
		t.Errorf("%d %q %v, want %q", resp.StatusCode, body, resp.Header, want)
	}
	if l := f.logged(1); l["class"] != "ok" || l["model"] != "tiny" || l["attempts"] != nil {
		t.Errorf("logged %v", l)
	}
	// Nothing else is made up, and no other failure is.
	resp, body = f.do("POST", "/v1/messages", plainChat)
	f.wantAnthropic(resp, body, 400, "invalid_request_error")
	for err, status := range map[error]int{pool.ErrUnknownModel: 404, pool.ErrNoProvider: 503, pool.ErrQueueFull: 429, pool.ErrWaitExpired: 503} {
		f.pool.acquire = refusing(err)
		if resp, body := f.do("POST", path, plainChat); resp.StatusCode != status || resp.Header.Get("X-Iop-Estimate") != "" {
			t.Errorf("%v: %d %s", err, resp.StatusCode, body)
		}
	}
	resp, body = f.do("POST", path, plainChat, "Authorization", "Bearer "+narrowKey)
	f.wantAnthropic(resp, body, 403, "permission_error")
	// Who can count is asked, and cannot claim to be us.
	f.pool.acquire = nil
	f.runner.answer = says(200, fields("X-Iop-Estimate", "true"), `{"input_tokens":7}`)
	if resp, body := f.do("POST", path, plainChat); body != `{"input_tokens":7}` || resp.Header.Get("X-Iop-Estimate") != "" {
		t.Errorf("%q %v", body, resp.Header)
	}
}

func refusing(err error) func(context.Context, Want) (Grant, error) {
	return func(context.Context, Want) (Grant, error) { return Grant{}, err }
}

// ends is a runner whose attempts end before a byte.
func ends(class wire.Class) func(context.Context, dispatch.Attempt, dispatch.Writer) dispatch.Result {
	return func(context.Context, dispatch.Attempt, dispatch.Writer) dispatch.Result {
		return dispatch.Result{Err: wire.Errorf(class, "inner text")}
	}
}
