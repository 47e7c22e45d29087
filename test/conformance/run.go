package conformance

import (
	"bytes"
	"fmt"
	"hash/maphash"
	"time"

	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/tunnel"
	"github.com/iop-fabric/iop/wire"
	"github.com/iop-fabric/iop/wire/iopv1"
)

// run is one run of a case as the player sees it. Everything is the player's to lock.
type run struct {
	p     *player
	label string
	id    string

	// What came, in order, by verb, and how far the script has taken it.
	got  map[subjects.Verb][]*message
	at   map[subjects.Verb]int
	seen map[subjects.Verb]map[uint64]uint64 // digest by sequence
	acks []*iopv1.StreamAck_Entry
	ack  int

	// What the numbered frames that came in order say (of the answer where the
	// player is Edge, of the request's body where it is the Node).
	next    uint64
	bytes   int
	started bool
	status  int
	over    bool   // the terminal came
	class   string // of an error
	bad     error  // what must not be

	lens  map[uint64]int // of the frames the script sent, by sequence
	whole []byte         // the request's body, where a caller sends it; nil: the pattern

	// The honest half; nil where the script says every message itself.
	honest  bool
	recv    *tunnel.Receiver
	unread  []int
	paused  bool
	sender  *tunnel.Sender
	pending []offer
	sent    int // body bytes offered
	timer   *time.Timer
	request []byte // repeated until something was heard
	heard   bool
	resetAt time.Time // the first reset since anything was acknowledged
	known   bool      // as Node: the request came
	stopped bool
	checked int // bytes of the caller's that were compared
}

// message is one that came about a run.
type message struct {
	seq   uint64
	again bool // its sequence came before
	frame *iopv1.ProviderTunnelFrame
	body  *iopv1.BodyFrame
	req   *iopv1.ProviderTunnelRequest
}

// offer is a frame that waits for credit.
type offer struct {
	make     func(seq uint64) []byte
	body     int
	terminal bool
	control  bool
}

func newRun(p *player, label, id string) *run {
	return &run{
		p: p, label: label, id: id, next: 1,
		got: map[subjects.Verb][]*message{}, at: map[subjects.Verb]int{},
		seen: map[subjects.Verb]map[uint64]uint64{subjects.Frame: {}, subjects.Body: {}},
		lens: map[uint64]int{},
	}
}

var digestSeed = maphash.MakeSeed()

func digest(data []byte) uint64 { return maphash.Bytes(digestSeed, data) }

// wrong notes what must not be, the first one.
func (r *run) wrong(format string, args ...any) {
	if r.bad == nil {
		r.bad = fmt.Errorf("run %s: "+format, append([]any{r.label}, args...)...)
	}
}

// numbered takes a frame of the answer or of the body.
func (r *run) numbered(v subjects.Verb, m *message, data []byte, n int, terminal bool) {
	d := digest(data)
	old, again := r.seen[v][m.seq]
	if m.again = again; again && old != d {
		r.wrong("sequence %d came twice with different content", m.seq)
	}
	r.seen[v][m.seq] = d
	r.got[v] = append(r.got[v], m)
	r.heard = true
	switch {
	case m.seq == 0:
		r.wrong("a frame has no sequence")
	case m.seq != r.next: // known already, or a gap
	case r.over:
		r.wrong("sequence %d follows the terminal", m.seq)
	default:
		r.inOrder(m, n, terminal)
	}
	if r.honest && r.recv != nil {
		r.receive(v, m.seq, n, d, terminal)
	}
}

func (r *run) inOrder(m *message, n int, terminal bool) {
	r.next++
	p := m.body.GetBody()
	if f := m.frame; f != nil {
		p = f.GetBody()
		switch {
		case f.GetKind() == iopv1.ProviderTunnelFrame_RESPONSE_START && r.started:
			r.wrong("a second start")
		case f.GetKind() == iopv1.ProviderTunnelFrame_RESPONSE_START:
			r.started, r.status = true, int(f.GetStatus())
		case !r.started && f.GetKind() != iopv1.ProviderTunnelFrame_ERROR && f.GetKind() != iopv1.ProviderTunnelFrame_USAGE:
			r.wrong("%v before the start", f.GetKind())
		}
		if f.GetKind() == iopv1.ProviderTunnelFrame_ERROR {
			if r.class = f.GetErrorClass(); wire.ParseClass(r.class) != wire.Class(r.class) {
				r.wrong("%q is no class", r.class)
			}
			if f.GetError() == "" {
				r.wrong("an ERROR without words")
			}
		}
	}
	if n > wire.MaxBody {
		r.wrong("sequence %d has %d bytes of body", m.seq, n)
	}
	want := pattern(r.bytes, n)
	if r.whole != nil {
		want = r.whole[min(r.bytes, len(r.whole)):min(r.bytes+n, len(r.whole))]
	}
	if !bytes.Equal(p, want) {
		r.wrong("the bytes from %d on are not those that were sent", r.bytes)
	}
	r.bytes += n
	r.over = terminal
}

// receive is an honest receiver: in order, once, acknowledged at once.
func (r *run) receive(v subjects.Verb, seq uint64, n int, d uint64, terminal bool) {
	now := time.Now()
	for _, ef := range r.recv.Step(now, tunnel.RecvEvent{Kind: tunnel.FrameReceived, Seq: seq, Body: n, Digest: d, Terminal: terminal}, nil) {
		switch ef.Kind {
		case tunnel.Deliver:
			r.unread = append(r.unread, n)
		case tunnel.ReceiverFailed:
			r.wrong("%v", ef.Err)
		default:
		}
	}
	r.consume()
	r.acknowledge(v)
}

func (r *run) consume() {
	if r.paused {
		return
	}
	for _, n := range r.unread {
		r.recv.Step(time.Now(), tunnel.RecvEvent{Kind: tunnel.Consumed, Body: n}, nil)
	}
	r.unread = nil
}

// direction is what an acknowledgement of a verb says.
func direction(v subjects.Verb) string {
	if v == subjects.Frame {
		return "frame"
	}
	return "body"
}

func (r *run) acknowledge(v subjects.Verb) {
	a := r.recv.Ack()
	r.p.publishAck(&iopv1.StreamAck_Entry{RunId: r.id, Acked: a.Acked, Credit: a.Credit, Resend: a.Resend, Direction: direction(v)})
}

// step is an honest sender.
func (r *run) step(ev tunnel.SendEvent) {
	if r.stopped || r.sender == nil {
		return
	}
	v := subjects.Frame
	if r.p.c.Role == Node {
		v = subjects.Body
	}
	for _, ef := range r.sender.Step(time.Now(), ev, nil) {
		switch ef.Kind {
		case tunnel.SendFrame:
			r.p.publish(0, v, r.id, ef.Frame.Data)
		case tunnel.SenderFailed:
			r.pending, r.stopped = nil, true // the outcome tells whether that was right
		case tunnel.SenderDone:
			r.stopped = true
		case tunnel.ReleaseFrame:
		}
	}
}

// pump offers what there is room for, and sets the timer.
func (r *run) pump() {
	for len(r.pending) > 0 && !r.stopped && r.sender != nil {
		o := r.pending[0]
		if room := o.terminal || o.control && r.sender.ControlRoom() || r.sender.Room(o.body); !room {
			break
		}
		r.pending = r.pending[1:]
		seq := r.sender.NextSeq()
		r.step(tunnel.SendEvent{Kind: tunnel.Offer, Frame: tunnel.Frame{
			Seq: seq, Data: o.make(seq), Body: o.body, Terminal: o.terminal, Control: o.control,
		}})
	}
	if r.timer != nil {
		r.timer.Stop()
		r.timer = nil
	}
	if r.stopped || r.sender == nil {
		return
	}
	if due := r.sender.Deadline(); !due.IsZero() {
		r.timer = time.AfterFunc(time.Until(due), func() {
			r.p.mu.Lock()
			defer r.p.mu.Unlock()
			if d := r.sender.Deadline(); !d.IsZero() && !time.Now().Before(d) {
				r.step(tunnel.SendEvent{Kind: tunnel.SendDeadline})
			}
			r.pump()
		})
	}
}

// acked takes an acknowledgement.
func (r *run) acked(e *iopv1.StreamAck_Entry) {
	r.acks = append(r.acks, e)
	if e.GetReset_() && r.honest && r.p.c.Role == Node {
		if r.resetAt.IsZero() {
			r.resetAt = time.Now()
		}
		if time.Since(r.resetAt) < time.Second {
			// The body overtook the request, or the reset something newer: both go again.
			if !r.heard {
				r.p.publish(0, subjects.Tunnel, r.id, r.request)
			}
			return
		}
	} else {
		r.resetAt = time.Time{}
	}
	r.heard = r.heard || !e.GetReset_()
	if r.honest && r.sender != nil && !r.stopped {
		r.step(tunnel.SendEvent{Kind: tunnel.AckReceived, Acked: e.GetAcked(), Credit: e.GetCredit(), Resend: e.GetResend(), Reset: e.GetReset_()})
		r.pump()
	}
}

// repeat publishes the request again until something was heard of the run.
func (r *run) repeat() {
	time.AfterFunc(500*time.Millisecond, func() {
		r.p.mu.Lock()
		defer r.p.mu.Unlock()
		if r.heard || r.stopped || r.p.ended {
			return
		}
		r.p.publish(0, subjects.Tunnel, r.id, r.request)
		r.repeat()
	})
}

// at is where the body of a frame begins in the whole: after those before it. One
// before it that was not sent yet counts as long as this one.
func (r *run) offset(seq uint64, n int) (from int) {
	for s := uint64(1); s < seq && s < 1<<16; s++ {
		if k, ok := r.lens[s]; ok {
			from += k
		} else {
			from += n
		}
	}
	return from
}

// bodyOf is the body of a frame that the script sends.
func (r *run) bodyOf(s Step, seq uint64) []byte {
	n := s.int("len", 0)
	p := bytes.Clone(pattern(r.offset(seq, n), n))
	if _, ok := r.lens[seq]; !ok {
		r.lens[seq] = n
	}
	if s.Flags["forged"] {
		for i := range p {
			p[i] ^= 0xff
		}
	}
	return p
}
