package dispatch

import (
	"slices"
	"time"

	"github.com/iop-fabric/iop/tunnel"
	"github.com/iop-fabric/iop/wire"
)

// downlink is what of requests' bodies is on its way to one session. All its streams
// share one link and one order, and nobody knows the link's rate. If each sent the
// window that it has, the queue before a slow link would be so long that what is late
// looks lost, and the broker closes a connection that takes too long for what is
// written to it. So together they send what comes through within a moment:
//
//	limit  begins with one window, doubles in a round trip while that is short, and is
//	       halved when it is long: a queue has formed
//	order  who finds no room waits, first come, first served, a frame each
//	late   what was sent before a stream's frames has not arrived yet: theirs are not
//	       missing, but behind it
//
// It is a pure core; the session's lock guards it, and wake must not block.
type downlink struct {
	limit, flight int
	sent, passed  uint64        // frames by the order in which they left; the newest that arrived
	quick, trip   time.Duration // the shortest round trip, and the smoothed one; 0: none was seen
	moved         time.Time     // when something arrived last, or was sent where nothing was on its way
	halved        time.Time
	lanes         []*lane
	waiting       []*lane
}

// lane is one stream's part of a downlink.
type lane struct {
	wake   func()
	turn   bool       // it was called, and has not looked yet
	frames []underWay // not acknowledged, by sequence
}

// underWay is a frame that was sent: as the how manyth first and last, and when last.
type underWay struct {
	first, number uint64
	cost          int
	at            time.Time
	again         bool
}

const (
	// shortQueue and longQueue are what a queue may add to the round trip: below the
	// one more may be under way, above the other it is too much.
	shortQueue, longQueue = 250 * time.Millisecond, time.Second
	// minDownlink is one first window, and the last frame that may go beyond it.
	minDownlink = wire.MinWindow + tunnel.MaxCost
	// maxDownlink bounds what is under way to one session: what a broker keeps for one
	// connection is as much.
	maxDownlink = 64 << 20
	// longestTrip is how long what is first is waited for on the slowest link, and how
	// long nothing may arrive of anything before those behind it ask too.
	longestTrip = 5 * time.Second
)

func newDownlink() downlink { return downlink{limit: minDownlink} }

func (d *downlink) join(l *lane) { d.lanes = append(d.lanes, l) }

// leave is for a stream that ended: what it had under way is nobody's concern.
func (d *downlink) leave(l *lane) {
	if i := slices.Index(d.lanes, l); i >= 0 {
		d.lanes = slices.Delete(d.lanes, i, i+1)
	}
	if i := slices.Index(d.waiting, l); i >= 0 {
		d.waiting = slices.Delete(d.waiting, i, i+1)
	}
	for _, f := range l.frames {
		d.flight -= f.cost
	}
	l.frames = nil
	d.call()
}

// room says whether a frame may go now. If not, the lane is woken when it is its turn.
func (d *downlink) room(l *lane, cost int) bool {
	free := d.flight == 0 || d.flight+cost <= d.limit && (l.turn || len(d.waiting) == 0)
	at := slices.Index(d.waiting, l)
	switch {
	case free && at >= 0:
		d.waiting = slices.Delete(d.waiting, at, at+1)
	case !free && l.turn: // another was quicker
		d.waiting = slices.Insert(d.waiting, 0, l)
	case !free && at < 0:
		d.waiting = append(d.waiting, l)
	}
	l.turn = false
	return free
}

// put is the lane's i-th unacknowledged frame leaving, perhaps again.
func (d *downlink) put(now time.Time, l *lane, i, cost int) {
	d.sent++
	if i < len(l.frames) {
		l.frames[i].number, l.frames[i].at, l.frames[i].again = d.sent, now, true
		return
	}
	if d.flight == 0 {
		d.moved = now
	}
	d.flight += cost
	l.frames = append(l.frames, underWay{first: d.sent, number: d.sent, cost: cost, at: now})
	d.call() // the next may have room too
}

// arrived is the acknowledgement of the lane's first n frames.
func (d *downlink) arrived(now time.Time, l *lane, n int) {
	n = min(n, len(l.frames))
	if n == 0 {
		return
	}
	last, freed, full := l.frames[n-1], 0, d.flight+wire.MaxBody > d.limit
	for _, f := range l.frames[:n] {
		freed += f.cost
		d.passed = max(d.passed, f.first) // which copy arrived nobody knows
	}
	l.frames = slices.Delete(l.frames, 0, n)
	d.flight -= freed
	d.moved = now
	if !last.again {
		d.measured(now, now.Sub(last.at), freed, full)
	}
	d.call()
}

// measured follows the round trip of a frame that was sent once.
func (d *downlink) measured(now time.Time, took time.Duration, freed int, full bool) {
	if d.quick == 0 {
		d.quick, d.trip = max(took, 1), took
	}
	d.quick = min(d.quick, max(took, 1))
	d.trip += (took - d.trip) / 4
	switch queue := took - 2*d.quick; {
	case queue <= shortQueue && full:
		d.limit = min(d.limit+freed, maxDownlink)
	case queue > longQueue && now.Sub(d.halved) > took:
		d.halved, d.limit = now, max(d.limit/2, minDownlink)
	}
}

// late says that the lane's frames are not missing yet: they are behind others that have
// not arrived, and whose streams ask; or they are first, and since what was before them
// arrived no two round trips have passed.
func (d *downlink) late(now time.Time, l *lane) bool {
	if len(l.frames) == 0 {
		return false
	}
	first, last := l.frames[0].first, l.frames[len(l.frames)-1]
	since := now.Sub(d.moved)
	switch {
	case d.passed > last.number || since >= longestTrip:
		return false
	case min(since, now.Sub(last.at)) < 2*d.trip:
		return true
	}
	return slices.ContainsFunc(d.lanes, func(o *lane) bool { return len(o.frames) > 0 && o.frames[0].first < first })
}

// call gives the first that waits its turn, if there is room. It may not take it, for
// its caller reads nothing: so it stands in nobody's way.
func (d *downlink) call() {
	if len(d.waiting) == 0 || d.flight > 0 && d.flight+tunnel.MaxCost > d.limit {
		return
	}
	l := d.waiting[0]
	d.waiting = slices.Delete(d.waiting, 0, 1)
	l.turn = true
	l.wake()
}
