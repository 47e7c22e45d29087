package broker

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/wire"
	"github.com/iop-fabric/iop/wire/iopv1"
)

func (f *fixture) ask(nc *nats.Conn, edge string, op subjects.Verb, req *iopv1.StoreRequest) *iopv1.StoreResponse {
	f.t.Helper()
	m, err := nc.Request(subjects.Store(edge, op), must(req.MarshalVT()), guard)
	if err != nil {
		f.t.Fatalf("%s: %v", op, err)
	}
	var resp iopv1.StoreResponse
	if err := resp.UnmarshalVT(m.Data); err != nil {
		f.t.Fatal(err)
	}
	return &resp
}

func listedKeys(resp *iopv1.StoreResponse) (keys []string) {
	for _, e := range resp.Entries {
		keys = append(keys, e.Key)
	}
	return keys
}

// The store compares revisions, tells of changes, and shows an Edge its own
// keys alone.
// Contract: B10
func TestStore(t *testing.T) {
	f := newFixture(t).start()
	one, two := f.edge("edge1"), f.edge("edge2")
	ctl := f.subscribe(one, subjects.CtlWildcard("edge1"))
	get := func(key string) *iopv1.StoreResponse {
		t.Helper()
		return f.ask(one, "edge1", subjects.Get, &iopv1.StoreRequest{Key: key})
	}
	put := func(key, value string, rev uint64) *iopv1.StoreResponse {
		t.Helper()
		return f.ask(one, "edge1", subjects.Put, &iopv1.StoreRequest{Key: key, Value: []byte(value), ExpectedRevision: rev})
	}

	if resp := get("lease/active"); len(resp.Entries) != 0 || resp.ErrorClass != "" {
		t.Errorf("get of nothing: %v", resp)
	}
	first := put("lease/active", "a", 0)
	if first.Revision == 0 || first.Conflict || first.ErrorClass != "" {
		t.Fatalf("create: %v", first)
	}
	if verb, n := f.notice(ctl); verb != subjects.Changed || n.Key != "lease/active" || n.Revision != first.Revision {
		t.Errorf("notice %s %v", verb, n)
	}
	if resp := put("lease/active", "b", 0); !resp.Conflict || resp.Revision != first.Revision {
		t.Errorf("create over an entry: %v", resp)
	}
	second := put("lease/active", "b", first.Revision)
	if second.Revision <= first.Revision || second.Conflict {
		t.Errorf("update: %v", second)
	}
	if resp := put("lease/active", "c", first.Revision); !resp.Conflict || resp.Revision != second.Revision {
		t.Errorf("update at an old revision: %v", resp)
	}
	if resp := get("lease/active"); len(resp.Entries) != 1 || string(resp.Entries[0].Value) != "b" || resp.Entries[0].Revision != second.Revision {
		t.Errorf("get: %v", resp)
	}

	put("keys/b", "", 0)
	put("keys/a", "", 0)
	if got := listedKeys(f.ask(one, "edge1", subjects.List, &iopv1.StoreRequest{Prefix: "keys/"})); !slices.Equal(got, []string{"keys/a", "keys/b"}) {
		t.Errorf("list: %v", got)
	}
	if got := f.ask(two, "edge2", subjects.List, &iopv1.StoreRequest{}); len(got.Entries) != 0 || got.ErrorClass != "" {
		t.Errorf("the other edge lists %v", got)
	}
	if got := f.ask(two, "edge2", subjects.Get, &iopv1.StoreRequest{Key: "lease/active"}); len(got.Entries) != 0 {
		t.Errorf("the other edge reads %v", got)
	}
}

// A list longer than a message comes in parts, each key once.
// Contract: B10
func TestStoreListsInParts(t *testing.T) {
	f := newFixture(t).start()
	nc := f.edge("edge1")
	var want []string
	for i := range 7 {
		key := fmt.Sprintf("big/%d", i)
		want = append(want, key)
		if resp := f.ask(nc, "edge1", subjects.Put, &iopv1.StoreRequest{Key: key, Value: bytes.Repeat([]byte{'x'}, wire.MaxStoreValue)}); resp.ErrorClass != "" {
			t.Fatalf("put: %v", resp.Error)
		}
	}
	var got []string
	last := ""
	for {
		resp := f.ask(nc, "edge1", subjects.List, &iopv1.StoreRequest{Prefix: "big/", Key: last})
		if len(resp.Entries) == 0 {
			break
		}
		if resp.SizeVT() > wire.MaxMessage {
			t.Errorf("a part of %d bytes", resp.SizeVT())
		}
		got = append(got, listedKeys(resp)...)
		last = got[len(got)-1]
	}
	if !slices.Equal(got, want) {
		t.Errorf("listed %v", got)
	}
}

// What is not a key, a value or a request is refused with a class, and nothing
// of it reaches the bucket.
// Contract: B10
func TestStoreRefuses(t *testing.T) {
	f := newFixture(t).start()
	nc := f.edge("edge1")
	for _, key := range []string{"", ".", "a..b", ".a", "a.", "*", ">", "a.*", "a.>", "a b", "a\r\nb", "ä", "$KV", strings.Repeat("k", 257)} {
		for _, op := range []subjects.Verb{subjects.Get, subjects.Put} {
			if resp := f.ask(nc, "edge1", op, &iopv1.StoreRequest{Key: key}); resp.ErrorClass == "" {
				t.Errorf("%s of %q: %v", op, key, resp)
			}
		}
	}
	if resp := f.ask(nc, "edge1", subjects.List, &iopv1.StoreRequest{Prefix: "*"}); resp.ErrorClass != string(wire.Invalid) {
		t.Errorf("list of *: %v", resp)
	}
	big := &iopv1.StoreRequest{Key: "k", Value: make([]byte, wire.MaxStoreValue+1)}
	if resp := f.ask(nc, "edge1", subjects.Put, big); resp.ErrorClass != string(wire.Invalid) {
		t.Errorf("a value over 64 KiB: %v", resp)
	}
	m, err := nc.Request(subjects.Store("edge1", subjects.Get), []byte{0xff, 0xff}, guard)
	if err != nil {
		t.Fatal(err)
	}
	var resp iopv1.StoreResponse
	if err := resp.UnmarshalVT(m.Data); err != nil || resp.ErrorClass != string(wire.Protocol) {
		t.Errorf("nonsense: %v, %v", &resp, err)
	}
}

// An Edge cannot have the service write into another Edge's inbox.
// Contract: B5 B10
func TestStoreAnswersOwnInboxOnly(t *testing.T) {
	f := newFixture(t).start()
	one, two := f.edge("edge1"), f.edge("edge2")
	victim := f.subscribe(two, subjects.EdgeInbox("edge2")+".>")
	req := must((&iopv1.StoreRequest{Key: "k"}).MarshalVT())
	for _, reply := range []string{subjects.EdgeInbox("edge2") + ".x", "iop.v1.edge2.ctl.admitted", "iop.v1.edge2.n1.1.down.fence"} {
		if err := one.PublishRequest(subjects.Store("edge1", subjects.Get), reply, req); err != nil {
			t.Fatal(err)
		}
	}
	// Requests are answered in order: once this one is, the others are done with.
	f.ask(one, "edge1", subjects.Get, &iopv1.StoreRequest{Key: "k"})
	if err := two.Flush(); err != nil {
		t.Fatal(err)
	}
	if n, _, err := victim.Pending(); err != nil || n != 0 {
		t.Errorf("%d messages in the other's inbox, %v", n, err)
	}
}
