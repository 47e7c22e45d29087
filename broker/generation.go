package broker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/iop-fabric/iop/subjects"
)

// The buckets in AUTH. None of them is ever purged or made anew.
const (
	bucketGenerations = "iop_generations"
	bucketMembers     = "iop_members"
	bucketStore       = "iop_store"
)

// maxStore bounds what all Edges keep together.
const maxStore = 64 << 20

// openBucket binds a bucket and makes it only where there is none: an existing
// one is never touched, its revisions are generations (G1).
func openBucket(ctx context.Context, js jetstream.JetStream, name string, maxBytes int64, replicas int) (jetstream.KeyValue, error) {
	kv, err := js.KeyValue(ctx, name)
	if errors.Is(err, jetstream.ErrBucketNotFound) {
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
			kv, err = js.KeyValue(ctx, name)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("broker: bucket %s: %w", name, err)
	}
	return kv, nil
}

// admission is what a generation's record holds of its session: enough for any
// session service to sign its token.
type admission struct {
	Instance string `json:"instance"`
	NKey     string `json:"nkey"`
	Leaf     string `json:"leaf,omitempty"` // through which it came; empty: a broker
}

// generations hands out the numbers of sessions.
type generations struct{ kv jetstream.KeyValue }

// Next is G1: one write, whose revision is the generation. It fails with a
// conflict where the node's newest generation is not last.
func (g generations) Next(ctx context.Context, edge, node string, a admission, last uint64) (subjects.Session, error) {
	value, err := json.Marshal(a)
	if err != nil {
		return subjects.Session{}, err
	}
	rev, err := g.kv.Update(ctx, edge+"."+node, value, last)
	if err != nil {
		return subjects.Session{}, fmt.Errorf("next generation: %w", err)
	}
	return subjects.Session{Edge: edge, Node: node, Gen: rev}, nil
}

// Newest returns the node's newest session and its record.
func (g generations) Newest(ctx context.Context, edge, node string) (s subjects.Session, a admission, err error) {
	e, err := g.kv.Get(ctx, edge+"."+node)
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
