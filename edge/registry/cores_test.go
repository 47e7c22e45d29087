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

const maxNodes = 2

var (
	nodeNames     = [maxNodes]string{"n1", "n2"}
	providerNames = [maxNodes]string{"p1", "p2"}
)

// The events that the explorer steps the registry with, after the messages of a
// session (msgAdmitted to msgDrainBeat).
const (
	ackSent = msgDrainBeat + 1 + iota
	ackFailed
	breaks      // the session breaks the rules of streams
	boundPasses // about a node
	configured  // about n1: 0 it is no longer, 1 it is again
	registryEvents
)

// The events that it steps the pool with, each with a generation, a request, a
// slot, a node or a configuration.
const (
	poolActivate = iota
	poolFence
	poolEnqueue
	poolCancel
	poolTerminal
	poolCancelBound
	poolNotSent
	poolDeadline
	poolDrains   // the session says that it drains
	poolStays    // and that it does no more
	poolDrained  // the operator drains a node
	poolReturned // and takes that back
	poolConfig
	poolEvents
)

// maxArg bounds what an event is about.
const maxArg = max(maxGen, maxSlots, configs) + 1

// configuration is what the Edge is configured with: all of it is about n1.
type configuration uint8

const (
	asBegun      configuration = iota
	pushed                     // its adapter gets another target, and the node has not answered yet (C5)
	retargeted                 // it has
	withoutOne                 // its provider is gone
	withoutNode                // the node is
	configs      = iota
	newTarget    = "m-new"
	firstTarget  = "m"
	exploredName = "m" // of the group
)

func (c configuration) String() string {
	return [...]string{"as begun", "pushed", "retargeted", "without its provider", "without the node"}[c]
}

type registryState struct {
	id       uint16
	core     *Registry
	owner    [maxNodes]uint64
	state    [maxNodes]State
	live     [maxNodes]uint64
	draining [maxNodes]bool
	steps    [registryEvents * maxArg]registryStep
}

type registryStep struct {
	to      *registryState
	effects []Effect
}

// view is a provider in the pool's snapshot.
type view struct {
	there, connected           bool
	gen                        uint64
	target                     string
	status, health             string
	capacity, inFlight, queued int
}

type poolState struct {
	id    uint16
	core  *pool.Pool
	shown poolShown
	steps [poolEvents * maxArg]poolStep
}

// poolShown is what the rules are about.
type poolShown struct {
	of      [maxNodes]view
	held    int
	waiting int
	expires bool // a wait has a deadline
}

type poolStep struct {
	to      *poolState
	effects []pool.Effect
}

// cores is what is known of both cores' states.
type cores struct {
	nodes      int
	places     int // of each node
	registries []*registryState
	pools      []*poolState
	registryBy map[string]*registryState
	poolBy     map[string]*poolState
	steps      int // that the production cores took
	key        []byte
}

func newCores(nodes, places int) *cores {
	c := &cores{nodes: nodes, places: places, registryBy: map[string]*registryState{}, poolBy: map[string]*poolState{}}
	r, p := c.fresh()
	c.registry(r)
	c.pool(p)
	return c
}

// nodeOf is whose a generation is: they are numbered over all nodes.
func (c *cores) nodeOf(gen uint64) int { return int(gen-1) % c.nodes }

// about is whose event it is.
func (c *cores) about(event int, arg uint64) int {
	switch {
	case event < boundPasses:
		return c.nodeOf(arg)
	case event == boundPasses:
		return int(arg)
	default: // configured
		return 0
	}
}

// config is the pool's configuration.
func (c *cores) config(as configuration) pool.Event {
	var cfg pool.Config
	g := pool.Group{Name: exploredName}
	for i := range c.nodes {
		n, a, v := nodeNames[i], pool.Adapter{Name: "a", Capacity: c.places}, pool.Provider{ID: providerNames[i], Adapter: "a", Target: firstTarget}
		a.Node, v.Node = n, n
		if i == 0 {
			a.Held = as == pushed
			if as == pushed || as == retargeted {
				v.Target = newTarget
			}
		}
		if i > 0 || as != withoutNode {
			cfg.Adapters = append(cfg.Adapters, a)
		}
		if i > 0 || (as != withoutNode && as != withoutOne) {
			cfg.Providers = append(cfg.Providers, v)
			g.Candidates = append(g.Candidates, pool.Candidate{Provider: v.ID})
		}
	}
	cfg.Groups = []pool.Group{g}
	return pool.SetConfig(cfg)
}

// fresh makes the cores as a world begins with them.
func (c *cores) fresh() (*Registry, *pool.Pool) {
	p := pool.New()
	p.Step(epoch, c.config(asBegun), nil)
	return New(Config{Nodes: nodeNames[:c.nodes]}), p
}

// registry returns the state that r is in, new if need be.
func (c *cores) registry(r *Registry) *registryState {
	c.key = r.AppendKey(c.key[:0])
	if s := c.registryBy[string(c.key)]; s != nil {
		return s
	}
	s := &registryState{id: uint16(len(c.registries)), core: r}
	s.look()
	c.registries = append(c.registries, s)
	c.registryBy[string(c.key)] = s
	return s
}

// look reads what the rules are about, and that the snapshot says no other.
func (s *registryState) look() {
	live := s.core.LiveSessions()
	for i, name := range nodeNames {
		s.owner[i], s.state[i] = s.core.Owner(name)
		s.live[i] = live[name]
	}
	for _, n := range s.core.Snapshot() {
		i := slices.Index(nodeNames[:], n.Node)
		s.draining[i] = n.Draining
		if n.Connected != (s.live[i] != 0) || n.Connected != s.core.Live(n.Node, n.Gen) || n.Gen != s.owner[i] || n.State != s.state[i] {
			breach("P6: %+v, live is %d", n, s.live[i])
		}
	}
}

func (c *cores) pool(p *pool.Pool) *poolState {
	c.key = p.AppendKey(c.key[:0])
	if s := c.poolBy[string(c.key)]; s != nil {
		return s
	}
	s := &poolState{id: uint16(len(c.pools)), core: p, shown: look(p)}
	c.pools = append(c.pools, s)
	c.poolBy[string(c.key)] = s
	return s
}

func look(p *pool.Pool) (s poolShown) {
	snap := p.Snapshot()
	for _, v := range snap.Providers {
		s.of[slices.Index(providerNames[:], v.ID)] = view{
			there: true, connected: v.Connected, gen: v.Gen, target: v.Target, status: v.Status, health: v.Health,
			capacity: v.Capacity, inFlight: v.InFlight, queued: v.Queued,
		}
	}
	s.held, s.waiting, s.expires = snap.Held, snap.Waiting, !p.Deadline().IsZero()
	return s
}

func (c *cores) stepRegistry(s *registryState, event, arg int) *registryStep {
	step := &s.steps[event*maxArg+arg]
	if step.to == nil {
		r := s.core.Clone()
		step.effects = c.registryTakes(r, event, arg)
		step.to = c.registry(r)
		c.steps++
	}
	return step
}

func (c *cores) stepPool(s *poolState, event, arg int) *poolStep {
	step := &s.steps[event*maxArg+arg]
	if step.to == nil {
		p := s.core.Clone()
		step.effects = c.poolTakes(p, event, arg)
		step.to = c.pool(p)
		c.steps++
	}
	return step
}

// registryTakes lets the production core take an event.
func (c *cores) registryTakes(r *Registry, event, arg int) []Effect {
	r.fences = limiter{} // the rate of fences is not explored
	var ev Event
	gen := uint64(arg)
	n := ""
	if event < boundPasses {
		n = nodeNames[c.about(event, gen)]
	}
	switch event {
	case msgAdmitted:
		ev = Admitted{Node: n, Gen: gen}
	case msgClosed:
		ev = Closed{Node: n, Gen: gen}
	case msgRegister:
		ev = RegisterReceived{Node: n, Gen: gen, PayloadNode: n, ProtocolMin: 1, ProtocolMax: 1}
	case msgReady:
		ev = ReadyReceived{Node: n, Gen: gen, PayloadNode: n}
	case msgBeat, msgDrainBeat:
		ev = HeartbeatReceived{Node: n, Gen: gen, Draining: event == msgDrainBeat}
	case ackSent:
		ev = ReadyAckSent{n, gen}
	case ackFailed:
		ev = ReadyAckFailed{n, gen}
	case breaks:
		ev = Misbehaved{n, gen}
	case boundPasses:
		return c.boundOf(r, nodeNames[arg])
	case configured:
		ev = ConfigChanged{nodeNames[1-arg : c.nodes]}
	}
	return r.Step(epoch, ev, nil)
}

// boundOf lets the bound of a node's owner pass. Every other event is of one
// instant, so for the other node no time passes meanwhile.
func (c *cores) boundOf(r *Registry, name string) (out []Effect) {
	n := r.nodes[name]
	at := n.due
	if n.state == Ready {
		at = n.heard.Add(r.heartbeatBound)
	}
	for other, o := range r.nodes {
		if other != name {
			was := *o
			o.heard, o.due = at, at.Add(time.Second)
			defer func() { o.heard, o.due = was.heard, was.due }()
		}
	}
	if d := r.Deadline(); d.IsZero() || d.After(at) {
		breach("R10: the bound of %s is at %v, and the next is due at %v", name, at, d)
	}
	out = r.Step(at, DeadlinePassed{}, nil)
	r.next = epoch // it may be too early, never too late
	return out
}

func (c *cores) poolTakes(p *pool.Pool, event, arg int) []pool.Effect {
	now, ev := epoch, pool.DeadlinePassed()
	gen := uint64(arg)
	switch event {
	case poolActivate:
		ev = pool.Activate(nodeNames[c.nodeOf(gen)], gen)
	case poolFence:
		ev = pool.Fence(nodeNames[c.nodeOf(gen)], gen, "over")
	case poolEnqueue: // the first to come is the first to give up
		ev = pool.Enqueue(&pool.Request{
			Waiter: pool.WaiterID(arg), Model: exploredName, Principal: "alice", MaxWait: time.Duration(arg) * time.Minute,
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
	case poolDrains, poolStays:
		ev = pool.SetDraining(nodeNames[c.nodeOf(gen)], gen, event == poolDrains)
	case poolDrained, poolReturned:
		ev = pool.SetDraining(nodeNames[arg], 0, event == poolDrained)
	case poolConfig:
		ev = c.config(configuration(arg))
	}
	return p.Step(now, ev, nil)
}

// walkers are cores that walk a path themselves.
type walkers struct {
	r *Registry
	p *pool.Pool
}

// registry takes the step that the table has, and must end where it says.
func (w *walkers) registry(c *cores, step *registryStep, event, arg int) {
	out := c.registryTakes(w.r, event, arg)
	c.key = w.r.AppendKey(c.key[:0])
	if s := c.registryBy[string(c.key)]; s != step.to || !slices.Equal(out, step.effects) {
		breach("the registry's key is not all there is: event %d of %d yields %v, and yielded %v", event, arg, out, step.effects)
	}
	seen := registryState{core: w.r}
	seen.look()
	if was := step.to; seen.owner != was.owner || seen.state != was.state || seen.live != was.live || seen.draining != was.draining {
		breach("the registry shows %v %v, and showed %v %v", seen.owner, seen.state, was.owner, was.state)
	}
}

func (w *walkers) pool(c *cores, step *poolStep, event, arg int) {
	out := c.poolTakes(w.p, event, arg)
	c.key = w.p.AppendKey(c.key[:0])
	if s := c.poolBy[string(c.key)]; s != step.to || !slices.Equal(out, step.effects) {
		breach("the pool's key is not all there is: event %d of %d yields %v, and yielded %v", event, arg, out, step.effects)
	}
	if seen := look(w.p); seen != step.to.shown {
		breach("the pool shows %+v, and showed %+v", seen, step.to.shown)
	}
}

func (c *cores) String() string {
	return fmt.Sprintf("%d registries and %d pools with %d steps", len(c.registries), len(c.pools), c.steps)
}
