package pool

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/iop-fabric/iop/internal/script"
)

var epoch = time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)

// A script is lines of intent (#), events, and indented effects. Configuration
// lines collect until apply.
//
//	adapter NODE/NAME [cap=N] [fallback] [disabled] [held]
//	provider NODE/ADAPTER/TARGET [id=ID] [cap=N] [long=N from=TOKENS] [ops=a,b] [disabled]
//	group NAME PROVIDER[@PRIORITY][*WEIGHT]...
//	queue [depth=N] [total=N] [wait=D] [PRINCIPAL*WEIGHT]
//	auto | apply | reset
//	enqueue ID MODEL PRINCIPAL [op=OP] [tokens=N] [affinity=N] [avoid=P,Q] [wait=D]
//	cancel ID | return SLOT HOW | activate NODE GEN | fence NODE GEN CAUSE
//	drain NODE GEN on|off | adopt NODE GEN ADAPTER [TARGET]... | overlay PROVIDER GEN on|off
//	after D (what would be due then) | pass D | deadline | stop | show | models
func TestScripts(t *testing.T) {
	script.Run(t, func() script.Event { return (&scriptRun{p: New(), now: epoch}).event })
}

type scriptRun struct {
	p   *Pool
	cfg Config
	now time.Time
}

// event is also taken by a clone, which must behave alike.
func (s *scriptRun) event(t *testing.T, words []string) []string {
	if words[0] == "pass" {
		d, err := time.ParseDuration(words[1])
		if err != nil {
			t.Fatal(err)
		}
		s.now = s.now.Add(d)
		return nil
	}
	clone := s.p.Clone()
	got := s.command(t, words)
	after := s.p
	s.p = clone
	if again := s.command(t, words); !slices.Equal(again, got) {
		t.Fatalf("%v: the clone differs:\n%q", words, again)
	}
	if string(s.p.AppendKey(nil)) != string(after.AppendKey(nil)) {
		t.Fatalf("%v: the clone's state differs", words)
	}
	s.p = after
	if err := check(s.p); err != nil {
		t.Fatalf("%v: %v", words, err)
	}
	return got
}

func (s *scriptRun) command(t *testing.T, w []string) []string {
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
		return nil
	case "provider":
		f := strings.SplitN(w[1], "/", 3)
		s.cfg.Providers = append(s.cfg.Providers[:len(s.cfg.Providers):len(s.cfg.Providers)], Provider{
			ID: opts["id"], Node: f[0], Adapter: f[1], Target: f[2], Capacity: opt("cap"),
			LongCapacity: opt("long"), LongThreshold: int64(opt("from")), Operations: list("ops"), Disabled: has("disabled"),
		})
		return nil
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
		return nil
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
		return nil
	case "auto":
		s.cfg.Auto = true
		return nil
	case "reset":
		s.cfg = Config{}
		return nil
	case "apply":
		ev = SetConfig(s.cfg)
	case "enqueue":
		r := &Request{
			Waiter: WaiterID(num(w[1])), Model: w[2], Principal: w[3], Operation: opts["op"],
			PromptTokens: int64(opt("tokens")), Affinity: uint64(opt("affinity")), Avoid: list("avoid"),
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
			return []string{"deadline " + s.in(s.p.Deadline())}
		}
		return s.print(s.p.Step(now, DeadlinePassed(), nil))
	case "stop":
		ev = Stopping()
	case "models":
		var out []string
		for _, m := range s.p.Models() {
			out = append(out, fmt.Sprintf("%s since %s", m.Name, s.in(m.Since)))
		}
		return out
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

func (s *scriptRun) print(effects []Effect) (out []string) {
	for _, e := range effects {
		switch e.Kind {
		case Granted:
			granted := fmt.Sprintf("granted %d: slot %d %s gen %d", e.Waiter, e.Slot.ID, e.Slot.Provider, e.Slot.Gen)
			if e.Slot.Long {
				granted += " long"
			}
			out = append(out, granted)
		case Refused:
			out = append(out, fmt.Sprintf("refused %d: %v", e.Waiter, e.Err))
		case EndAttempt:
			out = append(out, fmt.Sprintf("end_attempt slot %d: %s", e.Slot.ID, e.Cause))
		case SlotReturned:
			out = append(out, fmt.Sprintf("returned slot %d: %s", e.Slot.ID, e.How))
		case CatalogChanged:
			out = append(out, "catalog_changed")
		}
	}
	return out
}

func (s *scriptRun) show() (out []string) {
	snap := s.p.Snapshot()
	for _, v := range snap.Providers {
		out = append(out, fmt.Sprintf("%s %s/%s %d/%d long %d/%d queued %d/%d of %s", v.ID, v.Status, v.Health,
			v.InFlight, v.Capacity, v.LongInFlight, v.LongCapacity, v.Queued, v.LongQueued, strings.Join(v.Models, " ")))
	}
	return append(out, fmt.Sprintf("waiting %d held %d", snap.Waiting, snap.Held))
}
