package up

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/iop-fabric/iop/internal/identity"
)

// A disk that is full at any of the files, or read-only, is told, and with room the
// same line goes on. Only root can mount one.
//
// Contract: B11
func TestJoinDiskFull(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can mount a disk")
	}
	o := newOffice(t, identity.RoleBroker)
	dir := t.TempDir()
	mount := func(flags uintptr, options string) {
		t.Helper()
		if err := syscall.Mount("tmpfs", dir, "tmpfs", flags, options); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		_ = syscall.Unmount(dir, 0) // the last round's, if it did not get that far
	})
	full := 0
	for inodes := 1; ; inodes++ { // its root is one
		mount(0, fmt.Sprintf("mode=700,nr_inodes=%d", inodes))
		j := o.join(dir)
		err := j.Run(t.Context())
		if err != nil {
			full++
			if !errors.Is(err, syscall.ENOSPC) || !strings.Contains(err.Error(), "give the same line again") {
				t.Errorf("room for %d files: %v", inodes-1, err)
			}
			mount(syscall.MS_REMOUNT|syscall.MS_RDONLY, "nr_inodes=100")
			if err := j.Run(t.Context()); !errors.Is(err, syscall.EROFS) || !strings.Contains(err.Error(), "give the same line again") {
				t.Errorf("read-only: %v", err)
			}
			mount(syscall.MS_REMOUNT, "nr_inodes=100")
			if err := j.Run(t.Context()); err != nil {
				t.Errorf("with room again: %v", err)
			}
		}
		if err := syscall.Unmount(dir, 0); err != nil {
			t.Fatal(err)
		}
		if err == nil {
			break
		}
		if inodes > 30 {
			t.Fatal("it never joins")
		}
	}
	if full < len(files) {
		t.Errorf("the disk was full at %d of %d files", full, len(files))
	}
}
