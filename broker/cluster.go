package broker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sync/errgroup"

	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/wire"
	"github.com/iop-fabric/iop/wire/iopv1"
)

// The session service's side of a cluster: what it asks the servers, what it
// hears of the other services, and how it waits for the stores.

const (
	// openPatience is how long callouts wait for the stores of a service that has
	// just started: long enough for a member that comes back to a cluster, well
	// within the dial's own bound.
	openPatience = 2 * time.Second
	// A server that was killed is known to be gone within two reads and the time
	// the route takes to break.
	routesInterval = 150 * time.Millisecond
	routesBound    = 2 * time.Second
	// probeInterval is how often the stores are asked whether they can be written.
	probeInterval = time.Second
	probeBound    = 2 * time.Second
	openAttempt   = 5 * time.Second
	// currentInterval is how often a broker that has joined looks whether its copies
	// are as the leaders'; they say so once a second.
	currentInterval = 50 * time.Millisecond
	openBackoff     = time.Second
	waitingLog      = 10 * time.Second // while it waits, a line so often
	// replicaSilent is when a replica of a store counts as away.
	replicaSilent = 5 * time.Second
	// maxRaces bounds how often two services may be after one name at once. The
	// pause between, which doubles, is for a write that is not carried out yet.
	maxRaces  = 7
	racePause = 5 * time.Millisecond

	connectionsPage = 512
	serverSubject   = "$SYS.REQ.SERVER."
	shutdownSubject = "$SYS.SERVER.*.SHUTDOWN"
)

// listenServers subscribes what only a cluster, or a server of its own, tells.
func (s *service) listenServers() error {
	if s.b.alone {
		return nil
	}
	s.connz, s.routez = s.sys.NewInbox(), s.sys.NewInbox()
	for subject, handle := range map[string]nats.MsgHandler{shutdownSubject: s.shutdown, s.connz: s.connections, s.routez: s.reaches} {
		if _, err := s.sys.Subscribe(subject, handle); err != nil {
			return fmt.Errorf("broker: subscribe servers: %w", err)
		}
	}
	if _, err := s.fabric.Subscribe(subjects.CtlEverywhere(subjects.Admitted), s.learnt); err != nil {
		return fmt.Errorf("broker: subscribe admissions: %w", err)
	}
	s.askConnections(s.sys.ConnectedServerId(), 0)
	s.workers.Go(s.readRoutes)
	return nil
}

// serviceSeen notes a session service's connection in AUTH; others in there are
// no services.
func (s *service) serviceSeen(connected bool, conn connID, user string) {
	if user != s.b.keys.callout.Public() {
		return
	}
	kind := evServiceDisconnected
	if connected {
		kind = evServiceConnected
	}
	s.send(event{kind: kind, conn: conn})
}

// learnt hears that another service, or this one, has admitted a session.
func (s *service) learnt(m *nats.Msg) {
	edge, _, err := subjects.ParseCtl(m.Subject)
	var n iopv1.SessionNotice
	if err != nil || wire.Redirected(m.Data) || n.UnmarshalVT(m.Data) != nil || !subjects.ValidName(n.NodeId) || n.Generation == 0 {
		return
	}
	s.send(event{
		kind: evLearnt, instance: n.InstanceId,
		session: subjects.Session{Edge: edge, Node: n.NodeId, Gen: n.Generation},
	})
}

// sayStopped tells the others that the home server stops, in its stead: that it
// retires was the last thing it says (nats-server 2.15).
func (s *service) sayStopped(srv *server.Server) {
	word, err := json.Marshal(server.ServerInfo{ID: srv.ID(), Name: srv.Name(), Version: server.VERSION})
	if err == nil {
		err = s.sys.Publish(strings.Replace(shutdownSubject, "*", srv.ID(), 1), word)
	}
	if err == nil {
		err = s.sys.FlushTimeout(stopGrace)
	}
	if err != nil {
		s.b.log.Warn(eventFault, slog.String("operation", "stop"), slog.String("error", err.Error()))
	}
}

// shutdown hears that a server stops.
func (s *service) shutdown(m *nats.Msg) {
	if parts := strings.Split(m.Subject, "."); len(parts) == 4 {
		s.send(event{kind: evServerGone, conn: connID{Server: parts[2]}})
	}
}

// readRoutes asks the home server, again and again, which others it reaches.
func (s *service) readRoutes() {
	tick := time.NewTicker(routesInterval)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-s.ctx.Done():
			return
		}
		if home, reached, ok := s.routes(); ok {
			s.send(event{kind: evRoutes, conn: connID{Server: home}, servers: reached})
		}
	}
}

func (s *service) routes() (home string, reached []string, ok bool) {
	ctx, cancel := context.WithTimeout(s.ctx, routesBound)
	defer cancel()
	m, err := s.sys.RequestWithContext(ctx, serverSubject+s.sys.ConnectedServerId()+".ROUTEZ", nil)
	if err != nil {
		return "", nil, false
	}
	return parseRoutes(m)
}

// reaches hears which others a server reaches that is not the home.
func (s *service) reaches(m *nats.Msg) {
	if server, reached, ok := parseRoutes(m); ok {
		s.send(event{kind: evReaches, conn: connID{Server: server}, servers: reached})
	}
}

func parseRoutes(m *nats.Msg) (id string, reached []string, ok bool) {
	var resp server.ServerAPIRoutezResponse
	if json.Unmarshal(m.Data, &resp) != nil || resp.Server == nil || resp.Data == nil {
		return "", nil, false // nobody answers for a server that is gone
	}
	for _, r := range resp.Data.Routes {
		reached = append(reached, r.RemoteID)
	}
	return resp.Server.ID, reached, true
}

// askConnections asks a server who is connected to it. The answers come to
// connections.
func (s *service) askConnections(id string, offset int) {
	if s.connz == "" {
		return
	}
	body, err := json.Marshal(server.ConnzOptions{Username: true, Offset: offset, Limit: connectionsPage, Sort: server.ByCid})
	if err == nil {
		err = s.sys.PublishRequest(serverSubject+id+".CONNZ", s.connz, body)
	}
	if err != nil && s.ctx.Err() == nil {
		s.b.log.Warn(eventFault, slog.String("operation", "connections"), slog.String("error", err.Error()))
	}
}

func (s *service) connections(m *nats.Msg) {
	var resp server.ServerAPIConnzResponse
	if json.Unmarshal(m.Data, &resp) != nil || resp.Server == nil || resp.Data == nil {
		return // nobody answers for a server that is gone
	}
	for _, c := range resp.Data.Conns {
		conn := connID{Server: resp.Server.ID, Client: c.Cid}
		switch c.Account {
		case accountAuth:
			s.serviceSeen(true, conn, c.AuthorizedUser)
		case accountFabric:
			if session, err := subjects.ParseSession(c.AuthorizedUser); err == nil {
				s.send(event{kind: evSeen, session: session, conn: conn, instance: instanceOf(c.Name)})
			} else if id, ok := parsePeerUser(c.AuthorizedUser); ok {
				s.send(event{kind: evPeerSeen, member: id, conn: conn, instance: instanceOf(c.Name)})
			}
		}
	}
	if next := resp.Data.Offset + len(resp.Data.Conns); len(resp.Data.Conns) > 0 && next < resp.Data.Total {
		s.askConnections(resp.Server.ID, next)
	} else {
		s.send(event{kind: evListed, conn: connID{Server: resp.Server.ID}})
	}
}

// isOpen says whether the stores are there; shortly after the start it waits.
func (s *service) isOpen() bool {
	select {
	case <-s.opened:
		return true
	default:
	}
	wait := time.NewTimer(s.patience.Sub(s.b.now()))
	defer wait.Stop()
	select {
	case <-s.opened:
		return true
	case <-wait.C:
	case <-s.ctx.Done():
	}
	return false
}

// waitOpen opens the stores, however long it takes until more than half of the
// servers are there; a broker that is alone gives up in time.
func (s *service) waitOpen(ctx context.Context) error {
	if s.b.alone {
		bounded, cancel := context.WithTimeout(ctx, startBound)
		defer cancel()
		err := s.open(bounded)
		if isLost(err) {
			s.b.log.Error(eventOf(err), slog.String("error", err.Error()))
		}
		return err
	}
	var told time.Time
	for wait := openBackoff / 8; ; wait = min(2*wait, openBackoff) {
		attempt, cancel := context.WithTimeout(ctx, openAttempt)
		err := s.open(attempt)
		cancel()
		if err == nil {
			s.b.health.set(nil)
			return nil
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		lost := isLost(err)
		if !lost {
			err = fmt.Errorf("%w: %w", errNoQuorum, err)
		}
		s.b.health.set(err)
		if now := s.b.now(); now.Sub(told) >= waitingLog {
			told = now
			if lost {
				s.b.log.Error(eventOf(err), slog.String("error", err.Error()))
			} else {
				s.b.log.Warn(eventWaiting, slog.String("reason", s.b.Healthy().Error()))
			}
		}
		pause := time.NewTimer(wait)
		select {
		case <-pause.C:
		case <-ctx.Done():
			pause.Stop()
			return ctx.Err()
		}
	}
}

// waitCurrent waits until the home server's copies are what their leaders have,
// and it is known where the other services are. Until then the next broker must not
// be stopped: with this one behind, half of the rest would have to catch up before
// there is a leader again.
func (s *service) waitCurrent(ctx context.Context) error {
	if s.b.alone {
		return nil
	}
	tick := time.NewTicker(currentInterval)
	defer tick.Stop()
	for !s.isCurrent(ctx) {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

func (s *service) isCurrent(ctx context.Context) bool {
	if v, ok := s.ask(event{kind: evSettled}); !ok || !v.ok {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, operationBound)
	defer cancel()
	missing, ok := s.copiesHere(ctx)
	if !ok {
		return false
	}
	for _, account := range []string{accountSystem, accountAuth} {
		groups, err := s.raftGroups(ctx, account)
		if err != nil {
			return false
		}
		for _, group := range groups {
			if group.Size > 1 && (group.Leader == "" || group.CatchingUp || group.Applied < group.Committed) {
				return false
			}
			if account == accountAuth {
				missing--
			}
		}
	}
	return missing <= 0
}

// copiesHere counts the stores of which the home server is to have a copy; false:
// one's leader does not say that it is there. The home may not know of it yet: with
// a folder that was lost it begins with none, and nobody is elected by an empty copy.
func (s *service) copiesHere(ctx context.Context) (copies int, ok bool) {
	for _, b := range []bucket{s.generations.kv, s.members.kv, s.store.kv} {
		info, err := b.info(ctx)
		if err != nil || info.Cluster == nil || info.Cluster.Leader == "" {
			return 0, false
		}
		if len(info.Cluster.Replicas) == 0 { // there is no other copy to be like
			continue
		}
		here := info.Cluster.Leader == s.b.cfg.Name
		for _, r := range info.Cluster.Replicas {
			if r.Name == s.b.cfg.Name {
				here = true
				if !r.Current || r.Offline {
					return 0, false
				}
			}
		}
		if here {
			copies++
		}
	}
	return copies, true
}

// errNoQuorum: what the authority knows cannot be read or written.
var errNoQuorum = errors.New("nobody can be admitted until more than half of the brokers are there")

// probe watches whether the stores can be written, for Healthy.
func (s *service) probe() {
	tick := time.NewTicker(probeInterval)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-s.ctx.Done():
			return
		}
		err := s.quorum()
		if s.ctx.Err() != nil {
			return
		}
		was := s.b.Healthy()
		s.b.health.set(err)
		switch {
		case err != nil && was == nil:
			s.b.log.Warn(eventWaiting, slog.String("reason", err.Error()))
		case err == nil && was != nil:
			s.b.log.Info(eventResumed)
		}
	}
}

// quorum says why the store of generations cannot be written.
func (s *service) quorum() error {
	ctx, cancel := context.WithTimeout(s.ctx, probeBound)
	defer cancel()
	status, err := s.generations.kv.Status(ctx)
	if err != nil {
		return fmt.Errorf("%w: %w", errNoQuorum, err)
	}
	bucket, ok := status.(*jetstream.KeyValueBucketStatus)
	if !ok || bucket.StreamInfo().Cluster == nil || len(bucket.StreamInfo().Cluster.Replicas) == 0 {
		return nil
	}
	cluster := bucket.StreamInfo().Cluster
	there, all := 1, 1+len(cluster.Replicas)
	for _, r := range cluster.Replicas {
		if !r.Offline && r.Active < replicaSilent {
			there++
		}
	}
	if cluster.Leader == "" {
		return fmt.Errorf("%w: the store of generations has no leader", errNoQuorum)
	}
	if 2*there <= all {
		return fmt.Errorf("%w: %d of %d are", errNoQuorum, there, all)
	}
	return nil
}

// generationReads is how many records are read at once at the start.
const generationReads = 32

// readGenerations tells the core what the store knows, once.
func (s *service) readGenerations(ctx context.Context) error {
	keys, err := listKeys(ctx, s.generations.kv, ">")
	if err != nil {
		return fmt.Errorf("broker: read generations: %w", err)
	}
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(generationReads)
	for _, key := range keys {
		edge, node, ok := strings.Cut(key, ".")
		if !ok || !subjects.ValidName(edge) || !subjects.ValidName(node) {
			continue
		}
		group.Go(func() error {
			newest, _, err := s.generations.Newest(ctx, edge, node)
			if err == nil {
				s.send(event{kind: evKnown, session: newest})
			}
			return err
		})
	}
	return group.Wait()
}

// next gives an applicant its generation, if the name is free. The write counts
// only on top of the newest generation that this service knows of: one that
// another service has given meanwhile makes it ask again (B12).
func (s *service) next(ctx context.Context, a applicant) (session subjects.Session, since time.Time, r refusal) {
	record := admission{Instance: a.instance(), NKey: a.nkey, Leaf: a.leaf.Name, Root: a.root}
	var err error
	for pause := racePause; pause <= racePause<<maxRaces; pause *= 2 {
		v, ok := s.ask(event{kind: evClaim, member: a.member(), instance: a.instance(), leaf: a.leaf.Name})
		switch {
		case !ok:
			return session, since, refusedDraining
		case v.barred:
			return session, v.until, refusedMisbehaved
		case !v.ok:
			return session, v.since, refusedDuplicate
		}
		if session, err = s.generations.Next(ctx, a.id.Edge, a.id.Name, record, v.last); err == nil {
			return session, since, ""
		}
		if !isConflict(err) {
			break
		}
		newest, other, readErr := s.generations.Newest(ctx, a.id.Edge, a.id.Name)
		if readErr != nil && !errors.Is(readErr, jetstream.ErrKeyNotFound) {
			err = readErr
			break
		}
		if readErr != nil || newest.Gen <= v.last { // the other's write is still on its way
			time.Sleep(pause)
			continue
		}
		if _, ok := s.ask(event{kind: evLearnt, session: newest, instance: other.Instance}); !ok {
			return session, since, refusedDraining
		}
	}
	s.b.log.Warn(eventFault, slog.String("operation", "admit"), slog.String("error", err.Error()))
	return session, since, refusedUnavailable
}
