package pool

import "time"

// Model is one row of what the groups offer.
type Model struct {
	Name  string
	Since time.Time // when this pool first offered it
}

// Status of a provider in a snapshot.
const (
	StatusAvailable   = "available"
	StatusUnavailable = "unavailable" // its node is gone, or it is overlaid
	StatusDraining    = "draining"
	StatusDisabled    = "disabled"
	StatusHeld        = "held" // its node has not applied it yet (C5)
)

// Health of a provider in a snapshot.
const (
	HealthAvailable   = "available"
	HealthUnavailable = "unavailable" // overlaid (P5)
	HealthOffline     = "offline"     // its node is gone (P6)
)

// ProviderState is one provider in a snapshot (P4-P6).
type ProviderState struct {
	ID, Node, Adapter, Target string
	Gen                       uint64 // 0: not connected
	Connected                 bool
	Status, Health            string
	Capacity, InFlight        int
	Queued                    int
	LongCapacity              int
	LongInFlight, LongQueued  int
	Models                    []string // the groups it is a candidate of, sorted
}

// Snapshot is the state of the pool for people and metrics.
type Snapshot struct {
	Providers []ProviderState // by id
	Waiting   int             // requests in the queue
	Held      int             // slots in use, also those of providers no longer configured
}
