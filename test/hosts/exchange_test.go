package hosts

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/iop-fabric/iop/internal/fakeprovider"
	"github.com/iop-fabric/iop/internal/identity"
)

// inviting makes broker-1 the authority, and names machines in the Edge's file that are
// to join: each has a scripted provider of its own.
func (f *fabric) inviting(machines ...string) {
	f.t.Helper()
	text := f.read("broker-1/broker-1.yaml")
	for _, line := range []string{"admin_listen: 127.0.0.1:8401", "admin_token: {file: admin-token}", "enrolment: "} {
		text = strings.Replace(text, "# "+line, line, 1)
	}
	text = strings.Replace(text, "admin_listen: 127.0.0.1:8401", "admin_listen: "+f.net+"1:8401", 1)
	text = strings.Replace(text, `listen: "0.0.0.0:8443"`, fmt.Sprintf("listen: %q", f.net+"1:8443"), 1)
	f.write("broker-1/broker-1.yaml", text)
	f.write("broker-1/admin-token", "an operator's token, long enough")
	f.write("broker-1/ca.key", f.read("authority/ca.key"))
	edge := f.read("edge/edge.yaml")
	for _, m := range machines {
		edge = strings.Replace(edge, "  nodes:\n", fmt.Sprintf("    - {name: %s, providers: [{provider: %s/m}]}\n  nodes:\n", m, m), 1) + f.node(m)
	}
	f.write("edge/edge.yaml", edge)
}

func (f *fabric) operator(args ...string) []string {
	return append(args, "--config", f.path("broker-1/broker-1.yaml"))
}

// join invites a machine and has it join in a folder of its own, without starting it.
func (f *fabric) join(name string) (folder string) {
	f.t.Helper()
	return f.joinBy(name, f.invite(name))
}

func (f *fabric) invite(name string) (line string) {
	f.t.Helper()
	var i struct{ Command string }
	must(f.t, json.Unmarshal([]byte(f.iop(f.operator("invite", name, "--json")...)), &i))
	return i.Command
}

func (f *fabric) joinBy(name, line string) (folder string) {
	f.t.Helper()
	folder = filepath.Join(f.t.TempDir(), name)
	f.iop(append(strings.Fields(line)[1:], "--dir", folder, "--no-start")...)
	return folder
}

// startJoined runs the node of a machine that has joined.
func (f *fabric) startJoined(folder string) *process {
	f.t.Helper()
	return f.run("node-"+filepath.Base(folder), "node", filepath.Join(folder, "node.yaml"))
}

// hup has a process read its files, and waits until it says so.
func (p *process) hup(event string, words ...string) {
	p.t.Helper()
	n := p.log.Count(event)
	p.signal(syscall.SIGHUP)
	p.log.Await(p.t, func(string) bool { return p.log.Count(event) > n })
	if len(words) > 0 {
		p.log.AwaitEvent(p.t, event, words...)
	}
}

// fails runs a command that must not succeed, and returns what it says.
func (f *fabric) fails(args ...string) string {
	f.t.Helper()
	out, err := exec.Command(binary, args...).CombinedOutput()
	if err == nil {
		f.t.Fatalf("iop %v: done:\n%s", args, out)
	}
	return string(out)
}

// traffic streams from a node without end, one answer after the other, until it is told
// to stop; each must come whole, byte for byte.
func (f *fabric) traffic(node string) (stop func() int64) {
	f.t.Helper()
	ctx, cancel := context.WithCancel(f.t.Context())
	done := make(chan struct{})
	var served atomic.Int64
	var want strings.Builder
	var steps []fakeprovider.Step
	steps = append(steps, fakeprovider.SSEHead())
	for i := range 50 {
		steps = append(steps, fakeprovider.Chunk(event(i)))
		want.WriteString(event(i))
	}
	steps = append(steps, fakeprovider.Chunk(doneEvent), fakeprovider.LastChunk())
	want.WriteString(doneEvent)
	p := f.providers[node]
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			p.Next(steps...)
			resp, err := f.call(context.Background(), node, true)
			if err != nil {
				f.t.Errorf("%s: %v", node, err)
				return
			}
			b, err := io.ReadAll(resp.Body)
			resp.Body.Close()
			if err != nil || resp.StatusCode != http.StatusOK || string(b) != want.String() {
				f.t.Errorf("%s: answer %d: %d, %d bytes of %d: %v\n%.300s", node, served.Load(), resp.StatusCode, len(b), want.Len(), err, b)
				return
			}
			<-p.Received()
			served.Add(1)
		}
	}()
	return func() int64 { cancel(); <-done; return served.Load() }
}

// across opens a stream of n1 that spans what do does, and must end whole.
func (f *fabric) across(what string, do func()) {
	f.t.Helper()
	finish := make(chan struct{})
	running, _ := f.open("n1", fakeprovider.Wait(finish), fakeprovider.Chunk(event(2)), fakeprovider.Chunk(doneEvent), fakeprovider.LastChunk())
	do()
	close(finish)
	if got := rest([]*http.Response{running})[0]; got != event(2)+doneEvent {
		f.t.Errorf("%s: what ran ended as %q", what, got)
	}
}

// The CA and then the issuer are exchanged from the first step to the last, with streams
// under way that all come whole. A machine that joined follows by itself; machines join
// in between; one that was off all the time is refused, is told why, and comes back with
// the files it was due.
//
// Contract: B1 B8 B11 G1 G3 L8 J5
func TestCAAndIssuerExchanged(t *testing.T) {
	f := newFabric(t, 1, "n1", "n2", "off", "late")
	f.inviting("gpu1", "gpu2", "gpu3")
	broker, edge, n1, n2 := f.start("broker-1"), f.start("edge"), f.start("node-n1"), f.start("node-n2")
	off, late := f.start("node-off"), f.start("node-late")
	before := map[string]uint64{}
	for _, n := range []string{"n1", "n2", "off", "late"} {
		before[n] = edge.connected(n, 0)
	}
	broker.log.AwaitEvent(t, "broker.ready")
	gpu1 := f.startJoined(f.join("gpu1"))
	before["gpu1"] = edge.connected("gpu1", 0)
	off.stop()
	late.stop()
	was := map[string]string{}
	for _, name := range []string{"node-off/ca.pem", "node-off/cert.pem", "node-late/ca.pem", "node-late/cert.pem"} {
		was[name] = f.read(name)
	}
	stays := func(folder string) { // nobody gives it what the steps made for it
		for name, text := range was {
			if strings.HasPrefix(name, folder) {
				f.write(name, text)
			}
		}
	}
	stop := f.traffic("n2")

	f.across("begin", func() {
		f.iop("rotate", "ca", "begin", "--out", f.dir)
		broker.hup("broker.rotated")
		edge.hup("edge.roots_renewed", "count=2")
		gpu1.log.AwaitEvent(t, "node.trust_learnt", "count=2")
	})
	line := f.invite("gpu3") // it names the CA of now, which is the old one
	gpu2 := f.startJoined(f.join("gpu2"))
	edge.connected("gpu2", 0)
	f.served("gpu2")

	f.across("switch", func() {
		f.iop("rotate", "ca", "switch", "--out", f.dir)
		broker.hup("broker.rotated")
		edge.hup("edge.keys_renewed") // and its connection is made anew
		for _, n := range []*process{gpu1, gpu2} {
			n.log.AwaitEvent(t, "node.certificate_renewed")
		}
		before["gpu1"] = edge.connected("gpu1", before["gpu1"])
	})
	f.served("gpu1")
	gpu3 := f.startJoined(f.joinBy("gpu3", line))
	edge.connected("gpu3", 0)
	f.served("gpu3")
	// It has heard of none of this, and is let in; then it follows by itself.
	stays("node-late")
	late = f.start("node-late")
	before["late"] = edge.connected("late", before["late"])
	late.log.AwaitEvent(t, "node.trust_learnt", "count=2")
	late.log.AwaitEvent(t, "node.certificate_renewed")
	before["late"] = edge.connected("late", before["late"])
	f.served("late")
	f.across("the nodes take theirs", func() {
		n2.signal(syscall.SIGHUP)
		before["n2"] = edge.connected("n2", before["n2"])
		n1.signal(syscall.SIGHUP) // it waits for the stream
		f.served("n1")            // and nobody else does
	})
	before["n1"] = edge.connected("n1", before["n1"])
	f.served("n1")

	finish := f.operator("rotate", "ca", "finish", "--out", f.dir)
	if said := f.fails("rotate", "ca", "finish", "--out", f.dir); !strings.Contains(said, "nobody was asked") {
		t.Errorf("finish, nobody asked: %s", said)
	}
	if said := f.fails(finish...); !strings.Contains(said, "node off") || strings.Contains(said, "node n1") || strings.Contains(said, "late") || strings.Contains(said, "gpu") || strings.Contains(said, "edge home") {
		t.Errorf("finish, with a node that is off: %s", said)
	}
	f.across("finish", func() {
		f.iop(append(finish, "--force")...)
		broker.hup("broker.rotated")
		edge.hup("edge.roots_renewed", "count=1")
		for _, n := range []*process{gpu1, gpu2, gpu3} { // late's file is the folder's own
			n.log.AwaitEvent(t, "node.trust_learnt", "count=1")
		}
		n1.signal(syscall.SIGHUP) // nothing but the CA file is another
	})
	t.Logf("%d streams beside the CA's exchange", stop())
	root := try(identity.LoadCA(f.path("authority")))(t)
	if _, err := os.Stat(f.path("authority/ca-old.key")); !os.IsNotExist(err) {
		t.Errorf("the old CA's key is left: %v", err)
	}

	stays("node-off")
	off = f.start("node-off")
	off.log.AwaitEvent(t, "node.dial_failed", "exchanged while this machine was off")
	f.iop("rotate", "node", "off", "--out", f.dir)
	f.write("node-off/ca.pem", f.read("authority/ca.pem"))
	edge.connected("off", before["off"])
	f.served("off")
	if c := try(identity.LoadCertificate(f.path("node-off/cert.pem"), f.path("node-off/cert.key")))(t); identity.IssuerOf(c.Leaf) != identity.RootOf(root.Certificate()) {
		t.Error("its certificate is of another CA")
	}

	stop = f.traffic("n2")
	edgeFile := f.read("edge/edge.yaml")
	issuer := regexp.MustCompile(`issuers: \[(\w+)\]`).FindStringSubmatch(edgeFile)[1]
	next := regexp.MustCompile(`new issuer: (\w+)`).FindStringSubmatch(f.iop("rotate", "issuer", "begin", "--out", f.dir))[1]
	if said := f.fails("rotate", "issuer", "switch", "--out", f.dir); !strings.Contains(said, next) {
		t.Errorf("switch before the Edge knows it: %s", said)
	}
	f.across("issuer", func() {
		f.write("edge/edge.yaml", strings.Replace(edgeFile, issuer, issuer+", "+next, 1))
		edge.hup("edge.issuers_renewed", next)
		f.iop("rotate", "issuer", "switch", "--out", f.dir)
		if said := f.fails(f.operator("rotate", "issuer", "finish", "--out", f.dir)...); !strings.Contains(said, issuer) {
			t.Errorf("finish before the broker signs with it: %s", said)
		}
		broker.hup("broker.issuer_rotated", next)
		broker.log.AwaitEvent(t, "broker.needs_restart", "issuer_key")
		for _, p := range []*process{broker, edge} {
			if p.log.Count("process.needs_restart") != 0 {
				t.Errorf("%s: a setting needs a restart, and none has changed", p.name)
			}
		}
		text := f.read("broker-1/broker-1.yaml")
		f.write("broker-1/broker-1.yaml", strings.Replace(text, "store_dir: data", "store_dir: elsewhere", 1))
		broker.hup("process.needs_restart", "settings=[store_dir]")
		f.write("broker-1/broker-1.yaml", text)
		gpu1.kill() // its next session has a token of the new issuer
		gpu1 = f.startJoined(filepath.Dir(gpu1.config))
		before["gpu1"] = edge.connected("gpu1", before["gpu1"])
		f.iop(f.operator("rotate", "issuer", "finish", "--out", f.dir)...)
		f.write("edge/edge.yaml", strings.Replace(edgeFile, issuer, next, 1))
		edge.hup("edge.issuers_renewed", next)
	})
	t.Logf("%d streams beside the issuer's exchange", stop())
	gpu1.kill()
	gpu1 = f.startJoined(filepath.Dir(gpu1.config))
	before["gpu1"] = edge.connected("gpu1", before["gpu1"])
	f.served("gpu1")

	// What the server pins waits for a restart, and then is as the files say. Its newest
	// certificate holds nothing of the old CA any more, and everybody knows the new one.
	f.iop("rotate", "broker", "broker-1", "--out", f.dir)
	if c := try(identity.LoadCertificate(f.path("broker-1/cert.pem"), f.path("broker-1/cert.key")))(t); len(c.Chain) != 1 {
		t.Errorf("a chain of %d", len(c.Chain))
	}
	broker.stop()
	broker = f.start("broker-1")
	for _, n := range []string{"n1", "n2", "gpu1"} {
		edge.connected(n, before[n])
		f.served(n)
	}
	if n := broker.log.Count("broker.needs_restart"); n != 0 {
		t.Error("it needs a restart after its restart")
	}
}

// The nkeys of a Node that joined, of one whose files an operator copies, and of the
// Edge are exchanged under load: nothing ends by it, and the old ones are good for
// nothing in the end.
//
// Contract: B2 B8 J5
func TestNKeysExchangedUnderLoad(t *testing.T) {
	f := newFabric(t, 1, "n1", "n2")
	f.inviting("gpu1")
	broker, edge, n1 := f.start("broker-1"), f.start("edge"), f.start("node-n1")
	f.start("node-n2")
	before := edge.connected("n1", 0)
	edge.connected("n2", 0)
	folder := f.join("gpu1")
	gpu1 := f.startJoined(folder)
	joined := edge.connected("gpu1", 0)
	stop := f.traffic("n2")
	load := func(file string) *identity.NKey { return try(identity.LoadNKey(file))(t) }

	f.across("a machine that joined", func() {
		old := load(filepath.Join(folder, "user.nk"))
		var made struct{ NKey string }
		must(t, json.Unmarshal([]byte(f.iop("rotate", "node", "--nkey", "--dir", folder, "--json")), &made))
		gpu1.hup("node.nkey_registered", made.NKey)
		edge.connected("gpu1", joined)
		broker.log.AwaitEvent(t, "broker.nkey", "taken=true", made.NKey)
		if is := load(filepath.Join(folder, "user.nk")); is.Public() != made.NKey || is.Public() == old.Public() {
			t.Error("its file holds another")
		}
	})
	f.served("gpu1")

	members := func(change func(text string) string) {
		f.write("broker-1/broker-1.yaml", change(f.read("broker-1/broker-1.yaml")))
		broker.hup("broker.rotated")
	}
	rotate := func(args ...string) (line, old string) {
		var made struct{ Member, Replaces string }
		must(t, json.Unmarshal([]byte(f.iop(append([]string{"rotate", "--nkey", "--json", "--out", f.dir}, args...)...)), &made))
		return made.Member, made.Replaces
	}
	without := func(text, nkey string) string {
		return regexp.MustCompile(`(?m)^.*`+nkey+`.*\n`).ReplaceAllString(text, "")
	}
	var nodeLine, nodeOld string
	f.across("a node's", func() {
		nodeLine, nodeOld = rotate("node", "n1")
		members(func(text string) string { return strings.TrimRight(text, "\n") + "\n    " + nodeLine + "\n" })
		n1.signal(syscall.SIGHUP)
	})
	before = edge.connected("n1", before)
	members(func(text string) string { return without(text, nodeOld) })
	f.served("n1")

	f.across("the edge's", func() {
		line, old := rotate("edge")
		members(func(text string) string { return strings.TrimRight(text, "\n") + "\n    " + line + "\n" })
		admitted := broker.log.Count("broker.admitted")
		edge.hup("edge.keys_renewed", "nkey="+load(f.path("edge/user.nk")).Public())
		broker.log.Await(t, func(string) bool { return broker.log.Count("broker.admitted") > admitted })
		members(func(text string) string { return without(text, old) })
	})
	t.Logf("%d streams beside it", stop())
	// Only the new ones are good: whoever comes again comes with them, be it by itself or
	// as a process that is started anew.
	broker.kill()
	f.start("broker-1")
	edge.connected("n1", before)
	f.served("n1")
	edge.kill()
	edge = f.start("edge")
	edge.connected("n1", 0)
	f.served("n1")
}

func try[T any](v T, err error) func(*testing.T) T {
	return func(t *testing.T) T {
		t.Helper()
		must(t, err)
		return v
	}
}

// A cluster goes through the exchange of the CA: at each step a broker is killed and
// comes back among the others, whose certificates are of the old CA, of both, of the new
// one; streams go on beside it.
//
// Contract: B1 B8 Y2
func TestClusterThroughAnExchangeOfTheCA(t *testing.T) {
	f := newFabric(t, 3, "n1", "n2")
	var brokers []*process
	for _, name := range []string{"broker-1", "broker-2", "broker-3"} {
		brokers = append(brokers, f.start(name))
	}
	edge, n1, n2 := f.start("edge"), f.start("node-n1"), f.start("node-n2")
	gen := map[string]uint64{"n1": edge.connected("n1", 0), "n2": edge.connected("n2", 0)}
	for i, step := range []string{"begin", "switch", "finish"} {
		f.iop("rotate", "ca", step, "--out", f.dir, "--force")
		// One after the other: for a while some are a step ahead.
		brokers[i].kill()
		brokers[i] = f.start([]string{"broker-1", "broker-2", "broker-3"}[i])
		brokers[i].log.AwaitEvent(t, "broker.ready")
		for j, b := range brokers {
			if j != i {
				b.hup("broker.rotated")
			}
		}
		edge.hup(map[string]string{"begin": "edge.roots_renewed", "switch": "edge.keys_renewed", "finish": "edge.roots_renewed"}[step])
		for name, n := range map[string]*process{"n1": n1, "n2": n2} {
			n.signal(syscall.SIGHUP)
			if step == "switch" { // it dials with the new certificate
				gen[name] = edge.connected(name, gen[name])
			}
		}
		f.served("n1")
		f.served("n2")
	}
	for _, b := range brokers {
		if strings.Contains(b.log.String(), "reason=route") {
			t.Errorf("%s refuses another broker", b.name)
		}
	}
	// By now nobody needs the old one: all start from their files.
	for _, b := range brokers {
		b.stop()
	}
	for name := range gen { // each broker sent its Nodes to those that were left
		gen[name] = edge.log.LastSession(name)
	}
	for i, name := range []string{"broker-1", "broker-2", "broker-3"} {
		brokers[i] = f.start(name)
	}
	for name, before := range gen {
		edge.connected(name, before)
		f.served(name)
	}
}

// A certificate that comes to its end while its Node is connected ends the session, with
// a reason; nobody comes in with it after that, with a reason; and a newer one in the
// file is all it takes to be back. Other Nodes notice nothing.
//
// Contract: B2 B3 B8
func TestCertificateEndsWhileConnected(t *testing.T) {
	f := newFabric(t, 1, "n1", "n2")
	broker, edge := f.start("broker-1"), f.start("edge")
	ca := try(identity.LoadCA(f.path("authority")))(t)
	id := try(identity.LoadCertificate(f.path("node-n1/cert.pem"), f.path("node-n1/cert.key")))(t).ID()
	short := try(ca.Issue(id, nil, 6*time.Second))(t)
	must(t, short.Save(f.path("node-n1/cert.pem"), f.path("node-n1/cert.key")))
	n1 := f.start("node-n1")
	f.start("node-n2")
	before := edge.connected("n1", 0)
	edge.connected("n2", 0)
	stop := f.traffic("n2")
	running, _ := f.open("n1", fakeprovider.Hang())
	n1.log.AwaitEvent(t, "node.session_ended", "reason=certificate_expired")
	t.Logf("ended %v after the certificate's end", time.Since(short.Leaf.NotAfter).Round(time.Millisecond))
	if got := rest([]*http.Response{running})[0]; strings.Count(got, `"error"`) != 1 {
		t.Errorf("what ran ended as %q", got)
	}
	broker.log.AwaitEvent(t, "broker.evicted", "node=n1", "reason=certificate_expired")
	n1.log.AwaitEvent(t, "node.dial_failed", "refused our certificate", "expired")
	broker.log.AwaitEvent(t, "broker.refused", "reason=certificate")
	f.iop("rotate", "node", "n1", "--out", f.dir)
	edge.connected("n1", before)
	f.served("n1")
	if n := stop(); n == 0 {
		t.Error("the other node served nothing")
	}
}
