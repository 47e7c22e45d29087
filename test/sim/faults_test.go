package sim

import (
	"math/rand/v2"
	"strconv"
	"time"

	"github.com/iop-fabric/iop/internal/history"
	"github.com/iop-fabric/iop/node/session"
)

// swarm is what one seed may meet: of each kind so many a second, most of them none,
// so that seeds differ in kind and not only in measure.
type swarm struct {
	span   time.Duration // of the faults
	kinds  [faultKinds]int
	config float64 // configurations that do not apply
	deaf   float64 // connections whose end the session service is not told of
	// outages of the Edge's connection, each so short and so far from the next that
	// every session outlives them (J5); nothing else goes wrong then.
	outages int
}

type faultKind uint8

const (
	faultBurst faultKind = iota // all messages of one path are lost for a moment
	faultLoss                   // single ones, everywhere
	faultDup                    // come twice, the second late
	faultDelay
	faultPartition // of a Node, both ways
	faultOneWay
	faultCrash    // of a Node; its kernel says goodbye
	faultVanish   // it does not
	faultDrain    // a Node is stopped
	faultKick     // a Node's connection is reset
	faultEdgeDies // kill -9, and a new process
	faultEdgeAway // its connection, or the server it is at, is gone, and it knows
	faultEdgeHole // the same in silence
	faultBroker   // restarts; the generations stay
	faultPause    // a Node's process is stopped by a signal, and goes on
	faultEdgeStop // the Edge's
	faultRenew    // a Node has new keys, and dials anew when it has nothing to do
	faultRest     // an operator drains a Node
	faultRemove   // and takes one out of the configuration
	faultKinds
)

var faultNames = [faultKinds]string{
	"burst", "loss", "duplicates", "delay", "partition", "one_way", "crash", "vanish", "drain", "kick",
	"edge_dies", "edge_away", "edge_hole", "broker", "pause", "edge_pause", "renew", "rest", "remove",
}

func drawSwarm(r *rand.Rand) (s swarm) {
	s.span = between(r, time.Second, 10*time.Second)
	if r.IntN(20) == 0 {
		return s // a calm one
	}
	if r.IntN(8) == 0 {
		s.outages = 1 + r.IntN(3)
		return s
	}
	for k := range s.kinds {
		if r.IntN(3) == 0 {
			s.kinds[k] = 1 + r.IntN(4)
		}
	}
	if r.IntN(5) == 0 {
		s.config = 0.3
	}
	if r.IntN(4) == 0 {
		s.deaf = 0.4
	}
	return s
}

// badConfig is the share of configurations that do not apply now.
func (w *world) badConfig() float64 {
	if !w.now.Before(w.quietAt) {
		return 0
	}
	return w.swarm.config
}

// schedule draws when the faults begin and how long they go on.
func (w *world) schedule() {
	r := w.fault
	w.quietAt = epoch.Add(w.swarm.span)
	nth := 0
	begin := func(kind faultKind, at time.Time, d time.Duration) {
		nth++
		heal := w.prepare(kind, at)
		if end := at.Add(d); end.After(w.quietAt) {
			w.quietAt = end
		}
		name := faultNames[kind] + strconv.Itoa(nth)
		w.at(at, func() {
			w.event(history.Event{Kind: history.Start, Fault: name})
			undo := heal()
			w.after(d, func() {
				undo()
				w.event(history.Event{Kind: history.Stop, Fault: name})
			})
		})
	}
	at := epoch
	for range w.swarm.outages {
		at = at.Add(between(r, 3*heartbeatInterval, 6*heartbeatInterval))
		d := between(r, time.Millisecond, heartbeatBound-2*time.Second)
		begin([]faultKind{faultEdgeAway, faultEdgeHole}[r.IntN(2)], at, d)
		at = at.Add(d)
	}
	for k, count := range w.swarm.kinds {
		kind := faultKind(k) //nolint:gosec // few
		for range count {
			begin(kind, epoch.Add(between(r, 0, w.swarm.span)), lasts(r, kind))
		}
	}
}

func lasts(r *rand.Rand, kind faultKind) time.Duration {
	switch kind {
	case faultBurst:
		return between(r, time.Millisecond, 1500*time.Millisecond)
	case faultLoss, faultDup, faultDelay:
		return between(r, 100*time.Millisecond, 4*time.Second)
	case faultKick:
		return between(r, 0, 10*time.Millisecond)
	case faultEdgeAway, faultEdgeHole:
		if r.IntN(4) > 0 { // what a stream must survive (J5)
			return between(r, 10*time.Millisecond, heartbeatBound-2*time.Second)
		}
	default:
	}
	return between(r, 50*time.Millisecond, 8*time.Second)
}

// prepare draws a fault's details now, and returns what begins it, which returns what
// ends it.
func (w *world) prepare(kind faultKind, at time.Time) func() (undo func()) {
	r := w.fault
	n := w.nodes[r.IntN(len(w.nodes))]
	up := r.IntN(2) == 0
	rate, late := r.Float64(), 0.1*r.Float64()
	nothing := func() {}
	b, e := w.broker, w.edge
	switch kind {
	case faultBurst:
		return func() func() {
			var hit []*path
			for _, c := range b.conns {
				if c.node == n {
					if up {
						hit = append(hit, &c.up)
					} else {
						hit = append(hit, &c.down)
					}
				}
			}
			for _, p := range hit {
				p.lossTill = at.Add(time.Hour)
			}
			return func() {
				for _, p := range hit {
					p.lossTill = time.Time{}
				}
			}
		}
	case faultLoss:
		return func() func() { b.weather.loss = rate * 0.3; return func() { b.weather.loss = 0 } }
	case faultDup:
		return func() func() { b.weather.dup = rate * 0.5; return func() { b.weather.dup = 0 } }
	case faultDelay:
		return func() func() {
			b.weather.jitter = time.Duration(rate * float64(400*time.Millisecond))
			b.weather.late = late
			return func() { b.weather.jitter, b.weather.late = b.calm.jitter, 0 }
		}
	case faultPartition, faultOneWay:
		cutUp, cutDown := true, true
		if kind == faultOneWay {
			cutUp, cutDown = up, !up
		}
		return func() func() {
			b.partition(n, cutUp, cutDown)
			return func() { b.partition(n, false, false) }
		}
	case faultCrash, faultVanish:
		return func() func() {
			if n.up {
				n.crash(kind == faultVanish)
			}
			return n.restart
		}
	case faultDrain:
		return func() func() {
			n.stop()
			return n.comeBack
		}
	case faultKick:
		return func() func() {
			for _, c := range b.conns {
				if c.node == n {
					b.kick(c)
					break
				}
			}
			return nothing
		}
	case faultEdgeDies:
		return func() func() {
			if e.up {
				e.crash()
			}
			return func() {
				if !e.up {
					e.begin()
				}
			}
		}
	case faultEdgeAway, faultEdgeHole:
		return func() func() {
			if !b.up {
				return nothing
			}
			e.lose(kind == faultEdgeAway)
			epoch := e.epoch
			w.after(pingBound, func() {
				if e.epoch == epoch {
					e.knows = true
				}
			})
			return e.restore
		}
	case faultBroker:
		return func() func() {
			if b.up {
				b.crash()
			}
			return func() {
				if !b.up {
					b.restart()
				}
			}
		}
	case faultPause:
		return func() func() { n.pause(); return n.resume }
	case faultEdgeStop:
		return func() func() { e.pause(); return e.resume }
	case faultRenew:
		return func() func() {
			if n.up && !n.paused && n.conn != nil {
				n.step(session.Event{Kind: session.LeaveAsked, Reason: session.Renewed, Gen: n.conn.id.Gen, Bound: time.Duration(rate * float64(10*time.Second))})
			}
			return nothing
		}
	case faultRest:
		return func() func() {
			e.rest(n, true)
			return func() { e.rest(n, false) }
		}
	case faultRemove:
		return func() func() {
			e.remove(n, true)
			return func() { e.remove(n, false) }
		}
	case faultKinds:
	}
	panic("BUG: sim: no such fault")
}
