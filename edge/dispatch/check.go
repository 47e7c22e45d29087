package dispatch

import (
	"github.com/iop-fabric/iop/wire"
	"github.com/iop-fabric/iop/wire/iopv1"
)

// breach is a rule of the stream that a Node broke (J8). The list is closed: it
// is a metric's label.
type breach uint8

const (
	breachNone breach = iota
	breachUndecodable
	breachKind
	breachStatus
	breachHeader
	breachMisplaced
	breachBodySize
	breachEarly
	breachSecondStart
	breachStream
	breachGap
	breachFlood
	breachForeign
	breachUnknown
	breachLate
	breachAck
	breachGoingOn
	breachTrailing
	breachRepeats
)

var breachNames = [...]string{
	"none", "undecodable", "kind", "status", "header", "misplaced", "body_size", "early",
	"second_start", "stream", "gap", "flood", "foreign", "unknown", "late", "ack", "going_on",
	"trailing", "repeats",
}

var breachTexts = [...]string{
	"", "the node sent a frame that cannot be decoded", "the node sent a frame of an unknown kind",
	"the node sent a status that is none", "the node sent a header that is none, or too many",
	"the node sent a frame with parts that do not belong to its kind", "the node sent a frame with too much body",
	"the node sent an answer without its start", "the node started the answer twice",
	"the node broke the rules of the stream", "the node left a gap in the answer",
	"the node sent more than it was granted", "the node sent a frame of another node's attempt",
	"the node sent frames of attempts that nobody knows", "the node sent a frame after the terminal",
	"the node sent acknowledgements that make no sense",
	"the node goes on sending in a stream whose rules it broke",
	"the node's frames of a stream whose rules it broke come late",
	"the node sends over and over what it has sent",
}

func (b breach) String() string { return breachNames[b] }

func (b breach) err() *wire.Error { return wire.Errorf(wire.Protocol, "%s", breachTexts[b]) }

// headerCost is what a header counts beside its name and value.
const headerCost = 8

// check says what is wrong with a frame by itself, whatever came before it, and
// whether it is a terminal.
func check(f *iopv1.ProviderTunnelFrame) (terminal bool, b breach) {
	if len(f.Body) > wire.MaxBody {
		return false, breachBodySize
	}
	if len(f.Headers) > 0 && f.Kind != iopv1.ProviderTunnelFrame_RESPONSE_START {
		return false, breachMisplaced
	}
	switch f.Kind {
	case iopv1.ProviderTunnelFrame_BODY:
		terminal = f.End
	case iopv1.ProviderTunnelFrame_RESPONSE_START:
		// 1xx are the provider connection's affair; the caller's has one answer.
		if f.Status < 200 || f.Status > 599 {
			return false, breachStatus
		}
		if !validFields(f.Headers) {
			return false, breachHeader
		}
		terminal = f.End
	case iopv1.ProviderTunnelFrame_END:
		terminal = true
	case iopv1.ProviderTunnelFrame_ERROR:
		terminal = true
		if len(f.Body) > 0 || len(f.Trailers) > 0 {
			return true, breachMisplaced
		}
	case iopv1.ProviderTunnelFrame_USAGE:
		if len(f.Body) > 0 || f.End {
			return false, breachMisplaced
		}
	default:
		return false, breachKind
	}
	switch {
	case len(f.Trailers) == 0:
	case !terminal:
		return false, breachMisplaced
	case !validFields(f.Trailers):
		return terminal, breachHeader
	}
	return terminal, breachNone
}

// order is what the frames of one answer must keep among each other (T3).
type order struct{ started bool }

func (o *order) next(f *iopv1.ProviderTunnelFrame) breach {
	switch f.Kind {
	case iopv1.ProviderTunnelFrame_RESPONSE_START:
		if o.started {
			return breachSecondStart
		}
		o.started = true
	case iopv1.ProviderTunnelFrame_BODY, iopv1.ProviderTunnelFrame_END:
		if !o.started {
			return breachEarly
		}
	default:
	}
	return breachNone
}

// validFields reports whether headers or trailers can be written to a caller:
// names are tokens, no value can end its line, all together within the bound.
func validFields(hs []*iopv1.Header) bool {
	total := 0
	for _, h := range hs {
		if total += len(h.Name) + len(h.Value) + headerCost; total > wire.MaxHeaders || h.Name == "" {
			return false
		}
		for i := 0; i < len(h.Name); i++ {
			if !tokenByte[h.Name[i]] {
				return false
			}
		}
		for _, c := range h.Value {
			if c == '\r' || c == '\n' || c == 0 {
				return false
			}
		}
	}
	return true
}

// tokenByte is RFC 9110's tchar.
var tokenByte = func() (t [256]bool) {
	for c := '0'; c <= '9'; c++ {
		t[c] = true
	}
	for c := 'a'; c <= 'z'; c++ {
		t[c], t[c-'a'+'A'] = true, true
	}
	for _, c := range "!#$%&'*+-.^_`|~" {
		t[c] = true
	}
	return t
}()

// conduct is one session's record of rules broken, a bucket that leaks: honest
// trouble (frames in flight when a stream ended) never fills it, going on does.
type conduct struct {
	level float64
	at    int64 // unix seconds of the last offence
	lost  bool  // it was full once; the session is to end
}

const (
	// severe is a broken rule that only the Node can answer for, slight a frame
	// that may have been on its way when its stream ended: a whole window of the
	// smallest frames counts as four severe ones.
	severe = 1.0
	slight = 4.0 / (wire.MaxWindow / wire.FrameOverhead)
	// strange is a frame of a run that nobody remembers, strangeAck an acknowledgement.
	// Ended ones are remembered, so an honest Node has hardly a way to send one; but a
	// message holds many of the latter.
	strange    = severe / 64
	strangeAck = severe / 1024
	// acksPerSecond is what is far beyond any honest session's messages of
	// acknowledgements, emptyPerSecond beyond those that say nothing new; hastyAck is
	// one that is beyond either.
	acksPerSecond  = 1 << 17
	emptyPerSecond = 1 << 12
	hastyAck       = severe / 256
	// patience is how many severe offences end the session, leakPerSecond how
	// fast they are forgotten.
	patience      = 16
	leakPerSecond = 0.1
)

// heavy is slight for a message of any size: a whole window of them counts the same.
func heavy(size int) float64 {
	return slight * float64(size+wire.FrameOverhead) / wire.FrameOverhead
}

// offend records an offence; true is said once, when the session is lost.
func (c *conduct) offend(unix int64, weight float64) (lost bool) {
	if c.lost {
		return false
	}
	if unix > c.at {
		c.level = max(0, c.level-leakPerSecond*float64(unix-c.at))
		c.at = unix
	}
	c.level += weight
	c.lost = c.level >= patience
	return c.lost
}
