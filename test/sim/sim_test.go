package sim

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/iop-fabric/iop/internal/history"
)

var (
	fileFlag  = flag.String("history", "", "with -seed: write the history to this `file`, as lines of JSON")
	seedFlag  = flag.Uint64("seed", 0, "replay this seed with a full trace")
	timeFlag  = flag.Duration("sim", 0, "how long to simulate fresh seeds; 0: a few seeds only")
	firstFlag = flag.Uint64("first", 0, "the first fresh seed; 0: by the clock")
	fewFlag   = flag.Uint64("few", 300, "how many seeds without -sim")
	stopFlag  = flag.Int("stop", 0, "stop after so many failures; 0: do not")
	wantFlag  = flag.Int64("schedules", 0, "how many schedules are to be reached; half of them or fewer is a failure")
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// outcome is what one seed led to.
type outcome struct {
	seed     uint64
	hash     uint64
	breaches []history.Breach
	history  history.Counts
	counts   counts
	took     time.Duration // simulated
}

// simulate plays one seed to its end.
func simulate(seed uint64, trace io.Writer) outcome { return play(seed, trace, nil) }

func play(seed uint64, trace io.Writer, record func(history.Event)) (o outcome) {
	w := newWorld(seed, trace)
	w.record = record
	o.seed = seed
	defer func() {
		if r := recover(); r != nil {
			stack := make([]byte, 8192)
			o.breaches = append(o.breaches, history.Breach{Rule: "PANIC", At: w.now.Sub(epoch), What: fmt.Sprintf("%v\n%s", r, stack[:runtime.Stack(stack, false)])})
		}
	}()
	w.build()
	w.run()
	w.event(history.Event{Kind: history.End})
	leak := w.leak()
	w.close()
	o.hash, o.breaches, o.history, o.counts, o.took = w.hash, w.checker.Breaches(), w.checker.Counts(), w.counts, w.now.Sub(epoch)
	if leak != "" {
		o.breaches = append(o.breaches, history.Breach{Rule: "LEAK", At: o.took, What: leak})
	}
	return o
}

func report(t *testing.T, o outcome) {
	t.Helper()
	var lines []string
	for _, b := range o.breaches {
		lines = append(lines, b.String())
	}
	t.Errorf("seed %d (make sim SEED=%d shows it):\n%s", o.seed, o.seed, strings.Join(lines, "\n"))
}

func TestReplay(t *testing.T) {
	if *seedFlag == 0 {
		t.Skip("make sim SEED=n")
	}
	var record func(history.Event)
	if *fileFlag != "" {
		f, err := os.Create(*fileFlag)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		enc := json.NewEncoder(f)
		record = func(e history.Event) {
			if err := enc.Encode(e); err != nil {
				t.Error(err)
			}
		}
	}
	o := play(*seedFlag, os.Stdout, record)
	t.Logf("seed %d: hash %x, %v simulated, %+v, %+v", o.seed, o.hash, o.took, o.history, o.counts)
	if len(o.breaches) > 0 {
		report(t, o)
	}
}

// One seed is one history.
func TestSameSeedSameHistory(t *testing.T) {
	for seed := uint64(1); seed <= 40; seed++ {
		a, b := simulate(seed, nil), simulate(seed, nil)
		if a.hash != b.hash {
			t.Errorf("seed %d: %x, then %x", seed, a.hash, b.hash)
		}
	}
}

// A history that was written is judged as it was when it happened.
func TestWrittenHistoryIsJudgedAlike(t *testing.T) {
	var file bytes.Buffer
	enc := json.NewEncoder(&file)
	o := play(7, nil, func(e history.Event) {
		if err := enc.Encode(e); err != nil {
			t.Error(err)
		}
	})
	c := history.NewChecker(history.Options{LiveBound: liveBound})
	if err := history.Read(&file, c.Add); err != nil {
		t.Fatal(err)
	}
	if len(c.Breaches()) > 0 || c.Counts() != o.history {
		t.Errorf("%v\n%+v\n%+v", c.Breaches(), c.Counts(), o.history)
	}
}

var hashPrinted = regexp.MustCompile(`hash [0-9a-f]+`)

// Nor does it hang on the process: hashes and maps are seeded anew in each.
func TestSameSeedInAnotherProcess(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, seed := range []uint64{7, 283} {
		out, err := exec.CommandContext(t.Context(), exe, "-test.run", "^TestReplay$", "-test.v", "-seed", strconv.FormatUint(seed, 10)).Output()
		if err != nil {
			t.Fatal(err)
		}
		if got, want := string(hashPrinted.Find(out)), fmt.Sprintf("hash %x", simulate(seed, nil).hash); got != want {
			t.Errorf("seed %d: %q there, %q here", seed, got, want)
		}
	}
}

// The seeds that once showed a fault.
func TestRegressions(t *testing.T) {
	text, err := os.ReadFile("testdata/seeds.txt")
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range strings.Split(string(text), "\n") {
		line, _, _ = strings.Cut(line, "#")
		if line = strings.TrimSpace(line); line == "" {
			continue
		}
		seed, err := strconv.ParseUint(line, 10, 64)
		if err != nil {
			t.Fatalf("testdata/seeds.txt: %v", err)
		}
		if o := simulate(seed, nil); len(o.breaches) > 0 {
			report(t, o)
		}
	}
}

// floors is what many schedules must show together, or they show nothing.
func floors(schedules int64) history.Floors {
	return history.Floors{
		OKCalm: 0.8, OKFaulted: 0.2,
		FaultsHit: schedules, Resent: schedules, Redispatched: schedules / 10, Fences: schedules / 2,
		FencedSlots: schedules / 10, Stale: schedules / 100, Unknowns: schedules / 20,
	}
}

// Contract: J1 J2 J3 J4 J5 F2 F3 F5 F10 R9 P7 P8 T3 C1
func TestSimulation(t *testing.T) {
	first, next := *firstFlag, atomic.Uint64{}
	if first == 0 && *timeFlag > 0 {
		first = uint64(time.Now().UnixNano()) //nolint:gosec // any will do
	}
	first = max(first, 1)
	began := time.Now()
	var (
		mu        sync.Mutex
		sum       history.Counts
		also      counts
		simulated time.Duration
		schedules int64
		failed    int
		all       sync.WaitGroup
	)
	more := func() (seed uint64, ok bool) {
		n := next.Add(1) - 1
		if *timeFlag > 0 { // from a given first seed on no more than was asked for: everywhere the same
			return first + n, time.Since(began) < *timeFlag && (*firstFlag == 0 || *wantFlag == 0 || n < uint64(*wantFlag)) //nolint:gosec // not negative
		}
		return first + n, n < *fewFlag
	}
	for range runtime.GOMAXPROCS(0) {
		all.Go(func() {
			for {
				seed, ok := more()
				mu.Lock()
				enough := *stopFlag > 0 && failed >= *stopFlag
				mu.Unlock()
				if !ok || enough {
					return
				}
				o := simulate(seed, nil)
				mu.Lock()
				schedules++
				sum.Add(o.history)
				also.steps += o.counts.steps
				also.messages += o.counts.messages
				also.lost += o.counts.lost
				also.duplicated += o.counts.duplicated
				also.late += o.counts.late
				simulated += o.took
				if len(o.breaches) > 0 {
					if failed++; failed <= max(5, *stopFlag) {
						report(t, o)
					}
				}
				mu.Unlock()
			}
		})
	}
	all.Wait()
	took := time.Since(began)
	t.Logf("%d schedules in %v (%.0f/s), seeds from %d; %v simulated, %d failed\n%s", schedules, took.Round(time.Millisecond),
		float64(schedules)/took.Seconds(), first, simulated.Round(time.Second), failed, table(sum, also))
	if *wantFlag > 0 && schedules < *wantFlag/2 {
		t.Errorf("%d schedules, and half of %d is the least", schedules, *wantFlag)
	}
	for _, b := range sum.Void(floors(schedules)) {
		t.Error(b)
	}
}

func table(h history.Counts, c counts) string {
	var b bytes.Buffer
	for _, row := range []struct {
		what string
		n    int64
	}{
		{"steps", c.steps},
		{"events", h.Events},
		{"messages", c.messages},
		{"lost", c.lost},
		{"duplicated", c.duplicated},
		{"late", c.late},
		{"faults", h.Faults},
		{"faults that met a request", h.FaultsHit},
		{"requests", h.Requests},
		{"runs", h.Runs},
		{"dispatched again", h.Redispatched},
		{"frames delivered", h.Frames},
		{"bytes delivered", h.Bytes},
		{"frames sent again", h.Resent},
		{"sessions", h.Sessions},
		{"connected", h.Connected},
		{"fences", h.Fences},
		{"slots", h.Taken},
		{"slots back by a fence", h.FencedSlots},
		{"cancels unanswered", h.Unanswered},
		{"stale messages", h.Stale},
		{"ok without faults", h.OKCalm},
		{"of", h.EndedCalm},
		{"ok beside faults", h.OKFaulted},
		{"of", h.EndedFaulted},
		{"outcomes unknown", h.Unknown},
	} {
		fmt.Fprintf(&b, "%12d %s\n", row.n, row.what)
	}
	return b.String()
}
