package dispatch

import (
	"context"
	"io"
	"time"

	"github.com/iop-fabric/iop/edge/pool"
	"github.com/iop-fabric/iop/wire"
	"github.com/iop-fabric/iop/wire/iopv1"
)

// Attempt is one dispatch of one tunnel under one slot.
type Attempt struct {
	RunID     string // wire.NewRunID, new for each attempt (X6)
	Slot      pool.Slot
	Operation string
	Method    string
	Path      string
	RawQuery  string
	Header    []*iopv1.Header
	// Body is read from the start, once. Size is exact.
	Body     io.Reader
	BodySize int64
	Stream   bool
	// Timeout is the deadline of the whole attempt; 0: none.
	Timeout time.Duration
	// Grace is how much longer Edge waits for the Node to say that Timeout passed, so
	// that a late answer can be told from a provider that hung.
	Grace time.Duration
	// Patience is how long it is borne that nobody answers for the Node, while nothing
	// of the attempt was heard: the link to it may be back in a moment. 0: not at all,
	// for there is another candidate.
	Patience time.Duration
	// StallTimeout goes to the Node as response_stall_timeout_ms; 0: its default.
	StallTimeout time.Duration
}

// Writer takes the answer, on the goroutine that called Do. An error from it
// means that the caller is gone: the attempt is cancelled.
type Writer interface {
	// Start delivers status and headers; nothing was committed before it.
	Start(status int, header []*iopv1.Header) error
	// Body delivers bytes; they may be kept back until Flush. p is only valid
	// during the call.
	Body(p []byte) error
	// Flush is called when nothing more is at hand for now.
	Flush() error
	// Trailer delivers trailers, after the last Body.
	Trailer(fields []*iopv1.Header) error
}

// Result is the attempt's one terminal, as Edge saw it.
type Result struct {
	Err       *wire.Error // nil: END
	Started   bool        // Writer.Start was called: no replay may follow (H6)
	Acked     bool        // the Node acknowledged something of the attempt (G4)
	Status    int
	FirstByte time.Time // when Start was called
	Bytes     int64     // body bytes given to Writer
	Usage     *iopv1.Usage
}

// Runner is what the HTTP surface needs of a Dispatcher.
//
// Do sends the attempt, hands the answer to w as it arrives, and returns at its
// terminal. When ctx ends (the caller is gone, or its deadline passed; the cause
// tells) or w fails, Do sends one CancelRequest and returns at once; the slot
// still waits for the Node's terminal or its bound (P8). In every case Do, not
// its caller, returns the slot, exactly once.
type Runner interface {
	Do(ctx context.Context, a Attempt, w Writer) Result
}
