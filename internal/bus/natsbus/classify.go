package natsbus

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"strings"

	"github.com/nats-io/nats.go"

	"github.com/iop-fabric/iop/internal/bus"
)

// Reason is why a broker could not be used. The list is closed.
type Reason string

// The reasons, each with what to do about it.
const (
	Unreachable  Reason = "unreachable"  // nobody listens there: retry
	Timeout      Reason = "timeout"      // no answer in time, or no TLS at the other end: retry
	Busy         Reason = "busy"         // it accepts and gives up: overload, or the session service is away: retry
	Unauthorized Reason = "unauthorized" // name, key or role refused, or the service too slow: retry slowly
	Expired      Reason = "expired"      // the admission ran out: dial again
	Limit        Reason = "limit"        // the broker's connection limit: retry slowly
	TLSOwn       Reason = "tls_own"      // the broker refuses our certificate
	TLSPeer      Reason = "tls_peer"     // we refuse the broker's certificate
	NoTLS        Reason = "no_tls"       // something else than our TLS listens there
	Closed       Reason = "closed"       // an established connection ended
	Cancelled    Reason = "cancelled"    // our own doing
	Other        Reason = "other"
)

// Refusal is an error of Dial or Conn.Err as an operator wants to read it.
type Refusal struct {
	Reason   Reason
	Sentence string
}

// Classify tells why a broker could not be used. The sentence is fixed for each
// reason and holds nothing of the error's own text.
func Classify(err error) Refusal {
	if err == nil {
		return Refusal{}
	}
	r := reason(err)
	return Refusal{Reason: r, Sentence: sentences[r]}
}

var sentences = map[Reason]string{
	Unreachable:  "the broker cannot be reached: nobody answers at its address",
	Timeout:      "the broker did not answer in time, or does not speak TLS on this port",
	Busy:         "the broker gave up during the connect: it is overloaded, or its session service is not running",
	Unauthorized: "the broker refused this name or key, or could not check it in time",
	Expired:      "the broker's admission of this connection ran out",
	Limit:        "the broker has as many connections as it allows",
	TLSOwn:       "the broker refused our certificate: it is missing, expired, or not of the broker's CA (was the CA exchanged while this machine was off? it needs new files from iop rotate, or another invitation)",
	TLSPeer:      "the broker's certificate is not to be trusted: wrong CA, wrong name, or expired (was the CA exchanged while this machine was off? it needs new files from iop rotate, or another invitation)",
	NoTLS:        "the broker's address answers with something else than TLS",
	Closed:       "the connection to the broker ended",
	Cancelled:    "the connection was given up here",
	Other:        "the connection to the broker failed",
}

// own holds the TLS alerts that are about the certificate we sent.
var own = []string{
	"certificate required", "unknown certificate authority", "bad certificate", "expired certificate",
	"revoked certificate", "unsupported certificate", "unknown certificate", "access denied",
}

// reason reads types first; only what the library leaves untyped is read from
// its text.
func reason(err error) Reason {
	text := strings.ToLower(err.Error())
	has := func(parts ...string) bool {
		for _, p := range parts {
			if strings.Contains(text, p) {
				return true
			}
		}
		return false
	}
	var verification *tls.CertificateVerificationError
	var unknownCA x509.UnknownAuthorityError
	var wrongName x509.HostnameError
	var invalid x509.CertificateInvalidError
	var notTLS tls.RecordHeaderError
	switch {
	case errors.Is(err, context.Canceled), errors.Is(err, errAborted), errors.Is(err, bus.ErrClosed):
		return Cancelled
	case errors.Is(err, nats.ErrAuthExpired), errors.Is(err, nats.ErrAccountAuthExpired):
		return Expired
	case errors.Is(err, nats.ErrAuthorization), errors.Is(err, nats.ErrAuthRevoked), has("authorization violation", "authentication revoked"):
		return Unauthorized
	case errors.Is(err, nats.ErrMaxConnectionsExceeded), errors.Is(err, nats.ErrMaxAccountConnectionsExceeded), has("maximum account active connections", "maximum connections exceeded"):
		return Limit
	case errors.As(err, &notTLS):
		if notTLS.RecordHeader == [5]byte([]byte("-ERR ")) {
			return Limit // the one refusal a server writes before the handshake
		}
		return NoTLS
	case errors.As(err, &verification), errors.As(err, &unknownCA), errors.As(err, &wrongName), errors.As(err, &invalid), has("failed to verify certificate"):
		return TLSPeer
	case has("remote error: tls:") && has(own...):
		return TLSOwn
	case has("expected 'pong', got 'ping'"), has("closed by remote after tls handshake"), errors.Is(err, nats.ErrTLS) && errors.Is(err, io.EOF), has("tls error: eof"):
		return Busy
	case errors.Is(err, nats.ErrNoServers), has("connection refused", "no such host", "no route to host", "network is unreachable"):
		return Unreachable
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, nats.ErrTimeout), has("i/o timeout", "timeout"):
		return Timeout
	case errors.Is(err, io.ErrClosedPipe), has("closed pipe"): // how a refusal looks in process
		return Unauthorized
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, nats.ErrStaleConnection), has("connection reset", "broken pipe", "use of closed network connection"):
		return Closed
	default:
		return Other
	}
}
