package identity

import (
	"fmt"
	"io"
	"log/slog"
)

const redactedText = "[redacted]"

// redacted is embedded in every type that holds a private key, so that no verb
// of fmt, no slog handler and no encoder ever reaches the key behind it (I5).
type redacted struct{}

// seal hides a value in a function. fmt asks no method of an unexported field, and
// for a verb that does not fit it prints even what a pointer there points at; of a
// function it only ever prints the address (I5).
func seal[T any](v T) func() T { return func() T { return v } }

// Format writes "[redacted]" for every verb and flag.
func (redacted) Format(f fmt.State, _ rune) { io.WriteString(f, redactedText) } //nolint:errcheck // fmt.State keeps its own error

// LogValue is what slog writes.
func (redacted) LogValue() slog.Value { return slog.StringValue(redactedText) }

// MarshalText is what JSON, YAML and other encoders write.
func (redacted) MarshalText() ([]byte, error) { return []byte(redactedText), nil }

// MarshalYAML is what YAML encoders that do not ask for text write.
func (redacted) MarshalYAML() (any, error) { return redactedText, nil }
