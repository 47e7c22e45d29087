package hosts

import (
	"bufio"
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/bus"
	"github.com/iop-fabric/iop/internal/bus/natsbus"
	"github.com/iop-fabric/iop/internal/fakeprovider"
	"github.com/iop-fabric/iop/internal/identity"
	"github.com/iop-fabric/iop/internal/ioptest"
	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/wire"
	"github.com/iop-fabric/iop/wire/iopv1"
)

// A hostile Node of the test below is a process of its own: this test's binary with
// these in its environment. It dials, does the attack until its connection is closed,
// and dials again, for ever.
const (
	flooderAttack = "IOP_FLOODER"
	flooderConfig = "IOP_FLOODER_CONFIG"
)

// flooder is one session of the hostile Node.
type flooder struct {
	conn    *natsbus.Conn
	session subjects.Session
	told    chan subjects.Message
	heard   chan []byte // answers to what it asked, in turn
	frames  int
	bytes   int
}

func (n *flooder) say(v subjects.Verb, run string, data []byte) bool {
	n.frames++
	n.bytes += len(data)
	return n.conn.Publish(n.session.Up(v, run), data) == nil // else it is closed
}

func (n *flooder) frame(run string, seq uint64, body []byte) bool {
	data, err := (&iopv1.ProviderTunnelFrame{RunId: run, Sequence: seq, Kind: iopv1.ProviderTunnelFrame_BODY, Body: body}).MarshalVT()
	return err == nil && n.say(subjects.Frame, run, data)
}

func (n *flooder) start(run string) bool {
	data, err := (&iopv1.ProviderTunnelFrame{
		RunId: run, Sequence: 1, Kind: iopv1.ProviderTunnelFrame_RESPONSE_START, Status: 200,
		Headers: []*iopv1.Header{{Name: "Content-Type", Value: []byte("text/event-stream")}},
	}).MarshalVT()
	return err == nil && n.say(subjects.Frame, run, data)
}

// attacks end when the connection is closed. run is a call that waits for its answer.
var attacks = []struct {
	name string
	do   func(n *flooder, run string)
}{
	{"frames of one byte", func(n *flooder, run string) {
		n.start(run)
		for seq := uint64(2); n.frame(run, seq, []byte("x")); {
			seq++
		}
	}},
	{"64 KiB frames over credit", func(n *flooder, run string) {
		n.start(run)
		big := make([]byte, wire.MaxBody)
		for seq := uint64(2); n.frame(run, seq, big); {
			seq++
		}
	}},
	{"sequences that are none", func(n *flooder, run string) {
		n.start(run)
		for seq := uint64(math.MaxUint64); n.frame(run, seq, []byte("x")) && n.frame(run, 0, []byte("y")); {
			seq--
		}
	}},
	{"one frame again and again", func(n *flooder, run string) {
		for n.start(run) {
		}
	}},
	{"frames of unknown runs", func(n *flooder, _ string) {
		for id := wire.NewRunID(); n.frame(id, 1, []byte("x")); {
			id = wire.NewRunID()
		}
	}},
	{"acknowledgements", func(n *flooder, run string) {
		var ack iopv1.StreamAck
		for range 500 {
			ack.Entries = append(ack.Entries, &iopv1.StreamAck_Entry{RunId: wire.NewRunID(), Direction: "body", Acked: math.MaxUint64, Credit: math.MaxUint64})
		}
		ack.Entries = append(ack.Entries, &iopv1.StreamAck_Entry{RunId: run, Direction: "body", Acked: math.MaxUint64, Credit: math.MaxUint64})
		for data, err := ack.MarshalVT(); err == nil && n.say(subjects.Ack, "", data); {
		}
	}},
	{"empty acknowledgements", func(n *flooder, run string) {
		empty := iopv1.StreamAck{Entries: []*iopv1.StreamAck_Entry{{RunId: run, Direction: "sideways"}}}
		for data, err := empty.MarshalVT(); err == nil && n.say(subjects.Ack, "", data); {
		}
	}},
	{"heartbeats", func(n *flooder, _ string) {
		for data, err := (&iopv1.Heartbeat{}).MarshalVT(); err == nil && n.say(subjects.Heartbeat, "", data); {
		}
	}},
	{"verbs that are none", func(n *flooder, _ string) {
		own := strings.TrimSuffix(n.session.Up(subjects.Ready, ""), "ready")
		for n.conn.Publish(own+"x.y.z", nil) == nil {
			n.frames++
		}
	}},
}

// flood is the hostile Node's process; it ends when it is killed.
func flood(attack, config string) error {
	f, err := configs.Load(config)
	if err != nil {
		return err
	}
	i := slices.IndexFunc(attacks, func(a struct {
		name string
		do   func(*flooder, string)
	},
	) bool {
		return a.name == attack
	})
	if i < 0 {
		return errors.New("no such attack")
	}
	instance := wire.NewToken()
	for {
		n, err := floodSession(*f.Node, instance)
		if err != nil {
			fmt.Println("refused", err)
			<-time.After(10 * time.Millisecond) // it is in a hurry, but this is no test of dials
			continue
		}
		m := <-n.told
		began := time.Now()
		attacks[i].do(n, m.Run)
		fmt.Println("session", n.session.Gen, n.frames, n.bytes, time.Since(began).Milliseconds())
		n.conn.Close()
	}
}

// floodSession makes a session that is ready.
func floodSession(cfg configs.Node, instance string) (*flooder, error) {
	cert, err := identity.LoadCertificate(cfg.Broker.TLS.Certificate, cfg.Broker.TLS.Key)
	if err != nil {
		return nil, err
	}
	key, err := identity.LoadNKey(cfg.Broker.NKey)
	if err != nil {
		return nil, err
	}
	curve, err := identity.LoadNKey(cfg.CurveKey)
	if err != nil {
		return nil, err
	}
	pool, err := identity.LoadPool(cfg.Broker.TLS.CA)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), ioptest.Hang)
	defer cancel()
	name := instance + wire.NewToken()
	conn, err := natsbus.Dial(ctx, natsbus.Options{
		URLs: cfg.Broker.URLs, Name: name, Inbox: subjects.NodeInbox(cfg.Edge, cfg.Name, name),
		TLS:        &tls.Config{Certificates: []tls.Certificate{cert.TLS()}, RootCAs: pool, MinVersion: tls.VersionTLS13},
		NKeyPublic: key.Public(), Sign: key.Sign,
	})
	if err != nil {
		return nil, err
	}
	n := &flooder{conn: conn, told: make(chan subjects.Message, 1), heard: make(chan []byte, 16)}
	if err := n.ready(ctx, cfg.Name, cert, key, curve); err != nil {
		conn.Close()
		return nil, err
	}
	n.frames, n.bytes = 0, 0
	return n, nil
}

func (n *flooder) ready(ctx context.Context, name string, cert *identity.Certificate, key, curve *identity.NKey) error {
	info, err := n.conn.WhoAmI(ctx)
	if err != nil {
		return err
	}
	if n.session, err = subjects.ParseSession(info.User); err != nil {
		return fmt.Errorf("%s: %w", info.User, err)
	}
	if _, err := n.conn.Subscribe(n.session.DownWildcard(), func(m bus.Msg) {
		msg, err := subjects.ParseDown(m.Subject)
		if err != nil {
			return
		}
		switch msg.Verb {
		case subjects.Tunnel:
			select {
			case n.told <- msg:
			default:
			}
		case subjects.SessionVerb, subjects.Register, subjects.Ready:
			n.heard <- m.Data
		default:
		}
	}); err != nil {
		return err
	}
	ask := func(v subjects.Verb, q interface{ MarshalVT() ([]byte, error) }, a interface{ UnmarshalVT([]byte) error }) error {
		data, err := q.MarshalVT()
		if err != nil {
			return err
		}
		n.say(v, "", data)
		select {
		case data = <-n.heard:
			return a.UnmarshalVT(data)
		case <-n.conn.Closed():
			return n.conn.Err()
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	var grant iopv1.SessionGrant
	if err := ask(subjects.SessionVerb, &iopv1.SessionRequest{InstanceId: "x"}, &grant); err != nil {
		return err
	}
	r := &iopv1.RegisterRequest{
		NodeId: name, SessionToken: grant.GetToken(), Nonce: identity.NewNonce(), RecipientKey: curve.Public(),
		InstanceId: "0123456789abcdef", ProtocolMin: 1, ProtocolMax: 1, Software: "flood",
	}
	if err := identity.SignRegister(cert, key, r); err != nil {
		return err
	}
	var registered iopv1.RegisterResponse
	if err := ask(subjects.Register, r, &registered); err != nil || !registered.GetAccepted() {
		return fmt.Errorf("not registered: %s %w", registered.GetReason(), err)
	}
	var ready iopv1.NodeReadyResponse
	if err := ask(subjects.Ready, &iopv1.NodeReadyRequest{NodeId: name}, &ready); err != nil || !ready.GetReady() {
		return fmt.Errorf("not ready: %s %w", ready.GetReason(), err)
	}
	return nil
}

// latencies are what honest callers saw in one phase.
type latencies struct {
	chunks, calls []time.Duration
	faults        []string
}

func (l *latencies) String() string {
	part := func(all []time.Duration) string {
		if len(all) == 0 {
			return "none"
		}
		slices.Sort(all)
		at := func(q float64) float64 {
			return float64(all[min(len(all)-1, int(q*float64(len(all))))].Microseconds()) / 1000
		}
		return fmt.Sprintf("%6d: p50 %6.2f  p99 %7.2f  p99.9 %7.2f  max %8.2f", len(all), at(0.5), at(0.99), at(0.999), at(1))
	}
	return "chunks " + part(l.chunks) + " | calls " + part(l.calls)
}

// audience are honest callers of an honest node: paced streams and small calls.
type audience struct {
	f      *fabric
	mu     sync.Mutex
	now    *latencies // of the phase that it is
	stop   context.CancelFunc
	done   sync.WaitGroup
	stream atomic.Int64 // open ones
}

const (
	floodStreams = 32
	chunkEvery   = 20 * time.Millisecond
	floodCallers = 2
	callEvery    = 20 * time.Millisecond
)

// pause is a provider's, until the caller leaves.
func pause(x *fakeprovider.Exchange, d time.Duration) error {
	over := make(chan struct{})
	defer time.AfterFunc(d, func() { close(over) }).Stop()
	return fakeprovider.Wait(over)(x)
}

func (f *fabric) audience(t *testing.T, node string) *audience {
	epoch := time.Now()
	f.providers[node].Handle(func(r *fakeprovider.Request) []fakeprovider.Step {
		if !strings.Contains(string(r.Body), `"stream":true`) {
			return fakeprovider.JSON(200, `{"served":1}`)
		}
		return []fakeprovider.Step{fakeprovider.SSEHead(), func(x *fakeprovider.Exchange) error {
			for {
				if err := fakeprovider.Chunk(fmt.Sprintf("data: %d\n\n", time.Since(epoch)))(x); err != nil {
					return err
				}
				if err := pause(x, chunkEvery); err != nil {
					return err
				}
			}
		}}
	})
	ctx, stop := context.WithCancel(t.Context())
	a := &audience{f: f, now: &latencies{}, stop: stop}
	t.Cleanup(a.end)
	for range floodStreams {
		a.done.Go(func() {
			for ctx.Err() == nil {
				a.listen(ctx, node, epoch)
			}
		})
	}
	for range floodCallers {
		a.done.Go(func() {
			tick := time.NewTicker(callEvery)
			defer tick.Stop()
			for {
				select {
				case <-tick.C:
					a.call(ctx, node)
				case <-ctx.Done():
					return
				}
			}
		})
	}
	return a
}

func (a *audience) end() { a.stop(); a.done.Wait() }

// phase begins the next one and returns what the last one saw.
func (a *audience) phase() *latencies {
	a.mu.Lock()
	defer a.mu.Unlock()
	l := a.now
	a.now = &latencies{}
	return l
}

func (a *audience) fault(ctx context.Context, what string) {
	if ctx.Err() != nil {
		return
	}
	a.mu.Lock()
	a.now.faults = append(a.now.faults, what)
	a.mu.Unlock()
}

// listen reads one stream until it ends, which is a fault.
func (a *audience) listen(ctx context.Context, node string, epoch time.Time) {
	resp, err := a.f.call(ctx, node, true)
	if err != nil {
		a.fault(ctx, err.Error())
		return
	}
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	a.stream.Add(1)
	defer a.stream.Add(-1)
	for lines.Scan() {
		stamp, ok := strings.CutPrefix(lines.Text(), "data: ")
		if !ok {
			continue
		}
		sent, err := strconv.ParseInt(stamp, 10, 64)
		if err != nil {
			a.fault(ctx, stamp)
			return
		}
		took := time.Since(epoch) - time.Duration(sent)
		a.mu.Lock()
		a.now.chunks = append(a.now.chunks, took)
		a.mu.Unlock()
	}
	a.fault(ctx, fmt.Sprintf("a stream ended: %d %v", resp.StatusCode, lines.Err()))
}

func (a *audience) call(ctx context.Context, node string) {
	began := time.Now()
	resp, err := a.f.call(ctx, node, false)
	if err != nil {
		a.fault(ctx, err.Error())
		return
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil || string(b) != `{"served":1}` {
		a.fault(ctx, fmt.Sprintf("a call: %d %q %v", resp.StatusCode, b, err))
		return
	}
	a.mu.Lock()
	a.now.calls = append(a.now.calls, time.Since(began))
	a.mu.Unlock()
}

// A Node that floods Edge in the ways there are, as a process beside honest ones, and
// comes back as soon as it may: it loses each of its sessions, and no honest stream or
// call fails. IOP_FLOOD is for how long each attack lasts, IOP_FLOODS how often all
// are made; what honest callers saw meanwhile is logged, beside as long without one.
//
// Contract: J8 Z5
func TestFloodBesideHonestStreams(t *testing.T) {
	lasts, _ := time.ParseDuration(os.Getenv("IOP_FLOOD")) // left out: until it lost a session
	rounds, err := strconv.Atoi(cmp.Or(os.Getenv("IOP_FLOODS"), "1"))
	must(t, err)
	names := []string{"n1"}
	for round := range rounds { // a node that lost a session stays out: each attack has its own
		for i := range attacks {
			names = append(names, fmt.Sprintf("evil%d-%d", round, i))
		}
	}
	f := newFabric(t, 1, names...)
	f.write("edge/edge.yaml", strings.ReplaceAll(f.read("edge/edge.yaml"), "type: openai_compat,", "type: openai_compat, capacity: 64,"))
	run := func(role, folder string, env ...string) *process {
		return f.launch(folder, nil, append(os.Environ(), env...), role, "--config", f.path(folder+"/"+folder+".yaml"), "--log-level", "info")
	}
	broker := run("broker", "broker-1", "IOP_BROKER_HEARTBEAT_BOUND=10s")
	edge := run("edge", "edge", "IOP_EDGE_HEARTBEAT_INTERVAL=1s", "IOP_EDGE_HEARTBEAT_BOUND=10s",
		"IOP_EDGE_LISTEN="+f.net+"100:8400", "IOP_EDGE_ADMIN_LISTEN="+f.net+"100:8401")
	run("node", "node-n1")
	edge.connected("n1", 0)
	a := f.audience(t, "n1")
	quiet, attacked := &latencies{}, map[string]*latencies{}
	wait := func(d time.Duration) {
		if d > 0 {
			select {
			case <-time.After(d): // the measurement itself
			case <-t.Context().Done():
			}
		}
	}
	wait(lasts / 5)
	a.phase()
	for round := range rounds {
		for i, attack := range attacks {
			evil := fmt.Sprintf("evil%d-%d", round, i)
			if only := os.Getenv("IOP_FLOOD_ONLY"); only != "" && !strings.Contains(attack.name, only) {
				continue
			}
			wait(lasts)
			l := a.phase()
			quiet.chunks, quiet.calls = append(quiet.chunks, l.chunks...), append(quiet.calls, l.calls...)
			stop := f.bait(t, evil)
			p := f.flooder(attack.name, evil)
			gen := edge.connected(evil, 0)
			wait(lasts)
			edge.log.AwaitEvent(t, "node.disconnected", "node="+evil, fmt.Sprint("generation=", gen))
			broker.log.AwaitEvent(t, "broker.evicted", "node="+evil, fmt.Sprint("generation=", gen), "reason=misbehaved")
			p.kill()
			stop()
			l = a.phase()
			t.Logf("%-26s %s", attack.name, l)
			sessions, frames, bytes, ms := floods(p.log.String())
			t.Logf("%26s %d sessions lost, %d messages of %d KiB in sum, each lasted %d ms; refused %d times", "", sessions, frames, bytes>>10, ms/max(sessions, 1), strings.Count(p.log.String(), "refused"))
			for _, fault := range l.faults[:min(len(l.faults), 5)] {
				t.Errorf("%s: %s", attack.name, fault)
			}
			if got := attacked[attack.name]; got != nil {
				got.chunks, got.calls = append(got.chunks, l.chunks...), append(got.calls, l.calls...)
			} else {
				attacked[attack.name] = l
			}
			wait(lasts / 5)
			a.phase()
		}
	}
	t.Logf("%-26s %s", "quiet", quiet)
	for _, attack := range attacks {
		if l := attacked[attack.name]; l != nil {
			t.Logf("%-26s %s", attack.name, l)
		}
	}
	for _, p := range []*process{broker, edge} {
		if b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid)); err == nil {
			_, peak, _ := strings.Cut(string(b), "VmHWM:")
			peak, _, _ = strings.Cut(strings.TrimSpace(peak), "\n")
			t.Logf("%s: most memory %s", p.name, peak)
		}
	}
}

// bait makes calls that only that node can serve, one after the other, until stop.
func (f *fabric) bait(t *testing.T, node string) (stop func()) {
	ctx, cancel := context.WithCancel(t.Context())
	var done sync.WaitGroup
	done.Go(func() {
		for ctx.Err() == nil {
			if resp, err := f.call(ctx, node, true); err == nil {
				io.Copy(io.Discard, resp.Body) // it is cut
				resp.Body.Close()
			}
		}
	})
	stop = func() { cancel(); done.Wait() }
	t.Cleanup(stop)
	return stop
}

// flooder starts the hostile process, which gets what the others leave of the machine:
// it stands for another machine.
func (f *fabric) flooder(attack, node string) *process {
	f.t.Helper()
	self, err := os.Executable()
	must(f.t, err)
	p := &process{t: f.t, name: "flooder", log: &ioptest.LogBuffer{}, done: make(chan struct{})}
	p.cmd = exec.Command("nice", "-n", "19", self)
	p.cmd.Env = append(os.Environ(), flooderAttack+"="+attack, flooderConfig+"="+f.path("node-"+node+"/node-"+node+".yaml"), "GOMAXPROCS=1")
	p.cmd.Stdout, p.cmd.Stderr = p.log, p.log
	must(f.t, p.cmd.Start())
	go func() {
		defer close(p.done)
		_ = p.cmd.Wait() // it is killed
	}()
	f.t.Cleanup(p.kill)
	return p
}

// floods sums up what the hostile process says of its sessions.
func floods(log string) (sessions, frames, bytes, ms int) {
	for line := range strings.Lines(log) {
		var gen, n, size, took int
		if c, _ := fmt.Sscanf(line, "session %d %d %d %d", &gen, &n, &size, &took); c == 4 {
			sessions, frames, bytes, ms = sessions+1, frames+n, bytes+size, ms+took
		}
	}
	return sessions, frames, bytes, ms
}
