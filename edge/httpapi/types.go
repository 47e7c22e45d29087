package httpapi

import (
	"context"
	"time"

	"github.com/iop-fabric/iop/edge/pool"
)

// Want says what a request needs of the pool.
type Want struct {
	Model     string
	Principal string
	Operation string // what the candidate must be able to do
	// PromptTokens is the estimate that Q2's long-context thresholds are held
	// against.
	PromptTokens int64
	// Affinity names, hashed, what the request belongs to: a conversation that one
	// provider may have cached (Q1). Empty: nothing. It is never logged.
	Affinity string
	// MaxWait bounds the time in the queue; 0: the pool's default.
	MaxWait time.Duration
	// Avoid names providers an earlier attempt of this request failed on.
	Avoid []string
}

// Grant is what Acquire gave: a slot and, about the wait, what the log tells.
type Grant struct {
	Slot         pool.Slot
	StallTimeout time.Duration
	Waited       time.Duration
	// Others is how many live candidates the request has beside this one: without
	// any, a provider's answer is not held back for another attempt (Q5).
	Others int
}

// Model is one row of the model list.
type Model struct {
	ID      string
	Created int64 // Unix seconds at which this Edge first saw it
	OwnedBy string
}

// Pool is what the HTTP surface needs of the loop behind it.
type Pool interface {
	// Acquire waits in the queue for a slot. When ctx ends first it leaves the
	// queue, or returns a slot that came too late, and answers ctx's cause. Other
	// errors are pool.ErrQueueFull, ErrWaitExpired, ErrNoProvider, ErrUnknownModel,
	// ErrUnsupported. Want and grant are the caller's: a frame that waits with
	// neither in it needs half the stack.
	Acquire(ctx context.Context, want *Want, grant *Grant) error
	// Models lists what the groups offer, sorted by id.
	Models() []Model
}
