package pool

import (
	"container/heap"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// A machine of simulated time: requests come at moments, each holds its place for
// as long as it is served, and what the pool says decides when it begins.

type arrival struct {
	at        time.Time
	principal string
	serve     time.Duration
}

type ending struct {
	at   time.Time
	slot uint64
}

type endings []ending

func (e endings) Len() int           { return len(e) }
func (e endings) Less(i, j int) bool { return e[i].at.Before(e[j].at) }
func (e endings) Swap(i, j int)      { e[i], e[j] = e[j], e[i] }
func (e *endings) Push(x any)        { *e = append(*e, x.(ending)) }
func (e *endings) Pop() any {
	last := (*e)[len(*e)-1]
	*e = (*e)[:len(*e)-1]
	return last
}

// waits runs the arrivals through a pool of 16 places and returns how long each
// principal's requests took from their coming to their end.
func waits(t *testing.T, arrivals []arrival) map[string][]time.Duration {
	p := benchPool(nil)
	slices.SortStableFunc(arrivals, func(a, b arrival) int { return a.at.Compare(b.at) })
	took := map[string][]time.Duration{}
	var busy endings
	follow := func(now time.Time, out []Effect) {
		for _, e := range out {
			switch e.Kind {
			case Granted:
				a := arrivals[e.Waiter-1]
				end := now.Add(a.serve)
				heap.Push(&busy, ending{end, e.Slot.ID})
				took[a.principal] = append(took[a.principal], end.Sub(a.at))
			case Refused:
				t.Fatalf("refused: %v", e.Err)
			default:
			}
		}
	}
	for i, a := range arrivals {
		for len(busy) > 0 && !busy[0].at.After(a.at) {
			e := heap.Pop(&busy).(ending)
			follow(e.at, p.Step(e.at, ReturnSlot(e.slot, ByTerminal), nil))
		}
		follow(a.at, p.Step(a.at, Enqueue(&Request{Waiter: WaiterID(i + 1), Model: "m", Principal: a.principal, MaxWait: defaultWait}), nil))
	}
	for len(busy) > 0 {
		e := heap.Pop(&busy).(ending)
		follow(e.at, p.Step(e.at, ReturnSlot(e.slot, ByTerminal), nil))
	}
	return took
}

func p99(d []time.Duration) time.Duration {
	slices.Sort(d)
	return d[len(d)*99/100]
}

// One principal asks for a hundred times as much as another, and for more than
// there is: the other's slowest requests take no more than twice as long as if it
// were alone.
//
// Contract: Q3
func TestAnUnfairLoadIsItsOwnAffair(t *testing.T) {
	for seed := range uint64(5) {
		rnd := rand.New(rand.NewPCG(seed, 7))
		// 16 places at a mean of a second each: 16 requests a second is all there is.
		serve := func() time.Duration { return time.Duration((0.25 + rnd.ExpFloat64()*0.75) * float64(time.Second)) }
		var quiet, loud []arrival
		for at := 0.0; at < 400; at += rnd.ExpFloat64() / 0.2 { // one in five seconds
			quiet = append(quiet, arrival{epoch.Add(time.Duration(at * float64(time.Second))), "quiet", serve()})
		}
		for at := 0.0; at < 400; at += rnd.ExpFloat64() / 20 { // twenty a second
			loud = append(loud, arrival{epoch.Add(time.Duration(at * float64(time.Second))), "loud", serve()})
		}
		alone := p99(waits(t, slices.Clone(quiet))["quiet"])
		both := waits(t, slices.Concat(quiet, loud))
		t.Logf("alone p99 %v; beside the load %v, the load itself %v", alone, p99(both["quiet"]), p99(both["loud"]))
		if got := p99(both["quiet"]); got > 2*alone {
			t.Errorf("seed %d: the quiet principal's p99 is %v, %v when it is alone", seed, got, alone)
		}
		if len(both["loud"]) != len(loud) || len(both["quiet"]) != len(quiet) {
			t.Errorf("seed %d: %d of %d and %d of %d were served", seed, len(both["loud"]), len(loud), len(both["quiet"]), len(quiet))
		}
	}
}
