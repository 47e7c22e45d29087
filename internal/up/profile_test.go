package up

import (
	"context"
	"errors"
	"reflect"
	"strings"
	"testing"

	"github.com/iop-fabric/iop/adapters/openai_compat"
	"github.com/iop-fabric/iop/agent"
	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/fakeprovider"
	"github.com/iop-fabric/iop/wire/iopv1"
)

func payloadOf(p configs.Profile) *iopv1.ConcreteProtocolProfile {
	out := &iopv1.ConcreteProtocolProfile{Id: p.ID, AuthHeader: p.AuthHeader, AuthPrefix: p.AuthPrefix, ModelsPath: p.ModelsPath}
	for _, op := range p.Operations {
		out.Operations = append(out.Operations, &iopv1.ConcreteProtocolProfile_Operation{Name: op.Name, Method: op.Method, Path: op.Path, Streaming: op.Streaming})
	}
	return out
}

// The default profile is the adapter's own default, so that an Edge which sends
// none and one which sends it are the same to a Node.
//
// Contract: T2
func TestTheDefaultProfileIsTheAdapters(t *testing.T) {
	p, _ := configs.ProfileOf("")
	if got, want := profileOf(payloadOf(p)), openai_compat.DefaultProfile(); !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
	if got := profileOf(nil); !reflect.DeepEqual(got, openai_compat.Profile{}) {
		t.Errorf("%+v", got)
	}
}

type discard struct{}

func (discard) Start(int, []agent.Field, int64) error { return nil }
func (discard) Body([]byte) error                     { return nil }
func (discard) Trailer([]agent.Field) error           { return nil }

// What a profile does not have is refused before the provider is called, and the
// path of the request does not help it. A profile without operations has none.
//
// Contract: T2
func TestWhatAProfileLacksIsRefusedBeforeAnyCall(t *testing.T) {
	provider := fakeprovider.New(t)
	ollama, _ := configs.ProfileOf(configs.ProfileOllama)
	for name, c := range map[string]struct {
		profile *iopv1.ConcreteProtocolProfile
		refused []string
	}{
		"ollama":        {payloadOf(ollama), []string{"count_tokens", "rerank", "tokenize"}},
		"no operations": {&iopv1.ConcreteProtocolProfile{Id: "x"}, []string{"chat_completions", "models"}},
	} {
		p, err := NewAdapter(&iopv1.AdapterConfig{Name: "a", Type: configs.TypeOpenAICompat, OpenaiCompat: &iopv1.OpenAICompatAdapterConfig{
			BaseUrl: provider.URL, ProtocolProfile: c.profile,
		}})
		if err != nil {
			t.Fatal(err)
		}
		for _, op := range c.refused {
			err := p.(agent.Exchanger).Exchange(context.Background(), agent.Exchange{
				Operation: op, Method: "POST", Path: "/v1/chat/completions", Body: strings.NewReader("{}"), BodySize: 2,
			}, discard{})
			var f *agent.Failure
			if !errors.As(err, &f) || f.Code != agent.CodeInvalid {
				t.Errorf("%s: %s: %v", name, op, err)
			}
		}
		if err := p.Stop(context.Background()); err != nil {
			t.Error(err)
		}
	}
	if n := provider.Executions(); n != 0 {
		t.Errorf("the provider was called %d times", n)
	}
}

// A profile's operation decides method and path, its header carries the key, and
// the caller's query goes along.
//
// Contract: T2
func TestAProfileDecidesWhatIsCalled(t *testing.T) {
	provider := fakeprovider.New(t)
	t.Setenv("IOP_TEST_PROVIDER_KEY", "sk-provider")
	p, err := NewAdapter(&iopv1.AdapterConfig{Name: "a", Type: configs.TypeOpenAICompat, OpenaiCompat: &iopv1.OpenAICompatAdapterConfig{
		BaseUrl: provider.URL, StaticKeyName: "IOP_TEST_PROVIDER_KEY",
		ProtocolProfile: &iopv1.ConcreteProtocolProfile{
			Id: "own", AuthHeader: "x-api-key",
			Operations:   []*iopv1.ConcreteProtocolProfile_Operation{{Name: "messages", Method: "POST", Path: "/anthropic/v1/messages"}},
			FixedHeaders: []*iopv1.Header{{Name: "anthropic-version", Value: []byte("2023-06-01")}},
		},
	}})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Stop(context.Background())
	if err := p.(agent.Exchanger).Exchange(t.Context(), agent.Exchange{
		Operation: "messages", Method: "GET", Path: "/v1/models", RawQuery: "beta=true", Body: strings.NewReader("{}"), BodySize: 2,
	}, discard{}); err != nil {
		t.Fatal(err)
	}
	r := provider.Requests()[0]
	if r.Method != "POST" || r.Path != "/anthropic/v1/messages" || r.RawQuery != "beta=true" ||
		r.Header.Get("X-Api-Key") != "sk-provider" || r.Header.Get("Anthropic-Version") != "2023-06-01" {
		t.Errorf("%s %s?%s %v", r.Method, r.Path, r.RawQuery, r.Header)
	}
}
