package broker

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/jwt/v2"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/iop-fabric/iop/internal/identity"
	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/wire"
	"github.com/iop-fabric/iop/wire/iopv1"
)

const (
	calloutSubject = "$SYS.REQ.USER.AUTH"
	calloutQueue   = "iop-callout"
	calloutWorkers = 8    // two for each of four cores; more only queue at the CPU
	calloutBacklog = 8192 // herds of dials wait here; beyond it they are dropped and dial again
	sessionBacklog = 4096 // one token request for each of a herd
	memberBacklog  = 4096 // writes of members
	storeBacklog   = 1024 // Edges' requests; one that is dropped times out at the Edge
	inboxBacklog   = 4096 // advisories and heartbeats of a herd, between two reads of the loop
	operationBound = 5 * time.Second
	kickDelay      = 10 * time.Millisecond // at least 5, or the notice may not arrive before the close (B6)
	expireInterval = time.Second
	// stopGrace is how long what is being done when the service stops may still
	// take: without a store to ask it would take all of operationBound.
	stopGrace      = 500 * time.Millisecond
	admissionLocks = 64 // admissions of one node are one after the other
	// Connects and disconnects of every account: of Edges and Nodes, and of the
	// services themselves.
	advisorySubject = "$SYS.ACCOUNT.*.*"
	membersSubject  = "$KV." + bucketMembers + "."
	// Each service answers it, in AUTH: what must not meet one asks first.
	presenceSubject = "iop.service.presence"
	// Of the services, one answers.
	sessionQueue = "iop-session"
	storeQueue   = "iop-store"
)

// service is the session service: three connections, and one loop that owns
// the live core.
type service struct {
	b           *authority
	sys         *nats.Conn
	auth        *nats.Conn
	fabric      *nats.Conn
	members     members
	generations generations
	store       store
	invitations bucket // where machines are invited
	led         *elections
	clocks      clocks
	proofs      *proofs
	resync      chan struct{} // one: members are to be read anew
	instance    string        // of this service, for the agents of leaves

	inbox    chan event
	connz    string        // where servers say who is connected to them
	routez   string        // and which others they reach
	opened   chan struct{} // closed once the stores are there
	fresh    bool          // there was none before
	patience time.Time     // until when a callout waits for them
	draining atomic.Bool
	// admission keeps the admissions of one node in order: duplicate check,
	// generation and notice belong together. It guards no state of ours.
	admission [admissionLocks]sync.Mutex

	ctx     context.Context //nolint:containedctx // the life of the workers; set once by newService
	cancel  context.CancelFunc
	work    context.Context //nolint:containedctx // the same and stopGrace, for what they have begun
	abandon context.CancelFunc
	workers sync.WaitGroup
	evicted sync.WaitGroup
}

// event is what happened, as the loop is told.
type event struct {
	kind     eventKind
	member   memberID
	session  subjects.Session
	conn     connID
	leaf     string // where the session is, if not at a broker
	instance string
	reason   string
	revoked  bool
	// misbehaved: with evFenced, for breaking rules.
	misbehaved bool
	servers    []string
	until      time.Time    // the end of the session's certificate
	reply      chan verdict // of those that ask; buffered, the loop never waits
}

type eventKind int

const (
	evClaim        eventKind = iota // may this instance have the name?
	evAdmitted                      // a session has its generation
	evConnected                     // a session's connection stands
	evDisconnected                  // it has ended
	evHeard                         // a heartbeat
	evFenced                        // its Edge has said that it is over
	evGrant                         // may the session have its token?
	evPeerConnected
	evPeerDisconnected
	evMember    // the authority's record has changed
	evKnown     // the store's newest generation of a name, at the start
	evLearnt    // another service has admitted a session
	evSeen      // a server's answer: the session is connected
	evPeerSeen  // the same of an Edge or a leaf
	evPeerClaim // may this process have the Edge's name?
	evServiceConnected
	evServiceDisconnected
	evRoutes     // the servers that the home reaches
	evReaches    // those that another server reaches
	evListed     // a server has said all who are connected to it
	evSettled    // is it known who speaks of which server?
	evServerGone // a server says that it stops
	evLeafOpened // a session's connection stands at a leaf
	evLeafEnded  // it has ended
	evLeafBeat   // a leaf's agent is there
)

type verdict struct {
	ok     bool
	barred bool // it broke rules, and stays out
	until  time.Time
	since  time.Time
	last   uint64 // the newest generation known
}

// newService connects and begins to hear of connections. Callouts that come
// wait a little for open; then they are refused.
func newService(ctx context.Context, a *authority) (_ *service, err error) {
	s := &service{
		b: a, inbox: make(chan event, inboxBacklog), instance: wire.NewToken(), led: newElections(&a.storeOpen), proofs: newProofs(),
		resync: make(chan struct{}, 1), opened: make(chan struct{}), patience: a.now().Add(openPatience),
	}
	// The workers' own contexts: they finish what they have begun, after ctx ended.
	s.work, s.abandon = context.WithCancel(context.WithoutCancel(ctx))
	s.ctx, s.cancel = context.WithCancel(s.work)
	defer func() {
		if err != nil {
			s.stop()
		}
	}()
	for _, c := range []struct {
		to   **nats.Conn
		key  *identity.NKey
		name string
	}{
		{&s.sys, a.keys.system, "iop-sys"}, {&s.auth, a.keys.callout, "iop-auth"}, {&s.fabric, a.keys.service, "iop-fabric"},
	} {
		if *c.to, err = a.dial(c.key, c.name); err != nil {
			return nil, fmt.Errorf("broker: session service %s: %w", c.name, err)
		}
	}
	if a.embedded {
		s.clocks.home = s.auth.ConnectedServerId()
	}
	if err := s.listen(); err != nil {
		return nil, err
	}
	return s, s.flush(ctx)
}

// open opens the stores, applies the seeds and subscribes the rest. When it
// returns without error every callout is answered; after an error it may be
// called again.
func (s *service) open(ctx context.Context) error {
	if err := s.openStores(ctx); err != nil {
		return err
	}
	for _, seed := range s.b.seeds {
		if err := s.members.Seed(ctx, seed); err != nil {
			return fmt.Errorf("broker: seed: %w", err)
		}
	}
	if err := s.readGenerations(ctx); err != nil {
		return err
	}
	if err := s.subscribe(); err != nil {
		return err
	}
	if err := s.flush(ctx); err != nil {
		return err
	}
	if !s.b.alone {
		s.workers.Go(s.probe)
	}
	close(s.opened)
	return nil
}

func (s *service) flush(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startBound)
	defer cancel()
	for _, nc := range []*nats.Conn{s.sys, s.auth, s.fabric} {
		if err := nc.FlushWithContext(ctx); err != nil {
			return fmt.Errorf("broker: session service: %w", err)
		}
	}
	return nil
}

// connect makes one of the service's connections, through memory.
func (b *Broker) connect(srv *server.Server, key *identity.NKey, name string) (*nats.Conn, error) {
	return nats.Connect("", append(b.connectOptions(key, name), nats.InProcessServer(srv))...)
}

func (a *authority) connectOptions(key *identity.NKey, name string) []nats.Option {
	return []nats.Option{
		nats.Name(name), nats.Nkey(key.Public(), key.Sign),
		nats.MaxReconnects(-1), nats.ReconnectWait(50 * time.Millisecond), nats.Timeout(10 * time.Second),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) {
			if errors.Is(err, nats.ErrSlowConsumer) {
				a.metrics.dropped.Inc()
			}
			a.log.Warn(eventFault, slog.String("connection", name), slog.String("error", err.Error()))
		}),
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) {
			if err != nil {
				a.log.Warn(eventFault, slog.String("connection", name), slog.String("error", err.Error()))
			}
		}),
	}
}

func (s *service) openStores(ctx context.Context) error {
	js, err := jetstream.New(s.auth)
	if err != nil {
		return fmt.Errorf("broker: jetstream: %w", err)
	}
	open := func(to *bucket, name string, maxBytes int64) error {
		b, made, err := openBucket(ctx, js, s.led, name, maxBytes, s.b.replicas, 0)
		if isNoRoom(err) && s.b.embedded {
			return fmt.Errorf("broker: store_dir %s needs %d MiB of room for new stores, there is less: make room and start again", s.b.cfg.StoreDir, newStoreRoom>>20)
		}
		if err == nil {
			*to = b
			s.madeStore(made, name, 0)
		}
		return err
	}
	if err := open(&s.members.kv, bucketMembers, 0); err != nil {
		return err
	}
	if err := s.openGenerations(ctx, js); err != nil {
		return err
	}
	if s.b.cfg.Enrolment != nil || s.b.restore.has(kindInvitation) {
		if err := open(&s.invitations, bucketInvitations, 0); err != nil {
			return err
		}
	}
	if err := open(&s.store.kv, bucketStore, maxStore); err != nil {
		return err
	}
	return s.applyRestore(ctx)
}

// madeStore tells of a store that was not there. Where the members', which is opened
// first, was there, another that is not was lost; where none is, this is the first start.
func (s *service) madeStore(made bool, name string, first uint64) {
	s.fresh = s.fresh || (made && name == bucketMembers)
	if !made || name == bucketInvitations { // which holds nothing that is missed: they are made anew
		return
	}
	level := slog.LevelWarn
	if s.fresh {
		level = slog.LevelInfo
	}
	s.b.log.Log(s.ctx, level, eventStoreMade, slog.String("bucket", name), slog.Uint64("first", first))
}

// listen subscribes what tells of connections, and the callouts.
func (s *service) listen() error {
	s.workers.Go(s.loop)
	// One subscription for connects and disconnects: order holds within one only.
	if _, err := s.sys.Subscribe(advisorySubject, s.advisory); err != nil {
		return fmt.Errorf("broker: subscribe advisories: %w", err)
	}
	if _, err := s.fabric.Subscribe(subjects.UpEverywhere(subjects.Heartbeat), s.spoken(newPace(heartbeatPace), s.heartbeat)); err != nil {
		return fmt.Errorf("broker: subscribe heartbeats: %w", err)
	}
	if _, err := s.fabric.Subscribe(subjects.DownEverywhere(subjects.Fence), s.fencedByEdge); err != nil {
		return fmt.Errorf("broker: subscribe fences: %w", err)
	}
	if err := s.listenServers(); err != nil {
		return err
	}
	if _, err := s.auth.Subscribe(electedSubject, func(*nats.Msg) { s.led.happened() }); err != nil {
		return fmt.Errorf("broker: subscribe elections: %w", err)
	}
	if _, err := s.auth.Subscribe(presenceSubject, func(m *nats.Msg) { _ = m.Respond(nil) }); err != nil {
		return fmt.Errorf("broker: subscribe presence: %w", err)
	}
	callouts := make(chan *nats.Msg, calloutBacklog)
	if err := s.listenCallouts(callouts); err != nil {
		return fmt.Errorf("broker: subscribe callout: %w", err)
	}
	for range calloutWorkers {
		s.workers.Go(func() {
			s.serve(callouts, s.callout)
			s.drain(callouts, s.callout)
		})
	}
	return nil
}

// listenCallouts subscribes the requests for admission. The service beside a
// server answers that server's own: another's might be on its way to a broker
// that has just died, and whoever dials would wait for it in vain. Only services
// without a server of their own share them.
func (s *service) listenCallouts(callouts chan *nats.Msg) error {
	if !s.b.embedded {
		_, err := s.auth.ChanQueueSubscribe(calloutSubject, calloutQueue, callouts)
		return err
	}
	_, err := s.auth.Subscribe(calloutSubject, func(m *nats.Msg) {
		if issuerOf(m.Data) != s.auth.ConnectedServerId() {
			return
		}
		select {
		case callouts <- m:
		default:
			s.b.metrics.dropped.Inc()
		}
	})
	return err
}

// issuerOf reads who a token says it is from, and proves nothing.
func issuerOf(token []byte) string {
	_, rest, _ := bytes.Cut(token, []byte("."))
	payload, _, _ := bytes.Cut(rest, []byte("."))
	data := make([]byte, base64.RawURLEncoding.DecodedLen(len(payload)))
	var claims struct {
		Issuer string `json:"iss"`
	}
	if _, err := base64.RawURLEncoding.Decode(data, payload); err != nil || json.Unmarshal(data, &claims) != nil {
		return ""
	}
	return claims.Issuer
}

func (s *service) subscribe() error {
	writes := make(chan *nats.Msg, memberBacklog)
	if _, err := s.auth.ChanSubscribe(membersSubject+">", writes); err != nil {
		return fmt.Errorf("broker: subscribe members: %w", err)
	}
	s.workers.Go(func() { s.watchMembers(writes) })

	tokens := make(chan *nats.Msg, sessionBacklog)
	if _, err := s.fabric.QueueSubscribe(subjects.UpEverywhere(subjects.SessionVerb), sessionQueue, s.spoken(newPace(tokenPace), into(tokens))); err != nil {
		return fmt.Errorf("broker: subscribe session requests: %w", err)
	}
	s.workers.Go(func() { s.serve(tokens, s.token) })

	requests := make(chan *nats.Msg, storeBacklog)
	if _, err := s.fabric.ChanQueueSubscribe(subjects.StoreEverywhere(), storeQueue, requests); err != nil {
		return fmt.Errorf("broker: subscribe store: %w", err)
	}
	s.workers.Go(func() { s.serve(requests, s.storeRequest) })

	return s.subscribeLeaves()
}

// serve handles what comes, one after the other, until the service stops.
func (s *service) serve(in <-chan *nats.Msg, handle func(*nats.Msg)) {
	for s.ctx.Err() == nil {
		select {
		case m := <-in:
			handle(m)
		case <-s.ctx.Done():
		}
	}
}

// drain handles what still waits when the service stops: a server that is asked
// to stop would wait for the answers as long as a callout may take.
func (s *service) drain(in <-chan *nats.Msg, handle func(*nats.Msg)) {
	for {
		select {
		case m := <-in:
			handle(m)
		default:
			return
		}
	}
}

// stop ends the workers, each after what it is doing, then the connections.
func (s *service) stop() {
	s.draining.Store(true)
	s.cancel()
	defer time.AfterFunc(stopGrace, s.abandon).Stop()
	s.workers.Wait()
	s.evicted.Wait()
	s.abandon()
	s.close()
}

func (s *service) close() {
	for _, nc := range []*nats.Conn{s.fabric, s.auth, s.sys} {
		if nc != nil {
			nc.Close()
		}
	}
}

// loop is the one owner of the live core, and the only place here that ticks.
func (s *service) loop() {
	core := newLive(s.b.cfg.HeartbeatBound)
	core.Home(s.sys.ConnectedServerId())
	tick := time.NewTicker(expireInterval)
	defer tick.Stop()
	for {
		var out []effect
		select {
		case ev := <-s.inbox:
			out = s.step(core, ev)
		case <-tick.C:
			out = core.Expire(s.b.now())
			s.b.metrics.sessions.Set(float64(core.Sessions()))
		case <-s.ctx.Done():
			return
		}
		for _, ef := range core.Mine(out) {
			s.apply(ef)
		}
	}
}

func (s *service) step(core *live, ev event) []effect {
	now := s.b.now()
	switch ev.kind {
	case evClaim:
		since, duplicate := core.Duplicate(now, ev.member, ev.instance)
		if !duplicate && ev.leaf != "" {
			since, duplicate = core.Elsewhere(now, ev.member, ev.leaf)
		}
		until, barred := core.Barred(now, ev.member)
		ev.reply <- verdict{ok: !duplicate && !barred, barred: barred, until: until, since: since, last: core.Highest(ev.member)}
	case evAdmitted:
		out := core.Admitted(now, ev.session, ev.instance)
		core.AtLeaf(ev.session, ev.leaf, ev.conn.Server)
		core.Own(ev.session, ev.conn.Server)
		core.Until(ev.session, ev.until)
		ev.reply <- verdict{ok: true}
		return out
	case evConnected:
		return core.Connected(now, ev.session, ev.conn, ev.instance)
	case evDisconnected:
		core.Gone(now, ev.conn)
		return core.Disconnected(ev.session, ev.conn, ev.reason)
	case evHeard:
		core.Heard(now, ev.session)
		return core.Insist(now, ev.session)
	case evFenced:
		if ev.misbehaved {
			return core.Misbehaved(now, ev.session)
		}
		core.Fenced(now, ev.session)
	case evLeafOpened:
		return core.LeafOpened(now, ev.session, ev.leaf, ev.instance)
	case evLeafEnded:
		core.LeafEnded(ev.session, ev.leaf)
	case evLeafBeat:
		return core.LeafBeat(ev.member, ev.conn.Server)
	case evGrant:
		ev.reply <- verdict{ok: core.Grant(ev.session)}
	case evPeerConnected:
		out := core.PeerConnected(ev.member, ev.conn)
		core.PeerIs(now, ev.member, ev.conn, ev.instance)
		return out
	case evPeerDisconnected:
		core.Gone(now, ev.conn)
		core.PeerDisconnected(ev.member, ev.conn)
	case evMember:
		if ev.revoked && ev.member.Role == identity.RoleNode {
			s.notify(ev.member.Edge, subjects.Changed, &iopv1.SessionNotice{NodeId: ev.member.Name, Reason: string(refusedRevoked)})
		}
		return core.MemberChanged(ev.member, ev.revoked)
	case evKnown:
		core.Known(ev.session)
	case evLearnt:
		out := core.Learnt(now, ev.session, ev.instance)
		if ev.reply != nil {
			ev.reply <- verdict{ok: true}
		}
		return out
	case evSeen:
		return core.Seen(now, ev.session, ev.conn, ev.instance)
	case evPeerSeen:
		out := core.PeerSeen(ev.member, ev.conn)
		core.PeerIs(now, ev.member, ev.conn, ev.instance)
		return out
	case evPeerClaim:
		since, duplicate := core.PeerDuplicate(ev.member, ev.instance)
		ev.reply <- verdict{ok: !duplicate, since: since}
	case evServiceConnected:
		core.ServiceConnected(ev.conn)
	case evServiceDisconnected:
		core.ServiceDisconnected(ev.conn)
	case evRoutes:
		return core.Routes(ev.conn.Server, ev.servers)
	case evReaches:
		return core.Reaches(ev.conn.Server, ev.servers)
	case evListed:
		core.Listed(ev.conn.Server)
	case evSettled:
		ev.reply <- verdict{ok: core.Settled()}
	case evServerGone:
		return core.ServerGone(ev.conn.Server, reasonServerStopped)
	}
	return nil
}

// apply carries out an effect; it does not wait.
func (s *service) apply(ef effect) {
	switch ef.kind {
	case tellClosed:
		s.b.log.Info(eventClosed,
			slog.String("edge", ef.session.Edge), slog.String("node", ef.session.Node), slog.Uint64("generation", ef.session.Gen), slog.String("reason", ef.reason))
		s.notify(ef.session.Edge, subjects.Closed, &iopv1.SessionNotice{
			NodeId: ef.session.Node, Generation: ef.session.Gen, Reason: ef.reason,
		})
	case evict:
		s.b.metrics.evicted.WithLabelValues(ef.reason).Inc()
		s.evicted.Go(func() { s.evict(ef) })
	case askServer:
		s.askConnections(ef.conn.Server, 0)
		select {
		case s.resync <- struct{}{}:
		default:
		}
	case askRoutes:
		if err := s.sys.PublishRequest(serverSubject+ef.conn.Server+".ROUTEZ", s.routez, nil); err != nil && s.ctx.Err() == nil {
			s.b.log.Warn(eventFault, slog.String("operation", "routes"), slog.String("error", err.Error()))
		}
	case serverLost:
		s.b.log.Warn(eventLost, slog.String("server", ef.conn.Server), slog.String("reason", ef.reason))
		if ef.reason == reasonServerLost { // one that stops hands its stores over
			s.evicted.Go(s.callElections)
		}
	}
}

// notify publishes a notice to an Edge. A notice may be lost like any message:
// the Edge learns the same from the registration or from silence (B6, B7).
func (s *service) notify(edge string, verb subjects.Verb, n *iopv1.SessionNotice) {
	data, err := n.MarshalVT()
	if err == nil {
		err = s.fabric.Publish(subjects.Ctl(edge, verb), data)
	}
	if err != nil {
		s.b.log.Warn(eventFault, slog.String("operation", "notify"), slog.String("error", err.Error()))
	}
}

// evict tells a session why it ends and closes its connection a little later.
func (s *service) evict(ef effect) {
	ctx, cancel := context.WithTimeout(s.ctx, operationBound)
	defer cancel()
	if ef.session.Gen != 0 {
		event := eventEvicted
		if ef.reason == reasonSuperseded {
			event = eventSuperseded
		}
		s.b.log.Info(event,
			slog.String("edge", ef.session.Edge), slog.String("node", ef.session.Node), slog.Uint64("generation", ef.session.Gen), slog.String("reason", ef.reason))
		fence := &iopv1.Fence{Reason: ef.reason, ErrorClass: string(wire.SessionEnded)}
		if data, err := fence.MarshalVT(); err == nil && ef.reason != reasonMisbehaved { // its Edge has told it
			if err := s.fabric.Publish(ef.session.Down(subjects.Fence, ""), data); err == nil {
				s.fabric.FlushWithContext(ctx) //nolint:errcheck // the kick follows in any case
			}
		}
		wait := time.NewTimer(kickDelay)
		defer wait.Stop()
		select {
		case <-wait.C:
		case <-ctx.Done():
			return
		}
	} else {
		s.b.log.Info(eventEvicted, slog.String("reason", ef.reason))
	}
	if ef.leaf != "" {
		s.kickAtLeaf(ef)
		return
	}
	body, err := json.Marshal(server.KickClientReq{CID: ef.conn.Client})
	if err == nil {
		// A connection that is gone already is answered with an error: fine.
		_, err = s.sys.RequestWithContext(ctx, "$SYS.REQ.SERVER."+ef.conn.Server+".KICK", body)
	}
	if err != nil && s.ctx.Err() == nil {
		s.b.log.Warn(eventFault, slog.String("operation", "kick"), slog.String("error", err.Error()))
	}
}

// send gives the loop an event; false: the service stops.
func (s *service) send(ev event) bool {
	select {
	case s.inbox <- ev:
		return true
	case <-s.ctx.Done():
		return false
	}
}

// ask gives the loop an event and waits for its verdict.
func (s *service) ask(ev event) (verdict, bool) {
	ev.reply = make(chan verdict, 1)
	if !s.send(ev) {
		return verdict{}, false
	}
	select {
	case v := <-ev.reply:
		return v, true
	case <-s.ctx.Done():
		return verdict{}, false
	}
}

// advisory turns the server's own notices into events.
func (s *service) advisory(m *nats.Msg) {
	var ev event
	var client server.ClientInfo
	switch {
	case strings.HasSuffix(m.Subject, ".CONNECT"):
		var msg server.ConnectEventMsg
		if json.Unmarshal(m.Data, &msg) != nil {
			return
		}
		client, ev.kind, ev.conn.Server = msg.Client, evConnected, msg.Server.ID
	case strings.HasSuffix(m.Subject, ".DISCONNECT"):
		var msg server.DisconnectEventMsg
		if json.Unmarshal(m.Data, &msg) != nil {
			return
		}
		client, ev.kind, ev.conn.Server = msg.Client, evDisconnected, msg.Server.ID
		ev.reason = closeReason(msg.Reason)
	default:
		return
	}
	ev.conn.Client = client.ID
	switch client.Account {
	case accountFabric:
	case accountAuth:
		s.serviceSeen(ev.kind == evConnected, ev.conn, client.User)
		return
	default:
		return
	}
	if session, err := subjects.ParseSession(client.User); err == nil {
		ev.session, ev.instance = session, instanceOf(client.Name)
		s.send(ev)
		return
	}
	if id, ok := parsePeerUser(client.User); ok {
		ev.member, ev.instance = id, instanceOf(client.Name)
		if ev.kind == evConnected {
			ev.kind = evPeerConnected
		} else {
			ev.kind = evPeerDisconnected
		}
		s.send(ev)
	}
}

func parsePeerUser(user string) (memberID, bool) {
	id, ok := parseMemberKey(user)
	role, marked := strings.CutPrefix(string(id.Role), "_")
	id.Role = identity.Role(role)
	return id, ok && marked && checkMemberID(id) == nil
}

// heartbeat notes that a session lives. One too many is dropped: the next
// comes within the second.
func (s *service) heartbeat(session subjects.Session, _ *nats.Msg) bool {
	select {
	case s.inbox <- event{kind: evHeard, session: session}:
		return true
	default:
		return false
	}
}

// fencedByEdge notes that a session is over for its Edge. The service's own fences
// are of sessions that are evicted anyway.
func (s *service) fencedByEdge(m *nats.Msg) {
	down, err := subjects.ParseDown(m.Subject)
	if err != nil || wire.Redirected(m.Data) {
		return
	}
	var fence iopv1.Fence
	misbehaved := fence.UnmarshalVT(m.Data) == nil && fence.GetErrorClass() == string(wire.Protocol)
	s.send(event{kind: evFenced, session: down.Session, misbehaved: misbehaved})
}

// watchMembers tells the loop of every change in what the authority knows,
// whoever made it. It hears the writes themselves: a consumer of the stream
// would end with the server that holds it. What is written is no fact before
// the leader has it, so each is read back.
func (s *service) watchMembers(writes <-chan *nats.Msg) {
	seen := map[memberID]uint64{}
	s.readMembers(seen, slog.LevelDebug) // what was there is no change
	for {
		select {
		case m := <-writes:
			if id, ok := parseMemberKey(strings.TrimPrefix(m.Subject, membersSubject)); ok && checkMemberID(id) == nil {
				s.readMember(seen, id)
			}
		case <-s.resync: // a server is new, and what it heard we may not have
			s.readMembers(seen, slog.LevelInfo)
		case <-s.ctx.Done():
			return
		}
	}
}

// readMember reads a member until it shows a change, or none was made.
func (s *service) readMember(seen map[memberID]uint64, id memberID) {
	for _, wait := range []time.Duration{0, 10 * time.Millisecond, 100 * time.Millisecond, 300 * time.Millisecond} {
		pause := time.NewTimer(wait)
		select {
		case <-pause.C:
		case <-s.ctx.Done():
			pause.Stop()
			return
		}
		if s.tellMember(seen, id, slog.LevelInfo) {
			return
		}
	}
}

func (s *service) readMembers(seen map[memberID]uint64, level slog.Level) {
	ctx, cancel := context.WithTimeout(s.ctx, operationBound)
	defer cancel()
	keys, err := listKeys(ctx, s.members.kv, ">")
	if err != nil && s.ctx.Err() == nil {
		s.b.log.Warn(eventFault, slog.String("operation", "members"), slog.String("error", err.Error()))
	}
	for _, key := range keys {
		if id, ok := parseMemberKey(key); ok {
			s.tellMember(seen, id, level)
		}
	}
}

// tellMember tells the loop, and at that level the log, of a member that is not as it was
// seen last.
func (s *service) tellMember(seen map[memberID]uint64, id memberID, level slog.Level) (changed bool) {
	ctx, cancel := context.WithTimeout(s.ctx, operationBound)
	defer cancel()
	m, rev, err := s.members.GetRevision(ctx, id)
	if err != nil || rev == seen[id] {
		return false
	}
	seen[id] = rev
	gone := m.Revoked || rev == 0
	s.b.log.Log(s.ctx, level, eventMember,
		slog.String("edge", id.Edge), slog.String("role", string(id.Role)), slog.String("name", id.Name), slog.Bool("revoked", gone))
	s.send(event{kind: evMember, member: id, revoked: gone})
	return true
}

// token answers up.session: the signed proof of the session, from its record.
func (s *service) token(m *nats.Msg) {
	up, err := subjects.ParseUp(m.Subject)
	if err != nil {
		return
	}
	v, ok := s.ask(event{kind: evGrant, session: up.Session})
	if !ok {
		return
	}
	if !v.ok {
		s.b.metrics.dropped.Inc()
		return
	}
	grant := s.grant(up.Session)
	data, err := grant.MarshalVT()
	if err == nil {
		err = s.fabric.Publish(up.Session.Down(subjects.SessionVerb, ""), data)
	}
	if err != nil {
		s.b.log.Warn(eventFault, slog.String("operation", "grant"), slog.String("error", err.Error()))
	}
}

func (s *service) grant(session subjects.Session) *iopv1.SessionGrant {
	ctx, cancel := context.WithTimeout(s.work, operationBound)
	defer cancel()
	record, err := s.generations.Current(ctx, session)
	switch {
	case errors.Is(err, errSuperseded):
		return &iopv1.SessionGrant{Reason: reasonSuperseded, ErrorClass: string(wire.SessionEnded)}
	case err != nil:
		s.b.log.Warn(eventFault, slog.String("operation", "grant"), slog.String("error", err.Error()))
		return &iopv1.SessionGrant{Reason: "the session's record could not be read", ErrorClass: string(wire.Unreachable)}
	}
	token, err := identity.IssueToken(s.b.issuer.Load(), identity.SessionClaims{
		Edge: session.Edge, Node: session.Node, Gen: session.Gen, NKey: record.NKey,
	})
	if err != nil {
		s.b.log.Warn(eventFault, slog.String("operation", "grant"), slog.String("error", err.Error()))
		return &iopv1.SessionGrant{Reason: "the token could not be signed", ErrorClass: string(wire.Internal)}
	}
	return &iopv1.SessionGrant{Token: token}
}

// storeRequest answers one request of an Edge, to that Edge's own inbox and
// nowhere else (I6).
func (s *service) storeRequest(m *nats.Msg) {
	edge, op, err := subjects.ParseStore(m.Subject)
	if err != nil || !strings.HasPrefix(m.Reply, subjects.EdgeInbox(edge)+".") {
		return
	}
	ctx, cancel := context.WithTimeout(s.work, operationBound)
	defer cancel()
	resp, key, changed := s.store.Do(ctx, edge, op, m.Data)
	s.b.metrics.store.WithLabelValues(string(op), storeOutcome(resp)).Inc()
	data, err := resp.MarshalVT()
	if err == nil {
		err = s.fabric.Publish(m.Reply, data)
	}
	if err != nil {
		s.b.log.Warn(eventFault, slog.String("operation", "store"), slog.String("error", err.Error()))
	}
	if changed {
		s.notify(edge, subjects.Changed, &iopv1.SessionNotice{Key: key, Revision: resp.Revision})
	}
}

func storeOutcome(resp *iopv1.StoreResponse) string {
	switch {
	case resp.Conflict:
		return storeConflict
	case resp.ErrorClass == "":
		return storeOK
	case resp.ErrorClass == string(wire.Unreachable):
		return storeFailed
	}
	return storeRefused
}

// callout answers a request for admission of this fabric's own servers.
func (s *service) callout(m *nats.Msg) { s.decideOn(m, memberID{}) }

// decideOn answers one connection's request; leaf is who asks for it, where
// it is no server of ours.
func (s *service) decideOn(m *nats.Msg, leaf memberID) {
	began := s.b.now()
	defer func() {
		if p := recover(); p != nil { // fail closed: no answer admits nobody
			s.b.refuse(refusedUnavailable)
			s.b.log.Error(eventFault, slog.String("operation", "callout"), slog.String("error", fmt.Sprint(p)))
		}
	}()
	ac, err := jwt.DecodeAuthorizationRequestClaims(string(m.Data))
	if err != nil {
		s.b.refuse(refusedForged)
		return
	}
	if s.clocks.late(ac, began) {
		// Nobody waits any more; a generation for it would only fence the Node's
		// next attempt.
		s.b.refuse(refusedLate)
		return
	}
	answer, err := s.answer(ac, leaf)
	if err != nil {
		s.b.log.Warn(eventFault, slog.String("operation", "callout"), slog.String("error", err.Error()))
		return
	}
	if err := m.Respond([]byte(answer)); err != nil {
		s.b.log.Warn(eventFault, slog.String("operation", "callout"), slog.String("error", err.Error()))
	}
	s.b.metrics.callout.Observe(s.b.now().Sub(began).Seconds())
}

func (s *service) answer(ac *jwt.AuthorizationRequestClaims, leaf memberID) (string, error) {
	issuer := s.b.calloutIssuer(leaf).Pair()
	a, r := decide(ac, s.b.certs.Load().trust)
	if r != "" { // not proven: nothing of it is logged but the address
		s.b.refuse(r)
		s.b.log.Info(eventRefused, slog.String("reason", string(r)), slog.String("remote", ac.ClientInformation.Host))
		return encodeRefusal(issuer, ac, r)
	}
	a.leaf, a.server = leaf, ac.Server.ID
	g, since, r := s.admit(a)
	if r == "" {
		s.b.metrics.admitted.WithLabelValues(string(a.id.Role)).Inc()
		s.b.log.Info(eventAdmitted, slog.String("user", g.user))
		return encodeGrant(issuer, ac, g)
	}
	s.b.refuse(r)
	s.b.log.Warn(eventRefused,
		slog.String("reason", string(r)), slog.String("edge", a.id.Edge), slog.String("role", string(a.id.Role)), slog.String("name", a.id.Name))
	if g, ok := a.lobby(r, since, s.clocks.at(ac, s.b.now())); ok {
		return encodeGrant(issuer, ac, g)
	}
	return encodeRefusal(issuer, ac, r)
}

// admit asks the authority about an applicant that has proved who it is.
func (s *service) admit(a applicant) (g grant, since time.Time, r refusal) {
	if s.draining.Load() {
		return g, since, refusedDraining
	}
	if !s.isOpen() {
		return g, since, refusedUnavailable
	}
	ctx, cancel := context.WithTimeout(s.work, operationBound)
	defer cancel()
	if r := s.admitLeaf(ctx, a); r != "" {
		return g, since, r
	}
	m, found, err := s.members.Get(ctx, a.member())
	elsewhere := false
	if err == nil && !found {
		elsewhere, err = s.members.Elsewhere(ctx, a.member(), a.nkey)
	}
	if err != nil {
		s.b.log.Warn(eventFault, slog.String("operation", "admit"), slog.String("error", err.Error()))
		return g, since, refusedUnavailable
	}
	if r := judge(a, m, found, elsewhere); r != "" {
		return g, since, r
	}
	if a.leaf != (memberID{}) && !s.proofs.fresh(a.nkey, a.nonce) {
		return g, since, refusedSignature
	}
	if a.id.Role == identity.RoleEdge {
		v, ok := s.ask(event{kind: evPeerClaim, member: a.member(), instance: a.instance()})
		switch {
		case !ok:
			return g, since, refusedDraining
		case !v.ok:
			return g, v.since, refusedDuplicate
		}
	}
	if a.id.Role != identity.RoleNode {
		if m.Root != a.root {
			if err := s.members.Shown(ctx, a.member(), a.root); err != nil { // the next admission tries again
				s.b.log.Warn(eventFault, slog.String("operation", "admit"), slog.String("error", err.Error()))
			}
		}
		return a.peerGrant(), since, ""
	}
	g, since, r = s.admitNode(ctx, a)
	if r == "" && m.Next == a.nkey {
		if err := s.members.Took(ctx, a.member(), a.nkey); err != nil { // the next admission tries again
			s.b.log.Warn(eventFault, slog.String("operation", "admit"), slog.String("error", err.Error()))
			return g, since, r
		}
		s.b.log.Info(eventNKey, slog.String("edge", a.id.Edge), slog.String("name", a.id.Name), slog.String("nkey", a.nkey), slog.Bool("taken", true))
	}
	return g, since, r
}

// admitNode gives a Node its generation: free name, KV write, notice to Edge,
// and only then the connection (I2, I3, I5).
func (s *service) admitNode(ctx context.Context, a applicant) (g grant, since time.Time, r refusal) {
	h := fnv.New32a()
	h.Write([]byte(a.member().key()))
	lock := &s.admission[h.Sum32()%admissionLocks]
	lock.Lock()
	defer lock.Unlock()

	if s.b.health.storeFailed() { // it would only wait for an answer
		return g, since, refusedUnavailable
	}
	session, since, r := s.next(ctx, a)
	if r != "" {
		return g, since, r
	}
	s.notify(session.Edge, subjects.Admitted, &iopv1.SessionNotice{
		NodeId: session.Node, Generation: session.Gen, InstanceId: a.instance(),
	})
	if err := s.fabric.FlushWithContext(ctx); err != nil {
		s.b.log.Warn(eventFault, slog.String("operation", "admit"), slog.String("error", err.Error()))
		return g, since, refusedUnavailable
	}
	if _, ok := s.ask(event{kind: evAdmitted, session: session, instance: a.instance(), leaf: a.leaf.Name, conn: connID{Server: a.server}, until: a.notAfter}); !ok {
		return g, since, refusedDraining
	}
	return a.nodeGrant(session), since, ""
}
