//go:build unix

package identity

import (
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// A pipe in a file's place is told, not waited for.
//
// Contract: Z4
func TestPipeIsNoFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "ca.pem")
	if err := syscall.Mkfifo(file, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := LoadTrust(file); err == nil || !strings.Contains(err.Error(), "no regular file") {
		t.Errorf("%v", err)
	}
}
