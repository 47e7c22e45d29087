package dispatch

import (
	"github.com/iop-fabric/iop/edge/pool"
	"github.com/iop-fabric/iop/wire"
)

// state says who still has a part in an attempt.
type state uint8

const (
	open      state = iota // the slot is out and the caller is there
	ended                  // the slot is back, or taken by a fence; the caller takes what arrived
	lingering              // the caller is gone; the slot waits for the Node's answer to the cancel
	over                   // nothing is left
)

// life is the state machine of one attempt. Its zero value is an attempt whose
// slot was just handed over.
type life struct {
	state     state
	cut       *wire.Error // what ended the caller's side before the Node's terminal
	cancelled bool        // the CancelRequest was ordered
}

// orders is what must follow a step, each at most once in a life.
type orders struct {
	cancel bool        // publish the CancelRequest, start the bound
	give   pool.Return // give the slot back so; 0: do not
	remove bool        // the stream is in no table any more
	over   bool        // nothing is left of the attempt
}

// held reports whether the slot is still out.
func (l *life) held() bool { return l.state == open || l.state == lingering }

// unsent: nothing left Edge. The caller's side ends with it.
func (l *life) unsent() orders {
	o := l.returned(pool.ByNotSent)
	left := l.leave()
	o.over = o.over || left.over
	return o
}

// terminal: the Node's current terminal came.
func (l *life) terminal() orders { return l.returned(pool.ByTerminal) }

// bound: the cancel was not answered in time.
func (l *life) bound() orders {
	if !l.cancelled {
		return orders{}
	}
	return l.returned(pool.ByCancelBound)
}

// fence: the generation is over and the pool took the slot back itself.
func (l *life) fence(err *wire.Error) orders {
	if l.state == open && l.cut == nil {
		l.cut = err
	}
	return l.returned(0)
}

func (l *life) returned(how pool.Return) orders {
	switch l.state {
	case open:
		l.state = ended
		return orders{give: how, remove: true}
	case lingering:
		l.state = over
		return orders{give: how, remove: true, over: true}
	default:
		return orders{}
	}
}

// cutBy ends the caller's side while the Node's is still open.
func (l *life) cutBy(err *wire.Error) orders {
	if l.state != open || l.cut != nil {
		return orders{}
	}
	l.cut, l.cancelled = err, true
	return orders{cancel: true}
}

// leave: the caller has its result.
func (l *life) leave() orders {
	switch l.state {
	case open:
		if l.cut == nil {
			panic("BUG: dispatch I1: an open attempt was left")
		}
		l.state = lingering
		return orders{}
	case ended:
		l.state = over
		return orders{over: true}
	default:
		return orders{}
	}
}
