package broker

import (
	"maps"
	"slices"
	"time"

	"github.com/iop-fabric/iop/internal/identity"
	"github.com/iop-fabric/iop/subjects"
)

// The leaf's share of the live core. The servers of the hub see nothing of a
// leaf's clients: their sessions are known from the callout that admitted them,
// from the words of the leaf's agent, and from their heartbeats.

// reasonLeafRestarted of tellClosed: the leaf's process that held the session is gone.
const reasonLeafRestarted = "leaf_restarted"

// insistInterval is how often an evicted session that goes on is told so again.
const insistInterval = time.Second

func leafID(edge, leaf string) memberID {
	return memberID{Edge: edge, Role: identity.RoleLeaf, Name: leaf}
}

// reachable: the session can be told to go. One at a leaf may stand there
// already, though nobody has said so yet.
func (s *liveSession) reachable() bool { return s.connected || s.leaf != "" }

// lost: nobody will say of the session that it has ended. At a broker that is one
// which never appeared; at a leaf, one which is silent, since the leaf may be gone.
func (s *liveSession) lost(now time.Time, bound time.Duration) bool {
	if s.leaf != "" {
		return now.Sub(s.heard) >= max(connectBound, 2*bound)
	}
	return !s.connected && now.Sub(s.since) >= connectBound
}

// AtLeaf says where a session is that was admitted through a leaf; leaf is empty
// for one at a broker.
func (l *live) AtLeaf(s subjects.Session, leaf, server string) {
	if leaf == "" {
		return
	}
	if session := l.node(nodeID(s)).sessions[s.Gen]; session != nil {
		session.leaf, session.conn = leaf, connID{Server: server}
	}
}

// Elsewhere reports whether a session of the node lives at another place than the
// leaf that asks for it, and since when. Through a leaf it is not superseded, whatever
// the instance: a leaf names the connection itself, and a nonce that a Node signed for
// it once it can show for ever (Z6). A Node that really moved is silent there, or gone.
func (l *live) Elsewhere(now time.Time, id memberID, leaf string) (since time.Time, alive bool) {
	n := l.nodes[id]
	if n == nil {
		return time.Time{}, false
	}
	for _, s := range n.sessions {
		if s.connected && s.leaf != leaf && !s.evicted && now.Sub(s.heard) < l.bound {
			return s.since, true
		}
	}
	return time.Time{}, false
}

// LeafOpened is an agent's word that a session's connection stands.
func (l *live) LeafOpened(now time.Time, s subjects.Session, leaf, instance string) []effect {
	n := l.node(nodeID(s))
	if n.sessions[s.Gen] == nil { // admitted by another session service, or before this one began
		n.sessions[s.Gen] = &liveSession{instance: instance, since: now}
		n.highest = max(n.highest, s.Gen)
	}
	server := l.leaves[leafID(s.Edge, leaf)]
	l.AtLeaf(s, leaf, server)
	return l.Connected(now, s, connID{Server: server}, instance)
}

// LeafEnded is an agent's word that a session's connection has ended.
func (l *live) LeafEnded(s subjects.Session, leaf string) {
	if n := l.nodes[nodeID(s)]; n != nil {
		if session := n.sessions[s.Gen]; session != nil && session.leaf == leaf {
			delete(n.sessions, s.Gen)
		}
	}
}

// LeafBeat says which process is the leaf: what was at another one has ended.
func (l *live) LeafBeat(id memberID, server string) []effect {
	if l.leaves[id] == server {
		return nil
	}
	l.leaves[id] = server
	return l.dropAtLeaf(id, func(s *liveSession) bool { return s.conn.Server != server }, reasonLeafRestarted)
}

// leafRevoked ends what is at a leaf whose link is about to be cut for good.
func (l *live) leafRevoked(id memberID) []effect {
	if id.Role != identity.RoleLeaf {
		return nil
	}
	return l.dropAtLeaf(id, func(*liveSession) bool { return true }, string(refusedRevoked))
}

func (l *live) dropAtLeaf(id memberID, which func(*liveSession) bool, reason string) (out []effect) {
	for node, n := range l.nodes {
		if node.Edge != id.Edge {
			continue
		}
		for _, gen := range slices.Sorted(maps.Keys(n.sessions)) {
			if s := n.sessions[gen]; s.leaf == id.Name && which(s) {
				delete(n.sessions, gen)
				out = append(out, effect{
					kind: tellClosed, reason: reason,
					session: subjects.Session{Edge: node.Edge, Node: node.Name, Gen: gen},
				})
			}
		}
	}
	return out
}

// Insist tells a session at a leaf once more that it must go: it is still heard,
// so the first word was lost with the link.
func (l *live) Insist(now time.Time, s subjects.Session) []effect {
	n := l.nodes[nodeID(s)]
	if n == nil {
		return nil
	}
	session := n.sessions[s.Gen]
	if session == nil || session.leaf == "" || !session.evicted || now.Sub(session.told) < insistInterval {
		return nil
	}
	session.told = now
	return []effect{{kind: evict, session: s, conn: session.conn, leaf: session.leaf, reason: session.why}}
}
