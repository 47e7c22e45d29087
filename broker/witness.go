package broker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sync/errgroup"
)

// witnessPrefix begins the keys, in the store of generations, under which is written
// down how new the record of a member is at least. No Node's key has so many parts.
const witnessPrefix = "member."

// namesTold bounds how many names a line lists.
const namesTold = 20

// witness is what is kept of a member in another store than its record: a server that
// finds a record broken at its start drops it without a word, and a name that is not
// known may be seeded.
type witness struct {
	Revision uint64 `json:"revision"` // the record is not older
	Revoked  bool   `json:"revoked,omitempty"`
}

// ErrMembersLost: what the store holds of the members is less than was written.
// Nobody is admitted, or one that was revoked might be.
var ErrMembersLost = errors.New("broker: a part of the members' store is lost")

// isLost reports that something is not in the stores that was.
func isLost(err error) bool {
	return errors.Is(err, ErrGenerationsLost) || errors.Is(err, ErrMembersLost)
}

// eventOf is what is logged of it.
func eventOf(lost error) string {
	if errors.Is(lost, ErrMembersLost) {
		return eventMembers
	}
	return eventGenerations
}

// attest writes down how new the record of a member is. It comes after the record: one
// that is newer than its witness is as good.
func (ms members) attest(ctx context.Context, id memberID) error {
	m, rev, err := ms.GetRevision(ctx, id)
	if err != nil {
		return err
	}
	return change(ctx, ms.witnesses, witnessPrefix+id.key(), "witness", func(w *witness, _ bool) (bool, error) {
		newer := w.Revision < rev
		if newer {
			*w = witness{Revision: rev, Revoked: m.Revoked}
		}
		return newer, nil
	})
}

// missingMember is one whose record is gone, or older than it was.
type missingMember struct {
	id      memberID
	revoked bool // it was
}

// missing compares the members with their witnesses.
func (ms members) missing(ctx context.Context) (out []missingMember, err error) {
	// The witnesses first: a record was never there after its witness.
	keys, err := listKeys(ctx, ms.witnesses, witnessPrefix+">")
	if err != nil {
		return nil, err
	}
	var mu sync.Mutex
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(generationReads)
	for _, key := range keys {
		id, ok := parseMemberKey(strings.TrimPrefix(key, witnessPrefix))
		if !ok {
			continue
		}
		group.Go(func() error {
			var w witness
			if err := change(ctx, ms.witnesses, key, "witness", func(is *witness, _ bool) (bool, error) { w = *is; return false, nil }); err != nil {
				return err
			}
			_, rev, err := ms.GetRevision(ctx, id)
			if err == nil && rev < w.Revision {
				mu.Lock()
				defer mu.Unlock()
				out = append(out, missingMember{id: id, revoked: w.Revoked})
			}
			return err
		})
	}
	err = group.Wait()
	slices.SortFunc(out, func(a, b missingMember) int { return strings.Compare(a.id.key(), b.id.key()) })
	return out, err
}

// attestAll makes the witnesses that are not there, or that a crash has left behind.
func (ms members) attestAll(ctx context.Context) error {
	keys, err := listKeys(ctx, ms.kv, ">")
	if err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(generationReads)
	for _, key := range keys {
		if id, ok := parseMemberKey(key); ok {
			group.Go(func() error { return ms.attest(ctx, id) })
		}
	}
	return group.Wait()
}

// checkMembers finds, before anything is seeded, whether records of members were lost.
// Where the operator restores, those that were revoked are so again, and of the others
// it is forgotten that they were there.
func (s *service) checkMembers(ctx context.Context) error {
	missing, err := s.members.missing(ctx)
	if err == nil && len(missing) > 0 && !s.b.alone {
		// A leader that is new may show an older state: what it writes is after all.
		if _, err = (generations{kv: s.members.kv}).skip(ctx); err == nil {
			missing, err = s.members.missing(ctx)
		}
	}
	if err != nil {
		return fmt.Errorf("broker: members: %w", err)
	}
	if len(missing) > 0 && s.b.restore == nil {
		info, err := patiently(ctx, s.generations.kv.led, func(ctx context.Context) (*jetstream.StreamInfo, error) { return s.generations.kv.info(ctx) })
		if err != nil {
			return fmt.Errorf("broker: read generations: %w", err)
		}
		return lostMembers(missing, info.State.LastSeq)
	}
	for _, m := range missing {
		if err := s.members.forgive(ctx, m, s.b.now()); err != nil {
			return fmt.Errorf("broker: restore: %w", err)
		}
	}
	return s.members.attestAll(ctx)
}

// forgive has a record that is missing begin anew. One that was revoked is so from now
// on, whatever an older record says.
func (ms members) forgive(ctx context.Context, is missingMember, now time.Time) error {
	_, rev, err := ms.GetRevision(ctx, is.id)
	switch {
	case err != nil:
	case rev != 0 && is.revoked: // an older one
		err = change(ctx, ms.kv, is.id.key(), "member", func(m *member, _ bool) (bool, error) {
			m.Revoked, m.RevokedAt = true, now
			return true, nil
		})
	case rev == 0 && is.revoked:
		// Whatever is there: the server may hold one that it cannot read, and compare with it.
		err = put(ctx, ms.kv, is.id.key(), member{Revoked: true, RevokedAt: now, Forgotten: true})
	case rev == 0:
		_, err = patiently(ctx, ms.kv.led, func(ctx context.Context) (struct{}, error) { return struct{}{}, ms.kv.Delete(ctx, is.id.key()) })
	}
	if err != nil {
		return err
	}
	if _, rev, err = ms.GetRevision(ctx, is.id); err != nil {
		return err
	}
	// Last: until then it is missing, and this is done again.
	return put(ctx, ms.witnesses, witnessPrefix+is.id.key(), witness{Revision: rev, Revoked: is.revoked})
}

// put writes a record over whatever there is.
func put(ctx context.Context, kv bucket, key string, v any) error {
	value, err := json.Marshal(v)
	if err != nil {
		return err
	}
	_, err = patiently(ctx, kv.led, func(ctx context.Context) (uint64, error) { return kv.Put(ctx, key, value) })
	return err
}

// lostMembers says whose records they are, and what mends it.
func lostMembers(missing []missingMember, above uint64) error {
	var names []string
	for _, m := range missing[:min(len(missing), namesTold)] {
		name := string(m.id.Role) + " " + m.id.Name
		if m.revoked {
			name += " (revoked)"
		}
		names = append(names, name)
	}
	if more := len(missing) - len(names); more > 0 {
		names = append(names, fmt.Sprintf("and %d more", more))
	}
	return fmt.Errorf("%w: the records of %s are gone, or older than they were. If there is a better copy of store_dir, put it back; "+
		"or move store_dir away and run 'iop restore' with a backup. If there is neither, run 'iop restore --generation-above %d' "+
		"with the --config of this broker (or the --data-dir of iop up) while it is stopped, and start it again: "+
		"who was revoked is so again, the others are as broker.members says, or must be invited anew",
		ErrMembersLost, strings.Join(names, ", "), above)
}
