package broker

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strconv"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/identity"
	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/wire"
	"github.com/iop-fabric/iop/wire/iopv1"
)

// The hub's side of leaf brokers: the listener, their callouts, and what their
// agents say.

const (
	leafQueue   = "iop-leaf" // one session service tells the Edge, all keep their books
	leafBacklog = 4096       // words of agents; one that is dropped is said again
)

// leafConfig are the parts of the server's configuration that leaves need.
type leafConfig struct{ exports, imports, listener string }

func leafText(cfg configs.Broker) (leafConfig, error) {
	if cfg.LeafListen == "" {
		return leafConfig{}, nil
	}
	host, port, err := splitListen(cfg.LeafListen)
	if err != nil {
		return leafConfig{}, fmt.Errorf("broker: leaf_listen: %w", err)
	}
	if port == 0 {
		port = server.RANDOM_PORT
	}
	callouts := strconv.Quote(subjects.CalloutEverywhere())
	return leafConfig{
		exports: fmt.Sprintf(",\n    exports: [ { service: %s, accounts: [%s] } ]", callouts, accountFabric),
		imports: fmt.Sprintf("\n    imports: [ { service: { account: %s, subject: %s } } ]", accountAuth, callouts),
		listener: fmt.Sprintf(`leafnodes {
  listen: %s
  no_advertise: true
  authorization { timeout: 15 }
  tls {
    cert_file: %s
    key_file: %s
    ca_file: %s
    verify: true
    min_version: "1.3"
    handshake_first: true
    timeout: 15
  }
}
`, strconv.Quote(net.JoinHostPort(host, strconv.Itoa(port))),
			strconv.Quote(cfg.TLS.Certificate), strconv.Quote(cfg.TLS.Key), strconv.Quote(cfg.TLS.CA)),
	}, nil
}

// errStarting refuses a leaf's handshake while nobody would answer its callout.
var errStarting = errors.New("the session service is not there yet")

// holdLeaves lets no leaf in before the broker is ready: the server opens that
// listener by itself, and a leaf that came early would wait for a callout that
// nobody heard. Refused, it is back within half a second.
func (b *Broker) holdLeaves(opts *server.Options) {
	if opts.LeafNode.Port == 0 {
		return
	}
	serve := opts.LeafNode.TLSConfig.GetConfigForClient
	opts.LeafNode.TLSConfig.GetConfigForClient = func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
		if !b.isReady() {
			return nil, errStarting
		}
		return serve(hello)
	}
}

// leafURL is where leaves dial, once the server has started.
func leafURL(opts *server.Options) string {
	if opts.LeafNode.Port == 0 {
		return ""
	}
	host := opts.LeafNode.Host
	if ip := net.ParseIP(host); ip != nil && ip.IsUnspecified() {
		host = "127.0.0.1"
	}
	return "tls://" + net.JoinHostPort(host, strconv.Itoa(opts.LeafNode.Port))
}

// LeafURL is where leaf brokers dial, tls://host:port, after Ready; empty before,
// and where leaf_listen is not set.
func (b *Broker) LeafURL() string {
	if !b.isReady() {
		return ""
	}
	return b.leafURL
}

func (s *service) subscribeLeaves() error {
	if s.b.cfg.LeafListen == "" {
		return nil
	}
	callouts := make(chan *nats.Msg, calloutBacklog)
	if _, err := s.auth.ChanQueueSubscribe(subjects.CalloutEverywhere(), calloutQueue, callouts); err != nil {
		return fmt.Errorf("broker: subscribe callouts of leaves: %w", err)
	}
	for range calloutWorkers {
		s.workers.Go(func() { s.serve(callouts, s.leafCallout) })
	}
	// One channel for both words, and one worker: of a session, opened comes first.
	words := make(chan *nats.Msg, leafBacklog)
	told := make(chan *nats.Msg, leafBacklog)
	for _, verb := range []subjects.Verb{subjects.Opened, subjects.Ended} {
		if _, err := s.fabric.ChanSubscribe(subjects.LeafEverywhere(verb), words); err != nil {
			return fmt.Errorf("broker: subscribe leaves: %w", err)
		}
		if _, err := s.fabric.ChanQueueSubscribe(subjects.LeafEverywhere(verb), leafQueue, told); err != nil {
			return fmt.Errorf("broker: subscribe leaves: %w", err)
		}
	}
	if _, err := s.fabric.Subscribe(subjects.LeafEverywhere(subjects.Beat), s.leafBeat); err != nil {
		return fmt.Errorf("broker: subscribe leaves: %w", err)
	}
	s.workers.Go(func() { s.serve(words, s.leafWord) })
	s.workers.Go(func() { s.serve(told, s.leafTold) })
	return nil
}

// leafCallout answers a callout that a leaf asks for. Who asks is in the subject,
// which the hub's own permissions keep honest; all else a leaf could make up.
func (s *service) leafCallout(m *nats.Msg) {
	edge, leaf, err := subjects.ParseCallout(m.Subject)
	if err != nil {
		s.b.refuse(refusedForged)
		return
	}
	s.decideOn(m, leafID(edge, leaf))
}

// admitLeaf says whether the leaf an applicant comes through may speak for it:
// for Nodes of its own edge, as long as it is registered itself.
func (s *service) admitLeaf(ctx context.Context, a applicant) refusal {
	switch {
	case a.leaf == memberID{}:
		return ""
	case a.id.Role != identity.RoleNode:
		return refusedRole
	case a.id.Edge != a.leaf.Edge:
		return refusedWrongEdge
	}
	m, found, err := s.members.Get(ctx, a.leaf)
	switch {
	case err != nil:
		s.b.log.Warn(eventFault, slog.String("operation", "admit"), slog.String("error", err.Error()))
		return refusedUnavailable
	case !found || m.Revoked:
		return refusedLeaf
	}
	return ""
}

// leafBeat answers an agent, so that it knows the hub is there.
func (s *service) leafBeat(m *nats.Msg) {
	edge, leaf, _, err := subjects.ParseLeaf(m.Subject)
	if err != nil {
		return
	}
	var n iopv1.SessionNotice
	if wire.Redirected(m.Data) || n.UnmarshalVT(m.Data) != nil || len(n.InstanceId) > maxServerID {
		return
	}
	if nkeys.IsValidPublicAccountKey(n.Key) { // before it is answered, and lets Nodes in
		s.b.pins.Store(leafID(edge, leaf), n.Key)
	}
	select { // a beat too many is dropped like a heartbeat
	case s.inbox <- event{kind: evLeafBeat, member: leafID(edge, leaf), conn: connID{Server: n.InstanceId}}:
		s.tellLeaf(edge, leaf, subjects.Here, &iopv1.SessionNotice{InstanceId: s.instance})
	default:
		s.b.metrics.dropped.Inc()
	}
}

// maxServerID is the length of a server's id, a public nkey.
const maxServerID = 56

func (s *service) tellLeaf(edge, leaf string, verb subjects.Verb, n *iopv1.SessionNotice) {
	data, err := n.MarshalVT()
	if err == nil {
		err = s.fabric.Publish(subjects.Leaf(edge, leaf, verb), data)
	}
	if err != nil {
		s.b.log.Warn(eventFault, slog.String("operation", "leaf"), slog.String("error", err.Error()))
	}
}

// leafNotice is what an agent said of a session that its leaf may speak of.
type leafNotice struct {
	leaf       string
	verb       subjects.Verb
	session    subjects.Session
	record     admission
	reason     string
	superseded bool // the session is not its node's newest
}

// leafNotice reads and checks an agent's word. The session's own record says
// through which leaf it came; no leaf can end what is not its own.
func (s *service) leafNotice(m *nats.Msg) (out leafNotice, ok bool) {
	edge, leaf, verb, err := subjects.ParseLeaf(m.Subject)
	if err != nil {
		return out, false
	}
	var n iopv1.SessionNotice
	if wire.Redirected(m.Data) || n.UnmarshalVT(m.Data) != nil || !subjects.ValidName(n.NodeId) || n.Generation == 0 {
		return out, false
	}
	out = leafNotice{
		leaf: leaf, verb: verb, reason: knownReason(n.Reason),
		session: subjects.Session{Edge: edge, Node: n.NodeId, Gen: n.Generation},
	}
	ctx, cancel := context.WithTimeout(s.work, operationBound)
	defer cancel()
	out.record, err = s.generations.Current(ctx, out.session)
	switch {
	case errors.Is(err, errSuperseded):
		out.superseded = true
	case err != nil:
		s.b.log.Warn(eventFault, slog.String("operation", "leaf"), slog.String("error", err.Error()))
		return out, false
	case out.record.Leaf != leaf:
		s.b.metrics.dropped.Inc()
		s.b.log.Warn(eventRefused,
			slog.String("reason", string(refusedLeaf)), slog.String("edge", edge), slog.String("name", leaf), slog.String("node", n.NodeId))
		return out, false
	}
	return out, true
}

// knownReason keeps to the words of closeReasons.
func knownReason(word string) string {
	for _, known := range closeReasons {
		if word == known {
			return word
		}
	}
	return closeReason("")
}

// leafWord keeps the books.
func (s *service) leafWord(m *nats.Msg) {
	n, ok := s.leafNotice(m)
	switch {
	case !ok:
	case n.verb == subjects.Ended:
		s.send(event{kind: evLeafEnded, session: n.session, leaf: n.leaf})
	case !n.superseded:
		s.send(event{kind: evLeafOpened, session: n.session, leaf: n.leaf, instance: n.record.Instance})
	}
}

// leafTold tells the Edge what has ended, the leaf what must go, and the agent
// that it was heard.
func (s *service) leafTold(m *nats.Msg) {
	n, ok := s.leafNotice(m)
	if !ok {
		return
	}
	switch {
	case n.verb == subjects.Opened && n.superseded: // it came late (I4)
		s.fence(n.session, reasonSuperseded)
		s.kickAtLeaf(effect{session: n.session, leaf: n.leaf, reason: reasonSuperseded})
	case n.verb == subjects.Ended && !n.superseded: // of an older one the Edge knows
		s.apply(effect{kind: tellClosed, session: n.session, reason: n.reason})
	}
	s.tellLeaf(n.session.Edge, n.leaf, subjects.Noted, &iopv1.SessionNotice{
		NodeId: n.session.Node, Generation: n.session.Gen, Reason: string(n.verb),
	})
}

// fence tells a session that it ends.
func (s *service) fence(session subjects.Session, reason string) {
	fence := &iopv1.Fence{Reason: reason, ErrorClass: string(wire.SessionEnded)}
	if data, err := fence.MarshalVT(); err == nil {
		s.fabric.Publish(session.Down(subjects.Fence, ""), data) //nolint:errcheck // the kick follows in any case
	}
}

// kickAtLeaf asks the agent of a leaf to close a session: no server of the hub
// can. The fence went before it over the same link.
func (s *service) kickAtLeaf(ef effect) {
	s.tellLeaf(ef.session.Edge, ef.leaf, subjects.Kick, &iopv1.SessionNotice{
		NodeId: ef.session.Node, Generation: ef.session.Gen, Reason: ef.reason,
	})
}
