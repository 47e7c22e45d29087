package dispatch

import (
	"testing"

	"pgregory.net/rapid"

	"github.com/iop-fabric/iop/edge/pool"
	"github.com/iop-fabric/iop/wire"
)

// Whatever happens in whatever order, the slot comes back at most once and not
// after its fence, one cancel is ordered at most, and the end is the end.
//
// Contract: P8 J4
func TestI1I2I3LifeGivesTheSlotBackOnce(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var (
			l                             life
			gives, cancels, removes, ends int
			fenced, terminal              bool
		)
		apply := func(o orders) {
			if o.give != 0 {
				if gives++; fenced {
					t.Fatal("given back after the fence took it")
				}
			}
			if o.cancel {
				if cancels++; terminal || fenced {
					t.Fatal("a cancel after the end")
				}
			}
			if o.remove {
				removes++
			}
			if o.over {
				ends++
			}
			if (l.state == over) != (ends == 1) {
				t.Fatalf("over was said %d times in state %d", ends, l.state)
			}
			if l.held() == (removes == 1) {
				t.Fatalf("removed %d times in state %d", removes, l.state)
			}
		}
		if rapid.IntRange(0, 9).Draw(t, "unsent") == 0 {
			apply(l.unsent())
		}
		var first *wire.Error
		for range rapid.IntRange(0, 12).Draw(t, "steps") {
			had := l.cut
			switch rapid.IntRange(0, 4).Draw(t, "event") {
			case 0:
				held := l.held()
				apply(l.terminal())
				terminal = terminal || held
			case 1:
				held := l.held()
				o := l.fence(wire.Errorf(wire.SessionEnded, "fenced"))
				if o.give != 0 {
					t.Fatal("a fence gives nothing back: the pool took it")
				}
				apply(o)
				fenced = fenced || held
			case 2:
				apply(l.cutBy(wire.Errorf(wire.Cancelled, "gone")))
			case 3:
				apply(l.bound())
			case 4:
				if l.state == open && l.cut == nil {
					continue // Do stays while nothing ended the attempt
				}
				apply(l.leave())
			}
			if had != nil && l.cut != had {
				t.Fatal("what ended the caller's side first does not stand")
			}
			if first == nil {
				first = l.cut
			}
		}
		// To its end: the caller leaves, the Node answers.
		apply(l.cutBy(wire.Errorf(wire.Cancelled, "gone")))
		if l.state == open || l.state == ended {
			apply(l.leave())
		}
		apply(l.terminal())
		if l.state != over || removes != 1 || ends != 1 || cancels > 1 {
			t.Fatalf("state %d, removed %d, over %d, cancels %d", l.state, removes, ends, cancels)
		}
		if want := 1; !fenced && gives != want {
			t.Fatalf("given back %d times", gives)
		}
		if fenced && gives != 0 {
			t.Fatal("fenced and given back")
		}
	})
}

func TestLifeBoundWithoutACancelIsNothing(t *testing.T) {
	var l life
	if o := l.bound(); o != (orders{}) {
		t.Fatalf("%+v", o)
	}
	l.cutBy(wire.Errorf(wire.Deadline, "late"))
	if o := l.bound(); o.give != pool.ByCancelBound || l.state != ended {
		t.Fatalf("%+v in state %d: the caller is still there", o, l.state)
	}
}

func TestLifePanicsWhenAnOpenAttemptIsLeft(t *testing.T) {
	defer func() {
		if recover() == nil {
			t.Fatal("no panic")
		}
	}()
	var l life
	l.leave()
}
