package tunnel

import (
	"time"

	"github.com/iop-fabric/iop/wire"
)

// t0 is when every test begins.
var t0 = time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)

func at(d time.Duration) time.Time { return t0.Add(d) }

// newSender makes one with the usual first window.
func newSender() *Sender { return NewSender(SenderConfig{Credit: wire.MinWindow}) }
