package main

import (
	"encoding/json"
	"fmt"

	fake "github.com/iop-fabric/iop/internal/fakeprovider"
)

// ollama is Ollama 0.17.4.
func ollama(r fake.Request) answer {
	if hasToolResult(r.Body) { // none was recorded; it is a plain answer
		r.Body = edited(r.Body, func(v map[string]json.RawMessage) { delete(v, "tools"); v["messages"] = json.RawMessage(`[]`) })
	}
	return recorded("ollama", r)
}

// llamaServer is llama.cpp's server b10573, started with --embeddings.
func llamaServer(r fake.Request) answer {
	if r.Path == "/v1/embeddings" {
		vector := make([]float64, 512)
		vector[1], vector[4], vector[9] = 0.5773503184318542, 0.5773503184318542, 0.5773503184318542
		body := text(obj{
			"model": "tiny", "object": "list", "usage": obj{"prompt_tokens": 7, "total_tokens": 7},
			"data": []obj{{"embedding": vector, "index": 0, "object": "embedding"}},
		})
		return answer{body: body, head: fmt.Sprintf("HTTP/1.1 200 OK\r\nServer: llama.cpp\r\nAccess-Control-Allow-Origin: \r\n"+
			"Content-Type: application/json; charset=utf-8\r\nContent-Length: %d\r\nKeep-Alive: timeout=5, max=100\r\n\r\n", len(body))}
	}
	if hasToolResult(r.Body) && r.Path != "/v1/chat/completions" { // recorded there only
		r.Body = edited(r.Body, func(v map[string]json.RawMessage) { delete(v, "tools"); v["messages"] = json.RawMessage(`[]`) })
	}
	return recorded("llama-server", r)
}

// recorded is the recorded answer to the request that is most like r.
func recorded(server string, r fake.Request) answer {
	c, err := fake.CaptureFor(server, &r)
	if err != nil {
		panic("BUG: imitation: " + err.Error())
	}
	if c.Chunked {
		return answer{head: c.Head, chunks: c.Chunks()}
	}
	return answer{head: c.Head, body: c.Answer}
}
