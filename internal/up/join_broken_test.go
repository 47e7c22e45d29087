package up

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/iop-fabric/iop/broker/enrol"
	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/identity"
)

// files are what a join makes, in its order; node.yaml says that it is whole.
var files = []string{"joining", "cert.key", "user.nk", "curve.nk", "cert.pem", "ca.pem", "joined.json", "node.yaml"}

// asked are the requests that the authority has heard, each machine once.
func (o *office) asked() (machines []string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, r := range o.requests {
		if d := string(r.Digest()); !slices.Contains(machines, d) {
			machines = append(machines, d)
		}
	}
	return machines
}

// A line that was cut anywhere makes nothing and asks nobody.
//
// Contract: B11 D1
func TestJoinCutLine(t *testing.T) {
	o := newOffice(t, identity.RoleBroker)
	dir := filepath.Join(t.TempDir(), "node")
	for n := 1; n < len(o.token.Text()); n++ {
		j := o.join(dir)
		j.Token = j.Token[:n]
		if err := j.Check(); err == nil || !strings.Contains(err.Error(), "the invite line: ") {
			t.Errorf("cut after %d: %v", n, err)
		}
		if err := j.Run(t.Context()); err == nil {
			t.Errorf("cut after %d, it joins", n)
		}
	}
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) || len(o.asked()) != 0 {
		t.Errorf("something was made or asked: %v", err)
	}
}

// Nobody listens there; somebody does who is no authority: the machine says so, and
// gives nothing away.
//
// Contract: B11 L8
func TestJoinFindsNobody(t *testing.T) {
	o := newOffice(t, identity.RoleBroker)
	shut, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	shut.Close()
	var heard []string
	other := func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		heard = append(heard, string(b))
	}
	plain, website := httptest.NewServer(http.HandlerFunc(other)), httptest.NewUnstartedServer(http.HandlerFunc(other))
	website.Config.ErrorLog = log.New(io.Discard, "", 0)
	website.StartTLS()
	t.Cleanup(plain.Close)
	t.Cleanup(website.Close)
	for name, c := range map[string]struct{ addr, want string }{
		"nobody":    {shut.Addr().String(), "does not answer (it listens only while an invitation is open)"},
		"plain":     {plain.Listener.Addr().String(), "does not answer"},
		"a website": {website.Listener.Addr().String(), "is not the authority of this invitation: its CA is another"},
	} {
		ctx, cancel := context.WithCancel(t.Context())
		j := o.join(t.TempDir())
		j.Authority = c.addr
		said := ""
		j.Tell = func(s string) { said = s; cancel() } // it would try again for a while
		if err := j.Run(ctx); err == nil || !strings.Contains(said+err.Error(), c.want) {
			t.Errorf("%s: %v; told %q", name, err, said)
		}
		cancel()
		if present(j.Folder.NodeConfig()) {
			t.Errorf("%s: there is a configuration", name)
		}
	}
	if len(heard) != 0 {
		t.Errorf("a request was sent to %q", heard)
	}
}

// A clock that is minutes off on either side keeps nobody out; one that is years off
// is asked about, before the invitation is used and after.
//
// Contract: B11
func TestJoinClocksApart(t *testing.T) {
	o := newOffice(t, identity.RoleBroker) // its certificates are of this year
	key, err := identity.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	csr, err := key.Request("gpu1")
	if err != nil {
		t.Fatal(err)
	}
	public, err := identity.ParseRequest(csr)
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	der := must(o.ca.Sign(public, identity.ID{TrustDomain: "iop", Edge: "home", Role: identity.RoleNode, Name: "gpu1"}, nil, time.Hour))
	node := must(key.Certificate([][]byte{der}))
	for _, c := range []*identity.Certificate{node, o.cert} {
		if begins, ends := now.Sub(c.Leaf.NotBefore), c.Leaf.NotAfter.Sub(now); begins < 55*time.Minute || ends < 55*time.Minute {
			t.Errorf("%s: good from %v before now until %v after it: a machine's clock may be 55 minutes off", c.ID().Role, begins, ends)
		}
	}
	answer := enrol.Answer{
		Certificate: string(identity.EncodeChain([][]byte{der})), CA: string(o.ca.PEM()), Issuers: []string{o.issuer},
		BrokerURLs: []string{"tls://hub.example:4222"}, Edge: "home", TrustDomain: "iop",
	}
	if _, _, err := answer.Accept(o.token, key); err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) { // the year is 2000 here
		if _, _, err := answer.Accept(o.token, key); err == nil || !strings.Contains(clocked(err).Error(), "is this machine's clock right?") {
			t.Errorf("after the invitation was used: %v", err)
		}
		state := tlsState(o)
		if err := pinned(state, o.token.CA); err == nil || !strings.Contains(err.Error(), "is this machine's clock right?") {
			t.Errorf("before it: %v", err)
		}
	})
	if err := pinned(tlsState(o), o.token.CA); err != nil {
		t.Error(err)
	}
}

// tlsState is what a machine sees of the office.
func tlsState(o *office) tls.ConnectionState {
	var state tls.ConnectionState
	for _, der := range [][]byte{o.cert.Chain[0], o.ca.DER()} {
		state.PeerCertificates = append(state.PeerCertificates, must(x509.ParseCertificate(der)))
	}
	return state
}

// Whatever cannot be written, the machine says which file and what to do; the same
// line then goes on with the same keys, and the invitation is used by one machine.
//
// Contract: B11 Z4
func TestJoinCannotWrite(t *testing.T) {
	for n, file := range files {
		o := newOffice(t, identity.RoleBroker)
		dir := t.TempDir()
		way := filepath.Join(dir, file, "in the way")
		if err := os.MkdirAll(way, 0o700); err != nil {
			t.Fatal(err)
		}
		j := o.join(dir)
		if n > 4 && file != "node.yaml" { // this machine was joining: what is in the way came in between
			if err := identity.WriteKeyFile(j.path("joining"), []byte(j.invitation())); err != nil {
				t.Fatal(err)
			}
		}
		err := j.Run(t.Context())
		want := "give the same line again"
		if file == "node.yaml" {
			want = "joined.json" // a folder of that name looks like one that has joined
		}
		if err == nil || !strings.Contains(err.Error(), filepath.Join(dir, file)) && file != "node.yaml" || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", file, err)
		}
		if n > 4 && file != "node.yaml" && !strings.Contains(err.Error(), "within 15 minutes") {
			t.Errorf("%s, after the invitation was used: %v", file, err)
		}
		if err := os.RemoveAll(filepath.Join(dir, file)); err != nil {
			t.Fatal(err)
		}
		if err := j.Run(t.Context()); err != nil {
			t.Errorf("%s, mended: %v", file, err)
		}
		if n := len(o.asked()); n != 1 {
			t.Errorf("%s: %d machines have asked", file, n)
		}
	}
}

// helperJoin marks the process that joins to be killed: its authority and token.
const helperJoin = "IOP_TEST_JOIN"

func TestHelperJoin(t *testing.T) {
	line := strings.Fields(os.Getenv(helperJoin))
	if len(line) != 3 {
		return // it is a process of TestJoinKilled, and no test
	}
	if err := (Join{Folder: Folder(line[0]), Authority: line[1], Token: line[2]}).Run(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// Killed at any step, the same line joins, as the same machine.
//
// Contract: B11 Z4
func TestJoinKilled(t *testing.T) {
	for _, file := range files {
		o := newOffice(t, identity.RoleBroker)
		if slices.Index(files, file) < 4 { // its answer is lost then
			o.answer = func(w http.ResponseWriter, attempt int, good enrol.Answer) {
				if attempt > 1 {
					json.NewEncoder(w).Encode(good)
					return
				}
				drop(w)
			}
		}
		dir := t.TempDir()
		j := o.join(dir)
		victim := exec.Command(os.Args[0], "-test.run", "^TestHelperJoin$") //nolint:gosec // this very test
		victim.Env = append(os.Environ(), helperJoin+"="+dir+" "+j.Authority+" "+j.Token)
		if err := victim.Start(); err != nil {
			t.Fatal(err)
		}
		ended := make(chan error, 1) // its one end
		go func() { ended <- victim.Wait() }()
		for seen := false; !seen; {
			seen = present(filepath.Join(dir, file))
			select {
			case <-ended: // it was quicker
				seen = true
				ended <- nil
			default:
			}
		}
		_ = victim.Process.Kill() // it may have ended
		<-ended
		user, _ := os.ReadFile(filepath.Join(dir, "user.nk"))
		if err := j.Run(t.Context()); err != nil {
			t.Errorf("killed at %s: %v", file, err)
			continue
		}
		if _, err := configs.Load(j.Folder.NodeConfig()); err != nil {
			t.Errorf("killed at %s: %v", file, err)
		}
		after, err := os.ReadFile(filepath.Join(dir, "user.nk"))
		if err != nil || len(user) > 0 && string(user) != string(after) {
			t.Errorf("killed at %s: another nkey, %v", file, err)
		}
		if n := len(o.asked()); n != 1 {
			t.Errorf("killed at %s: %d machines have asked", file, n)
		}
		if left, _ := filepath.Glob(filepath.Join(dir, ".iop-*")); len(left) > 0 {
			t.Errorf("killed at %s: left over: %v", file, left)
		}
	}
}
