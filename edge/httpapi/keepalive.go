package httpapi

import (
	"encoding/json"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/wire/iopv1"
)

// comment is what keeps a stream alive: event streams skip it.
const comment = ": keep-alive\n\n"

// keepAlive writes comments into an event stream while nothing else is written
// (E8). It is on between begin and end; in that time the exchange's goroutine
// takes mu for all it does to the exchange.
type keepAlive struct {
	x        *exchange
	interval time.Duration

	mu    sync.Mutex
	timer *time.Timer
	on    bool
	ended bool
	last  time.Time // when something was written
}

// keepsAlive reports whether the answer is to be kept alive at all.
func keepsAlive(cfg configs.KeepAlive, x *exchange) bool {
	if cfg.Interval <= 0 || !x.named.stream {
		return false
	}
	switch x.route.operation {
	case opChat, opCompletions, opResponses, opMessages:
		return true
	default: // answers with no stream
		return false
	}
}

func newKeepAlive(x *exchange, interval time.Duration) *keepAlive {
	k := &keepAlive{x: x, interval: interval, last: x.api.now()}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.timer = time.AfterFunc(interval, k.tick)
	return k
}

// begin lets comments be written. A nil keepAlive does nothing.
func (k *keepAlive) begin() { k.turn(true, false) }

// end keeps them from being written.
func (k *keepAlive) end() { k.turn(false, false) }

// close ends it for good.
func (k *keepAlive) close() { k.turn(false, true) }

func (k *keepAlive) turn(on, ended bool) {
	if k == nil {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.on = on
	if ended {
		k.ended = true
		k.timer.Stop()
	}
}

// tick runs on the timer's goroutine.
func (k *keepAlive) tick() {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.ended {
		return
	}
	now := k.x.api.now()
	due := k.last.Add(k.interval)
	if !now.Before(due) {
		if k.on && k.x.writeComment() != nil {
			return // net/http has ended the request's context
		}
		due = now.Add(k.interval)
	}
	k.timer.Reset(due.Sub(now))
}

// lock and unlock stand around what an attempt does to the exchange.
func (x *exchange) lock() {
	if x.alive != nil {
		x.alive.mu.Lock()
	}
}

func (x *exchange) unlock() {
	if k := x.alive; k != nil {
		k.last = x.api.now()
		k.mu.Unlock()
	}
}

// writeComment writes one where it can stand: instead of an answer that is not
// there yet, which commits it, or between two events.
func (x *exchange) writeComment() error {
	switch {
	case x.broken != nil:
		return x.broken
	case x.holding != nil || x.held != nil:
		return nil // its status is still the caller's
	case !x.committed:
		x.commitAlive()
	case x.events == nil || !x.events.between() || x.events.whole():
		return nil
	}
	if x.events.empty() {
		x.mark = bom
	}
	x.armWrite()
	_, err := x.w.Write([]byte(comment))
	if x.wrote(err) != nil {
		return x.broken
	}
	return x.flush()
}

// commitAlive commits to an event stream before the provider said anything.
func (x *exchange) commitAlive() {
	h := x.w.Header()
	h["Content-Type"] = []string{"text/event-stream"}
	h["Cache-Control"] = []string{"no-cache"}
	h["X-Accel-Buffering"] = []string{"no"}
	x.optIn(h)
	x.setClose(h)
	x.events = newEventWatch(x.dialect)
	x.keptAlive, x.committed, x.status = true, true, http.StatusOK
	x.armWrite()
	x.w.WriteHeader(http.StatusOK)
}

// startAlive takes status and headers when they come too late to be shown. A
// stream of events goes on; of anything else the caller is told in an event.
func (x *exchange) startAlive(status int, header []*iopv1.Header) error {
	head := answerHead{status: status, header: http.Header{}}
	length, fault := fromProvider(head.header, header)
	if fault != nil {
		return x.refuse(fault)
	}
	if status != http.StatusOK || !isEventStream(head.header) {
		x.hold(head)
		return nil
	}
	x.length, x.firstByte = length, x.api.now()
	return nil
}

// unmarked is p without the byte order mark that it begins with where a comment came
// before it: it would be no beginning then, but a part of the first event's name. The mark
// may come in pieces.
func (x *exchange) unmarked(p []byte) []byte {
	for len(p) > 0 && len(x.mark) > 0 {
		if p[0] != x.mark[0] {
			p = append(slices.Clone(bom[:len(bom)-len(x.mark)]), p...)
			x.mark = nil
			break
		}
		p, x.mark = p[1:], x.mark[1:]
		if len(x.mark) == 0 && x.length >= 0 {
			x.length -= int64(len(bom))
		}
	}
	return p
}

// toldInstead is what an event says of an answer that could not be given, in the
// provider's own words where it has some.
func toldInstead(h *heldAnswer) string {
	if h.head.status < http.StatusBadRequest {
		return "the provider did not answer with a stream of events"
	}
	told := "the provider answered " + strconv.Itoa(h.head.status)
	var e struct {
		Error struct {
			Message string `json:"message"`
		} `json:"error"`
	}
	if json.Unmarshal(h.body, &e) == nil && e.Error.Message != "" {
		told += ": " + e.Error.Message
	}
	return told
}
