package broker

import (
	"bufio"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/bus"
	"github.com/iop-fabric/iop/internal/bus/natsbus"
	"github.com/iop-fabric/iop/internal/identity"
	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/wire"
)

// cluster is three brokers in this process, each with its own store and ports.
type cluster struct {
	*fixture // the files they share
	members  []*fixture
}

// freePorts picks ports nobody listens at.
func freePorts(t testing.TB, n int) []string {
	t.Helper()
	out := make([]string, n)
	for i := range out {
		l := must(net.Listen("tcp", "127.0.0.1:0"))
		defer l.Close() //nolint:gocritic // all at the end, so that no port comes twice
		out[i] = l.Addr().String()
	}
	return out
}

// newCluster makes the files; the members of the fabric are added before start.
func newCluster(t testing.TB) *cluster {
	t.Helper()
	c := &cluster{fixture: newFixture(t)}
	ports := freePorts(t, 6)
	var routes []string
	for _, p := range ports[3:] {
		routes = append(routes, "tls://"+p)
	}
	for i := range 3 {
		m := &fixture{t: t, ca: c.ca, dir: c.dir, edges: c.edges, cfg: c.cfg}
		m.cfg.Name, m.cfg.Listen, m.cfg.StoreDir = fmt.Sprintf("b%d", i+1), ports[i], filepath.Join(c.dir, fmt.Sprintf("js%d", i+1))
		m.cfg.Cluster = &configs.Cluster{Listen: ports[3+i], Routes: routes}
		c.members = append(c.members, m)
	}
	return c
}

func (c *cluster) start() *cluster {
	c.t.Helper()
	for _, m := range c.members {
		m.cfg.Members = c.cfg.Members
		m.launch()
	}
	for _, m := range c.members {
		m.served()
	}
	return c
}

// clusterNode dials one of several brokers, and another when that one is gone.
type clusterNode struct {
	c        *cluster
	name     string
	instance string
	key      *identity.NKey

	nc      *nats.Conn
	session subjects.Session
	at      int // index of the broker
	closed  chan struct{}
}

func (c *cluster) nodes(n int) []*clusterNode {
	out := make([]*clusterNode, n)
	for i := range out {
		name := fmt.Sprintf("n%d", i)
		out[i] = &clusterNode{c: c, name: name, instance: wire.NewToken(), key: c.member("edge1", "node", name)}
	}
	return out
}

// dial tries the brokers in turn, from first on, until one admits it.
func (n *clusterNode) dial(first int) error {
	deadline := time.Now().Add(guard)
	var err error
	for i := first; time.Now().Before(deadline); i++ {
		m := n.c.members[i%3]
		connection := n.instance + wire.NewToken()
		d := &dialer{
			url: "tls://" + m.cfg.Listen,
			tls: &tls.Config{
				RootCAs: n.c.ca.pool(), MinVersion: tls.VersionTLS13,
				Certificates: []tls.Certificate{n.c.ca.client("spiffe://iop/edge1/node/" + n.name)},
			},
			connection: connection, inbox: subjects.NodeInbox("edge1", n.name, connection),
			auth: nats.Nkey(n.key.Public(), n.key.Sign), closed: make(chan struct{}),
		}
		var nc *nats.Conn
		if nc, err = d.dial(); err != nil {
			continue
		}
		msg, reqErr := nc.Request(subjects.UserInfo, nil, guard)
		if reqErr != nil {
			err = reqErr
			nc.Close()
			continue
		}
		_, rest, _ := strings.Cut(string(msg.Data), `"user":"`)
		user, _, _ := strings.Cut(rest, `"`)
		s, parseErr := subjects.ParseSession(user)
		if parseErr != nil {
			err = fmt.Errorf("user %q", user)
			nc.Close()
			continue
		}
		n.nc, n.session, n.at, n.closed = nc, s, i%3, d.closed
		return nil
	}
	return err
}

// connect dials all nodes at once, spread over the brokers.
func (c *cluster) connectAll(nodes []*clusterNode, first func(i int) int) {
	c.t.Helper()
	var wg sync.WaitGroup
	for i, n := range nodes {
		wg.Go(func() {
			if err := n.dial(first(i)); err != nil {
				c.t.Errorf("%s: %v", n.name, err)
			}
		})
	}
	wg.Wait()
	c.t.Cleanup(func() {
		for _, n := range nodes {
			if n.nc != nil {
				n.nc.Close()
			}
		}
	})
	if c.t.Failed() {
		c.t.FailNow()
	}
}

// Any broker of three stops: what is at the others notices nothing, what was at
// it is back elsewhere under higher generations, and Edge is told of each once
// more than it was, at once. Each broker has decided on its own dials alone.
// Contract: Y2 B7
func TestClusterLosesAnyBroker(t *testing.T) {
	c := newCluster(t)
	nodes := c.nodes(30)
	c.start()
	c.connectAll(nodes, func(i int) int { return i })
	for _, n := range nodes {
		c.members[n.at].logs.wait(t, 0, map[string]string{"msg": eventAdmitted, "user": n.session.String()})
	}
	for victim := range 3 {
		watch := c.members[(victim+1)%3]
		edge := watch.edge("edge1")
		ctl := c.subscribe(edge, subjects.CtlWildcard("edge1"))
		lost := map[string]uint64{}
		var there, elsewhere []*clusterNode
		for _, n := range nodes {
			if n.at == victim {
				there = append(there, n)
				lost[n.name] = n.session.Gen
			} else {
				elsewhere = append(elsewhere, n)
			}
		}
		began := time.Now()
		c.members[victim].stop()
		stopped := time.Since(began)
		var wg sync.WaitGroup
		var back time.Duration
		for _, n := range there {
			before := n.session.Gen
			c.wait("the end of "+n.name, n.closed)
			wg.Go(func() {
				if err := n.dial(victim + 1); err != nil {
					t.Errorf("%s: %v", n.name, err)
				} else if n.session.Gen <= before {
					t.Errorf("%s: generation %d after %d", n.name, n.session.Gen, before)
				}
			})
		}
		wg.Wait()
		back = time.Since(began)
		told := time.Duration(0)
		for len(lost) > 0 {
			verb, n := c.notice(ctl)
			if verb == subjects.Closed && lost[n.NodeId] == n.Generation {
				if n.Reason != reasonServerStopped {
					t.Errorf("%s: closed as %q", n.NodeId, n.Reason)
				}
				delete(lost, n.NodeId)
				told = time.Since(began)
			}
		}
		t.Logf("b%d stopped in %v: %d sessions back after %v, Edge had read of all after %v", victim+1, stopped, len(there), back, told)
		for _, n := range elsewhere {
			if n.nc.IsClosed() {
				t.Errorf("%s at b%d lost its session with b%d", n.name, n.at+1, victim+1)
			} else if got := c.whoami(n.nc); got != n.session.String() {
				t.Errorf("%s is %q now, was %s", n.name, got, n.session)
			}
		}
		edge.Close()
		c.members[victim].start()
	}
}

// A broker killed says nothing; the others find out by themselves, and tell Edge
// within a second.
// Contract: Y2 B7 B8
func TestClusterKilledBroker(t *testing.T) {
	c := newCluster(t)
	nodes := c.nodes(12)
	for i := range 2 {
		c.members[i].cfg.Members = c.cfg.Members
		c.members[i].launch()
	}
	victim := c.members[2]
	cmd := exec.Command(os.Args[0], "-test.run=^TestHelperClusterBroker$") //nolint:gosec // this very program
	cmd.Env = append(os.Environ(), helperCluster+"="+c.dir, "IOP_TEST_LISTEN="+victim.cfg.Listen,
		"IOP_TEST_CLUSTER="+victim.cfg.Cluster.Listen, "IOP_TEST_ROUTES="+strings.Join(victim.cfg.Cluster.Routes, ","))
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	killed := false
	defer func() {
		if !killed {
			cmd.Process.Kill()
			cmd.Wait() // killed
		}
	}()
	for lines := bufio.NewScanner(out); lines.Scan() && lines.Text() != "ready"; {
	}
	c.members[0].served()
	c.members[1].served()

	c.connectAll(nodes, func(int) int { return 2 })
	for _, n := range nodes {
		if n.at != 2 {
			t.Fatalf("%s is at b%d", n.name, n.at+1)
		}
	}
	ctl := c.subscribe(c.members[0].edge("edge1"), subjects.CtlWildcard("edge1"))
	began := time.Now()
	cmd.Process.Kill()
	cmd.Wait() // killed
	killed = true
	lost := map[string]uint64{}
	for _, n := range nodes {
		lost[n.name] = n.session.Gen
	}
	var wg sync.WaitGroup
	for i, n := range nodes {
		before := n.session.Gen
		wg.Go(func() {
			if err := n.dial(i % 2); err != nil || n.session.Gen <= before {
				t.Errorf("%s: %d after %d, %v", n.name, n.session.Gen, before, err)
			}
		})
	}
	wg.Wait()
	back := time.Since(began)
	for len(lost) > 0 {
		verb, n := c.notice(ctl)
		if verb == subjects.Closed && lost[n.NodeId] == n.Generation {
			if n.Reason != reasonServerLost {
				t.Errorf("closed as %q", n.Reason)
			}
			delete(lost, n.NodeId)
		}
	}
	// A revocation at one broker closes at the other, also now (B8).
	for _, n := range nodes {
		if n.at == 0 {
			began := time.Now()
			if err := c.members[1].b.Revoke(t.Context(), "edge1", "node", n.name); err != nil {
				t.Fatal(err)
			}
			c.wait("the close of a revoked node at the other broker", n.closed)
			t.Logf("revoked at the other broker: closed after %v", time.Since(began))
			break
		}
	}
	t.Logf("killed: all back after %v, Edge had read of all after %v", back, time.Since(began))
}

const helperCluster = "IOP_TEST_CLUSTER_DIR"

// TestHelperClusterBroker is not a test: it is the third broker in a process of
// its own, which TestClusterKilledBroker kills.
func TestHelperClusterBroker(t *testing.T) {
	dir := os.Getenv(helperCluster)
	if dir == "" {
		return
	}
	f := &fixture{t: t, dir: dir, cfg: fileConfig(dir)}
	f.cfg.Name, f.cfg.Listen, f.cfg.StoreDir = "b3", os.Getenv("IOP_TEST_LISTEN"), filepath.Join(dir, "js3")
	f.cfg.Cluster = &configs.Cluster{Listen: os.Getenv("IOP_TEST_CLUSTER"), Routes: strings.Split(os.Getenv("IOP_TEST_ROUTES"), ",")}
	f.start()
	fmt.Println("ready")
	<-f.done // for ever: it is killed
}

// Generations only rise, whichever broker restarts, and wherever a Node dials.
// Contract: G1 Y2
func TestClusterGenerationsRise(t *testing.T) {
	c := newCluster(t)
	nodes := c.nodes(1)
	c.start()
	var last uint64
	for round := range 5 {
		victim := rand.IntN(3)
		c.members[victim].stop()
		for i := range 3 {
			if err := nodes[0].dial(victim + i); err != nil {
				t.Fatal(err)
			}
			if s := nodes[0].session; s.Gen <= last {
				t.Fatalf("round %d: generation %d after %d", round, s.Gen, last)
			}
			last = nodes[0].session.Gen
			defer nodes[0].nc.Close()
		}
		c.members[victim].start()
	}
}

// Two of three admit; one alone refuses, Node and Edge alike, and says whom and
// why; with the second back it goes on by itself.
// Contract: Y2 B9 G1
func TestClusterQuorum(t *testing.T) {
	c := newCluster(t)
	nodes, edgeKey := c.nodes(3), c.member("edge1", "edge", "e1")
	c.start()
	c.connectAll(nodes[:1], func(int) int { return 0 })
	c.members[2].stop()
	if err := nodes[1].dial(0); err != nil {
		t.Fatalf("with two of three: %v", err)
	}
	defer nodes[1].nc.Close()
	mark := c.members[0].logs.mark()
	c.members[1].stop()
	c.members[0].logs.wait(t, mark, map[string]string{"msg": eventWaiting})
	if err := c.members[0].b.Healthy(); !errors.Is(err, errNoQuorum) {
		t.Errorf("healthy: %v", err)
	}
	if user := c.whoami(nodes[0].nc); user != nodes[0].session.String() {
		t.Errorf("the session that stood is %q", user)
	}
	m := c.members[0]
	d := m.dialer("edge1", "node", "n2", nodes[2].key)
	mark = m.logs.mark()
	if nc, err := d.dial(); !errors.Is(err, nats.ErrAuthorization) {
		if err == nil {
			nc.Close()
		}
		t.Errorf("one of three answers a node: %v", err)
	}
	m.logs.wait(t, mark, map[string]string{"msg": eventRefused, "reason": string(refusedUnavailable), "edge": "edge1", "role": "node", "name": "n2"})
	mark = m.logs.mark()
	c.members[1].start()
	m.logs.wait(t, mark, map[string]string{"msg": eventResumed})
	if err := nodes[2].dial(0); err != nil || nodes[2].session.Gen <= nodes[1].session.Gen {
		t.Errorf("with two again: generation %d after %d, %v", nodes[2].session.Gen, nodes[1].session.Gen, err)
	} else {
		nodes[2].nc.Close()
	}

	// One that starts alone serves TLS, refuses, says why, and goes on by itself.
	c.members[0].stop()
	c.members[1].stop()
	m.launch()
	m.logs.wait(t, 0, map[string]string{"msg": eventWaiting})
	if err := m.b.Healthy(); !errors.Is(err, errNoQuorum) {
		t.Errorf("healthy: %v", err)
	}
	d = m.dialer("edge1", "node", "n2", nodes[2].key)
	d.url = "tls://" + m.cfg.Listen
	if nc, err := d.dial(); !errors.Is(err, nats.ErrAuthorization) {
		if err == nil {
			nc.Close()
		}
		t.Errorf("dial: %v", err)
	}
	if m.refused(refusedUnavailable) == 0 {
		t.Error("not counted")
	}
	d = m.dialer("edge1", "edge", "e1", edgeKey)
	d.url = "tls://" + m.cfg.Listen
	mark = m.logs.mark()
	if nc, err := d.dial(); !errors.Is(err, nats.ErrAuthorization) {
		if err == nil {
			nc.Close()
		}
		t.Errorf("one of three answers an Edge: %v", err)
	}
	m.logs.wait(t, mark, map[string]string{"msg": eventRefused, "reason": string(refusedUnavailable), "edge": "edge1", "role": "edge", "name": "e1"})
	c.members[2].start()
	m.served()
	if err := m.b.Healthy(); err != nil {
		t.Errorf("healthy: %v", err)
	}
}

// A newer session at another broker is told to Edge once, and the older one, at
// its own broker, is told and closed.
// Contract: B6 Y2
func TestClusterSupersedes(t *testing.T) {
	c := newCluster(t)
	nodes := c.nodes(1)
	c.start()
	n := nodes[0]
	ctl := c.subscribe(c.members[2].edge("edge1"), subjects.CtlWildcard("edge1"))
	var last uint64
	for round := range 9 {
		old, closed := n.nc, n.closed
		var fences <-chan *nats.Msg
		if old != nil {
			fences = c.fences(old, n.session)
		}
		if err := n.dial(round); err != nil {
			t.Fatal(err)
		}
		defer n.nc.Close()
		want := map[string]bool{fmt.Sprint(subjects.Admitted, n.session.Gen): true}
		if old != nil {
			c.wait("the close of the older session", closed)
			if reason := c.fenced(fences); reason != reasonSuperseded {
				t.Errorf("fenced as %q", reason)
			}
			want[fmt.Sprint(subjects.Closed, last)] = true
		}
		for len(want) > 0 { // two brokers say so, each in its own time
			verb, notice := c.notice(ctl)
			if said := fmt.Sprint(verb, notice.Generation); !want[said] || verb == subjects.Closed && notice.Reason != "kicked" {
				t.Fatalf("round %d: %s %v, want %v", round, verb, notice, want)
			} else {
				delete(want, said)
			}
		}
		last = n.session.Gen
	}
	if pending, _, err := ctl.Pending(); err != nil || pending != 0 {
		t.Errorf("%d notices too many, %v", pending, err)
	}
}

// Many instances of one name, at all three brokers at once: one is let in.
// Contract: B12 Y2
func TestClusterDuplicates(t *testing.T) {
	c := newCluster(t)
	key := c.member("edge1", "node", "n1")
	c.start()
	for round := range 5 {
		users := make(chan string, 12)
		conns := make(chan *nats.Conn, cap(users))
		var wg sync.WaitGroup
		for i := range cap(users) {
			d := c.members[i%3].dialer("edge1", "node", "n1", key)
			wg.Go(func() {
				nc, err := d.dial()
				if err != nil {
					t.Error(err)
					return
				}
				conns <- nc
				users <- c.firstWord(d, nc)
			})
		}
		wg.Wait()
		close(users)
		close(conns)
		count := map[string]int{}
		for user := range users {
			count[user]++
		}
		if count["edge1"] != 1 || count["!denied"] != cap(conns)-1 {
			t.Errorf("round %d: users %v", round, count)
		}
		var closed sync.WaitGroup
		for nc := range conns {
			closed.Go(nc.Close)
		}
		closed.Wait()
		// All three must have heard that the name is free.
		for _, m := range c.members {
			for {
				d := m.dialer("edge1", "node", "n1", key)
				nc, user := c.connect(d)
				nc.Close()
				if strings.HasPrefix(user, "edge1.") {
					break
				}
			}
		}
	}
}

// Nobody but a broker makes a route, from either end.
// Contract: Y2 B2
func TestRouteIsForBrokersOnly(t *testing.T) {
	c := newCluster(t).start()
	both := []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth}
	certificate := func(ca *testCA, uris ...string) tls.Certificate {
		chain, key := ca.issueRaw(both, uris...)
		return tls.Certificate{Certificate: chain, PrivateKey: key}
	}
	m := c.members[0]
	greeted := func(cert tls.Certificate) bool {
		conn, err := tls.Dial("tcp", m.cfg.Cluster.Listen, &tls.Config{
			MinVersion: tls.VersionTLS13, RootCAs: c.ca.pool(), Certificates: []tls.Certificate{cert},
			GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &cert, nil },
		})
		if err != nil {
			return false
		}
		defer conn.Close()
		conn.SetDeadline(time.Now().Add(guard))
		line, err := bufio.NewReader(conn).ReadString('\n')
		return err == nil && strings.HasPrefix(line, "INFO")
	}
	if !greeted(certificate(c.ca, "spiffe://iop/-/broker/b9")) {
		t.Error("a broker is not let in")
	}
	for name, cert := range map[string]tls.Certificate{
		"node":           certificate(c.ca, "spiffe://iop/edge1/node/n1"),
		"edge":           certificate(c.ca, "spiffe://iop/edge1/edge/e1"),
		"leaf":           certificate(c.ca, "spiffe://iop/edge1/leaf/l1"),
		"service":        certificate(c.ca, "spiffe://iop/-/service/s1"),
		"foreign CA":     certificate(newTestCA(), "spiffe://iop/-/broker/b1"),
		"foreign domain": certificate(c.ca, "spiffe://other/-/broker/b1"),
		"no certificate": {},
	} {
		if greeted(cert) {
			t.Errorf("%s: let in", name)
		}
		// The other end: we dialled it.
		cs := tls.ConnectionState{}
		for _, der := range cert.Certificate {
			cs.PeerCertificates = append(cs.PeerCertificates, must(x509.ParseCertificate(der)))
		}
		if err := m.b.checkRoute(cs, true); err == nil {
			t.Errorf("%s: dialled and taken", name)
		}
	}
	if m.refused(refusedRoute) == 0 {
		t.Error("not counted")
	}
}

// A second broker of a name ends and says why; the first goes on, and so does the
// cluster.
// Contract: Y2 G1
func TestClusterNameTaken(t *testing.T) {
	c := newCluster(t)
	nodes := c.nodes(2)
	c.start().members[2].stop()
	c.connectAll(nodes[:1], func(int) int { return 0 })
	second, own := c.members[2], c.members[2].cfg
	second.cfg.Name, second.cfg.StoreDir = "b1", filepath.Join(c.dir, "copy")
	second.launch()
	second.cancel = nil // it ends by itself
	select {
	case err := <-second.done:
		if err == nil || !strings.Contains(err.Error(), `called "b1" too`) {
			t.Errorf("Run: %v", err)
		}
	case <-time.After(guard):
		t.Fatal("the second of the name goes on")
	}
	second.logs.wait(t, 0, map[string]string{"msg": eventName})
	if user := c.whoami(nodes[0].nc); user != nodes[0].session.String() {
		t.Errorf("the session at the first is %q", user)
	}
	for i := range 2 {
		if err := c.members[i].b.Healthy(); err != nil {
			t.Errorf("b%d: healthy: %v", i+1, err)
		}
	}
	if err := nodes[1].dial(0); err != nil || nodes[1].session.Gen <= nodes[0].session.Gen {
		t.Fatalf("generation %d after %d, %v", nodes[1].session.Gen, nodes[0].session.Gen, err)
	}
	defer nodes[1].nc.Close()
	second.cfg = own // as it should be
	second.launch().served()
}

// Who has no certificate of a broker of ours for the route joins nothing: a
// broker with another CA's is refused, counted and told of in the log, and one
// with a Node's does not even start. The rest is unharmed.
// Contract: Y2 B2
func TestClusterKeepsStrangersOut(t *testing.T) {
	c := newCluster(t)
	nodes := c.nodes(2)
	c.start().members[2].stop()
	c.connectAll(nodes[:1], func(int) int { return 0 })

	foreign, in := newTestCA(), func(name string) string { return filepath.Join(c.dir, name) }
	foreign.write(in("foreign-ca.pem"))
	if err := foreign.issue(bothUses, "spiffe://iop/-/broker/b3").Save(in("foreign.pem"), in("foreign.key")); err != nil {
		t.Fatal(err)
	}
	if err := c.ca.issue(bothUses, "spiffe://iop/edge1/node/n1").Save(in("node.pem"), in("node.key")); err != nil {
		t.Fatal(err)
	}
	stranger := c.members[2]
	stranger.cfg.Cluster.TLS = configs.TLS{Certificate: in("node.pem"), Key: in("node.key"), CA: in("ca.pem")}
	if _, err := New(stranger.cfg, Deps{}); err == nil || !strings.Contains(err.Error(), "is not a broker's") {
		t.Errorf("a node's certificate for the route: %v", err)
	}
	stranger.cfg.Cluster.TLS = configs.TLS{Certificate: in("foreign.pem"), Key: in("foreign.key"), CA: in("foreign-ca.pem")}
	mark := c.members[0].logs.mark()
	stranger.launch()
	c.members[0].logs.wait(t, mark, map[string]string{"msg": eventRefused, "reason": string(refusedRoute)})
	stranger.logs.wait(t, 0, map[string]string{"msg": eventWaiting})
	if err := stranger.b.Healthy(); err == nil {
		t.Error("the stranger is healthy")
	}
	if user := c.whoami(nodes[0].nc); user != nodes[0].session.String() {
		t.Errorf("the session that stood is %q", user)
	}
	if err := nodes[1].dial(0); err != nil {
		t.Fatalf("beside the stranger: %v", err)
	}
	defer nodes[1].nc.Close()
	if routes := must(c.members[0].b.server.Routez(nil)); slices.ContainsFunc(routes.Routes, func(r *server.RouteInfo) bool { return r.RemoteName == "b3" }) {
		t.Error("the stranger has a route")
	}
	if c.members[0].refused(refusedRoute) == 0 {
		t.Error("not counted")
	}
}

// A broker stops within its bound though nobody is left who could answer what
// its Nodes ask it: two of three are gone.
// Contract: Y2
func TestClusterLastOneStops(t *testing.T) {
	c := newCluster(t)
	nodes := c.nodes(2 * calloutWorkers)
	c.start()
	last := c.members[0]
	c.members[1].stop()
	c.members[2].stop()
	mark := last.logs.mark()
	last.logs.wait(t, mark, map[string]string{"msg": eventWaiting})
	var wg sync.WaitGroup
	for _, n := range nodes {
		d := last.dialer("edge1", "node", n.name, n.key)
		wg.Go(func() {
			if nc, err := d.dial(); err == nil { // to be told that the broker stops
				nc.Close()
			}
		})
	}
	for from := mark; len(last.logs.seen(eventRefused)) < calloutWorkers; from = last.logs.mark() { // the others are being decided on
		last.logs.wait(t, from, map[string]string{"msg": eventRefused})
	}
	began := time.Now()
	last.stop()
	took := time.Since(began)
	wg.Wait()
	t.Logf("stopped in %v", took)
	if took >= operationBound-time.Second {
		t.Errorf("stopped in %v: it waited for stores that nobody leads", took)
	}
	if i := slices.IndexFunc(last.logs.lines()[mark:], func(l map[string]string) bool { return l["msg"] == eventAdmitted }); i >= 0 {
		t.Errorf("admitted: %v", last.logs.lines()[mark+i])
	}
}

// Two brokers with one copy of each store are ready, too.
func TestClusterOfTwo(t *testing.T) {
	c := newCluster(t)
	c.members = c.members[:2]
	nodes := c.nodes(1)
	for _, m := range c.members {
		m.cfg.Cluster.Routes = m.cfg.Cluster.Routes[:2]
	}
	c.start()
	if err := nodes[0].dial(0); err != nil {
		t.Fatal(err)
	}
	nodes[0].nc.Close()
}

// One of three that lost its store gets it from the others before it is ready,
// and makes none anew.
// Contract: G1 Y2 B9
func TestClusterStoreLost(t *testing.T) {
	c := newCluster(t)
	nodes := c.nodes(2)
	c.start()
	c.connectAll(nodes[:1], func(int) int { return 0 })
	last := nodes[0].session.Gen
	c.members[0].stop()
	if err := os.RemoveAll(c.members[0].cfg.StoreDir); err != nil {
		t.Fatal(err)
	}
	c.members[0].start()
	for account, groups := range *c.members[0].b.server.Raftz(&server.RaftzOptions{}) {
		for name, g := range groups {
			if g.Size > 1 && (g.Leader == "" || g.CatchingUp) {
				t.Errorf("ready without its copy of %s %s", account, name)
			}
		}
	}
	c.members[1].stop()
	if err := nodes[1].dial(0); err != nil || nodes[1].session.Gen <= last {
		t.Fatalf("generation %d after %d, %v", nodes[1].session.Gen, last, err)
	}
	defer nodes[1].nc.Close()
	if made := c.members[0].logs.seen(eventStoreMade); len(made) > 0 {
		t.Errorf("made anew: %v", made)
	}
}

// A broker alone that lost its store says that it made a new one, and gives no
// generation twice.
// Contract: G1
func TestStoreLost(t *testing.T) {
	f := newFixture(t)
	key := f.member("edge1", "node", "n1")
	f.start()
	f.logs.wait(t, 0, map[string]string{"msg": eventStoreMade, "bucket": bucketGenerations})
	var last uint64
	for range 3 {
		nc, s := f.node(f.instance("0123456789abcdef", "edge1", "node", "n1", key))
		last = s.Gen
		nc.Close()
	}
	f.stop()
	if err := os.RemoveAll(f.cfg.StoreDir); err != nil {
		t.Fatal(err)
	}
	f.start()
	f.logs.wait(t, 0, map[string]string{"msg": eventStoreMade, "bucket": bucketGenerations})
	if _, s := f.node(f.dialer("edge1", "node", "n1", key)); s.Gen <= last {
		t.Errorf("generation %d after %d", s.Gen, last)
	}
	f.stop()
	f.start()
	if made := f.logs.seen(eventStoreMade); len(made) > 0 {
		t.Errorf("made anew what was there: %v", made)
	}
}

// A store belongs to one broker at a time, and a broker's own store to no cluster.
func TestStoreIsForOne(t *testing.T) {
	f := newFixture(t).start()
	other := f.cfg
	if err := must(New(other, Deps{})).Run(t.Context()); !errors.Is(err, ErrLocked) || !strings.Contains(err.Error(), f.cfg.StoreDir) {
		t.Errorf("second broker: %v", err)
	}
	f.stop()
	f.start()
	f.stop()
	ports := freePorts(t, 1)
	other.Cluster = &configs.Cluster{Listen: ports[0], Routes: []string{"tls://" + ports[0], "tls://127.0.0.1:1", "tls://127.0.0.1:2"}}
	if _, err := New(other, Deps{}); err == nil || !strings.Contains(err.Error(), "without a cluster") {
		t.Errorf("a lonely store in a cluster: %v", err)
	}
}

func (c *cluster) urls() (urls []string) {
	for _, m := range c.members {
		urls = append(urls, "tls://"+m.cfg.Listen)
	}
	return urls
}

// dialBus dials as the product does, with all three addresses.
func (c *cluster) dialBus(role, name, instance string, key *identity.NKey, reconnect bool) (*natsbus.Conn, error) {
	connection := instance + wire.NewToken()
	inbox := subjects.NodeInbox("edge1", name, connection)
	if role == "edge" {
		inbox = subjects.EdgeInbox("edge1")
	}
	return natsbus.Dial(c.t.Context(), natsbus.Options{
		URLs: c.urls(), Name: connection, Inbox: inbox, Reconnect: reconnect,
		TLS: &tls.Config{
			RootCAs: c.ca.pool(), MinVersion: tls.VersionTLS13,
			Certificates: []tls.Certificate{c.ca.client("spiffe://iop/edge1/" + role + "/" + name)},
		},
		NKeyPublic: key.Public(), Sign: key.Sign,
	})
}

// An Edge of its own process comes back through another broker when its own is
// gone, with what it had subscribed; a second process of its name stays out. A
// Node with three addresses gets in whichever broker is gone.
// Contract: Y2 B12
func TestClusterEdgeAndNodeFailOver(t *testing.T) {
	c := newCluster(t)
	edgeKey, nodeKey := c.member("edge1", "edge", "e1"), c.member("edge1", "node", "n1")
	c.start()
	edge, err := c.dialBus("edge", "e1", wire.NewToken(), edgeKey, true)
	if err != nil {
		t.Fatal(err)
	}
	defer edge.Close()
	notices := make(chan string, 64)
	if _, err := edge.Subscribe(subjects.CtlWildcard("edge1"), func(m bus.Msg) { notices <- m.Subject }); err != nil {
		t.Fatal(err)
	}
	for _, m := range c.members {
		d := m.dialer("edge1", "edge", "e1", edgeKey)
		if _, user := m.connect(d); !strings.HasPrefix(user, "!denied.duplicate.") {
			t.Errorf("another process of the Edge at %s: %q", m.cfg.Name, user)
		}
	}
	instance := wire.NewToken()
	for victim, m := range c.members {
		there := m.connected("edge1._edge.e1")
		began := time.Now()
		m.stop()
		if there {
			select {
			case <-edge.Reconnected():
				t.Logf("the Edge was back after %v", time.Since(began))
			case <-time.After(guard):
				t.Fatal("the Edge did not come back")
			}
		}
		node, err := c.dialBus("node", "n1", instance, nodeKey, false)
		if err != nil {
			t.Fatalf("without b%d: %v", victim+1, err)
		}
		select {
		case subject := <-notices:
			if subject != subjects.Ctl("edge1", subjects.Admitted) {
				t.Errorf("notice %s", subject)
			}
		case <-time.After(guard):
			t.Fatal("the Edge hears nothing")
		}
		node.Close()
		select {
		case subject := <-notices:
			if subject != subjects.Ctl("edge1", subjects.Closed) {
				t.Errorf("notice %s", subject)
			}
		case <-time.After(guard):
			t.Fatal("the Edge does not hear of the end")
		}
		m.start()
	}
}

// connected reports whether a user's connection is at this broker.
func (f *fixture) connected(user string) bool {
	connz := must(f.b.server.Connz(&server.ConnzOptions{Username: true}))
	return slices.ContainsFunc(connz.Conns, func(c *server.ConnInfo) bool { return c.AuthorizedUser == user })
}
