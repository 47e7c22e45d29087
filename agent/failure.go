package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
)

// ErrRunCancelled is the cause of a run's context that its caller cancelled.
var ErrRunCancelled = errors.New("run cancelled")

// ErrFailureEnvelope: the bytes are no Failure of a version this build reads.
var ErrFailureEnvelope = errors.New("not a failure envelope")

// MetaOriginalCode is the metadata key that keeps a later version's code.
const MetaOriginalCode = "original_code"

const (
	failureVersion = 1
	maxFailure     = 64 << 10 // an envelope over this is refused unread
	maxCode        = 64
)

type failureEnvelope struct {
	Version   int               `json:"version"`
	Code      Code              `json:"code"`
	Message   string            `json:"message"`
	Retryable bool              `json:"retryable"`
	Metadata  map[string]string `json:"metadata,omitempty"`
}

// known reports whether c is a code of this version.
func (c Code) known() bool {
	switch c {
	case CodeInvalid, CodeCredential, CodeUnreachable, CodeProvider, CodeDeadline, CodeCancelled, CodeInternal, CodeUnknown:
		return true
	}
	return false
}

// EncodeFailure returns f in its versioned JSON envelope. Bytes of the message
// that are no UTF-8 are replaced.
func EncodeFailure(f *Failure) ([]byte, error) {
	b, err := json.Marshal(failureEnvelope{failureVersion, f.Code, f.Message, f.Retryable, f.Metadata})
	if err != nil {
		return nil, fmt.Errorf("encode failure: %w", err)
	}
	if len(b) > maxFailure {
		return nil, fmt.Errorf("encode failure: %w: over %d bytes", ErrFailureEnvelope, maxFailure)
	}
	return b, nil
}

// DecodeFailure reads an envelope. Unknown fields are passed over; an unknown
// code becomes CodeUnknown and stands under MetaOriginalCode; an envelope of a
// later version is refused.
func DecodeFailure(b []byte) (*Failure, error) {
	if len(b) > maxFailure {
		return nil, fmt.Errorf("decode failure: %w: over %d bytes", ErrFailureEnvelope, maxFailure)
	}
	var e failureEnvelope
	if err := json.Unmarshal(b, &e); err != nil {
		return nil, fmt.Errorf("decode failure: %w: no JSON object of its shape", ErrFailureEnvelope)
	}
	if e.Version != failureVersion {
		return nil, fmt.Errorf("decode failure: %w: version %d", ErrFailureEnvelope, e.Version)
	}
	if e.Code == "" {
		return nil, fmt.Errorf("decode failure: %w: no code", ErrFailureEnvelope)
	}
	f := &Failure{Code: e.Code, Message: e.Message, Retryable: e.Retryable, Metadata: e.Metadata}
	if !e.Code.known() {
		if f.Metadata == nil {
			f.Metadata = make(map[string]string, 1)
		}
		f.Metadata[MetaOriginalCode] = clipCode(string(e.Code))
		f.Code = CodeUnknown
	}
	return f, nil
}

// clipCode keeps a foreign code short; a whole character stays whole.
func clipCode(s string) string {
	if len(s) > maxCode {
		s = strings.ToValidUTF8(s[:maxCode], "")
	}
	return s
}

// FailureOf classifies any error a provider returned (AR8). It returns nil for
// nil, and for an error nobody gave a code CodeInternal without its text.
func FailureOf(err error) *Failure {
	var f *Failure
	switch {
	case err == nil:
		return nil
	case errors.As(err, &f):
		return f
	case errors.Is(err, ErrRunCancelled), errors.Is(err, context.Canceled):
		return &Failure{Code: CodeCancelled, Message: "the run was cancelled"}
	case errors.Is(err, context.DeadlineExceeded):
		return &Failure{Code: CodeDeadline, Message: "the deadline passed", Retryable: true}
	default:
		return &Failure{Code: CodeInternal, Message: "the provider's adapter failed"}
	}
}
