package httpapi

import (
	"strings"
	"testing"

	"github.com/iop-fabric/iop/configs"
)

// A key's limit means the model that the pool serves under a name: with ":latest" and
// without it they are one, in calls and in lists.
//
// Contract: E1 E9
func TestAKeysModelsAreMeantWithAndWithoutLatest(t *testing.T) {
	for _, limit := range []string{"tag", "tag:latest"} {
		f := newFixture(t, func(c *Config) { c.Keys[1].Models = []string{limit} })
		f.pool.models = []Model{{"tag:13b", 1, "x"}, {"tag:latest", 2, "x"}, {"other:latest", 3, "x"}}
		auth := []string{"Authorization", "Bearer " + narrowKey}
		for model, want := range map[string]int{"tag": 200, "tag:latest": 200, "tag:13b": 403, "other": 403, "tag:latest:latest": 403} {
			if resp, body := f.do("POST", "/v1/chat/completions", `{"model":"`+model+`"}`, auth...); resp.StatusCode != want {
				t.Errorf("limit %s, model %s: %d %s", limit, model, resp.StatusCode, body)
			}
		}
		for _, id := range []string{"tag", "tag:latest"} {
			if resp, body := f.do("GET", "/v1/models/"+id, "", auth...); resp.StatusCode != 200 || !strings.Contains(body, `"id":"tag:latest"`) {
				t.Errorf("limit %s, model %s: %d %s", limit, id, resp.StatusCode, body)
			}
		}
		if _, body := f.do("GET", "/v1/models", "", auth...); strings.Count(body, `"id":`) != 1 || !strings.Contains(body, `"id":"tag:latest"`) {
			t.Errorf("limit %s: %s", limit, body)
		}
	}
}

// Two principals with one key would both be the last of them.
//
// Contract: E9 D3
func TestOneKeyIsOnePrincipals(t *testing.T) {
	_, err := ConfigOf(&configs.Edge{}, []Key{{Name: "alice", Digest: DigestOf("k1")}, {Name: "bob", Digest: DigestOf("k2")}, {Name: "carol", Digest: DigestOf("k1")}})
	if err == nil || !strings.Contains(err.Error(), `"alice"`) || !strings.Contains(err.Error(), `"carol"`) || strings.Contains(err.Error(), "bob") {
		t.Errorf("%v", err)
	}
	if _, err := ConfigOf(&configs.Edge{}, []Key{{Name: "alice", Digest: DigestOf("k1")}, {Name: "bob", Digest: DigestOf("k2")}}); err != nil {
		t.Error(err)
	}
}
