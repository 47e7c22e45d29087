package pool

// Slot is the immutable record that one attempt occupies one place of one
// provider (the contract's provider lease). It is bound to what it names, also
// when the configuration changes.
type Slot struct {
	ID       uint64
	Provider string // "<node>/<adapter>/<target>", or the configured id
	Node     string
	Gen      uint64
	Adapter  string
	Target   string
	Long     bool // it holds a long-context place too
}

// Return says how a slot came back (P8): exactly one of these, once.
type Return uint8

// The ways.
const (
	ByTerminal    Return = iota + 1 // its current terminal
	ByFence                         // its generation's fence; the pool does this itself
	ByNotSent                       // the dispatch never left Edge
	ByCancelBound                   // a cancel that nobody answered in time
)

func (r Return) String() string {
	return [...]string{"", "terminal", "fence", "not_sent", "cancel_bound"}[r]
}
