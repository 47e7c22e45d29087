package wire

import (
	"context"
	"errors"
	"fmt"
)

// Class says what kind of failure ended a run, a tunnel or a command (M3).
// The list is closed. Callers branch on the class and never on the message.
type Class string

const (
	// Invalid: the request itself cannot be served by anyone. A retry cannot help.
	Invalid Class = "invalid"
	// UnknownAdapter: the Node has no adapter of that name. Another Node may.
	UnknownAdapter Class = "unknown_adapter"
	// Capacity: the adapter's gate is full. A retry elsewhere or later helps.
	Capacity Class = "capacity"
	// Draining: the Node takes nothing new. A retry elsewhere helps.
	Draining Class = "draining"
	// Credential: the credential lease was missing or refused. A retry cannot help.
	Credential Class = "credential"
	// Unreachable: the provider, or the Node before it acknowledged anything,
	// could not be reached, so nothing was executed. A retry elsewhere helps.
	Unreachable Class = "unreachable"
	// Provider: the provider failed while serving. It may have done work.
	Provider Class = "provider"
	// Deadline: the request's own time ran out.
	Deadline Class = "deadline"
	// Cancelled: the caller gave up.
	Cancelled Class = "cancelled"
	// Stalled: the provider showed no progress within the stall bound.
	Stalled Class = "stalled"
	// SessionEnded: the Node's session was closed or fenced. A retry elsewhere helps.
	SessionEnded Class = "session_ended"
	// Protocol: a peer broke the rules of the stream.
	Protocol Class = "protocol"
	// Internal: a fault of our own.
	Internal Class = "internal"
)

// Classes lists every class, in the order of M3.
var Classes = []Class{
	Invalid, UnknownAdapter, Capacity, Draining, Credential, Unreachable, Provider,
	Deadline, Cancelled, Stalled, SessionEnded, Protocol, Internal,
}

// ParseClass returns the class a peer sent; one that is not of the list
// (a later version's, a hostile peer's) becomes Protocol.
func ParseClass(s string) Class {
	for _, c := range Classes {
		if string(c) == s {
			return c
		}
	}
	return Protocol
}

// MetaReason is the key of an ERROR's metadata that says more of the failure, and
// ReasonRefused the one word that anything depends on.
const (
	MetaReason    = "reason"
	ReasonRefused = "refused"
)

// Error is a failure with its class. It is what crosses the wire.
type Error struct {
	Class   Class
	Message string
	// Refused: nobody listens where the provider should be (of Unreachable alone). It
	// travels as ReasonRefused and informs.
	Refused bool
	remote  bool
	cause   error
}

func (e *Error) Error() string { return e.Message }

// Unwrap returns the local error behind e, if there is one. It never travels.
func (e *Error) Unwrap() error { return e.cause }

// Errorf makes an Error; a %w operand is kept as the local cause.
func Errorf(class Class, format string, args ...any) *Error {
	err := fmt.Errorf(format, args...)
	return &Error{Class: class, Message: err.Error(), cause: errors.Unwrap(err)}
}

// FromPeer makes the Error a peer reported. IsRemote is true for it.
func FromPeer(class, message string) *Error {
	return &Error{Class: ParseClass(class), Message: message, remote: true}
}

// ClassOf maps any local error to its class; one nobody gave a class is Internal.
func ClassOf(err error) Class {
	var e *Error
	switch {
	case err == nil:
		return ""
	case errors.As(err, &e):
		return e.Class
	case errors.Is(err, context.Canceled):
		return Cancelled
	case errors.Is(err, context.DeadlineExceeded):
		return Deadline
	default:
		return Internal
	}
}

// AsError returns err as an *Error, giving it the class ClassOf finds.
func AsError(err error) *Error {
	if err == nil {
		return nil
	}
	var e *Error
	if errors.As(err, &e) {
		return e
	}
	return &Error{Class: ClassOf(err), Message: err.Error(), cause: err}
}

// IsRemote reports whether the failure is one that a peer told us about.
func IsRemote(err error) bool {
	var e *Error
	return errors.As(err, &e) && e.remote
}
