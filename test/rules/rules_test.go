// Package rules checks that a test's claim, "// Contract: R4", names a rule that
// docs/rules.md states, and prints how many rules are named by a test.
package rules

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var (
	ruleLine = regexp.MustCompile(`(?m)^- ([A-Z]{1,2}[0-9]+) `)
	claim    = regexp.MustCompile(`(?m)^\s*// Contract:(.*)$`)
	ruleID   = regexp.MustCompile(`\b[A-Z]{1,2}[0-9]+\b`)
)

func TestEveryClaimNamesARule(t *testing.T) {
	text, err := os.ReadFile("../../docs/rules.md")
	if err != nil {
		t.Fatal(err)
	}
	stated := map[string]bool{}
	for _, m := range ruleLine.FindAllStringSubmatch(string(text), -1) {
		if stated[m[1]] {
			t.Errorf("docs/rules.md states %s twice", m[1])
		}
		stated[m[1]] = true
	}
	named := map[string]bool{}
	err = filepath.WalkDir("../..", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		src, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		for _, m := range claim.FindAllStringSubmatch(string(src), -1) {
			ids := ruleID.FindAllString(m[1], -1)
			if len(ids) == 0 {
				t.Errorf("%s: a claim that names no rule: %q", path, m[0])
			}
			for _, id := range ids {
				named[id] = true
				if !stated[id] {
					t.Errorf("%s: names %s, which docs/rules.md does not state", path, id)
				}
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d of %d rules are named by a test", len(named), len(stated))
}
