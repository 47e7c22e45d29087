// Command imitation answers as model servers do, for the checks of the public
// client libraries (`make clients`): Ollama and llama.cpp's server from what was
// recorded of them, vLLM after its source, each on a loopback port of its own. It
// prints one NAME=address line for each, and one for CONTROL, which tells how many
// endless streams are open.
//
// Every server knows the model "tiny", and these:
//
//	slow       a stream without an end, until the caller leaves
//	cut        a stream whose connection breaks in its middle
//	busy       429 with Retry-After
//	busy-once  429, and at the second try the answer
//	broken     500
//
// SIGTERM ends it, with a line that says how many endless streams there were.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/signal"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	fake "github.com/iop-fabric/iop/internal/fakeprovider"
)

func main() {
	servers := []struct {
		name   string
		answer func(fake.Request) answer
	}{
		{"OLLAMA", ollama},
		{"LLAMA", llamaServer},
		{"VLLM", vllm},
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	var s streams
	listen := func(name string) *fake.Provider {
		ln, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		p := fake.Serve(ln)
		fmt.Printf("%s=%s\n", name, p.URL)
		return p
	}
	control := listen("CONTROL")
	control.Handle(func(*fake.Request) []fake.Step {
		s.Lock()
		defer s.Unlock()
		return fake.JSON(200, fmt.Sprint(s.open))
	})
	all := []*fake.Provider{control}
	for _, server := range servers {
		p := listen(server.name)
		p.Handle(specials(&s, server.answer))
		all = append(all, p)
	}
	fmt.Println("READY=yes")
	<-ctx.Done()
	s.Lock()
	fmt.Printf("endless streams: %d, left by their callers: %d, open: %d\n", s.begun, s.left, s.open)
	s.Unlock()
	for _, p := range all {
		p.Close()
	}
}

// answer is what a server says: its very head, and a body with an exact length or
// the chunks of a stream.
type answer struct {
	head   string
	body   string
	chunks []string
}

func (a answer) steps() []fake.Step {
	steps := []fake.Step{fake.Raw(a.head)}
	if a.chunks == nil {
		return append(steps, fake.Raw(a.body))
	}
	for _, c := range a.chunks {
		steps = append(steps, fake.Chunk(c))
	}
	return append(steps, fake.LastChunk())
}

// specials serves the models that every server knows; the rest is the server's.
func specials(s *streams, of func(fake.Request) answer) func(*fake.Request) []fake.Step {
	var mu sync.Mutex
	turned := map[string]bool{} // paths where busy-once turned a caller away, and not yet the next one
	return func(r *fake.Request) []fake.Step {
		var body struct {
			Model  string `json:"model"`
			Stream bool   `json:"stream"`
		}
		if json.Unmarshal(r.Body, &body) != nil {
			return of(*r).steps()
		}
		switch body.Model {
		case "busy":
			return turnAway(r.Path)
		case "busy-once":
			mu.Lock()
			turned[r.Path] = !turned[r.Path]
			away := turned[r.Path]
			mu.Unlock()
			if away {
				return turnAway(r.Path)
			}
		case "broken":
			return fake.JSON(500, problem(r.Path, "server_error", "api_error", "The server had an error while processing your request."))
		case "slow", "cut":
		default:
			return of(*r).steps()
		}
		tiny := *r
		tiny.Body = edited(r.Body, func(v map[string]json.RawMessage) { v["model"] = json.RawMessage(`"tiny"`) })
		a := of(tiny)
		if a.chunks == nil {
			return a.steps()
		}
		switch half := len(a.chunks) / 2; body.Model {
		case "slow":
			return []fake.Step{fake.Raw(a.head), s.endless(a.chunks[:half], a.chunks[half])}
		case "cut":
			a.chunks = a.chunks[:half]
			steps := a.steps()
			return append(steps[:len(steps)-1], fake.Close())
		default:
			return a.steps()
		}
	}
}

func turnAway(path string) []fake.Step {
	return fake.JSON(429, problem(path, "rate_limit_exceeded", "rate_limit_error", "Rate limit reached, please try again in 1s."), "Retry-After: 1")
}

// problem is an error as the public services of the path's dialect word it.
func problem(path, openAI, anthropic, message string) string {
	if strings.HasPrefix(path, "/v1/messages") {
		return text(obj{"type": "error", "error": obj{"type": anthropic, "message": message}, "request_id": "req_011CSHoEeqs5C35K2UUqR7Fy"})
	}
	return text(obj{"error": obj{"message": message, "type": openAI, "param": nil, "code": openAI}})
}

// streams counts the endless ones.
type streams struct {
	sync.Mutex
	begun, left, open int
}

var errLeft = errors.New("the caller left")

// endless sends the chunks, and then the same one again and again.
func (s *streams) endless(first []string, again string) fake.Step {
	return func(x *fake.Exchange) error {
		s.Lock()
		s.begun++
		s.open++
		s.Unlock()
		err := talk(x, first, again)
		s.Lock()
		s.open--
		s.left++
		s.Unlock()
		return err
	}
}

func talk(x *fake.Exchange, first []string, again string) error {
	for _, c := range first {
		if err := fake.Chunk(c)(x); err != nil {
			return err
		}
	}
	every := time.NewTicker(20 * time.Millisecond)
	defer every.Stop()
	for {
		select {
		case <-x.Request.Gone:
			return errLeft
		case <-every.C:
			if err := fake.Chunk(again)(x); err != nil {
				return err
			}
		}
	}
}

type obj = map[string]any

func text(v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		panic("BUG: imitation: " + err.Error())
	}
	return string(b)
}

// edited returns a JSON object with something changed.
func edited(body []byte, edit func(map[string]json.RawMessage)) []byte {
	v := map[string]json.RawMessage{}
	if json.Unmarshal(body, &v) != nil {
		return body
	}
	edit(v)
	return []byte(text(v))
}

// hasToolResult reports whether a request brings what a tool said.
func hasToolResult(body []byte) bool {
	return slices.ContainsFunc([]string{`"tool_call_id"`, `"tool_result"`, `"function_call_output"`}, func(s string) bool {
		return strings.Contains(string(body), s)
	})
}
