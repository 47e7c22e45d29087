package node

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"runtime/debug"
	"strings"
	"sync"
	"time"

	"github.com/iop-fabric/iop/agent"
	"github.com/iop-fabric/iop/tunnel"
	"github.com/iop-fabric/iop/wire"
	"github.com/iop-fabric/iop/wire/iopv1"
)

// stream is one tunnel. Three goroutines meet here: its exchange makes frames,
// the bus's callback brings acknowledgements and body, the send loop owns the
// cores. What they tell each other lies in mail, under mu.
type stream struct {
	all     *streams
	run     string
	subject string          // up.frame.<run>
	ctx     context.Context //nolint:containedctx // the exchange's; the stream is what may cancel it
	cancel  context.CancelCauseFunc
	began   time.Time
	lists   bool // it asks what the provider serves: discovery, not work
	watch   watch

	mu     sync.Mutex
	seq    uint64 // of the last frame made
	cost   uint64 // of all frames made (J1)
	credit uint64 // the sender's, as of its last step
	ended  bool   // the terminal was made, or the stream dropped: no frame follows
	mail   mail
	queued bool // it stands in the send loop's list
	// room wakes the exchange that waits for credit, or tells it that ended is set.
	room chan struct{}

	// The send loop's alone.
	sender   *tunnel.Sender
	receiver *tunnel.Receiver // nil: the whole body came with the request
	body     *bodyReader      // the same
	deadline time.Time        // timeout_sec, counted from acceptance; zero: none
	forceAt  time.Time        // a cancelled exchange may take this long; zero: not cancelled
	lookAt   time.Time        // when to look whether the provider stalls; zero: never again
	bodyAt   time.Time        // when to look whether the request's body still comes; the same
	answered bool             // a frame went out
	ackOwed  bool             // it stands in the loop's list of acknowledgements
	bodyOwed bool             // it is the body's, not only the request's
	gone     bool             // forgotten; mail that still comes is dropped
	index    int              // where it stands in the loop's list of timed streams; -1: not in it
}

// mail is what waits for the send loop.
type mail struct {
	frames   []tunnel.Frame // bounded by the credit
	ack      tunnel.SendEvent
	acked    bool // ack holds something
	body     []bodyFrame
	bodySize int   // of what is in body, with overhead
	consumed []int // sizes of body frames the exchange has read
	cut      bool  // the context was cancelled
	again    bool  // the request came again: acknowledge it
}

// bodyFrame is one received BodyFrame.
type bodyFrame struct {
	seq    uint64
	data   []byte
	last   bool
	failed string // error_class
}

// post changes the mail under the lock and tells the loop.
func (st *stream) post(change func(m *mail)) {
	st.mu.Lock()
	change(&st.mail)
	tell := st.queueLocked()
	st.mu.Unlock()
	if tell {
		st.all.wakeFor(st)
	}
}

func (st *stream) queueLocked() (tell bool) {
	tell, st.queued = !st.queued, true
	return tell
}

// frame makes the next frame of the stream and hands it over. A frame with body
// waits for room, whatever its kind; one without has a reserve at the peer. It
// reports false where the stream has ended.
func (st *stream) frame(f *iopv1.ProviderTunnelFrame, terminal bool) bool {
	body := len(f.Body)
	cost := uint64(body + wire.FrameOverhead)
	st.mu.Lock()
	for !st.ended && body > 0 && st.cost+cost > st.credit {
		st.mu.Unlock()
		if !st.waitRoom() { // who wants the terminal all the same makes one without a body
			return false
		}
		st.mu.Lock()
	}
	if st.ended {
		st.mu.Unlock()
		return false
	}
	st.seq++
	st.cost += cost
	st.ended = terminal
	f.RunId, f.Sequence = st.run, st.seq
	data := st.all.buffers.get(f.SizeVT())
	n, err := f.MarshalToSizedBufferVT(data)
	if err != nil || n != len(data) {
		panic("BUG: node I2: a frame does not encode into its own size")
	}
	st.mail.frames = append(st.mail.frames, tunnel.Frame{Seq: st.seq, Data: data, Body: body, Terminal: terminal, Control: body == 0 && !terminal})
	tell := st.queueLocked()
	st.mu.Unlock()
	if tell {
		st.all.wakeFor(st)
	}
	return true
}

// waitRoom waits for the caller's credit; false: the exchange is over. That wait is
// none for the provider.
func (st *stream) waitRoom() bool {
	st.watch.pause()
	defer st.watch.resume()
	return st.all.run.wait(st.ctx, st.room)
}

// fail ends the stream with an ERROR, unless it has ended already.
func (st *stream) fail(why *wire.Error) {
	f := iopv1.ProviderTunnelFrame{
		Kind: iopv1.ProviderTunnelFrame_ERROR, Error: why.Message, ErrorClass: string(why.Class),
		TimestampUnixNanos: st.all.run.now().UnixNano(),
	}
	if f.Error == "" {
		f.Error = "failed: " + f.ErrorClass
	}
	if why.Refused {
		f.Metadata = map[string]string{wire.MetaReason: wire.ReasonRefused}
	}
	if st.frame(&f, true) {
		st.all.ended(st, why)
	}
}

// drop ends the stream without a word: its session is over, or Edge left it.
func (st *stream) drop(cause error) {
	st.mu.Lock()
	st.ended = true
	st.mail.frames = st.mail.frames[:0] // their bytes go to the garbage collector
	st.mu.Unlock()
	st.cancel(cause)
	st.signalRoom()
	if st.body != nil {
		st.body.close(cause)
	}
}

func (st *stream) hasEnded() bool {
	st.mu.Lock()
	defer st.mu.Unlock()
	return st.ended
}

func (st *stream) signalRoom() {
	select {
	case st.room <- struct{}{}:
	default:
	}
}

// serve runs the exchange and ends the stream with what came of it.
func (st *stream) serve(u use, req *iopv1.ProviderTunnelRequest, body io.Reader, size int64) {
	defer st.all.host.leave()
	s := &sink{st: st}
	e := exchangeOf(st.run, req, body, size)
	st.watch.resume()
	err := st.exchange(u.exchanger(), e, s)
	st.watch.pause()
	if st.body != nil {
		st.body.close(io.ErrClosedPipe) // what still comes of the body is dropped
	}
	st.all.host.free(u) // before the terminal (P7)
	if why := outcome(st.ctx, err); why != nil {
		s.flush()
		st.fail(why)
	} else {
		s.end()
	}
	st.cancel(nil)
}

// exchange is the adapter's call; a panic in it is one more failure (I7).
func (st *stream) exchange(ex agent.Exchanger, e agent.Exchange, s *sink) (err error) {
	defer func() {
		if recover() != nil { // the value is the adapter's and may hold anything
			st.all.log.Error(evPanic, slog.String(keyRun, st.run), slog.String(keyStack, string(debug.Stack())))
			err = errPanicked
		}
	}()
	return ex.Exchange(st.ctx, e, s)
}

// sink makes frames of an answer (agent.Sink). A small answer that comes whole in
// one read goes out as one message.
type sink struct {
	st      *stream
	f       iopv1.ProviderTunnelFrame // reused: encoding copies it
	started bool                      // Start was called
	sent    bool                      // START went out
	held    []byte                    // of a small answer
	size    int                       // of the small answer
	small   bool
	header  []*iopv1.Header
	status  int32
	trailer []*iopv1.Header
	watch   bool // the answer may tell its usage
	tail    tail
	err     error // what the sink answered last; the same from then on
}

// Start implements agent.Sink.
func (s *sink) Start(status int, header []agent.Field, size int64) error {
	switch {
	case s.err != nil:
		return s.err
	case s.started:
		return s.refuse(errAnswer)
	}
	if status < 200 || status > 599 {
		return s.refuse(errAnswerStatus)
	}
	fields, block := headersOf(header)
	if block > wire.MaxHeaders {
		return s.refuse(errAnswerHeader)
	}
	s.st.watch.heard()
	s.started = true
	s.status, s.header = int32(status), fields //nolint:gosec // an HTTP status
	s.watch = status < 300 && tellsUsage(header)
	if size >= 0 && size <= wire.MaxBody {
		s.small, s.size = true, int(size)
		return nil
	}
	return s.start()
}

// Heard implements agent.Listener.
func (s *sink) Heard() { s.st.watch.heard() }

// tellsUsage: only these can hold an OpenAI-shaped usage.
func tellsUsage(header []agent.Field) bool {
	for _, h := range header {
		if strings.EqualFold(h.Name, "Content-Type") {
			v := strings.ToLower(string(h.Value))
			return strings.Contains(v, "json") || strings.Contains(v, "event-stream")
		}
	}
	return false
}

// start sends START, with what was held.
func (s *sink) start() error {
	s.sent, s.small = true, false
	s.f = iopv1.ProviderTunnelFrame{
		Kind: iopv1.ProviderTunnelFrame_RESPONSE_START, Status: s.status, Headers: s.header,
		Body: s.held, TimestampUnixNanos: s.st.all.run.now().UnixNano(),
	}
	if s.watch {
		s.tail.write(s.held)
	}
	s.held, s.header = nil, nil
	return s.send()
}

// send hands s.f over; nobody wants more once the context has ended.
func (s *sink) send() error {
	if s.st.ctx.Err() == nil && s.st.frame(&s.f, false) {
		return nil
	}
	s.err = errSessionEnded
	if cause := context.Cause(s.st.ctx); cause != nil {
		s.err = cause
	}
	return s.err
}

// Body implements agent.Sink.
func (s *sink) Body(p []byte) error {
	switch {
	case s.err != nil:
		return s.err
	case !s.started:
		return s.refuse(errAnswer)
	case len(p) == 0:
		return nil
	}
	s.st.watch.heard()
	if s.small {
		if s.held == nil && len(p) == s.size {
			s.held = bytes.Clone(p)
			return nil
		}
		// It comes in pieces, or is longer than it said: nothing is kept back to be
		// complete (E4).
		if err := s.start(); err != nil {
			return err
		}
	}
	if s.watch {
		s.tail.write(p)
	}
	for len(p) > 0 {
		n := min(len(p), wire.MaxBody)
		s.f = iopv1.ProviderTunnelFrame{Kind: iopv1.ProviderTunnelFrame_BODY, Body: p[:n]}
		if err := s.send(); err != nil {
			return err
		}
		p = p[n:]
	}
	return nil
}

// Trailer implements agent.Sink.
func (s *sink) Trailer(fields []agent.Field) error {
	switch {
	case s.err != nil:
		return s.err
	case !s.started:
		return s.refuse(errAnswer)
	}
	trailer, block := headersOf(fields)
	if block > wire.MaxHeaders {
		return s.refuse(errAnswerHeader)
	}
	s.st.watch.heard()
	s.trailer = trailer
	return nil
}

func (s *sink) refuse(err *wire.Error) error {
	s.err = err
	return err
}

// flush sends what a failed exchange had delivered: the caller gets it before
// the error.
func (s *sink) flush() {
	if s.started && !s.sent {
		_ = s.start() // the stream has ended: nothing is left to be told
	}
}

// end sends END: alone, or with the whole small answer before it.
func (s *sink) end() {
	switch {
	case s.err != nil: // the adapter swallowed what the sink said
		s.flush()
		s.st.fail(wire.AsError(s.err))
		return
	case !s.started:
		s.st.fail(errNoAnswer)
		return
	}
	s.f = iopv1.ProviderTunnelFrame{
		Kind: iopv1.ProviderTunnelFrame_END, Trailers: s.trailer,
		TimestampUnixNanos: s.st.all.run.now().UnixNano(),
	}
	end := s.tail.bytes()
	if !s.sent {
		s.f.Kind, s.f.End = iopv1.ProviderTunnelFrame_RESPONSE_START, true
		s.f.Status, s.f.Headers, s.f.Body = s.status, s.header, s.held
		end = s.held[max(0, len(s.held)-tailSize):]
	}
	if s.watch {
		s.f.Usage = readUsage(end)
	}
	if s.st.frame(&s.f, true) {
		s.st.all.ended(s.st, nil)
		return
	}
	// Its body found no room before the context ended. Where the stream has a
	// terminal already this one is dropped.
	s.st.fail(wire.AsError(context.Cause(s.st.ctx)))
}
