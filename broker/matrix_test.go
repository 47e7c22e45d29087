package broker

import (
	"crypto/tls"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"

	"github.com/iop-fabric/iop/internal/identity"
	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/wire"
)

// cell is one subject of the matrix: who may publish to it and subscribe to it, by
// role, separated by commas.
type cell struct{ subject, publish, subscribe string }

func (c cell) want(role string) (publish, subscribe bool) {
	in := func(list string) bool { return slices.Contains(strings.Split(list, ","), role) }
	return in(c.publish), in(c.subscribe)
}

// cast is who is in the matrix: two nodes of edge1, one of them with an older
// generation too, and a stranger in the lobby.
type cast struct {
	node, other       subjects.Session
	inbox, otherInbox string // of the two nodes
	lobby, revoked    string // of who may read why it is refused, and no more
	run               string
}

const bothEdges = "edge,edge over TCP"

// cells is B5, subject by subject.
func (c cast) cells() []cell {
	s, s2, run := c.node, c.other, c.run
	older, newer := s, s
	older.Gen--
	newer.Gen++
	const svc, leaf = ",service", ",leaf"
	out := []cell{
		// The node's own session. What a leaf carries, it may carry both ways.
		{s.Up(subjects.Heartbeat, ""), "node" + leaf, bothEdges + svc},
		{s.Up(subjects.SessionVerb, ""), "node" + leaf, bothEdges + svc},
		{s.Up(subjects.Renew, ""), "node" + leaf, bothEdges + svc},
		{s.Up(subjects.Register, ""), "node" + leaf, bothEdges},
		{s.Up(subjects.Ready, ""), "node" + leaf, bothEdges},
		{s.Up(subjects.Ack, ""), "node" + leaf, bothEdges},
		{s.Up(subjects.Frame, run), "node" + leaf, bothEdges},
		{s.Up(subjects.Event, run), "node" + leaf, bothEdges},
		{s.Up(subjects.Result, run), "node" + leaf, bothEdges},
		{s.Down(subjects.Tunnel, run), bothEdges, "node" + leaf},
		{s.Down(subjects.Run, run), bothEdges, "node" + leaf},
		{s.Down(subjects.Body, run), bothEdges, "node" + leaf},
		{s.Down(subjects.Cancel, run), bothEdges, "node" + leaf},
		{s.Down(subjects.Command, run), bothEdges, "node" + leaf},
		{s.Down(subjects.Register, ""), bothEdges, "node" + leaf},
		{s.Down(subjects.Ready, ""), bothEdges, "node" + leaf},
		{s.Down(subjects.Heartbeat, ""), bothEdges, "node" + leaf},
		{s.Down(subjects.Refresh, ""), bothEdges, "node" + leaf},
		{s.Down(subjects.Ack, ""), bothEdges, "node" + leaf},
		{s.Down(subjects.SessionVerb, ""), bothEdges + svc, "node" + leaf},
		{s.Down(subjects.Renew, ""), bothEdges + svc, "node" + leaf},
		{s.Down(subjects.Fence, ""), bothEdges + svc, "node" + leaf + svc},
		{s.DownWildcard(), bothEdges, "node" + leaf},
		// Its older generation, while this one is admitted.
		{older.Up(subjects.Register, ""), "older node" + leaf, bothEdges},
		{older.Up(subjects.Frame, run), "older node" + leaf, bothEdges},
		{older.Down(subjects.Tunnel, run), bothEdges, "older node" + leaf},
		// A newer one, another node, another edge.
		{newer.Up(subjects.Register, ""), leaf, bothEdges},
		{newer.Down(subjects.Tunnel, run), bothEdges, leaf},
		{s2.Up(subjects.Register, ""), leaf, bothEdges},
		{s2.Down(subjects.Tunnel, run), bothEdges, leaf},
		{"iop.v1.edge2.n1.1.up.register", "", ""},
		{"iop.v1.edge2.n1.1.up.session", "", "service"},
		{"iop.v1.edge2.n1.1.down.tunnel." + run, "", ""},
		{"iop.v1.edge2.n1.1.down.fence", "service", "service"},
		// Beside a session's two directions there is nothing.
		{s.String(), "", ""},
		{"iop.v1." + s.String() + ".up", "", ""},
		{"iop.v1." + s.String() + ".sideways.x", "", ""},
		{"iop.v1." + s.String() + ".>", "", ""},
		{"iop.v1." + s.Edge + "." + s.Node + ".*.up.>", leaf, bothEdges},
		{"iop.v1." + s.Edge + "." + s.Node + ".*.down.>", bothEdges, leaf},
		{"iop.v1." + s.Edge + ".*.*.down.>", bothEdges, leaf},
		// The session service's.
		{subjects.Ctl("edge1", subjects.Admitted), "service", bothEdges + svc},
		{subjects.Ctl("edge1", subjects.Closed), "service", bothEdges},
		{subjects.Ctl("edge1", subjects.Changed), "service", bothEdges},
		{subjects.Ctl("edge2", subjects.Admitted), "service", "service"},
		{subjects.Store("edge1", subjects.Get), bothEdges, "service"},
		{subjects.Store("edge1", subjects.Put), bothEdges, "service"},
		{subjects.Store("edge2", subjects.Get), "", "service"},
		// Nothing is below or beside these.
		{"iop.v1.edge1.store.get.x", "", ""},
		{"iop.v1.edge1.ctl.closed.x", "service", ""},
		{"iop.v1.edge1.n1.admitted", "", ""},
		{"iop.v1." + s.String() + ".sideways.fence", "", ""},
		{"_INBOX.edge1._nr.a.b", "", ""},
		{"INBOX.edge1._nr.a", "", ""},
		{"INBOX.edge1._edge.a", "", ""},
		// Leaves' agents, and leaves' callouts.
		{subjects.Leaf("edge1", "l1", subjects.Beat), "leaf,leaf agent", "service"},
		{subjects.Leaf("edge1", "l1", subjects.Opened), "leaf,leaf agent", "service"},
		{subjects.Leaf("edge1", "l1", subjects.Ended), "leaf,leaf agent", "service"},
		{subjects.Leaf("edge1", "l1", subjects.Here), "service", "leaf,leaf agent"},
		{subjects.Leaf("edge1", "l1", subjects.Noted), "service", "leaf,leaf agent"},
		{subjects.Leaf("edge1", "l1", subjects.Kick), "service", "leaf,leaf agent"},
		{subjects.Callout("edge1", "l1"), leaf, ""},
		{subjects.Callout("edge1", "l2"), "", ""},
		{subjects.Callout("edge2", "l1"), "", ""},
		{"iop.v1.edge1.edge1.l1", "", ""},
		// Inboxes. The lobby's is its own, and so is the node's.
		{c.inbox + ".x", "", "node,older node"},
		{c.lobby + ".x", "", "lobby"},
		{c.revoked + ".x", "", "revoked"},
		{c.otherInbox + ".x", "", ""},
		{subjects.EdgeInbox("edge1") + ".x", "service", bothEdges},
		{subjects.EdgeInbox("edge2") + ".x", "service", ""},
		{subjects.NoResponders("edge1", run), "", bothEdges},
		{subjects.NoResponders("edge2", run), "", ""},
		{"_INBOX.edge1.n1.>", "", ""},
		{"_INBOX.edge1.n1.x", "", ""},
		{"_INBOX.>", "", ""},
		{"_INBOX.edge1.>", "", ""},
		{"_INBOX.*.*.x", "", ""},
		{"_R_.x", "", leaf},
		// The server's own.
		{subjects.UserInfo, "node,older node,lobby,revoked," + bothEdges, ""},
		{"$SYS.REQ.USER.AUTH", "", ""},
		{"$SYS.REQ.ACCOUNT.INFO", "", ""},
		{"$SYS.ACCOUNT.USER.INFO", "", ""},
		{"$G.REQ.USER.INFO", "", ""},
		{"$SYS.REQ.SERVER.PING", "", ""},
		{"$SYS.REQ.SERVER.X.KICK", "", ""},
		{"$SYS.REQ.ACCOUNT.PING.CONNZ", "", ""},
		{"$SYS.ACCOUNT.FABRIC.CONNECT", "", ""},
		{"$SYS.REQ.>", "", ""},
		{"$SYS.>", "", ""},
		{"$JS.API.INFO", "", ""},
		{"$JS.API.STREAM.LIST", "", ""},
		{"$JS.>", "", ""},
		{"$KV.iop_store.edge1.a", "", ""},
		// Everything.
		{">", "", ""},
		{"*", "", ""},
		{"*.>", "", ""},
		{"iop.>", "", ""},
		{"iop.v1.>", "", ""},
		{"iop.v1.edge1.>", "", ""},
		{"iop.v1.*.*.*.up.>", "", ""},
		{"iop.v1.*.*.*.down.>", "", ""},
		{"iop.v1.edge1.*.*.up.>", leaf, bothEdges},
		{"iop.v1.*.*.*.up.session", "", "service"},
		{"iop.v1.*.*.*.up.heartbeat", "", "service"},
		{"iop.v1.*.*.*.up.renew", "", "service"},
		{"iop.v1.*.*.*.up.register", "", ""},
		{"iop.v1.*.*.*.down.session", "service", ""},
		{"iop.v1.*.*.*.down.fence", "service", "service"},
		{"iop.v1.edge2.n1.1.down.renew", "service", ""},
		{"iop.v1.edge2.n1.1.down.session", "service", ""},
		{"iop.v1.*.*.*.down.renew", "service", ""},
		{"iop.v1.*.ctl.>", "service", ""},
		{"iop.v1.*.ctl.*", "service", ""},
		{"iop.v1.*.ctl.admitted", "service", "service"},
		{"iop.v1.edge1.ctl.*", "service", bothEdges},
		{"iop.v1.*.store.*", "", "service"},
		{"iop.v1.edge1.store.*", bothEdges, "service"},
		{"iop.v1.*.leaf.*.>", "", ""},
		{"iop.v1.*.leaf.*.beat", "", "service"},
		{"iop.v1.*.leaf.*.opened", "", "service"},
		{"iop.v1.*.leaf.*.ended", "", "service"},
		{"iop.v1.*.leaf.*.here", "service", ""},
		{"iop.v1.*.leaf.*.noted", "service", ""},
		{"iop.v1.*.leaf.*.kick", "service", ""},
		{"iop.v1.callout.*.*", "", ""},
		{"_INBOX.*._edge.>", "service", ""},
		{"_INBOX.*.*.>", "", ""},
		{"_INBOX.edge1._nr.*", "", bothEdges},
		{"_INBOX.*._nr.*", "", ""},
		{"_R_.>", "", leaf},
	}
	// One token of a session's own, or of an inbox's, that is another's.
	for _, s := range []subjects.Session{s, older} {
		elsewhere, neighbour := s, s
		elsewhere.Edge, neighbour.Node = "edge2", s2.Node
		out = append(out,
			cell{elsewhere.Up(subjects.Frame, run), "", ""}, cell{elsewhere.Down(subjects.Tunnel, run), "", ""},
			cell{neighbour.Up(subjects.Frame, run), leaf, bothEdges}, cell{neighbour.Down(subjects.Tunnel, run), bothEdges, leaf})
	}
	for _, inbox := range []string{c.inbox, c.lobby, c.revoked} {
		tokens := strings.Split(inbox, ".")
		for i, other := range []string{"INBOX", "edge2", s2.Node, wire.NewToken() + wire.NewToken()} {
			another := slices.Clone(tokens)
			another[i] = other
			out = append(out, cell{strings.Join(another, ".") + ".x", "", ""})
		}
	}
	for _, v := range []subjects.Verb{subjects.Beat, subjects.Opened, subjects.Ended, subjects.Here, subjects.Noted, subjects.Kick} {
		publish, subscribe := "", "service"
		if v == subjects.Here || v == subjects.Noted || v == subjects.Kick {
			publish, subscribe = "service", ""
		}
		for _, other := range [][2]string{{"edge1", "l2"}, {"edge2", "l1"}} {
			out = append(out, cell{subjects.Leaf(other[0], other[1], v), publish, subscribe})
		}
		out = append(out, cell{"iop.v1.edge1.n1.l1." + string(v), "", ""})
	}
	for i := range out {
		out[i].publish, out[i].subscribe = strings.TrimPrefix(out[i].publish, ","), strings.TrimPrefix(out[i].subscribe, ",")
	}
	return out
}

// elsewhere are the same subjects of another version, and of something else that
// shares the servers: nobody's.
func elsewhere(cells []cell) []cell {
	out := cells
	for _, c := range cells {
		if rest, ours := strings.CutPrefix(c.subject, "iop.v1."); ours {
			out = append(out, cell{subject: "iop.v2." + rest}, cell{subject: "poi.v1." + rest})
		}
	}
	return out
}

// roles are the sets of the cast, as they are rendered.
func (c cast) roles(connection, lobby, revoked string) map[string]subjects.Permissions {
	older := c.node
	older.Gen--
	return map[string]subjects.Permissions{
		"node":       subjects.NodePermissions(c.node, connection),
		"older node": subjects.NodePermissions(older, connection), // it may be called so again
		"lobby":      subjects.LobbyPermissions("edge1", "n9", lobby),
		"revoked":    subjects.LobbyPermissions("edge1", "n3", revoked),
		"edge":       subjects.EdgePermissions("edge1"),
		"service":    subjects.ServicePermissions(),
		"leaf":       subjects.LeafPermissions("edge1", "l1"),
		"leaf agent": subjects.LeafAgentPermissions("edge1", "l1"),
	}
}

// staged is a cast without a broker.
func staged() (c cast, roles map[string]subjects.Permissions) {
	name := func() string { return wire.NewToken() + wire.NewToken() }
	connection, lobby, revoked := name(), name(), name()
	c = cast{
		node: subjects.Session{Edge: "edge1", Node: "n1", Gen: 7}, other: subjects.Session{Edge: "edge1", Node: "n2", Gen: 9},
		inbox: subjects.NodeInbox("edge1", "n1", connection), lobby: subjects.NodeInbox("edge1", "n9", lobby),
		otherInbox: subjects.NodeInbox("edge1", "n2", name()), revoked: subjects.NodeInbox("edge1", "n3", revoked), run: wire.NewRunID(),
	}
	return c, c.roles(connection, lobby, revoked)
}

// covers is the server's own rule: every subject that the one may stand for is in
// the set.
func covers(set []string, subject string) bool {
	return slices.ContainsFunc(set, func(allowed string) bool { return server.SubjectMatchesFilter(subject, allowed) })
}

// caught says which cell of the matrix a role's set breaks; "": none.
func caught(cells []cell, role string, p subjects.Permissions) string {
	for _, c := range cells {
		publish, subscribe := c.want(role)
		if covers(p.Publish, c.subject) != publish {
			return "publish to " + c.subject
		}
		if covers(p.Subscribe, c.subject) != subscribe {
			return "subscribe to " + c.subject
		}
	}
	return ""
}

// The matrix catches every grant that is lost and every one too many: of each set
// each pattern is left out, and what is broader by one token, by an open end, or is
// another role's, is added.
//
// Contract: B5 B10 U2
func TestPermissionMatrixCatches(t *testing.T) {
	c, roles := staged()
	cells := elsewhere(c.cells())
	tried := 0
	for role, p := range roles {
		if at := caught(cells, role, p); at != "" {
			t.Errorf("%s: %s", role, at)
			continue
		}
		for _, side := range []string{"publish", "subscribe"} {
			set := func(p *subjects.Permissions) *[]string {
				if side == "publish" {
					return &p.Publish
				}
				return &p.Subscribe
			}
			mutant := func(what string, edit func([]string) []string) {
				m := subjects.Permissions{Publish: slices.Clone(p.Publish), Subscribe: slices.Clone(p.Subscribe)}
				*set(&m) = edit(*set(&m))
				tried++
				if caught(cells, role, m) == "" {
					t.Errorf("%s, %s %s: no cell of the matrix fails", role, side, what)
				}
			}
			own := *set(&p)
			for i, pattern := range own {
				if rest := slices.Delete(slices.Clone(own), i, i+1); !covers(rest, pattern) {
					mutant("without "+pattern, func(s []string) []string { return slices.Delete(s, i, i+1) })
				}
			}
			for _, extra := range broader(roles, own) {
				if !covers(own, extra) {
					mutant("with "+extra, func(s []string) []string { return append(s, extra) })
				}
			}
		}
	}
	t.Logf("%d changed sets over %d cells", tried, len(cells))
	if tried < 300 {
		t.Errorf("only %d changes were tried", tried)
	}
}

// broader are patterns that nobody should be given by mistake.
func broader(roles map[string]subjects.Permissions, own []string) (out []string) {
	for _, pattern := range own {
		tokens := strings.Split(pattern, ".")
		for i := range tokens {
			if tokens[i] != "*" && tokens[i] != ">" {
				wide := slices.Clone(tokens)
				wide[i] = "*"
				out = append(out, strings.Join(wide, "."))
			}
			out = append(out, strings.Join(append(slices.Clone(tokens[:i]), ">"), "."))
		}
	}
	for _, p := range roles {
		out = append(append(out, p.Publish...), p.Subscribe...)
	}
	return out
}

// The rule that the matrix is read by is the server's: each set is rendered for a
// server of its own, and asked cell by cell, a queue's subscription too.
//
// Contract: B5 U2
func TestPermissionSetsOnAServer(t *testing.T) {
	c, roles := staged()
	opts := &server.Options{Host: "127.0.0.1", Port: -1, DontListen: true, NoSigs: true, NoLog: true}
	for role, p := range roles {
		opts.Users = append(opts.Users, &server.User{Username: role, Password: "p", Permissions: &server.Permissions{
			Publish: &server.SubjectPermission{Allow: p.Publish}, Subscribe: &server.SubjectPermission{Allow: p.Subscribe},
		}})
	}
	srv := must(server.NewServer(opts))
	srv.Start()
	t.Cleanup(func() { srv.Shutdown(); srv.WaitForShutdown() })
	for role, p := range roles {
		nc := must(nats.Connect("", nats.InProcessServer(srv), nats.UserInfo(role, "p"), nats.NoReconnect(), nats.ErrorHandler(quiet)))
		for _, cell := range c.cells() {
			if may, err := mayPublish(nc, cell.subject); err != nil || may != covers(p.Publish, cell.subject) {
				t.Errorf("%s publishes to %s: %v %v", role, cell.subject, may, err)
			}
			for _, queue := range []string{"", "q"} {
				if may, err := maySubscribe(nc, cell.subject, queue); err != nil || may != covers(p.Subscribe, cell.subject) {
					t.Errorf("%s subscribes to %s (queue %q): %v %v", role, cell.subject, queue, may, err)
				}
			}
		}
		nc.Close()
	}
}

// What is no member's use of a credential is refused, whatever the credential: a
// leaf's as a client, a node's or an edge's as a leaf's link or a route, a broker's
// anywhere but at a route, the Edge's own key of this process over TCP.
//
// Contract: B2 B5
func TestCredentialsOfAnotherUse(t *testing.T) {
	f, leafKey, n1, _ := newHub(t)
	brokerKey := f.member("edge1", "node", "x")
	f.start()
	for name, c := range map[string]struct {
		uri string
		key *identity.NKey
		r   refusal
	}{
		"a leaf's as a client":             {"spiffe://iop/edge1/leaf/l1", leafKey, refusedRole},
		"a broker's as a client":           {"spiffe://iop/-/broker/b1", brokerKey, refusedRole},
		"a node's certificate, leaf's key": {"spiffe://iop/edge1/node/n1", leafKey, refusedNKey},
		"an edge's certificate, nodes key": {"spiffe://iop/edge1/edge/n1", n1, refusedUnknown},
		"the Edge's key of this process":   {"spiffe://iop/edge1/edge/e1", f.edges["edge1"], ""},
		"the session service's key":        {"spiffe://iop/edge1/node/n1", f.b.keys.service, ""},
		"the callout's key":                {"spiffe://iop/edge1/node/n1", f.b.keys.callout, ""},
		"the system's key":                 {"spiffe://iop/edge1/node/n1", f.b.keys.system, ""},
	} {
		before := 0.0
		if c.r != "" {
			before = f.refused(c.r)
		}
		d := f.dialer("edge1", "node", "n1", c.key)
		d.tls.Certificates[0] = f.ca.client(c.uri)
		if nc, err := d.dial(); err == nil {
			if user, err := userOf(nc); err == nil && !strings.HasPrefix(user, "!denied.") {
				t.Errorf("%s: came in as %q", name, user)
			}
			nc.Close()
		}
		if c.r != "" && f.refused(c.r) == before {
			t.Errorf("%s: %s was not counted", name, c.r)
		}
	}
	// A leaf link with everything right but whose it is.
	for uri, key := range map[string]*identity.NKey{"spiffe://iop/edge1/node/n1": n1, "spiffe://iop/-/broker/b1": brokerKey} {
		s := f.newSite(leafKey)
		s.cfg.Hub = []string{f.b.LeafURL()}
		before := f.refused(refusedRole)
		_, evil := f.hostileWith(s, func(r *server.RemoteLeafOpts) {
			cert := f.ca.client(uri)
			r.TLSConfig.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &cert, nil }
			r.Nkey = string(must(key.Pair().Seed()))
		})
		for deadline := time.Now().Add(guard); f.refused(refusedRole) == before; {
			if err := evil.Flush(); err != nil || time.Now().After(deadline) {
				t.Fatalf("%s as a leaf's link: not refused (%v)", uri, err)
			}
		}
	}
	if n := f.b.server.NumLeafNodes(); n != 0 {
		t.Errorf("%d leaves", n)
	}
}
