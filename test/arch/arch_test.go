// Package arch checks that the tree is the architecture: imports only go down,
// and a core has no clock, goroutine, lock or log.
package arch

import (
	"bytes"
	"encoding/json"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

const module = "github.com/iop-fabric/iop/"

// layer is one row of the table in docs/architecture.md: a package (and what is
// below it, with a trailing /) and what of ours it may import.
type layer struct {
	pkg  string
	may  []string
	core bool
}

var leaves = []string{"wire", "wire/iopv1", "internal/secret", "internal/identity"}

func with(more ...string) []string { return append(append([]string{}, leaves...), more...) }

var table = []layer{
	{pkg: "wire/iopv1"},
	{pkg: "wire"},
	{pkg: "internal/secret"},
	{pkg: "internal/identity", may: []string{"wire", "wire/iopv1", "internal/secret"}},
	{pkg: "internal/fakeprovider"},
	{pkg: "internal/adminapi"},
	{pkg: "internal/history"},
	{pkg: "internal/obs"},
	{pkg: "internal/install"},
	{pkg: "internal/script"},
	{pkg: "subjects", may: leaves},
	{pkg: "tunnel", may: leaves, core: true},
	{pkg: "lease", may: leaves, core: true},
	{pkg: "configs/", may: leaves},
	{pkg: "agent/", may: []string{"internal/secret", "agent/"}},
	{pkg: "adapters/", may: []string{"agent/", "internal/secret"}},
	{pkg: "internal/bus/", may: with("internal/bus/", "subjects")},
	{pkg: "broker/enrol", may: leaves, core: true},
	{pkg: "broker/", may: with("subjects", "configs/", "broker/")},
	{pkg: "edge/registry", may: leaves, core: true},
	{pkg: "edge/pool", may: leaves, core: true},
	{pkg: "edge/dispatch", may: with("edge/pool", "tunnel", "subjects", "internal/bus/")},
	{pkg: "edge/httpapi", may: with("internal/obs", "edge/pool", "edge/dispatch", "configs/")},
	{pkg: "edge/admin", may: with("edge/pool", "edge/registry", "internal/adminapi")},
	{pkg: "edge", may: with("internal/obs", "edge/", "tunnel", "lease", "subjects", "configs/", "internal/bus/")},
	{pkg: "node/session", may: with("subjects"), core: true},
	{pkg: "node/gate", may: leaves, core: true},
	{pkg: "node/", may: with("node/", "tunnel", "lease", "subjects", "configs/", "internal/bus/", "agent/")},
	{pkg: "internal/up", may: []string{"/"}},
	{pkg: "internal/ioptest", may: []string{"/"}},
	{pkg: "test/", may: []string{"/"}},
	{pkg: "cmd/", may: []string{"/"}},
}

func matches(pattern, pkg string) bool {
	if pattern == "/" {
		return true
	}
	if dir, ok := strings.CutSuffix(pattern, "/"); ok {
		return pkg == dir || strings.HasPrefix(pkg, pattern)
	}
	return pkg == pattern
}

type goPackage struct {
	ImportPath string
	Dir        string
	GoFiles    []string
	Imports    []string
}

func list(t *testing.T) []goPackage {
	t.Helper()
	cmd := exec.Command("go", "list", "-json=ImportPath,Dir,GoFiles,Imports", "./...")
	cmd.Dir = filepath.Join("..", "..")
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	var all []goPackage
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var p goPackage
		if err := dec.Decode(&p); err == io.EOF {
			return all
		} else if err != nil {
			t.Fatal(err)
		}
		all = append(all, p)
	}
}

func TestImportsOnlyGoDown(t *testing.T) {
	for _, p := range list(t) {
		pkg := strings.TrimPrefix(p.ImportPath, module)
		var row *layer
		for i := range table {
			if matches(table[i].pkg, pkg) {
				row = &table[i]
				break
			}
		}
		if row == nil {
			t.Errorf("%s stands in no row of the table: add it where it belongs", pkg)
			continue
		}
		for _, imp := range p.Imports {
			ours, ok := strings.CutPrefix(imp, module)
			if !ok {
				continue
			}
			allowed := false
			for _, m := range row.may {
				allowed = allowed || matches(m, ours)
			}
			if !allowed {
				t.Errorf("%s imports %s, which is not below it", pkg, ours)
			}
		}
	}
}

// A core is plain data and functions of (state, event, now): style, not taste,
// because the explorer and the simulator drive these very packages.
func TestCoresArePure(t *testing.T) {
	forbidden := map[string]bool{
		"net": true, "net/http": true, "os": true, "sync": true, "sync/atomic": true,
		"context": true, "log": true, "log/slog": true, "math/rand": true, "math/rand/v2": true,
		"github.com/nats-io/nats.go": true,
	}
	for _, p := range list(t) {
		pkg := strings.TrimPrefix(p.ImportPath, module)
		for _, row := range table {
			if !row.core || !matches(row.pkg, pkg) {
				continue
			}
			for _, imp := range p.Imports {
				if forbidden[imp] {
					t.Errorf("core %s imports %s", pkg, imp)
				}
			}
			for _, f := range p.GoFiles {
				checkNoClock(t, filepath.Join(p.Dir, f))
			}
		}
	}
}

func checkNoClock(t *testing.T, file string) {
	t.Helper()
	fset := token.NewFileSet()
	tree, err := parser.ParseFile(fset, file, nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	clock := map[string]bool{"Now": true, "After": true, "AfterFunc": true, "Sleep": true, "NewTimer": true, "NewTicker": true, "Since": true, "Until": true, "Tick": true}
	ast.Inspect(tree, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.GoStmt:
			t.Errorf("%s: a goroutine in a core", fset.Position(n.Pos()))
		case *ast.SelectorExpr:
			if x, ok := n.X.(*ast.Ident); ok && x.Name == "time" && clock[n.Sel.Name] {
				t.Errorf("%s: time.%s in a core", fset.Position(n.Pos()), n.Sel.Name)
			}
		}
		return true
	})
}
