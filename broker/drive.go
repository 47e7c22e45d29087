package broker

import (
	"cmp"
	"slices"
	"time"

	"github.com/iop-fabric/iop/subjects"
)

// Driven is the live core, for who plays the servers and the session service around
// it: the simulator of test/sim. A connection is a number, at one server.
type Driven struct{ live *live }

// Order is what the core orders of a Node's session: Evict (fence it, then close the
// connection Conn), or else tell its Edge that it has closed; with the reason.
type Order struct {
	Evict   bool
	Session subjects.Session
	Conn    uint64
	Reason  string
}

// Drive makes the core. bound is how long a silent session still holds its name.
func Drive(bound time.Duration) *Driven { return &Driven{newLive(bound)} }

// Duplicate reports whether another instance than this one holds the name.
func (d *Driven) Duplicate(now time.Time, s subjects.Session, instance string) bool {
	_, dup := d.live.Duplicate(now, nodeID(s), instance)
	return dup
}

// Admitted records a session under its new generation.
func (d *Driven) Admitted(now time.Time, s subjects.Session, instance string) []Order {
	return orders(d.live.Admitted(now, s, instance))
}

// Connected says that the session's connection stands.
func (d *Driven) Connected(now time.Time, s subjects.Session, conn uint64, instance string) []Order {
	return orders(d.live.Connected(now, s, connID{Client: conn}, instance))
}

// Disconnected says that it has ended.
func (d *Driven) Disconnected(s subjects.Session, conn uint64, reason string) []Order {
	return orders(d.live.Disconnected(s, connID{Client: conn}, reason))
}

// Heard is a heartbeat of the session.
func (d *Driven) Heard(now time.Time, s subjects.Session) { d.live.Heard(now, s) }

// Grant reports whether the session may have its token.
func (d *Driven) Grant(s subjects.Session) bool { return d.live.Grant(s) }

// Expire ends what was admitted and never seen.
func (d *Driven) Expire(now time.Time) []Order {
	out := orders(d.live.Expire(now))
	slices.SortFunc(out, func(a, b Order) int {
		return cmp.Or(cmp.Compare(a.Session.Node, b.Session.Node), cmp.Compare(a.Session.Gen, b.Session.Gen))
	})
	return out
}

// orders leaves out what is about servers: here is one, and it does not die alone.
func orders(effects []effect) (out []Order) {
	for _, ef := range effects {
		if ef.kind == evict || ef.kind == tellClosed {
			out = append(out, Order{Evict: ef.kind == evict, Session: ef.session, Conn: ef.conn.Client, Reason: ef.reason})
		}
	}
	return out
}
