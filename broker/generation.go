package broker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/iop-fabric/iop/subjects"
)

// The buckets in AUTH. None of them is ever made anew; where generations went back,
// and an operator says above what they are to go on, what is below is purged.
const (
	bucketGenerations = "iop_generations"
	bucketMembers     = "iop_members"
	bucketStore       = "iop_store"
	bucketInvitations = "iop_invitations"
)

// maxStore bounds what all Edges keep together.
const maxStore = 64 << 20

// openBucket binds a bucket and makes it only where there is none: an existing
// one is never touched, its revisions are generations (G1).
//
// first is the revision a new one begins with.
func openBucket(ctx context.Context, js jetstream.JetStream, led *elections, name string, maxBytes int64, replicas int, first uint64) (b bucket, made bool, err error) {
	if b, err = bindBucket(ctx, js, led, name); errors.Is(err, jetstream.ErrBucketNotFound) {
		if maxBytes == 0 {
			maxBytes = -1
		}
		// As CreateKeyValue makes it, but that the leader alone reads: a replica that
		// lags would show an older generation, and with it refuse an honest Node.
		_, err = js.CreateStream(ctx, jetstream.StreamConfig{
			Name: "KV_" + name, Subjects: []string{"$KV." + name + ".>"},
			MaxMsgsPerSubject: 1, MaxBytes: maxBytes, Replicas: replicas,
			FirstSeq: first, Storage: jetstream.FileStorage, Discard: jetstream.DiscardNew, AllowRollup: true, DenyDelete: true,
		})
		made = err == nil
		if made || errors.Is(err, jetstream.ErrStreamNameAlreadyInUse) { // another service was quicker
			b, err = bindBucket(ctx, js, led, name)
		}
	}
	if err != nil {
		return b, made, fmt.Errorf("broker: bucket %s: %w", name, err)
	}
	return b, made, nil
}

// firstGeneration is where a new bucket of generations begins: at the time in
// milliseconds. Where there was one before, and it was lost, its generations are
// all below: it began earlier, and no fabric admits a thousand sessions a second
// for long. So no generation comes twice, though nobody remembers the last (G1).
func firstGeneration(now time.Time) uint64 { return uint64(max(now.UnixMilli(), 1)) } //nolint:gosec // not negative

// bucket is a bucket and the stream it is kept in.
type bucket struct {
	jetstream.KeyValue
	stream jetstream.Stream
	led    *elections
}

// Get, Create, Update, Put, Delete, purgeBelow and info do not meet the stores being opened anew.

// Get implements jetstream.KeyValue.
func (b bucket) Get(ctx context.Context, key string) (jetstream.KeyValueEntry, error) {
	b.led.open.RLock()
	defer b.led.open.RUnlock()
	return b.KeyValue.Get(ctx, key)
}

// Create implements jetstream.KeyValue.
func (b bucket) Create(ctx context.Context, key string, value []byte, opts ...jetstream.KVCreateOpt) (uint64, error) {
	b.led.open.RLock()
	defer b.led.open.RUnlock()
	return b.KeyValue.Create(ctx, key, value, opts...)
}

// Update implements jetstream.KeyValue.
func (b bucket) Update(ctx context.Context, key string, value []byte, revision uint64) (uint64, error) {
	b.led.open.RLock()
	defer b.led.open.RUnlock()
	return b.KeyValue.Update(ctx, key, value, revision)
}

// Put implements jetstream.KeyValue.
func (b bucket) Put(ctx context.Context, key string, value []byte) (uint64, error) {
	b.led.open.RLock()
	defer b.led.open.RUnlock()
	return b.KeyValue.Put(ctx, key, value)
}

// Delete implements jetstream.KeyValue.
func (b bucket) Delete(ctx context.Context, key string, opts ...jetstream.KVDeleteOpt) error {
	b.led.open.RLock()
	defer b.led.open.RUnlock()
	return b.KeyValue.Delete(ctx, key, opts...)
}

// purgeBelow takes out what is below a revision, and makes that one the next where
// there is none yet.
func (b bucket) purgeBelow(ctx context.Context, revision uint64) error {
	b.led.open.RLock()
	defer b.led.open.RUnlock()
	return b.stream.Purge(ctx, jetstream.WithPurgeSequence(revision))
}

func (b bucket) info(ctx context.Context, opts ...jetstream.StreamInfoOpt) (*jetstream.StreamInfo, error) {
	b.led.open.RLock()
	defer b.led.open.RUnlock()
	return b.stream.Info(ctx, opts...)
}

func bindBucket(ctx context.Context, js jetstream.JetStream, led *elections, name string) (b bucket, err error) {
	b.led = led
	b.KeyValue, err = patiently(ctx, led, func(ctx context.Context) (jetstream.KeyValue, error) { return js.KeyValue(ctx, name) })
	if err == nil {
		b.stream, err = patiently(ctx, led, func(ctx context.Context) (jetstream.Stream, error) { return js.Stream(ctx, "KV_"+name) })
	}
	return b, err
}

// admission is what a generation's record holds of its session: enough for any
// session service to sign its token.
type admission struct {
	Instance string `json:"instance"`
	NKey     string `json:"nkey"`
	Leaf     string `json:"leaf,omitempty"` // through which it came; empty: a broker
	// Root is whose key signed the certificate that was shown; see identity.IssuerOf.
	Root string `json:"root,omitempty"`
}

// generations hands out the numbers of sessions.
type generations struct {
	kv    bucket
	marks *marks
}

// Next is G1: one write, whose revision is the generation; one in markAhead writes
// the mark too. It fails with a conflict where the node's newest generation is not
// last.
func (g generations) Next(ctx context.Context, edge, node string, a admission, last uint64) (subjects.Session, error) {
	value, err := json.Marshal(a)
	if err != nil {
		return subjects.Session{}, err
	}
	mark := g.marks.known.Load()
	rev, err := patiently(ctx, g.kv.led, func(ctx context.Context) (uint64, error) { return g.kv.Update(ctx, edge+"."+node, value, last) })
	if err != nil {
		return subjects.Session{}, fmt.Errorf("next generation: %w", err)
	}
	session := subjects.Session{Edge: edge, Node: node, Gen: rev}
	return session, g.covered(ctx, session, mark)
}

// Newest returns the node's newest session and its record.
func (g generations) Newest(ctx context.Context, edge, node string) (s subjects.Session, a admission, err error) {
	e, err := patiently(ctx, g.kv.led, func(ctx context.Context) (jetstream.KeyValueEntry, error) { return g.kv.Get(ctx, edge+"."+node) })
	if err != nil {
		return s, a, fmt.Errorf("read generation: %w", err)
	}
	return subjects.Session{Edge: edge, Node: node, Gen: e.Revision()}, a, json.Unmarshal(e.Value(), &a)
}

// errSuperseded: the node has a newer generation.
var errSuperseded = errors.New("a newer session of this node was admitted")

// Current returns the record of a session that is its node's newest.
func (g generations) Current(ctx context.Context, s subjects.Session) (admission, error) {
	newest, a, err := g.Newest(ctx, s.Edge, s.Node)
	switch {
	case err != nil:
		return a, err
	case newest.Gen > s.Gen:
		return a, errSuperseded
	case newest.Gen < s.Gen:
		return a, errStale
	}
	return a, nil
}

// errStale: the store does not show a write yet that it has acknowledged.
var errStale = errors.New("read generation: the store is behind")

const (
	// tryBound is how long the first try may take: a store that is led answers in
	// milliseconds. Each one that is not answered at all makes the next longer, for
	// a machine that is only slow.
	tryBound = 250 * time.Millisecond
	tryLimit = time.Second
	tryPause = 50 * time.Millisecond
)

// patiently tries an operation on a store again while the store has no leader:
// what was sent to the one that was lost is answered by nobody. Once there is a
// new one nobody waits for an answer of the old. A write that was carried out all
// the same meets its own revision: a conflict.
func patiently[T any](ctx context.Context, led *elections, do func(context.Context) (T, error)) (v T, err error) {
	for bound := tryBound; ; {
		elected := led.next()
		try, cancel := context.WithTimeout(ctx, bound)
		stop := context.AfterFunc(elected, cancel)
		v, err = do(try)
		stop()
		cancel()
		switch {
		case err == nil || ctx.Err() != nil:
			return v, err
		case elected.Err() != nil && errors.Is(err, context.Canceled):
			bound = tryBound
			continue
		case isFull(err) || !isLeaderless(err):
			return v, err
		case errors.Is(err, context.DeadlineExceeded) || errors.Is(err, nats.ErrTimeout):
			bound = min(2*bound, tryLimit)
		}
		pause := time.NewTimer(tryPause)
		select {
		case <-pause.C:
		case <-ctx.Done():
			pause.Stop()
			return v, err
		}
	}
}

func isLeaderless(err error) bool {
	var api *jetstream.APIError
	return errors.Is(err, context.DeadlineExceeded) || errors.Is(err, nats.ErrTimeout) || errors.Is(err, nats.ErrNoResponders) ||
		errors.Is(err, jetstream.ErrNoStreamResponse) || (errors.As(err, &api) && api.Code == 503)
}
