package tunnel

import (
	"fmt"
	"time"

	"github.com/iop-fabric/iop/wire"
)

// What both sides must count alike (J1).
const (
	// MaxCost is the cost of the largest frame.
	MaxCost = wire.MaxBody + wire.FrameOverhead
	// ControlReserve is how far frames without a body may go beyond the credit:
	// 256 of them, so a start, a usage or a terminal passes a full window.
	ControlReserve = 64 << 10
	// TerminalReserve is how far the terminal may: past the control frames it may
	// have behind it, and with a body of its own.
	TerminalReserve = ControlReserve + MaxCost
)

// Defaults of SenderConfig.
const (
	defaultMinRTO   = 200 * time.Millisecond
	defaultMaxRTO   = 2 * time.Second
	defaultAckDelay = 25 * time.Millisecond
	defaultGiveUp   = 10 * time.Second
)

const (
	// firstBurst is how much is sent again before the peer has acknowledged anything
	// of it; every acknowledgement doubles it. A link is thus refilled in a few round
	// trips, and one that loses is not fed whole windows.
	firstBurst = 4 * MaxCost
	// slowestRTO bounds the time after which silence is asked about, on the slowest link.
	slowestRTO = 5 * time.Second
	// probeBackoff is how many MaxRTO lie at most between two credit probes: they
	// cost a frame each and are of use only after a credit update was lost.
	probeBackoff = 4
	// Rings: the first size, and the size an idle stream may keep.
	minRing, idleRing = 8, 16
	// idleAfter is when a stream with nothing owed gives a larger ring back.
	idleAfter = time.Second
	// digests is how many of the last frames a forgery is noticed for.
	digests = 64
	// maxRoundTrip bounds the receiver's estimate. What takes longer to come than
	// this is held up by its source, not by the window, and needs no larger one.
	maxRoundTrip = 250 * time.Millisecond
	// minRoundTrip is what it takes a round trip for before it saw one.
	minRoundTrip = time.Millisecond
)

type state uint8

const (
	open    state = iota // frames may be offered, or may come
	closing              // Sender only: the terminal was offered, not yet acknowledged
	done                 // the terminal was acknowledged, or delivered
	failed               // gave up, reset, breach, or stopped from outside
)

// Sender is the sending half of one stream. Its zero value is not usable.
type Sender struct {
	cfg   SenderConfig
	state state

	next    uint64 // the sequence the next offer must have
	cursor  uint64 // the next sequence to put on the wire; below next only while recovering
	sent    uint64 // the highest sequence that ever was on the wire
	acked   uint64 // all up to it were acknowledged
	offered uint64 // cost of all frames ever offered
	credit  uint64 // how far that may go

	ring     []slot // frames acked+1 .. next-1, from head on
	head, n  int
	held     Frame // acknowledged, kept to probe with while out of credit
	holding  bool
	rtt      time.Duration // smoothed; 0: no sample yet
	rto      time.Duration // the current one, with back-off
	resendAt time.Time     // when the next repetition or probe is due; zero: never
	progress time.Time     // last time the peer acknowledged something new, or owed nothing
	idleAt   time.Time     // when the ring may shrink; zero: never

	recoverTo uint64    // recovering until this is acknowledged; 0: not recovering
	burst     uint64    // cost that may be in flight while recovering
	flight    uint64    // cost of the frames acked+1 .. cursor-1
	gap       uint64    // the sequence the last repetition began with
	gapAt     time.Time // and when that was
	gapAsked  bool      // the peer was asked since, by a frame after it
}

type slot struct {
	Frame
	sentAt time.Time
	again  bool // more than once: no round trip can be read from it (Karn)
}

func cost(body int) uint64 { return uint64(body) + wire.FrameOverhead } //nolint:gosec // bodies are lengths

// NewSender makes the sending half of a stream that nothing was sent on yet.
//
// The first credit must hold at least one frame: where no grant has crossed the
// wire yet, both sides take wire.MinWindow.
func NewSender(cfg SenderConfig) *Sender {
	setDefault(&cfg.MinRTO, defaultMinRTO)
	setDefault(&cfg.MaxRTO, defaultMaxRTO)
	setDefault(&cfg.AckDelay, defaultAckDelay)
	setDefault(&cfg.GiveUp, defaultGiveUp)
	cfg.MaxRTO = max(cfg.MaxRTO, cfg.MinRTO)
	cfg.Credit = min(cfg.Credit, wire.MaxWindow) // the peer's number: no window is larger
	return &Sender{cfg: cfg, next: 1, cursor: 1, credit: cfg.Credit, rto: cfg.MinRTO}
}

func setDefault(d *time.Duration, def time.Duration) {
	if *d <= 0 {
		*d = def
	}
}

// NextSeq is the sequence the next offered frame must carry.
func (s *Sender) NextSeq() uint64 { return s.next }

// Room reports whether a body frame of this size may be offered now.
func (s *Sender) Room(body int) bool {
	return s.state == open && body >= 0 && s.offered+cost(body) <= s.credit
}

// ControlRoom reports whether a frame without a body may be offered now, with
// the reserve if need be. A terminal always may.
func (s *Sender) ControlRoom() bool {
	return s.state == open && s.offered+cost(0) <= s.credit+ControlReserve
}

// Credit is the highest grant so far.
func (s *Sender) Credit() uint64 { return s.credit }

// Offered is the cost of everything offered so far.
func (s *Sender) Offered() uint64 { return s.offered }

// Acked is the highest acknowledged sequence.
func (s *Sender) Acked() uint64 { return s.acked }

// Deadline is when SendDeadline is due; zero: never.
func (s *Sender) Deadline() time.Time {
	if s.resendAt.IsZero() {
		return s.idleAt
	}
	if s.n > 0 {
		if end := s.progress.Add(s.cfg.GiveUp); end.Before(s.resendAt) {
			return end
		}
	}
	return s.resendAt
}

// starved: all is acknowledged and a full frame does not fit, so the next thing
// to happen must be a grant; were that lost, nobody would speak again.
func (s *Sender) starved() bool {
	return s.state == open && s.n == 0 && s.acked > 0 && s.offered+MaxCost > s.credit
}

func (s *Sender) at(i int) *slot { return &s.ring[(s.head+i)&(len(s.ring)-1)] }

func (s *Sender) push(f Frame) {
	if s.n == len(s.ring) {
		bigger := make([]slot, max(minRing, 2*len(s.ring))) // a power of two, always
		for i := range s.n {
			bigger[i] = *s.at(i)
		}
		s.ring, s.head = bigger, 0
	}
	s.n++
	*s.at(s.n - 1) = slot{Frame: f}
}

func (s *Sender) pop() slot {
	p := s.at(0)
	f := *p
	*p = slot{}
	s.head = (s.head + 1) & (len(s.ring) - 1)
	s.n--
	return f
}

// Receiver is the receiving half of one stream. Its zero value is not usable.
type Receiver struct {
	state    state
	breached bool // a breach after the terminal was reported
	resend   bool // a gap was seen since the last Ack

	next      uint64 // the sequence expected next
	received  uint64 // cost of all frames delivered
	consumed  uint64 // cost the reader took
	announced uint64 // credit in the last Ack, or the first window
	window    uint64
	maxWindow uint64
	gap       uint64 // the next for which a gap was reported last

	now        time.Time     // of the last event; Ack has no other clock
	roundTrip  time.Duration // smallest time from a grant to its first use
	measuring  bool
	measureAt  time.Time // when the grant was made
	measureOff uint64    // the first offset that needed it
	epochAt    time.Time // since when the window is being emptied
	epochOff   uint64    // consumed then

	digest [digests]uint64 // by sequence
}

// NewReceiver makes the receiving half of a stream that nothing came on yet.
// The first window is granted by whoever opens the stream.
//
// A window is never smaller than two frames, so that a grant of a quarter of it
// always comes before the sender is stuck, and never larger than wire.MaxWindow,
// which every sender takes for a breach.
func NewReceiver(cfg ReceiverConfig) *Receiver {
	if cfg.Window == 0 {
		cfg.Window = wire.MinWindow
	}
	if cfg.MaxWindow == 0 {
		cfg.MaxWindow = wire.MaxWindow
	}
	r := &Receiver{next: 1}
	r.maxWindow = min(max(cfg.MaxWindow, 2*MaxCost), wire.MaxWindow)
	r.window = min(max(cfg.Window, 2*MaxCost), r.maxWindow)
	r.announced = r.window
	return r
}

// Window is the current window; the first one is what to grant at the start.
func (r *Receiver) Window() uint64 { return r.window }

// Granted is what the peer may still send of what was granted, the reserves aside: no
// more than that can be on its way from a peer that keeps the rules.
func (r *Receiver) Granted() uint64 { return r.announced - min(r.received, r.announced) }

// Done reports whether the terminal was delivered.
func (r *Receiver) Done() bool { return r.state == done }

// Ack is the entry to send; it clears Resend.
func (r *Receiver) Ack() Ack {
	a := Ack{Acked: r.next - 1, Credit: r.announced, Resend: r.resend}
	r.resend = false
	if grant := r.consumed + r.window; r.state == open && grant > r.announced {
		if !r.measuring {
			r.measuring, r.measureAt, r.measureOff = true, r.now, r.announced
		}
		r.announced, a.Credit = grant, grant
	}
	return a
}

func bug(rule, format string, args ...any) {
	panic("BUG: tunnel " + rule + ": " + fmt.Sprintf(format, args...))
}
