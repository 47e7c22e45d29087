package broker

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// Only a group whose leader is gone is called for an election, once; and again
// where it has none although whoever heard of it has stood.
// Contract: Y2
func TestElectionIsCalledForTheLeaderless(t *testing.T) {
	names := map[string]bool{"b1": true, "b2": true}
	peers := map[string]server.RaftzGroupPeer{"id2": {Name: "b2"}, "id3": {Name: "b3"}} // b1 is home, and in no list of its own
	group := func(leader, state string, term uint64) raftGroup {
		return raftGroup{server.RaftzGroup{ID: "id1", Leader: leader, State: state, Term: term, Size: 3, Peers: peers}}
	}
	ballots := map[string]ballot{}
	for i, step := range []struct {
		group raftGroup
		call  bool
	}{
		{group("id1", "LEADER", 4), false},   // led at home
		{group("id2", "FOLLOWER", 4), false}, // led at a server that is there
		{group("id3", "FOLLOWER", 4), true},  // led by the lost one
		{group("", "FOLLOWER", 5), false},    // called
		{group("", "FOLLOWER", 5), false},
		{group("", "FOLLOWER", 5), false}, // whoever heard it still waits
		{group("", "CANDIDATE", 6), false},
		{group("", "CANDIDATE", 6), false},
		{group("", "CANDIDATE", 6), true}, // the votes are parted
		{group("", "FOLLOWER", 7), false},
		{group("id2", "FOLLOWER", 8), false},
	} {
		if call := stand(ballots, "g", step.group, names); call != step.call {
			t.Errorf("step %d: called: %v", i, call)
		}
	}
	if len(ballots) != 0 {
		t.Errorf("still leaderless: %v", ballots)
	}
	for i := range unheardReads + 1 {
		if call := stand(ballots, "g", group("", "FOLLOWER", 9), names); call != (i == unheardReads) {
			t.Errorf("nobody stands, read %d: called: %v", i, call)
		}
	}
	alone := group("", "FOLLOWER", 9)
	alone.Size = 1
	if stand(ballots, "h", alone, names) {
		t.Error("a group of one is called")
	}
}

// A store without a leader is asked again at short intervals, however often it
// says so, and at once when it has one; one that is full is not asked again.
// Contract: Y2
func TestPatientlyWaitsForALeader(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), guard)
	defer cancel()
	led, tries := newElections(&sync.RWMutex{}), 0
	var longest time.Duration
	v, err := patiently(ctx, led, func(try context.Context) (int, error) {
		deadline, _ := try.Deadline()
		longest = max(longest, time.Until(deadline))
		if tries++; tries < 6 {
			return 0, &jetstream.APIError{Code: 503}
		}
		return 7, nil
	})
	if v != 7 || err != nil || longest > tryBound {
		t.Errorf("%d, %v; a try of %v", v, err, longest)
	}

	tries = 0
	v, err = patiently(ctx, led, func(try context.Context) (int, error) {
		if tries++; tries == 1 {
			led.happened()
			<-try.Done()
			if !errors.Is(try.Err(), context.Canceled) {
				t.Error("the election did not end the try")
			}
			return 0, try.Err()
		}
		return tries, nil
	})
	if v != 2 || err != nil {
		t.Errorf("after an election: %d, %v", v, err)
	}

	tries = 0
	full := &jetstream.APIError{Code: 503, ErrorCode: codesFull[0]}
	if _, err := patiently(ctx, led, func(context.Context) (int, error) { tries++; return 0, full }); !errors.Is(err, full) || tries != 1 {
		t.Errorf("full: %v after %d tries", err, tries)
	}
	short, done := context.WithTimeout(t.Context(), time.Millisecond)
	defer done()
	if _, err := patiently(short, led, func(try context.Context) (int, error) { <-try.Done(); return 0, nats.ErrTimeout }); !errors.Is(err, nats.ErrTimeout) {
		t.Errorf("no time left: %v", err)
	}
}
