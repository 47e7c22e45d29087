package e2e

import (
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/fakeprovider"
	"github.com/iop-fabric/iop/internal/ioptest"
	"github.com/iop-fabric/iop/internal/up"
	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/wire"
	"github.com/iop-fabric/iop/wire/iopv1"
)

// The one thing a Node may ask a server is who it is; the answer goes to the reply
// subject, which no permission is compared with. So a Node can have it sent in the
// name of any session, to an Edge or to a Node; neither takes it for a peer's word.
//
// Contract: Z5 B5 F8
func TestZ5RepliesSpeakForNobody(t *testing.T) {
	f := ioptest.Start(t, ioptest.Options{
		Nodes: []configs.EdgeNode{{Name: "evil"}},
		Edge:  func(e *configs.Edge) { e.HeartbeatBound = ioptest.Hang },
	})
	evil := f.DialRaw("evil", wire.NewToken())
	victim := subjects.Session{Edge: evil.Session.Edge, Node: up.DefaultNode, Gen: f.WaitNode(up.DefaultNode)}
	const each = 100 // far more than any patience
	for range each {
		for _, reply := range []string{
			victim.Up(subjects.Ack, ""), victim.Up(subjects.Frame, wire.NewRunID()), victim.Up(subjects.Register, ""),
			victim.Up(subjects.Ready, ""), victim.Up(subjects.Heartbeat, ""), victim.Up(subjects.Event, wire.NewRunID()),
			victim.Down(subjects.Fence, ""), victim.Down(subjects.Ready, ""), victim.Down(subjects.Register, ""),
			victim.Down(subjects.Heartbeat, ""), victim.Down(subjects.Ack, ""), victim.Down(subjects.Tunnel, wire.NewRunID()),
			subjects.Ctl(victim.Edge, subjects.Closed), subjects.Ctl(victim.Edge, subjects.Admitted),
		} {
			if err := evil.Conn.PublishRequest(subjects.UserInfo, reply, nil); err != nil {
				t.Fatal(err)
			}
		}
	}
	if _, err := evil.Conn.WhoAmI(t.Context()); err != nil { // all of them were answered
		t.Fatal(err)
	}
	if r := get(t, f, call(t, f)); r.status != 200 {
		t.Fatalf("%+v", r)
	}
	log := f.Log.String()
	for _, event := range []string{"node.fenced", "node.disconnected", "node.session_ended", "node.session_closing", "tunnel.breach", "node.misbehaved", "node.refused"} {
		if n := strings.Count(log, "msg="+event+" "); n > 0 {
			t.Errorf("%s %d times", event, n)
		}
	}
	if n := strings.Count(log, "msg=node.connected role=edge node="+up.DefaultNode+" "); n != 1 {
		t.Errorf("node.connected %d times", n)
	}
}

// baited is a fabric with an honest node and hostile ones, "evil" and more, which are
// sent work for the models "bait-evil" and so on.
func baited(t *testing.T, more ...string) *ioptest.Fabric {
	t.Helper()
	nodes := []configs.EdgeNode{{Name: "evil"}, {Name: "other"}}
	for _, name := range more {
		nodes = append(nodes, configs.EdgeNode{Name: name})
	}
	return ioptest.Start(t, ioptest.Options{
		Nodes: nodes,
		Edge: func(e *configs.Edge) {
			for i := range e.Nodes {
				n := &e.Nodes[i]
				if n.Name != "evil" && !slices.Contains(more, n.Name) {
					continue
				}
				n.Adapters, n.Providers = slices.Clone(e.Nodes[0].Adapters), slices.Clone(e.Nodes[0].Providers)
				n.Adapters[0].Capacity = 64
				e.Models.Groups = append(e.Models.Groups, configs.ModelGroup{
					Name: "bait-" + n.Name, Providers: []configs.ProviderReference{{Provider: n.Name + "/" + n.Providers[0].ID}},
				})
			}
			e.HeartbeatBound = 5 * ioptest.Hang // a session ends by what it does, however slow the machine
		},
	})
}

// bait makes a call that only that hostile node can serve.
func bait(t *testing.T, f *ioptest.Fabric, node string) <-chan result {
	t.Helper()
	return callModel(t, f, strings.Replace(ioptest.Chat(true), `"`+ioptest.Model+`"`, `"bait-`+node+`"`, 1))
}

// honest makes streamed calls of an honest node, side by side, until stop, and says
// what went wrong and how long each took.
type honest struct {
	mu     sync.Mutex
	took   []time.Duration
	faults []string
	stop   chan struct{}
	done   sync.WaitGroup
}

func load(t *testing.T, f *ioptest.Fabric, want string) *honest {
	t.Helper()
	h := &honest{stop: make(chan struct{})}
	for range 3 {
		h.done.Go(func() {
			for over := false; !over; {
				began := time.Now()
				fault := exact(f, f.Request(t.Context(), http.MethodPost, "/v1/chat/completions", ioptest.Chat(true)), want)
				h.mu.Lock()
				h.took = append(h.took, time.Since(began))
				if fault != "" && len(h.faults) < 5 {
					h.faults = append(h.faults, fault)
				}
				h.mu.Unlock()
				select {
				case <-h.stop:
					over = true
				case <-t.Context().Done(): // the test has failed
					over = true
				default:
				}
			}
		})
	}
	return h
}

// exact makes a call and says in what its answer is not the one wanted.
func exact(f *ioptest.Fabric, req *http.Request, want string) string {
	resp, err := f.Client.Do(req)
	if err != nil {
		return err.Error()
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != 200 || string(b) != want {
		return fmt.Sprintf("%d, %d bytes of %d: %v", resp.StatusCode, len(b), len(want), err)
	}
	return ""
}

// end stops the load; it reports faults and returns how many calls there were.
func (h *honest) end(t *testing.T, when string) int {
	t.Helper()
	close(h.stop)
	h.done.Wait()
	for _, fault := range h.faults {
		t.Errorf("%s: an honest stream: %s", when, fault)
	}
	slices.Sort(h.took)
	if n := len(h.took); n > 0 {
		t.Logf("%-32s %4d honest streams, p50 %v, p99 %v", when, n, h.took[n/2].Round(time.Millisecond), h.took[n*99/100].Round(time.Millisecond))
	}
	return len(h.took)
}

// live makes the hostile node's next session, which is ready. One that lost its last is
// told that it stays out for a while, and dials again until it is let in.
func live(t *testing.T, f *ioptest.Fabric, instance string) *ioptest.RawNode {
	t.Helper()
	return liveAs(t, f, "evil", instance)
}

func liveAs(t *testing.T, f *ioptest.Fabric, name, instance string) *ioptest.RawNode {
	t.Helper()
	n := f.DialRaw(name, instance)
	for hang := time.After(ioptest.Hang); strings.HasPrefix(n.User, "!denied.misbehaved."); n = f.DialRaw(name, instance) {
		select {
		case <-n.Conn.Closed(): // the lobby ends
		case <-hang:
			t.Fatal("it stays out for ever")
		}
	}
	if n.Session.Gen == 0 {
		t.Fatalf("it is %q", n.User)
	}
	if resp := n.Register(1, nil); !resp.GetAccepted() {
		t.Fatalf("a new generation is refused: %v", resp)
	}
	if resp := n.Ready(1, name); !resp.GetReady() {
		t.Fatalf("a new generation is not ready: %v", resp)
	}
	f.Log.AwaitSession(t, name, n.Session.Gen-1)
	return n
}

func start(run string) *iopv1.ProviderTunnelFrame {
	return &iopv1.ProviderTunnelFrame{
		RunId: run, Sequence: 1, Kind: iopv1.ProviderTunnelFrame_RESPONSE_START, Status: 200,
		Headers: []*iopv1.Header{{Name: "Content-Type", Value: []byte("text/event-stream")}},
	}
}

func body(run string, seq uint64, b []byte) *iopv1.ProviderTunnelFrame {
	return &iopv1.ProviderTunnelFrame{RunId: run, Sequence: seq, Kind: iopv1.ProviderTunnelFrame_BODY, Body: b}
}

// A Node with good credentials of its own that breaks the rules in every way there is
// loses the stream, then its session, and comes back as a new generation alone, while
// an honest Node's streams of the same Edge come byte for byte, and Edge keeps nothing
// of it.
//
// Contract: Z5 J8 F10 R5 R9 Z6
func TestZ5HostileNode(t *testing.T) {
	// One for each attack: a node that lost its session stays out for a while.
	hostile := []string{"evil1", "evil2", "evil3", "evil4", "evil5", "evil6", "evil7", "evil8", "evil9"}
	f := baited(t, hostile...)
	var steps []fakeprovider.Step
	var want strings.Builder
	steps = append(steps, fakeprovider.SSEHead())
	for i := range 200 {
		steps = append(steps, fakeprovider.Chunk(chunkEvent(i)))
		want.WriteString(chunkEvent(i))
	}
	want.WriteString(doneEvent)
	f.Provider.Always(append(steps, fakeprovider.Chunk(doneEvent), fakeprovider.LastChunk())...)
	f.WaitNode("here")

	quiet := load(t, f, want.String())
	for range 60 { // as many as it takes to say something
		<-f.Provider.Received()
	}
	quiet.end(t, "quiet")
	base, _ := footprint()

	instance := wire.NewToken()
	say := func(n *ioptest.RawNode, v subjects.Verb, run string, data []byte) bool {
		return n.Conn.Publish(n.Session.Up(v, run), data) == nil // else it is closed
	}
	frame := func(n *ioptest.RawNode, run string, fr *iopv1.ProviderTunnelFrame) bool {
		data, err := fr.MarshalVT()
		return err == nil && say(n, subjects.Frame, run, data)
	}
	// goesOn breaks rules whatever was granted: an Edge that is faster than its Node may
	// have granted all that came before.
	goesOn := func(n *ioptest.RawNode, run string) {
		for i := uint64(0); i < 200_000 && frame(n, run, body(run, math.MaxUint64-i, []byte("x"))); {
			i++
		}
	}
	junk := func() []byte {
		b := make([]byte, 1+rand.IntN(200))
		for i := range b {
			b[i] = byte(rand.Uint32())
		}
		b[0] = 0xff // never a message
		return b
	}
	for i, attack := range []struct {
		name string
		// stream: the call that is under way ends with class protocol.
		stream bool
		do     func(n *ioptest.RawNode, run string)
	}{
		{"a million frames of one byte", true, func(n *ioptest.RawNode, run string) {
			frame(n, run, start(run))
			for seq := uint64(2); seq < 1_000_000 && frame(n, run, body(run, seq, []byte("x"))); {
				seq++
			}
			goesOn(n, run)
		}},
		{"64 KiB frames over credit", true, func(n *ioptest.RawNode, run string) {
			frame(n, run, start(run))
			for seq := range uint64(3000) {
				frame(n, run, body(run, seq+2, make([]byte, wire.MaxBody)))
			}
			goesOn(n, run)
		}},
		{"garbage on every verb", true, func(n *ioptest.RawNode, run string) {
			for range 200 {
				for _, v := range []subjects.Verb{subjects.Register, subjects.Ready, subjects.Heartbeat, subjects.Renew, subjects.SessionVerb, subjects.Ack} {
					say(n, v, "", junk())
				}
				for _, v := range []subjects.Verb{subjects.Frame, subjects.Event, subjects.Result} {
					say(n, v, run, junk())
				}
			}
		}},
		{"frames of runs nobody knows", false, func(n *ioptest.RawNode, _ string) {
			for range 70_000 {
				id := wire.NewRunID()
				frame(n, id, body(id, math.MaxUint64, []byte("x")))
			}
		}},
		{"acknowledgements of everything", false, func(n *ioptest.RawNode, run string) {
			for range 200 {
				var ack iopv1.StreamAck
				for range 500 {
					ack.Entries = append(ack.Entries, &iopv1.StreamAck_Entry{RunId: wire.NewRunID(), Direction: "body", Acked: math.MaxUint64, Credit: math.MaxUint64})
				}
				ack.Entries = append(ack.Entries, // of its own run: beyond what was sent, and back
					&iopv1.StreamAck_Entry{RunId: run, Direction: "body", Acked: math.MaxUint64, Credit: math.MaxUint64},
					&iopv1.StreamAck_Entry{RunId: run, Direction: "sideways", Acked: 1 << 63, Credit: 1 << 63, Resend: true},
					&iopv1.StreamAck_Entry{RunId: run, Direction: "frame", Reset_: true},
					&iopv1.StreamAck_Entry{RunId: "", Direction: "body"},
				)
				n.Whisper(subjects.Ack, "", &ack)
			}
		}},
		{"sequences that are none", true, func(n *ioptest.RawNode, run string) {
			frame(n, run, start(run))
			for range 40 {
				for _, seq := range []uint64{0, math.MaxUint64, 1, 1 << 63, 2, 1} {
					frame(n, run, body(run, seq, junk()))
				}
			}
			goesOn(n, run)
		}},
		{"terminals without end", false, func(n *ioptest.RawNode, run string) {
			end := start(run)
			end.End = true
			frame(n, run, end)
			for i := range uint64(40) {
				frame(n, run, &iopv1.ProviderTunnelFrame{RunId: run, Sequence: i + 2, Kind: iopv1.ProviderTunnelFrame_ERROR, ErrorClass: "no such class", Error: "\r\n"})
			}
		}},
		{"verbs that are none", false, func(n *ioptest.RawNode, _ string) {
			own := strings.TrimSuffix(n.Session.Up(subjects.Ready, ""), "ready")
			for i := range 5000 {
				for _, subject := range []string{"x", "ready.x", "frame", "frame.x", strings.Repeat("a.", 100) + "a", fmt.Sprint("event.", i)} {
					_ = n.Conn.Publish(own+subject, nil) // it may be closed by now
				}
			}
		}},
		{"register, ready and heartbeat without end", false, func(n *ioptest.RawNode, _ string) {
			proof := n.RegisterRequest(nil)
			for range 5000 {
				n.Whisper(subjects.Register, "", proof)
				n.Whisper(subjects.Ready, "", &iopv1.NodeReadyRequest{NodeId: "other"})
				n.Whisper(subjects.Heartbeat, "", &iopv1.Heartbeat{EdgeInstance: "x", OpenAttempts: math.MaxUint32, SentUnixNanos: math.MinInt64})
			}
		}},
	} {
		n := liveAs(t, f, hostile[i], instance)
		caught := bait(t, f, hostile[i])
		run := n.Await(subjects.Tunnel, 1).Run
		h := load(t, f, want.String())
		began := time.Now()
		attack.do(n, run)
		// It may not read its fence: the connection is closed upon all that it has said.
		f.Log.AwaitEvent(t, "node.fenced", "node="+hostile[i], "protocol rules broken")
		took := time.Since(began)
		r := get(t, f, caught)
		if attack.stream && !strings.Contains(r.body, "protocol") {
			t.Errorf("%s: the call ended as %d %q", attack.name, r.status, r.body[max(0, len(r.body)-400):])
		}
		calls := h.end(t, attack.name)
		heap, _ := footprint()
		t.Logf("%-32s fenced; %v in all, heap %d KiB, before any %d KiB", attack.name, took.Round(time.Millisecond), heap>>10, base>>10)
		if calls == 0 {
			t.Errorf("%s: no honest stream came to its end", attack.name)
		}
		if heap > base+64<<20 {
			t.Errorf("%s: %d MiB are kept", attack.name, (heap-base)>>20)
		}
		// Under its old generation it is nobody: it is not ready again, and soon closed.
		again := time.NewTicker(30 * time.Millisecond) // its words are few by now
		for over, hang := false, time.After(ioptest.Hang); !over; {
			select {
			case <-n.Conn.Closed():
				over = true
			case <-again.C:
				n.Whisper(subjects.Ready, "", &iopv1.NodeReadyRequest{NodeId: n.Session.Node})
				over = refused(n)
			case <-hang:
				t.Fatalf("%s: nobody says that it is over", attack.name)
			}
		}
		again.Stop()
	}
	// It does not leave, and goes on: its connection is closed.
	n := live(t, f, instance)
	id := wire.NewRunID()
	flood := body(id, 1, []byte("x"))
	for hang := time.After(ioptest.Hang); ; {
		select {
		case <-n.Conn.Closed():
		case <-hang:
			t.Fatal("it floods for ever")
		default:
			frame(n, id, flood)
			continue
		}
		break
	}
	f.Log.AwaitEvent(t, "broker.evicted", "node=evil", "reason=misbehaved")

	n = live(t, f, instance)
	back := bait(t, f, "evil")
	n.Answer(n.Await(subjects.Tunnel, 1).Run, "back")
	if r := get(t, f, back); r.status != 200 || r.body != "back" {
		t.Errorf("behaving again: %+v", r)
	}
	if n := strings.Count(f.Log.String(), "msg=node.connected role=edge node=here "); n != 1 {
		t.Errorf("the honest node was connected %d times", n)
	}
}

// refused says whether the last answer to ready that a node was told is no.
func refused(n *ioptest.RawNode) (no bool) {
	for _, m := range n.Heard() {
		var resp iopv1.NodeReadyResponse
		if m.Verb == subjects.Ready && resp.UnmarshalVT(m.Data) == nil {
			no = !resp.GetReady()
		}
	}
	return no
}

// What a Node said in an earlier session is nothing in its next: neither its
// registration, nor its readiness, nor frames of what it was sent then.
//
// Contract: Z5 G3 R1 R9 F5 F10
func TestZ5EarlierSessionShownAgain(t *testing.T) {
	f := baited(t)
	instance := wire.NewToken()
	n1 := live(t, f, instance)
	earlier := n1.RegisterRequest(nil)
	lost := bait(t, f, "evil")
	run := n1.Await(subjects.Tunnel, 1).Run
	n1.Conn.Close()
	if r := get(t, f, lost); r.status != 502 {
		t.Fatalf("the stream of the session that ended: %+v", r)
	}

	n2 := f.DialRaw("evil", instance)
	if resp := n2.Ready(1, "evil"); resp.GetReady() {
		t.Error("ready before it registered")
	}
	n2.Say(subjects.Register, "", earlier)
	var resp iopv1.RegisterResponse
	if err := resp.UnmarshalVT(n2.Await(subjects.Register, 1).Data); err != nil || resp.GetAccepted() || resp.GetConfig() != nil {
		t.Errorf("the earlier registration: %v %v", &resp, err)
	}
	f.Log.AwaitEvent(t, "node.refused", "node=evil", "another generation")
	if resp := n2.Ready(2, "evil"); resp.GetReady() {
		t.Error("ready by an earlier session's registration")
	}
	n2.Answer(run, "late")
	n2.Await(subjects.Fence, 1) // who speaks without being the owner is told so

	n3 := live(t, f, instance)
	n3.Answer(run, "late")
	served := bait(t, f, "evil")
	n3.Answer(n3.Await(subjects.Tunnel, 1).Run, "own")
	if r := get(t, f, served); r.status != 200 || r.body != "own" {
		t.Errorf("%+v", r)
	}
}
