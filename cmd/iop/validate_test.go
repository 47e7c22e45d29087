package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/iop-fabric/iop/internal/identity"
)

// Every file that a configuration names is looked into: what is wrong with it stands
// with the file and line that name it, and a file of another host can be left out.
//
// Contract: D3 Z4
func TestValidateFiles(t *testing.T) {
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	whole := func(t *testing.T) string {
		dir, _ := hostsFolder(t)
		mustIOP(t, "init", "--out", dir, "--node", "gpu1,gpu2", "--leaf", "attic=attic.example")
		return dir
	}
	dir := whole(t)
	for _, folder := range []string{"broker-1", "edge", "node-gpu1", "leaf-attic"} {
		if code, _, errs := ended(t, "validate", config(dir, folder)); code != 0 || errs != "" {
			t.Errorf("%s as it was made: %d %s", folder, code, errs)
		}
	}
	ca, err := identity.LoadCA(filepath.Join(dir, "authority"))
	must(err)
	copyFile := func(to, from string) {
		t.Helper()
		b, err := os.ReadFile(from)
		must(err)
		must(os.WriteFile(to, b, 0o600))
	}
	issue := func(file, key, name string, life time.Duration) {
		t.Helper()
		c, err := ca.Issue(identity.ID{TrustDomain: "iop", Edge: "home", Role: identity.RoleNode, Name: name}, nil, life)
		must(err)
		must(c.Save(file, key))
	}
	for name, c := range map[string]struct {
		folder string
		spoil  func(in, dir string) // in: the member's folder
		want   string               // with %: file and line go before it
		warns  bool
	}{
		"no certificate": {"node-gpu1", func(in, _ string) { must(os.Remove(in + "cert.pem")) }, "node.broker.tls.certificate: stat ", false},
		"no key":         {"node-gpu1", func(in, _ string) { must(os.Remove(in + "cert.key")) }, "node.broker.tls.key: stat ", false},
		"no CA":          {"edge", func(in, _ string) { must(os.Remove(in + "ca.pem")) }, "edge.broker.tls.ca: stat ", false},
		"cut short":      {"node-gpu1", func(in, _ string) { must(os.Truncate(in+"cert.pem", 100)) }, "it is not PEM, or cut short", false},
		"empty":          {"node-gpu1", func(in, _ string) { must(os.Truncate(in+"cert.pem", 0)) }, "the file is empty", false},
		"a folder":       {"node-gpu1", func(in, _ string) { must(os.Remove(in + "ca.pem")); must(os.Mkdir(in+"ca.pem", 0o700)) }, "node.broker.tls.ca: ", false},
		"no pair":        {"node-gpu1", func(in, dir string) { copyFile(in+"cert.key", dir+"/node-gpu2/cert.key") }, "the key is not the key of the certificate in ", false},
		"another's":      {"node-gpu1", func(in, dir string) { issue(in+"cert.pem", in+"cert.key", "gpu2", time.Hour) }, `is of name "gpu2", the configuration says "gpu1"`, false},
		"another role": {"node-gpu1", func(in, dir string) {
			copyFile(in+"cert.pem", dir+"/edge/cert.pem")
			copyFile(in+"cert.key", dir+"/edge/cert.key")
		}, "certificate of a edge where a node is wanted", false},
		"another CA":        {"node-gpu1", func(in, _ string) { copyFile(in+"ca.pem", whole(t)+"/authority/ca.pem") }, "against the CA in ", false},
		"a CA that is none": {"node-gpu1", func(in, _ string) { copyFile(in+"ca.pem", in+"cert.pem") }, "certificate 1 is not of a CA", false},
		"mode":              {"node-gpu1", func(in, _ string) { must(os.Chmod(in+"user.nk", 0o640)) }, "node.broker.nkey: nkey ", false},
		"an nkey, another":  {"node-gpu1", func(in, _ string) { copyFile(in+"user.nk", in+"curve.nk") }, "user.nk holds an nkey of another kind", false},
		"no nkey at all":    {"node-gpu1", func(in, _ string) { copyFile(in+"curve.nk", in+"ca.pem") }, "node.curve_key: nkey ", false},
		"one key twice":     {"broker-1", func(in, _ string) { copyFile(in+"system.nk", in+"callout.nk") }, "broker.callout_key: the key in it is already that of broker.system_key", false},
		"a user as issuer":  {"broker-1", func(in, _ string) { copyFile(in+"issuer.nk", in+"callout.nk") }, "issuer.nk holds an nkey of another kind: want the seed SA", false},
		"a store, a file":   {"broker-1", func(in, _ string) { copyFile(in+"data", in+"ca.pem") }, "broker.store_dir: ", false},
		"no API key":        {"edge", func(in, _ string) { must(os.Remove(in + "api-key")) }, "edge.keys[0].file: stat ", false},
		"an empty token":    {"edge", func(in, _ string) { must(os.WriteFile(in+"admin-token", []byte("\n"), 0o600)) }, "edge.admin_token.file: file ", false},
		"an open API key":   {"edge", func(in, _ string) { must(os.Chmod(in+"api-key", 0o644)) }, "chmod 600 ", true},
		"expires soon": {"node-gpu1", func(in, _ string) { // of a life long enough to warn of
			cert, err := ca.Issue(identity.ID{TrustDomain: "iop", Edge: "home", Role: identity.RoleNode, Name: "gpu1"}, nil, 20*time.Minute)
			must(err)
			must(cert.Save(in+"cert.pem", in+"cert.key"))
		}, "expires on ", true},
	} {
		t.Run(name, func(t *testing.T) {
			dir := whole(t)
			ca, err = identity.LoadCA(filepath.Join(dir, "authority"))
			must(err)
			file := config(dir, c.folder)
			c.spoil(filepath.Dir(file)+string(filepath.Separator), dir)
			code, _, errs := ended(t, "validate", file)
			line := file + ":"
			if (code == 0) != c.warns || !strings.Contains(errs, c.want) || !strings.Contains(errs, line) || strings.Contains(errs, "warning:") != c.warns {
				t.Errorf("exit code %d; no %q at %sN in\n%s", code, c.want, line, errs)
			}
			if code, _, errs := ended(t, "validate", "--no-files", file); code != 0 || errs != "" {
				t.Errorf("--no-files: %d %s", code, errs)
			}
		})
	}
}
