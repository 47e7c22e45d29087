package dispatch

import (
	"cmp"
	"hash/maphash"
	"slices"
	"sync"
	"time"

	"github.com/iop-fabric/iop/wire"
)

// table finds the stream of a run id, and remembers finished runs long enough
// to acknowledge their terminals again (J3). It is cut into shards, so that the
// callback and the callers seldom meet.
type table struct {
	seed   maphash.Seed
	shards [shardCount]shard

	slotMu sync.Mutex
	bySlot map[uint64]*stream
}

const (
	shardCount = 16 // a power of two
	// What is remembered of finished runs, in all and for how long.
	rememberRuns = 1 << 16
	rememberFor  = 2 * time.Minute
	// lateAcks is how many acknowledgements of a run may come after its end: one
	// for each of the largest frames that were on their way to the Node.
	lateAcks = wire.MaxWindow / wire.MaxBody
	// lateFrames is how much of a run may come after its end: all that was on its way.
	lateFrames = 2 * wire.MaxWindow / wire.FrameOverhead
)

type shard struct {
	mu   sync.Mutex
	open map[string]*stream
	// done and order hold no pointers, so that the collector need not read them.
	done  map[uint64]finished
	order []remembered // a ring once it is full
	head  int
	n     int
}

// finished says of a run by which session it was served and which sequence its
// terminal had; 0: it had none, nobody answered its cancel.
type finished struct {
	key, acked uint64
	acks       uint32 // that came late
	late       uint32 // frames that did, in units of wire.FrameOverhead
}

type remembered struct {
	hash uint64
	at   int64 // unix seconds
}

func newTable() *table {
	t := &table{seed: maphash.MakeSeed(), bySlot: map[uint64]*stream{}}
	for i := range t.shards {
		t.shards[i].open = map[string]*stream{}
		t.shards[i].done = map[uint64]finished{}
	}
	return t
}

func (t *table) hash(run string) uint64 { return maphash.String(t.seed, run) }

func (t *table) shard(hash uint64) *shard { return &t.shards[hash%shardCount] }

// add reports whether the run and the slot are new.
func (t *table) add(s *stream) bool {
	t.slotMu.Lock()
	if t.bySlot[s.slot.ID] != nil {
		t.slotMu.Unlock()
		return false
	}
	t.bySlot[s.slot.ID] = s
	t.slotMu.Unlock()
	sh := t.shard(s.hash)
	sh.mu.Lock()
	_, known := sh.done[s.hash]
	known = known || sh.open[s.run] != nil
	if !known {
		sh.open[s.run] = s
	}
	sh.mu.Unlock()
	if known {
		t.forgetSlot(s)
	}
	return !known
}

func (t *table) get(run string, hash uint64) *stream {
	sh := t.shard(hash)
	sh.mu.Lock()
	defer sh.mu.Unlock()
	return sh.open[run]
}

func (t *table) slot(id uint64) *stream {
	t.slotMu.Lock()
	defer t.slotMu.Unlock()
	return t.bySlot[id]
}

func (t *table) forgetSlot(s *stream) {
	t.slotMu.Lock()
	if t.bySlot[s.slot.ID] == s {
		delete(t.bySlot, s.slot.ID)
	}
	t.slotMu.Unlock()
}

// remove takes a stream out. remember: its Node may still speak of it; acked, if not 0,
// is what repetitions of its terminal are answered with from now on.
func (t *table) remove(s *stream, remember bool, acked uint64, now int64) {
	t.forgetSlot(s)
	sh := t.shard(s.hash)
	sh.mu.Lock()
	defer sh.mu.Unlock()
	if sh.open[s.run] == s {
		delete(sh.open, s.run)
	}
	if remember {
		sh.remember(s.hash, finished{key: s.sess.key, acked: acked}, now)
	}
}

func (sh *shard) remember(hash uint64, f finished, now int64) {
	const most = rememberRuns / shardCount
	for sh.n > 0 && (sh.n == most || sh.order[sh.head].at < now-int64(rememberFor/time.Second)) {
		delete(sh.done, sh.order[sh.head].hash)
		sh.head = (sh.head + 1) % len(sh.order)
		sh.n--
	}
	if sh.n == len(sh.order) { // full, but below the bound: only ever before it wraps at it
		bigger := make([]remembered, min(most, max(64, 2*len(sh.order))))
		for i := range sh.n {
			bigger[i] = sh.order[(sh.head+i)%len(sh.order)]
		}
		sh.order, sh.head = bigger, 0
	}
	sh.order[(sh.head+sh.n)%len(sh.order)] = remembered{hash: hash, at: now}
	sh.n++
	sh.done[hash] = f
}

// lateFrame notes a frame of that size of a run that ended. It reports whether it was one
// of that session's, and whether it is one too many.
func (t *table) lateFrame(hash, key uint64, size int) (f finished, ok, over bool) {
	sh := t.shard(hash)
	sh.mu.Lock()
	defer sh.mu.Unlock()
	if f, ok = sh.done[hash]; !ok || f.key != key {
		return f, false, false
	}
	if over = f.late >= lateFrames; !over {
		f.late += uint32(1 + min(size, wire.MaxMessage)/wire.FrameOverhead) //nolint:gosec // of a message
		sh.done[hash] = f
	}
	return f, true, over
}

// lateAck notes an acknowledgement of a run that is not open. It reports whether a
// session may be expected to send it: the run was its own, and these are not many.
func (t *table) lateAck(hash, key uint64) bool {
	sh := t.shard(hash)
	sh.mu.Lock()
	defer sh.mu.Unlock()
	f, ok := sh.done[hash]
	if !ok || f.key != key || f.acks >= lateAcks {
		return false
	}
	f.acks++
	sh.done[hash] = f
	return true
}

// each calls fn for every open stream, in the order of their slots, with no lock held.
func (t *table) each(fn func(*stream)) {
	var all []*stream
	for i := range t.shards {
		sh := &t.shards[i]
		sh.mu.Lock()
		for _, s := range sh.open {
			all = append(all, s)
		}
		sh.mu.Unlock()
	}
	slices.SortFunc(all, func(a, b *stream) int { return cmp.Compare(a.slot.ID, b.slot.ID) })
	for _, s := range all {
		fn(s)
	}
}
