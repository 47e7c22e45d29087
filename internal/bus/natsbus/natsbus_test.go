package natsbus

import (
	"bytes"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"
	"go.uber.org/goleak"

	"github.com/iop-fabric/iop/internal/bus"
	"github.com/iop-fabric/iop/internal/bus/bustest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type fabric struct {
	broker  *broker
	options func(t *testing.T) Options
}

func (f fabric) Connect(t *testing.T) bus.Conn { return dial(t, f.options(t)) }

func (f fabric) Lose(t *testing.T, c bus.Conn) {
	conn, ok := c.(*Conn)
	if !ok {
		t.Fatalf("not a natsbus connection: %T", c)
	}
	f.broker.kick(t, conn)
}

func (b *broker) kick(t *testing.T, c *Conn) {
	t.Helper()
	id, err := c.nc.GetClientID()
	if err != nil {
		t.Fatal(err)
	}
	if err := b.DisconnectClientByID(id); err != nil {
		t.Fatal(err)
	}
}

func dial(t *testing.T, o Options) *Conn {
	t.Helper()
	c, err := Dial(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		c.Close()
		wait(t, c.Closed(), "Closed")
	})
	return c
}

func wait[T any](t *testing.T, ch <-chan T, what string) (v T) {
	t.Helper()
	select {
	case v = <-ch:
	case <-time.After(hang):
		t.Fatalf("%s did not happen", what)
	}
	return v
}

func TestSuiteOverTLS(t *testing.T) {
	bustest.Run(t, func(t *testing.T) bustest.Fabric {
		b := newBroker(t)
		return fabric{b, b.options}
	})
}

func TestSuiteInProcess(t *testing.T) {
	bustest.Run(t, func(t *testing.T) bustest.Fabric {
		b := newBroker(t)
		return fabric{b, func(t *testing.T) Options {
			o := b.options(t)
			o.URLs, o.TLS, o.InProcess = nil, nil, b
			return o
		}}
	})
}

// A Node may be in the broker's process and still prove its certificate.
func TestInProcessWithTLS(t *testing.T) {
	b := newBroker(t)
	o := b.options(t)
	o.URLs, o.InProcess = nil, b
	if _, err := dial(t, o).WhoAmI(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func TestDialNeedsOneTargetAndTLS(t *testing.T) {
	b := newBroker(t)
	both, none, plain := b.options(t), b.options(t), b.options(t)
	both.InProcess = b
	none.URLs = nil
	plain.TLS = nil
	for name, o := range map[string]Options{"both": both, "none": none, "plain": plain} {
		if c, err := Dial(t.Context(), o); err == nil {
			c.Close()
			t.Errorf("%s: dialled", name)
		}
	}
}

// N1: the context ends a dial that hangs in the handshake.
func TestN1DialEndsWithItsContext(t *testing.T) {
	l := listen(t)
	accepted := make(chan struct{})
	go func() {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		close(accepted)
		_, _ = conn.Read(make([]byte, 1<<16)) // the client's hello
		_, _ = conn.Read(make([]byte, 1))     // until it hangs up
		_ = conn.Close()
	}()
	o := newBroker(t).options(t)
	o.URLs, o.Timeout = []string{"tls://" + l.Addr().String()}, time.Hour
	gone := errors.New("no longer wanted")
	ctx, cancel := context.WithCancelCause(t.Context())
	go func() {
		<-accepted
		cancel(gone)
	}()
	if _, err := Dial(ctx, o); !errors.Is(err, gone) {
		t.Errorf("got %v", err)
	}
	if _, err := Dial(ctx, o); !errors.Is(err, gone) {
		t.Errorf("a dial under an ended context: %v", err)
	}
}

// N5: a server that takes connections and says nothing is passed over.
func TestN5SilentServerIsPassedOver(t *testing.T) {
	l := listen(t) // the kernel accepts for it
	for range 4 {  // whichever comes first
		o := newBroker(t).options(t)
		o.URLs, o.Timeout = append(o.URLs, "tls://"+l.Addr().String()), time.Hour
		began := time.Now()
		dial(t, o)
		if took := time.Since(began); took > hang {
			t.Errorf("it took %v", took)
		}
	}
}

// N5: where all fail, the reason that tells most is told.
func TestN5RefusalBesideOneThatIsDown(t *testing.T) {
	down := listen(t)
	address := down.Addr().String()
	down.Close()
	o := newBroker(t).options(t)
	o.TLS = o.TLS.Clone()
	o.TLS.RootCAs = x509.NewCertPool()
	o.URLs = append(o.URLs, "tls://"+address)
	if _, err := Dial(t.Context(), o); Classify(err).Reason != TLSPeer {
		t.Errorf("got %v", err)
	}
}

// N6: where a server was, something takes connections and says nothing. Publish
// fails, and does not wait for the dials.
func TestN6PublishDoesNotWaitForTheDial(t *testing.T) {
	b := newBroker(t)
	o := b.options(t)
	o.Reconnect, o.Timeout = true, time.Hour
	edge := dial(t, o)
	address := b.Addr().String()
	b.Shutdown()
	b.WaitForShutdown()
	l, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for edge.Publish("t.x", nil) == nil { // until the loss is noticed
			runtime.Gosched()
		}
		for range 1000 {
			_ = edge.Publish("t.x", nil)
		}
	}()
	wait(t, ended, "the end of the messages")
	if edge.Publish("t.x", nil) == nil {
		t.Error("a message went to nobody")
	}
}

// N1: a connection that comes up although its context ended is closed.
func TestN1LateWinnerIsClosed(t *testing.T) {
	b := newBroker(t)
	for _, inProcess := range []bool{false, true} {
		o := b.options(t)
		if inProcess {
			o.URLs, o.TLS, o.InProcess = nil, nil, b
		}
		ctx, cancel := context.WithCancel(t.Context())
		o.Sign = func(nonce []byte) ([]byte, error) {
			cancel() // in the midst of the handshake
			return b.user.Sign(nonce)
		}
		if c, err := Dial(ctx, o); !errors.Is(err, context.Canceled) || c != nil {
			t.Errorf("in process %v: got %v, %v", inProcess, c, err)
		}
	}
	// Whatever the server let in is gone when another client has gone through it.
	other := dial(t, b.options(t))
	deadline := time.Now().Add(hang)
	for b.NumClients() != 1 {
		if time.Now().After(deadline) {
			t.Fatalf("%d clients are left", b.NumClients())
		}
		if err := other.Flush(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}

// Contract: S2
func TestN3NodeConnectionIsOverAtItsFirstLoss(t *testing.T) {
	b := newBroker(t)
	c := dial(t, b.options(t))
	b.kick(t, c)
	wait(t, c.Closed(), "Closed")
	if r := Classify(c.Err()); r.Reason != Closed {
		t.Errorf("%v is %q", c.Err(), r.Reason)
	}
}

// A server that is about to stop says so while the connection still serves.
//
// Contract: Y6
func TestRetiringServerIsHeard(t *testing.T) {
	b := newBroker(t)
	c := dial(t, b.options(t))
	select {
	case <-c.Retiring():
		t.Fatal("told before it was so")
	default:
	}
	done := make(chan struct{})
	go func() { b.LameDuckShutdown(); close(done) }()
	wait(t, c.Retiring(), "Retiring")
	if err := c.Flush(t.Context()); err != nil {
		t.Errorf("the connection is of no more use: %v", err)
	}
	c.Close()
	b.Shutdown()
	wait(t, done, "the server's end")
}

// Contract: J5
func TestEdgeConnectionComesBack(t *testing.T) {
	b := newBroker(t)
	o := b.options(t)
	o.Reconnect = true
	edge, node := dial(t, o), dial(t, b.options(t))
	got := make(chan bus.Msg, 16)
	if _, err := edge.Subscribe("t.>", func(m bus.Msg) { got <- m }); err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		b.kick(t, edge)
		wait(t, edge.Reconnected(), "Reconnected")
		if err := edge.Flush(t.Context()); err != nil {
			t.Fatal(err)
		}
		want := fmt.Sprint("after loss ", i)
		if err := node.Publish("t.x", []byte(want)); err != nil {
			t.Fatal(err)
		}
		if m := wait(t, got, "a message"); string(m.Data) != want {
			t.Errorf("got %q", m.Data)
		}
	}
	if edge.Err() != nil {
		t.Errorf("a connection that came back has the error %v", edge.Err())
	}
}

// Told to, an Edge's connection comes back with the keys of then, and measures the
// server by the roots of then.
//
// Contract: B8 J5
func TestRedialWithOtherKeys(t *testing.T) {
	next, err := nkeys.CreateUser()
	if err != nil {
		t.Fatal(err)
	}
	b := newBroker(t, func(o *server.Options) {
		o.Nkeys = append(o.Nkeys, &server.NkeyUser{Nkey: public(t, next), Permissions: o.Nkeys[0].Permissions})
	})
	o := b.options(t)
	key, roots := b.user, b.ca.pool()
	var mu sync.Mutex
	asked := 0
	o.Reconnect = true
	o.TLS.RootCAs = newCA(t).pool() // what was there when it was made
	o.Roots = func() *x509.CertPool { mu.Lock(); defer mu.Unlock(); return roots }
	o.Keys = func() (string, func([]byte) ([]byte, error)) {
		mu.Lock()
		defer mu.Unlock()
		asked++
		return public(t, key), key.Sign
	}
	edge := dial(t, o)
	shown := func() string {
		t.Helper()
		id, err := edge.nc.GetClientID()
		if err != nil {
			t.Fatal(err)
		}
		all, err := b.Connz(&server.ConnzOptions{Username: true, CID: id})
		if err != nil || len(all.Conns) != 1 {
			t.Fatalf("%v %v", all, err)
		}
		return all.Conns[0].AuthorizedUser
	}
	if got := shown(); got != public(t, b.user) {
		t.Errorf("it came as %q", got)
	}
	mu.Lock()
	key = next
	if asked != 0 {
		t.Error("asked at the first dial")
	}
	mu.Unlock()
	edge.Redial()
	wait(t, edge.Reconnected(), "Reconnected")
	if err := edge.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := shown(); got != public(t, next) {
		t.Errorf("it came back as %q", got)
	}
	if node := dial(t, b.options(t)); true { // a Node's stays as it is
		node.Redial()
		if err := node.Flush(t.Context()); err != nil || node.Err() != nil {
			t.Errorf("a connection that does not come back: %v", err)
		}
	}
}

// While the server is away an Edge's messages are refused, not kept: kept ones
// would arrive after newer ones.
func TestNothingIsKeptWhileTheServerIsAway(t *testing.T) {
	b := newBroker(t)
	o := b.options(t)
	o.Reconnect = true
	edge := dial(t, o)
	b.Shutdown()
	b.WaitForShutdown()
	deadline := time.Now().Add(hang)
	for edge.Publish("t.x", []byte("kept?")) == nil {
		if time.Now().After(deadline) {
			t.Fatal("the loss was not noticed")
		}
	}
	if err := edge.Publish("t.x", nil); errors.Is(err, bus.ErrClosed) {
		t.Error("an Edge's connection ended for good")
	}
	edge.Close()
	wait(t, edge.Closed(), "Closed")
	if !errors.Is(edge.Err(), bus.ErrClosed) {
		t.Errorf("Err is %v", edge.Err())
	}
}

// Contract: G2
func TestWhoAmI(t *testing.T) {
	b := newBroker(t)
	info, err := dial(t, b.options(t)).WhoAmI(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if info.User != public(t, b.user) || !slices.Contains(info.Permissions.Publish, "t.>") || !slices.Contains(info.Permissions.Subscribe, "_INBOX.>") {
		t.Errorf("got %+v", info)
	}
}

func TestParseUserInfo(t *testing.T) {
	for _, bad := range []string{"", "{", "[]", `{"data":{"user":7}}`, `{"error":{"code":403,"description":"no"}}`} {
		if info, err := parseUserInfo([]byte(bad)); err == nil {
			t.Errorf("%q was read as %+v", bad, info)
		}
	}
}

func TestRefusedSubjectsReachOnError(t *testing.T) {
	b := newBroker(t)
	o := b.options(t)
	heard := make(chan error, 16)
	o.OnError = func(err error) { heard <- err }
	c := dial(t, o)
	if _, err := c.Subscribe("other.>", func(bus.Msg) {}); err != nil {
		t.Fatal(err)
	}
	if err := wait(t, heard, "the refusal of a subscription"); !errors.Is(err, nats.ErrPermissionViolation) {
		t.Errorf("got %v", err)
	}
	if err := c.Publish("other.x", nil); err != nil {
		t.Fatal(err)
	}
	if err := wait(t, heard, "the refusal of a message"); !errors.Is(err, nats.ErrPermissionViolation) {
		t.Errorf("got %v", err)
	}
	if c.Err() != nil {
		t.Errorf("a refused subject ended the connection: %v", c.Err())
	}
}

// A64: what a slow callback makes the library drop is noticed, and the rest
// keeps its order: the stream above finds the gap by its sequence.
func TestA64SlowConsumerIsHeard(t *testing.T) {
	b := newBroker(t)
	o := b.options(t)
	o.PendingBytes = 1 << 20
	heard := make(chan error, 16)
	o.OnError = func(err error) { heard <- err }
	slow, quick := dial(t, o), dial(t, b.options(t))
	release, got := make(chan struct{}), make(chan byte, 256)
	if _, err := slow.Subscribe("t.x", func(m bus.Msg) {
		<-release
		got <- m.Data[0]
	}); err != nil {
		t.Fatal(err)
	}
	if err := slow.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	for i := range byte(64) {
		if err := quick.Publish("t.x", append([]byte{i}, make([]byte, 64<<10)...)); err != nil {
			t.Fatal(err)
		}
	}
	if err := wait(t, heard, "the slow consumer"); !errors.Is(err, nats.ErrSlowConsumer) {
		t.Errorf("got %v", err)
	}
	close(release)
	for want := range byte(8) {
		if n := wait(t, got, "a message"); n != want {
			t.Fatalf("got %d, want %d", n, want)
		}
	}
}

func TestClassifyRealRefusals(t *testing.T) {
	b := newBroker(t)
	otherCA := newCA(t)
	stranger, err := nkeys.CreateUser()
	if err != nil {
		t.Fatal(err)
	}
	ours := func(change func(o *Options)) Options {
		o := b.options(t)
		change(&o)
		return o
	}
	silent, hangsUp, free := listen(t), listen(t), listen(t)
	banner := newBroker(t, func(o *server.Options) { o.TLSHandshakeFirst = false })
	_ = free.Close()
	go serve(silent, func(conn net.Conn) { _, _ = conn.Read(make([]byte, 1<<16)); _, _ = conn.Read(make([]byte, 1)) })
	go serve(hangsUp, func(conn net.Conn) { _, _ = conn.Read(make([]byte, 1<<16)) })
	full := newBroker(t, func(o *server.Options) { o.MaxConn = 1 })
	dial(t, full.options(t))

	for _, c := range []struct {
		name string
		o    Options
		want []Reason
	}{
		{"nobody listens", ours(func(o *Options) { o.URLs = []string{"tls://" + free.Addr().String()} }), []Reason{Unreachable}},
		{"no such name", ours(func(o *Options) { o.URLs = []string{"tls://broker.invalid:4222"} }), []Reason{Unreachable}},
		{"silent", ours(func(o *Options) {
			o.URLs, o.Timeout = []string{"tls://" + silent.Addr().String()}, 100*time.Millisecond
		}), []Reason{Timeout}},
		{"hangs up", ours(func(o *Options) { o.URLs = []string{"tls://" + hangsUp.Addr().String()} }), []Reason{Busy, Closed}},
		{"unknown nkey", ours(func(o *Options) { o.NKeyPublic, o.Sign = public(t, stranger), stranger.Sign }), []Reason{Unauthorized}},
		{"wrong signature", ours(func(o *Options) { o.Sign = stranger.Sign }), []Reason{Unauthorized}},
		{"no nkey", ours(func(o *Options) { o.NKeyPublic = "" }), []Reason{Unauthorized}},
		{"unknown nkey in process", ours(func(o *Options) {
			o.URLs, o.TLS, o.InProcess = nil, nil, b
			o.NKeyPublic, o.Sign = public(t, stranger), stranger.Sign
		}), []Reason{Unauthorized}},
		{"no certificate", ours(func(o *Options) { o.TLS.Certificates = nil }), []Reason{TLSOwn}},
		{"certificate of another CA", ours(func(o *Options) { o.TLS.Certificates[0] = otherCA.issue(t, "", time.Now().Add(time.Hour)) }), []Reason{TLSOwn}},
		{"expired certificate", ours(func(o *Options) { o.TLS.Certificates[0] = b.ca.issue(t, "", time.Now().Add(-time.Hour)) }), []Reason{TLSOwn}},
		{"broker of another CA", ours(func(o *Options) { o.TLS.RootCAs = otherCA.pool() }), []Reason{TLSPeer}},
		{"broker of another name", ours(func(o *Options) { o.TLS.ServerName = "broker.example" }), []Reason{TLSPeer}},
		{"server without handshake first", ours(func(o *Options) { o.URLs = []string{banner.ClientURL()} }), []Reason{NoTLS}},
		{"full", full.options(t), []Reason{Limit}},
	} {
		conn, err := Dial(t.Context(), c.o)
		if err == nil {
			conn.Close()
			t.Errorf("%s: let in", c.name)
			continue
		}
		r := Classify(err)
		if !slices.Contains(c.want, r.Reason) {
			t.Errorf("%s: %q is %q, want %v", c.name, err, r.Reason, c.want)
		}
		if r.Sentence == "" || !strings.HasPrefix(r.Sentence, "the ") {
			t.Errorf("%s: the sentence is %q", c.name, r.Sentence)
		}
	}
}

// The texts of nats-facts that no server here can be made to give.
func TestClassifyTexts(t *testing.T) {
	for text, want := range map[string]Reason{
		"nats: expected 'PONG', got 'PING'":                                                    Busy,
		"nats: tls error: connection closed by remote after TLS handshake: write: broken pipe": Busy,

		"nats: tls error: EOF":               Busy,
		"nats: Authorization Violation":      Unauthorized,
		"remote error: tls: bad certificate": TLSOwn,
		"dial tcp: lookup x: no such host":   Unreachable,
		"read tcp: connection reset by peer": Closed,
		"something new":                      Other,
	} {
		if r := Classify(fmt.Errorf("dial broker: %w", errors.New(text))); r.Reason != want {
			t.Errorf("%q is %q, want %q", text, r.Reason, want)
		}
	}
	for want, err := range map[Reason]error{
		Expired: nats.ErrAuthExpired, Limit: nats.ErrMaxAccountConnectionsExceeded, Cancelled: context.Canceled,
		Timeout: context.DeadlineExceeded, Closed: nats.ErrStaleConnection, "": nil,
	} {
		if r := Classify(err); r.Reason != want {
			t.Errorf("%v is %q, want %q", err, r.Reason, want)
		}
	}
	for r, s := range sentences {
		if s == "" {
			t.Errorf("%q has no sentence", r)
		}
	}
}

// N4: neither seed nor nonce nor signature is in any error.
//
// Contract: L5
func TestN4NoSecretInErrors(t *testing.T) {
	b := newBroker(t)
	seed, err := b.user.Seed()
	if err != nil {
		t.Fatal(err)
	}
	o := b.options(t)
	var nonces [][]byte
	o.Sign = func(nonce []byte) ([]byte, error) {
		nonces = append(nonces, bytes.Clone(nonce))
		return nil, errors.New("the key file is gone")
	}
	_, err = Dial(t.Context(), o)
	if err == nil || !strings.Contains(err.Error(), "the key file is gone") {
		t.Fatalf("got %v", err)
	}
	for _, secret := range append(nonces, seed) {
		if strings.Contains(err.Error(), string(secret)) {
			t.Errorf("%v holds a secret", err)
		}
	}
}

func listen(t *testing.T) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l
}

func serve(l net.Listener, fn func(net.Conn)) {
	for {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		fn(conn)
		_ = conn.Close()
	}
}
