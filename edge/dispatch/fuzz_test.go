package dispatch

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/iop-fabric/iop/wire"
	"github.com/iop-fabric/iop/wire/iopv1"
)

// input reads a script out of bytes; what is missing is zero.
type input struct{ data []byte }

func (in *input) byte() int {
	if len(in.data) == 0 {
		return 0
	}
	b := in.data[0]
	in.data = in.data[1:]
	return int(b)
}

// near is mostly n or beside it, and sometimes anything.
func (in *input) near(n uint64) uint64 {
	switch k := uint64(in.byte()); { //nolint:gosec // a byte
	case k < 160:
		return n
	case k < 240:
		return n + k%16 - 8
	default:
		return ^uint64(0) >> (k % 16 * 4)
	}
}

// size is any length up to a little over the largest body, mostly small.
func (in *input) size() int { return in.byte() * in.byte() * 66000 / (255 * 255) }

// frame is one with everything a Node can say in it, sensible or not.
func (in *input) frame(next uint64) *iopv1.ProviderTunnelFrame {
	f := &iopv1.ProviderTunnelFrame{
		Sequence: in.near(next), Kind: iopv1.ProviderTunnelFrame_Kind(in.byte() % 7), //nolint:gosec // below 7
		Status: int32(in.near(200)), Body: make([]byte, in.size()), //nolint:gosec // any number is meant
	}
	flags := in.byte()
	f.End = flags&1 != 0
	if flags&2 != 0 {
		f.Headers = header("A", "b")
	}
	if flags&4 != 0 {
		f.Trailers = header("A", strings.Repeat("x", in.byte()))
	}
	if flags&8 != 0 {
		f.Error, f.ErrorClass = "e", string(wire.Classes[in.byte()%len(wire.Classes)])
	}
	if flags&16 != 0 {
		f.Usage = &iopv1.Usage{TotalTokens: 1}
	}
	return f
}

// FuzzAttempt: whatever a Node says and does, in whole messages that are nearly right,
// together with whatever befalls caller and session: nothing panics, the place comes
// back once, the caller sees one end and nothing after it, what is unread is bounded,
// and a neighbour's attempt is served.
//
// Contract: J4 J7 J8 Z5
func FuzzAttempt(f *testing.F) {
	f.Add([]byte{0, 0, 1, 0, 0, 0, 0, 0, 0, 2, 0, 9, 9, 0, 0, 0, 3})
	f.Add([]byte{0, 0, 1, 0, 0, 0, 0, 0, 0, 2, 0, 255, 255, 0, 0, 0, 2, 0, 255, 255, 0, 6, 5, 200, 0, 0, 4, 0, 0, 0, 8})
	f.Add([]byte{4, 0, 0, 4, 0, 0, 1, 5, 255, 7, 0, 0, 1, 0, 0, 0, 0})
	f.Add([]byte{0, 0, 3, 0, 0, 0, 0, 9, 9, 9, 8, 8, 10, 3, 1, 2, 3})
	f.Fuzz(func(t *testing.T, data []byte) {
		inBubble(t, Config{}, func(t *testing.T, r *rig) {
			in := &input{data: data}
			n, good, old := r.node("n", 5), r.node("good", 6), r.node("n", 4)
			payload := "{}"
			if in.byte()%4 == 3 {
				payload = strings.Repeat("x", 200_000)
			}
			a, other := r.attempt(n, payload), r.attempt(good, "{}")
			ctx, leave := context.WithCancel(t.Context())
			defer leave()
			w := answer{block: make(chan struct{}), blocked: make(chan struct{}, 1)}
			reads := in.byte()%3 != 0
			if reads {
				close(w.block)
			}
			p, po := r.do(ctx, a, &w), r.do(t.Context(), other, &answer{})
			<-n.requests
			<-good.requests
			s := r.d.table.get(a.RunID, r.d.table.hash(a.RunID))
			next, fenced := uint64(1), false
			var last []byte
			for len(in.data) > 0 {
				switch op := in.byte() % 12; op {
				case 0, 1, 2, 3:
					f := in.frame(next)
					if f.Sequence == next {
						next++
					}
					last, _ = f.MarshalVT()
					n.raw(a.RunID, last)
				case 4:
					flags := in.byte()
					e := &iopv1.StreamAck_Entry{RunId: a.RunID, Acked: in.near(2), Credit: in.near(wire.MinWindow), Resend: flags&1 != 0, Reset_: flags&2 != 0, Direction: directionBody}
					if flags&4 != 0 {
						e.Direction = "sideways"
					}
					if flags&8 != 0 {
						e.RunId = wire.NewRunID()
					}
					n.sendAck(e)
				case 5:
					pass(time.Duration(in.byte()) * 10 * time.Millisecond)
				case 6:
					leave()
				case 7:
					if !fenced && r.how(a.Slot) == 0 {
						fenced = true
						r.d.Fenced(a.Slot, "fuzz")
					}
				case 8:
					n.raw(a.RunID, last)
				case 9:
					good.raw(a.RunID, last) // another node's run
					old.raw(a.RunID, last)  // a session that is over
				case 10:
					k := min(in.byte(), len(in.data))
					n.raw(a.RunID, in.data[:k])
					in.data = in.data[k:]
				case 11:
					n.raw(wire.NewRunID(), last)
				}
				synctest.Wait()
				if s != nil {
					s.mu.Lock()
					unread := s.unread
					s.mu.Unlock()
					if unread > wire.MaxWindow+inboxSlack {
						t.Fatalf("%d bytes are unread", unread)
					}
				}
			}
			leave()
			if !reads {
				close(w.block)
			}
			p.wait()
			w.mu.Lock()
			calls := len(w.calls)
			w.mu.Unlock()
			pass(wire.CancelBound)
			n.raw(a.RunID, last)
			good.send(other.RunID, whole("y"))
			wantClass(t, po.wait(), "")
			synctest.Wait()
			w.mu.Lock()
			defer w.mu.Unlock()
			if len(w.calls) != calls {
				t.Fatalf("after the end: %v", w.calls[calls:])
			}
			if starts := strings.Count(strings.Join(w.calls, ","), "start"); starts > 1 {
				t.Fatal(w.calls)
			}
			if back := r.how(a.Slot) != 0; back == fenced || r.d.Open() != 0 {
				t.Fatalf("the place is back: %v, was fenced: %v, %d open", back, fenced, r.d.Open())
			}
		})
	})
}

// Acknowledgements that Do has not looked at yet add up; one that was overtaken asks
// for nothing again.
//
// Contract: J1 J2
func TestOvertakenAcknowledgements(t *testing.T) {
	type entry = iopv1.StreamAck_Entry
	for name, c := range map[string]struct {
		entries []*entry
		want    bodyAck
	}{
		"an older one asks":           {[]*entry{{Acked: 2, Credit: 9}, {Acked: 1, Credit: 8, Resend: true}}, bodyAck{pending: true, acked: 2, credit: 9}},
		"a newer one asks no more":    {[]*entry{{Acked: 1, Resend: true}, {Acked: 2}}, bodyAck{pending: true, acked: 2}},
		"the newest asks":             {[]*entry{{Acked: 1}, {Acked: 2, Resend: true}}, bodyAck{pending: true, acked: 2, resend: true}},
		"asked and then told of more": {[]*entry{{Acked: 1, Resend: true}, {Acked: 1, Credit: 5}}, bodyAck{pending: true, acked: 1, credit: 5, resend: true}},
	} {
		s := &stream{wake: make(chan struct{}, 1)}
		for _, e := range c.entries {
			s.acknowledged(e)
		}
		if s.body != c.want {
			t.Errorf("%s: %+v", name, s.body)
		}
	}
}
