package broker

import (
	"bufio"
	"crypto/tls"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/identity"
	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/wire"
)

// victim is a broker in a process of its own, to be killed.
type victim struct {
	t   *testing.T
	dir string
	cfg configs.Broker
	cmd *exec.Cmd
}

const helperVictim = "IOP_TEST_VICTIM_DIR"

// TestHelperVictim is not a test: it is that process. Its members are the nodes
// whose keys are in the folder.
func TestHelperVictim(t *testing.T) {
	dir := os.Getenv(helperVictim)
	if dir == "" {
		return
	}
	f := &fixture{t: t, dir: dir, cfg: fileConfig(dir)}
	f.cfg.Name, f.cfg.Listen, f.cfg.StoreDir = os.Getenv("IOP_TEST_NAME"), os.Getenv("IOP_TEST_LISTEN"), os.Getenv("IOP_TEST_STORE")
	if listen := os.Getenv("IOP_TEST_CLUSTER"); listen != "" {
		f.cfg.Cluster = &configs.Cluster{Listen: listen, Routes: strings.Split(os.Getenv("IOP_TEST_ROUTES"), ",")}
	}
	for _, file := range must(filepath.Glob(filepath.Join(dir, "node-*.nk"))) {
		name := strings.TrimSuffix(strings.TrimPrefix(filepath.Base(file), "node-"), ".nk")
		f.cfg.Members = append(f.cfg.Members, configs.Member{Edge: "edge1", Role: "node", Name: name, NKey: must(identity.LoadNKey(file)).Public()})
	}
	f.start()
	fmt.Println("ready")
	<-f.done // for ever: it is killed
}

// start returns a channel that is closed once the process serves, or has ended.
func (v *victim) start() <-chan struct{} {
	v.t.Helper()
	v.cmd = exec.Command(os.Args[0], "-test.run=^TestHelperVictim$") //nolint:gosec // this very program
	v.cmd.Env = append(os.Environ(), helperVictim+"="+v.dir, "IOP_TEST_NAME="+v.cfg.Name, "IOP_TEST_LISTEN="+v.cfg.Listen, "IOP_TEST_STORE="+v.cfg.StoreDir)
	if c := v.cfg.Cluster; c != nil {
		v.cmd.Env = append(v.cmd.Env, "IOP_TEST_CLUSTER="+c.Listen, "IOP_TEST_ROUTES="+strings.Join(c.Routes, ","))
	}
	v.cmd.Stderr = os.Stderr
	out, err := v.cmd.StdoutPipe()
	if err == nil {
		err = v.cmd.Start()
	}
	if err != nil {
		v.t.Fatal(err)
	}
	ready := make(chan struct{})
	go func() {
		defer close(ready)
		for lines := bufio.NewScanner(out); lines.Scan(); {
			if lines.Text() == "ready" {
				return
			}
			fmt.Fprintln(os.Stderr, lines.Text())
		}
	}()
	return ready
}

func (v *victim) kill() {
	v.cmd.Process.Kill() // SIGKILL
	v.cmd.Wait()         // killed
}

// learnt are the generations that Nodes were told.
type learnt struct {
	mu     sync.Mutex
	high   uint64
	seen   map[uint64]string
	count  int
	failed int
	wrong  []string
	grown  chan struct{} // closed at the next one
}

// wait waits until so many more were told.
func (l *learnt) wait(t *testing.T, more int) {
	t.Helper()
	timeout := time.After(guard)
	for first := -1; ; {
		l.mu.Lock()
		if first < 0 {
			first = l.count
		}
		enough, grown := l.count >= first+more, l.grown
		l.mu.Unlock()
		if enough {
			return
		}
		select {
		case <-grown:
		case <-timeout:
			t.Fatal("nobody is admitted")
		}
	}
}

func (l *learnt) highest() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.high
}

// add notes a session that a dial got which began when high was the highest.
func (l *learnt) add(s subjects.Session, high uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if s.Gen <= high {
		l.wrong = append(l.wrong, fmt.Sprintf("%s got %d after %d", s.Node, s.Gen, high))
	}
	if other, ok := l.seen[s.Gen]; ok {
		l.wrong = append(l.wrong, fmt.Sprintf("%s got %d, which was %s's", s.Node, s.Gen, other))
	}
	l.seen[s.Gen] = s.Node
	l.high = max(l.high, s.Gen)
	l.count++
	close(l.grown)
	l.grown = make(chan struct{})
}

// dialInALoop has a Node dial any of the addresses, again and again, until stop.
func (l *learnt) dialInALoop(ca *testCA, name string, key *identity.NKey, addrs []string, stop <-chan struct{}) {
	config := &tls.Config{
		RootCAs: ca.pool(), MinVersion: tls.VersionTLS13,
		Certificates: []tls.Certificate{ca.client("spiffe://iop/edge1/node/" + name)},
	}
	instance := wire.NewToken()
	for {
		select {
		case <-stop:
			return
		default:
		}
		connection := instance + wire.NewToken()
		d := &dialer{
			url: "tls://" + addrs[rand.IntN(len(addrs))], tls: config, connection: connection, //nolint:gosec // no secret
			inbox: subjects.NodeInbox("edge1", name, connection), auth: nats.Nkey(key.Public(), key.Sign), closed: make(chan struct{}),
		}
		high := l.highest()
		err := func() error {
			nc, err := d.dial()
			if err != nil {
				return err
			}
			defer nc.Close()
			user, err := userOf(nc)
			if err != nil {
				return err
			}
			s, err := subjects.ParseSession(user)
			if err == nil {
				l.add(s, high)
			}
			return err
		}()
		if err != nil {
			l.mu.Lock()
			l.failed++
			l.mu.Unlock()
			select { // nobody listens there at the moment
			case <-time.After(10 * time.Millisecond):
			case <-stop:
			}
		}
	}
}

// kills is how often the broker is killed: IOP_KILLS.
func kills(t *testing.T) int {
	n, err := strconv.Atoi(os.Getenv("IOP_KILLS"))
	if err != nil {
		n = 6
	}
	if testing.Short() {
		n = min(n, 2)
	}
	t.Logf("%d kills (IOP_KILLS)", n)
	return n
}

// The generation never falls, and none comes twice, over kill -9 of a broker
// while Nodes dial in a loop: of the only one, or of one, two or all of three.
//
// Contract: G1 F1 B9 Y2
func TestGenerationsRiseOverKills(t *testing.T) {
	for _, brokers := range []int{1, 3} {
		t.Run(fmt.Sprintf("%d", brokers), func(t *testing.T) { killBrokers(t, brokers) })
	}
}

func killBrokers(t *testing.T, brokers int) {
	c := newCluster(t)
	var all []*victim
	var addrs []string
	for _, m := range c.members[:brokers] {
		v := &victim{t: t, dir: c.dir, cfg: m.cfg}
		if brokers == 1 {
			v.cfg.Cluster = nil
		}
		all, addrs = append(all, v), append(addrs, v.cfg.Listen)
	}
	keys := map[string]*identity.NKey{}
	for i := range 8 {
		name := fmt.Sprintf("n%d", i)
		keys[name] = must(identity.NewUserKey())
		if err := keys[name].Save(filepath.Join(c.dir, "node-"+name+".nk")); err != nil {
			t.Fatal(err)
		}
	}
	var ready []<-chan struct{}
	for _, v := range all {
		ready = append(ready, v.start())
	}
	defer func() {
		for _, v := range all {
			v.kill()
		}
	}()
	for i, r := range ready {
		c.wait(all[i].cfg.Name+" at the start", r)
	}
	l := &learnt{seen: map[uint64]string{}, grown: make(chan struct{})}
	stop := make(chan struct{})
	var nodes sync.WaitGroup
	for name, key := range keys {
		nodes.Go(func() { l.dialInALoop(c.ca, name, key, addrs, stop) })
	}
	defer nodes.Wait()
	defer close(stop)

	killed, together := 0, 0
	for round, want := 0, kills(t); killed < want; round++ {
		// In the middle of admissions, at a moment that nobody chose.
		l.wait(t, 1+rand.IntN(10)) //nolint:gosec // no secret
		victims := slices.Clone(all)
		rand.Shuffle(len(victims), func(i, j int) { victims[i], victims[j] = victims[j], victims[i] })
		victims = victims[:min(1+round%brokers, brokers)]
		for _, v := range victims {
			v.kill()
			killed++
		}
		if len(victims) == brokers {
			together++
		}
		ready = ready[:0]
		for _, v := range victims {
			ready = append(ready, v.start())
		}
		for i, r := range ready {
			c.wait(victims[i].cfg.Name+" after a kill", r)
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, w := range l.wrong {
		t.Error(w)
	}
	t.Logf("brokers: %d, kills: %d, of which all at once: %d times; admissions told: %d, dials lost: %d, generations that fell or came twice: %d",
		brokers, killed, together, l.count, l.failed, len(l.wrong))
}
