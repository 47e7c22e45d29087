package registry

import (
	"fmt"
	"math/bits"

	"github.com/iop-fabric/iop/edge/pool"
)

// What may be under way. To Edge: from the session service, and from the node's
// session of a generation. To the node: answers, fences.
const (
	msgAdmitted = iota
	msgClosed
	msgRegister
	msgReady
	msgBeat // stands for every message of a live session
	msgDrainBeat
	msgAccepted
	msgRefused
	msgReadyYes
	msgReadyNo
	msgFence
	perGen
)

// Of each slot, on top of the generations' bits.
const (
	msgDispatch = iota
	msgTerminal
	perSlot
)

const (
	maxGen   = 5 // generations that the world may have, those of the calm included
	maxSlots = 3 // and requests: each has one slot at most
	slotBase = maxGen * perGen
)

func genBit(gen uint64, msg int) uint64 { return 1 << (int(gen-1)*perGen + msg) }
func slotBit(slot, msg int) uint64      { return 1 << (slotBase + (slot-1)*perSlot + msg) }

// sessionState is a Node's view of one of its sessions.
type sessionState uint8

const (
	none sessionState = iota
	registering
	asking // accepted: it asked for ready
	serving
	draining // it takes nothing new, ends what runs, and then itself (D7)
	dead
)

type requestState uint8

const (
	fresh requestState = iota
	waiting
	running
	leaving // its caller left while it ran: its slot waits for a terminal (P8)
	over
)

type slotState uint8

const (
	unsent slotState = iota
	atNode
	finished
)

type slot struct {
	request  uint8
	gen      uint8 // 0: no such slot yet
	state    slotState
	returned bool
}

// faults is what may go wrong yet: how often each.
type faults struct {
	drops    uint8
	dups     uint8
	fails    uint8 // acknowledgements and dispatches that cannot be sent
	suspects uint8 // heartbeat or pending bounds that pass though the session lives
	crashes  uint8 // with a goodbye, which the broker's notice is
	vanishes uint8 // without
	givesUp  uint8 // cancels that nobody answers
	leaves   uint8
	expires  uint8 // waits that end
	beats    uint8
	drains   uint8 // nodes that say so
	breaches uint8 // of the rules of streams, for which Edge ends a session (J8)
	operator uint8 // drains and undrains
	changes  uint8 // of the configuration
}

// state is all of a world that matters to its future, small and comparable.
type state struct {
	net      uint64
	registry uint16 // of cores
	pool     uint16
	acks     uint8 // bit per generation: ready acknowledgements whose fate is not reported yet
	config   configuration
	nodes    [maxNodes]nodeState
	sessions [maxGen + 1]sessionState
	requests [maxSlots + 1]requestState
	slots    [maxSlots + 1]slot
	faults
}

// nodeState is what Edge was told of a node, and must not forget.
type nodeState struct {
	connected uint8 // the last generation that node.connected named
	highest   uint8 // the highest generation it was told of
	ended     bool  // and was told, or decided, that it is over
	drains    bool  // that generation says that it drains
	drained   bool  // by the operator
}

// world is a state that moves. It is copied before each move.
type world struct {
	state
	cores *cores
	walk  *walkers // in a replay: cores that take every step themselves
	tally *tally
}

// tally counts what the rules had to hold against, so that it shows if they held
// against nothing.
type tally struct {
	moves    [moveKinds]int
	stale    int // events below the highest generation
	late     int // terminals of slots that were returned
	fenced   int // slots returned by a fence
	granted  int
	refused  int
	released int // slots returned by other ways
	answered int // fences to who is not the owner
	passed   int // requests that waited for the one node and were served by the other
	held     int // states in which a place was free and its provider out of the candidates
}

// broken is what a rule's breach panics with, so that it reaches the test with
// the path that led there.
type broken string

func breach(format string, args ...any) { panic(broken(fmt.Sprintf(format, args...))) }

func (w *world) reg() *registryState { return w.cores.registries[w.state.registry] }
func (w *world) pl() *poolShown      { return &w.cores.pools[w.state.pool].shown }

// ofGen is what Edge was told of the node whose session has the generation.
func (w *world) ofGen(gen uint64) *nodeState { return &w.nodes[w.cores.nodeOf(gen)] }

// owns reports whether the registry has the session as its node's owner.
func (w *world) owns(gen uint64) bool {
	r, n := w.reg(), w.cores.nodeOf(gen)
	return r.owner[n] == gen && r.state[n].Owns()
}

// open reports whether a node's provider is one that may be granted.
func (w *world) open(n int) bool {
	s := &w.nodes[n]
	return w.reg().live[n] != 0 && !s.drains && !s.drained &&
		(n > 0 || w.config == asBegun || w.config == retargeted)
}

// registry steps the registry and what it orders of the pool.
func (w *world) registry(event int, arg uint64) {
	was := w.reg()
	step := w.cores.stepRegistry(was, event, int(arg))
	if w.walk != nil {
		w.walk.registry(w.cores, step, event, int(arg))
	}
	w.state.registry = step.to.id
	now := step.to
	if w.cores.nodes > 1 {
		o := 1 - w.cores.about(event, arg)
		if was.owner[o] != now.owner[o] || was.state[o] != now.state[o] || was.live[o] != now.live[o] || was.draining[o] != now.draining[o] {
			breach("F5: event %d of %d changed %s: %d is %s, and was %d %s", event, arg, nodeNames[o], now.owner[o], now.state[o], was.owner[o], was.state[o])
		}
	}
	for _, e := range step.effects {
		switch e := e.(type) {
		case SendRegisterAnswer:
			if !e.Accepted {
				w.net |= genBit(e.Gen, msgRefused)
				continue
			}
			if !w.owns(e.Gen) {
				breach("R2: %d is accepted, and %v is %v", e.Gen, now.owner, now.state)
			}
			w.net |= genBit(e.Gen, msgAccepted)
		case SendReadyAnswer:
			n := w.cores.nodeOf(e.Gen)
			switch {
			case !e.Ready:
				w.net |= genBit(e.Gen, msgReadyNo)
			case now.owner[n] != e.Gen || (now.state[n] != Acking && now.state[n] != Ready):
				breach("R5: %d is told that it is ready, and %v is %v", e.Gen, now.owner, now.state)
			default: // also if it is a repetition
				w.acks |= 1 << e.Gen
			}
		case SendFence:
			w.net |= genBit(e.Gen, msgFence)
		case Activate:
			if event != ackSent || arg != e.Gen {
				breach("R4: %d is activated by event %d of %d", e.Gen, event, arg)
			}
			w.pool(poolActivate, int(e.Gen))
		case Draining:
			if on := event == msgDrainBeat || event == ackSent; e.Gen != arg || e.On != on || !w.owns(e.Gen) {
				breach("D7: %d drains: %v, by event %d of %d", e.Gen, e.On, event, arg)
			}
			if e.On {
				w.pool(poolDrains, int(e.Gen))
			} else {
				w.pool(poolStays, int(e.Gen))
			}
		case FenceGeneration:
			if was.live[w.cores.nodeOf(e.Gen)] != e.Gen {
				breach("F2: %d is fenced and was not live", e.Gen)
			}
			w.pool(poolFence, int(e.Gen))
			for i, s := range w.slots {
				if uint64(s.gen) == e.Gen && !s.returned {
					breach("F3: slot %d of the fenced generation %d is held", i, e.Gen)
				}
			}
		case NodeConnected:
			of := w.ofGen(e.Gen)
			if e.Gen <= uint64(of.connected) {
				breach("R4: connected %d after %d", e.Gen, of.connected)
			}
			of.connected = uint8(e.Gen)
		}
	}
}

func (w *world) pool(event, arg int) {
	step := w.cores.stepPool(w.cores.pools[w.state.pool], event, arg)
	if w.walk != nil {
		w.walk.pool(w.cores, step, event, arg)
	}
	w.state.pool = step.to.id
	returned, ended := uint64(0), uint64(0) // a bit per slot
	for i := range step.effects {
		e := &step.effects[i]
		id := int(e.Slot.ID)
		switch e.Kind {
		case pool.Granted:
			w.granted(id, e)
		case pool.Refused:
			if w.requests[e.Waiter] != waiting && w.requests[e.Waiter] != fresh {
				breach("I7: request %d was refused and does not wait", e.Waiter)
			}
			if event != poolDeadline && event != poolEnqueue {
				breach("P9: request %d was refused by event %d", e.Waiter, event)
			}
			w.requests[e.Waiter] = over
			w.tally.refused++
		case pool.SlotReturned:
			if w.slots[id].gen == 0 || w.slots[id].returned {
				breach("P8: slot %d is returned and not held", id)
			}
			if (e.How == pool.ByFence) != (event == poolFence) {
				breach("P8: slot %d is returned by %s at event %d", id, e.How, event)
			}
			w.slots[id].returned = true
			w.requests[w.slots[id].request] = over
			if event == poolFence {
				returned |= 1 << id
				w.tally.fenced++
			} else {
				w.tally.released++
			}
		case pool.EndAttempt:
			if returned&(1<<id) == 0 {
				breach("F3: slot %d ends before it is returned", id)
			}
			if ended&(1<<id) != 0 {
				breach("F3: slot %d ends twice", id)
			}
			ended |= 1 << id
		}
	}
	if ended != returned {
		breach("F3: slots %b are returned, %b end", returned, ended)
	}
}

// granted is a request that gets a slot.
func (w *world) granted(id int, e *pool.Effect) {
	gen := e.Slot.Gen
	n := w.cores.nodeOf(gen)
	if live := w.reg().live[n]; gen != live || live == 0 || e.Slot.Node != nodeNames[n] || e.Slot.Provider != providerNames[n] {
		breach("I5: slot %d of %s under %d, live is %d", id, e.Slot.Provider, gen, live)
	}
	if !w.open(n) {
		breach("D7 C5: slot %d of %s is granted, the node: %+v, the configuration: %s", id, e.Slot.Provider, w.nodes[n], w.config)
	}
	if target := w.target(n); e.Slot.Target != target {
		breach("C5: slot %d is for %s, the provider has %s", id, e.Slot.Target, target)
	}
	was := w.requests[e.Waiter]
	if was != waiting && was != fresh {
		breach("I7: request %d was granted and does not wait", e.Waiter)
	}
	if w.slots[id].gen != 0 {
		breach("P8: slot %d is granted twice", id)
	}
	w.requests[e.Waiter] = running
	w.slots[id] = slot{request: uint8(e.Waiter), gen: uint8(gen)}
	w.net |= slotBit(id, msgDispatch)
	w.tally.granted++
	if was == waiting && w.cores.nodes > 1 && w.nodes[1-n].ended {
		w.tally.passed++
	}
}

// target is what a node's provider runs, as configured.
func (w *world) target(n int) string {
	if n == 0 && (w.config == pushed || w.config == retargeted) {
		return newTarget
	}
	return firstTarget
}

// check is what must hold in every state.
func (w *world) check() {
	r, p := w.reg(), w.pl()
	held := [maxNodes]int{}
	for i, s := range w.slots {
		if s.gen == 0 || s.returned {
			continue
		}
		n := w.cores.nodeOf(uint64(s.gen))
		if held[n]++; uint64(s.gen) != r.live[n] {
			breach("F3: slot %d is held under %d, live is %d", i, s.gen, r.live[n])
		}
	}
	waits, runs := 0, 0
	for _, q := range w.requests {
		switch q {
		case waiting:
			waits++
		case running, leaving:
			runs++
		case fresh, over:
		}
	}
	if held[0]+held[1] != p.held || runs != p.held {
		breach("P4: %v slots are held for %d requests, the pool says %d", held, runs, p.held)
	}
	if waits != p.waiting {
		breach("P9: %d wait, the pool has %d", waits, p.waiting)
	}
	for n := range w.cores.nodes {
		w.checkNode(n, held[n], waits)
	}
}

// checkNode is what must hold of one node, of whose places some are held.
func (w *world) checkNode(n, held, waits int) {
	r, of := w.reg(), &w.nodes[n]
	if r.owner[n] != uint64(of.highest) {
		breach("R9: Edge was told of %d, the registry has %d", of.highest, r.owner[n])
	}
	if of.ended && r.state[n].Owns() {
		breach("R10: %d is over, and is %s", r.owner[n], r.state[n])
	}
	if r.draining[n] != of.drains {
		breach("D7: %d drains: %v, the registry says %v", r.owner[n], of.drains, r.draining[n])
	}
	if r.state[n] == Ready && of.connected != of.highest {
		breach("R4: %d is ready, connected was %d", r.owner[n], of.connected)
	}
	if held > w.cores.places {
		breach("I1: %d places are held of %d", held, w.cores.places)
	}
	open := w.open(n)
	if waits > 0 && open && held < w.cores.places {
		breach("Q4: a lost wake-up at %s", nodeNames[n])
	}
	if waits > 0 && r.live[n] != 0 && !open && held < w.cores.places {
		w.tally.held++
	}
	if want, shown := w.shown(n, held, waits), w.pl().of[n]; shown != want {
		breach("P6: shown is %+v, and it is %+v", shown, want)
	}
}

// shown is what a snapshot must say of a node's provider.
func (w *world) shown(n, held, waits int) view {
	if n == 0 && (w.config == withoutOne || w.config == withoutNode) {
		return view{}
	}
	live := w.reg().live[n]
	v := view{there: true, target: w.target(n), gen: live, connected: live != 0, status: pool.StatusUnavailable, health: pool.HealthOffline}
	if live == 0 {
		return v
	}
	v.status, v.health, v.capacity, v.inFlight = pool.StatusAvailable, pool.HealthAvailable, w.cores.places, held
	switch {
	case n == 0 && w.config == pushed:
		v.status = pool.StatusHeld
	case !w.open(n):
		v.status = pool.StatusDraining
	default:
		v.queued = waits
	}
	return v
}

// unmoved checks that an event of a generation below the highest changed nothing
// and said nothing, but to who sent it (F5).
func (w *world) unmoved(before state, gen uint64, what string) {
	w.tally.stale++
	said := w.net &^ before.net
	if said&^(genBit(gen, msgRefused)|genBit(gen, msgReadyNo)|genBit(gen, msgFence)) != 0 {
		breach("F5: %s of %d said %b", what, gen, said)
	}
	after := w.state
	after.net = before.net
	if after != before {
		breach("F5: %s of %d changed what %d has", what, gen, w.ofGen(gen).highest)
	}
}

// ends: Edge was told, or decided, that a node's newest session is over.
func (of *nodeState) ends() { of.ended, of.drains = true, false }

// toEdge delivers a message of a node's session, or about it.
func (w *world) toEdge(gen uint64, msg int) {
	of := w.ofGen(gen)
	if gen < uint64(of.highest) {
		before := w.state
		w.registry(msg, gen)
		w.unmoved(before, gen, "a message")
	} else {
		w.told(of, gen, msg)
		w.registry(msg, gen)
	}
	if (msg == msgBeat || msg == msgDrainBeat) && !w.owns(gen) {
		if w.tally.answered++; w.net&genBit(gen, msgFence) == 0 {
			breach("F10: %d spoke and was not told", gen)
		}
	}
}

// told notes what a message of the newest session, or of a newer, says.
func (w *world) told(of *nodeState, gen uint64, msg int) {
	switch msg {
	case msgBeat, msgDrainBeat:
		if w.owns(gen) {
			of.drains = msg == msgDrainBeat
		}
	case msgRegister: // of a node that is not configured it is refused, and changes nothing
		if gen > uint64(of.highest) && (w.config != withoutNode || w.cores.nodeOf(gen) > 0) {
			of.highest, of.ended, of.drains = uint8(gen), false, false
		}
	case msgAdmitted, msgClosed:
		if gen > uint64(of.highest) {
			of.highest, of.ended, of.drains = uint8(gen), false, false
		}
		if msg == msgClosed {
			of.ends()
		}
	}
}

// toNode delivers a message to a node's session.
func (w *world) toNode(gen uint64, msg int) {
	s := &w.sessions[gen]
	switch {
	case *s == dead:
	case msg == msgAccepted && *s == registering:
		*s = asking
		w.net |= genBit(gen, msgReady)
	case msg == msgReadyYes && *s == asking:
		*s = serving
	case msg == msgRefused || msg == msgReadyNo || msg == msgFence:
		w.end(gen, true)
	}
}

// end ends a session on the node's side; the broker notices, or does not.
func (w *world) end(gen uint64, noticed bool) {
	w.sessions[gen] = dead
	if noticed {
		w.net |= genBit(gen, msgClosed)
	}
	for i := range w.slots { // its work is dropped (F5)
		if uint64(w.slots[i].gen) == gen && w.slots[i].state == atNode {
			w.slots[i].state = finished
			w.net &^= slotBit(i, msgTerminal)
		}
	}
}

// ofSlot delivers a dispatch to the node, or a terminal to Edge.
func (w *world) ofSlot(i, msg int) {
	s := &w.slots[i]
	if msg == msgDispatch {
		// A node takes work from the moment it asked for ready (R6).
		switch st := w.sessions[s.gen]; {
		case s.state != unsent:
		case st == asking || st == serving:
			s.state = atNode
		case st == draining: // it refuses: that, too, is a terminal
			s.state = finished
			w.net |= slotBit(i, msgTerminal)
		}
		return
	}
	// The demux asks whether it is the slot's own generation; the pool, whether
	// the slot is held.
	before := w.state
	w.pool(poolTerminal, i)
	if before.slots[i].returned || before.slots[i].gen < w.ofGen(uint64(s.gen)).highest {
		if w.tally.late++; w.state != before {
			breach("F5: a late terminal of slot %d changed something", i)
		}
	}
}

// settle takes out of the network what no longer means anything to a node's
// session, so that states that differ in nothing else are one.
func (w *world) settle() {
	for gen := uint64(1); gen <= maxGen; gen++ {
		switch w.sessions[gen] {
		case asking:
			w.net &^= genBit(gen, msgAccepted)
		case serving, draining:
			w.net &^= genBit(gen, msgAccepted) | genBit(gen, msgReadyYes)
		case dead:
			const moot = 1<<msgAccepted | 1<<msgRefused | 1<<msgReadyYes | 1<<msgReadyNo | 1<<msgFence
			w.net &^= uint64(moot) << ((gen - 1) * perGen)
		case none, registering:
		}
	}
	for i, s := range w.slots {
		if s.gen != 0 && (w.sessions[s.gen] == dead || s.state != unsent) {
			w.net &^= slotBit(i, msgDispatch)
		}
	}
}

func (w *world) deliver(bit int) {
	w.net &^= 1 << bit
	if bit >= slotBase {
		w.ofSlot((bit-slotBase)/perSlot+1, (bit-slotBase)%perSlot)
		return
	}
	gen, msg := uint64(bit/perGen+1), bit%perGen
	if msg <= msgDrainBeat {
		w.toEdge(gen, msg)
	} else {
		w.toNode(gen, msg)
	}
}

// next is the generation that a node's next session would have; 0: there are no more.
func (w *world) next(n, gens int) uint64 {
	for gen := n + 1; gen <= gens; gen += w.cores.nodes {
		if w.sessions[gen] == none {
			return uint64(gen)
		}
	}
	return 0
}

// dial opens a node's next session.
func (w *world) dial(n int) {
	gen := w.next(n, maxGen)
	if gen == 0 {
		breach("the world is out of generations")
	}
	w.sessions[gen] = registering
	w.net |= genBit(gen, msgAdmitted) | genBit(gen, msgRegister)
}

// report tells the registry what became of a ready acknowledgement.
func (w *world) report(gen uint64, sent bool) {
	w.acks &^= 1 << gen
	event := ackFailed
	if sent {
		event = ackSent
		w.net |= genBit(gen, msgReadyYes)
	}
	before := w.state
	w.registry(event, gen)
	if gen < uint64(w.ofGen(gen).highest) {
		w.unmoved(before, gen, "the acknowledgement")
	}
}

func (w *world) reportAll() {
	for gen := uint64(1); gen <= maxGen; gen++ {
		if w.acks&(1<<gen) != 0 {
			w.report(gen, true)
		}
	}
}

func (w *world) enqueue(i int) {
	w.pool(poolEnqueue, i)
	if w.requests[i] == fresh {
		w.requests[i] = waiting
	}
}

// bound lets the bound of a node's owner pass, whatever it is.
func (w *world) bound(n int) {
	w.nodes[n].ends()
	w.registry(boundPasses, uint64(n))
	w.evicted(uint64(w.nodes[n].highest), "out of time")
}

func (w *world) evicted(gen uint64, why string) {
	if w.net&genBit(gen, msgFence) == 0 {
		breach("F10: %d is %s and was not told", gen, why)
	}
}

// misbehaves is Edge's finding that a session goes on breaking the rules of streams.
func (w *world) misbehaves(gen uint64) {
	if of := w.ofGen(gen); gen < uint64(of.highest) || !w.owns(gen) {
		before := w.state
		w.registry(breaks, gen)
		w.unmoved(before, gen, "the breach")
		return
	}
	w.ofGen(gen).ends()
	w.registry(breaks, gen)
	w.evicted(gen, "misbehaving")
}

// configure is a reload, or a node's answer to one: first the registry is told,
// then the pool.
func (w *world) configure(to configuration) {
	was := w.config
	w.config = to
	if (was == withoutNode) != (to == withoutNode) {
		owner := uint64(w.nodes[0].highest)
		owned := owner > 0 && w.owns(owner)
		if to == withoutNode {
			if owned {
				w.nodes[0].ends()
			}
			w.registry(configured, 0)
			if owned {
				w.evicted(owner, "removed")
			}
		} else {
			w.registry(configured, 1)
		}
	}
	w.pool(poolConfig, int(to))
}

// move is one thing the world may do.
type move struct {
	kind moveKind
	arg  uint8
}

type moveKind uint8

const (
	deliver moveKind = iota
	repeat
	lose
	dial
	sent
	notSent
	registerAgain
	askAgain
	beat
	crash
	vanish
	suspect
	enqueue
	leave
	leaveRunning
	expire
	finish
	giveUp
	dispatchAgain
	terminalAgain
	dispatchFails
	drain
	stopAfterDrain
	breaksRules
	operatorDrains
	operatorReturns
	reconfigure
	moveKinds
)

func (m move) String() string {
	name := [...]string{
		"deliver", "deliver and repeat", "lose", "dial", "ack sent", "ack failed", "register again",
		"ask again", "beat", "crash", "vanish", "bound passes", "enqueue", "leave", "leave while running", "waits end",
		"finish", "cancel bound", "dispatch again", "terminal again", "dispatch fails",
		"drain", "drained, end", "rules broken by", "operator drains node", "operator returns node", "reconfigure",
	}[m.kind]
	if m.kind == reconfigure {
		return fmt.Sprint(name, " ", configuration(m.arg))
	}
	if m.kind > lose {
		return fmt.Sprint(name, " ", m.arg)
	}
	if m.arg >= slotBase {
		i := m.arg - slotBase
		return fmt.Sprint(name, " ", [...]string{"dispatch", "terminal"}[i%perSlot], " of slot ", i/perSlot+1)
	}
	return fmt.Sprint(name, " ", [...]string{
		"admitted", "closed", "register", "ready", "beat", "draining beat", "accepted", "refused", "ready yes", "ready no", "fence",
	}[m.arg%perGen], " of ", m.arg/perGen+1)
}

// changesFrom lists what a configuration may become. Where an adapter is changed or
// added its node must answer before it counts (C5): that it applied it, or that it
// failed.
var changesFrom = [configs][]configuration{
	asBegun:     {pushed, withoutOne, withoutNode},
	pushed:      {retargeted, asBegun, withoutOne, withoutNode},
	retargeted:  {asBegun, withoutOne},
	withoutOne:  {asBegun, pushed},
	withoutNode: {asBegun, pushed},
}

// beatOf is what the session says when it says that it lives.
func (w *world) beatOf(gen uint64) int {
	if w.sessions[gen] == draining {
		return msgDrainBeat
	}
	return msgBeat
}

// moves appends all that may happen next, in a world of some generations.
func (w *world) moves(all []move, gens int) []move {
	for net := w.net; net != 0; net &= net - 1 {
		bit := uint8(bits.TrailingZeros64(net))
		all = append(all, move{deliver, bit})
		if w.dups > 0 {
			all = append(all, move{repeat, bit})
		}
		if w.drops > 0 {
			all = append(all, move{lose, bit})
		}
	}
	// A session that is thought dead may live on beside the next.
	for n := range w.cores.nodes {
		if w.next(n, gens) != 0 {
			all = append(all, move{dial, uint8(n)})
		}
	}
	for g := 1; g <= gens; g++ {
		gen, arg := uint64(g), uint8(g)
		if w.acks&(1<<gen) != 0 {
			all = append(all, move{sent, arg})
			if w.fails > 0 {
				all = append(all, move{notSent, arg})
			}
		}
		switch w.sessions[gen] {
		case none, dead:
			continue
		case registering:
			if w.net&(genBit(gen, msgRegister)|genBit(gen, msgAccepted)|genBit(gen, msgRefused)) == 0 {
				all = append(all, move{registerAgain, arg})
			}
		case asking:
			if w.acks&(1<<gen) == 0 && w.net&(genBit(gen, msgReady)|genBit(gen, msgReadyYes)|genBit(gen, msgReadyNo)) == 0 {
				all = append(all, move{askAgain, arg})
			}
		case serving:
		case draining:
			all = append(all, move{stopAfterDrain, arg})
		}
		if w.beats > 0 && w.sessions[gen] >= asking && w.net&genBit(gen, w.beatOf(gen)) == 0 {
			all = append(all, move{beat, arg})
		}
		if st := w.sessions[gen]; w.drains > 0 && (st == asking || st == serving) {
			all = append(all, move{drain, arg})
		}
		if w.breaches > 0 && w.sessions[gen] >= asking {
			all = append(all, move{breaksRules, arg})
		}
		if w.crashes > 0 {
			all = append(all, move{crash, arg})
		}
		if w.vanishes > 0 {
			all = append(all, move{vanish, arg})
		}
	}
	for n := range w.cores.nodes {
		if w.suspects > 0 && w.reg().state[n].Owns() {
			all = append(all, move{suspect, uint8(n)})
		}
		if w.operator > 0 {
			kind := operatorDrains
			if w.nodes[n].drained {
				kind = operatorReturns
			}
			all = append(all, move{kind, uint8(n)})
		}
	}
	if w.changes > 0 {
		for _, to := range changesFrom[w.config] {
			all = append(all, move{reconfigure, uint8(to)})
		}
	}
	for i, q := range w.requests {
		switch {
		case i == 0:
		case q == fresh:
			all = append(all, move{enqueue, uint8(i)})
		case q == waiting && w.leaves > 0:
			all = append(all, move{leave, uint8(i)})
		case q == running && w.leaves > 0:
			all = append(all, move{leaveRunning, uint8(i)})
		}
	}
	if w.expires > 0 && w.pl().expires {
		all = append(all, move{kind: expire})
	}
	for i, s := range w.slots {
		if s.gen == 0 {
			continue
		}
		arg := uint8(i)
		if s.state == atNode {
			all = append(all, move{finish, arg})
		}
		if s.returned {
			continue
		}
		if s.state != unsent && w.requests[s.request] == leaving && w.givesUp > 0 {
			all = append(all, move{giveUp, arg})
		}
		if w.sessions[s.gen] == dead {
			continue
		}
		if s.state == unsent && w.net&slotBit(i, msgDispatch) == 0 {
			all = append(all, move{dispatchAgain, arg})
		}
		if s.state == unsent && w.net&slotBit(i, msgDispatch) != 0 && w.fails > 0 {
			all = append(all, move{dispatchFails, arg})
		}
		if s.state == finished && w.net&slotBit(i, msgTerminal) == 0 {
			all = append(all, move{terminalAgain, arg})
		}
	}
	return all
}

// do makes a move.
func (w *world) do(m move) {
	i, gen := int(m.arg), uint64(m.arg)
	w.tally.moves[m.kind]++
	switch m.kind {
	case moveKinds:
	case deliver:
		w.deliver(i)
	case repeat:
		w.dups--
		w.deliver(i)
		w.net |= 1 << i
	case lose:
		w.drops--
		w.net &^= 1 << i
	case dial:
		w.dial(i)
	case sent:
		w.report(gen, true)
	case notSent:
		w.fails--
		w.report(gen, false)
	case registerAgain:
		w.net |= genBit(gen, msgRegister)
	case askAgain:
		w.net |= genBit(gen, msgReady)
	case beat:
		w.beats--
		w.net |= genBit(gen, w.beatOf(gen))
	case crash:
		w.crashes--
		w.end(gen, true)
	case vanish:
		w.vanishes--
		w.end(gen, false)
	case suspect:
		w.suspects--
		w.bound(i)
	case enqueue:
		w.enqueue(i)
	case leave:
		w.leaves--
		w.requests[i] = over
		w.pool(poolCancel, i)
	case leaveRunning:
		w.leaves--
		w.requests[i] = leaving
	case expire:
		w.expires--
		refused := w.tally.refused
		if w.pool(poolDeadline, 0); w.tally.refused == refused {
			breach("I7: a wait ended and nobody was refused")
		}
	case finish:
		w.slots[i].state = finished
		w.net |= slotBit(i, msgTerminal)
	case giveUp:
		w.givesUp--
		w.pool(poolCancelBound, i)
	case dispatchAgain:
		w.net |= slotBit(i, msgDispatch)
	case terminalAgain:
		w.net |= slotBit(i, msgTerminal)
	case dispatchFails:
		w.fails--
		w.net &^= slotBit(i, msgDispatch)
		w.pool(poolNotSent, i)
	case drain:
		w.drains--
		w.sessions[gen] = draining
		w.net |= genBit(gen, msgDrainBeat)
	case stopAfterDrain:
		w.end(gen, true)
	case breaksRules:
		w.breaches--
		w.misbehaves(gen)
	case operatorDrains, operatorReturns:
		w.operator--
		w.drainedBy(i, m.kind == operatorDrains)
	case reconfigure:
		w.changes--
		w.configure(configuration(m.arg))
	}
	w.settle()
}

// drainedBy is the operator's word about a node.
func (w *world) drainedBy(n int, on bool) {
	w.nodes[n].drained = on
	event := poolReturned
	if on {
		event = poolDrained
	}
	w.pool(event, n)
}

// calm ends the faults and lets everything that is due happen, in rounds, until a
// round changes nothing. All must come to rest then: each node is live under its
// newest session, and every request has its end (LIVE1, LIVE2). What an operator
// took away is back: who waits for it may wait for ever.
func (w *world) calm() {
	if to := map[configuration]configuration{pushed: retargeted, withoutOne: asBegun, withoutNode: asBegun}; w.config != asBegun && w.config != retargeted {
		w.configure(to[w.config])
	}
	for n := range w.cores.nodes {
		if w.nodes[n].drained {
			w.drainedBy(n, false)
		}
	}
	for rounds := 0; ; rounds++ {
		before := w.state
		w.round()
		w.settle()
		w.check()
		if w.state == before {
			break
		}
		if rounds == 20 {
			breach("LIVE1: no rest")
		}
	}
	for n := range w.cores.nodes {
		newest := uint64(0)
		for gen := n + 1; gen <= maxGen; gen += w.cores.nodes {
			if w.sessions[gen] != none {
				newest = uint64(gen)
			}
		}
		if r := w.reg(); r.live[n] != newest || w.sessions[newest] != serving {
			breach("LIVE1: Edge has %v %v, the nodes are %v", r.owner, r.state, w.sessions)
		}
	}
	for i := range w.requests {
		if i > 0 && w.requests[i] != over {
			breach("LIVE2: request %d is %d", i, w.requests[i])
		}
	}
	if p := w.pl(); p.held > 0 || p.waiting > 0 {
		breach("INV4: at rest %+v", p)
	}
}

func (w *world) round() {
	w.reportAll()
	alive := [maxNodes]bool{}
	for gen := uint64(1); gen <= maxGen; gen++ {
		switch w.sessions[gen] {
		case none, dead:
			continue
		case registering:
			w.net |= genBit(gen, msgRegister)
		case asking:
			w.net |= genBit(gen, msgReady)
		case serving:
			w.net |= genBit(gen, msgBeat)
		case draining:
			if w.idle(gen) {
				w.end(gen, true)
				continue
			}
			w.net |= genBit(gen, msgDrainBeat)
		}
		alive[w.cores.nodeOf(gen)] = true
	}
	for n := range w.cores.nodes {
		if !alive[n] {
			w.dial(n)
		}
	}
	// Whose session ended goes on being silent.
	for n := range w.cores.nodes {
		if r := w.reg(); r.state[n].Owns() && w.sessions[r.owner[n]] == dead {
			w.bound(n)
		}
	}
	for i := range w.requests {
		if i > 0 && w.requests[i] == fresh {
			w.enqueue(i)
		}
	}
	for i, s := range w.slots {
		if s.gen == 0 || s.returned {
			continue
		}
		switch s.state {
		case unsent:
			w.net |= slotBit(i, msgDispatch)
		case atNode:
			w.slots[i].state = finished
			w.net |= slotBit(i, msgTerminal)
		case finished:
			w.net |= slotBit(i, msgTerminal)
		}
	}
	for net := w.net; net != 0; net &= net - 1 {
		w.deliver(bits.TrailingZeros64(net))
		w.reportAll()
	}
}

// idle: nothing of the session runs at its node, or is on the way.
func (w *world) idle(gen uint64) bool {
	for i, s := range w.slots {
		if uint64(s.gen) == gen && !s.returned && (s.state == atNode || w.net&(slotBit(i, msgDispatch)|slotBit(i, msgTerminal)) != 0) {
			return false
		}
	}
	return true
}
