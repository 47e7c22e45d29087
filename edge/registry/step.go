package registry

import (
	"slices"
	"time"

	"github.com/iop-fabric/iop/wire"
)

// Step takes one event, and appends what must follow to out.
func (r *Registry) Step(now time.Time, ev Event, out []Effect) []Effect {
	switch e := ev.(type) {
	case Admitted:
		return r.admitted(now, e, out)
	case Closed:
		return r.closed(now, e, out)
	case RegisterReceived:
		return r.register(now, e, out)
	case ReadyReceived:
		return r.ready(now, e, out)
	case ReadyAckSent:
		return r.ackSent(now, e, out)
	case ReadyAckFailed:
		if n := r.current(e.Node, e.Gen); n != nil && n.state == Acking {
			r.become(n, Pending, now) // the claim's bound runs on
		}
		return out
	case HeartbeatReceived:
		return r.heartbeat(now, e, out)
	case MessageReceived:
		n := r.current(e.Node, e.Gen)
		if n == nil || !n.state.Owns() {
			return r.tellOver(now, e.Node, e.Gen, out)
		}
		if n.state == Ready {
			n.heard = now
		}
		return out
	case Misbehaved:
		if n := r.current(e.Node, e.Gen); n != nil && n.state.Owns() {
			return r.evict(now, e.Node, n, Misbehaving, out)
		}
		return r.fence(now, e.Node, e.Gen, Misbehaving, out) // it owns nothing, and floods all the same
	case DeadlinePassed:
		return r.deadlinePassed(now, out)
	case ConfigChanged:
		return r.configChanged(now, e, out)
	case Stopping:
		r.stopping = true
		return out
	case Stopped:
		r.stopping = true
		for _, name := range r.names() {
			if n := r.nodes[name]; n.state.Owns() {
				out = r.evict(now, name, n, EdgeStopping, out)
			}
		}
		return out
	}
	panic("BUG: registry: unknown event")
}

// become is the one place that sets a node's state, and what the state owns.
func (r *Registry) become(n *node, s State, now time.Time) {
	switch s {
	case Ready:
		n.heard, n.due = now, time.Time{}
		r.dueBy(now.Add(r.heartbeatBound))
	case Pending:
		if n.state != Acking { // a failed acknowledgement does not extend the claim
			n.due = now.Add(r.pendingBound)
		}
		r.dueBy(n.due)
	case Gone, AdmittedState:
		n.heard, n.due, n.draining = time.Time{}, time.Time{}, false
	case Absent, Acking: // what the record holds stays
	}
	n.state, n.since = s, now
}

// dueBy moves the next deadline forward to at if it would be later.
func (r *Registry) dueBy(at time.Time) {
	if r.next.IsZero() || at.Before(r.next) {
		r.next = at
	}
}

// current returns the record of the session, if its generation is the highest.
func (r *Registry) current(name string, gen uint64) *node {
	if n := r.nodes[name]; n != nil && n.gen == gen {
		return n
	}
	return nil
}

// supersede makes gen, which is higher than any seen, the node's generation. The
// older owner is over before the newer one is anything (B6, R9).
func (r *Registry) supersede(now time.Time, name string, gen uint64, out []Effect) (*node, []Effect) {
	n := r.nodes[name]
	if n == nil {
		n = &node{}
		r.nodes[name] = n
	}
	if n.state.Owns() || n.state == AdmittedState {
		out = r.end(now, name, n, Superseded, out)
		out = r.fence(now, name, n.gen, Superseded, out)
	}
	*n = node{gen: gen}
	r.become(n, AdmittedState, now)
	return n, out
}

// end ends the node's session: a ready one is fenced, a pending one loses its
// claim and nothing is said about it (F2, R10).
func (r *Registry) end(now time.Time, name string, n *node, why Reason, out []Effect) []Effect {
	wasReady := n.state == Ready
	r.become(n, Gone, now)
	if wasReady {
		out = append(out, FenceGeneration{name, n.gen, why}, NodeDisconnected{name, n.gen, why})
	}
	return out
}

// evict ends a session that may be alive: it is told, and closed (F10).
func (r *Registry) evict(now time.Time, name string, n *node, why Reason, out []Effect) []Effect {
	out = r.end(now, name, n, why, out)
	out = r.fence(now, name, n.gen, why, out)
	return append(out, CloseSession{name, n.gen, why})
}

func (r *Registry) admitted(now time.Time, e Admitted, out []Effect) []Effect {
	if n := r.nodes[e.Node]; n != nil && e.Gen <= n.gen {
		return out
	}
	n, out := r.supersede(now, e.Node, e.Gen, out)
	n.instance = clip(e.Instance)
	return out
}

func (r *Registry) closed(now time.Time, e Closed, out []Effect) []Effect {
	n := r.nodes[e.Node]
	if n == nil || e.Gen > n.gen {
		// Its admission was lost on the way, and its registration may still come
		// (R10): remember that it is over.
		n, out = r.supersede(now, e.Node, e.Gen, out)
	}
	if e.Gen < n.gen || n.state == Gone {
		return out
	}
	return r.end(now, e.Node, n, SessionClosed, out)
}

func (r *Registry) register(now time.Time, e RegisterReceived, out []Effect) []Effect {
	n := r.nodes[e.Node]
	refuse := func(why Reason, class wire.Class) []Effect {
		return append(out, SendRegisterAnswer{Node: e.Node, Gen: e.Gen, Reason: why, Class: class})
	}
	switch {
	case n != nil && e.Gen < n.gen:
		return refuse(Superseded, wire.SessionEnded)
	case n != nil && e.Gen == n.gen && n.state == Gone:
		return refuse(SessionOver, wire.SessionEnded)
	case e.PayloadNode != e.Node:
		return refuse(WrongNode, wire.Invalid)
	case e.Verified != nil:
		class := wire.ClassOf(e.Verified)
		if class == wire.Internal { // the check gave it none
			class = wire.Credential
		}
		return refuse(Unproved, class)
	case n != nil && e.Gen == n.gen && n.state.Owns():
		return append(out, SendRegisterAnswer{
			Node: e.Node, Gen: e.Gen, Accepted: true, Repeat: true, Protocol: n.protocol,
		})
	case r.stopping:
		return refuse(EdgeStopping, wire.Draining)
	case !r.configured[e.Node]:
		return refuse(UnknownNode, wire.Invalid)
	case e.ProtocolMin > wire.ProtocolVersion || e.ProtocolMax < wire.ProtocolVersion:
		return refuse(WrongProtocol, wire.Protocol)
	}
	if n == nil || e.Gen > n.gen {
		n, out = r.supersede(now, e.Node, e.Gen, out)
	}
	n.instance, n.software, n.features = clip(e.Instance), clip(e.Software), clipAll(e.Features)
	n.protocol = wire.ProtocolVersion
	r.become(n, Pending, now)
	return append(out, SendRegisterAnswer{Node: e.Node, Gen: e.Gen, Accepted: true, Protocol: n.protocol})
}

func (r *Registry) ready(now time.Time, e ReadyReceived, out []Effect) []Effect {
	refuse := func(why Reason, class wire.Class) []Effect {
		return append(out, SendReadyAnswer{Node: e.Node, Gen: e.Gen, Reason: why, Class: class})
	}
	n := r.nodes[e.Node]
	switch {
	case n == nil || e.Gen > n.gen:
		return refuse(NotRegistered, wire.SessionEnded)
	case e.Gen < n.gen:
		return refuse(Superseded, wire.SessionEnded)
	case n.state == AdmittedState:
		return refuse(NotRegistered, wire.SessionEnded)
	case n.state == Gone:
		return refuse(SessionOver, wire.SessionEnded)
	case e.PayloadNode != e.Node:
		return refuse(WrongNode, wire.Invalid)
	case n.state == Acking:
		return out // its answer is on the way out already
	case n.state == Pending && r.stopping:
		return refuse(EdgeStopping, wire.Draining)
	case n.state == Pending:
		r.become(n, Acking, now)
	}
	return append(out, SendReadyAnswer{Node: e.Node, Gen: e.Gen, Ready: true})
}

func (r *Registry) ackSent(now time.Time, e ReadyAckSent, out []Effect) []Effect {
	n := r.current(e.Node, e.Gen)
	if n == nil || n.state != Acking {
		return out
	}
	r.become(n, Ready, now)
	if n.draining { // before Activate: a node that stops already gets nothing
		out = append(out, Draining{e.Node, e.Gen, true})
	}
	return append(out, Activate(e), NodeConnected(e))
}

func (r *Registry) heartbeat(now time.Time, e HeartbeatReceived, out []Effect) []Effect {
	n := r.current(e.Node, e.Gen)
	if n == nil || !n.state.Owns() {
		return r.tellOver(now, e.Node, e.Gen, out)
	}
	changed := n.draining != e.Draining
	n.draining = e.Draining
	if n.state != Ready {
		return out // told when it is ready; its claim has its own bound
	}
	n.heard = now
	if changed {
		out = append(out, Draining{e.Node, e.Gen, e.Draining})
	}
	return out
}

// deadlinePassed ends what is out of time, and finds the next deadline.
func (r *Registry) deadlinePassed(now time.Time, out []Effect) []Effect {
	r.next = time.Time{}
	for _, name := range r.names() {
		n := r.nodes[name]
		switch n.state {
		case Ready:
			if at := n.heard.Add(r.heartbeatBound); at.After(now) {
				r.dueBy(at)
			} else {
				out = r.evict(now, name, n, HeartbeatMissed, out)
			}
		case Pending, Acking:
			if n.due.After(now) {
				r.dueBy(n.due)
			} else {
				out = r.evict(now, name, n, PendingTooLong, out)
			}
		case Absent, AdmittedState, Gone: // owns nothing, so nothing is due
		}
	}
	return out
}

func (r *Registry) configChanged(now time.Time, e ConfigChanged, out []Effect) []Effect {
	r.configured = make(map[string]bool, len(e.Nodes))
	for _, name := range e.Nodes {
		r.configured[name] = true
	}
	for _, name := range r.names() {
		// The record stays: its generation must not own again.
		if n := r.nodes[name]; !r.configured[name] && n.state.Owns() {
			out = r.evict(now, name, n, Removed, out)
		}
	}
	return out
}

// names lists the nodes in a fixed order, so that effects come in one.
func (r *Registry) names() []string {
	names := make([]string, 0, len(r.nodes))
	for name := range r.nodes {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// tellOver answers who speaks without being the owner (F10). It changes nothing
// but the limiter.
func (r *Registry) tellOver(now time.Time, name string, gen uint64, out []Effect) []Effect {
	why := NotRegistered
	if n := r.nodes[name]; n != nil {
		switch {
		case gen < n.gen:
			why = Superseded
		case gen == n.gen && n.state == Gone:
			why = SessionOver
		}
	}
	return r.fence(now, name, gen, why, out)
}

// fence tells a session that it is over, within the limiter's bound. A flood is told of
// at once, for the broker closes the session by it: the class says so. That event comes
// more and more seldom by itself.
func (r *Registry) fence(now time.Time, name string, gen uint64, why Reason, out []Effect) []Effect {
	s, class := session{name, gen}, wire.SessionEnded
	switch {
	case why == Misbehaving:
		class = wire.Protocol
	case !r.fences.allow(now, s):
		return out
	}
	r.fences.told(now, s)
	return append(out, SendFence{name, gen, why, class})
}
