//go:build unix

package install

import (
	"fmt"
	"os"
	"os/user"
	"path/filepath"
	"strings"
	"syscall"
)

// Own finds who the node is to run as: who owns the folder, or a user that systemd
// makes for it. root: it would be root itself.
func (s *Spec) Own() (root bool, err error) {
	folder := filepath.Dir(s.Config)
	is, err := os.Stat(folder)
	if err != nil {
		return false, err
	}
	st, ok := is.Sys().(*syscall.Stat_t)
	if !ok || os.Geteuid() != 0 {
		return false, nil
	}
	// One that systemd has had before is a link into a folder of its own.
	real, err := filepath.EvalSymlinks(folder)
	if err != nil {
		return false, err
	}
	had := strings.HasPrefix(real, filepath.Join(stateRoot, "private")+"/")
	switch {
	case DynamicFolder(folder) && (st.Uid == 0 || had):
		s.Dynamic = true
	case st.Uid == 0:
		return true, nil
	default:
		s.Owner = fmt.Sprint(st.Uid)
		if u, err := user.LookupId(s.Owner); err == nil {
			s.Owner = u.Username
		}
	}
	return false, nil
}
