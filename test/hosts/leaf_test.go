package hosts

import (
	"net/http"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/iop-fabric/iop/internal/fakeprovider"
)

// A Node behind a leaf, each a process of its own started from its own folder:
// it streams; the leaf killed fences it, the leaf back brings it back.
//
// Contract: Y3 B7 S4 D7
func TestLeafSite(t *testing.T) {
	f := newFabric(t, 1, "n1")
	// The site is added later, as an operator would: what the files lack is printed.
	out := f.iop("init", "--out", f.dir, "--leaf", "attic="+f.net+"50", "--node", "far@attic", "--demo")
	f.adopt(out)
	broker, edge, leaf := f.start("broker-1"), f.start("edge"), f.start("leaf-attic")
	far := f.start("node-far")
	before := edge.connected("far", 0)
	f.served("far")
	stream, _ := f.open("far", fakeprovider.Hang())
	leaf.kill()
	if got := rest([]*http.Response{stream})[0]; strings.Count(got, `"error"`) != 1 {
		t.Errorf("the leaf killed: the stream ended as %q", got)
	}
	leaf = f.start("leaf-attic")
	edge.connected("far", before)
	f.served("far")
	for _, p := range []*process{far, leaf, edge, broker} {
		p.stop()
	}
}

// adopt does what iop init asked for: members and the leaf listener into the
// broker's file, the node into the Edge's.
func (f *fabric) adopt(out string) {
	f.t.Helper()
	for _, section := range strings.Split(out, "\nbelow ")[1:] {
		head, text, _ := strings.Cut(section, ":\n\n")
		text, _, _ = strings.Cut(text, "\n\n") // what follows says how it is read
		key, file, _ := strings.Cut(head, " in ")
		whole := f.read(file)
		name := key[strings.LastIndexByte(key, '.')+1:] + ":"
		at := strings.Index(whole, name)
		line := strings.IndexByte(whole[max(at, 0):], '\n')
		if at < 0 || line < 0 {
			f.t.Fatalf("no %s in %s", key, file)
		}
		if key == "edge.nodes" { // with a provider of the test's
			text = f.node("far")
			whole = strings.Replace(whole, "  models:\n", "  models:\n    - {name: far, providers: [{provider: far/m}]}\n", 1)
			at = strings.Index(whole, name)
			line = strings.IndexByte(whole[at:], '\n')
		}
		f.write(file, whole[:at+line+1]+strings.TrimSuffix(text, "\n")+"\n"+whole[at+line+1:])
		if b, err := exec.Command(binary, "validate", f.path(file)).CombinedOutput(); err != nil {
			f.t.Fatalf("%s after what was asked for:\n%s\n%s", file, b, f.read(file))
		}
	}
	if _, err := os.Stat(f.path("node-far/node-far.yaml")); err != nil {
		f.t.Fatal(err)
	}
}
