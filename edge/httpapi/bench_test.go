package httpapi

import (
	"context"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/iop-fabric/iop/edge/dispatch"
)

// quietWriter is a response that costs nothing.
type quietWriter struct{ h http.Header }

func (w *quietWriter) Header() http.Header         { return w.h }
func (w *quietWriter) Write(p []byte) (int, error) { return len(p), nil }
func (w *quietWriter) WriteHeader(int)             {}
func (w *quietWriter) FlushError() error           { return nil }

type quietRunner struct{ chunks int }

func (q quietRunner) Do(_ context.Context, a dispatch.Attempt, w dispatch.Writer) dispatch.Result {
	if _, err := io.Copy(io.Discard, a.Body); err != nil {
		panic(err)
	}
	_ = w.Start(200, answerHeader)
	for range q.chunks {
		_ = w.Body(answerBody)
		_ = w.Flush()
	}
	return dispatch.Result{Started: true}
}

var (
	answerHeader = fields("Content-Type", "text/event-stream", "Date", "Sun, 29 Nov 2026 14:33:44 GMT")
	answerBody   = []byte(chunk + "data: [DONE]\n\n")
)

func benchmark(b *testing.B, doc string, chunks int) {
	benchmarkAs(b, "/v1/chat/completions", doc, chunks)
}

func benchmarkAs(b *testing.B, path, doc string, chunks int, more ...string) {
	api := New(Config{Keys: []Key{{Name: "a", Digest: DigestOf(goodKey)}}}, Deps{Pool: &quietPool{}, Runner: quietRunner{chunks}})
	h := api.Handler()
	header := http.Header{"Authorization": {"Bearer " + goodKey}, "Content-Type": {"application/json"}, "User-Agent": {"sdk/1.2.3"}, "Accept": {"*/*"}}
	for i := 0; i+1 < len(more); i += 2 {
		header.Set(more[i], more[i+1])
	}
	b.ReportAllocs()
	b.SetBytes(int64(len(doc)))
	for b.Loop() {
		r, err := http.NewRequest("POST", path, io.NopCloser(strings.NewReader(doc)))
		if err != nil {
			b.Fatal(err)
		}
		r.ContentLength, r.Header = int64(len(doc)), header
		h.ServeHTTP(&quietWriter{http.Header{}}, r)
	}
}

type quietPool struct{ fakePool }

func (*quietPool) Acquire(context.Context, *Want, *Grant) error { return nil }

func BenchmarkSmallCall(b *testing.B) { benchmark(b, plainChat, 1) }
func BenchmarkStream200(b *testing.B) { benchmark(b, streamChat, 200) }
func BenchmarkBody1MiB(b *testing.B) {
	benchmark(b, `{"model":"tiny","messages":"`+strings.Repeat("y", 1<<20-100)+`"}`, 1)
}

func BenchmarkScan(b *testing.B) {
	doc := []byte(`{"model":"tiny","messages":[` + strings.Repeat(`{"role":"user","content":"a line of text\nand another"},`, 2000) + `{}]}`)
	b.SetBytes(int64(len(doc)))
	for b.Loop() {
		var s scanner
		s.init()
		s.feed(doc)
		if _, why, _ := s.finish(); why != "" {
			b.Fatal(why)
		}
	}
}
