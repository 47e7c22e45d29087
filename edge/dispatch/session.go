package dispatch

import (
	"hash/maphash"
	"sync"
	"sync/atomic"

	"github.com/iop-fabric/iop/subjects"
)

// session is what is owed to one session of a Node, and how it behaves.
type session struct {
	id  subjects.Session
	ack string // the subject of acknowledgements to it
	key uint64 // stands for id where a pointer would keep it alive

	mu      sync.Mutex
	owed    []owed
	strays  int // those of owed that belong to no open stream
	listed  bool
	conduct conduct
	down    downlink
	acks    ackPace

	lost atomic.Bool // by its conduct: nothing it says is looked at any more
}

// ackPace counts the messages of acknowledgements of one second, and those of them that
// said nothing new.
type ackPace struct {
	at       int64 // unix seconds
	n, empty int
}

func (p *ackPace) hasty(unix int64, empty bool) bool {
	if unix != p.at {
		*p = ackPace{at: unix}
	}
	p.n++
	if empty {
		p.empty++
	}
	return p.n > acksPerSecond || (empty && p.empty > emptyPerSecond)
}

// owed is one entry of the next acknowledgement: a stream's, whatever it is by
// then, or a stray's.
type owed struct {
	s     *stream
	run   string
	acked uint64
	reset bool
}

// maxStrays bounds what frames of unknown and finished attempts may bring into
// one acknowledgement; who goes without is answered at its next repetition.
const maxStrays = 1024

var sessionSeed = maphash.MakeSeed()

func newSession(id subjects.Session) *session {
	return &session{
		id:   id,
		ack:  id.Down(subjects.Ack, ""),
		key:  sessionKey(id),
		down: newDownlink(),
	}
}

func sessionKey(id subjects.Session) uint64 {
	return maphash.String(sessionSeed, id.Node) ^ (id.Gen * 0x9e3779b97f4a7c15)
}

// seat is what is remembered of a node: its newest session, and up to which
// generation it was fenced. There is one for each node that ever registered.
type seat struct {
	sess   *session
	fenced uint64
}

// seats knows the nodes.
type seats struct {
	mu   sync.RWMutex
	byID map[string]*seat
}

// session finds a session; one that is not its node's newest is made for the
// moment and remembered nowhere.
func (t *seats) session(id subjects.Session) *session {
	t.mu.RLock()
	var sess *session
	if st := t.byID[id.Node]; st != nil {
		sess = st.sess // read under the lock: a fence takes it away
	}
	t.mu.RUnlock()
	if sess != nil && sess.id == id {
		return sess
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	st := t.seat(id.Node)
	switch {
	case st.sess != nil && st.sess.id == id:
		return st.sess
	case id.Gen <= st.fenced, st.sess != nil && st.sess.id.Gen > id.Gen:
		return newSession(id)
	}
	st.sess = newSession(id)
	return st.sess
}

func (t *seats) seat(node string) *seat {
	st := t.byID[node]
	if st == nil {
		st = &seat{}
		t.byID[node] = st
	}
	return st
}

// fence remembers that a generation is over: a slot of it may be in a caller's
// hands and not yet here.
func (t *seats) fence(node string, gen uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	st := t.seat(node)
	st.fenced = max(st.fenced, gen)
	if st.sess != nil && st.sess.id.Gen <= gen {
		st.sess = nil
	}
}

func (t *seats) fenced(node string, gen uint64) bool {
	t.mu.RLock()
	defer t.mu.RUnlock()
	st := t.byID[node]
	return st != nil && gen <= st.fenced
}

// current says whether id may be a live session: not one that is known to be
// over or replaced.
func (t *seats) current(id subjects.Session) bool {
	t.mu.RLock()
	defer t.mu.RUnlock()
	st := t.byID[id.Node]
	return st == nil || (id.Gen > st.fenced && (st.sess == nil || st.sess.id.Gen <= id.Gen))
}
