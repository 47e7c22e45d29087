package node

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/iop-fabric/iop/agent"
	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/bus"
	"github.com/iop-fabric/iop/internal/identity"
	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/wire/iopv1"
)

// The Node proves itself with the token, asks for ready only after its
// configuration runs, and takes work from then on.
//
// Contract: R2 R3 G2 G3 L8 M5
func TestHandshake(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, options{}).ready()
		defer r.finish()
		r.edge.with(func() {
			if want := []string{"session", "register", "ready"}; !slices.Equal(r.edge.log, want) {
				t.Errorf("the node sent %v, not %v", r.edge.log, want)
			}
			if q := r.edge.request; q.GetProtocolMin() != 1 || q.GetProtocolMax() != 1 || q.GetNodeId() != testNode {
				t.Errorf("registered with %v", q)
			}
		})
		if r.makes["a"] != 1 {
			t.Errorf("adapter made %d times", r.makes["a"])
		}
		_, a := r.edge.open(nil)
		<-a.ended
		r.edge.wantClass(a, "END")
	})
}

// Trap 4 on the Node: the acknowledgement of ready and the first dispatch may
// come in either order, and no work is taken before ready was asked for.
//
// Contract: R6
func TestTrap04WorkBeforeTheAcknowledgement(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, options{})
		r.edge.silent = map[subjects.Verb]int{subjects.Register: 1, subjects.Ready: 1}
		r.start()
		defer r.finish()
		synctest.Wait()
		r.wantState("registering")
		_, early := r.edge.open(nil)
		synctest.Wait()
		if got := r.edge.got(early); len(got) != 0 {
			t.Errorf("work was taken before ready was asked for: %s", describe(got))
		}
		pass(time.Second) // register goes out again
		r.wantState("awaiting_ready")
		_, a := r.edge.open(nil)
		synctest.Wait()
		r.edge.wantClass(a, "END")
		pass(time.Second)
		r.wantState("ready")
	})
}

// Requests that were lost go out again, the same bytes; answers that come twice
// change nothing.
//
// Contract: R1
func TestRepeatedRequests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, options{})
		r.edge.silent = map[subjects.Verb]int{subjects.SessionVerb: 2, subjects.Register: 1, subjects.Ready: 3}
		var proofs []string
		r.bus.Tap("iop.v1.*.*.*.up.register", func(m bus.Msg) { proofs = append(proofs, string(m.Data)) })
		r.start()
		defer r.finish()
		pass(6500 * time.Millisecond)
		r.wantState("ready")
		if len(proofs) != 2 || proofs[0] != proofs[1] {
			t.Errorf("%d proofs, or not the same", len(proofs))
		}
		r.edge.with(func() {
			for range 2 {
				r.edge.send(r.session(), subjects.Ready, "", &iopv1.NodeReadyResponse{Ready: true})
				r.edge.send(r.session(), subjects.Register, "", &iopv1.RegisterResponse{Accepted: true, EdgeInstance: "other"})
			}
		})
		synctest.Wait()
		r.wantState("ready")
		if r.dials != 1 {
			t.Errorf("%d dials", r.dials)
		}
	})
}

// Nothing is applied that Edge did not sign over our nonce: the session ends
// and another is tried.
//
// Contract: G3 L8 R3
func TestConfigurationMustBeEdges(t *testing.T) {
	for name, tamper := range map[string]func(r *rig, a *iopv1.RegisterResponse){
		"none":             func(_ *rig, a *iopv1.RegisterResponse) { a.Config = nil },
		"payload changed":  func(_ *rig, a *iopv1.RegisterResponse) { a.Config.Payload = append(a.Config.Payload, 0x18, 7) },
		"signature broken": func(_ *rig, a *iopv1.RegisterResponse) { a.Config.Signature[8] ^= 1 },
		"another nonce": func(r *rig, a *iopv1.RegisterResponse) {
			a.Config, _ = identity.SignConfig(r.edge.cert, a.Config.Payload, identity.NewNonce(), 1)
		},
		"signed by a node": func(r *rig, a *iopv1.RegisterResponse) {
			a.Config, _ = identity.SignConfig(r.node.deps.Identity.Certificate, a.Config.Payload, a.Config.Nonce, 1)
		},
		"another edge": func(r *rig, a *iopv1.RegisterResponse) {
			c, err := r.edge.ca.Issue(identity.ID{TrustDomain: "iop", Edge: "edge2", Role: identity.RoleEdge, Name: "x"}, nil, time.Hour)
			must(r.t, err)
			a.Config, _ = identity.SignConfig(c, a.Config.Payload, a.Config.Nonce, 1)
		},
		"another CA": func(r *rig, a *iopv1.RegisterResponse) {
			ca, err := identity.NewCA("iop", time.Hour)
			must(r.t, err)
			c, err := ca.Issue(identity.ID{TrustDomain: "iop", Edge: testEdge, Role: identity.RoleEdge, Name: "x"}, nil, time.Hour)
			must(r.t, err)
			a.Config, _ = identity.SignConfig(c, a.Config.Payload, a.Config.Nonce, 1)
		},
		"another node":     func(_ *rig, a *iopv1.RegisterResponse) { a.NodeId = "node2" },
		"another protocol": func(_ *rig, a *iopv1.RegisterResponse) { a.Protocol = 2 },
		"nameless edge":    func(_ *rig, a *iopv1.RegisterResponse) { a.EdgeInstance = "" },
		"two of a name": func(r *rig, a *iopv1.RegisterResponse) {
			raw, err := payload("a", "a").MarshalVT()
			must(r.t, err)
			a.Config, _ = identity.SignConfig(r.edge.cert, raw, a.Config.Nonce, 1)
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t, options{})
				r.edge.tamper = func(a *iopv1.RegisterResponse) { tamper(r, a) }
				r.start()
				defer r.finish()
				synctest.Wait()
				r.wantState("waiting")
				if len(r.makes) != 0 || slices.Contains(r.edge.log, "ready") {
					t.Errorf("applied: %v %v", r.makes, r.edge.log)
				}
				r.edge.with(func() { r.edge.tamper = nil })
				pass(10 * time.Second)
				r.wantState("ready")
			})
		})
	}
}

// What cannot be applied whole is not applied at all; what runs already goes on.
// Unchanged adapters are kept over sessions.
//
// Contract: R3 M1
func TestConfigurationWholeOrNotAtAll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, options{config: payload("a", "b")}).ready()
		defer r.finish()
		good := r.provide
		var broken agent.Provider
		r.provide = func(c *iopv1.AdapterConfig) (agent.Provider, error) {
			switch c.GetName() {
			case "panics":
				panic("at once")
			case "unknown":
				return nil, errors.New("unknown type")
			case "fails":
				return broken, nil
			}
			return good(c)
		}
		broken = &fakeProvider{r: r, startErr: errors.New("no")}
		for _, name := range []string{"panics", "unknown", "fails"} {
			r.edge.with(func() { r.edge.config = payload("a", "c", name) })
			r.conn.Kill(nil)
			pass(250 * time.Millisecond)
			if s := r.node.State(); s.State != "waiting" || s.LastReason != "bad_config" {
				t.Fatalf("%s: %+v", name, s)
			}
			if names := r.node.host.registry.Names(); !slices.Equal(names, []string{"a", "b"}) {
				t.Errorf("%s: adapters %v run now", name, names)
			}
			r.edge.with(func() { r.edge.config = payload("a", "b") })
			pass(10 * time.Second)
			r.wantState("ready")
		}
		if r.makes["a"] != 1 || r.makes["b"] != 1 || r.stops["a"]+r.stops["b"] != 0 {
			t.Errorf("adapters were not kept: made %v, stopped %v", r.makes, r.stops)
		}
		changed := payload("a")
		changed.Adapters[0].Demo = &iopv1.DemoAdapterConfig{ChunkDelayMs: 5}
		r.edge.with(func() { r.edge.config = changed })
		r.conn.Kill(nil)
		pass(250 * time.Millisecond)
		r.wantState("ready")
		if r.makes["a"] != 2 || r.stops["a"] != 1 || r.stops["b"] != 1 {
			t.Errorf("made %v, stopped %v", r.makes, r.stops)
		}
	})
}

// Edge's silence, another instance in its place, a fence and a lost connection
// all end the session, and with it every tunnel; the Node comes back.
//
// Contract: F9 F10 W8 F5
func TestTrap18SessionEnds(t *testing.T) {
	for name, c := range map[string]struct {
		end    func(r *rig)
		within time.Duration
		again  time.Duration
		reason string
	}{
		"silence":      {func(r *rig) { r.edge.with(func() { r.edge.beats = false }) }, hbBound, 250 * time.Millisecond, "silent"},
		"another edge": {func(r *rig) { r.edge.with(func() { r.edge.instance = "edge-instance-2" }) }, beat, 250 * time.Millisecond, "edge_changed"},
		"fence":        {func(r *rig) { r.edge.send(r.session(), subjects.Fence, "", &iopv1.Fence{Reason: "not the owner"}) }, 0, 250 * time.Millisecond, "fenced"},
		"edge stops":   {func(r *rig) { r.edge.send(r.session(), subjects.Fence, "", &iopv1.Fence{Reason: "edge is stopping"}) }, 0, 250 * time.Millisecond, "edge_stopping"},
		"superseded":   {func(r *rig) { r.edge.send(r.session(), subjects.Fence, "", &iopv1.Fence{Reason: "superseded"}) }, 0, 10 * time.Second, "superseded"},
		"ready=false":  {func(r *rig) { r.edge.send(r.session(), subjects.Ready, "", &iopv1.NodeReadyResponse{Reason: "stale"}) }, 0, 250 * time.Millisecond, "not_ready"},
		"lost":         {func(r *rig) { r.conn.Kill(nil) }, 0, 250 * time.Millisecond, "lost"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				causes := make(chan error, 1)
				late := make(chan struct{})
				r := newRig(t, options{exchange: func(ctx context.Context, ex agent.Exchange, sink agent.Sink) error {
					err := hang(ctx, ex, sink)
					causes <- err
					<-late // and speaks once more, when it is too late
					return errors.Join(sink.Body([]byte("late")), err)
				}}).ready()
				defer r.finish()
				_, a := r.edge.open(nil)
				<-a.started
				first := r.conn
				c.end(r)
				if c.within > 0 {
					pass(c.within)
				}
				synctest.Wait()
				select {
				case err := <-causes:
					if !errors.Is(err, errSessionEnded) {
						t.Errorf("the exchange ended for %v", err)
					}
				default:
					t.Fatalf("the exchange still runs %v after\n%s", c.within, r.logs)
				}
				select {
				case <-first.Closed():
				default:
					t.Error("the connection is still open")
				}
				r.edge.with(func() { r.edge.beats = true })
				if s := r.node.State(); s.LastReason != c.reason {
					t.Errorf("ended for %s, not %s", s.LastReason, c.reason)
				}
				if c.again > time.Second {
					pass(c.again - time.Millisecond)
					r.wantState("waiting")
					pass(time.Millisecond)
				} else {
					pass(c.again)
				}
				r.wantState("ready")
				close(late)
				synctest.Wait()
				if got := r.edge.got(a); len(got) != 1 {
					t.Errorf("after the session: %s", describe(got))
				}
			})
		})
	}
}

// A session that is told that it was superseded, and then closed at once, as one that
// wakes up finds it, knows the first when it acts on the second: it waits a full
// interval, and does not fight for its name.
//
// Contract: S3 B6
func TestWhatWasToldCountsBeforeTheEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, options{})
		good := r.provide
		r.provide = func(c *iopv1.AdapterConfig) (agent.Provider, error) { // while the supervisor is busy
			r.edge.send(r.session(), subjects.Fence, "", &iopv1.Fence{Reason: "superseded"})
			<-time.After(time.Microsecond) // it has arrived
			r.conn.Kill(nil)
			return good(c)
		}
		r.edge.config = payload("a0")
		r.start()
		defer r.finish()
		for i := range 20 { // by chance it would be right now and then
			pass(time.Millisecond)
			if s := r.node.State(); s.State != "waiting" || s.LastReason != "superseded" {
				t.Fatalf("session %d: %+v", i+1, s)
			}
			pass(10*time.Second - 2*time.Millisecond)
			r.wantState("waiting")
			r.edge.with(func() { r.edge.config = payload(fmt.Sprint("a", i+1)) })
			pass(time.Millisecond)
		}
	})
}

// The broker that a Node is at says that it will stop: the Node drains, ends nothing
// that runs, and is then at once at another, as a new session.
//
// Contract: Y6 D7
func TestBrokerAboutToStop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		r := newRig(t, options{exchange: func(ctx context.Context, _ agent.Exchange, sink agent.Sink) error {
			if err := sink.Start(200, nil, -1); err != nil {
				return err
			}
			select {
			case <-release:
				return sink.Body([]byte("whole"))
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		}}).ready()
		defer r.finish()
		_, a := r.edge.open(nil)
		<-a.started
		first := r.conn
		first.Retire()
		synctest.Wait()
		r.wantState("draining")
		pass(time.Minute)
		if r.wantState("draining"); r.dials != 1 {
			t.Fatalf("%d dials while something runs", r.dials)
		}
		close(release)
		pass(250 * time.Millisecond)
		r.wantState("ready")
		r.edge.wantClass(a, "END")
		if s := r.node.State(); s.LastReason != "retired" || r.dials != 2 {
			t.Errorf("%d dials, %+v", r.dials, s)
		}
		select {
		case <-first.Closed():
		default:
			t.Error("it is still at the broker that stops")
		}
	})
}

// Whatever a remote says is a failed attempt, retried; a positive limit ends it
// after exactly so many dials in a row.
//
// Contract: S1 S2 S3 S4
func TestTrap20Supervisor(t *testing.T) {
	three, one := 3, 1
	limited := configs.Reconnect{MaxAttempts: &three, IntervalSec: &one}
	t.Run("refused at ready, three times", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t, options{cfg: configs.Node{Reconnect: limited}})
			r.edge.refuse = map[subjects.Verb]string{subjects.Ready: "no"}
			r.start()
			<-r.done
			if !errors.Is(r.err, ErrExhausted) || r.dials != 3 {
				t.Errorf("%d dials, then %v", r.dials, r.err)
			}
			r.edge.conn.Close()
		})
	})
	t.Run("ready counts anew", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t, options{cfg: configs.Node{Reconnect: limited}})
			r.dialErr = func(n int) error {
				if n != 3 {
					return errors.New("unreachable")
				}
				return nil
			}
			r.start()
			pass(2 * time.Second)
			r.wantState("ready")
			r.conn.Kill(nil)
			<-r.done
			if !errors.Is(r.err, ErrExhausted) || r.dials != 6 {
				t.Errorf("%d dials, then %v", r.dials, r.err)
			}
			r.edge.conn.Close()
		})
	})
	t.Run("every refusal is retried", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t, options{})
			denials := []string{"!denied.unknown_node", "!denied.revoked", "!denied.duplicate.946684800", "edge2.node1.9", "nonsense"}
			r.user = func(gen uint64) string {
				if gen <= uint64(len(denials)) {
					return denials[gen-1]
				}
				return r.session().String()
			}
			r.edge.refuse = map[subjects.Verb]string{subjects.Register: "unknown"}
			r.start()
			defer r.finish()
			pass(60 * time.Second)
			r.edge.with(func() { r.edge.refuse = map[subjects.Verb]string{subjects.SessionVerb: "revoked"} })
			pass(20 * time.Second)
			r.edge.with(func() { r.edge.refuse = nil })
			pass(10 * time.Second)
			r.wantState("ready")
			for _, word := range []string{"unknown_node", "revoked", "duplicate"} {
				if !strings.Contains(r.logs.String(), word) {
					t.Errorf("the log does not tell %s", word)
				}
			}
		})
	})
	t.Run("for ever without a remote", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t, options{})
			r.dialErr = func(int) error { return errors.New("unreachable") }
			r.start()
			pass(time.Hour)
			r.wantState("waiting")
			if r.dials < 360 || r.dials > 721 {
				t.Errorf("%d dials in an hour", r.dials)
			}
			r.stop() // during the wait
			synctest.Wait()
			select {
			case <-r.done:
			default:
				t.Error("the stop waits for the next dial")
			}
			r.finish()
		})
	})
	t.Run("a local fault", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t, options{})
			r.dialErr = func(int) error { return fmt.Errorf("%w: node.key is missing", ErrLocal) }
			r.start()
			<-r.done
			if !errors.Is(r.err, ErrLocal) || r.dials != 1 {
				t.Errorf("%d dials, then %v", r.dials, r.err)
			}
			r.edge.conn.Close()
		})
	})
	t.Run("stopped while dialling the last time", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t, options{cfg: configs.Node{Reconnect: configs.Reconnect{MaxAttempts: &one}}})
			r.dialErr = func(int) error { r.stop(); return context.Canceled }
			r.start()
			r.finish()
		})
	})
	t.Run("the bound of a step", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t, options{})
			r.edge.silent = map[subjects.Verb]int{subjects.Register: 1000}
			r.start()
			defer r.finish()
			pass(10 * time.Second)
			if s := r.node.State(); s.State != "waiting" || s.LastReason != "step_bound" {
				t.Errorf("%+v", s)
			}
		})
	})
}

// New refuses what cannot work, and starts nothing.
func TestNewRefuses(t *testing.T) {
	minus := -1
	r := newRig(t, options{})
	defer r.edge.conn.Close()
	ok := r.node
	for name, change := range map[string]func(*configs.Node, *Deps){
		"policy":   func(c *configs.Node, _ *Deps) { c.Reconnect = configs.Reconnect{MaxAttempts: &minus} },
		"name":     func(c *configs.Node, _ *Deps) { c.Name = "a.b" },
		"edge":     func(c *configs.Node, _ *Deps) { c.Edge = "" },
		"dial":     func(_ *configs.Node, d *Deps) { d.Dial = nil },
		"identity": func(_ *configs.Node, d *Deps) { d.Identity.Curve = nil },
		"instance": func(_ *configs.Node, d *Deps) { d.InstanceID = "" },
	} {
		cfg, deps := ok.cfg, ok.deps
		deps.Metrics = nil
		change(&cfg, &deps)
		if _, err := New(cfg, deps); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

// What a server says who somebody is, and who chose where that goes had it sent here,
// is no word of Edge's, though it may decode as one.
//
// Contract: Z5
func TestRedirectedAnswersEndNoSession(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, options{}).ready()
		defer r.finish()
		answer := []byte("{|") // a group that nobody knows: as a fence it is one without a reason
		if err := new(iopv1.Fence).UnmarshalVT(answer); err != nil {
			t.Fatal(err)
		}
		for _, v := range []subjects.Verb{subjects.Fence, subjects.Ready, subjects.Heartbeat} {
			must(t, r.edge.conn.Publish(r.session().Down(v, ""), answer))
		}
		synctest.Wait()
		r.wantState("ready")
		if r.dials != 1 {
			t.Errorf("%d dials", r.dials)
		}
	})
}
