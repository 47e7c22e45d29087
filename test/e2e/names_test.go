package e2e

import (
	"crypto/rand"
	"encoding/json"
	"net/http"
	"net/url"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/iop-fabric/iop/broker/enrol"
	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/identity"
	"github.com/iop-fabric/iop/internal/ioptest"
	"github.com/iop-fabric/iop/internal/secret"
	"github.com/iop-fabric/iop/internal/up"
	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/wire"
	"github.com/iop-fabric/iop/wire/iopv1"
)

// goodName is Z1, but for the reserved words.
var goodName = regexp.MustCompile(`^[a-z0-9][a-z0-9_-]{0,62}$`)

// badNames are none, each for a reason of its own.
var badNames = []string{
	"", ".", "..", "*", ">", "a.b", "a*", "a>", "a b", " a", "a ", "a\tb", "a\r\nb", "a\n", "a\x00", "\x00", "A", "aB", "-a", "_a", "_edge", "_nr", "a/b", "a\\b", "a%2eb",
	"ctl", "store", "callout", "ä", "а", "ａ", "n\u0031\u20e3", "a\u200b", "a\u00ad", "\ufeffa", "a\u202eb", "ﬁ", "\xff", "a\xc3\x28", "$sys", "$JS", "a:b", "a@b", "a,b", "a;b", `a"b`, "a'b", "a|b",
	strings.Repeat("a", 64), strings.Repeat("a", 256), strings.Repeat("a", 70_000), "a." + strings.Repeat("b.", 100) + "c", "iop.v1.x.ctl.closed",
}

// entrances are the places where a name comes in that may become a token of a subject,
// each of which says whether it took the name.
func entrances(t testing.TB) map[string]func(name string) bool {
	key, err := identity.NewUserKey()
	issuer, err2 := identity.NewAccountKey()
	ca, err3 := identity.NewCA(identity.DefaultTrustDomain, time.Hour)
	curve, err4 := identity.NewCurveKey()
	for _, err := range []error{err, err2, err3, err4} {
		if err != nil {
			t.Fatal(err)
		}
	}
	secretKey := make([]byte, enrol.SecretSize)
	rand.Read(secretKey) // never fails
	s := secret.New(string(secretKey))
	run := wire.NewRunID()
	issue := func(edge, name string) bool {
		_, err := ca.Issue(identity.ID{TrustDomain: identity.DefaultTrustDomain, Edge: edge, Role: identity.RoleNode, Name: name}, nil, time.Minute)
		return err == nil
	}
	parse := func(edge, name string) bool {
		_, err := identity.ParseID(&url.URL{Scheme: "spiffe", Host: "iop", Path: "/" + edge + "/node/" + name})
		return err == nil
	}
	token := func(edge, node string) bool {
		_, err := identity.IssueToken(issuer, identity.SessionClaims{Edge: edge, Node: node, Gen: 1, NKey: key.Public()})
		return err == nil
	}
	built := func(build func()) (ok bool) { // a builder panics: what it is given was checked before
		defer func() { ok = recover() == nil }()
		build()
		return
	}
	complete := func(f configs.File) bool {
		err := f.Complete()
		return err == nil || !strings.Contains(err.Error(), "name") // faults of files that are not there are others
	}
	return map[string]func(string) bool{
		"wire":                 func(n string) bool { return wire.CheckName(n) == nil },
		"a certificate's edge": func(n string) bool { return issue(n, "n") },
		"a certificate's name": func(n string) bool { return issue("e", n) },
		"a SAN's edge":         func(n string) bool { return parse(n, "n") },
		"a SAN's name":         func(n string) bool { return parse("e", n) },
		"a token's edge":       func(n string) bool { return token(n, "n") },
		"a token's node":       func(n string) bool { return token("e", n) },
		"a session's edge":     func(n string) bool { _, err := subjects.ParseSession(n + ".n.1"); return err == nil },
		"a session's node":     func(n string) bool { _, err := subjects.ParseSession("e." + n + ".1"); return err == nil },
		"up, edge":             func(n string) bool { _, err := subjects.ParseUp("iop.v1." + n + ".n.1.up.ready"); return err == nil },
		"up, node":             func(n string) bool { _, err := subjects.ParseUp("iop.v1.e." + n + ".1.up.ready"); return err == nil },
		"down, node": func(n string) bool {
			_, err := subjects.ParseDown("iop.v1.e." + n + ".1.down.tunnel." + run)
			return err == nil
		},
		"ctl":   func(n string) bool { _, _, err := subjects.ParseCtl("iop.v1." + n + ".ctl.closed"); return err == nil },
		"store": func(n string) bool { _, _, err := subjects.ParseStore("iop.v1." + n + ".store.get"); return err == nil },
		"a callout's edge": func(n string) bool {
			_, _, err := subjects.ParseCallout("iop.v1.callout." + n + ".l")
			return err == nil
		},
		"a callout's leaf": func(n string) bool { _, _, err := subjects.ParseCallout("iop.v1.callout.e." + n); return err == nil },
		"a leaf's edge": func(n string) bool {
			_, _, _, err := subjects.ParseLeaf("iop.v1." + n + ".leaf.l.beat")
			return err == nil
		},
		"a leaf's name": func(n string) bool {
			_, _, _, err := subjects.ParseLeaf("iop.v1.e.leaf." + n + ".beat")
			return err == nil
		},
		"building up": func(n string) bool {
			return built(func() { subjects.Session{Edge: "e", Node: n, Gen: 1}.Up(subjects.Ready, "") })
		},
		"building down": func(n string) bool {
			return built(func() { _ = subjects.Session{Edge: n, Node: "n", Gen: 1}.DownWildcard() })
		},
		"building permissions": func(n string) bool { return built(func() { subjects.EdgePermissions(n) }) },
		"a node's permissions": func(n string) bool {
			return built(func() { subjects.NodePermissions(subjects.Session{Edge: "e", Node: n, Gen: 1}, run[:16]) })
		},
		"a leaf's permissions":  func(n string) bool { return built(func() { subjects.LeafPermissions("e", n) }) },
		"a lobby's permissions": func(n string) bool { return built(func() { subjects.LobbyPermissions("e", n, run[:16]) }) },
		"an invitation":         func(n string) bool { _, err := enrol.New(n, s, time.Now(), time.Hour); return err == nil },
		"an invite line": func(n string) bool {
			_, err := enrol.ParseToken(enrol.Token{Name: n, Secret: s}.Text())
			return err == nil
		},
		"a request to join": func(n string) bool {
			body, err := json.Marshal(enrol.Request{Name: n, NKey: key.Public(), Curve: curve.Public()})
			if err != nil {
				return false
			}
			_, _, err = enrol.Unseal(body, "")
			return len(body) <= enrol.MaxRequest && !strings.Contains(err.Error(), "name:") // the next fault is the missing request for a certificate
		},
		"edge.name": func(n string) bool { return complete(configs.File{Edge: &configs.Edge{Name: n}}) },
		"edge.nodes": func(n string) bool {
			return complete(configs.File{Edge: &configs.Edge{Name: "e", Nodes: []configs.EdgeNode{{Name: n}}}})
		},
		"broker.members": func(n string) bool {
			return complete(configs.File{Broker: &configs.Broker{Name: "b", Members: []configs.Member{{Edge: "e", Role: "node", Name: n, NKey: key.Public()}}}})
		},
	}
}

// What may become a token of a subject is a name, wherever it comes in.
//
// Contract: Z1 U1
func TestZ1NamesAtEveryEntrance(t *testing.T) {
	all := entrances(t)
	for where, takes := range all {
		for _, good := range []string{"a", "0", "n-1_x", strings.Repeat("a", 63)} {
			if !takes(good) {
				t.Errorf("%s refuses %q", where, good)
			}
		}
		for _, bad := range badNames {
			if bad == "" && (where == "edge.name" || where == "broker.members" || where == "edge.nodes") {
				continue // the default, or another fault: left out
			}
			if takes(bad) {
				t.Errorf("%s takes %.40q", where, bad)
			}
		}
	}
}

// FuzzNames: no entrance takes what is no name, and none panics but the builders.
func FuzzNames(f *testing.F) {
	for _, n := range badNames {
		f.Add(n)
	}
	f.Add("n-1")
	all := entrances(f)
	f.Fuzz(func(t *testing.T, n string) {
		if goodName.MatchString(n) || n == "" {
			return
		}
		for where, takes := range all {
			if takes(n) {
				t.Errorf("%s takes %.40q", where, n)
			}
		}
	})
}

// The same where a running fabric is told a name: in a registration, and by an
// operator.
//
// Contract: Z1 R1
func TestZ1NamesInARunningFabric(t *testing.T) {
	f := raw(t, nil)
	n := f.DialRaw("raw", wire.NewToken())
	n.AskToken()
	count := 0
	for _, bad := range badNames {
		if len(bad) > 1000 || strings.ContainsRune(bad, '\ufffd') || !json.Valid([]byte(`"`+bad+`"`)) || strings.ToValidUTF8(bad, "") != bad {
			continue // protobuf's strings are UTF-8
		}
		if count == 15 {
			break // its budget of words
		}
		count++
		if resp := n.Register(count, func(r *iopv1.RegisterRequest) { r.NodeId = bad }); resp.GetAccepted() {
			t.Errorf("registered as %q", bad)
		}
	}
	for _, bad := range badNames {
		if len(bad) > 1000 {
			continue
		}
		for _, path := range []string{"/api/v1/invitations/" + url.PathEscape(bad), "/api/v1/members/node/" + url.PathEscape(bad) + "/revoke", "/api/v1/members/" + url.PathEscape(bad) + "/x/revoke"} {
			method := http.MethodDelete
			if strings.HasSuffix(path, "revoke") {
				method = http.MethodPost
			}
			req, err := http.NewRequestWithContext(t.Context(), method, f.Info.AdminURL+path, nil)
			if err != nil {
				t.Fatal(err)
			}
			req.Header.Set("Authorization", "Bearer "+adminToken(t, f))
			if resp, body := f.Do(req); resp.StatusCode < 400 || resp.StatusCode >= 500 {
				t.Errorf("%s %s: %d %s", method, path, resp.StatusCode, body)
			}
		}
		if err := f.Broker.Register(t.Context(), configs.Member{Edge: up.DefaultEdge, Role: "node", Name: bad}); err == nil {
			t.Errorf("a member %q was registered", bad)
		}
		if err := f.Broker.Revoke(t.Context(), bad, "node", "raw"); err == nil {
			t.Errorf("a member of edge %q was revoked", bad)
		}
	}
	if resp := n.Register(count+1, nil); !resp.GetAccepted() {
		t.Errorf("the honest name is refused after them: %v", resp)
	}
}

func adminToken(t *testing.T, f *ioptest.Fabric) string {
	t.Helper()
	data, err := os.ReadFile(f.Folder.AdminToken())
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(data))
}
