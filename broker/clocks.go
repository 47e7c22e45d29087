package broker

import (
	"sync"
	"time"

	"github.com/nats-io/jwt/v2"
)

const (
	// clockWindow: what a clock showed is forgotten after two, so that one that was
	// set is soon understood.
	clockWindow = 10 * time.Second
	// maxClocks bounds how many servers' clocks are remembered; each restart of one
	// makes a new id.
	maxClocks = 1024
)

// clocks is how far the clocks of the servers that ask for admissions are from
// ours: a leaf's host may be minutes off. Of what a request says of its age, that
// is what queueing and the way here do not explain: the least that was seen lately.
type clocks struct {
	home string // the server of this process: its clock is ours
	mu   sync.Mutex
	seen map[string]clock
}

// clock is of one server: ours less its own, the least in this window and the one
// before.
type clock struct {
	least, before time.Duration
	since         time.Time
}

// offset is that of the request's server, which the request itself may lower.
func (c *clocks) offset(ac *jwt.AuthorizationRequestClaims, now time.Time) time.Duration {
	if ac.Issuer == c.home {
		return 0
	}
	age := now.Sub(time.Unix(ac.IssuedAt, 0))
	c.mu.Lock()
	defer c.mu.Unlock()
	k, known := c.seen[ac.Issuer] // who signed it: a server speaks of its own clock alone
	switch passed := now.Sub(k.since); {
	case !known || passed >= 2*clockWindow:
		k = clock{least: age, before: age, since: now}
	case passed >= clockWindow:
		k = clock{least: age, before: k.least, since: now}
	default:
		k.least = min(k.least, age)
	}
	if c.seen == nil || !known && len(c.seen) >= maxClocks {
		c.seen = map[string]clock{}
	}
	c.seen[ac.Issuer] = k
	return min(k.least, k.before)
}

// at is a moment of ours by the clock of the request's server.
func (c *clocks) at(ac *jwt.AuthorizationRequestClaims, now time.Time) time.Time {
	return now.Add(-c.offset(ac, now))
}

// late reports whether the server has given the request up by now.
func (c *clocks) late(ac *jwt.AuthorizationRequestClaims, now time.Time) bool {
	return ac.Expires != 0 && c.at(ac, now).After(time.Unix(ac.Expires, 0))
}
