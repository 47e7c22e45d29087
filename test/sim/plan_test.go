package sim

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"time"

	"github.com/iop-fabric/iop/edge/registry"
	"github.com/iop-fabric/iop/internal/history"
	"github.com/iop-fabric/iop/wire"
)

// build draws the world: nodes, requests, faults.
func (w *world) build() {
	r := w.plan
	w.checker = history.NewChecker(history.Options{LiveBound: liveBound, Stubborn: true, Never: []string{
		string(wire.Invalid), string(wire.Protocol), string(wire.UnknownAdapter), string(wire.Credential), string(wire.Internal),
		string(registry.Misbehaving),
	}})
	w.broker = newServer(w)
	for i := range 1 + r.IntN(3) {
		w.nodes = append(w.nodes, &nodeProc{w: w, name: "n" + strconv.Itoa(i+1), capacity: 1 + r.IntN(3)})
	}
	if r.IntN(4) == 0 {
		w.patience = between(r, time.Second, 20*time.Second)
	}
	w.edge = newEdge(w)
	w.swarm = drawSwarm(w.fault)
	w.uploads = r.IntN(8) == 0
	w.schedule()
	for _, n := range w.nodes {
		w.after(between(w.sched, 0, 100*time.Millisecond), n.restart)
	}
	if r.IntN(3) == 0 {
		w.lazy = 0.2 * r.Float64()
	}
	for range 2 + r.IntN(24) {
		q := w.drawRequest()
		w.stubborn = w.stubborn || q.answer.fate == fateHangs
		at := epoch.Add(between(r, 0, w.swarm.span))
		if !q.until.IsZero() {
			q.until = at.Add(q.until.Sub(epoch))
		}
		if !q.leaves.IsZero() {
			q.leaves = at.Add(q.leaves.Sub(epoch))
		}
		w.at(at, q.invoke)
	}
	w.checker.Expect(w.stubborn, w.swarm.outages > 0)
	w.at(w.quietAt.Add(liveBound), w.probe)
}

// probe asks every node for something when all should be well (LIVE3).
func (w *world) probe() {
	if w.now.Before(w.quietAt.Add(3*time.Minute)) && slices.ContainsFunc(w.requests, func(q *request) bool { return q.open }) {
		w.after(time.Second, w.probe) // a slow caller may have the one place there is
		return
	}
	for _, n := range w.nodes {
		q := w.newRequest()
		q.model, q.probe = n.name, n.name
		q.until = w.now.Add(20 * time.Second)
		q.answer = answer{status: 200, chunks: []int{100, 100}}
		q.invoke()
	}
	// And whatever else callers ask for, all of which is served but for its own sake.
	for range w.call.IntN(5) {
		q := w.drawRequest()
		q.until, q.leaves, q.timeout = time.Time{}, time.Time{}, 0
		if q.answer.fate == fateHangs {
			q.answer.fate = fateAnswers
		}
		q.invoke()
	}
	w.probed = true
}

func (w *world) newRequest() *request {
	q := &request{w: w, n: len(w.requests) + 1}
	q.id = "q" + strconv.Itoa(q.n)
	w.requests = append(w.requests, q)
	return q
}

// drawRequest draws one; times are from its invocation on, as of the epoch.
func (w *world) drawRequest() *request {
	r := w.call
	q := w.newRequest()
	q.model = "all"
	if r.IntN(4) == 0 {
		q.model = w.nodes[r.IntN(len(w.nodes))].name
	}
	switch r.IntN(10) {
	case 0:
	case 1:
		q.body = content[:logUniform(r, wire.MaxBody+1, 1<<20)]
	default:
		q.body = content[:logUniform(r, 1, wire.MaxBody)]
	}
	q.answer = drawAnswer(r)
	if r.IntN(4) == 0 {
		q.until = epoch.Add(between(r, 100*time.Millisecond, 20*time.Second))
	}
	if r.IntN(5) == 0 {
		q.timeout = between(r, time.Second, 10*time.Second)
	}
	if r.IntN(6) == 0 {
		q.leaves = epoch.Add(between(r, 0, 3*time.Second))
	}
	if r.IntN(3) == 0 {
		q.reads = between(r, 100*time.Microsecond, 50*time.Millisecond)
		if r.IntN(3) == 0 {
			q.reads *= 12
		}
	}
	if r.IntN(20) == 0 {
		q.breaks = 1 + r.IntN(5)
	}
	if w.uploads {
		q.body = content[:wire.MaxBody+1+r.IntN(1<<20)]
		q.answer.readPace = between(r, 0, 200*time.Millisecond)
		if r.IntN(3) == 0 {
			q.leaves = epoch.Add(between(r, 0, 3*time.Second))
		}
	}
	return q
}

func drawAnswer(r *rand.Rand) (a answer) {
	a.status = 200
	if r.IntN(10) == 0 {
		a.status = 500
	}
	if r.IntN(6) == 0 {
		a.fate = fate(1 + r.IntN(int(fateHangs))) //nolint:gosec // small
	}
	a.think = time.Duration(logUniform(r, 1, 1000)) * time.Millisecond
	most := 400
	switch r.IntN(20) {
	case 0, 6, 7: // up to a few MiB
		for range logUniform(r, 4, 48) {
			a.chunks = append(a.chunks, wire.MaxBody-r.IntN(100))
		}
	case 1:
		a.chunks = nil
	case 2, 3, 4, 5:
		most = 20_000
		fallthrough
	default:
		for range logUniform(r, 1, 60) {
			a.chunks = append(a.chunks, logUniform(r, 1, most))
		}
		a.pace = time.Duration(logUniform(r, 1, 100)) * time.Millisecond
	}
	a.sized = r.IntN(3) == 0
	if r.IntN(8) == 0 {
		a.readPace = between(r, 0, 100*time.Millisecond)
	}
	a.at = r.IntN(len(a.chunks) + 1)
	return a
}

// run lets the world happen until the calm has shown what it must.
func (w *world) run() {
	end := w.quietAt.Add(6 * time.Minute) // a minute more than anybody waits
	for w.step(end) {
		if w.probed && w.over() {
			break
		}
	}
}

// over: nothing is left to wait for.
func (w *world) over() bool {
	if w.leak() != "" || len(w.edge.returns) > 0 {
		return false
	}
	for _, q := range w.requests {
		if q.open {
			return false
		}
	}
	return true
}

// leak says what is held though nothing needs it any more.
func (w *world) leak() string {
	if n := len(w.edge.slots); n > 0 {
		return fmt.Sprintf("the Edge holds %d slots", n)
	}
	if n := w.edge.d.Open(); n > 0 {
		return fmt.Sprintf("the Edge has %d attempts", n)
	}
	for _, n := range w.nodes {
		if k := n.driven.InUse(adapterName); k > 0 {
			return fmt.Sprintf("%s holds %d places", n.name, k)
		}
		if n.tunnels != nil && n.tunnels.Count() > 0 {
			return fmt.Sprintf("%s has %d tunnels", n.name, n.tunnels.Count())
		}
	}
	return ""
}

// close takes the world down.
func (w *world) close() {
	for _, n := range w.nodes {
		if n.tunnels != nil {
			n.tunnels.End()
		}
	}
	w.quiet = true
	for _, t := range w.tasks {
		t.stop()
	}
	w.tasks = nil
}
