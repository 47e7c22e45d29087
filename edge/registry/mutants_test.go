package registry

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
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

// A mutant is a small wrong variant of one of the two cores. The tests must find
// each: a rule that no mutant breaks unseen is one the tests look at. The variant
// is laid over the source for one run of go test (its -overlay), so that what is
// released has no seam for it.

var mutantTests = flag.String("mutants", "", "run the mutants: each with the test that is `named` for it, or with all")

type mutant struct {
	name   string
	file   string   // below edge/
	patch  []string // old, new, old, new ...
	killer string   // a test that must fail
}

var mutants = []mutant{
	{
		name: "a stale registration is accepted", file: "registry/step.go", killer: "registry.TestExplore",
		patch: []string{
			"case n != nil && e.Gen < n.gen:\n\t\treturn refuse(Superseded, wire.SessionEnded)\n\tcase n != nil && e.Gen == n.gen && n.state == Gone",
			"case n != nil && e.Gen == n.gen && n.state == Gone",
			"if n == nil || e.Gen > n.gen {\n\t\tn, out = r.supersede(now, e.Node, e.Gen, out)\n\t}\n\tn.instance",
			"if n == nil || e.Gen != n.gen {\n\t\tn, out = r.supersede(now, e.Node, e.Gen, out)\n\t}\n\tn.instance",
		},
	},
	{
		name: "a stale ready is accepted", file: "registry/step.go", killer: "registry.TestExplore",
		patch: []string{"case e.Gen < n.gen:\n\t\treturn refuse(Superseded, wire.SessionEnded)\n\tcase n.state == AdmittedState", "case n.state == AdmittedState"},
	},
	{
		name: "the close of an older generation ends the newer", file: "registry/step.go", killer: "registry.TestExplore",
		patch: []string{"if e.Gen < n.gen || n.state == Gone {", "if n.state == Gone {"},
	},
	{
		name: "generations are compared with >=", file: "registry/step.go", killer: "registry.TestExplore",
		patch: []string{"n != nil && n.gen == gen {", "n != nil && n.gen >= gen {"},
	},
	{
		name: "the end of a pending claim fences", file: "registry/step.go", killer: "registry.TestExplore",
		patch: []string{"wasReady := n.state == Ready", "wasReady := n.state.Owns()"},
	},
	{
		name: "connected comes with each acknowledgement", file: "registry/step.go", killer: "registry.TestExplore",
		patch: []string{"if n == nil || n.state != Acking {\n\t\treturn out", "if n == nil || !n.state.Owns() {\n\t\treturn out"},
	},
	{
		name: "the older owner is revived when the newer ends", file: "registry/step.go", killer: "registry.TestExplore",
		patch: []string{
			"return r.end(now, e.Node, n, SessionClosed, out)",
			"if n.state == Pending && n.gen > 1 {\n\t\tn.gen--\n\t\tr.become(n, Ready, now)\n\t\treturn append(out, Activate{e.Node, n.gen})\n\t}\n\treturn r.end(now, e.Node, n, SessionClosed, out)",
		},
	},
	{
		name: "a takeover does not end the older owner", file: "registry/step.go", killer: "registry.TestExplore",
		patch: []string{"\t\tout = r.end(now, name, n, Superseded, out)\n", ""},
	},
	{
		name: "a close before the registration is forgotten", file: "registry/step.go", killer: "registry.TestExplore",
		patch: []string{"n, out = r.supersede(now, e.Node, e.Gen, out)\n\t}\n\tif e.Gen < n.gen ||", "return out\n\t}\n\tif e.Gen < n.gen ||"},
	},
	{
		name: "a registration after the close is accepted", file: "registry/step.go", killer: "registry.TestExplore",
		patch: []string{"\tcase n != nil && e.Gen == n.gen && n.state == Gone:\n\t\treturn refuse(SessionOver, wire.SessionEnded)\n", ""},
	},
	{
		name: "a ready after the close is accepted", file: "registry/step.go", killer: "registry.TestExplore",
		patch: []string{"\tcase n.state == Gone:\n\t\treturn refuse(SessionOver, wire.SessionEnded)\n\tcase e.PayloadNode != e.Node:\n\t\treturn refuse(WrongNode, wire.Invalid)\n\tcase n.state == Acking", "\tcase e.PayloadNode != e.Node:\n\t\treturn refuse(WrongNode, wire.Invalid)\n\tcase n.state == Acking"},
	},
	{
		name: "ready does not wait for its acknowledgement", file: "registry/step.go", killer: "registry.TestExplore",
		patch: []string{"r.become(n, Acking, now)", "r.become(n, Ready, now)"},
	},
	{
		name: "a failed acknowledgement counts as sent", file: "registry/step.go", killer: "registry.TestExplore",
		patch: []string{"r.become(n, Pending, now) // the claim's bound runs on", "return r.ackSent(now, ReadyAckSent(e), out)"},
	},
	{
		name: "the acknowledgement of a session that ended makes it ready", file: "registry/step.go", killer: "registry.TestExplore",
		patch: []string{"if n == nil || n.state != Acking {\n\t\treturn out", "if n == nil || n.state == Ready {\n\t\treturn out"},
	},
	{
		name: "a repeated registration makes a ready owner pending", file: "registry/step.go", killer: "registry.TestExplore",
		patch: []string{"case n != nil && e.Gen == n.gen && n.state.Owns():", "case n != nil && e.Gen == n.gen && n.state == Pending:"},
	},
	{
		name: "a repeated admission ends its own session", file: "registry/step.go", killer: "registry.TestExplore",
		patch: []string{"n != nil && e.Gen <= n.gen {\n\t\treturn out", "n != nil && e.Gen < n.gen {\n\t\treturn out"},
	},
	{
		name: "a stranger's heartbeat is not answered", file: "registry/step.go", killer: "registry.TestExplore",
		patch: []string{"if n == nil || !n.state.Owns() {\n\t\treturn r.tellOver(now, e.Node, e.Gen, out)", "if n == nil || !n.state.Owns() {\n\t\treturn out"},
	},
	{
		name: "a silent owner stays", file: "registry/step.go", killer: "registry.TestExplore",
		patch: []string{"if at := n.heard.Add(r.heartbeatBound); at.After(now) {", "if at := n.heard.Add(r.heartbeatBound); !at.Before(now) {"},
	},
	{
		name: "a pending claim has no bound", file: "registry/step.go", killer: "registry.TestExplore",
		patch: []string{"if n.due.After(now) {\n\t\t\t\tr.dueBy(n.due)", "if true {"},
	},
	{
		name: "an evicted session is not told", file: "registry/step.go", killer: "registry.TestScripts",
		patch: []string{"out = r.fence(now, name, n.gen, why, out)\n\treturn append(out, CloseSession", "return append(out, CloseSession"},
	},
	{
		name: "a failed acknowledgement extends the claim", file: "registry/step.go", killer: "registry.TestScripts",
		patch: []string{"if n.state != Acking { // a failed", "if true { // a failed"},
	},
	{
		name: "another node's id registers", file: "registry/step.go", killer: "registry.TestScripts",
		patch: []string{"\tcase e.PayloadNode != e.Node:\n\t\treturn refuse(WrongNode, wire.Invalid)\n\tcase e.Verified != nil:", "\tcase e.Verified != nil:"},
	},
	{
		name: "an unproved registration is accepted", file: "registry/step.go", killer: "registry.TestUnprovedChangesNothing",
		patch: []string{"case e.Verified != nil:", "case false:"},
	},
	{
		name: "a draining node is activated as if it were not", file: "registry/step.go", killer: "registry.TestDrainingNodeIsActivatedWithoutWork",
		patch: []string{"if n.draining { // before", "if false { // before"},
	},
	{
		name: "fences come as often as asked for", file: "registry/limiter.go", killer: "registry.TestScripts",
		patch: []string{"ok && now.Sub(at) < fenceEvery {", "ok && now.Sub(at) < 0 {"},
	},
	{
		name: "a node that left the configuration stays", file: "registry/step.go", killer: "registry.TestScripts",
		patch: []string{"!r.configured[name] && n.state.Owns()", "false && n.state.Owns()"},
	},
	{
		name: "a fence returns its slots twice", file: "pool/step.go", killer: "registry.TestExplore",
		patch: []string{
			"out = append(out, Effect{Kind: SlotReturned, How: ByFence, Slot: h.slot})",
			"out = append(out, Effect{Kind: SlotReturned, How: ByFence, Slot: h.slot}, Effect{Kind: SlotReturned, How: ByFence, Slot: h.slot})",
		},
	},
	{
		name: "a fence leaves its slots in use", file: "pool/step.go", killer: "registry.TestExplore",
		patch: []string{"for h := n.first; h != nil; h = n.first {", "for h := n.first; h != nil; h = h.next {", "Slot: h.slot})\n\t\tp.drop(h)\n\t}", "Slot: h.slot})\n\t}"},
	},
	{
		name: "slots are granted under a fenced generation", file: "pool/catalog.go", killer: "registry.TestExplore",
		patch: []string{"return v.node.gen != 0 && v.enabled()", "return v.enabled()"},
	},
	{
		name: "a fence grants what it frees", file: "pool/step.go", killer: "registry.TestExplore",
		patch: []string{"\tn.gen = 0\n\tif n.drain == gen", "\tif n.drain == gen", "p.drop(h)\n\t}\n\tfor _, v", "p.drop(h)\n\t\tif len(out) < 9 {\n\t\t\tout = p.pumpNode(time.Time{}, n, out)\n\t\t}\n\t}\n\tn.gen = 0\n\tfor _, v"},
	},
	{
		name: "a fence ends no attempt", file: "pool/step.go", killer: "registry.TestExplore",
		patch: []string{"out = append(out, Effect{Kind: EndAttempt, Slot: ef.Slot, Cause: cause})", "_ = ef"},
	},
	{
		name: "who waits is lost at a fence", file: "pool/step.go", killer: "registry.TestExplore",
		patch: []string{"first := len(out)\n", "first := len(out)\n\tfor _, w := range p.waitersByArrival() {\n\t\tp.remove(w)\n\t}\n"},
	},
	{
		name: "one place too many", file: "pool/catalog.go", killer: "registry.TestExplore",
		patch: []string{"v.places.used < v.Capacity && v.adapter.places.used < v.adapter.Capacity", "v.places.used <= v.Capacity && v.adapter.places.used <= v.adapter.Capacity"},
	},
	{
		name: "one place too few", file: "pool/catalog.go", killer: "registry.TestExplore",
		patch: []string{"v.places.used < v.Capacity &&", "v.places.used+1 < v.Capacity &&"},
	},
	{
		name: "the terminal of an old slot frees a new one", file: "pool/step.go", killer: "registry.TestExplore",
		patch: []string{"h := p.held[id]\n", "h := p.held[id]\n\tfor _, o := range p.held {\n\t\tif h == nil {\n\t\t\th = o\n\t\t}\n\t}\n"},
	},
	{
		name: "a slot stays in the table when it is returned", file: "pool/state.go", killer: "registry.TestExplore",
		patch: []string{"delete(p.held, h.slot.ID)\n", ""},
	},
	{
		name: "a place stays in use when its slot is returned", file: "pool/state.go", killer: "registry.TestExplore",
		patch: []string{"h.count(-1)\n", ""},
	},
	{
		name: "a returned slot wakes nobody", file: "pool/step.go", killer: "registry.TestExplore",
		patch: []string{"\tif a != nil {\n\t\tout = p.pump(now, a, out)", "\tif a == nil {\n\t\tout = p.pump(now, a, out)"},
	},
	{
		name: "a ready node wakes nobody", file: "pool/step.go", killer: "registry.TestExplore",
		patch: []string{"n.gen, n.seen = gen, gen\n\treturn p.pumpNode(now, n, out)", "n.gen, n.seen = gen, gen\n\treturn out"},
	},
	{
		name: "who left stays in the queue", file: "pool/step.go", killer: "registry.TestExplore",
		patch: []string{"w != nil {\n\t\t\tp.remove(w)", "w != nil {\n\t\t\t_ = w"},
	},
	{
		name: "a wait that ended goes on", file: "pool/step.go", killer: "registry.TestExplore",
		patch: []string{"!p.expiry[0].deadline.After(now)", "p.expiry[0].deadline.Before(now)"},
	},
	{
		name: "the key forgets the last slot", file: "pool/key.go", killer: "registry.TestExplore",
		patch: []string{"\tk.num(p.lastSlot)\n", ""},
	},
	{
		name: "a clone shares its node", file: "registry/snapshot.go", killer: "registry.TestExplore",
		patch: []string{"m := *n // features are replaced as a whole, never changed\n\t\tc.nodes[name] = &m", "c.nodes[name] = n"},
	},
	{
		name: "the activation of a generation that ended is taken", file: "pool/step.go", killer: "pool.TestI6StaleChangesNothing",
		patch: []string{"if gen <= n.seen {", "if gen < n.seen {"},
	},
	{
		name: "a late fence ends the generation that is live", file: "pool/step.go", killer: "pool.TestI6StaleChangesNothing",
		patch: []string{"n == nil || gen == 0 || n.gen != gen {", "n == nil || gen == 0 || n.gen == 0 {"},
	},
	{
		name: "an overlay outlives its generation", file: "pool/step.go", killer: "pool.TestScripts",
		patch: []string{"if v.node == n {\n\t\t\tv.overlaid = false", "if v.node == n {\n\t\t\tv.overlaid = v.overlaid && true"},
	},
	{
		name: "long requests do not count", file: "pool/state.go", killer: "pool.TestScripts",
		patch: []string{"h.provider.long += by", "h.provider.long += 0"},
	},
	{
		name: "a principal's turn does not end", file: "pool/queue.go", killer: "pool.TestScripts",
		patch: []string{"e.used, e.turn = 0, tick", "e.used = 0"},
	},
	{
		name: "who came last is served first", file: "pool/queue.go", killer: "pool.TestScripts",
		patch: []string{"if w == nil || e.first.at < w.at {", "if w == nil || e.first.at > w.at {"},
	},
	{
		name: "priorities are not looked at", file: "pool/queue.go", killer: "pool.TestScripts",
		patch: []string{"if best != nil && k.priority != best.priority {", "if false {"},
	},
	{
		name: "one more waits than may", file: "pool/step.go", killer: "pool.TestA38QueueLimitHoldsInEveryState",
		patch: []string{"l.waiting >= orDefault(q.Depth", "l.waiting > orDefault(q.Depth"},
	},
}

// overlay writes the mutant's source, and the file that has go test use it.
func (m *mutant) overlay(t *testing.T) string {
	source, err := filepath.Abs(filepath.Join("..", filepath.FromSlash(m.file)))
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(source)
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i < len(m.patch); i += 2 {
		if n := bytes.Count(text, []byte(m.patch[i])); n != 1 {
			t.Fatalf("%s has this %d times, and should once:\n%s", m.file, n, m.patch[i])
		}
		text = bytes.Replace(text, []byte(m.patch[i]), []byte(m.patch[i+1]), 1)
	}
	dir := t.TempDir()
	patched, list := filepath.Join(dir, "mutant.go"), filepath.Join(dir, "overlay.json")
	overlay, err := json.Marshal(map[string]map[string]string{"Replace": {source: patched}})
	if err != nil {
		t.Fatal(err)
	}
	for name, b := range map[string][]byte{patched: text, list: overlay} {
		if err := os.WriteFile(name, b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return list
}

// Every mutant still fits the source it changes.
func TestMutantsApply(t *testing.T) {
	for _, m := range mutants {
		m.overlay(t)
	}
}

var (
	failed       = regexp.MustCompile(`(?m)^--- FAIL: (\w+)|^FAIL\t\S+/(\w+)\t`)
	breachedRule = regexp.MustCompile(`explore_test\.go:\d+: (.*)\n.*after: (.*)`)
)

// Each mutant must fail the test that is named for it.
func TestMutants(t *testing.T) {
	if *mutantTests == "" {
		t.Skip("make mutants")
	}
	var (
		mu    sync.Mutex
		began = time.Now()
		table []string
	)
	t.Run("all", func(t *testing.T) {
		for _, m := range mutants {
			t.Run(strings.ReplaceAll(m.name, " ", "_"), func(t *testing.T) {
				t.Parallel()
				killers, how := m.run(t, *mutantTests == "all")
				mu.Lock()
				defer mu.Unlock()
				table = append(table, fmt.Sprintf("%-60s %s%s", m.name, strings.Join(killers, " "), how))
				if !slices.Contains(killers, m.killer) {
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

// run runs the tests on the mutant, and returns those that failed, and what the
// explorer said.
func (m *mutant) run(t *testing.T, all bool) (killers []string, how string) {
	args := []string{"test", "-overlay", m.overlay(t), "-vet=off", "-count=1", "-timeout=60s"}
	pkg, name, _ := strings.Cut(m.killer, ".")
	switch {
	case !all:
		args = append(args, "-run", "^"+name+"$", "../"+pkg)
	case strings.HasPrefix(m.file, "pool/"):
		args = append(args, "../registry", "../pool")
	default:
		args = append(args, "../registry")
	}
	// A failure that is enough needs no smallest example.
	args = append(args, "-rapid.nofailfile", "-rapid.shrinktime=1ms")
	out, err := exec.CommandContext(t.Context(), "go", args...).CombinedOutput()
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	if bytes.Contains(out, []byte("[build failed]")) || bytes.Contains(out, []byte("[setup failed]")) {
		t.Fatalf("it does not compile:\n%s", out)
	}
	named := 0 // those whose package is known: its line comes after them
	for _, f := range failed.FindAllStringSubmatch(string(out), -1) {
		if f[1] != "" {
			killers = append(killers, f[1])
			continue
		}
		for ; named < len(killers); named++ {
			killers[named] = f[2] + "." + killers[named]
		}
	}
	if b := breachedRule.FindSubmatch(out); b != nil {
		how = fmt.Sprintf("\n%60s %s, after %d moves", "", b[1], 1+bytes.Count(b[2], []byte(", ")))
	}
	if len(killers) == 0 {
		t.Logf("%s", out)
	}
	return killers, how
}
