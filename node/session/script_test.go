package session

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/iop-fabric/iop/internal/script"
)

var kinds = map[string]Kind{
	"start": Started, "connected": Connected, "dial-failed": DialFailed, "local-fault": LocalFault,
	"granted": Granted, "registered": RegisterAnswered, "applied": Applied, "ready": ReadyAnswered,
	"heartbeat": HeartbeatReceived, "spoke": EdgeSpoke, "fence": FenceReceived, "lost": ConnectionLost, "idle": Idle,
	"due": DeadlinePassed, "stop": StopAsked, "leave": LeaveAsked,
}

// epoch is where every script begins.
var epoch = time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)

// TestScripts replays testdata: a line of intent, events, and under each the
// effects and the state it leads to. "policy" begins anew, "+5s" lets time pass,
// "due" waits for the core's deadline first.
func TestScripts(t *testing.T) {
	script.Run(t, func() script.Event { return (&scriptRun{}).event })
}

type scriptRun struct {
	c   *Core
	now time.Time
}

func (s *scriptRun) event(t *testing.T, words []string) []string {
	out, err := s.replay(words)
	if err != nil {
		t.Fatalf("%v: %v", words, err)
	}
	return out
}

func (s *scriptRun) replay(words []string) (out []string, err error) {
	if words[0] == "policy" {
		p, err := parsePolicy(words[1:])
		s.c, s.now = New(Config{Policy: p}), epoch
		return nil, err
	}
	if d, ok := strings.CutPrefix(words[0], "+"); ok {
		pass, err := time.ParseDuration(d)
		if err != nil {
			return nil, err
		}
		s.now, words = s.now.Add(pass), words[1:]
	}
	ev, err := parseEvent(words, s.c)
	if err != nil {
		return nil, err
	}
	if ev.Kind == DeadlinePassed && s.c.Deadline().After(s.now) {
		s.now = s.c.Deadline()
	}
	for _, ef := range s.c.Step(s.now, ev, nil) {
		out = append(out, show(ef))
	}
	at := "never"
	if d := s.c.Deadline(); !d.IsZero() {
		at = "+" + d.Sub(s.now).String()
	}
	return append(out, fmt.Sprintf("[%s gen=%d attempts=%d due=%s]", s.c.State(), s.c.Generation(), s.c.Attempts(), at)), nil
}

func show(ef Effect) string {
	s := ef.Kind.String()
	if ef.Reason != "" {
		s += " reason=" + string(ef.Reason)
	}
	if ef.Draining {
		s += " draining"
	}
	if ef.Kind == Exit {
		s += fmt.Sprintf(" err=%v", ef.Err)
	}
	return s
}

func parsePolicy(words []string) (p Policy, err error) {
	for _, w := range words {
		k, v, _ := strings.Cut(w, "=")
		switch k {
		case "max":
			p.MaxAttempts, err = strconv.Atoi(v)
		case "interval":
			p.Interval, err = time.ParseDuration(v)
		default:
			err = fmt.Errorf("policy: %s?", w)
		}
		if err != nil {
			return p, err
		}
	}
	return p, nil
}

func parseEvent(words []string, c *Core) (Event, error) {
	ev := Event{Kind: kinds[words[0]], Gen: c.Generation(), OK: true, Rand: 0.5}
	if ev.Kind == 0 {
		return ev, errors.New("no such event")
	}
	for _, w := range words[1:] {
		k, v, _ := strings.Cut(w, "=")
		var err error
		switch k {
		case "gen":
			ev.Gen, err = strconv.ParseUint(v, 10, 64)
		case "no":
			ev.OK = false
		case "reason":
			ev.Reason = Reason(v)
		case "edge":
			ev.Instance = v
		case "interval":
			ev.Interval, err = time.ParseDuration(v)
		case "resume":
			ev.Resume = true
		case "bound":
			ev.Bound, err = time.ParseDuration(v)
		case "rand":
			ev.Rand, err = strconv.ParseFloat(v, 64)
		case "err":
			ev.Err = fmt.Errorf("%w: %s", ErrLocal, v)
		default:
			err = fmt.Errorf("%s?", w)
		}
		if err != nil {
			return ev, err
		}
	}
	return ev, nil
}
