//go:build linux

package netns

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"testing"
	"time"
)

// BenchmarkLeaf measures what a leaf adds to a small call and to a streamed chunk,
// beside the same through the hub alone, in turns within one run: hub, Edge, leaf
// and both Nodes are processes on hosts of their own. The provider of both Nodes
// is this process, reached over a host's loopback, and stamps what it sends.
func BenchmarkLeaf(b *testing.B) {
	f := newFabric(b, plan{brokers: 1, leaves: []string{"attic"}, nodes: []string{"near", "far@attic"}})
	for _, n := range []string{"near", "far"} {
		f.provide(n, 64, stamping)
	}
	f.start("broker-1")
	edge := f.start("edge")
	f.start("leaf-attic")
	f.start("node-near")
	f.start("node-far")
	edge.connected("near", 0)
	edge.connected("far", 0)
	call, chunk := map[string][]time.Duration{}, map[string][]time.Duration{}
	small := func(model string) {
		began := time.Now()
		resp, err := f.post(b.Context(), fmt.Sprintf(`{"model":%q,"messages":[]}`, model))
		must(b, err)
		got, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil || resp.StatusCode != http.StatusOK || string(got) != smallAnswer {
			b.Fatalf("%s: %d %q %v", model, resp.StatusCode, got, err)
		}
		call[model] = append(call[model], time.Since(began))
	}
	stream := func(model string) {
		resp, err := f.post(b.Context(), fmt.Sprintf(`{"model":%q,"stream":true,"messages":[]}`, model))
		must(b, err)
		defer resp.Body.Close()
		r := bufio.NewReader(resp.Body)
		for {
			line, err := r.ReadBytes('\n')
			if err != nil {
				b.Fatalf("%s: %v", model, err)
			}
			stamp, ok := bytes.CutPrefix(line, []byte("data: "))
			if !ok {
				continue
			}
			sent, err := strconv.ParseInt(string(bytes.TrimSpace(stamp)), 10, 64)
			if err != nil {
				return // [DONE]
			}
			chunk[model] = append(chunk[model], time.Duration(time.Now().UnixNano()-sent))
		}
	}
	for range 50 { // warm
		for _, m := range []string{"near", "far"} {
			small(m)
		}
	}
	clear(call)
	b.ResetTimer()
	for i := range b.N {
		for _, m := range []string{"near", "far"} {
			small(m)
			if i%chunks == 0 {
				stream(m)
			}
		}
	}
	b.StopTimer()
	for what, took := range map[string]map[string][]time.Duration{"call": call, "chunk": chunk} {
		at := map[string]float64{}
		for _, m := range []string{"near", "far"} {
			slices.Sort(took[m])
			n := len(took[m])
			at[m+"50"] = float64(took[m][n/2]) / 1e3
			at[m+"99"] = float64(took[m][n*99/100]) / 1e3
		}
		for _, p := range []string{"50", "99"} {
			b.ReportMetric(at["near"+p], "hub-"+what+"-p"+p+"-µs")
			b.ReportMetric(at["far"+p], "leaf-"+what+"-p"+p+"-µs")
		}
		b.Logf("%s: p50 %.0f µs through the hub, %.0f through the leaf; p99 %.0f and %.0f; %d each",
			what, at["near50"], at["far50"], at["near99"], at["far99"], len(took["far"]))
	}
}

const (
	smallAnswer = `{"ok":1}`
	chunks      = 50 // of a stream, 2 ms apart
)

// stamping is a provider that says when it sent what.
var stamping = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body) // a cut shows in what is in it
	if !bytes.Contains(body, []byte(`"stream":true`)) {
		w.Header().Set("Content-Type", "application/json")
		io.WriteString(w, smallAnswer)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for range chunks {
		<-tick.C
		fmt.Fprintf(w, "data: %d\n\n", time.Now().UnixNano())
		w.(http.Flusher).Flush()
	}
	io.WriteString(w, "data: [DONE]\n\n")
})
