package hosts

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/iop-fabric/iop/internal/adminapi"
	"github.com/iop-fabric/iop/internal/fakeprovider"
	"github.com/iop-fabric/iop/internal/ioptest"
	"github.com/iop-fabric/iop/internal/up"
)

// TestJoinToFirstAnswer: a machine with nothing but the binary and a model server
// joins an `iop up` that has its defaults, and answers a caller through it. What that
// takes is logged (goal: 10 s from the command to the answer).
//
// Contract: B11 D1 Y1
func TestJoinToFirstAnswer(t *testing.T) {
	f := &fabric{t: t, dir: t.TempDir(), client: &http.Client{Transport: &http.Transport{}}}
	t.Cleanup(f.client.CloseIdleConnections)
	p := fakeprovider.New(t)
	p.Handle(func(r *fakeprovider.Request) []fakeprovider.Step {
		if strings.HasSuffix(r.Path, "/models") {
			return fakeprovider.JSON(200, `{"object":"list","data":[{"id":"far","object":"model"}]}`)
		}
		return fakeprovider.JSON(200, `{"choices":[{"index":0,"message":{"role":"assistant","content":"hello from afar"}}]}`)
	})
	f.write("iop.yaml", fmt.Sprintf("broker: {}\nedge:\n  nodes: [{name: here, adapters: [{type: demo}]}]\n"+
		"  invited_adapters: [{name: p, type: openai_compat, base_url: %q}]\n", p.URL))

	var out ioptest.LogBuffer
	hub := f.launch("up", &out, nil, "up", "--json", "--data-dir", f.path("data"), "--config", f.path("iop.yaml"),
		"--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0", "--broker-listen", "127.0.0.1:0", "--enrol-listen", "127.0.0.1:0")
	var info up.Info
	out.Await(t, func(line string) bool { return json.Unmarshal([]byte(line), &info) == nil })
	var i adminapi.Invited
	must(t, json.Unmarshal([]byte(f.iop("invite", "gpu1", "--data-dir", info.DataDir, "--json")), &i))

	began := time.Now()
	node := f.launch("join", nil, nil, append(strings.Fields(i.Command)[1:], "--dir", f.path("gpu1"))...)
	hub.log.AwaitEvent(t, "node.connected", "node=gpu1 ")
	connected := time.Since(began)
	hub.log.AwaitEvent(t, "models.changed", "far")
	offered := time.Since(began)
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, info.BaseURL+"/chat/completions",
		strings.NewReader(`{"model":"far","messages":[{"role":"user","content":"hi"}]}`))
	must(t, err)
	req.Header.Set("Authorization", "Bearer "+info.APIKey)
	req.Header.Set("Content-Type", "application/json")
	resp, err := f.client.Do(req)
	must(t, err)
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != 200 || !strings.Contains(string(b), "hello from afar") {
		t.Fatalf("%d %s %v", resp.StatusCode, b, err)
	}
	t.Logf("from iop join: connected after %v, its model on offer after %v, the answer after %v",
		connected.Round(time.Millisecond), offered.Round(time.Millisecond), time.Since(began).Round(time.Millisecond))
	node.stop()
	hub.stop()
}

// TestJoinBehindALeaf: two machines of a leaf's site join with one line each, the one
// told what to dial by the leaf's name, the other by itself, and are ready through it;
// nothing of theirs is edited by hand.
//
// Contract: B11 Y3 D1
func TestJoinBehindALeaf(t *testing.T) {
	f := newFabric(t, 1, "n1")
	f.adopt(f.iop("init", "--out", f.dir, "--leaf", "attic="+f.net+"50", "--node", "far@attic", "--demo"))
	leafURL := "tls://" + f.net + "50:4222"
	text := strings.NewReplacer("# admin_listen: 127.0.0.1:8401", "admin_listen: "+f.net+"1:8401", "# admin_token:", "admin_token:",
		"# enrolment: {", fmt.Sprintf("enrolment: {leaves: {attic: %q}, ", leafURL)).Replace(f.read("broker-1/broker-1.yaml"))
	f.write("broker-1/broker-1.yaml", text)
	f.write("broker-1/admin-token", "0123456789abcdef\n")
	f.write("broker-1/ca.key", f.read("authority/ca.key"))
	f.write("edge/edge.yaml", f.read("edge/edge.yaml")+"  invited: true\n  invited_adapters: [{type: demo}]\n")
	broker, edge := f.start("broker-1"), f.start("edge")
	leaf := f.start("leaf-attic")
	broker.log.AwaitEvent(t, "broker.ready")
	leaf.log.AwaitEvent(t, "leaf.hub_near")
	invite := func(name string, more ...string) []string {
		var i adminapi.Invited
		must(t, json.Unmarshal([]byte(f.iop(append([]string{"invite", name, "--json", "--config", f.path("broker-1/broker-1.yaml")}, more...)...)), &i))
		return append(strings.Fields(i.Command)[1:], "--dir", f.path(name))
	}
	box := f.launch("join", nil, nil, invite("box", "--leaf", "attic")...)
	shed := f.launch("join", nil, nil, append(invite("shed"), "--broker-url", leafURL)...)
	for _, name := range []string{"box", "shed"} {
		edge.connected(name, 0)
		if text := f.read(name + "/node.yaml"); !strings.Contains(text, "urls: [\""+leafURL+"\"]") {
			t.Errorf("%s dials something else:\n%s", name, text)
		}
	}
	for _, p := range []*process{box, shed, leaf, edge, broker} {
		p.stop()
	}
}
