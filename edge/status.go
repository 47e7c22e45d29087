package edge

import (
	"context"
	"errors"
	"net"
	"net/http"
	"slices"
	"time"

	"github.com/iop-fabric/iop/edge/admin"
	"github.com/iop-fabric/iop/edge/httpapi"
	"github.com/iop-fabric/iop/edge/registry"
)

// adminHandler is what the admin listener serves.
func (e *Edge) adminHandler() http.Handler {
	host, _, _ := net.SplitHostPort(e.cfg.AdminListen)
	mux := http.NewServeMux()
	mux.Handle("/", httpapi.AdminHandler(func() error { return nil }, e.checkReady, e.deps.Metrics))
	mux.Handle("/api/", admin.New(admin.Config{
		Guard: admin.Guard{Token: e.adminToken, Host: host, Listener: "edge.admin_listen"},
		Edge:  e.cfg.Name, QueueDepth: e.cfg.Queue.Depth, QueueWait: e.cfg.Queue.Wait, Mount: e.deps.Admin,
	}, e, e.now))
	return admin.WholeBodies(mux)
}

// State implements admin.Source: both cores, in one step of the loop.
func (e *Edge) State(ctx context.Context) (s admin.State, err error) {
	select {
	case <-e.ready:
	default:
		return s, errors.New("not connected to the broker yet")
	}
	s.Certificate, s.Certificates = e.cert.Load().Leaf.NotAfter, map[string]time.Time{}
	err = e.loop.ask(ctx, func() {
		s.Nodes, s.Pool = e.nodes(), e.loop.pool.Snapshot()
		for name, r := range e.registered {
			s.Certificates[name] = r.until
		}
	})
	s.Ready = e.checkReady()
	return s, err
}

// nodes are those that are listed. What has left is remembered for its generation alone.
func (e *Edge) nodes() []registry.NodeState {
	return slices.DeleteFunc(e.loop.reg.Snapshot(), func(n registry.NodeState) bool { return !n.Configured && n.State == registry.Gone })
}
