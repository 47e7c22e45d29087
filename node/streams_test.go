package node

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/iop-fabric/iop/agent"
	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/bus"
	"github.com/iop-fabric/iop/internal/bus/membus"
	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/tunnel"
	"github.com/iop-fabric/iop/wire"
	"github.com/iop-fabric/iop/wire/iopv1"
)

// A small answer of known size is one message, with its usage.
//
// Contract: T3 T4
func TestSmallAnswerIsOneMessage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		text := `{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":4,"total_tokens":7}}`
		r := newRig(t, options{exchange: func(_ context.Context, ex agent.Exchange, sink agent.Sink) error {
			if ex.Target != "m" || ex.Operation != "chat_completions" || ex.RawQuery != "q=1" || ex.BodySize != 2 || string(ex.Header[1].Value) != "\xff" {
				t.Errorf("asked %+v", ex)
			}
			b, _ := io.ReadAll(ex.Body)
			if string(b) != "{}" {
				t.Errorf("body %q", b)
			}
			return errors.Join(
				sink.Start(201, append(jsonHeader, agent.Field{Name: "X", Value: []byte("1")}, agent.Field{Name: "X", Value: []byte{0xe9}}), int64(len(text))),
				sink.Body([]byte(text)), sink.Trailer([]agent.Field{{Name: "T", Value: []byte("t")}}))
		}}).ready()
		defer r.finish()
		_, a := r.edge.open(func(q *iopv1.ProviderTunnelRequest) {
			q.RawQuery, q.Body, q.BodySize = "q=1", []byte("{}"), 2
			q.Headers = []*iopv1.Header{{Name: "A", Value: []byte("a")}, {Name: "A", Value: []byte("\xff")}}
		})
		<-a.ended
		got := r.edge.got(a)
		if len(got) != 1 {
			t.Fatalf("%d frames: %s", len(got), describe(got))
		}
		f := got[0]
		if f.GetKind() != iopv1.ProviderTunnelFrame_RESPONSE_START || !f.GetEnd() || f.GetStatus() != 201 || string(f.GetBody()) != text {
			t.Errorf("%v", f)
		}
		if h := f.GetHeaders(); len(h) != 3 || h[1].GetName() != "X" || !bytes.Equal(h[2].GetValue(), []byte{0xe9}) {
			t.Errorf("headers %v", h)
		}
		if len(f.GetTrailers()) != 1 || f.GetUsage().GetTotalTokens() != 7 || f.GetUsage().GetInputTokens() != 3 {
			t.Errorf("trailers %v, usage %v", f.GetTrailers(), f.GetUsage())
		}
	})
}

// An answer of known size that comes in pieces is not kept back to be complete.
//
// Contract: E4
func TestSmallAnswerInPiecesIsNotKeptBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		next := make(chan []byte)
		r := newRig(t, options{exchange: func(_ context.Context, _ agent.Exchange, sink agent.Sink) error {
			if err := sink.Start(200, jsonHeader, 4); err != nil {
				return err
			}
			for p := range next {
				if err := sink.Body(p); err != nil {
					return err
				}
			}
			return nil
		}}).ready()
		defer r.finish()
		_, a := r.edge.open(nil)
		next <- []byte("ab")
		synctest.Wait()
		if got := r.edge.got(a); len(got) == 0 || string(body(got)) != "ab" {
			t.Fatalf("the first piece waits for the second: %s", describe(got))
		}
		next <- []byte("cd")
		close(next)
		<-a.ended
		if got := r.edge.got(a); string(body(got)) != "abcd" {
			t.Errorf("%s", describe(got))
		}
	})
}

// Of a stream the start goes out at once and every read is a frame; END has the
// trailers and the usage of the last event.
//
// Contract: T3 J6 J9
func TestStreamedAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		next := make(chan []byte)
		r := newRig(t, options{exchange: func(_ context.Context, _ agent.Exchange, sink agent.Sink) error {
			if err := sink.Start(200, []agent.Field{{Name: "content-type", Value: []byte("text/event-stream")}}, -1); err != nil {
				return err
			}
			for p := range next {
				if err := sink.Body(p); err != nil {
					return err
				}
			}
			return sink.Trailer([]agent.Field{{Name: "T", Value: []byte("t")}})
		}}).ready()
		defer r.finish()
		_, a := r.edge.open(nil)
		synctest.Wait()
		if got := r.edge.got(a); len(got) != 1 || got[0].GetStatus() != 200 {
			t.Fatalf("before the first byte: %s", describe(got))
		}
		for i := range 5 {
			next <- fmt.Appendf(nil, "data: {\"i\":%d,\"usage\":null}\n\n", i)
			synctest.Wait()
			if got := r.edge.got(a); len(got) != 2+i {
				t.Fatalf("read %d is not one frame: %s", i, describe(got))
			}
		}
		next <- bytes.Repeat([]byte("x"), wire.MaxBody+1) // larger than any message
		next <- []byte(`data: {"usage":{"prompt_tokens":1,"completion_tokens":2}}` + "\n\ndata: [DONE]\n\n")
		close(next)
		<-a.ended
		got := r.edge.got(a)
		last := got[len(got)-1]
		if len(got) != 10 || last.GetKind() != iopv1.ProviderTunnelFrame_END || len(last.GetTrailers()) != 1 || last.GetUsage().GetTotalTokens() != 3 {
			t.Errorf("%s: %v", describe(got), last)
		}
		for _, f := range got {
			if len(f.GetBody()) > wire.MaxBody {
				t.Errorf("a body of %d bytes", len(f.GetBody()))
			}
		}
	})
}

// A bus that loses, doubles and reorders in both directions changes no byte of
// either body.
//
// Contract: J1 J2 J3 T7
func TestLossyBus(t *testing.T) {
	for seed := range uint64(4) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				rnd := rand.New(rand.NewPCG(seed, 1))
				sent := make([]byte, 900<<10+int(seed)*7777)
				for i := range sent {
					sent[i] = byte(rnd.Uint32())
				}
				r := newRig(t, options{seed: seed, exchange: func(_ context.Context, ex agent.Exchange, sink agent.Sink) error {
					if err := sink.Start(200, nil, -1); err != nil {
						return err
					}
					h := sha256.New()
					buf := make([]byte, 32<<10)
					for { // gives back what it gets, as it gets it
						n, err := ex.Body.Read(buf)
						h.Write(buf[:n])
						if n > 0 {
							if err := sink.Body(buf[:n]); err != nil {
								return err
							}
						}
						if err == io.EOF {
							break
						}
						if err != nil {
							return err
						}
					}
					return sink.Trailer([]agent.Field{{Name: "Hash", Value: h.Sum(nil)}})
				}}).ready()
				defer r.finish()
				for _, subject := range []string{"iop.v1.*.*.*.up.frame.*", "iop.v1.*.*.*.up.ack", "iop.v1.*.*.*.down.ack", "iop.v1.*.*.*.down.body.*"} {
					defer r.bus.Inject(membus.Fault{Subject: subject, Drop: 0.15, Duplicate: 0.1, Jitter: 5 * time.Millisecond})()
				}
				_, a := r.edge.upload(sent)
				<-a.ended
				r.edge.wantClass(a, "END")
				got := r.edge.got(a)
				want := sha256.Sum256(sent)
				if b := body(got); sha256.Sum256(b) != want {
					t.Errorf("%d bytes came back, %d were sent", len(b), len(sent))
				}
				if tr := got[len(got)-1].GetTrailers(); len(tr) != 1 || !bytes.Equal(tr[0].GetValue(), want[:]) {
					t.Error("the provider read another body")
				}
				pass(30 * time.Second)
				if n := len(r.node.link.streams.byRun); n != 0 {
					t.Errorf("%d streams are not forgotten", n)
				}
				r.wantState("ready")
			})
		})
	}
}

// upload opens a tunnel whose body follows in frames, and sends it on a
// goroutine that ends with the run.
func (e *fakeEdge) upload(data []byte) (string, *answer) {
	run, a := e.open(func(q *iopv1.ProviderTunnelRequest) { q.BodyFollows, q.BodySize = true, uint64(len(data)) })
	sess := a.sess
	go func() {
		s := tunnel.NewSender(tunnel.SenderConfig{Credit: wire.MinWindow})
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		seen, left := 0, data
		do := func(effects []tunnel.SendEffect) {
			for _, ef := range effects {
				if ef.Kind == tunnel.SendFrame {
					_ = e.conn.Publish(sess.Down(subjects.Body, run), ef.Frame.Data)
				}
			}
		}
		for {
			for len(left) > 0 && s.Room(min(len(left), wire.MaxBody)) {
				n := min(len(left), wire.MaxBody)
				f := &iopv1.BodyFrame{RunId: run, Sequence: s.NextSeq(), Body: left[:n], Last: n == len(left)}
				raw, err := f.MarshalVT()
				must(e.r.t, err)
				left = left[n:]
				do(s.Step(time.Now(), tunnel.SendEvent{Kind: tunnel.Offer, Frame: tunnel.Frame{Seq: f.GetSequence(), Data: raw, Body: n, Terminal: f.GetLast()}}, nil))
			}
			select {
			case <-a.ended:
				return
			case <-tick.C:
			}
			if d := s.Deadline(); !d.IsZero() && !time.Now().Before(d) {
				do(s.Step(time.Now(), tunnel.SendEvent{Kind: tunnel.SendDeadline}, nil))
			}
			var news []*iopv1.StreamAck_Entry
			e.with(func() { news = e.acks[seen:]; seen = len(e.acks) })
			for _, k := range news {
				if k.GetRunId() == run && k.GetDirection() == dirBody {
					do(s.Step(time.Now(), tunnel.SendEvent{Kind: tunnel.AckReceived, Acked: k.GetAcked(), Credit: k.GetCredit(), Resend: k.GetResend()}, nil))
				}
			}
		}
	}()
	return run, a
}

// Whatever is refused is refused before any provider is called, in one ERROR.
//
// Contract: W1 L1 P3 X6 M3
func TestRefusals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		calls := 0
		r := newRig(t, options{exchange: func(context.Context, agent.Exchange, agent.Sink) error {
			calls++
			return nil
		}}).ready()
		defer r.finish()
		for name, c := range map[string]struct {
			class  wire.Class
			change func(q *iopv1.ProviderTunnelRequest)
		}{
			"unknown adapter":  {wire.UnknownAdapter, func(q *iopv1.ProviderTunnelRequest) { q.Adapter = "b" }},
			"negative stall":   {wire.Invalid, func(q *iopv1.ProviderTunnelRequest) { q.ResponseStallTimeoutMs = -1 }},
			"endless stall":    {wire.Invalid, func(q *iopv1.ProviderTunnelRequest) { q.ResponseStallTimeoutMs = 9223372036855 }},
			"negative timeout": {wire.Invalid, func(q *iopv1.ProviderTunnelRequest) { q.TimeoutSec = -1 }},
			"endless timeout":  {wire.Invalid, func(q *iopv1.ProviderTunnelRequest) { q.TimeoutSec = math.MaxInt64 }},
			"another id":       {wire.Invalid, func(q *iopv1.ProviderTunnelRequest) { q.RunId = wire.NewRunID() }},
			"a lease":          {wire.Credential, func(q *iopv1.ProviderTunnelRequest) { q.CredentialLease = []byte{1} }},
			"a binding":        {wire.Credential, func(q *iopv1.ProviderTunnelRequest) { q.CredentialBinding = &iopv1.CredentialLeaseBinding{} }},
			"two bodies":       {wire.Invalid, func(q *iopv1.ProviderTunnelRequest) { q.Body, q.BodyFollows, q.BodySize = []byte("x"), true, 1 }},
			"half a body":      {wire.Invalid, func(q *iopv1.ProviderTunnelRequest) { q.Body, q.BodySize = []byte("x"), 2 }},
			"endless body":     {wire.Invalid, func(q *iopv1.ProviderTunnelRequest) { q.BodyFollows, q.BodySize = true, math.MaxUint64 }},
			"headers": {wire.Invalid, func(q *iopv1.ProviderTunnelRequest) {
				q.Headers = []*iopv1.Header{{Name: "x", Value: make([]byte, wire.MaxHeaders)}}
			}},
		} {
			_, a := r.edge.open(c.change)
			synctest.Wait()
			if got := r.edge.class(a); got != string(c.class) {
				t.Errorf("%s: %q, not %s", name, got, c.class)
			}
		}
		_, a := r.edge.open(func(q *iopv1.ProviderTunnelRequest) { q.ResponseStallTimeoutMs = 9223372036854 })
		synctest.Wait()
		r.edge.wantClass(a, string(wire.Internal)) // it got to the adapter, which answered nothing
		if calls != 1 {
			t.Errorf("the provider was called %d times", calls)
		}
	})
}

// A full gate refuses at once; listing models takes no slot.
//
// Contract: P3
func TestCapacity(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, options{exchange: hang}).ready()
		defer r.finish()
		var runs []string
		for range 4 {
			run, a := r.edge.open(nil)
			<-a.started
			runs = append(runs, run)
		}
		_, fifth := r.edge.open(nil)
		listing, models := r.edge.open(func(q *iopv1.ProviderTunnelRequest) { q.Operation = opModels })
		synctest.Wait()
		r.edge.wantClass(fifth, string(wire.Capacity))
		if got := r.edge.got(models); len(got) != 1 || r.edge.class(models) != "" {
			t.Error("listing models needs a slot")
		}
		for _, run := range append(runs, listing) {
			r.edge.cancel(run)
		}
		synctest.Wait()
		if n := r.node.host.open(); n != 0 {
			t.Errorf("%d exchanges are open", n)
		}
	})
}

// Trap 14: whoever sees a terminal finds the slot free.
//
// Contract: P7
func TestTrap14SlotBeforeTerminal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		config := payload("a")
		config.Adapters[0].Capacity = 1
		r := newRig(t, options{config: config}).ready()
		defer r.finish()
		for i := range 3000 {
			_, a := r.edge.open(nil)
			<-a.ended
			if c := r.edge.class(a); c != "END" {
				t.Fatalf("run %d: %s", i, c)
			}
		}
	})
}

// Trap 16: cancels in every order; always one terminal.
//
// Contract: C1 T6
func TestTrap16CancelOrders(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		calls := map[string]int{}
		r := newRig(t, options{exchange: func(ctx context.Context, ex agent.Exchange, sink agent.Sink) error {
			mu.Lock()
			calls[ex.RunID]++
			mu.Unlock()
			err := hang(ctx, ex, sink)
			if !errors.Is(err, errCancelled) {
				t.Errorf("cancelled with %v", err)
			}
			return err
		}}).ready()
		defer r.finish()

		early := wire.NewRunID() // before its request
		r.edge.cancel(early)
		_, a := r.edge.openAs(early, nil)
		synctest.Wait()
		r.edge.wantClass(a, string(wire.Cancelled))

		first, a1 := r.edge.open(nil) // two attempts, the first cancelled twice
		second, a2 := r.edge.open(nil)
		<-a1.started
		<-a2.started
		r.edge.cancel(first)
		r.edge.cancel(first)
		synctest.Wait()
		r.edge.wantClass(a1, string(wire.Cancelled))
		r.edge.wantClass(a2, "")
		r.edge.cancel(first) // after the terminal
		pass(time.Second)
		r.edge.cancel(first)                     // after it was forgotten
		for _, id := range []string{"", first} { // empty, and another's
			r.edge.send(r.session(), subjects.Cancel, second, &iopv1.CancelRequest{RunId: id})
		}
		synctest.Wait()
		r.edge.wantClass(a1, string(wire.Cancelled))
		r.edge.wantClass(a2, "")
		r.edge.cancel(second)
		synctest.Wait()
		r.edge.wantClass(a2, string(wire.Cancelled))

		old := wire.NewRunID() // remembered for a while only
		r.edge.cancel(old)
		pass(keepEarly)
		_, a3 := r.edge.openAs(old, nil)
		synctest.Wait()
		r.edge.wantClass(a3, "")
		r.edge.cancel(old)
		synctest.Wait()
		if calls[early] != 0 || calls[first] != 1 || calls[second] != 1 || calls[old] != 1 {
			t.Errorf("calls: %v", calls)
		}
	})
}

// A66: a request that comes twice runs once; the second copy is only
// acknowledged, while the first runs and after it ended.
//
// Contract: X6
func TestA66RequestTwice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		calls := 0
		r := newRig(t, options{exchange: func(ctx context.Context, ex agent.Exchange, sink agent.Sink) error {
			calls++
			<-ctx.Done()
			return context.Cause(ctx)
		}}).ready()
		defer r.finish()
		run, a := r.edge.open(nil)
		pass(ackDelay)
		accepted := func() (n int) {
			r.edge.with(func() {
				for _, k := range r.edge.acks {
					if k.GetRunId() == run && k.GetDirection() == dirBody && !k.GetReset_() {
						n++
					}
				}
			})
			return n
		}
		if accepted() != 1 {
			t.Fatalf("a silent provider's request was acknowledged %d times", accepted())
		}
		r.edge.openAs(run, nil)
		pass(ackDelay)
		if calls != 1 || len(r.edge.got(a)) != 0 || accepted() != 2 {
			t.Errorf("%d calls, %s, %d acknowledgements", calls, describe(r.edge.got(a)), accepted())
		}
		r.edge.cancel(run)
		pass(time.Second)
		r.edge.openAs(run, nil)
		pass(time.Second)
		if calls != 1 || len(r.edge.got(a)) != 1 {
			t.Errorf("%d calls, %s", calls, describe(r.edge.got(a)))
		}
	})
}

// timeout_sec counts from acceptance.
//
// Contract: M4
func TestDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, options{exchange: hang}).ready()
		defer r.finish()
		_, a := r.edge.open(func(q *iopv1.ProviderTunnelRequest) { q.TimeoutSec = 7 })
		pass(7*time.Second - time.Millisecond)
		r.edge.wantClass(a, "")
		pass(2 * time.Millisecond)
		r.edge.wantClass(a, string(wire.Deadline))
	})
}

// Trap 13's half without a stall: a provider that ignores its cancel keeps its
// slot, over sessions, until it returns; its terminal goes out after the grace,
// and nothing it yields later follows.
//
// Contract: W9 P3 F5
func TestTrap13ProviderThatDoesNotReturn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		config := payload("a")
		config.Adapters[0].Capacity = 1
		release := make(chan struct{})
		stubborn := true
		r := newRig(t, options{config: config, exchange: func(ctx context.Context, ex agent.Exchange, sink agent.Sink) error {
			if !stubborn {
				return small("ok")(ctx, ex, sink)
			}
			must(t, sink.Start(200, nil, -1))
			<-release
			if sink.Body([]byte("late")) == nil {
				t.Error("the sink still takes bytes")
			}
			return nil
		}}).ready()
		defer r.finish()
		run, a := r.edge.open(nil)
		<-a.started
		r.edge.cancel(run)
		pass(wire.CloseGrace - time.Millisecond)
		r.edge.wantClass(a, "")
		pass(2 * time.Millisecond)
		r.edge.wantClass(a, string(wire.Cancelled))

		stubborn = false
		refused := func() {
			t.Helper()
			_, b := r.edge.open(nil)
			synctest.Wait()
			r.edge.wantClass(b, string(wire.Capacity))
		}
		refused()
		r.conn.Kill(nil)
		pass(250 * time.Millisecond)
		r.wantState("ready")
		refused()
		close(release)
		synctest.Wait()
		_, c := r.edge.open(nil)
		synctest.Wait()
		r.edge.wantClass(c, "END")
		if got := r.edge.got(a); len(got) != 2 {
			t.Errorf("of the first: %s", describe(got))
		}
	})
}

// The first terminal made wins, also while nobody has acknowledged it.
//
// Contract: J4 W9
func TestOneTerminal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		r := newRig(t, options{exchange: func(_ context.Context, _ agent.Exchange, sink agent.Sink) error {
			must(t, sink.Start(200, nil, -1))
			<-release
			return nil
		}}).ready()
		defer r.finish()
		run, a := r.edge.open(nil)
		<-a.started
		r.edge.with(func() { a.mute = true })
		r.edge.cancel(run)
		pass(wire.CloseGrace + time.Millisecond)
		close(release)
		synctest.Wait()
		r.edge.wantClass(a, string(wire.Cancelled))
		if got := r.edge.got(a); len(got) != 2 {
			t.Errorf("%s", describe(got))
		}
	})
}

// How an exchange fails becomes a class, and no text nobody vouched for.
//
// Contract: M3
func TestFailureClasses(t *testing.T) {
	fail := func(code agent.Code) error { return &agent.Failure{Code: code, Message: "told"} }
	begun := []agent.Field{}
	for name, c := range map[string]struct {
		run   func(sink agent.Sink) error
		class string
		text  string
		sent  string
	}{
		"invalid":     {func(agent.Sink) error { return fail(agent.CodeInvalid) }, "invalid", "told", ""},
		"unreachable": {func(agent.Sink) error { return fail(agent.CodeUnreachable) }, "unreachable", "told", ""},
		"refused": {func(agent.Sink) error {
			return &agent.Failure{Code: agent.CodeUnreachable, Message: "told", Metadata: map[string]string{agent.MetaReason: agent.ReasonRefused}}
		}, "unreachable", "told", ""},
		"refused, but begun": {func(agent.Sink) error {
			return &agent.Failure{Code: agent.CodeProvider, Message: "told", Metadata: map[string]string{agent.MetaReason: agent.ReasonRefused}}
		}, "provider", "told", ""},
		"deadline":   {func(agent.Sink) error { return fail(agent.CodeDeadline) }, "deadline", "told", ""},
		"cancelled":  {func(agent.Sink) error { return fail(agent.CodeCancelled) }, "cancelled", "told", ""},
		"internal":   {func(agent.Sink) error { return fail(agent.CodeInternal) }, "internal", "told", ""},
		"later code": {func(agent.Sink) error { return fail("of-2031") }, "internal", "told", ""},
		"unvouched":  {func(agent.Sink) error { return errors.New("dial http://secret") }, "internal", "the adapter failed", ""},
		"panic":      {func(agent.Sink) error { panic("secret") }, "internal", "the adapter panicked", ""},
		"nothing":    {func(agent.Sink) error { return nil }, "internal", "", ""},
		"cut, small": {func(s agent.Sink) error { // what came before the cut arrives
			return errors.Join(s.Start(200, begun, 10), s.Body([]byte("half")), fail(agent.CodeProvider))
		}, "provider", "", "half"},
		"cut, stream": {func(s agent.Sink) error {
			return errors.Join(s.Start(200, begun, -1), s.Body([]byte("half")), fail(agent.CodeProvider))
		}, "provider", "", "half"},
		"body first":    {func(s agent.Sink) error { return s.Body([]byte("x")) }, "internal", "", ""},
		"trailer first": {func(s agent.Sink) error { return s.Trailer(nil) }, "internal", "", ""},
		"two starts": {func(s agent.Sink) error {
			_ = s.Start(200, begun, -1)
			_ = s.Start(200, begun, -1)
			return nil
		}, "internal", "", ""},
		"status": {func(s agent.Sink) error { return s.Start(101, begun, -1) }, "provider", "", ""},
		"huge header": {func(s agent.Sink) error {
			return s.Start(200, []agent.Field{{Name: "X", Value: make([]byte, wire.MaxHeaders)}}, -1)
		}, "provider", "", ""},
		"huge trailer": {func(s agent.Sink) error {
			_ = s.Start(200, begun, 0)
			return s.Trailer([]agent.Field{{Name: "X", Value: make([]byte, wire.MaxHeaders)}})
		}, "provider", "", ""},
		"longer than it said": {func(s agent.Sink) error {
			return errors.Join(s.Start(200, begun, 2), s.Body([]byte("lon")), s.Body([]byte("ger")))
		}, "END", "", "longer"},
		"empty": {func(s agent.Sink) error { return s.Start(204, nil, 0) }, "END", "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t, options{exchange: func(_ context.Context, _ agent.Exchange, sink agent.Sink) error { return c.run(sink) }}).ready()
				defer r.finish()
				_, a := r.edge.open(nil)
				synctest.Wait()
				r.edge.wantClass(a, c.class)
				got := r.edge.got(a)
				if len(got) == 0 {
					t.Fatal("no terminal")
				}
				if text := got[len(got)-1].GetError(); c.text != "" && text != c.text {
					t.Errorf("told %q", text)
				}
				if reason := got[len(got)-1].GetMetadata()[wire.MetaReason]; (reason == wire.ReasonRefused) != (name == "refused") {
					t.Errorf("the reason is %q", reason)
				}
				if string(body(got)) != c.sent {
					t.Errorf("sent %q, not %q", body(got), c.sent)
				}
				if strings.Contains(r.logs.String(), "secret") {
					t.Error("the log holds what the adapter said")
				}
				if n := r.node.host.open(); n != 0 {
					t.Errorf("%d exchanges are open", n)
				}
			})
		})
	}
}

// A caller that does not read stops its own stream after one window, and no
// other; a cancel frees the exchange that waits for room.
//
// Contract: J7 T6
func TestA62SlowCaller(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		produced := map[string]int{}
		r := newRig(t, options{exchange: func(_ context.Context, ex agent.Exchange, sink agent.Sink) error {
			if err := sink.Start(200, nil, -1); err != nil {
				return err
			}
			if ex.Target == "quick" {
				return sink.Body([]byte("quick"))
			}
			for {
				if err := sink.Body(make([]byte, 1000)); err != nil {
					return err
				}
				produced[ex.RunID]++
			}
		}}).ready()
		defer r.finish()
		run, a := r.edge.open(nil)
		r.edge.with(func() { a.mute = true })
		synctest.Wait()
		if n := produced[run] * (1000 + wire.FrameOverhead); n > wire.MinWindow || n < wire.MinWindow-4*wire.FrameOverhead-2000 {
			t.Errorf("%d bytes are under way in a window of %d", n, wire.MinWindow)
		}
		_, b := r.edge.open(func(q *iopv1.ProviderTunnelRequest) { q.Target = "quick" })
		<-b.ended
		r.edge.wantClass(b, "END")
		r.edge.cancel(run)
		synctest.Wait()
		r.edge.wantClass(a, string(wire.Cancelled))
		if n := r.node.host.open(); n != 0 {
			t.Errorf("%d exchanges are open", n)
		}
		r.edge.with(func() { r.edge.ack(a.sess, run, a) })
		synctest.Wait()
		if n := r.node.link.streams.count(); n != 0 {
			t.Errorf("%d streams are known", n)
		}
	})
}

// A19, A20, A61: cancels reach silent providers at once, and nothing stays.
//
// Contract: T6
func TestA61CancelledStreamsLeaveNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		config := payload("a")
		config.Adapters[0].Capacity = 1000
		r := newRig(t, options{config: config, exchange: hang}).ready()
		defer r.finish()
		before := runtime.NumGoroutine()
		var runs []string
		var answers []*answer
		for range 1000 {
			run, a := r.edge.open(nil)
			runs, answers = append(runs, run), append(answers, a)
		}
		synctest.Wait()
		for _, run := range runs {
			r.edge.cancel(run)
		}
		synctest.Wait()
		for _, a := range answers {
			r.edge.wantClass(a, string(wire.Cancelled))
		}
		pass(time.Second)
		if now := runtime.NumGoroutine(); now > before {
			t.Errorf("%d goroutines before, %d after", before, now)
		}
		if n := r.node.link.streams.count(); n != 0 {
			t.Errorf("%d streams are known", n)
		}
	})
}

// A stop refuses what is new as draining, lets what runs end, says so in its
// heartbeats, and returns nil.
//
// Contract: D7
func TestGracefulStop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		finish := make(chan struct{})
		r := newRig(t, options{exchange: func(_ context.Context, _ agent.Exchange, sink agent.Sink) error {
			must(t, sink.Start(200, nil, -1))
			<-finish
			return sink.Body([]byte("whole"))
		}}).ready()
		defer r.finish()
		_, a := r.edge.open(nil)
		<-a.started
		r.stop()
		synctest.Wait()
		r.wantState("draining")
		_, b := r.edge.open(nil)
		synctest.Wait()
		r.edge.wantClass(b, string(wire.Draining))
		pass(beat)
		r.edge.with(func() {
			last := r.edge.hearts[len(r.edge.hearts)-1]
			if !last.GetDraining() || last.GetOpenAttempts() != 1 {
				t.Errorf("heartbeat %v", last)
			}
		})
		close(finish)
		<-r.done
		r.edge.wantClass(a, "END")
		if r.stops["a"] != 1 {
			t.Errorf("adapters stopped: %v", r.stops)
		}
	})
}

// What does not end within the grace is cut with one terminal, which is still
// delivered.
//
// Contract: D7
func TestStopGraceIsOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, options{exchange: hang, cfg: configs.Node{StopGrace: 4 * time.Second}}).ready()
		defer r.finish()
		_, a := r.edge.open(nil)
		<-a.started
		r.stop()
		pass(4*time.Second - time.Millisecond)
		r.edge.wantClass(a, "")
		pass(2 * time.Millisecond)
		r.edge.wantClass(a, string(wire.SessionEnded))
		<-r.done
	})
}

// A provider that never returns holds neither its terminal nor the process.
//
// Contract: D7
func TestStopWithAStubbornProvider(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		r := newRig(t, options{exchange: func(context.Context, agent.Exchange, agent.Sink) error {
			<-release
			return nil
		}}).ready()
		_, a := r.edge.open(nil)
		synctest.Wait()
		r.finish()
		r.edge.wantClass(a, string(wire.SessionEnded))
		if !strings.Contains(r.logs.String(), evLeft) {
			t.Error("nobody says that an exchange was left")
		}
		close(release)
		synctest.Wait()
	})
}

// An Edge that breaks the rules of a body loses that stream.
//
// Contract: J8 J3
func TestBodyBreaches(t *testing.T) {
	frame := func(seq uint64, n int, last bool) *iopv1.BodyFrame {
		return &iopv1.BodyFrame{Sequence: seq, Body: make([]byte, n), Last: last}
	}
	for name, c := range map[string]struct {
		size   uint64
		frames []*iopv1.BodyFrame
		class  string
	}{
		"no sequence":    {100, []*iopv1.BodyFrame{frame(0, 10, false)}, "protocol"},
		"forged":         {100, []*iopv1.BodyFrame{frame(1, 10, false), frame(1, 11, false)}, "protocol"},
		"after the last": {100, []*iopv1.BodyFrame{frame(1, 100, true), frame(2, 1, false)}, "protocol"},
		"too short":      {100, []*iopv1.BodyFrame{frame(1, 99, true)}, "invalid"},
		"too long":       {100, []*iopv1.BodyFrame{frame(1, 101, false)}, "invalid"},
		"given up":       {100, []*iopv1.BodyFrame{{Sequence: 1, ErrorClass: "cancelled"}}, "cancelled"},
		"over credit": {1 << 20, []*iopv1.BodyFrame{
			frame(1, 65536, false), frame(2, 65536, false), frame(3, 65536, false), frame(4, 65536, false), frame(5, 65536, false),
		}, "protocol"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t, options{exchange: func(ctx context.Context, ex agent.Exchange, _ agent.Sink) error {
					<-ctx.Done()
					_, err := io.ReadAll(ex.Body)
					return err
				}}).ready()
				defer r.finish()
				run, a := r.edge.open(func(q *iopv1.ProviderTunnelRequest) { q.BodyFollows, q.BodySize = true, c.size })
				for _, f := range c.frames {
					f.RunId = run
					r.edge.send(a.sess, subjects.Body, run, f)
				}
				synctest.Wait()
				r.edge.wantClass(a, c.class)
				stranger := wire.NewRunID()
				r.edge.send(a.sess, subjects.Body, stranger, &iopv1.BodyFrame{RunId: stranger, Sequence: 1})
				synctest.Wait()
				r.edge.with(func() {
					if k := r.edge.acks[len(r.edge.acks)-1]; k.GetRunId() != stranger || !k.GetReset_() || k.GetDirection() != dirBody {
						t.Errorf("a frame nobody knows is answered with %v", k)
					}
				})
			})
		})
	}
}

// A Read learns what is wrong with the body only once the exchange's context has its
// cause: an adapter that returns at once would be taken for the one that failed.
//
// Contract: J8 W8
func TestBodyBreaksOffAfterItsCause(t *testing.T) {
	for name, c := range map[string]struct {
		frame bodyFrame
		want  *wire.Error
	}{
		"too long":  {bodyFrame{data: make([]byte, 11)}, errBodyTooLarge},
		"too short": {bodyFrame{data: make([]byte, 9), last: true}, errBodyTooLarge},
		"given up":  {bodyFrame{failed: "cancelled"}, errBodyCut},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBodyReader(t.Context(), &watch{}, goroutines{}, bodyBound, 10, func(int) {})
				var got error
				go func() { _, got = b.Read(make([]byte, 20)) }()
				synctest.Wait()
				if kept, err := b.deliver(c.frame); kept || err != c.want {
					t.Errorf("deliver: %v, %v", kept, err)
				}
				synctest.Wait()
				if got != nil {
					t.Errorf("the Read ended before anybody was told why: %v", got)
				}
				b.close(c.want)
				synctest.Wait()
				if !errors.Is(got, c.want) {
					t.Errorf("the Read ended with %v", got)
				}
			})
		})
	}
}

// An Edge that does not acknowledge for a minute, and whose heartbeats come, still gets
// the terminal: nobody else would tell its caller.
//
// Contract: J3 J5
func TestTerminalIsRepeatedWhileTheSessionLives(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, options{exchange: small("hello")}).ready()
		defer r.finish()
		run := wire.NewRunID()
		a := r.edge.expect(run)
		r.edge.with(func() { a.mute = true })
		sent := 0
		defer r.bus.Tap(r.session().Up(subjects.Frame, run), func(bus.Msg) { sent++ })()
		r.edge.openAs(run, nil)
		<-a.ended
		pass(time.Minute)
		if sent < 25 { // every two seconds
			t.Errorf("it was sent %d times in a minute", sent)
		}
		r.edge.with(func() { r.edge.ack(a.sess, run, a) })
		synctest.Wait()
		if n := r.node.link.streams.count(); n != 0 {
			t.Errorf("%d streams are not forgotten", n)
		}
	})
}

// An Edge whose cancel was lost sends no more of the body. The exchange that waits for
// it ends, and its place is free; one whose provider takes its time does not, nor one
// whose Edge repeats what it sent.
//
// Contract: J2 P7 C1
func TestBodyThatStopsComing(t *testing.T) {
	for name, c := range map[string]struct {
		read   bool
		repeat bool
		again  bool   // the request comes again
		class  string // "": it goes on
	}{
		"nobody sends":          {true, false, false, "protocol"},
		"the provider rests":    {false, false, false, ""},
		"the sender repeats":    {true, true, false, ""},
		"it waits for its turn": {true, false, true, ""},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t, options{exchange: func(ctx context.Context, ex agent.Exchange, _ agent.Sink) error {
					if !c.read {
						<-ctx.Done()
						return context.Cause(ctx)
					}
					_, err := io.ReadAll(ex.Body)
					return err
				}}).ready()
				defer r.finish()
				run, a := r.edge.open(func(q *iopv1.ProviderTunnelRequest) { q.BodyFollows, q.BodySize = true, 2 })
				first := &iopv1.BodyFrame{RunId: run, Sequence: 1, Body: []byte("x")}
				r.edge.send(a.sess, subjects.Body, run, first)
				for range 4 {
					pass(bodyBound / 2)
					if c.again {
						r.edge.openAs(run, func(q *iopv1.ProviderTunnelRequest) { q.BodyFollows, q.BodySize = true, 2 })
					}
					if c.repeat {
						r.edge.send(a.sess, subjects.Body, run, first)
					}
				}
				synctest.Wait()
				if got := r.edge.class(a); got != c.class {
					t.Errorf("it ended as %q", got)
				}
				used := r.node.host.open()
				if (c.class == "") != (used == 1) {
					t.Errorf("%d exchanges are under way", used)
				}
				r.edge.cancel(run)
				synctest.Wait()
			})
		})
	}
}

// A stream Edge forgot, or whose acknowledgements make no sense, ends and takes
// its exchange with it; the session goes on.
//
// Contract: J3 J8
func TestAckBreaches(t *testing.T) {
	for name, entry := range map[string]*iopv1.StreamAck_Entry{
		"reset":      {Reset_: true},
		"beyond":     {Acked: 1000},
		"all credit": {Credit: math.MaxUint64},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t, options{exchange: hang}).ready()
				defer r.finish()
				run, a := r.edge.open(nil)
				<-a.started
				entry.RunId, entry.Direction = run, dirFrame
				r.edge.send(a.sess, subjects.Ack, "", &iopv1.StreamAck{Entries: []*iopv1.StreamAck_Entry{
					{RunId: run, Direction: "sideways", Reset_: true}, {RunId: "?", Direction: dirFrame, Reset_: true}, entry,
				}})
				synctest.Wait()
				if n := r.node.host.open(); n != 0 {
					t.Errorf("%d exchanges are open", n)
				}
				r.edge.wantClass(a, "")
				r.wantState("ready")
			})
		})
	}
}

// Nothing a peer sends stops the Node: garbage, foreign verbs, floods.
//
// Contract: V1 M5 J8
func TestGarbage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, options{exchange: hang}).ready()
		defer r.finish()
		run, a := r.edge.open(nil)
		<-a.started
		id, rnd := wire.NewRunID(), rand.New(rand.NewPCG(1, 2))
		r.edge.expect(id) // some of it decodes, and is refused
		for range 300 {
			junk := make([]byte, rnd.IntN(60))
			for i := range junk {
				junk[i] = byte(rnd.Uint32())
			}
			for _, s := range []string{
				a.sess.Down(subjects.Tunnel, id), a.sess.Down(subjects.Tunnel, run), a.sess.Down(subjects.Body, run),
				a.sess.Down(subjects.Cancel, id), a.sess.Down(subjects.Ack, ""), a.sess.Down(subjects.Run, run),
				a.sess.Down(subjects.Command, id), a.sess.Down(subjects.Refresh, ""), a.sess.Down(subjects.SessionVerb, ""),
				a.sess.Down(subjects.Register, ""), "iop.v1.edge1.node1.1.down.dance", "iop.v1.edge1.node1.1.down.tunnel",
			} {
				must(t, r.edge.conn.Publish(s, junk))
			}
		}
		synctest.Wait()
		r.wantState("ready")
		r.edge.cancel(run)
		synctest.Wait()
		r.edge.wantClass(a, string(wire.Cancelled))
	})
}

// FuzzReceive feeds the session's callback any bytes under any of its subjects.
//
// Contract: J8
func FuzzReceive(f *testing.F) {
	q, _ := (&iopv1.ProviderTunnelRequest{RunId: strings.Repeat("a", 26), Adapter: "a", BodyFollows: true, BodySize: 9}).MarshalVT()
	b, _ := (&iopv1.BodyFrame{RunId: strings.Repeat("a", 26), Sequence: 1, Body: []byte("nine byte"), Last: true}).MarshalVT()
	for verb := range uint8(12) {
		f.Add(verb, q, b)
	}
	verbs := []subjects.Verb{
		subjects.Tunnel, subjects.Body, subjects.Cancel, subjects.Ack, subjects.SessionVerb, subjects.Register,
		subjects.Ready, subjects.Heartbeat, subjects.Fence, subjects.Refresh, subjects.Run, subjects.Command,
	}
	f.Fuzz(func(t *testing.T, verb uint8, first, second []byte) {
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t, options{}).ready()
			defer r.finish()
			run := strings.Repeat("a", 26)
			r.edge.expect(run)
			v := verbs[int(verb)%len(verbs)]
			takesRun := run
			switch v {
			case subjects.Ack, subjects.SessionVerb, subjects.Register, subjects.Ready, subjects.Heartbeat, subjects.Fence, subjects.Refresh:
				takesRun = ""
			}
			must(t, r.edge.conn.Publish(r.session().Down(subjects.Tunnel, run), first))
			must(t, r.edge.conn.Publish(r.session().Down(v, takesRun), second))
			synctest.Wait()
		})
	})
}

// BenchmarkSmallTunnel is one small call through the Node, over membus.
func BenchmarkSmallTunnel(b *testing.B) {
	r, ended := benchRig(b, small(`{"id":"x","usage":{"prompt_tokens":3,"completion_tokens":4,"total_tokens":7}}`))
	defer r.finish()
	req := &iopv1.ProviderTunnelRequest{
		Adapter: "a", Target: "m", Operation: "chat_completions", Method: "POST", Credit: wire.MinWindow,
		Headers: []*iopv1.Header{{Name: "Content-Type", Value: []byte("application/json")}}, Body: make([]byte, 300),
	}
	s := r.session()
	b.ReportAllocs()
	for b.Loop() {
		req.RunId = wire.NewRunID()
		data, _ := req.MarshalVT()
		_ = r.edge.conn.Publish(s.Down(subjects.Tunnel, req.RunId), data)
		<-ended
	}
}

// BenchmarkStream is one frame of a stream, of a token's size and of a whole read.
func BenchmarkStream(b *testing.B) {
	for _, size := range []int{200, wire.MaxBody} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			n := b.N
			r, ended := benchRig(b, func(_ context.Context, _ agent.Exchange, sink agent.Sink) error {
				p := make([]byte, size)
				err := sink.Start(200, jsonHeader, -1)
				for range n {
					err = errors.Join(err, sink.Body(p))
				}
				return err
			})
			defer r.finish()
			run := wire.NewRunID()
			data, _ := (&iopv1.ProviderTunnelRequest{RunId: run, Adapter: "a", Credit: wire.MinWindow}).MarshalVT()
			b.SetBytes(int64(size))
			b.ReportAllocs()
			b.ResetTimer()
			_ = r.edge.conn.Publish(r.session().Down(subjects.Tunnel, run), data)
			<-ended
		})
	}
}

// benchRig is a ready Node whose Edge only acknowledges, in real time.
func benchRig(b *testing.B, exchange func(context.Context, agent.Exchange, agent.Sink) error) (*rig, <-chan struct{}) {
	r := newRig(b, options{exchange: exchange, level: slog.LevelWarn}).start()
	ended := make(chan struct{}, 1)
	up := make(chan struct{}, 1)
	recv := map[string]*tunnel.Receiver{}
	_, err := r.edge.conn.Subscribe("iop.v1.*.*.*.up.frame.*", func(m bus.Msg) {
		msg, _ := subjects.ParseUp(m.Subject)
		var f iopv1.ProviderTunnelFrame
		_ = f.UnmarshalVTUnsafe(m.Data)
		rc := recv[msg.Run]
		if rc == nil {
			rc = tunnel.NewReceiver(tunnel.ReceiverConfig{})
			recv[msg.Run] = rc
		}
		last := f.GetEnd() || f.GetKind() == iopv1.ProviderTunnelFrame_END
		effects := rc.Step(time.Now(), tunnel.RecvEvent{Kind: tunnel.FrameReceived, Seq: f.GetSequence(), Body: len(f.GetBody()), Terminal: last}, nil)
		effects = rc.Step(time.Now(), tunnel.RecvEvent{Kind: tunnel.Consumed, Body: len(f.GetBody())}, effects)
		for _, ef := range effects {
			if ef.Kind == tunnel.AckNow {
				k := rc.Ack()
				data, _ := (&iopv1.StreamAck{Entries: []*iopv1.StreamAck_Entry{{RunId: msg.Run, Acked: k.Acked, Credit: k.Credit, Direction: dirFrame}}}).MarshalVT()
				_ = r.edge.conn.Publish(msg.Session.Down(subjects.Ack, ""), data)
				break
			}
		}
		if last {
			delete(recv, msg.Run)
			ended <- struct{}{}
		}
	})
	must(b, err)
	r.edge.with(func() { r.edge.runs = nil })
	_, err = r.edge.conn.Subscribe("iop.v1.*.*.*.up.ready", func(bus.Msg) { up <- struct{}{} })
	must(b, err)
	<-up
	return r, ended
}
