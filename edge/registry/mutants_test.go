package registry

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// A mutant is a small wrong variant of a core: of registry and pool, of the
// broker's and the Node's views of sessions, of a stream. The tests must find each:
// a rule that no mutant breaks unseen is one the tests look at.
//
// All variants of a package are built at once. A function that a variant changes
// stands there a second time, as changed, and the original begins by asking whether
// to call it: `if mutantNow == 7 { return p.fence__7(node, gen, cause, out) }`. This
// is laid over the source for one build (go test's -overlay), so that what is
// released has no seam for it; the environment then says which variant a run has.

var mutantTests = flag.String("mutants", "", "run the mutants: each with the test that is `named` for it, or with all")

type mutant struct {
	name   string
	file   string   // below the module
	patch  []string // old, new, old, new ...
	killer string   // package and name of a test that must fail
}

// packages are those whose tests find mutants, by their names.
var packages = map[string]string{
	"registry": "edge/registry", "pool": "edge/pool", "broker": "broker", "session": "node/session", "tunnel": "tunnel",
}

// watching lists, for each package that has mutants, those whose tests watch it.
var watching = map[string][]string{
	"edge/registry": {"registry"}, "edge/pool": {"registry", "pool"},
	"broker": {"broker"}, "node/session": {"session"}, "tunnel": {"tunnel"},
}

var mutants = []mutant{
	{
		name: "a stale registration is accepted", file: "edge/registry/step.go", killer: "registry.TestExplore",
		patch: []string{
			"case n != nil && e.Gen < n.gen:\n\t\treturn refuse(Superseded, wire.SessionEnded)\n\tcase n != nil && e.Gen == n.gen && n.state == Gone",
			"case n != nil && e.Gen == n.gen && n.state == Gone",
			"if n == nil || e.Gen > n.gen {\n\t\tn, out = r.supersede(now, e.Node, e.Gen, out)\n\t}\n\tn.instance",
			"if n == nil || e.Gen != n.gen {\n\t\tn, out = r.supersede(now, e.Node, e.Gen, out)\n\t}\n\tn.instance",
		},
	},
	{
		name: "a stale ready is accepted", file: "edge/registry/step.go", killer: "registry.TestExplore",
		patch: []string{"case e.Gen < n.gen:\n\t\treturn refuse(Superseded, wire.SessionEnded)\n\tcase n.state == AdmittedState", "case n.state == AdmittedState"},
	},
	{
		name: "the close of an older generation ends the newer", file: "edge/registry/step.go", killer: "registry.TestExplore",
		patch: []string{"if e.Gen < n.gen || n.state == Gone {", "if n.state == Gone {"},
	},
	{
		name: "generations are compared with >=", file: "edge/registry/step.go", killer: "registry.TestExplore",
		patch: []string{"n != nil && n.gen == gen {", "n != nil && n.gen >= gen {"},
	},
	{
		name: "the end of a pending claim fences", file: "edge/registry/step.go", killer: "registry.TestExplore",
		patch: []string{"wasReady := n.state == Ready", "wasReady := n.state.Owns()"},
	},
	{
		name: "connected comes with each acknowledgement", file: "edge/registry/step.go", killer: "registry.TestExplore",
		patch: []string{"if n == nil || n.state != Acking {\n\t\treturn out", "if n == nil || !n.state.Owns() {\n\t\treturn out"},
	},
	{
		name: "the older owner is revived when the newer ends", file: "edge/registry/step.go", killer: "registry.TestExplore",
		patch: []string{
			"return r.end(now, e.Node, n, SessionClosed, out)",
			"if n.state == Pending && n.gen > 1 {\n\t\tn.gen--\n\t\tr.become(n, Ready, now)\n\t\treturn append(out, Activate{e.Node, n.gen})\n\t}\n\treturn r.end(now, e.Node, n, SessionClosed, out)",
		},
	},
	{
		name: "a takeover does not end the older owner", file: "edge/registry/step.go", killer: "registry.TestExplore",
		patch: []string{"\t\tout = r.end(now, name, n, Superseded, out)\n", ""},
	},
	{
		name: "a close before the registration is forgotten", file: "edge/registry/step.go", killer: "registry.TestExplore",
		patch: []string{"n, out = r.supersede(now, e.Node, e.Gen, out)\n\t}\n\tif e.Gen < n.gen ||", "return out\n\t}\n\tif e.Gen < n.gen ||"},
	},
	{
		name: "a registration after the close is accepted", file: "edge/registry/step.go", killer: "registry.TestExplore",
		patch: []string{"\tcase n != nil && e.Gen == n.gen && n.state == Gone:\n\t\treturn refuse(SessionOver, wire.SessionEnded)\n", ""},
	},
	{
		name: "a ready after the close is accepted", file: "edge/registry/step.go", killer: "registry.TestExplore",
		patch: []string{"\tcase n.state == Gone:\n\t\treturn refuse(SessionOver, wire.SessionEnded)\n\tcase e.PayloadNode != e.Node:\n\t\treturn refuse(WrongNode, wire.Invalid)\n\tcase n.state == Acking", "\tcase e.PayloadNode != e.Node:\n\t\treturn refuse(WrongNode, wire.Invalid)\n\tcase n.state == Acking"},
	},
	{
		name: "ready does not wait for its acknowledgement", file: "edge/registry/step.go", killer: "registry.TestExplore",
		patch: []string{"r.become(n, Acking, now)", "r.become(n, Ready, now)"},
	},
	{
		name: "a failed acknowledgement counts as sent", file: "edge/registry/step.go", killer: "registry.TestExplore",
		patch: []string{"r.become(n, Pending, now) // the claim's bound runs on", "return r.ackSent(now, ReadyAckSent(e), out)"},
	},
	{
		name: "the acknowledgement of a session that ended makes it ready", file: "edge/registry/step.go", killer: "registry.TestExplore",
		patch: []string{"if n == nil || n.state != Acking {\n\t\treturn out", "if n == nil || n.state == Ready {\n\t\treturn out"},
	},
	{
		name: "a repeated registration makes a ready owner pending", file: "edge/registry/step.go", killer: "registry.TestExplore",
		patch: []string{"case n != nil && e.Gen == n.gen && n.state.Owns():", "case n != nil && e.Gen == n.gen && n.state == Pending:"},
	},
	{
		name: "a repeated admission ends its own session", file: "edge/registry/step.go", killer: "registry.TestExplore",
		patch: []string{"n != nil && e.Gen <= n.gen {\n\t\treturn out", "n != nil && e.Gen < n.gen {\n\t\treturn out"},
	},
	{
		name: "a stranger's heartbeat is not answered", file: "edge/registry/step.go", killer: "registry.TestExplore",
		patch: []string{"if n == nil || !n.state.Owns() {\n\t\treturn r.tellOver(now, e.Node, e.Gen, out)", "if n == nil || !n.state.Owns() {\n\t\treturn out"},
	},
	{
		name: "a silent owner stays", file: "edge/registry/step.go", killer: "registry.TestExplore",
		patch: []string{"if at := n.heard.Add(r.heartbeatBound); at.After(now) {", "if at := n.heard.Add(r.heartbeatBound); !at.Before(now) {"},
	},
	{
		name: "a pending claim has no bound", file: "edge/registry/step.go", killer: "registry.TestExplore",
		patch: []string{"if n.due.After(now) {\n\t\t\t\tr.dueBy(n.due)", "if true {"},
	},
	{
		name: "an evicted session is not told", file: "edge/registry/step.go", killer: "registry.TestScripts",
		patch: []string{"out = r.fence(now, name, n.gen, why, out)\n\treturn append(out, CloseSession", "return append(out, CloseSession"},
	},
	{
		name: "a failed acknowledgement extends the claim", file: "edge/registry/step.go", killer: "registry.TestScripts",
		patch: []string{"if n.state != Acking { // a failed", "if true { // a failed"},
	},
	{
		name: "another node's id registers", file: "edge/registry/step.go", killer: "registry.TestScripts",
		patch: []string{"\tcase e.PayloadNode != e.Node:\n\t\treturn refuse(WrongNode, wire.Invalid)\n\tcase e.Verified != nil:", "\tcase e.Verified != nil:"},
	},
	{
		name: "an unproved registration is accepted", file: "edge/registry/step.go", killer: "registry.TestUnprovedChangesNothing",
		patch: []string{"case e.Verified != nil:", "case false:"},
	},
	{
		name: "a draining node is activated as if it were not", file: "edge/registry/step.go", killer: "registry.TestDrainingNodeIsActivatedWithoutWork",
		patch: []string{"if n.draining { // before", "if false { // before"},
	},
	{
		name: "fences come as often as asked for", file: "edge/registry/limiter.go", killer: "registry.TestScripts",
		patch: []string{"ok && now.Sub(at) < fenceEvery {", "ok && now.Sub(at) < 0 {"},
	},
	{
		name: "a node that left the configuration stays", file: "edge/registry/step.go", killer: "registry.TestScripts",
		patch: []string{"!r.configured[name] && n.state.Owns()", "false && n.state.Owns()"},
	},
	{
		name: "a fence returns its slots twice", file: "edge/pool/step.go", killer: "registry.TestExplore",
		patch: []string{
			"out = append(out, Effect{Kind: SlotReturned, How: ByFence, Slot: h.slot})",
			"out = append(out, Effect{Kind: SlotReturned, How: ByFence, Slot: h.slot}, Effect{Kind: SlotReturned, How: ByFence, Slot: h.slot})",
		},
	},
	{
		name: "a fence leaves its slots in use", file: "edge/pool/step.go", killer: "registry.TestExplore",
		patch: []string{"for h := n.first; h != nil; h = n.first {", "for h := n.first; h != nil; h = h.next {", "Slot: h.slot})\n\t\tp.drop(h)\n\t}", "Slot: h.slot})\n\t}"},
	},
	{
		name: "slots are granted under a fenced generation", file: "edge/pool/catalog.go", killer: "registry.TestExplore",
		patch: []string{"return v.node.gen != 0 && v.enabled()", "return v.enabled()"},
	},
	{
		name: "a fence grants what it frees", file: "edge/pool/step.go", killer: "registry.TestExplore",
		patch: []string{"\tn.gen = 0\n\tif n.drain == gen", "\tif n.drain == gen", "p.drop(h)\n\t}\n\tfor _, v", "p.drop(h)\n\t\tif len(out) < 9 {\n\t\t\tout = p.pumpNode(time.Time{}, n, out)\n\t\t}\n\t}\n\tn.gen = 0\n\tfor _, v"},
	},
	{
		name: "a fence ends no attempt", file: "edge/pool/step.go", killer: "registry.TestExplore",
		patch: []string{"out = append(out, Effect{Kind: EndAttempt, Slot: ef.Slot, Cause: cause})", "_ = ef"},
	},
	{
		name: "who waits is lost at a fence", file: "edge/pool/step.go", killer: "registry.TestExplore",
		patch: []string{"first := len(out)\n", "first := len(out)\n\tfor _, w := range p.waitersByArrival() {\n\t\tp.remove(w)\n\t}\n"},
	},
	{
		name: "one place too many", file: "edge/pool/catalog.go", killer: "registry.TestExplore",
		patch: []string{"v.places.used < v.Capacity && v.adapter.places.used < v.adapter.Capacity", "v.places.used <= v.Capacity && v.adapter.places.used <= v.adapter.Capacity"},
	},
	{
		name: "one place too few", file: "edge/pool/catalog.go", killer: "registry.TestExplore",
		patch: []string{"v.places.used < v.Capacity &&", "v.places.used+1 < v.Capacity &&"},
	},
	{
		name: "the terminal of an old slot frees a new one", file: "edge/pool/step.go", killer: "registry.TestExplore",
		patch: []string{"h := p.held[id]\n", "h := p.held[id]\n\tfor _, o := range p.held {\n\t\tif h == nil {\n\t\t\th = o\n\t\t}\n\t}\n"},
	},
	{
		name: "a slot stays in the table when it is returned", file: "edge/pool/state.go", killer: "registry.TestExplore",
		patch: []string{"delete(p.held, h.slot.ID)\n", ""},
	},
	{
		name: "a place stays in use when its slot is returned", file: "edge/pool/state.go", killer: "registry.TestExplore",
		patch: []string{"h.count(-1)\n", ""},
	},
	{
		name: "a returned slot wakes nobody", file: "edge/pool/step.go", killer: "registry.TestExplore",
		patch: []string{"\tif a != nil {\n\t\tout = p.pump(now, a, out)", "\tif a == nil {\n\t\tout = p.pump(now, a, out)"},
	},
	{
		name: "a ready node wakes nobody", file: "edge/pool/step.go", killer: "registry.TestExplore",
		patch: []string{"n.gen, n.seen = gen, gen\n\treturn p.pumpNode(now, n, out)", "n.gen, n.seen = gen, gen\n\treturn out"},
	},
	{
		name: "who left stays in the queue", file: "edge/pool/step.go", killer: "registry.TestExplore",
		patch: []string{"w != nil {\n\t\t\tp.remove(w)", "w != nil {\n\t\t\t_ = w"},
	},
	{
		name: "a wait that ended goes on", file: "edge/pool/step.go", killer: "registry.TestExplore",
		patch: []string{"!p.expiry[0].deadline.After(now)", "p.expiry[0].deadline.Before(now)"},
	},
	{
		name: "the key forgets the last slot", file: "edge/pool/key.go", killer: "registry.TestExplore",
		patch: []string{"\tk.num(p.lastSlot)\n", ""},
	},
	{
		name: "a clone shares its node", file: "edge/registry/snapshot.go", killer: "registry.TestExplore",
		patch: []string{"m := *n // features are replaced as a whole, never changed\n\t\tc.nodes[name] = &m", "c.nodes[name] = n"},
	},
	{
		name: "the activation of a generation that ended is taken", file: "edge/pool/step.go", killer: "pool.TestI6StaleChangesNothing",
		patch: []string{"if gen <= n.seen {", "if gen < n.seen {"},
	},
	{
		name: "a late fence ends the generation that is live", file: "edge/pool/step.go", killer: "pool.TestI6StaleChangesNothing",
		patch: []string{"n == nil || gen == 0 || n.gen != gen {", "n == nil || gen == 0 || n.gen == 0 {"},
	},
	{
		name: "an overlay outlives its generation", file: "edge/pool/step.go", killer: "pool.TestScripts",
		patch: []string{"if v.node == n {\n\t\t\tv.overlaid = false", "if v.node == n {\n\t\t\tv.overlaid = v.overlaid && true"},
	},
	{
		name: "long requests do not count", file: "edge/pool/state.go", killer: "pool.TestScripts",
		patch: []string{"h.provider.long += by", "h.provider.long += 0"},
	},
	{
		name: "a principal's turn does not end", file: "edge/pool/queue.go", killer: "pool.TestScripts",
		patch: []string{"e.used, e.turn = 0, tick", "e.used = 0"},
	},
	{
		name: "who came last is served first", file: "edge/pool/queue.go", killer: "pool.TestScripts",
		patch: []string{"if w == nil || e.first.at < w.at {", "if w == nil || e.first.at > w.at {"},
	},
	{
		name: "priorities are not looked at", file: "edge/pool/queue.go", killer: "pool.TestScripts",
		patch: []string{"if best != nil && k.priority != best.priority {", "if false {"},
	},
	{
		name: "a model whose list is outstanding is unknown", file: "edge/pool/unlisted.go", killer: "pool.TestScripts",
		patch: []string{"return listing\n", "return unknown\n"},
	},
	{
		name: "who waits for a list is not told that it came without the model", file: "edge/pool/unlisted.go", killer: "pool.TestScripts",
		patch: []string{"} else if refusal != nil {", "} else if false {"},
	},
	{
		name: "one more waits than may", file: "edge/pool/unlisted.go", killer: "pool.TestA38QueueLimitHoldsInEveryState",
		patch: []string{"waiting >= orDefault(q.Depth", "waiting > orDefault(q.Depth"},
	},
	{
		name: "a node that drains no more stays out", file: "edge/registry/step.go", killer: "registry.TestExplore",
		patch: []string{"changed := n.draining != e.Draining", "changed := e.Draining && !n.draining"},
	},
	{
		name: "what a session said of itself outlives it", file: "edge/registry/step.go", killer: "registry.TestExplore",
		patch: []string{"n.heard, n.due, n.draining = time.Time{}, time.Time{}, false", "n.heard, n.due = time.Time{}, time.Time{}"},
	},
	{
		name: "a breach of an older session ends the newer", file: "edge/registry/step.go", killer: "registry.TestExplore",
		patch: []string{
			"case Misbehaved:\n\t\tif n := r.current(e.Node, e.Gen); n != nil && n.state.Owns() {",
			"case Misbehaved:\n\t\tif n := r.nodes[e.Node]; n != nil && n.state.Owns() {",
		},
	},
	{
		name: "a session that breaks the rules stays", file: "edge/registry/step.go", killer: "registry.TestExplore",
		patch: []string{"return r.evict(now, e.Node, n, Misbehaving, out)", "return out"},
	},
	{
		name: "a pending session that breaks the rules stays", file: "edge/registry/step.go", killer: "registry.TestExplore",
		patch: []string{
			"n != nil && n.state.Owns() {\n\t\t\treturn r.evict(now, e.Node, n, Misbehaving",
			"n != nil && n.state == Ready {\n\t\t\treturn r.evict(now, e.Node, n, Misbehaving",
		},
	},
	{
		name: "a claim outlives the node's configuration", file: "edge/registry/step.go", killer: "registry.TestExplore",
		patch: []string{"!r.configured[name] && n.state.Owns()", "!r.configured[name] && n.state == Ready"},
	},
	{
		name: "a node that is no longer configured is forgotten", file: "edge/registry/step.go", killer: "registry.TestExplore",
		patch: []string{"out = r.evict(now, name, n, Removed, out)", "out = r.evict(now, name, n, Removed, out)\n\t\t\tdelete(r.nodes, name)"},
	},
	{
		name: "a node that is no longer configured registers", file: "edge/registry/step.go", killer: "registry.TestExplore",
		patch: []string{"case !r.configured[e.Node]:", "case !r.configured[e.Node] && n == nil:"},
	},
	{
		name: "the bound of one node ends the others", file: "edge/registry/step.go", killer: "registry.TestExplore",
		patch: []string{"if at := n.heard.Add(r.heartbeatBound); at.After(now) {", "if at := n.heard.Add(r.heartbeatBound); len(out) == 0 && at.After(now) {"},
	},
	{
		name: "a draining node gets work", file: "edge/pool/catalog.go", killer: "registry.TestExplore",
		patch: []string{"&& !v.overlaid && !v.node.draining()", "&& !v.overlaid"},
	},
	{
		name: "what its node has not applied gets work", file: "edge/pool/catalog.go", killer: "registry.TestExplore",
		patch: []string{"v.enabled() && !v.adapter.Held && !v.overlaid", "v.enabled() && !v.overlaid"},
	},
	{
		name: "a node that comes back from draining wakes nobody", file: "edge/pool/step.go", killer: "registry.TestExplore",
		patch: []string{"n.drain = 0\n\t}\n\treturn p.pumpNode(now, n, out)", "n.drain = 0\n\t}\n\treturn out"},
	},
	{
		name: "a fence takes back what the operator said", file: "edge/pool/step.go", killer: "registry.TestExplore",
		patch: []string{"\tn.gen = 0\n\tif n.drain == gen", "\tn.gen, n.drained = 0, false\n\tif n.drain == gen"},
	},
	{
		name: "the operator takes back what a node said", file: "edge/pool/step.go", killer: "registry.TestExplore",
		patch: []string{"n.drained = on\n", "n.drained, n.drain = on, 0\n"},
	},
	{
		name: "a reload forgets what is in use", file: "edge/pool/catalog.go", killer: "registry.TestExplore",
		patch: []string{"if v.places = p.providerPlaces[key]; v.places == nil {", "if v.places = p.providerPlaces[key]; true {"},
	},
	{
		name: "a reload wakes nobody", file: "edge/pool/step.go", killer: "registry.TestExplore",
		patch: []string{"out = p.pumpNode(now, nil, out)", ""},
	},
	{
		name: "a reload loses who waits", file: "edge/pool/catalog.go", killer: "registry.TestExplore",
		patch: []string{"\tfor _, w := range p.waitersByArrival() {\n\t\tif g := ", "\tfor _, w := range p.waitersByArrival() {\n\t\tif p.groups[w.model] != nil && len(p.groups[w.model].candidates) == 0 {\n\t\t\tdelete(p.waiters, w.id)\n\t\t\tcontinue\n\t\t}\n\t\tif g := "},
	},
	{
		name: "who waits for the one provider is not served by the other", file: "edge/pool/queue.go", killer: "registry.TestExplore",
		patch: []string{"if k := &c.candidates[i]; k.adapter == a && k.hasPlace() {", "if k := &c.candidates[0*i]; k.adapter == a && k.hasPlace() {"},
	},
	{
		name: "a fence of one node ends what runs on another", file: "edge/pool/step.go", killer: "registry.TestExplore",
		patch: []string{"\tn.gen = 0\n\tif n.drain == gen", "\tfor _, o := range p.held {\n\t\tif o.node != n {\n\t\t\tout = append(out, Effect{Kind: SlotReturned, How: ByFence, Slot: o.slot})\n\t\t\tp.drop(o)\n\t\t}\n\t}\n\tn.gen = 0\n\tif n.drain == gen"},
	},
	{
		name: "a silent session is a duplicate for ever", file: "broker/live.go", killer: "broker.TestI5Duplicate",
		patch: []string{" && now.Sub(s.heard) < l.bound {", " {"},
	},
	{
		name: "an evicted session keeps its name", file: "broker/live.go", killer: "broker.TestI5Duplicate",
		patch: []string{"s.instance != instance && !s.evicted &&", "s.instance != instance &&"},
	},
	{
		name: "a process is a duplicate of itself", file: "broker/live.go", killer: "broker.TestI5Duplicate",
		patch: []string{"s.instance != instance && !s.evicted", "!s.evicted"},
	},
	{
		name: "a session counts only once it is connected", file: "broker/live.go", killer: "broker.TestI5Duplicate",
		patch: []string{"!s.evicted && now.Sub", "!s.evicted && s.connected && now.Sub"},
	},
	{
		name: "heartbeats do not keep a name", file: "broker/live.go", killer: "broker.TestI5Duplicate",
		patch: []string{"session.heard = now\n\t\t}", "_ = session\n\t\t}"},
	},
	{
		name: "the newer session is evicted", file: "broker/live.go", killer: "broker.TestI4OlderSessionsAreEvicted",
		patch: []string{"if gen == n.highest || s.evicted {", "if gen < n.highest || s.evicted {"},
	},
	{
		name: "a session is evicted with each newer one", file: "broker/live.go", killer: "broker.TestI4OlderSessionsAreEvicted",
		patch: []string{"if gen == n.highest || s.evicted {", "if gen == n.highest {"},
	},
	{
		name: "who completes late stays", file: "broker/live.go", killer: "broker.TestI4OlderSessionsAreEvicted",
		patch: []string{"late := session.evicted", "late := false"},
	},
	{
		name: "the last to connect is the newest", file: "broker/live.go", killer: "broker.TestI4OlderSessionsAreEvicted",
		patch: []string{"n.sessions[s.Gen] = session\n\t\tn.highest = max(n.highest, s.Gen)", "n.sessions[s.Gen] = session\n\t\tn.highest = s.Gen"},
	},
	{
		name: "the end of an older connection ends the newer", file: "broker/live.go", killer: "broker.TestAReplacedConnectionEndsNothing",
		patch: []string{"(!session.connected || session.conn == conn)", "true"},
	},
	{
		name: "the end of a session is not told", file: "broker/live.go", killer: "broker.TestI4OlderSessionsAreEvicted",
		patch: []string{"return []effect{{kind: tellClosed, session: s, conn: conn, reason: reason}}", "return nil"},
	},
	{
		name: "who was admitted and never came is not told", file: "broker/live.go", killer: "broker.TestAbandonedSessions",
		patch: []string{"if !s.own && s.leaf == \"\" {", "if true {"},
	},
	{
		name: "who is revoked while it connects stays", file: "broker/live.go", killer: "broker.TestRevokedWhileConnecting",
		patch: []string{"case !session.evicted && l.revoked[id]:", "case false:"},
	},
	{
		name: "a session may ask for tokens for ever", file: "broker/live.go", killer: "broker.TestGrantsAreBounded",
		patch: []string{"return n.sessions[s.Gen].grants <= maxGrants", "return true"},
	},
	{
		name: "an older session's event is taken", file: "node/session/step.go", killer: "session.TestScripts",
		patch: []string{"if c.state.live() && ev.Gen == c.gen {", "if c.state.live() {"},
	},
	{
		name: "one dial too many", file: "node/session/step.go", killer: "session.TestScripts",
		patch: []string{"limit > 0 && c.attempts >= limit", "limit > 0 && c.attempts > limit"},
	},
	{
		name: "ready does not start the count anew", file: "node/session/step.go", killer: "session.TestScripts",
		patch: []string{"c.attempts, c.ready = 0, true", "c.ready = true"},
	},
	{
		name: "who was superseded dials at once", file: "node/session/step.go", killer: "session.TestScripts",
		patch: []string{"case why == Superseded || why == Duplicate:", "case why == Duplicate:"},
	},
	{
		name: "a duplicate dials as if nobody was there", file: "node/session/step.go", killer: "session.TestScripts",
		patch: []string{"case why == Superseded || why == Duplicate:", "case why == Superseded:"},
	},
	{
		name: "a lost session waits for its redial", file: "node/session/step.go", killer: "session.TestScripts",
		patch: []string{"\tcase c.ready:\n", "\tcase c.ready && interval == 0:\n"},
	},
	{
		name: "another Edge's heartbeat keeps a session", file: "node/session/step.go", killer: "session.TestScripts",
		patch: []string{"if ev.Instance != c.instance {", "if false {"},
	},
	{
		name: "a silent Edge keeps a session", file: "node/session/step.go", killer: "session.TestScripts",
		patch: []string{"if !now.Before(c.heard.Add(c.bound)) {", "if false {"},
	},
	{
		name: "ready is asked for before work is taken", file: "node/session/step.go", killer: "session.TestScripts",
		patch: []string{"Effect{Kind: TakeWork, Gen: c.gen}, Effect{Kind: SendReady, Gen: c.gen})", "Effect{Kind: SendReady, Gen: c.gen}, Effect{Kind: TakeWork, Gen: c.gen})"},
	},
	{
		name: "a configuration that did not apply is called ready", file: "node/session/step.go", killer: "session.TestScripts",
		patch: []string{"if !ev.OK {\n\t\t\treturn c.end(now, BadConfig, ev.Rand, out)\n\t\t}\n", ""},
	},
	{
		name: "ready=false does not end who once was ready", file: "node/session/step.go", killer: "session.TestScripts",
		patch: []string{"case !ev.OK && c.state >= AwaitingReady:", "case !ev.OK && c.state == AwaitingReady:"},
	},
	{
		name: "a fence ends nothing", file: "node/session/step.go", killer: "session.TestScripts",
		patch: []string{"return c.end(now, ReasonOf(string(ev.Reason), Fenced), ev.Rand, out)", "return out"},
	},
	{
		name: "a step before ready has no bound", file: "node/session/step.go", killer: "session.TestScripts",
		patch: []string{"return c.end(now, StepBound, ev.Rand, out)", "c.due = now.Add(c.cfg.StepBound)"},
	},
	{
		name: "a stop leaves the dial that is under way", file: "node/session/step.go", killer: "session.TestScripts",
		patch: []string{"\tcase Dialling:\n\t\treturn out // the dial", "\tcase Dialling:\n\t\treturn c.exit(now, nil, out) // the dial"},
	},
	{
		name: "a local fault leaves the session", file: "node/session/step.go", killer: "session.TestScripts",
		patch: []string{"out = append(out, Effect{Kind: EndSession, Gen: c.gen, Reason: Stopped})", "_ = out"},
	},
	{
		name: "a renewal refuses what is on its way", file: "node/session/step.go", killer: "session.TestScripts",
		patch: []string{"takes nothing new\n\t}\n\treturn append(out, ", "takes nothing new\n\t}\n\treturn append(out, Effect{Kind: RefuseWork, Gen: c.gen}, "},
	},
	{
		name: "a duplicate is delivered", file: "tunnel/step.go", killer: "tunnel.TestI1OldDuplicatesAreAcknowledged",
		patch: []string{"return append(out, RecvEffect{Kind: AckNow})\n\tcase r.state == done:", "return append(out, RecvEffect{Kind: Deliver}, RecvEffect{Kind: AckNow})\n\tcase r.state == done:"},
	},
	{
		name: "a duplicate is not acknowledged again", file: "tunnel/step.go", killer: "tunnel.TestI1OldDuplicatesAreAcknowledged",
		patch: []string{"return append(out, RecvEffect{Kind: AckNow})\n\tcase r.state == done:", "return out\n\tcase r.state == done:"},
	},
	{
		name: "a forged duplicate passes", file: "tunnel/step.go", killer: "tunnel.TestScripts",
		patch: []string{"if r.next-ev.Seq <= digests && r.digest[ev.Seq%digests] != ev.Digest {", "if false {"},
	},
	{
		name: "more than the credit is taken", file: "tunnel/step.go", killer: "tunnel.TestI2ReserveIsCountedAlike",
		patch: []string{"if end > r.announced+reserve(ev) {", "if end > r.announced+2*reserve(ev)+MaxCost {"},
	},
	{
		name: "an acknowledgement of what was never sent is taken", file: "tunnel/step.go", killer: "tunnel.TestScripts",
		patch: []string{"case ev.Acked > s.sent:", "case ev.Acked >= s.next+1000:"},
	},
	{
		name: "an older acknowledgement takes credit back", file: "tunnel/step.go", killer: "tunnel.TestI2AnOlderAcknowledgementTakesNothingBack",
		patch: []string{"s.credit = max(s.credit, ev.Credit)", "s.credit = ev.Credit"},
	},
	{
		name: "the last frame is not sent again", file: "tunnel/step.go", killer: "tunnel.TestScripts",
		patch: []string{"s.baseRTO()))\n\treturn s.ask(now, out)", "s.baseRTO()))\n\tif s.state == closing {\n\t\ts.resendAt = time.Time{}\n\t\treturn out\n\t}\n\treturn s.ask(now, out)"},
	},
	{
		name: "a silence sends the window again", file: "tunnel/step.go", killer: "tunnel.TestScripts",
		patch: []string{"s.baseRTO()))\n\treturn s.ask(now, out)", "s.baseRTO()))\n\treturn s.rewind(now, out)"},
	},
	{
		name: "only heartbeats are a sign of life", file: "edge/registry/step.go", killer: "registry.TestScripts",
		patch: []string{"if n.state == Ready {\n\t\t\tn.heard = now\n\t\t}\n\t\treturn out", "return out"},
	},
	{
		name: "a lost grant is waited for for ever", file: "tunnel/step.go", killer: "tunnel.TestLostCreditDoesNotStopAStream",
		patch: []string{"s.held, s.holding = last.Frame, true\n\t\t\tbreak", "_ = last"},
	},
	{
		name: "a frame is released twice", file: "tunnel/step.go", killer: "tunnel.TestI5EveryFrameIsReleasedOnce",
		patch: []string{"out = append(out, SendEffect{Kind: ReleaseFrame, Frame: s.pop().Frame})", "f := s.pop().Frame\n\t\tout = append(out, SendEffect{Kind: ReleaseFrame, Frame: f}, SendEffect{Kind: ReleaseFrame, Frame: f})"},
	},
	{
		name: "who is never answered goes on", file: "tunnel/step.go", killer: "tunnel.TestScripts",
		patch: []string{"return s.fail(errUnanswered(s.acked), out)", "s.progress = now"},
	},
}

// source is the text of a file as the mutant has it.
func (m *mutant) source(t *testing.T, text []byte) []byte {
	t.Helper()
	for i := 0; i < len(m.patch); i += 2 {
		if n := bytes.Count(text, []byte(m.patch[i])); n != 1 {
			t.Fatalf("%s: %s has this %d times, and should once:\n%s", m.name, m.file, n, m.patch[i])
		}
		text = bytes.Replace(text, []byte(m.patch[i]), []byte(m.patch[i+1]), 1)
	}
	return text
}

// functions returns the declarations of a file's functions by receiver and name,
// with the positions that they have in the text.
func functions(t *testing.T, text []byte) map[string]*ast.FuncDecl {
	t.Helper()
	f, err := parser.ParseFile(token.NewFileSet(), "", text, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]*ast.FuncDecl{}
	for _, d := range f.Decls {
		if fn, ok := d.(*ast.FuncDecl); ok {
			name := fn.Name.Name
			if fn.Recv != nil {
				name = string(text[fn.Recv.Pos()-1:fn.Recv.End()-1]) + name
			}
			all[name] = fn
		}
	}
	return all
}

// schema is a file with all of its mutants, each under its number.
func schema(t *testing.T, file string, original []byte) []byte {
	t.Helper()
	type insertion struct {
		at   int
		text string
	}
	var (
		base   = functions(t, original)
		asks   []insertion
		copies bytes.Buffer
	)
	for i := range mutants {
		m := &mutants[i]
		if m.file != file {
			continue
		}
		text, changed := m.source(t, original), 0
		for name, fn := range functions(t, text) {
			was := base[name]
			if was == nil {
				t.Fatalf("%s: it adds %s", m.name, name)
			}
			body := text[fn.Pos()-1 : fn.End()-1]
			if bytes.Equal(body, original[was.Pos()-1:was.End()-1]) {
				continue
			}
			changed++
			other := fmt.Sprintf("%s__%d", fn.Name.Name, i+1)
			at := int(fn.Name.Pos() - fn.Pos())
			fmt.Fprintf(&copies, "\n%s%s%s\n", body[:at], other, body[at+len(fn.Name.Name):])
			asks = append(asks, insertion{int(was.Body.Lbrace), fmt.Sprintf("\n\tif mutantNow == %d {\n\t\t%s\n\t}", i+1, call(t, was, other))})
		}
		if changed == 0 {
			t.Fatalf("%s: it changes no function", m.name)
		}
	}
	slices.SortStableFunc(asks, func(a, b insertion) int { return b.at - a.at })
	out := slices.Clone(original)
	for _, a := range asks {
		out = slices.Insert(out, a.at, []byte(a.text)...)
	}
	return append(out, copies.Bytes()...)
}

// call is the call of another function in fn's place.
func call(t *testing.T, fn *ast.FuncDecl, other string) string {
	t.Helper()
	var args []string
	for _, p := range fn.Type.Params.List {
		if len(p.Names) == 0 {
			t.Fatalf("%s has a parameter without a name", fn.Name.Name)
		}
		for _, n := range p.Names {
			args = append(args, n.Name)
		}
	}
	if fn.Recv != nil {
		other = fn.Recv.List[0].Names[0].Name + "." + other
	}
	c := other + "(" + strings.Join(args, ", ") + ")"
	if fn.Type.Results == nil {
		return c + "\n\t\treturn"
	}
	return "return " + c
}

// overlay writes the files with their mutants, and the list that has go use them.
func overlay(t *testing.T) string {
	t.Helper()
	root, err := filepath.Abs(filepath.Join("..", ".."))
	if err != nil {
		t.Fatal(err)
	}
	dir, replace := t.TempDir(), map[string]string{}
	lay := func(file string, text []byte) {
		at := filepath.Join(dir, fmt.Sprint(len(replace), ".go"))
		if err := os.WriteFile(at, text, 0o600); err != nil {
			t.Fatal(err)
		}
		replace[filepath.Join(root, filepath.FromSlash(file))] = at
	}
	done := map[string]bool{}
	for _, m := range mutants {
		if done[m.file] {
			continue
		}
		done[m.file] = true
		text, err := os.ReadFile(filepath.Join(root, filepath.FromSlash(m.file)))
		if err != nil {
			t.Fatal(err)
		}
		lay(m.file, schema(t, m.file, text))
		folder := m.file[:strings.LastIndexByte(m.file, '/')]
		if !done[folder] {
			done[folder] = true
			pkg := folder[strings.LastIndexByte(folder, '/')+1:]
			lay(folder+"/zz_mutants.go", []byte("package "+pkg+`

import (
	"os"
	"strconv"
)

var mutantNow, _ = strconv.Atoi(os.Getenv("IOP_MUTANT"))
`))
		}
	}
	list := filepath.Join(dir, "overlay.json")
	b, err := json.Marshal(map[string]any{"Replace": replace})
	if err == nil {
		err = os.WriteFile(list, b, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	return list
}

// Every mutant still fits the source it changes.
func TestMutantsApply(t *testing.T) {
	overlay(t)
}

// Each mutant must fail the test that is named for it.
func TestMutants(t *testing.T) {
	if *mutantTests == "" {
		t.Skip("make mutants")
	}
	var (
		mu       sync.Mutex
		began    = time.Now()
		table    []string
		list     = overlay(t)
		binaries = map[string]string{}
	)
	for name, folder := range packages {
		binaries[name] = filepath.Join(filepath.Dir(list), name+".test")
		build := exec.CommandContext(t.Context(), "go", "test", "-c", "-vet=off", "-overlay", list, "-o", binaries[name], "./"+folder)
		build.Dir = filepath.Join("..", "..")
		if out, err := build.CombinedOutput(); err != nil {
			t.Fatalf("a mutant does not compile: %v\n%s", err, out)
		}
	}
	t.Logf("built in %v", time.Since(began).Round(time.Second))
	// Without a mutant the same tests pass.
	none := mutant{name: "none"}
	for _, name := range killers() {
		if failed, how := none.run(t, binaries, 0, name); len(failed) > 0 {
			t.Fatalf("%s fails without a mutant, too%s", name, how)
		}
	}
	t.Run("all", func(t *testing.T) {
		for i := range mutants {
			m := &mutants[i]
			t.Run(strings.ReplaceAll(m.name, " ", "_"), func(t *testing.T) {
				t.Parallel()
				var found []string
				var how string
				if *mutantTests == "all" {
					for _, pkg := range watching[filepath.ToSlash(filepath.Dir(m.file))] {
						f, h := m.run(t, binaries, i+1, pkg+".")
						found, how = append(found, f...), how+h
					}
				} else {
					found, how = m.run(t, binaries, i+1, m.killer)
				}
				mu.Lock()
				defer mu.Unlock()
				table = append(table, fmt.Sprintf("%-60s %s%s", m.name, strings.Join(found, " "), how))
				if !slices.Contains(found, m.killer) {
					t.Errorf("%s did not find it", m.killer)
				}
				if m.killer == "registry.TestExplore" && how == "" {
					t.Error("the explorer found no rule that it breaks, only another number of states")
				}
			})
		}
	})
	slices.Sort(table)
	t.Logf("%d mutants in %v: killed by\n%s", len(table), time.Since(began).Round(time.Second), strings.Join(table, "\n"))
}

// killers are the tests that are named for a mutant, each once.
func killers() (names []string) {
	for _, m := range mutants {
		names = append(names, m.killer)
	}
	slices.Sort(names)
	return slices.Compact(names)
}

var (
	failedTest   = regexp.MustCompile(`(?m)^--- FAIL: (\w+)`)
	breachedRule = regexp.MustCompile(`explore_test\.go:\d+: (.*)\n.*after: (.*)`)
)

// run runs a test on a mutant, or all of its package, and returns those that
// failed, and what the explorer said.
func (m *mutant) run(t *testing.T, binaries map[string]string, number int, test string) (found []string, how string) {
	t.Helper()
	pkg, name, _ := strings.Cut(test, ".")
	args := []string{"-test.timeout=10m", "-test.count=1"}
	if name != "" {
		args = []string{"-test.timeout=60s", "-test.count=1", "-test.run=^" + name + "$"}
	}
	// A failure that is enough needs no smallest example.
	args = append(args, "-rapid.nofailfile", "-rapid.shrinktime=1ms")
	run := exec.CommandContext(t.Context(), binaries[pkg], args...)
	run.Dir = filepath.Join("..", "..", filepath.FromSlash(packages[pkg]))
	run.Env = append(os.Environ(), fmt.Sprint("IOP_MUTANT=", number))
	out, err := run.CombinedOutput()
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	for _, f := range failedTest.FindAllStringSubmatch(string(out), -1) {
		found = append(found, pkg+"."+f[1])
	}
	if b := breachedRule.FindSubmatch(out); b != nil {
		how = fmt.Sprintf("\n%60s %s, after %d moves", "", b[1], 1+bytes.Count(b[2], []byte(", ")))
	}
	if (err == nil) != (len(found) == 0) {
		t.Errorf("%s: %v\n%s", test, err, out)
	}
	if len(found) == 0 && number > 0 {
		t.Logf("%s", out)
	}
	return found, how
}
