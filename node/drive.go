package node

import (
	"context"
	"log/slog"
	"time"

	"github.com/iop-fabric/iop/agent"
	"github.com/iop-fabric/iop/internal/bus"
	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/wire/iopv1"
)

// Runner is what driven exchanges run on and wait with: Start runs an exchange beside
// its caller, Wait returns true once ready has a value and false once ctx has ended.
type Runner interface {
	Start(exchange func())
	Wait(ctx context.Context, ready <-chan struct{}) bool
	Now() time.Time
}

type driver struct{ r Runner }

func (d driver) start(exchange func())                            { d.r.Start(exchange) }
func (d driver) wait(ctx context.Context, c <-chan struct{}) bool { return d.r.Wait(ctx, c) }
func (d driver) now() time.Time                                   { return d.r.Now() }

// Driven is a Node's adapters and tunnels, stepped from outside: no goroutine, and no
// clock but the Runner's. What it steps is what a Node runs; the simulator of
// test/sim is its user, and plays the supervisor's shell around node/session itself.
type Driven struct {
	host *host
	run  runner
}

// Drive makes the part that outlives sessions, running the adapters of p.
func Drive(r Runner, adapters func(*iopv1.AdapterConfig) (agent.Provider, error), p *iopv1.NodeConfigPayload) (*Driven, error) {
	m, err := newMetrics(nil)
	if err != nil {
		return nil, err
	}
	d := &Driven{host: newHost(adapters, slog.New(slog.DiscardHandler), m), run: driver{r}}
	return d, d.host.apply(context.Background(), p)
}

// InUse is how many slots an adapter holds.
func (d *Driven) InUse(adapter string) int { return d.host.gate.InUse(adapter) }

// Tunnels are those of one session.
type Tunnels struct {
	s      *streams
	cancel context.CancelCauseFunc
	idle   chan struct{}
}

// Open begins a session's; nothing is taken before TakeWork.
func (d *Driven) Open(id subjects.Session, conn bus.Conn) *Tunnels {
	ctx, cancel := context.WithCancelCause(context.Background())
	t := &Tunnels{cancel: cancel, idle: make(chan struct{}, 1)}
	t.s = newStreams(ctx, d.host, d.run, id, conn, t.idle)
	return t
}

// TakeWork lets requests in.
func (t *Tunnels) TakeWork() { t.s.admit(doorOpen) }

// RefuseWork refuses new requests as draining.
func (t *Tunnels) RefuseWork() { t.s.admit(doorDraining) }

// CutRest ends what still runs at a stop.
func (t *Tunnels) CutRest() { t.s.cutRest() }

// Receive takes a message of the session's subscription; one of the session's own
// verbs it leaves alone and reports false.
func (t *Tunnels) Receive(m subjects.Message, data []byte) bool {
	switch m.Verb {
	case subjects.Tunnel:
		t.s.request(m.Run, data)
	case subjects.Ack:
		t.s.acks(data)
	case subjects.Body:
		t.s.bodyFrame(m.Run, data)
	case subjects.Cancel:
		t.s.cancelRun(m.Run, data)
	default:
		return false
	}
	return true
}

// Woken reports whether Round has something to do at once.
func (t *Tunnels) Woken() bool { return len(t.s.wake) > 0 }

// Deadline is when Round is due; zero: when Woken says so.
func (t *Tunnels) Deadline() time.Time { return first(t.s.ackAt, t.s.scanAt) }

// Round does what the send loop does when it wakes. idle: the session drains, and no
// tunnel is left.
func (t *Tunnels) Round() (idle bool) {
	select {
	case <-t.s.wake:
	default:
	}
	t.s.round(t.s.run.now())
	select {
	case <-t.idle:
		return true
	default:
		return false
	}
}

// Count is how many tunnels are known.
func (t *Tunnels) Count() int { return t.s.count() }

// End cancels every tunnel; nothing of the session is sent any more.
func (t *Tunnels) End() {
	t.cancel(errSessionEnded)
	t.s.over()
}
