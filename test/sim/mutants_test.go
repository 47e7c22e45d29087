package sim

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

var mutantsFlag = flag.Bool("mutants", false, "run the mutants of the code that is simulated: make mutants")

// mutant is a small wrong variant of code that callers get: patch is pairs of what
// stands there and what is put in its place; rule is what it must be found to break, one of those named.
type mutant struct {
	name  string
	file  string
	rule  string
	patch []string
}

var mutants = []mutant{
	{
		name: "a slot whose caller left is not given back", file: "edge/dispatch/life.go", rule: "INV3",
		patch: []string{"return orders{give: how, remove: true, over: true}", "return orders{remove: true, over: true}"},
	},
	{
		name: "the last frame throws away what waits", file: "edge/dispatch/stream.go", rule: "INV2",
		patch: []string{"	s.mu.Lock()\n	s.push(f)\n	s.mu.Unlock()", "	s.mu.Lock()\n	s.head, s.inbox = 0, nil\n	s.push(f)\n	s.mu.Unlock()"},
	},
	{
		name: "a late copy of a finished request runs again", file: "node/streams.go", rule: "INV2",
		patch: []string{"case s.finished.has(run, now):", "case false:"},
	},
	{
		name: "a copy of a running request runs too", file: "node/streams.go", rule: "INV2",
		patch: []string{"if st := s.byRun[run]; st != nil { // I1", "if st := s.byRun[run]; st != nil && st.answered { // I1"},
	},
	{
		name: "nobody looks whether a provider stalls", file: "node/watch.go", rule: "LIVE2",
		patch: []string{"	return next, due(now, next)\n", "	return now.Add(w.bound), false\n"},
	},
	{
		name: "what was not acknowledged is not sent again", file: "tunnel/step.go", rule: "LIVE2",
		patch: []string{"	s.rto = min(2*s.rto, max(s.cfg.MaxRTO, s.baseRTO()))\n	return s.ask(now, out)", "	s.resendAt = now.Add(s.cfg.MaxRTO)\n	return out"},
	},
	{
		name: "a gap of one is delivered", file: "tunnel/step.go", rule: "INV2",
		patch: []string{"case ev.Seq > r.next: // a gap", "case ev.Seq > r.next+1: // a gap"},
	},
	{
		name: "a lost grant stops the stream", file: "tunnel/state.go", rule: "LIVE2 CLASS",
		patch: []string{"return s.state == open && s.n == 0 && s.acked > 0 && s.offered+MaxCost > s.credit", "return false"},
	},
	{
		name: "one more than the capacity", file: "edge/pool/state.go", rule: "INV4",
		patch: []string{"	h.count(+1)\n	v.places.last", "	if p.lastSlot%8 != 0 {\n		h.count(+1)\n	}\n	v.places.last"},
	},
	{
		name: "a superseded session's slots are not taken back", file: "edge/registry/step.go", rule: "INV5",
		patch: []string{"	if wasReady {\n", "	if wasReady && why != Superseded {\n"},
	},
	{
		name: "a dead session holds its name for ever", file: "broker/live.go", rule: "LIVE1",
		patch: []string{"!s.evicted && now.Sub(s.heard) < l.bound {", "!s.evicted {"},
	},
	{
		name: "a fence leaves the attempts open", file: "edge/dispatch/dispatch.go", rule: "LIVE2",
		patch: []string{"if s := d.table.slot(slot.ID); s != nil {", "if s := d.table.slot(slot.ID); s != nil && !s.heard {"},
	},
	{
		name: "the bound of an unanswered cancel changes nothing", file: "edge/dispatch/loop.go", rule: "INV3",
		patch: []string{"		d.apply(s, s.step((*life).bound), false)\n", ""},
	},
	{
		name: "a request that was lost is not sent again", file: "edge/dispatch/do.go", rule: "LIVE2",
		patch: []string{"c.request, c.repeat, c.repeatAt = data, firstRepeat, now.Add(firstRepeat)", "c.request, c.repeat = data, firstRepeat"},
	},
	{
		name: "a missing frame is not waited for", file: "edge/dispatch/dispatch.go", rule: "CLASS",
		patch: []string{"return max(silenceBound, d.cfg.HeartbeatBound)", "return 10 * time.Millisecond"},
	},
	{
		name: "the last duplicate is delivered", file: "tunnel/step.go", rule: "INV2",
		patch: []string{"case ev.Seq < r.next: // a duplicate", "case ev.Seq+1 < r.next: // a duplicate"},
	},
	{
		name: "what was read of a body is not told", file: "node/streams.go", rule: "LIVE2",
		patch: []string{"m.consumed = append(m.consumed, frame)", "m.consumed = m.consumed[:0:0]"},
	},
	{
		name: "the place is not free with the terminal", file: "node/stream.go", rule: "CLASS",
		patch: []string{"	st.all.host.free(u) // before the terminal (P7)\n", "", "	st.cancel(nil)\n}\n\n// exchange is", "	st.cancel(nil)\n	st.all.run.wait(context.Background(), nil)\n	st.all.host.free(u)\n}\n\n// exchange is"},
	},
	{
		name: "a late notice brings an older session back", file: "edge/registry/step.go", rule: "INV5",
		patch: []string{"n != nil && e.Gen <= n.gen {", "n != nil && e.Gen == n.gen {"},
	},
	{
		name: "an older session registers", file: "edge/registry/step.go", rule: "INV5",
		patch: []string{
			"case n != nil && e.Gen < n.gen:\n		return refuse(Superseded, wire.SessionEnded)\n	case n != nil && e.Gen == n.gen && n.state == Gone:", "case n != nil && e.Gen == n.gen && n.state == Gone:",
			"	if n == nil || e.Gen > n.gen {\n		n, out = r.supersede(now, e.Node, e.Gen, out)\n	}\n	n.instance, n.software", "	if n == nil || e.Gen != n.gen {\n		n, out = r.supersede(now, e.Node, e.Gen, out)\n	}\n	n.instance, n.software",
		},
	},
	{
		name: "a cancel that overtakes its request is forgotten", file: "node/streams.go", rule: "C1",
		patch: []string{"		s.early.add(run, now)\n", "		_ = now\n"},
	},
}

// overlay writes the mutant's source, and the file that has go test use it.
func (m *mutant) overlay(t *testing.T) string {
	source, err := filepath.Abs(filepath.Join("..", "..", filepath.FromSlash(m.file)))
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

var ruleBroken = regexp.MustCompile(`(?m)^\s+((?:INV|LIVE|C|J)\d|CLASS|CALM|LEAK|PANIC|VOID) at [^:]*: (.*)$`)

// Each mutant must be found by the rule it breaks, within the seeds of TestSimulation.
func TestMutants(t *testing.T) {
	if !*mutantsFlag {
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
				rules := m.run(t)
				mu.Lock()
				defer mu.Unlock()
				table = append(table, fmt.Sprintf("%-60s %s", m.name, strings.Join(rules, "; ")))
				broken := func(r string) bool {
					return slices.ContainsFunc(strings.Fields(m.rule), func(rule string) bool { return strings.HasPrefix(r, rule) })
				}
				if !slices.ContainsFunc(rules, broken) {
					t.Errorf("%s is not found broken", m.rule)
				}
			})
		}
	})
	slices.Sort(table)
	t.Logf("%d mutants in %v:\n%s", len(table), time.Since(began).Round(time.Second), strings.Join(table, "\n"))
}

// run simulates the mutant, and returns the rules it breaks, with their first breach.
func (m *mutant) run(t *testing.T) (rules []string) {
	cmd := exec.CommandContext(t.Context(), "go", "test", "-overlay", m.overlay(t), "-vet=off", "-count=1", "-timeout=120s", "-run", "^TestSimulation$", ".", "-few", "1500", "-stop", "20")
	out, err := cmd.CombinedOutput()
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	if bytes.Contains(out, []byte("[build failed]")) || bytes.Contains(out, []byte("[setup failed]")) {
		t.Fatalf("it does not compile:\n%s", out)
	}
	seen := map[string]bool{}
	for _, b := range ruleBroken.FindAllStringSubmatch(string(out), -1) {
		if rule := b[1]; !seen[rule] {
			seen[rule] = true
			rules = append(rules, rule+" ("+b[2][:min(len(b[2]), 60)]+")")
		}
	}
	if len(rules) == 0 {
		t.Logf("%s", out[:min(len(out), 2000)])
	}
	return rules
}
