package configs

import (
	"os"
	"slices"
	"strings"
	"testing"
)

// What a server is known to lack is no operation of its profile; of a server
// that only calls itself compatible nothing is known.
//
// Contract: T2 P1
func TestProfiles(t *testing.T) {
	all := []string{"models", "chat_completions", "completions", "responses", "embeddings", "rerank", "messages", "count_tokens"}
	for id, without := range map[string][]string{
		"": nil, "openai": nil, "llamacpp": nil, "vllm": nil, "ollama": {"rerank", "count_tokens"},
	} {
		p, ok := ProfileOf(id)
		want := slices.DeleteFunc(slices.Clone(all), func(op string) bool { return slices.Contains(without, op) })
		if !ok || !slices.Equal(p.OperationNames(), want) {
			t.Errorf("%q: %v %v", id, ok, p.OperationNames())
		}
		if id != "" && p.ID != id {
			t.Errorf("%q: calls itself %q", id, p.ID)
		}
	}
	if _, ok := ProfileOf("Ollama"); ok {
		t.Error("a profile nobody has")
	}
	for id := range lacks {
		if !slices.Contains(ProfileIDs(), id) {
			t.Errorf("%s is not offered", id)
		}
	}
	if len(ProfileIDs()) != len(lacks) {
		t.Errorf("%v", ProfileIDs())
	}
}

// An adapter that names none has the default, and only one that calls a provider
// has any.
//
// Contract: T2 D3
func TestProfileDefault(t *testing.T) {
	f, err := Parse("f.yaml", []byte("broker:\nedge:\n  name: home\n  nodes: [{name: a, adapters: [{type: demo}, {type: openai_compat, base_url: 'http://h'}, {name: o, type: openai_compat, base_url: 'http://h', profile: ollama}]}]\n"))
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, a := range f.Edge.Nodes[0].Adapters {
		got = append(got, a.Profile)
	}
	if !slices.Equal(got, []string{"", "openai", "ollama"}) {
		t.Errorf("%q", got)
	}
}

// The table in docs/protocol.md is what the profiles are.
func TestTheDocumentSaysWhatProfilesAre(t *testing.T) {
	text, err := os.ReadFile("../docs/protocol.md")
	if err != nil {
		t.Fatal(err)
	}
	rows := map[string][]string{}
	for line := range strings.Lines(string(text)) {
		cells := strings.Split(strings.TrimSpace(line), "|")
		if len(cells) < 3 {
			continue
		}
		for i := range cells {
			cells[i] = strings.Trim(strings.TrimSpace(cells[i]), "`")
		}
		rows[cells[1]] = cells
	}
	for i, id := range ProfileIDs() {
		p, _ := ProfileOf(id)
		for _, op := range operations {
			row := rows[op.Method+" "+op.Path]
			if len(row) < 8 || row[2] != op.Name {
				t.Errorf("no row for %s %s", op.Method, op.Path)
				continue
			}
			want := "-"
			if slices.Contains(p.OperationNames(), op.Name) {
				want = "yes"
			}
			if got := row[3+i]; got != want {
				t.Errorf("%s of %s: the document says %q", op.Name, id, got)
			}
		}
	}
}
