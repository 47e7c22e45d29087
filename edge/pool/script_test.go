package pool

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

var update = flag.Bool("update", false, "rewrite the effects in testdata")

var epoch = time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)

// A script is lines of intent (#), events, and indented effects. Configuration
// lines collect until apply.
//
//	adapter NODE/NAME [cap=N] [fallback] [disabled] [held]
//	provider NODE/ADAPTER/TARGET [id=ID] [cap=N] [long=N] [ops=a,b] [disabled]
//	group NAME PROVIDER[@PRIORITY][*WEIGHT]...
//	queue [depth=N] [total=N] [wait=D] [PRINCIPAL*WEIGHT]
//	auto | apply | reset
//	enqueue ID MODEL PRINCIPAL [op=OP] [long] [avoid=P,Q] [wait=D]
//	cancel ID | return SLOT HOW | activate NODE GEN | fence NODE GEN CAUSE
//	drain NODE GEN on|off | adopt NODE GEN ADAPTER [TARGET]... | overlay PROVIDER GEN on|off
//	after D | deadline | stop | show | models
func TestScripts(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatal("no scripts", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			got := runScript(t, string(want))
			if *update {
				if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			if got != string(want) {
				t.Errorf("effects differ; got\n%s", got)
			}
		})
	}
}

type scriptRun struct {
	p   *Pool
	cfg Config
	now time.Time
	out strings.Builder
}

func runScript(t *testing.T, text string) string {
	s := &scriptRun{p: New(), now: epoch}
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\n")
		if strings.HasPrefix(line, "\t") {
			continue // an effect: printed anew
		}
		s.out.WriteString(line + "\n")
		words := strings.Fields(line)
		if len(words) == 0 || words[0] == "#" {
			continue
		}
		// Every event is also taken by a clone, which must behave alike.
		clone := s.p.Clone()
		before := s.p
		got := s.command(t, words)
		after := s.p
		s.p = clone
		if again := s.command(t, words); again != got {
			t.Fatalf("%s: the clone differs:\n%s", line, again)
		}
		if string(s.p.AppendKey(nil)) != string(after.AppendKey(nil)) {
			t.Fatalf("%s: the clone's state differs", line)
		}
		_ = before
		s.p = after
		if err := check(s.p); err != nil {
			t.Fatalf("%s: %v", line, err)
		}
		s.out.WriteString(got)
	}
	return s.out.String()
}

func (s *scriptRun) command(t *testing.T, w []string) string {
	num := func(v string) int {
		n, err := strconv.Atoi(v)
		if err != nil {
			t.Fatalf("%v: %v", w, err)
		}
		return n
	}
	dur := func(v string) time.Duration {
		d, err := time.ParseDuration(v)
		if err != nil {
			t.Fatalf("%v: %v", w, err)
		}
		return d
	}
	opts := map[string]string{}
	for _, o := range w[1:] {
		k, v, _ := strings.Cut(o, "=")
		opts[k] = v
	}
	has := func(k string) bool { _, ok := opts[k]; return ok }
	opt := func(k string) int {
		if v := opts[k]; v != "" {
			return num(v)
		}
		return 0
	}
	list := func(k string) []string {
		if opts[k] == "" {
			return nil
		}
		return strings.Split(opts[k], ",")
	}
	gen := func(i int) uint64 { return uint64(num(w[i])) }
	var ev Event
	switch w[0] {
	case "adapter":
		node, name, _ := strings.Cut(w[1], "/")
		s.cfg.Adapters = append(s.cfg.Adapters[:len(s.cfg.Adapters):len(s.cfg.Adapters)], Adapter{
			Node: node, Name: name, Capacity: opt("cap"), Operations: list("ops"),
			Fallback: has("fallback"), Disabled: has("disabled"), Held: has("held"),
		})
		return ""
	case "provider":
		f := strings.SplitN(w[1], "/", 3)
		s.cfg.Providers = append(s.cfg.Providers[:len(s.cfg.Providers):len(s.cfg.Providers)], Provider{
			ID: opts["id"], Node: f[0], Adapter: f[1], Target: f[2], Capacity: opt("cap"),
			LongCapacity: opt("long"), Operations: list("ops"), Disabled: has("disabled"),
		})
		return ""
	case "group":
		g := Group{Name: w[1]}
		for _, c := range w[2:] {
			c, weight, _ := strings.Cut(c, "*")
			id, prio, _ := strings.Cut(c, "@")
			k := Candidate{Provider: id}
			if weight != "" {
				k.Weight = num(weight)
			}
			if prio != "" {
				k.Priority = num(prio)
			}
			g.Candidates = append(g.Candidates, k)
		}
		s.cfg.Groups = append(s.cfg.Groups[:len(s.cfg.Groups):len(s.cfg.Groups)], g)
		return ""
	case "queue":
		s.cfg.Queue = Queue{Depth: opt("depth"), Total: opt("total"), Weights: map[string]int{}}
		if has("wait") {
			s.cfg.Queue.Wait = dur(opts["wait"])
		}
		for _, o := range w[1:] {
			if name, weight, ok := strings.Cut(o, "*"); ok {
				s.cfg.Queue.Weights[name] = num(weight)
			}
		}
		return ""
	case "auto":
		s.cfg.Auto = true
		return ""
	case "reset":
		s.cfg = Config{}
		return ""
	case "apply":
		ev = SetConfig(s.cfg)
	case "enqueue":
		r := &Request{
			Waiter: WaiterID(num(w[1])), Model: w[2], Principal: w[3], Operation: opts["op"],
			Long: has("long"), Avoid: list("avoid"),
		}
		if has("wait") {
			r.MaxWait = dur(opts["wait"])
		}
		ev = Enqueue(r)
	case "cancel":
		ev = CancelWaiter(WaiterID(num(w[1])))
	case "return":
		how := map[string]Return{"terminal": ByTerminal, "not_sent": ByNotSent, "cancel_bound": ByCancelBound}[w[2]]
		ev = ReturnSlot(uint64(num(w[1])), how)
	case "activate":
		ev = Activate(w[1], gen(2))
	case "fence":
		ev = Fence(w[1], gen(2), w[3])
	case "drain":
		ev = SetDraining(w[1], gen(2), w[3] == "on")
	case "adopt":
		ev = AdoptTargets(w[1], gen(2), w[3], w[4:])
	case "overlay":
		ev = Overlay(w[1], gen(2), w[3] == "on")
	case "after":
		now := s.now.Add(dur(w[1]))
		if s.p.Deadline().IsZero() || s.p.Deadline().After(now) {
			return fmt.Sprintf("\tdeadline %s\n", s.in(s.p.Deadline()))
		}
		return s.print(s.p.Step(now, DeadlinePassed(), nil))
	case "stop":
		ev = Stopping()
	case "models":
		var b strings.Builder
		for _, m := range s.p.Models() {
			fmt.Fprintf(&b, "\t%s since %s\n", m.Name, s.in(m.Since))
		}
		return b.String()
	case "show":
		return s.show()
	default:
		t.Fatalf("unknown command %v", w)
	}
	return s.print(s.p.Step(s.now, ev, nil))
}

func (s *scriptRun) in(at time.Time) string {
	if at.IsZero() {
		return "never"
	}
	return at.Sub(epoch).String()
}

func (s *scriptRun) print(effects []Effect) string {
	var b strings.Builder
	for _, e := range effects {
		switch e.Kind {
		case Granted:
			fmt.Fprintf(&b, "\tgranted %d: slot %d %s gen %d", e.Waiter, e.Slot.ID, e.Slot.Provider, e.Slot.Gen)
			if e.Slot.Long {
				b.WriteString(" long")
			}
			b.WriteString("\n")
		case Refused:
			fmt.Fprintf(&b, "\trefused %d: %v\n", e.Waiter, e.Err)
		case EndAttempt:
			fmt.Fprintf(&b, "\tend_attempt slot %d: %s\n", e.Slot.ID, e.Cause)
		case SlotReturned:
			fmt.Fprintf(&b, "\treturned slot %d: %s\n", e.Slot.ID, e.How)
		case CatalogChanged:
			b.WriteString("\tcatalog_changed\n")
		}
	}
	return b.String()
}

func (s *scriptRun) show() string {
	var b strings.Builder
	snap := s.p.Snapshot()
	for _, v := range snap.Providers {
		fmt.Fprintf(&b, "\t%s %s/%s %d/%d long %d/%d queued %d/%d of %s\n", v.ID, v.Status, v.Health,
			v.InFlight, v.Capacity, v.LongInFlight, v.LongCapacity, v.Queued, v.LongQueued, strings.Join(v.Models, " "))
	}
	fmt.Fprintf(&b, "\twaiting %d held %d\n", snap.Waiting, snap.Held)
	return b.String()
}
