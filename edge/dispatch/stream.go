package dispatch

import (
	"hash/maphash"
	"sync"
	"time"

	"github.com/iop-fabric/iop/edge/pool"
	"github.com/iop-fabric/iop/tunnel"
	"github.com/iop-fabric/iop/wire"
	"github.com/iop-fabric/iop/wire/iopv1"
)

// frame is a decoded message, with the size it keeps alive.
type frame struct {
	iopv1.ProviderTunnelFrame
	size int
}

// frames are reused, for one is needed for every message.
var frames = sync.Pool{New: func() any { return new(frame) }}

func (f *frame) recycle() {
	f.Reset()
	f.size = 0
	frames.Put(f)
}

// inboxSlack is what unread messages may keep alive beyond the window: the
// frames of the reserve and one start with all its headers.
const inboxSlack = tunnel.TerminalReserve + wire.MaxMessage

// stream is one attempt between the callback that receives for it and the
// goroutine of Do that consumes.
type stream struct {
	run    string
	slot   pool.Slot
	sess   *session
	window uint64        // what of the sum of windows it holds
	wake   chan struct{} // 1: a wake-up that is pending says all
	hash   uint64

	mu        sync.Mutex
	life      life
	recv      *tunnel.Receiver
	order     order
	inbox     []*frame // head: the next to take; it is reused once it is empty
	head      int
	unread    int // bytes the inbox keeps alive
	heard     bool
	patient   time.Time // until when a hint that nobody answers is borne
	hinted    bool      // such a hint came since Do looked
	came      time.Time // when the last frame did
	owed      bool      // an acknowledgement is in the session's list
	again     bool      // the next acknowledgement asks for what follows it
	reconnect bool      // the connection was re-made since Do looked

	// Once the rules were broken there is no sequence to keep: all is
	// acknowledged, so that the Node comes to its terminal.
	broken  bool
	highest uint64
	// What may still come honestly of a broken stream: what was on its way.
	inFlight      int // bytes of messages
	inFlightUntil time.Time

	// What came that was not delivered: frames behind a gap, and ones that were there
	// already. Whatever is delivered makes up for a window of it, and time does.
	wasted   int
	wastedAt time.Time

	delivered uint64    // sequences delivered in order
	gapSince  time.Time // since when the next one is missing; zero: it is not

	body bodyAck // what the Node acknowledged of the request's body

	saidAcked, saidCredit uint64 // the most that it ever did, of what it said

	out [4]tunnel.RecvEffect // room for a step's effects
}

// bodyAck is the sum of the acknowledgements that Do has not looked at.
type bodyAck struct {
	pending, resend, reset bool
	acked, credit          uint64
}

// need says when an acknowledgement is due.
type need uint8

const (
	needNone need = iota
	needSoon
	needNow
)

func (s *stream) wakeUp() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

var digestSeed = maphash.MakeSeed()

// fate is what becomes of a received frame.
type fate uint8

const (
	dropped fate = iota
	kept         // it is in the inbox
	last         // it is the terminal: to be delivered once its orders are done
)

// receive takes one message that is of this attempt.
func (s *stream) receive(now time.Time, f *frame, decoded bool, digest uint64) (o orders, n need, b breach, what fate) {
	terminal := false
	if !decoded {
		b = breachUndecodable
	} else {
		terminal, b = check(&f.ProviderTunnelFrame)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.heard, s.came = true, now
	if decoded {
		s.highest = max(s.highest, f.Sequence)
	}
	if s.broken || b != breachNone {
		return s.receiveBroken(now, f.size, terminal, b)
	}
	ev := tunnel.RecvEvent{Kind: tunnel.FrameReceived, Seq: f.Sequence, Body: len(f.Body), Digest: digest, Terminal: terminal}
	deliver := false
	for _, ef := range s.recv.Step(now, ev, s.out[:0]) {
		switch ef.Kind {
		case tunnel.Deliver:
			deliver = true
		case tunnel.AckSoon:
			n = max(n, needSoon)
		case tunnel.AckNow:
			n = max(n, needNow)
		case tunnel.ReceiverFailed:
			if s.recv.Done() { // it had its terminal; the Node answers for the rest
				return orders{}, needNone, breachLate, dropped
			}
			return s.receiveBroken(now, f.size, terminal, breachStream)
		}
	}
	if !deliver {
		if s.waste(now, f.size) {
			return s.receiveBroken(now, f.size, terminal, breachRepeats)
		}
		if f.Sequence > s.delivered+1 && s.gapSince.IsZero() && s.life.state == open {
			s.gapSince = now
			s.wakeUp()
		}
		return orders{}, n, breachNone, dropped
	}
	s.delivered++
	s.wasted = max(0, s.wasted-int(s.recv.Window())) //nolint:gosec // at most 4 MiB
	s.gapSince = time.Time{}
	if b = s.order.next(&f.ProviderTunnelFrame); b != breachNone {
		return s.receiveBroken(now, f.size, terminal, b)
	}
	switch {
	case s.life.state != open || s.life.cut != nil:
		n = max(n, s.consume(now, len(f.Body)))
	case s.unread+f.size > int(s.window)+inboxSlack: //nolint:gosec // a window is at most 4 MiB
		return s.receiveBroken(now, f.size, terminal, breachFlood)
	case terminal:
		what = last
	default:
		s.push(f)
		what = kept
		s.wakeUp()
	}
	if terminal {
		// Nothing follows it, so nothing waits for the acknowledgement but the
		// Node's copy of this frame: it can wait for others (J1).
		n, o = needSoon, s.life.terminal()
	}
	return o, n, breachNone, what
}

// finish delivers the terminal. The slot is back by now, so whoever calls again
// upon it finds the place free.
func (s *stream) finish(f *frame) {
	s.mu.Lock()
	s.push(f)
	s.mu.Unlock()
	s.wakeUp()
}

// receiveBroken ends the caller's side, if it is still there, and waits for the
// Node's terminal alone. b is reported for the first breach; what comes after it is
// one of its own only where it cannot have been on its way.
func (s *stream) receiveBroken(now time.Time, size int, terminal bool, b breach) (orders, need, breach, fate) {
	var o orders
	if !s.broken {
		// What was granted may be on its way, with as much as headers take; and where a
		// gap is open, what was asked for again.
		bytes := s.recv.Granted() * 5 / 4
		if !s.gapSince.IsZero() {
			bytes += s.recv.Window()
		}
		s.broken, s.gapSince = true, time.Time{}
		s.expectInFlight(now, bytes+tunnel.TerminalReserve)
		o = s.life.cutBy(b.err())
		s.wakeUp()
	} else {
		b = s.goesOn(now, size)
	}
	if terminal {
		t := s.life.terminal()
		o.give, o.remove, o.over = t.give, t.remove, t.over
	}
	return o, needSoon, b, dropped
}

// inFlightFor is how long frames of a broken stream are taken for what was sent
// before the Node could know, if they are no more than a window.
const inFlightFor = time.Second

func (s *stream) expectInFlight(now time.Time, bytes uint64) {
	s.inFlight, s.inFlightUntil = int(bytes), now.Add(inFlightFor) //nolint:gosec // some windows
}

// goesOn says whether one more message of a broken stream is one too many (J8): it may
// come late, over a slow link, but there can be no more of them than was granted.
func (s *stream) goesOn(now time.Time, size int) breach {
	s.inFlight = max(0, s.inFlight-size-wire.FrameOverhead)
	switch {
	case s.inFlight == 0:
		return breachGoingOn
	case now.After(s.inFlightUntil):
		return breachTrailing
	default:
		return breachNone
	}
}

const (
	// wasteWindows is how many windows may come in vain while nothing is delivered: one
	// frame that is lost costs all that is on its way behind it, and what is repeated may
	// be lost again. wasteEvery is how soon one of them is forgotten.
	wasteWindows = 16
	wasteEvery   = 100 * time.Millisecond
)

// waste notes a message that came in vain, and says whether it is one too many (J8).
func (s *stream) waste(now time.Time, size int) bool {
	window := int(s.recv.Window()) //nolint:gosec // at most 4 MiB
	if s.wasted > 0 {
		s.wasted = max(0, s.wasted-int(float64(window)*float64(now.Sub(s.wastedAt))/float64(wasteEvery)))
	}
	s.wastedAt = now
	s.wasted += size + wire.FrameOverhead
	return s.wasted > wasteWindows*window
}

func (s *stream) push(f *frame) {
	if s.head > 0 && len(s.inbox) == cap(s.inbox) {
		n := copy(s.inbox, s.inbox[s.head:])
		clear(s.inbox[n:])
		s.inbox, s.head = s.inbox[:n], 0
	}
	s.inbox = append(s.inbox, f)
	s.unread += f.size
}

// inboxKeep is the room an empty inbox keeps.
const inboxKeep = 64

func (s *stream) pop() *frame {
	if s.head == len(s.inbox) {
		return nil
	}
	f := s.inbox[s.head]
	s.inbox[s.head] = nil
	s.head++
	s.unread -= f.size
	if s.head == len(s.inbox) {
		s.inbox, s.head = s.inbox[:0], 0
		if cap(s.inbox) > inboxKeep {
			s.inbox = nil
		}
	}
	return f
}

// consume grants a delivered frame's cost anew.
func (s *stream) consume(now time.Time, body int) (n need) {
	if s.broken {
		return needNone
	}
	for _, ef := range s.recv.Step(now, tunnel.RecvEvent{Kind: tunnel.Consumed, Body: body}, s.out[:0]) {
		switch ef.Kind {
		case tunnel.AckSoon:
			n = max(n, needSoon)
		case tunnel.AckNow:
			n = max(n, needNow)
		default:
		}
	}
	return n
}

// view is what Do sees of its stream at one moment.
type view struct {
	f         *frame      // the next frame; nil: none is at hand
	cut       *wire.Error // the attempt is over for the caller
	need      need
	heard     bool
	gapSince  time.Time
	reconnect bool
	hinted    bool
	ended     bool // the Node's terminal came
	body      bodyAck
}

// next says what there is to do. taken is the body of the frame that was
// delivered to the caller last; below 0: none was.
func (s *stream) next(now time.Time, taken int) (v view) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if taken >= 0 {
		v.need = s.consume(now, taken)
	}
	v.heard, v.gapSince = s.heard, s.gapSince
	v.reconnect, s.reconnect = s.reconnect, false
	v.hinted, s.hinted = s.hinted, false
	v.ended = s.life.state == ended
	v.body, s.body = s.body, bodyAck{}
	if v.cut = s.life.cut; v.cut == nil {
		v.f = s.pop()
	}
	return v
}

// leave ends Do's part; what it did not take is dropped and granted anew, so
// that the Node comes to its terminal.
func (s *stream) leave(now time.Time) (o orders, n need, heard bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	o = s.life.leave()
	if s.head < len(s.inbox) {
		for f := s.pop(); f != nil; f = s.pop() {
			n = max(n, s.consume(now, len(f.Body)))
			f.recycle()
		}
	}
	s.inbox = nil
	return o, n, s.heard
}

// step runs one step of the life under the lock and wakes Do.
func (s *stream) step(fn func(*life) orders) orders {
	s.mu.Lock()
	o := fn(&s.life)
	s.mu.Unlock()
	s.wakeUp()
	return o
}

// ack is the entry to send to the Node now.
func (s *stream) ack() tunnel.Ack {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.owed = false
	if s.broken {
		return tunnel.Ack{Acked: s.highest}
	}
	a := s.recv.Ack()
	a.Resend = a.Resend || s.again
	s.again = false
	return a
}
