package httpapi

import (
	"context"
	"maps"
	"net/http"
	"time"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/wire"
	"github.com/iop-fabric/iop/wire/iopv1"
)

// maxHeld is how much of a provider's answer is kept back. What says that a
// request failed is far shorter; a longer answer is the caller's at once.
const maxHeld = 64 << 10

// heldWait bounds how long the rest of such an answer may take. Nobody waits longer
// for the words of a failure while somebody else could serve.
const heldWait = 5 * time.Second

// errLate ends an attempt whose answer was kept back for so long.
var errLate = wire.Errorf(wire.Stalled, "the rest of the provider's refusal did not come in time")

// heldAnswer is a provider's whole answer of which the caller saw nothing yet,
// for another provider may give a better one (Q5). It is the caller's when none
// does, unchanged (T4).
type heldAnswer struct {
	head    answerHead
	body    []byte
	trailer http.Header
	grant   Grant
	usage   *iopv1.Usage
	timer   *time.Timer // gives the attempt up; nil: nothing does
}

// inTime ends the wait for the rest; false: it was over, and the attempt is given up.
func (h *heldAnswer) inTime() bool { return h.timer == nil || h.timer.Stop() }

// answerHead is an answer's status and headers, as they go to the caller.
type answerHead struct {
	status int
	header http.Header
	length int64 // the Content-Length, or -1
}

// whole reports whether all of the answer is there.
func (h *heldAnswer) whole() bool {
	return h.head.length < 0 || h.head.length == int64(len(h.body)) || bodiless(h.head.status)
}

// retryPolicy says for which answers of providers another one is asked.
type retryPolicy struct {
	other configs.Statuses            // of every model that is not in of
	of    map[string]configs.Statuses // by the model's name
}

func newRetryPolicy(other configs.Statuses, groups []configs.ModelGroup) retryPolicy {
	p := retryPolicy{other: other}
	for _, g := range groups {
		if g.RetryOn == nil {
			continue
		}
		if p.of == nil {
			p.of = map[string]configs.Statuses{}
		}
		p.of[g.Name] = g.RetryOn
	}
	return p
}

// on returns the policy of a model, as a call may name it: without its tag, too.
func (p *retryPolicy) on(model string) configs.Statuses {
	if s, ok := p.of[model]; ok {
		return s
	}
	if s, ok := p.of[model+":latest"]; ok {
		return s
	}
	return p.other
}

// hold keeps an answer back, where another provider may serve for no longer than
// heldWait.
func (x *exchange) hold(head answerHead) {
	x.holding = &heldAnswer{head: head, grant: x.granted}
	if giveUp := x.giveUp; giveUp != nil && !x.keptAlive {
		x.holding.timer = time.AfterFunc(heldWait, func() { giveUp(errLate) })
	}
}

// bounded is the context of an attempt whose answer may be kept back; end is called
// when the attempt is over.
func (x *exchange) bounded(ctx context.Context) (bound context.Context, end func()) {
	if x.giveUp = nil; !x.others || len(x.retryOn) == 0 {
		return ctx, func() {}
	}
	bound, giveUp := context.WithCancelCause(ctx)
	x.giveUp = giveUp
	return bound, func() { giveUp(nil) }
}

// add keeps p, if there is room for it.
func (h *heldAnswer) add(p []byte) bool {
	if len(h.body)+len(p) > maxHeld {
		return false
	}
	h.body = append(h.body, p...)
	return true
}

// release gives the caller what was kept back so far.
func (x *exchange) release(h *heldAnswer) error {
	x.granted = h.grant
	x.ofProvider(h.head.header)
	maps.Copy(x.w.Header(), h.head.header)
	if err := x.commit(h.head.status, h.head.length); err != nil {
		return err
	}
	if err := x.write(h.body); err != nil || len(h.trailer) == 0 {
		return err
	}
	if err := x.flush(); err != nil {
		return err
	}
	maps.Copy(x.w.Header(), h.trailer)
	return nil
}

// settle ends a request whose last attempt failed with why: the last whole
// answer of a provider, where there is one, tells its caller more than we can
// (A30).
func (x *exchange) settle(why reason) reason {
	h := x.held
	if h == nil || x.committed {
		return why
	}
	x.usage = h.usage
	if x.release(h) != nil {
		return callerGone
	}
	return ""
}
