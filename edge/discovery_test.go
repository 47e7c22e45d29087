package edge

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/iop-fabric/iop/edge/dispatch"
	"github.com/iop-fabric/iop/wire"
)

// listRunner answers each model list with the next of its answers.
type listRunner struct {
	answers  []listAnswer
	progress bool // the adapter answers other requests
}

func (r *listRunner) Progresses(string, string, time.Time) bool { return r.progress }

type listAnswer struct {
	res    dispatch.Result
	status int
	body   string
}

func (r *listRunner) Do(_ context.Context, _ dispatch.Attempt, w dispatch.Writer) dispatch.Result {
	a := r.answers[0]
	r.answers = r.answers[1:]
	if a.status != 0 {
		_ = w.Start(a.status, nil)
	}
	if err := w.Body([]byte(a.body)); err != nil {
		a.res.Err = wire.Errorf(wire.Provider, "%w", err)
	}
	return a.res
}

// A model leaves when its provider says so, or when nobody listens there. What
// goes wrong in the fabric, and a Node that stops, take nothing away: its session's
// end tells, and until then its models keep their callers waiting rather than 404.
//
// Contract: P1 P6 P9 D7
func TestWhatTakesAModelAway(t *testing.T) {
	// What Edge finds itself, and what the Node says.
	own := func(class wire.Class, acked bool) listAnswer {
		return listAnswer{res: dispatch.Result{Err: wire.Errorf(class, "x"), Acked: acked}}
	}
	says := func(class wire.Class) listAnswer {
		return listAnswer{res: dispatch.Result{Err: wire.FromPeer(string(class), "x"), Acked: true}}
	}
	refused := says(wire.Unreachable)
	refused.res.Err.Refused = true
	given := listAnswer{res: dispatch.Result{Acked: true}, status: 200, body: `{"data":[{"id":"m"}]}`}
	busy := listAnswer{res: dispatch.Result{Acked: true}, status: 503, body: `{"error":"busy"}`}
	for name, c := range map[string]struct {
		then []listAnswer
		gone bool
		busy bool // with other requests, which it answers
	}{
		"the broker is away":           {[]listAnswer{own(wire.Unreachable, false)}, false, false},
		"nobody answers for the node":  {slices.Repeat([]listAnswer{own(wire.Unreachable, false)}, 9), false, false},
		"the node's answer is late":    {slices.Repeat([]listAnswer{own(wire.Deadline, true)}, 9), false, false},
		"the node's ack is late":       {slices.Repeat([]listAnswer{own(wire.Deadline, false)}, 9), false, false},
		"the node stops":               {slices.Repeat([]listAnswer{says(wire.Draining)}, 9), false, false},
		"its session ended":            {[]listAnswer{own(wire.SessionEnded, true)}, false, false},
		"its gate is full":             {slices.Repeat([]listAnswer{says(wire.Capacity)}, 9), false, false},
		"nobody listens there":         {[]listAnswer{refused}, true, false},
		"it could not be dialled once": {[]listAnswer{says(wire.Unreachable)}, false, false},
		"it cannot be dialled":         {slices.Repeat([]listAnswer{says(wire.Unreachable)}, 3), true, false},
		"it hung once":                 {[]listAnswer{says(wire.Deadline)}, false, false},
		"it hung twice":                {slices.Repeat([]listAnswer{says(wire.Deadline)}, 2), false, false},
		"it hangs":                     {slices.Repeat([]listAnswer{says(wire.Deadline)}, 3), true, false},
		"it answers everybody else":    {slices.Repeat([]listAnswer{says(wire.Deadline), says(wire.Unreachable)}, 5), false, true},
		"it goes while it answers":     {[]listAnswer{refused}, true, true},
		"it breaks the rules":          {slices.Repeat([]listAnswer{own(wire.Protocol, true)}, 3), true, false},
		"it was busy":                  {[]listAnswer{busy, busy}, false, false},
		"it is busy":                   {[]listAnswer{busy, busy, busy}, true, false},
		"it lists nothing":             {[]listAnswer{{res: dispatch.Result{Acked: true}, status: 200, body: `{"data":[]}`}}, true, false},
		"a list longer than any":       {[]listAnswer{{res: dispatch.Result{Acked: true}, status: 200, body: strings.Repeat("x", listBytes+1)}}, false, false},
	} {
		has := false
		d := newDiscovery(&listRunner{append([]listAnswer{given}, c.then...), c.busy}, nil,
			func(_ string, _ uint64, _ string, targets []string) { has = len(targets) == 1 }, 0, slog.New(slog.DiscardHandler))
		misses := 0
		for range 1 + len(c.then) {
			d.ask(t.Context(), "n", 1, "a", &misses)
		}
		if has == c.gone {
			t.Errorf("%s: the model is there: %v", name, has)
		}
	}
}

// A list of more models than are taken says so.
func TestTooManyModelsAreTold(t *testing.T) {
	var ids []string
	for i := range listModels + 7 {
		ids = append(ids, fmt.Sprintf(`{"id":"m%d"}`, i))
	}
	var log strings.Builder
	n := 0
	d := newDiscovery(&listRunner{answers: []listAnswer{{res: dispatch.Result{Acked: true}, status: 200, body: `{"data":[` + strings.Join(ids, ",") + `]}`}}}, nil,
		func(_ string, _ uint64, _ string, targets []string) { n = len(targets) }, 0, slog.New(slog.NewTextHandler(&log, nil)))
	misses := 0
	d.ask(t.Context(), "n", 1, "a", &misses)
	if n != listModels || !strings.Contains(log.String(), "left_out=7") {
		t.Errorf("%d models, log %s", n, log.String())
	}
}
