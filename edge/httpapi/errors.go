package httpapi

import (
	"context"
	"errors"

	"github.com/iop-fabric/iop/edge/pool"
	"github.com/iop-fabric/iop/wire"
)

// reason says why a request was not served. It is a class of the wire or one of
// the surface's own below; the set is closed, so it may be a metric's label.
// Empty: it was served.
type reason string

// What the surface itself refuses.
const (
	badJSON       reason = "bad_json"
	badModel      reason = "bad_model"
	badBody       reason = "bad_body"
	badHeader     reason = "bad_header"
	unsupported   reason = "unsupported"
	noKey         reason = "no_key"
	forbidden     reason = "forbidden"
	unknownModel  reason = "unknown_model"
	unknownPath   reason = "unknown_path"
	badMethod     reason = "bad_method"
	slowBody      reason = "slow_body"
	tooLarge      reason = "too_large"
	badEncoding   reason = "bad_encoding"
	misdirected   reason = "misdirected"
	largeHeader   reason = "large_header"
	tooManyOfKey  reason = "streams_per_key"
	queueFull     reason = "queue_full"
	waitExpired   reason = "wait_expired"
	noProvider    reason = "no_provider"
	bodiesFull    reason = "bodies_full"
	upgradeAsked  reason = "upgrade"
	callerGone           = reason(wire.Cancelled)
	brokenAnswer         = reason(wire.Protocol)
	internalFault        = reason(wire.Internal)
)

// row says what a reason is to the caller (E7, E12).
type row struct {
	status     int
	code       string // OpenAI's error.code; stable
	openAI     string // OpenAI's error.type
	anthropic  string // Anthropic's error.type
	retryAfter int    // seconds; 0: no such header
	retry      bool   // another provider may be tried before commitment (E12)
	message    string // for the caller; a peer's own text stays inside
}

// StatusCallerGone is logged where nobody is left to answer.
const StatusCallerGone = 499

const (
	invalidRequest = "invalid_request_error"
	rateLimit      = "rate_limit_error"
	serverError    = "server_error"
	apiError       = "api_error"
	overloaded     = "overloaded_error"
	timedOut       = "timeout_error"
)

// table is E12, and E7's own refusals.
var table = map[reason]row{
	reason(wire.Invalid):        {400, "invalid_request", invalidRequest, invalidRequest, 0, false, "the request cannot be served as it is"},
	reason(wire.UnknownAdapter): {502, "unknown_adapter", serverError, apiError, 0, true, "the node does not run this provider's adapter"},
	reason(wire.Capacity):       {503, "capacity", serverError, overloaded, 1, true, "the provider is at its capacity"},
	reason(wire.Draining):       {503, "draining", serverError, overloaded, 1, true, "the service is being stopped and takes nothing new"},
	reason(wire.Credential):     {502, "credential_refused", serverError, apiError, 0, false, "the provider's credential was refused"},
	reason(wire.Unreachable):    {502, "provider_unreachable", serverError, apiError, 0, true, "the provider could not be reached"},
	reason(wire.Provider):       {502, "provider_error", serverError, apiError, 0, false, "the provider failed while serving the request"},
	reason(wire.Deadline):       {504, "deadline_exceeded", serverError, timedOut, 0, false, "the request's time ran out"},
	reason(wire.Cancelled):      {StatusCallerGone, "cancelled", serverError, apiError, 0, false, "the request was cancelled"},
	reason(wire.Stalled):        {504, "provider_stalled", serverError, timedOut, 0, true, "the provider showed no progress in time"},
	reason(wire.SessionEnded):   {502, "node_lost", serverError, apiError, 0, true, "the connection to the provider's node was lost"},
	reason(wire.Protocol):       {502, "protocol_error", serverError, apiError, 0, false, "the provider's answer was broken"},
	reason(wire.Internal):       {500, "internal_error", serverError, apiError, 0, false, "internal error"},

	badJSON:      {400, "invalid_json", invalidRequest, invalidRequest, 0, false, "the request body is not valid JSON"},
	badModel:     {400, "invalid_model", invalidRequest, invalidRequest, 0, false, "the request body must name one model"},
	badBody:      {400, "invalid_body", invalidRequest, invalidRequest, 0, false, "the request body could not be read"},
	badHeader:    {400, "invalid_header", invalidRequest, invalidRequest, 0, false, "a request header is malformed"},
	unsupported:  {400, "unsupported_operation", invalidRequest, invalidRequest, 0, false, "no provider of this model can do this"},
	upgradeAsked: {400, "upgrade_refused", invalidRequest, invalidRequest, 0, false, "connections are not upgraded here"},
	noKey:        {401, "invalid_api_key", invalidRequest, "authentication_error", 0, false, "a valid API key is needed: Authorization: Bearer <key>, or x-api-key: <key>"},
	forbidden:    {403, "model_not_allowed", "permission_error", "permission_error", 0, false, "this API key may not use the model"},
	unknownModel: {404, "model_not_found", invalidRequest, "not_found_error", 0, false, "the model does not exist here"},
	unknownPath:  {404, "unknown_path", invalidRequest, "not_found_error", 0, false, "nothing is served at this path"},
	badMethod:    {405, "method_not_allowed", invalidRequest, invalidRequest, 0, false, "this path does not take the method"},
	slowBody:     {408, "request_timeout", invalidRequest, timedOut, 0, false, "the request body came too slowly"},
	tooLarge:     {413, "request_too_large", invalidRequest, "request_too_large", 0, false, "the request body is larger than this server takes"},
	badEncoding:  {415, "unsupported_content_encoding", invalidRequest, invalidRequest, 0, false, "the request body must come as it is, or in one Content-Encoding of gzip and zstd"},
	misdirected:  {421, "misdirected_request", invalidRequest, invalidRequest, 0, false, "this server answers only for itself"},
	tooManyOfKey: {429, "too_many_streams", rateLimit, "rate_limit_error", 1, false, "this API key has too many requests running"},
	queueFull:    {429, "queue_full", rateLimit, "rate_limit_error", 1, false, "the queue of this model is full"},
	largeHeader:  {431, "headers_too_large", invalidRequest, invalidRequest, 0, false, "the request headers are too large"},
	waitExpired:  {503, "queue_timeout", serverError, overloaded, 5, false, "no provider became free in time"},
	noProvider:   {503, "no_provider", serverError, overloaded, 5, false, "no provider of this model is available"},
	bodiesFull:   {503, "server_busy", serverError, overloaded, 1, false, "too many large requests are being held"},
}

// rowOf returns what the caller is told; nobody is told 499.
func rowOf(why reason) row {
	r, ok := table[why]
	if !ok {
		return table[internalFault]
	}
	if r.status == StatusCallerGone {
		r.status = 502
	}
	return r
}

// statusOf returns the status that is logged.
func statusOf(why reason) int { return table[why].status }

// reasonOf maps what Acquire answers, and what a context was cancelled with.
func reasonOf(err error) reason {
	switch {
	case errors.Is(err, pool.ErrUnknownModel):
		return unknownModel
	case errors.Is(err, pool.ErrUnsupported):
		return unsupported
	case errors.Is(err, pool.ErrQueueFull):
		return queueFull
	case errors.Is(err, pool.ErrWaitExpired):
		return waitExpired
	case errors.Is(err, pool.ErrNoProvider):
		return noProvider
	case errors.Is(err, pool.ErrStopping):
		return reason(wire.Draining)
	default:
		return reasonOfClass(wire.ClassOf(err))
	}
}

// reasonOfClass keeps the set closed whatever made the class.
func reasonOfClass(c wire.Class) reason {
	if _, ok := table[reason(c)]; !ok {
		return internalFault
	}
	return reason(c)
}

// errorBody is OpenAI's error object.
type errorBody struct {
	Error errorDetail `json:"error"`
}

type errorDetail struct {
	Message string  `json:"message"`
	Type    string  `json:"type"`
	Param   *string `json:"param"`
	Code    string  `json:"code"`
}

func openAIError(why reason, detail string) []byte { return marshal(errorObject(why, detail)) }

// errorObject is a reason in OpenAI's words; a non-empty detail takes the place
// of the table's message.
func errorObject(why reason, detail string) errorBody {
	r := rowOf(why)
	if detail == "" {
		detail = r.message
	}
	e := errorBody{errorDetail{Message: detail, Type: r.openAI, Code: r.code}}
	switch why {
	case badModel, unknownModel, forbidden, unsupported:
		param := "model"
		e.Error.Param = &param
	default: // no parameter is at fault
	}
	return e
}

// maxAttempts bounds the attempts of one request, the first included.
const maxAttempts = 3

// next decides whether a request whose attempt ended with why may have another
// one (E12, H6, I3): where the class allows it, or where the operator asked for it
// by the status of the provider's answer (Q5). attempts counts those made.
func next(why reason, asked, committed bool, attempts int) bool {
	return !committed && attempts < maxAttempts && (asked || table[why].retry)
}

// MayRetry reports whether a request whose attempts, so many, ended with this class may
// have another one. The simulator decides by it as relay does.
func MayRetry(class wire.Class, committed bool, attempts int) bool {
	return next(reasonOfClass(class), false, committed, attempts)
}

// cancelled says why ctx ended: a caller that left cancels without a cause of
// its own, whoever stops the Edge names one. Empty: it has not ended.
func cancelled(ctx context.Context) reason {
	if ctx.Err() == nil {
		return ""
	}
	return reasonOf(context.Cause(ctx))
}
