package httpapi

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"log/slog"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/edge/dispatch"
	"github.com/iop-fabric/iop/edge/pool"
	"github.com/iop-fabric/iop/wire"
	"github.com/iop-fabric/iop/wire/iopv1"
)

// One line tells the whole of a request that had a hard time.
// Contract: E7 D5 E12
func TestTheRequestLineTellsTheWholeStory(t *testing.T) {
	f := choosing(t, []answerFunc{unreachable, overloadedFor("1", "busy"), func(ctx context.Context, a dispatch.Attempt, w dispatch.Writer) dispatch.Result {
		res := says(200, fields("Content-Type", "text/event-stream"), chunk)(ctx, a, w)
		res.Err, res.Usage = wire.Errorf(wire.SessionEnded, "lost"), &iopv1.Usage{InputTokens: 7, OutputTokens: 3}
		return res
	}})
	acquire := f.pool.acquire
	f.pool.acquire = func(ctx context.Context, w Want) (Grant, error) {
		g, err := acquire(ctx, w)
		g.Waited = 1500 * time.Millisecond
		return g, err
	}
	_, body := f.do("POST", "/v1/chat/completions", streamChat, "X-Forwarded-For", "198.51.100.1")
	l := f.logged(1)
	for k, want := range map[string]any{
		"msg": "edge.request", "operation": "chat_completions", "principal": "alice", "remote": "127.0.0.1", "model": "tiny", "provider": "p3", "node": "n3",
		"attempts": 3.0, "status": 200.0, "class": "session_ended", "queue_wait": 4.5e9, "bytes_in": float64(len(streamChat)), "bytes_out": float64(len(chunk)),
		"input_tokens": 7.0, "output_tokens": 3.0,
	} {
		if l[k] != want {
			t.Errorf("%s is %v, want %v", k, l[k], want)
		}
	}
	if first, took := l["first_byte"].(float64), l["duration"].(float64); first <= 0 || first > took || !strings.HasSuffix(body, "\n\n") {
		t.Errorf("first byte after %v of %v", first, took)
	}
	if strings.Count(f.logs.String(), "\n") != 1 {
		t.Errorf("more than one line: %s", f.logs)
	}
}

// What a caller or a provider sends stands in no log line and no metric, in no
// spelling, at no level and however the request ends.
// Contract: E9 L5 O2 Z4
func TestNothingThatWasSentIsLogged(t *testing.T) {
	const canary = "canary7f3a91"
	f := newFixture(t)
	reg := prometheus.NewRegistry()
	var logs syncBuffer
	log := slog.New(slog.NewTextHandler(&logs, &slog.HandlerOptions{Level: slog.LevelDebug}))
	api := New(Config{Keys: []Key{{Name: "carol", Digest: DigestOf(canary + "-key")}}, RetryOn: configs.Statuses{{First: 500, Last: 599}}},
		Deps{Pool: f.pool, Runner: f.runner, Log: log, Metrics: reg})
	f.server.Config.Handler = api.Handler()
	f.server.Config.ErrorLog = api.Server(nil).ErrorLog
	grants := f.pool.acquire
	all := map[string]answerFunc{
		"good":      says(200, fields("X-"+canary, canary, "Content-Type", "application/json"), canary),
		"refused":   says(400, fields("X-Error", canary), `{"error":{"message":"`+canary+`"}}`),
		"kept back": says(500, fields("X-Error", canary), canary),
		"cut":       failing(wire.Provider, eventStream, "data: "+canary+"\n\n"),
		"failed": func(context.Context, dispatch.Attempt, dispatch.Writer) dispatch.Result {
			return dispatch.Result{Err: wire.FromPeer("unreachable", canary)}
		},
		"odd class": func(context.Context, dispatch.Attempt, dispatch.Writer) dispatch.Result {
			return dispatch.Result{Err: wire.FromPeer(canary, canary)}
		},
		"bad header": says(200, fields("X "+canary, canary), canary),
		"too long":   says(200, fields("Content-Length", "1"), canary),
	}
	n := 0
	call := func(path, body, key string) {
		_, _, _ = f.try("POST", path+"?q="+canary, body, "Authorization", "Bearer "+key, "X-Request-Id", canary, "User-Agent", canary, "Referer", "http://"+canary,
			"X-Forwarded-For", canary, "Origin", "http://"+canary, "Session-Id", canary, "Cookie", "a="+canary, "X-"+canary, canary, "Content-Type", canary)
		n++
		logs.wait(t, n)
	}
	body := `{"model":"tiny","prompt_cache_key":"` + canary + `","messages":[{"content":"` + canary + `"}]}`
	for _, answer := range all {
		f.runner.answer = answer
		for _, path := range []string{"/v1/chat/completions", "/v1/messages"} {
			call(path, body, canary+"-key")
		}
	}
	for _, err := range []error{pool.ErrUnknownModel, pool.ErrQueueFull, fmt.Errorf("a fault: %s", canary)} {
		f.pool.acquire = refusing(err)
		call("/v1/responses", body, canary+"-key")
	}
	f.pool.acquire = refusing(pool.ErrUnknownModel)
	call("/v1/chat/completions", `{"model":"`+canary+`"}`, canary+"-key")
	f.pool.acquire = grants
	call("/v1/chat/completions", body, canary+"-wrong")
	call("/v1/chat/completions", body[:40], canary+"-key")
	call("/v1/"+canary, body, canary+"-key")
	call("/v1/models/"+canary, body, canary+"-key")
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	told := strings.ToLower(logs.String() + fmt.Sprint(families))
	digest := DigestOf(canary + "-key")
	for what, spelling := range map[string]string{
		"itself": canary, "hex": hex.EncodeToString([]byte(canary)), "base64": base64.StdEncoding.EncodeToString([]byte(canary))[:12],
		"as a URL has it": url.QueryEscape(canary), "digest": hex.EncodeToString(digest[:]), "bytes": fmt.Sprintf("%d", []byte(canary)),
		"affinity": hex.EncodeToString([]byte(affinityOf("carol", nil, canary))), "what it belongs to": affinityOf("carol", nil, canary),
	} {
		if bytes.Contains([]byte(told), []byte(strings.ToLower(spelling))) {
			t.Errorf("%s: %s", what, told)
		}
	}
	if !strings.Contains(told, "principal=carol") {
		t.Errorf("the caller was not known: %s", told)
	}
}

// net/http's own lines are events like all others.
// Contract: D5 O2
func TestTheServersOwnLinesAreEvents(t *testing.T) {
	var logs syncBuffer
	api := New(Config{}, Deps{Pool: &fakePool{}, Runner: &fakeRunner{}, Log: slog.New(slog.NewJSONHandler(&logs, nil))})
	own := api.Server(nil).ErrorLog
	own.Print("http: TLS handshake error from 192.0.2.1:1: EOF") // below the level
	own.Print("http: panic serving\nmsg=\"x\"")
	if got := logs.String(); strings.Count(got, "\n") != 1 || !strings.Contains(got, `"level":"WARN","msg":"edge.http_error","error":"http: panic serving\nmsg=\"x\""}`) {
		t.Errorf("%s", got)
	}
}
