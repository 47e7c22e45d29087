package e2e

import (
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/ioptest"
	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/wire"
	"github.com/iop-fabric/iop/wire/iopv1"
)

// raw starts a fabric whose model is served by node "raw", which the test plays.
func raw(t *testing.T, edit func(*configs.Edge)) *ioptest.Fabric {
	t.Helper()
	f := ioptest.Start(t, ioptest.Options{
		Nodes: []configs.EdgeNode{{Name: "raw"}, {Name: "other"}},
		Edge: func(e *configs.Edge) {
			n := &e.Nodes[1]
			n.Adapters, n.Providers = e.Nodes[0].Adapters, e.Nodes[0].Providers
			n.Adapters[0].Capacity = 5
			e.Nodes[0].Adapters, e.Nodes[0].Providers = nil, nil
			e.Models.Groups[0].Providers[0].Provider = "raw/m"
			e.HeartbeatBound = ioptest.Hang // the test decides when a session ends
			if edit != nil {
				edit(e)
			}
		},
	})
	return f
}

type result struct {
	status int
	body   string
}

// call makes a chat call in the background.
func call(t *testing.T, f *ioptest.Fabric) <-chan result {
	t.Helper()
	return callModel(t, f, ioptest.Chat(false))
}

func callModel(t *testing.T, f *ioptest.Fabric, body string) <-chan result {
	t.Helper()
	out := make(chan result, 1)
	req := f.Request(t.Context(), http.MethodPost, "/v1/chat/completions", body)
	go func() {
		resp, err := f.Client.Do(req)
		if err != nil {
			out <- result{0, err.Error()}
			return
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		if err != nil {
			b = append(b, err.Error()...)
		}
		out <- result{resp.StatusCode, string(b)}
	}()
	return out
}

func get(t *testing.T, f *ioptest.Fabric, ch <-chan result) result {
	t.Helper()
	select {
	case r := <-ch:
		return r
	case <-time.After(ioptest.Hang):
		t.Fatalf("no answer\n%s", f.Log)
		return result{}
	}
}

// Five waiters are stranded; the node registers and asks for ready: it hears the
// register answer, the ready answer, and then the five dispatches (trap 4).
//
// Contract: R2 R3 R4 R6 F4 P9 G4
func TestTrap04AcknowledgementFirst(t *testing.T) {
	f := raw(t, nil)
	var calls []<-chan result
	for range 5 {
		calls = append(calls, call(t, f))
	}
	n := f.DialRaw("raw", wire.NewToken())
	if resp := n.Register(1, nil); !resp.GetAccepted() || resp.GetNodeId() != "raw" || resp.GetConfig() == nil {
		t.Fatalf("register: %v", resp)
	}
	if got := n.Verbs(); slices.Contains(got, subjects.Tunnel) {
		t.Fatalf("work before ready: %v", got)
	}
	if resp := n.Ready(1, "raw"); !resp.GetReady() {
		t.Fatalf("ready: %v", resp)
	}
	n.Await(subjects.Tunnel, 5)
	want := []subjects.Verb{subjects.SessionVerb, subjects.Register, subjects.Ready, subjects.Tunnel, subjects.Tunnel, subjects.Tunnel, subjects.Tunnel, subjects.Tunnel}
	if got := n.Verbs(); !slices.Equal(got, want) {
		t.Fatalf("told %v, want %v", got, want)
	}
	runs := map[string]bool{}
	for _, m := range n.Heard() {
		if m.Verb == subjects.Tunnel {
			runs[m.Run] = true
			n.Answer(m.Run, `{"n":1}`)
		}
	}
	if len(runs) != 5 {
		t.Errorf("%d run ids for five attempts", len(runs))
	}
	for _, c := range calls {
		if r := get(t, f, c); r.status != 200 || r.body != `{"n":1}` {
			t.Errorf("%+v", r)
		}
	}
}

// Ready again, ready for another node, ready after a newer session: trap 3.
//
// Contract: R1 R4 R5 R9 F5 F10
func TestTrap03ReadyVariants(t *testing.T) {
	f := raw(t, nil)
	instance := wire.NewToken()
	g1 := f.DialRaw("raw", instance)
	g1.Register(1, nil)
	if resp := g1.Ready(1, "other"); resp.GetReady() || resp.GetReason() == "" {
		t.Fatalf("ready for another node: %v", resp)
	}
	if resp := g1.Ready(2, "raw"); !resp.GetReady() {
		t.Fatalf("ready: %v", resp)
	}
	f.WaitNode("raw")
	if resp := g1.Ready(3, "raw"); !resp.GetReady() {
		t.Fatalf("ready again: %v", resp)
	}
	// A repeated registration gets the same answer and does not undo ready.
	if resp := g1.Register(2, nil); !resp.GetAccepted() {
		t.Fatalf("register again: %v", resp)
	}
	if n := strings.Count(f.Log.String(), "msg=node.connected role=edge node=raw "); n != 1 {
		t.Errorf("node.connected %d times", n)
	}
	first := call(t, f)
	run := g1.Await(subjects.Tunnel, 1).Run
	g1.Answer(run, "{}")
	if r := get(t, f, first); r.status != 200 {
		t.Fatalf("%+v", r)
	}

	g2 := f.DialRaw("raw", instance)
	if g2.Session.Gen <= g1.Session.Gen {
		t.Fatalf("generation %d after %d", g2.Session.Gen, g1.Session.Gen)
	}
	var fence iopv1.Fence
	if err := fence.UnmarshalVT(g1.Await(subjects.Fence, 1).Data); err != nil || fence.GetReason() == "" {
		t.Fatalf("the older session was told %v %v", &fence, err)
	}
	g2.Register(1, nil)
	if resp := g2.Ready(1, "other"); resp.GetReady() {
		t.Fatal("ready for another node")
	}
	if resp := g2.Ready(2, "raw"); !resp.GetReady() {
		t.Fatalf("%v", resp)
	}
}

// A takeover with work under way: both streams of the old session end once, what
// it still says changes nothing, the waiter is served by the new one (trap 1).
//
// Contract: F2 F3 F5 F8 R9 B6 P8
func TestTrap01TakeoverWithWorkUnderWay(t *testing.T) {
	f := raw(t, func(e *configs.Edge) { e.Nodes[1].Adapters[0].Capacity = 2 })
	instance := wire.NewToken()
	g1 := f.DialRaw("raw", instance)
	g1.Register(1, nil)
	g1.Ready(1, "raw")
	open1, open2 := call(t, f), call(t, f)
	g1.Await(subjects.Tunnel, 2)
	var runs []string
	for _, m := range g1.Heard() {
		if m.Verb == subjects.Tunnel {
			runs = append(runs, m.Run)
		}
	}
	waiting := call(t, f)
	g2 := f.DialRaw("raw", instance)
	for _, c := range []<-chan result{open1, open2} {
		if r := get(t, f, c); r.status != 502 || !strings.Contains(r.body, "node_lost") {
			t.Errorf("a stream of the old session ended as %+v", r)
		}
	}
	g2.Register(1, nil)
	// The old one goes on talking, if it can: nothing of it counts.
	g1.Whisper(subjects.Frame, runs[0], &iopv1.ProviderTunnelFrame{
		RunId: runs[0], Sequence: 1, Kind: iopv1.ProviderTunnelFrame_RESPONSE_START, Status: 200, Body: []byte(`{"late":1}`), End: true,
	})
	g2.Ready(1, "raw")
	g2.Answer(g2.Await(subjects.Tunnel, 1).Run, `{"g2":1}`)
	if r := get(t, f, waiting); r.status != 200 || r.body != `{"g2":1}` {
		t.Errorf("the waiter: %+v", r)
	}
	connected := func() int { return strings.Count(f.Log.String(), "msg=node.connected role=edge node=raw ") }
	f.Log.Await(t, func(string) bool { return connected() >= 2 })
	if n := connected(); n != 2 {
		t.Errorf("node.connected %d times, want 2", n)
	}
}

// A newer session that closes before ready leaves the node offline, and the old
// one does not come back (trap 2).
//
// Contract: R9 R10 F2
func TestTrap02ClosedBeforeReady(t *testing.T) {
	f := raw(t, nil)
	instance := wire.NewToken()
	g1 := f.DialRaw("raw", instance)
	g1.Register(1, nil)
	g1.Ready(1, "raw")
	f.WaitNode("raw")
	g2 := f.DialRaw("raw", instance)
	g2.Register(1, nil)
	g1.Await(subjects.Fence, 1)
	g2.Conn.Close()
	f.Log.AwaitEvent(t, "broker.closed", "node=raw generation="+strings.Split(g2.User, ".")[2])
	if n := strings.Count(f.Log.String(), "msg=node.connected role=edge node=raw "); n != 1 {
		t.Errorf("node.connected %d times, want 1", n)
	}
	g3 := f.DialRaw("raw", instance)
	g3.Register(1, nil)
	if resp := g3.Ready(1, "raw"); !resp.GetReady() {
		t.Fatalf("%v", resp)
	}
	c := call(t, f)
	g3.Answer(g3.Await(subjects.Tunnel, 1).Run, "{}")
	if r := get(t, f, c); r.status != 200 {
		t.Errorf("%+v", r)
	}
}

// What a registration proves is checked, each part alone, above the broker.
//
// Contract: G3 L8 R1 R2
func TestForgedRegistrations(t *testing.T) {
	f := raw(t, nil)
	other := f.DialRaw("other", wire.NewToken())
	other.AskToken()
	n := f.DialRaw("raw", wire.NewToken())
	n.AskToken()
	own := n.Token
	count := 0
	refused := func(what string, edit func(*iopv1.RegisterRequest), after func(*iopv1.RegisterRequest)) {
		t.Helper()
		r := n.RegisterRequest(edit)
		if after != nil {
			after(r)
		}
		n.Say(subjects.Register, "", r)
		count++
		var resp iopv1.RegisterResponse
		if err := resp.UnmarshalVT(n.Await(subjects.Register, count).Data); err != nil || resp.GetAccepted() || resp.GetConfig() != nil || resp.GetReason() == "" {
			t.Errorf("%s: %v %v", what, &resp, err)
		}
	}
	refused("another node's id", func(r *iopv1.RegisterRequest) { r.NodeId = "other" }, nil)
	refused("another node's token", func(r *iopv1.RegisterRequest) { r.SessionToken = other.Token }, nil)
	refused("no token", func(r *iopv1.RegisterRequest) { r.SessionToken = nil }, nil)
	refused("a flipped bit in the token", func(r *iopv1.RegisterRequest) {
		r.SessionToken = slices.Clone(own)
		r.SessionToken[len(own)/2] ^= 1
	}, nil)
	refused("a flipped bit in the certificate's signature", nil, func(r *iopv1.RegisterRequest) { r.CertificateSignature[8] ^= 1 })
	refused("a flipped bit in the nkey's signature", nil, func(r *iopv1.RegisterRequest) { r.NkeySignature[8] ^= 1 })
	refused("no certificate", nil, func(r *iopv1.RegisterRequest) { r.CertificateChain = nil })
	refused("a changed recipient key", nil, func(r *iopv1.RegisterRequest) { r.RecipientKey = "XBADBADBAD" })
	refused("a protocol nobody speaks", func(r *iopv1.RegisterRequest) { r.ProtocolMin, r.ProtocolMax = 99, 99 }, nil)
	if resp := n.Register(count+1, nil); !resp.GetAccepted() {
		t.Fatalf("the honest one after them: %v", resp)
	}
}

// A node with valid credentials of its own that speaks for others is not heard.
//
// Contract: Z5 B5 F8
func TestNodeSpeaksForItselfAlone(t *testing.T) {
	f := raw(t, nil)
	victim := f.DialRaw("raw", wire.NewToken())
	victim.Register(1, nil)
	victim.Ready(1, "raw")
	c := call(t, f)
	run := victim.Await(subjects.Tunnel, 1).Run
	evil := f.DialRaw("other", wire.NewToken())
	evil.Register(1, nil)
	evil.Ready(1, "other")
	frame := &iopv1.ProviderTunnelFrame{RunId: run, Sequence: 1, Kind: iopv1.ProviderTunnelFrame_RESPONSE_START, Status: 200, Body: []byte("evil"), End: true}
	evil.SayAs(victim.Session, subjects.Frame, run, frame) // refused by the broker
	evil.Say(subjects.Frame, run, frame)                   // refused by Edge: not its attempt
	evil.SayAs(victim.Session, subjects.Heartbeat, "", &iopv1.Heartbeat{Draining: true})
	evil.Flush()
	victim.Answer(run, "mine")
	if r := get(t, f, c); r.status != 200 || r.body != "mine" {
		t.Fatalf("%+v", r)
	}
}

// A second machine with the same identity is refused while the first lives, and
// told why.
//
// Contract: B12 B3
func TestSecondInstanceIsRefused(t *testing.T) {
	f := raw(t, nil)
	first := f.DialRaw("raw", wire.NewToken())
	first.Register(1, nil)
	first.Ready(1, "raw")
	first.Beat(200 * time.Millisecond)
	second := f.DialRaw("raw", wire.NewToken())
	if !strings.HasPrefix(second.User, "!denied.duplicate") {
		t.Fatalf("the second instance is %q", second.User)
	}
	c := call(t, f)
	first.Answer(first.Await(subjects.Tunnel, 1).Run, "{}")
	if r := get(t, f, c); r.status != 200 {
		t.Fatalf("the first was disturbed: %+v", r)
	}
}

// A registration that stays pending ends after its bound, and fences nothing.
//
// Contract: R10
func TestPendingEndsAfterItsBound(t *testing.T) {
	f := raw(t, func(e *configs.Edge) { e.PendingBound = 300 * time.Millisecond })
	n := f.DialRaw("raw", wire.NewToken())
	n.Register(1, nil)
	n.Await(subjects.Fence, 1)
	if resp := n.Ready(1, "raw"); resp.GetReady() || resp.GetReason() == "" {
		t.Fatalf("ready after the bound: %v", resp)
	}
	if f.Log.Count("node.disconnected") != 0 {
		t.Error("node.disconnected for a session that never was connected")
	}
}

// A Node whose word that it drains was lost says it with the first request that it
// refuses: nothing more is sent to it, and who comes waits for its next session.
//
// Contract: D7 P9 F4
func TestTheFirstRefusalOfADrainingNodeIsItsWord(t *testing.T) {
	f := raw(t, nil)
	instance := wire.NewToken()
	n := f.DialRaw("raw", instance)
	n.Register(1, nil)
	n.Ready(1, "raw")
	refused := call(t, f)
	run := n.Await(subjects.Tunnel, 1).Run
	waiting := call(t, f)
	n.Await(subjects.Tunnel, 2)
	n.Say(subjects.Frame, run, &iopv1.ProviderTunnelFrame{
		RunId: run, Sequence: 1, Kind: iopv1.ProviderTunnelFrame_ERROR, ErrorClass: string(wire.Draining), Error: "draining",
	})
	if r := get(t, f, refused); r.status != 503 || !strings.Contains(r.body, "draining") {
		t.Errorf("refused: %+v", r)
	}
	later := call(t, f)
	waitFor(t, f, func(held, waiting int) bool { return held == 1 && waiting == 1 })
	n.Answer(n.Await(subjects.Tunnel, 2).Run, "{}") // what runs goes on
	if r := get(t, f, waiting); r.status != 200 {
		t.Errorf("what ran: %+v", r)
	}
	next := f.DialRaw("raw", instance)
	next.Register(1, nil)
	next.Ready(1, "raw")
	next.Answer(next.Await(subjects.Tunnel, 1).Run, `{"next":1}`)
	if r := get(t, f, later); r.status != 200 || r.body != `{"next":1}` {
		t.Errorf("who waited: %+v", r)
	}
	if verbs := n.Verbs(); len(verbs) > 0 && strings.Count(fmt.Sprint(verbs), string(subjects.Tunnel)) != 2 {
		t.Errorf("the draining node was sent %v", verbs)
	}
}

// Frames that break the rules end their own stream with class protocol, and
// nothing else.
//
// Contract: J8 T3 V1
func TestHostileFramesOverTheRealBroker(t *testing.T) {
	f := raw(t, nil)
	n := f.DialRaw("raw", wire.NewToken())
	n.Register(1, nil)
	n.Ready(1, "raw")
	n.Beat(500 * time.Millisecond)
	start := func(f *iopv1.ProviderTunnelFrame) {
		f.Kind, f.Status = iopv1.ProviderTunnelFrame_RESPONSE_START, 200
	}
	for i, c := range []struct {
		name   string
		frames []func(*iopv1.ProviderTunnelFrame)
	}{
		{"body before start", []func(*iopv1.ProviderTunnelFrame){func(f *iopv1.ProviderTunnelFrame) { f.Kind, f.Body = iopv1.ProviderTunnelFrame_BODY, []byte("x") }}},
		{"end before start", []func(*iopv1.ProviderTunnelFrame){func(f *iopv1.ProviderTunnelFrame) { f.Kind = iopv1.ProviderTunnelFrame_END }}},
		{"two starts", []func(*iopv1.ProviderTunnelFrame){start, start}},
		{"an unknown kind", []func(*iopv1.ProviderTunnelFrame){func(f *iopv1.ProviderTunnelFrame) { f.Kind = 77 }}},
		{"a line feed in a header", []func(*iopv1.ProviderTunnelFrame){func(f *iopv1.ProviderTunnelFrame) {
			start(f)
			f.Headers = []*iopv1.Header{{Name: "X-A", Value: []byte("b\r\nSet-Cookie: c")}}
		}}},
		{"a status that is none", []func(*iopv1.ProviderTunnelFrame){func(f *iopv1.ProviderTunnelFrame) { start(f); f.Status = 99 }}},
	} {
		t.Run(c.name, func(t *testing.T) {
			ch := call(t, f)
			run := n.Await(subjects.Tunnel, i+1).Run
			for seq, edit := range c.frames {
				frame := &iopv1.ProviderTunnelFrame{RunId: run, Sequence: uint64(seq + 1)}
				edit(frame)
				n.Say(subjects.Frame, run, frame)
			}
			n.Await(subjects.Cancel, i+1)
			n.Say(subjects.Frame, run, &iopv1.ProviderTunnelFrame{RunId: run, Sequence: uint64(len(c.frames) + 1), Kind: iopv1.ProviderTunnelFrame_ERROR, ErrorClass: "cancelled", Error: "x"})
			r := get(t, f, ch)
			if c.name != "two starts" && (r.status != 502 || !strings.Contains(r.body, "protocol")) {
				t.Errorf("%+v", r)
			}
		})
	}
	ch := call(t, f)
	n.Answer(n.Await(subjects.Tunnel, 7).Run, "fine")
	if r := get(t, f, ch); r.status != 200 || r.body != "fine" {
		t.Errorf("after them: %+v", r)
	}
}
