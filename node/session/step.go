package session

import (
	"time"

	"github.com/iop-fabric/iop/wire"
)

// Step takes one event and appends what must follow.
func (c *Core) Step(now time.Time, ev Event, out []Effect) []Effect {
	if c.state == Closed {
		return out
	}
	switch ev.Kind {
	case Started:
		if c.state == 0 {
			return c.dial(now, out)
		}
	case StopAsked:
		return c.stop(now, out)
	case LocalFault:
		if c.state.live() {
			out = append(out, Effect{Kind: EndSession, Gen: c.gen, Reason: Stopped})
		}
		return c.exit(now, ev.Err, out)
	case DeadlinePassed:
		return c.deadline(now, ev, out)
	case Connected:
		if c.state == Dialling {
			return c.connected(now, ev, out)
		}
	case DialFailed:
		if c.state == Dialling {
			return c.next(now, ev.Reason, ev.Rand, out)
		}
	default:
		if c.state.live() && ev.Gen == c.gen { // I4
			return c.inSession(now, ev, out)
		}
	}
	return out
}

// inSession takes the events that the live session's connection brings.
func (c *Core) inSession(now time.Time, ev Event, out []Effect) []Effect {
	switch ev.Kind {
	case Granted:
		if c.state != Admitted {
			return out
		}
		if !ev.OK {
			return c.end(now, ReasonOf(string(ev.Reason), NoToken), ev.Rand, out)
		}
		c.become(now, Registering, c.cfg.Resend)
		return append(out, Effect{Kind: SendRegister, Gen: c.gen})

	case RegisterAnswered:
		if c.state != Registering {
			return out // a repeat of an answer already taken (R1)
		}
		if !ev.OK {
			return c.end(now, ReasonOf(string(ev.Reason), Refused), ev.Rand, out)
		}
		c.instance = ev.Instance
		c.interval = between(ev.Interval, 50*time.Millisecond, wire.HeartbeatInterval, 30*time.Second)
		c.bound = between(ev.Bound, 2*c.interval, max(wire.HeartbeatBound, 2*c.interval), 10*time.Minute)
		c.become(now, Applying, 0)
		return append(out, Effect{Kind: Apply, Gen: c.gen})

	case Applied:
		if c.state != Applying {
			return out
		}
		if !ev.OK {
			return c.end(now, BadConfig, ev.Rand, out)
		}
		c.become(now, AwaitingReady, c.cfg.Resend)
		c.beatAt = now.Add(c.interval)
		return append(out, Effect{Kind: TakeWork, Gen: c.gen}, Effect{Kind: SendReady, Gen: c.gen})

	case ReadyAnswered:
		switch {
		case !ev.OK && c.state >= AwaitingReady: // R5: also if it once was ready
			return c.end(now, ReasonOf(string(ev.Reason), NotReady), ev.Rand, out)
		case ev.OK && c.state == AwaitingReady:
			c.attempts, c.ready = 0, true
			c.become(now, Ready, 0)
			c.heard = now
		}

	case HeartbeatReceived:
		if c.instance == "" {
			return out // nobody registered us yet
		}
		if ev.Instance != c.instance {
			return c.end(now, EdgeChanged, ev.Rand, out)
		}
		c.heard = now

	case EdgeSpoke:
		c.heard = now

	case FenceReceived:
		return c.end(now, ReasonOf(string(ev.Reason), Fenced), ev.Rand, out)
	case ConnectionLost:
		return c.end(now, Lost, ev.Rand, out)
	case Idle:
		if c.state == Draining {
			return c.end(now, c.drained(), ev.Rand, out)
		}
	case LeaveAsked:
		if c.state == Ready {
			return c.leaving(now, ev, out)
		}
	default: // Step takes the rest, in a session or not
	}
	return out
}

func (c *Core) deadline(now time.Time, ev Event, out []Effect) []Effect {
	switch c.state {
	case Waiting:
		if !now.Before(c.due) {
			return c.dial(now, out)
		}
		return out
	case Admitted, Registering, Applying, AwaitingReady:
		if !now.Before(c.due) {
			return c.end(now, StepBound, ev.Rand, out)
		}
		if !c.resend.IsZero() && !now.Before(c.resend) {
			c.resend = now.Add(c.cfg.Resend)
			again := map[State]EffectKind{Admitted: AskToken, Registering: SendRegister, AwaitingReady: SendReady}
			out = append(out, Effect{Kind: again[c.state], Gen: c.gen})
		}
	case Ready, Draining:
		if !now.Before(c.heard.Add(c.bound)) {
			return c.end(now, Silent, ev.Rand, out)
		}
		if c.state == Draining && !now.Before(c.due) {
			if c.resume {
				return c.stay(now, out)
			}
			if c.cut {
				return c.end(now, c.drained(), ev.Rand, out)
			}
			c.cut, c.due = true, now.Add(c.cfg.CutBound)
			out = append(out, Effect{Kind: CutRest, Gen: c.gen})
		}
		if !c.refuse.IsZero() && !now.Before(c.refuse) {
			return c.refuseWork(now, out)
		}
	case Dialling, Closed: // nothing is due
	}
	if !c.beatAt.IsZero() && !now.Before(c.beatAt) {
		c.beatAt = now.Add(c.interval)
		out = append(out, Effect{Kind: SendHeartbeat, Gen: c.gen, Draining: c.state == Draining})
	}
	return out
}

// Deadline is when DeadlinePassed is due; zero: never.
func (c *Core) Deadline() time.Time {
	at := c.due
	if c.state == Ready || c.state == Draining {
		at = earlier(earlier(at, c.heard.Add(c.bound)), c.refuse)
	}
	return earlier(earlier(at, c.resend), c.beatAt)
}

func (c *Core) connected(now time.Time, ev Event, out []Effect) []Effect {
	c.gen = ev.Gen
	c.become(now, Admitted, c.cfg.Resend)
	if c.stopping {
		return c.end(now, Stopped, ev.Rand, out)
	}
	return append(out, Effect{Kind: AskToken, Gen: c.gen})
}

func (c *Core) dial(now time.Time, out []Effect) []Effect {
	c.attempts++
	c.become(now, Dialling, 0)
	return append(out, Effect{Kind: Dial})
}

func (c *Core) stop(now time.Time, out []Effect) []Effect {
	if c.stopping {
		return out
	}
	c.stopping = true
	switch c.state {
	case AwaitingReady, Ready:
		if c.state == AwaitingReady {
			c.heard = now // ready was never acknowledged; Edge still gets its bound
		}
		c.become(now, Draining, 0)
		return c.refuseWork(now, out)
	case Draining: // to dial anew
		c.leave, c.resume, c.cut, c.due = "", false, false, now.Add(c.cfg.StopGrace)
		return c.refuseWork(now, out)
	case Dialling:
		return out // the dial ends first, as a failure or as a session to close (I1)
	case Admitted, Registering, Applying:
		return c.end(now, Stopped, 0, out)
	default:
		return c.exit(now, nil, out)
	}
}

// leaving drains for another session. What Edge has sent before it heard of that is
// still taken: nothing may be lost to what nobody has asked for.
func (c *Core) leaving(now time.Time, ev Event, out []Effect) []Effect {
	c.become(now, Draining, 0)
	c.leave, c.due, c.resume = ev.Reason, now.Add(ev.Bound), ev.Resume
	c.beatAt, c.refuse = now.Add(c.interval), now.Add(c.interval)
	if ev.Resume {
		c.due = c.due.Add(c.interval) // its time begins when it takes nothing new
	}
	return append(out, Effect{Kind: SendHeartbeat, Gen: c.gen, Draining: true})
}

// stay gives up a drain that did not end in its time: nothing is cut, and work is taken
// again.
func (c *Core) stay(now time.Time, out []Effect) []Effect {
	c.become(now, Ready, 0)
	c.beatAt = now.Add(c.interval)
	return append(out, Effect{Kind: TakeWork, Gen: c.gen}, Effect{Kind: SendHeartbeat, Gen: c.gen})
}

// refuseWork takes nothing new from now on.
func (c *Core) refuseWork(now time.Time, out []Effect) []Effect {
	c.refuse, c.beatAt = time.Time{}, now.Add(c.interval)
	return append(out,
		Effect{Kind: RefuseWork, Gen: c.gen},
		Effect{Kind: SendHeartbeat, Gen: c.gen, Draining: true})
}

// drained is why a session that was drained has ended.
func (c *Core) drained() Reason {
	if c.leave != "" {
		return c.leave
	}
	return Stopped
}

// end ends the live session and decides what follows.
func (c *Core) end(now time.Time, why Reason, rand float64, out []Effect) []Effect {
	out = append(out, Effect{Kind: EndSession, Gen: c.gen, Reason: why})
	return c.next(now, why, rand, out)
}

// next waits for the next dial, or exits where there is none.
func (c *Core) next(now time.Time, why Reason, rand float64, out []Effect) []Effect {
	if c.stopping {
		return c.exit(now, nil, out)
	}
	if limit := c.cfg.Policy.MaxAttempts; limit > 0 && c.attempts >= limit {
		return c.exit(now, ErrExhausted, out)
	}
	interval := c.cfg.Policy.Interval
	var wait time.Duration
	switch {
	case why == Superseded || why == Duplicate:
		wait = interval
	case c.ready:
		wait = time.Duration(rand * float64(LostJitter))
	default:
		wait = interval/2 + time.Duration(rand*float64(interval-interval/2))
	}
	c.become(now, Waiting, 0)
	c.due = now.Add(wait)
	return out
}

func (c *Core) exit(now time.Time, err error, out []Effect) []Effect {
	c.become(now, Closed, 0)
	return append(out, Effect{Kind: Exit, Err: err})
}

// become enters a state and resets what the state owns. resend repeats the
// state's request until it is answered.
func (c *Core) become(now time.Time, s State, resend time.Duration) {
	c.state, c.since = s, now
	c.due, c.resend = time.Time{}, time.Time{}
	if resend > 0 {
		c.resend = now.Add(resend)
	}
	switch s {
	case Admitted, Registering, Applying, AwaitingReady:
		c.due = now.Add(c.cfg.StepBound)
	case Draining:
		c.due, c.cut = now.Add(c.cfg.StopGrace), false
	case Waiting, Dialling, Closed:
		c.gen, c.ready, c.instance, c.beatAt, c.leave, c.resume, c.refuse = 0, false, "", time.Time{}, "", false, time.Time{}
	case Ready:
		c.leave, c.resume, c.refuse = "", false, time.Time{}
	}
}

// between returns d within its limits, or def where the peer named none.
func between(d, low, def, high time.Duration) time.Duration {
	if d <= 0 {
		d = def
	}
	return min(max(d, low), high)
}

// earlier returns the earlier of two deadlines, of which zero is none.
func earlier(a, b time.Time) time.Time {
	if a.IsZero() || (!b.IsZero() && b.Before(a)) {
		return b
	}
	return a
}
