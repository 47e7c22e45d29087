package history

import "fmt"

// Counts are what histories showed, so that rules that held against nothing are seen.
type Counts struct {
	Events, Requests, Runs, Frames, Bytes      int64
	Sessions, Connected, Fences, Stale         int64
	Taken, FencedSlots, Unanswered             int64
	Faults, FaultsHit                          int64 // faults; those that met an open request
	Redispatched, Resent                       int64
	OKCalm, EndedCalm, OKFaulted, EndedFaulted int64 // outcomes, by whether a fault went on meanwhile
	Failed, Unknown                            int64
}

func (c *Counts) ended(faulted, ok bool) {
	n := int64(0)
	if ok {
		n = 1
	}
	if faulted {
		c.EndedFaulted++
		c.OKFaulted += n
	} else {
		c.EndedCalm++
		c.OKCalm += n
	}
}

// Add sums.
func (c *Counts) Add(o Counts) {
	c.Events += o.Events
	c.Requests += o.Requests
	c.Runs += o.Runs
	c.Frames += o.Frames
	c.Bytes += o.Bytes
	c.Sessions += o.Sessions
	c.Connected += o.Connected
	c.Fences += o.Fences
	c.Stale += o.Stale
	c.Taken += o.Taken
	c.FencedSlots += o.FencedSlots
	c.Unanswered += o.Unanswered
	c.Faults += o.Faults
	c.FaultsHit += o.FaultsHit
	c.Redispatched += o.Redispatched
	c.Resent += o.Resent
	c.OKCalm += o.OKCalm
	c.EndedCalm += o.EndedCalm
	c.OKFaulted += o.OKFaulted
	c.EndedFaulted += o.EndedFaulted
	c.Failed += o.Failed
	c.Unknown += o.Unknown
}

// Floors are what must have been seen for the counts to mean something; a share is of
// the requests that ended, knowing how.
type Floors struct {
	OKCalm, OKFaulted                                                     float64
	FaultsHit, Resent, Redispatched, Fences, FencedSlots, Stale, Unknowns int64
}

// Void says what the counts lack.
func (c Counts) Void(f Floors) (out []Breach) {
	lack := func(ok bool, format string, args ...any) {
		if !ok {
			out = append(out, Breach{Rule: "VOID", What: fmt.Sprintf(format, args...)})
		}
	}
	share := func(what string, ok, of int64, floor float64) {
		lack(floor == 0 || float64(ok) >= floor*float64(of) && of > 0, "%d of %d requests are ok %s", ok, of, what)
	}
	share("without a fault", c.OKCalm, c.EndedCalm, f.OKCalm)
	share("beside faults", c.OKFaulted, c.EndedFaulted, f.OKFaulted)
	for _, x := range []struct {
		what      string
		got, want int64
	}{
		{"faults met an open request", c.FaultsHit, f.FaultsHit},
		{"frames were sent again", c.Resent, f.Resent},
		{"requests were dispatched again", c.Redispatched, f.Redispatched},
		{"sessions were fenced", c.Fences, f.Fences},
		{"slots came back by a fence", c.FencedSlots, f.FencedSlots},
		{"messages were stale", c.Stale, f.Stale},
		{"outcomes are unknown", c.Unknown, f.Unknowns},
	} {
		lack(x.got >= x.want, "%d %s, and %d should", x.got, x.what, x.want)
	}
	return out
}
