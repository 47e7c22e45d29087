package httpapi

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/edge/dispatch"
	"github.com/iop-fabric/iop/edge/pool"
	"github.com/iop-fabric/iop/wire"
)

type answerFunc = func(context.Context, dispatch.Attempt, dispatch.Writer) dispatch.Result

// choosing has as many providers as answers, p1 first, each of which answers with
// its own.
func choosing(t *testing.T, answers []answerFunc, change ...func(*Config)) *fixture {
	f := newFixture(t, append([]func(*Config){func(c *Config) {
		c.RetryOn, c.OptInHeaders = configs.Statuses{{First: 429, Last: 429}, {First: 500, Last: 599}}, true
	}}, change...)...)
	f.pool.acquire = func(_ context.Context, w Want) (Grant, error) {
		n := len(w.Avoid)
		if n == len(answers) {
			return Grant{}, pool.ErrNoProvider
		}
		return Grant{Slot: pool.Slot{ID: uint64(n + 1), Provider: fmt.Sprint("p", n+1), Node: fmt.Sprint("n", n+1), Target: "t"}, Others: len(answers) - n - 1}, nil
	}
	f.runner.answer = func(ctx context.Context, a dispatch.Attempt, w dispatch.Writer) dispatch.Result {
		return answers[a.Slot.ID-1](ctx, a, w)
	}
	return f
}

func (f *fixture) attemptsOf(class string) float64 {
	f.Helper()
	return testutil.ToFloat64(f.series("iop_edge_http_attempts_total", map[string]string{"class": class}))
}

// refusal answers as a provider that is overloaded, with a trailer.
func overloadedFor(seconds, body string) answerFunc {
	return func(ctx context.Context, a dispatch.Attempt, w dispatch.Writer) dispatch.Result {
		res := says(503, fields("Content-Type", "application/json", "Retry-After", seconds, "X-Own", "a", "X-Own", "b"), body[:2], body[2:])(ctx, a, w)
		_ = w.Trailer(fields("X-Sum", "1"))
		return res
	}
}

func unreachable(context.Context, dispatch.Attempt, dispatch.Writer) dispatch.Result {
	return dispatch.Result{Err: wire.Errorf(wire.Unreachable, "refused")}
}

// Contract: Q5 H6 E12
func TestABusyProvidersAnswerIsGivenUpForABetterOne(t *testing.T) {
	f := choosing(t, []answerFunc{overloadedFor("7", "busy"), says(200, fields("Content-Type", "text/plain"), "good")})
	resp, body := f.chat(plainChat)
	if resp.StatusCode != 200 || body != "good" || resp.Header.Get("Retry-After") != "" || resp.Header.Get("X-Own") != "" || len(resp.Trailer) != 0 {
		t.Errorf("%d %q %v", resp.StatusCode, body, resp.Header)
	}
	if resp.Header.Get("X-Iop-Provider") != "p2" || resp.Header.Get("X-Iop-Attempts") != "2" {
		t.Errorf("%v", resp.Header)
	}
	all := f.runner.all()
	if len(all) != 2 || all[0].RunID == all[1].RunID || all[0].body != all[1].body || !reflect.DeepEqual(f.pool.wants[1].Avoid, []string{"p1"}) || f.pool.wants[1].MaxWait != retryWait {
		t.Errorf("%+v %+v", all, f.pool.wants)
	}
	if l := f.logged(1); l["attempts"] != 2.0 || l["provider"] != "p2" || l["class"] != "ok" {
		t.Errorf("logged %v", l)
	}
	if p, ok := f.attemptsOf("provider"), f.attemptsOf("ok"); p != 1 || ok != 1 {
		t.Errorf("counted %v and %v", p, ok)
	}
}

// Contract: Q5 T4
func TestA30TheLastAnswerIsTheCallersUnchanged(t *testing.T) {
	cutShort := func(ctx context.Context, a dispatch.Attempt, w dispatch.Writer) dispatch.Result {
		res := says(503, fields("Content-Length", "100"), "half")(ctx, a, w)
		res.Err = wire.Errorf(wire.Provider, "cut")
		return res
	}
	malformed := func(ctx context.Context, a dispatch.Attempt, w dispatch.Writer) dispatch.Result {
		res := says(503, nil, "half")(ctx, a, w)
		_ = w.Trailer(fields("X Y", "1"))
		return res
	}
	for name, c := range map[string]struct {
		answers        []answerFunc
		tries          int
		from, body     string
		status         int
		seconds, class string
	}{
		"nobody else at first":        {[]answerFunc{overloadedFor("7", "first")}, 1, "p1", "first", 503, "7", "ok"},
		"the second is busy, too":     {[]answerFunc{overloadedFor("1", "first"), overloadedFor("30", "second")}, 2, "p2", "second", 503, "30", "ok"},
		"three, and there are more":   {[]answerFunc{overloadedFor("1", "first"), overloadedFor("2", "second"), overloadedFor("3", "third"), says(200, nil, "no")}, 3, "p3", "third", 503, "3", "ok"},
		"the second is unreachable":   {[]answerFunc{overloadedFor("7", "first"), unreachable}, 2, "p1", "first", 503, "7", "ok"},
		"and the third, too":          {[]answerFunc{overloadedFor("7", "first"), unreachable, unreachable}, 3, "p1", "first", 503, "7", "ok"},
		"the first was unreachable":   {[]answerFunc{unreachable, overloadedFor("7", "second")}, 2, "p2", "second", 503, "7", "ok"},
		"the second is not retried":   {[]answerFunc{overloadedFor("7", "first"), says(400, fields("Retry-After", ""), "no such thing")}, 2, "p2", "no such thing", 400, "", "ok"},
		"the second is broken":        {[]answerFunc{overloadedFor("7", "first"), says(200, fields("Content-Length", "x"), "second")}, 2, "p1", "first", 503, "7", "ok"},
		"the first is cut":            {[]answerFunc{cutShort, overloadedFor("7", "second")}, 2, "p2", "second", 503, "7", "ok"},
		"the first is malformed":      {[]answerFunc{malformed, overloadedFor("7", "second")}, 2, "p2", "second", 503, "7", "ok"},
		"shorter than it says":        {[]answerFunc{says(503, fields("Content-Length", "9"), "four"), overloadedFor("7", "second")}, 2, "p2", "second", 503, "7", "ok"},
		"only a part, and no other":   {[]answerFunc{says(503, fields("Content-Length", "9"), "four"), unreachable}, 2, "", "", 502, "", "unreachable"},
		"the first is malformed, too": {[]answerFunc{says(503, fields("X Y", "1"), "x"), says(200, nil, "second")}, 1, "", "", 502, "", "protocol"},
	} {
		t.Run(name, func(t *testing.T) {
			f := choosing(t, c.answers)
			resp, body := f.chat(plainChat)
			if n := len(f.runner.all()); n != c.tries {
				t.Fatalf("%d attempts, want %d", n, c.tries)
			}
			l := f.logged(1)
			if l["class"] != c.class || l["status"] != float64(c.status) {
				t.Errorf("logged %v", l)
			}
			if c.from == "" {
				f.wantError(resp, body, c.status, table[reason(c.class)].code)
				return
			}
			if resp.StatusCode != c.status || body != c.body || resp.Header.Get("Retry-After") != c.seconds {
				t.Errorf("%d %q %v", resp.StatusCode, body, resp.Header)
			}
			if got := resp.Header.Get("X-Iop-Provider"); got != c.from || l["provider"] != c.from {
				t.Errorf("from %q, logged %v", got, l["provider"])
			}
			if c.status == 503 && (len(resp.Header["X-Own"]) != 2 || resp.Trailer.Get("X-Sum") != "1" || resp.Header.Get("X-Request-Id") == "") {
				t.Errorf("%v, trailer %v", resp.Header, resp.Trailer)
			}
		})
	}
}

// Contract: Q5
func TestTheFirstAnswerStandsWhenTheOthersAreGone(t *testing.T) {
	f := choosing(t, []answerFunc{overloadedFor("7", "first")})
	acquire := f.pool.acquire
	f.pool.acquire = func(ctx context.Context, w Want) (Grant, error) {
		if len(w.Avoid) > 0 {
			return Grant{}, pool.ErrWaitExpired
		}
		g, err := acquire(ctx, w)
		g.Others = 1
		return g, err
	}
	resp, body := f.chat(plainChat)
	if resp.StatusCode != 503 || body != "first" || resp.Header.Get("Retry-After") != "7" || resp.Trailer.Get("X-Sum") != "1" || len(f.pool.wants) != 2 {
		t.Errorf("%d %q %v, asked %d times", resp.StatusCode, body, resp.Header, len(f.pool.wants))
	}
	if l := f.logged(1); l["attempts"] != 1.0 || l["status"] != 503.0 || l["class"] != "ok" || l["bytes_out"] != 5.0 {
		t.Errorf("logged %v", l)
	}
}

// Only an answer whose status says so, and for which there is somebody else, is
// kept back, and none that is long.
// Contract: Q5 E4 T4
func TestWhatIsNotKeptBack(t *testing.T) {
	for name, c := range map[string]struct {
		status int
		others int
		tries  int
		size   int
		change func(*Config)
	}{
		"good":                   {200, 1, 1, 4, func(*Config) {}},
		"not asked for":          {404, 1, 1, 4, func(*Config) {}},
		"nobody else":            {503, 0, 1, 4, func(*Config) {}},
		"nothing is asked for":   {503, 1, 1, 4, func(c *Config) { c.RetryOn = nil }},
		"the model says nothing": {503, 1, 1, 4, func(c *Config) { c.Models = []configs.ModelGroup{{Name: "tiny:latest", RetryOn: configs.Statuses{}}} }},
		"the last attempt":       {503, 1, maxAttempts, 4, func(*Config) {}},
		"long":                   {503, 1, 1, maxHeld + 1, func(*Config) {}},
	} {
		t.Run(name, func(t *testing.T) {
			read := make(chan struct{})
			var f *fixture
			f = choosing(t, []answerFunc{func(_ context.Context, _ dispatch.Attempt, w dispatch.Writer) dispatch.Result {
				if len(f.runner.all()) < c.tries {
					return unreachable(t.Context(), dispatch.Attempt{}, nil)
				}
				_ = w.Start(c.status, fields("X-Own", "a"))
				_ = w.Body([]byte(strings.Repeat("x", c.size)))
				_ = w.Flush()
				await(t, read, "the caller to have read it")
				_ = w.Body([]byte("end"))
				return dispatch.Result{Started: true}
			}}, c.change)
			acquire := f.pool.acquire
			f.pool.acquire = func(ctx context.Context, w Want) (Grant, error) {
				g, err := acquire(ctx, Want{})
				g.Others = c.others
				return g, err
			}
			conn, r := f.raw()
			f.post(conn, plainChat)
			resp, err := http.ReadResponse(r, nil)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			if _, err := io.ReadFull(resp.Body, make([]byte, c.size)); err != nil {
				t.Fatal(err)
			}
			close(read)
			b, err := io.ReadAll(resp.Body)
			if err != nil || string(b) != "end" || resp.StatusCode != c.status || resp.Header.Get("X-Own") != "a" {
				t.Errorf("%d %q %v %v", resp.StatusCode, b, resp.Header, err)
			}
			if n := len(f.runner.all()); n != c.tries {
				t.Errorf("%d attempts", n)
			}
		})
	}
}

// Contract: Q5
func TestAModelsOwnPolicyGoesBeforeTheEdges(t *testing.T) {
	p := newRetryPolicy(configs.Statuses{{First: 429, Last: 429}}, []configs.ModelGroup{
		{Name: "silent"}, {Name: "none", RetryOn: configs.Statuses{}}, {Name: "own:latest", RetryOn: configs.Statuses{{First: 500, Last: 599}}},
	})
	for model, want := range map[string][2]bool{"silent": {true, false}, "other": {true, false}, "none": {false, false}, "own": {false, true}, "own:latest": {false, true}} {
		if got := [2]bool{p.on(model).Has(429), p.on(model).Has(503)}; got != want {
			t.Errorf("%s: %v", model, got)
		}
	}
}

// A refusal whose rest does not come keeps nobody from the provider that is free.
//
// Contract: Q5 H6
func TestAnAnswerThatDoesNotEndIsNotKeptBackForEver(t *testing.T) {
	for name, rest := range map[string]string{"silence": "", "too much, too late": strings.Repeat("x", maxHeld)} {
		for second, want := range map[string]struct {
			answer answerFunc
			status int
		}{"good": {says(200, nil, "good"), 200}, "unreachable": {unreachable, 502}} {
			t.Run(name+", then "+second, func(t *testing.T) {
				var begun, ended time.Time
				answers := map[uint64]answerFunc{1: func(ctx context.Context, _ dispatch.Attempt, w dispatch.Writer) dispatch.Result {
					begun = time.Now()
					_ = w.Start(429, nil)
					_ = w.Body([]byte("x"))
					select {
					case <-ctx.Done():
					case <-time.After(time.Hour):
						return dispatch.Result{Started: true, Err: wire.Errorf(wire.Deadline, "late")}
					}
					ended = time.Now()
					if rest == "" {
						return dispatch.Result{Started: true, Err: wire.AsError(context.Cause(ctx))}
					}
					if w.Body([]byte(rest)) == nil {
						t.Error("was taken")
					}
					return dispatch.Result{Started: true, Err: wire.Errorf(wire.Cancelled, "caller gone")}
				}, 2: want.answer}
				fp := &fakePool{acquire: func(_ context.Context, w Want) (Grant, error) {
					id := uint64(len(w.Avoid) + 1)
					if id > 2 {
						return Grant{}, pool.ErrNoProvider
					}
					return Grant{Slot: pool.Slot{ID: id, Provider: fmt.Sprint("p", id), Node: "n", Target: "t"}, Others: int(2 - id)}, nil
				}}
				inBubbleWith(t, Config{RetryOn: configs.Statuses{{First: 429, Last: 429}}}, fp, func(t *testing.T, p *pipes, runner *fakeRunner) {
					runner.answer = func(ctx context.Context, a dispatch.Attempt, w dispatch.Writer) dispatch.Result {
						return answers[a.Slot.ID](ctx, a, w)
					}
					conn := p.dial()
					defer conn.Close()
					if resp, body := callAs(t, conn, "/v1/chat/completions", plainChat); resp.StatusCode != want.status {
						t.Errorf("%d %q", resp.StatusCode, body)
					}
					if took := ended.Sub(begun); took != heldWait || len(runner.all()) != 2 {
						t.Errorf("given up after %v, %d attempts", took, len(runner.all()))
					}
				})
			})
		}
	}
}

// Contract: E5 Q5
func TestACallerWhoLeavesGetsNoOtherAttempt(t *testing.T) {
	began := make(chan struct{})
	f := choosing(t, []answerFunc{func(ctx context.Context, a dispatch.Attempt, w dispatch.Writer) dispatch.Result {
		res := says(503, nil, "busy")(ctx, a, w)
		close(began)
		<-ctx.Done()
		return res // its end was there first
	}, says(200, nil, "good")})
	c, _ := f.raw()
	f.post(c, plainChat)
	await(t, began, "the attempt")
	c.Close()
	if l := f.logged(1); l["class"] != "cancelled" || l["status"] != 499.0 {
		t.Errorf("logged %v", l)
	}
	if n := len(f.runner.all()); n != 1 {
		t.Errorf("%d attempts", n)
	}
}
