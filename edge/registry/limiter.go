package registry

import (
	"maps"
	"strings"
	"time"
)

const (
	// fenceEvery is the least time between two fences to one session (F10).
	fenceEvery = time.Second
	// maxLimited bounds the sessions remembered: beyond it, fences to further ones
	// wait until some are forgotten. No honest fleet comes near in a second.
	maxLimited = 8192
	// maxText bounds what a peer says about itself, in bytes and in items.
	maxText  = 128
	maxItems = 64
)

type session struct {
	node string
	gen  uint64
}

// limiter remembers when each session was last told, for fenceEvery.
type limiter struct {
	last  map[session]time.Time
	swept time.Time // when those of long ago were last forgotten
}

// allow reports whether a session may be told now, and makes room to remember it.
func (l *limiter) allow(now time.Time, s session) bool {
	if at, ok := l.last[s]; ok && now.Sub(at) < fenceEvery {
		return false
	}
	if len(l.last) >= maxLimited {
		// One sweep for each fenceEvery: a flood of strangers must not make each of
		// its messages cost one.
		if now.Sub(l.swept) < fenceEvery {
			return false
		}
		l.swept = now
		maps.DeleteFunc(l.last, func(_ session, at time.Time) bool { return now.Sub(at) >= fenceEvery })
		if len(l.last) >= maxLimited {
			return false
		}
	}
	return true
}

// told remembers that a session was.
func (l *limiter) told(now time.Time, s session) {
	if _, known := l.last[s]; !known && len(l.last) >= maxLimited {
		return // allow was not asked, or said no
	}
	if l.last == nil {
		l.last = map[session]time.Time{}
	}
	l.last[s] = now
}

// clip bounds a text that a peer says about itself.
func clip(s string) string {
	return strings.Clone(s[:min(len(s), maxText)]) // s may alias a message
}

func clipAll(in []string) []string {
	out := make([]string, 0, min(len(in), maxItems))
	for _, s := range in[:min(len(in), maxItems)] {
		out = append(out, clip(s))
	}
	return out
}
