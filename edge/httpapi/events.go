package httpapi

import (
	"bytes"
	"net/http"
	"strings"
)

// isEventStream reports whether the answer is a stream of events that we could
// add one to: an encoded one we cannot.
func isEventStream(h http.Header) bool {
	if v := h["Content-Encoding"]; len(v) > 0 && !strings.EqualFold(v[0], "identity") {
		return false
	}
	v := h["Content-Type"]
	if len(v) == 0 {
		return false
	}
	kind, _, _ := strings.Cut(v[0], ";")
	return strings.EqualFold(strings.TrimSpace(kind), "text/event-stream")
}

// eventWatch keeps the first and last bytes of an event stream, and looks at the
// beginnings of its lines; the events themselves are not read.
type eventWatch struct {
	head    [512]byte
	tail    [4]byte // as much as two line ends take
	headLen int
	tailLen int
	dialect dialect
	lines   lineWatch
}

func newEventWatch(d dialect) *eventWatch {
	return &eventWatch{dialect: d, lines: lineWatch{marks: marksOf[d]}}
}

func (e *eventWatch) add(p []byte) {
	e.lines.add(p)
	if e.headLen < len(e.head) {
		e.headLen += copy(e.head[e.headLen:], p)
	}
	if n := len(e.tail); len(p) >= n {
		e.tailLen = copy(e.tail[:], p[len(p)-n:])
		return
	}
	keep := min(e.tailLen, len(e.tail)-len(p))
	copy(e.tail[:], e.tail[e.tailLen-keep:e.tailLen])
	e.tailLen = keep + copy(e.tail[keep:], p)
}

// lineWatch sees what the beginnings of lines tell: the first and the last event of
// a stream with named events, the end of one without, and a provider's own error. It
// keeps the beginning of the line at hand.
type lineWatch struct {
	marks  *marks // nil: the dialect's events have no names
	line   [96]byte
	n      int
	later  bool // a line ended
	begun  bool // the dialect's first event was seen
	ended  bool // and its last
	failed bool // an error of the provider's
}

// add looks at the beginning of each line, however the bytes are cut. Lines end in LF,
// CR or both; the empty one that is then seen between the two tells nothing.
func (w *lineWatch) add(p []byte) {
	for more := true; more; {
		var upToLF []byte
		upToLF, p, more = bytes.Cut(p, lf)
		for open := true; open; {
			var line []byte
			line, upToLF, open = bytes.Cut(upToLF, cr)
			w.n += copy(w.line[w.n:], line)
			if open || more {
				w.endLine()
			}
		}
	}
}

var (
	lf, cr  = []byte("\n"), []byte("\r")
	bom     = []byte("\ufeff") // event streams may begin with one
	dataTag = []byte("data:")
	doneTag = []byte("[DONE]")
)

func (w *lineWatch) endLine() {
	line := w.line[:w.n]
	if !w.later {
		w.later, line = true, bytes.TrimPrefix(line, bom)
	}
	w.n = 0
	if w.marks == nil {
		w.ended = w.ended || tellsDone(line)
		w.failed = w.failed || tellsError(line)
		return
	}
	w.begun = w.begun || seenIn(line, w.marks.first)
	w.ended = w.ended || seenIn(line, w.marks.last)
	w.failed = w.failed || seenIn(line, w.marks.failed)
}

// tellsDone reports whether a line is the end of a stream whose events have no names.
// Within the text of a model the same letters are no line of their own.
func tellsDone(line []byte) bool {
	v, ok := bytes.CutPrefix(line, dataTag)
	return ok && bytes.Equal(bytes.TrimSpace(v), doneTag)
}

// errorsToldAs is how servers that speak OpenAI's dialect begin an event that is
// an error, blanks aside: with data, or, as llama.cpp once had it, without (A27).
var errorsToldAs = [][]byte{[]byte(`data:{"error":{`), []byte(`data:{"error":"`), []byte(`data:{"object":"error"`), []byte(`error:{`)}

// tellsError reports whether the beginning of a line tells an error.
func tellsError(line []byte) bool {
	if !bytes.Contains(line, []byte("error")) {
		return false
	}
	line = bytes.ReplaceAll(line, []byte(" "), nil)
	for _, e := range errorsToldAs {
		if bytes.HasPrefix(line, e) {
			return true
		}
	}
	return false
}

// whole reports whether the stream's own end was seen.
func (e *eventWatch) whole() bool {
	if e.lines.marks != nil {
		return e.lines.ended
	}
	w := &e.lines
	return w.failed || w.ended || tellsDone(w.line[:w.n]) // its line end may be yet to come
}

// unfinished reports whether a stream that ended speaks its dialect and lacks
// the marker that ends it there: its provider stopped half way and said nothing
// (A09). Streams of any other look are not judged.
func (e *eventWatch) unfinished() bool {
	e.lines.endLine() // one without its line end
	if w := &e.lines; w.marks != nil {
		return w.begun && !w.ended
	}
	head := e.head[:e.headLen]
	return (bytes.Contains(head, []byte(`"chat.completion.chunk"`)) || bytes.Contains(head, []byte(`"text_completion"`))) && !e.whole()
}

// empty reports whether nothing came at all.
func (e *eventWatch) empty() bool { return e.tailLen == 0 }

// failure is the dialect's error event, begun on a line of its own wherever the
// provider's bytes stopped.
func (e *eventWatch) failure(why reason, detail, id string) []byte {
	var b []byte
	if lines := e.newlines(); !e.empty() {
		for range 2 - lines {
			b = append(b, '\n')
		}
	}
	return append(b, e.dialect.errorEvent(why, detail, id)...)
}

// between reports whether nothing but whole events came so far.
func (e *eventWatch) between() bool { return e.empty() || e.newlines() == 2 }

// newlines counts the line ends, up to two, that the stream ends with.
func (e *eventWatch) newlines() (n int) {
	for i := e.tailLen - 1; i >= 0 && n < 2; i-- {
		switch e.tail[i] {
		case '\n':
			n++
			if i > 0 && e.tail[i-1] == '\r' {
				i--
			}
		case '\r':
			n++
		default:
			return n
		}
	}
	return n
}
