package ioptest

import (
	"bytes"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/iop-fabric/iop/internal/history"
)

// historyHeader carries a request's id to the provider that records it.
const historyHeader = "X-History"

// History records streams at both of their ends, a provider's and its callers', as
// lines of JSON; the test fails where the checker finds a rule broken.
type History struct {
	w    *history.Writer
	file bytes.Buffer

	mu     sync.Mutex
	n      int
	served map[string]chan struct{} // closed when the provider is done
}

// NewHistory begins one, which is judged when the test ends.
func NewHistory(t testing.TB) *History {
	h := &History{served: map[string]chan struct{}{}}
	h.w = history.NewWriter(&h.file)
	t.Cleanup(func() { h.judge(t) })
	return h
}

func (h *History) judge(t testing.TB) {
	h.w.Add(history.Event{Kind: history.End})
	c := history.NewChecker(history.Options{Partial: true})
	if err := h.w.Err(); err != nil {
		t.Error(err)
	}
	if err := history.Read(&h.file, c.Add); err != nil {
		t.Error(err)
	}
	for _, b := range c.Breaches() {
		t.Errorf("history: %v", b)
	}
	n := c.Counts()
	t.Logf("history: %d requests, %d parts of answers compared, %d ok, %d failed, %d unknown", n.Requests, n.Frames, n.OKCalm+n.OKFaulted, n.Failed, n.Unknown)
	if n.Requests == 0 || n.Frames == 0 {
		t.Error("history: nothing was compared")
	}
}

// Fault records that one begins; the function returned, that it ends.
func (h *History) Fault(name string) (ended func()) {
	h.w.Add(history.Event{Kind: history.Start, Fault: name})
	return func() { h.w.Add(history.Event{Kind: history.Stop, Fault: name}) }
}

// Invoke records that the request is made, and returns its id.
func (h *History) Invoke(r *http.Request) string {
	h.mu.Lock()
	h.n++
	id := fmt.Sprintf("q%d", h.n)
	h.served[id] = make(chan struct{})
	h.mu.Unlock()
	r.Header.Set(historyHeader, id)
	h.w.Add(history.Event{Kind: history.Invoke, Req: id})
	return id
}

// Ended records what the caller got of its provider's bytes, and how it ended. Where
// the answer is whole, its provider is waited for.
func (h *History) Ended(id string, got []byte, o history.Outcome) {
	parts := history.Parts{Report: func(seq uint64, n int64, sum uint32) {
		h.w.Add(history.Event{Kind: history.Frame, Req: id, Run: id, Seq: seq, N: n, Sum: sum})
	}}
	if o == history.OK {
		h.mu.Lock()
		served := h.served[id]
		h.mu.Unlock()
		select {
		case <-served:
		case <-time.After(Hang): // the checker says what is missing
		}
	}
	_, _ = parts.Write(got)
	if o == history.OK {
		parts.Close() // of a beginning the last part may be half of what its provider gives next
	}
	h.w.Add(history.Event{Kind: history.Terminal, Req: id, Outcome: o})
}

// Provide records what a provider answers.
func (h *History) Provide(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		id := r.Header.Get(historyHeader)
		h.mu.Lock()
		served := h.served[id]
		h.mu.Unlock()
		if served == nil {
			next.ServeHTTP(w, r) // of no caller that records
			return
		}
		defer close(served)
		rec := &recorded{ResponseWriter: w, parts: history.Parts{Report: func(seq uint64, n int64, sum uint32) {
			h.w.Add(history.Event{Kind: history.Sent, Run: id, Seq: seq, N: n, Sum: sum})
		}}}
		next.ServeHTTP(rec, r) // a panic is a provider that broke off
		seq, total := rec.parts.Close()
		h.w.Add(history.Event{Kind: history.Served, Run: id, Seq: seq, N: total})
	})
}

// recorded notes bytes before they are sent.
type recorded struct {
	http.ResponseWriter
	parts history.Parts
}

// Write implements http.ResponseWriter.
func (r *recorded) Write(p []byte) (int, error) {
	_, _ = r.parts.Write(p)
	return r.ResponseWriter.Write(p)
}

// WriteString implements io.StringWriter.
func (r *recorded) WriteString(s string) (int, error) { return r.Write([]byte(s)) }

// Flush implements http.Flusher.
func (r *recorded) Flush() { _ = http.NewResponseController(r.ResponseWriter).Flush() }

// OwnBytes is what an event stream holds of its provider's: an error that Edge
// appended is not.
func OwnBytes(stream string) []byte {
	own, _, _ := strings.Cut(stream, "data: {\"error\"")
	return []byte(own)
}
