package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"

	fake "github.com/iop-fabric/iop/internal/fakeprovider"
)

// words are what the model says, one token each.
var words = []string{"Hello", "!", " I", " am", " a", " tiny", " model", "."}

const arguments = `{"city": "Paris"}`

// call is a request to vLLM, as far as it matters.
type call struct {
	Model         string `json:"model"`
	Stream        bool   `json:"stream"`
	StreamOptions struct {
		IncludeUsage bool `json:"include_usage"`
	} `json:"stream_options"`
	Tools []struct {
		Name     string `json:"name"`
		Function struct {
			Name string `json:"name"`
		} `json:"function"`
	} `json:"tools"`
	tool string // what to call, or nothing
}

// vllm is vLLM's OpenAI server, after its source: FastAPI on uvicorn.
func vllm(r fake.Request) answer {
	if r.Path == "/v1/models" {
		return reply(200, obj{"object": "list", "data": []obj{{
			"id": "tiny", "object": "model", "created": 1795962824, "owned_by": "vllm", "root": "tiny", "parent": nil,
			"max_model_len": 4096, "permission": []obj{{
				"id": "modelperm-97c5b6f6a2d24a3b", "object": "model_permission", "created": 1795962824, "allow_create_engine": false,
				"allow_sampling": true, "allow_logprobs": true, "allow_search_indices": false, "allow_view": true,
				"allow_fine_tuning": false, "organization": "*", "group": nil, "is_blocking": false,
			}},
		}}})
	}
	serve, ok := map[string]func(call) answer{
		"/v1/chat/completions": chat, "/v1/completions": completions, "/v1/embeddings": embeddings,
		"/v1/responses": responses, "/v1/messages": messages, "/v1/messages/count_tokens": countTokens,
	}[r.Path]
	if !ok {
		return reply(404, obj{"error": obj{"message": "Not Found", "type": "Not Found", "param": nil, "code": 404}})
	}
	var c call
	if err := json.Unmarshal(r.Body, &c); err != nil {
		return reply(400, obj{"error": obj{"message": "There was an error parsing the body", "type": "Bad Request", "param": nil, "code": 400}})
	}
	if c.Model != "tiny" {
		why := fmt.Sprintf("The model `%s` does not exist.", c.Model)
		if strings.HasPrefix(r.Path, "/v1/messages") {
			return reply(404, obj{"type": "error", "error": obj{"type": "NotFoundError", "message": why}})
		}
		return reply(404, obj{"error": obj{"message": why, "type": "NotFoundError", "param": "model", "code": 404}})
	}
	if len(c.Tools) > 0 && !hasToolResult(r.Body) {
		if c.tool = c.Tools[0].Function.Name; c.tool == "" {
			c.tool = c.Tools[0].Name
		}
	}
	return serve(c)
}

func reply(status int, v any) answer {
	body := text(v)
	return answer{body: body, head: fmt.Sprintf("HTTP/1.1 %d %s\r\ndate: Sun, 29 Nov 2026 14:33:44 GMT\r\nserver: uvicorn\r\n"+
		"content-length: %d\r\ncontent-type: application/json\r\n\r\n", status, http.StatusText(status), len(body))}
}

// stream is an event stream; of events with a type of their own, with their names.
func stream(named bool, events []obj) answer {
	a := answer{head: "HTTP/1.1 200 OK\r\ndate: Sun, 29 Nov 2026 14:33:44 GMT\r\nserver: uvicorn\r\n" +
		"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"}
	for _, e := range events {
		s := "data: " + text(e) + "\n\n"
		if named {
			s = fmt.Sprintf("event: %s\n%s", e["type"], s)
		}
		a.chunks = append(a.chunks, s)
	}
	if !named {
		a.chunks = append(a.chunks, "data: [DONE]\n\n")
	}
	return a
}

var said = strings.Join(words, "")

func usage() obj {
	return obj{"prompt_tokens": 11, "total_tokens": 11 + len(words), "completion_tokens": len(words)}
}

func chat(c call) answer {
	const id = "chatcmpl-9a1c3ef0b7e84e2d8f5a6b7c8d9e0f12"
	if !c.Stream {
		message, reason := obj{"role": "assistant", "content": said}, "stop"
		calls := []obj{}
		if c.tool != "" {
			message["content"], reason = nil, "tool_calls"
			calls = append(calls, obj{"id": "chatcmpl-tool-5f0c", "type": "function", "function": obj{"name": c.tool, "arguments": arguments}})
		}
		for _, k := range []string{"refusal", "annotations", "audio", "function_call", "reasoning"} {
			message[k] = nil
		}
		message["tool_calls"] = calls
		u := usage()
		u["prompt_tokens_details"] = nil
		return reply(200, obj{
			"id": id, "object": "chat.completion", "created": 1795962824, "model": c.Model,
			"choices":      []obj{{"index": 0, "message": message, "logprobs": nil, "finish_reason": reason, "stop_reason": nil, "token_ids": nil}},
			"service_tier": nil, "system_fingerprint": "vllm-0.19.0-1f3a9c2e", "usage": u,
			"prompt_logprobs": nil, "prompt_token_ids": nil, "kv_transfer_params": nil,
		})
	}
	var events []obj
	add := func(choices []obj, more obj) {
		e := obj{"id": id, "object": "chat.completion.chunk", "created": 1795962824, "model": c.Model, "choices": choices}
		for k, v := range more {
			e[k] = v
		}
		events = append(events, e)
	}
	delta := func(d obj) {
		add([]obj{{"index": 0, "delta": d, "logprobs": nil, "finish_reason": nil, "token_ids": nil}}, nil)
	}
	add([]obj{{"index": 0, "delta": obj{"role": "assistant", "content": ""}, "logprobs": nil, "finish_reason": nil}}, obj{"prompt_token_ids": nil})
	reason := "stop"
	if c.tool != "" {
		reason = "tool_calls"
		delta(obj{"tool_calls": []obj{{"id": "chatcmpl-tool-5f0c", "type": "function", "index": 0, "function": obj{"name": c.tool, "arguments": ""}}}})
		for _, piece := range strings.SplitAfter(arguments, " ") {
			delta(obj{"tool_calls": []obj{{"index": 0, "function": obj{"arguments": piece}}}})
		}
	} else {
		for _, w := range words {
			delta(obj{"content": w})
		}
	}
	add([]obj{{"index": 0, "delta": obj{"content": ""}, "logprobs": nil, "finish_reason": reason, "stop_reason": nil, "token_ids": nil}}, nil)
	if c.StreamOptions.IncludeUsage {
		add([]obj{}, obj{"usage": usage(), "system_fingerprint": "vllm-0.19.0-1f3a9c2e"})
	}
	return stream(false, events)
}

func completions(c call) answer {
	whole := func(text string, reason any, more obj) obj {
		e := obj{"id": "cmpl-4d1e", "object": "text_completion", "created": 1795962824, "model": c.Model, "choices": []obj{{
			"index": 0, "text": text, "logprobs": nil, "finish_reason": reason, "stop_reason": nil,
		}}}
		for k, v := range more {
			e[k] = v
		}
		return e
	}
	if !c.Stream {
		return reply(200, whole(said, "stop", obj{"service_tier": nil, "system_fingerprint": nil, "usage": usage(), "kv_transfer_params": nil}))
	}
	var events []obj
	for _, w := range words {
		events = append(events, whole(w, nil, nil))
	}
	return stream(false, append(events, whole("", "stop", nil)))
}

func embeddings(c call) answer {
	return reply(200, obj{
		"id": "embd-77aa", "object": "list", "created": 1795962824, "model": c.Model,
		"data":  []obj{{"index": 0, "object": "embedding", "embedding": []float64{0.5, -0.5, 0.25}}},
		"usage": obj{"prompt_tokens": 3, "total_tokens": 3, "completion_tokens": 0, "prompt_tokens_details": nil},
	})
}

func responses(c call) answer {
	const item = "msg_6c1d"
	part := func(text string) obj {
		return obj{"type": "output_text", "text": text, "annotations": []obj{}, "logprobs": nil}
	}
	message := func(status string, parts ...obj) obj {
		return obj{"id": item, "type": "message", "role": "assistant", "status": status, "content": append([]obj{}, parts...)}
	}
	response := func(status string, use any, output ...obj) obj {
		return obj{
			"id": "resp_2b8f", "object": "response", "created_at": 1795962824, "status": status, "model": c.Model, "output": append([]obj{}, output...),
			"incomplete_details": nil, "instructions": nil, "metadata": nil, "parallel_tool_calls": true, "temperature": 1.0, "tool_choice": "auto",
			"tools": []obj{}, "top_p": 1.0, "background": false, "max_output_tokens": 4085, "max_tool_calls": nil, "previous_response_id": nil,
			"prompt": nil, "reasoning": nil, "service_tier": "auto", "text": nil, "top_logprobs": nil, "truncation": "disabled", "usage": use, "user": nil,
		}
	}
	done := response("completed", obj{
		"input_tokens": 11, "input_tokens_details": obj{"cached_tokens": 0},
		"output_tokens": len(words), "output_tokens_details": obj{"reasoning_tokens": 0, "tool_output_tokens": 0}, "total_tokens": 11 + len(words),
	}, message("completed", part(said)))
	if !c.Stream {
		return reply(200, done)
	}
	var events []obj
	add := func(typ string, e obj) {
		e["type"], e["sequence_number"] = "response."+typ, len(events)
		events = append(events, e)
	}
	within := func(e obj) obj {
		e["item_id"], e["output_index"], e["content_index"] = item, 0, 0
		return e
	}
	add("created", obj{"response": response("in_progress", nil)})
	add("in_progress", obj{"response": response("in_progress", nil)})
	add("output_item.added", obj{"output_index": 0, "item": message("in_progress")})
	add("content_part.added", within(obj{"part": part("")}))
	for _, w := range words {
		add("output_text.delta", within(obj{"delta": w, "logprobs": []obj{}}))
	}
	add("output_text.done", within(obj{"text": said, "logprobs": []obj{}}))
	add("content_part.done", within(obj{"part": part(said)}))
	add("output_item.done", obj{"output_index": 0, "item": message("completed", part(said))})
	add("completed", obj{"response": done})
	return stream(true, events)
}

func messages(c call) answer {
	const id = "chatcmpl-3e5a"
	reason := "end_turn"
	if c.tool != "" {
		reason = "tool_use"
	}
	if !c.Stream {
		block := obj{"type": "text", "text": said}
		if c.tool != "" {
			block = obj{"type": "tool_use", "id": "chatcmpl-tool-5f0c", "name": c.tool, "input": json.RawMessage(arguments)}
		}
		return reply(200, obj{
			"id": id, "type": "message", "role": "assistant", "content": []obj{block}, "model": c.Model, "stop_reason": reason,
			"stop_sequence": nil, "usage": obj{"input_tokens": 11, "output_tokens": len(words)},
		})
	}
	var events []obj
	add := func(typ string, e obj) {
		e["type"] = typ
		events = append(events, e)
	}
	add("message_start", obj{"message": obj{
		"id": id, "type": "message", "role": "assistant", "content": []obj{}, "model": c.Model, "stop_reason": nil,
		"stop_sequence": nil, "usage": obj{"input_tokens": 11, "output_tokens": 0},
	}})
	if c.tool != "" {
		add("content_block_start", obj{"index": 0, "content_block": obj{"type": "tool_use", "id": "chatcmpl-tool-5f0c", "name": c.tool, "input": obj{}}})
		for _, piece := range strings.SplitAfter(arguments, " ") {
			add("content_block_delta", obj{"index": 0, "delta": obj{"type": "input_json_delta", "partial_json": piece}})
		}
	} else {
		add("content_block_start", obj{"index": 0, "content_block": obj{"type": "text", "text": ""}})
		for _, w := range words {
			add("content_block_delta", obj{"index": 0, "delta": obj{"type": "text_delta", "text": w}})
		}
	}
	add("content_block_stop", obj{"index": 0})
	add("message_delta", obj{"delta": obj{"stop_reason": reason, "stop_sequence": nil}, "usage": obj{"input_tokens": 11, "output_tokens": len(words)}})
	add("message_stop", obj{})
	return stream(true, events)
}

func countTokens(call) answer { return reply(200, obj{"input_tokens": 11}) }
