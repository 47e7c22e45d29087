package broker

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/identity"
	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/wire"
	"github.com/iop-fabric/iop/wire/iopv1"
)

// notice reads the next notice to an Edge.
func (f *fixture) notice(sub *nats.Subscription) (subjects.Verb, *iopv1.SessionNotice) {
	f.t.Helper()
	m := f.next(sub)
	_, verb, err := subjects.ParseCtl(m.Subject)
	if err != nil {
		f.t.Fatal(err)
	}
	var n iopv1.SessionNotice
	if err := n.UnmarshalVT(m.Data); err != nil {
		f.t.Fatal(err)
	}
	return verb, &n
}

// Edge hears of a newer session first; the older one reads why it ends before
// it is closed; then Edge hears that it is.
// Contract: B6 B7
func TestSupersededIsToldBeforeTheClose(t *testing.T) {
	f := newFixture(t)
	key := f.member("edge1", "node", "n1")
	f.start()
	ctl := f.subscribe(f.edge("edge1"), subjects.CtlWildcard("edge1"))
	instance := wire.NewToken()
	var last uint64
	var old *dialer
	var oldFences <-chan *nats.Msg
	for round := range 20 {
		d := f.instance(instance, "edge1", "node", "n1", key)
		nc, s := f.node(d)
		if s.Gen <= last {
			t.Fatalf("generation %d after %d", s.Gen, last)
		}
		verb, n := f.notice(ctl)
		if verb != subjects.Admitted || n.NodeId != "n1" || n.Generation != s.Gen || n.InstanceId != instance {
			t.Fatalf("round %d: notice %s %v, want admitted of %d", round, verb, n, s.Gen)
		}
		if old != nil {
			f.wait("the close of the older session", old.closed)
			if reason := f.fenced(oldFences); reason != "superseded" {
				t.Fatalf("fenced as %q", reason)
			}
			if verb, n := f.notice(ctl); verb != subjects.Closed || n.Generation != last || n.Reason != "kicked" {
				t.Fatalf("notice %s %v, want closed of %d", verb, n, last)
			}
		}
		last, old = s.Gen, d
		oldFences = f.fences(nc, s)
	}
}

// A second instance is refused while the first lives, is told since when, and
// takes over once the first has been silent for the bound.
// Contract: B12
func TestDuplicateIsRefusedUntilTheFirstIsSilent(t *testing.T) {
	f := newFixture(t)
	key := f.member("edge1", "node", "n1")
	f.start()
	begun := time.Now().Unix()
	d := f.dialer("edge1", "node", "n1", key)
	first, s := f.node(d)
	fences := f.fences(first, s)
	grants := f.subscribe(first, s.Down(subjects.SessionVerb, ""))

	second := wire.NewToken()
	user := func() string {
		nc, user := f.connect(f.instance(second, "edge1", "node", "n1", key))
		nc.Close()
		return user
	}
	refused := func(when string) {
		t.Helper()
		got := user()
		var since int64
		if _, err := fmt.Sscanf(got, "!denied.duplicate.%d", &since); err != nil || since < begun {
			t.Fatalf("%s: user %q", when, got)
		}
	}
	refused("at once")
	f.offset.Add(int64(f.cfg.HeartbeatBound) - int64(time.Second/2))
	// Heartbeats keep it alive. Each is followed by a question that the same loop
	// answers, so that they are surely heard before the next dial.
	for range 5 {
		if err := errors.Join(first.Publish(s.Up(subjects.Heartbeat, ""), nil), first.Publish(s.Up(subjects.SessionVerb, ""), nil)); err != nil {
			t.Fatal(err)
		}
		f.next(grants)
		f.offset.Add(int64(tokenPace)) // no session is heard more often
	}
	f.offset.Add(int64(f.cfg.HeartbeatBound) - int64(time.Second))
	refused("heard lately")

	f.offset.Add(int64(2 * time.Second))
	if got := user(); !strings.HasPrefix(got, "edge1.n1.") {
		t.Fatalf("after the bound: user %q", got)
	}
	f.wait("the close of the silent one", d.closed)
	if reason := f.fenced(fences); reason != "superseded" {
		t.Errorf("fenced as %q", reason)
	}
}

// A revoked member is fenced and closed and stays out; registered anew it is back.
// Contract: B8 B9
func TestRevokeClosesAndRefuses(t *testing.T) {
	f := newFixture(t)
	key, edgeKey := f.member("edge1", "node", "n1"), f.member("edge1", "edge", "e1")
	f.start()
	ctx := t.Context()
	d := f.dialer("edge1", "node", "n1", key)
	nc, s := f.node(d)
	fences := f.fences(nc, s)
	peer := f.dialer("edge1", "edge", "e1", edgeKey)
	peer.inbox = subjects.EdgeInbox("edge1")
	f.connect(peer)

	if err := errors.Join(f.b.Revoke(ctx, "edge1", "node", "n1"), f.b.Revoke(ctx, "edge1", "edge", "e1")); err != nil {
		t.Fatal(err)
	}
	f.wait("the close of the revoked node", d.closed)
	if reason := f.fenced(fences); reason != "revoked" {
		t.Errorf("fenced as %q", reason)
	}
	f.wait("the close of the revoked edge", peer.closed)
	if _, user := f.connect(f.dialer("edge1", "node", "n1", key)); user != "!denied.revoked" {
		t.Errorf("user %q", user)
	}
	if err := f.b.Revoke(ctx, "edge1", "node", "nobody"); !errors.Is(err, ErrUnknownMember) {
		t.Errorf("revoke of a stranger: %v", err)
	}

	fresh := must(identity.NewUserKey())
	if err := f.b.Register(ctx, configs.Member{Edge: "edge1", Role: "node", Name: "n1", NKey: fresh.Public()}); err != nil {
		t.Fatal(err)
	}
	f.node(f.dialer("edge1", "node", "n1", fresh))
	if _, err := f.dialer("edge1", "node", "n1", key).dial(); !errors.Is(err, nats.ErrAuthorization) {
		t.Errorf("the revoked nkey: %v", err)
	}
}

// During a rotation both nkeys serve; the third registration retires the first.
// Contract: B8
func TestTwoNKeysServeDuringARotation(t *testing.T) {
	f := newFixture(t)
	a := f.member("edge1", "node", "n1")
	f.start()
	b, c := must(identity.NewUserKey()), must(identity.NewUserKey())
	instance := wire.NewToken()
	register := func(k *identity.NKey) {
		t.Helper()
		if err := f.b.Register(t.Context(), configs.Member{Edge: "edge1", Role: "node", Name: "n1", NKey: k.Public()}); err != nil {
			t.Fatal(err)
		}
	}
	register(b)
	f.node(f.instance(instance, "edge1", "node", "n1", a))
	f.node(f.instance(instance, "edge1", "node", "n1", b))
	register(c)
	f.node(f.instance(instance, "edge1", "node", "n1", c))
	if _, err := f.instance(instance, "edge1", "node", "n1", a).dial(); !errors.Is(err, nats.ErrAuthorization) {
		t.Errorf("the first nkey: %v", err)
	}
	list, err := f.b.Members(t.Context())
	if err != nil || len(list) != 2 || list[0].NKey != c.Public() {
		t.Errorf("members %v: %v", list, err)
	}
}

// What was learnt at run time outlives a restart with the same file; a changed
// file wins.
// Contract: B9
func TestSeedsAndRestart(t *testing.T) {
	f := newFixture(t)
	key := f.member("edge1", "node", "n1")
	f.start()
	f.node(f.dialer("edge1", "node", "n1", key))
	if err := f.b.Revoke(t.Context(), "edge1", "node", "n1"); err != nil {
		t.Fatal(err)
	}
	f.stop()

	f.start()
	if _, user := f.connect(f.dialer("edge1", "node", "n1", key)); user != "!denied.revoked" {
		t.Errorf("after a restart: user %q", user)
	}
	f.stop()

	fresh := must(identity.NewUserKey())
	f.cfg.Members[0].NKey = fresh.Public()
	f.start()
	f.node(f.dialer("edge1", "node", "n1", fresh))
	f.stop()

	f.cfg.Members[0].Revoked = true
	f.start()
	if _, user := f.connect(f.dialer("edge1", "node", "n1", fresh)); user != "!denied.revoked" {
		t.Errorf("revoked in the file: user %q", user)
	}
}

// The token names the session of the subject and the nkey of its admission, is
// signed by the issuer, and is refused to a superseded session.
// Contract: G2 G3
func TestSessionToken(t *testing.T) {
	f := newFixture(t)
	key := f.member("edge1", "node", "n1")
	f.start()
	nc, s := f.node(f.dialer("edge1", "node", "n1", key))
	sub := f.subscribe(nc, s.Down(subjects.SessionVerb, ""))
	ask := func() *iopv1.SessionGrant {
		t.Helper()
		if err := nc.Publish(s.Up(subjects.SessionVerb, ""), nil); err != nil {
			t.Fatal(err)
		}
		var g iopv1.SessionGrant
		if err := g.UnmarshalVT(f.next(sub).Data); err != nil {
			t.Fatal(err)
		}
		return &g
	}
	g := ask()
	claims, err := identity.VerifyToken(f.b.keys.issuer.Public(), g.Token)
	want := identity.SessionClaims{Edge: "edge1", Node: "n1", Gen: s.Gen, NKey: key.Public()}
	if err != nil || claims != want {
		t.Errorf("claims %+v: %v", claims, err)
	}
	// A newer generation elsewhere: this session's token is history.
	gens := f.gives()
	if _, err := gens.Next(t.Context(), "edge1", "n1", admission{}, s.Gen); err != nil {
		t.Fatal(err)
	}
	f.offset.Add(int64(tokenPace))
	if g := ask(); len(g.Token) != 0 || g.Reason != "superseded" || g.ErrorClass != string(wire.SessionEnded) {
		t.Errorf("grant %v", g)
	}
}

// A killed Node's end is told at once, and to its own Edge alone.
// Contract: B7
func TestClosedIsTold(t *testing.T) {
	f := newFixture(t)
	key := f.member("edge1", "node", "n1")
	f.start()
	ctl := f.subscribe(f.edge("edge1"), subjects.CtlWildcard("edge1"))
	other := f.subscribe(f.edge("edge2"), subjects.CtlWildcard("edge2"))
	nc, s := f.node(f.dialer("edge1", "node", "n1", key))
	f.notice(ctl)
	nc.Close()
	if verb, n := f.notice(ctl); verb != subjects.Closed || n.NodeId != "n1" || n.Generation != s.Gen || n.Reason != "client_closed" {
		t.Errorf("notice %s %v", verb, n)
	}
	if n, _, err := other.Pending(); err != nil || n != 0 {
		t.Errorf("the other Edge was told: %d, %v", n, err)
	}
}

// A herd of dials is let in whole, each under a generation of its own. BROKER_HERD
// makes it larger (make herd: 1,000).
// Contract: B4 G1
func TestHerd(t *testing.T) {
	f := newFixture(t)
	herd := 200
	if n, err := strconv.Atoi(os.Getenv("BROKER_HERD")); err == nil && n > 0 {
		herd = n
	}
	dialers := make([]*dialer, herd)
	keys := make([]*identity.NKey, herd)
	for i := range herd {
		keys[i] = f.member("edge1", "node", fmt.Sprintf("n%d", i))
	}
	f.start()
	for i := range herd {
		dialers[i] = f.dialer("edge1", "node", fmt.Sprintf("n%d", i), keys[i])
	}
	var mu sync.Mutex
	gens := map[uint64]bool{}
	began, cpu := time.Now(), cpuTime()
	var again atomic.Int64
	var wg sync.WaitGroup
	for _, d := range dialers {
		wg.Go(func() {
			// On a machine too busy to shake so many hands in time a dial may fail, or
			// its callout come too late; the Node dials again, and none may be lost for
			// good.
			nc, err := d.dial()
			for tries := 1; err != nil && tries < 5; tries++ {
				again.Add(1)
				d.closed = make(chan struct{})
				nc, err = d.dial()
			}
			if err != nil {
				t.Errorf("dial: %v", err)
				return
			}
			defer nc.Close()
			s, err := subjects.ParseSession(f.whoami(nc))
			if err != nil {
				t.Error(err)
			}
			mu.Lock()
			defer mu.Unlock()
			gens[s.Gen] = true
		})
	}
	wg.Wait()
	t.Logf("%d at once: all in after %v, %v of CPU with the dialling side, %d dials twice",
		herd, time.Since(began).Round(time.Millisecond), (cpuTime() - cpu).Round(time.Millisecond), again.Load())
	if len(gens) != herd {
		t.Errorf("%d different generations of %d", len(gens), herd)
	}
}

// Many instances of one name at once: one is let in, the others are told.
// Contract: B12
func TestDuplicatesAtOnce(t *testing.T) {
	f := newFixture(t)
	key := f.member("edge1", "node", "n1")
	f.start()
	var mu sync.Mutex
	users := map[string]int{}
	var wg sync.WaitGroup
	conns := make(chan *nats.Conn, 16)
	for range cap(conns) {
		d := f.dialer("edge1", "node", "n1", key)
		wg.Go(func() {
			nc, err := d.dial()
			if err != nil {
				t.Error(err)
				return
			}
			conns <- nc // open until all have dialled
			user := f.firstWord(d, nc)
			mu.Lock()
			defer mu.Unlock()
			users[user]++
		})
	}
	wg.Wait()
	close(conns)
	for nc := range conns {
		nc.Close()
	}
	if users["edge1"] != 1 || users["!denied"] != 15 {
		t.Errorf("users %v", users)
	}
}
