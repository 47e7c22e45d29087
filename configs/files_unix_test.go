//go:build unix

package configs

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// What another program writes as it is read is not waited for.
//
// Contract: D3
func TestCheckWaitsForNoPipe(t *testing.T) {
	dir := t.TempDir()
	if err := syscall.Mkfifo(filepath.Join(dir, "key"), 0o600); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "edge.yaml")
	if err := os.WriteFile(file, []byte("broker:\nedge:\n  name: home\n  keys: [{name: first, file: key}]\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	warnings, err := Check(file, time.Now())
	if err != nil || len(warnings) != 1 || !strings.Contains(warnings[0].String(), "edge.yaml:4: edge.keys[0].file: ") {
		t.Errorf("%v, %v", warnings, err)
	}
}
