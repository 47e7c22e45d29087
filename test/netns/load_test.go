//go:build linux

package netns

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/iop-fabric/iop/internal/history"
)

// kind is what a call does.
type kind int

const (
	paced  kind = iota // its provider gives a chunk at each tick
	burst              // the same, and some hundred KiB at once while the fault goes on
	held               // the same, some MiB, to a caller that reads on only after the fault
	upload             // its provider reads a body of some MiB, piece by piece
	probe              // it is answered at once
)

func (k kind) streams() bool { return k == paced || k == burst || k == held }

const (
	callHeader = "X-Call"
	uploadSize = 8 << 20  // more than the kernel keeps between Node and provider
	uploadRead = 64 << 10 // at each tick
	// uploadHurry is the tick of one that hurries: a second for all of it.
	uploadHurry = 10 * time.Millisecond
	doneEvent   = "data: [DONE]\n\n"
)

// mark is something that happens once.
type mark struct {
	once sync.Once
	ch   chan struct{}
}

func newMark() *mark   { return &mark{ch: make(chan struct{})} }
func (m *mark) reach() { m.once.Do(func() { close(m.ch) }) }

// call is a request, and what its caller and its provider, both in this process,
// know of it. Streams go on until their round is over, so every one of them is under
// way as long as the fault lasts.
type call struct {
	*round
	id, node string
	kind     kind
	pace     time.Duration
	hurries  bool // an upload's provider, as the fault begins
	body     string
	bytes    *rand.ChaCha8 // of its chunks
	size     *rand.Rand    // of its chunks

	begun  *mark // the first piece is here; of an upload: the first is read
	again  *mark // a piece is here that was given after the fault
	served *mark // its provider is done
	ended  chan struct{}

	mu    sync.Mutex
	given []piece // and not yet at the caller
	run   string
	tries int

	// What its caller knows, to be read once it has ended.
	outcome history.Outcome
	why     string // it is not ok
	wrong   string // a rule is broken
	got     int64
	pause   time.Duration // the longest that a piece took
}

// piece is what a provider gave in one write.
type piece struct {
	bytes []byte
	at    time.Time
	last  bool
}

// round is a load and a fault, and the history of both.
type round struct {
	client *http.Client
	key    string
	w      *history.Writer
	fault  chan struct{} // closed when it begins
	mended chan struct{} // closed when it is over
	over   chan struct{} // closed when the streams may end
	healed atomic.Int64  // when, in Unix nanoseconds; 0: not yet
}

func (r *round) newCall(id, node string, k kind, seed uint64, filler string) *call {
	var key [32]byte
	copy(key[:], id)
	c := &call{
		round: r, id: id, node: node, kind: k,
		bytes: rand.NewChaCha8(key), size: rand.New(rand.NewPCG(seed, 1)),
		begun: newMark(), again: newMark(), served: newMark(), ended: make(chan struct{}),
	}
	c.pace = time.Duration(200+c.size.IntN(600)) * time.Millisecond
	c.body = fmt.Sprintf(`{"model":%q,"user":%q,"stream":%t,"messages":[{"role":"user","content":"`, node, id, k.streams())
	if k == upload {
		c.body += filler
	}
	c.body += `"}]}`
	return c
}

// chunk is the provider's next one, of at least n bytes; it names the call and its place.
func (c *call) chunk(k, n int) []byte {
	pad := make([]byte, n/2)
	_, _ = c.bytes.Read(pad) // never fails
	b := fmt.Appendf(nil, "data: {\"object\":\"chat.completion.chunk\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"%s %d ", c.id, k)
	return append(hex.AppendEncode(b, pad), "\"}}]}\n\n"...)
}

// serve is the provider.
func (c *call) serve(node string, w http.ResponseWriter, r *http.Request) {
	c.mu.Lock()
	c.tries++
	run := fmt.Sprintf("%s.%d", c.id, c.tries)
	c.run = run
	c.given = nil
	c.mu.Unlock()
	c.w.Add(history.Event{Kind: history.Dispatch, Req: c.id, Run: run, Node: node})
	sum := crc32.NewIEEE()
	tick := time.NewTicker(c.pace)
	defer tick.Stop()
	next := func(hurry <-chan struct{}) bool { // false: the round is over, or hurry
		select {
		case <-tick.C:
			return true
		case <-r.Context().Done():
		case <-c.over:
		case <-hurry:
		}
		return false
	}
	read, err := c.read(io.TeeReader(r.Body, sum), tick, next)
	if err != nil {
		return // the Node is gone
	}
	parts := history.Parts{Report: func(seq uint64, n int64, sum uint32) {
		c.w.Add(history.Event{Kind: history.Sent, Run: run, Seq: seq, N: n, Sum: sum})
	}}
	give := func(b []byte, last bool) {
		c.mu.Lock()
		c.given = append(c.given, piece{b, time.Now(), last})
		c.mu.Unlock()
		_, _ = parts.Write(b)
		_, _ = w.Write(b) // where the Node is gone, the request's context says so
		w.(http.Flusher).Flush()
	}
	if c.kind.streams() {
		w.Header().Set("Content-Type", "text/event-stream")
		big := c.kind == paced
		for k := 0; ; k++ {
			size := 40 + c.size.IntN(2000)
			select {
			case <-c.fault:
				if !big {
					size, big = (100+c.size.IntN(300))<<10, true
					if c.kind == held {
						size += 3 << 20
					}
				}
			default:
			}
			give(c.chunk(k, size), false)
			if !next(nil) {
				break
			}
		}
		if r.Context().Err() != nil {
			return
		}
		give([]byte(doneEvent), true)
	} else {
		w.Header().Set("Content-Type", "application/json")
		give(fmt.Appendf(nil, `{"user":%q,"read":%d}`, c.id, read), true)
	}
	seq, total := parts.Close()
	c.w.Add(history.Event{Kind: history.Served, Run: run, Seq: seq, N: total, Read: read, Sum: sum.Sum32()})
	c.served.reach()
}

// read reads the request's body. An upload comes as slowly as the round goes on, and the
// rest of it at the end; of every second one the rest comes as fast as the fault begins, so
// that some of it is on its way just then.
func (c *call) read(body io.Reader, tick *time.Ticker, next func(hurry <-chan struct{}) bool) (n int64, err error) {
	var hurry <-chan struct{}
	if c.hurries {
		hurry = c.fault
	}
	for slow := c.kind == upload; slow && err == nil; {
		var k int64
		k, err = io.CopyN(io.Discard, body, uploadRead)
		n += k
		c.begun.reach()
		if c.healed.Load() != 0 {
			c.again.reach()
		}
		if slow = err == nil && next(hurry); !slow && hurry != nil {
			tick.Reset(uploadHurry)
			hurry, slow = nil, true
		}
	}
	if err == nil {
		var rest int64
		rest, err = io.Copy(io.Discard, body)
		n += rest
	}
	if errors.Is(err, io.EOF) {
		err = nil
	}
	c.again.reach()
	for c.kind == upload && err == nil && next(nil) {
	}
	return n, err
}

// make is the caller: it asks, and takes what comes to its end.
func (c *call) make(ctx context.Context) {
	defer close(c.ended)
	c.w.Add(history.Event{
		Kind: history.Invoke, Req: c.id, Node: c.node, Probe: c.kind == probe, Sure: true,
		N: int64(len(c.body)), Sum: crc32.ChecksumIEEE([]byte(c.body)),
	})
	c.outcome = history.Fail
	if err := c.ask(ctx); err != nil {
		c.outcome, c.why = history.Unknown, err.Error()
	}
	if ctx.Err() != nil {
		return // it hangs: the history has no end of it
	}
	if c.outcome == history.OK {
		select {
		case <-c.served.ch: // now or soon
		case <-ctx.Done():
		}
	}
	c.w.Add(history.Event{Kind: history.Terminal, Req: c.id, Outcome: c.outcome, Class: c.why})
}

func (c *call) ask(ctx context.Context) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://edge/v1/chat/completions", strings.NewReader(c.body))
	if err != nil {
		return err
	}
	req.Header.Set("Authorization", "Bearer "+c.key)
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set(callHeader, c.id)
	resp, err := c.client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		b, err := io.ReadAll(resp.Body)
		c.why = fmt.Sprintf("%d %s", resp.StatusCode, b)
		if strings.Count(string(b), `"error":`) != 1 {
			c.wrong = "no error, or more than one: " + c.why
		}
		return err
	}
	return c.receive(resp.Body)
}

// receive compares what comes with what was given, and sets the outcome.
func (c *call) receive(body io.Reader) error {
	c.mu.Lock()
	run := c.run
	c.mu.Unlock()
	parts := history.Parts{Report: func(seq uint64, n int64, sum uint32) {
		c.w.Add(history.Event{Kind: history.Frame, Req: c.id, Run: run, Seq: seq, N: n, Sum: sum})
	}}
	var (
		now     piece // it is on its way
		n       int   // so much of it is here
		foreign []byte
	)
	buf := make([]byte, 4<<10)
	for {
		if c.kind == held && n > 0 {
			select {
			case <-c.mended:
			case <-c.over:
			}
		}
		k, err := body.Read(buf)
		for b := buf[:k]; len(b) > 0; {
			if n == len(now.bytes) && foreign == nil {
				now, n = c.next(), 0
			}
			m := alike(now.bytes[n:], b)
			if foreign != nil || m < len(b) && n+m < len(now.bytes) || len(now.bytes) == 0 {
				foreign = append(foreign, b...)
				break
			}
			n, b = n+m, b[m:]
			c.got += int64(m)
			if n == len(now.bytes) {
				_, _ = parts.Write(now.bytes)
				c.here(now)
			}
		}
		if err == nil {
			continue
		}
		switch {
		case !errors.Is(err, io.EOF):
			return err
		case foreign == nil && now.last && n == len(now.bytes):
			parts.Close()
			c.outcome = history.OK
		case foreign == nil:
			c.wrong = fmt.Sprintf("it ends after %d bytes without a word", c.got)
		default:
			c.why, c.wrong = broken(now.bytes, append(bytes.Clone(now.bytes[:n]), foreign...))
		}
		return nil
	}
}

// alike is how many bytes two texts begin with alike.
func alike(a, b []byte) (n int) {
	for n < len(a) && n < len(b) && a[n] == b[n] {
		n++
	}
	return n
}

// broken judges an end that is not the provider's: some of its piece, and one error.
func broken(want, got []byte) (why, wrong string) {
	own, rest, ok := bytes.Cut(got, []byte("data: {\"error\":"))
	switch {
	case !ok || !bytes.HasPrefix(want, bytes.TrimRight(own, "\n")):
		return "", fmt.Sprintf("other bytes: %.200q where %.200q was given", got, want)
	case bytes.Contains(rest, []byte("data:")) || !bytes.HasSuffix(rest, []byte("\n\n")):
		return "", fmt.Sprintf("something comes after its error: %q", rest)
	}
	return string(bytes.TrimSpace(rest)), ""
}

// next is the piece that comes next; an empty one: nothing was given.
func (c *call) next() (p piece) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.given) > 0 {
		p, c.given = c.given[0], c.given[1:]
	}
	return p
}

func (c *call) here(p piece) {
	if c.kind == paced || c.kind == burst {
		c.pause = max(c.pause, time.Since(p.at))
	}
	c.begun.reach()
	if healed := c.healed.Load(); healed != 0 && p.at.UnixNano() > healed {
		c.again.reach()
	}
}

// sessions turns an Edge's log into events of the round that goes on.
type sessions struct {
	mu   sync.Mutex
	line []byte
	w    *history.Writer   // nil: nobody listens
	live map[string]uint64 // generations
	ends int
}

var session = regexp.MustCompile(`msg=node\.(connected|disconnected) .*\bnode=(\S+) generation=(\d+)`)

// Write implements io.Writer.
func (s *sessions) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.line = append(s.line, p...)
	for {
		line, rest, ok := bytes.Cut(s.line, []byte("\n"))
		if !ok {
			return len(p), nil
		}
		if m := session.FindSubmatch(line); m != nil {
			gen, _ := strconv.ParseUint(string(m[3]), 10, 64) // digits
			e := history.Event{Kind: history.Connected, Node: string(m[2]), Gen: gen}
			if string(m[1]) == "disconnected" {
				e.Kind = history.Fenced
				delete(s.live, e.Node)
				s.ends++
			} else {
				s.live[e.Node] = gen
			}
			if s.w != nil {
				s.w.Add(e)
			}
		}
		s.line = rest
	}
}

// begin has a history know who is connected, and what comes of it. It returns the
// generations, and how many sessions have ended so far.
func (s *sessions) begin(w *history.Writer) (live map[string]uint64, ends int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for node, gen := range s.live {
		w.Add(history.Event{Kind: history.Connected, Node: node, Gen: gen})
	}
	s.w = w
	return maps.Clone(s.live), s.ends
}

// finish ends that.
func (s *sessions) finish() (ends int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.w = nil
	return s.ends
}
