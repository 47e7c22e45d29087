package e2e

import (
	"net/http"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/identity"
	"github.com/iop-fabric/iop/internal/ioptest"
	"github.com/iop-fabric/iop/internal/up"
)

// A Node in the last third of its certificate's life has it renewed over its session
// and dials anew with it, while callers go on asking: each gets its whole answer. No
// port is open for that, and the key stays as it is.
//
// Contract: B8
func TestNodeRenewsItsCertificate(t *testing.T) {
	f := ioptest.Start(t, ioptest.Options{
		Nodes: []configs.EdgeNode{{Name: "far"}},
		Edge: func(e *configs.Edge) {
			n := &e.Nodes[1]
			n.Adapters, n.Providers = e.Nodes[0].Adapters, e.Nodes[0].Providers
			e.Nodes[0].Adapters, e.Nodes[0].Providers = nil, nil
			e.Models.Groups[0].Providers[0].Provider = "far/m"
		},
	})
	tls := f.NodeConfig("far").Broker.TLS
	ca, err := identity.LoadCA(filepath.Join(string(f.Folder), "pki"))
	if err != nil {
		t.Fatal(err)
	}
	id := identity.ID{TrustDomain: identity.DefaultTrustDomain, Edge: up.DefaultEdge, Role: identity.RoleNode, Name: "far"}
	short, err := ca.Issue(id, nil, 10*time.Minute) // an hour of its life lies behind it
	if err != nil {
		t.Fatal(err)
	}
	if err := short.Save(tls.Certificate, tls.Key); err != nil {
		t.Fatal(err)
	}

	stop := make(chan struct{})
	var callers sync.WaitGroup
	ask := func() {
		for {
			req := f.Request(t.Context(), http.MethodPost, "/v1/chat/completions", ioptest.Chat(true))
			if resp, body := f.Do(req); resp.StatusCode != http.StatusOK || len(body) == 0 {
				t.Errorf("%d %s", resp.StatusCode, body)
				return
			}
			select {
			case <-stop:
				return
			default:
			}
		}
	}
	for range 4 {
		callers.Go(ask)
	}
	f.StartNode("far")
	first := f.WaitNode("far")
	f.Log.AwaitEvent(t, "broker.renewed", "name=far")
	f.Log.AwaitEvent(t, "node.certificate_renewed")
	f.Log.AwaitSession(t, "far", first)
	f.Log.AwaitEvent(t, "node.keys_renewed")
	ask0 := f.Request(t.Context(), http.MethodPost, "/v1/chat/completions", ioptest.Chat(true))
	if resp, body := f.Do(ask0); resp.StatusCode != http.StatusOK {
		t.Errorf("with the new certificate: %d %s", resp.StatusCode, body)
	}
	close(stop)
	callers.Wait()

	renewed, err := identity.LoadCertificate(tls.Certificate, tls.Key)
	if err != nil {
		t.Fatal(err)
	}
	if renewed.ID() != id || time.Until(renewed.Leaf.NotAfter) < 300*24*time.Hour {
		t.Errorf("%s until %v", renewed.ID(), renewed.Leaf.NotAfter)
	}
	if n := f.Log.Count("node.certificate_renewed"); n != 1 {
		t.Errorf("renewed %d times", n)
	}
	if n := f.Log.Count("broker.enrol_open"); n != 0 {
		t.Errorf("the enrolment listener was opened %d times", n)
	}
}
