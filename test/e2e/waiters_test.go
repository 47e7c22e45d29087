package e2e

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
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
	"github.com/iop-fabric/iop/internal/fakeprovider"
	"github.com/iop-fabric/iop/internal/ioptest"
)

// hold opens n raw connections that each send one request, and returns what closes
// them. The callers' side costs the same whoever is asked.
func hold(t *testing.T, addr, request string, n int) (conns []net.Conn) {
	t.Helper()
	for range n {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		if _, err := io.WriteString(c, request); err != nil {
			t.Fatal(err)
		}
		conns = append(conns, c)
	}
	return conns
}

func inUse() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapInuse + m.StackInuse)
}

// plainWaiter is what a waiting request costs in net/http alone: read, and nothing done.
func plainWaiter(t *testing.T, request string, n int) int64 {
	var arrived sync.WaitGroup
	arrived.Add(n)
	over, end := context.WithCancel(context.Background())
	s := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		arrived.Done()
		select {
		case <-over.Done():
		case <-r.Context().Done():
		}
	}))
	defer s.Close()
	defer end()
	before := inUse()
	conns := hold(t, s.Listener.Addr().String(), request, n)
	arrived.Wait()
	cost := (inUse() - before) / int64(n)
	for _, c := range conns {
		c.Close()
	}
	return cost
}

// Thousands of requests that wait cost little beside what net/http keeps for each,
// and when their callers leave nothing of them is left.
//
// Contract: Q3 E5
func TestManyWaiters(t *testing.T) {
	n := 2000
	if v, err := strconv.Atoi(os.Getenv("IOP_WAITERS")); err == nil {
		n = v
	}
	f := ioptest.Start(t, ioptest.Options{Quiet: true, Edge: func(e *configs.Edge) {
		e.Queue.Depth = n
		e.Nodes[0].Adapters[0].Capacity = 1
	}})
	body := ioptest.Chat(true)
	addr := strings.TrimSuffix(strings.TrimPrefix(f.Info.BaseURL, "http://"), "/v1")
	request := fmt.Sprintf("POST /v1/chat/completions HTTP/1.1\r\nHost: %s\r\nAuthorization: Bearer %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s",
		addr, f.Info.APIKey, len(body), body)
	plain := plainWaiter(t, request, n)

	release := make(chan struct{})
	f.Provider.Next(fakeprovider.SSEHead(), fakeprovider.Chunk(chunkEvent(1)), fakeprovider.Wait(release), fakeprovider.Chunk(doneEvent), fakeprovider.LastChunk())
	first := hold(t, addr, request, 1)[0] // it has the one place
	waitFor(t, f, func(held, waiting int) bool { return held == 1 })
	before := inUse()
	conns := hold(t, addr, request, n)
	waitFor(t, f, func(held, waiting int) bool { return waiting == n })
	each := (inUse() - before) / int64(n)
	t.Logf("%d waiting: %d bytes each, %d in net/http alone", n, each, plain)
	if each > plain+4<<10 {
		t.Errorf("a waiting request costs %d bytes, %d more than net/http's own", each, each-plain)
	}
	for _, c := range conns[1:] {
		c.Close()
	}
	waitFor(t, f, func(held, waiting int) bool { return held == 1 && waiting == 1 })
	f.Provider.Next(fakeprovider.SSE(chunkEvent(2), doneEvent)...)
	close(release)
	for _, c := range []net.Conn{first, conns[0]} { // the one that stayed is served
		resp, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(resp.Body)
		if err != nil || !strings.HasSuffix(string(b), doneEvent) {
			t.Errorf("%q %v", b, err)
		}
		c.Close()
	}
	waitFor(t, f, func(held, waiting int) bool { return held == 0 && waiting == 0 })
}

// waitFor waits until the pool shows it.
func waitFor(t *testing.T, f *ioptest.Fabric, ok func(held, waiting int) bool) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	hang := time.After(ioptest.Hang)
	for {
		s, err := f.Edge.State(t.Context())
		if err == nil && ok(s.Pool.Held, s.Pool.Waiting) {
			return
		}
		select {
		case <-tick.C:
		case <-hang:
			t.Fatalf("held %d, waiting %d, %v", s.Pool.Held, s.Pool.Waiting, err)
		}
	}
}
