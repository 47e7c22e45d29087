package agent

import (
	"context"
	"io"
)

// Field is one header or trailer line. Names and values are as received;
// repeated names keep their order.
type Field struct {
	Name  string
	Value []byte
}

// Exchange asks a provider for one HTTP exchange.
type Exchange struct {
	RunID  string // opaque; for logs alone
	Target string // the provider's own model name; informs, the body already names it
	// Operation names a profile operation; it wins over Path and is refused when
	// the profile does not have it (T2).
	Operation string
	Method    string
	Path      string
	RawQuery  string
	Header    []Field
	// Body is read while Exchange runs. If it is an io.Closer too, Exchange closes
	// it before it returns, and a Close must end a Read that waits.
	Body     io.Reader // nil: none
	BodySize int64     // exact
	Stream   bool
	// Credential is the one secret for this exchange, out of a credential lease:
	// the adapter puts it, and nothing else, into its auth header (L4). Nil: the
	// adapter's own key, if it has one. Credentials among Header never pass.
	Credential []byte
}

// Sink receives the answer, in order: Start once, Body any number of times,
// then the Exchanger returns. A Sink's error means that nobody wants the rest:
// the Exchanger closes the provider's connection and returns that error.
type Sink interface {
	// Start delivers status and end-to-end headers. size is the length of the
	// body as the provider announced it, -1 if it did not. The Sink may hold the
	// start back until the first Body call or the return where size is known
	// and small, to send both at once.
	Start(status int, header []Field, size int64) error
	// Body delivers the next bytes, as one read of the provider gave them. The
	// Sink copies what it keeps: p is reused.
	Body(p []byte) error
	// Trailer delivers trailers, after the last Body.
	Trailer(fields []Field) error
}

// Listener is a Sink that also wants to hear of bytes that are no part of the answer,
// such as HTTP's 1xx responses. Heard may be called from any goroutine (W2).
type Listener interface {
	Sink
	Heard()
}

// Exchanger runs raw HTTP exchanges (AR1).
//
// Exchange returns nil when the provider's answer was complete, whatever its
// status. Otherwise it returns a *Failure, or the Sink's error, or the
// context's cause.
type Exchanger interface {
	Exchange(ctx context.Context, ex Exchange, sink Sink) error
}

// Health is the outcome of a probe.
type Health string

// The three verdicts (C3).
const (
	Available   Health = "available"
	Unavailable Health = "unavailable"
	Unknown     Health = "unknown"
)

// Prober asks whether a provider itself shows that it serves exactly target.
type Prober interface {
	Probe(ctx context.Context, target string) Health
}

// Provider is what every adapter is: something with a life of its own.
type Provider interface {
	// Start prepares the adapter; the provider behind it need not be reachable.
	Start(ctx context.Context) error
	// Stop releases what Start took. Exchanges under way end first.
	Stop(ctx context.Context) error
}

// Code is a failure's stable code (AR8).
type Code string

// Codes of failures. Each says whether a retry can help.
const (
	// CodeInvalid: the request cannot be served by this adapter. No retry.
	CodeInvalid Code = "invalid"
	// CodeCredential: the provider's key is missing here. A retry cannot help.
	CodeCredential Code = "credential"
	// CodeUnreachable: nothing of the request reached the provider. A retry is safe.
	CodeUnreachable Code = "unreachable"
	// CodeProvider: the provider broke off, or answered what is no HTTP. It may
	// have done the work.
	CodeProvider Code = "provider"
	// CodeDeadline: the time ran out. Retryable by who has more.
	CodeDeadline Code = "deadline_exceeded"
	// CodeCancelled: the caller gave up.
	CodeCancelled Code = "cancelled"
	// CodeInternal: a fault of ours.
	CodeInternal Code = "internal"
	// CodeUnknown: a code of a later version; the original is in Metadata.
	CodeUnknown Code = "unknown"
)

// MetaReason is the key of a Failure's metadata that says in a word what an operator
// looks at first. ReasonRefused: nobody listens at the provider's address.
const (
	MetaReason    = "reason"
	ReasonRefused = "refused"
)

// Failure is how a provider fails: a stable code, a message for people, and
// nothing secret (AR8).
type Failure struct {
	Code      Code
	Message   string
	Retryable bool
	Metadata  map[string]string
}

func (f *Failure) Error() string { return f.Message }
