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

// The buckets in AUTH. None of them is ever purged or made anew.
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
func openBucket(ctx context.Context, js jetstream.JetStream, name string, maxBytes int64, replicas int) (b bucket, err error) {
	if b, err = bindBucket(ctx, js, name); errors.Is(err, jetstream.ErrBucketNotFound) {
		if maxBytes == 0 {
			maxBytes = -1
		}
		// As CreateKeyValue makes it, but that the leader alone reads: a replica that
		// lags would show an older generation, and with it refuse an honest Node.
		_, err = js.CreateStream(ctx, jetstream.StreamConfig{
			Name: "KV_" + name, Subjects: []string{"$KV." + name + ".>"},
			MaxMsgsPerSubject: 1, MaxBytes: maxBytes, Replicas: replicas,
			Storage: jetstream.FileStorage, Discard: jetstream.DiscardNew, AllowRollup: true, DenyDelete: true,
		})
		if err == nil || errors.Is(err, jetstream.ErrStreamNameAlreadyInUse) { // another service was quicker
			b, err = bindBucket(ctx, js, name)
		}
	}
	if err != nil {
		return b, fmt.Errorf("broker: bucket %s: %w", name, err)
	}
	return b, nil
}

// bucket is a bucket and the stream it is kept in.
type bucket struct {
	jetstream.KeyValue
	stream jetstream.Stream
}

func bindBucket(ctx context.Context, js jetstream.JetStream, name string) (b bucket, err error) {
	b.KeyValue, err = patiently(ctx, func(ctx context.Context) (jetstream.KeyValue, error) { return js.KeyValue(ctx, name) })
	if err == nil {
		b.stream, err = patiently(ctx, func(ctx context.Context) (jetstream.Stream, error) { return js.Stream(ctx, "KV_"+name) })
	}
	return b, err
}

// admission is what a generation's record holds of its session: enough for any
// session service to sign its token.
type admission struct {
	Instance string `json:"instance"`
	NKey     string `json:"nkey"`
	Leaf     string `json:"leaf,omitempty"` // through which it came; empty: a broker
}

// generations hands out the numbers of sessions.
type generations struct{ kv bucket }

// Next is G1: one write, whose revision is the generation. It fails with a
// conflict where the node's newest generation is not last.
func (g generations) Next(ctx context.Context, edge, node string, a admission, last uint64) (subjects.Session, error) {
	value, err := json.Marshal(a)
	if err != nil {
		return subjects.Session{}, err
	}
	rev, err := patiently(ctx, func(ctx context.Context) (uint64, error) { return g.kv.Update(ctx, edge+"."+node, value, last) })
	if err != nil {
		return subjects.Session{}, fmt.Errorf("next generation: %w", err)
	}
	return subjects.Session{Edge: edge, Node: node, Gen: rev}, nil
}

// Newest returns the node's newest session and its record.
func (g generations) Newest(ctx context.Context, edge, node string) (s subjects.Session, a admission, err error) {
	e, err := patiently(ctx, func(ctx context.Context) (jetstream.KeyValueEntry, error) { return g.kv.Get(ctx, edge+"."+node) })
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
	firstTry = 500 * time.Millisecond // each next one may take twice as long
	tryPause = 50 * time.Millisecond
)

// patiently tries an operation on a store again while the store has no leader:
// what was sent to the one that was lost is answered by nobody. A write that
// was carried out all the same meets its own revision: a conflict.
func patiently[T any](ctx context.Context, do func(context.Context) (T, error)) (v T, err error) {
	for bound := firstTry; ; bound *= 2 {
		try, cancel := context.WithTimeout(ctx, bound)
		v, err = do(try)
		cancel()
		if err == nil || !isLeaderless(err) {
			return v, err
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
