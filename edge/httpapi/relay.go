package httpapi

import (
	"context"
	"net/http"
	"time"

	"github.com/iop-fabric/iop/edge/dispatch"
	"github.com/iop-fabric/iop/wire"
	"github.com/iop-fabric/iop/wire/iopv1"
)

const (
	// retryWait bounds the queueing for another attempt. A request that already
	// failed once would rather hear why than wait as long as a new one.
	retryWait = 30 * time.Second
	// unheardWait bounds in the same way how long a request without another candidate
	// bears that nobody answers for its node, whose link may be back in a moment.
	unheardWait = retryWait
	// bytesPerToken is the usual rough measure of a prompt's length.
	bytesPerToken = 4
)

// promptTokens estimates how many tokens a body of n bytes is.
func promptTokens(n int64) int64 { return (n + bytesPerToken - 1) / bytesPerToken }

// relay serves a request from a provider, through a tunnel.
func (a *API) relay(x *exchange, r *http.Request) reason {
	if why := a.enter(x, r); why != "" {
		return why
	}
	defer x.key.leave()
	header, why := toProvider(r.Header)
	if why != "" {
		return why
	}
	b, why := a.readBody(x, r)
	if why != "" {
		return why
	}
	defer b.close()
	return a.attempts(x, r, header, b)
}

// enter admits by key and by what the request's head tells.
func (a *API) enter(x *exchange, r *http.Request) reason {
	k := a.authenticate(r.Header)
	if k == nil {
		return noKey
	}
	var ok bool
	if x.coding, ok = codingOf(r.Header); !ok {
		return badEncoding
	}
	if !k.enter(a.cfg.Limits.StreamsPerKey) {
		return tooManyOfKey
	}
	x.key = k
	return ""
}

// readBody reads the whole body before anything is dispatched: to name the
// model, to be able to send it twice, and because net/http sees a caller leave
// only after the body's end (E5).
func (a *API) readBody(x *exchange, r *http.Request) (*body, reason) {
	b, why := a.takeBody(x, r)
	if why != "" {
		return nil, why
	}
	x.unread = false
	x.disarmRead()
	x.named, why, x.detail = x.scan.finish()
	switch {
	case why != "":
	case !x.key.allows(x.named.model):
		why, x.detail = forbidden, a.modelHint(x.key, x.named.model, forbidden)
	default:
		return b, ""
	}
	b.close()
	return nil, why
}

// takeBody reads the body, decoded: from here on it is as if it had come so.
func (a *API) takeBody(x *exchange, r *http.Request) (b *body, why reason) {
	source := &pacedReader{x: x, r: r.Body, began: a.now(), announced: r.ContentLength}
	if x.coding == identity {
		b, why = a.bodies.read(r.Context(), source, r.ContentLength, x.scan.feed)
		if b != nil {
			x.bodyIn = b.size
		}
		return b, why
	}
	if r.ContentLength > a.cfg.Limits.Body {
		return nil, tooLarge
	}
	d, err := a.bodies.decode(x.coding, source)
	defer d.close()
	if err != nil {
		why = readFailure(r.Context(), err)
	} else {
		b, why = a.bodies.read(r.Context(), d, -1, x.scan.feed)
	}
	if why == badBody {
		x.detail = "the request body is not what its Content-Encoding says"
	}
	x.bodyIn = d.source.n
	return b, why
}

// attempts makes up to maxAttempts of them (H6). Its frame and acquire's stand while
// the request waits, so they are kept small: attempt's does not.
func (a *API) attempts(x *exchange, r *http.Request, header []*iopv1.Header, b *body) (why reason) {
	x.want.Model, x.want.Principal, x.want.Operation = x.named.model, x.key.principal, x.route.operation
	x.want.PromptTokens = promptTokens(b.size)
	x.want.Affinity = affinityOf(x.key.principal, r.Header, x.named.cacheKey)
	x.retryOn = a.retry.on(x.want.Model)
	if alive := a.cfg.KeepAlive; keepsAlive(alive, x) {
		x.alive = newKeepAlive(x, alive.Interval)
		defer x.alive.close()
	}
	for over := false; !over; {
		if none := a.acquire(r.Context(), x); none == nil {
			why, over = a.attempt(x, r, header, b)
		} else {
			why, over = a.unserved(r.Context(), x, none, why), true
		}
	}
	return why
}

// acquire waits for a place.
//
//go:noinline
func (a *API) acquire(ctx context.Context, x *exchange) (err error) {
	if a.cfg.KeepAlive.Queued && x.tries == 0 {
		x.alive.begin()
	}
	x.asked = a.now()
	err = a.pool.Acquire(ctx, &x.want, &x.granted)
	x.alive.end()
	return err
}

// unserved says why there is no place; before is why the attempt before ended.
func (a *API) unserved(ctx context.Context, x *exchange, err error, before reason) reason {
	x.waited += a.now().Sub(x.asked)
	if gone := cancelled(ctx); gone != "" {
		return gone
	}
	if x.tries > 0 {
		return x.settle(before) // the failure that asked for another attempt tells more
	}
	switch why := reasonOf(err); why {
	case unknownModel:
		x.detail = a.modelHint(x.key, x.want.Model, why)
		return why
	case unsupported, queueFull, waitExpired, noProvider:
		x.model = x.want.Model // the pool knows it
		if why == unsupported && x.route.operation == opCountTokens {
			return x.estimate()
		}
		return why
	default:
		return why
	}
}

// attempt makes one, at the place that was granted; over: there is none after it.
//
//go:noinline
func (a *API) attempt(x *exchange, r *http.Request, header []*iopv1.Header, b *body) (why reason, over bool) {
	ctx, grant := r.Context(), &x.granted
	x.model, x.fault = x.want.Model, nil
	x.waited += grant.Waited
	x.tries++
	x.others = grant.Others > 0 && x.tries < maxAttempts
	content, size := b.naming(x.named, grant.Slot.Target)
	bound, end := x.bounded(ctx)
	x.alive.begin()
	result := a.runner.Do(bound, dispatch.Attempt{
		RunID:        wire.NewRunID(),
		Slot:         grant.Slot,
		Operation:    x.route.operation,
		Method:       x.route.method,
		Path:         x.route.path,
		RawQuery:     r.URL.RawQuery,
		Header:       header,
		Body:         content,
		BodySize:     size,
		Stream:       x.named.stream,
		StallTimeout: grant.StallTimeout,
		Patience:     x.patience(),
	}, x)
	x.alive.end()
	end()
	x.unheard = x.unheard || (!x.others && !result.Acked && result.Err != nil && result.Err.Class == wire.Unreachable)
	asked := x.holding != nil // for another attempt, by the answer's status
	why = x.outcome(ctx, result)
	a.metrics.attempt(x.class(why))
	if why == "" {
		return "", true
	}
	if gone := cancelled(ctx); gone == callerGone {
		return gone, true
	} else if gone != "" || !next(why, asked, x.committed, x.tries) {
		return x.settle(why), true
	}
	x.want.Avoid = append(x.want.Avoid, grant.Slot.Provider)
	x.want.MaxWait = retryWait
	return why, false
}

// patience is how long an attempt may bear that nobody answers for its node: not at
// all where another candidate may serve, and once for each request.
func (x *exchange) patience() time.Duration {
	if x.others || x.unheard {
		return 0
	}
	return unheardWait
}

// outcome judges an attempt by its terminal and by what became of the answer.
func (x *exchange) outcome(ctx context.Context, result dispatch.Result) reason {
	x.usage = result.Usage
	gone := cancelled(ctx)
	if h := x.holding; h != nil {
		x.holding = nil
		if !h.inTime() && result.Err != nil && gone == "" && x.fault == nil {
			return reason(errLate.Class)
		}
		if x.keptAlive && result.Err == nil && x.fault == nil {
			x.detail = toldInstead(h)
			return reason(wire.Provider)
		}
		if result.Err == nil && x.fault == nil && h.whole() {
			h.usage = result.Usage
			x.held = h
			return reason(wire.Provider)
		}
	}
	switch {
	case x.fault != nil:
		return reasonOfClass(x.fault.Class)
	case x.broken != nil:
		return callerGone
	case result.Err == nil && x.firstByte.IsZero():
		return brokenAnswer // an end without a beginning; never a 200 without bytes
	case result.Err == nil && x.length >= 0 && x.sent < x.length && !x.bodiless:
		x.cut = true
		return brokenAnswer
	case result.Err == nil && x.events != nil && x.status == http.StatusOK && x.events.empty():
		return reason(wire.Provider) // told in an event: never a 200 without bytes (E6)
	case result.Err == nil && x.events != nil && x.named.stream && x.events.unfinished():
		x.cut = true
		return reason(wire.Provider)
	case result.Err == nil:
		return ""
	case gone != "":
		return gone
	default:
		return reasonOfClass(result.Err.Class)
	}
}
