package edge

import "time"

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
	of map[string]*budget // by node
}

type budget struct {
	gen    uint64
	tokens float64
	at     time.Time
	over   int
}

// budgetNodes bounds the map: nodes are configured, but names come from subjects.
const budgetNodes = 1 << 16

// take says whether the session may say one more thing now; misbehaved is true
// once each time it has gone far beyond.
func (b *budgets) take(now time.Time, node string, gen uint64) (ok, misbehaved bool) {
	s := b.of[node]
	if s == nil || gen > s.gen {
		if s == nil && len(b.of) >= budgetNodes {
			return false, false
		}
		s = &budget{gen: gen, tokens: budgetBurst, at: now}
		b.of[node] = s
	}
	s.tokens = min(budgetBurst, s.tokens+now.Sub(s.at).Seconds()*budgetRate)
	s.at = now
	if s.tokens >= 1 {
		s.tokens--
		s.over = max(0, s.over-10)
		return true, false
	}
	if s.over++; s.over == budgetOver {
		s.over = 0
		return false, true
	}
	return false, false
}
