//go:build unix

package up

import (
	"os"
	"syscall"
)

// keepOwner gives a file that was replaced to whom it belonged before.
func keepOwner(file string, was os.FileInfo) error {
	st, ok := was.Sys().(*syscall.Stat_t)
	if !ok || (int(st.Uid) == os.Getuid() && int(st.Gid) == os.Getgid()) {
		return nil
	}
	return os.Lchown(file, int(st.Uid), int(st.Gid))
}
