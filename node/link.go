package node

import (
	"context"
	"errors"
	"time"

	"github.com/iop-fabric/iop/internal/bus"
	"github.com/iop-fabric/iop/internal/identity"
	"github.com/iop-fabric/iop/node/session"
	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/wire"
	"github.com/iop-fabric/iop/wire/iopv1"
)

// signal is a message of the session's own, for the supervisor.
type signal struct {
	link *link
	verb subjects.Verb
	data []byte
}

// link is one session: its connection and its tunnels.
type link struct {
	id      subjects.Session
	conn    bus.Conn
	cancel  context.CancelCauseFunc
	ctx     context.Context //nolint:containedctx // the session's life (W8)
	streams *streams
	idle    chan struct{} // told when draining and nothing is left
	out     chan outgoing // to the send loop
	spoke   time.Time     // the callback's alone: when the supervisor last heard that Edge speaks

	// The supervisor's alone.
	nonce    []byte
	request  []byte // the RegisterRequest; the same bytes each time (R1)
	answer   *iopv1.RegisterResponse
	instance string // Edge's
	beats    uint64
}

// outgoing is a message of the session's own, on its way out.
type outgoing struct {
	verb subjects.Verb
	data []byte
}

// outgoingBuffer holds what a session says of itself while its socket takes
// nothing: heartbeats, and what is asked again. More of that is worth nothing.
const outgoingBuffer = 16

// newLink subscribes once to all the session may be told, and starts its send loops.
func (n *Node) newLink(ctx context.Context, id subjects.Session, conn bus.Conn) (*link, error) {
	ctx, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	l := &link{id: id, conn: conn, ctx: ctx, cancel: cancel, idle: make(chan struct{}, 1), out: make(chan outgoing, outgoingBuffer), nonce: identity.NewNonce()}
	l.streams = newStreams(ctx, n.host, goroutines{}, id, conn, l.idle)
	if _, err := conn.Subscribe(id.DownWildcard(), func(m bus.Msg) { n.receive(l, m) }); err != nil {
		cancel(err)
		return nil, err
	}
	n.children.Go(l.streams.loop)
	n.children.Go(l.publish)
	return l, nil
}

// publish is the one that waits while the socket takes nothing: the supervisor
// must not, or it would notice a dead broker no sooner than the write deadline.
func (l *link) publish() {
	for {
		select {
		case o := <-l.out:
			_ = l.conn.Publish(l.id.Up(o.verb, ""), o.data) // an error is the connection's end
		case <-l.ctx.Done():
			return
		}
	}
}

// receive is the callback of the session's one subscription. It only hands on.
func (n *Node) receive(l *link, m bus.Msg) {
	msg, err := subjects.ParseDown(m.Subject)
	if err != nil || msg.Session != l.id || wire.Redirected(m.Data) {
		n.metrics.dropped[dropUnknown].Inc()
		return
	}
	switch msg.Verb {
	case subjects.Tunnel:
		l.streams.request(msg.Run, m.Data)
	case subjects.Ack:
		l.streams.acks(m.Data)
	case subjects.Body:
		l.streams.bodyFrame(msg.Run, m.Data)
	case subjects.Cancel:
		l.streams.cancelRun(msg.Run, m.Data)
	case subjects.SessionVerb, subjects.Register, subjects.Ready, subjects.Heartbeat, subjects.Fence, subjects.Renew:
		n.tell(signal{l, msg.Verb, m.Data})
		return
	default: // what we named no feature for (M5)
		n.metrics.dropped[dropUnknown].Inc()
		return
	}
	// Edge lives, though its heartbeats stand behind what fills a slow link.
	if now := time.Now(); now.Sub(l.spoke) >= spokeEvery {
		l.spoke = now
		n.tell(signal{l, msg.Verb, nil})
	}
}

// spokeEvery is how often the supervisor hears that Edge speaks of work: the
// shortest heartbeat interval.
const spokeEvery = 50 * time.Millisecond

func (n *Node) tell(s signal) {
	select {
	case n.inbox <- s:
	default:
		n.metrics.dropped[dropFlood].Inc()
	}
}

// end cancels every tunnel under the session and closes its connection.
func (n *Node) end(l *link) {
	l.cancel(errSessionEnded)
	n.children.Go(l.conn.Close) // it may wait for a dead peer; the next dial must not
}

// event reads what a message of the session tells the core. ok is false for
// what does not decode.
func (l *link) event(n *Node, verb subjects.Verb, data []byte) (ev session.Event, ok bool) {
	ev.Gen = l.id.Gen
	var err error
	switch verb {
	case subjects.SessionVerb:
		var g iopv1.SessionGrant
		if err = g.UnmarshalVT(data); err != nil {
			break
		}
		ev.Kind, ev.OK, ev.Reason = session.Granted, len(g.GetToken()) > 0, session.Reason(g.GetReason())
		if ev.OK && l.request == nil {
			if l.request, err = l.prove(n, g.GetToken()); err != nil {
				return session.Event{Kind: session.LocalFault, Err: errors.Join(ErrLocal, err)}, true
			}
		}
	case subjects.Register:
		var a iopv1.RegisterResponse
		if err = a.UnmarshalVT(data); err != nil {
			break
		}
		ev.Kind, ev.Reason = session.RegisterAnswered, session.Reason(a.GetReason())
		// Another node's answer, or one in a protocol we do not speak, accepts nothing.
		ev.OK = a.GetAccepted() && a.GetNodeId() == l.id.Node && a.GetProtocol() == wire.ProtocolVersion && a.GetEdgeInstance() != ""
		ev.Instance = a.GetEdgeInstance()
		ev.Interval = time.Duration(a.GetHeartbeatIntervalMs()) * time.Millisecond
		ev.Bound = time.Duration(a.GetHeartbeatBoundMs()) * time.Millisecond
		l.streams.bodyBound.Store(int64(ev.Bound))
		if l.answer == nil && ev.OK {
			l.answer, l.instance = &a, a.GetEdgeInstance()
		}
	case subjects.Ready:
		var a iopv1.NodeReadyResponse
		if err = a.UnmarshalVT(data); err != nil {
			break
		}
		ev.Kind, ev.OK, ev.Reason = session.ReadyAnswered, a.GetReady(), session.Reason(a.GetReason())
	case subjects.Heartbeat:
		var h iopv1.Heartbeat
		if err = h.UnmarshalVT(data); err != nil {
			break
		}
		ev.Kind, ev.Instance = session.HeartbeatReceived, h.GetEdgeInstance()
	case subjects.Fence:
		var f iopv1.Fence
		if err = f.UnmarshalVT(data); err != nil {
			break
		}
		ev.Kind, ev.Reason = session.FenceReceived, session.Reason(f.GetReason())
	case subjects.Tunnel, subjects.Ack, subjects.Body, subjects.Cancel:
		ev.Kind = session.EdgeSpoke
	default: // the other verbs tell the core nothing
	}
	return ev, err == nil
}

// prove makes the register request: the token, and both of our signatures (G3).
func (l *link) prove(n *Node, token []byte) ([]byte, error) {
	id := n.keys.used
	r := &iopv1.RegisterRequest{
		NodeId: l.id.Node, SessionToken: token, Nonce: l.nonce, RecipientKey: id.Curve.Public(),
		InstanceId: n.deps.InstanceID, Software: n.deps.Software,
		ProtocolMin: wire.ProtocolVersion, ProtocolMax: wire.ProtocolVersion,
	}
	if err := identity.SignRegister(id.Certificate, id.User, r); err != nil {
		return nil, err
	}
	return r.MarshalVT()
}

// message is anything of iopv1.
type message interface{ MarshalVT() ([]byte, error) }

// send hands one message of the session to the send loop. One that finds no room
// is lost, as it would be with the connection; what matters is asked again.
func (l *link) send(verb subjects.Verb, m message) {
	if data, err := m.MarshalVT(); err == nil {
		l.sendData(verb, data)
	}
}

func (l *link) sendData(verb subjects.Verb, data []byte) {
	select {
	case l.out <- outgoing{verb, data}:
	default:
	}
}

func (l *link) heartbeat(draining bool) {
	l.beats++
	l.send(subjects.Heartbeat, &iopv1.Heartbeat{
		Count: l.beats, EdgeInstance: l.instance, Draining: draining,
		OpenAttempts:  uint32(l.streams.count()), //nolint:gosec // bounded by maxStreams
		SentUnixNanos: time.Now().UnixNano(),
	})
}
