package e2e

import (
	"io"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/iop-fabric/iop/internal/adminapi"
	"github.com/iop-fabric/iop/internal/identity"
	"github.com/iop-fabric/iop/internal/ioptest"
	"github.com/iop-fabric/iop/internal/up"
)

// What expires is shown before it bites: each part's metric, and the admin API with
// the Edge's own certificate and that of each node's session.
//
// Contract: B8 D8
func TestExpiryIsShown(t *testing.T) {
	f := ioptest.Start(t, ioptest.Options{})
	until := func(role identity.Role, name string) time.Time {
		t.Helper()
		file := f.Folder.Certificate(role, name)
		c, err := identity.LoadCertificate(file, strings.TrimSuffix(file, ".pem")+".key")
		if err != nil {
			t.Fatal(err)
		}
		return c.Leaf.NotAfter
	}
	resp, err := f.Client.Get(f.Info.AdminURL + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	metrics, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	for role, name := range map[identity.Role]string{identity.RoleBroker: "broker", identity.RoleEdge: up.DefaultEdge, identity.RoleNode: up.DefaultNode} {
		metric := "\niop_" + string(role) + "_certificate_expiry_timestamp_seconds "
		_, rest, _ := strings.Cut(string(metrics), metric)
		line, _, _ := strings.Cut(rest, "\n")
		if at, err := strconv.ParseFloat(line, 64); err != nil || int64(at) != until(role, name).Unix() {
			t.Errorf("%s%s", metric, line)
		}
	}
	token, err := os.ReadFile(f.Folder.AdminToken())
	if err != nil {
		t.Fatal(err)
	}
	client := adminapi.Client{URL: f.Info.AdminURL, Token: strings.TrimSpace(string(token))}
	s, err := client.Snapshot(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	want := adminapi.Certificate{Role: "edge", Name: up.DefaultEdge, Expires: until(identity.RoleEdge, up.DefaultEdge)}
	if len(s.Certificates) != 1 || s.Certificates[0].Role != want.Role || s.Certificates[0].Name != want.Name || !s.Certificates[0].Expires.Equal(want.Expires) {
		t.Errorf("its own: %+v, want %+v", s.Certificates, want)
	}
	if len(s.Nodes) != 1 || !s.Nodes[0].CertificateExpires.Equal(until(identity.RoleNode, up.DefaultNode)) {
		t.Errorf("the node's: %+v", s.Nodes)
	}
}
