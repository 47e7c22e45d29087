package configs

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime"
	"time"

	"github.com/iop-fabric/iop/internal/identity"
)

// expiryWarning is how long before its end a certificate is warned of.
const expiryWarning = 30 * 24 * time.Hour

// Check loads a file as LoadAny does and then opens the files it names: each must be
// there, readable, of the right kind, a pair where it is one, and good at now. It
// asks nobody. Warnings are what does not keep a process from starting.
func Check(path string, now time.Time) (warnings Faults, err error) {
	data, err := read(path)
	if err != nil {
		return nil, err
	}
	file, locate, err := decode(path, data, os.Environ(), hasSection(data, "broker") && hasSection(data, "edge"))
	if err != nil {
		return nil, lacksBroker(path, data, err)
	}
	c := &checker{now: now}
	c.file(file)
	for _, fs := range []*Faults{&c.faults, &c.warnings} {
		for i, f := range *fs {
			(*fs)[i] = locate(f)
		}
	}
	_ = c.warnings.err() // in the order of the file
	return c.warnings, c.faults.err()
}

// checker collects what is wrong with files. None of it echoes what they hold.
type checker struct {
	validator
	warnings Faults
	now      time.Time
}

func (c *checker) warn(path, format string, args ...any) {
	c.warnings = append(c.warnings, Fault{Path: path, Message: fmt.Sprintf(format, args...)})
}

func (c *checker) file(f *File) {
	if b := f.Broker; b != nil {
		id := identity.ID{TrustDomain: b.TrustDomain, Role: identity.RoleBroker}
		c.tls("broker.tls", b.TLS, id)
		if b.Cluster != nil && b.Cluster.TLS != b.TLS {
			c.tls("broker.cluster.tls", b.Cluster.TLS, id)
		}
		c.authority("broker", b.IssuerKey, b.SystemKey, b.CalloutKey, b.ServiceKey)
		c.folder("broker.store_dir", b.StoreDir)
		c.token("broker.admin_token", b.AdminToken)
		c.enrolment("broker.enrolment", b.Enrolment)
	}
	if s := f.Service; s != nil {
		c.tls("service.tls", s.TLS, identity.ID{TrustDomain: s.TrustDomain, Role: identity.RoleService})
		c.authority("service", s.IssuerKey, s.SystemKey, s.CalloutKey, s.ServiceKey)
		c.token("service.admin_token", s.AdminToken)
		c.enrolment("service.enrolment", s.Enrolment)
	}
	if e := f.Edge; e != nil {
		c.remote("edge.broker", e.Broker, identity.ID{TrustDomain: e.TrustDomain, Edge: e.Name, Role: identity.RoleEdge})
		c.token("edge.admin_token", e.AdminToken)
		c.pair("edge.tls", e.TLS)
		for i, k := range e.Keys {
			c.key(fmt.Sprintf("edge.keys[%d]", i), k)
		}
	}
	if n := f.Node; n != nil {
		c.remote("node.broker", n.Broker, identity.ID{TrustDomain: n.TrustDomain, Edge: n.Edge, Role: identity.RoleNode, Name: n.Name})
		c.nkey("node.curve_key", n.CurveKey, 'X')
	}
	if l := f.Leaf; l != nil {
		c.tls("leaf.tls", l.TLS, identity.ID{TrustDomain: l.TrustDomain, Edge: l.Edge, Role: identity.RoleLeaf, Name: l.Name})
		c.nkey("leaf.nkey", l.NKey, 'U')
	}
}

func (c *checker) remote(path string, r Remote, id identity.ID) {
	c.tls(path+".tls", r.TLS, id)
	c.nkey(path+".nkey", r.NKey, 'U')
}

// tls is a certificate of the fabric: of that workload, or any name of that role
// where none is given. What the process makes itself is not named.
func (c *checker) tls(path string, t TLS, want identity.ID) {
	if t == (TLS{}) {
		return
	}
	var pool *x509.CertPool
	key := c.opens(path+".key", t.Key)
	if key {
		_, err := identity.LoadKey(t.Key)
		c.check(path+".key", err)
		key = err == nil
	}
	if c.opens(path+".ca", t.CA) {
		var err error
		pool, err = identity.LoadPool(t.CA)
		c.check(path+".ca", err)
	}
	if !c.opens(path+".certificate", t.Certificate) {
		return
	}
	chain, id, err := identity.LoadChain(t.Certificate)
	if err != nil {
		c.check(path+".certificate", err)
		return
	}
	if key {
		if _, err := identity.LoadCertificate(t.Certificate, t.Key); err != nil { // both can be read: they are no pair
			c.check(path+".key", err)
		}
	}
	if !c.inTime(path+".certificate", t.Certificate, chain[0]) {
		return
	}
	if pool != nil {
		raw := make([][]byte, len(chain))
		for i, cert := range chain {
			raw[i] = cert.Raw
		}
		server := want.Role == identity.RoleBroker || want.Role == identity.RoleLeaf
		if _, _, err := identity.VerifyChain(pool, raw, want.Role, server); err != nil {
			c.fault(path+".certificate", "%s, against the CA in %s: %s", t.Certificate, t.CA, err)
			return
		}
	}
	wrong := func(what, is, should string) {
		if should != "" && is != should {
			c.fault(path+".certificate", "%s is of %s %q, the configuration says %q", t.Certificate, what, is, should)
		}
	}
	wrong("trust domain", id.TrustDomain, want.TrustDomain)
	wrong("edge", id.Edge, want.Edge)
	wrong("name", id.Name, want.Name)
}

// inTime says when a certificate is not, or will soon not be, good.
func (c *checker) inTime(path, file string, cert *x509.Certificate) bool {
	const day = "2006-01-02 15:04 MST"
	switch left := cert.NotAfter.Sub(c.now); {
	case c.now.Before(cert.NotBefore):
		c.fault(path, "%s is good only from %s on: is this machine's clock right?", file, cert.NotBefore.UTC().Format(day))
		return false
	case left <= 0:
		c.fault(path, "%s has expired on %s: have it signed anew (iop rotate, or the file of a renewed one), or is this machine's clock right?", file, cert.NotAfter.UTC().Format(day))
		return false
	case left < expiryWarning && left < cert.NotAfter.Sub(cert.NotBefore)/3: // a short life is no warning
		c.warn(path, "%s expires on %s", file, cert.NotAfter.UTC().Format(day))
	}
	return true
}

// pair is the callers' listener's, of whatever CA.
func (c *checker) pair(path string, p KeyPair) {
	if p == (KeyPair{}) {
		return
	}
	if !c.readable(path+".certificate", p.Certificate) || !c.secret(path+".key", p.Key) {
		return
	}
	cert, err := tls.LoadX509KeyPair(p.Certificate, p.Key)
	if err != nil {
		c.fault(path, "%s and %s: %s", p.Certificate, p.Key, err)
		return
	}
	c.inTime(path+".certificate", p.Certificate, cert.Leaf)
}

// nkey is a seed; kind is the first letter of its public key.
func (c *checker) nkey(path, file string, kind byte) (public string) {
	if file == "" || !c.opens(path, file) {
		return ""
	}
	k, err := identity.LoadNKey(file)
	switch {
	case err != nil:
		c.check(path, err)
		return ""
	case k.Public()[0] != kind:
		c.fault(path, "%s holds an nkey of another kind: want the seed S%c...", file, kind)
		return ""
	}
	return k.Public()
}

// authority checks the four keys of a session service.
func (c *checker) authority(section, issuer, system, callout, service string) {
	c.nkey(section+".issuer_key", issuer, 'A')
	seen := unique{}
	for _, k := range []struct{ name, file string }{{"system_key", system}, {"callout_key", callout}, {"service_key", service}} {
		path := section + "." + k.name
		seen.add(&c.validator, path, c.nkey(path, k.file, 'U'), "the key in it")
	}
}

func (c *checker) enrolment(path string, e *Enrolment) {
	if e == nil || (e.CACertificate == "" && e.CAKey == "") ||
		!c.opens(path+".ca_certificate", e.CACertificate) || !c.opens(path+".ca_key", e.CAKey) {
		return
	}
	_, certErr := identity.LoadPool(e.CACertificate)
	_, keyErr := identity.LoadKey(e.CAKey)
	c.check(path+".ca_certificate", certErr)
	c.check(path+".ca_key", keyErr)
	if certErr == nil && keyErr == nil {
		_, err := identity.LoadCAFiles(e.CACertificate, e.CAKey)
		c.check(path+".ca_key", err)
	}
}

// key is a caller's; that of a variable is another process's environment.
func (c *checker) key(path string, k APIKey) {
	if k.File == "" || !c.secret(path+".file", k.File) {
		return
	}
	key, err := k.read()
	clear(key)
	c.check(path+".file", err)
}

func (c *checker) token(path string, t AdminToken) {
	if t.Set() {
		c.key(path, t.key())
	}
}

// secret is a readable file that others had better not read: here no process refuses
// it for that.
func (c *checker) secret(path, file string) bool {
	if !c.readable(path, file) {
		return false
	}
	info, err := os.Stat(file)
	if err == nil && runtime.GOOS != "windows" && info.Mode().Perm()&0o077 != 0 {
		c.warn(path, "%s: its mode %#o lets others at it: chmod 600 %s", file, info.Mode().Perm(), file)
	}
	return true
}

func (c *checker) readable(path, file string) bool {
	if !c.opens(path, file) {
		return false
	}
	f, err := os.Open(file)
	c.check(path, err)
	if err == nil {
		f.Close() // only opened
	}
	return err == nil
}

// opens says whether a file can be looked into: one that another program writes as it
// is read is left to the process it is for.
func (c *checker) opens(path, file string) bool {
	switch info, err := os.Stat(file); {
	case err != nil:
		c.check(path, err)
	case info.IsDir():
		c.fault(path, "%s is a folder: want a file", file)
	case !info.Mode().IsRegular():
		c.warn(path, "%s is no plain file: it is not looked into", file)
	default:
		return true
	}
	return false
}

// folder is made where it is not there; what is there must be one.
func (c *checker) folder(path, dir string) {
	if dir == "" {
		return
	}
	switch info, err := os.Stat(dir); {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		c.check(path, err)
	case !info.IsDir():
		c.fault(path, "%s is a file: want a folder", dir)
	}
}
