package pool

import "time"

// WaiterID names one request in the queue. The caller of Enqueue chooses it and
// never uses it again.
type WaiterID uint64

// Request says what a caller needs.
type Request struct {
	Waiter    WaiterID
	Model     string
	Principal string
	Operation string
	// PromptTokens is the estimated length of its prompt: where it reaches a
	// provider's LongThreshold, it needs a long-context place there too (Q2).
	PromptTokens int64
	// Affinity tells requests apart that profit from the same provider, such as
	// those of one conversation; 0: it does not matter (Q1).
	Affinity uint64
	MaxWait  time.Duration // 0, or more than Queue.Wait: Queue.Wait
	// Avoid names providers an earlier attempt failed on, the last one last: they are
	// no candidates of this request. The pool does not keep or change the slice.
	Avoid []string
}

// Event is one thing that happened; make it with the functions below.
type Event struct {
	kind    eventKind
	on      bool
	how     Return
	waiter  WaiterID
	slot    uint64
	gen     uint64
	node    string
	name    string // adapter, provider
	cause   string
	request *Request
	config  *Config
	targets []string
}

type eventKind uint8

const (
	evSetConfig eventKind = iota + 1
	evEnqueue
	evCancelWaiter
	evReturnSlot
	evActivate
	evFence
	evSetDraining
	evAdoptTargets
	evOverlay
	evDeadlinePassed
	evStopping
)

// SetConfig replaces the whole configuration. Slots and waiting requests stay;
// a request whose model is gone keeps its place until its wait ends. The pool
// keeps c; nobody changes it any more.
func SetConfig(c Config) Event { return Event{kind: evSetConfig, config: &c} }

// Enqueue asks for a slot. The answer is one Granted or Refused for r.Waiter,
// in this step or a later one, unless CancelWaiter comes before. r is read
// during the step only.
func Enqueue(r *Request) Event { return Event{kind: evEnqueue, request: r} }

// CancelWaiter takes a request out of the queue. If it was granted or refused
// already, nothing happens: a slot that came too late is returned by whoever
// got it.
func CancelWaiter(id WaiterID) Event { return Event{kind: evCancelWaiter, waiter: id} }

// ReturnSlot gives a slot back (P8); how is any but ByFence.
func ReturnSlot(id uint64, how Return) Event { return Event{kind: evReturnSlot, slot: id, how: how} }

// Activate makes a node's providers live under a generation (R4, F4).
func Activate(node string, gen uint64) Event { return Event{kind: evActivate, node: node, gen: gen} }

// Fence ends a generation (F3). cause comes back in each EndAttempt.
func Fence(node string, gen uint64, cause string) Event {
	return Event{kind: evFence, node: node, gen: gen, cause: cause}
}

// SetDraining takes a node out of the candidate sets, or back in; what it runs
// goes on. With a generation, the active one or one to come, it is the node's own
// word and ends with that generation; with 0 it is the operator's, and stays
// until it is taken back.
func SetDraining(node string, gen uint64, on bool) Event {
	return Event{kind: evSetDraining, node: node, gen: gen, on: on}
}

// AdoptTargets tells what an adapter lists now. The list is remembered until
// the next one, also over sessions, as long as the adapter is configured.
// The pool keeps targets.
func AdoptTargets(node string, gen uint64, adapter string, targets []string) Event {
	return Event{kind: evAdoptTargets, node: node, gen: gen, name: adapter, targets: targets}
}

// Overlay lays the verdict "unavailable" over a provider of a generation, or
// takes it away. To grant nobody a provider just found unavailable, step it
// before the ReturnSlot (H2).
func Overlay(provider string, gen uint64, on bool) Event {
	return Event{kind: evOverlay, name: provider, gen: gen, on: on}
}

// DeadlinePassed says that the time Deadline named has come.
func DeadlinePassed() Event { return Event{kind: evDeadlinePassed} }

// Stopping refuses all that wait and all that comes; slots in use go on.
func Stopping() Event { return Event{kind: evStopping} }
