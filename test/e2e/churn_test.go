package e2e

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/history"
	"github.com/iop-fabric/iop/internal/ioptest"
)

const churnPlaces = 8

// churnProvider streams twenty events, or fails the way X-Fate says. Stay holds a
// stream open until release is closed.
func churnProvider(t *testing.T, seen *ioptest.History, staying chan<- struct{}, release <-chan struct{}) *httptest.Server {
	s := httptest.NewServer(seen.Provide(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/v1/models" {
			io.WriteString(w, `{"data":[{"id":"m"}]}`)
			return
		}
		io.Copy(io.Discard, r.Body)
		fate := r.Header.Get("X-Fate")
		switch fate {
		case "drop":
			panic(http.ErrAbortHandler)
		case "refuse":
			http.Error(w, `{"error":{"message":"no"}}`, http.StatusInternalServerError)
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		for i := range 20 {
			if fate == "cut" && i == 7 {
				panic(http.ErrAbortHandler)
			}
			io.WriteString(w, chunkEvent(i))
			w.(http.Flusher).Flush()
		}
		if fate == "stay" {
			staying <- struct{}{}
			select {
			case <-release:
			case <-r.Context().Done():
			}
		}
		io.WriteString(w, doneEvent)
	})))
	t.Cleanup(s.Close)
	return s
}

// Streams by the thousand, a fifth of the callers leaving at random moments (in the
// queue, before the head, between two bytes, after the end) and a tenth of the
// provider's answers failing: nobody gets another's or half an answer for a whole
// one, every place comes back at Edge and at the Node, and memory and goroutines stay
// where they were.
//
// Contract: P7 P8 E5 E6 J4 Q4 T6
func TestChurn(t *testing.T) {
	n := 3000
	if v, err := strconv.Atoi(os.Getenv("IOP_CHURN")); err == nil {
		n = v
	}
	staying, release := make(chan struct{}, churnPlaces), make(chan struct{})
	seen := ioptest.NewHistory(t)
	p := churnProvider(t, seen, staying, release)
	f := ioptest.Start(t, ioptest.Options{Quiet: true, Adapters: []configs.Adapter{
		{Name: "p", Type: configs.TypeOpenAICompat, BaseURL: p.URL, Capacity: churnPlaces},
	}})
	var whole strings.Builder
	for i := range 20 {
		whole.WriteString(chunkEvent(i))
	}
	whole.WriteString(doneEvent)

	churn := func(n int, seed uint64) {
		var wg sync.WaitGroup
		work := make(chan int)
		for worker := range 4 * churnPlaces {
			wg.Go(func() {
				rnd := rand.New(rand.NewPCG(seed, uint64(worker)))
				for range work {
					if err := churnOne(t.Context(), f, seen, rnd, whole.String()); err != nil {
						t.Error(err)
					}
				}
			})
		}
		for i := range n {
			work <- i
		}
		close(work)
		wg.Wait()
	}
	churn(n/3, 1)
	quiet(t, f)
	before, goroutines := footprint()
	churn(n-n/3, 2)
	quiet(t, f)
	after, now := footprint()
	t.Logf("%d streams: heap %d KiB, then %d KiB; goroutines %d, then %d", n, before>>10, after>>10, goroutines, now)
	if after > before+4<<20 {
		t.Errorf("the heap grew from %d to %d KiB", before>>10, after>>10)
	}
	if now > goroutines+50 {
		t.Errorf("goroutines: %d, then %d", goroutines, now)
	}
	// All places are there: as many streams as there are run at once.
	var wg sync.WaitGroup
	for range churnPlaces {
		wg.Go(func() {
			req := f.Request(t.Context(), http.MethodPost, "/v1/chat/completions", ioptest.Chat(true))
			req.Header.Set("X-Fate", "stay")
			resp, err := f.Client.Do(req)
			if err != nil {
				t.Error(err)
				return
			}
			defer resp.Body.Close()
			if b, err := io.ReadAll(resp.Body); err != nil || string(b) != whole.String() {
				t.Errorf("%d bytes, %v", len(b), err)
			}
		})
	}
	for range churnPlaces {
		select {
		case <-staying:
		case <-time.After(ioptest.Hang):
			t.Error("a place is missing")
		}
	}
	close(release)
	wg.Wait()
}

// churnOne makes one call of a random fate, and judges what came of it.
func churnOne(ctx context.Context, f *ioptest.Fabric, seen *ioptest.History, rnd *rand.Rand, whole string) error {
	fate, stays := "", int64(1<<40)
	switch p := rnd.IntN(100); {
	case p < 10:
		fate = []string{"drop", "refuse", "cut"}[rnd.IntN(3)]
	case p < 30:
		var leave context.CancelFunc
		ctx, leave = context.WithCancel(ctx)
		defer leave()
		if rnd.IntN(2) == 0 {
			defer time.AfterFunc(time.Duration(rnd.IntN(20_000))*time.Microsecond, leave).Stop()
		} else {
			stays = int64(rnd.IntN(len(whole) + 1)) // it leaves after so many bytes
		}
	}
	req := f.Request(ctx, http.MethodPost, "/v1/chat/completions", ioptest.Chat(true))
	if fate != "" {
		req.Header.Set("X-Fate", fate)
	}
	id := seen.Invoke(req)
	resp, err := f.Client.Do(req)
	if err != nil {
		seen.Ended(id, nil, history.Unknown)
		if ctx.Err() != nil {
			return nil
		}
		return err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, stays))
	got := string(b)
	switch {
	case err == nil && int64(len(b)) < stays && resp.StatusCode != http.StatusBadGateway && fate != "cut":
		seen.Ended(id, b, history.OK)
	case resp.StatusCode == http.StatusOK:
		seen.Ended(id, ioptest.OwnBytes(got), history.Fail)
	default:
		seen.Ended(id, nil, history.Fail)
	}
	switch {
	case ctx.Err() != nil || int64(len(b)) == stays:
		if !strings.HasPrefix(whole, got) && resp.StatusCode == http.StatusOK {
			return fmt.Errorf("not the answer's beginning: %q", got)
		}
	case fate == "drop" && resp.StatusCode != http.StatusBadGateway, fate == "refuse" && resp.StatusCode != http.StatusInternalServerError:
		return fmt.Errorf("%s: status %d %q", fate, resp.StatusCode, got)
	case fate == "cut" && strings.Contains(got, "[DONE]"):
		return fmt.Errorf("half an answer looks whole: %q", got)
	case fate == "" && (err != nil || resp.StatusCode != http.StatusOK || got != whole):
		return fmt.Errorf("status %d, %d of %d bytes, %w", resp.StatusCode, len(got), len(whole), err)
	}
	return nil
}

// quiet waits until nothing is in use and nobody waits.
func quiet(t *testing.T, f *ioptest.Fabric) {
	t.Helper()
	f.Client.CloseIdleConnections()
	waitFor(t, f, func(held, waiting int) bool { return held == 0 && waiting == 0 })
}

// footprint is the living heap and the goroutines.
func footprint() (heap int64, goroutines int) {
	runtime.GC()
	runtime.GC() // what finalizers held
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc), runtime.NumGoroutine()
}
