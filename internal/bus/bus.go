// Package bus is what Edge, Node and the tests need of a message bus, and no
// more: publish, subscribe, no-responders notices, a close that is noticed.
// natsbus carries it over NATS, membus in memory with faults; bustest is the
// suite both must pass.
//
//	B1  Messages of one publisher reach one subscription in the order sent.
//	B2  A callback runs on the subscription's one goroutine and must not block.
//	B3  A nil error from Publish promises nothing: the message may be lost.
//	B4  Data handed to a callback belongs to the callback: it may keep it and
//	    alias it. Data handed to Publish may be reused once Publish returned.
package bus

import (
	"context"
	"errors"
)

// Msg is one received message.
type Msg struct {
	Subject string
	Reply   string
	Data    []byte
	// NoResponders is set, with nothing else but the subject, on the notice that
	// a message published with that reply subject found no subscriber. It is a
	// hint and never proof (G4).
	NoResponders bool
}

// ErrClosed is what every call answers once the connection has ended.
var ErrClosed = errors.New("bus: connection closed")

// ErrNoResponders is what Request answers when nobody subscribes the subject.
var ErrNoResponders = errors.New("bus: nobody answers on this subject")

// ErrAway is what publishing answers while a connection that comes back by itself
// is lost: it is as if the message had been lost with it.
var ErrAway = errors.New("bus: the connection is lost and comes back")

// ErrTooLarge is what publishing answers for data larger than the bus carries.
var ErrTooLarge = errors.New("bus: message too large")

// Subscription ends one subscription.
type Subscription interface {
	Unsubscribe() error
}

// Conn is one connection to the bus.
type Conn interface {
	// Publish sends data; B4 says who owns it.
	Publish(subject string, data []byte) error
	// PublishRequest sends data with a reply subject, on which the bus reports
	// that nobody was there to read it.
	PublishRequest(subject, reply string, data []byte) error
	// Subscribe calls fn for every message whose subject matches.
	Subscribe(subject string, fn func(Msg)) (Subscription, error)
	// Request sends data and waits for one answer on a private inbox.
	Request(ctx context.Context, subject string, data []byte) (Msg, error)
	// Flush waits until the bus has processed everything sent before it.
	Flush(ctx context.Context) error
	// Inbox is the private prefix this connection may be answered on, without
	// the last token.
	Inbox() string
	// Closed is closed when the connection has ended; Err then says why.
	Closed() <-chan struct{}
	Err() error
	// Close ends the connection after sending what was published.
	Close()
}

// Retirer is a Conn that hears when its server is about to stop (a server's lame-duck
// mode). The channel is closed then; the connection lives on for a while.
type Retirer interface {
	Retiring() <-chan struct{}
}

// Reconnecter is a Conn that can come back by itself (Edge's; a Node's never
// does: S2). The channel receives a value each time it has.
type Reconnecter interface {
	Reconnected() <-chan struct{}
}

// Redialer is a Reconnecter that ends its connection when it is told to, and comes
// back with the keys that there are then.
type Redialer interface {
	Redial()
}
