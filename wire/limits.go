package wire

import "time"

// Limits of the wire, in bytes unless the name says otherwise.
const (
	// MaxBody is the most body one message carries; larger ones are cut (J6).
	MaxBody = 64 << 10
	// MaxMessage is the largest message any of us sends or decodes: MaxBody and
	// its envelope with headers and trailers. The broker's account limit.
	MaxMessage = 256 << 10
	// MaxHeaders bounds a header block, and a trailer block, each (T3).
	MaxHeaders = 64 << 10
	// FrameOverhead is what a frame costs its window beside its body (J1).
	FrameOverhead = 256
	// MinWindow is where a stream's window starts, MaxWindow where it ends (J7).
	MinWindow = 256 << 10
	MaxWindow = 4 << 20
	// MaxStoreValue bounds one value of an Edge's store (B10).
	MaxStoreValue = 64 << 10
	// ProtocolVersion is the newest protocol this build speaks, and the oldest.
	ProtocolVersion = 1
)

// Defaults of times that both ends must agree on or must choose alike.
const (
	HeartbeatInterval = time.Second
	HeartbeatBound    = 5 * time.Second
	PendingBound      = 30 * time.Second
	StallTimeout      = 300 * time.Second
	CloseGrace        = 2 * time.Second
	ProbeBound        = 5 * time.Second
	// CancelBound is how long a lease waits for the answer to a cancel (P8).
	CancelBound = CloseGrace + ProbeBound + 5*time.Second
)
