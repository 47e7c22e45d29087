package membus_test

import (
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/iop-fabric/iop/internal/bus"
	"github.com/iop-fabric/iop/internal/bus/bustest"
	"github.com/iop-fabric/iop/internal/bus/membus"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type fabric struct {
	bus *membus.Bus
	n   int
}

func (f *fabric) Connect(t *testing.T) bus.Conn {
	f.n++
	c := f.bus.Connect(fmt.Sprintf("_INBOX.c%d", f.n))
	t.Cleanup(c.Close)
	return c
}

func (f *fabric) Lose(t *testing.T, c bus.Conn) {
	mem, ok := c.(*membus.Conn)
	if !ok {
		t.Fatalf("not a membus connection: %T", c)
	}
	mem.Kill(nil)
}

func TestSuite(t *testing.T) {
	bustest.Run(t, func(*testing.T) bustest.Fabric { return &fabric{bus: membus.New()} })
}

func TestMatch(t *testing.T) {
	for _, c := range []struct {
		pattern, subject string
		want             bool
	}{
		{"a.b", "a.b", true},
		{"a.b", "a", false},
		{"a", "a.b", false},
		{"a.*", "a.b", true},
		{"a.*", "a", false},
		{"a.*", "a.b.c", false},
		{"*.b", "a.b", true},
		{"a.>", "a.b", true},
		{"a.>", "a.b.c", true},
		{"a.>", "a", false},
		{">", "a", true},
		{"a.*.c", "a.b.c", true},
		{"a.*.c", "a.b.d", false},
		{"a.*.>", "a.b", false},
	} {
		if got := membus.Match(c.pattern, c.subject); got != c.want {
			t.Errorf("Match(%q, %q) = %v", c.pattern, c.subject, got)
		}
	}
}

// pair makes a bus whose second connection records what comes to "t.>".
func pair(t *testing.T, seed uint64) (b *membus.Bus, from, to *membus.Conn, got *record) {
	t.Helper()
	b = membus.NewSeeded(seed)
	from, to = b.Connect("_INBOX.from"), b.Connect("_INBOX.to")
	got = new(record)
	if _, err := to.Subscribe("t.>", got.add); err != nil {
		t.Fatal(err)
	}
	return b, from, to, got
}

type record struct {
	mu   sync.Mutex
	data []string
}

func (r *record) add(m bus.Msg) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.data = append(r.data, string(m.Data))
}

// take returns what came once every goroutine of the bubble waits.
func (r *record) take() string {
	synctest.Wait()
	r.mu.Lock()
	defer r.mu.Unlock()
	data := r.data
	r.data = nil
	return fmt.Sprint(data)
}

func publish(t *testing.T, c *membus.Conn, data ...string) {
	t.Helper()
	for _, d := range data {
		if err := c.Publish("t.x", []byte(d)); err != nil {
			t.Fatal(err)
		}
	}
}

func expect(t *testing.T, r *record, want ...string) {
	t.Helper()
	if got := r.take(); got != fmt.Sprint(want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestFaults(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, from, to, got := pair(t, 1)
		defer from.Close()
		defer to.Close()

		stop := b.Inject(membus.Fault{Subject: "t.x", Drop: 1, Limit: 2})
		publish(t, from, "1", "2", "3")
		expect(t, got, "3")
		stop()

		stop = b.Inject(membus.Fault{Duplicate: 1})
		publish(t, from, "1", "2")
		expect(t, got, "1", "1", "2", "2")
		stop()

		stop = b.Inject(membus.Fault{Delay: time.Hour})
		began := time.Now()
		publish(t, from, "1", "2")
		expect(t, got)
		stop()
		publish(t, from, "3")
		expect(t, got, "3")
		<-time.After(time.Hour)
		expect(t, got, "1", "2")
		if time.Since(began) != time.Hour {
			t.Errorf("an hour took %v", time.Since(began))
		}

		stop = b.Inject(membus.Fault{Drop: 1, Only: func(_ string, data []byte) bool { return string(data) == "2" }})
		publish(t, from, "1", "2", "3")
		expect(t, got, "1", "3")
		stop()
		if s := b.Stats(); s.Dropped != 3 || s.Duplicated != 2 || s.Delayed != 2 {
			t.Errorf("stats %+v", s)
		}
	})
}

func TestJitterReordersAndIsSeeded(t *testing.T) {
	run := func(seed uint64) (out string) {
		synctest.Test(t, func(t *testing.T) {
			b, from, to, got := pair(t, seed)
			defer from.Close()
			defer to.Close()
			b.Inject(membus.Fault{Jitter: time.Second, Drop: 0.2, Duplicate: 0.2})
			for i := range 50 {
				publish(t, from, fmt.Sprint(i))
			}
			<-time.After(2 * time.Second)
			out = got.take()
		})
		return out
	}
	a, again, other := run(7), run(7), run(8)
	if a != again {
		t.Errorf("one seed, two outcomes:\n%s\n%s", a, again)
	}
	if a == other {
		t.Error("two seeds, one outcome")
	}
}

func TestHoldAndTap(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, from, to, got := pair(t, 1)
		defer from.Close()
		defer to.Close()
		var seen []string
		untap := b.Tap("t.*", func(m bus.Msg) { seen = append(seen, string(m.Data)) })
		release := b.Hold("t.x")
		publish(t, from, "1", "2")
		if err := from.Publish("t.y", []byte("3")); err != nil {
			t.Fatal(err)
		}
		expect(t, got, "3")
		release()
		expect(t, got, "1", "2")
		untap()
		publish(t, from, "4")
		expect(t, got, "4")
		if fmt.Sprint(seen) != "[1 2 3]" {
			t.Errorf("the tap saw %v", seen)
		}
	})
}

func TestCutIsSilentAndRestoreIsTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, from, to, got := pair(t, 1)
		defer from.Close()
		defer to.Close()
		notices := 0
		if _, err := from.Subscribe("_INBOX.from.>", func(bus.Msg) { notices++ }); err != nil {
			t.Fatal(err)
		}
		to.Cut()
		publish(t, from, "1")
		if err := from.PublishRequest("t.x", "_INBOX.from.nr", nil); err != nil {
			t.Fatal(err)
		}
		expect(t, got)
		if notices != 0 {
			t.Error("a cut subscriber was reported as gone")
		}
		from.Cut()
		to.Restore()
		publish(t, from, "2")
		expect(t, got)
		if err := from.Flush(t.Context()); err == nil {
			t.Error("a cut connection was flushed")
		}
		from.Restore()
		publish(t, from, "3")
		expect(t, got, "3")
		for _, c := range []*membus.Conn{from, to} {
			select {
			case <-c.Reconnected():
			default:
				t.Error("Restore was not told")
			}
		}
	})
}

func TestKillGivesItsCause(t *testing.T) {
	c := membus.New().Connect("_INBOX.c")
	gone := errors.New("kicked")
	c.Kill(gone)
	c.Kill(errors.New("again"))
	<-c.Closed()
	if !errors.Is(c.Err(), gone) {
		t.Errorf("Err is %v", c.Err())
	}
}
