package history

import (
	"fmt"
	"slices"
	"time"
)

// Options say what a history must keep beyond the rules.
type Options struct {
	// LiveBound is how long after the last fault a node may take to be connected (F10).
	LiveBound time.Duration
	// Grace is how long after its deadline a request may end.
	Grace time.Duration
	// Partial histories are of real runs: a caller's and a provider's view, and what Edge
	// told of its sessions. Slots are not followed, and nodes are judged where the
	// history names them.
	Partial bool
	// Never are classes that no attempt ends with, and causes that no session is fenced
	// for, where every part is honest (J8).
	Never []string
	// Outlived: the faults are all such as sessions and their streams outlive (J5).
	Outlived bool
	// Stubborn: there are providers that do not return when they are cancelled, so a
	// Node may have no place where Edge has (W9).
	Stubborn bool
}

// Breach is a rule broken.
type Breach struct {
	Rule string
	At   time.Duration
	What string
}

func (b Breach) String() string { return fmt.Sprintf("%s at %v: %s", b.Rule, b.At, b.What) }

// capacityClass is what a Node says that has no place (P3).
const capacityClass = "capacity"

// maxBreaches bounds what is kept: the first says most.
const maxBreaches = 16

// Checker judges a history as it comes. Its zero value is not usable: NewChecker.
type Checker struct {
	opt      Options
	now      int64
	breaches []Breach
	counts   Counts

	requests map[string]*request
	open     map[string]*request
	runs     map[string]*run
	slots    map[uint64]slot
	places   map[string]*places
	nodes    map[string]*node
	faults   map[string]int // that go on, by name
	lastStop int64
	resumed  int64 // when the Edge went on last
	ended    bool
}

type request struct {
	invoke  Event
	run     string // whose frames it got
	attempt string // the last
	tries   int
	seq     uint64
	got     int64
	done    bool
	faulted bool // a fault went on while it was open
	calm    bool // none did, nor shortly before
}

type run struct {
	sent      []Event // not yet seen at the caller
	parts     uint64
	bytes     int64
	served    bool
	end       Event
	cancelled bool // before its request came
	over      bool // nobody compares it any more
	short     bool // the caller's last part was shorter than its provider's
}

type slot struct {
	provider, node string
	gen            uint64
}

type places struct {
	capacity int64
	used     int64
}

type node struct {
	up        bool
	gen       uint64 // connected; 0: not
	highest   uint64 // that was connected
	fenced    uint64
	allocated uint64
	liveAt    int64 // when it was connected last
	probed    bool  // a probe was served since the last fault
}

// NewChecker makes one.
func NewChecker(opt Options) *Checker {
	if opt.LiveBound <= 0 {
		opt.LiveBound = 12 * time.Second
	}
	if opt.Grace <= 0 {
		opt.Grace = time.Second
	}
	return &Checker{
		opt: opt, requests: map[string]*request{}, open: map[string]*request{}, runs: map[string]*run{}, slots: map[uint64]slot{},
		places: map[string]*places{}, nodes: map[string]*node{}, faults: map[string]int{},
	}
}

// Expect changes the options of these names.
func (c *Checker) Expect(stubborn, outlived bool) {
	c.opt.Stubborn, c.opt.Outlived = stubborn, outlived
}

// Breaches are the rules broken so far, the first ones.
func (c *Checker) Breaches() []Breach { return c.breaches }

// Counts are what the history showed so far.
func (c *Checker) Counts() Counts { return c.counts }

func (c *Checker) breach(rule, format string, args ...any) {
	if len(c.breaches) < maxBreaches {
		c.breaches = append(c.breaches, Breach{rule, time.Duration(c.now), fmt.Sprintf(format, args...)})
	}
}

func (c *Checker) node(name string) *node {
	n := c.nodes[name]
	if n == nil {
		n = &node{}
		c.nodes[name] = n
	}
	return n
}

// Add judges the next event.
func (c *Checker) Add(e Event) {
	if c.ended {
		c.breach("INV1", "%s after the end", e.Kind)
		return
	}
	if e.At < c.now {
		c.breach("VOID", "time goes back")
	}
	c.now = e.At
	c.counts.Events++
	switch e.Kind {
	case Invoke:
		c.invoke(e)
	case Dispatch:
		c.dispatch(e)
	case Cancel:
		c.run(e.Run).cancelled = true
	case Begin:
		if c.run(e.Run).cancelled {
			c.breach("C1", "run %s was cancelled before it came, and is served", e.Run)
		}
	case Sent:
		c.sent(e)
	case Served:
		r := c.run(e.Run)
		if r.served {
			c.breach("INV1", "run %s was served twice", e.Run)
		}
		r.served, r.end = true, e
	case Frame:
		c.frame(e)
	case Ended:
		// A place that a cancel's bound gave back may still be in use at the Node.
		full := e.Class == capacityClass && !c.opt.Stubborn && c.counts.Unanswered == 0
		if full || slices.Contains(c.opt.Never, e.Class) {
			c.breach("CLASS", "run %s of %s ends as %s", e.Run, e.Req, e.Class)
		}
	case Terminal:
		c.terminal(e)
	case Capacity:
		c.place(e.Provider).capacity = e.N
	case Take:
		c.take(e)
	case Release:
		c.release(e)
	case Alloc:
		if n := c.node(e.Node); e.Gen <= n.allocated {
			c.breach("INV6", "generation %d of %s was given after %d", e.Gen, e.Node, n.allocated)
		} else {
			n.allocated = e.Gen
			c.counts.Sessions++
		}
	case Register, Ready:
		if n := c.node(e.Node); e.Gen < n.gen {
			c.breach("INV5", "%s of generation %d of %s, %d is connected", e.Kind, e.Gen, e.Node, n.gen)
		}
	case Connected:
		c.connected(e)
	case Fenced:
		n := c.node(e.Node)
		if n.gen != e.Gen {
			c.breach("INV5", "generation %d of %s is fenced, %d is connected", e.Gen, e.Node, n.gen)
		}
		if slices.Contains(c.opt.Never, e.How) {
			c.breach("CLASS", "generation %d of %s is fenced as %s", e.Gen, e.Node, e.How)
		}
		n.gen, n.fenced = 0, max(n.fenced, e.Gen)
		c.counts.Fences++
	case Stale:
		c.counts.Stale++
		if e.Changed {
			c.breach("INV5", "a message of the old generation %d of %s changed something", e.Gen, e.Node)
		}
	case Resent:
		c.counts.Resent += max(e.N, 1)
	case Up:
		if e.Node != "" {
			c.node(e.Node).up = true
		}
	case Resumed:
		if e.Node == "" {
			c.resumed = e.At
		}
	case Paused: // what it means shows when the process goes on
	case Down:
		c.down(e)
	case Start:
		c.faultStarts(e)
	case Stop:
		c.faultStops(e)
	case End:
		c.end()
	}
}

func (c *Checker) invoke(e Event) {
	if c.requests[e.Req] != nil {
		c.breach("INV1", "request %s is invoked twice", e.Req)
		return
	}
	c.counts.Requests++
	q := &request{invoke: e, faulted: len(c.faults) > 0}
	q.calm = !q.faulted && (c.counts.Faults == 0 || e.At > c.lastStop+int64(c.opt.LiveBound))
	if c.opt.Partial {
		q.attempt = e.Req // its run, until somebody names one
	}
	c.requests[e.Req], c.open[e.Req] = q, q
}

func (c *Checker) dispatch(e Event) {
	q := c.requests[e.Req]
	switch {
	case q == nil || q.done:
		c.breach("INV1", "run %s is dispatched for %s, which does not wait", e.Run, e.Req)
		return
	case q.run != "":
		c.breach("INV2", "%s is dispatched again after a part of its answer", e.Req)
	case c.runs[e.Run] != nil:
		c.breach("INV1", "run id %s is used twice", e.Run)
	case !c.opt.Partial && c.slots[e.Slot] != (slot{e.Provider, e.Node, e.Gen}):
		c.breach("INV3", "run %s is dispatched under slot %d, which it does not hold", e.Run, e.Slot)
	}
	if q.tries++; q.tries > 1 {
		c.counts.Redispatched++
		c.forget(q.attempt)
	}
	q.attempt = e.Run
	c.counts.Runs++
	c.run(e.Run)
}

func (c *Checker) run(id string) *run {
	r := c.runs[id]
	if r == nil {
		r = &run{}
		c.runs[id] = r
	}
	return r
}

func (c *Checker) sent(e Event) {
	r := c.run(e.Run)
	if r.served || e.Seq != r.parts+1 {
		c.breach("INV2", "part %d of run %s is sent after %d", e.Seq, e.Run, r.parts)
	}
	r.parts, r.bytes = e.Seq, r.bytes+e.N
	if !r.over {
		r.sent = append(r.sent, e)
	}
}

// forget is for a run that nobody compares any more; its provider may go on.
func (c *Checker) forget(id string) {
	if r := c.runs[id]; r != nil {
		r.over, r.sent = true, nil
	}
}

func (c *Checker) frame(e Event) {
	q := c.requests[e.Req]
	if q == nil || q.done {
		c.breach("INV1", "a part of %s comes outside of it", e.Req)
		return
	}
	if q.run != "" && q.run != e.Run {
		c.breach("INV2", "%s gets parts of %s and of %s", e.Req, q.run, e.Run)
		return
	}
	q.run = e.Run
	r := c.run(e.Run)
	switch {
	case e.Seq != q.seq+1 || r.short:
		c.breach("INV2", "%s gets part %d after %d", e.Req, e.Seq, q.seq)
	case len(r.sent) == 0:
		c.breach("INV2", "%s gets part %d, which no provider gave", e.Req, e.Seq)
	case r.sent[0].Seq != e.Seq, e.N > r.sent[0].N, e.N == r.sent[0].N && e.Sum != r.sent[0].Sum:
		c.breach("INV2", "part %d of %s is not what its provider gave", e.Seq, e.Req)
	default:
		r.short = e.N < r.sent[0].N
		r.sent = r.sent[1:]
	}
	q.seq, q.got = e.Seq, q.got+e.N
	c.counts.Frames++
	c.counts.Bytes += e.N
}

func (c *Checker) terminal(e Event) {
	q := c.requests[e.Req]
	if q == nil || q.done {
		c.breach("INV1", "%s ends outside of it", e.Req)
		return
	}
	// An Edge that does not run ends nothing.
	if until := max(q.invoke.Until, c.resumed); q.invoke.Until > 0 && e.At > until+int64(c.opt.Grace) {
		c.breach("LIVE2", "%s ends %v after its deadline", e.Req, time.Duration(e.At-until))
	}
	switch {
	case !q.invoke.Sure || e.Outcome == OK:
	case q.calm:
		c.breach("CALM", "%s ends as %s (%s), and there was no fault", e.Req, e.Outcome, e.Class)
	case c.opt.Outlived:
		c.breach("J5", "%s ends as %s (%s), and no fault was more than it outlives", e.Req, e.Outcome, e.Class)
	}
	q.done = true
	r := c.runs[q.attempt]
	faulted := q.faulted || len(c.faults) > 0
	switch e.Outcome {
	case OK:
		c.whole(q, r, e)
		c.counts.ended(faulted, true)
	case Fail:
		c.counts.Failed++
		c.counts.ended(faulted, false)
	case Unknown:
		c.counts.Unknown++
	default:
		c.breach("VOID", "%s ends with the outcome %q", e.Req, e.Outcome)
	}
	c.forget(q.attempt)
	delete(c.open, e.Req)
	q.invoke = Event{} // the id stays: it must not come again
}

// whole judges an answer that its caller took for complete.
func (c *Checker) whole(q *request, r *run, e Event) {
	switch {
	case r == nil || !r.served:
		c.breach("INV2", "%s is complete, and no provider completed it", e.Req)
		return
	case len(r.sent) > 0 || r.short || r.bytes != q.got || r.end.N != q.got || r.end.Seq != r.parts:
		c.breach("INV2", "%s is complete with %d bytes, its provider gave %d", e.Req, q.got, r.bytes)
	case r.end.Read != q.invoke.N || r.end.Sum != q.invoke.Sum:
		c.breach("INV2", "%s has a body of %d bytes, its provider read %d, or others", e.Req, q.invoke.N, r.end.Read)
	}
	if q.invoke.Probe {
		c.node(q.invoke.Node).probed = true
	}
}

func (c *Checker) place(id string) *places {
	p := c.places[id]
	if p == nil {
		p = &places{}
		c.places[id] = p
	}
	return p
}

func (c *Checker) take(e Event) {
	if _, held := c.slots[e.Slot]; held {
		c.breach("INV3", "slot %d is taken twice", e.Slot)
		return
	}
	if n := c.node(e.Node); n.gen != e.Gen || e.Gen == 0 {
		c.breach("INV5", "slot %d is granted under generation %d of %s, %d is connected", e.Slot, e.Gen, e.Node, n.gen)
	}
	c.slots[e.Slot] = slot{e.Provider, e.Node, e.Gen}
	p := c.place(e.Provider)
	if p.used++; p.used > p.capacity {
		c.breach("INV4", "%s has %d slots in use of %d", e.Provider, p.used, p.capacity)
	}
	c.counts.Taken++
}

func (c *Checker) release(e Event) {
	s, held := c.slots[e.Slot]
	switch {
	case !held:
		c.breach("INV3", "slot %d is released and not held", e.Slot)
		return
	case s.gen != e.Gen:
		c.breach("INV3", "slot %d of generation %d is released for %d", e.Slot, s.gen, e.Gen)
	case (e.How == "fence") != (c.node(s.node).gen != s.gen):
		c.breach("INV5", "slot %d of generation %d is released by %s, %d is connected", e.Slot, s.gen, e.How, c.node(s.node).gen)
	}
	delete(c.slots, e.Slot)
	c.place(s.provider).used--
	if e.How == "fence" {
		c.counts.FencedSlots++
	}
	if e.How == "cancel_bound" {
		c.counts.Unanswered++
	}
}

func (c *Checker) connected(e Event) {
	n := c.node(e.Node)
	switch {
	case e.Gen <= n.highest:
		c.breach("INV6", "generation %d of %s is connected after %d", e.Gen, e.Node, n.highest)
	case n.gen != 0:
		c.breach("INV5", "generation %d of %s is connected, and %d is not fenced", e.Gen, e.Node, n.gen)
	case e.Gen <= n.fenced:
		c.breach("INV5", "generation %d of %s is connected and was fenced", e.Gen, e.Node)
	}
	n.gen, n.highest, n.liveAt = e.Gen, max(n.highest, e.Gen), e.At
	c.counts.Connected++
}

func (c *Checker) down(e Event) {
	if e.Node != "" {
		c.node(e.Node).up = false
		return
	}
	// An Edge forgets with its process; what it had is nobody's any more.
	c.resumed = c.now
	clear(c.slots)
	for _, p := range c.places {
		p.used = 0
	}
	for _, n := range c.nodes {
		n.gen = 0
	}
}

func (c *Checker) faultStarts(e Event) {
	c.faults[e.Fault]++
	c.counts.Faults++
	hit := false
	for _, q := range c.open {
		q.faulted, q.calm, hit = true, false, true
	}
	if hit {
		c.counts.FaultsHit++
	}
}

func (c *Checker) faultStops(e Event) {
	switch n := c.faults[e.Fault]; n {
	case 0:
		c.breach("VOID", "%s stops and did not start", e.Fault)
	case 1:
		delete(c.faults, e.Fault)
	default:
		c.faults[e.Fault]--
	}
	c.lastStop = e.At
	for _, n := range c.nodes {
		n.probed = false
	}
}

func (c *Checker) end() {
	c.ended = true
	for _, id := range sorted(c.open) {
		c.breach("LIVE2", "%s never ends", id)
	}
	if len(c.faults) > 0 {
		c.breach("VOID", "a fault goes on at the end")
	}
	if len(c.slots) > 0 {
		c.breach("INV3", "%d slots are held in the end", len(c.slots))
	}
	for _, name := range sorted(c.nodes) {
		n := c.nodes[name]
		if !n.up {
			continue
		}
		switch bound := c.lastStop + int64(c.opt.LiveBound); {
		case n.gen == 0:
			c.breach("LIVE1", "%s is up and not connected", name)
		case n.liveAt > bound:
			c.breach("LIVE1", "%s was connected %v after the last fault", name, time.Duration(n.liveAt-c.lastStop))
		case !n.probed:
			c.breach("LIVE3", "%s served no probe", name)
		}
	}
}

func sorted[T any](m map[string]T) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}
