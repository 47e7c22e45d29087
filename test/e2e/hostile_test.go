package e2e

import (
	"strings"
	"testing"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/ioptest"
	"github.com/iop-fabric/iop/internal/up"
	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/wire"
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
