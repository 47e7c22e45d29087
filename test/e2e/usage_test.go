package e2e

import (
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/iop-fabric/iop/internal/fakeprovider"
	"github.com/iop-fabric/iop/internal/ioptest"
)

// What a provider reports of tokens, in a small answer or at the end of a stream, is
// counted by key and model; what it does not report is not.
//
// Contract: D8 T3
func TestUsageIsCounted(t *testing.T) {
	f := ioptest.Start(t, ioptest.Options{})
	usage := `"usage":{"prompt_tokens":11,"completion_tokens":5,"total_tokens":16}`
	f.Provider.Next(fakeprovider.JSON(200, `{"choices":[],`+usage+`}`)...)
	f.Provider.Next(fakeprovider.SSE(chunkEvent(1), `data: {"object":"chat.completion.chunk","choices":[],`+usage+"}\n\n", doneEvent)...)
	f.Provider.Next(fakeprovider.JSON(200, `{"choices":[]}`)...)
	for i := range 3 {
		if resp, body := f.Do(f.Request(t.Context(), http.MethodPost, "/v1/chat/completions", ioptest.Chat(i == 1))); resp.StatusCode != 200 {
			t.Fatal(resp.StatusCode, body)
		}
	}
	waitFor(t, f, func(held, _ int) bool { return held == 0 })
	resp, err := f.Client.Get(f.Info.AdminURL + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		`iop_edge_tokens_total{kind="input",model="m",principal="local"} 22`,
		`iop_edge_tokens_total{kind="output",model="m",principal="local"} 10`,
		`iop_edge_provider_capacity{provider="here/m"} 8`, `iop_edge_node_connected{node="here"} 1`,
	} {
		if !strings.Contains(string(b), want+"\n") {
			t.Errorf("no %s in\n%s", want, b)
		}
	}
}
