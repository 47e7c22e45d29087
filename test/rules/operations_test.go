package rules

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

var (
	eventName  = regexp.MustCompile(`^[a-z]+\.[a-z_]+$`)
	metricName = regexp.MustCompile(`^iop_(broker|leaf|edge|node)_[a-z_]+$`)
	tableRow   = regexp.MustCompile("(?m)^\\| `([a-z_.]+)` \\|")
)

// TestOperationsTellsWhatThereIs: the tables of docs/operations.md name every log
// event and every metric of the code, and nothing else.
//
// Contract: D5
func TestOperationsTellsWhatThereIs(t *testing.T) {
	text, err := os.ReadFile("../../docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	_, events, _ := strings.Cut(string(text), "\n## Log events\n")
	events, metrics, _ := strings.Cut(events, "\n## Metrics\n")
	inCode := map[string]bool{}
	for _, dir := range []string{"broker", "edge", "node", "internal/up"} {
		err := filepath.WalkDir(filepath.Join("../..", dir), func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			return names(path, inCode)
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	for what, table := range map[string]string{"event": events, "metric": metrics} {
		var told []string
		for _, m := range tableRow.FindAllStringSubmatch(table, -1) {
			if slices.Contains(told, m[1]) {
				t.Errorf("docs/operations.md tells the %s %s twice", what, m[1])
			}
			told = append(told, m[1])
			if !inCode[m[1]] {
				t.Errorf("docs/operations.md tells of the %s %s, which the code has not", what, m[1])
			}
		}
		if len(told) < 10 {
			t.Errorf("the table of %ss was not found", what)
		}
		for name := range inCode {
			if metricName.MatchString(name) == (what == "metric") && !slices.Contains(told, name) {
				t.Errorf("docs/operations.md lacks the %s %s", what, name)
			}
		}
	}
}

// names adds the events (constants named ev..., event... or Event...) and the
// metrics of a file.
func names(path string, out map[string]bool) error {
	tree, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
	if err != nil {
		return err
	}
	ast.Inspect(tree, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.ValueSpec:
			for i, id := range n.Names {
				if i >= len(n.Values) || !strings.HasPrefix(strings.ToLower(id.Name), "ev") {
					continue
				}
				if s, ok := text(n.Values[i]); ok && eventName.MatchString(s) {
					out[s] = true
				}
			}
		case *ast.BasicLit:
			if s, ok := text(n); ok && metricName.MatchString(s) {
				out[s] = true
			}
		}
		return true
	})
	return nil
}

func text(e ast.Expr) (string, bool) {
	lit, ok := e.(*ast.BasicLit)
	if !ok || lit.Kind != token.STRING {
		return "", false
	}
	s, err := strconv.Unquote(lit.Value)
	return s, err == nil
}

// closed are the lists of reasons in the code: the constants of a type, or those of a
// name, in the files of a folder.
var closed = []struct {
	dir, typed, named string
	section           string // where docs/operations.md tells of them
	fine              []string
}{
	{dir: "broker", typed: "refusal", section: refusals},
	{dir: "broker", named: "reason", section: refusals},
	{dir: "edge/registry", typed: "Reason", section: refusals},
	{dir: "node/session", typed: "Reason", section: refusals},
	{dir: "broker/enrol", typed: "Outcome", section: joins, fine: []string{"accepted", "repeated"}},
}

const (
	refusals = "\n## Why a Node is refused, and what to do\n"
	joins    = "\n## Why a machine may not join, and what to do\n"
)

var (
	reasonRow  = regexp.MustCompile("(?m)^\\| (`.*`) \\| (.+) \\| (.+) \\| (.*) \\|$")
	quotedWord = regexp.MustCompile("`([^`]+)`")
)

// TestEveryRefusalHasARemedy: whatever the code may refuse a Node or a machine with is
// told in docs/operations.md with what to do, and nothing else is.
//
// Contract: B3 B11 R5
func TestEveryRefusalHasARemedy(t *testing.T) {
	text, err := os.ReadFile("../../docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	told := map[string]map[string]bool{}
	for _, section := range []string{refusals, joins} {
		_, rest, ok := strings.Cut(string(text), section)
		if !ok {
			t.Fatalf("docs/operations.md has no section %q", section)
		}
		part, _, _ := strings.Cut(rest, "\n## ")
		told[section] = map[string]bool{}
		for _, row := range reasonRow.FindAllStringSubmatch(part, -1) {
			for _, w := range quotedWord.FindAllStringSubmatch(row[1], -1) {
				told[section][w[1]] = true
			}
			if strings.TrimSpace(row[3]) == "" || strings.TrimSpace(row[4]) == "" {
				t.Errorf("docs/operations.md tells of %s without what it means or what to do", row[1])
			}
		}
	}
	known := map[string]map[string]bool{refusals: {}, joins: {}}
	for _, c := range closed {
		files, err := filepath.Glob(filepath.Join("../..", c.dir, "*.go"))
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		for _, path := range files {
			if strings.HasSuffix(path, "_test.go") {
				continue
			}
			for _, reason := range constants(t, path, c.typed, c.named) {
				n++
				known[c.section][reason] = true
				if !told[c.section][reason] && !slices.Contains(c.fine, reason) {
					t.Errorf("docs/operations.md lacks %q of %s, and what to do", reason, c.dir)
				}
			}
		}
		if n < 2 {
			t.Errorf("no reasons were found in %s", c.dir)
		}
	}
	for section, all := range told {
		for reason := range all {
			if !known[section][reason] {
				t.Errorf("docs/operations.md tells of %q, which the code has not", reason)
			}
		}
	}
}

// constants are the strings of a file's constants of a type, or, where it has none, of
// a name that begins so.
func constants(t *testing.T, path, typed, named string) (out []string) {
	t.Helper()
	tree, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range tree.Decls {
		g, ok := d.(*ast.GenDecl)
		if !ok || g.Tok != token.CONST {
			continue
		}
		for _, spec := range g.Specs {
			v := spec.(*ast.ValueSpec)
			is, _ := v.Type.(*ast.Ident)
			for i, id := range v.Names {
				if i >= len(v.Values) {
					continue
				}
				if mine := is != nil && is.Name == typed || is == nil && named != "" && strings.HasPrefix(id.Name, named); !mine {
					continue
				}
				if s, ok := text(v.Values[i]); ok {
					out = append(out, s)
				}
			}
		}
	}
	return out
}
