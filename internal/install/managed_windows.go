package install

import (
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/windows/svc"
)

// Managed runs what a service manager has started. A service of Windows is told to
// stop by its manager, not by a signal, and has no standard error: its log is a file
// beside its configuration.
func Managed(stop func(), run func() int) int {
	if is, err := svc.IsWindowsService(); err != nil || !is {
		return run()
	}
	if i := slices.Index(os.Args, "--config"); i >= 0 && i+1 < len(os.Args) {
		log := filepath.Join(filepath.Dir(os.Args[i+1]), "node.log")
		if f, err := os.OpenFile(log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600); err == nil {
			os.Stdout, os.Stderr = f, f
		}
	}
	s := &service{stop: stop, run: run}
	if err := svc.Run("", s); err != nil { // the name counts only where several share a process
		return 1
	}
	return s.code
}

type service struct {
	stop func()
	run  func() int
	code int
}

// Execute implements svc.Handler.
func (s *service) Execute(_ []string, requests <-chan svc.ChangeRequest, tell chan<- svc.Status) (bool, uint32) {
	tell <- svc.Status{State: svc.StartPending}
	ended := make(chan int, 1) // the one end
	go func() { ended <- s.run() }()
	tell <- svc.Status{State: svc.Running, Accepts: svc.AcceptStop | svc.AcceptShutdown}
	for {
		select {
		case s.code = <-ended:
			tell <- svc.Status{State: svc.StopPending}
			return true, uint32(s.code) //nolint:gosec // an exit code
		case r := <-requests:
			if r.Cmd == svc.Stop || r.Cmd == svc.Shutdown {
				tell <- svc.Status{State: svc.StopPending}
				s.stop()
				continue
			}
			tell <- r.CurrentStatus // it is asked; nothing else is accepted
		}
	}
}
