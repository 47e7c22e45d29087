package node

import (
	"context"
	"io"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/iop-fabric/iop/agent"
	"github.com/iop-fabric/iop/internal/bus"
	"github.com/iop-fabric/iop/subjects"
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

// FuzzStreams: whatever an Edge says, in whole messages that are nearly right: nothing
// panics, the session stays, each run has its sequences once each and in order and one
// terminal at most, and in the end no exchange and no stream is left.
//
// Contract: J3 J4 J8 C1 X6
func FuzzStreams(f *testing.F) {
	f.Add([]byte{0, 0, 0, 200, 0, 1, 0, 9, 9, 1, 3, 0, 1, 0, 0, 5, 10})
	f.Add([]byte{0, 1, 0, 200, 0, 1, 0, 99, 0, 1, 0, 99, 1, 2, 2, 0, 3, 250, 0})
	f.Add([]byte{2, 0, 0, 0, 0, 0, 0, 5, 100, 3, 0, 245, 1, 4, 7})
	f.Fuzz(func(t *testing.T, data []byte) {
		synctest.Test(t, func(t *testing.T) {
			in := &input{data: data}
			r := newRig(t, options{exchange: func(_ context.Context, ex agent.Exchange, sink agent.Sink) error {
				if err := sink.Start(200, jsonHeader, -1); err != nil {
					return err
				}
				for range 5 {
					if err := sink.Body(make([]byte, 3000)); err != nil {
						return err
					}
				}
				if ex.Body != nil {
					if _, err := io.Copy(io.Discard, ex.Body); err != nil {
						return err
					}
				}
				return nil
			}}).ready()
			defer r.finish()
			r.edge.with(func() { r.edge.runs = nil }) // what comes is looked at here
			runs := []string{strings.Repeat("a", 26), strings.Repeat("b", 26), strings.Repeat("c", 26)}
			next, ended := map[string]uint64{}, map[string]uint64{}
			_, err := r.edge.conn.Subscribe("iop.v1.*.*.*.up.frame.*", func(m bus.Msg) {
				msg, _ := subjects.ParseUp(m.Subject)
				var f iopv1.ProviderTunnelFrame
				if f.UnmarshalVT(m.Data) != nil {
					t.Error("a frame does not decode")
				}
				seq, terminal := f.GetSequence(), f.GetEnd() || f.GetKind() == iopv1.ProviderTunnelFrame_END || f.GetKind() == iopv1.ProviderTunnelFrame_ERROR
				switch end := ended[msg.Run]; {
				case seq > next[msg.Run]+1:
					t.Errorf("%d follows %d", seq, next[msg.Run])
				case end > 0 && seq > end:
					t.Errorf("%d follows the terminal %d", seq, end)
				case terminal:
					ended[msg.Run] = seq
				}
				next[msg.Run] = max(next[msg.Run], seq)
			})
			must(t, err)
			s := r.session()
			seqs := map[string]uint64{}
			for len(in.data) > 0 {
				run := runs[in.byte()%len(runs)]
				switch op := in.byte() % 8; op {
				case 0, 1:
					q := &iopv1.ProviderTunnelRequest{
						RunId: run, Adapter: "a", Credit: in.near(wire.MinWindow), BodyFollows: op == 1, BodySize: in.near(20),
						TimeoutSec: int64(in.byte() % 3), //nolint:gosec // a small one
					}
					r.edge.send(s, subjects.Tunnel, run, q)
				case 2, 3:
					flags := in.byte()
					seq := in.near(seqs[run] + 1)
					seqs[run] = max(seqs[run], min(seq, seqs[run]+1))
					b := &iopv1.BodyFrame{RunId: run, Sequence: seq, Body: make([]byte, in.byte()%24), Last: flags&1 != 0, Acked: uint64(flags >> 6)} //nolint:gosec // small
					if flags&2 != 0 {
						b.ErrorClass = "cancelled"
					}
					r.edge.send(s, subjects.Body, run, b)
				case 4, 5:
					flags := in.byte()
					e := &iopv1.StreamAck_Entry{RunId: run, Acked: in.near(2), Credit: in.near(wire.MinWindow), Resend: flags&1 != 0, Reset_: flags&6 == 6, Direction: dirFrame}
					r.edge.send(s, subjects.Ack, "", &iopv1.StreamAck{Entries: []*iopv1.StreamAck_Entry{e}})
				case 6:
					r.edge.cancel(run)
				case 7:
					pass(time.Duration(in.byte()) * 10 * time.Millisecond)
				}
				synctest.Wait()
			}
			for _, run := range runs {
				r.edge.cancel(run)
			}
			// The close grace, and what a sender waits for acknowledgements at most;
			// a starved one waits for ever, and is told that nobody knows it.
			pass(wire.CloseGrace + 11*time.Second)
			for _, run := range runs {
				r.edge.send(s, subjects.Ack, "", &iopv1.StreamAck{Entries: []*iopv1.StreamAck_Entry{{RunId: run, Reset_: true, Direction: dirFrame}}})
			}
			pass(time.Second)
			if n := r.node.host.open(); n != 0 {
				t.Errorf("%d exchanges are left", n)
			}
			r.wantState("ready")
		})
	})
}
