package pool

import "errors"

// Why a request gets no slot.
var (
	// ErrUnknownModel: no group has that name, and every node has listed what it has.
	ErrUnknownModel = errors.New("unknown model")
	// ErrUnsupported: no candidate of the group can do the operation.
	ErrUnsupported = errors.New("no provider of this model can do this")
	// ErrQueueFull: the group's or the principal's queue is at its bound.
	ErrQueueFull = errors.New("queue full")
	// ErrWaitExpired: the wait in the queue reached its bound.
	ErrWaitExpired = errors.New("waited too long")
	// ErrNoProvider: the group has no enabled provider at all, or there is no such group
	// and a node that has not listed yet is away (P9).
	ErrNoProvider = errors.New("no enabled provider")
	// ErrStopping: the pool takes nothing new.
	ErrStopping = errors.New("stopping")
)
