package tunnel

import (
	"container/heap"
	"fmt"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/iop-fabric/iop/wire"
)

// model runs one Sender against one Receiver over a channel that loses,
// repeats, delays and reorders, in virtual time.
type model struct {
	now    time.Time
	queue  timeline
	order  int
	faults faults

	send *Sender
	recv *Receiver

	frames    []Frame // to be offered, in order
	offered   int
	released  map[uint64]int
	delivered []uint64
	terminals int
	doneAt    time.Time // SenderDone
	sendErr   *wire.Error
	recvErr   *wire.Error
	sends     int
	credit    uint64 // highest the sender had
	unread    []int  // bodies delivered, not yet consumed
	reading   bool
	ackDue    bool
	failure   string
}

// faults are those of the channel, both ways, until they end.
type faults struct {
	ends          time.Duration
	loss, dup     float64
	delay, jitter time.Duration
	cutFrom, cut  time.Duration // all is lost, and the sender told of a reconnect after it
	silentCut     bool          // or not told
	read          time.Duration // how long the reader takes for a frame
	stallUntil    time.Duration // and until when it reads nothing
	draw          func() float64
}

const ackDelay = 25 * time.Millisecond

func newModel(f faults, frames []Frame) *model {
	m := &model{now: t0, faults: f, frames: frames, released: map[uint64]int{}, send: newSender(), recv: NewReceiver(ReceiverConfig{})}
	if f.cut > 0 && !f.silentCut {
		m.after(f.cutFrom+f.cut, func() { m.sender(SendEvent{Kind: SendReconnected}) })
	}
	if f.stallUntil > 0 {
		m.after(f.stallUntil, m.read)
	}
	return m
}

// run returns when nothing is left to happen, or the sender is done.
func (m *model) run(limit time.Duration) {
	m.offer()
	for m.failure == "" && m.sendErr == nil && m.recvErr == nil && m.doneAt.IsZero() {
		deadline := m.send.Deadline()
		var next time.Time
		switch {
		case len(m.queue) > 0 && (deadline.IsZero() || !deadline.Before(m.queue[0].at)):
			next = m.queue[0].at
		case !deadline.IsZero():
			next = deadline
		default:
			m.failure = fmt.Sprintf("nothing is left to happen after %v: acked %d of %d, credit %d, offered %d",
				m.now.Sub(t0), m.send.Acked(), len(m.frames), m.send.Credit(), m.send.Offered())
			return
		}
		if next.Sub(t0) > limit {
			m.failure = fmt.Sprintf("not done after %v: acked %d of %d", limit, m.send.Acked(), len(m.frames))
			return
		}
		m.now = next
		if len(m.queue) > 0 && m.queue[0].at.Equal(next) {
			e, _ := heap.Pop(&m.queue).(entry)
			e.do()
		} else {
			m.sender(SendEvent{Kind: SendDeadline})
		}
		m.offer()
	}
}

func (m *model) after(d time.Duration, do func()) {
	m.order++
	heap.Push(&m.queue, entry{at: m.now.Add(d), order: m.order, do: do})
}

// cross sends something over the channel.
func (m *model) cross(do func()) {
	age := m.now.Sub(t0)
	f := m.faults
	if age >= f.ends {
		m.after(f.delay, do)
		return
	}
	if age >= f.cutFrom && age < f.cutFrom+f.cut || f.draw() < f.loss {
		return
	}
	copies := 1
	if f.draw() < f.dup {
		copies = 2
	}
	for range copies {
		m.after(f.delay+time.Duration(f.draw()*float64(f.jitter)), do)
	}
}

func (m *model) offer() {
	for m.offered < len(m.frames) {
		f := m.frames[m.offered]
		ok := f.Terminal || m.send.Room(f.Body) || f.Control && f.Body == 0 && m.send.ControlRoom()
		if !ok || m.sendErr != nil || !m.doneAt.IsZero() {
			return
		}
		m.offered++
		f.Seq = m.send.NextSeq()
		m.sender(SendEvent{Kind: Offer, Frame: f})
	}
}

func (m *model) sender(ev SendEvent) {
	for _, ef := range m.send.Step(m.now, ev, nil) {
		switch ef.Kind {
		case SendFrame:
			m.sends++
			if m.released[ef.Frame.Seq] > 0 {
				m.fail("frame %d was sent after its release", ef.Frame.Seq)
			}
			f := ef.Frame
			m.cross(func() { m.receiver(f) })
		case ReleaseFrame:
			m.released[ef.Frame.Seq]++
		case SenderDone:
			m.doneAt = m.now
		case SenderFailed:
			m.sendErr = ef.Err
		}
	}
	// I2, I7
	if m.send.Credit() < m.credit {
		m.fail("the credit shrank")
	}
	m.credit = m.send.Credit()
	if over := TerminalReserve; m.send.Offered() > m.credit+uint64(over) {
		m.fail("offered %d with a credit of %d", m.send.Offered(), m.credit)
	}
}

func (m *model) receiver(f Frame) {
	ev := RecvEvent{Kind: FrameReceived, Seq: f.Seq, Body: f.Body, Digest: f.Seq * 7, Terminal: f.Terminal}
	for _, ef := range m.recv.Step(m.now, ev, nil) {
		if ef.Kind == Deliver {
			m.delivered = append(m.delivered, f.Seq)
			if f.Terminal {
				m.terminals++
			}
			m.unread = append(m.unread, f.Body)
			m.read()
		}
		m.apply(ef)
	}
}

func (m *model) apply(ef RecvEffect) {
	switch ef.Kind {
	case AckNow:
		m.ack()
	case AckSoon:
		if !m.ackDue {
			m.ackDue = true
			m.after(ackDelay, func() {
				if m.ackDue {
					m.ack()
				}
			})
		}
	case ReceiverFailed:
		m.recvErr = ef.Err
	}
}

func (m *model) ack() {
	m.ackDue = false
	a := m.recv.Ack()
	m.cross(func() {
		m.sender(SendEvent{Kind: AckReceived, Acked: a.Acked, Credit: a.Credit, Resend: a.Resend})
	})
}

// read consumes one frame, and after its time the next.
func (m *model) read() {
	if m.reading || len(m.unread) == 0 || m.now.Sub(t0) < m.faults.stallUntil {
		return
	}
	m.reading = true
	m.after(m.faults.read, func() {
		m.reading = false
		body := m.unread[0]
		m.unread = m.unread[1:]
		for _, ef := range m.recv.Step(m.now, RecvEvent{Kind: Consumed, Body: body}, nil) {
			m.apply(ef)
		}
		m.read()
	})
}

func (m *model) fail(format string, args ...any) {
	if m.failure == "" {
		m.failure = fmt.Sprintf(format, args...)
	}
}

// check asserts what must hold when a stream ran to its end.
func (m *model) check(t interface{ Errorf(string, ...any) }) {
	if m.failure != "" || m.sendErr != nil || m.recvErr != nil {
		t.Errorf("%s, sender: %v, receiver: %v", m.failure, m.sendErr, m.recvErr)
		return
	}
	for i, seq := range m.delivered {
		if seq != uint64(i)+1 { //nolint:gosec // small
			t.Errorf("delivery %d is of frame %d", i+1, seq)
			return
		}
	}
	if len(m.delivered) != len(m.frames) || m.terminals != 1 || !m.recv.Done() {
		t.Errorf("%d of %d frames delivered, %d terminals", len(m.delivered), len(m.frames), m.terminals)
	}
	for _, f := range m.frames {
		if n := m.released[f.Seq]; f.Seq != 0 && n != 1 {
			t.Errorf("frame %d was released %d times", f.Seq, n)
		}
	}
	for seq := uint64(1); seq <= uint64(len(m.frames)); seq++ {
		if m.released[seq] != 1 {
			t.Errorf("frame %d was released %d times", seq, m.released[seq])
		}
	}
}

type entry struct {
	at    time.Time
	order int
	do    func()
}

type timeline []entry

func (q timeline) Len() int { return len(q) }
func (q timeline) Less(i, j int) bool {
	return q[i].at.Before(q[j].at) || q[i].at.Equal(q[j].at) && q[i].order < q[j].order
}
func (q timeline) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q *timeline) Push(x any)   { *q = append(*q, x.(entry)) }
func (q *timeline) Pop() any {
	old := *q
	last := old[len(old)-1]
	*q = old[:len(old)-1]
	return last
}

// drawFrames draws a stream: perhaps a start, bodies of all sizes, perhaps
// usages, and the terminal, with or without a body.
func drawFrames(t *rapid.T) []Frame {
	body := rapid.OneOf(rapid.IntRange(0, 300), rapid.IntRange(0, wire.MaxBody), rapid.Just(wire.MaxBody))
	frames := []Frame{}
	if rapid.Bool().Draw(t, "start") {
		frames = append(frames, Frame{Control: true})
	}
	for range rapid.IntRange(0, 120).Draw(t, "bodies") {
		f := Frame{Body: body.Draw(t, "body")}
		f.Control = f.Body == 0
		frames = append(frames, f)
	}
	return append(frames, Frame{Terminal: true, Body: body.Draw(t, "last")})
}

// Contract: J1
// Contract: J2
// Contract: J3
// Contract: T3
func TestPropertyEverythingArrivesOnceInOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		f := faults{
			ends:   4 * time.Second,
			loss:   rapid.Float64Range(0, 0.5).Draw(t, "loss"),
			dup:    rapid.Float64Range(0, 0.5).Draw(t, "dup"),
			delay:  time.Duration(rapid.IntRange(0, 50).Draw(t, "delay")) * time.Millisecond,
			jitter: time.Duration(rapid.IntRange(0, 100).Draw(t, "jitter")) * time.Millisecond,
			read:   time.Duration(rapid.IntRange(0, 20).Draw(t, "read")) * time.Millisecond,
		}
		if rapid.Bool().Draw(t, "cut") {
			f.cutFrom = time.Duration(rapid.IntRange(0, 1000).Draw(t, "from")) * time.Millisecond
			f.cut = time.Duration(rapid.IntRange(0, 3000).Draw(t, "cut ms")) * time.Millisecond
			f.silentCut = rapid.Bool().Draw(t, "silent")
		}
		if rapid.Bool().Draw(t, "stall") {
			f.stallUntil = time.Duration(rapid.IntRange(0, 60000).Draw(t, "stall ms")) * time.Millisecond
		}
		rnd := splitmix(rapid.Uint64().Draw(t, "seed"))
		f.draw = rnd.float
		m := newModel(f, drawFrames(t))
		// After the last fault and the reader's pause: one probe at its slowest
		// (8 s), and the whole stream at a frame a round trip and a read each.
		limit := max(f.ends, f.stallUntil) + 8*time.Second + time.Duration(len(m.frames))*(2*f.delay+f.read+ackDelay) + 4*time.Second
		m.run(limit)
		m.check(t)
	})
}

// splitmix is a small generator, so that one draw of rapid makes a whole run.
type splitmixState uint64

func splitmix(seed uint64) *splitmixState { s := splitmixState(seed); return &s }

func (s *splitmixState) float() float64 {
	*s += 0x9e3779b97f4a7c15
	z := uint64(*s)
	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9
	z = (z ^ (z >> 27)) * 0x94d049bb133111eb
	return float64((z^(z>>31))>>11) / (1 << 53)
}

// A stream that a link's round trip alone holds up has its window doubled once in
// each, from the first, and all of it granted: 32 MiB take the five that it grows in
// and seven and a half windows of 4 MiB.
//
// Contract: J7
func TestBulkTakesFewRoundTrips(t *testing.T) {
	const roundTrip, most = 50 * time.Millisecond, 12
	frames := make([]Frame, 512)
	for i := range frames {
		frames[i] = Frame{Body: wire.MaxBody, Terminal: i == len(frames)-1}
	}
	m := newModel(faults{delay: roundTrip / 2, read: 5 * time.Microsecond}, frames)
	m.run(time.Minute)
	m.check(t)
	if took := m.doneAt.Sub(t0); took >= (most+1)*roundTrip {
		t.Errorf("it took %v, that is %.1f round trips", took, float64(took)/float64(roundTrip))
	}
}
