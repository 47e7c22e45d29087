package e2e

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/ioptest"
)

// While the first list of a ready Node is outstanding no model is unknown: a request
// waits for it, and /readyz says that the Edge is not of use yet.
//
// Contract: E7 P9 D4
func TestARequestWaitsForTheFirstList(t *testing.T) {
	asked, list := make(chan struct{}, 64), make(chan struct{})
	provider := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasSuffix(r.URL.Path, "/models") {
			asked <- struct{}{}
			select {
			case <-list:
				io.WriteString(w, `{"object":"list","data":[{"id":"late"}]}`)
			case <-r.Context().Done():
			}
			return
		}
		w.Header().Set("Content-Type", "application/json")
		io.WriteString(w, `{"ok":true}`)
	}))
	t.Cleanup(provider.Close)
	f := ioptest.Start(t, ioptest.Options{NoWait: true, Adapters: []configs.Adapter{
		{Name: "p", Type: configs.TypeOpenAICompat, BaseURL: provider.URL, Capacity: 8},
	}})
	f.Wait(asked, "the list to be asked for")
	ready := func() (int, string) {
		resp, err := f.Client.Get("http://" + f.Edge.AdminAddr() + "/readyz")
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		b, _ := io.ReadAll(resp.Body)
		return resp.StatusCode, string(b)
	}
	if status, body := ready(); status != http.StatusServiceUnavailable || !strings.Contains(body, "models") {
		t.Errorf("/readyz while the list is outstanding: %d %q", status, body)
	}
	type answer struct {
		status int
		body   string
	}
	ask := func(model string) <-chan answer {
		got := make(chan answer, 1)
		go func() {
			resp, err := f.Client.Do(f.Request(t.Context(), "POST", "/v1/chat/completions", `{"model":"`+model+`","messages":[]}`))
			if err != nil {
				got <- answer{body: err.Error()}
				return
			}
			defer resp.Body.Close()
			b, _ := io.ReadAll(resp.Body)
			got <- answer{resp.StatusCode, string(b)}
		}()
		return got
	}
	late, never := ask("late"), ask("never")
	for waiting := 0; waiting < 2; {
		s, err := f.Edge.State(t.Context())
		if err != nil && !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
		waiting = s.Pool.Waiting
		select {
		case a := <-late:
			t.Fatalf("answered before the list was there: %+v", a)
		case a := <-never:
			t.Fatalf("answered before the list was there: %+v", a)
		default:
		}
	}
	close(list)
	if a := <-late; a.status != 200 || a.body != `{"ok":true}` {
		t.Errorf("of what was listed: %+v", a)
	}
	if a := <-never; a.status != 404 || !strings.Contains(a.body, "model_not_found") {
		t.Errorf("of what was not: %+v", a)
	}
	f.Wait(f.Edge.Offers(), "the first list to be taken")
	if status, body := ready(); status != 200 {
		t.Errorf("/readyz: %d %q", status, body)
	}
}
