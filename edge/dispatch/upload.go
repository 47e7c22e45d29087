package dispatch

import (
	"errors"
	"io"
	"sync"
	"time"

	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/tunnel"
	"github.com/iop-fabric/iop/wire"
	"github.com/iop-fabric/iop/wire/iopv1"
)

// upload sends a request's body that is too large for the request itself, as
// the Node's credit allows. Do's goroutine owns it.
type upload struct {
	d       *Dispatcher
	s       *stream
	sender  *tunnel.Sender
	body    io.Reader
	left    int64
	subject string
	reply   string
	out     []tunnel.SendEffect
	lane    lane
	lookAt  time.Time // when to look for room of the downlink in any case; zero: it does not wait
	saidAt  time.Time // when anything of the run was sent last
	silent  bool      // the Node answered nothing for too long, which breaks no rule
	resetAt time.Time // the first reset since the Node acknowledged something
	askedAt time.Time // when a reset last brought the request again
}

const (
	// resetBound is how long the Node must say that it does not know the run
	// before that is believed: a frame of the body may have come before the
	// request, or the request be lost, or the reset be older than what was
	// acknowledged since. A Node that means it says so at every repetition.
	resetBound = time.Second
	// resetPause lies between two repetitions of the request for a reset.
	resetPause = 100 * time.Millisecond
	// lookAgain is for room that whoever was called did not take: its caller reads nothing.
	lookAgain = time.Second
	// stillThere is how often a Node is told of a body that waits for its turn: below
	// what it waits for one.
	stillThere = 3 * time.Second
)

// bodyBuffers hold one encoded frame, or one body to be encoded.
var bodyBuffers = sync.Pool{New: func() any { b := make([]byte, wire.MaxBody+512); return &b }}

func newUpload(d *Dispatcher, s *stream, body io.Reader, size int64) *upload {
	u := &upload{
		d: d, s: s, body: body, left: size,
		sender:  tunnel.NewSender(tunnel.SenderConfig{Credit: wire.MinWindow, GiveUp: d.silence()}),
		subject: s.sess.id.Down(subjects.Body, s.run),
		reply:   subjects.NoResponders(d.cfg.Edge, s.run),
		lane:    lane{wake: s.wakeUp},
		saidAt:  d.now(),
	}
	u.downlink(func(l *downlink) { l.join(&u.lane) })
	return u
}

// downlink does something with that of the session, under its lock.
func (u *upload) downlink(do func(*downlink)) {
	u.s.sess.mu.Lock()
	defer u.s.sess.mu.Unlock()
	do(&u.s.sess.down)
}

// room says whether a frame of n bytes may go to the session now.
func (u *upload) room(now time.Time, n int) (yes bool) {
	u.downlink(func(l *downlink) { yes = l.room(&u.lane, n+wire.FrameOverhead) })
	u.lookAt = time.Time{}
	if !yes {
		u.lookAt = now.Add(lookAgain)
	}
	return yes
}

// step does all that can be done now. lost asks for the request to be sent again.
func (u *upload) step(now time.Time, v *view) (done, lost bool, err *wire.Error) {
	if b := v.body; b.pending {
		if b.acked > u.sender.Acked() {
			u.resetAt = time.Time{} // it knew the run since, so this reset may be older
		}
		switch {
		case !b.reset:
			u.resetAt = time.Time{}
		case u.resetAt.IsZero():
			u.resetAt = now
		}
		if b.reset && now.Sub(u.resetAt) < resetBound {
			b.reset = false
			if !v.heard && now.Sub(u.askedAt) >= resetPause {
				u.askedAt = now
				lost, v.reconnect = true, true
			}
		}
		done, err = u.send(now, tunnel.SendEvent{Kind: tunnel.AckReceived, Acked: b.acked, Credit: b.credit, Resend: b.resend, Reset: b.reset})
		if done || err != nil {
			return done, lost, err
		}
	}
	if v.reconnect {
		if done, err = u.send(now, tunnel.SendEvent{Kind: tunnel.SendReconnected}); done || err != nil {
			return done, lost, err
		}
	}
	if due := u.sender.Deadline(); !due.IsZero() && !now.Before(due) {
		what := tunnel.SendDeadline
		u.downlink(func(l *downlink) {
			if l.late(now, &u.lane) {
				what = tunnel.SendLate
			}
		})
		if done, err = u.send(now, tunnel.SendEvent{Kind: what}); done || err != nil {
			return done, lost, err
		}
	}
	for u.left > 0 {
		n := int(min(u.left, wire.MaxBody))
		last := int64(n) == u.left
		if !last && !u.sender.Room(n) || !u.room(now, n) {
			break
		}
		frame, ferr := u.encode(n, last)
		if ferr != nil {
			return false, lost, ferr
		}
		u.left -= int64(n)
		if done, err = u.send(now, tunnel.SendEvent{Kind: tunnel.Offer, Frame: frame}); done || err != nil {
			return done, lost, err
		}
	}
	return false, lost, nil
}

func (u *upload) encode(n int, last bool) (tunnel.Frame, *wire.Error) {
	raw := bodyBuffers.Get().(*[]byte)
	defer bodyBuffers.Put(raw)
	if _, err := io.ReadFull(u.body, (*raw)[:n]); err != nil {
		return tunnel.Frame{}, errBody(err)
	}
	seq := u.sender.NextSeq()
	msg := iopv1.BodyFrame{RunId: u.s.run, Sequence: seq, Body: (*raw)[:n], Last: last}
	buf := bodyBuffers.Get().(*[]byte)
	size := msg.SizeVT()
	if _, err := msg.MarshalToSizedBufferVT((*buf)[:size]); err != nil {
		bodyBuffers.Put(buf)
		return tunnel.Frame{}, wire.Errorf(wire.Internal, "encode the request's body: %w", err)
	}
	return tunnel.Frame{Seq: seq, Data: (*buf)[:size], Body: n, Terminal: last}, nil
}

// errBody tells that the body that was kept for the attempt cannot be read.
func errBody(err error) *wire.Error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return wire.Errorf(wire.Internal, "the request's body is shorter than its size")
	}
	return wire.Errorf(wire.Internal, "the request's body cannot be read")
}

func (u *upload) send(now time.Time, ev tunnel.SendEvent) (done bool, err *wire.Error) {
	before := u.sender.Acked()
	u.out = u.sender.Step(now, ev, u.out[:0])
	acked := u.sender.Acked()
	if acked > before {
		u.downlink(func(l *downlink) { l.arrived(now, &u.lane, int(acked-before)) }) //nolint:gosec // a window of frames at most
	}
	for i := range u.out {
		switch ef := &u.out[i]; ef.Kind {
		case tunnel.SendFrame:
			if ef.Frame.Seq > acked { // else it asks for credit
				u.downlink(func(l *downlink) {
					l.put(now, &u.lane, int(ef.Frame.Seq-acked-1), ef.Frame.Body+wire.FrameOverhead) //nolint:gosec // a window of frames at most
				})
			}
			u.saidAt = now
			if ef.Again {
				u.d.metrics.resent.Inc()
			}
			// What the bus does not take is lost like any message, and repeated.
			_ = u.d.deps.Bus.PublishRequest(u.subject, u.reply, ef.Frame.Data)
		case tunnel.ReleaseFrame:
			buf := ef.Frame.Data[:cap(ef.Frame.Data)]
			bodyBuffers.Put(&buf)
		case tunnel.SenderDone:
			done = true
		case tunnel.SenderFailed:
			err, u.silent = ef.Err, ev.Kind == tunnel.SendDeadline
		}
		u.out[i] = tunnel.SendEffect{}
	}
	if done || err != nil {
		u.downlink(func(l *downlink) { l.leave(&u.lane) })
	}
	return done, err
}

// stillThere says whether the Node is to be told of the body that waits for its turn.
func (u *upload) stillThere(now time.Time) bool {
	if u.lookAt.IsZero() || now.Sub(u.saidAt) < stillThere {
		return false
	}
	u.saidAt = now
	return true
}

// stop releases what is kept.
func (u *upload) stop(now time.Time) {
	_, _ = u.send(now, tunnel.SendEvent{Kind: tunnel.SendStopped})
	u.downlink(func(l *downlink) { l.leave(&u.lane) })
}
