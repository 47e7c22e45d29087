package edge

import (
	"testing"
	"time"
)

// One session's flood costs that session alone; what an honest one says always
// fits.
//
// Contract: Z5 J8
func TestBudgets(t *testing.T) {
	b := budgets{of: map[string]*budget{}}
	now := time.Unix(0, 0)
	lost := 0
	for range 10 * time.Second / time.Millisecond { // ten a millisecond, for ten seconds
		for range 10 {
			if _, bad := b.take(now, "evil", 7); bad {
				lost++
			}
		}
		if now.UnixMilli()%500 == 0 { // the honest one: two a second
			if ok, bad := b.take(now, "honest", 3); !ok || bad {
				t.Fatalf("at %v the honest session was refused", now)
			}
		}
		now = now.Add(time.Millisecond)
	}
	if lost == 0 {
		t.Error("the flood cost its session nothing")
	}
	if ok, _ := b.take(now, "evil", 8); !ok {
		t.Error("a new session begins with the old one's debt")
	}
}
