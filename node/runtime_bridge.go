package node

import (
	"context"
	"errors"
	"io"
	"math"
	"time"

	"github.com/iop-fabric/iop/agent"
	"github.com/iop-fabric/iop/wire"
	"github.com/iop-fabric/iop/wire/iopv1"
)

// This file is the only place that turns the wire's messages into the agent
// types of an adapter and back (AR10).

// opModels lists what a provider serves. It is Edge's discovery, not work, and
// takes no slot.
const opModels = "models"

// maxStallMillis is the most milliseconds a Go duration holds (W1).
const maxStallMillis = math.MaxInt64 / int64(time.Millisecond)

// fieldCost is what a header counts beside its name and value.
const fieldCost = 8

// checkRequest refuses what no adapter should see.
func checkRequest(run string, req *iopv1.ProviderTunnelRequest) *wire.Error {
	switch ms := req.GetResponseStallTimeoutMs(); {
	case req.GetRunId() != run:
		return errRunID
	case ms < 0 || ms > maxStallMillis:
		return errStallTimeout
	case req.GetTimeoutSec() < 0 || req.GetTimeoutSec() > math.MaxInt64/int64(time.Second):
		return errTimeout
	case len(req.GetCredentialLease()) > 0 || req.GetCredentialBinding() != nil:
		return errNoCredentials // either half (L1)
	case len(req.GetBody()) > wire.MaxBody, req.GetBodySize() > math.MaxInt64:
		return errBodyTooLarge
	case req.GetBodyFollows() && len(req.GetBody()) > 0:
		return errBodyTooLarge
	case !req.GetBodyFollows() && req.GetBodySize() != uint64(len(req.GetBody())) && req.GetBodySize() != 0:
		return errBodyTooLarge
	case blockSize(req.GetHeaders()) > wire.MaxHeaders:
		return errHeaders
	}
	return nil
}

// blockSize is how large a header or trailer block is, counted as Edge does.
func blockSize(fields []*iopv1.Header) (n int) {
	for _, f := range fields {
		n += len(f.GetName()) + len(f.GetValue()) + fieldCost
	}
	return n
}

// exchangeOf is what the adapter is asked. Names and bytes alias the message.
func exchangeOf(run string, req *iopv1.ProviderTunnelRequest, body io.Reader, size int64) agent.Exchange {
	header := make([]agent.Field, len(req.GetHeaders()))
	for i, h := range req.GetHeaders() {
		header[i] = agent.Field{Name: h.GetName(), Value: h.GetValue()}
	}
	return agent.Exchange{
		RunID: run, Target: req.GetTarget(), Operation: req.GetOperation(),
		Method: req.GetMethod(), Path: req.GetPath(), RawQuery: req.GetRawQuery(),
		Header: header, Body: body, BodySize: size, Stream: req.GetStream(),
	}
}

// headersOf turns an adapter's fields into the wire's, and counts their size.
func headersOf(fields []agent.Field) ([]*iopv1.Header, int) {
	if len(fields) == 0 {
		return nil, 0
	}
	all := make([]iopv1.Header, len(fields))
	out := make([]*iopv1.Header, len(fields))
	for i, f := range fields {
		all[i].Name, all[i].Value = f.Name, f.Value
		out[i] = &all[i]
	}
	return out, blockSize(out)
}

// failureClasses maps an adapter's codes to the wire's classes.
var failureClasses = map[agent.Code]wire.Class{
	agent.CodeInvalid:     wire.Invalid,
	agent.CodeCredential:  wire.Credential,
	agent.CodeUnreachable: wire.Unreachable,
	agent.CodeProvider:    wire.Provider,
	agent.CodeDeadline:    wire.Deadline,
	agent.CodeCancelled:   wire.Cancelled,
	agent.CodeInternal:    wire.Internal,
	agent.CodeUnknown:     wire.Provider,
}

// outcome is the terminal of an exchange that returned err: nil is END. What
// ended the context first decides, whatever the adapter made of it (W8); only a
// whole answer outlives a local stop.
func outcome(ctx context.Context, err error) *wire.Error {
	cause := context.Cause(ctx)
	var (
		why *wire.Error
		f   *agent.Failure
	)
	switch {
	case cause != nil && (err != nil || !errors.Is(cause, errStopping)):
		return wire.AsError(cause)
	case err == nil:
		return nil
	case errors.As(err, &why): // the sink's own, which the adapter handed back
		return why
	case errors.As(err, &f):
		class, ok := failureClasses[f.Code]
		if !ok {
			class = wire.Internal
		}
		refused := class == wire.Unreachable && f.Metadata[agent.MetaReason] == agent.ReasonRefused
		return &wire.Error{Class: class, Message: clip(f.Message), Refused: refused}
	default:
		// Nobody vouched for that text, so it stays here (W3).
		return errAdapter
	}
}

// clip bounds the text of a failure.
func clip(s string) string {
	const most = 1 << 10
	if len(s) > most {
		s = s[:most]
	}
	return s
}
