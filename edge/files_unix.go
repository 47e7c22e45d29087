//go:build unix

package edge

import "syscall"

// maxFiles is how many files this process may open.
func maxFiles() int {
	var files syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &files); err != nil || files.Cur > 1<<20 {
		return 1 << 20
	}
	return int(files.Cur) // bounded above
}
