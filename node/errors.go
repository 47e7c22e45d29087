package node

import "github.com/iop-fabric/iop/wire"

// Why a request is refused. They travel as they stand (W3).
var (
	errUnknownAdapter = wire.Errorf(wire.UnknownAdapter, "this node has no such adapter")
	errNoTunnels      = wire.Errorf(wire.Invalid, "this adapter serves no tunnels")
	errCapacity       = wire.Errorf(wire.Capacity, "the adapter has no free slot")
	errFull           = wire.Errorf(wire.Capacity, "the node holds as many streams as it may")
	errDraining       = wire.Errorf(wire.Draining, "the node is draining")
	errNoCredentials  = wire.Errorf(wire.Credential, "this node has no credential plane")
	errRunID          = wire.Errorf(wire.Invalid, "the run id is not the subject's")
	errTimeout        = wire.Errorf(wire.Invalid, "timeout_sec is out of range")
	errStallTimeout   = wire.Errorf(wire.Invalid, "response_stall_timeout_ms is out of range")
	errHeaders        = wire.Errorf(wire.Invalid, "the request's headers are larger than the limit")
	errBodyTooLarge   = wire.Errorf(wire.Invalid, "the request's body is not of the announced size")
)

// Causes that cancel an exchange. The first one decides its terminal (W8).
var (
	errCancelled    = wire.Errorf(wire.Cancelled, "the caller gave up")
	errDeadline     = wire.Errorf(wire.Deadline, "the request's time ran out")
	errStopping     = wire.Errorf(wire.SessionEnded, "the node stopped before the answer was complete")
	errSessionEnded = wire.Errorf(wire.SessionEnded, "the node's session ended")
)

// How an exchange fails on our side of the adapter.
var (
	errPanicked     = wire.Errorf(wire.Internal, "the adapter panicked")
	errAdapter      = wire.Errorf(wire.Internal, "the adapter failed")
	errAnswer       = wire.Errorf(wire.Internal, "the adapter broke the order of an answer")
	errAnswerHeader = wire.Errorf(wire.Provider, "the provider's headers or trailers are larger than the limit")
	errAnswerStatus = wire.Errorf(wire.Provider, "the provider's status is none of an answer")
	errNoAnswer     = wire.Errorf(wire.Internal, "the adapter returned without an answer")
)
