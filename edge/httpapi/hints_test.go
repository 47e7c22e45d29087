package httpapi

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/iop-fabric/iop/edge/pool"
)

func modelsNamed(ids ...string) (all []Model) {
	for _, id := range ids {
		all = append(all, Model{ID: id})
	}
	return all
}

// Contract: E7
func TestAnUnknownModelIsNamedAndTheOthersToo(t *testing.T) {
	five := modelsNamed("a", "b c", "ns/d", "e:1", "small")
	for name, c := range map[string]struct {
		key, asked string
		models     []Model
		status     int
		want       string
	}{
		"none": {goodKey, "x", nil, 404, `the model "x" does not exist here; GET /v1/models lists what does: none at this time`},
		"one":  {goodKey, "x", five[:1], 404, `the model "x" does not exist here; GET /v1/models lists what does: "a"`},
		"five": {goodKey, "x", five, 404, `the model "x" does not exist here; GET /v1/models lists what does: "a", "b c", "ns/d", "e:1", "small"`},
		"six":  {goodKey, "x", append(five[:5:5], Model{ID: "z"}), 404, `the model "x" does not exist here; GET /v1/models lists what does`},
		"refused": {
			narrowKey, "b c", five, 403,
			`this API key may not use the model "b c"; GET /v1/models lists what it may use: "small"`,
		},
		"escaped": {goodKey, "a\"\n\u0000é", five[:1], 404, `the model "a\"\n\u0000é" does not exist here; GET /v1/models lists what does: "a"`},
		"long": {
			goodKey, strings.Repeat("é", 101), nil, 404,
			`the model "` + strings.Repeat("é", 100) + `…" does not exist here; GET /v1/models lists what does: none at this time`,
		},
		"just not long": {
			goodKey, strings.Repeat("é", 100), nil, 404,
			`the model "` + strings.Repeat("é", 100) + `" does not exist here; GET /v1/models lists what does: none at this time`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			f.pool.models = c.models
			f.pool.acquire = func(context.Context, Want) (Grant, error) { return Grant{}, pool.ErrUnknownModel }
			doc := fmt.Sprintf(`{"model":%s}`, quote(c.asked))
			resp, body := f.do("POST", "/v1/chat/completions", doc, "Authorization", "Bearer "+c.key)
			code := map[int]string{403: "model_not_allowed", 404: "model_not_found"}[c.status]
			if e := f.wantError(resp, body, c.status, code); e.Message != c.want {
				t.Errorf("got  %s\nwant %s", e.Message, c.want)
			}
			resp, body = f.do("POST", "/v1/messages", doc, "Authorization", "Bearer "+c.key)
			var e anthropicBody
			if err := json.Unmarshal([]byte(body), &e); err != nil || resp.StatusCode != c.status || e.Error.Message != c.want {
				t.Errorf("%d %s", resp.StatusCode, body)
			}
		})
	}
}

// Contract: E7
func TestA44AModelThatIsNotListedIsNamed(t *testing.T) {
	f := newFixture(t)
	f.pool.models = modelsNamed("ns/name:13b", "other")
	resp, body := f.do("GET", "/v1/models/ns%2Fnope", "")
	if e := f.wantError(resp, body, 404, "model_not_found"); e.Message != `the model "ns/nope" does not exist here; GET /v1/models lists what does: "ns/name:13b", "other"` {
		t.Error(e.Message)
	}
	resp, body = f.do("GET", "/v1/models/other", "", "Authorization", "Bearer "+narrowKey)
	if e := f.wantError(resp, body, 403, "model_not_allowed"); e.Message != `this API key may not use the model "other"; GET /v1/models lists what it may use: "ns/name:13b"` {
		t.Error(e.Message)
	}
}

// What a caller sent and is told again stays between the two.
// Contract: E7
func TestWhatACallerNamedIsNeitherLoggedNorCounted(t *testing.T) {
	const canary = "canary-7f3a"
	f := newFixture(t)
	f.pool.models = modelsNamed("small")
	f.pool.acquire = func(context.Context, Want) (Grant, error) { return Grant{}, pool.ErrUnknownModel }
	for i, key := range []string{goodKey, narrowKey} {
		_, body := f.do("POST", "/v1/chat/completions", `{"model":"`+canary+`"}`, "Authorization", "Bearer "+key)
		if !strings.Contains(body, canary) {
			t.Errorf("not named: %s", body)
		}
		_, _ = f.do("GET", "/v1/models/"+canary, "", "Authorization", "Bearer "+key)
		f.logged(2 * (i + 1))
	}
	families, err := f.reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	if all := f.logs.String() + fmt.Sprint(families); strings.Contains(all, canary) {
		t.Error(all)
	}
}

// Contract: E7
func TestAPathServedElsewhereIsToldWhatIsServed(t *testing.T) {
	f := newFixture(t)
	for _, path := range []string{
		"/v1/audio/speech", "/v1/images/generations", "/v1/files", "/v1/files/file-1/content", "/v1/moderations", "/v1/threads/t/runs",
		"/v1/responses/resp_1", "/v1/responses/resp_1/cancel", "/v1/chat/completions/chatcmpl-1", "/v1/fine_tuning/jobs?limit=1", "/v1/complete",
	} {
		resp, body := f.do("POST", path, "{}")
		e := f.wantError(resp, body, 404, "unknown_path")
		if strings.Contains(e.Message, f.server.URL) {
			t.Errorf("%s: names the base URL, which was right: %s", path, e.Message)
		}
		for i := range routes {
			if r := &routes[i]; r.operation != opRoot && !strings.Contains(e.Message, r.method+" "+r.path) {
				t.Errorf("%s: %s is not named: %s", path, r.path, e.Message)
			}
		}
	}
	resp, body := f.do("POST", "/v1/messages/batches", "{}")
	var e anthropicBody
	if err := json.Unmarshal([]byte(body), &e); err != nil || resp.StatusCode != 404 || !strings.Contains(e.Error.Message, "POST /v1/messages/count_tokens") {
		t.Errorf("%d %s", resp.StatusCode, body)
	}
	// What only begins like one, or hides one, has its base URL named.
	for _, path := range []string{"/v1/filesystem", "/v1/files/", "/v1/chat/completions2", "/files", "/v1//files"} {
		resp, body := f.do("POST", path, "{}")
		if e := f.wantError(resp, body, 404, "unknown_path"); !strings.Contains(e.Message, f.server.URL+"/v1") {
			t.Errorf("%s: %s", path, e.Message)
		}
	}
}
