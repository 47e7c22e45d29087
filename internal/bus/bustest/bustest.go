// Package bustest is the suite every bus must pass: what bus.Conn promises, and
// nothing about how.
package bustest

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/iop-fabric/iop/internal/bus"
	"github.com/iop-fabric/iop/wire"
)

// Fabric makes connections to one bus. They may publish and subscribe below
// "t.", and are answered below inboxes of their own.
type Fabric interface {
	// Connect makes a new connection that does not come back by itself.
	Connect(t *testing.T) bus.Conn
	// Lose ends a connection of Connect from the outside, as a crash of the bus
	// or of the network would.
	Lose(t *testing.T, c bus.Conn)
}

// hang is how long an event may take before the test takes it for lost. It
// bounds a failure, never a success.
const hang = 30 * time.Second

// Run runs the suite; fresh makes a bus for each test.
func Run(t *testing.T, fresh func(t *testing.T) Fabric) {
	t.Helper()
	for _, c := range []struct {
		name string
		run  func(t *testing.T, f Fabric)
	}{
		{"PublishReachesEverySubscriber", publishReaches},
		{"WildcardsMatch", wildcards},
		{"B1Order", order},
		{"B1OrderOverSubjects", orderOverSubjects},
		{"B2OneGoroutine", oneGoroutine},
		{"B4Ownership", ownership},
		{"NoRespondersNotice", noResponders},
		{"NoNoticeWithASubscriber", noNotice},
		{"Request", request},
		{"RequestNobody", requestNobody},
		{"RequestEndsWithItsContext", requestContext},
		{"Unsubscribe", unsubscribe},
		{"LargestMessage", largest},
		{"TooLarge", tooLarge},
		{"BadSubject", badSubject},
		{"CloseSendsWhatWasPublished", closeSends},
		{"ClosedAnswersErrClosed", closedAnswers},
		{"CloseTwice", closeTwice},
		{"LossIsNoticed", lossNoticed},
		{"LossEndsARequest", lossEndsRequest},
	} {
		t.Run(c.name, func(t *testing.T) { c.run(t, fresh(t)) })
	}
}

func publishReaches(t *testing.T, f Fabric) {
	a, b := f.Connect(t), f.Connect(t)
	atA, atB := collect(t, a, "t.x"), collect(t, b, "t.x")
	must(t, b.Publish("t.x", []byte("hello")))
	must(t, b.Publish("t.y", []byte("not for us")))
	for _, ch := range []<-chan bus.Msg{atA, atB} {
		m := receive(t, ch)
		if m.Subject != "t.x" || string(m.Data) != "hello" || m.Reply != "" || m.NoResponders {
			t.Errorf("got %+v", m)
		}
	}
}

func wildcards(t *testing.T, f Fabric) {
	a, b := f.Connect(t), f.Connect(t)
	star, rest := collect(t, a, "t.*.c"), collect(t, a, "t.b.>")
	for _, s := range []string{"t.b", "t.c", "t.b.d", "t.b.c.d", "t.b.c"} {
		must(t, b.Publish(s, nil))
	}
	if m := receive(t, star); m.Subject != "t.b.c" {
		t.Errorf("t.*.c got %q", m.Subject)
	}
	for _, want := range []string{"t.b.d", "t.b.c.d", "t.b.c"} {
		if m := receive(t, rest); m.Subject != want {
			t.Errorf("t.b.> got %q, want %q", m.Subject, want)
		}
	}
}

func order(t *testing.T, f Fabric) {
	a, b := f.Connect(t), f.Connect(t)
	got := collect(t, a, "t.order")
	const n = 2000
	for i := range uint64(n) {
		must(t, b.Publish("t.order", binary.BigEndian.AppendUint64(nil, i)))
	}
	for i := range uint64(n) {
		if m := receive(t, got); binary.BigEndian.Uint64(m.Data) != i {
			t.Fatalf("message %d is %d", i, binary.BigEndian.Uint64(m.Data))
		}
	}
}

// Contract: U3
func orderOverSubjects(t *testing.T, f Fabric) {
	a, b := f.Connect(t), f.Connect(t)
	got := collect(t, a, "t.many.>")
	const n = 2000
	for i := range uint64(n) {
		size := 8 + int(i%7)*500
		data := binary.BigEndian.AppendUint64(make([]byte, 0, size), i)[:size]
		must(t, b.Publish(fmt.Sprintf("t.many.%d", i%31), data))
	}
	for i := range uint64(n) {
		if m := receive(t, got); binary.BigEndian.Uint64(m.Data) != i {
			t.Fatalf("message %d is %d", i, binary.BigEndian.Uint64(m.Data))
		}
	}
}

func oneGoroutine(t *testing.T, f Fabric) {
	a, b, c := f.Connect(t), f.Connect(t), f.Connect(t)
	var (
		mu      sync.Mutex // held by a callback while it runs
		overlap bool
		count   int
	)
	const n = 500
	done := make(chan struct{})
	_, err := a.Subscribe("t.one", func(bus.Msg) {
		if !mu.TryLock() {
			overlap = true
			return
		}
		defer mu.Unlock()
		if count++; count == 2*n {
			close(done)
		}
	})
	must(t, err)
	flush(t, a)
	var senders sync.WaitGroup
	for _, from := range []bus.Conn{b, c} {
		senders.Go(func() {
			for range n {
				if err := from.Publish("t.one", []byte("x")); err != nil {
					t.Error(err)
				}
			}
		})
	}
	senders.Wait()
	wait(t, done, "all callbacks")
	if overlap {
		t.Error("two callbacks of one subscription ran at once")
	}
}

func ownership(t *testing.T, f Fabric) {
	a, b := f.Connect(t), f.Connect(t)
	one, two := collect(t, a, "t.own"), collect(t, a, "t.*")
	buf := []byte("first")
	must(t, b.Publish("t.own", buf))
	copy(buf, "other") // the publisher's again
	must(t, b.Publish("t.own", buf))
	m := receive(t, one)
	if string(m.Data) != "first" {
		t.Errorf("the message changed after Publish returned: %q", m.Data)
	}
	copy(m.Data, "XXXXX") // the callback's own
	if second := receive(t, one); string(second.Data) != "other" || string(m.Data) != "XXXXX" {
		t.Errorf("a later message wrote over an earlier one: %q, %q", m.Data, second.Data)
	}
	if m := receive(t, two); string(m.Data) != "first" {
		t.Errorf("two subscriptions share one message: %q", m.Data)
	}
}

// Contract: G4
func noResponders(t *testing.T, f Fabric) {
	a := f.Connect(t)
	reply := a.Inbox() + ".nr.run1"
	notices := collect(t, a, a.Inbox()+".nr.*")
	must(t, a.PublishRequest("t.nobody", reply, []byte("body")))
	m := receive(t, notices)
	if !m.NoResponders || m.Subject != reply || len(m.Data) != 0 {
		t.Errorf("got %+v", m)
	}
}

func noNotice(t *testing.T, f Fabric) {
	a, b := f.Connect(t), f.Connect(t)
	notices := collect(t, a, a.Inbox()+".nr.*")
	reply := a.Inbox() + ".nr.run1"
	got := collect(t, b, "t.somebody")
	must(t, a.PublishRequest("t.somebody", reply, []byte("body")))
	if m := receive(t, got); m.Reply != reply || string(m.Data) != "body" {
		t.Errorf("got %+v", m)
	}
	must(t, a.PublishRequest("t.nobody", a.Inbox()+".nr.end", nil)) // its notice comes behind any other
	if m := receive(t, notices); m.Subject != a.Inbox()+".nr.end" {
		t.Errorf("a notice for a message that was read: %+v", m)
	}
}

func request(t *testing.T, f Fabric) {
	a, b := f.Connect(t), f.Connect(t)
	_, err := b.Subscribe("t.ask", func(m bus.Msg) {
		if err := b.Publish(m.Reply, append([]byte("re: "), m.Data...)); err != nil {
			t.Error(err)
		}
	})
	must(t, err)
	flush(t, b)
	for i := range 20 {
		q := fmt.Sprintf("question %d", i)
		m, err := a.Request(t.Context(), "t.ask", []byte(q))
		must(t, err)
		if string(m.Data) != "re: "+q {
			t.Errorf("%q was answered %q", q, m.Data)
		}
	}
}

func requestNobody(t *testing.T, f Fabric) {
	a := f.Connect(t)
	if m, err := a.Request(t.Context(), "t.nobody", nil); !errors.Is(err, bus.ErrNoResponders) {
		t.Errorf("got %+v, %v", m, err)
	}
}

func requestContext(t *testing.T, f Fabric) {
	a, b := f.Connect(t), f.Connect(t)
	asked := collect(t, b, "t.silent")
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-asked
		cancel()
	}()
	if m, err := a.Request(ctx, "t.silent", nil); !errors.Is(err, context.Canceled) {
		t.Errorf("got %+v, %v", m, err)
	}
}

func unsubscribe(t *testing.T, f Fabric) {
	a, b := f.Connect(t), f.Connect(t)
	got := make(chan bus.Msg, 16)
	s, err := a.Subscribe("t.short", func(m bus.Msg) { got <- m })
	must(t, err)
	mark := collect(t, a, "t.mark")
	flush(t, a)
	must(t, b.Publish("t.short", []byte("1")))
	if m := receive(t, got); string(m.Data) != "1" {
		t.Errorf("got %q", m.Data)
	}
	must(t, s.Unsubscribe())
	flush(t, a)
	must(t, b.Publish("t.short", []byte("2")))
	must(t, b.Publish("t.mark", nil))
	receive(t, mark)
	if len(got) != 0 {
		t.Errorf("a message after Unsubscribe: %q", (<-got).Data)
	}
}

// Contract: J6
func largest(t *testing.T, f Fabric) {
	a, b := f.Connect(t), f.Connect(t)
	got := collect(t, a, "t.large")
	data := bytes.Repeat([]byte{0xA7}, wire.MaxMessage)
	must(t, b.Publish("t.large", data))
	if m := receive(t, got); !bytes.Equal(m.Data, data) {
		t.Errorf("the largest message came as %d bytes", len(m.Data))
	}
}

func tooLarge(t *testing.T, f Fabric) {
	a := f.Connect(t)
	if err := a.Publish("t.large", make([]byte, wire.MaxMessage+1)); !errors.Is(err, bus.ErrTooLarge) {
		t.Errorf("got %v", err)
	}
}

func badSubject(t *testing.T, f Fabric) {
	a := f.Connect(t)
	for _, s := range []string{"", "t x", "t.x\r\nPUB t.y 0"} {
		if err := a.Publish(s, nil); err == nil {
			t.Errorf("published to %q", s)
		}
		if _, err := a.Subscribe(s, func(bus.Msg) {}); err == nil {
			t.Errorf("subscribed %q", s)
		}
	}
}

func closeSends(t *testing.T, f Fabric) {
	a, b := f.Connect(t), f.Connect(t)
	got := collect(t, a, "t.last")
	const n = 100
	for i := range uint64(n) {
		must(t, b.Publish("t.last", binary.BigEndian.AppendUint64(nil, i)))
	}
	b.Close()
	for i := range uint64(n) {
		if m := receive(t, got); binary.BigEndian.Uint64(m.Data) != i {
			t.Fatalf("message %d is %d", i, binary.BigEndian.Uint64(m.Data))
		}
	}
}

func closedAnswers(t *testing.T, f Fabric) {
	a := f.Connect(t)
	if a.Err() != nil {
		t.Errorf("a living connection has the error %v", a.Err())
	}
	a.Close()
	wait(t, a.Closed(), "Closed")
	if err := a.Err(); !errors.Is(err, bus.ErrClosed) {
		t.Errorf("Err is %v", err)
	}
	if err := a.Publish("t.x", nil); !errors.Is(err, bus.ErrClosed) {
		t.Errorf("Publish: %v", err)
	}
	if err := a.PublishRequest("t.x", a.Inbox()+".r", nil); !errors.Is(err, bus.ErrClosed) {
		t.Errorf("PublishRequest: %v", err)
	}
	if _, err := a.Subscribe("t.x", func(bus.Msg) {}); !errors.Is(err, bus.ErrClosed) {
		t.Errorf("Subscribe: %v", err)
	}
	if _, err := a.Request(t.Context(), "t.x", nil); !errors.Is(err, bus.ErrClosed) {
		t.Errorf("Request: %v", err)
	}
	if err := a.Flush(t.Context()); !errors.Is(err, bus.ErrClosed) {
		t.Errorf("Flush: %v", err)
	}
}

func closeTwice(t *testing.T, f Fabric) {
	a := f.Connect(t)
	a.Close()
	a.Close()
	wait(t, a.Closed(), "Closed")
	a.Close()
}

// Contract: F9
func lossNoticed(t *testing.T, f Fabric) {
	a := f.Connect(t)
	f.Lose(t, a)
	wait(t, a.Closed(), "Closed")
	if err := a.Err(); err == nil || errors.Is(err, bus.ErrClosed) {
		t.Errorf("Err is %v: it does not tell a loss from our own Close", err)
	}
	if err := a.Publish("t.x", nil); !errors.Is(err, bus.ErrClosed) {
		t.Errorf("Publish: %v", err)
	}
}

func lossEndsRequest(t *testing.T, f Fabric) {
	a, b := f.Connect(t), f.Connect(t)
	asked := collect(t, b, "t.silent")
	answer := make(chan error, 1)
	go func() {
		_, err := a.Request(t.Context(), "t.silent", nil)
		answer <- err
	}()
	receive(t, asked)
	f.Lose(t, a)
	select {
	case err := <-answer:
		if err == nil {
			t.Error("a request on a lost connection was answered")
		}
	case <-time.After(hang):
		t.Fatal("a request outlived its connection")
	}
}

// collect subscribes and returns what comes, in order.
func collect(t *testing.T, c bus.Conn, pattern string) <-chan bus.Msg {
	t.Helper()
	ch := make(chan bus.Msg, 4096) // more than any test here sends
	_, err := c.Subscribe(pattern, func(m bus.Msg) { ch <- m })
	must(t, err)
	flush(t, c)
	return ch
}

func flush(t *testing.T, c bus.Conn) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), hang)
	defer cancel()
	must(t, c.Flush(ctx))
}

func receive(t *testing.T, ch <-chan bus.Msg) bus.Msg {
	t.Helper()
	select {
	case m := <-ch:
		return m
	case <-time.After(hang):
		t.Fatal("no message came")
		return bus.Msg{}
	}
}

func wait(t *testing.T, ch <-chan struct{}, what string) {
	t.Helper()
	select {
	case <-ch:
	case <-time.After(hang):
		t.Fatalf("%s did not happen", what)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
