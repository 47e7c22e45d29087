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
func openBucket(ctx context.Context, js jetstream.JetStream, name string, maxBytes int64) (jetstream.KeyValue, error) {
	kv, err := js.KeyValue(ctx, name)
	if errors.Is(err, jetstream.ErrBucketNotFound) {
		kv, err = js.CreateKeyValue(ctx, jetstream.KeyValueConfig{
			Bucket: name, History: 1, Storage: jetstream.FileStorage, MaxBytes: maxBytes,
		})
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

// Next is G1: one write, whose revision is the generation.
func (g generations) Next(ctx context.Context, edge, node string, a admission) (subjects.Session, error) {
	value, err := json.Marshal(a)
	if err != nil {
		return subjects.Session{}, err
	}
	rev, err := g.kv.Put(ctx, edge+"."+node, value)
	if err != nil {
		return subjects.Session{}, fmt.Errorf("next generation: %w", err)
	}
	return subjects.Session{Edge: edge, Node: node, Gen: rev}, nil
}

// errSuperseded: the node has a newer generation.
var errSuperseded = errors.New("a newer session of this node was admitted")

// Current returns the record of a session that is its node's newest.
func (g generations) Current(ctx context.Context, s subjects.Session) (admission, error) {
	var a admission
	e, err := g.kv.Get(ctx, s.Edge+"."+s.Node)
	switch {
	case err != nil:
		return a, fmt.Errorf("read generation: %w", err)
	case e.Revision() != s.Gen:
		return a, errSuperseded
	}
	return a, json.Unmarshal(e.Value(), &a)
}
