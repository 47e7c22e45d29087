//go:build !unix

package edge

// maxFiles is a guess where the system has no such bound.
func maxFiles() int { return 1 << 16 }
