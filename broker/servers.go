package broker

import (
	"maps"
	"slices"
	"time"

	"github.com/iop-fabric/iop/subjects"
)

// The servers' share of the live core. In a cluster every session service hears
// of every connection, so all of them keep the same books; who acts on them is
// decided by the server that holds the connection: the service beside it speaks,
// and where there is none, the one at the lowest of the other servers.
//
//	reached ──not in the home's routes, twice──> missed ──nobody reaches it──> lost: its
//	    │  ^                                       │                           sessions
//	    │  └────────────────it is there again──────┘                           have ended
//	    └──says that it stops───────────────────────────────────────────────────────^
//
// A route that breaks is no broker that is gone: the servers that the home does reach
// are asked, and as long as one of them reaches it, its sessions live, or end by
// heartbeats as they do behind any other gap (J5, F9). A home that reaches nobody while
// several are missed is itself the one cut off, and waits.
//
// Of a server that is lost every service tells: whichever is alive is enough,
// and an Edge hears the second word of the same end with indifference.

const (
	// lostAfter reads in a row without a server: one may fall between two
	// connections of a route that is made anew.
	lostAfter = 2
	// patience is for how many reads more a server is not given up for want of an answer.
	patience = 20
	// askAgain reads in a row without an answer to who is connected there: it, or
	// the question, was lost with a route.
	askAgain = 8
	// goneFor is how long a connection's end outlives what a slower list says.
	goneFor = time.Minute
	// staleAfter is when a silent session of another server is forgotten: the
	// word of its end was lost. An Edge has long given it up.
	staleAfter = time.Minute
)

// The reasons of tellClosed for a server's end.
const (
	reasonServerLost    = "broker_lost"
	reasonServerStopped = "broker_stopped"
)

// topology is what the core knows of servers and services.
type topology struct {
	home     string                         // the server this service is connected to
	services map[string]map[uint64]struct{} // by server: the connections of the services there
	others   map[string]int                 // servers but the home: reads in a row that did not show them
	listed   map[string]bool                // servers that have said who is connected to them
	silent   map[string]int                 // reads that showed one that has not
	reached  map[string]bool                // by the home, at the last read
	sights   map[string]map[string]bool     // by server that is missed: who else was asked, and reaches it
	read     bool                           // the home has said which others it reaches
	gone     map[connID]time.Time           // connections whose end was heard, lately
	who      map[connID]peer                // the processes behind the connections of Edges and leaves
}

type peer struct {
	instance string
	since    time.Time
}

func newTopology() topology {
	return topology{services: map[string]map[uint64]struct{}{}, others: map[string]int{}, listed: map[string]bool{}, silent: map[string]int{}, sights: map[string]map[string]bool{}, gone: map[connID]time.Time{}, who: map[connID]peer{}}
}

// Home says which server this service is connected to now.
func (l *live) Home(server string) {
	if l.home != "" && l.home != server {
		l.note(l.home) // if that one is gone, the next reads will not show it
	}
	l.home = server
	delete(l.others, server)
	delete(l.sights, server)
}

// note keeps an eye on a server.
func (l *live) note(server string) {
	if _, known := l.others[server]; !known && server != l.home && server != "" {
		l.others[server] = 0
	}
}

// Listed says that a server has named all that is connected to it.
func (l *live) Listed(server string) {
	l.listed[server] = true
	delete(l.silent, server)
}

// Settled reports whether all servers have said who is connected to them, and so
// where the other services are. Before that two might speak of one server.
func (l *live) Settled() bool {
	for server := range l.others {
		if !l.listed[server] {
			return false
		}
	}
	return l.read
}

// speaks reports whether this service acts on what happens at a server.
func (l *live) speaks(server string) bool {
	if server == l.home || l.home == "" {
		return true
	}
	if len(l.services[server]) > 0 {
		return false
	}
	for other, there := range l.services {
		if len(there) > 0 && other < l.home {
			return false
		}
	}
	return true
}

// Mine drops the effects that are another service's to carry out. One that names
// no connection is everybody's.
func (l *live) Mine(out []effect) []effect {
	return slices.DeleteFunc(out, func(ef effect) bool {
		return (ef.kind == tellClosed || ef.kind == evict) && ef.conn.Server != "" && !l.speaks(ef.conn.Server)
	})
}

// ServiceConnected and ServiceDisconnected are the server's word about a
// session service's connection.
func (l *live) ServiceConnected(conn connID) {
	if l.services[conn.Server] == nil {
		l.services[conn.Server] = map[uint64]struct{}{}
	}
	l.services[conn.Server][conn.Client] = struct{}{}
}

func (l *live) ServiceDisconnected(conn connID) {
	delete(l.services[conn.Server], conn.Client)
	if len(l.services[conn.Server]) == 0 {
		delete(l.services, conn.Server)
	}
}

// Gone remembers that a connection has ended.
func (l *live) Gone(now time.Time, conn connID) { l.gone[conn] = now }

// Known is what the store says of a name at the start: its highest generation,
// of a session of which nothing else is known.
func (l *live) Known(s subjects.Session) {
	n := l.node(nodeID(s))
	n.highest = max(n.highest, s.Gen)
}

// Highest is the newest generation of a name that is known of; 0: none.
func (l *live) Highest(id memberID) uint64 {
	if n := l.nodes[id]; n != nil {
		return n.highest
	}
	return 0
}

// Own says that this service admitted the session, for a connection at a server.
func (l *live) Own(s subjects.Session, server string) {
	n := l.nodes[nodeID(s)]
	if n == nil || n.sessions[s.Gen] == nil {
		return
	}
	session := n.sessions[s.Gen]
	session.own = true
	if session.leaf == "" && !session.connected {
		session.conn.Server = server
		l.note(server)
	}
}

// Learnt records a session that another service has admitted.
func (l *live) Learnt(now time.Time, s subjects.Session, instance string) []effect {
	n := l.node(nodeID(s))
	if s.Gen <= n.highest {
		return nil // ours, or older than what we know
	}
	n.sessions[s.Gen] = &liveSession{instance: instance, since: now, heard: now}
	n.highest = s.Gen
	return l.supersede(n, s)
}

// Seen is a server's answer to who is connected to it: Connected, unless the
// end was heard in the meantime.
func (l *live) Seen(now time.Time, s subjects.Session, conn connID, instance string) []effect {
	if _, gone := l.gone[conn]; gone {
		return nil
	}
	if n := l.nodes[nodeID(s)]; n != nil {
		if session := n.sessions[s.Gen]; session != nil && session.connected {
			return nil
		}
	}
	return l.Connected(now, s, conn, instance)
}

// PeerSeen is the same of an Edge or a leaf.
func (l *live) PeerSeen(id memberID, conn connID) []effect {
	_, gone := l.gone[conn]
	if _, known := l.peers[id][conn]; gone || known {
		return nil
	}
	return l.PeerConnected(id, conn)
}

// PeerIs says which process a peer's connection is of.
func (l *live) PeerIs(now time.Time, id memberID, conn connID, instance string) {
	if _, there := l.peers[id][conn]; there && instance != "" {
		l.who[conn] = peer{instance: instance, since: now}
	}
}

// PeerDuplicate is B12 for an Edge, which sends no heartbeats: another process
// has the name as long as its connection stands.
func (l *live) PeerDuplicate(id memberID, instance string) (since time.Time, duplicate bool) {
	for conn := range l.peers[id] {
		if other, known := l.who[conn]; known && other.instance != instance && (!duplicate || other.since.Before(since)) {
			since, duplicate = other.since, true
		}
	}
	return since, duplicate
}

// Routes is what the home server says of the others that it reaches. A new one
// is asked who is connected there.
func (l *live) Routes(home string, reached []string) (out []effect) {
	if home != l.home {
		l.Home(home)
		out = append(out, effect{kind: askServer, conn: connID{Server: home}})
	}
	l.read = true
	there := map[string]bool{}
	for _, server := range reached {
		if server == home || server == "" || there[server] {
			continue
		}
		there[server] = true
		if !l.listed[server] {
			l.silent[server]++
		}
		if misses, known := l.others[server]; !known || misses > 0 || l.silent[server] >= askAgain {
			l.silent[server] = 0
			out = append(out, effect{kind: askServer, conn: connID{Server: server}})
		}
		l.others[server] = 0
		delete(l.sights, server)
	}
	l.reached = there
	missed := false
	for _, server := range slices.Sorted(maps.Keys(l.others)) {
		if there[server] {
			continue
		}
		l.others[server]++
		missed = true
	}
	if !missed {
		return out
	}
	out = append(out, l.giveUp()...)
	for _, server := range slices.Sorted(maps.Keys(there)) {
		out = append(out, effect{kind: askRoutes, conn: connID{Server: server}})
	}
	return out
}

// Reaches is what a server other than the home says of those that it reaches.
func (l *live) Reaches(server string, reached []string) []effect {
	for other, misses := range l.others {
		if misses == 0 || other == server {
			continue
		}
		if l.sights[other] == nil {
			l.sights[other] = map[string]bool{}
		}
		l.sights[other][server] = slices.Contains(reached, other)
	}
	return l.giveUp()
}

// giveUp ends what was at servers that nobody reaches any more.
func (l *live) giveUp() (out []effect) {
	missed := 0
	for _, misses := range l.others {
		if misses > 0 {
			missed++
		}
	}
	for _, server := range slices.Sorted(maps.Keys(l.others)) {
		misses, seen, asked := l.others[server], false, 0
		for by, reaches := range l.sights[server] {
			if l.reached[by] {
				asked++
				seen = seen || reaches
			}
		}
		known := asked == len(l.reached) && (asked > 0 || missed == 1) // a lone other one has no witness
		if misses >= lostAfter && !seen && (known || misses >= lostAfter+patience) {
			out = append(out, l.ServerGone(server, reasonServerLost)...)
		}
	}
	return out
}

// ServerGone ends all that was at a server.
func (l *live) ServerGone(server, reason string) (out []effect) {
	if _, known := l.others[server]; known {
		out = append(out, effect{kind: serverLost, conn: connID{Server: server}, reason: reason})
	}
	delete(l.others, server)
	delete(l.listed, server)
	delete(l.silent, server)
	delete(l.sights, server)
	delete(l.services, server)
	for _, id := range sortedIDs(l.nodes) {
		n := l.nodes[id]
		for _, gen := range slices.Sorted(maps.Keys(n.sessions)) {
			if s := n.sessions[gen]; s.conn.Server == server && s.leaf == "" {
				delete(n.sessions, gen)
				out = append(out, effect{
					kind: tellClosed, reason: reason,
					session: subjects.Session{Edge: id.Edge, Node: id.Name, Gen: gen},
				})
			}
		}
	}
	for _, id := range sortedIDs(l.peers) {
		for conn := range l.peers[id] {
			if conn.Server == server {
				l.PeerDisconnected(id, conn)
			}
		}
	}
	return out
}

func sortedIDs[V any](m map[memberID]V) []memberID {
	return slices.SortedFunc(maps.Keys(m), func(a, b memberID) int {
		if a.key() < b.key() {
			return -1
		}
		return 1
	})
}

// sweep forgets what nobody will tell the end of.
func (l *live) sweep(now time.Time) {
	maps.DeleteFunc(l.gone, func(_ connID, at time.Time) bool { return now.Sub(at) >= goneFor })
	if l.home == "" {
		return
	}
	for _, n := range l.nodes {
		maps.DeleteFunc(n.sessions, func(_ uint64, s *liveSession) bool {
			return s.connected && s.leaf == "" && s.conn.Server != l.home && now.Sub(s.heard) >= max(staleAfter, 2*l.bound)
		})
	}
}
