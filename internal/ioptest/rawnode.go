package ioptest

import (
	"context"
	"crypto/tls"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/bus"
	"github.com/iop-fabric/iop/internal/bus/natsbus"
	"github.com/iop-fabric/iop/internal/identity"
	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/wire"
	"github.com/iop-fabric/iop/wire/iopv1"
)

// RawNode is a Node driven by hand over the real broker: it says what the test
// says, right or wrong, and keeps everything it is told, in order.
type RawNode struct {
	Session subjects.Session
	User    string // what the broker calls this connection
	Conn    *natsbus.Conn
	Token   []byte

	t    testing.TB
	cfg  configs.Node
	cert *identity.Certificate
	key  *identity.NKey

	mu   sync.Mutex
	got  []Told
	more chan struct{}
}

// Told is one message to a RawNode.
type Told struct {
	Verb subjects.Verb
	Run  string
	Data []byte
}

// DialRaw connects as a node of Options.Nodes. The same instance may dial again.
func (f *Fabric) DialRaw(name, instance string) *RawNode {
	f.t.Helper()
	n := &RawNode{t: f.t, cfg: f.NodeConfig(name), more: make(chan struct{}, 1)}
	var err error
	n.cert, err = identity.LoadCertificate(n.cfg.Broker.TLS.Certificate, n.cfg.Broker.TLS.Key)
	must(f.t, err)
	n.key, err = identity.LoadNKey(n.cfg.Broker.NKey)
	must(f.t, err)
	pool, err := identity.LoadPool(n.cfg.Broker.TLS.CA)
	must(f.t, err)
	connection := instance + wire.NewToken()
	ctx, cancel := context.WithTimeout(context.Background(), Hang)
	defer cancel()
	n.Conn, err = natsbus.Dial(ctx, natsbus.Options{
		URLs: n.cfg.Broker.URLs, Name: connection, Inbox: subjects.NodeInbox(n.cfg.Edge, name, connection),
		TLS:        &tls.Config{Certificates: []tls.Certificate{n.cert.TLS()}, RootCAs: pool, MinVersion: tls.VersionTLS13},
		NKeyPublic: n.key.Public(), Sign: n.key.Sign,
	})
	must(f.t, err)
	f.t.Cleanup(n.Conn.Close)
	info, err := n.Conn.WhoAmI(ctx)
	must(f.t, err)
	n.User = info.User
	if strings.HasPrefix(n.User, "!") {
		return n // the lobby
	}
	n.Session, err = subjects.ParseSession(n.User)
	must(f.t, err)
	_, err = n.Conn.Subscribe(n.Session.DownWildcard(), func(m bus.Msg) {
		msg, err := subjects.ParseDown(m.Subject)
		if err != nil {
			f.t.Errorf("told on %q: %v", m.Subject, err)
			return
		}
		n.mu.Lock()
		n.got = append(n.got, Told{Verb: msg.Verb, Run: msg.Run, Data: m.Data})
		n.mu.Unlock()
		select {
		case n.more <- struct{}{}:
		default:
		}
	})
	must(f.t, err)
	must(f.t, n.Conn.Flush(ctx))
	return n
}

// Say publishes on the node's own session.
func (n *RawNode) Say(v subjects.Verb, run string, m interface{ MarshalVT() ([]byte, error) }) {
	n.t.Helper()
	n.SayAs(n.Session, v, run, m)
}

// SayAs publishes as another session: the broker refuses it.
func (n *RawNode) SayAs(s subjects.Session, v subjects.Verb, run string, m interface{ MarshalVT() ([]byte, error) }) {
	n.t.Helper()
	data, err := m.MarshalVT()
	must(n.t, err)
	must(n.t, n.Conn.Publish(s.Up(v, run), data))
}

// Whisper is Say for a session that may be closed already.
func (n *RawNode) Whisper(v subjects.Verb, run string, m interface{ MarshalVT() ([]byte, error) }) {
	n.t.Helper()
	data, err := m.MarshalVT()
	must(n.t, err)
	n.Conn.Publish(n.Session.Up(v, run), data) // lost, if it is closed
}

// Flush waits until the broker has what was said.
func (n *RawNode) Flush() {
	n.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), Hang)
	defer cancel()
	must(n.t, n.Conn.Flush(ctx))
}

// Heard is everything the node was told so far, without heartbeats and
// acknowledgements.
func (n *RawNode) Heard() []Told {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(n.got), func(m Told) bool {
		return m.Verb == subjects.Heartbeat || m.Verb == subjects.Ack
	})
}

// Verbs lists the verbs of Heard.
func (n *RawNode) Verbs() []subjects.Verb {
	var out []subjects.Verb
	for _, m := range n.Heard() {
		out = append(out, m.Verb)
	}
	return out
}

// Await waits for the count-th message of a verb.
func (n *RawNode) Await(v subjects.Verb, count int) Told {
	n.t.Helper()
	hang := time.After(Hang)
	for {
		n.mu.Lock()
		seen := 0
		for _, m := range n.got {
			if m.Verb == v {
				if seen++; seen == count {
					n.mu.Unlock()
					return m
				}
			}
		}
		n.mu.Unlock()
		select {
		case <-n.more:
		case <-hang:
			n.t.Fatalf("node %s was not told %s for the %d. time; it heard %v", n.User, v, count, n.Verbs())
		}
	}
}

// AskToken asks the session service for the session token.
func (n *RawNode) AskToken() {
	n.t.Helper()
	n.Say(subjects.SessionVerb, "", &iopv1.SessionRequest{InstanceId: "x"})
	var g iopv1.SessionGrant
	must(n.t, g.UnmarshalVT(n.Await(subjects.SessionVerb, 1).Data))
	if n.Token = g.GetToken(); len(n.Token) == 0 {
		n.t.Fatalf("no token: %s", g.GetReason())
	}
}

// RegisterRequest is an honest one, signed; edit changes it before it is signed.
func (n *RawNode) RegisterRequest(edit func(*iopv1.RegisterRequest)) *iopv1.RegisterRequest {
	n.t.Helper()
	curve, err := identity.LoadNKey(n.cfg.CurveKey)
	must(n.t, err)
	r := &iopv1.RegisterRequest{
		NodeId: n.Session.Node, SessionToken: n.Token, Nonce: identity.NewNonce(), RecipientKey: curve.Public(),
		InstanceId: "0123456789abcdef", ProtocolMin: 1, ProtocolMax: 1, Software: "raw",
	}
	if edit != nil {
		edit(r)
	}
	must(n.t, identity.SignRegister(n.cert, n.key, r))
	return r
}

// Register registers and returns the count-th answer.
func (n *RawNode) Register(count int, edit func(*iopv1.RegisterRequest)) *iopv1.RegisterResponse {
	n.t.Helper()
	if n.Token == nil {
		n.AskToken()
	}
	n.Say(subjects.Register, "", n.RegisterRequest(edit))
	var resp iopv1.RegisterResponse
	must(n.t, resp.UnmarshalVT(n.Await(subjects.Register, count).Data))
	return &resp
}

// Ready asks for ready and returns the count-th answer.
func (n *RawNode) Ready(count int, node string) *iopv1.NodeReadyResponse {
	n.t.Helper()
	n.Say(subjects.Ready, "", &iopv1.NodeReadyRequest{NodeId: node})
	var resp iopv1.NodeReadyResponse
	must(n.t, resp.UnmarshalVT(n.Await(subjects.Ready, count).Data))
	return &resp
}

// Beat sends heartbeats until the test ends.
func (n *RawNode) Beat(every time.Duration) {
	stop := make(chan struct{})
	done := make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(every)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				data, err := (&iopv1.Heartbeat{}).MarshalVT()
				if err != nil || n.Conn.Publish(n.Session.Up(subjects.Heartbeat, ""), data) != nil {
					return
				}
			case <-stop:
				return
			}
		}
	}()
	n.t.Cleanup(func() { close(stop); <-done })
}

// Answer sends one whole small answer to a tunnel.
func (n *RawNode) Answer(run, body string) {
	n.t.Helper()
	n.Say(subjects.Frame, run, &iopv1.ProviderTunnelFrame{
		RunId: run, Sequence: 1, Kind: iopv1.ProviderTunnelFrame_RESPONSE_START, Status: 200, Body: []byte(body), End: true,
	})
}
