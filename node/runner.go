package node

import (
	"context"
	"time"
)

// runner is what exchanges run on and wait with, and the clock they go by.
type runner interface {
	// start runs an exchange beside its caller.
	start(exchange func())
	// wait returns true once ready has a value, and false once ctx has ended.
	wait(ctx context.Context, ready <-chan struct{}) bool
	now() time.Time
}

// goroutines is the runner there is: each exchange has a goroutine of its own.
type goroutines struct{}

func (goroutines) start(exchange func()) { go exchange() }

func (goroutines) now() time.Time { return time.Now() }

func (goroutines) wait(ctx context.Context, ready <-chan struct{}) bool {
	select {
	case <-ready:
		return true
	case <-ctx.Done():
		return false
	}
}
