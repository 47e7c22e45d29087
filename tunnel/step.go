package tunnel

import (
	"time"

	"github.com/iop-fabric/iop/wire"
)

// Step is all that can happen to a Sender and all that must follow. Effects are
// appended to out, in the order to be carried out.
func (s *Sender) Step(now time.Time, ev SendEvent, out []SendEffect) []SendEffect {
	if s.state == done || s.state == failed {
		if ev.Kind == Offer {
			if s.state == done {
				bug("I3", "frame %d offered after the terminal", ev.Frame.Seq)
			}
			out = append(out, SendEffect{Kind: ReleaseFrame, Frame: ev.Frame}) // I5
		}
		return out
	}
	if due := s.Deadline(); s.n > 0 && !due.IsZero() && now.After(due) {
		s.progress = s.progress.Add(now.Sub(due)) // who slept through its deadline could hear nothing
	}
	switch ev.Kind {
	case Offer:
		return s.offer(now, ev.Frame, out)
	case AckReceived:
		return s.ack(now, ev, out)
	case SendDeadline:
		return s.deadline(now, out)
	case SendReconnected:
		s.rto = s.baseRTO()
		if s.holding {
			return s.probe(now, out)
		}
		return s.rewind(now, out)
	case SendLate:
		if s.n > 0 && !s.holding {
			s.progress, s.resendAt = now, now.Add(s.rto)
		}
	case SendStopped:
		out = s.releaseAll(out)
		s.become(failed)
	}
	return out
}

// become writes the state and drops what the one left behind owned.
func (s *Sender) become(st state) {
	s.state = st
	if st == done || st == failed {
		s.ring, s.head = nil, 0
		s.resendAt, s.idleAt = time.Time{}, time.Time{}
	}
}

func (s *Sender) offer(now time.Time, f Frame, out []SendEffect) []SendEffect {
	c := cost(f.Body)
	switch {
	case s.state == closing:
		bug("I3", "frame %d offered after the terminal", f.Seq)
	case f.Seq != s.next:
		bug("I1", "frame %d offered, %d is next", f.Seq, s.next)
	case f.Body < 0 || f.Body > wire.MaxBody:
		bug("I2", "body of %d bytes offered", f.Body)
	case f.Terminal:
		if s.offered+c > s.credit+TerminalReserve {
			bug("I2", "terminal beyond its reserve")
		}
	case f.Control && f.Body == 0:
		if !s.ControlRoom() {
			bug("I2", "control frame %d offered without room", f.Seq)
		}
	case !s.Room(f.Body):
		bug("I2", "frame %d offered without room", f.Seq)
	}
	out = s.releaseHeld(out)
	if s.n == 0 {
		s.progress = now // silence counts from when something is owed
		s.rto = s.baseRTO()
		s.resendAt = now.Add(s.rto)
		s.idleAt = time.Time{}
	}
	s.push(f)
	s.next++
	s.offered += c
	if f.Terminal {
		s.become(closing)
	}
	return s.flush(now, out)
}

// flush puts on the wire what may go: everything, or while recovering as much
// as the burst allows, at least one frame.
func (s *Sender) flush(now time.Time, out []SendEffect) []SendEffect {
	for s.cursor < s.next {
		p := s.at(int(s.cursor - s.acked - 1)) //nolint:gosec // below n
		c := cost(p.Body)
		if s.recoverTo > 0 && s.flight > 0 && s.flight+c > s.burst {
			break
		}
		p.again, p.sentAt = s.cursor <= s.sent, now
		s.sent = max(s.sent, s.cursor)
		s.flight += c
		s.cursor++
		out = append(out, SendEffect{Kind: SendFrame, Frame: p.Frame, Again: p.again})
	}
	return out
}

// rewind begins to send again from the first frame that is unacknowledged.
func (s *Sender) rewind(now time.Time, out []SendEffect) []SendEffect {
	if s.n == 0 {
		return out
	}
	s.cursor, s.flight = s.acked+1, 0
	s.gap, s.gapAt, s.gapAsked = s.cursor, now, false
	s.recoverTo, s.burst = s.next-1, firstBurst
	s.resendAt = now.Add(s.rto)
	return s.flush(now, out)
}

// ask repeats the last frame that is on its way, when nothing was heard for long: the
// peer acknowledges it again, or asks for what is missing before it. Frames that are
// only late, behind a slow link with a full queue, are not sent twice for that.
func (s *Sender) ask(now time.Time, out []SendEffect) []SendEffect {
	p := s.at(int(s.cursor - s.acked - 2)) //nolint:gosec // something is on its way, or no timer ran
	p.again, p.sentAt = true, now
	s.resendAt, s.gapAsked = now.Add(s.rto), true
	return append(out, SendEffect{Kind: SendFrame, Frame: p.Frame, Again: true})
}

func (s *Sender) ack(now time.Time, ev SendEvent, out []SendEffect) []SendEffect {
	switch {
	case ev.Reset:
		return s.fail(errReset(s.acked), out)
	case ev.Acked > s.sent:
		return s.fail(errAckBeyond(ev.Acked, s.sent), out)
	case ev.Credit > s.offered+wire.MaxWindow:
		return s.fail(errCreditBeyond(ev.Credit, s.offered), out)
	}
	s.credit = max(s.credit, ev.Credit) // acks overtake each other: an older one takes nothing back
	if ev.Acked > s.acked {
		if out = s.advance(now, ev.Acked, out); s.state == done {
			return out
		}
	}
	if s.holding && !s.starved() {
		out = s.releaseHeld(out)
		s.rest(now)
	}
	if ev.Resend && ev.Acked == s.acked && s.n > 0 && !s.justRepeated(now) {
		return s.rewind(now, out)
	}
	return s.flush(now, out)
}

// justRepeated: what the peer asks for is already on its way to it. Not if it was asked
// since: a peer that still misses it never got the copy, whatever the round trip seemed.
func (s *Sender) justRepeated(now time.Time) bool {
	if s.cursor == s.acked+1 {
		return true // not even sent yet
	}
	rtt := s.rtt
	if rtt == 0 {
		rtt = s.cfg.MinRTO
	}
	return s.gap == s.acked+1 && !s.gapAsked && now.Sub(s.gapAt) < rtt
}

// advance takes all frames up to acked as received.
func (s *Sender) advance(now time.Time, acked uint64, out []SendEffect) []SendEffect {
	var last slot
	terminal := false
	for s.acked < acked {
		last = s.pop()
		s.acked++
		terminal = last.Terminal
		if s.cursor <= s.acked {
			s.cursor = s.acked + 1 // its first copy had arrived after all
		} else {
			s.flight -= cost(last.Body)
		}
		if s.n == 0 && s.starved() {
			s.held, s.holding = last.Frame, true
			break
		}
		out = append(out, SendEffect{Kind: ReleaseFrame, Frame: last.Frame})
	}
	if s.recoverTo == 0 && !last.again {
		s.sample(now.Sub(last.sentAt))
	}
	s.progress = now
	if s.rtt > 0 || !last.again { // else nothing says yet that it was too long (Karn)
		s.rto = s.baseRTO()
	}
	s.burst *= 2
	if s.acked >= s.recoverTo {
		s.recoverTo = 0
	}
	switch {
	case terminal:
		s.become(done)
		out = append(out, SendEffect{Kind: SenderDone})
	case s.n > 0 || s.holding:
		s.resendAt = now.Add(s.rto)
	default:
		s.rest(now)
	}
	return out
}

// rest: nothing is owed, so no timer runs but the one that gives memory back.
func (s *Sender) rest(now time.Time) {
	s.resendAt = time.Time{}
	if len(s.ring) > idleRing {
		s.idleAt = now.Add(idleAfter)
	}
}

// sample smooths the round trip as TCP does.
func (s *Sender) sample(rtt time.Duration) {
	rtt = max(rtt, 1)
	if s.rtt == 0 {
		s.rtt = rtt
		return
	}
	s.rtt += (rtt - s.rtt) / 8
}

// baseRTO is the time after which silence is one. On a link whose queue alone takes
// longer than MaxRTO it may be longer too.
func (s *Sender) baseRTO() time.Duration {
	return min(max(s.cfg.MinRTO, 2*s.rtt+s.cfg.AckDelay), slowestRTO)
}

func (s *Sender) deadline(now time.Time, out []SendEffect) []SendEffect {
	if !s.idleAt.IsZero() && !now.Before(s.idleAt) {
		s.ring, s.head, s.idleAt = nil, 0, time.Time{}
	}
	if s.n > 0 && now.Sub(s.progress) >= s.cfg.GiveUp {
		return s.fail(errUnanswered(s.acked), out)
	}
	if s.resendAt.IsZero() || now.Before(s.resendAt) {
		return out
	}
	if s.holding {
		s.rto = min(2*s.rto, probeBackoff*s.cfg.MaxRTO)
		return s.probe(now, out)
	}
	s.rto = min(2*s.rto, max(s.cfg.MaxRTO, s.baseRTO()))
	return s.ask(now, out)
}

// probe repeats the last frame: the receiver answers any duplicate with its
// acknowledgement, and that holds the credit.
func (s *Sender) probe(now time.Time, out []SendEffect) []SendEffect {
	s.resendAt = now.Add(s.rto)
	return append(out, SendEffect{Kind: SendFrame, Frame: s.held, Again: true})
}

func (s *Sender) fail(err *wire.Error, out []SendEffect) []SendEffect {
	out = s.releaseAll(out)
	s.become(failed)
	return append(out, SendEffect{Kind: SenderFailed, Err: err})
}

func (s *Sender) releaseHeld(out []SendEffect) []SendEffect {
	if s.holding {
		out = append(out, SendEffect{Kind: ReleaseFrame, Frame: s.held})
		s.held, s.holding = Frame{}, false
	}
	return out
}

func (s *Sender) releaseAll(out []SendEffect) []SendEffect {
	out = s.releaseHeld(out)
	for s.n > 0 {
		out = append(out, SendEffect{Kind: ReleaseFrame, Frame: s.pop().Frame})
	}
	return out
}

// Step is all that can happen to a Receiver and all that must follow.
func (r *Receiver) Step(now time.Time, ev RecvEvent, out []RecvEffect) []RecvEffect {
	r.now = now
	if r.state == failed {
		return out
	}
	switch ev.Kind {
	case FrameReceived:
		return r.frame(now, ev, out)
	case Consumed:
		return r.consume(now, ev.Body, out)
	case RecvStopped:
		if r.state != done { // done already: duplicates are still acknowledged
			r.state = failed
		}
	}
	return out
}

func (r *Receiver) frame(now time.Time, ev RecvEvent, out []RecvEffect) []RecvEffect {
	switch {
	case ev.Seq == 0:
		return r.fail(errSeqZero(), out)
	case ev.Seq < r.next: // a duplicate: acknowledged again, not delivered (I1)
		if r.next-ev.Seq <= digests && r.digest[ev.Seq%digests] != ev.Digest {
			return r.fail(errForged(ev.Seq), out)
		}
		return append(out, RecvEffect{Kind: AckNow})
	case r.state == done:
		return r.fail(errAfterTerminal(ev.Seq, r.next-1), out)
	case ev.Seq > r.next && ev.Seq-r.next > (r.announced+TerminalReserve-r.received)/cost(0): // the credit has no room for those between
		return r.fail(errBeyondCredit(ev.Seq, r.next, r.announced), out)
	case ev.Seq > r.next: // a gap: nothing is kept, all is asked for again
		r.resend = true
		if r.gap == r.next {
			return append(out, RecvEffect{Kind: AckSoon}) // the burst behind the gap asks once
		}
		r.gap = r.next
		return append(out, RecvEffect{Kind: AckNow})
	case ev.Body < 0 || ev.Body > wire.MaxBody:
		return r.fail(errBodySize(ev.Seq, ev.Body), out)
	}
	end := r.received + cost(ev.Body)
	if end > r.announced+reserve(ev) {
		return r.fail(errOverCredit(ev.Seq, end, r.announced), out)
	}
	if r.measuring && end > r.measureOff {
		r.measuring = false
		if rtt := now.Sub(r.measureAt); r.roundTrip == 0 || rtt < r.roundTrip {
			r.roundTrip = max(rtt, 1)
		}
	}
	if r.epochAt.IsZero() {
		r.epochAt = now
	}
	r.digest[ev.Seq%digests] = ev.Digest
	r.received = end
	r.next++
	out = append(out, RecvEffect{Kind: Deliver})
	if ev.Terminal {
		r.state = done
		return append(out, RecvEffect{Kind: AckNow})
	}
	return append(out, RecvEffect{Kind: AckSoon})
}

// reserve is how far beyond the credit this frame may go (J1).
func reserve(ev RecvEvent) uint64 {
	switch {
	case ev.Terminal:
		return TerminalReserve
	case ev.Body == 0:
		return ControlReserve
	default:
		return 0
	}
}

func (r *Receiver) consume(now time.Time, body int, out []RecvEffect) []RecvEffect {
	if body < 0 || r.consumed+cost(body) > r.received {
		bug("I7", "more was consumed than delivered")
	}
	r.consumed += cost(body)
	if r.state == done {
		return out
	}
	r.grow(now)
	switch grant := r.consumed + r.window - r.announced; {
	case grant >= r.window/4:
		return append(out, RecvEffect{Kind: AckNow})
	case grant >= MaxCost, r.announced < r.received+MaxCost: // the sender may be waiting for every byte
		return append(out, RecvEffect{Kind: AckSoon})
	}
	return out
}

// grow doubles the window when the stream emptied one within two round trips,
// for then it is the window that holds it up (J7). It is empty once a full frame
// does not fit any more.
//
// A round trip is the shortest time seen from a grant to the first frame that
// needed it. Where the sender does not wait for grants that time is too long,
// so it is bounded; and as it only falls while the window grows, growth ends
// once the window is no longer what limits the stream. Before any was seen it is
// taken for so short a one that what comes in bursts alone grows at once.
func (r *Receiver) grow(now time.Time) {
	if r.consumed-r.epochOff+MaxCost <= r.window {
		return
	}
	took, roundTrip := now.Sub(r.epochAt), min(r.roundTrip, maxRoundTrip)
	if roundTrip == 0 {
		roundTrip = minRoundTrip
	}
	r.epochAt, r.epochOff = now, r.consumed
	if took <= 2*roundTrip {
		r.window = min(2*r.window, r.maxWindow)
	}
}

// fail reports a breach, once. A stream whose terminal was delivered stays
// done: it has its one terminal, and the breach is only the peer's to answer for.
func (r *Receiver) fail(err *wire.Error, out []RecvEffect) []RecvEffect {
	if r.breached {
		return out
	}
	r.breached = true
	if r.state != done {
		r.state = failed
	}
	return append(out, RecvEffect{Kind: ReceiverFailed, Err: err})
}
