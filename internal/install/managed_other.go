//go:build !windows

package install

// Managed runs what a service manager has started. Here that is as anybody does:
// signals tell it to stop.
func Managed(_ func(), run func() int) int { return run() }
