package tunnel

import (
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/iop-fabric/iop/wire"
)

// body makes the next body frame of this size.
func body(s *Sender, n int) SendEvent {
	return SendEvent{Kind: Offer, Frame: Frame{Seq: s.NextSeq(), Body: n}}
}

func terminal(s *Sender) SendEvent {
	return SendEvent{Kind: Offer, Frame: Frame{Seq: s.NextSeq(), Terminal: true}}
}

func acked(seq uint64, s *Sender) SendEvent {
	return SendEvent{Kind: AckReceived, Acked: seq, Credit: s.Offered() + wire.MinWindow}
}

func count(effects []SendEffect, kind SendEffectKind) (n int) {
	for _, ef := range effects {
		if ef.Kind == kind {
			n++
		}
	}
	return n
}

// Contract: T3
func TestI1SequencesBeginAtOne(t *testing.T) {
	s := newSender()
	for want := uint64(1); want <= 3; want++ {
		if s.NextSeq() != want {
			t.Fatalf("next is %d, want %d", s.NextSeq(), want)
		}
		s.Step(t0, body(s, 1), nil)
	}
}

// A local breach is a bug of ours and stops the process with its rule's name.
func TestLocalBreachesPanic(t *testing.T) {
	full := func() *Sender {
		s := NewSender(SenderConfig{Credit: MaxCost})
		s.Step(t0, body(s, wire.MaxBody), nil)
		return s
	}
	closed := func() *Sender {
		s := newSender()
		s.Step(t0, terminal(s), nil)
		return s
	}
	for _, c := range []struct {
		name, rule string
		do         func()
	}{
		{"wrong sequence", "I1", func() { newSender().Step(t0, SendEvent{Kind: Offer, Frame: Frame{Seq: 2}}, nil) }},
		{"no room", "I2", func() { s := full(); s.Step(t0, body(s, 1), nil) }},
		{"control with a body is a body", "I2", func() {
			s := full()
			s.Step(t0, SendEvent{Kind: Offer, Frame: Frame{Seq: 2, Body: 1, Control: true}}, nil)
		}},
		{"no control room", "I2", func() {
			s := full()
			for range ControlReserve/wire.FrameOverhead + 1 {
				s.Step(t0, SendEvent{Kind: Offer, Frame: Frame{Seq: s.NextSeq(), Control: true}}, nil)
			}
		}},
		{"body too large", "I2", func() { s := newSender(); s.Step(t0, body(s, wire.MaxBody+1), nil) }},
		{"negative body", "I2", func() { s := newSender(); s.Step(t0, body(s, -1), nil) }},
		{"after the terminal", "I3", func() { s := closed(); s.Step(t0, body(s, 1), nil) }},
		{"after the end", "I3", func() {
			s := closed()
			s.Step(t0, acked(1, s), nil)
			s.Step(t0, body(s, 1), nil)
		}},
		{"consumed too much", "I7", func() {
			NewReceiver(ReceiverConfig{}).Step(t0, RecvEvent{Kind: Consumed, Body: 1}, nil)
		}},
	} {
		func() {
			defer func() {
				if msg, _ := recover().(string); !strings.HasPrefix(msg, "BUG: tunnel "+c.rule+":") {
					t.Errorf("%s: got %q, want a breach of %s", c.name, msg, c.rule)
				}
			}()
			c.do()
		}()
	}
}

// A window full of body cannot hold control frames or the terminal back, and
// the receiver takes what the reserve allows and not a frame more.
//
// Contract: J1
func TestI2ReserveIsCountedAlike(t *testing.T) {
	s := NewSender(SenderConfig{Credit: 2 * MaxCost})
	r := NewReceiver(ReceiverConfig{Window: 2 * MaxCost, MaxWindow: 2 * MaxCost})
	deliver := func(body int, terminal bool) {
		t.Helper()
		seq := s.NextSeq()
		s.Step(t0, SendEvent{Kind: Offer, Frame: Frame{Seq: seq, Body: body, Control: body == 0, Terminal: terminal}}, nil)
		out := r.Step(t0, RecvEvent{Kind: FrameReceived, Seq: seq, Body: body, Terminal: terminal}, nil)
		if len(out) == 0 || out[0].Kind != Deliver {
			t.Fatalf("frame %d: %+v", seq, out)
		}
	}
	deliver(wire.MaxBody, false)
	deliver(wire.MaxBody, false)
	if s.Room(0) {
		t.Error("room in a full window")
	}
	n := 0
	for ; s.ControlRoom(); n++ {
		deliver(0, false)
	}
	if n != ControlReserve/wire.FrameOverhead {
		t.Errorf("%d control frames passed a full window", n)
	}
	over := *r
	out := over.Step(t0, RecvEvent{Kind: FrameReceived, Seq: s.NextSeq()}, nil)
	if len(out) != 1 || out[0].Kind != ReceiverFailed || out[0].Err.Class != wire.Protocol {
		t.Errorf("a control frame beyond the reserve: %+v", out)
	}
	deliver(wire.MaxBody, true)
	if !r.Done() {
		t.Error("the terminal did not end the stream")
	}
}

// Contract: J4
func TestI3OneTerminalAndNothingAfter(t *testing.T) {
	r := NewReceiver(ReceiverConfig{})
	r.Step(t0, RecvEvent{Kind: FrameReceived, Seq: 1, Terminal: true}, nil)
	breaches := 0
	for seq := uint64(1); seq < 10; seq++ {
		for _, ef := range r.Step(t0, RecvEvent{Kind: FrameReceived, Seq: seq, Terminal: seq%2 == 0}, nil) {
			switch ef.Kind {
			case Deliver:
				t.Errorf("frame %d was delivered after the terminal", seq)
			case ReceiverFailed:
				breaches++
			}
		}
	}
	if breaches != 1 || !r.Done() {
		t.Errorf("%d breaches were reported, done %v", breaches, r.Done())
	}
}

// Whatever ends a stream, each frame comes back exactly once.
func TestI5EveryFrameIsReleasedOnce(t *testing.T) {
	ends := map[string][]SendEvent{
		"stopped":      {{Kind: SendStopped}},
		"reset":        {{Kind: AckReceived, Reset: true}},
		"breach":       {{Kind: AckReceived, Acked: 99}},
		"twice ended":  {{Kind: SendStopped}, {Kind: SendStopped}, {Kind: AckReceived, Reset: true}},
		"acked, ended": {{Kind: AckReceived, Acked: 2}, {Kind: SendStopped}},
	}
	for name, events := range ends {
		s := NewSender(SenderConfig{Credit: 2 * MaxCost})
		released := map[uint64]int{}
		step := func(ev SendEvent) {
			for _, ef := range s.Step(t0, ev, nil) {
				if ef.Kind == ReleaseFrame {
					released[ef.Frame.Seq]++
				}
			}
		}
		step(body(s, wire.MaxBody))
		step(body(s, wire.MaxBody)) // acknowledged, it is held to probe with
		for _, ev := range events {
			step(ev)
		}
		if s.NextSeq() == 3 && name != "acked, ended" {
			step(body(s, 1)) // offered in ignorance of the end
		}
		for seq := uint64(1); seq < s.NextSeq(); seq++ {
			if released[seq] != 1 {
				t.Errorf("%s: frame %d was released %d times", name, seq, released[seq])
			}
		}
		if !s.Deadline().IsZero() {
			t.Errorf("%s: a timer is left", name)
		}
	}
}

// Round trips are read from frames sent once only; an outage leaves no trace.
func TestRTTIgnoresRepetitions(t *testing.T) {
	s := newSender()
	s.Step(t0, body(s, 1), nil)
	s.Step(at(10*time.Millisecond), acked(1, s), nil)
	s.Step(at(time.Second), body(s, 1), nil)
	s.Step(at(time.Second), body(s, 1), nil)
	s.Step(at(4*time.Second), SendEvent{Kind: SendDeadline}, nil) // the last is sent again
	s.Step(at(5*time.Second), acked(3, s), nil)
	s.Step(at(6*time.Second), body(s, 1), nil)
	if got := s.Deadline().Sub(at(6 * time.Second)); got != defaultMinRTO {
		t.Errorf("the timer is %v after an outage, want %v", got, defaultMinRTO)
	}
}

func TestRTOFollowsTheRoundTrip(t *testing.T) {
	for _, c := range []struct{ rtt, want time.Duration }{
		{time.Millisecond, defaultMinRTO},
		{300 * time.Millisecond, 2*300*time.Millisecond + defaultAckDelay},
		{800 * time.Millisecond, 2*800*time.Millisecond + defaultAckDelay},
		{5 * time.Second, slowestRTO},
	} {
		s := newSender()
		s.Step(t0, body(s, 1), nil)
		s.Step(t0.Add(c.rtt), acked(1, s), nil)
		s.Step(t0.Add(c.rtt), body(s, 1), nil)
		if got := s.Deadline().Sub(t0.Add(c.rtt)); got != c.want {
			t.Errorf("round trip %v: timer %v, want %v", c.rtt, got, c.want)
		}
	}
}

// A first credit is a number of the peer's like any other.
//
// Contract: J8
func TestI6HostileFirstCredit(t *testing.T) {
	s := NewSender(SenderConfig{Credit: ^uint64(0)})
	n := 0
	for ; s.Room(wire.MaxBody); n++ {
		s.Step(t0, body(s, wire.MaxBody), nil)
		if n > 100 {
			t.Fatal("the credit has no end")
		}
	}
	if !s.ControlRoom() {
		t.Error("the reserve overflowed")
	}
}

// run moves frames frames of size through the model without faults.
func run(t *testing.T, frames, size int, f faults) *model {
	t.Helper()
	f.draw = splitmix(1).float
	list := make([]Frame, 0, frames+1)
	for range frames {
		list = append(list, Frame{Body: size})
	}
	m := newModel(f, append(list, Frame{Terminal: true}))
	m.run(time.Hour)
	m.check(t)
	return m
}

// Contract: J7
func TestI7WindowGrowsWhereItIsTheLimit(t *testing.T) {
	far := run(t, 2000, wire.MaxBody, faults{delay: 20 * time.Millisecond})
	if got := far.recv.Window(); got != wire.MaxWindow {
		t.Errorf("a bulk stream over 40 ms has a window of %d", got)
	}
	slow := run(t, 200, wire.MaxBody, faults{delay: time.Millisecond, read: 20 * time.Millisecond})
	if got := slow.recv.Window(); got != wire.MinWindow {
		t.Errorf("a stream with a slow reader has a window of %d", got)
	}
}

// A model's answer: small frames, far slower than the window. It must not earn
// megabytes of memory for it, however long it goes on.
//
// Contract: J7
func TestI7WindowOfASlowSourceStays(t *testing.T) {
	r := NewReceiver(ReceiverConfig{})
	now := t0
	for seq := uint64(1); seq <= 50_000; seq++ {
		now = now.Add(20 * time.Millisecond)
		r.Step(now, RecvEvent{Kind: FrameReceived, Seq: seq, Body: 300}, nil)
		r.Step(now, RecvEvent{Kind: Consumed, Body: 300}, nil)
		r.Ack()
	}
	if r.Window() != wire.MinWindow {
		t.Errorf("the window is %d", r.Window())
	}
}

// The sender is starved, all it sent is acknowledged, and every grant the reader
// then earns it is lost: only its probe can get things going again.
//
// Contract: J7
func TestLostCreditDoesNotStopAStream(t *testing.T) {
	m := run(t, 20, wire.MaxBody, faults{
		delay: time.Millisecond, stallUntil: time.Second, silentCut: true,
		cutFrom: 900 * time.Millisecond, cut: 600 * time.Millisecond, ends: 1500 * time.Millisecond,
	})
	if took := m.doneAt.Sub(t0); took > 10*time.Second {
		t.Errorf("done after %v", took)
	}
	// A pause without loss costs few probes.
	m = run(t, 100, wire.MaxBody, faults{stallUntil: 5 * time.Minute, delay: time.Millisecond})
	if m.sends > 250 {
		t.Errorf("%d frames were sent for 101 while the reader paused", m.sends)
	}
}

// Acknowledgements may overtake each other: what an older one says takes nothing
// back of what a newer one granted and acknowledged.
//
// Contract: J1
func TestI2AnOlderAcknowledgementTakesNothingBack(t *testing.T) {
	s := NewSender(SenderConfig{Credit: MaxCost})
	s.Step(t0, body(s, 1), nil)
	s.Step(t0, body(s, 1), nil)
	newer, older := s.Offered()+wire.MinWindow, s.Offered()
	s.Step(t0, SendEvent{Kind: AckReceived, Acked: 2, Credit: newer}, nil)
	s.Step(t0, SendEvent{Kind: AckReceived, Acked: 1, Credit: older}, nil)
	if s.Credit() != newer || s.Acked() != 2 || !s.Room(wire.MaxBody) {
		t.Errorf("credit %d of %d, %d acknowledged of 2", s.Credit(), newer, s.Acked())
	}
}

// Once all that was in doubt is acknowledged the pace is that of the credit again.
func TestRecoveryEnds(t *testing.T) {
	s := NewSender(SenderConfig{Credit: wire.MaxWindow})
	s.Step(t0, body(s, 1), nil)
	s.Step(t0, SendEvent{Kind: SendReconnected}, nil)
	s.Step(t0, acked(1, s), nil)
	for s.Room(wire.MaxBody) {
		if n := count(s.Step(t0, body(s, wire.MaxBody), nil), SendFrame); n != 1 {
			t.Fatalf("%d frames were sent for one offered", n)
		}
	}
}

// Digests are remembered for the last frames only; an older duplicate is taken
// on trust, for it is not delivered anyway.
//
// Contract: J2
func TestI1OldDuplicatesAreAcknowledged(t *testing.T) {
	r := NewReceiver(ReceiverConfig{})
	for seq := uint64(1); seq <= 3*digests; seq++ {
		r.Step(t0, RecvEvent{Kind: FrameReceived, Seq: seq, Body: 1, Digest: seq}, nil)
	}
	for seq := uint64(1); seq <= 3*digests; seq++ {
		out := r.Step(t0, RecvEvent{Kind: FrameReceived, Seq: seq, Body: 1, Digest: seq}, nil)
		if len(out) != 1 || out[0].Kind != AckNow {
			t.Fatalf("duplicate %d: %+v", seq, out)
		}
	}
}

func TestI7WindowIsBounded(t *testing.T) {
	for _, c := range []struct{ window, most, want uint64 }{
		{0, 0, wire.MinWindow},
		{1, 0, 2 * MaxCost},
		{1 << 40, 1 << 40, wire.MaxWindow},
		{1 << 20, 1, 2 * MaxCost},
	} {
		if got := NewReceiver(ReceiverConfig{Window: c.window, MaxWindow: c.most}).Window(); got != c.want {
			t.Errorf("window %d of at most %d became %d, want %d", c.window, c.most, got, c.want)
		}
	}
}

// A dead link is not fed whole windows: what is sent into it in the time until
// giving up is a few bursts.
func TestOutageSendsLittle(t *testing.T) {
	s := NewSender(SenderConfig{Credit: wire.MaxWindow})
	for s.Room(wire.MaxBody) {
		s.Step(t0, body(s, wire.MaxBody), nil)
	}
	sent, rounds := 0, 0
	for !s.Deadline().IsZero() {
		sent += count(s.Step(s.Deadline(), SendEvent{Kind: SendDeadline}, nil), SendFrame)
		rounds++
	}
	if sent > 4*rounds {
		t.Errorf("%d frames in %d rounds", sent, rounds)
	}
}

// Contract: J7
func TestIdleStreamIsSmall(t *testing.T) {
	s := NewSender(SenderConfig{Credit: wire.MaxWindow})
	for i := 0; i < 5000; i++ {
		s.Step(t0, body(s, 1), nil)
	}
	s.Step(t0, acked(5000, s), nil)
	due := s.Deadline()
	if due.IsZero() {
		t.Fatal("a large ring is kept for ever")
	}
	s.Step(due, SendEvent{Kind: SendDeadline}, nil)
	if !s.Deadline().IsZero() {
		t.Error("an idle stream has a timer")
	}
	idle := unsafe.Sizeof(*s) + uintptr(len(s.ring))*unsafe.Sizeof(slot{}) + unsafe.Sizeof(Receiver{})
	if idle > 2<<10 {
		t.Errorf("both halves of an idle stream take %d bytes", idle)
	}
	if smallest := unsafe.Sizeof(*s) + idleRing*unsafe.Sizeof(slot{}) + unsafe.Sizeof(Receiver{}); smallest > 4<<10 {
		t.Errorf("both halves of a quiet stream take %d bytes", smallest)
	}
	if s.Step(due, body(s, 1), nil); s.n != 1 {
		t.Error("an idle stream cannot go on")
	}
}

// Contract: J9
func TestHotPathAllocatesNothing(t *testing.T) {
	p := newPipe(1024)
	p.round() // the ring and the slices find their size
	if n := testing.AllocsPerRun(1000, p.round); n != 0 {
		t.Errorf("%v allocations per round", n)
	}
}

// pipe is a stream in its steady state, without a channel between the halves.
type pipe struct {
	now  time.Time
	size int
	send *Sender
	recv *Receiver
	out  []SendEffect
	in   []RecvEffect
}

func newPipe(size int) *pipe {
	return &pipe{now: t0, size: size, send: newSender(), recv: NewReceiver(ReceiverConfig{})}
}

const perRound = 3

// round sends a few frames, reads them, and acknowledges once.
func (p *pipe) round() {
	p.now = p.now.Add(50 * time.Microsecond)
	for range perRound {
		seq := p.send.NextSeq()
		p.out = p.send.Step(p.now, SendEvent{Kind: Offer, Frame: Frame{Seq: seq, Body: p.size}}, p.out[:0])
		p.in = p.recv.Step(p.now, RecvEvent{Kind: FrameReceived, Seq: seq, Body: p.size, Digest: seq}, p.in[:0])
		p.in = p.recv.Step(p.now, RecvEvent{Kind: Consumed, Body: p.size}, p.in[:0])
	}
	a := p.recv.Ack()
	p.out = p.send.Step(p.now, SendEvent{Kind: AckReceived, Acked: a.Acked, Credit: a.Credit, Resend: a.Resend}, p.out[:0])
}

func BenchmarkStream(b *testing.B) {
	for name, size := range map[string]int{"1KiB": 1 << 10, "64KiB": wire.MaxBody} {
		b.Run(name, func(b *testing.B) {
			p := newPipe(size)
			b.ReportAllocs()
			b.SetBytes(int64(perRound * size))
			for b.Loop() {
				p.round()
			}
		})
	}
}

func BenchmarkRecovery(b *testing.B) {
	s := NewSender(SenderConfig{Credit: wire.MaxWindow})
	for s.Room(wire.MaxBody) {
		s.Step(t0, body(s, wire.MaxBody), nil)
	}
	var out []SendEffect
	now := t0
	b.ReportAllocs()
	for b.Loop() {
		now = now.Add(time.Millisecond)
		out = s.Step(now, SendEvent{Kind: SendReconnected}, out[:0])
	}
}
