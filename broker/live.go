package broker

import (
	"maps"
	"slices"
	"time"

	"github.com/iop-fabric/iop/internal/identity"
	"github.com/iop-fabric/iop/subjects"
)

// connectBound is how long an admitted session may take to appear: the
// server's own authorization timeout and some room.
const connectBound = 20 * time.Second

// fenceGrace is how long a session may take to leave that its Edge has fenced. An
// honest Node does at once.
const fenceGrace = 2 * time.Second

// maxGrants bounds how often one session may ask for its token. An honest Node
// asks once, and once a second while an answer is lost.
const maxGrants = 64

// memberID names a registered workload.
type memberID struct {
	Edge string
	Role identity.Role
	Name string
}

// connID names one connection at one server.
type connID struct {
	Server string
	Client uint64
}

// live is the core that knows who is connected: it decides about duplicates
// (I5), finds the sessions that must go (I4) and what Edge must be told.
//
//	admitted ──connected──> alive ──heard──> alive ──silent for bound──> silent
//	    │                     │                                            │
//	    │ connectBound        │ a higher generation, revoked, misbehaved   │
//	    v                     v                                            v
//	  closed <──gone───── evicted (ignored as a duplicate) <──takeover─────┘
type live struct {
	bound   time.Duration
	nodes   map[memberID]*liveNode // one per name ever seen, so bounded by the members
	peers   map[memberID]map[connID]struct{}
	revoked map[memberID]bool
	leaves  map[memberID]string // the server id of each leaf
	topology
}

type liveNode struct {
	highest  uint64
	sessions map[uint64]*liveSession
	bar      bar
}

// A node whose session was fenced for breaking rules stays out for barFirst, which an
// honest Node waits in any case before it dials again; each time that it does it again
// for twice as long, up to barMost. Once it has behaved for barForgiven, all is as it
// was. So a Node that floods whenever it is let in disturbs others ever more seldom.
const (
	barFirst    = 2 * time.Second
	barMost     = 2 * time.Minute
	barForgiven = 10 * time.Minute
)

// bar is how long a node stays out.
type bar struct {
	gen   uint64 // the newest generation that broke rules
	until time.Time
	wait  time.Duration
}

// raise is for a session that broke rules; each counts once, and one that is older
// than another that did not at all.
func (b *bar) raise(now time.Time, gen uint64) {
	if gen <= b.gen {
		return
	}
	if now.Sub(b.until) >= barForgiven {
		b.wait = 0
	}
	b.gen, b.wait = gen, min(max(2*b.wait, barFirst), barMost)
	b.until = now.Add(b.wait)
}

type liveSession struct {
	instance  string
	since     time.Time // of admission
	heard     time.Time // admission, connect or heartbeat, whichever was last
	conn      connID
	connected bool
	own       bool      // admitted by this service
	leaf      string    // the leaf it is at; empty: a broker
	evicted   bool      // told to go; counts no more
	why       string    // it was
	until     time.Time // the end of its certificate, of one admitted by this service
	fenced    time.Time // when its Edge first said that it is over
	told      time.Time // last time, of one at a leaf
	grants    int
}

func newLive(bound time.Duration) *live {
	return &live{
		bound: bound, nodes: map[memberID]*liveNode{},
		peers: map[memberID]map[connID]struct{}{}, revoked: map[memberID]bool{}, leaves: map[memberID]string{},
		topology: newTopology(),
	}
}

// effectKind is an order of the core to its shell.
type effectKind int

const (
	// tellClosed: ctl.closed for the session, with the reason.
	tellClosed effectKind = iota + 1
	// evict: fence the session (a peer has none), then close the connection.
	evict
	// askServer: who is connected to the server of conn?
	askServer
	// askRoutes: whom does the server of conn reach?
	askRoutes
	// serverLost: the server of conn is gone; what was there is told one by one.
	serverLost
)

type effect struct {
	kind    effectKind
	session subjects.Session // zero for an Edge or a leaf
	conn    connID
	leaf    string // where conn is, if not at a broker
	reason  string
}

// The reasons of evict, which the Node reads, and of tellClosed beside the
// server's own.
const (
	reasonSuperseded = "superseded"
	reasonAbandoned  = "abandoned" // admitted, never seen
	reasonExpired    = "certificate_expired"
	reasonFenced     = "fenced"     // its Edge has, and it stays
	reasonMisbehaved = "misbehaved" // its Edge has fenced it for breaking rules
)

func nodeID(s subjects.Session) memberID {
	return memberID{Edge: s.Edge, Role: identity.RoleNode, Name: s.Node}
}

func (l *live) node(id memberID) *liveNode {
	n := l.nodes[id]
	if n == nil {
		n = &liveNode{sessions: map[uint64]*liveSession{}}
		l.nodes[id] = n
	}
	return n
}

// Duplicate reports whether another instance than this one holds the name, and
// since when (B12).
func (l *live) Duplicate(now time.Time, id memberID, instance string) (since time.Time, duplicate bool) {
	n := l.nodes[id]
	if n == nil {
		return time.Time{}, false
	}
	for _, s := range n.sessions {
		if s.instance != instance && !s.evicted && now.Sub(s.heard) < l.bound {
			return s.since, true
		}
	}
	return time.Time{}, false
}

// Admitted records a session under its new generation and evicts what it
// supersedes.
func (l *live) Admitted(now time.Time, s subjects.Session, instance string) []effect {
	n := l.node(nodeID(s))
	n.sessions[s.Gen] = &liveSession{instance: instance, since: now, heard: now, own: true}
	n.highest = max(n.highest, s.Gen)
	return l.supersede(n, s)
}

// supersede evicts every session of the node but the highest.
func (l *live) supersede(n *liveNode, of subjects.Session) (out []effect) {
	for _, gen := range slices.Sorted(maps.Keys(n.sessions)) {
		s := n.sessions[gen]
		if gen == n.highest || s.evicted {
			continue
		}
		s.evicted, s.why = true, reasonSuperseded
		if s.reachable() {
			of.Gen = gen
			out = append(out, effect{kind: evict, session: of, conn: s.conn, leaf: s.leaf, reason: reasonSuperseded})
		}
	}
	return out
}

// Until notes when the session's certificate ends: with it ends the session.
func (l *live) Until(s subjects.Session, until time.Time) {
	if n := l.nodes[nodeID(s)]; n != nil && n.sessions[s.Gen] != nil {
		n.sessions[s.Gen].until = until
	}
}

// expire evicts the sessions whose certificates have come to their end.
func (l *live) expire(now time.Time, id memberID, n *liveNode) (out []effect) {
	for gen, s := range n.sessions {
		if s.evicted || s.until.IsZero() || now.Before(s.until) {
			continue
		}
		s.evicted, s.why = true, reasonExpired
		if s.reachable() {
			out = append(out, effect{
				kind: evict, conn: s.conn, leaf: s.leaf, reason: reasonExpired,
				session: subjects.Session{Edge: id.Edge, Node: id.Name, Gen: gen},
			})
		}
	}
	return out
}

// Fenced is an Edge's word to a session that it is over (F10). One that stays is
// closed: else its Edge would have to read, and drop, all that it goes on to say (Z5).
func (l *live) Fenced(now time.Time, s subjects.Session) {
	if n := l.nodes[nodeID(s)]; n != nil {
		if session := n.sessions[s.Gen]; session != nil && session.fenced.IsZero() {
			session.fenced = now
		}
	}
}

// Misbehaved is an Edge's word to a session that it is over for breaking rules (J8): it
// goes at once, for it floods until then, and its node stays out for a while. The
// session may have gone by itself.
func (l *live) Misbehaved(now time.Time, s subjects.Session) []effect {
	n := l.nodes[nodeID(s)]
	if n == nil || s.Gen > n.highest { // not one that was admitted
		return nil
	}
	n.bar.raise(now, s.Gen)
	session := n.sessions[s.Gen]
	if session == nil || session.evicted {
		return nil
	}
	session.evicted, session.why = true, reasonMisbehaved
	if !session.reachable() {
		return nil // it goes when it appears
	}
	return []effect{{kind: evict, session: s, conn: session.conn, leaf: session.leaf, reason: reasonMisbehaved}}
}

// Barred says until when a node stays out, if it does.
func (l *live) Barred(now time.Time, id memberID) (until time.Time, barred bool) {
	if n := l.nodes[id]; n != nil && now.Before(n.bar.until) {
		return n.bar.until, true
	}
	return time.Time{}, false
}

// Connected is the server's word that a session's connection stands. One that
// comes late, under a lower generation or after its revocation, must go.
func (l *live) Connected(now time.Time, s subjects.Session, conn connID, instance string) []effect {
	id := nodeID(s)
	n := l.node(id)
	session := n.sessions[s.Gen]
	if session == nil { // admitted by another session service, or before this one began
		session = &liveSession{instance: instance, since: now}
		n.sessions[s.Gen] = session
		n.highest = max(n.highest, s.Gen)
	}
	session.connected, session.conn, session.heard = true, conn, now
	if session.leaf == "" {
		l.note(conn.Server)
	}
	late := session.evicted
	out := l.supersede(n, s)
	switch {
	case late:
		out = append(out, effect{kind: evict, session: s, conn: conn, leaf: session.leaf, reason: session.why})
	case !session.evicted && l.revoked[id]:
		session.evicted, session.why = true, string(refusedRevoked)
		out = append(out, effect{kind: evict, session: s, conn: conn, leaf: session.leaf, reason: string(refusedRevoked)})
	}
	return out
}

// Disconnected is the server's word that a connection has ended.
func (l *live) Disconnected(s subjects.Session, conn connID, reason string) []effect {
	if n := l.nodes[nodeID(s)]; n != nil {
		if session := n.sessions[s.Gen]; session != nil && (!session.connected || session.conn == conn) {
			delete(n.sessions, s.Gen)
		}
	}
	return []effect{{kind: tellClosed, session: s, conn: conn, reason: reason}}
}

// Heard is a heartbeat of the session.
func (l *live) Heard(now time.Time, s subjects.Session) {
	if n := l.nodes[nodeID(s)]; n != nil {
		if session := n.sessions[s.Gen]; session != nil {
			session.heard = now
		}
	}
}

// Grant reports whether the session has not yet asked for its token too often.
func (l *live) Grant(s subjects.Session) bool {
	n := l.nodes[nodeID(s)]
	if n == nil || n.sessions[s.Gen] == nil {
		return true // admitted elsewhere; its CONNECT advisory is on its way
	}
	n.sessions[s.Gen].grants++
	return n.sessions[s.Gen].grants <= maxGrants
}

// PeerConnected records an Edge's or a leaf's connection.
func (l *live) PeerConnected(id memberID, conn connID) []effect {
	if l.peers[id] == nil {
		l.peers[id] = map[connID]struct{}{}
	}
	l.peers[id][conn] = struct{}{}
	l.note(conn.Server)
	if l.revoked[id] {
		return []effect{{kind: evict, conn: conn, reason: string(refusedRevoked)}}
	}
	return nil
}

// PeerDisconnected forgets it.
func (l *live) PeerDisconnected(id memberID, conn connID) {
	delete(l.peers[id], conn)
	delete(l.who, conn)
	if len(l.peers[id]) == 0 {
		delete(l.peers, id)
	}
}

// MemberChanged is the authority's word about a member; a revoked one's
// connections are evicted (B8).
func (l *live) MemberChanged(id memberID, revoked bool) (out []effect) {
	if !revoked {
		delete(l.revoked, id)
		return nil
	}
	l.revoked[id] = true
	if n := l.nodes[id]; n != nil {
		for _, gen := range slices.Sorted(maps.Keys(n.sessions)) {
			s := n.sessions[gen]
			if s.reachable() && !s.evicted {
				s.evicted, s.why = true, string(refusedRevoked)
				out = append(out, effect{
					kind: evict, conn: s.conn, leaf: s.leaf, reason: string(refusedRevoked),
					session: subjects.Session{Edge: id.Edge, Node: id.Name, Gen: gen},
				})
			}
		}
	}
	out = append(out, l.leafRevoked(id)...)
	for conn := range l.peers[id] {
		out = append(out, effect{kind: evict, conn: conn, reason: string(refusedRevoked)})
	}
	return out
}

// Expire ends what was admitted and never seen, what has outlived its certificate, and
// what was fenced and stays. It is called now and then.
func (l *live) Expire(now time.Time) (out []effect) {
	l.sweep(now)
	for id, n := range l.nodes {
		out = append(out, l.expire(now, id, n)...)
		for gen, s := range n.sessions {
			if s.reachable() && !s.evicted && !s.fenced.IsZero() && now.Sub(s.fenced) >= fenceGrace {
				s.evicted, s.why = true, reasonFenced
				out = append(out, effect{
					kind: evict, conn: s.conn, leaf: s.leaf, reason: reasonFenced,
					session: subjects.Session{Edge: id.Edge, Node: id.Name, Gen: gen},
				})
			}
			if s.lost(now, l.bound) {
				delete(n.sessions, gen)
				if !s.own && s.leaf == "" {
					continue // who admitted it tells
				}
				out = append(out, effect{
					kind: tellClosed, reason: reasonAbandoned,
					session: subjects.Session{Edge: id.Edge, Node: id.Name, Gen: gen},
				})
			}
		}
	}
	return out
}

// Sessions counts those that are connected.
func (l *live) Sessions() (count int) {
	for _, n := range l.nodes {
		for _, s := range n.sessions {
			if s.connected {
				count++
			}
		}
	}
	return count
}
