// Command langchain drives an OpenAI-compatible server (and, with -ollama,
// an Ollama server) through langchaingo, as an application would.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"time"

	"github.com/tmc/langchaingo/llms"
	"github.com/tmc/langchaingo/llms/ollama"
	"github.com/tmc/langchaingo/llms/openai"
)

func main() {
	base := flag.String("base", "http://127.0.0.1:18080", "OpenAI-compatible server, without /v1 (empty: skip)")
	key := flag.String("key", "test-key", "API key of that server")
	oll := flag.String("ollama", "", "Ollama server (empty: skip)")
	model := flag.String("model", "tiny", "model")
	slow := flag.String("slow", "slow", "model for the endless stream")
	flag.Parse()
	passed, failed := 0, 0
	run := func(name string, m llms.Model, err error, modelName, slowName string) {
		check := func(op string, f func(context.Context) (string, error)) {
			ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
			defer cancel()
			got, err := f(ctx)
			if err != nil {
				failed++
				fmt.Printf("FAIL %s/%s: %v | %s\n", name, op, err, got)
				return
			}
			passed++
			fmt.Printf("PASS %s/%s: %s\n", name, op, got)
		}
		if err != nil {
			failed++
			fmt.Printf("FAIL %s: %v\n", name, err)
			return
		}
		msgs := func(s string) []llms.MessageContent {
			return []llms.MessageContent{llms.TextParts(llms.ChatMessageTypeHuman, s)}
		}
		check("chat", func(ctx context.Context) (string, error) {
			r, err := m.GenerateContent(ctx, msgs("hi"), llms.WithModel(modelName))
			if err != nil {
				return "", err
			}
			return fmt.Sprintf("%q %v", r.Choices[0].Content, r.Choices[0].StopReason), nil
		})
		check("stream", func(ctx context.Context) (string, error) {
			n := 0
			r, err := m.GenerateContent(ctx, msgs("hi"), llms.WithModel(modelName), llms.WithStreamingFunc(func(context.Context, []byte) error { n++; return nil }))
			if err != nil {
				return "", err
			}
			return fmt.Sprintf("%d pieces %q", n, r.Choices[0].Content), nil
		})
		check("abort", func(ctx context.Context) (string, error) {
			ctx, cancel := context.WithCancel(ctx)
			defer cancel()
			n := 0
			_, err := m.GenerateContent(ctx, msgs("SAY-LONG"), llms.WithModel(slowName), llms.WithStreamingFunc(func(context.Context, []byte) error {
				if n++; n == 10 {
					cancel()
				}
				return nil
			}))
			if !errors.Is(err, context.Canceled) && ctx.Err() == nil {
				return "", fmt.Errorf("want a cancel, got %v", err)
			}
			return fmt.Sprintf("%d pieces, then %v", n, err), nil
		})
		check("missing", func(ctx context.Context) (string, error) {
			_, err := m.GenerateContent(ctx, msgs("hi"), llms.WithModel("missing"))
			if err == nil {
				return "", errors.New("no error")
			}
			return err.Error(), nil
		})
	}
	if *base != "" {
		m, err := openai.New(openai.WithBaseURL(*base+"/v1"), openai.WithToken(*key), openai.WithModel(*model))
		run("langchain-openai", m, err, *model, *slow)
	}
	if *oll != "" {
		m, err := ollama.New(ollama.WithServerURL(*oll), ollama.WithModel(*model))
		run("langchain-ollama", m, err, *model, *slow)
	}
	fmt.Printf("%d passed, %d failed\n", passed, failed)
	if failed > 0 {
		os.Exit(1)
	}
}
