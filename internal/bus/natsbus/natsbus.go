package natsbus

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/iop-fabric/iop/internal/bus"
	"github.com/iop-fabric/iop/subjects"
)

// Options says where to dial, as whom, and what happens when the connection ends.
type Options struct {
	URLs      []string                   // one of the two
	InProcess nats.InProcessConnProvider // one of the two
	Name      string                     // the connection's name: instance and random part (B5)
	Inbox     string                     // inbox prefix: subjects.NodeInbox or EdgeInbox
	TLS       *tls.Config                // nil only in process

	NKeyPublic string
	Sign       func(nonce []byte) ([]byte, error)

	// Roots, where it is set, are asked for at every dial, in the place of TLS.RootCAs.
	Roots func() *x509.CertPool
	// Keys, where it is set, is asked for at every dial that comes after the first, in
	// the place of NKeyPublic and Sign.
	Keys func() (public string, sign func(nonce []byte) ([]byte, error))

	// Reconnect is Edge's: the connection comes back by itself, for ever. A Node's
	// does not: every connection is a new session (S2).
	Reconnect bool
	// Timeout bounds each attempt to connect; 10 s. It must hold the callout.
	Timeout time.Duration
	// PendingBytes is how much may wait for one subscription's callback before
	// the newest messages are lost; 256 MiB. It must hold all windows in sum.
	PendingBytes int
	// OnError hears what has no caller to return to: permission violations and
	// slow consumers. It must not block.
	OnError func(error)
}

const (
	defaultTimeout      = 10 * time.Second
	defaultPendingBytes = 256 << 20

	// Edge notices a silent server, of which not a byte comes for edgeSilence though it
	// is asked every edgePing, and a blocked write by the write deadline.
	edgePing          = time.Second
	edgeSilence       = 2500 * time.Millisecond
	edgeWriteDeadline = 2 * time.Second
	reconnectWait     = 100 * time.Millisecond
	reconnectJitter   = 100 * time.Millisecond

	// A Node has Edge's heartbeats to tell it; these are the backstop. Its uplink
	// may be slow, so its write deadline is longer.
	nodePing          = 5 * time.Second
	nodeSilence       = 12500 * time.Millisecond
	nodeWriteDeadline = 5 * time.Second

	// anyPings: the library does not judge by answers to its pings. They stand behind
	// whatever fills a slow link, and any byte is as good a sign of life.
	anyPings = 1 << 30
)

// Conn is a bus.Conn, a bus.Reconnecter and a bus.Retirer.
type Conn struct {
	nc          *nats.Conn
	inbox       string
	pending     int
	stop        context.CancelFunc // ends the dialer, and so a reconnect in its midst
	reconnected chan struct{}
	closed      chan struct{}
	retiring    chan struct{}
	dialer      *dialer
	reconnects  bool

	mu        sync.Mutex
	byUs      bool
	lastCause error
}

var (
	_ bus.Conn        = (*Conn)(nil)
	_ bus.Reconnecter = (*Conn)(nil)
	_ bus.Redialer    = (*Conn)(nil)
	_ bus.Retirer     = (*Conn)(nil)
)

// Dial connects, or says why not; Classify reads its error.
func Dial(ctx context.Context, o Options) (*Conn, error) {
	if (len(o.URLs) == 0) == (o.InProcess == nil) {
		return nil, errors.New("dial broker: give either URLs or an in-process server")
	}
	if o.TLS == nil && o.InProcess == nil {
		return nil, errors.New("dial broker: no TLS configuration")
	}
	if o.Timeout <= 0 {
		o.Timeout = defaultTimeout
	}
	if o.PendingBytes <= 0 {
		o.PendingBytes = defaultPendingBytes
	}
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("dial broker: %w", context.Cause(ctx))
	}

	life, stop := context.WithCancel(context.Background())
	c := &Conn{
		inbox:       o.Inbox,
		pending:     o.PendingBytes,
		stop:        stop,
		reconnected: make(chan struct{}, 1), // a signal, not a count
		closed:      make(chan struct{}),
		retiring:    make(chan struct{}),
	}
	// nats.Connect knows no context. So the sockets it opens are ours, and the end
	// of the context closes them under it: it then returns at once.
	d := &dialer{
		ctx: life, timeout: o.Timeout, inner: o.InProcess, tls: o.TLS, roots: o.Roots, keys: o.Keys,
		servers: addresses(o.URLs), silence: nodeSilence,
	}
	if o.Reconnect {
		d.silence = edgeSilence
	}
	release := context.AfterFunc(ctx, d.abort)
	nc, err := nats.Connect(servers(o.URLs), c.options(o, d)...)
	if !release() { // the context ended first
		if err == nil {
			nc.Close()
		}
		stop()
		return nil, fmt.Errorf("dial broker: %w", context.Cause(ctx))
	}
	if err != nil {
		stop()
		return nil, fmt.Errorf("dial broker: %w", err)
	}
	d.settle(nc)
	c.nc, c.dialer, c.reconnects = nc, d, o.Reconnect
	return c, nil
}

func servers(urls []string) string {
	if len(urls) == 0 {
		return nats.DefaultURL // a name only: in process, nothing is looked up
	}
	s := urls[0]
	for _, u := range urls[1:] {
		s += "," + u
	}
	return s
}

func (c *Conn) options(o Options, d *dialer) []nats.Option {
	var retire sync.Once
	opts := []nats.Option{
		nats.Name(o.Name),
		nats.Timeout(o.Timeout),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) {
			if o.OnError != nil {
				o.OnError(err)
			}
		}),
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) {
			d.up.Store(false)
			c.note(err)
		}),
		nats.ReconnectHandler(func(*nats.Conn) {
			d.isUp()
			select {
			case c.reconnected <- struct{}{}:
			default:
			}
		}),
		nats.LameDuckModeHandler(func(*nats.Conn) { retire.Do(func() { close(c.retiring) }) }),
		nats.ClosedHandler(func(nc *nats.Conn) {
			c.note(nc.LastError())
			c.stop()
			d.discard()
			close(c.closed)
		}),
	}
	if o.Inbox != "" {
		opts = append(opts, nats.CustomInboxPrefix(o.Inbox))
	}
	if o.NKeyPublic != "" {
		opts = append(opts, nats.Nkey(o.NKeyPublic, nats.SignatureHandler(o.Sign)))
	}
	if o.TLS != nil {
		opts = append(opts, nats.Secure(o.TLS), nats.TLSHandshakeFirst())
	}
	if o.InProcess != nil {
		opts = append(opts, nats.InProcessServer(d))
	} else {
		// The dialer resolves names and speaks TLS itself, under its context.
		opts = append(opts, nats.SetCustomDialer(d), nats.SkipHostLookup())
	}
	if o.Reconnect {
		return append(opts,
			nats.MaxReconnects(-1), nats.IgnoreAuthErrorAbort(),
			nats.ReconnectWait(reconnectWait), nats.ReconnectJitter(reconnectJitter, reconnectJitter),
			nats.ReconnectBufSize(-1), // lost at once: streams send again, and nothing arrives late
			nats.PingInterval(edgePing), nats.MaxPingsOutstanding(anyPings),
			nats.FlusherTimeout(edgeWriteDeadline))
	}
	return append(opts, nats.NoReconnect(),
		nats.PingInterval(nodePing), nats.MaxPingsOutstanding(anyPings),
		nats.FlusherTimeout(nodeWriteDeadline))
}

// note keeps the last thing that went wrong, for Err.
func (c *Conn) note(err error) {
	if err == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.lastCause = err
}

// away says, without the library's lock, that the connection is about to be made
// again (N6).
func (c *Conn) away() bool { return c.reconnects && !c.dialer.up.Load() }

// Publish sends data; a nil error promises nothing (B3).
func (c *Conn) Publish(subject string, data []byte) error {
	if c.away() {
		return bus.ErrAway
	}
	return mapError("publish", c.nc.Publish(subject, data))
}

// PublishRequest sends data with a reply subject for the no-responders notice.
func (c *Conn) PublishRequest(subject, reply string, data []byte) error {
	if c.away() {
		return bus.ErrAway
	}
	return mapError("publish", c.nc.PublishRequest(subject, reply, data))
}

// Subscribe calls fn for every message whose subject matches. A subject the
// broker does not permit is reported to OnError: the call itself cannot know.
func (c *Conn) Subscribe(subject string, fn func(bus.Msg)) (bus.Subscription, error) {
	sub, err := c.nc.Subscribe(subject, func(m *nats.Msg) { fn(fromNATS(m)) })
	if err != nil {
		return nil, mapError("subscribe", err)
	}
	if err := sub.SetPendingLimits(-1, c.pending); err != nil {
		return nil, mapError("subscribe", err)
	}
	return subscription{sub}, nil
}

type subscription struct{ sub *nats.Subscription }

func (s subscription) Unsubscribe() error { return mapError("unsubscribe", s.sub.Unsubscribe()) }

func fromNATS(m *nats.Msg) bus.Msg {
	// The server's notice: a status header and nothing else.
	if len(m.Header) > 0 && len(m.Data) == 0 && m.Header.Get("Status") == "503" {
		return bus.Msg{Subject: m.Subject, NoResponders: true}
	}
	return bus.Msg{Subject: m.Subject, Reply: m.Reply, Data: m.Data}
}

// Request sends data and waits for one answer, or the end of the context.
func (c *Conn) Request(ctx context.Context, subject string, data []byte) (bus.Msg, error) {
	m, err := c.nc.RequestWithContext(ctx, subject, data)
	if err != nil {
		return bus.Msg{}, mapError("request", err)
	}
	return fromNATS(m), nil
}

// Flush waits until the broker has processed everything sent before it.
func (c *Conn) Flush(ctx context.Context) error {
	if _, ok := ctx.Deadline(); !ok { // the library insists on one
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, defaultTimeout)
		defer cancel()
	}
	return mapError("flush", c.nc.FlushWithContext(ctx))
}

// Inbox is the prefix this connection may be answered on.
func (c *Conn) Inbox() string { return c.inbox }

// Reconnected receives a value after the connection came back.
func (c *Conn) Reconnected() <-chan struct{} { return c.reconnected }

// Redial ends the connection and has it come back. In process nothing is shown that
// could be another.
func (c *Conn) Redial() {
	if c.reconnects && c.dialer.inner == nil {
		_ = c.nc.ForceReconnect() // one that is closed stays so, one that is away comes back
	}
}

// Retiring is closed when a server has said that it is about to stop. A connection
// that comes back may be at another one by then.
func (c *Conn) Retiring() <-chan struct{} { return c.retiring }

// Closed is closed when the connection is over for good.
func (c *Conn) Closed() <-chan struct{} { return c.closed }

// Err says why the connection ended; nil while it lives.
func (c *Conn) Err() error {
	select {
	case <-c.closed:
	default:
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.byUs:
		return bus.ErrClosed
	case c.lastCause == nil:
		return fmt.Errorf("connection to the broker: %w", io.EOF)
	default:
		return fmt.Errorf("connection to the broker: %w", c.lastCause)
	}
}

// Close sends what was published and ends the connection. Twice is fine.
func (c *Conn) Close() {
	c.mu.Lock()
	if !c.nc.IsClosed() {
		c.byUs = true
	}
	c.mu.Unlock()
	c.stop()
	c.nc.Close()
}

func mapError(op string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, nats.ErrConnectionClosed), errors.Is(err, nats.ErrConnectionDraining), errors.Is(err, nats.ErrBadSubscription):
		return bus.ErrClosed
	case errors.Is(err, nats.ErrNoResponders):
		return bus.ErrNoResponders
	case errors.Is(err, nats.ErrReconnectBufExceeded), errors.Is(err, nats.ErrConnectionReconnecting):
		return bus.ErrAway
	case errors.Is(err, nats.ErrMaxPayload):
		return bus.ErrTooLarge
	default:
		return fmt.Errorf("%s: %w", op, err)
	}
}

// UserInfo is what the server says about this very connection (G2).
type UserInfo struct {
	User        string               // <edge>.<node>.<gen>, or a lobby's !denied.<reason>
	Account     string               //
	Permissions subjects.Permissions // what it enforces
	Expires     time.Duration        // how long the admission lasts; 0: no end
}

// WhoAmI asks the server who this connection is; no peer can answer it.
func (c *Conn) WhoAmI(ctx context.Context) (UserInfo, error) {
	m, err := c.Request(ctx, subjects.UserInfo, nil)
	if err != nil {
		return UserInfo{}, fmt.Errorf("ask the broker who we are: %w", err)
	}
	return parseUserInfo(m.Data)
}

func parseUserInfo(data []byte) (UserInfo, error) {
	var answer struct {
		Data struct {
			User        string `json:"user"`
			Account     string `json:"account"`
			Permissions struct {
				Publish   struct{ Allow []string } `json:"publish"`
				Subscribe struct{ Allow []string } `json:"subscribe"`
			} `json:"permissions"`
			Expires time.Duration `json:"expires"`
		} `json:"data"`
		Error *struct {
			Code        int    `json:"code"`
			Description string `json:"description"`
		} `json:"error"`
	}
	if err := json.Unmarshal(data, &answer); err != nil {
		return UserInfo{}, fmt.Errorf("ask the broker who we are: unreadable answer: %w", err)
	}
	if answer.Error != nil {
		return UserInfo{}, fmt.Errorf("ask the broker who we are: %s (%d)", answer.Error.Description, answer.Error.Code)
	}
	d := answer.Data
	return UserInfo{
		User: d.User, Account: d.Account, Expires: d.Expires,
		Permissions: subjects.Permissions{Publish: d.Permissions.Publish.Allow, Subscribe: d.Permissions.Subscribe.Allow},
	}, nil
}
