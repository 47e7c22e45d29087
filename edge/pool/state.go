package pool

import "time"

// Pool is the state. One goroutine owns it.
type Pool struct{}

// New makes an empty pool; step SetConfig first.
func New() *Pool { return &Pool{} }

// Step takes one event at a time, and appends what must follow to out.
func (p *Pool) Step(now time.Time, ev Event, out []Effect) []Effect { return out }

// Deadline is when DeadlinePassed is due; zero: never.
func (p *Pool) Deadline() time.Time { return time.Time{} }

// Models lists what the groups offer, by name. The slice is never changed: it
// may be shared. A new one comes with each CatalogChanged.
func (p *Pool) Models() []Model { return nil }

// Snapshot computes the numbers of now.
func (p *Pool) Snapshot() Snapshot { return Snapshot{} }
