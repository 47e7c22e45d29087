package conformance

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/iop-fabric/iop/agent"
	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/edge/dispatch"
	"github.com/iop-fabric/iop/edge/pool"
	"github.com/iop-fabric/iop/internal/bus"
	"github.com/iop-fabric/iop/internal/bus/natsbus"
	"github.com/iop-fabric/iop/internal/identity"
	"github.com/iop-fabric/iop/node"
	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/wire"
	"github.com/iop-fabric/iop/wire/iopv1"
)

// What one frame of a stream costs beside the bus, both through the same real broker,
// in this process: ours is our Node's exchange to our Edge's caller, bare is nats.go
// publishing a message of the same size to a nats.go subscription, as far ahead as the
// largest window.
//
//	go test ./test/conformance -run xxx -bench Frame -benchtime 20000x
func BenchmarkFrame(b *testing.B) {
	for _, size := range []int{200, 4096, wire.MaxBody} {
		b.Run(fmt.Sprintf("ours/%d", size), func(b *testing.B) { ours(b, size) })
		b.Run(fmt.Sprintf("bare/%d", size), func(b *testing.B) { bare(b, size) })
	}
}

// flood is an adapter whose answer is so many frames, as fast as they go.
type flood struct {
	size  int
	count *atomic.Int64
}

func (flood) Start(context.Context) error { return nil }
func (flood) Stop(context.Context) error  { return nil }

func (f flood) Exchange(_ context.Context, _ agent.Exchange, sink agent.Sink) error {
	p := make([]byte, f.size)
	err := sink.Start(200, answerHeader, -1)
	for n := f.count.Load(); n > 0 && err == nil; n-- {
		err = sink.Body(p)
	}
	return err
}

// counter is a caller who counts.
type counter struct{ bytes int }

func (*counter) Start(int, []*iopv1.Header) error { return nil }
func (c *counter) Body(p []byte) error            { c.bytes += len(p); return nil }
func (*counter) Flush() error                     { return nil }
func (*counter) Trailer([]*iopv1.Header) error    { return nil }

func (m *members) options(role identity.Role, name string) natsbus.Options {
	pool, err := identity.LoadPool(m.f.Folder.CA())
	must(m.t, err)
	key := m.key(name)
	o := natsbus.Options{
		URLs: []string{m.f.Broker.ClientURL()}, Name: wire.NewToken() + wire.NewToken(),
		TLS:        &tls.Config{Certificates: []tls.Certificate{m.cert(role, name).TLS()}, RootCAs: pool, MinVersion: tls.VersionTLS13},
		NKeyPublic: key.Public(), Sign: key.Sign,
	}
	o.Inbox = subjects.EdgeInbox(confEdge)
	if role == identity.RoleNode {
		o.Inbox = subjects.NodeInbox(confEdge, name, o.Name)
	}
	return o
}

func ours(b *testing.B, size int) {
	m := newMembers(b)
	w := m.player()
	curve, err := identity.NewCurveKey()
	must(b, err)
	roots, err := identity.LoadTrust(m.f.Folder.CA())
	must(b, err)
	frames := new(atomic.Int64)
	n, err := node.New(configs.Node{Name: "tested", Edge: confEdge}, node.Deps{
		Dial: func(ctx context.Context) (bus.Conn, error) {
			return natsbus.Dial(ctx, m.options(identity.RoleNode, "tested"))
		},
		Adapters:   func(*iopv1.AdapterConfig) (agent.Provider, error) { return flood{size, frames}, nil },
		Identity:   node.Identity{Certificate: m.cert(identity.RoleNode, "tested"), User: m.key("tested"), Curve: curve, Trust: roots},
		InstanceID: wire.NewToken(), Software: "conformance",
	})
	must(b, err)
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error, 2)
	go func() { done <- n.Run(ctx) }()
	must(b, w.Wait())
	d := dispatch.New(dispatch.Config{Edge: confEdge}, dispatch.Deps{Bus: w.conn, Return: func(pool.Slot, pool.Return) {}})
	go func() { done <- d.Run(ctx) }()
	defer func() {
		stop()
		must(b, <-done)
		must(b, <-done)
	}()
	session := w.session
	w.Receive(func(v subjects.Verb, run string, data []byte) {
		if v == subjects.Frame {
			d.Frame(subjects.Message{Session: session, Verb: v, Run: run}, data)
		} else {
			d.Ack(subjects.Message{Session: session, Verb: v}, data)
		}
	})
	slot := uint64(0)
	call := func(count int) {
		slot++
		frames.Store(int64(count))
		c := &counter{}
		res := d.Do(context.Background(), dispatch.Attempt{
			RunID: wire.NewRunID(), Slot: pool.Slot{ID: slot, Node: "tested", Gen: session.Gen, Adapter: "a", Target: "m"}, Operation: "chat_completions", Method: "POST",
		}, c)
		if res.Err != nil || c.bytes != count*size {
			b.Fatalf("%v, %d bytes of %d", res.Err, c.bytes, count*size)
		}
	}
	call(1000) // windows, rings and pools grow
	b.SetBytes(int64(size))
	b.ReportAllocs()
	b.ResetTimer()
	call(b.N)
	b.StopTimer()
}

func bare(b *testing.B, size int) {
	m := newMembers(b)
	connect := func(role identity.Role, name string) *nats.Conn {
		o := m.options(role, name)
		c, err := nats.Connect(o.URLs[0], nats.Secure(o.TLS), nats.TLSHandshakeFirst(), nats.Name(o.Name), nats.CustomInboxPrefix(o.Inbox), nats.Nkey(o.NKeyPublic, o.Sign), nats.NoReconnect())
		must(b, err)
		b.Cleanup(c.Close)
		return c
	}
	edge, from := connect(identity.RoleEdge, "player"), connect(identity.RoleNode, "tested")
	info, err := from.Request(subjects.UserInfo, nil, Hang)
	must(b, err)
	var answer struct {
		Data struct {
			User string `json:"user"`
		} `json:"data"`
	}
	must(b, json.Unmarshal(info.Data, &answer))
	session, err := subjects.ParseSession(answer.Data.User)
	must(b, err)
	var got atomic.Int64
	more := make(chan struct{}, 1)
	_, err = edge.Subscribe(subjects.UpWildcard(confEdge), func(*nats.Msg) {
		got.Add(1)
		select {
		case more <- struct{}{}:
		default:
		}
	})
	must(b, err)
	must(b, edge.Flush())
	run := wire.NewRunID()
	data := encode(&iopv1.ProviderTunnelFrame{RunId: run, Sequence: 1 << 14, Kind: iopv1.ProviderTunnelFrame_BODY, Body: make([]byte, size)})
	subject, ahead := session.Up(subjects.Frame, run), int64(max(4, wire.MaxWindow/(size+wire.FrameOverhead)))
	send := func(count int) {
		got.Store(0)
		for i := range int64(count) {
			for i-got.Load() >= ahead {
				<-more
			}
			must(b, from.Publish(subject, data))
		}
		for got.Load() < int64(count) {
			<-more
		}
	}
	send(1000)
	b.SetBytes(int64(size))
	b.ReportAllocs()
	b.ResetTimer()
	send(b.N)
	b.StopTimer()
}
