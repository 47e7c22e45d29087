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
