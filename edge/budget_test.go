package edge

import (
	"strconv"
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
	if lost == 0 || lost > 8 {
		t.Errorf("a flood of 100,000 was told %d times", lost)
	}
	if ok, _ := b.take(now, "evil", 8); !ok {
		t.Error("a new session begins with the old one's debt")
	}
	for range 1000 {
		b.take(now, "evil", 7)
	}
	if ok, _ := b.take(now, "evil", 8); !ok {
		t.Error("a new session pays for what the old one still says")
	}
}

// Names that somebody made up keep no node out for good.
//
// Contract: Z6
func TestBudgetsOfMadeUpNames(t *testing.T) {
	b := budgets{of: map[string]*budget{}}
	now := time.Unix(1000, 0)
	for i := range 2 * budgetNodes {
		b.take(now, strconv.Itoa(i), 1)
	}
	if len(b.of) > budgetNodes {
		t.Errorf("%d names are remembered", len(b.of))
	}
	if ok, _ := b.take(now.Add(budgetIdle), "honest", 1); !ok {
		t.Error("an honest node is kept out")
	}
}
