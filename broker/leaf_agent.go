package broker

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/iop-fabric/iop/subjects"
)

// agent is the core of what stands beside a leaf's server: it tells the hub's
// session service of the leaf's sessions, and closes those the hub asks to close.
// Only it can do either: the hub's servers see nothing of a leaf's clients (Y3).
//
//	opened ──say──> said ──noted──> known          each word is said again,
//	   │              │               │            every beat, until noted
//	   └──────────────┴──ended──┬─────┘
//	                            └──say──> said ──noted──> forgotten
//
//	near ──no word of the hub for bound──> cut: all sessions and the link closed
//	  ^                                      │
//	  └──────────── the hub is heard ────────┘
//
//	L1  What has ended is said until the hub has noted it (or the leaf ends).
//	L2  A session the hub wants closed is closed, also if it appears later.
//	L3  A session service that is new to the agent is told of every session.
//	L4  The hub silent for the heartbeat bound: every session is closed once, and
//	    the link dialled anew; until the hub is heard again, nobody comes in.
type agent struct {
	bound    time.Duration
	sessions map[subjects.Session]*leafSession
	words    map[subjects.Session]*word // not yet noted
	kicks    map[subjects.Session]time.Time
	services map[string]struct{}
	heard    time.Time
	near     bool      // the hub was heard lately
	cut      time.Time // when the link was last closed for silence
}

type leafSession struct {
	client   uint64
	instance string
}

type word struct {
	verb     subjects.Verb // Opened or Ended
	instance string
	reason   string
	said     time.Time
}

const (
	beatInterval = 500 * time.Millisecond // of the agent; a shorter bound has a shorter one
	maxServices  = 64                     // session services an agent remembers; more are forgotten
	kickMemory   = time.Minute            // how long a session may take to appear that must go
)

// beatEvery leaves room for several beats in a bound.
func beatEvery(bound time.Duration) time.Duration {
	return max(min(beatInterval, bound/8), 10*time.Millisecond)
}

func newAgent(now time.Time, bound time.Duration) *agent {
	return &agent{
		bound: bound, cut: now,
		sessions: map[subjects.Session]*leafSession{}, words: map[subjects.Session]*word{},
		kicks: map[subjects.Session]time.Time{}, services: map[string]struct{}{},
	}
}

type orderKind int

const (
	sayBeat orderKind = iota + 1
	sayOpened
	sayEnded
	closeClient // a little later: the fence that tells it why is on its way
	closeLink
	tellNear // the hub is there
	tellAway // it is not
)

// order is what the agent's shell is to do.
type order struct {
	kind     orderKind
	session  subjects.Session
	instance string
	reason   string
	client   uint64
}

// Opened: a session's connection stands at the leaf.
func (a *agent) Opened(now time.Time, s subjects.Session, client uint64, instance string) []order {
	a.sessions[s] = &leafSession{client: client, instance: instance}
	out := a.say(now, s, word{verb: subjects.Opened, instance: instance})
	if _, ok := a.kicks[s]; ok {
		delete(a.kicks, s)
		out = append(out, order{kind: closeClient, session: s, client: client})
	}
	return out
}

// Ended: it has ended.
func (a *agent) Ended(now time.Time, s subjects.Session, client uint64, reason string) []order {
	if at := a.sessions[s]; at == nil || at.client != client {
		return nil
	}
	delete(a.sessions, s)
	return a.say(now, s, word{verb: subjects.Ended, reason: reason})
}

func (a *agent) say(now time.Time, s subjects.Session, w word) []order {
	w.said = now
	a.words[s] = &w
	return []order{w.order(s)}
}

func (w *word) order(s subjects.Session) order {
	kind := sayOpened
	if w.verb == subjects.Ended {
		kind = sayEnded
	}
	return order{kind: kind, session: s, instance: w.instance, reason: w.reason}
}

// Here: a session service of the hub has answered a beat.
func (a *agent) Here(now time.Time, service string) (out []order) {
	a.heard = now
	if !a.near {
		a.near = true
		out = append(out, order{kind: tellNear})
	}
	if _, known := a.services[service]; known {
		return out
	}
	if len(a.services) >= maxServices {
		clear(a.services)
	}
	a.services[service] = struct{}{}
	for _, s := range sorted(a.sessions) {
		out = append(out, a.say(now, s, word{verb: subjects.Opened, instance: a.sessions[s].instance})...)
	}
	return out
}

// Noted: the hub knows the word.
func (a *agent) Noted(s subjects.Session, verb subjects.Verb) {
	if w := a.words[s]; w != nil && w.verb == verb {
		delete(a.words, s)
	}
}

// Kick: the hub wants a session closed.
func (a *agent) Kick(now time.Time, s subjects.Session) []order {
	if at := a.sessions[s]; at != nil {
		return []order{{kind: closeClient, session: s, client: at.client}}
	}
	if w := a.words[s]; w == nil || w.verb != subjects.Ended { // it is to come yet
		a.kicks[s] = now
	}
	return nil
}

// Tick is called once a beat.
func (a *agent) Tick(now time.Time) []order {
	out := []order{{kind: sayBeat}}
	for _, s := range sorted(a.words) {
		if w := a.words[s]; now.Sub(w.said) >= beatEvery(a.bound) {
			w.said = now
			out = append(out, w.order(s))
		}
	}
	for s, asked := range a.kicks {
		if now.Sub(asked) >= kickMemory {
			delete(a.kicks, s)
		}
	}
	if a.near && now.Sub(a.heard) >= a.bound/2 {
		a.near = false
		out = append(out, order{kind: tellAway})
	}
	if now.Sub(latest(a.heard, a.cut)) >= a.bound {
		a.cut = now
		for _, s := range sorted(a.sessions) {
			out = append(out, order{kind: closeClient, session: s, client: a.sessions[s].client})
		}
		out = append(out, order{kind: closeLink})
	}
	return out
}

// Stop closes every session.
func (a *agent) Stop() (out []order) {
	for _, s := range sorted(a.sessions) {
		out = append(out, order{kind: closeClient, session: s, client: a.sessions[s].client})
	}
	return out
}

// Settled: there is no session, and the hub knows it.
func (a *agent) Settled() bool { return len(a.sessions) == 0 && len(a.words) == 0 }

func latest(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

func sorted[V any](m map[subjects.Session]V) []subjects.Session {
	return slices.SortedFunc(maps.Keys(m), func(a, b subjects.Session) int {
		return cmp.Or(cmp.Compare(a.Edge, b.Edge), cmp.Compare(a.Node, b.Node), cmp.Compare(a.Gen, b.Gen))
	})
}
