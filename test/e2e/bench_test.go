package e2e

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/fakeprovider"
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
			if err := succeeds(b.Context(), f, body); err != nil {
				b.Error(err)
				return
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

// report adds p50 and p99 of times to the benchmark's line.
func report(b *testing.B, times []time.Duration) {
	b.Helper()
	slices.Sort(times)
	at := func(q float64) float64 {
		return float64(times[min(int(q*float64(len(times))), len(times)-1)]) / float64(time.Millisecond)
	}
	b.ReportMetric(at(.5), "p50-ms")
	b.ReportMetric(at(.99), "p99-ms")
	b.ReportMetric(0, "ns/op")
}

// BenchmarkCallerGone: from the caller's leaving in mid-stream to the close of
// the provider's connection (E5: 250 ms).
func BenchmarkCallerGone(b *testing.B) {
	f := ioptest.Start(b, ioptest.Options{Quiet: true})
	var times []time.Duration
	for b.Loop() {
		f.Provider.Next(fakeprovider.SSEHead(), fakeprovider.Chunk(chunkEvent(1)), fakeprovider.Hang())
		ctx, leave := context.WithCancel(b.Context())
		resp, err := f.Client.Do(f.Request(ctx, http.MethodPost, "/v1/chat/completions", ioptest.Chat(true)))
		if err != nil {
			b.Fatal(err)
		}
		readUntil(b, resp.Body, chunkEvent(1))
		r := <-f.Provider.Received()
		left := time.Now()
		leave()
		<-r.Gone
		times = append(times, time.Since(left))
		resp.Body.Close()
	}
	report(b, times)
}

// BenchmarkNodeKilled: from SIGKILL of a Node process to the end of the streams
// it carried (B7: 50 ms).
func BenchmarkNodeKilled(b *testing.B) {
	f := otherNode(b)
	var times []time.Duration
	seen := f.Log.Count("node.connected")
	for b.Loop() {
		kill := f.SpawnNode("other")
		f.Log.Await(b, func(string) bool { return f.Log.Count("node.connected") > seen })
		seen = f.Log.Count("node.connected")
		const streams = 4
		var bodies []io.ReadCloser
		for range streams {
			f.Provider.Next(fakeprovider.SSEHead(), fakeprovider.Chunk(chunkEvent(1)), fakeprovider.Hang())
			resp, err := f.Client.Do(f.Request(b.Context(), http.MethodPost, "/v1/chat/completions", ioptest.Chat(true)))
			if err != nil {
				b.Fatal(err)
			}
			readUntil(b, resp.Body, chunkEvent(1))
			bodies = append(bodies, resp.Body)
		}
		killed := time.Now()
		kill()
		for _, body := range bodies {
			rest, _ := io.ReadAll(body)
			times = append(times, time.Since(killed))
			body.Close()
			if strings.Count(string(rest), `"error"`) != 1 {
				b.Errorf("a stream ended as %q", rest)
			}
		}
	}
	report(b, times)
}
