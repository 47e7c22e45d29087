package broker

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/iop-fabric/iop/subjects"
)

const (
	// markKey is where, beside the members, it is written down how far generations
	// may have gone: a store of its own must not be the only one that knows. It is
	// no name of a member.
	markKey = "generations"
	// markAhead is how far the mark is ahead of what was given: one admission in so
	// many writes twice, and a start leaves at most so many generations out.
	markAhead = 32
	// skipKey is of no Node. What is written to it takes generations that nobody gets.
	skipKey = "skip"
)

// mark is what is kept under markKey.
type mark struct {
	// Generation: none above it was given to anybody.
	Generation uint64 `json:"generation"`
}

// ErrGenerationsLost: what the store holds of generations is less than was given.
// Nobody is admitted, or a generation might come twice (G1).
var ErrGenerationsLost = errors.New("broker: a part of the store is lost")

// lost says so, and what mends it.
func lost(how string, above uint64) error {
	return fmt.Errorf("%w: %s, though generations up to %d may have been given. What else is lost cannot be told: "+
		"if there is a better copy of store_dir, put it back. Then, or if there is none, run 'iop restore --generation-above %d' "+
		"with the --config of this broker (or the --data-dir of iop up) while it is stopped, and start it again",
		ErrGenerationsLost, how, above, above)
}

// marks keeps the mark ahead of what is given.
type marks struct {
	kv    bucket        // the members'
	known atomic.Uint64 // what is surely written
	mu    sync.Mutex    // one writes at a time
	asked bool          // resume has written to see where the store is
}

// read returns the mark; zero: there is none yet.
func (m *marks) read(ctx context.Context) (v mark, err error) {
	err = change(ctx, m.kv, markKey, "mark", func(is *mark, _ bool) (bool, error) { v = *is; return false, nil })
	return v, err
}

// cover returns once a generation is not above the mark: before that nobody may
// have it.
func (m *marks) cover(ctx context.Context, generation uint64) error {
	if generation <= m.known.Load() {
		return nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if generation <= m.known.Load() {
		return nil // another has written meanwhile
	}
	var is uint64
	err := change(ctx, m.kv, markKey, "mark", func(v *mark, _ bool) (bool, error) {
		raise := v.Generation < generation
		if raise {
			v.Generation = generation + markAhead
		}
		is = v.Generation
		return raise, nil
	})
	if err == nil {
		m.known.Store(is)
	}
	return err
}

// openGenerations opens the store of generations, or makes it where there was
// none, and goes on above all that were given.
func (s *service) openGenerations(ctx context.Context, js jetstream.JetStream) error {
	if s.generations.marks == nil {
		s.generations.marks = &marks{kv: s.members.kv}
	}
	// Read in this order: a mark was never there before its store.
	was, err := s.generations.marks.read(ctx)
	if err != nil {
		return err
	}
	known, err := listKeys(ctx, s.members.kv, ">")
	if err != nil {
		return err
	}
	first := firstGeneration(s.b.now())
	if s.b.restore != nil {
		first = max(first, s.b.restore.Generation+1, was.Generation+1)
	} else if len(known) > 0 {
		b, err := bindBucket(ctx, js, s.led, bucketGenerations)
		if errors.Is(err, jetstream.ErrBucketNotFound) {
			return lost("there is no store of generations", max(was.Generation, first))
		}
		if err != nil {
			return fmt.Errorf("broker: bucket %s: %w", bucketGenerations, err)
		}
		s.generations.kv = b
	}
	if s.generations.kv.KeyValue == nil {
		made := false
		if s.generations.kv, made, err = openBucket(ctx, js, s.led, bucketGenerations, 0, s.b.replicas, first); err != nil {
			return err
		}
		s.madeStore(made, bucketGenerations, first)
	}
	s.members.witnesses = s.generations.kv
	if s.b.restore != nil {
		// Before raise, which may take the witnesses away.
		if err := s.checkMembers(ctx); err != nil {
			return err
		}
		if err := s.generations.raise(ctx, max(s.b.restore.Generation, was.Generation)); err != nil {
			return err
		}
	}
	if err := s.generations.resume(ctx, s.b.alone); err != nil {
		return err
	}
	return s.checkMembers(ctx)
}

// skip takes a generation that nobody gets. Like every write of a running service to
// this bucket it names the revision that it follows: the server has a race between the
// first write that does and one before it that does not.
func (g generations) skip(ctx context.Context) (uint64, error) {
	return replace(ctx, g.kv, skipKey, "generation", func([]byte, bool) ([]byte, bool, error) { return nil, true, nil })
}

// resume leaves out what may have been given and is not in the store any more.
// The mark is never more than markAhead above what was stored when it was written:
// where the store is further below, it has lost more than its last moments.
func (g generations) resume(ctx context.Context, alone bool) error {
	was, err := g.marks.read(ctx)
	if err != nil {
		return err
	}
	info, err := patiently(ctx, g.kv.led, func(ctx context.Context) (*jetstream.StreamInfo, error) { return g.kv.info(ctx) })
	if err != nil {
		return fmt.Errorf("read generations: %w", err)
	}
	last := info.State.LastSeq
	if last+markAhead < was.Generation && !alone && !g.marks.asked {
		// A leader that is new may show an older state: what it writes is after all.
		// Once, or who asks again and again would come near the mark.
		g.marks.asked = true
		if last, err = g.skip(ctx); err != nil {
			return err
		}
	}
	if last+markAhead < was.Generation {
		return lost(fmt.Sprintf("the store of generations ends at %d", last), was.Generation)
	}
	for last < was.Generation && err == nil {
		last, err = g.skip(ctx)
	}
	if err == nil {
		err = g.marks.cover(ctx, last)
	}
	return err
}

// raise makes the next generation one above. What the store still holds of older
// sessions goes, they have ended. Two that raise at once undo nothing of each other.
func (g generations) raise(ctx context.Context, above uint64) error {
	rev, err := g.skip(ctx)
	if err == nil && rev <= above {
		_, err = patiently(ctx, g.kv.led, func(ctx context.Context) (struct{}, error) {
			return struct{}{}, g.kv.purgeBelow(ctx, above+1)
		})
		if err == nil {
			rev, err = g.skip(ctx)
		}
	}
	if err == nil && rev <= above {
		err = fmt.Errorf("broker: restore: generations go on at %d, not above %d", rev, above)
	}
	if err == nil {
		err = g.marks.cover(ctx, rev)
	}
	return err
}

// covered says whether a generation may be given out that was written after the
// mark was known to be at before.
func (g generations) covered(ctx context.Context, s subjects.Session, before uint64) error {
	if s.Gen+markAhead < before {
		return lost(fmt.Sprintf("the store of generations fell back to %d", s.Gen), before)
	}
	if err := g.marks.cover(ctx, s.Gen); err != nil {
		return fmt.Errorf("next generation: %w", err)
	}
	return nil
}
