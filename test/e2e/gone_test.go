package e2e

import (
	"context"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/fakeprovider"
	"github.com/iop-fabric/iop/internal/ioptest"
)

// The caller goes away: the provider's connection is closed, the place is free
// for the next one.
//
// Contract: E5 T6 C1 P8
func TestCallerGone(t *testing.T) {
	f := ioptest.Start(t, ioptest.Options{Edge: func(e *configs.Edge) { e.Nodes[0].Adapters[0].Capacity = 1 }})
	for _, c := range []struct {
		name  string
		steps []fakeprovider.Step
		until string // what the caller reads before it leaves
	}{
		{"A19 before any answer", []fakeprovider.Step{fakeprovider.Hang()}, ""},
		{"A20 in mid-stream", []fakeprovider.Step{fakeprovider.SSEHead(), fakeprovider.Chunk(chunkEvent(1)), fakeprovider.Hang()}, chunkEvent(1)},
	} {
		t.Run(c.name, func(t *testing.T) {
			f.Provider.Next(c.steps...)
			ctx, leave := context.WithCancel(t.Context())
			done := make(chan struct{})
			go func() {
				defer close(done)
				resp, err := f.Client.Do(f.Request(ctx, http.MethodPost, "/v1/chat/completions", ioptest.Chat(c.until != "")))
				if err == nil {
					defer resp.Body.Close()
					readUntil(t, resp.Body, c.until)
					leave()
				}
			}()
			r := received(t, f)
			if c.until == "" {
				leave()
			}
			left := time.Now()
			f.Wait(done, "the caller to leave")
			f.Wait(r.Gone, "the provider's connection to be closed")
			t.Logf("provider's connection closed after %v", time.Since(left))
			// The one place is free again.
			f.Provider.Next(fakeprovider.JSON(200, `{"next":1}`)...)
			if resp, got := f.Do(f.Request(t.Context(), http.MethodPost, "/v1/chat/completions", ioptest.Chat(false))); resp.StatusCode != 200 || got != `{"next":1}` {
				t.Fatalf("the next call: %d %s", resp.StatusCode, got)
			}
			received(t, f)
			leave()
		})
	}
}

// A request that waits leaves the queue with its caller, and nothing is sent
// for it.
//
// Contract: E5 P8 Q4
func TestCallerGoneWhileQueued(t *testing.T) {
	f := ioptest.Start(t, ioptest.Options{Edge: func(e *configs.Edge) { e.Nodes[0].Adapters[0].Capacity = 1 }})
	finish := make(chan struct{})
	f.Provider.Next(fakeprovider.SSEHead(), fakeprovider.Chunk(chunkEvent(1)), fakeprovider.Wait(finish), fakeprovider.Chunk(doneEvent), fakeprovider.LastChunk())
	first := open(t, f, t.Context(), ioptest.Chat(true))
	readUntil(t, first.Body, chunkEvent(1))
	received(t, f)

	ctx, leave := context.WithCancel(t.Context())
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		resp, err := f.Client.Do(f.Request(ctx, http.MethodPost, "/v1/chat/completions", ioptest.Chat(false)))
		if err == nil {
			resp.Body.Close()
			t.Errorf("answered %d", resp.StatusCode)
		}
	}()
	third := make(chan string, 1)
	leave()
	f.Wait(gone, "the second caller to leave")
	f.Provider.Next(fakeprovider.JSON(200, `{"third":1}`)...)
	go func() {
		resp, err := f.Client.Do(f.Request(t.Context(), http.MethodPost, "/v1/chat/completions", ioptest.Chat(false)))
		if err != nil {
			third <- err.Error()
			return
		}
		defer resp.Body.Close()
		b, _ := io.ReadAll(resp.Body)
		third <- string(b)
	}()
	close(finish)
	rest, err := io.ReadAll(first.Body)
	if err != nil || string(rest) != doneEvent {
		t.Fatalf("the first stream: %q %v", rest, err)
	}
	select {
	case got := <-third:
		if got != `{"third":1}` {
			t.Fatalf("the third call: %s", got)
		}
	case <-time.After(ioptest.Hang):
		t.Fatalf("the third call waits for ever\n%s", f.Log)
	}
	if n := f.Provider.Executions(); n != 2 {
		t.Errorf("%d calls reached the provider, want 2: the caller who left was served", n)
	}
}

// A busy provider makes callers wait, in order, instead of failing them.
//
// Contract: Q3 P8 P7
func TestBusyProviderMakesCallersWait(t *testing.T) {
	f := ioptest.Start(t, ioptest.Options{Edge: func(e *configs.Edge) { e.Nodes[0].Adapters[0].Capacity = 1 }})
	const n = 20
	f.Provider.Always(fakeprovider.JSON(200, `{}`)...)
	results := make(chan int, n)
	for range n {
		go func() {
			resp, err := f.Client.Do(f.Request(t.Context(), http.MethodPost, "/v1/chat/completions", ioptest.Chat(false)))
			if err != nil {
				results <- 0
				return
			}
			resp.Body.Close()
			results <- resp.StatusCode
		}()
	}
	for range n {
		if s := <-results; s != 200 {
			t.Errorf("status %d", s)
		}
	}
	// The slot was always free before the terminal: no refusal of the gate.
	if strings.Contains(f.Log.String(), "class=capacity") {
		t.Error("the Node's gate refused though Edge counted a free place (trap 14)")
	}
}

// Ten thousand in a row against one place: the Node frees its place before the
// terminal, so the next dispatch never meets a full gate.
//
// Contract: P7 P3
func TestTrap14SlotBeforeTerminal(t *testing.T) {
	f := ioptest.Start(t, ioptest.Options{Edge: func(e *configs.Edge) { e.Nodes[0].Adapters[0].Capacity = 1 }})
	const n = 2000
	work := make(chan struct{}, n)
	for range n {
		work <- struct{}{}
	}
	close(work)
	done := make(chan struct{})
	const callers = 4
	for range callers {
		go func() {
			defer func() { done <- struct{}{} }()
			for range work {
				if err := succeeds(t.Context(), f, ioptest.Chat(false)); err != nil {
					t.Error(err)
				}
			}
		}()
	}
	for range callers {
		<-done
	}
	if strings.Contains(f.Log.String(), "class=capacity") {
		t.Error("the gate refused a dispatch")
	}
}
