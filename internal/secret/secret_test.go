package secret

import (
	"bytes"
	"encoding/gob"
	"encoding/json"
	"encoding/xml"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

const canary = "canary-7f3a"

func TestI1NothingPrintsIt(t *testing.T) {
	s := New(canary)
	hidden := struct{ key String }{s}
	shown := struct {
		Key  String
		Keys []String
		Map  map[string]String
	}{s, []String{s}, map[string]String{"a": s}}
	var out bytes.Buffer
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%X", "%d", "%10s", "%T", "%!"} {
		for _, v := range []any{s, &s, hidden, &hidden, shown, &shown, []String{s}, errors.Join(fmt.Errorf("with %v", s))} {
			fmt.Fprintf(&out, verb+"\n", v)
		}
	}
	fmt.Fprintln(&out, s, &s, hidden)
	for _, h := range []slog.Handler{slog.NewTextHandler(&out, nil), slog.NewJSONHandler(&out, nil)} {
		slog.New(h).Info("event", slog.Any("key", s), slog.Any("pointer", &s), slog.Any("struct", shown), slog.Group("g", slog.Any("key", s)))
	}
	for _, v := range []any{s, &s, shown, hidden} {
		if b, err := json.Marshal(v); err != nil {
			t.Errorf("json: %v", err)
		} else {
			out.Write(b)
		}
		if b, err := yaml.Marshal(v); err != nil {
			t.Errorf("yaml: %v", err)
		} else {
			out.Write(b)
		}
	}
	b, err := xml.Marshal(s)
	if err != nil {
		t.Errorf("xml: %v", err)
	}
	out.Write(b)
	// gob has no text of its own to write and asks MarshalText.
	if err := gob.NewEncoder(&out).Encode(s); err != nil {
		t.Logf("gob refuses: %v", err)
	}
	text := out.String()
	// Hex and decimal bytes of it are as bad as the text.
	for _, leak := range []string{canary, fmt.Sprintf("%x", canary), fmt.Sprintf("%X", canary), fmt.Sprintf("%d", []byte(canary))} {
		if strings.Contains(text, leak) {
			t.Errorf("the secret was printed as %q in:\n%s", leak, text)
		}
	}
	if got := fmt.Sprintf("%v %s %#v", s, s, s); got != "[redacted] [redacted] [redacted]" {
		t.Errorf("got %q", got)
	}
}

func TestI2Reveal(t *testing.T) {
	if got := New(canary).Reveal(); got != canary {
		t.Errorf("got %q", got)
	}
	var zero String
	if zero.Reveal() != "" || !zero.Empty() || New(canary).Empty() {
		t.Error("the zero value is not the empty text")
	}
	if !New("a").Equal(New("a")) || New("a").Equal(New("b")) || !zero.Equal(New("")) {
		t.Error("Equal does not compare the texts")
	}
}
