package httpapi

import (
	"bytes"
	"encoding/json"
	"strings"
	"unicode/utf8"
)

const (
	// maxDepth is how deep encoding/json lets arrays and objects nest.
	maxDepth = 10_000
	// maxKey is the longest spelling of a key that matters: "stream" with every
	// letter escaped.
	maxKey = len("stream") * len(`\u0000`)
	// maxModel bounds the spelling of a model's name.
	maxModel = 4 << 10
	// maxCacheKey is the longest prompt_cache_key that is a hint.
	maxCacheKey = 256
)

// named is what a scan found at the top level of a request.
type named struct {
	model    string
	stream   bool
	cacheKey string // prompt_cache_key as it is spelt; a hint (Q1)
	// start and end span the model's value in the body, quotes included.
	start, end int64
}

// scanner reads one JSON document in pieces, builds nothing, accepts exactly
// what encoding/json accepts, and finds where the top-level "model" stands.
type scanner struct {
	state   scanState
	offset  int64    // of the piece at hand in the document
	objects []uint64 // a bit for each open bracket: it is an object's
	depth   int
	literal string // what is still to come of true, false or null
	truth   bool   // the literal is true
	hex     int    // what is still to come of \uXXXX
	broken  bool   // not JSON; nothing is looked at any more
	fault   string // JSON, but not a request: what is wrong with it

	topObject bool
	isKey     bool   // the string at hand is a key
	keep      int    // how much of the string at hand is kept; 0: none
	escaped   bool   // it has an escape
	kept      []byte // its bytes between the quotes
	field     field  // whose value is at hand, at depth 1
	found     bool   // "model" was seen
	named     named

	objectsBuf [4]uint64
	keptBuf    [64]byte
}

// init saves the usual document its allocations.
func (s *scanner) init() { s.objects, s.kept = s.objectsBuf[:0], s.keptBuf[:0] }

type field uint8

const (
	otherField field = iota
	modelField
	streamField
	cacheKeyField
)

type scanState uint8

const (
	atValue      scanState = iota // a value must come
	atValueOrEnd                  // after '['
	atKeyOrEnd                    // after '{'
	atKey                         // after ',' in an object
	atColon                       // after a key
	afterValue                    // after a value inside something: ',' or its end
	atEnd                         // after the document: only space
	inString
	inEscape
	inHex
	inLiteral
	afterMinus
	afterZero
	inInteger
	afterPoint
	inFraction
	afterE
	afterESign
	inExponent
)

// stringEnd are the bytes a string cannot simply go on with.
var stringEnd = func() (t [256]bool) {
	for c := range 0x20 {
		t[c] = true
	}
	t['"'], t['\\'] = true, true
	return t
}()

// feed takes the next piece of the document.
func (s *scanner) feed(p []byte) {
	if s.broken {
		return
	}
	if !s.scan(p) {
		s.broken = true
	}
	s.offset += int64(len(p))
}

func (s *scanner) scan(p []byte) bool {
	for i := 0; i < len(p); i++ {
		c := p[i]
		switch s.state {
		case inString:
			from := i
			for i < len(p) && !stringEnd[p[i]] {
				i++
			}
			s.retain(p[from:i])
			if i == len(p) {
				return true
			}
			switch c = p[i]; c {
			case '"':
				s.endString(s.offset + int64(i) + 1)
			case '\\':
				s.escaped = true
				s.retain(p[i : i+1])
				s.state = inEscape
			default:
				return false
			}
			continue
		case inEscape:
			s.retain(p[i : i+1])
			switch c {
			case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
				s.state = inString
			case 'u':
				s.state, s.hex = inHex, 4
			default:
				return false
			}
			continue
		case inHex:
			if (c < '0' || c > '9') && (c < 'a' || c > 'f') && (c < 'A' || c > 'F') {
				return false
			}
			s.retain(p[i : i+1])
			if s.hex--; s.hex == 0 {
				s.state = inString
			}
			continue
		case inLiteral:
			if c != s.literal[0] {
				return false
			}
			if s.literal = s.literal[1:]; s.literal == "" {
				s.endValue()
			}
			continue
		case afterMinus:
			switch {
			case c == '0':
				s.state = afterZero
			case '1' <= c && c <= '9':
				s.state = inInteger
			default:
				return false
			}
			continue
		case afterPoint:
			if c < '0' || c > '9' {
				return false
			}
			s.state = inFraction
			continue
		case afterE:
			if c == '+' || c == '-' {
				s.state = afterESign
				continue
			}
			fallthrough
		case afterESign:
			if c < '0' || c > '9' {
				return false
			}
			s.state = inExponent
			continue
		case inInteger, afterZero, inFraction, inExponent:
			if s.inNumber(c) {
				continue
			}
			s.endValue() // and c is what follows
		default: // between values: structure knows them
		}
		if c == ' ' || c == '\n' || c == '\t' || c == '\r' {
			continue
		}
		if !s.structure(c, s.offset+int64(i)) {
			return false
		}
	}
	return true
}

// inNumber reports whether c goes on with a number that could also end here.
func (s *scanner) inNumber(c byte) bool {
	digit := '0' <= c && c <= '9'
	switch {
	case digit && s.state != afterZero:
		return true
	case c == '.' && (s.state == inInteger || s.state == afterZero):
		s.state = afterPoint
		return true
	case (c == 'e' || c == 'E') && s.state != inExponent:
		s.state = afterE
		return true
	}
	return false
}

// structure takes a byte between values; at is its place in the document.
func (s *scanner) structure(c byte, at int64) bool {
	switch s.state {
	case atValueOrEnd:
		if c == ']' {
			return s.pop(false)
		}
		return s.beginValue(c, at)
	case atValue:
		return s.beginValue(c, at)
	case atKeyOrEnd, atKey:
		if c == '}' && s.state == atKeyOrEnd {
			return s.pop(true)
		}
		if c != '"' {
			return false
		}
		keep := 0
		if s.depth == 1 {
			keep = maxKey
		}
		s.beginString(true, keep)
		return true
	case atColon:
		if c != ':' {
			return false
		}
		s.state = atValue
		return true
	case afterValue:
		switch {
		case c == ',' && s.inObject():
			s.state = atKey
		case c == ',':
			s.state = atValue
		case c == '}':
			return s.pop(true)
		case c == ']':
			return s.pop(false)
		default:
			return false
		}
		return true
	default: // atEnd
		return false
	}
}

func (s *scanner) beginValue(c byte, at int64) bool {
	isModel := s.depth == 1 && s.field == modelField
	if isModel && c != '"' {
		s.complain(`"model" must be a string`)
	}
	switch c {
	case '{':
		if s.depth == 0 {
			s.topObject = true
		}
		s.state = atKeyOrEnd
		return s.push(true)
	case '[':
		s.state = atValueOrEnd
		return s.push(false)
	case '"':
		keep := 0
		switch {
		case isModel:
			keep = maxModel
			s.named.start = at
		case s.depth == 1 && s.field == cacheKeyField:
			keep = maxCacheKey
		}
		s.beginString(false, keep)
	case 't':
		s.state, s.literal, s.truth = inLiteral, "true"[1:], true
	case 'f':
		s.state, s.literal, s.truth = inLiteral, "false"[1:], false
	case 'n':
		s.state, s.literal, s.truth = inLiteral, "null"[1:], false
	case '-':
		s.state = afterMinus
	case '0':
		s.state = afterZero
	default:
		if c < '1' || c > '9' {
			return false
		}
		s.state = inInteger
	}
	if s.depth == 1 && s.field == streamField {
		s.named.stream = c == 't' // the last one counts, as providers have it
	}
	return true
}

func (s *scanner) beginString(isKey bool, keep int) {
	s.state, s.isKey, s.keep, s.escaped = inString, isKey, keep, false
	s.kept = s.kept[:0]
}

// retain keeps a little more than it should, so that endString sees what is too
// long.
func (s *scanner) retain(p []byte) {
	if room := s.keep + 1 - len(s.kept); s.keep > 0 && room > 0 {
		s.kept = append(s.kept, p[:min(len(p), room)]...)
	}
}

// endString takes the end of a string; end is the place behind its quote.
func (s *scanner) endString(end int64) {
	if s.isKey {
		s.state = atColon
		if s.depth == 1 {
			s.field = s.fieldOf()
		}
		return
	}
	switch whole := len(s.kept) <= s.keep; {
	case s.keep == 0:
	case s.field == cacheKeyField:
		if whole {
			s.named.cacheKey = string(s.kept)
		}
	default:
		s.named.end = end
		if !whole {
			s.complain(`"model" is too long`)
			break
		}
		s.named.model = unquote(s.kept, s.escaped)
	}
	s.endValue()
}

// fieldOf tells whose value follows the key just read. A second "model" and one
// in other letter case are refused: providers disagree on which of them counts,
// so the model a key may use and the model that runs could differ.
func (s *scanner) fieldOf() field {
	if len(s.kept) > s.keep {
		return otherField
	}
	key := s.kept
	if s.escaped {
		key = []byte(unquote(key, true))
	}
	switch {
	case string(key) == "stream":
		return streamField
	case string(key) == "model":
		if s.found {
			s.complain(`"model" is given more than once`)
		}
		s.found = true
		return modelField
	case string(key) == "prompt_cache_key":
		return cacheKeyField
	case bytes.EqualFold(key, []byte("model")):
		s.complain(`"model" must be spelt in lower case`)
	}
	return otherField
}

func (s *scanner) endValue() {
	if s.state = afterValue; s.depth == 0 {
		s.state = atEnd
	}
	if s.depth == 1 {
		s.field = otherField
	}
}

// complain keeps the first fault.
func (s *scanner) complain(fault string) {
	if s.fault == "" {
		s.fault = fault
	}
}

// push and pop keep, a bit each, which brackets are open.
func (s *scanner) push(object bool) bool {
	if s.depth == maxDepth {
		return false
	}
	word, bit := s.depth/64, uint(s.depth%64)
	if word == len(s.objects) {
		s.objects = append(s.objects, 0)
	}
	s.objects[word] &^= 1 << bit
	if object {
		s.objects[word] |= 1 << bit
	}
	s.depth++
	return true
}

func (s *scanner) inObject() bool {
	at := s.depth - 1
	return s.objects[at/64]>>uint(at%64)&1 == 1
}

func (s *scanner) pop(object bool) bool {
	if s.inObject() != object {
		return false
	}
	s.depth--
	s.endValue()
	return true
}

// finish ends the document and tells what it names.
func (s *scanner) finish() (n named, why reason, detail string) {
	switch s.state {
	case afterZero, inInteger, inFraction, inExponent:
		s.endValue()
	default: // only a number ends without a byte that says so
	}
	switch {
	case s.broken || s.state != atEnd:
		return named{}, badJSON, ""
	case !s.topObject:
		return named{}, badJSON, "the request body must be a JSON object"
	case s.fault != "":
		return named{}, badModel, s.fault
	case !s.found:
		return named{}, badModel, `"model" is missing`
	case s.named.model == "":
		return named{}, badModel, `"model" is empty`
	}
	return s.named, "", ""
}

// unquote returns the text of a valid JSON string whose inner bytes are given.
func unquote(inner []byte, escaped bool) string {
	if !escaped && utf8.Valid(inner) {
		return string(inner)
	}
	quoted := make([]byte, 0, len(inner)+2)
	quoted = append(append(append(quoted, '"'), inner...), '"')
	var text string
	if err := json.Unmarshal(quoted, &text); err != nil {
		panic("BUG: httpapi: a scanned string is valid JSON: " + err.Error())
	}
	return text
}

// quote returns name as a JSON string.
func quote(name string) string {
	var b strings.Builder
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(name); err != nil {
		panic("BUG: httpapi: a string always encodes: " + err.Error())
	}
	return strings.TrimSuffix(b.String(), "\n")
}
