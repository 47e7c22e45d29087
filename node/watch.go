package node

import (
	"sync/atomic"
	"time"

	"github.com/iop-fabric/iop/wire"
)

// watch is what one exchange's stall watchdog goes by (W2): when the provider last
// gave a byte, and whether it is the provider that is waited for at all. Those who
// wait only note it here; the send loop looks, as it does for timeout_sec, and not
// before a stall could be over the bound, so a busy stream costs it one look a bound.
type watch struct {
	began time.Time
	now   func() time.Time
	bound time.Duration // of silence; 0: nothing is watched
	// last is the provider's last byte, or the end of the last wait that was not
	// for it, since began.
	last atomic.Int64
	// others counts what else is waited for: the call to begin, the caller's credit,
	// the request's body from Edge. Above 0 the watchdog is off.
	others atomic.Int32
}

// set makes a watch that is off until the provider call begins.
func (w *watch) set(now func() time.Time, began time.Time, bound time.Duration) {
	w.began, w.bound, w.now = began, bound, now
	w.others.Store(1)
}

// heard: the provider gave something.
func (w *watch) heard() {
	if w.now != nil { // else nothing is watched
		w.last.Store(int64(w.now().Sub(w.began)))
	}
}

// pause: from here on it is not, or not only, the provider that is waited for.
func (w *watch) pause() { w.others.Add(1) }

// resume ends a pause; the silence counts from zero.
func (w *watch) resume() {
	w.heard()
	w.others.Add(-1)
}

// look says when to look again, and whether the provider has stalled by now. While
// the watchdog is off it cannot have, nor before a whole bound has passed.
func (w *watch) look(now time.Time) (next time.Time, stalled bool) {
	if w.others.Load() > 0 {
		return now.Add(w.bound), false
	}
	next = w.began.Add(time.Duration(w.last.Load())).Add(w.bound)
	return next, due(now, next)
}

func errStalled(bound time.Duration) *wire.Error {
	return wire.Errorf(wire.Stalled, "no byte from the provider for %v", bound)
}
