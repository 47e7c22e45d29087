package registry

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/iop-fabric/iop/internal/script"
	"github.com/iop-fabric/iop/wire"
)

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
	script.Run(t, func() script.Event {
		return (&scriptRun{r: New(Config{Nodes: []string{"n1", "n2"}}), now: epoch}).event
	})
}

type scriptRun struct {
	r   *Registry
	now time.Time
}

// event is also taken by a clone, which must do the same.
func (s *scriptRun) event(t *testing.T, words []string) (out []string) {
	var ev Event
	switch words[0] {
	case "show":
		for _, n := range s.r.Snapshot() {
			out = append(out, fmt.Sprintf("%s gen %d %s connected=%v draining=%v configured=%v",
				n.Node, n.Gen, n.State, n.Connected, n.Draining, n.Configured))
		}
		return out
	case "after":
		d, err := time.ParseDuration(words[1])
		if err != nil {
			t.Fatal(err)
		}
		if s.now = s.now.Add(d); s.r.Deadline().IsZero() || s.r.Deadline().After(s.now) {
			return nil
		}
		ev = DeadlinePassed{}
	default:
		ev = parseEvent(t, words)
	}
	clone := s.r.Clone()
	effects := s.r.Step(s.now, ev, nil)
	again := clone.Step(s.now, ev, nil)
	if !slices.Equal(effects, again) || string(s.r.AppendKey(nil)) != string(clone.AppendKey(nil)) {
		t.Fatalf("%v: a clone does otherwise: %v", words, again)
	}
	for _, e := range effects {
		out = append(out, printEffect(e))
	}
	return out
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
