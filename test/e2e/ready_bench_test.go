package e2e

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"testing"
	"time"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/ioptest"
	"github.com/iop-fabric/iop/internal/up"
)

// states is a log that hands on when a Node entered which state, and nothing else.
type states chan state

type state struct {
	name string
	at   time.Time
}

func (s states) Enabled(context.Context, slog.Level) bool { return true }
func (s states) WithAttrs([]slog.Attr) slog.Handler       { return s }
func (s states) WithGroup(string) slog.Handler            { return s }
func (s states) Handle(_ context.Context, r slog.Record) error {
	if r.Message == "node.state" {
		at := time.Now()
		r.Attrs(func(a slog.Attr) bool {
			if a.Key == "state" {
				s <- state{a.Value.String(), at}
			}
			return true
		})
	}
	return nil
}

// BenchmarkNodeReady: a Node daemon dials over mutual TLS, is admitted and given its
// generation, gets its token, registers, applies its configuration and is ready, on
// one host (goal: p50 within 10 ms). Each is another Node of the fabric, one after
// the other; the key files are read before.
func BenchmarkNodeReady(b *testing.B) {
	const nodes = 512 // more are names that have been there before
	o := ioptest.Options{Quiet: true}
	for i := range nodes {
		o.Nodes = append(o.Nodes, configs.EdgeNode{Name: fmt.Sprint("n", i), Adapters: []configs.Adapter{{Type: configs.TypeDemo}}})
	}
	f := ioptest.Start(b, o)
	var whole []time.Duration
	steps := map[string][]time.Duration{}
	i := 0
	for b.Loop() {
		cfg := f.NodeConfig(fmt.Sprint("n", i%nodes))
		i++
		seen := make(states, 64) // more than a session's states
		n, err := up.NewNode(cfg, func() []string { return cfg.Broker.URLs }, slog.New(seen), nil)
		if err != nil {
			b.Fatal(err)
		}
		ctx, cancel := context.WithCancel(b.Context())
		done := make(chan error, 1)
		began := time.Now()
		go func() { done <- n.Run(ctx) }()
		for last := began; ; {
			s := <-seen
			steps[s.name] = append(steps[s.name], s.at.Sub(last))
			if last = s.at; s.name == "ready" {
				whole = append(whole, s.at.Sub(began))
				break
			}
		}
		b.StopTimer()
		cancel()
		if err := <-done; err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
	}
	for name, times := range steps {
		slices.Sort(times)
		b.Logf("to %s: p50 %v of %d", name, times[len(times)/2], len(times))
	}
	report(b, whole)
}
