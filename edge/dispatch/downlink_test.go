package dispatch

import (
	"container/heap"
	"fmt"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/iop-fabric/iop/tunnel"
	"github.com/iop-fabric/iop/wire"
)

// narrow is bodies over one link of a rate and a round trip, in virtual time.
type narrow struct {
	now, free time.Time // free: when the link has sent what is in its queue
	rate      int       // bytes a second
	roundTrip time.Duration
	down      downlink
	bodies    []*narrowBody
	events    arrivals
	longest   time.Duration // from a frame's leaving to its acknowledgement
	silence   time.Duration // the longest between two acknowledgements of one body
}

type narrowBody struct {
	lane
	left   int // frames
	woken  bool
	heard  time.Time
	window int // frames that may be unacknowledged
}

type arrival struct {
	at   time.Time
	body *narrowBody
	sent time.Time
}

type arrivals []arrival

func (a arrivals) Len() int           { return len(a) }
func (a arrivals) Less(i, j int) bool { return a[i].at.Before(a[j].at) }
func (a arrivals) Swap(i, j int)      { a[i], a[j] = a[j], a[i] }
func (a *arrivals) Push(x any)        { *a = append(*a, x.(arrival)) } //nolint:forcetypeassert // of this heap
func (a *arrivals) Pop() any {
	old := *a
	last := old[len(old)-1]
	*a = old[:len(old)-1]
	return last
}

func newNarrow(rate int, roundTrip time.Duration, bodies, frames int) *narrow {
	n := &narrow{now: time.Unix(1, 0), rate: rate, roundTrip: roundTrip, down: newDownlink()}
	for range bodies {
		b := &narrowBody{left: frames, heard: n.now, window: 3}
		b.wake = func() { b.woken = true }
		n.down.join(&b.lane)
		n.bodies = append(n.bodies, b)
	}
	return n
}

func (n *narrow) send(b *narrowBody) {
	for b.left > 0 && len(b.frames) < b.window && n.down.room(&b.lane, tunnel.MaxCost) {
		b.left--
		n.down.put(n.now, &b.lane, len(b.frames), tunnel.MaxCost)
		if n.free.Before(n.now) {
			n.free = n.now
		}
		n.free = n.free.Add(time.Duration(tunnel.MaxCost) * time.Second / time.Duration(n.rate))
		heap.Push(&n.events, arrival{at: n.free.Add(n.roundTrip), body: b, sent: n.now})
	}
}

// run sends all bodies and returns how long that took; false: they are stuck.
func (n *narrow) run() (time.Duration, bool) {
	began := n.now
	for _, b := range n.bodies {
		n.send(b)
	}
	for len(n.events) > 0 {
		e, _ := heap.Pop(&n.events).(arrival)
		n.now = e.at
		n.longest = max(n.longest, n.now.Sub(e.sent))
		n.silence = max(n.silence, n.now.Sub(e.body.heard))
		e.body.heard = n.now
		e.body.window = min(e.body.window+1, wire.MaxWindow/tunnel.MaxCost)
		n.down.arrived(n.now, &e.body.lane, 1)
		if e.body.left == 0 && len(e.body.frames) == 0 {
			n.down.leave(&e.body.lane)
		}
		n.send(e.body)
		for again := true; again; {
			again = false
			for _, b := range n.bodies {
				if b.woken {
					b.woken, again = false, true
					n.send(b)
				}
			}
		}
	}
	for _, b := range n.bodies {
		if b.left > 0 || len(b.frames) > 0 {
			return 0, false
		}
	}
	return n.now.Sub(began), n.down.flight == 0 && len(n.down.waiting) == 0 && len(n.down.lanes) == 0
}

// However many bodies share a link, and whatever its rate: it is full, and the queue
// before it stays so short that nothing seems lost, and that the broker, which gives
// what it writes ten seconds, never waits so long.
//
// Contract: J7 J2
func TestManyBodiesShareALink(t *testing.T) {
	const mbit = 1_000_000 / 8
	for _, c := range []struct {
		rate, bodies, frames int
		roundTrip            time.Duration
	}{
		{1 * mbit, 4, 16, time.Millisecond},
		{1 * mbit, 64, 16, 50 * time.Millisecond},
		{10 * mbit, 64, 16, 20 * time.Millisecond},
		{100 * mbit, 64, 64, 100 * time.Millisecond},
		{1000 * mbit, 8, 2000, 250 * time.Millisecond},
	} {
		t.Run(fmt.Sprintf("%d bodies at %d Mbit per second", c.bodies, c.rate/mbit), func(t *testing.T) {
			n := newNarrow(c.rate, c.roundTrip, c.bodies, c.frames)
			took, ok := n.run()
			if !ok {
				t.Fatalf("%+v is left", n.down)
			}
			alone := time.Duration(c.bodies*c.frames*tunnel.MaxCost)*time.Second/time.Duration(c.rate) + 8*c.roundTrip // until it is known how much the link takes
			t.Logf("%v, the link needs %v; the longest queue %v, the longest silence of a body %v; limit %d KiB", took, alone, n.longest, n.silence, n.down.limit>>10)
			if took > alone*11/10 {
				t.Errorf("the link is not full: %v, it needs %v", took, alone)
			}
			if first := time.Duration(minDownlink) * time.Second / time.Duration(c.rate); n.longest > c.roundTrip*4+longQueue+first {
				t.Errorf("a frame is under way for %v", n.longest)
			}
		})
	}
}

// Bodies come and go as they like, some are left, frames are sent again: nothing is
// under way in the end, and nobody waits for ever.
//
// Contract: J7
func TestDownlinkProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		d, now := newDownlink(), time.Unix(1, 0)
		type body struct {
			lane
			woken, waits bool
		}
		var lanes []*body
		check := func() {
			sum := 0
			for _, l := range lanes {
				for i, f := range l.frames {
					sum += f.cost
					if i > 0 && !f.again && f.number < l.frames[i-1].number && !l.frames[i-1].again {
						t.Fatal("frames out of order")
					}
				}
			}
			if sum != d.flight {
				t.Fatalf("%d under way, %d counted", sum, d.flight)
			}
			if d.limit < minDownlink || d.limit > maxDownlink {
				t.Fatalf("limit %d", d.limit)
			}
			if d.flight == 0 && len(d.waiting) > 0 {
				if !slices.ContainsFunc(lanes, func(b *body) bool { return b.turn && b.woken }) {
					t.Fatal("all is quiet, and nobody was called")
				}
			}
		}
		send := func(l *body) {
			l.woken = false
			if d.room(&l.lane, tunnel.MaxCost) {
				l.waits = false
				d.put(now, &l.lane, len(l.frames), tunnel.MaxCost)
			} else {
				l.waits = true
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"": func(*rapid.T) { check() },
			"join": func(*rapid.T) {
				l := &body{}
				l.wake = func() { l.woken = true }
				d.join(&l.lane)
				lanes = append(lanes, l)
			},
			"time": func(t *rapid.T) {
				now = now.Add(time.Duration(rapid.IntRange(0, 3000).Draw(t, "ms")) * time.Millisecond)
			},
			"send": func(t *rapid.T) {
				if len(lanes) > 0 {
					send(rapid.SampledFrom(lanes).Draw(t, "lane"))
				}
			},
			"again": func(t *rapid.T) {
				if len(lanes) > 0 {
					if l := rapid.SampledFrom(lanes).Draw(t, "lane"); len(l.frames) > 0 {
						d.put(now, &l.lane, rapid.IntRange(0, len(l.frames)-1).Draw(t, "frame"), tunnel.MaxCost)
					}
				}
			},
			"arrive": func(t *rapid.T) {
				if len(lanes) > 0 {
					l := rapid.SampledFrom(lanes).Draw(t, "lane")
					d.arrived(now, &l.lane, rapid.IntRange(0, 3).Draw(t, "frames"))
				}
			},
			"leave": func(t *rapid.T) {
				if len(lanes) > 0 {
					i := rapid.IntRange(0, len(lanes)-1).Draw(t, "lane")
					d.leave(&lanes[i].lane)
					lanes = append(lanes[:i], lanes[i+1:]...)
				}
			},
		})
		for len(lanes) > 0 {
			d.leave(&lanes[0].lane)
			lanes = lanes[1:]
			if len(lanes) > 0 {
				check()
			}
		}
		if d.flight != 0 || len(d.waiting) > 0 {
			t.Fatalf("%+v is left", d)
		}
	})
}

// Who was called and does not look, for its caller reads nothing, keeps nobody waiting.
//
// Contract: J7
func TestWhoDoesNotLookStandsInNobodysWay(t *testing.T) {
	const bodies, frames = 4, 50
	n := newNarrow(1<<20, time.Millisecond, bodies, frames)
	n.bodies[2].wake = func() {} // nor is it told
	n.run()
	for i, b := range n.bodies {
		if left := b.left + len(b.frames); i != 2 && left > 0 {
			t.Errorf("body %d has %d frames left", i, left)
		}
	}
}

// What is behind others' frames on the link is late, not missing, as long as those
// arrive; what others have overtaken is missing.
//
// Contract: J2
func TestLateIsNotMissing(t *testing.T) {
	d, now := newDownlink(), time.Unix(1, 0)
	a, b := &lane{wake: func() {}}, &lane{wake: func() {}}
	d.join(a)
	d.join(b)
	d.put(now, a, 0, 1000)
	d.put(now, b, 0, 1000)
	now = now.Add(silenceBound / 100)
	if d.late(now, a) {
		t.Error("nothing is before the first")
	}
	if !d.late(now, b) {
		t.Error("the first has not arrived, so the second cannot have")
	}
	if d.late(now.Add(longestTrip), b) {
		t.Error("nothing arrives at all: the second may ask")
	}
	d.put(now, a, 1, 1000)
	d.arrived(now, a, 1)
	if !d.late(now, b) {
		t.Error("two round trips are not over since it left")
	}
	if d.late(now.Add(silenceBound/50), b) {
		t.Error("nothing is before the second any more")
	}
	d.arrived(now, a, 1)
	if d.late(now, b) {
		t.Error("what left after the second has arrived")
	}
	d.put(now, b, 0, 1000) // it asks
	d.put(now, a, 0, 1000)
	d.arrived(now, b, 1) // by which copy nobody knows
	d.put(now, b, 0, 1000)
	if d.passed > d.sent-3 {
		t.Error("the copy that was sent last is taken for the one that arrived")
	}
}
