package openai_compat

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"syscall"

	"github.com/iop-fabric/iop/agent"
)

// MetaReason is the metadata key of a failure's Reason.
const MetaReason = agent.MetaReason

// Reason says in a word of a closed list what an operator looks at first.
type Reason string

// Reasons of failures.
const (
	ReasonRequest  Reason = "request"           // the exchange itself is not one of the profile's
	ReasonBody     Reason = "body"              // the request's body broke off on our side
	ReasonKey      Reason = "key"               // the provider's key is missing
	ReasonStopped  Reason = "stopped"           // the adapter was stopped
	ReasonRefused  Reason = agent.ReasonRefused // nobody listens there
	ReasonName     Reason = "name"              // the host's name does not resolve
	ReasonTLS      Reason = "tls"               // no TLS, or not with this certificate
	ReasonTimeout  Reason = "timeout"           // no connection in time
	ReasonReset    Reason = "reset"             // the provider reset the connection
	ReasonClosed   Reason = "closed"            // the provider closed before its answer was whole
	ReasonNotHTTP  Reason = "not_http"          // what came is no HTTP answer
	ReasonHeaders  Reason = "headers"           // a header or trailer block over its bound
	ReasonProtocol Reason = "protocol"          // HTTP, but an answer that was not asked for
	ReasonOther    Reason = "other"
)

func invalid(message string) *agent.Failure {
	return &agent.Failure{Code: agent.CodeInvalid, Message: message, Metadata: reason(ReasonRequest)}
}

func reason(r Reason) map[string]string { return map[string]string{MetaReason: string(r)} }

func broke(r Reason, message string) *agent.Failure {
	return &agent.Failure{Code: agent.CodeProvider, Message: message, Metadata: reason(r)}
}

// failure turns an error of the transport into what Exchange returns. Nothing
// of the error's text is kept: it names addresses and quotes answers.
func failure(ctx context.Context, at *attempt, b *body, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if b != nil && b.fault.Load() != nil {
		return &agent.Failure{Code: agent.CodeInternal, Message: "the request's body broke off", Metadata: reason(ReasonBody)}
	}
	if !at.sent() {
		return &agent.Failure{
			Code: agent.CodeUnreachable, Message: "the provider could not be reached",
			Retryable: true, Metadata: reason(reasonOf(err)),
		}
	}
	switch r := reasonOf(err); r {
	case ReasonHeaders:
		return broke(r, "the provider's headers are too large")
	case ReasonNotHTTP:
		return broke(r, "the provider's answer is no valid HTTP")
	default:
		return broke(r, "the provider broke off")
	}
}

// reasonOf finds the word for an error. net/http has no types for some, only
// texts; a text that changes there turns a word into ReasonOther, no more.
func reasonOf(err error) Reason {
	var (
		dns      *net.DNSError
		record   tls.RecordHeaderError
		alert    tls.AlertError
		verify   *tls.CertificateVerificationError
		unknown  x509.UnknownAuthorityError
		hostname x509.HostnameError
	)
	text := err.Error()
	switch {
	case errors.As(err, &dns):
		return ReasonName
	case errors.As(err, &record), errors.As(err, &alert), errors.As(err, &verify),
		errors.As(err, &unknown), errors.As(err, &hostname), strings.Contains(text, "HTTP response to HTTPS client"):
		return ReasonTLS
	case errors.Is(err, syscall.ECONNREFUSED):
		return ReasonRefused
	case errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		return ReasonReset
	case errors.Is(err, os.ErrDeadlineExceeded), timedOut(err):
		return ReasonTimeout
	case errors.Is(err, errHeader), strings.Contains(text, "malformed"), strings.Contains(text, "invalid"),
		strings.Contains(text, "unsupported transfer encoding"):
		return ReasonNotHTTP
	case strings.Contains(text, "headers exceeded"), strings.Contains(text, "suspiciously long trailer"):
		return ReasonHeaders
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, errIdleClosed),
		strings.Contains(text, "server closed idle connection"), strings.Contains(text, "unexpected EOF"):
		return ReasonClosed
	default:
		return ReasonOther
	}
}

func timedOut(err error) bool {
	var ne net.Error
	return errors.As(err, &ne) && ne.Timeout()
}
