package openai_compat

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/iop-fabric/iop/agent"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// hang is how long a test may wait for an event that must come; it bounds a
// broken run and asserts nothing.
const hang = 30 * time.Second

// answer is a Sink that keeps everything.
type answer struct {
	status  int
	header  []agent.Field
	size    int64
	starts  int
	reads   [][]byte
	trailer []agent.Field
	onStart func() error
	onBody  func(p []byte) error
}

func (a *answer) Start(status int, h []agent.Field, size int64) error {
	a.status, a.header, a.size = status, h, size
	a.starts++
	if a.onStart != nil {
		return a.onStart()
	}
	return nil
}

func (a *answer) Body(p []byte) error {
	a.reads = append(a.reads, bytes.Clone(p))
	if a.onBody != nil {
		return a.onBody(p)
	}
	return nil
}

func (a *answer) Trailer(f []agent.Field) error {
	a.trailer = f
	return nil
}

func (a *answer) body() string { return string(bytes.Join(a.reads, nil)) }

func (a *answer) values(name string) []string { return values(a.header, name) }

func values(fields []agent.Field, name string) []string {
	var out []string
	for _, f := range fields {
		if strings.EqualFold(f.Name, name) {
			out = append(out, string(f.Value))
		}
	}
	return out
}

func newAdapter(t testing.TB, o Options) *Adapter {
	t.Helper()
	a, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), hang)
		defer cancel()
		if err := a.Stop(ctx); err != nil {
			t.Errorf("stop: %v", err)
		}
	})
	return a
}

func post(body string) agent.Exchange {
	return agent.Exchange{Operation: "chat_completions", Body: strings.NewReader(body), BodySize: int64(len(body))}
}

func wantFailure(t *testing.T, err error, code agent.Code, reason Reason) *agent.Failure {
	t.Helper()
	var f *agent.Failure
	if !errors.As(err, &f) {
		t.Fatalf("got %v (%T), want a failure of code %s", err, err, code)
	}
	if f.Code != code || (reason != "" && f.Metadata[MetaReason] != string(reason)) {
		t.Fatalf("got %s %v (%s), want %s %s", f.Code, f.Metadata, f.Message, code, reason)
	}
	return f
}

func await(t *testing.T, what string, ch <-chan struct{}) {
	t.Helper()
	select {
	case <-ch:
	case <-time.After(hang):
		t.Fatalf("%s never came", what)
	}
}
