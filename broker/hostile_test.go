package broker

import (
	"bytes"
	"fmt"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/wire"
	"github.com/iop-fabric/iop/wire/iopv1"
)

// A server answers "who am I?" on the reply subject of the question, whatever it is:
// no permission is compared with it. So a Node can have that answer sent in another's
// name, and the session service takes it for nobody's word.
//
// Contract: Z5 B5 G3
func TestZ5RepliesAreNobodysWord(t *testing.T) {
	f, _, n1, n2 := newHub(t)
	f.start()
	evil, own := f.node(f.dialer("edge1", "node", "n1", n1))
	victim, s := f.node(f.dialer("edge1", "node", "n2", n2))
	down := f.subscribe(victim, s.DownWildcard())
	up := f.subscribe(f.edge("edge1"), subjects.UpWildcard("edge1"))
	before := testutil.ToFloat64(f.b.metrics.dropped)
	say := func(reply string) {
		t.Helper()
		if err := evil.PublishRequest(subjects.UserInfo, reply, nil); err != nil {
			t.Fatal(err)
		}
	}
	said := []string{s.Up(subjects.SessionVerb, ""), s.Up(subjects.Heartbeat, ""), subjects.Leaf("edge1", "l1", subjects.Beat), subjects.Leaf("edge1", "l1", subjects.Ended)}
	for _, reply := range said {
		say(reply)
	}
	// The fact itself: if a later server compares permissions, this ends here.
	for _, reply := range said[:2] {
		if m := f.next(up); m.Subject != reply || len(m.Data) == 0 || m.Data[0] != '{' {
			t.Fatalf("%s: %.20q", m.Subject, m.Data)
		}
	}
	for deadline := time.Now().Add(guard); testutil.ToFloat64(f.b.metrics.dropped) < before+2; { // the first two are counted
		if time.Now().After(deadline) {
			t.Fatal("they were taken")
		}
		f.whoami(evil)
	}
	// The service answers in order: had it granted upon that, the grant would come first.
	if err := victim.Publish(s.Up(subjects.SessionVerb, ""), nil); err != nil {
		t.Fatal(err)
	}
	f.next(down)
	if err := evil.Publish(own.Up(subjects.SessionVerb, ""), nil); err != nil {
		t.Fatal(err)
	}
	f.next(up)
	if m, err := down.NextMsg(0); err == nil {
		t.Errorf("the victim was told %s for nothing", m.Subject)
	}
}

// A Node that floods what the session service reads is alone with its flood: others
// get their tokens, come in and renew meanwhile.
//
// Contract: Z5 J8 B4
func TestZ5FloodOfTheSessionService(t *testing.T) {
	f, _, n1, n2 := newHub(t)
	f.start()
	evil, own := f.node(f.dialer("edge1", "node", "n1", n1))
	stop, done := make(chan struct{}), make(chan struct{})
	full := make(chan struct{})
	go func() {
		defer close(done)
		for i := 0; ; i++ {
			for _, v := range []subjects.Verb{subjects.SessionVerb, subjects.Heartbeat, subjects.Renew} {
				_ = evil.Publish(own.Up(v, ""), nil)
			}
			if i == 100_000 {
				close(full)
			}
			select {
			case <-stop:
				return
			default:
			}
		}
	}()
	defer func() { close(stop); <-done }()
	f.wait("the flood", full)
	instance := wire.NewToken()
	for range 5 {
		began := time.Now()
		nc, s := f.node(f.instance(instance, "edge1", "node", "n2", n2))
		down := f.subscribe(nc, s.Down(subjects.SessionVerb, ""))
		var g iopv1.SessionGrant
		for tries := 1; ; tries++ { // as an honest Node does
			if err := nc.Publish(s.Up(subjects.SessionVerb, ""), nil); err != nil {
				t.Fatal(err)
			}
			m, err := down.NextMsg(time.Second)
			if err == nil && g.UnmarshalVT(m.Data) == nil && len(g.Token) > 0 {
				break
			}
			if tries == 10 { // its patience
				t.Fatalf("no token: %v %v", err, nats.ErrTimeout)
			}
		}
		t.Logf("in, with a token, after %v", time.Since(began))
		nc.Close()
	}
}

// Contract: Z5
func TestPace(t *testing.T) {
	p := newPace(time.Second)
	now := time.Unix(1000, 0)
	one, two := subjects.Session{Edge: "e", Node: "n", Gen: 1}, subjects.Session{Edge: "e", Node: "n", Gen: 2}
	if !p.allow(now, one) || p.allow(now.Add(time.Second-1), one) || !p.allow(now, two) || !p.allow(now.Add(time.Second), one) {
		t.Error("one session in a second, each for itself")
	}
	if !p.allow(now.Add(-time.Hour), one) {
		t.Error("a clock that was set back silences a session")
	}
	now = now.Add(time.Hour)
	for i := range 2 * maxPaced { // names that somebody made up
		p.allow(now, subjects.Session{Edge: "e", Node: "n", Gen: uint64(i) + 10})
	}
	if len(p.last) > maxPaced {
		t.Errorf("%d sessions are remembered", len(p.last))
	}
	if !p.allow(now.Add(time.Second), one) {
		t.Error("made-up names keep everybody out for good")
	}
}

// A session that its Edge has fenced and that stays all the same is closed; one that
// no Edge fenced is not, and nobody else can say so.
//
// Contract: Z5 F10 B6
func TestZ5FencedSessionIsClosed(t *testing.T) {
	f, key, n1, n2 := newHub(t)
	f.start()
	edge := f.edge("edge1")
	site := f.newSite(key).start()
	stays, far := f.dialer("edge1", "node", "n1", n1), site.dialer(f.dialer("edge1", "node", "n2", n2))
	nc, s := f.node(stays)
	nc2, s2 := f.node(far)
	ctl := f.subscribe(edge, subjects.Ctl("edge1", subjects.Closed))
	for _, nc := range []*nats.Conn{nc, nc2} { // "who am I?", answered as a fence
		for _, s := range []subjects.Session{s, s2} {
			if err := nc.PublishRequest(subjects.UserInfo, s.Down(subjects.Fence, ""), nil); err != nil {
				t.Fatal(err)
			}
		}
		f.whoami(nc)
	}
	f.offset.Add(int64(fenceGrace))
	closed := f.offset.Load()
	for _, s := range []subjects.Session{s, s2} {
		if m, err := ctl.NextMsg(1500 * time.Millisecond); err == nil { // longer than the service's tick
			t.Fatalf("closed without its Edge's word: %s", m.Data)
		}
		fence := must((&iopv1.Fence{Reason: "misbehaving"}).MarshalVT())
		if err := edge.Publish(s.Down(subjects.Fence, ""), fence); err != nil {
			t.Fatal(err)
		}
		f.offset.Store(closed)
		if n := f.told(ctl); n.NodeId != s.Node || n.Generation != s.Gen {
			t.Errorf("the Edge was told %v", n)
		}
	}
	f.wait("the close at the hub", stays.closed)
	f.wait("the close at the leaf", far.closed)
	if got := testutil.ToFloat64(f.b.metrics.evicted.WithLabelValues(reasonFenced)); got != 2 {
		t.Errorf("%v evicted", got)
	}
}

// By the class of an Edge's fence the broker knows that a session broke rules: it is
// closed while no time passes, its node is told that it stays out and until when, and
// comes back after that.
//
// Contract: J8 Z5 B3
func TestZ5MisbehavedIsClosedAtOnceAndStaysOut(t *testing.T) {
	f, key, n1, n2 := newHub(t)
	f.start()
	edge := f.edge("edge1")
	site := f.newSite(key).start()
	near := func() *dialer { return f.dialer("edge1", "node", "n1", n1) }
	far := func() *dialer { return site.dialer(f.dialer("edge1", "node", "n2", n2)) }
	for _, dialer := range []func() *dialer{near, far} {
		for _, wait := range []time.Duration{barFirst, 2 * barFirst} {
			d := dialer()
			nc, s := f.node(d)
			fences := f.fences(nc, s)
			begun := time.Now().Add(time.Duration(f.offset.Load()))
			fence := must((&iopv1.Fence{Reason: "rules", ErrorClass: string(wire.Protocol)}).MarshalVT())
			if err := edge.Publish(s.Down(subjects.Fence, ""), fence); err != nil {
				t.Fatal(err)
			}
			f.wait("the close", d.closed)
			select {
			case m := <-fences:
				if !bytes.Equal(m.Data, fence) {
					t.Errorf("told %q", m.Data)
				}
			default:
				if s.Node == "n1" { // the hub may not know yet that the other listens
					t.Error("it was closed and told nothing")
				}
			}
			var until int64
			nc, user := f.connect(dialer())
			nc.Close()
			if _, err := fmt.Sscanf(user, "!denied.misbehaved.%d", &until); err != nil || until < begun.Add(wait).Unix() {
				t.Fatalf("user %q, not out until %v", user, begun.Add(wait).Unix())
			}
			f.offset.Add(int64(wait))
		}
		nc, _ := f.node(dialer())
		nc.Close()
	}
	if got := testutil.ToFloat64(f.b.metrics.evicted.WithLabelValues(reasonMisbehaved)); got < 4 { // a leaf may be told again

		t.Errorf("%v evicted", got)
	}
}
