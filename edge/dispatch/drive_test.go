package dispatch

import (
	"bytes"
	"context"
	"errors"
	"testing"
	"time"

	"github.com/iop-fabric/iop/edge/pool"
	"github.com/iop-fabric/iop/internal/bus"
	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/wire"
	"github.com/iop-fabric/iop/wire/iopv1"
)

// silentConn is a connection that takes everything and brings nothing.
type silentConn struct{ bus.Conn }

func (silentConn) Publish(string, []byte) error                { return nil }
func (silentConn) PublishRequest(string, string, []byte) error { return nil }

// driven is a Dispatcher with a clock of the test's, and one attempt with a body that
// follows.
type driven struct {
	*Driven
	now     time.Time
	returns []pool.Return
	id      subjects.Session
	call    *Call
	run     string
}

func newDriven(body int) *driven {
	d := &driven{now: time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC), id: subjects.Session{Edge: "e", Node: "n", Gen: 1}, run: wire.NewRunID()}
	d.Driven = Drive(New(Config{Edge: "e"}, Deps{
		Bus: silentConn{}, Now: func() time.Time { return d.now },
		Return: func(_ pool.Slot, how pool.Return) { d.returns = append(d.returns, how) },
	}))
	d.call = d.Begin(Attempt{
		RunID: d.run, Slot: pool.Slot{ID: 1, Node: "n", Gen: 1}, Body: bytes.NewReader(make([]byte, body)), BodySize: int64(body),
	}, &answer{})
	d.turn()
	return d
}

func (d *driven) turn() {
	for d.call.Ready() {
		d.call.Turn()
	}
	d.Pass()
}

// ack gives one acknowledgement of the body to the subscription's callback.
func (d *driven) ack(t *testing.T, e *iopv1.StreamAck_Entry) {
	t.Helper()
	e.RunId, e.Direction = d.run, "body"
	data, err := (&iopv1.StreamAck{Entries: []*iopv1.StreamAck_Entry{e}}).MarshalVT()
	if err != nil {
		t.Fatal(err)
	}
	d.Ack(subjects.Message{Session: d.id, Verb: subjects.Ack}, data)
}

// frame gives one frame of the answer to the subscription's callback.
func (d *driven) frame(t *testing.T, f *iopv1.ProviderTunnelFrame) {
	t.Helper()
	f.RunId = d.run
	data, err := f.MarshalVT()
	if err != nil {
		t.Fatal(err)
	}
	d.Frame(subjects.Message{Session: d.id, Verb: subjects.Frame, Run: d.run}, data)
}

// A reset that comes late, beside acknowledgements of what it knew nothing about, is
// not believed, though the first was long ago; a Node that goes on with it is.
//
// Contract: J3 J2
func TestLateResetOfABody(t *testing.T) {
	d := newDriven(200 << 10)
	d.ack(t, &iopv1.StreamAck_Entry{Reset_: true})
	d.turn()
	d.now = d.now.Add(2 * time.Second) // Edge did not run meanwhile
	d.ack(t, &iopv1.StreamAck_Entry{Acked: 1, Credit: wire.MinWindow})
	d.ack(t, &iopv1.StreamAck_Entry{Reset_: true})
	d.turn()
	if res, over := d.call.Result(); over {
		t.Fatalf("it ended: %v", res.Err)
	}
	d.now = d.now.Add(resetBound)
	d.ack(t, &iopv1.StreamAck_Entry{Reset_: true})
	d.turn()
	if res, over := d.call.Result(); !over || res.Err.Class != wire.Protocol {
		t.Fatalf("a Node that forgot the run: %v %v", res, over)
	}
}

// What is driven gives slots back as what waits does.
//
// Contract: P8
func TestDrivenAttemptReturnsItsSlotOnce(t *testing.T) {
	d := newDriven(10)
	d.call.Leave(context.Canceled)
	d.turn()
	if res, over := d.call.Result(); !over || res.Err.Class != wire.Cancelled || !errors.Is(res.Err, errCallerGone) {
		t.Fatalf("%v %v", res, over)
	}
	if len(d.returns) != 0 {
		t.Fatal("a caller who left frees nothing by leaving")
	}
	began := d.now
	var left time.Time
	for at := d.Deadline(); !at.IsZero(); at = d.Deadline() { // cancels that go out again, then the bound
		if len(d.returns) == 0 {
			left = at
		}
		d.now = at
		d.Pass()
	}
	if left != began.Add(wire.CancelBound) {
		t.Fatalf("the slot came back after %v", left.Sub(began))
	}
	if len(d.returns) != 1 || d.returns[0] != pool.ByCancelBound {
		t.Fatal(d.returns)
	}
}

// Once the Node's terminal came nobody waits for what it took of the body: it has ended
// and answers for it no more, however slowly the caller reads what is there.
//
// Contract: J3 J4
func TestTerminalEndsTheUpload(t *testing.T) {
	d := newDriven(100_000)
	d.ack(t, &iopv1.StreamAck_Entry{Acked: 1, Credit: 1 << 20}) // the last frame's was lost
	d.turn()
	const pause, n = 500 * time.Millisecond, 60 // thrice the bound of silence
	frames := []*iopv1.ProviderTunnelFrame{frameOf(1, start, "a")}
	for seq := uint64(2); seq < n; seq++ {
		frames = append(frames, frameOf(seq, body, "b"))
	}
	frames = append(frames, frameOf(n, end, ""))
	for _, f := range frames {
		d.frame(t, f)
	}
	for range frames { // one of them at each turn
		d.now = d.now.Add(pause)
		d.call.Turn()
		d.Pass()
	}
	if res, over := d.call.Result(); !over || res.Err != nil {
		t.Fatalf("%v, over: %v", res.Err, over)
	}
}

// While the Edge itself stood still a Node may have sent what is missing: that time is
// no part of the ten seconds.
//
// Contract: J2 J5
func TestGapWhileTheEdgeStoodStill(t *testing.T) {
	for pause, want := range map[time.Duration]time.Duration{0: silenceBound, 4 * time.Second: silenceBound + 3*time.Second, time.Minute: silenceBound + 59*time.Second} {
		d := newDriven(10)
		d.frame(t, frameOf(1, start, ""))
		d.frame(t, frameOf(3, body, "c"))
		d.turn()
		began := d.now
		d.now = d.now.Add(pause) // nothing runs; then the first look is late by all but a second
		for _, over := d.call.Result(); !over; _, over = d.call.Result() {
			if at := d.call.Deadline(); at.After(d.now) {
				d.now = at
			}
			d.call.Turn()
		}
		if res, _ := d.call.Result(); res.Err.Class != wire.Protocol || d.now.Sub(began) != want {
			t.Errorf("paused for %v it ended after %v: %v", pause, d.now.Sub(began), res.Err)
		}
	}
}
