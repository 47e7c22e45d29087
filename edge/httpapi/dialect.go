package httpapi

import (
	"bytes"
	"encoding/json"
	"strings"
)

// dialect is how errors are told to a caller, and how an event stream of its
// kind begins and ends.
type dialect uint8

const (
	openAI    dialect = iota // also of everything that has no other
	responses                // OpenAI's Responses: JSON errors as openAI, events of its own
	anthropic
)

// dialectOf is that of a path nothing is served at (E7).
func dialectOf(path string) dialect {
	if path == "/v1/messages" || strings.HasPrefix(path, "/v1/messages/") {
		return anthropic
	}
	return openAI
}

// errorOf renders a reason as a JSON answer; a non-empty detail takes the place
// of the table's message. id is the request's, as the caller sees it.
func (d dialect) errorOf(why reason, detail, id string) []byte {
	if d == anthropic {
		return anthropicError(why, detail, id)
	}
	return openAIError(why, detail)
}

// errorEvent is the event that ends a stream which failed (E6), with a detail as
// errorOf has it.
func (d dialect) errorEvent(why reason, detail, id string) []byte {
	var b []byte
	switch d {
	case anthropic:
		b = append(append(b, "event: error\ndata: "...), anthropicError(why, detail, id)...)
	case responses:
		b = append(append(b, "event: error\ndata: "...), responsesError(why, detail)...)
	default:
		b = append(append(b, "data: "...), openAIError(why, detail)...)
	}
	return append(b, "\n\n"...)
}

// marks are the events by which a stream with named events is known: one of
// first shows that it speaks the dialect, one of last that it is whole. A
// provider's own error, one of failed, is an end too: it said what happened.
type marks struct{ first, last, failed []eventName }

var marksOf = map[dialect]*marks{
	anthropic: {first: names("message_start"), last: names("message_stop", "error"), failed: names("error")},
	responses: {
		first:  names("response.created", "response.in_progress"),
		last:   names("response.completed", "response.incomplete", "response.failed", "error"),
		failed: names("response.failed", "error"),
	},
}

// eventName is one event's name, and how data without an event line spells it.
type eventName struct{ name, compact, spaced []byte }

func names(of ...string) (list []eventName) {
	for _, n := range of {
		list = append(list, eventName{[]byte(n), []byte(`"type":"` + n + `"`), []byte(`"type": "` + n + `"`)})
	}
	return list
}

// seenIn reports whether the beginning of a line names one of the events. Text
// of a model cannot: its quotes are escaped within JSON.
func seenIn(line []byte, list []eventName) bool {
	if v, ok := bytes.CutPrefix(line, []byte("event:")); ok {
		v = bytes.TrimSpace(v)
		for _, n := range list {
			if bytes.Equal(v, n.name) {
				return true
			}
		}
		return false
	}
	if !bytes.HasPrefix(line, []byte("data:")) {
		return false
	}
	for _, n := range list {
		if bytes.Contains(line, n.compact) || bytes.Contains(line, n.spaced) {
			return true
		}
	}
	return false
}

// anthropicBody is Anthropic's error object.
type anthropicBody struct {
	Type      string          `json:"type"`
	Error     anthropicDetail `json:"error"`
	RequestID string          `json:"request_id"`
}

type anthropicDetail struct {
	Type    string `json:"type"`
	Message string `json:"message"`
}

func anthropicError(why reason, detail, id string) []byte {
	r := rowOf(why)
	if detail == "" {
		detail = r.message
	}
	return marshal(anthropicBody{"error", anthropicDetail{r.anthropic, detail}, id})
}

// responsesError is the Responses' error event. The client libraries look for
// "error" in every event and raise it, so the common object is there as well.
func responsesError(why reason, detail string) []byte {
	e := errorObject(why, detail)
	return marshal(struct {
		Type    string  `json:"type"`
		Code    string  `json:"code"`
		Message string  `json:"message"`
		Param   *string `json:"param"`
		errorBody
	}{"error", e.Error.Code, e.Error.Message, e.Error.Param, e})
}

func marshal(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic("BUG: httpapi: an answer always marshals: " + err.Error())
	}
	return b
}
