package broker

import (
	"context"
	"errors"
	"slices"
	"strings"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/wire"
	"github.com/iop-fabric/iop/wire/iopv1"
)

// maxStoreKey bounds a key of an Edge's store.
const maxStoreKey = 256

// store is B10: each Edge's own keys, in one bucket, below its name.
type store struct{ kv bucket }

// validStoreKey: letters, digits and "-_=/.", no empty token. It is what KV
// takes, and no character of it can widen a subject.
func validStoreKey(key string) bool {
	if key == "" || len(key) > maxStoreKey || strings.HasPrefix(key, ".") || strings.HasSuffix(key, ".") || strings.Contains(key, "..") {
		return false
	}
	return validStorePrefix(key)
}

func validStorePrefix(prefix string) bool {
	if len(prefix) > maxStoreKey {
		return false
	}
	for i := 0; i < len(prefix); i++ {
		c := prefix[i]
		if (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && !strings.ContainsRune("-_=/.", rune(c)) {
			return false
		}
	}
	return true
}

func storeFailure(class wire.Class, text string) *iopv1.StoreResponse {
	return &iopv1.StoreResponse{Error: text, ErrorClass: string(class)}
}

var errStoreUnavailable = storeFailure(wire.Unreachable, "the store could not be asked")

// Do carries out one operation of one Edge. changed says that a key has a new
// revision, of which the Edge is to be told.
func (s store) Do(ctx context.Context, edge string, op subjects.Verb, data []byte) (resp *iopv1.StoreResponse, key string, changed bool) {
	var req iopv1.StoreRequest
	if err := req.UnmarshalVT(data); err != nil {
		return storeFailure(wire.Protocol, "the request cannot be read"), "", false
	}
	switch op {
	case subjects.Get:
		return s.get(ctx, edge, &req), "", false
	case subjects.Put:
		resp = s.put(ctx, edge, &req)
		return resp, req.Key, resp.ErrorClass == "" && !resp.Conflict
	case subjects.List:
		return s.list(ctx, edge, &req), "", false
	default:
		return storeFailure(wire.Invalid, "no such operation"), "", false
	}
}

func (s store) get(ctx context.Context, edge string, req *iopv1.StoreRequest) *iopv1.StoreResponse {
	if !validStoreKey(req.Key) {
		return storeFailure(wire.Invalid, "the key is not valid")
	}
	e, err := s.kv.Get(ctx, edge+"."+req.Key)
	switch {
	case errors.Is(err, jetstream.ErrKeyNotFound):
		return &iopv1.StoreResponse{} // no entry: there is none
	case err != nil:
		return errStoreUnavailable
	}
	return &iopv1.StoreResponse{
		Entries:  []*iopv1.StoreEntry{{Key: req.Key, Value: e.Value(), Revision: e.Revision()}},
		Revision: e.Revision(),
	}
}

// put writes at the expected revision alone. A conflict says which revision is
// there instead.
func (s store) put(ctx context.Context, edge string, req *iopv1.StoreRequest) *iopv1.StoreResponse {
	switch {
	case !validStoreKey(req.Key):
		return storeFailure(wire.Invalid, "the key is not valid")
	case len(req.Value) > wire.MaxStoreValue:
		return storeFailure(wire.Invalid, "the value is larger than 64 KiB")
	}
	key := edge + "." + req.Key
	var rev uint64
	var err error
	if req.ExpectedRevision == 0 {
		rev, err = s.kv.Create(ctx, key, req.Value)
	} else {
		rev, err = s.kv.Update(ctx, key, req.Value, req.ExpectedRevision)
	}
	switch {
	case err == nil:
		return &iopv1.StoreResponse{Revision: rev}
	case isConflict(err):
		resp := &iopv1.StoreResponse{Conflict: true}
		if e, err := s.kv.Get(ctx, key); err == nil {
			resp.Revision = e.Revision()
		}
		return resp
	case isFull(err):
		return storeFailure(wire.Capacity, "the store is full")
	}
	return errStoreUnavailable
}

// list returns the keys with the prefix, sorted, those after req.key only and
// as many as one message holds. A caller asks again after the last key it got,
// until an answer is empty.
func (s store) list(ctx context.Context, edge string, req *iopv1.StoreRequest) *iopv1.StoreResponse {
	if !validStorePrefix(req.Prefix) || !validStorePrefix(req.Key) {
		return storeFailure(wire.Invalid, "the prefix is not valid")
	}
	keys, err := listKeys(ctx, s.kv, edge+".>")
	if err != nil {
		return errStoreUnavailable
	}
	keys = slices.DeleteFunc(keys, func(key string) bool {
		key = strings.TrimPrefix(key, edge+".")
		return !strings.HasPrefix(key, req.Prefix) || key <= req.Key
	})
	resp := &iopv1.StoreResponse{}
	room := wire.MaxMessage - 1024
	for _, key := range keys {
		e, err := s.kv.Get(ctx, key)
		if errors.Is(err, jetstream.ErrKeyNotFound) {
			continue
		}
		if err != nil {
			return errStoreUnavailable
		}
		entry := &iopv1.StoreEntry{Key: strings.TrimPrefix(key, edge+"."), Value: e.Value(), Revision: e.Revision()}
		if room -= entry.SizeVT() + 8; room < 0 {
			break
		}
		resp.Entries = append(resp.Entries, entry)
	}
	return resp
}

// isFull reports that the bucket's bound, or the disk's, is reached.
func isFull(err error) bool {
	var api *jetstream.APIError
	return errors.As(err, &api) && slices.Contains(codesFull, api.ErrorCode)
}

// newStoreRoom is what must be free where stores are made: the server counts on three
// quarters of it.
const newStoreRoom = maxStore/3*4 + 1<<20

// isNoRoom reports that there is less than a new bucket may take.
func isNoRoom(err error) bool {
	var api *jetstream.APIError
	return errors.As(err, &api) && api.ErrorCode == codeNoRoom
}

// codeNoRoom is JetStream's "insufficient storage resources available".
const codeNoRoom jetstream.ErrorCode = 10047

// codesFull are JetStream's "message was not stored", which a bucket at its bound
// and a disk without room answer, and "insufficient" and "maximum" of its storage.
var codesFull = []jetstream.ErrorCode{10077, 10023, codeNoRoom}
