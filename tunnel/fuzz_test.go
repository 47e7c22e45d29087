package tunnel

import (
	"encoding/binary"
	"testing"
	"time"

	"github.com/iop-fabric/iop/wire"
)

// input reads events out of bytes; what is missing is zero.
type input struct{ data []byte }

func (in *input) byte() byte {
	if len(in.data) == 0 {
		return 0
	}
	b := in.data[0]
	in.data = in.data[1:]
	return b
}

// number is mostly near what is plausible, and sometimes anything.
func (in *input) number(near uint64) uint64 {
	switch k := in.byte(); {
	case k < 200:
		return near + uint64(k%16) - 8
	case k < 240:
		return near + uint64(k)<<12
	default:
		var raw [8]byte
		for i := range raw {
			raw[i] = in.byte()
		}
		return binary.LittleEndian.Uint64(raw[:])
	}
}

func (in *input) body() int { return int(in.byte()) * int(in.byte()) * 65536 / (255 * 255) }

// FuzzSender: whatever a peer answers, in whatever order, nothing panics and
// I1 to I7 hold.
//
// Contract: J8
func FuzzSender(f *testing.F) {
	f.Add([]byte{0, 9, 9, 0, 9, 9, 1, 8, 8, 0, 2, 3, 4})
	f.Add([]byte{0, 255, 255, 0, 255, 255, 1, 9, 0, 0, 2, 2, 5, 0, 1, 1})
	f.Add([]byte{6, 1, 250, 255, 255, 255, 255, 255, 255, 255, 255, 0, 0})
	f.Fuzz(func(t *testing.T, data []byte) {
		in := &input{data: data}
		s := NewSender(SenderConfig{Credit: in.number(wire.MinWindow)})
		now, credit, ended, closing := t0, s.Credit(), 0, false
		owned := map[uint64]bool{} // by the sender
		for len(in.data) > 0 {
			ev := SendEvent{}
			switch op := in.byte(); op % 8 {
			case 0, 6:
				n := in.body()
				f := Frame{Seq: s.NextSeq(), Body: n, Terminal: op == 6}
				if closing || !f.Terminal && !s.Room(n) {
					continue
				}
				closing = f.Terminal
				owned[f.Seq] = true
				ev = SendEvent{Kind: Offer, Frame: f}
			case 7:
				if closing || !s.ControlRoom() {
					continue
				}
				f := Frame{Seq: s.NextSeq(), Control: true}
				owned[f.Seq] = true
				ev = SendEvent{Kind: Offer, Frame: f}
			case 1, 5:
				flags := in.byte()
				ev = SendEvent{Kind: AckReceived, Acked: in.number(s.Acked()), Credit: in.number(s.Offered() + wire.MinWindow), Resend: flags&1 != 0, Reset: flags > 250}
			case 2:
				if now = s.Deadline(); now.IsZero() {
					now = t0
				}
				ev.Kind = SendDeadline
			case 3:
				ev.Kind = SendReconnected
			case 4:
				now = now.Add(time.Duration(in.byte()) * 10 * time.Millisecond)
				if in.byte() < 250 {
					continue
				}
				ev.Kind = SendStopped
			}
			offered := s.Offered()
			for _, ef := range s.Step(now, ev, nil) {
				switch ef.Kind {
				case SendFrame:
					if !owned[ef.Frame.Seq] || ended > 0 {
						t.Fatalf("I5: frame %d sent, owned %v, ended %d", ef.Frame.Seq, owned[ef.Frame.Seq], ended)
					}
				case ReleaseFrame:
					if !owned[ef.Frame.Seq] {
						t.Fatalf("I5: frame %d released twice", ef.Frame.Seq)
					}
					delete(owned, ef.Frame.Seq)
				case SenderDone, SenderFailed:
					if ended++; ended > 1 || len(owned) > 0 {
						t.Fatalf("I3: ended %d times, %d frames kept", ended, len(owned))
					}
					if ef.Kind == SenderDone && !closing {
						t.Fatal("I3: done without a terminal")
					}
				}
			}
			if s.Credit() < credit || s.Credit() > s.Offered()+wire.MaxWindow {
				t.Fatalf("I7: credit %d after %d with %d offered", s.Credit(), credit, s.Offered())
			}
			credit = s.Credit()
			if s.Offered() > credit+TerminalReserve || s.Offered() < offered {
				t.Fatalf("I2: offered %d with a credit of %d", s.Offered(), credit)
			}
			if ended == 1 && s.state == done {
				return // offering now would be a breach of our own
			}
		}
		s.Step(now, SendEvent{Kind: SendStopped}, nil)
		if s.n != 0 || s.holding {
			t.Fatal("I5: stopped with frames")
		}
	})
}

// FuzzReceiver: whatever a peer sends, nothing panics, nothing out of order is
// delivered, and I1, I3 and I7 hold.
//
// Contract: J8
func FuzzReceiver(f *testing.F) {
	f.Add([]byte{0, 8, 1, 1, 0, 0, 9, 1, 1, 0, 2, 3})
	f.Add([]byte{0, 9, 255, 255, 0, 1, 9, 255, 255, 0, 1, 2, 2, 2, 3})
	f.Add([]byte{0, 9, 255, 255, 5, 0, 9, 255, 255, 5, 0, 10, 0, 0, 0})
	f.Fuzz(func(t *testing.T, data []byte) {
		in := &input{data: data}
		r := NewReceiver(ReceiverConfig{Window: in.number(wire.MinWindow), MaxWindow: in.number(wire.MaxWindow)})
		now, credit, failures := t0, r.Window(), 0
		var next, received, consumed uint64 = 1, 0, 0
		var unread []int
		ended := false
		for len(in.data) > 0 {
			now = now.Add(time.Duration(in.byte()) * time.Millisecond)
			var ev RecvEvent
			switch op := in.byte(); {
			case op < 160:
				ev = RecvEvent{Kind: FrameReceived, Seq: in.number(next), Body: in.body(), Digest: uint64(in.byte() / 128), Terminal: op > 155}
				if op == 7 {
					ev.Body = -ev.Body
				}
			case op < 220:
				if len(unread) == 0 {
					continue
				}
				ev = RecvEvent{Kind: Consumed, Body: unread[0]}
				consumed += cost(unread[0])
				unread = unread[1:]
			case op < 254:
				a := r.Ack()
				if a.Acked != next-1 || a.Credit < credit || a.Credit > consumed+wire.MaxWindow {
					t.Fatalf("I7: %+v with %d delivered, %d consumed, %d granted before", a, next-1, consumed, credit)
				}
				credit = a.Credit
				continue
			default:
				ev.Kind = RecvStopped
			}
			for _, ef := range r.Step(now, ev, nil) {
				switch ef.Kind {
				case Deliver:
					if ev.Kind != FrameReceived || ev.Seq != next || ended || failures > 0 {
						t.Fatalf("I1, I3: delivered %+v with %d next, ended %v, failed %d", ev, next, ended, failures)
					}
					next++
					received += cost(ev.Body)
					unread = append(unread, ev.Body)
					ended = ev.Terminal
					if received > credit+TerminalReserve {
						t.Fatalf("I2: took %d with %d granted", received, credit)
					}
				case ReceiverFailed:
					if failures++; failures > 1 || ef.Err.Class != wire.Protocol {
						t.Fatalf("I6: failed %d times with %v", failures, ef.Err)
					}
				}
			}
		}
		if ended != r.Done() {
			t.Fatalf("I3: ended %v, done %v", ended, r.Done())
		}
	})
}
