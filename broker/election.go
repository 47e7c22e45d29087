package broker

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/nats-io/nats-server/v2/server"
)

// JetStream elects a new leader of a store four to nine seconds after the old
// one was killed, and until then nobody is admitted; no setting changes that.
// The services know of the server's end within half a second, and the servers
// have a word for it: a request for a vote, from a candidate with an empty log
// and of the next term. Whoever hears it grants nothing, since its own log is
// newer, but stands for election itself within 0.8 s. That is what a peer that
// has just restarted might send, so it can harm no store; and where a server
// does not understand it, the election comes at its own time.

const (
	voteSubject   = "$NRG.V." // and the group's name
	voteLength    = 32        // term, last term, last index: 8 bytes each; candidate: 8 characters
	voteCandidate = "iop-none"
)

// electedSubject is where a stream's new leader says that it is.
const electedSubject = "$JS.EVENT.ADVISORY.STREAM.LEADER_ELECTED.>"

// elections tells those who wait for a store that one has a new leader.
type elections struct {
	open    *sync.RWMutex // held to write while the stores are opened anew
	mu      sync.Mutex
	context context.Context //nolint:containedctx // ends with the next election
	end     context.CancelFunc
}

func newElections(open *sync.RWMutex) *elections {
	e := &elections{open: open}
	e.context, e.end = context.WithCancel(context.Background())
	return e
}

// next ends with the next election.
func (e *elections) next() context.Context {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.context
}

func (e *elections) happened() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.end()
	e.context, e.end = context.WithCancel(context.Background())
}

// raftStatus is a server's answer about its groups, by account and group.
type raftStatus struct {
	Data map[string]map[string]raftGroup `json:"data"`
}

// After a call one service, that at the lowest of the names that are left, looks
// again every electionRead whether there is a leader.
const (
	electionRead = 100 * time.Millisecond
	// Two that stood at the same moment, each with its own vote, would wait for
	// seconds: so many reads show it.
	partedReads = 2
	// Whoever heard the call has stood by so many.
	unheardReads = 10
)

// ballot is a group's term while it has no leader, and the reads that showed it.
type ballot struct {
	term  uint64
	reads int
}

// callElections has every group of the home server elect a leader whose leader
// is at a server that the home does not reach.
func (s *service) callElections() {
	ctx, cancel := context.WithTimeout(s.ctx, operationBound)
	defer cancel()
	home, names, err := s.reachedNames(ctx)
	tick := time.NewTicker(electionRead)
	defer tick.Stop()
	ballots := map[string]ballot{}
	for err == nil {
		if err = s.callElection(ctx, names, ballots); len(ballots) == 0 || home != slices.Min(slices.Collect(maps.Keys(names))) {
			break
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
	if err != nil && s.ctx.Err() == nil {
		s.b.log.Warn(eventFault, slog.String("operation", "election"), slog.String("error", err.Error()))
	}
}

// callElection does it once, and keeps in ballots who has no leader yet. Such a
// group is not called at first: another service has done so, and a second call
// would put down who stands for it, or leads it by now.
func (s *service) callElection(ctx context.Context, names map[string]bool, ballots map[string]ballot) error {
	for _, account := range []string{accountSystem, accountAuth} {
		groups, err := s.raftGroups(ctx, account)
		if err != nil {
			return err
		}
		for name, group := range groups {
			if !stand(ballots, name, group, names) {
				continue
			}
			if err := s.sys.PublishRequest(voteSubject+name, s.sys.NewInbox(), voteRequest(group.Term+1)); err != nil {
				return err
			}
		}
	}
	return nil
}

// stand notes in ballots what a read shows of a group, and says whether to call it.
func stand(ballots map[string]ballot, name string, group raftGroup, names map[string]bool) bool {
	if group.Size <= 1 || group.led(names) {
		delete(ballots, name)
		return false
	}
	b := ballots[name]
	if b.term != group.Term {
		b = ballot{term: group.Term}
	} else {
		b.reads++
	}
	ballots[name] = b
	return group.Leader != "" || b.reads >= unheardReads || b.reads >= partedReads && group.State == server.Candidate.String()
}

// raftGroup is one of the home server's groups, as it sees it.
type raftGroup struct{ server.RaftzGroup }

// led reports whether the group's leader is at one of the named servers. The
// list of peers does not hold the server itself.
func (g raftGroup) led(names map[string]bool) bool {
	return g.Leader != "" && (g.Leader == g.ID || names[g.Peers[g.Leader].Name])
}

func (s *service) raftGroups(ctx context.Context, account string) (map[string]raftGroup, error) {
	body, err := json.Marshal(server.RaftzOptions{AccountFilter: account})
	if err != nil {
		return nil, err
	}
	m, err := s.sys.RequestWithContext(ctx, serverSubject+s.sys.ConnectedServerId()+".RAFTZ", body)
	if err != nil {
		return nil, fmt.Errorf("groups: %w", err)
	}
	var status raftStatus
	if err := json.Unmarshal(m.Data, &status); err != nil {
		return nil, fmt.Errorf("groups: %w", err)
	}
	return status.Data[account], nil
}

// voteRequest is what nobody grants: its log is empty.
func voteRequest(term uint64) []byte {
	out := make([]byte, voteLength)
	binary.LittleEndian.PutUint64(out, term)
	copy(out[voteLength-len(voteCandidate):], voteCandidate)
	return out
}

// reachedNames are the names of the home server, and of it and those it reaches.
func (s *service) reachedNames(ctx context.Context) (home string, names map[string]bool, err error) {
	m, err := s.sys.RequestWithContext(ctx, serverSubject+s.sys.ConnectedServerId()+".ROUTEZ", nil)
	if err != nil {
		return "", nil, fmt.Errorf("routes: %w", err)
	}
	var resp server.ServerAPIRoutezResponse
	if err := json.Unmarshal(m.Data, &resp); err != nil {
		return "", nil, fmt.Errorf("routes: %w", err)
	}
	names = map[string]bool{}
	if resp.Server != nil {
		home = resp.Server.Name
		names[home] = true
	}
	if resp.Data != nil {
		for _, r := range resp.Data.Routes {
			names[r.RemoteName] = true
		}
	}
	return home, names, nil
}
