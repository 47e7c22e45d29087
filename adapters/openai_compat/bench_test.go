package openai_compat

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/iop-fabric/iop/agent"
)

// discard is a Sink that counts.
type discard struct{ bytes, reads int64 }

func (*discard) Start(int, []agent.Field, int64) error { return nil }
func (*discard) Trailer([]agent.Field) error           { return nil }
func (d *discard) Body(p []byte) error {
	d.bytes += int64(len(p))
	d.reads++
	return nil
}

func server(b *testing.B, h http.HandlerFunc) *Adapter {
	b.Helper()
	s := httptest.NewServer(h)
	b.Cleanup(s.Close)
	return newAdapter(b, Options{BaseURL: s.URL})
}

// One small chat answer, client and server together.
func BenchmarkSmall(b *testing.B) {
	answer := []byte(strings.Repeat("x", 600))
	a := server(b, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body) // a benchmark's server
		_, _ = w.Write(answer)
	})
	body := strings.Repeat("y", 300)
	header := []agent.Field{{Name: "Content-Type", Value: []byte("application/json")}}
	b.ReportAllocs()
	for b.Loop() {
		ex := post(body)
		ex.Header = header
		if err := a.Exchange(b.Context(), ex, new(discard)); err != nil {
			b.Fatal(err)
		}
	}
}

// A large answer, read 64 KiB at a time.
func BenchmarkBulk(b *testing.B) {
	const size = 32 << 20
	chunk := make([]byte, 256<<10)
	for _, framing := range []string{"length", "chunked"} {
		b.Run(framing, func(b *testing.B) {
			a := server(b, func(w http.ResponseWriter, _ *http.Request) {
				if framing == "length" {
					w.Header().Set("Content-Length", fmt.Sprint(size))
				}
				for range size / len(chunk) {
					_, _ = w.Write(chunk) // a benchmark's server
				}
			})
			b.SetBytes(size)
			b.ReportAllocs()
			var d discard
			for b.Loop() {
				if err := a.Exchange(b.Context(), agent.Exchange{Operation: "models"}, &d); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(d.bytes)/float64(d.reads), "B/read")
		})
	}
}
