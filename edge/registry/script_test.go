package registry

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/iop-fabric/iop/wire"
)

var update = flag.Bool("update", false, "rewrite the effects in testdata")

var epoch = time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)

// A script is lines of intent (#), events, and indented effects.
//
//	admit NODE GEN | close NODE GEN
//	register NODE GEN [id=NODE] [unproved] [protocol=N]
//	ready NODE GEN [id=NODE] | sent NODE GEN | failed NODE GEN
//	beat NODE GEN [draining] | message NODE GEN | misbehaved NODE GEN
//	after D (the time passes, and the deadline if it is due)
//	config [NODE]... | stopping | stopped | show
//
// A script starts with n1 and n2 configured.
func TestScripts(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatal("no scripts", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			got := runScript(t, string(want))
			if *update {
				if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			if got != string(want) {
				t.Errorf("effects differ; got\n%s", got)
			}
		})
	}
}

func runScript(t *testing.T, text string) string {
	r := New(Config{Nodes: []string{"n1", "n2"}})
	now := epoch
	var out strings.Builder
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\n")
		if strings.HasPrefix(line, "\t") {
			continue
		}
		out.WriteString(line + "\n")
		words := strings.Fields(line)
		if len(words) == 0 || words[0] == "#" {
			continue
		}
		if words[0] == "show" {
			for _, s := range r.Snapshot() {
				fmt.Fprintf(&out, "\t%s gen %d %s connected=%v draining=%v configured=%v\n",
					s.Node, s.Gen, s.State, s.Connected, s.Draining, s.Configured)
			}
			continue
		}
		var ev Event
		if words[0] == "after" {
			d, err := time.ParseDuration(words[1])
			if err != nil {
				t.Fatal(err)
			}
			if now = now.Add(d); r.Deadline().IsZero() || r.Deadline().After(now) {
				continue
			}
			ev = DeadlinePassed{}
		} else {
			ev = parseEvent(t, words)
		}
		clone := r.Clone()
		effects := r.Step(now, ev, nil)
		again := clone.Step(now, ev, nil)
		if !slices.Equal(effects, again) || string(r.AppendKey(nil)) != string(clone.AppendKey(nil)) {
			t.Fatalf("%s: a clone does otherwise: %v", line, again)
		}
		for _, e := range effects {
			fmt.Fprintf(&out, "\t%s\n", printEffect(e))
		}
	}
	return out.String()
}

func parseEvent(t *testing.T, w []string) Event {
	var (
		node, id string
		gen      uint64
		opts     = map[string]string{}
	)
	for _, o := range w[1:] {
		k, v, _ := strings.Cut(o, "=")
		opts[k] = v
	}
	has := func(k string) bool { _, ok := opts[k]; return ok }
	switch w[0] {
	case "config":
		return ConfigChanged{Nodes: w[1:]}
	case "stopping":
		return Stopping{}
	case "stopped":
		return Stopped{}
	}
	node, id = w[1], w[1]
	gen, err := strconv.ParseUint(w[2], 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	if has("id") {
		id = opts["id"]
	}
	switch w[0] {
	case "admit":
		return Admitted{Node: node, Gen: gen}
	case "close":
		return Closed{Node: node, Gen: gen}
	case "register":
		e := RegisterReceived{Node: node, Gen: gen, PayloadNode: id, ProtocolMin: 1, ProtocolMax: wire.ProtocolVersion}
		if has("unproved") {
			e.Verified = wire.Errorf(wire.Credential, "signature: %w", errors.New("bad"))
		}
		if has("protocol") {
			e.ProtocolMin, e.ProtocolMax = 99, 99
		}
		return e
	case "ready":
		return ReadyReceived{node, gen, id}
	case "sent":
		return ReadyAckSent{node, gen}
	case "failed":
		return ReadyAckFailed{node, gen}
	case "beat":
		return HeartbeatReceived{node, gen, has("draining")}
	case "message":
		return MessageReceived{node, gen}
	case "misbehaved":
		return Misbehaved{node, gen}
	}
	t.Fatalf("unknown command %v", w)
	return nil
}

func printEffect(e Effect) string {
	switch e := e.(type) {
	case SendRegisterAnswer:
		return fmt.Sprintf("register answer to %s/%d: accepted=%v repeat=%v %s%s", e.Node, e.Gen, e.Accepted, e.Repeat, e.Reason, paren(e.Class))
	case SendReadyAnswer:
		return fmt.Sprintf("ready answer to %s/%d: ready=%v %s%s", e.Node, e.Gen, e.Ready, e.Reason, paren(e.Class))
	case SendFence:
		return fmt.Sprintf("fence to %s/%d: %s%s", e.Node, e.Gen, e.Reason, paren(e.Class))
	case CloseSession:
		return fmt.Sprintf("close session %s/%d: %s", e.Node, e.Gen, e.Reason)
	case Activate:
		return fmt.Sprintf("activate %s/%d", e.Node, e.Gen)
	case FenceGeneration:
		return fmt.Sprintf("fence generation %s/%d: %s", e.Node, e.Gen, e.Cause)
	case Draining:
		return fmt.Sprintf("draining %s/%d: %v", e.Node, e.Gen, e.On)
	case NodeConnected:
		return fmt.Sprintf("node.connected %s/%d", e.Node, e.Gen)
	case NodeDisconnected:
		return fmt.Sprintf("node.disconnected %s/%d: %s", e.Node, e.Gen, e.Cause)
	}
	return fmt.Sprintf("%#v", e)
}

func paren(c wire.Class) string {
	if c == "" {
		return ""
	}
	return " (" + string(c) + ")"
}
