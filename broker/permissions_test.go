package broker

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/iop-fabric/iop/internal/identity"
	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/wire"
)

// Every role against every subject, both ways, cell by cell: the server allows
// what the table names and nothing else.
// Contract: B5 B10 U2
func TestPermissionMatrix(t *testing.T) {
	f := newFixture(t)
	key, other := f.member("edge1", "node", "n1"), f.member("edge1", "node", "n2")
	outside, revoked := f.member("edge1", "edge", "e1"), f.member("edge1", "node", "n3")
	f.cfg.Members[len(f.cfg.Members)-1].Revoked = true
	f.cfg.HeartbeatBound = 10 * guard // nobody heartbeats, and a busy machine takes its time
	f.start()
	d := f.dialer("edge1", "node", "n1", key)
	node, s := f.node(d)
	d2 := f.dialer("edge1", "node", "n2", other)
	node2, s2 := f.node(d2)
	defer node2.Close()
	refused := map[string]*dialer{
		"lobby": f.dialer("edge1", "node", "n9", must(identity.NewUserKey())), "revoked": f.dialer("edge1", "node", "n3", revoked),
	}
	edge := f.edge("edge1")
	peer := f.dialer("edge1", "edge", "e1", outside)
	peer.inbox = subjects.EdgeInbox("edge1")
	edgeTCP, _ := f.connect(peer)
	service := must(f.b.connect(f.b.server, f.b.keys.service, "matrix"))
	defer service.Close()

	conns := map[string]*nats.Conn{"node": node, "edge": edge, "edge over TCP": edgeTCP, "service": service}
	for role, d := range refused {
		conns[role], _ = f.connect(d)
	}
	// A lobby has but two seconds: it is entered anew when it ran out.
	ask := func(role string, question func(*nats.Conn) (bool, error)) bool {
		t.Helper()
		for {
			may, err := question(conns[role])
			if err == nil {
				return may
			}
			d := refused[role]
			if d == nil {
				t.Fatalf("%s: %v", role, err)
			}
			f.wait("the end of the lobby", d.closed)
			d.closed = make(chan struct{})
			conns[role], _ = f.connect(d)
		}
	}
	staged := cast{node: s, other: s2, inbox: d.inbox, otherInbox: d2.inbox, lobby: refused["lobby"].inbox, revoked: refused["revoked"].inbox, run: wire.NewRunID()}
	for _, c := range staged.cells() {
		for role := range conns {
			publish, subscribe := c.want(role)
			if got := ask(role, func(nc *nats.Conn) (bool, error) { return mayPublish(nc, c.subject) }); got != publish {
				t.Errorf("%s publishes to %s: %v, want %v", role, c.subject, got, publish)
			}
			for _, queue := range []string{"", "q"} {
				if got := ask(role, func(nc *nats.Conn) (bool, error) { return maySubscribe(nc, c.subject, queue) }); got != subscribe {
					t.Errorf("%s subscribes to %s (queue %q): %v, want %v", role, c.subject, queue, got, subscribe)
				}
			}
		}
	}
}

// mayPublish asks the server. A permission violation is an asynchronous error,
// but it comes before the answer to the ping that follows.
func mayPublish(nc *nats.Conn, subject string) (bool, error) {
	violated, err := violates(nc, `Publish to "`+subject+`"`, func() error { return nc.Publish(subject, nil) })
	return !violated, err
}

func maySubscribe(nc *nats.Conn, subject, queue string) (bool, error) {
	violated, err := violates(nc, `Subscription to "`+subject+`"`, func() error {
		sub, err := nc.QueueSubscribe(subject, queue, func(*nats.Msg) {})
		if err != nil {
			return err
		}
		if err := nc.Flush(); err != nil {
			return err
		}
		return sub.Unsubscribe()
	})
	return !violated, err
}

func violates(nc *nats.Conn, what string, do func() error) (bool, error) {
	if err := errors.Join(do(), nc.Flush()); err != nil && !errors.Is(err, nats.ErrBadSubscription) {
		if errors.Is(err, nats.ErrPermissionViolation) {
			return true, nil
		}
		return false, fmt.Errorf("%s: %w", what, err)
	}
	last := nc.LastError()
	if nc.IsClosed() || errors.Is(last, nats.ErrAuthExpired) { // whatever was said before that is forgotten
		return false, fmt.Errorf("%s: %w", what, errors.Join(last, nats.ErrConnectionClosed))
	}
	if !errors.Is(last, nats.ErrPermissionViolation) || !strings.Contains(last.Error(), what) {
		return false, nil
	}
	// The error stays until another comes: provoke one of another subject, so
	// that the next question is about itself.
	return true, errors.Join(nc.Publish("violation.marker", nil), nc.Flush())
}

// JetStream is AUTH's alone.
// Contract: B1 B10
func TestJetStreamIsNotInFabric(t *testing.T) {
	f := newFixture(t).start()
	for name, want := range map[string]bool{accountAuth: true, accountFabric: false, accountSystem: false} {
		acc, err := f.b.server.LookupAccount(name)
		if err != nil {
			t.Fatal(err)
		}
		if acc.JetStreamEnabled() != want {
			t.Errorf("account %s: JetStream %v", name, !want)
		}
	}
}
