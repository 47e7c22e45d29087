package registry

import (
	"crypto/sha256"
	"encoding/binary"
	"flag"
	"fmt"
	"math/bits"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/iop-fabric/iop/edge/pool"
)

// The explorer drives the production cores through every order of a small world:
// one node with one place, a few generations, two requests, and a network that
// loses, repeats and reorders. It visits every state once, checks the rules in
// each, and from many of them lets the faults end and looks whether all comes to
// rest.

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
	maxSlots = 4
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

// env is the world around the cores.
type env struct {
	net      uint64
	acks     uint64 // bit per generation: ready acknowledgements whose fate is not reported yet
	sessions [maxGen + 1]sessionState
	requests [3]requestState
	slots    [maxSlots + 1]struct {
		request  uint8
		gen      uint64
		state    slotState
		returned bool
	}
	connected uint64 // the last generation that node.connected named
	drops     uint8
	dups      uint8
	fails     uint8 // acknowledgements that cannot be sent
	suspects  uint8 // heartbeat or pending bounds that pass though the session lives
	crashes   uint8
	givesUp   uint8 // cancels that nobody answers
	leaves    uint8
	beats     uint8
}

// world is copied before each move, the cores only when they are stepped.
type world struct {
	env
	r          *Registry
	p          *pool.Pool
	ownR, ownP bool
	keyR, keyP string // empty: not known
}

func (w *world) clone() *world {
	return &world{env: w.env, r: w.r, p: w.p, keyR: w.coreKeyR(), keyP: w.coreKeyP()}
}

// stepR and stepP step a core of the world's own.
func (w *world) stepR(now time.Time, ev Event) []Effect {
	if !w.ownR {
		w.r, w.ownR = w.r.Clone(), true
	}
	w.keyR = ""
	w.r.fences = limiter{} // the rate of fences is not explored
	return w.r.Step(now, ev, nil)
}

func (w *world) stepP(now time.Time, ev pool.Event) []pool.Effect {
	if !w.ownP {
		w.p, w.ownP = w.p.Clone(), true
	}
	w.keyP = ""
	return w.p.Step(now, ev, nil)
}

func (w *world) coreKeyR() string {
	if w.keyR == "" {
		w.keyR = string(w.r.AppendKey(nil))
	}
	return w.keyR
}

func (w *world) coreKeyP() string {
	if w.keyP == "" {
		w.keyP = string(w.p.AppendKey(nil))
	}
	return w.keyP
}

func (w *world) coreKey() string { return w.coreKeyR() + w.coreKeyP() }

func (w *world) key(b []byte) [16]byte {
	b = append(append(b[:0], w.coreKeyR()...), w.coreKeyP()...)
	b = binary.LittleEndian.AppendUint64(b, w.net)
	b = append(b, byte(w.acks), byte(w.connected), w.drops, w.dups, w.fails, w.suspects, w.crashes, w.givesUp, w.leaves, w.beats)
	for _, s := range w.sessions {
		b = append(b, byte(s))
	}
	for _, r := range w.requests {
		b = append(b, byte(r))
	}
	for _, s := range w.slots {
		b = append(b, s.request, byte(s.gen), byte(s.state), boolByte(s.returned))
	}
	sum := sha256.Sum256(b)
	return [16]byte(sum[:16])
}

func boolByte(v bool) byte {
	if v {
		return 1
	}
	return 0
}

// broken is what a rule's breach panics with, so that it reaches the test with
// the path that led there.
type broken string

func breach(format string, args ...any) { panic(broken(fmt.Sprintf(format, args...))) }

// registry steps the registry and what it orders of the pool.
func (w *world) registry(now time.Time, ev Event) {
	for _, e := range w.stepR(now, ev) {
		switch e := e.(type) {
		case SendRegisterAnswer:
			if e.Accepted {
				w.net |= genBit(e.Gen, msgAccepted)
			} else {
				w.net |= genBit(e.Gen, msgRefused)
			}
		case SendReadyAnswer:
			switch {
			case !e.Ready:
				w.net |= genBit(e.Gen, msgReadyNo)
			case w.r.Live(e.Node, e.Gen):
				w.net |= genBit(e.Gen, msgReadyYes)
			default:
				w.acks |= 1 << e.Gen
			}
		case SendFence:
			w.net |= genBit(e.Gen, msgFence)
		case Activate:
			w.pool(now, pool.Activate(e.Node, e.Gen))
		case FenceGeneration:
			w.pool(now, pool.Fence(e.Node, e.Gen, string(e.Cause)))
			for i, s := range w.slots {
				if s.gen == e.Gen && !s.returned {
					breach("F3: slot %d of the fenced generation %d is held", i, e.Gen)
				}
			}
		case NodeConnected:
			if e.Gen <= w.connected {
				breach("R4: connected %d after %d", e.Gen, w.connected)
			}
			w.connected = e.Gen
		}
	}
}

func (w *world) pool(now time.Time, ev pool.Event) {
	for _, e := range w.stepP(now, ev) {
		id := int(e.Slot.ID)
		switch e.Kind {
		case pool.Granted:
			if !w.r.Live(e.Slot.Node, e.Slot.Gen) {
				breach("I5: slot %d under %d, which is not live", id, e.Slot.Gen)
			}
			if w.requests[e.Waiter] != waiting && w.requests[e.Waiter] != fresh {
				breach("I7: request %d was granted and does not wait", e.Waiter)
			}
			w.requests[e.Waiter] = running
			w.slots[id].request, w.slots[id].gen = uint8(e.Waiter), e.Slot.Gen
			w.net |= slotBit(id, msgDispatch)
		case pool.Refused:
			w.requests[e.Waiter] = over
		case pool.SlotReturned:
			if w.slots[id].gen == 0 || w.slots[id].returned {
				breach("P8: slot %d is returned and not held", id)
			}
			w.slots[id].returned = true
			w.requests[w.slots[id].request] = over
		case pool.EndAttempt:
			if !w.slots[id].returned {
				breach("F3: slot %d ends before it is returned", id)
			}
		}
	}
}

// check is what must hold in every state. What it looks at changes only with the
// cores.
func (w *world) check() {
	if !w.ownR && !w.ownP {
		return
	}
	live := w.r.LiveSessions()["n1"]
	snap := w.p.Snapshot()
	v := snap.Providers[0]
	held := 0
	for i, s := range w.slots {
		if s.gen == 0 || s.returned {
			continue
		}
		if held++; s.gen != live {
			breach("F3: slot %d is held under %d, live is %d", i, s.gen, live)
		}
	}
	if held > 1 || held != snap.Held || v.Connected && held != v.InFlight {
		breach("P4: %d slots are held, the pool says %+v", held, snap)
	}
	if v.Connected != (live != 0) || v.Gen != live {
		breach("R6: the pool has %d, the registry %d", v.Gen, live)
	}
	if snap.Waiting > 0 && live != 0 && held == 0 {
		breach("Q4: a lost wake-up")
	}
	if owner, s := w.r.Owner("n1"); s == Ready && w.connected != owner {
		breach("R4: %d is ready and not connected", owner)
	}
}

// toEdge delivers a message of the node's session, or about it.
func (w *world) toEdge(gen uint64, msg int) {
	highest, _ := w.r.Owner("n1")
	var before string
	if gen < highest {
		before = w.coreKey()
	}
	w.registry(epoch, map[int]Event{
		msgAdmitted: Admitted{Node: "n1", Gen: gen},
		msgClosed:   Closed{Node: "n1", Gen: gen},
		msgRegister: RegisterReceived{Node: "n1", Gen: gen, PayloadNode: "n1", ProtocolMin: 1, ProtocolMax: 1},
		msgReady:    ReadyReceived{Node: "n1", Gen: gen, PayloadNode: "n1"},
		msgBeat:     HeartbeatReceived{Node: "n1", Gen: gen},
	}[msg])
	if gen < highest && w.coreKey() != before {
		breach("F5: message %d of %d changed what %d has", msg, gen, highest)
	}
	if _, s := w.r.Owner("n1"); msg == msgBeat && (gen != highest || !s.Owns()) && w.net&genBit(gen, msgFence) == 0 {
		breach("F10: %d spoke and was not told", gen)
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
		w.end(gen)
	}
}

// end ends a session on the node's side; the broker notices.
func (w *world) end(gen uint64) {
	w.sessions[gen] = dead
	w.net |= genBit(gen, msgClosed)
	for i := range w.slots { // its work is dropped (F5)
		if w.slots[i].gen == gen && w.slots[i].state == atNode {
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
	highest, _ := w.r.Owner("n1")
	before := ""
	if s.returned || s.gen < highest {
		before = w.coreKey()
	}
	w.pool(epoch, pool.ReturnSlot(uint64(i), pool.ByTerminal))
	if before != "" && w.coreKey() != before {
		breach("F5: a late terminal of slot %d changed something", i)
	}
}

// settle takes out of the network what no longer means anything to a node's
// session, so that states that differ in nothing else are one.
func (w *world) settle() {
	for gen := uint64(1); gen <= maxGen; gen++ {
		var moot []int
		switch w.sessions[gen] {
		case asking:
			moot = []int{msgAccepted}
		case serving:
			moot = []int{msgAccepted, msgReadyYes}
		case dead:
			moot = []int{msgAccepted, msgRefused, msgReadyYes, msgReadyNo, msgFence}
		}
		for _, msg := range moot {
			w.net &^= genBit(gen, msg)
		}
	}
	for i, s := range w.slots {
		if s.gen != 0 && (w.sessions[s.gen] == dead || s.state != unsent) {
			w.net &^= slotBit(i, msgDispatch)
		}
	}
}

func (w *world) deliver(bit int) {
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

func (w *world) dialled() (n int) {
	for _, s := range w.sessions {
		if s != none {
			n++
		}
	}
	return n
}

// report tells the registry what became of a ready acknowledgement.
func (w *world) report(gen uint64, sent bool) {
	w.acks &^= 1 << gen
	highest, _ := w.r.Owner("n1")
	before := w.coreKey()
	if sent {
		w.net |= genBit(gen, msgReadyYes)
		w.registry(epoch, ReadyAckSent{"n1", gen})
	} else {
		w.registry(epoch, ReadyAckFailed{"n1", gen})
	}
	if gen < highest && w.coreKey() != before {
		breach("F5: the acknowledgement of %d changed what %d has", gen, highest)
	}
}

func (w *world) reportAll() {
	for gen := uint64(1); gen <= maxGen; gen++ {
		if w.acks&(1<<gen) != 0 {
			w.report(gen, true)
		}
	}
}

// move is one thing the world may do.
type move struct {
	name string
	do   func(*world)
}

// moves lists all that may happen next.
func (w *world) moves(gens int) []move {
	var all []move
	add := func(name string, do func(*world)) { all = append(all, move{name, do}) }
	for net := w.net; net != 0; net &= net - 1 {
		bit := bits.TrailingZeros64(net)
		add(fmt.Sprintf("deliver %d", bit), func(w *world) { w.net &^= 1 << bit; w.deliver(bit) })
		if w.dups > 0 {
			add(fmt.Sprintf("deliver and repeat %d", bit), func(w *world) { w.dups--; w.net &^= 1 << bit; w.deliver(bit); w.net |= 1 << bit })
		}
		if w.drops > 0 {
			add(fmt.Sprintf("lose %d", bit), func(w *world) { w.drops--; w.net &^= 1 << bit })
		}
	}
	// A session that is thought dead may live on beside the next.
	if w.dialled() < gens {
		add("dial", func(w *world) { w.dial() })
	}
	for gen := uint64(1); int(gen) <= gens; gen++ {
		if w.acks&(1<<gen) != 0 {
			add("ack sent", func(w *world) { w.report(gen, true) })
			if w.fails > 0 {
				add("ack failed", func(w *world) { w.fails--; w.report(gen, false) })
			}
		}
		switch s := w.sessions[gen]; s {
		case none, dead:
			continue
		case registering:
			if w.net&(genBit(gen, msgRegister)|genBit(gen, msgAccepted)|genBit(gen, msgRefused)) == 0 {
				add("register again", func(w *world) { w.net |= genBit(gen, msgRegister) })
			}
		case asking:
			if w.acks&(1<<gen) == 0 && w.net&(genBit(gen, msgReady)|genBit(gen, msgReadyYes)|genBit(gen, msgReadyNo)) == 0 {
				add("ask again", func(w *world) { w.net |= genBit(gen, msgReady) })
			}
		}
		if w.beats > 0 && w.sessions[gen] >= asking && w.net&genBit(gen, msgBeat) == 0 {
			add("beat", func(w *world) { w.beats--; w.net |= genBit(gen, msgBeat) })
		}
		if w.crashes > 0 {
			add("crash", func(w *world) { w.crashes--; w.end(gen) })
		}
	}
	if _, s := w.r.Owner("n1"); s.Owns() && w.suspects > 0 {
		add("bound passes", func(w *world) { w.suspects--; w.bound() })
	}
	for i := range w.requests {
		switch w.requests[i] {
		case fresh:
			if i > 0 {
				add("enqueue", func(w *world) { w.enqueue(i) })
			}
		case waiting:
			if w.leaves > 0 {
				add("leave", func(w *world) { w.leaves--; w.requests[i] = over; w.pool(epoch, pool.CancelWaiter(pool.WaiterID(i))) })
			}
		case running:
			if w.leaves > 0 {
				add("leave while running", func(w *world) { w.leaves--; w.requests[i] = leaving })
			}
		}
	}
	for i := range w.slots {
		s := w.slots[i]
		if s.gen == 0 {
			continue
		}
		if s.state == atNode {
			add("finish", func(w *world) { w.slots[i].state = finished; w.net |= slotBit(i, msgTerminal) })
		}
		if !s.returned && s.state != unsent && w.requests[s.request] == leaving && w.givesUp > 0 {
			add("cancel bound", func(w *world) { w.givesUp--; w.pool(epoch, pool.ReturnSlot(uint64(i), pool.ByCancelBound)) })
		}
		if !s.returned && w.sessions[s.gen] != dead {
			if s.state == unsent && w.net&slotBit(i, msgDispatch) == 0 {
				add("dispatch again", func(w *world) { w.net |= slotBit(i, msgDispatch) })
			}
			if s.state == finished && w.net&slotBit(i, msgTerminal) == 0 {
				add("terminal again", func(w *world) { w.net |= slotBit(i, msgTerminal) })
			}
		}
	}
	return all
}

func (w *world) enqueue(i int) {
	w.pool(epoch, pool.Enqueue(&pool.Request{Waiter: pool.WaiterID(i), Model: "m", Principal: "alice"}))
	if w.requests[i] == fresh {
		w.requests[i] = waiting
	}
}

// bound lets the owner's bound pass, whatever it is.
func (w *world) bound() {
	for range 2 { // Deadline may be earlier than any bound once
		if d := w.r.Deadline(); !d.IsZero() {
			w.registry(d, DeadlinePassed{})
		}
	}
}

// calm ends the faults and lets everything that is due happen, in rounds. All
// must come to rest: the node is live under its newest session, and every request
// has its end (LIVE1, LIVE2).
func (w *world) calm() {
	for range 12 {
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
		if owner, s := w.r.Owner("n1"); s.Owns() && w.sessions[owner] == dead {
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
			bit := bits.TrailingZeros64(net)
			w.net &^= 1 << bit
			w.deliver(bit)
			w.reportAll()
		}
		w.check()
	}
	newest := uint64(0)
	for gen := uint64(1); gen <= maxGen; gen++ {
		if w.sessions[gen] != none {
			newest = gen
		}
	}
	if !w.r.Live("n1", newest) || w.sessions[newest] != serving {
		owner, s := w.r.Owner("n1")
		breach("LIVE1: Edge has %d %s, the node is %v", owner, s, w.sessions)
	}
	for i := range w.requests {
		if i > 0 && w.requests[i] != over {
			breach("LIVE2: request %d is %d", i, w.requests[i])
		}
	}
	if s := w.p.Snapshot(); s.Held > 0 || s.Waiting > 0 {
		breach("INV4: at rest %+v", s)
	}
}

var deep = flag.Bool("deep", false, "explore larger worlds: minutes to hours")

type exploration struct {
	name     string
	gens     int
	start    env
	requests int
	liveness int // every how many states the calm is tried
}

// Contract: R1 R4 R5 R6 R9 R10 F2 F3 F4 F5 F10 P8 P9 Q4
func TestExplore(t *testing.T) {
	worlds := []exploration{
		{name: "takeover", gens: 2, requests: 2, liveness: 4, start: env{}},
		{name: "loss", gens: 2, requests: 1, liveness: 2, start: env{drops: 1}},
		{name: "crash", gens: 2, requests: 1, liveness: 1, start: env{crashes: 1}},
		{name: "suspicion", gens: 2, requests: 1, liveness: 2, start: env{suspects: 1}},
		{name: "strangers", gens: 2, requests: 1, liveness: 2, start: env{beats: 1}},
		{name: "callers", gens: 1, requests: 2, liveness: 1, start: env{leaves: 2, givesUp: 1, crashes: 1}},
		{name: "repetition", gens: 1, requests: 2, liveness: 2, start: env{dups: 2, fails: 1}},
	}
	if underRace {
		worlds = worlds[len(worlds)-2:]
	}
	if *deep {
		worlds = []exploration{
			{name: "all faults", gens: 2, requests: 1, liveness: 16, start: env{drops: 1, dups: 1, beats: 1, suspects: 1, crashes: 1}},
			{name: "two callers", gens: 2, requests: 2, liveness: 16, start: env{crashes: 1, dups: 1, leaves: 1, givesUp: 1}},
			{name: "three generations", gens: 3, requests: 1, liveness: 16, start: env{crashes: 1, suspects: 1}},
		}
	}
	for _, x := range worlds {
		t.Run(strings.ReplaceAll(x.name, " ", "_"), func(t *testing.T) {
			x.run(t)
		})
	}
}

// step is a state's first way there.
type step struct {
	from int
	name string
}

func (x exploration) run(t *testing.T) {
	l := newLoop(t, 1)
	first := &world{env: x.start, r: New(Config{Nodes: []string{"n1"}}), p: l.p}
	for i := x.requests + 1; i < len(first.requests); i++ {
		first.requests[i] = over
	}
	var (
		buf     []byte
		seen    = map[[16]byte]bool{first.key(nil): true}
		path    = []step{{from: -1}}
		queue   = []*world{first}
		index   = []int{0}
		moves   int
		calm    int
		current int
		name    string
	)
	defer func() {
		if b := recover(); b != nil {
			msg, ok := b.(broken)
			if !ok {
				panic(b)
			}
			names := []string{name}
			for at := current; at >= 0; at = path[at].from {
				names = append(names, path[at].name)
			}
			slices.Reverse(names)
			t.Fatalf("%s\nafter: %s", msg, strings.Join(names, ", "))
		}
	}()
	for len(queue) > 0 {
		w, at := queue[0], index[0]
		queue[0] = nil
		queue, index = queue[1:], index[1:]
		current = at
		if at%x.liveness == 0 {
			name = "calm"
			w.clone().calm()
			calm++
		}
		for _, m := range w.moves(x.gens) {
			next := w.clone()
			name = m.name
			m.do(next)
			next.settle()
			next.check()
			moves++
			buf = buf[:0]
			key := next.key(buf)
			if seen[key] {
				continue
			}
			seen[key] = true
			path = append(path, step{at, m.name})
			queue = append(queue, next)
			index = append(index, len(path)-1)
		}
	}
	t.Logf("%d states, %d transitions, %d of them brought to rest; complete", len(seen), moves, calm)
}
