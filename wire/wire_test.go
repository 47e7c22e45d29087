package wire_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/iop-fabric/iop/wire"
)

// Contract: M3
func TestClasses(t *testing.T) {
	for _, c := range wire.Classes {
		if got := wire.ParseClass(string(c)); got != c {
			t.Errorf("ParseClass(%s) = %s", c, got)
		}
	}
	for _, s := range []string{"", "oom", "Invalid", "capacity "} {
		if got := wire.ParseClass(s); got != wire.Protocol {
			t.Errorf("ParseClass(%q) = %s: a class outside the list is a breach", s, got)
		}
	}
	for _, c := range []struct {
		err  error
		want wire.Class
	}{
		{nil, ""},
		{errors.New("x"), wire.Internal},
		{fmt.Errorf("a: %w", wire.Errorf(wire.Capacity, "full")), wire.Capacity},
		{fmt.Errorf("a: %w", context.Canceled), wire.Cancelled},
		{context.DeadlineExceeded, wire.Deadline},
	} {
		if got := wire.ClassOf(c.err); got != c.want {
			t.Errorf("ClassOf(%v) = %s, want %s", c.err, got, c.want)
		}
	}
	cause := errors.New("cause")
	if err := wire.Errorf(wire.Provider, "call: %w", cause); !errors.Is(err, cause) || wire.IsRemote(err) {
		t.Error("Errorf loses its cause, or calls itself remote")
	}
	if !wire.IsRemote(fmt.Errorf("x: %w", wire.FromPeer("capacity", "full"))) {
		t.Error("FromPeer is not remote")
	}
}

// Contract: X6
func TestRunIDs(t *testing.T) {
	seen := map[string]bool{}
	for range 10000 {
		id := wire.NewRunID()
		if !wire.ValidRunID(id) || seen[id] {
			t.Fatalf("bad or repeated id %q", id)
		}
		seen[id] = true
	}
	for _, bad := range []string{"", "abc", "ABCDEFGHIJKLMNOPQRSTUVWX", "aaaaaaaaaaaaaaaaaaaa.", "aaaaaaaaaaaaaaaaaaa*a", string(make([]byte, 26))} {
		if wire.ValidRunID(bad) {
			t.Errorf("ValidRunID(%q)", bad)
		}
	}
}
