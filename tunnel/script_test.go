package tunnel

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/iop-fabric/iop/internal/script"
)

// A script is lines of events, each followed by the effects it had, indented.
// "#" begins a comment. The first event makes the core:
//
//	sender credit=N            receiver window=N max=N
//	offer N [control|terminal]     frame SEQ body=N [digest=N] [terminal]
//	ack N credit=N [resend|reset]  consume N
//	deadline                       take            (what Ack returns)
//	reconnected                    stop
//	stop
//
// "+DURATION" before an event moves the clock on. Run with -update to rewrite.
func TestScripts(t *testing.T) {
	script.Run(t, func() script.Event { return (&player{now: t0}).event })
}

type player struct {
	now  time.Time
	send *Sender
	recv *Receiver
}

func (p *player) event(t *testing.T, words []string) []string {
	t.Helper()
	if d, ok := strings.CutPrefix(words[0], "+"); ok {
		step, err := time.ParseDuration(d)
		if err != nil {
			t.Fatalf("%v: %v", words, err)
		}
		p.now, words = p.now.Add(step), words[1:]
		if len(words) == 0 {
			return nil
		}
	}
	flags, values := map[string]bool{}, map[string]uint64{}
	var first uint64
	for i, w := range words[1:] {
		name, value, pair := strings.Cut(w, "=")
		switch n, err := strconv.ParseUint(value, 10, 64); {
		case pair && err == nil:
			values[name] = n
		case pair:
			t.Fatalf("%v: %v", words, err)
		default:
			if n, err := strconv.ParseUint(w, 10, 64); err == nil && i == 0 {
				first = n
			} else {
				flags[w] = true
			}
		}
	}
	switch words[0] {
	case "sender":
		*p = player{now: p.now, send: NewSender(SenderConfig{Credit: values["credit"]})}
		return nil
	case "receiver":
		*p = player{now: p.now, recv: NewReceiver(ReceiverConfig{Window: values["window"], MaxWindow: values["max"]})}
		return []string{fmt.Sprintf("window %d", p.recv.Window())}
	case "take":
		a := p.recv.Ack()
		return []string{fmt.Sprintf("ack %d credit %d%s", a.Acked, a.Credit, word(a.Resend, " resend"))}
	}
	if p.send != nil {
		return p.sender(t, words[0], first, flags, values)
	}
	return p.receiver(t, words[0], first, flags, values)
}

func (p *player) sender(t *testing.T, verb string, first uint64, flags map[string]bool, values map[string]uint64) (out []string) {
	t.Helper()
	var ev SendEvent
	switch verb {
	case "offer":
		ev = SendEvent{Kind: Offer, Frame: Frame{Seq: p.send.NextSeq(), Body: int(first), Control: flags["control"], Terminal: flags["terminal"]}} //nolint:gosec // small
	case "ack":
		ev = SendEvent{Kind: AckReceived, Acked: first, Credit: values["credit"], Resend: flags["resend"], Reset: flags["reset"]}
	case "deadline":
		p.now = p.send.Deadline()
		if p.now.IsZero() {
			t.Fatal("no deadline")
		}
		ev = SendEvent{Kind: SendDeadline}
		out = append(out, "at "+p.now.Sub(t0).String())
	case "reconnected":
		ev = SendEvent{Kind: SendReconnected}
	case "stop":
		ev = SendEvent{Kind: SendStopped}
	default:
		t.Fatalf("%q is no event", verb)
	}
	for _, ef := range p.send.Step(p.now, ev, nil) {
		switch ef.Kind {
		case SendFrame:
			out = append(out, fmt.Sprintf("send %d%s", ef.Frame.Seq, word(ef.Again, " again")))
		case ReleaseFrame:
			out = append(out, fmt.Sprintf("release %d", ef.Frame.Seq))
		case SenderDone:
			out = append(out, "done")
		case SenderFailed:
			out = append(out, fmt.Sprintf("failed %s: %s", ef.Err.Class, ef.Err))
		}
	}
	if d := p.send.Deadline(); !d.IsZero() {
		out = append(out, "due in "+d.Sub(p.now).String())
	}
	return out
}

func (p *player) receiver(t *testing.T, verb string, first uint64, flags map[string]bool, values map[string]uint64) (out []string) {
	t.Helper()
	var ev RecvEvent
	switch verb {
	case "frame":
		digest, given := values["digest"]
		if !given {
			digest = first
		}
		ev = RecvEvent{Kind: FrameReceived, Seq: first, Body: int(values["body"]), Digest: digest, Terminal: flags["terminal"]} //nolint:gosec // small
	case "consume":
		ev = RecvEvent{Kind: Consumed, Body: int(first)} //nolint:gosec // small
	case "stop":
		ev = RecvEvent{Kind: RecvStopped}
	default:
		t.Fatalf("%q is no event", verb)
	}
	for _, ef := range p.recv.Step(p.now, ev, nil) {
		switch ef.Kind {
		case Deliver:
			out = append(out, "deliver")
		case AckSoon:
			out = append(out, "ack soon")
		case AckNow:
			out = append(out, "ack now")
		case ReceiverFailed:
			out = append(out, fmt.Sprintf("failed %s: %s", ef.Err.Class, ef.Err))
		}
	}
	return out
}

func word(on bool, w string) string {
	if on {
		return w
	}
	return ""
}
