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

// sessionState is the Node's view of one of its sessions.
type sessionState uint8

const (
	none sessionState = iota
	registering
	asking // accepted: it asked for ready
	serving
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
}

// state is all of a world that matters to its future, small and comparable.
type state struct {
	net       uint64
	registry  uint16 // of cores
	pool      uint16
	acks      uint8 // bit per generation: ready acknowledgements whose fate is not reported yet
	connected uint8 // the last generation that node.connected named
	highest   uint8 // the highest generation Edge was told of
	ended     bool  // and was told, or decided, that it is over
	sessions  [maxGen + 1]sessionState
	requests  [maxSlots + 1]requestState
	slots     [maxSlots + 1]slot
	faults
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
}

// broken is what a rule's breach panics with, so that it reaches the test with
// the path that led there.
type broken string

func breach(format string, args ...any) { panic(broken(fmt.Sprintf(format, args...))) }

func (w *world) reg() *registryState { return w.cores.registries[w.state.registry] }
func (w *world) pl() *poolState      { return w.cores.pools[w.state.pool] }

// registry steps the registry and what it orders of the pool.
func (w *world) registry(event int, gen uint64) {
	was := w.reg()
	step := w.cores.stepRegistry(was, event, gen)
	if w.walk != nil {
		w.walk.registry(w.cores, step, event, gen)
	}
	w.state.registry = step.to.id
	now := step.to
	for _, e := range step.effects {
		switch e := e.(type) {
		case SendRegisterAnswer:
			if !e.Accepted {
				w.net |= genBit(e.Gen, msgRefused)
				continue
			}
			if now.owner != e.Gen || !now.state.Owns() {
				breach("R2: %d is accepted, and %d is %s", e.Gen, now.owner, now.state)
			}
			w.net |= genBit(e.Gen, msgAccepted)
		case SendReadyAnswer:
			switch {
			case !e.Ready:
				w.net |= genBit(e.Gen, msgReadyNo)
			case now.owner != e.Gen || (now.state != Acking && now.state != Ready):
				breach("R5: %d is told that it is ready, and %d is %s", e.Gen, now.owner, now.state)
			default: // also if it is a repetition
				w.acks |= 1 << e.Gen
			}
		case SendFence:
			w.net |= genBit(e.Gen, msgFence)
		case Activate:
			if event != ackSent || gen != e.Gen {
				breach("R4: %d is activated by event %d of %d", e.Gen, event, gen)
			}
			w.pool(poolActivate, int(e.Gen))
		case FenceGeneration:
			if was.live != e.Gen {
				breach("F2: %d is fenced and was not live", e.Gen)
			}
			w.pool(poolFence, int(e.Gen))
			for i, s := range w.slots {
				if uint64(s.gen) == e.Gen && !s.returned {
					breach("F3: slot %d of the fenced generation %d is held", i, e.Gen)
				}
			}
		case NodeConnected:
			if e.Gen <= uint64(w.connected) {
				breach("R4: connected %d after %d", e.Gen, w.connected)
			}
			w.connected = uint8(e.Gen)
		}
	}
}

func (w *world) pool(event, arg int) {
	step := w.cores.stepPool(w.pl(), event, arg)
	if w.walk != nil {
		w.walk.pool(w.cores, step, event, arg)
	}
	w.state.pool = step.to.id
	live := w.reg().live
	returned, ended := uint64(0), uint64(0) // a bit per slot
	for _, e := range step.effects {
		id := int(e.Slot.ID)
		switch e.Kind {
		case pool.Granted:
			if e.Slot.Gen != live || live == 0 {
				breach("I5: slot %d under %d, live is %d", id, e.Slot.Gen, live)
			}
			if w.requests[e.Waiter] != waiting && w.requests[e.Waiter] != fresh {
				breach("I7: request %d was granted and does not wait", e.Waiter)
			}
			if w.slots[id].gen != 0 {
				breach("P8: slot %d is granted twice", id)
			}
			w.requests[e.Waiter] = running
			w.slots[id] = slot{request: uint8(e.Waiter), gen: uint8(e.Slot.Gen)}
			w.net |= slotBit(id, msgDispatch)
			w.tally.granted++
		case pool.Refused:
			if w.requests[e.Waiter] != waiting && w.requests[e.Waiter] != fresh {
				breach("I7: request %d was refused and does not wait", e.Waiter)
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

// check is what must hold in every state.
func (w *world) check() {
	r, p := w.reg(), w.pl()
	if r.owner != uint64(w.highest) {
		breach("R9: Edge was told of %d, the registry has %d", w.highest, r.owner)
	}
	if w.ended && r.state.Owns() {
		breach("R10: %d is over, and is %s", r.owner, r.state)
	}
	held := 0
	for i, s := range w.slots {
		if s.gen == 0 || s.returned {
			continue
		}
		if held++; uint64(s.gen) != r.live {
			breach("F3: slot %d is held under %d, live is %d", i, s.gen, r.live)
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
	if held > w.cores.places || held != p.held || runs != held || (p.gen != 0 && held != p.inUse) {
		breach("P4: %d slots are held for %d requests, the pool says %d and %d", held, runs, p.held, p.inUse)
	}
	if waits != p.waiting {
		breach("P9: %d wait, the pool has %d", waits, p.waiting)
	}
	if p.gen != r.live {
		breach("R6: the pool has %d, the registry %d", p.gen, r.live)
	}
	if waits > 0 && r.live != 0 && held < w.cores.places {
		breach("Q4: a lost wake-up")
	}
	if r.state == Ready && w.connected != w.highest {
		breach("R4: %d is ready, connected was %d", r.owner, w.connected)
	}
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
		breach("F5: %s of %d changed what %d has", what, gen, before.highest)
	}
}

// toEdge delivers a message of the node's session, or about it.
func (w *world) toEdge(gen uint64, msg int) {
	if gen < uint64(w.highest) {
		before := w.state
		w.registry(msg, gen)
		w.unmoved(before, gen, "a message")
	} else {
		w.registry(msg, gen)
		switch {
		case msg != msgAdmitted && msg != msgClosed && msg != msgRegister:
		case gen > uint64(w.highest):
			w.highest, w.ended = uint8(gen), msg == msgClosed
		case msg == msgClosed:
			w.ended = true
		}
	}
	if r := w.reg(); msg == msgBeat && (gen != r.owner || !r.state.Owns()) {
		if w.tally.answered++; w.net&genBit(gen, msgFence) == 0 {
			breach("F10: %d spoke and was not told", gen)
		}
	}
}

// toNode delivers a message to a session of the node.
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
		if st := w.sessions[s.gen]; s.state == unsent && (st == asking || st == serving) {
			s.state = atNode
		}
		return
	}
	// The demux asks whether it is the slot's own generation; the pool, whether
	// the slot is held.
	before := w.state
	w.pool(poolTerminal, i)
	if before.slots[i].returned || before.slots[i].gen < before.highest {
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
		case serving:
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
	if msg <= msgBeat {
		w.toEdge(gen, msg)
	} else {
		w.toNode(gen, msg)
	}
}

// dial opens the node's next session.
func (w *world) dial() {
	for gen := uint64(1); gen <= maxGen; gen++ {
		if w.sessions[gen] == none {
			w.sessions[gen] = registering
			w.net |= genBit(gen, msgAdmitted) | genBit(gen, msgRegister)
			return
		}
	}
	breach("the world is out of generations")
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
	if gen < uint64(before.highest) {
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

// bound lets the owner's bound pass, whatever it is.
func (w *world) bound() {
	w.registry(boundPasses, 0)
	w.ended = true
	if gen := uint64(w.highest); w.net&genBit(gen, msgFence) == 0 {
		breach("F10: %d is out of time and was not told", gen)
	}
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
	moveKinds
)

func (m move) String() string {
	name := [...]string{
		"deliver", "deliver and repeat", "lose", "dial", "ack sent", "ack failed", "register again",
		"ask again", "beat", "crash", "vanish", "bound passes", "enqueue", "leave", "leave while running", "waits end",
		"finish", "cancel bound", "dispatch again", "terminal again", "dispatch fails",
	}[m.kind]
	if m.kind > lose {
		return fmt.Sprint(name, " ", m.arg)
	}
	if m.arg >= slotBase {
		i := m.arg - slotBase
		return fmt.Sprint(name, " ", [...]string{"dispatch", "terminal"}[i%perSlot], " of slot ", i/perSlot+1)
	}
	return fmt.Sprint(name, " ", [...]string{
		"admitted", "closed", "register", "ready", "beat", "accepted", "refused", "ready yes", "ready no", "fence",
	}[m.arg%perGen], " of ", m.arg/perGen+1)
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
	if w.sessions[gens] == none {
		all = append(all, move{kind: dial})
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
		}
		if w.beats > 0 && w.sessions[gen] >= asking && w.net&genBit(gen, msgBeat) == 0 {
			all = append(all, move{beat, arg})
		}
		if w.crashes > 0 {
			all = append(all, move{crash, arg})
		}
		if w.vanishes > 0 {
			all = append(all, move{vanish, arg})
		}
	}
	if w.suspects > 0 && w.reg().state.Owns() {
		all = append(all, move{kind: suspect})
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
		w.dial()
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
		w.net |= genBit(gen, msgBeat)
	case crash:
		w.crashes--
		w.end(gen, true)
	case vanish:
		w.vanishes--
		w.end(gen, false)
	case suspect:
		w.suspects--
		w.bound()
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
	}
	w.settle()
}

// calm ends the faults and lets everything that is due happen, in rounds, until a
// round changes nothing. All must come to rest then: the node is live under its
// newest session, and every request has its end (LIVE1, LIVE2).
func (w *world) calm() {
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
	newest := uint64(0)
	for gen := uint64(1); gen <= maxGen; gen++ {
		if w.sessions[gen] != none {
			newest = gen
		}
	}
	if r := w.reg(); r.live != newest || w.sessions[newest] != serving {
		breach("LIVE1: Edge has %d %s, the node is %v", r.owner, r.state, w.sessions)
	}
	for i := range w.requests {
		if i > 0 && w.requests[i] != over {
			breach("LIVE2: request %d is %d", i, w.requests[i])
		}
	}
	if p := w.pl(); p.held > 0 || p.waiting > 0 {
		breach("INV4: at rest %+v", p.core.Snapshot())
	}
}

func (w *world) round() {
	w.reportAll()
	alive := uint64(0)
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
		}
		alive = gen
	}
	if alive == 0 {
		w.dial()
	}
	// Whose session ended goes on being silent.
	if r := w.reg(); r.state.Owns() && w.sessions[r.owner] == dead {
		w.bound()
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
