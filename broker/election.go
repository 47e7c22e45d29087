package broker

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"log/slog"

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

// raftStatus is a server's answer about its groups, by account and group.
type raftStatus struct {
	Data server.RaftzStatus `json:"data"`
}

// callElections has every group of the home server elect a leader whose leader
// is at a server that the home does not reach.
func (s *service) callElections() {
	ctx, cancel := context.WithTimeout(s.ctx, operationBound)
	defer cancel()
	names, err := s.reachedNames(ctx)
	if err != nil {
		s.b.log.Warn(eventFault, slog.String("operation", "election"), slog.String("error", err.Error()))
		return
	}
	for _, account := range []string{accountSystem, accountAuth} {
		body, err := json.Marshal(server.RaftzOptions{AccountFilter: account})
		if err != nil {
			continue
		}
		m, err := s.sys.RequestWithContext(ctx, serverSubject+s.sys.ConnectedServerId()+".RAFTZ", body)
		var status raftStatus
		if err == nil {
			err = json.Unmarshal(m.Data, &status)
		}
		if err != nil {
			s.b.log.Warn(eventFault, slog.String("operation", "election"), slog.String("error", err.Error()))
			continue
		}
		for name, group := range status.Data[account] {
			if group.Leader != "" && names[group.Peers[group.Leader].Name] || group.Size <= 1 {
				continue
			}
			if err := s.sys.PublishRequest(voteSubject+name, s.sys.NewInbox(), voteRequest(group.Term+1)); err != nil {
				s.b.log.Warn(eventFault, slog.String("operation", "election"), slog.String("error", err.Error()))
			}
		}
	}
}

// voteRequest is what nobody grants: its log is empty.
func voteRequest(term uint64) []byte {
	out := make([]byte, voteLength)
	binary.LittleEndian.PutUint64(out, term)
	copy(out[voteLength-len(voteCandidate):], voteCandidate)
	return out
}

// reachedNames are the names of the home server and of those it reaches.
func (s *service) reachedNames(ctx context.Context) (map[string]bool, error) {
	m, err := s.sys.RequestWithContext(ctx, serverSubject+s.sys.ConnectedServerId()+".ROUTEZ", nil)
	if err != nil {
		return nil, fmt.Errorf("routes: %w", err)
	}
	var resp server.ServerAPIRoutezResponse
	if err := json.Unmarshal(m.Data, &resp); err != nil {
		return nil, fmt.Errorf("routes: %w", err)
	}
	names := map[string]bool{}
	if resp.Server != nil {
		names[resp.Server.Name] = true
	}
	if resp.Data != nil {
		for _, r := range resp.Data.Routes {
			names[r.RemoteName] = true
		}
	}
	return names, nil
}
