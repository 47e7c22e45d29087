package edge

import (
	"maps"
	"time"
)

// What one session may say beside frames and acknowledgements: honest sessions
// beat once a second and repeat a request once a second.
const (
	budgetRate  = 20 // a second
	budgetBurst = 60
	// budgetOver is how much more than that ends the session (J8); each message
	// within the budget forgives ten.
	budgetOver = 1000
)

// budgets bound what each session may put into the loop's inbox, so that one
// that floods is alone with its flood (Z5). The bus callback's goroutine owns it.
type budgets struct {
	of    map[string]*budget // by node
	swept time.Time          // when those that say nothing were last forgotten
}

type budget struct {
	gen    uint64
	tokens float64
	at     time.Time
	over   int
	limit  int // of over, until it is said (again)
}

const (
	// budgetNodes bounds the map: nodes are configured, but names come from subjects,
	// and a leaf can make them up.
	budgetNodes = 1 << 16
	// budgetIdle is when a session that says nothing is forgotten, where there is no
	// room for others: its budget is whole again by then.
	budgetIdle = budgetBurst / budgetRate * time.Second
)

// take says whether the session may say one more thing now; misbehaved is true
// once each time it has gone far beyond.
func (b *budgets) take(now time.Time, node string, gen uint64) (ok, misbehaved bool) {
	s := b.of[node]
	if s != nil && gen < s.gen { // what an older session still says is not the newer one's debt
		node = "older." + node // no node is called so
		s = b.of[node]
	}
	if s == nil || gen > s.gen {
		if s == nil && len(b.of) >= budgetNodes && !b.sweep(now) {
			return false, false
		}
		s = &budget{gen: gen, tokens: budgetBurst, at: now, limit: budgetOver}
		b.of[node] = s
	}
	s.tokens = min(budgetBurst, s.tokens+now.Sub(s.at).Seconds()*budgetRate)
	s.at = now
	if s.tokens >= 1 {
		s.tokens--
		s.over = max(0, s.over-10)
		return true, false
	}
	if s.over++; s.over >= s.limit {
		s.over, s.limit = 0, 2*s.limit // one that floods on is not worth a line each time
		return false, true
	}
	return false, false
}

// sweep makes room, once in budgetIdle, and says whether there is some.
func (b *budgets) sweep(now time.Time) bool {
	if now.Sub(b.swept) >= budgetIdle {
		b.swept = now
		maps.DeleteFunc(b.of, func(_ string, s *budget) bool { return now.Sub(s.at) >= budgetIdle })
	}
	return len(b.of) < budgetNodes
}
