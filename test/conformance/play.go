package conformance

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/tunnel"
	"github.com/iop-fabric/iop/wire"
	"github.com/iop-fabric/iop/wire/iopv1"
)

// Hang is how long a step waits for what must come. It measures nothing.
const Hang = 30 * time.Second

// World is where a case is played: the other side of the protocol, and the bus.
type World interface {
	// Publish sends to the side under test, in its session; gen is added to the
	// session's generation.
	Publish(gen int, v subjects.Verb, run string, data []byte) error
	// Receive sets who is told of what it sends about runs.
	Receive(func(v subjects.Verb, run string, data []byte))
	// Settle waits until nothing moves, where time is virtual.
	Settle()
	Virtual() bool
}

// NodeWorld is one with a Node under test.
type NodeWorld interface {
	World
	Providers() *Providers
}

// EdgeWorld is one with an Edge under test.
type EdgeWorld interface {
	World
	// Call makes a caller's request of so many bytes; it is told of each change.
	Call(run string, body []byte, timeout time.Duration, changed func()) Caller
	Fence()
	Lost() bool            // the session was given up for breaking rules
	Connection(there bool) // Edge's
}

// Caller is one caller of an Edge.
type Caller interface {
	// State is what it got so far. class is the error's, "?" if it cannot be told.
	State() (status int, body []byte, over bool, class string)
	Leave()
	Stop(stop bool) // reading
	Slot() string   // how the place came back; "": it is held
}

type player struct {
	c       *Case
	w       World
	virtual bool
	changed chan struct{}
	last    time.Time // when the step before was over

	mu      sync.Mutex
	runs    map[string]*run
	byID    map[string]*run
	waiting []*run // calls whose request did not come yet
	callers map[string]Caller
	serve   bool
	batches []int // entries of each message of acknowledgements
	ended   bool
	err     error // of publishing
}

// Play plays one case; nil: everything came as it says.
func Play(c *Case, w World) error {
	p := &player{
		c: c, w: w, virtual: w.Virtual(), changed: make(chan struct{}, 1), last: time.Now(),
		runs: map[string]*run{}, byID: map[string]*run{}, callers: map[string]Caller{},
	}
	w.Receive(p.receive)
	defer w.Receive(func(subjects.Verb, string, []byte) {})
	defer p.end()
	if nw, ok := w.(NodeWorld); ok {
		nw.Providers().setChanged(p.wake)
	}
	for _, s := range c.Steps {
		if err := p.step(s); err != nil {
			return fmt.Errorf("%s:%d: case %s (%s): %s: %w", c.File, s.Line, c.ID, c.Intent, s.text, err)
		}
		w.Settle()
		p.last = time.Now()
		p.mu.Lock()
		err := p.wrong()
		p.mu.Unlock()
		if err != nil {
			return fmt.Errorf("%s:%d: case %s (%s): by %s: %w", c.File, s.Line, c.ID, c.Intent, s.text, err)
		}
	}
	return nil
}

// wrong is what must not be, whatever the script says.
func (p *player) wrong() error {
	for _, r := range p.runs {
		if r.bad != nil {
			return r.bad
		}
	}
	return p.err
}

// end leaves nothing behind: what is still open is given up.
func (p *player) end() {
	p.mu.Lock()
	p.ended = true
	for _, r := range p.runs {
		r.stopped = true
		if r.timer != nil {
			r.timer.Stop()
		}
		if p.c.Role == Node {
			p.publishAck(&iopv1.StreamAck_Entry{RunId: r.id, Reset_: true, Direction: "frame"})
		}
	}
	callers := p.callers
	p.mu.Unlock()
	for _, c := range callers {
		c.Stop(false)
		c.Leave()
	}
	if p.c.Role == Edge {
		p.w.Settle()
		p.mu.Lock()
		for _, r := range p.byID {
			seq := uint64(1)
			for s := range r.lens {
				seq = max(seq, s+1)
			}
			if r.sender != nil {
				seq = max(seq, r.sender.NextSeq())
			}
			f := &iopv1.ProviderTunnelFrame{RunId: r.id, Sequence: seq, Kind: iopv1.ProviderTunnelFrame_ERROR, ErrorClass: "cancelled", Error: "the case is over"}
			p.publish(0, subjects.Frame, r.id, encode(f))
		}
		p.mu.Unlock()
	}
	p.w.Settle()
}

func (p *player) wake() {
	select {
	case p.changed <- struct{}{}:
	default:
	}
}

// until waits for something.
func (p *player) until(ok func() (bool, error)) error {
	hang := time.NewTimer(Hang)
	defer hang.Stop()
	for {
		p.mu.Lock()
		done, err := ok()
		if err == nil && !done {
			err = p.wrong()
		}
		p.mu.Unlock()
		if done || err != nil {
			return err
		}
		select {
		case <-p.changed:
		case <-hang.C:
			return errors.New("it did not come")
		}
	}
}

type encoder interface{ MarshalVT() ([]byte, error) }

func encode(m encoder) []byte {
	data, err := m.MarshalVT()
	if err != nil {
		panic("BUG: conformance: " + err.Error())
	}
	return data
}

func (p *player) publish(gen int, v subjects.Verb, run string, data []byte) {
	if err := p.w.Publish(gen, v, run, data); err != nil && p.err == nil && !p.ended {
		p.err = fmt.Errorf("publish %s: %w", v, err)
	}
}

func (p *player) publishAck(e *iopv1.StreamAck_Entry) {
	p.publish(0, subjects.Ack, "", encode(&iopv1.StreamAck{Entries: []*iopv1.StreamAck_Entry{e}}))
}

// receive takes what the side under test sends.
func (p *player) receive(v subjects.Verb, id string, data []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	defer p.wake()
	if v == subjects.Ack {
		var a iopv1.StreamAck
		if err := a.UnmarshalVT(data); err != nil {
			p.err = fmt.Errorf("an acknowledgement does not decode: %w", err)
			return
		}
		p.batches = append(p.batches, len(a.GetEntries()))
		want := "body"
		if p.c.Role == Edge {
			want = "frame"
		}
		for _, e := range a.GetEntries() {
			if r := p.byID[e.GetRunId()]; r != nil && e.GetDirection() == want {
				r.acked(e)
			} else if r != nil {
				r.wrong("an acknowledgement of direction %q", e.GetDirection())
			}
		}
		return
	}
	r := p.byID[id]
	if r == nil && v == subjects.Tunnel && len(p.waiting) > 0 {
		r = p.waiting[0]
		p.waiting = p.waiting[1:]
		r.id = id
		p.byID[id] = r
	}
	if r == nil {
		return // of a case before
	}
	m := &message{}
	var err error
	switch v {
	case subjects.Frame:
		m.frame = &iopv1.ProviderTunnelFrame{}
		if err = m.frame.UnmarshalVT(data); err == nil {
			f := m.frame
			m.seq = f.GetSequence()
			terminal := f.GetEnd() || f.GetKind() == iopv1.ProviderTunnelFrame_END || f.GetKind() == iopv1.ProviderTunnelFrame_ERROR
			r.numbered(v, m, data, len(f.GetBody()), terminal)
			if r.honest {
				r.pump()
			}
		}
	case subjects.Body:
		m.body = &iopv1.BodyFrame{}
		if err = m.body.UnmarshalVT(data); err == nil {
			m.seq = m.body.GetSequence()
			r.numbered(v, m, data, len(m.body.GetBody()), m.body.GetLast() || m.body.GetErrorClass() != "")
		}
	case subjects.Tunnel:
		m.req = &iopv1.ProviderTunnelRequest{}
		if err = m.req.UnmarshalVT(data); err == nil {
			m.again = r.known
			r.got[v] = append(r.got[v], m)
			r.request1(m.req)
		}
	case subjects.Cancel:
		r.got[v] = append(r.got[v], m)
	default:
	}
	if err != nil {
		r.wrong("%s does not decode: %v", v, err)
	}
}

// request1 is an honest Node's part in a request.
func (r *run) request1(q *iopv1.ProviderTunnelRequest) {
	if !r.known {
		r.known, r.honest = true, r.p.serve
		r.bytes, r.over = len(q.GetBody()), !q.GetBodyFollows()
		if r.honest {
			r.sender = tunnel.NewSender(tunnel.SenderConfig{Credit: q.GetCredit()})
			r.recv = tunnel.NewReceiver(tunnel.ReceiverConfig{})
		}
	}
	if r.honest {
		r.p.publishAck(&iopv1.StreamAck_Entry{RunId: r.id, Direction: "body"})
		r.pump()
	}
}

func (p *player) run(s Step) (*run, error) {
	label := s.str("run", "r1")
	r := p.runs[label]
	if r == nil {
		return nil, fmt.Errorf("there is no run %s yet", label)
	}
	return r, nil
}

// newRun makes the run a request opens.
func (p *player) newRun(s Step, id string) *run {
	label := s.str("run", "r1")
	r := newRun(p, label, id)
	p.runs[label] = r
	if id != "" {
		p.byID[id] = r
	}
	return r
}

func (p *player) elapsed(s Step) error {
	if !s.has("after") || !p.virtual { // real time is the machine's affair, too
		return nil
	}
	if took := time.Since(p.last); took != s.duration("after") {
		return fmt.Errorf("it came after %v", took)
	}
	return nil
}

func (p *player) step(s Step) error {
	switch s.Verb {
	case "send":
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.send(s)
	case "expect", "again":
		switch s.Noun {
		case "silence":
			return p.silence(s)
		case "batch":
			return p.batch(s)
		}
		if err := p.expect(s); err != nil {
			return err
		}
		return p.elapsed(s)
	case "outcome":
		return p.outcome(s)
	case "provider":
		return p.provider(s)
	case "advance":
		<-time.After(s.duration("for"))
		return nil
	case "call":
		return p.call(s)
	case "serve":
		p.mu.Lock()
		defer p.mu.Unlock()
		p.serve = true
		return nil
	case "fence":
		p.w.(EdgeWorld).Fence()
		return nil
	case "connection":
		p.w.(interface{ Connection(there bool) }).Connection(s.Noun == "back")
		return nil
	case "session":
		lost := s.Noun == "lost"
		return p.until(func() (bool, error) {
			is := p.w.(EdgeWorld).Lost()
			if is && !lost {
				return false, errors.New("the session was lost")
			}
			return is == lost, nil
		})
	}
	p.mu.Lock()
	if s.Verb == "open" {
		defer p.mu.Unlock()
		return p.open(s)
	}
	r, err := p.run(s)
	p.mu.Unlock()
	if err != nil {
		return err
	}
	switch s.Verb {
	case "cancel":
		p.mu.Lock()
		defer p.mu.Unlock()
		p.publish(0, subjects.Cancel, r.id, encode(&iopv1.CancelRequest{RunId: r.id}))
	case "pause", "resume":
		p.mu.Lock()
		defer p.mu.Unlock()
		if r.paused = s.Verb == "pause"; !r.paused {
			r.consume()
			r.acknowledge(subjects.Frame)
		}
	case "node":
		return p.node(s, r)
	case "caller":
		c := p.callers[r.label]
		switch s.Noun {
		case "leave":
			c.Leave()
		case "stop":
			c.Stop(true)
		case "read":
			c.Stop(false)
		}
	case "slot":
		return p.slot(s, p.callers[r.label])
	}
	return nil
}

// slot asks how a call's place came back. Where time is real it is asked for again
// and again, for nothing tells of it.
func (p *player) slot(s Step, c Caller) error {
	for hang := time.Now().Add(Hang); ; <-time.After(10 * time.Millisecond) {
		how := c.Slot()
		switch {
		case s.Noun == "held" && how != "":
			return fmt.Errorf("it came back: %s", how)
		case s.Noun == "held":
			return nil
		case how != "" && how != "?" && s.has("how") && how != s.Vals["how"]:
			return fmt.Errorf("it came back: %s", how)
		case how != "":
			return nil
		case time.Now().After(hang):
			return errors.New("it did not come back")
		}
	}
}

// ---- what is sent ----

func (p *player) tunnelRequest(s Step, id string) *iopv1.ProviderTunnelRequest {
	n := s.int("len", 0)
	q := &iopv1.ProviderTunnelRequest{
		RunId: s.str("id", id), Adapter: s.str("adapter", "a"), Target: "m", Operation: s.str("operation", "chat_completions"),
		Method: "POST", RawQuery: "run=" + id, Credit: s.number("credit", wire.MinWindow),
		TimeoutSec: int64(s.number("timeout_sec", 0)), ResponseStallTimeoutMs: int64(s.number("stall_ms", 0)), //nolint:gosec // negative ones are meant
		BodyFollows: s.Flags["body_follows"], BodySize: s.number("body_size", uint64(n)), //nolint:gosec // a length
		Headers: fields(s.Vals["header"]),
	}
	if n > 0 {
		q.Body = pattern(0, n)
	}
	if s.Flags["lease"] {
		q.CredentialLease = []byte("x")
	}
	return q
}

// fields are headers or trailers as a script names them.
func fields(name string) []*iopv1.Header {
	h := func(name, value string) []*iopv1.Header {
		return []*iopv1.Header{{Name: name, Value: []byte(value)}}
	}
	switch name {
	case "ok":
		return h("X-Conformance", "1")
	case "latin1":
		return h("X-Conformance", "caf\xe9")
	case "crlf":
		return h("X-Conformance", "a\r\nSet-Cookie: b")
	case "nul":
		return h("X-Conformance", "a\x00b")
	case "name":
		return h("X Conformance", "1")
	case "empty":
		return h("", "1")
	case "huge":
		return h("X-Conformance", strings.Repeat("x", wire.MaxHeaders))
	}
	return nil
}

var kinds = map[string]iopv1.ProviderTunnelFrame_Kind{
	"none":  iopv1.ProviderTunnelFrame_KIND_UNSPECIFIED,
	"start": iopv1.ProviderTunnelFrame_RESPONSE_START,
	"body":  iopv1.ProviderTunnelFrame_BODY,
	"end":   iopv1.ProviderTunnelFrame_END,
	"error": iopv1.ProviderTunnelFrame_ERROR,
	"usage": iopv1.ProviderTunnelFrame_USAGE,
}

func kind(name string) (iopv1.ProviderTunnelFrame_Kind, error) {
	if k, ok := kinds[name]; ok {
		return k, nil
	}
	n, err := strconv.ParseInt(name, 10, 32)
	if err != nil {
		return 0, fmt.Errorf("%q is no kind of frame", name)
	}
	return iopv1.ProviderTunnelFrame_Kind(n), nil
}

func (p *player) send(s Step) error {
	if s.Noun == "tunnel" && p.runs[s.str("run", "r1")] == nil {
		p.newRun(s, wire.NewRunID())
	}
	r := p.runs[s.str("run", "r1")]
	if r == nil { // a run that nobody opened
		r = p.newRun(s, wire.NewRunID())
	}
	switch s.Noun {
	case "tunnel":
		p.publish(0, subjects.Tunnel, r.id, encode(p.tunnelRequest(s, r.id)))
	case "cancel":
		p.publish(0, subjects.Cancel, r.id, encode(&iopv1.CancelRequest{RunId: s.str("id", r.id)}))
	case "ack":
		def := "frame"
		if p.c.Role == Edge {
			def = "body"
		}
		p.publishAck(&iopv1.StreamAck_Entry{
			RunId: s.str("id", r.id), Acked: s.number("acked", 0), Credit: s.number("credit", 0),
			Resend: s.Flags["resend"], Reset_: s.Flags["reset"], Direction: s.str("direction", def),
		})
	case "garbage":
		data, err := hex.DecodeString(s.Vals["hex"])
		if err != nil {
			return err
		}
		v, run := subjects.Verb(s.str("verb", "ack")), r.id
		if v == subjects.Ack {
			run = ""
		}
		for range s.int("times", 1) {
			p.publish(0, v, run, data)
		}
	case "body":
		seq := s.number("seq", 0)
		p.publish(0, subjects.Body, r.id, encode(&iopv1.BodyFrame{
			RunId: s.str("id", r.id), Sequence: seq, Body: r.bodyOf(s, seq), Last: s.Flags["last"], ErrorClass: s.Vals["class"],
			Acked: s.number("acked", 0), Credit: s.number("credit", 0),
		}))
	case "frame":
		seq := s.number("seq", 0)
		for range s.int("times", 1) {
			f, err := r.frame(s, seq)
			if err != nil {
				return err
			}
			p.publish(s.int("gen", 0), subjects.Frame, r.id, encode(f))
			if s.Flags["rising"] {
				seq++
			}
		}
	}
	return nil
}

func (r *run) frame(s Step, seq uint64) (*iopv1.ProviderTunnelFrame, error) {
	k, err := kind(s.str("kind", "body"))
	if err != nil {
		return nil, err
	}
	f := &iopv1.ProviderTunnelFrame{
		RunId: s.str("id", r.id), Sequence: seq, Kind: k, Body: r.bodyOf(s, seq), End: s.Flags["end"],
		Headers: fields(s.Vals["header"]), Trailers: fields(s.Vals["trailer"]),
		ErrorClass: s.Vals["class"],
	}
	if k == iopv1.ProviderTunnelFrame_RESPONSE_START {
		f.Status = int32(s.int("status", 200)) //nolint:gosec // any number is meant
		if f.Headers == nil {
			f.Headers = []*iopv1.Header{{Name: "Content-Type", Value: []byte("text/plain")}}
		}
	}
	if k == iopv1.ProviderTunnelFrame_ERROR {
		f.Error = s.str("error", "as the case says")
	}
	if s.Flags["usage"] {
		f.Usage = &iopv1.Usage{TotalTokens: 1}
	}
	if s.Flags["forged"] {
		f.Metadata = map[string]string{"forged": "yes"}
	}
	return f, nil
}

// open is an honest Edge's request: with its body, and everything acknowledged.
func (p *player) open(s Step) error {
	r := p.newRun(s, wire.NewRunID())
	r.honest, r.recv = true, tunnel.NewReceiver(tunnel.ReceiverConfig{Window: s.number("credit", 0), MaxWindow: s.number("credit", 0)})
	n := s.int("len", 0)
	q := p.tunnelRequest(s, r.id)
	q.Credit = r.recv.Window()
	if n > wire.MaxBody {
		q.Body, q.BodyFollows = nil, true
		r.sender = tunnel.NewSender(tunnel.SenderConfig{Credit: wire.MinWindow})
		for from := 0; from < n; from += wire.MaxBody {
			k := min(n-from, wire.MaxBody)
			last := from+k == n
			r.pending = append(r.pending, offer{body: k, terminal: last, make: func(seq uint64) []byte {
				return encode(&iopv1.BodyFrame{RunId: r.id, Sequence: seq, Body: pattern(from, k), Last: last})
			}})
		}
	}
	r.request = encode(q)
	p.publish(0, subjects.Tunnel, r.id, r.request)
	r.repeat()
	r.pump()
	return nil
}

func (p *player) call(s Step) error {
	p.mu.Lock()
	r := p.newRun(s, "")
	p.waiting = append(p.waiting, r)
	n := s.int("len", 64)
	r.whole = []byte(fmt.Sprintf(`{"model":"m","pad":"%s"}`, strings.Repeat("0123456789", n/10+1)[:max(n-22, 0)]))
	p.mu.Unlock()
	c := p.w.(EdgeWorld).Call(r.label, r.whole, s.duration("timeout"), p.wake)
	p.mu.Lock()
	p.callers[r.label] = c
	p.mu.Unlock()
	return nil
}

// node is what an honest Node does with a run.
func (p *player) node(s Step, r *run) error {
	p.mu.Lock()
	switch s.Noun {
	case "got":
		p.mu.Unlock()
		return p.until(func() (bool, error) {
			if want := s.int("bytes", 0); r.over && r.bytes != want {
				return false, fmt.Errorf("the Node got %d bytes", r.bytes)
			}
			return r.known && r.over, nil
		})
	case "cancelled":
		p.mu.Unlock()
		return p.until(func() (bool, error) { return len(r.got[subjects.Cancel]) > 0, nil })
	}
	defer p.mu.Unlock()
	n := s.int("len", 0)
	for range s.int("times", 1) {
		from := r.sent
		r.sent += n
		kinds := map[string]string{"start": "start", "body": "body", "usage": "usage", "end": "end", "error": "error"}
		terminal := s.Flags["end"] || s.Noun == "end" || s.Noun == "error"
		r.pending = append(r.pending, offer{body: n, terminal: terminal, control: n == 0, make: func(seq uint64) []byte {
			fs := s
			fs.Vals = map[string]string{"kind": kinds[s.Noun], "status": s.str("status", "200"), "class": s.Vals["class"], "len": "0"}
			fs.Flags = map[string]bool{"end": s.Flags["end"], "usage": s.Noun == "usage"}
			f, err := r.frame(fs, seq)
			if err != nil {
				panic("BUG: conformance: " + err.Error())
			}
			f.Body = pattern(from, n)
			return encode(f)
		}})
	}
	r.pump()
	return nil
}

// ---- what is expected ----

func (p *player) expect(s Step) error {
	v := subjects.Verb(s.Noun)
	if v == subjects.Ack {
		return p.expectAck(s)
	}
	return p.until(func() (bool, error) {
		r, err := p.run(s)
		if err != nil {
			return false, err
		}
		for r.at[v] < len(r.got[v]) {
			m := r.got[v][r.at[v]]
			r.at[v]++
			switch {
			case s.Verb == "again" && m.again && (!s.has("seq") || m.seq == s.number("seq", 0)):
				return true, nil
			case m.again: // any may come again
			case s.Verb == "again":
				return false, fmt.Errorf("sequence %d came, and is new", m.seq)
			default:
				return true, s.matches(m)
			}
		}
		return false, nil
	})
}

// matches compares what the step names.
func (s Step) matches(m *message) error {
	for k := range s.Vals {
		want := s.number(k, 0)
		var is uint64
		switch k {
		case "seq":
			is = m.seq
		case "len":
			is = uint64(len(m.frame.GetBody()) + len(m.body.GetBody()) + len(m.req.GetBody()))
		case "status":
			is = uint64(m.frame.GetStatus()) //nolint:gosec // a status
		case "body_size":
			is = m.req.GetBodySize()
		case "credit":
			is = m.req.GetCredit()
		case "timeout_sec":
			is = uint64(m.req.GetTimeoutSec()) //nolint:gosec // a time
		case "kind":
			w, err := kind(s.Vals[k])
			if err != nil {
				return err
			}
			if w != m.frame.GetKind() {
				return fmt.Errorf("the kind is %v (class %q)", m.frame.GetKind(), m.frame.GetErrorClass())
			}
			continue
		case "class":
			if c := m.frame.GetErrorClass(); c != s.Vals[k] {
				return fmt.Errorf("the class is %q: %s", c, m.frame.GetError())
			}
			continue
		default:
			continue
		}
		if is != want {
			return fmt.Errorf("%s is %d", k, is)
		}
	}
	for f := range s.Flags {
		is := map[string]bool{
			"end": m.frame.GetEnd(), "last": m.body.GetLast(), "body_follows": m.req.GetBodyFollows(), "usage": m.frame.GetUsage() != nil,
		}[f]
		if !is {
			return fmt.Errorf("%s is not set", f)
		}
	}
	return nil
}

func (p *player) expectAck(s Step) error {
	return p.until(func() (bool, error) {
		r, err := p.run(s)
		if err != nil {
			return false, err
		}
		for r.ack < len(r.acks) {
			e := r.acks[r.ack]
			r.ack++
			if s.has("acked") && e.GetAcked() > s.number("acked", 0) {
				return false, fmt.Errorf("%d is acknowledged", e.GetAcked())
			}
			if (!s.has("acked") || e.GetAcked() == s.number("acked", 0)) && (!s.has("credit") || e.GetCredit() == s.number("credit", 0)) &&
				(!s.Flags["resend"] || e.GetResend()) && e.GetReset_() == s.Flags["reset"] {
				return true, nil
			}
		}
		return false, nil
	})
}

// silence: nothing new comes for a while; what was sent may come again.
func (p *player) silence(s Step) error {
	<-time.After(s.duration("for"))
	p.w.Settle()
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, r := range p.runs {
		for v, all := range r.got {
			for _, m := range all[r.at[v]:] {
				if !m.again {
					return fmt.Errorf("%s %d of run %s came", v, m.seq, r.label)
				}
			}
		}
	}
	return nil
}

// batch: so many messages of acknowledgements came, with so many entries in all.
func (p *player) batch(s Step) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	entries := 0
	for _, n := range p.batches {
		entries += n
	}
	if len(p.batches) != s.int("messages", 0) || entries != s.int("entries", 0) {
		return fmt.Errorf("the messages had %v entries", p.batches)
	}
	return nil
}

func (p *player) outcome(s Step) error {
	state := func() (status, n int, over bool, class string, err error) {
		r, err := p.run(s)
		if err != nil {
			return 0, 0, false, "", err
		}
		if p.c.Role == Node {
			return r.status, r.bytes, r.over, r.class, nil
		}
		status, body, over, class := p.callers[r.label].State()
		if at := r.checked; !bytes.Equal(body[at:], pattern(at, len(body)-at)) {
			err = errors.New("the caller's bytes are not those that were sent")
		}
		r.checked = len(body)
		return status, len(body), over, class, err
	}
	if s.Noun == "none" {
		p.mu.Lock()
		defer p.mu.Unlock()
		if _, _, over, class, err := state(); err != nil || over {
			return errors.Join(err, fmt.Errorf("it is over, class %q", class))
		}
		return nil
	}
	return p.until(func() (bool, error) {
		status, n, over, class, err := state()
		switch {
		case err != nil:
			return false, err
		case s.Noun == "progress":
			return n >= s.int("bytes", 0), nil
		case !over:
			return false, nil
		case s.Noun == "end" && class != "":
			return false, fmt.Errorf("an error of class %q", class)
		case s.Noun == "error" && class == "":
			return false, errors.New("it ended well")
		case class != "?" && s.has("class") && class != s.Vals["class"]:
			return false, fmt.Errorf("the class is %q", class)
		case s.has("status") && status != s.int("status", 0):
			return false, fmt.Errorf("the status is %d", status)
		case s.has("bytes") && n != s.int("bytes", 0):
			return false, fmt.Errorf("%d bytes came", n)
		}
		return true, nil
	})
}

// ---- the provider ----

func (p *player) provider(s Step) error {
	all := p.w.(NodeWorld).Providers()
	if s.Noun == "idle" {
		return p.until(func() (bool, error) {
			for _, r := range p.runs {
				if c := all.get(r.id); c != nil && !c.state().gone {
					return false, nil
				}
			}
			return true, nil
		})
	}
	p.mu.Lock()
	r, err := p.run(s)
	p.mu.Unlock()
	if err != nil {
		return err
	}
	var c *call
	// A Node need not call its provider before it has the whole body: where the run
	// was over by then, nobody was called, and nobody has to go.
	never := func() bool { return s.Noun == "gone" && !p.virtual && r.over }
	if err := p.until(func() (bool, error) { c = all.get(r.id); return c != nil || never(), nil }); err != nil {
		return fmt.Errorf("the provider was not called: %w", err)
	}
	if c == nil {
		return nil
	}
	times := s.int("times", 1)
	switch s.Noun {
	case "answer":
		c.order(order{what: "answer", n: s.int("status", 200), size: s.int("size", -1)})
	case "body":
		for range times {
			c.order(order{what: "body", n: s.int("len", 0)})
		}
	case "end", "fail":
		c.order(order{what: s.Noun})
	case "read":
		n := s.int("len", -1)
		before := c.state()
		c.order(order{what: "read", n: n})
		return p.until(func() (bool, error) {
			now := c.state()
			switch {
			case now.err != nil || n >= 0:
				return now.read-before.read >= n, now.err
			case now.eof && s.has("bytes") && now.read != s.int("bytes", 0):
				return false, fmt.Errorf("the provider read %d bytes", now.read)
			}
			return now.eof, nil
		})
	case "gone":
		if !p.virtual { // a server sees its caller's end only once it has read the request
			c.order(order{what: "drain"})
		}
		return p.until(func() (bool, error) { now := c.state(); return now.gone, now.err })
	}
	return nil
}
