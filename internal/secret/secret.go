package secret

import (
	"crypto/subtle"
	"fmt"
	"io"
	"log/slog"
)

// Redacted is what is written in a secret's place.
const Redacted = "[redacted]"

// String is a text that is not printed. The zero value is the empty text. Compare
// with Equal: == compares where two texts are, not what they are.
type String struct {
	// A pointer, because fmt reads unexported fields without asking their type
	// how to print; a pointer below the top it prints as an address.
	text *string
}

// New keeps text from being printed.
func New(text string) String { return String{&text} }

// Reveal returns the text.
func (s String) Reveal() string {
	if s.text == nil {
		return ""
	}
	return *s.text
}

// Empty reports whether there is no text.
func (s String) Empty() bool { return s.Reveal() == "" }

// Equal compares in a time that tells only the length.
func (s String) Equal(o String) bool {
	return subtle.ConstantTimeCompare([]byte(s.Reveal()), []byte(o.Reveal())) == 1
}

// Format writes "[redacted]" for every verb and flag.
func (String) Format(f fmt.State, _ rune) { io.WriteString(f, Redacted) } //nolint:errcheck // fmt.State keeps its own error

// String is "[redacted]".
func (String) String() string { return Redacted }

// LogValue is what slog writes.
func (String) LogValue() slog.Value { return slog.StringValue(Redacted) }

// MarshalText is what JSON and other encoders write.
func (String) MarshalText() ([]byte, error) { return []byte(Redacted), nil }

// MarshalYAML is what YAML encoders write.
func (String) MarshalYAML() (any, error) { return Redacted, nil }
