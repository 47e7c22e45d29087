package history

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"sync"
	"time"
)

// Kind says what happened; which fields an event fills stands beside it.
type Kind string

// The events.
const (
	Invoke    Kind = "invoke"    // Req; Until; N, Sum of the request's body; Probe; Sure: but for faults it is ok
	Dispatch  Kind = "dispatch"  // Req, Run, Slot, Node, Gen, Provider
	Cancel    Kind = "cancel"    // Run: its cancel reached the Node before the request did
	Begin     Kind = "begin"     // Run: its provider is called
	Sent      Kind = "sent"      // Run; Seq, N, Sum: a part of the answer, by its provider
	Served    Kind = "served"    // Run; Seq, N: parts and bytes in all; Read: how much of the body was read, Sum
	Frame     Kind = "frame"     // Req, Run; Seq, N, Sum: a part, at the caller
	Terminal  Kind = "terminal"  // Req; Outcome, Class
	Ended     Kind = "ended"     // Req, Run; Class: an attempt, at Edge; no class: the answer is complete
	Capacity  Kind = "capacity"  // Provider, N
	Take      Kind = "take"      // Slot, Provider, Node, Gen
	Release   Kind = "release"   // Slot, Gen, How
	Alloc     Kind = "alloc"     // Node, Gen: the broker gave it
	Register  Kind = "register"  // Node, Gen: accepted
	Ready     Kind = "ready"     // Node, Gen: the acknowledgement is out
	Connected Kind = "connected" // Node, Gen
	Fenced    Kind = "fenced"    // Node, Gen; How: the cause
	Stale     Kind = "stale"     // Node, Gen: a message of an older generation; Changed, if it changed something
	Resent    Kind = "resent"    // Run: a frame went out again; N: so many, where a process only counts them
	Up        Kind = "up"        // Node, or Edge where it is empty: the process runs
	Down      Kind = "down"      // it does not; an Edge's slots and sessions are gone with it
	Paused    Kind = "paused"    // Node, or Edge: the process does not run
	Resumed   Kind = "resumed"   // it goes on
	Start     Kind = "start"     // Fault: it begins
	Stop      Kind = "stop"      // and ends
	End       Kind = "end"       // of the history; nothing is open any more
)

// Outcome is what a caller knows.
type Outcome string

// The outcomes.
const (
	OK      Outcome = "ok"
	Fail    Outcome = "fail"
	Unknown Outcome = "unknown"
)

// Event is one line. At is nanoseconds since the history began.
type Event struct {
	At       int64   `json:"at"`
	Kind     Kind    `json:"kind"`
	Req      string  `json:"req,omitempty"`
	Run      string  `json:"run,omitempty"`
	Node     string  `json:"node,omitempty"`
	Gen      uint64  `json:"gen,omitempty"`
	Slot     uint64  `json:"slot,omitempty"`
	Provider string  `json:"provider,omitempty"`
	Seq      uint64  `json:"seq,omitempty"`
	N        int64   `json:"n,omitempty"`
	Sum      uint32  `json:"sum,omitempty"`
	Read     int64   `json:"read,omitempty"`
	Until    int64   `json:"until,omitempty"`
	Outcome  Outcome `json:"outcome,omitempty"`
	Class    string  `json:"class,omitempty"`
	How      string  `json:"how,omitempty"`
	Fault    string  `json:"fault,omitempty"`
	Probe    bool    `json:"probe,omitempty"`
	Sure     bool    `json:"sure,omitempty"`
	Changed  bool    `json:"changed,omitempty"`
}

// Writer writes a history, from any goroutine; each event gets its time.
type Writer struct {
	mu    sync.Mutex
	enc   *json.Encoder
	began time.Time
	err   error
}

// NewWriter begins a history now.
func NewWriter(w io.Writer) *Writer { return &Writer{enc: json.NewEncoder(w), began: time.Now()} }

// Add appends an event.
func (w *Writer) Add(e Event) {
	w.mu.Lock()
	defer w.mu.Unlock()
	e.At = int64(time.Since(w.began))
	if err := w.enc.Encode(e); err != nil && w.err == nil {
		w.err = fmt.Errorf("history: %w", err)
	}
}

// Err is why an event could not be written.
func (w *Writer) Err() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.err
}

// maxLine bounds one event's line.
const maxLine = 1 << 16

// Read calls fn for every event of a file.
func Read(r io.Reader, fn func(Event)) error {
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, maxLine)
	for n := 1; lines.Scan(); n++ {
		var e Event
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			return fmt.Errorf("history: line %d is no event: %w", n, err)
		}
		if !known[e.Kind] {
			return fmt.Errorf("history: line %d: there is no kind %q", n, e.Kind)
		}
		fn(e)
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("history: %w", err)
	}
	return nil
}

var known = func() map[Kind]bool {
	m := map[Kind]bool{}
	for _, k := range []Kind{
		Invoke, Dispatch, Cancel, Begin, Sent, Served, Frame, Ended, Terminal, Capacity, Take, Release, Alloc,
		Register, Ready, Connected, Fenced, Stale, Resent, Up, Down, Paused, Resumed, Start, Stop, End,
	} {
		m[k] = true
	}
	return m
}()
