package up

import (
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/iop-fabric/iop/internal/identity"
)

// Lifetimes of what Prepare makes. Certificates are renewed before their end; a new
// CA is a new folder.
const (
	caLife   = 10 * 365 * 24 * time.Hour
	certLife = 365 * 24 * time.Hour
)

// Folder is a data folder's layout.
type Folder string

func (f Folder) path(elem ...string) string {
	return filepath.Join(append([]string{string(f)}, elem...)...)
}

// Certificate and key name the files of one workload. A name of its own has a
// file of its own, so another name in the configuration makes another
// certificate and leaves the first.
func (f Folder) Certificate(role identity.Role, name string) string {
	return f.path("pki", string(role)+"-"+name+".pem")
}

func (f Folder) key(role identity.Role, name string) string {
	return f.path("pki", string(role)+"-"+name+".key")
}

// CA is the certificate authority's certificate.
func (f Folder) CA() string { return f.path("pki", "ca.pem") }

// CAKey is its key: who has it makes members.
func (f Folder) CAKey() string { return f.path("pki", "ca.key") }

// NKey names the file of one nkey: issuer, system, callout, service, edge,
// node, curve.
func (f Folder) NKey(name string) string { return f.path("keys", name+".nk") }

// APIKey names the file with the first caller's key.
func (f Folder) APIKey() string { return f.path("api-key") }

// AdminToken names the file with the token of the admin API.
func (f Folder) AdminToken() string { return f.path("admin-token") }

// AdminURL names the file that says where the running fabric's admin listener is.
func (f Folder) AdminURL() string { return f.path("admin-url") }

// Store is where the broker keeps what the authority knows.
func (f Folder) Store() string { return f.path("store") }

// Config is where `iop init` writes the configuration.
func (f Folder) Config() string { return f.path("iop.yaml") }

var nkeyKinds = []struct {
	name string
	make func() (*identity.NKey, error)
}{
	{"issuer", identity.NewAccountKey},
	{"system", identity.NewUserKey},
	{"callout", identity.NewUserKey},
	{"service", identity.NewUserKey},
	{"edge", identity.NewUserKey},
	{"node", identity.NewUserKey},
	{"curve", identity.NewCurveKey},
}

// Lock takes the folder for this process (I3).
func Lock(f Folder) (unlock func(), err error) {
	if err := os.MkdirAll(string(f), 0o700); err != nil {
		return nil, fmt.Errorf("data folder: %w", err)
	}
	return lock(f)
}

// Prepare makes what the folder lacks and leaves what it has; the caller holds
// its Lock: a CA, a
// certificate each for broker, edge and node, the nkeys, and one API key.
func Prepare(f Folder, edge, node string) error {
	for _, dir := range []string{string(f), f.path("pki"), f.path("keys"), f.Store()} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return fmt.Errorf("data folder: %w", err)
		}
		if err := checkPrivate(dir); err != nil {
			return err
		}
	}
	// A first start that was cut off leaves no mark, and is done again; after it,
	// what is missing was lost.
	made := f.path("made")
	used := present(made)
	if used && !present(f.CA()) {
		return fmt.Errorf("%s is missing, and every certificate of this folder was made with it: restore it, or begin with a new data folder", f.CA())
	}
	if !used {
		removeLeftovers(f.path("pki"), f.path("keys"), string(f))
	}
	if err := prepareCertificates(f, edge, node); err != nil {
		return err
	}
	for _, kind := range nkeyKinds {
		if used && !present(f.NKey(kind.name)) {
			return fmt.Errorf("%s is missing, and what was made with it would not be trusted with another: restore it, or begin with a new data folder", f.NKey(kind.name))
		}
		k, err := ensureNKey(f.NKey(kind.name), kind.make)
		if err != nil {
			return err
		}
		if fresh, err := kind.make(); err == nil && fresh.Public()[0] != k.Public()[0] {
			return fmt.Errorf("%s: holds a key of another kind (%c..., want %c...): were files swapped?", f.NKey(kind.name), k.Public()[0], fresh.Public()[0])
		}
	}
	for file, prefix := range map[string]string{f.APIKey(): apiKeyPrefix, f.AdminToken(): adminTokenPrefix} {
		if err := ensureKey(file, prefix); err != nil {
			return err
		}
	}
	if used {
		return nil
	}
	return identity.WriteKeyFile(made, []byte("The keys of this folder were made whole. They belong together.\n"))
}

// checkPrivate refuses a folder of keys that others may write.
func checkPrivate(dir string) error {
	// Windows keeps access lists, not modes.
	if st, err := os.Stat(dir); runtime.GOOS != "windows" && err == nil && st.Mode().Perm()&0o022 != 0 {
		return fmt.Errorf("data folder: %s may be written by others (mode %04o), so its keys prove nothing: chmod 700 it", dir, st.Mode().Perm())
	}
	return nil
}

// removeLeftovers removes what a write that was cut off left behind.
func removeLeftovers(dirs ...string) {
	for _, dir := range dirs {
		files, err := filepath.Glob(filepath.Join(dir, ".iop-*"))
		if err != nil {
			continue
		}
		for _, file := range files {
			_ = os.Remove(file) // it is in nobody's way
		}
	}
}

// ensureNKey loads the nkey in file, or makes it there.
func ensureNKey(file string, mk func() (*identity.NKey, error)) (*identity.NKey, error) {
	if present(file) {
		return identity.LoadNKey(file)
	}
	k, err := mk()
	if err != nil {
		return nil, err
	}
	return k, k.Save(file)
}

// ensureCA loads the CA in dir, or makes it there.
func ensureCA(dir string) (*identity.CA, error) {
	switch cert, key := present(filepath.Join(dir, "ca.pem")), present(filepath.Join(dir, "ca.key")); {
	case cert && key:
		if err := identity.ResumeSwitch(dir); err != nil {
			return nil, err
		}
		return identity.LoadCA(dir)
	case cert: // the key is written first: without a certificate it signed nothing
		return nil, fmt.Errorf("%s: ca.pem and ca.key belong together, one of them is missing: restore it, or remove the folder to make new keys", dir)
	}
	ca, err := identity.NewCA(identity.DefaultTrustDomain, caLife)
	if err != nil {
		return nil, err
	}
	return ca, ca.Save(dir)
}

// ensureCertificate checks that the certificate in certFile is id's, or makes it
// and its key there.
func ensureCertificate(ca *identity.CA, id identity.ID, hosts []string, certFile, keyFile string) error {
	// The key is written first: alone, it is what a start that was cut off left.
	if present(certFile) {
		c, err := identity.LoadCertificate(certFile, keyFile)
		if err != nil {
			return err
		}
		if c.ID() != id {
			return fmt.Errorf("%s: is %s, but %s is configured: use the name it was made for, or remove the file and its key", certFile, c.ID(), id)
		}
		return nil
	}
	c, err := ca.Issue(id, hosts, certLife)
	if err != nil {
		return err
	}
	return c.Save(certFile, keyFile)
}

func prepareCertificates(f Folder, edge, node string) error {
	ca, err := ensureCA(f.path("pki"))
	if err != nil {
		return err
	}
	for _, w := range []struct {
		id    identity.ID
		hosts []string
	}{
		{identity.ID{Edge: "-", Role: identity.RoleBroker, Name: "broker"}, brokerHosts()},
		{identity.ID{Edge: edge, Role: identity.RoleEdge, Name: edge}, nil},
		{identity.ID{Edge: edge, Role: identity.RoleNode, Name: node}, nil},
	} {
		w.id.TrustDomain = identity.DefaultTrustDomain
		if err := ensureCertificate(ca, w.id, w.hosts, f.Certificate(w.id.Role, w.id.Name), f.key(w.id.Role, w.id.Name)); err != nil {
			return err
		}
	}
	return nil
}

// brokerHosts are the names the broker's certificate is good for.
func brokerHosts() []string {
	hosts := []string{"localhost", "127.0.0.1", "::1"}
	if name, err := os.Hostname(); err == nil && name != "" && name != "localhost" {
		hosts = append(hosts, name)
	}
	return hosts
}

// maxHosts bounds the names of a certificate that is used at changing addresses.
const maxHosts = 32

// renewBroker signs the broker's certificate anew, for the same key, where it is
// not good for a host that machines are told to dial it at.
func renewBroker(f Folder, hosts ...string) error {
	certFile, keyFile := f.Certificate(identity.RoleBroker, "broker"), f.key(identity.RoleBroker, "broker")
	c, err := identity.LoadCertificate(certFile, keyFile)
	if err != nil {
		return err
	}
	if !slices.ContainsFunc(hosts, func(h string) bool { return c.Leaf.VerifyHostname(h) != nil }) {
		return nil
	}
	hosts = append(hosts, brokerHosts()...)
	hosts = append(hosts, c.Hosts()...)
	var unique []string
	for _, h := range hosts {
		if !slices.Contains(unique, h) && len(unique) < maxHosts {
			unique = append(unique, h)
		}
	}
	ca, err := ensureCA(f.path("pki"))
	if err != nil {
		return err
	}
	renewed, err := ca.Renew(c, unique, certLife)
	if err != nil {
		return err
	}
	return renewed.Save(certFile, keyFile)
}

// What a key of ours begins with, so that one that leaked is known for what it is.
const (
	apiKeyPrefix     = "sk-iop-"
	adminTokenPrefix = "iop-admin-"
)

// ensureKey checks the key in file, or makes one there.
func ensureKey(file, prefix string) error {
	if present(file) {
		_, err := readKey(file)
		return err
	}
	var b [24]byte
	rand.Read(b[:]) // never fails
	key := prefix + base64.RawURLEncoding.EncodeToString(b[:])
	return identity.WriteKeyFile(file, []byte(key+"\n"))
}

// ReadAPIKey reads the folder's API key.
func ReadAPIKey(f Folder) (string, error) { return readKey(f.APIKey()) }

func readKey(file string) (string, error) {
	b, err := identity.ReadKeyFile(file)
	if err != nil {
		return "", err
	}
	key := strings.TrimSpace(string(b))
	if len(key) < 16 || strings.ContainsFunc(key, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return "", fmt.Errorf("%s: holds no key (16 or more printable characters, no blanks): remove it to have a new one made", file)
	}
	return key, nil
}

func present(file string) bool {
	_, err := os.Lstat(file)
	return err == nil || !errors.Is(err, fs.ErrNotExist)
}
