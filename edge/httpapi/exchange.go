package httpapi

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/netip"
	"strconv"
	"time"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/wire"
	"github.com/iop-fabric/iop/wire/iopv1"
)

// exchange is one request and its answer. It is the dispatch.Writer of the
// request's attempts.
type exchange struct {
	api *API
	w   http.ResponseWriter
	rc  *http.ResponseController
	h2  bool
	// chunks: an answer without a length goes out in chunks, which have an end of
	// their own. HTTP/1.0 has none.
	chunks bool
	// dialect is the route's, or where there is none what the path looks like.
	dialect dialect
	coding  coding // of the caller's body
	route   *route

	began   time.Time
	remote  netip.Addr
	origin  []string // the page that asks, as the browser says
	id      string   // minted
	key     *keyState
	scan    scanner
	named   named
	model   string // once the pool knew it
	detail  string // for the caller, in place of the table's message
	bodyIn  int64
	unread  bool // the caller's body was not read to its end
	closing bool // the connection takes no request after this one
	want    Want // of the pool
	granted Grant
	tries   int
	waited  time.Duration
	asked   time.Time // when it last asked for a place

	retryOn configs.Statuses        // the model's
	others  bool                    // another attempt may be made elsewhere
	unheard bool                    // nobody answered for a node though that was borne
	giveUp  context.CancelCauseFunc // ends the attempt at hand; nil: its answer is not kept back
	holding *heldAnswer             // of the attempt at hand
	held    *heldAnswer             // of the last attempt that had a whole one

	alive     *keepAlive // nil: off
	keptAlive bool       // it committed the answer
	mark      []byte     // what of a byte order mark may not follow

	writeArmed time.Time

	committed bool
	status    int
	firstByte time.Time
	sent      int64
	usage     *iopv1.Usage
	length    int64 // the answer's Content-Length, or -1
	bodiless  bool
	events    *eventWatch // of an event stream that is readable
	broken    error       // the caller cannot be written to
	fault     *wire.Error // the answer must not be written
	cut       bool        // the answer ended before its own end
}

func newExchange(a *API, w http.ResponseWriter, r *http.Request) *exchange {
	x := &exchange{
		api: a, w: w, rc: http.NewResponseController(w), h2: r.ProtoMajor == 2, chunks: r.ProtoAtLeast(1, 1),
		began: a.now(), route: &otherRoute, length: -1,
	}
	x.unread = !x.h2 && r.ContentLength != 0
	// net/http drops a Content-Length that came beside Transfer-Encoding without a
	// word. Where the next request begins must then matter to nobody (RFC 9112, 6.1).
	x.closing = !x.h2 && len(r.TransferEncoding) > 0
	x.scan.init()
	var shown string
	x.id, shown = requestID(r.Header)
	w.Header()["X-Request-Id"] = []string{shown}
	x.origin = r.Header["Origin"]
	x.remote = remoteOf(r, a.cfg.Proxies)
	a.cors.allow(w.Header(), x.origin)
	return x
}

// shown is the request's id as its answer shows it.
func (x *exchange) shown() string { return x.w.Header()["X-Request-Id"][0] }

// --- bounds of time -------------------------------------------------------

// disarmRead lets the connection be watched for ever; a deadline that passed
// would look like a caller who left.
func (x *exchange) disarmRead() { _ = x.rc.SetReadDeadline(time.Time{}) }

// armWrite bounds the wait for the caller to take a byte (E10), set
// further ahead than the bound as the read deadline is. On HTTP/2 a deadline that passes resets the stream also while nothing is
// written, so there it stands only during a write.
func (x *exchange) armWrite() {
	stall := x.api.cfg.Limits.WriteStall
	if now := x.api.now(); x.h2 || now.Sub(x.writeArmed) > stall/4 {
		x.writeArmed = now
		_ = x.rc.SetWriteDeadline(now.Add(stall + stall/4))
	}
}

func (x *exchange) disarmWrite() {
	if x.h2 {
		_ = x.rc.SetWriteDeadline(time.Time{})
	}
}

const (
	// paceGrace and pace bound how long a whole body may take: the grace, and its
	// size at 64 KiB/s. Without it a byte a minute would hold a place for days.
	paceGrace = 30 * time.Second
	pace      = 64 << 10
	// paceAhead is how much of a body of unknown size is granted before it came,
	// so that the deadline need not be set for each read.
	paceAhead = 256 << 10
)

// wholeTime is how long a body of n bytes may take.
func wholeTime(n int64) time.Duration {
	return paceGrace + time.Duration(n/pace)*time.Second
}

// pacedReader is a request body whose reads are bounded in time: each by the
// stall bound, and all together by wholeTime of what was announced or came.
type pacedReader struct {
	x         *exchange
	r         io.Reader
	began     time.Time
	announced int64 // or -1
	came      int64
	armed     time.Time // the read deadline as it is set
}

func (p *pacedReader) Read(b []byte) (int, error) {
	p.arm()
	n, err := p.r.Read(b)
	p.came += int64(n)
	return n, err
}

// arm sets the read deadline once the one that is set would come too early.
// Setting one for each read would cost more than many reads; so it is set
// further ahead than the bound, by a quarter of it or by paceAhead.
func (p *pacedReader) arm() {
	now, stall := p.x.api.now(), p.x.api.cfg.Limits.WriteStall
	if p.armed.Before(p.due(now.Add(stall), p.came)) {
		p.armed = p.due(now.Add(stall+stall/4), p.came+paceAhead)
		_ = p.x.rc.SetReadDeadline(p.armed) // a writer without deadlines has none to miss
	}
}

// due is the earlier of a stall's end and of what the whole body may take.
func (p *pacedReader) due(stalled time.Time, came int64) time.Time {
	if p.announced >= 0 {
		came = p.announced // never more of it comes
	}
	if whole := p.began.Add(wholeTime(came)); whole.Before(stalled) {
		return whole
	}
	return stalled
}

// --- dispatch.Writer ------------------------------------------------------

// Start commits status and headers to the caller.
func (x *exchange) Start(status int, header []*iopv1.Header) error {
	x.lock()
	defer x.unlock()
	if status < 200 || status > 599 {
		return x.refuse(wire.Errorf(wire.Protocol, "the answer has no final status"))
	}
	if x.keptAlive {
		return x.startAlive(status, header)
	}
	if x.others && x.retryOn.Has(status) {
		head := answerHead{status: status, header: http.Header{}}
		var fault *wire.Error
		if head.length, fault = fromProvider(head.header, header); fault != nil {
			return x.refuse(fault)
		}
		x.hold(head)
		return nil
	}
	h := x.w.Header()
	shown := h["X-Request-Id"]
	clear(h) // of an attempt before this one
	length, fault := fromProvider(h, header)
	if fault == nil && status == http.StatusOK && length == 0 && isEventStream(h) {
		fault = wire.Errorf(wire.Provider, "the answer is a stream without an event")
	}
	if fault != nil {
		clear(h)
		h["X-Request-Id"] = shown
		x.api.cors.allow(h, x.origin)
		return x.refuse(fault)
	}
	h["X-Request-Id"] = shown
	x.ofProvider(h)
	return x.commit(status, length)
}

// ofProvider puts our word about pages in the place of a provider's.
func (x *exchange) ofProvider(h http.Header) {
	if x.api.cors == nil {
		return
	}
	for name := range h {
		if isCORS(name) {
			delete(h, name)
		}
	}
	x.api.cors.allow(h, x.origin)
}

// commit gives the caller the status and the provider's headers as they stand.
func (x *exchange) commit(status int, length int64) error {
	h := x.w.Header()
	if _, ok := h["Content-Type"]; !ok {
		h["Content-Type"] = nil // net/http would guess one
	}
	x.optIn(h)
	x.setClose(h)
	x.length = length
	x.status = status
	x.bodiless = bodiless(status)
	if isEventStream(h) && length < 0 && !x.bodiless {
		if _, ok := h["X-Accel-Buffering"]; !ok {
			h["X-Accel-Buffering"] = noBuffering // or a proxy before us may collect it (A70)
		}
		x.events = newEventWatch(x.dialect)
	}
	x.armWrite()
	x.committed = true
	x.firstByte = x.api.now()
	x.w.WriteHeader(status)
	if x.named.stream || x.events != nil {
		return x.flush()
	}
	x.disarmWrite()
	return nil
}

var noBuffering = []string{"no"}

func bodiless(status int) bool {
	return status == http.StatusNoContent || status == http.StatusNotModified
}

// refuse keeps an answer from being written.
func (x *exchange) refuse(fault *wire.Error) error {
	x.fault = fault
	return fault
}

// Body hands bytes on as they are.
func (x *exchange) Body(p []byte) error {
	x.lock()
	defer x.unlock()
	return x.write(p)
}

func (x *exchange) write(p []byte) error {
	if len(p) == 0 {
		return nil
	}
	if x.broken != nil {
		return x.broken
	}
	if h := x.holding; h != nil {
		if h.add(p) || x.keptAlive {
			return nil
		}
		if !h.inTime() {
			return errLate
		}
		x.holding = nil
		if err := x.release(h); err != nil {
			return err
		}
	}
	if len(x.mark) > 0 {
		if p = x.unmarked(p); len(p) == 0 {
			return nil
		}
	}
	if x.bodiless || (x.length >= 0 && x.sent+int64(len(p)) > x.length) {
		return x.refuse(wire.Errorf(wire.Protocol, "the answer is longer than it said"))
	}
	x.armWrite()
	n, err := x.w.Write(p)
	x.disarmWrite()
	x.sent += int64(n)
	if x.events != nil {
		x.events.add(p[:n])
	}
	return x.wrote(err)
}

// Flush sends what Body kept back.
func (x *exchange) Flush() error {
	x.lock()
	defer x.unlock()
	return x.flush()
}

func (x *exchange) flush() error {
	if x.broken != nil {
		return x.broken
	}
	if !x.committed {
		return nil // a flush would commit a status nobody gave
	}
	x.armWrite()
	err := x.rc.Flush()
	x.disarmWrite()
	return x.wrote(err)
}

// Trailer hands trailers on; HTTP/1.1 has room for them only where no length
// was given.
func (x *exchange) Trailer(fields []*iopv1.Header) error {
	// Until something was flushed net/http may still give the answer a length.
	x.lock()
	defer x.unlock()
	if err := x.flush(); err != nil {
		return err
	}
	h := x.w.Header()
	if x.holding != nil {
		h = http.Header{}
		x.holding.trailer = h
	}
	for _, f := range fields {
		if !validName(f.GetName()) || !validValue(f.GetValue()) {
			return x.refuse(wire.Errorf(wire.Protocol, "the answer has a malformed trailer"))
		}
		name := http.CanonicalHeaderKey(f.GetName())
		if answerPolicy[name] != pass || trailerNever[name] {
			continue
		}
		h[http.TrailerPrefix+name] = append(h[http.TrailerPrefix+name], string(f.GetValue()))
	}
	return nil
}

func (x *exchange) wrote(err error) error {
	if err != nil && !errors.Is(err, http.ErrNotSupported) {
		x.broken = err
	}
	return x.broken
}

// optIn tells who answered, where the operator wants that told (E11).
func (x *exchange) optIn(h http.Header) {
	if !x.api.cfg.OptInHeaders || x.tries == 0 {
		return
	}
	h["X-Iop-Attempts"] = []string{strconv.Itoa(x.tries)}
	h["X-Iop-Queue-Ms"] = []string{strconv.FormatInt(x.waited.Milliseconds(), 10)}
	if s := x.granted.Slot; s.Node != "" && validValue(s.Node) && validValue(s.Provider) {
		h["X-Iop-Node"] = []string{s.Node}
		h["X-Iop-Provider"] = []string{s.Provider}
	}
}

// --- answers of our own -----------------------------------------------------

// conclude ends the answer. abort asks for the connection to be broken, so that
// a caller can tell a cut from an end (I5).
func (x *exchange) conclude(r *http.Request, why reason) (abort bool) {
	switch {
	case why == "":
		return false
	case why == callerGone && (x.broken != nil || r.Context().Err() != nil):
		// Nobody is there, or somebody who takes nothing: neither a 200 without
		// bytes nor a proper end of a chunked body may follow.
		return true
	case !x.committed:
		x.refuseWith(why)
		return x.broken != nil
	case x.events != nil && !x.events.whole() && !x.cut && (x.fault == nil || x.firstByte.IsZero()):
		if why == reason(wire.Draining) && x.detail == "" && !x.firstByte.IsZero() {
			x.detail = "this answer was cut: the service is being stopped" // it was not a new one
		}
		x.armWrite()
		_, err := x.w.Write(x.events.failure(why, x.detail, x.shown()))
		return x.wrote(err) != nil
	default:
		// What was given is a true beginning of the answer; it goes out before the
		// connection breaks.
		_ = x.flush()
		return true
	}
}

// refuseWith answers a request with a JSON error.
func (x *exchange) refuseWith(why reason) {
	ro := rowOf(why)
	h := x.w.Header()
	if ro.retryAfter > 0 {
		h["Retry-After"] = []string{strconv.Itoa(ro.retryAfter)}
	}
	switch why {
	case noKey:
		h["Www-Authenticate"] = []string{"Bearer"}
	case badEncoding:
		h["Accept-Encoding"] = []string{acceptedCodings}
	default: // the status says it all
	}
	if x.dialect == anthropic {
		h["Request-Id"] = []string{x.shown()} // where its client libraries look for it
	}
	x.optIn(h)
	x.writeJSON(ro.status, x.dialect.errorOf(why, x.detail, x.shown()))
}

// discardTime bounds how long the rest of a refused body is read.
const discardTime = 5 * time.Second

// leaveBody keeps an answer from waiting for a body that nobody will read. What
// the caller still sends is read for a moment after it, so that a reset does not
// overtake the answer.
func (x *exchange) leaveBody() {
	if x.unread {
		x.closing = true
		_ = x.rc.SetReadDeadline(x.api.now().Add(discardTime))
	}
	x.setClose(x.w.Header())
}

func (x *exchange) setClose(h http.Header) {
	if x.closing {
		h["Connection"] = []string{"close"}
	}
}

func (x *exchange) writeJSON(status int, b []byte) {
	h := x.w.Header()
	h["Content-Type"] = []string{"application/json"}
	h["Content-Length"] = []string{strconv.Itoa(len(b))}
	x.leaveBody()
	x.committed, x.status, x.firstByte = true, status, x.api.now()
	x.armWrite()
	x.w.WriteHeader(status)
	n, err := x.w.Write(b)
	x.sent += int64(n)
	if !errors.Is(err, http.ErrBodyNotAllowed) { // HEAD
		_ = x.wrote(err)
	}
}

func (x *exchange) refuseMethod(rt *route) reason {
	if rt.method != "" {
		x.w.Header()["Allow"] = []string{rt.allow()}
	} else {
		x.w.Header()["Allow"] = []string{"GET, HEAD, POST, OPTIONS"}
	}
	return badMethod
}

func (x *exchange) options(rt *route, asked http.Header) reason {
	_ = x.refuseMethod(rt)
	x.api.cors.preflight(x.w.Header(), asked, rt.allow())
	x.leaveBody()
	x.committed, x.status = true, http.StatusNoContent
	x.armWrite()
	x.w.WriteHeader(http.StatusNoContent)
	return ""
}
