package pool

import "time"

// EffectKind says what an Effect orders.
type EffectKind uint8

// The effects, with the fields they fill.
const (
	// Granted: Waiter has Slot; also StallTimeout, Waited, Others.
	Granted EffectKind = iota + 1
	// Refused: Waiter gets Err, a sentinel of this package; also Waited.
	Refused
	// EndAttempt: end the attempt that runs under Slot with one terminal
	// (session_ended), because of Cause. The slot is returned already.
	EndAttempt
	// SlotReturned: Slot came back, How; for metrics and the log. Every slot
	// yields exactly one.
	SlotReturned
	// CatalogChanged: Models may answer differently now.
	CatalogChanged
)

func (k EffectKind) String() string {
	return [...]string{"", "granted", "refused", "end_attempt", "slot_returned", "catalog_changed"}[k]
}

// Effect is one order to the loop.
type Effect struct {
	Kind         EffectKind
	How          Return
	Waiter       WaiterID
	Slot         Slot
	StallTimeout time.Duration // the provider's (W1)
	Waited       time.Duration
	Others       int // candidates beside the slot's that are live now
	Err          error
	Cause        string
}
