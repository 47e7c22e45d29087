package history

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// parse reads a hand-made history: an event a line or between semicolons, its kind and
// key=value; each is a millisecond after the one before, or at=..ms.
func parse(t *testing.T, text string) (all []Event) {
	t.Helper()
	at := int64(0)
	for _, line := range strings.FieldsFunc(text, func(r rune) bool { return r == '\n' || r == ';' }) {
		words := strings.Fields(line)
		if len(words) == 0 {
			continue
		}
		m := map[string]any{"kind": words[0]}
		at += int64(time.Millisecond)
		for _, w := range words[1:] {
			k, v, _ := strings.Cut(w, "=")
			switch n, err := strconv.ParseInt(v, 10, 64); {
			case k == "at" || k == "until":
				d, err := time.ParseDuration(v)
				if err != nil {
					t.Fatal(err)
				}
				if m[k] = int64(d); k == "at" {
					at = int64(d)
				}
			case v == "true":
				m[k] = true
			case err == nil && k != "req" && k != "run":
				m[k] = n
			default:
				m[k] = v
			}
		}
		m["at"] = at
		b, err := json.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		if err := Read(bytes.NewReader(b), func(e Event) { all = append(all, e) }); err != nil {
			t.Fatalf("%s: %v", line, err)
		}
	}
	return all
}

func judge(all []Event, opt Options) *Checker {
	c := NewChecker(opt)
	for _, e := range all {
		c.Add(e)
	}
	return c
}

const (
	// begin is a node that is up and ready, calm its end: a probe, and nothing open.
	begin = `up; capacity provider=p n=1; up node=a; alloc node=a gen=1; register node=a gen=1; ready node=a gen=1; connected node=a gen=1;`
	take  = `take slot=1 provider=p node=a gen=1; dispatch req=q run=r slot=1 node=a gen=1 provider=p;`
	give  = `release slot=1 gen=1 how=terminal;`
	calm  = `invoke req=z node=a probe=true; take slot=9 provider=p node=a gen=1; dispatch req=z run=z1 slot=9 node=a gen=1 provider=p;
	         served run=z1; release slot=9 gen=1 how=terminal; terminal req=z outcome=ok; end`
	// gen2 is the same under the next generation.
	next2 = `alloc node=a gen=2; register node=a gen=2; ready node=a gen=2; connected node=a gen=2;`
	calm2 = `invoke req=z node=a probe=true; take slot=9 provider=p node=a gen=2; dispatch req=z run=z1 slot=9 node=a gen=2 provider=p;
	         served run=z1; release slot=9 gen=2 how=terminal; terminal req=z outcome=ok; end`
	whole = `sent run=r seq=1 n=3 sum=7; frame req=q run=r seq=1 n=3 sum=7; served run=r seq=1 n=3;`
	okay  = `terminal req=q outcome=ok;`
)

var good = map[string]string{
	"nothing happens":                 begin + calm,
	"one answer":                      begin + `invoke req=q;` + take + whole + give + okay + calm,
	"an empty answer":                 begin + `invoke req=q;` + take + `served run=r;` + give + okay + calm,
	"a body that was read":            begin + `invoke req=q n=5 sum=4;` + take + `sent run=r seq=1 n=3 sum=7; frame req=q run=r seq=1 n=3 sum=7; served run=r seq=1 n=3 read=5 sum=4;` + give + okay + calm,
	"a beginning of an answer":        begin + `invoke req=q;` + take + `sent run=r seq=1 n=3 sum=7; sent run=r seq=2 n=3 sum=8; frame req=q run=r seq=1 n=3 sum=7;` + give + `terminal req=q outcome=fail class=provider;` + calm,
	"a part of a part, cut":           begin + `invoke req=q;` + take + `sent run=r seq=1 n=3 sum=7; frame req=q run=r seq=1 n=2 sum=1;` + give + `terminal req=q outcome=fail;` + calm,
	"a provider that goes on":         begin + `invoke req=q;` + take + `terminal req=q outcome=fail class=gone; sent run=r seq=1 n=3 sum=7;` + give + `sent run=r seq=2 n=1 sum=1; served run=r seq=2 n=4;` + calm,
	"refused without a slot":          begin + `invoke req=q; terminal req=q outcome=fail class=queue_full;` + calm,
	"a fence and the next":            begin + `invoke req=q;` + take + `fenced node=a gen=1; release slot=1 gen=1 how=fence; terminal req=q outcome=fail class=session_ended;` + next2 + calm2,
	"dispatched again":                begin + `invoke req=q;` + take + `release slot=1 gen=1 how=terminal; take slot=2 provider=p node=a gen=1; dispatch req=q run=s slot=2 node=a gen=1 provider=p; sent run=s seq=1 n=1 sum=1; frame req=q run=s seq=1 n=1 sum=1; served run=s seq=1 n=1; release slot=2 gen=1 how=terminal;` + okay + calm,
	"the Edge dies":                   begin + `invoke req=q;` + take + `down; terminal req=q outcome=unknown; up; capacity provider=p n=1;` + next2 + calm2,
	"stale and harmless":              begin + `fenced node=a gen=1;` + next2 + `stale node=a gen=1;` + calm2,
	"a late deadline, forgiven":       begin + `invoke req=q until=100ms; terminal req=q outcome=fail at=1100ms;` + calm,
	"a deadline of a paused one":      begin + `invoke req=q until=100ms; paused; resumed at=5s; terminal req=q outcome=fail at=5500ms;` + calm,
	"a fault, and live in time":       begin + `start fault=f; fenced node=a gen=1; stop fault=f; alloc node=a gen=2; register node=a gen=2; ready node=a gen=2; connected node=a gen=2 at=11s;` + calm2,
	"no place after a cancel's bound": begin + `invoke req=q;` + take + `release slot=1 gen=1 how=cancel_bound; ended req=q run=r class=capacity; terminal req=q outcome=fail;` + calm,
	"sure, but for a fault":           begin + `invoke req=q sure=true; start fault=f; stop fault=f; terminal req=q outcome=fail;` + calm,
	"sure, but shortly after a fault": begin + `start fault=f; stop fault=f; invoke req=q sure=true at=11s; terminal req=q outcome=fail;` + calm,
	"cancelled while it is served":    begin + `invoke req=q;` + take + `begin run=r; cancel run=r;` + give + `terminal req=q outcome=fail;` + calm,
	"a node that stays down":          begin + `fenced node=a gen=1; down node=a; end`,
}

var bad = []struct{ rule, name, text string }{
	{"INV1", "two terminals", begin + `invoke req=q;` + take + whole + give + okay + okay + calm},
	{"INV1", "two terminals of two kinds", begin + `invoke req=q; terminal req=q outcome=fail; terminal req=q outcome=unknown;` + calm},
	{"INV1", "a terminal of nobody", begin + `terminal req=q outcome=fail;` + calm},
	{"INV1", "a part after the terminal", begin + `invoke req=q;` + take + whole + give + okay + `frame req=q run=r seq=2 n=1;` + calm},
	{"INV1", "a part of nobody", begin + `frame req=q run=r seq=1 n=1;` + calm},
	{"INV1", "invoked twice", begin + `invoke req=q; invoke req=q; terminal req=q outcome=fail;` + calm},
	{"INV1", "dispatched after the terminal", begin + `invoke req=q; terminal req=q outcome=fail;` + take + give + calm},
	{"INV1", "a run id again", begin + `invoke req=q;` + take + `dispatch req=q run=r slot=1 node=a gen=1 provider=p;` + give + `terminal req=q outcome=fail;` + calm},
	{"INV1", "served twice", begin + `invoke req=q;` + take + whole + `served run=r seq=1 n=3;` + give + okay + calm},
	{"INV1", "an event after the end", begin + calm + `; up`},
	{"INV2", "a part is lost", begin + `invoke req=q;` + take + `sent run=r seq=1 n=1 sum=1; sent run=r seq=2 n=1 sum=2; frame req=q run=r seq=2 n=1 sum=2; served run=r seq=2 n=2;` + give + okay + calm},
	{"INV2", "a part comes twice", begin + `invoke req=q;` + take + `sent run=r seq=1 n=1 sum=1; frame req=q run=r seq=1 n=1 sum=1; frame req=q run=r seq=1 n=1 sum=1;` + give + `terminal req=q outcome=fail;` + calm},
	{"INV2", "parts change places", begin + `invoke req=q;` + take + `sent run=r seq=1 n=1 sum=1; sent run=r seq=2 n=1 sum=2; frame req=q run=r seq=1 n=1 sum=2;` + give + `terminal req=q outcome=fail;` + calm},
	{"INV2", "other bytes", begin + `invoke req=q;` + take + `sent run=r seq=1 n=3 sum=7; frame req=q run=r seq=1 n=3 sum=8;` + give + `terminal req=q outcome=fail;` + calm},
	{"INV2", "more bytes", begin + `invoke req=q;` + take + `sent run=r seq=1 n=3 sum=7; frame req=q run=r seq=1 n=4 sum=7;` + give + `terminal req=q outcome=fail;` + calm},
	{"INV2", "bytes nobody gave", begin + `invoke req=q;` + take + `frame req=q run=r seq=1 n=3 sum=7;` + give + `terminal req=q outcome=fail;` + calm},
	{"INV2", "ok without the last part", begin + `invoke req=q;` + take + `sent run=r seq=1 n=1 sum=1; sent run=r seq=2 n=1 sum=2; frame req=q run=r seq=1 n=1 sum=1; served run=r seq=2 n=2;` + give + okay + calm},
	{"INV2", "ok with half of the last part", begin + `invoke req=q;` + take + `sent run=r seq=1 n=3 sum=7; frame req=q run=r seq=1 n=2 sum=1; served run=r seq=1 n=3;` + give + okay + calm},
	{"INV2", "ok, and its provider is not done", begin + `invoke req=q;` + take + `sent run=r seq=1 n=1 sum=1; frame req=q run=r seq=1 n=1 sum=1;` + give + okay + calm},
	{"INV2", "more after half a part", begin + `invoke req=q;` + take + `sent run=r seq=1 n=3 sum=7; sent run=r seq=2 n=1 sum=2; frame req=q run=r seq=1 n=2 sum=1; frame req=q run=r seq=2 n=1 sum=2;` + give + `terminal req=q outcome=fail;` + calm},
	{"INV2", "parts of two runs", begin + `invoke req=q;` + take + `sent run=r seq=1 n=1 sum=1; frame req=q run=r seq=1 n=1 sum=1; sent run=s seq=1 n=1 sum=1; sent run=s seq=2 n=1 sum=1; frame req=q run=s seq=2 n=1 sum=1;` + give + `terminal req=q outcome=fail;` + calm},
	{"INV2", "dispatched again after a part", begin + `invoke req=q;` + take + `sent run=r seq=1 n=1 sum=1; frame req=q run=r seq=1 n=1 sum=1;` + give + `take slot=2 provider=p node=a gen=1; dispatch req=q run=s slot=2 node=a gen=1 provider=p; release slot=2 gen=1 how=terminal; terminal req=q outcome=fail;` + calm},
	{"INV2", "half of the request was read", begin + `invoke req=q n=5 sum=4;` + take + `served run=r read=4 sum=4;` + give + okay + calm},
	{"INV2", "another request was read", begin + `invoke req=q n=5 sum=4;` + take + `served run=r read=5 sum=3;` + give + okay + calm},
	{"INV2", "the provider skips", begin + `invoke req=q;` + take + `sent run=r seq=2 n=1 sum=1;` + give + `terminal req=q outcome=fail;` + calm},
	{"INV3", "released twice", begin + `invoke req=q;` + take + give + give + `terminal req=q outcome=fail;` + calm},
	{"INV3", "never released", begin + `capacity provider=p n=2; invoke req=q;` + take + `terminal req=q outcome=fail;` + calm},
	{"INV3", "released for another generation", begin + `invoke req=q;` + take + `release slot=1 gen=2 how=terminal; terminal req=q outcome=fail;` + calm},
	{"INV3", "released by nobody", begin + `release slot=5 gen=1 how=terminal;` + calm},
	{"INV3", "taken twice", begin + `capacity provider=p n=2; invoke req=q;` + take + `take slot=1 provider=p node=a gen=1;` + give + `terminal req=q outcome=fail;` + calm},
	{"INV3", "dispatched under no slot", begin + `invoke req=q; dispatch req=q run=r slot=1 node=a gen=1 provider=p; terminal req=q outcome=fail;` + calm},
	{"INV3", "dispatched under another's slot", begin + `invoke req=q; take slot=1 provider=p node=a gen=1; dispatch req=q run=r slot=1 node=b gen=1 provider=p;` + give + `terminal req=q outcome=fail;` + calm},
	{"INV4", "one more than there is room for", begin + `take slot=1 provider=p node=a gen=1; take slot=2 provider=p node=a gen=1; release slot=1 gen=1 how=terminal; release slot=2 gen=1 how=terminal;` + calm},
	{"INV4", "a provider without capacity", begin + `take slot=1 provider=x node=a gen=1; release slot=1 gen=1 how=terminal;` + calm},
	{"INV5", "a grant under a fenced generation", begin + `fenced node=a gen=1; take slot=1 provider=p node=a gen=1; release slot=1 gen=1 how=fence;` + next2 + calm2},
	{"INV5", "a grant before ready", begin + `fenced node=a gen=1; alloc node=a gen=2; take slot=1 provider=p node=a gen=2; release slot=1 gen=2 how=fence; register node=a gen=2; connected node=a gen=2;` + calm2},
	{"INV5", "a terminal returns what was fenced", begin + `invoke req=q;` + take + `fenced node=a gen=1; release slot=1 gen=1 how=terminal; terminal req=q outcome=fail;` + next2 + calm2},
	{"INV5", "a fence returns what lives", begin + `invoke req=q;` + take + `release slot=1 gen=1 how=fence; terminal req=q outcome=fail;` + calm},
	{"INV5", "the next before the fence", begin + next2 + calm2},
	{"INV5", "a fence of another generation", begin + `fenced node=a gen=2;` + next2 + calm2},
	{"INV5", "a stale message changes something", begin + `fenced node=a gen=1;` + next2 + `stale node=a gen=1 changed=true;` + calm2},
	{"INV5", "an old session registers", begin + `fenced node=a gen=1;` + next2 + `register node=a gen=1;` + calm2},
	{"INV6", "connected twice", begin + `fenced node=a gen=1; connected node=a gen=1;` + calm},
	{"INV6", "connected backwards", begin + `fenced node=a gen=1;` + next2 + `fenced node=a gen=2; connected node=a gen=1;` + calm},
	{"INV6", "a generation is given twice", begin + `alloc node=a gen=1;` + calm},
	{"LIVE1", "up and not connected", begin + `fenced node=a gen=1; end`},
	{"LIVE1", "connected too late", begin + `start fault=f; fenced node=a gen=1; stop fault=f; alloc node=a gen=2; register node=a gen=2; ready node=a gen=2; connected node=a gen=2 at=20s;` + calm2},
	{"LIVE2", "never ends", begin + `invoke req=q;` + calm},
	{"LIVE2", "long after its deadline", begin + `invoke req=q until=100ms; terminal req=q outcome=fail at=1200ms;` + calm},
	{"LIVE3", "no probe", begin + `end`},
	{"LIVE3", "a probe before the fault is over", begin + strings.TrimSuffix(calm, "end") + `start fault=f; stop fault=f; end`},
	{"LIVE3", "a probe that failed", begin + `invoke req=z node=a probe=true; terminal req=z outcome=fail; end`},
	{"VOID", "a fault without end", begin + `start fault=f;` + calm},
	{"VOID", "an end without a fault", begin + `stop fault=f;` + calm},
	{"VOID", "an outcome that is none", begin + `invoke req=q; terminal req=q outcome=maybe;` + calm},
	{"VOID", "time goes back", begin + `paused at=1ms;` + calm},
	{"INV1", "a finished run goes on", begin + `invoke req=q;` + take + whole + give + okay + `served run=r seq=1 n=3;` + calm},
	{"INV2", "a finished run runs again", begin + `invoke req=q;` + take + whole + give + okay + `sent run=r seq=1 n=3 sum=7;` + calm},
	{"C1", "served though it was cancelled", begin + `invoke req=q;` + take + `cancel run=r; begin run=r;` + give + `terminal req=q outcome=fail;` + calm},
	{"CLASS", "an honest session is fenced", begin + `fenced node=a gen=1 how=protocol;` + next2 + calm2},
	{"CALM", "refused before any fault", begin + `invoke req=q sure=true; terminal req=q outcome=fail class=unreachable; start fault=f; stop fault=f;` + calm},
	{"CALM", "refused long after a fault", begin + `start fault=f; stop fault=f; invoke req=q sure=true at=13s; terminal req=q outcome=fail;` + calm},
	{"CLASS", "a broken rule", begin + `invoke req=q;` + take + give + `ended req=q run=r class=protocol; terminal req=q outcome=fail;` + calm},
	{"CLASS", "no place under a slot", begin + `invoke req=q;` + take + give + `ended req=q run=r class=capacity; terminal req=q outcome=fail;` + calm},
}

// Contract: J4 T3 P8 F3 F5 R4 F1
func TestGoodHistoriesPass(t *testing.T) {
	for name, text := range good {
		if b := judge(parse(t, text), Options{Never: []string{"protocol"}}).Breaches(); len(b) > 0 {
			t.Errorf("%s: %v", name, b)
		}
	}
}

func TestBadHistoriesAreFlagged(t *testing.T) {
	for _, h := range bad {
		c := judge(parse(t, h.text), Options{Never: []string{"protocol"}})
		if !slices.ContainsFunc(c.Breaches(), func(b Breach) bool { return b.Rule == h.rule }) {
			t.Errorf("%s: %s is broken, found %v", h.name, h.rule, c.Breaches())
		}
	}
	rules := map[string]int{}
	for _, h := range bad {
		rules[h.rule]++
	}
	t.Logf("%d bad histories %v, %d good ones", len(bad), rules, len(good))
}

// The same history is good or bad by what its faults were.
func TestOutlivedFaults(t *testing.T) {
	text := begin + `invoke req=q sure=true; start fault=f; stop fault=f; terminal req=q outcome=fail;` + calm
	if b := judge(parse(t, text), Options{Outlived: true}).Breaches(); len(b) != 1 || b[0].Rule != "J5" {
		t.Error(b)
	}
	if b := judge(parse(t, strings.Replace(text, "sure=true", "", 1)), Options{Outlived: true}).Breaches(); len(b) != 0 {
		t.Error(b)
	}
}

// What callers and providers alone recorded knows no slots, and no nodes but those it names.
func TestPartialHistories(t *testing.T) {
	for name, c := range map[string]struct{ rule, text string }{
		"whole":   {"", `invoke req=q; sent run=q seq=1 n=3 sum=7; served run=q seq=1 n=3; frame req=q run=q seq=1 n=3 sum=7; terminal req=q outcome=ok; end`},
		"other":   {"INV2", `invoke req=q; sent run=q seq=1 n=3 sum=7; served run=q seq=1 n=3; frame req=q run=q seq=1 n=3 sum=9; terminal req=q outcome=ok; end`},
		"missing": {"INV2", `invoke req=q; sent run=q seq=1 n=3 sum=7; served run=q seq=1 n=3; terminal req=q outcome=ok; end`},
		"open":    {"LIVE2", `invoke req=q; end`},
		"a node": {"", `up node=a; connected node=a gen=1; start fault=f; resent n=5; fenced node=a gen=1; stop fault=f; connected node=a gen=2;
			invoke req=z node=a probe=true; dispatch req=z run=z1 node=a; served run=z1; terminal req=z outcome=ok; end`},
		"a node that is gone": {"LIVE1", `up node=a; connected node=a gen=1; start fault=f; fenced node=a gen=1; stop fault=f; end`},
		"a node without work": {"LIVE3", `up node=a; connected node=a gen=1; start fault=f; stop fault=f; end`},
	} {
		b := judge(parse(t, c.text), Options{Partial: true}).Breaches()
		if (c.rule == "") != (len(b) == 0) || (c.rule != "" && b[0].Rule != c.rule) {
			t.Errorf("%s: %v", name, b)
		}
	}
}

func TestVoid(t *testing.T) {
	floors := Floors{OKCalm: 0.8, OKFaulted: 0.2, FaultsHit: 1, Resent: 1, Redispatched: 1, Fences: 1, FencedSlots: 1, Stale: 1, Unknowns: 1}
	full := Counts{OKCalm: 8, EndedCalm: 10, OKFaulted: 2, EndedFaulted: 10, FaultsHit: 1, Resent: 1, Redispatched: 1, Fences: 1, FencedSlots: 1, Stale: 1, Unknown: 1}
	if b := full.Void(floors); len(b) != 0 {
		t.Error(b)
	}
	for i, poor := range []func(*Counts){
		func(c *Counts) { c.OKCalm-- }, func(c *Counts) { c.OKFaulted-- }, func(c *Counts) { c.FaultsHit-- }, func(c *Counts) { c.Resent-- },
		func(c *Counts) { c.Redispatched-- }, func(c *Counts) { c.Fences-- }, func(c *Counts) { c.FencedSlots-- },
		func(c *Counts) { c.Stale-- }, func(c *Counts) { c.Unknown-- }, func(c *Counts) { c.EndedCalm, c.OKCalm = 0, 0 },
	} {
		c := full
		if poor(&c); len(c.Void(floors)) != 1 {
			t.Errorf("%d: %v", i, c.Void(floors))
		}
	}
	if c := judge(parse(t, `resent run=r; resent n=5`), Options{Partial: true}).Counts(); c.Resent != 6 {
		t.Errorf("%+v", c)
	}
	if c := judge(parse(t, good["dispatched again"]), Options{}).Counts(); c.Redispatched != 1 || c.Runs != 3 || c.Taken != 3 || c.OKCalm != 2 {
		t.Errorf("%+v", c)
	}
}

func TestFilesAreReadAsWritten(t *testing.T) {
	var file bytes.Buffer
	w := NewWriter(&file)
	all := parse(t, good["a fence and the next"])
	for _, e := range all {
		w.Add(e)
	}
	if w.Err() != nil {
		t.Fatal(w.Err())
	}
	i := 0
	if err := Read(&file, func(e Event) {
		all[i].At = e.At // the writer's
		if e != all[i] {
			t.Errorf("%+v, written was %+v", e, all[i])
		}
		i++
	}); err != nil || i != len(all) {
		t.Error(i, err)
	}
	for in, want := range map[string]string{
		"{\"at\":1,\"kind\":\"up\"}\nnonsense": "line 2",
		`{"at":1,"kind":"upp"}`:                `no kind "upp"`,
		`{"at":"x","kind":"up"}`:               "line 1",
		strings.Repeat("x", maxLine+1):         "too long",
	} {
		if err := Read(strings.NewReader(in), func(Event) {}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.30s: %v", in, err)
		}
	}
}

// However a stream is cut into writes, its parts are the same.
func TestPartsOfAStream(t *testing.T) {
	stream := bytes.Repeat([]byte("0123456789"), 333)
	cut := func(n int) (out string) {
		p := Parts{Report: func(seq uint64, n int64, sum uint32) { out += fmt.Sprintln(seq, n, sum) }}
		for rest := stream; len(rest) > 0; {
			k := min(n, len(rest))
			if m, err := p.Write(rest[:k]); m != k || err != nil {
				t.Fatal(m, err)
			}
			rest = rest[k:]
		}
		if seq, total := p.Close(); seq != 4 || total != int64(len(stream)) {
			t.Errorf("%d parts, %d bytes", seq, total)
		}
		return out
	}
	whole := cut(len(stream))
	for _, n := range []int{1, 7, PartSize - 1, PartSize, PartSize + 1} {
		if got := cut(n); got != whole {
			t.Errorf("in writes of %d:\n%swant\n%s", n, got, whole)
		}
	}
}
