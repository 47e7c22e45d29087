package session

import (
	"errors"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func at(n int) *int { return &n }

// TestTrap20Policy is what an operator may write, and what it means.
//
// Contract: S3
func TestTrap20Policy(t *testing.T) {
	for name, c := range map[string]struct {
		attempts, interval *int
		want               Policy
		wrong              string
	}{
		"omitted":              {nil, nil, Policy{10, 10 * time.Second}, ""},
		"for ever":             {at(0), nil, Policy{0, 10 * time.Second}, ""},
		"three":                {at(3), at(1), Policy{3, time.Second}, ""},
		"negative attempts":    {at(-1), nil, Policy{}, "max_attempts"},
		"negative interval":    {nil, at(-1), Policy{}, "interval_sec"},
		"no interval, limited": {at(3), at(0), Policy{3, 0}, ""},
		"no interval, default": {nil, at(0), Policy{10, 0}, ""},
		"no interval, no end":  {at(0), at(0), Policy{}, "interval_sec"},
		"huge":                 {nil, at(1 << 40), Policy{}, "interval_sec"},
	} {
		got, err := PolicyOf(c.attempts, c.interval)
		switch {
		case c.wrong == "" && (err != nil || got != c.want):
			t.Errorf("%s: %v, %v", name, got, err)
		case c.wrong != "" && (err == nil || !strings.Contains(err.Error(), c.wrong)):
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Contract: G2 B3
func TestIdentify(t *testing.T) {
	for user, want := range map[string]struct {
		gen    uint64
		denied string
		wrong  bool
	}{
		"edge1.node1.17":              {gen: 17},
		"edge1.node2.17":              {wrong: true},
		"edge2.node1.17":              {wrong: true},
		"edge1.node1.0":               {wrong: true},
		"edge1.node1":                 {wrong: true},
		"":                            {wrong: true},
		"!denied.revoked":             {denied: "revoked"},
		"!denied.duplicate.170000000": {denied: "duplicate.170000000"},
		"!denied.":                    {denied: "unspecified"},
		"!denied":                     {wrong: true},
	} {
		s, denied, err := Identify(user, "edge1", "node1")
		if s.Gen != want.gen || denied != want.denied || (err != nil) != want.wrong {
			t.Errorf("%q: %v %q %v", user, s, denied, err)
		}
	}
	if DeniedReason("duplicate.17") != Duplicate || DeniedReason("revoked") != Denied || DeniedReason("superseded") != Superseded {
		t.Error("the lobby's words are read otherwise")
	}
	for words, want := range map[string]string{
		"revoked":                "revoked",
		"duplicate":              "duplicate",
		"duplicate.soon":         "duplicate.soon",
		"misbehaved.946684800":   "misbehaved: this node broke rules of the protocol and is let in again at 2000-01-01T00:00:00Z",
		"duplicate.946684800":    "duplicate: another instance of this node is connected since 2000-01-01T00:00:00Z",
		"unknown_node.946684800": "unknown_node.946684800",
		"duplicate.-1":           "duplicate: another instance of this node is connected since 1969-12-31T23:59:59Z",
		"duplicate.1.2":          "duplicate.1.2",
	} {
		if got := Told(words); got != want {
			t.Errorf("%q is told as %q", words, got)
		}
	}
}

// model checks the invariants of doc.go from the effects alone.
type model struct {
	policy   Policy
	live     uint64 // the session
	dials    int    // in a row
	working  bool
	draining bool
	resume   bool // the last leave's
	exited   bool
	stopping bool
	lost     bool   // the session that ended last had been ready
	why      Reason // of the last end or failure
}

// TestInvariants drives the core with any events in any order.
//
// Contract: S2 S3 S4 R3 R6
func TestInvariants(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := &model{policy: Policy{
			MaxAttempts: rapid.IntRange(0, 4).Draw(t, "max"),
			Interval:    time.Duration(rapid.IntRange(1, 20).Draw(t, "interval")) * time.Second,
		}}
		c := New(Config{Policy: m.policy})
		now, gen := epoch, uint64(0)
		step := func(ev Event) {
			was := c.State()
			before := *c
			if ev.Kind == DialFailed && was == Dialling {
				m.why = ev.Reason
			}
			if ev.Kind == Connected && was == Dialling {
				m.live = ev.Gen
			}
			effects := c.Step(now, ev, nil)
			if foreign := ev.Gen != 0 && ev.Gen != before.gen; foreign && ev.Kind != Connected && (len(effects) > 0 || *c != before) {
				t.Fatalf("I4: %v of session %d changed session %d", ev.Kind, ev.Gen, before.gen)
			}
			for _, ef := range effects {
				m.effect(t, ev, was, ef)
			}
			if ev.Kind == ReadyAnswered && ev.OK && was == AwaitingReady && c.State() == Ready {
				m.dials, m.lost = 0, true
			}
			if c.State() == Waiting && was != Waiting {
				m.wait(t, c.Deadline().Sub(now))
			}
			if m.live == before.gen && m.live != 0 && mustEnd(&before, now, ev) {
				t.Fatalf("F9 F10 R5: session %d goes on after %+v in %v", m.live, ev, was)
			}
			if s := c.State(); s != 0 && s != Closed && s != Dialling && c.Deadline().IsZero() {
				t.Fatalf("I7: nothing is due in %v", s)
			}
		}
		step(Event{Kind: Started})
		reasons := []Reason{Superseded, Duplicate, "", "other"}
		for range rapid.IntRange(1, 120).Draw(t, "events") {
			kind := Kind(rapid.IntRange(int(Started), int(LeaveAsked)).Draw(t, "kind")) //nolint:gosec // in range
			if due, ok := answers[c.State()]; ok && rapid.Bool().Draw(t, "answered") {
				kind = due // or too few sessions would be ready
			}
			ev := Event{
				Kind: kind,
				OK:   rapid.IntRange(0, 5).Draw(t, "ok") > 0, Instance: rapid.SampledFrom([]string{"e1", "e1", "e1", "e2", ""}).Draw(t, "edge"),
				Reason: rapid.SampledFrom(reasons).Draw(t, "reason"), Rand: rapid.Float64Range(0, 0.999).Draw(t, "rand"),
				Interval: time.Duration(rapid.IntRange(0, 3).Draw(t, "beat")) * time.Second,
			}
			switch ev.Kind {
			case Connected:
				gen++
				ev.Gen = gen
			case DialFailed:
				if ev.Reason == "" || ev.Reason == "other" {
					ev.Reason = Unreachable
				}
			case Started:
				ev.Kind = DeadlinePassed
				now = now.Add(time.Duration(rapid.IntRange(0, 30000).Draw(t, "ms")) * time.Millisecond)
			case LocalFault:
				ev.Err = ErrLocal
				if rapid.IntRange(0, 9).Draw(t, "fault") > 0 {
					continue
				}
			case StopAsked:
				m.stopping = m.stopping || rapid.IntRange(0, 5).Draw(t, "stop") == 0
				if !m.stopping {
					continue
				}
			case DeadlinePassed:
				if d := c.Deadline(); d.After(now) {
					now = d
				}
			case Granted, RegisterAnswered, Applied, ReadyAnswered, HeartbeatReceived, EdgeSpoke, FenceReceived, ConnectionLost, Idle, LeaveAsked:
				ev.Gen = c.Generation()
				if rapid.IntRange(0, 9).Draw(t, "stale") == 0 {
					ev.Gen = gen + 1
				}
				if ev.Kind == LeaveAsked {
					ev.Resume = rapid.Bool().Draw(t, "resume")
					if c.State() == Ready && ev.Gen == c.Generation() {
						m.resume = ev.Resume
					}
				}
			}
			step(ev)
		}
	})
}

// answers is what each state waits for.
var answers = map[State]Kind{
	Waiting: DeadlinePassed, Dialling: Connected, Admitted: Granted, Registering: RegisterAnswered,
	Applying: Applied, AwaitingReady: ReadyAnswered,
}

// mustEnd reports whether an event leaves the session that c has no way to go on.
func mustEnd(c *Core, now time.Time, ev Event) bool {
	if ev.Kind == DeadlinePassed {
		return (c.state == Ready || c.state == Draining) && !now.Before(c.heard.Add(c.bound))
	}
	if ev.Gen != c.gen {
		return false
	}
	switch ev.Kind {
	case FenceReceived, ConnectionLost:
		return true
	case HeartbeatReceived:
		return c.instance != "" && ev.Instance != c.instance
	case ReadyAnswered:
		return !ev.OK && c.state >= AwaitingReady
	case Granted, RegisterAnswered, Applied:
		return !ev.OK && answers[c.state] == ev.Kind
	default:
		return false
	}
}

func (m *model) effect(t *rapid.T, ev Event, was State, ef Effect) {
	if m.exited {
		t.Fatalf("I8: %v after exit", ef.Kind)
	}
	switch ef.Kind {
	case Dial:
		if m.live != 0 || was == Dialling {
			t.Fatalf("I1: a dial in %v with session %d", was, m.live)
		}
		if m.dials++; m.policy.MaxAttempts > 0 && m.dials > m.policy.MaxAttempts {
			t.Fatalf("I2: dial %d of %d", m.dials, m.policy.MaxAttempts)
		}
		m.working, m.lost, m.draining = false, false, false
	case AskToken:
		if m.live != ef.Gen {
			t.Fatalf("I4: session %d asks for a token, %d is live", ef.Gen, m.live)
		}
	case TakeWork:
		if back := was == Draining && m.resume && ev.Kind == DeadlinePassed; !back && (ev.Kind != Applied || !ev.OK || m.draining) {
			t.Fatal("I5: work before the configuration was applied, or while draining")
		}
		m.working, m.draining = true, false
	case CutRest:
		if m.resume && !m.stopping {
			t.Fatal("I9: a leave that resumes has cut what runs")
		}
	case SendReady:
		if !m.working {
			t.Fatal("I5: ready before work is taken")
		}
	case RefuseWork:
		if ev.Kind == LeaveAsked {
			t.Fatal("I9: a leave refuses what Edge has sent already")
		}
		m.draining = true
	case EndSession:
		if m.live == 0 || ef.Gen != m.live {
			t.Fatalf("I8: session %d ended, %d is live", ef.Gen, m.live)
		}
		m.live, m.why = 0, ef.Reason
	case Exit:
		m.exited = true
		switch {
		case ef.Err == nil && !m.stopping, errors.Is(ef.Err, ErrLocal) && ev.Kind != LocalFault:
			t.Fatalf("I6: exit for %v: %v", ev.Kind, ef.Err)
		case errors.Is(ef.Err, ErrExhausted) && m.dials != m.policy.MaxAttempts:
			t.Fatalf("I2: exhausted after %d of %d", m.dials, m.policy.MaxAttempts)
		}
		if m.live != 0 {
			t.Fatal("I8: exit with a live session")
		}
	}
}

// wait checks I3.
func (m *model) wait(t *rapid.T, d time.Duration) {
	i := m.policy.Interval
	switch {
	case m.why == Superseded || m.why == Duplicate:
		if d != i {
			t.Fatalf("I3: %v after %s", d, m.why)
		}
	case m.lost:
		if d > LostJitter {
			t.Fatalf("I3: %v after a lost session", d)
		}
	case d < i/2 || d > i:
		t.Fatalf("I3: %v after %s with interval %v", d, m.why, i)
	}
}
