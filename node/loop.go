package node

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/iop-fabric/iop/internal/bus"
	"github.com/iop-fabric/iop/node/session"
	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/wire/iopv1"
)

// Bounds of what the supervisor itself waits for.
const (
	dialBound  = 15 * time.Second // connecting and asking who we are
	applyBound = 10 * time.Second // starting the adapters of a configuration
	closeBound = 5 * time.Second  // the last exchanges and the adapters, at the end
	// leaveBound is how long what runs may go on at a broker that is about to stop: as
	// long as a nats-server takes by default to close all connections.
	leaveBound = 2 * time.Minute
)

// Run supervises sessions until ctx ends (nil), the attempts are exhausted
// (ErrExhausted) or something local is broken (ErrLocal). It is the one place
// that dials, one dial at a time (S2). When ctx ends it drains first (D7).
func (n *Node) Run(ctx context.Context) error {
	defer func() {
		n.metrics.ready.Set(0)
		n.children.Wait()
		n.host.close(closeBound)
	}()
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	look := time.NewTimer(n.keys.pause())
	defer look.Stop()
	stop := ctx.Done()
	ev := session.Event{Kind: session.Started}
	for {
		if exit, err := n.step(ctx, ev); exit {
			return err
		}
		if at := n.core.Deadline(); at.IsZero() {
			timer.Stop()
		} else {
			timer.Reset(max(time.Until(at), 0))
		}
		var lost <-chan struct{}
		var idle <-chan struct{}
		told := false // what is in the inbox is to be read first
		var retiring <-chan struct{}
		if n.link != nil {
			lost, idle = n.link.conn.Closed(), n.link.idle
			if c, ok := n.link.conn.(bus.Retirer); ok && n.core.State() == session.Ready {
				retiring = c.Retiring()
			}
		}
		select {
		case sig := <-n.inbox:
			ev = n.read(sig)
		case <-lost:
			told, ev = true, session.Event{Kind: session.ConnectionLost, Gen: n.link.id.Gen}
		case <-idle:
			ev = session.Event{Kind: session.Idle, Gen: n.link.id.Gen}
		case <-retiring:
			ev = session.Event{Kind: session.LeaveAsked, Reason: session.Retired, Gen: n.link.id.Gen, Bound: leaveBound}
		case <-timer.C:
			told, ev = true, session.Event{Kind: session.DeadlinePassed}
		case <-look.C:
			ev = n.renewal(time.Now(), true)
			look.Reset(n.keys.pause())
		case <-n.host.quiet:
			ev = n.quiet(time.Now())
		case <-n.asked:
			ev = n.taken(time.Now())
			look.Reset(n.keys.pause()) // there may be more to look after
		case <-stop:
			stop, ev = nil, session.Event{Kind: session.StopAsked}
		}
		if !told {
			continue
		}
		// What a session was told counts before its end, and before time passes: a
		// process that slept finds all of it at once. No more than is there now: a
		// flood must not hold up the clock.
		for range len(n.inbox) {
			if exit, err := n.step(ctx, n.read(<-n.inbox)); exit {
				return err
			}
		}
	}
}

// read turns a session's message into an event; one of an older session, or one
// that does not decode, into none (F5).
func (n *Node) read(sig signal) session.Event {
	if sig.link != n.link {
		return session.Event{}
	}
	if sig.verb == subjects.Renew {
		return n.renewed(sig.data)
	}
	ev, ok := sig.link.event(n, sig.verb, sig.data)
	if !ok {
		n.metrics.dropped[dropMalformed].Inc()
		return session.Event{}
	}
	return ev
}

// step runs the core on ev and on what its effects bring in turn.
func (n *Node) step(ctx context.Context, ev session.Event) (exit bool, err error) {
	for ev.Kind != 0 {
		was := n.core.State()
		ev.Rand = rand.Float64() //nolint:gosec // spreads dials; nothing secret hangs on it
		effects := n.core.Step(time.Now(), ev, nil)
		n.observe(was)
		ev = session.Event{}
		for _, ef := range effects {
			if ef.Kind == session.Exit {
				return true, ef.Err
			}
			if next := n.apply(ctx, ef); next.Kind != 0 {
				ev = next // at most one effect of a step brings an event
			}
		}
		if was != session.Ready && n.core.State() == session.Ready {
			ev = n.renewal(time.Now(), false) // no effect of that step brings one
		}
	}
	return false, nil
}

// apply does what the core orders. Only Dial and Apply wait, both bounded: they
// are what the supervisor is for, and nothing may go on beside them.
func (n *Node) apply(ctx context.Context, ef session.Effect) session.Event {
	l := n.link
	switch ef.Kind {
	case session.Dial:
		ev := n.dial(ctx)
		if ctx.Err() != nil { // the stop came first: what became of the dial is its consequence
			n.core.Step(time.Now(), session.Event{Kind: session.StopAsked}, nil)
		}
		return ev
	case session.AskToken:
		l.send(subjects.SessionVerb, &iopv1.SessionRequest{InstanceId: n.deps.InstanceID})
	case session.SendRegister:
		l.sendData(subjects.Register, l.request)
	case session.Apply:
		return n.applyConfig(l)
	case session.TakeWork:
		l.streams.admit(doorOpen)
	case session.SendReady:
		l.send(subjects.Ready, &iopv1.NodeReadyRequest{NodeId: l.id.Node})
	case session.SendHeartbeat:
		l.heartbeat(ef.Draining)
	case session.RefuseWork:
		l.streams.admit(doorDraining)
	case session.CutRest:
		l.streams.cutRest()
	case session.EndSession:
		event := evSession
		if ef.Reason == session.Fenced || ef.Reason == session.Superseded {
			event = evFenced
		}
		level := slog.LevelWarn
		if n.core.Stopping() || ef.Reason == session.Renewed || ef.Reason == session.Retired || ef.Reason == session.EdgeStopping {
			level = slog.LevelInfo // somebody's own doing
		}
		n.log.LogAttrs(context.Background(), level, event, slog.Uint64(keyGeneration, ef.Gen), slog.Any(keyReason, ef.Reason))
		n.failed(ef.Reason)
		n.link = nil
		n.end(l)
	case session.Exit:
	}
	return session.Event{}
}

// dial makes one connection and learns which session it is (G2).
func (n *Node) dial(ctx context.Context) session.Event {
	n.metrics.dials.Inc()
	ctx, cancel := context.WithTimeout(ctx, dialBound)
	defer cancel()
	failed := func(why session.Reason, err error) session.Event {
		n.log.Warn(evDialFailed, slog.Int(keyAttempt, n.core.Attempts()), slog.Any(keyReason, why), slog.Any(keyError, err))
		n.failed(why)
		return session.Event{Kind: session.DialFailed, Reason: why}
	}
	n.reload()
	conn, err := n.deps.Dial(ctx)
	switch {
	case errors.Is(err, ErrLocal):
		return session.Event{Kind: session.LocalFault, Err: err}
	case err != nil:
		return failed(session.Unreachable, err)
	}
	user, err := n.deps.WhoAmI(ctx, conn)
	if err != nil {
		conn.Close()
		return failed(session.Unreachable, err)
	}
	id, denied, err := session.Identify(user, n.cfg.Edge, n.cfg.Name)
	switch {
	case denied != "":
		conn.Close()
		return failed(session.DeniedReason(denied), errors.New("the broker refused this node: "+session.Told(denied)))
	case err != nil:
		conn.Close()
		return failed(session.WrongName, err)
	}
	l, err := n.newLink(ctx, id, conn)
	if err != nil {
		conn.Close()
		return failed(session.Unreachable, err)
	}
	n.link = l
	return session.Event{Kind: session.Connected, Gen: id.Gen}
}

// applyConfig verifies and applies what the accepted answer brought (R3).
func (n *Node) applyConfig(l *link) session.Event {
	ctx, cancel := context.WithTimeout(l.ctx, applyBound)
	defer cancel()
	payload, err := openConfig(n.keys.used, n.cfg.Edge, l.nonce, 0, l.answer.GetConfig())
	if err == nil {
		err = n.host.apply(ctx, payload)
	}
	if err != nil {
		n.log.Error(evBadConfig, slog.Uint64(keyGeneration, l.id.Gen), slog.Any(keyError, err))
	} else {
		n.log.Info(evConfig, slog.Uint64(keyGeneration, l.id.Gen),
			slog.Uint64(keyRevision, l.answer.GetConfig().GetRevision()), slog.Int(keyCount, len(payload.GetAdapters())))
	}
	l.answer = nil // it is large, and done with
	return session.Event{Kind: session.Applied, Gen: l.id.Gen, OK: err == nil}
}

// failed counts a failed attempt or an ended session.
func (n *Node) failed(why session.Reason) {
	n.metrics.ends[why].Inc()
	n.mu.Lock()
	n.status.LastReason = string(why)
	n.mu.Unlock()
}

// observe publishes the state after a step, and logs it where it is another.
func (n *Node) observe(was session.State) {
	is := n.core.State()
	n.mu.Lock()
	n.status.State, n.status.Generation = is.String(), n.core.Generation()
	n.status.Since, n.status.Attempts = n.core.Since(), n.core.Attempts()
	n.mu.Unlock()
	if is == was {
		return
	}
	ready := 0.0
	if is == session.Ready {
		ready = 1
	}
	n.metrics.ready.Set(ready)
	n.log.Info(evState, slog.String(keyState, is.String()), slog.Uint64(keyGeneration, n.core.Generation()))
}
