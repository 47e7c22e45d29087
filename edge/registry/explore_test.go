package registry

import (
	"flag"
	"hash/maphash"
	"math/bits"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// The explorer drives the production cores through every order of a small world:
// one node with a place or two, or two that share a queue, a few generations, one
// to three requests, and a network that loses, repeats and reorders; nodes that
// drain, an operator who drains them and changes the configuration. It visits every
// state once, checks the rules in each, and from each lets the faults end and looks
// whether all comes to rest. cores_test.go is how it drives the cores, world_test.go the world and its
// rules.

var worldSize = flag.String("worlds", "small", "explore the `small` worlds, the large ones (make explore) or the huge ones")

// exploration is a world and how many states it has. The number is known, so that
// an explorer that sees less does not pass for one that found nothing.
type exploration struct {
	name     string
	nodes    int // 1 if 0
	gens     int // of all nodes; the first node has the odd ones of two
	places   int // of each node; 1 if 0
	requests int
	may      faults
	replay   int // every how many states the way there is walked again
	states   int
}

var worlds = map[string][]exploration{
	"small": {
		{name: "takeover", gens: 2, requests: 2, replay: 8, states: 8_341},
		{name: "loss", gens: 2, requests: 1, replay: 8, states: 7_350, may: faults{drops: 1}},
		{name: "crash", gens: 2, requests: 1, replay: 8, states: 7_612, may: faults{crashes: 1, vanishes: 1}},
		{name: "suspicion", gens: 2, requests: 1, replay: 8, states: 7_226, may: faults{suspects: 1}},
		{name: "strangers", gens: 2, requests: 1, replay: 8, states: 5_494, may: faults{beats: 1}},
		{name: "callers", gens: 1, requests: 2, replay: 8, states: 1_374, may: faults{leaves: 2, givesUp: 1, crashes: 1}},
		{name: "repetition", gens: 1, requests: 2, replay: 8, states: 4_331, may: faults{dups: 2, fails: 1}},
		{name: "waits", gens: 1, requests: 3, places: 2, replay: 8, states: 11_759, may: faults{expires: 2, crashes: 1, fails: 1}},
		{name: "draining", gens: 1, requests: 2, replay: 8, states: 2_337, may: faults{drains: 1, beats: 1}},
		{name: "draining in a takeover", gens: 2, requests: 1, replay: 8, states: 9_198, may: faults{drains: 1}},
		{name: "operator", gens: 1, requests: 2, replay: 8, states: 2_107, may: faults{operator: 2, drains: 1}},
		{name: "operator in a takeover", gens: 2, requests: 1, replay: 8, states: 3_300, may: faults{operator: 1}},
		{name: "reloads", gens: 1, requests: 2, replay: 8, states: 6_891, may: faults{changes: 2, crashes: 1}},
		{name: "reload in a takeover", gens: 2, requests: 1, replay: 8, states: 11_618, may: faults{changes: 1}},
		{name: "breaches", gens: 2, requests: 1, replay: 8, states: 6_934, may: faults{breaches: 1}},
		{name: "two nodes", nodes: 2, gens: 2, requests: 2, replay: 8, states: 27_301, may: faults{crashes: 1}},
		{name: "two nodes, silence", nodes: 2, gens: 2, requests: 1, replay: 8, states: 5_994, may: faults{suspects: 1}},
	},
	"large": {
		{name: "all faults", gens: 2, requests: 1, replay: 64, states: 1_697_648, may: faults{drops: 1, dups: 1, beats: 1, suspects: 1, crashes: 1}},
		{name: "callers", gens: 2, requests: 2, replay: 64, states: 1_292_177, may: faults{crashes: 1, dups: 1, fails: 1, leaves: 1, givesUp: 1}},
		{name: "two places", gens: 2, requests: 3, places: 2, replay: 64, states: 996_151, may: faults{vanishes: 1, suspects: 1, expires: 1}},
		{name: "three generations", gens: 3, requests: 1, replay: 64, states: 771_970, may: faults{crashes: 1, suspects: 1}},
		{name: "draining", gens: 2, requests: 2, replay: 64, states: 180_885, may: faults{drains: 2, crashes: 1}},
		{name: "operator", gens: 2, requests: 2, replay: 64, states: 339_839, may: faults{operator: 2, crashes: 1, drains: 1}},
		{name: "reloads", gens: 2, requests: 2, replay: 64, states: 444_109, may: faults{changes: 3}},
		{name: "reloads and silence", gens: 2, requests: 1, replay: 64, states: 414_824, may: faults{changes: 2, suspects: 1, drains: 1}},
		{name: "breaches", gens: 2, requests: 2, replay: 64, states: 514_304, may: faults{breaches: 2, dups: 1}},
		{name: "two nodes", nodes: 2, gens: 2, requests: 3, replay: 64, states: 1_180_656, may: faults{suspects: 1, operator: 1}},
		{name: "two nodes, reloads", nodes: 2, gens: 2, requests: 2, replay: 64, states: 202_018, may: faults{changes: 1, drains: 1}},
		{name: "two nodes, a takeover", nodes: 2, gens: 3, requests: 2, replay: 64, states: 401_233},
	},
	"huge": {
		{name: "two nodes, faults", nodes: 2, gens: 2, requests: 2, replay: 256, states: 1_540_803, may: faults{suspects: 1, drains: 1, drops: 1}},
		{name: "two nodes, a takeover", nodes: 2, gens: 3, requests: 2, replay: 256, states: 2_603_521, may: faults{suspects: 1}},
		{name: "operator", gens: 2, requests: 2, replay: 256, states: 339_839, may: faults{operator: 2, crashes: 1, drains: 1}},
		{name: "lossy drains", gens: 2, requests: 2, replay: 256, states: 1_844_339, may: faults{drains: 1, drops: 1, dups: 1}},
		{name: "lossy reloads", gens: 2, requests: 2, replay: 256, states: 7_815_633, may: faults{changes: 2, drops: 1, dups: 1}},
		{name: "breaches of zombies", gens: 2, requests: 2, replay: 256, states: 1_966_620, may: faults{breaches: 2, beats: 1, dups: 1}},
		{name: "two callers", gens: 2, requests: 2, replay: 256, states: 5_544_583, may: faults{drops: 1, dups: 1, beats: 1, suspects: 1}},
		{name: "zombies", gens: 3, requests: 2, replay: 256, states: 8_488_389, may: faults{beats: 1, suspects: 1}},
		{name: "three generations repeated", gens: 3, requests: 1, replay: 256, states: 5_304_080, may: faults{vanishes: 1, suspects: 1, dups: 1}},
		{name: "three generations lossy", gens: 3, requests: 1, replay: 256, states: 4_347_554, may: faults{crashes: 1, suspects: 1, drops: 1}},
		{name: "three callers", gens: 2, requests: 3, places: 2, replay: 256, states: 9_588_575, may: faults{dups: 1, crashes: 1, leaves: 1, givesUp: 1}},
		{name: "network", gens: 2, requests: 2, replay: 256, states: 13_474_049, may: faults{drops: 2, dups: 2, suspects: 1}},
		{name: "every fault", gens: 2, requests: 1, replay: 256, states: 11_811_228, may: faults{
			drops: 1, dups: 1, fails: 1, suspects: 1, crashes: 1, vanishes: 1, givesUp: 1, leaves: 1, expires: 1, beats: 1,
		}},
	},
}

// Contract: R1 R4 R5 R6 R9 R10 F2 F3 F4 F5 F10 P4 P6 P8 P9 Q4 D7 J8
func TestExplore(t *testing.T) {
	all, ok := worlds[*worldSize]
	if !ok {
		t.Fatalf("there are no %s worlds", *worldSize)
	}
	var (
		mu     sync.Mutex
		began  = time.Now()
		sum    tally
		states int
		moves  int
	)
	t.Run("worlds", func(t *testing.T) {
		for _, x := range all {
			t.Run(strings.ReplaceAll(x.name, " ", "_"), func(t *testing.T) {
				t.Parallel() // each has its own cores
				seen, tally := x.run(t)
				mu.Lock()
				defer mu.Unlock()
				states += seen
				moves += sum.add(tally)
			})
		}
	})
	t.Logf("%d states, %d transitions in %v; complete", states, moves, time.Since(began).Round(100*time.Millisecond))
	t.Logf("stale events %d, late terminals %d, slots granted %d, fenced %d, returned %d, requests refused %d, strangers told %d, passed from node to node %d, states with places held back %d",
		sum.stale, sum.late, sum.granted, sum.fenced, sum.released, sum.refused, sum.answered, sum.passed, sum.held)
	if t.Failed() {
		return
	}
	for kind, n := range sum.moves {
		if n == 0 {
			t.Errorf("no world did: %s", move{kind: moveKind(kind)})
		}
	}
	if min(sum.stale, sum.late, sum.granted, sum.fenced, sum.released, sum.refused, sum.answered, sum.passed, sum.held) == 0 {
		t.Error("a rule had nothing to hold against")
	}
}

// add sums up, and returns how many moves o has.
func (t *tally) add(o *tally) (moves int) {
	for i, n := range o.moves {
		t.moves[i] += n
		moves += n
	}
	t.stale, t.late, t.granted, t.fenced = t.stale+o.stale, t.late+o.late, t.granted+o.granted, t.fenced+o.fenced
	t.released, t.refused, t.answered = t.released+o.released, t.refused+o.refused, t.answered+o.answered
	t.passed, t.held = t.passed+o.passed, t.held+o.held
	return moves
}

// visited is every state seen, in the order found: the ones not looked at yet are
// the frontier.
type visited struct {
	states []state
	from   []origin
	table  []uint32 // open addressing, by hash: index + 1 of a state
	seed   maphash.Seed
}

// origin is how a state was first reached.
type origin struct {
	at   uint32
	move move
}

// newVisited has room for as many states as are known to come.
func newVisited(states int) *visited {
	return &visited{
		states: make([]state, 0, states), from: make([]origin, 0, states),
		table: make([]uint32, 1<<bits.Len(uint(2*states+2))), seed: maphash.MakeSeed(),
	}
}

// add reports whether the state is new.
func (v *visited) add(s *state, from int, m move) bool {
	if 2*len(v.states) >= len(v.table) {
		v.grow()
	}
	slot := v.slot(s)
	if *slot != 0 {
		return false
	}
	v.states = append(v.states, *s)
	v.from = append(v.from, origin{uint32(from), m})
	*slot = uint32(len(v.states))
	return true
}

// slot is where the state is in the table, or would be.
func (v *visited) slot(s *state) *uint32 {
	mask := uint64(len(v.table) - 1)
	for i := maphash.Comparable(v.seed, *s) & mask; ; i = (i + 1) & mask {
		if at := v.table[i]; at == 0 || v.states[at-1] == *s {
			return &v.table[i]
		}
	}
}

func (v *visited) grow() {
	v.table = make([]uint32, 2*len(v.table))
	for i := range v.states {
		*v.slot(&v.states[i]) = uint32(i + 1)
	}
}

// path lists the moves from the start to a state.
func (v *visited) path(at int) (moves []move) {
	for ; at > 0; at = int(v.from[at].at) {
		moves = append(moves, v.from[at].move)
	}
	slices.Reverse(moves)
	return moves
}

func (x exploration) run(t *testing.T) (int, *tally) {
	var (
		began   = time.Now()
		cores   = newCores(max(x.nodes, 1), max(x.places, 1))
		counted tally // the moves that explore
		beside  tally // those of the calm and of replays
		first   = world{state: state{faults: x.may}, cores: cores, tally: &counted}
		v       = newVisited(x.states)
		walks   int
		at      int
		doing   any
	)
	for i := x.requests + 1; i < len(first.requests); i++ {
		first.requests[i] = over
	}
	defer func() {
		if b := recover(); b != nil {
			if _, ok := b.(broken); !ok {
				t.Logf("%s", debug.Stack())
			}
			var path strings.Builder
			for _, m := range v.path(at) {
				path.WriteString(m.String() + ", ")
			}
			t.Fatalf("%v\nafter: %s%v", b, path.String(), doing)
		}
	}()
	first.check()
	v.add(&first.state, 0, move{}) // nobody reads how the first was reached
	var moves []move
	for ; at < len(v.states); at++ {
		w := world{state: v.states[at], cores: cores, tally: &counted}
		doing = "calm"
		rest := w
		rest.tally = &beside
		rest.calm()
		if at%x.replay == 0 {
			doing = "the same again"
			again := first
			again.tally = &beside
			again.walk = &walkers{}
			again.walk.r, again.walk.p = cores.fresh()
			for _, m := range v.path(at) {
				again.do(m)
			}
			if again.state != w.state {
				breach("the same moves lead elsewhere")
			}
			walks++
		}
		moves = w.moves(moves[:0], x.gens)
		for i := range moves {
			doing = &moves[i]
			next := w
			next.do(moves[i])
			if v.add(&next.state, at, moves[i]) {
				next.check()
			}
		}
	}
	taken := (&tally{}).add(&counted)
	t.Logf("%s: %d states, %d transitions, each brought to rest, %d reached again; %s; %v",
		x.name, len(v.states), taken, walks, cores, time.Since(began).Round(10*time.Millisecond))
	if len(v.states) != x.states {
		t.Errorf("%d states, and not %d: if world or cores changed on purpose, write the new number", len(v.states), x.states)
	}
	return len(v.states), &counted
}
