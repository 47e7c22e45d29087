package demo

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"time"

	"github.com/iop-fabric/iop/agent"
)

// Model is the one model's name.
const Model = "demo"

const maxRequest = 16 << 20

// Options configure an Adapter.
type Options struct {
	ChunkDelay time.Duration    // before each token, unless the message says otherwise
	Now        func() time.Time // time.Now
}

// Adapter is the stand-in.
type Adapter struct {
	delay   time.Duration
	now     func() time.Time
	started int64
	running agent.Running
}

// New returns an adapter.
func New(o Options) *Adapter {
	if o.Now == nil {
		o.Now = time.Now
	}
	return &Adapter{delay: max(o.ChunkDelay, 0), now: o.Now, started: o.Now().Unix()}
}

// Start has nothing to prepare.
func (a *Adapter) Start(context.Context) error { return nil }

// Stop waits for exchanges under way, as long as ctx lets it.
func (a *Adapter) Stop(ctx context.Context) error { return a.running.Stop(ctx) }

// Probe knows: the model is there, and no other.
func (a *Adapter) Probe(_ context.Context, target string) agent.Health {
	if target == Model {
		return agent.Available
	}
	return agent.Unavailable
}

// operationOf names the operation of a path, for callers that give none.
var operationOf = map[string]string{
	"GET /v1/models":            "models",
	"POST /v1/chat/completions": "chat_completions",
}

// Exchange answers one exchange.
func (a *Adapter) Exchange(ctx context.Context, ex agent.Exchange, sink agent.Sink) error {
	if !a.running.Enter() {
		return &agent.Failure{Code: agent.CodeUnreachable, Message: "the demo model is stopped", Retryable: true}
	}
	defer a.running.Leave()
	if c, ok := ex.Body.(io.Closer); ok {
		defer c.Close() // it is read no further
		defer context.AfterFunc(ctx, func() { _ = c.Close() })()
	}
	op := ex.Operation
	if op == "" {
		op = operationOf[ex.Method+" "+ex.Path]
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	switch op {
	case "models":
		return a.models(sink)
	case "chat_completions":
		return a.chat(ctx, ex, sink)
	default:
		return &agent.Failure{Code: agent.CodeInvalid, Message: "the demo model offers models and chat completions only"}
	}
}

func (a *Adapter) models(sink agent.Sink) error {
	return answer(sink, 200, modelList{
		Object: "list",
		Data:   []modelEntry{{ID: Model, Object: "model", Created: a.started, OwnedBy: "iop"}},
	})
}

func (a *Adapter) chat(ctx context.Context, ex agent.Exchange, sink agent.Sink) error {
	if ex.BodySize > maxRequest {
		return refuse(sink, 413, "invalid_request_error", "", "the request is too large for the demo model")
	}
	var raw []byte
	if ex.Body != nil {
		var err error
		if raw, err = io.ReadAll(io.LimitReader(ex.Body, ex.BodySize)); err != nil || int64(len(raw)) < ex.BodySize {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			return &agent.Failure{Code: agent.CodeInternal, Message: "the request's body broke off"}
		}
	}
	var req chatRequest
	if err := json.Unmarshal(raw, &req); err != nil {
		return refuse(sink, 400, "invalid_request_error", "", "the body is not a chat completion request in JSON")
	}
	if req.Model != Model {
		return refuse(sink, 404, "invalid_request_error", "model_not_found", "the demo provider has one model, demo")
	}
	if len(req.Messages) == 0 {
		return refuse(sink, 400, "invalid_request_error", "", "messages must not be empty")
	}
	if req.N != nil && *req.N != 1 {
		return refuse(sink, 400, "invalid_request_error", "", "the demo model gives one choice")
	}
	o, err := parseOrders(req.lastUser())
	if err != nil {
		return refuse(sink, 400, "invalid_request_error", "", err.Error())
	}
	if !o.delayed {
		o.delay = a.delay
	}
	if o.status != 0 {
		return refuse(sink, o.status, errorType(o.status), "", fmt.Sprintf("demo:status=%d asked for this", o.status))
	}
	tokens := o.answer()
	finish := "stop"
	if limit := req.limit(); limit >= 0 && len(tokens) > limit {
		tokens, finish = tokens[:limit], "length"
	}
	r := reply{
		id:      "chatcmpl-" + random(),
		created: a.now().Unix(),
		tokens:  tokens,
		finish:  finish,
		usage:   usage{Prompt: req.tokens(), Completion: len(tokens), Total: req.tokens() + len(tokens)},
		orders:  o,
	}
	if req.Stream {
		return r.stream(ctx, sink, req.StreamOptions.IncludeUsage)
	}
	return r.whole(ctx, sink)
}

// reply is one answer, ready to be given.
type reply struct {
	id      string
	created int64
	tokens  []string
	finish  string
	usage   usage
	orders  orders
}

var errCut error = &agent.Failure{Code: agent.CodeProvider, Message: "the demo model broke off, as demo:cut asked"}

func (r *reply) whole(ctx context.Context, sink agent.Sink) error {
	for range r.tokens {
		if err := wait(ctx, r.orders.delay); err != nil {
			return err
		}
	}
	text := ""
	for _, t := range r.tokens {
		text += t
	}
	b, err := json.Marshal(completion{
		ID: r.id, Object: "chat.completion", Created: r.created, Model: Model,
		Choices: []choice{{Message: &message{Role: "assistant", Content: &text}, FinishReason: &r.finish}},
		Usage:   &r.usage,
	})
	if err != nil {
		return fmt.Errorf("demo answer: %w", err)
	}
	if r.orders.cut >= 0 {
		if err := start(sink, 200, "application/json", int64(len(b))); err != nil {
			return err
		}
		if err := sink.Body(b[:len(b)/2]); err != nil {
			return err
		}
		return errCut
	}
	return deliver(sink, 200, b)
}

func (r *reply) stream(ctx context.Context, sink agent.Sink, withUsage bool) error {
	if err := start(sink, 200, "text/event-stream", -1); err != nil {
		return err
	}
	chunks := 0
	cut := func() error {
		if chunks == r.orders.cut {
			return errCut
		}
		return nil
	}
	send := func(c completion) error {
		if err := cut(); err != nil {
			return err
		}
		chunks++
		c.ID, c.Object, c.Created, c.Model = r.id, "chat.completion.chunk", r.created, Model
		return event(sink, c)
	}
	delta := func(m message, finish *string) error {
		return send(completion{Choices: []choice{{Delta: &m, FinishReason: finish}}})
	}
	empty := ""
	if err := delta(message{Role: "assistant", Content: &empty}, nil); err != nil {
		return err
	}
	for _, t := range r.tokens {
		if err := wait(ctx, r.orders.delay); err != nil {
			return err
		}
		if err := delta(message{Content: &t}, nil); err != nil {
			return err
		}
	}
	if err := delta(message{}, &r.finish); err != nil {
		return err
	}
	if withUsage {
		if err := send(completion{Choices: []choice{}, Usage: &r.usage}); err != nil {
			return err
		}
	}
	if err := cut(); err != nil {
		return err
	}
	return sink.Body([]byte("data: [DONE]\n\n"))
}

// wait returns at once when the context ends (I2).
func wait(ctx context.Context, d time.Duration) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if d <= 0 {
		return nil
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func event(sink agent.Sink, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("demo event: %w", err)
	}
	return sink.Body(append(append([]byte("data: "), b...), "\n\n"...))
}

func answer(sink agent.Sink, status int, v any, extra ...agent.Field) error {
	b, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("demo answer: %w", err)
	}
	return deliver(sink, status, b, extra...)
}

func deliver(sink agent.Sink, status int, b []byte, extra ...agent.Field) error {
	if err := start(sink, status, "application/json", int64(len(b)), extra...); err != nil {
		return err
	}
	return sink.Body(b)
}

func start(sink agent.Sink, status int, contentType string, size int64, extra ...agent.Field) error {
	h := make([]agent.Field, 0, 2+len(extra))
	if size >= 0 {
		h = append(h, agent.Field{Name: "Content-Length", Value: strconv.AppendInt(nil, size, 10)})
	}
	h = append(h, agent.Field{Name: "Content-Type", Value: []byte(contentType)})
	return sink.Start(status, append(h, extra...), size)
}

// refuse answers with an OpenAI error; 429 and 503 say when to come again.
func refuse(sink agent.Sink, status int, kind, code, text string) error {
	var e errorAnswer
	e.Error.Message, e.Error.Type = text, kind
	if code != "" {
		e.Error.Code = &code
	}
	if status == 429 || status == 503 {
		return answer(sink, status, e, agent.Field{Name: "Retry-After", Value: []byte("1")})
	}
	return answer(sink, status, e)
}

func errorType(status int) string {
	switch {
	case status == 401:
		return "authentication_error"
	case status == 403:
		return "permission_error"
	case status == 429:
		return "rate_limit_error"
	case status >= 500:
		return "server_error"
	default:
		return "invalid_request_error"
	}
}

func random() string {
	var b [12]byte
	rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}

var errOrder = errors.New("a demo: word has a value it cannot have; say help for the list")
