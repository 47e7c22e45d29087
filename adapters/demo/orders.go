package demo

import (
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

const (
	maxDelay  = 10 * time.Minute
	maxTokens = 100_000
	maxEcho   = 200 // bytes of the message that come back
)

const help = `I am the demo model of iop: no language model, only a stand-in that needs no network.
Put these words into your message:
demo:delay=50ms waits so long before each token.
demo:tokens=200 makes the answer so many tokens long.
demo:status=429 answers with this error status.
demo:cut=5 breaks off after so many chunks.`

// orders are what the last user message asks for.
type orders struct {
	text    string // the message without them
	delay   time.Duration
	delayed bool // delay was given
	tokens  int  // -1: not given
	status  int  // 0: not given
	cut     int  // -1: not given
}

func parseOrders(text string) (orders, error) {
	o := orders{tokens: -1, cut: -1}
	var rest []string
	for word := range strings.FieldsSeq(text) {
		order, ok := strings.CutPrefix(word, "demo:")
		if !ok {
			rest = append(rest, word)
			continue
		}
		name, value, _ := strings.Cut(order, "=")
		var err error
		switch name {
		case "delay":
			o.delay, err = time.ParseDuration(value)
			o.delayed = true
			if o.delay < 0 || o.delay > maxDelay {
				err = errOrder
			}
		case "tokens":
			o.tokens, err = number(value, 0, maxTokens)
		case "status":
			o.status, err = number(value, 400, 599)
		case "cut":
			o.cut, err = number(value, 0, maxTokens)
		default:
			err = errOrder
		}
		if err != nil {
			return orders{}, errOrder
		}
	}
	o.text = strings.Join(rest, " ")
	return o, nil
}

func number(s string, lowest, highest int) (int, error) {
	n, err := strconv.Atoi(s)
	if err != nil || n < lowest || n > highest {
		return 0, errOrder
	}
	return n, nil
}

// answer returns the answer's tokens.
func (o orders) answer() []string {
	switch {
	case o.tokens >= 0:
		tokens := make([]string, o.tokens)
		for i := range tokens {
			tokens[i] = "word "
		}
		return tokens
	case strings.EqualFold(strings.Trim(o.text, "?!. "), "help"):
		return split(help)
	case o.text == "":
		return split("I am the demo model of iop, no language model. Say help for what I can do.")
	default:
		return split(fmt.Sprintf("I am the demo model of iop, no language model. You said: %s", clip(o.text, maxEcho)))
	}
}

// clip cuts s to at most n bytes, between characters.
func clip(s string, n int) string {
	if len(s) <= n {
		return s
	}
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n] + " ..."
}

// split cuts s into tokens; joined again they are s.
func split(s string) []string {
	var tokens []string
	for s != "" {
		word := strings.IndexFunc(s, unicode.IsSpace)
		if word < 0 {
			return append(tokens, s)
		}
		end := strings.IndexFunc(s[word:], func(r rune) bool { return !unicode.IsSpace(r) })
		if end < 0 {
			return append(tokens, s)
		}
		tokens = append(tokens, s[:word+end])
		s = s[word+end:]
	}
	return tokens
}

func count(s string) int {
	n := 0
	for range strings.FieldsSeq(s) {
		n++
	}
	return n
}
