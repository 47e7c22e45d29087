//go:build unix

package openai_compat

import (
	"net"
	"syscall"
)

// quiet reports whether an idle connection still looks usable: open, and with
// nothing to read, for nobody was asked. It does not wait.
func quiet(c net.Conn) bool {
	sc, ok := c.(syscall.Conn)
	if !ok {
		return true
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return false
	}
	open := false
	// Control, not Read: a Read of the transport's is waiting on the descriptor.
	err = raw.Control(func(fd uintptr) {
		var b [1]byte
		_, _, rerr := syscall.Recvfrom(int(fd), b[:], syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
		open = rerr == syscall.EAGAIN || rerr == syscall.EWOULDBLOCK || rerr == syscall.EINTR
	})
	return err == nil && open
}
