package e2e

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/ioptest"
)

// benchFabric is a whole fabric in front of a plain net/http server.
func benchFabric(b *testing.B, h http.HandlerFunc) *ioptest.Fabric {
	b.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/v1/models" {
			io.WriteString(w, `{"data":[{"id":"m"}]}`)
			return
		}
		io.Copy(io.Discard, r.Body)
		h(w, r)
	}))
	b.Cleanup(s.Close)
	return ioptest.Start(b, ioptest.Options{Quiet: true, Adapters: []configs.Adapter{
		{Name: "p", Type: configs.TypeOpenAICompat, BaseURL: s.URL, Capacity: 1000},
	}})
}

func benchCalls(b *testing.B, f *ioptest.Fabric, body string, parallel int) {
	b.Helper()
	b.ReportAllocs()
	b.SetParallelism(parallel)
	b.ResetTimer()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			resp, err := f.Client.Do(f.Request(b.Context(), http.MethodPost, "/v1/chat/completions", body))
			if err != nil {
				b.Error(err)
				return
			}
			io.Copy(io.Discard, resp.Body)
			resp.Body.Close()
			if resp.StatusCode != 200 {
				b.Errorf("status %d", resp.StatusCode)
			}
		}
	})
}

// BenchmarkSmallJSON is one small call through the whole fabric, caller and
// provider included.
func BenchmarkSmallJSON(b *testing.B) {
	answer := `{"id":"x","choices":[{"index":0,"message":{"role":"assistant","content":"` + strings.Repeat("x", 200) + `"}}],"usage":{"prompt_tokens":1,"completion_tokens":2,"total_tokens":3}}`
	f := benchFabric(b, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		io.WriteString(w, answer)
	})
	for _, callers := range []int{1, 8} {
		b.Run(fmt.Sprint("callers=", callers), func(b *testing.B) { benchCalls(b, f, ioptest.Chat(false), callers) })
	}
}

// BenchmarkStream is a stream of 200 chunks.
func BenchmarkStream(b *testing.B) {
	chunk := []byte(chunkEvent(1))
	f := benchFabric(b, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for range 200 {
			w.Write(chunk)
			w.(http.Flusher).Flush()
		}
		io.WriteString(w, doneEvent)
	})
	benchCalls(b, f, ioptest.Chat(true), 4)
}

// BenchmarkDownload is an answer of 16 MiB.
func BenchmarkDownload(b *testing.B) {
	block := bytes.Repeat([]byte("x"), 256<<10)
	f := benchFabric(b, func(w http.ResponseWriter, _ *http.Request) {
		for range 64 {
			w.Write(block)
		}
	})
	b.SetBytes(16 << 20)
	benchCalls(b, f, ioptest.Chat(false), 1)
}

// BenchmarkUpload is a request of 16 MiB.
func BenchmarkUpload(b *testing.B) {
	f := benchFabric(b, func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "{}") })
	b.SetBytes(16 << 20)
	benchCalls(b, f, `{"model":"m","pad":"`+strings.Repeat("x", 16<<20)+`"}`, 1)
}
