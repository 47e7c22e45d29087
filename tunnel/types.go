package tunnel

import (
	"time"

	"github.com/iop-fabric/iop/wire"
)

// Frame is one encoded message of a stream, as a Sender keeps it.
type Frame struct {
	Seq      uint64
	Data     []byte // encoded, its sequence inside; the Sender's until ReleaseFrame
	Body     int    // body bytes; with wire.FrameOverhead they are the frame's cost
	Terminal bool   // the last one
	Control  bool   // small and not body (a start, a usage): may use the reserve
}

// SenderConfig parameterises a Sender. Zero durations mean the defaults below.
type SenderConfig struct {
	Credit uint64        // the peer's first grant: an absolute cost offset
	MinRTO time.Duration // 200 ms
	MaxRTO time.Duration // 2 s; where twice the round trip is longer, that, up to 5 s
	// AckDelay is how long the peer may keep an acknowledgement back; 25 ms.
	AckDelay time.Duration
	// GiveUp ends a stream that shows no progress at all though frames were sent
	// again and again; 10 s.
	GiveUp time.Duration
}

// SendKind says what happened to a sending half.
type SendKind uint8

// Events of a Sender.
const (
	// Offer: Frame is to be sent. Its Seq must be NextSeq(); Room must have said
	// yes, unless it is Terminal or Control.
	Offer SendKind = iota + 1
	// AckReceived: the peer acknowledged up to Acked, grants up to Credit, and
	// asks for what follows Acked again if Resend is set. Reset: it does not know
	// the stream.
	AckReceived
	// SendDeadline: Deadline() has passed.
	SendDeadline
	// SendReconnected: the connection was lost and re-made; send again at once.
	SendReconnected
	// SendLate: what is on its way is behind others' frames on one link, and those do
	// arrive: its silence counts from now.
	SendLate
	// SendStopped: the stream is over for a reason outside it; release all.
	SendStopped
)

// SendEvent is one event of a Sender.
type SendEvent struct {
	Kind   SendKind
	Frame  Frame
	Acked  uint64
	Credit uint64
	Resend bool
	Reset  bool
}

// SendEffectKind says what a Sender orders.
type SendEffectKind uint8

// Effects of a Sender.
const (
	// SendFrame: publish Frame.Data. Again marks a repetition.
	SendFrame SendEffectKind = iota + 1
	// ReleaseFrame: Frame.Data is the shell's again.
	ReleaseFrame
	// SenderDone: the terminal was acknowledged; forget the stream.
	SenderDone
	// SenderFailed: Err says why (class protocol, or unreachable where the peer
	// never acknowledged anything). All frames were released before it.
	SenderFailed
)

// SendEffect is one order of a Sender.
type SendEffect struct {
	Kind  SendEffectKind
	Frame Frame
	Again bool
	Err   *wire.Error
}

// ReceiverConfig parameterises a Receiver.
type ReceiverConfig struct {
	Window    uint64 // the first window; wire.MinWindow if 0
	MaxWindow uint64 // how far it may grow; wire.MaxWindow if 0
}

// RecvKind says what happened to a receiving half.
type RecvKind uint8

// Events of a Receiver.
const (
	// FrameReceived: a frame with Seq arrived, with Body bytes of body and this
	// Digest of its content (to tell a duplicate from a forgery).
	FrameReceived RecvKind = iota + 1
	// Consumed: the reader took Body bytes' worth of one delivered frame; its
	// cost may be granted anew.
	Consumed
	// RecvStopped: the stream is over for a reason outside it.
	RecvStopped
)

// RecvEvent is one event of a Receiver.
type RecvEvent struct {
	Kind     RecvKind
	Seq      uint64
	Body     int
	Digest   uint64
	Terminal bool
}

// RecvEffectKind says what a Receiver orders.
type RecvEffectKind uint8

// Effects of a Receiver.
const (
	// Deliver: the frame of this very event is the next one; hand it on.
	Deliver RecvEffectKind = iota + 1
	// AckSoon: an acknowledgement is due within the batch delay.
	AckSoon
	// AckNow: an acknowledgement is due at once: a gap, much credit, an end.
	AckNow
	// ReceiverFailed: the peer broke the rules; Err has class protocol.
	ReceiverFailed
)

// RecvEffect is one order of a Receiver.
type RecvEffect struct {
	Kind RecvEffectKind
	Err  *wire.Error
}

// Ack is what a Receiver would acknowledge now.
type Ack struct {
	Acked  uint64
	Credit uint64
	Resend bool // a gap was seen since the last Ack
}
