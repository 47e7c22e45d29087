package httpapi

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"reflect"
	"strings"
	"testing"
	"testing/iotest"
)

func scanAll(doc string, piece int) (named, reason, string) {
	var s scanner
	s.init()
	for len(doc) > 0 {
		n := min(piece, len(doc))
		s.feed([]byte(doc[:n]))
		doc = doc[n:]
	}
	return s.finish()
}

func TestScan(t *testing.T) {
	deep := func(n int) string {
		return `{"model":"m","x":` + strings.Repeat("[", n-1) + strings.Repeat("]", n-1) + `}`
	}
	for _, c := range []struct {
		doc    string
		why    reason
		model  string
		stream bool
	}{
		{`{"model":"m"}`, "", "m", false},
		{" \r\n\t{ \"model\" : \"m\" , \"stream\" : true } ", "", "m", true},
		{`{"stream":true,"stream":false,"model":"a/b:c d.e"}`, "", "a/b:c d.e", false},
		{`{"stream":"true","model":"m"}`, "", "m", false},
		{`{"mod\u0065l":"\u006d\n"}`, "", "m\n", false},
		{`{"x":{"model":"inner"},"model":"outer","y":[{"model":1}]}`, "", "outer", false},
		{`{"x":-0.5e+10,"y":0,"z":10E2,"model":"m","n":null}`, "", "m", false},
		{"{\"model\":\"\xff\"}", "", "\ufffd", false},
		{deep(maxDepth), "", "m", false},

		{`{"model":"a","model":"b"}`, badModel, "", false},
		{`{"model":"a","mod\u0065l":"b"}`, badModel, "", false},
		{`{"model":"a","Model":"b"}`, badModel, "", false},
		{`{"MODEL":"b"}`, badModel, "", false},
		{`{"model":7}`, badModel, "", false},
		{`{"model":{"model":"m"}}`, badModel, "", false},
		{`{"model":null}`, badModel, "", false},
		{`{"model":""}`, badModel, "", false},
		{`{"model":"` + strings.Repeat("m", maxModel+1) + `"}`, badModel, "", false},
		{`{"messages":[]}`, badModel, "", false},
		{`{}`, badModel, "", false},

		{``, badJSON, "", false},
		{`{"model":`, badJSON, "", false},
		{`{"model":"m"`, badJSON, "", false},
		{`{"model":"m"}}`, badJSON, "", false},
		{`{"model":"m"} x`, badJSON, "", false},
		{`{"model":"m",}`, badJSON, "", false},
		{`{"model":"m","x":[1,]}`, badJSON, "", false},
		{`{"model":"m","x":01}`, badJSON, "", false},
		{`{"model":"m","x":1.}`, badJSON, "", false},
		{`{"model":"m","x":-}`, badJSON, "", false},
		{`{"model":"m","x":1e}`, badJSON, "", false},
		{`{"model":"m","x":tru}`, badJSON, "", false},
		{`{"model":"m","x":"\x"}`, badJSON, "", false},
		{`{"model":"m","x":"\u12g4"}`, badJSON, "", false},
		{"{\"model\":\"m\n\"}", badJSON, "", false},
		{`{"model":"m","x":[}}`, badJSON, "", false},
		{`{'model':'m'}`, badJSON, "", false},
		{"\xef\xbb\xbf{\"model\":\"m\"}", badJSON, "", false},
		{`["model","m"]`, badJSON, "", false},
		{`"model"`, badJSON, "", false},
		{deep(maxDepth + 1), badJSON, "", false},
	} {
		for _, piece := range []int{1, 3, len(c.doc) + 1} {
			n, why, _ := scanAll(c.doc, piece)
			name := c.doc[:min(len(c.doc), 60)]
			if why != c.why {
				t.Errorf("%q in pieces of %d: %q, want %q", name, piece, why, c.why)
				continue
			}
			if why == "" && (n.model != c.model || n.stream != c.stream) {
				t.Errorf("%q: %+v", name, n)
			}
			if why == "" && unquote([]byte(c.doc[n.start+1:n.end-1]), true) != c.model {
				t.Errorf("%q: the span %q is not the model", name, c.doc[n.start:n.end])
			}
		}
	}
}

// Contract: E2
func TestNamingChangesNothingElse(t *testing.T) {
	const doc = "{ \"z\":1e400, \"seed\" : 9007199254740993,\"model\"  :\t\"tiny\" ,\"a\":\"\\u00e9<&>\",\"unknown\":{ \"model\":\"x\" } }\n"
	for _, memory := range []int64{1 << 20, 8} { // in memory, in a file
		o := &bodies{max: 1 << 20, memory: memory, total: 1 << 20, dir: t.TempDir(), log: slog.New(slog.DiscardHandler)}
		var s scanner
		s.init()
		b, why := o.read(context.Background(), strings.NewReader(doc), -1, s.feed)
		if why != "" {
			t.Fatal(why)
		}
		n, why, _ := s.finish()
		if why != "" {
			t.Fatal(why)
		}
		for _, target := range []string{"tiny", "a<b>&\"c\"\n\\", "", "長い名前"} {
			r, size := b.naming(n, target)
			got, err := io.ReadAll(iotest.HalfReader(r))
			if err != nil {
				t.Fatal(err)
			}
			name, err := json.Marshal(target)
			if err != nil {
				t.Fatal(err)
			}
			var text string
			if err := json.Unmarshal(got[n.start:int64(len(got))-(int64(len(doc))-n.end)], &text); err != nil || text != target {
				t.Errorf("model is %q, want %s", text, name)
			}
			if int64(len(got)) != size || !bytes.HasPrefix(got, []byte(doc[:n.start])) || !bytes.HasSuffix(got, []byte(doc[n.end:])) {
				t.Errorf("target %q: %q", target, got)
			}
		}
		b.close()
		b.close()
		if o.held.Load() != 0 {
			t.Errorf("%d bytes still held", o.held.Load())
		}
	}
}

// FuzzScan compares the scanner with encoding/json: the same verdict on what is
// JSON, the same model, and after naming another one the same document.
func FuzzScan(f *testing.F) {
	for _, s := range []string{
		`{"model":"m"}`, `{"model":"m","stream":true,"x":[1,-0.5e+7,{"a":null}]}`, `{"mod\u0065l":"\ud83d\ude00"}`,
		`{"model":"a","model":"b"}`, `{"Model":"a"}`, `[{"model":"m"}]`, `{"model":1}`, `{"model":[{"":null}]}`, `{"a":"\"","model":"m"}`, `0`, `1e5 `, `-`, "{\"model\":\"\x80\"}",
	} {
		f.Add([]byte(s), uint8(3))
	}
	f.Fuzz(func(t *testing.T, doc []byte, piece uint8) {
		n, why, _ := scanAll(string(doc), int(piece)+1)
		if whole, w, _ := scanAll(string(doc), len(doc)+1); w != why || whole != n {
			t.Fatalf("in pieces %+v %q, whole %+v %q", n, why, whole, w)
		}
		var top map[string]json.RawMessage
		isObject := json.Valid(doc) && json.Unmarshal(doc, &top) == nil && top != nil
		if isObject != (why != badJSON) {
			t.Fatalf("encoding/json: object %v, scanner: %q", isObject, why)
		}
		if why == badModel {
			if v, ok := top["model"]; ok && len(top) == 1 && bytes.Count(doc, []byte(`"`)) == 4 && v[0] == '"' && len(v) > 2 && len(v) < maxModel {
				t.Fatalf("refused %q", doc)
			}
			return
		}
		if why != "" {
			return
		}
		var model string
		if err := json.Unmarshal(top["model"], &model); err != nil || model != n.model {
			t.Fatalf("encoding/json has model %q (%v), scanner %q", model, err, n.model)
		}
		b := &body{owner: &bodies{}, mem: doc, size: int64(len(doc))}
		r, size := b.naming(n, "other \"name\"")
		out, err := io.ReadAll(r)
		if err != nil || int64(len(out)) != size {
			t.Fatalf("%d bytes, promised %d, %v", len(out), size, err)
		}
		var after map[string]json.RawMessage
		if err := json.Unmarshal(out, &after); err != nil {
			t.Fatalf("no longer JSON: %v", err)
		}
		if err := json.Unmarshal(after["model"], &model); err != nil || model != "other \"name\"" {
			t.Fatalf("renamed to %q, %v", model, err)
		}
		delete(top, "model")
		delete(after, "model")
		if !reflect.DeepEqual(top, after) {
			t.Fatalf("more than the model changed: %q -> %q", doc, out)
		}
	})
}

func FuzzAnswerHeaders(f *testing.F) {
	f.Add("Content-Type", []byte("text/plain"), "Connection", []byte("x-a, x-b"))
	f.Add("X\r\nY", []byte("v"), "Content-Length", []byte("+5"))
	f.Fuzz(func(t *testing.T, n1 string, v1 []byte, n2 string, v2 []byte) {
		dst := map[string][]string{}
		length, err := fromProvider(dst, fields(n1, string(v1), n2, string(v2)))
		if err != nil {
			return
		}
		for name, values := range dst {
			for _, v := range values {
				if strings.ContainsAny(name+v, "\r\n\x00") || answerPolicy[name] == hop || answerPolicy[name] == ours {
					t.Fatalf("let through %q: %q", name, v)
				}
			}
		}
		if _, ok := dst["Content-Length"]; ok != (length >= 0) {
			t.Fatalf("length %d, header %v", length, dst)
		}
	})
}
