package edge

import (
	"context"
	"log/slog"
	"slices"
	"time"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/edge/pool"
	"github.com/iop-fabric/iop/edge/registry"
	"github.com/iop-fabric/iop/internal/bus"
	"github.com/iop-fabric/iop/internal/identity"
	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/wire"
	"github.com/iop-fabric/iop/wire/iopv1"
)

// verifiers check registrations beside each other: a proof costs about a third
// of a millisecond, and a thousand nodes may come at once.
const (
	verifiers   = 4
	verifyQueue = 4096
)

// registration is what one session's registration is answered with.
type registration struct {
	gen    uint64
	nonce  []byte
	answer []byte // the accepted answer, for a repeat (R1)
	// until is the end of the certificate that it was proved with.
	until time.Time
}

type register struct {
	session subjects.Session
	data    []byte
}

// onUp receives everything nodes send, on the bus's one goroutine for it. It
// never blocks (U3).
func (e *Edge) onUp(m bus.Msg) {
	if wire.Redirected(m.Data) {
		e.metrics.dropped.Inc()
		return
	}
	msg, err := subjects.ParseUp(m.Subject)
	if err != nil || len(m.Data) > wire.MaxMessage {
		e.metrics.dropped.Inc()
		if s, err := subjects.UpOf(m.Subject); err == nil { // it is a message all the same
			e.charge(s)
		}
		return
	}
	s := msg.Session
	live := e.loop.isLive(s.Node, s.Gen)
	if live != nil {
		switch msg.Verb {
		case subjects.Frame: // dispatch bounds these by credit
			e.speaks(s, live)
			e.dispatch.Frame(msg, m.Data)
			return
		case subjects.Ack:
			e.speaks(s, live)
			e.dispatch.Ack(msg, m.Data)
			return
		default:
		}
	}
	if !e.charge(s) {
		e.metrics.dropped.Inc()
		return
	}
	switch msg.Verb {
	case subjects.Frame, subjects.Ack, subjects.Event, subjects.Result:
		if live == nil {
			// F5, F10: it changes nothing, and its sender is told.
			e.metrics.stale.Inc()
			e.fromPeer(registry.MessageReceived{Node: s.Node, Gen: s.Gen})
		} // else runs and commands: no feature of this protocol version asks for them
	case subjects.Heartbeat:
		var hb iopv1.Heartbeat
		if hb.UnmarshalVT(m.Data) == nil {
			e.fromPeer(registry.HeartbeatReceived{Node: s.Node, Gen: s.Gen, Draining: hb.GetDraining()})
		}
	case subjects.Register:
		select {
		case e.verify <- register{session: s, data: m.Data}:
		default:
			e.metrics.dropped.Inc()
		}
	case subjects.Ready:
		var r iopv1.NodeReadyRequest
		if r.UnmarshalVT(m.Data) == nil {
			e.fromPeer(registry.ReadyReceived{Node: s.Node, Gen: s.Gen, PayloadNode: r.GetNodeId()})
		}
	default: // up.session is the session service's
	}
}

// speaks tells the loop once an interval that a session does: on a link that is full
// its heartbeats come late.
func (e *Edge) speaks(s subjects.Session, live *liveSession) {
	if now := e.now(); now.Sub(live.spoke) >= e.cfg.HeartbeatInterval {
		live.spoke = now
		e.fromPeer(registry.MessageReceived{Node: s.Node, Gen: s.Gen})
	}
}

// charge takes one message off the session's budget; false: it is spent.
func (e *Edge) charge(s subjects.Session) bool {
	ok, misbehaved := e.budgets.take(e.now(), s.Node, s.Gen)
	if misbehaved {
		e.misbehaved(s.Node, s.Gen, "flood")
	}
	return ok
}

func (e *Edge) fromPeer(ev registry.Event) {
	if !e.loop.in.put(item{reg: ev}, true) {
		e.metrics.dropped.Inc()
	}
}

// onCtl receives the session service's notices (B6, B7).
func (e *Edge) onCtl(m bus.Msg) {
	_, verb, err := subjects.ParseCtl(m.Subject)
	var n iopv1.SessionNotice
	if err != nil || wire.Redirected(m.Data) || n.UnmarshalVT(m.Data) != nil || !subjects.ValidName(n.GetNodeId()) {
		return
	}
	if verb == subjects.Changed && n.GetReason() == noticeRevoked {
		e.loop.in.put(item{do: func() { e.leave(n.GetNodeId()) }}, false)
		return
	}
	if n.GetGeneration() == 0 {
		return
	}
	var ev registry.Event
	switch verb {
	case subjects.Admitted:
		ev = registry.Admitted{Node: n.GetNodeId(), Gen: n.GetGeneration(), Instance: n.GetInstanceId()}
	case subjects.Closed:
		ev = registry.Closed{Node: n.GetNodeId(), Gen: n.GetGeneration(), Reason: n.GetReason()}
	default:
		return
	}
	e.loop.in.put(item{reg: ev}, false)
}

func (e *Edge) onNoResponders(m bus.Msg) {
	if !m.NoResponders {
		return
	}
	if run, err := subjects.ParseNoResponders(m.Subject); err == nil {
		e.dispatch.NoResponders(run)
	}
}

// verifyRegistrations checks proofs until ctx ends; the verdict goes to the
// loop with the request (G3, L8).
func (e *Edge) verifyRegistrations(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case r := <-e.verify:
			var req iopv1.RegisterRequest
			if err := req.UnmarshalVT(r.data); err != nil {
				e.metrics.dropped.Inc()
				continue
			}
			verdict := e.verifyRegister(r.session, &req)
			if verdict != nil {
				e.log.LogAttrs(ctx, slog.LevelWarn, eventNodeRefused, slog.String("node", r.session.Node),
					slog.Uint64("generation", r.session.Gen), slog.String("reason", verdict.Error()))
			}
			ev := registry.RegisterReceived{
				Node: r.session.Node, Gen: r.session.Gen, PayloadNode: req.GetNodeId(), Verified: verdict,
				ProtocolMin: req.GetProtocolMin(), ProtocolMax: req.GetProtocolMax(),
				Features: req.GetFeatures(), Instance: req.GetInstanceId(), Software: clip(req.GetSoftware(), 128),
			}
			regis := &registration{gen: r.session.Gen, nonce: req.GetNonce()}
			if verdict == nil {
				regis.until = expiry(req.GetCertificateChain())
			}
			if !e.loop.in.put(item{reg: ev, regis: regis}, true) {
				e.metrics.dropped.Inc()
			}
		}
	}
}

func (e *Edge) verifyRegister(s subjects.Session, req *iopv1.RegisterRequest) error {
	var err error
	pool := e.trust.Load().Pool()
	for _, issuer := range *e.issuers.Load() {
		if err = identity.VerifyRegister(pool, issuer, s.Edge, s.Node, s.Gen, req); err == nil {
			return nil
		}
	}
	// The peer may know that its proof failed; how exactly is our log's.
	return wire.Errorf(wire.Credential, "the registration's proof was refused: %w", err)
}

// ---- the loop's port: called on the loop's goroutine alone ----

func (e *Edge) sendRegisterAnswer(a registry.SendRegisterAnswer, r *registration) {
	s := subjects.Session{Edge: e.cfg.Name, Node: a.Node, Gen: a.Gen}
	if a.Accepted {
		if known := e.registered[a.Node]; a.Repeat && known != nil && known.gen == a.Gen {
			e.tell(s, subjects.Register, known.answer)
			return
		}
	}
	resp := &iopv1.RegisterResponse{Accepted: a.Accepted, Reason: string(a.Reason), ErrorClass: string(a.Class)}
	if a.Accepted {
		if r == nil {
			return // a repeat whose answer is gone with an older session
		}
		payload, err := nodePayload(&e.cfg, a.Node).MarshalVT()
		if err != nil {
			e.log.Error(eventNodeRefused, slog.String("node", a.Node), slog.String("reason", err.Error()))
			return
		}
		signed, err := identity.SignConfig(e.cert.Load(), payload, r.nonce, firstRevision)
		if err != nil {
			e.log.Error(eventNodeRefused, slog.String("node", a.Node), slog.String("reason", err.Error()))
			return
		}
		resp.NodeId, resp.Config, resp.Protocol = a.Node, signed, a.Protocol
		resp.EdgeInstance = e.instance
		resp.HeartbeatIntervalMs = uint32(e.cfg.HeartbeatInterval.Milliseconds())
		resp.HeartbeatBoundMs = uint32(e.cfg.HeartbeatBound.Milliseconds())
	}
	data, err := resp.MarshalVT()
	if err != nil {
		return
	}
	if a.Accepted {
		r.answer = data
		e.registered[a.Node] = r
		e.log.LogAttrs(context.Background(), slog.LevelInfo, eventNodeRegistered,
			slog.String("node", a.Node), slog.Uint64("generation", a.Gen))
	} else {
		e.log.LogAttrs(context.Background(), slog.LevelWarn, eventNodeRefused,
			slog.String("node", a.Node), slog.Uint64("generation", a.Gen), slog.String("reason", string(a.Reason)))
	}
	e.tell(s, subjects.Register, data)
}

func (e *Edge) sendReadyAnswer(a registry.SendReadyAnswer) error {
	resp := &iopv1.NodeReadyResponse{Ready: a.Ready, Reason: string(a.Reason), ErrorClass: string(a.Class)}
	data, err := resp.MarshalVT()
	if err != nil {
		return err
	}
	return e.bus.Publish(subjects.Session{Edge: e.cfg.Name, Node: a.Node, Gen: a.Gen}.Down(subjects.Ready, ""), data)
}

func (e *Edge) sendFence(f registry.SendFence) {
	data, err := (&iopv1.Fence{Reason: string(f.Reason), ErrorClass: string(f.Class)}).MarshalVT()
	if err != nil {
		return
	}
	e.log.LogAttrs(context.Background(), slog.LevelInfo, eventNodeFenced,
		slog.String("node", f.Node), slog.Uint64("generation", f.Gen), slog.String("reason", string(f.Reason)))
	e.tell(subjects.Session{Edge: e.cfg.Name, Node: f.Node, Gen: f.Gen}, subjects.Fence, data)
}

func (e *Edge) sendHeartbeat(node string, gen uint64) {
	e.beats++
	data, err := (&iopv1.Heartbeat{Count: e.beats, EdgeInstance: e.instance, SentUnixNanos: e.now().UnixNano()}).MarshalVT()
	if err == nil {
		e.tell(subjects.Session{Edge: e.cfg.Name, Node: node, Gen: gen}, subjects.Heartbeat, data)
	}
}

// tell publishes to a session. The loop does it itself, so that what a session
// reads keeps the loop's order; the connection's write deadline bounds the wait.
func (e *Edge) tell(s subjects.Session, v subjects.Verb, data []byte) {
	if err := e.bus.Publish(s.Down(v, ""), data); err != nil {
		e.metrics.busErrors.Inc() // the peer asks again, or is fenced
	}
}

func (e *Edge) connected(node string, gen uint64) {
	e.log.LogAttrs(context.Background(), slog.LevelInfo, eventNodeConnected,
		slog.String("node", node), slog.Uint64("generation", gen))
	e.discovery.start(node, gen)
}

func (e *Edge) disconnected(node string, gen uint64, cause registry.Reason) {
	level := slog.LevelWarn
	if cause == registry.EdgeStopping {
		level = slog.LevelInfo // our own doing
	}
	e.log.LogAttrs(context.Background(), level, eventNodeDisconnected,
		slog.String("node", node), slog.Uint64("generation", gen), slog.String("reason", string(cause)))
	if r := e.registered[node]; r != nil && r.gen == gen {
		delete(e.registered, node)
	}
	e.discovery.stop(node, gen)
}

// takeIn adds invited nodes to this Edge's own copy of the configuration, which the
// loop alone reads once it runs.
func (e *Edge) takeIn(proved []string) (names []string, cfg pool.Config, ok bool) {
	if !e.cfg.TakesInvited() {
		return nil, cfg, false
	}
	known := map[string]bool{}
	for _, n := range e.cfg.Nodes {
		known[n.Name] = true
		names = append(names, n.Name)
	}
	nodes := slices.Clone(e.cfg.Nodes)
	for _, name := range proved {
		if known[name] {
			continue
		}
		known[name] = true
		names, nodes = append(names, name), append(nodes, e.cfg.InvitedNode(name))
		e.log.LogAttrs(context.Background(), slog.LevelInfo, eventNodeTakenIn, slog.String("node", name))
	}
	if len(nodes) == len(e.cfg.Nodes) {
		return nil, cfg, false
	}
	e.cfg.Nodes = nodes
	return names, poolConfig(&e.cfg), true
}

// noticeRevoked is the reason of the session service's word that a node was revoked.
const noticeRevoked = "revoked"

// leave forgets a node that was taken in, and is revoked now. One of the configuration
// stays: the operator has named it.
func (e *Edge) leave(name string) {
	i := slices.IndexFunc(e.cfg.Nodes, func(n configs.EdgeNode) bool { return n.Name == name })
	if i < 0 || e.given[name] {
		return
	}
	e.cfg.Nodes = slices.Delete(slices.Clone(e.cfg.Nodes), i, i+1)
	names := make([]string, len(e.cfg.Nodes))
	for i, n := range e.cfg.Nodes {
		names[i] = n.Name
	}
	e.log.LogAttrs(context.Background(), slog.LevelInfo, eventNodeLeft, slog.String("node", name))
	now := e.now()
	e.loop.stepRegistry(now, registry.ConfigChanged{Nodes: names}, nil)
	e.loop.stepPool(now, pool.SetConfig(poolConfig(&e.cfg)))
}

func (e *Edge) endAttempt(slot pool.Slot, cause string) { e.dispatch.Fenced(slot, cause) }

func clip(s string, n int) string {
	if len(s) > n {
		return s[:n]
	}
	return s
}
