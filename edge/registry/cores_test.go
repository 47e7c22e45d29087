package registry

import (
	"fmt"
	"slices"
	"time"

	"github.com/iop-fabric/iop/edge/pool"
)

// A core has few states, and the world around it many. So the explorer keeps each
// state of a core once and lets the production core take each step from it once;
// where the world comes there again, it looks up what the core did. That equal
// keys mean equal behaviour, on which this rests, replays check: the whole way to
// every so-manieth state, walked by cores that nobody cloned or looked up.

// The events that the explorer steps the registry with, after the messages of a
// session (msgAdmitted to msgBeat).
const (
	ackSent = msgBeat + 1 + iota
	ackFailed
	boundPasses
	registryEvents
)

// The events that it steps the pool with, each with a generation, a request or a
// slot.
const (
	poolActivate = iota
	poolFence
	poolEnqueue
	poolCancel
	poolTerminal
	poolCancelBound
	poolNotSent
	poolDeadline
	poolEvents
)

// maxArg bounds what an event is about.
const maxArg = max(maxGen, maxSlots) + 1

type registryState struct {
	id    uint16
	core  *Registry
	owner uint64
	state State
	live  uint64
	steps [registryEvents * maxArg]registryStep
}

type registryStep struct {
	to      *registryState
	effects []Effect
}

type poolState struct {
	id      uint16
	core    *pool.Pool
	gen     uint64 // of the one provider; 0: not connected
	inUse   int
	held    int
	waiting int
	expires bool // a wait has a deadline
	steps   [poolEvents * maxArg]poolStep
}

type poolStep struct {
	to      *poolState
	effects []pool.Effect
}

// cores is what is known of both cores' states.
type cores struct {
	places     int
	registries []*registryState
	pools      []*poolState
	registryBy map[string]*registryState
	poolBy     map[string]*poolState
	steps      int // that the production cores took
	key        []byte
}

func newCores(places int) *cores {
	c := &cores{places: places, registryBy: map[string]*registryState{}, poolBy: map[string]*poolState{}}
	r, p := c.fresh()
	c.registry(r)
	c.pool(p)
	return c
}

// fresh makes the cores as a world begins with them.
func (c *cores) fresh() (*Registry, *pool.Pool) {
	p := pool.New()
	p.Step(epoch, pool.SetConfig(pool.Config{
		Adapters:  []pool.Adapter{{Node: "n1", Name: "a", Capacity: c.places}},
		Providers: []pool.Provider{{ID: "p1", Node: "n1", Adapter: "a", Target: "m"}},
		Groups:    []pool.Group{{Name: "m", Candidates: []pool.Candidate{{Provider: "p1"}}}},
	}), nil)
	return New(Config{Nodes: []string{"n1"}}), p
}

// registry returns the state that r is in, new if need be.
func (c *cores) registry(r *Registry) *registryState {
	c.key = r.AppendKey(c.key[:0])
	if s := c.registryBy[string(c.key)]; s != nil {
		return s
	}
	s := &registryState{id: uint16(len(c.registries)), core: r}
	s.owner, s.state = r.Owner("n1")
	s.live = r.LiveSessions()["n1"]
	c.registries = append(c.registries, s)
	c.registryBy[string(c.key)] = s
	return s
}

func (c *cores) pool(p *pool.Pool) *poolState {
	c.key = p.AppendKey(c.key[:0])
	if s := c.poolBy[string(c.key)]; s != nil {
		return s
	}
	s := &poolState{id: uint16(len(c.pools)), core: p}
	s.look()
	c.pools = append(c.pools, s)
	c.poolBy[string(c.key)] = s
	return s
}

// look reads what the rules are about.
func (s *poolState) look() {
	snap := s.core.Snapshot()
	v := snap.Providers[0]
	s.gen, s.inUse, s.held, s.waiting = v.Gen, v.InFlight, snap.Held, snap.Waiting
	s.expires = !s.core.Deadline().IsZero()
	if v.Connected != (v.Gen != 0) {
		breach("P6: %+v", v)
	}
}

func (c *cores) stepRegistry(s *registryState, event int, gen uint64) *registryStep {
	step := &s.steps[event*maxArg+int(gen)]
	if step.to == nil {
		r := s.core.Clone()
		step.effects = stepRegistry(r, event, gen)
		step.to = c.registry(r)
		c.steps++
	}
	return step
}

func (c *cores) stepPool(s *poolState, event, arg int) *poolStep {
	step := &s.steps[event*maxArg+arg]
	if step.to == nil {
		p := s.core.Clone()
		step.effects = stepPool(p, event, arg)
		step.to = c.pool(p)
		c.steps++
	}
	return step
}

// stepRegistry lets the production core take an event.
func stepRegistry(r *Registry, event int, gen uint64) (out []Effect) {
	r.fences = limiter{} // the rate of fences is not explored
	var ev Event
	switch event {
	case msgAdmitted:
		ev = Admitted{Node: "n1", Gen: gen}
	case msgClosed:
		ev = Closed{Node: "n1", Gen: gen}
	case msgRegister:
		ev = RegisterReceived{Node: "n1", Gen: gen, PayloadNode: "n1", ProtocolMin: 1, ProtocolMax: 1}
	case msgReady:
		ev = ReadyReceived{Node: "n1", Gen: gen, PayloadNode: "n1"}
	case msgBeat:
		ev = HeartbeatReceived{Node: "n1", Gen: gen}
	case ackSent:
		ev = ReadyAckSent{"n1", gen}
	case ackFailed:
		ev = ReadyAckFailed{"n1", gen}
	case boundPasses:
		for range 2 { // Deadline may be earlier than any bound once
			if d := r.Deadline(); !d.IsZero() {
				out = r.Step(d, DeadlinePassed{}, out)
			}
		}
		return out
	}
	return r.Step(epoch, ev, nil)
}

func stepPool(p *pool.Pool, event, arg int) []pool.Effect {
	now, ev := epoch, pool.DeadlinePassed()
	switch event {
	case poolActivate:
		ev = pool.Activate("n1", uint64(arg))
	case poolFence:
		ev = pool.Fence("n1", uint64(arg), "over")
	case poolEnqueue: // the first to come is the first to give up
		ev = pool.Enqueue(&pool.Request{
			Waiter: pool.WaiterID(arg), Model: "m", Principal: "alice", MaxWait: time.Duration(arg) * time.Minute,
		})
	case poolCancel:
		ev = pool.CancelWaiter(pool.WaiterID(arg))
	case poolTerminal:
		ev = pool.ReturnSlot(uint64(arg), pool.ByTerminal)
	case poolCancelBound:
		ev = pool.ReturnSlot(uint64(arg), pool.ByCancelBound)
	case poolNotSent:
		ev = pool.ReturnSlot(uint64(arg), pool.ByNotSent)
	case poolDeadline:
		now = p.Deadline()
	}
	return p.Step(now, ev, nil)
}

// walkers are cores that walk a path themselves.
type walkers struct {
	r *Registry
	p *pool.Pool
}

// registry takes the step that the table has, and must end where it says.
func (w *walkers) registry(c *cores, step *registryStep, event int, gen uint64) {
	out := stepRegistry(w.r, event, gen)
	c.key = w.r.AppendKey(c.key[:0])
	if s := c.registryBy[string(c.key)]; s != step.to || !slices.Equal(out, step.effects) {
		breach("the registry's key is not all there is: event %d of %d yields %v, and yielded %v", event, gen, out, step.effects)
	}
	owner, state := w.r.Owner("n1")
	if owner != step.to.owner || state != step.to.state || w.r.LiveSessions()["n1"] != step.to.live {
		breach("the registry shows %d %s, and showed %d %s", owner, state, step.to.owner, step.to.state)
	}
}

func (w *walkers) pool(c *cores, step *poolStep, event, arg int) {
	out := stepPool(w.p, event, arg)
	c.key = w.p.AppendKey(c.key[:0])
	if s := c.poolBy[string(c.key)]; s != step.to || !slices.Equal(out, step.effects) {
		breach("the pool's key is not all there is: event %d of %d yields %v, and yielded %v", event, arg, out, step.effects)
	}
	seen := poolState{core: w.p}
	seen.look()
	if was := step.to; seen.gen != was.gen || seen.inUse != was.inUse || seen.held != was.held ||
		seen.waiting != was.waiting || seen.expires != was.expires {
		breach("the pool shows %+v", w.p.Snapshot())
	}
}

func (c *cores) String() string {
	return fmt.Sprintf("%d registries and %d pools with %d steps", len(c.registries), len(c.pools), c.steps)
}
