package broker

import (
	"maps"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/wire"
)

const (
	// heartbeatPace and tokenPace are the least time between two of a session: an
	// honest one beats once a second, and asks again once a second.
	heartbeatPace = 100 * time.Millisecond
	tokenPace     = 200 * time.Millisecond
	// maxPaced bounds the sessions remembered; beyond it further ones wait until some
	// are forgotten.
	maxPaced = 1 << 16
)

// pace lets each session say one thing of a kind every so often, so that what one
// floods stands before nothing that others say (Z5). One goroutine owns it.
type pace struct {
	every time.Duration
	last  map[subjects.Session]time.Time
	swept time.Time // when those of long ago were last forgotten
}

func newPace(every time.Duration) *pace {
	return &pace{every: every, last: map[subjects.Session]time.Time{}}
}

func (p *pace) allow(now time.Time, s subjects.Session) bool {
	if at, ok := p.last[s]; ok && !now.Before(at) && now.Sub(at) < p.every {
		return false
	}
	if len(p.last) >= maxPaced {
		if now.Sub(p.swept) < p.every { // one sweep for many messages
			return false
		}
		p.swept = now
		maps.DeleteFunc(p.last, func(_ subjects.Session, at time.Time) bool { return now.Sub(at) >= p.every })
		if len(p.last) >= maxPaced {
			return false
		}
	}
	p.last[s] = now
	return true
}

// spoken hands on what sessions say, each at its pace; take must not wait.
func (s *service) spoken(p *pace, take func(subjects.Session, *nats.Msg) bool) nats.MsgHandler {
	return func(m *nats.Msg) {
		up, err := subjects.ParseUp(m.Subject)
		if err != nil {
			return
		}
		if wire.Redirected(m.Data) || !p.allow(s.b.now(), up.Session) || !take(up.Session, m) {
			s.b.metrics.dropped.Inc()
		}
	}
}

// into puts what sessions say into a worker's queue, as long as there is room.
func into(queue chan<- *nats.Msg) func(subjects.Session, *nats.Msg) bool {
	return func(_ subjects.Session, m *nats.Msg) bool {
		select {
		case queue <- m:
			return true
		default:
			return false
		}
	}
}
