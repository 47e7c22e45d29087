//go:build unix

package broker

import (
	"os"
	"syscall"
)

// lockFile takes the file for this process, or fails at once. The lock ends with
// the process, however it ends.
func lockFile(f *os.File) error {
	return syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) //nolint:gosec // a file descriptor fits
}
