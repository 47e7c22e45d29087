package pool

import "time"

// A provider on which an attempt failed is a suspect for a moment: of the same
// priority the others come first, however idle it looks. Who fails at once looks
// idle most of the time (A39). It is never excluded: where no other has a place it
// is tried like any.
const (
	firstSuspicion = time.Second
	lastSuspicion  = 30 * time.Second
)

// suspect notes a failed attempt. Suspicion that is renewed soon after it ended, or
// before, lasts twice as long.
func (c *places) suspect(now time.Time) {
	if now.Before(c.suspectUntil.Add(c.suspicion)) {
		c.suspicion = min(2*c.suspicion, lastSuspicion)
	} else {
		c.suspicion = firstSuspicion
	}
	c.suspectUntil = now.Add(c.suspicion)
}

func (c *places) suspected(now time.Time) bool { return now.Before(c.suspectUntil) }

// suspectLast notes the failure that a request's last attempt ended in, if this is
// not its first.
func (p *Pool) suspectLast(now time.Time, avoid []string) {
	if len(avoid) == 0 {
		return
	}
	if v := p.providers[avoid[len(avoid)-1]]; v != nil {
		v.places.suspect(now)
	}
}
