package node

import (
	"bytes"
	"context"
	"hash/maphash"
	"io"
	"log/slog"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/iop-fabric/iop/internal/bus"
	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/tunnel"
	"github.com/iop-fabric/iop/wire"
	"github.com/iop-fabric/iop/wire/iopv1"
)

// Bounds of one session.
const (
	// maxStreams is how many tunnels may be known at once, refused and finished
	// ones that await their last acknowledgement included.
	maxStreams = 16384
	// Finished ids are remembered to leave late copies of a request alone, ids of
	// early cancels to refuse the request they overtook (C1).
	maxFinished, keepFinished = 16384, 2 * time.Minute
	maxEarly, keepEarly       = 4096, 30 * time.Second
	maxResets, maxAway        = 1024, 1024 // ids to be answered in one batch (J3)
	maxAckEntries             = 512        // of one StreamAck
	ackDelay                  = 25 * time.Millisecond
	// bodyMemory is what the windows of all bodies share; near it new ones are small.
	bodyMemory = 256 << 20
	// mailBody is how much unserved body a stream may hold: what any window
	// allows, and the sender's reserve. More is a breach (J8).
	mailBody = wire.MaxWindow + tunnel.TerminalReserve
)

// neverGiveUp: while the session lives, a stream's frames are repeated until they are
// acknowledged or Edge says that it does not know the run. Whether Edge is there its
// heartbeats tell; a stream that gave up before them would leave its caller waiting.
const neverGiveUp = 1 << 62

// The directions of StreamAck's entries.
const (
	dirFrame = "frame" // of the frames a Node sends
	dirBody  = "body"  // of the request body it receives, and of the request itself
)

type door uint8

const (
	doorShut     door = iota // ready was not asked for yet
	doorOpen                 // work is taken
	doorDraining             // new requests are refused
	doorOver                 // the session ended
)

// streams are the tunnels of one session. Its send loop owns every tunnel core
// and alone publishes frames and acknowledgements.
type streams struct {
	id      subjects.Session
	conn    bus.Conn
	host    *host
	run     runner
	metrics *metrics
	log     *slog.Logger
	buffers buffers
	ctx     context.Context //nolint:containedctx // the session's, under which every exchange runs
	ackTo   string          // up.ack
	wake    chan struct{}   // one pending wake-up says all
	idle    chan<- struct{} // told, while draining, when no stream is left

	mu       sync.Mutex
	door     door
	byRun    map[string]*stream
	finished *ids
	early    *ids
	dirty    []*stream
	resets   []string
	away     []string // refused, without a stream to remember it
	bodies   int      // streams that receive a body

	bodyBound atomic.Int64 // nanoseconds

	// The send loop's alone.
	spare   []*stream // dirty's other half
	mails   mail      // the slices of the last mail, for the next stream to fill
	sends   []tunnel.SendEffect
	recvs   []tunnel.RecvEffect
	timed   []*stream
	owed    []*stream // acknowledgements that are due at ackAt
	ackAt   time.Time
	scanAt  time.Time       // no timed stream has anything due before it
	entries iopv1.StreamAck // being built
	pack    []byte
}

func newStreams(ctx context.Context, h *host, run runner, id subjects.Session, conn bus.Conn, idle chan<- struct{}) *streams {
	return &streams{
		id: id, conn: conn, host: h, run: run, metrics: h.metrics, log: h.log, ctx: ctx,
		ackTo: id.Up(subjects.Ack, ""), wake: make(chan struct{}, 1), idle: idle,
		byRun: map[string]*stream{}, finished: newIDs(maxFinished, keepFinished), early: newIDs(maxEarly, keepEarly),
	}
}

// admit sets what becomes of new requests.
func (s *streams) admit(d door) {
	s.mu.Lock()
	if s.door != doorOver {
		s.door = d
	}
	s.mu.Unlock()
	s.signal()
}

// count is how many tunnels are known.
func (s *streams) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.byRun)
}

// ---- the bus's callback: nothing here blocks (I5) ----

// request takes a ProviderTunnelRequest.
func (s *streams) request(run string, data []byte) {
	now := s.run.now()
	s.mu.Lock()
	if st := s.byRun[run]; st != nil { // I1: the first is left alone
		s.mu.Unlock()
		s.metrics.dropped[dropDuplicate].Inc()
		st.post(func(m *mail) { m.again = true })
		return
	}
	switch {
	case s.door == doorShut || s.door == doorOver:
		s.mu.Unlock()
		s.metrics.dropped[dropEarly].Inc()
		return
	case s.finished.has(run, now):
		s.mu.Unlock()
		s.metrics.dropped[dropDuplicate].Inc()
		return
	}
	if len(s.byRun) >= maxStreams {
		if len(s.away) < maxAway {
			s.away = append(s.away, run)
		}
		s.mu.Unlock()
		s.signal()
		return
	}
	draining := s.door == doorDraining
	cancelled := s.early.has(run, now)
	s.mu.Unlock()

	req := new(iopv1.ProviderTunnelRequest)
	if req.UnmarshalVTUnsafe(data) != nil {
		s.metrics.dropped[dropMalformed].Inc()
		return
	}
	st := s.open(run, req, now)
	if st == nil {
		return
	}
	refusal := checkRequest(run, req)
	switch {
	case refusal != nil:
	case cancelled:
		refusal = errCancelled
	case draining:
		refusal = errDraining
	}
	var u use
	if refusal == nil {
		u, refusal = s.host.take(req.GetAdapter(), req.GetOperation() != opModels)
	}
	if refusal != nil {
		st.fail(refusal)
		st.cancel(refusal)
		if st.body != nil {
			st.body.close(refusal)
		}
		return
	}
	s.start(st, u, req)
}

// open makes the stream known; nil if the session ended meanwhile.
func (s *streams) open(run string, req *iopv1.ProviderTunnelRequest, now time.Time) *stream {
	credit := req.GetCredit()
	if credit == 0 {
		credit = wire.MinWindow // what both sides take where none was granted
	}
	ctx, cancel := context.WithCancelCause(s.ctx)
	st := &stream{
		all: s, run: run, subject: s.id.Up(subjects.Frame, run), ctx: ctx, cancel: cancel, began: now,
		lists: req.GetOperation() == opModels, room: make(chan struct{}, 1), index: -1,
		sender: tunnel.NewSender(tunnel.SenderConfig{Credit: credit, AckDelay: ackDelay, GiveUp: neverGiveUp}),
	}
	st.credit = st.sender.Credit()
	if t := req.GetTimeoutSec(); t > 0 && t <= math.MaxInt64/int64(time.Second) {
		st.deadline = now.Add(time.Duration(t) * time.Second)
	}
	if bound := s.host.stallTimeout(req.GetResponseStallTimeoutMs()); bound > 0 {
		st.watch.set(s.run.now, now, bound)
		st.lookAt = now.Add(bound)
	}
	if req.GetBodyFollows() && req.GetBodySize() <= math.MaxInt64 {
		bound := max(bodyBound, time.Duration(s.bodyBound.Load()))
		st.receiver = tunnel.NewReceiver(tunnel.ReceiverConfig{MaxWindow: s.bodyWindow()})
		st.body = newBodyReader(ctx, &st.watch, s.run, bound, int64(req.GetBodySize()), func(frame int) { //nolint:gosec // checked above
			st.post(func(m *mail) { m.consumed = append(m.consumed, frame) })
		})
		st.bodyAt = now.Add(bound)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.door == doorOver {
		cancel(errSessionEnded)
		return nil
	}
	s.byRun[run] = st
	if st.body != nil {
		s.bodies++
	}
	return st
}

// bodyWindow is how far the window of one more body may grow (J7).
func (s *streams) bodyWindow() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return max(wire.MinWindow, min(wire.MaxWindow, bodyMemory/uint64(s.bodies+1))) //nolint:gosec // a count
}

// start runs the exchange, and tells the loop, which owes Edge a sign of life.
func (s *streams) start(st *stream, u use, req *iopv1.ProviderTunnelRequest) {
	var (
		body io.Reader
		size int64
	)
	switch {
	case st.body != nil:
		body, size = st.body, int64(req.GetBodySize()) //nolint:gosec // checked by open
	case len(req.GetBody()) > 0:
		body, size = bytes.NewReader(req.GetBody()), int64(len(req.GetBody()))
	}
	s.run.start(func() { st.serve(u, req, body, size) }) // the host counts it: take to leave
	st.post(func(m *mail) { m.again = true })
}

// turnAway answers a request for which there was no room to remember it.
func (s *streams) turnAway(run string) {
	s.metrics.terminals[errFull.Class].Inc()
	f := iopv1.ProviderTunnelFrame{
		RunId: run, Sequence: 1, Kind: iopv1.ProviderTunnelFrame_ERROR,
		Error: errFull.Message, ErrorClass: string(errFull.Class),
	}
	data, err := f.MarshalVT()
	if err != nil {
		return
	}
	_ = s.conn.Publish(s.id.Up(subjects.Frame, run), data) // lost with the connection, as all is
}

// cancelRun takes a CancelRequest (C1).
func (s *streams) cancelRun(run string, data []byte) {
	var req iopv1.CancelRequest
	if req.UnmarshalVTUnsafe(data) != nil || req.GetRunId() != run {
		s.metrics.dropped[dropMalformed].Inc()
		return
	}
	now := s.run.now()
	s.mu.Lock()
	st := s.byRun[run]
	if st == nil && !s.finished.has(run, now) {
		s.early.add(run, now)
	}
	s.mu.Unlock()
	if st != nil {
		st.interrupt(errCancelled)
	}
}

// interrupt cancels the exchange; the stream ends within the close grace.
func (st *stream) interrupt(cause *wire.Error) {
	st.cancel(cause)
	st.post(func(m *mail) { m.cut = true })
}

// bodyFrame takes a BodyFrame.
func (s *streams) bodyFrame(run string, data []byte) {
	var f iopv1.BodyFrame
	if f.UnmarshalVTUnsafe(data) != nil || f.GetRunId() != run {
		s.metrics.dropped[dropMalformed].Inc()
		return
	}
	s.mu.Lock()
	st := s.byRun[run]
	if st == nil && s.door != doorOver && len(s.resets) < maxResets && !slices.Contains(s.resets, run) {
		s.resets = append(s.resets, run)
	}
	s.mu.Unlock()
	if st == nil {
		s.signal()
		return
	}
	flood := false
	st.post(func(m *mail) {
		if f.GetAcked() > 0 || f.GetCredit() > 0 {
			m.acknowledge(f.GetAcked(), f.GetCredit(), false, false)
		}
		cost := len(f.GetBody()) + wire.FrameOverhead
		if flood = m.bodySize+cost > mailBody; flood {
			return
		}
		m.bodySize += cost
		m.body = append(m.body, bodyFrame{seq: f.GetSequence(), data: f.GetBody(), last: f.GetLast(), failed: f.GetErrorClass()})
	})
	if flood {
		s.metrics.dropped[dropFlood].Inc()
	}
}

// acks takes a StreamAck.
func (s *streams) acks(data []byte) {
	var a iopv1.StreamAck
	if a.UnmarshalVTUnsafe(data) != nil {
		s.metrics.dropped[dropMalformed].Inc()
		return
	}
	for _, e := range a.GetEntries() {
		if e.GetDirection() != dirFrame {
			continue
		}
		s.mu.Lock()
		st := s.byRun[e.GetRunId()]
		s.mu.Unlock()
		if st != nil {
			st.post(func(m *mail) { m.acknowledge(e.GetAcked(), e.GetCredit(), e.GetResend(), e.GetReset_()) })
		}
	}
}

// acknowledge adds to what the loop has not seen yet: the highest of each.
func (m *mail) acknowledge(acked, credit uint64, resend, reset bool) {
	a := &m.ack
	if m.acked && acked < a.Acked {
		resend = false // an old one, overtaken
	} else if acked > a.Acked {
		a.Resend = false
	}
	m.acked = true
	a.Kind = tunnel.AckReceived
	a.Acked, a.Credit = max(a.Acked, acked), max(a.Credit, credit)
	a.Resend, a.Reset = a.Resend || resend, a.Reset || reset
}

// ---- the send loop ----

func (s *streams) signal() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

func (s *streams) wakeFor(st *stream) {
	s.mu.Lock()
	s.dirty = append(s.dirty, st)
	s.mu.Unlock()
	s.signal()
}

// loop runs until the session's context ends. It is the only place here that
// waits, and reads the clock for the cores.
func (s *streams) loop() {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	var armed time.Time
	for {
		if at := first(s.ackAt, s.scanAt); !at.Equal(armed) {
			if armed = at; at.IsZero() {
				timer.Stop()
			} else {
				timer.Reset(max(time.Until(at), 0))
			}
		}
		select {
		case <-s.wake:
		case <-timer.C:
			armed = time.Time{}
		case <-s.ctx.Done():
			s.over()
			return
		}
		s.round(s.run.now())
	}
}

// round does all that is due now.
func (s *streams) round(now time.Time) {
	s.mu.Lock()
	dirty, resets, away := s.dirty, s.resets, s.away
	s.dirty, s.resets, s.away = s.spare, nil, nil
	s.mu.Unlock()
	for i, st := range dirty {
		s.serve(now, st)
		dirty[i] = nil
	}
	s.spare = dirty[:0]
	for _, run := range away {
		s.turnAway(run)
	}
	if !s.scanAt.IsZero() && !now.Before(s.scanAt) {
		s.scan(now)
	}
	if len(resets) > 0 || (!s.ackAt.IsZero() && !now.Before(s.ackAt)) {
		s.acknowledge(resets)
	}
	s.mu.Lock()
	quiet := s.door == doorDraining && len(s.byRun) == 0
	s.mu.Unlock()
	if quiet {
		select {
		case s.idle <- struct{}{}:
		default: // it was told
		}
	}
}

// serve takes one stream's mail.
func (s *streams) serve(now time.Time, st *stream) {
	st.mu.Lock()
	m := st.mail
	st.mail, st.queued = s.mails, false
	st.mu.Unlock()

	if m.acked {
		s.send(now, st, m.ack)
	}
	for _, f := range m.frames {
		s.send(now, st, tunnel.SendEvent{Kind: tunnel.Offer, Frame: f})
	}
	if st.receiver != nil {
		for _, size := range m.consumed {
			s.receive(now, st, tunnel.RecvEvent{Kind: tunnel.Consumed, Body: size})
		}
		for _, f := range m.body {
			s.bodyArrived(now, st, f)
		}
	}
	if m.cut && st.forceAt.IsZero() {
		st.forceAt = now.Add(s.host.closeGrace())
	}
	if m.again {
		if st.body != nil {
			st.body.frame(now)
		}
		s.owe(st, now.Add(ackDelay))
	}
	if !st.gone {
		st.mirrorCredit()
		s.schedule(st)
	}
	s.mails = m.emptied()
}

// emptied returns the mail's slices for the next one to fill. Large ones go.
func (m *mail) emptied() mail {
	const most = 64
	clear(m.frames)
	clear(m.body)
	e := mail{frames: m.frames[:0], body: m.body[:0], consumed: m.consumed[:0]}
	if cap(e.frames) > most || cap(e.body) > most || cap(e.consumed) > most {
		return mail{}
	}
	return e
}

// mirrorCredit shows the exchange what the sender was granted.
func (st *stream) mirrorCredit() {
	credit := st.sender.Credit()
	st.mu.Lock()
	more := credit > st.credit
	st.credit = credit
	st.mu.Unlock()
	if more {
		st.signalRoom()
	}
}

// send steps the sending half and does what it orders.
func (s *streams) send(now time.Time, st *stream, ev tunnel.SendEvent) {
	if st.gone {
		if ev.Kind == tunnel.Offer {
			s.buffers.put(ev.Frame.Data)
		}
		return
	}
	s.sends = st.sender.Step(now, ev, s.sends[:0])
	for _, ef := range s.sends {
		switch ef.Kind {
		case tunnel.SendFrame:
			// An error is the connection's end, which the supervisor sees.
			_ = s.conn.Publish(st.subject, ef.Frame.Data)
			st.answered = true
			if ef.Again {
				s.metrics.resent.Inc()
			} else {
				s.metrics.sent.Inc()
			}
		case tunnel.ReleaseFrame:
			s.buffers.put(ef.Frame.Data)
		case tunnel.SenderDone:
			s.forget(now, st)
		case tunnel.SenderFailed:
			s.log.Warn(evStream, slog.String(keyRun, st.run), slog.Any(keyClass, ef.Err.Class), slog.Any(keyError, ef.Err))
			st.drop(ef.Err)
			s.forget(now, st)
		}
	}
}

// bodyArrived steps the receiving half with one frame of the request's body.
func (s *streams) bodyArrived(now time.Time, st *stream, f bodyFrame) {
	st.body.frame(now)
	last := f.last || f.failed != ""
	ev := tunnel.RecvEvent{Kind: tunnel.FrameReceived, Seq: f.seq, Body: len(f.data), Terminal: last, Digest: digest(f)}
	if !s.receive(now, st, ev) {
		return
	}
	kept, err := st.body.deliver(f)
	if !kept {
		s.receive(now, st, tunnel.RecvEvent{Kind: tunnel.Consumed, Body: len(f.data)})
	}
	if err != nil {
		s.breakOff(now, st, err)
	}
}

// receive steps the receiving half, and reports whether the event's frame is to
// be delivered.
func (s *streams) receive(now time.Time, st *stream, ev tunnel.RecvEvent) (deliver bool) {
	if st.gone {
		return false
	}
	s.recvs = st.receiver.Step(now, ev, s.recvs[:0])
	for _, ef := range s.recvs {
		switch ef.Kind {
		case tunnel.Deliver:
			deliver = true
		case tunnel.AckSoon:
			s.owe(st, now.Add(ackDelay))
			st.bodyOwed = true
		case tunnel.AckNow:
			s.owe(st, now)
			st.bodyOwed = true
		case tunnel.ReceiverFailed:
			s.log.Warn(evStream, slog.String(keyRun, st.run), slog.Any(keyClass, ef.Err.Class), slog.Any(keyError, ef.Err))
			s.breakOff(now, st, ef.Err)
		}
	}
	return deliver
}

// breakOff cancels the exchange from within the loop.
func (s *streams) breakOff(now time.Time, st *stream, why *wire.Error) {
	s.cut(now, st, why)
	st.body.close(why)
}

// cut cancels the exchange and gives it the close grace to return in. What was
// cancelled before keeps its cause, and its grace.
func (s *streams) cut(now time.Time, st *stream, why *wire.Error) {
	st.cancel(why)
	if st.forceAt.IsZero() {
		st.forceAt = now.Add(s.host.closeGrace())
	}
}

// look cuts the exchange of a provider that stalls (W2), unless something else did
// so before (W8).
func (s *streams) look(now time.Time, st *stream) {
	next, stalled := st.watch.look(now)
	if !stalled {
		st.lookAt = next
		return
	}
	st.lookAt = time.Time{}
	s.cut(now, st, errStalled(st.watch.bound))
}

var digestSeed = maphash.MakeSeed()

// digest tells a repeated frame from another of the same sequence.
func digest(f bodyFrame) uint64 {
	d := maphash.Bytes(digestSeed, f.data)
	if f.last {
		d++
	}
	return d + maphash.String(digestSeed, f.failed)
}

// owe has the stream's acknowledgement sent at the given time at the latest.
func (s *streams) owe(st *stream, at time.Time) {
	if st.gone {
		return
	}
	if !st.ackOwed {
		st.ackOwed = true
		s.owed = append(s.owed, st)
	}
	s.ackAt = first(s.ackAt, at)
}

// acknowledge sends what is owed. A request needs no acknowledgement of its own
// where a frame went out already.
func (s *streams) acknowledge(resets []string) {
	s.ackAt = time.Time{}
	for _, run := range resets {
		s.entry(&iopv1.StreamAck_Entry{RunId: run, Reset_: true, Direction: dirBody})
	}
	for i, st := range s.owed {
		s.owed[i] = nil
		st.ackOwed = false
		if st.gone || (!st.bodyOwed && st.answered) {
			continue
		}
		e := &iopv1.StreamAck_Entry{RunId: st.run, Direction: dirBody}
		if st.receiver != nil {
			a := st.receiver.Ack()
			e.Acked, e.Credit, e.Resend = a.Acked, a.Credit, a.Resend
		}
		st.bodyOwed = false
		s.entry(e)
	}
	s.owed = s.owed[:0]
	s.flushEntries()
}

// scan looks after every stream with something due.
func (s *streams) scan(now time.Time) {
	s.scanAt = time.Time{}
	for i := len(s.timed) - 1; i >= 0; i-- { // backwards: a stream may leave the list
		st := s.timed[i]
		if st.hasEnded() {
			st.deadline, st.forceAt, st.lookAt, st.bodyAt = time.Time{}, time.Time{}, time.Time{}, time.Time{}
		}
		if due(now, st.deadline) {
			st.deadline = time.Time{}
			s.cut(now, st, errDeadline)
		}
		if due(now, st.lookAt) {
			s.look(now, st)
		}
		if due(now, st.bodyAt) {
			var silent bool
			if st.bodyAt, silent = st.body.look(now); silent {
				st.bodyAt = time.Time{}
				s.breakOff(now, st, errBodySilent)
			}
		}
		if due(now, st.forceAt) {
			st.forceAt = time.Time{}
			st.fail(wire.AsError(context.Cause(st.ctx)))
		}
		if due(now, st.sender.Deadline()) {
			s.send(now, st, tunnel.SendEvent{Kind: tunnel.SendDeadline})
		}
		if !st.gone {
			s.schedule(st)
		}
	}
}

func due(now, at time.Time) bool { return !at.IsZero() && !now.Before(at) }

// schedule keeps the stream in the list of the timed while something is due.
func (s *streams) schedule(st *stream) {
	at := first(first(first(first(st.sender.Deadline(), st.deadline), st.forceAt), st.lookAt), st.bodyAt)
	switch {
	case at.IsZero():
		s.unschedule(st)
		return
	case st.index < 0:
		st.index = len(s.timed)
		s.timed = append(s.timed, st)
	}
	s.scanAt = first(s.scanAt, at)
}

func (s *streams) unschedule(st *stream) {
	if st.index < 0 {
		return
	}
	last := len(s.timed) - 1
	s.timed[st.index] = s.timed[last]
	s.timed[st.index].index = st.index
	s.timed[last] = nil
	s.timed = s.timed[:last]
	st.index = -1
}

// forget ends the stream's part: its terminal was acknowledged, or nobody will.
func (s *streams) forget(now time.Time, st *stream) {
	st.gone = true
	s.unschedule(st)
	s.mu.Lock()
	delete(s.byRun, st.run)
	s.finished.add(st.run, now)
	if st.body != nil {
		s.bodies--
	}
	s.mu.Unlock()
}

// ended records a terminal. It is called once for each stream (I2).
func (s *streams) ended(st *stream, why *wire.Error) {
	level, class := slog.LevelDebug, wire.Class("")
	if why != nil {
		class = why.Class
		switch class {
		case wire.Capacity, wire.Draining, wire.Cancelled: // as meant, and many under load
		case wire.Unreachable:
			// A provider that is not there is asked for its list again and again.
			if !st.lists {
				level = slog.LevelInfo
			}
		default:
			level = slog.LevelInfo
		}
	}
	s.metrics.terminals[class].Inc()
	if s.log.Enabled(s.ctx, level) {
		s.log.LogAttrs(s.ctx, level, evTunnel, slog.String(keyRun, st.run), slog.Any(keyClass, class),
			slog.Duration(keyDuration, s.run.now().Sub(st.began)))
	}
}

// cutRest ends what still runs at a stop.
func (s *streams) cutRest() {
	s.mu.Lock()
	rest := make([]*stream, 0, len(s.byRun))
	for _, st := range s.byRun {
		rest = append(rest, st)
	}
	s.mu.Unlock()
	slices.SortFunc(rest, func(a, b *stream) int { return strings.Compare(a.run, b.run) })
	for _, st := range rest {
		st.interrupt(errStopping)
	}
}

// over drops everything: the session has ended, and nothing of it is sent (I4).
func (s *streams) over() {
	s.mu.Lock()
	s.door = doorOver
	rest := s.byRun
	s.byRun, s.dirty, s.resets, s.away = map[string]*stream{}, nil, nil, nil
	s.mu.Unlock()
	for _, st := range rest {
		st.gone = true
		st.drop(errSessionEnded)
	}
}

// entry adds one to the StreamAck being built.
func (s *streams) entry(e *iopv1.StreamAck_Entry) {
	if len(s.entries.Entries) == maxAckEntries {
		s.flushEntries()
	}
	s.entries.Entries = append(s.entries.Entries, e)
}

func (s *streams) flushEntries() {
	if len(s.entries.Entries) == 0 {
		return
	}
	n := s.entries.SizeVT()
	if cap(s.pack) < n {
		s.pack = make([]byte, n)
	}
	if _, err := s.entries.MarshalToSizedBufferVT(s.pack[:n]); err != nil {
		panic("BUG: node: acknowledgements do not encode")
	}
	_ = s.conn.Publish(s.ackTo, s.pack[:n]) // an error is the connection's end
	clear(s.entries.Entries)
	s.entries.Entries = s.entries.Entries[:0]
}

// first returns the earlier of two times, of which zero is none.
func first(a, b time.Time) time.Time {
	if a.IsZero() || (!b.IsZero() && b.Before(a)) {
		return b
	}
	return a
}
