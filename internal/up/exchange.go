package up

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/iop-fabric/iop/broker"
	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/identity"
)

// What is exchanged in three steps, by which everybody knows the new one before the old
// one is good for nothing any more.
const (
	ExchangeCA     = "ca"
	ExchangeIssuer = "issuer"
)

// The steps of an exchange.
const (
	StepBegin  = "begin"  // the new one is made beside the old one, and is believed
	StepSwitch = "switch" // the new one signs
	StepFinish = "finish" // the old one is believed no more
)

// CheckExchange says what is wrong with a step's name.
func CheckExchange(what, step string) error {
	if what != ExchangeCA && what != ExchangeIssuer {
		return fmt.Errorf("exchange %s: want ca or issuer", what)
	}
	if step != StepBegin && step != StepSwitch && step != StepFinish {
		return fmt.Errorf("%s %s: want begin, switch or finish", what, step)
	}
	return nil
}

// Exchange takes one step in a folder of `iop init --out`.
type Exchange struct {
	Out  string // the authority's folder
	What string // ExchangeCA or ExchangeIssuer
	Step string
	// Live is what each says that was asked; nil: nobody could be. Force finishes all the same.
	Live  []Asked
	Force bool
}

// Asked is what a broker or service, by the address it was asked at, says of the keys.
type Asked struct {
	Whom string
	broker.Keys
}

// Exchanged says what was done.
type Exchanged struct {
	// Files are what hosts must get, by the folder of each.
	Files []HostFiles
	// Key is the issuer's new public key.
	Key string
}

// HostFiles are those of one host.
type HostFiles struct {
	Folder string
	Names  []string
}

// add notes a file of a member's folder.
func (d *Exchanged) add(folder, name string) {
	i := slices.IndexFunc(d.Files, func(f HostFiles) bool { return f.Folder == folder })
	if i < 0 {
		d.Files, i = append(d.Files, HostFiles{Folder: folder}), len(d.Files)
	}
	d.Files[i].Names = append(d.Files[i].Names, name)
}

// Run takes the step. One that was cut off is taken again, and does the rest.
func (e Exchange) Run() (done Exchanged, err error) {
	if err := CheckExchange(e.What, e.Step); err != nil {
		return done, err
	}
	if !present(filepath.Join(e.Out, "authority")) {
		return done, fmt.Errorf("%s: is no folder of iop init --out: it has no authority", e.Out)
	}
	unlock, err := lock(Folder(e.Out))
	if err != nil {
		return done, err
	}
	defer unlock()
	if e.What == ExchangeIssuer {
		return e.issuer()
	}
	return e.ca()
}

func (e Exchange) ca() (done Exchanged, err error) {
	dir := filepath.Join(e.Out, "authority")
	if e.Step == StepFinish {
		if err := e.allShowTheNew(dir); err != nil {
			return done, err
		}
	}
	t, err := stepCA(dir, e.Step)
	if err != nil {
		return done, err
	}
	folders, err := memberFolders(e.Out)
	if err != nil {
		return done, err
	}
	for _, folder := range folders {
		if err := e.distribute(&done, folder, t); err != nil {
			return done, err
		}
	}
	return done, nil
}

// stepCA takes the step in the CA's own folder. A beginning that is there already is
// carried on.
func stepCA(dir, step string) (t identity.Trust, err error) {
	switch step {
	case StepBegin:
		if t, err = identity.BeginCA(dir, caLife); errors.Is(err, identity.ErrExchanging) {
			was, read := identity.LoadTrust(filepath.Join(dir, "ca.pem"))
			ca, load := identity.LoadCA(dir)
			if read == nil && load == nil && was.Signer() != nil && ca.Certificate().Equal(was.Signer()) && !switched(was) {
				return was, nil
			}
		}
	case StepSwitch:
		t, err = identity.SwitchCA(dir)
	case StepFinish:
		t, err = identity.FinishCA(dir)
	}
	return t, err
}

// switched reports whether the newer of two roots signs.
func switched(t identity.Trust) bool {
	return !slices.ContainsFunc(t.Roots(), func(c *x509.Certificate) bool { return c.NotBefore.After(t.Signer().NotBefore) })
}

// memberFolders are those of hosts: each has a CA file.
func memberFolders(out string) (folders []string, err error) {
	entries, err := os.ReadDir(out)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		if e.IsDir() && e.Name() != "authority" && present(filepath.Join(out, e.Name(), "ca.pem")) {
			folders = append(folders, e.Name())
		}
	}
	return folders, nil
}

// Authorities are the folders of those who admit members: the brokers or, where nats-servers
// of an operator's own are in their place (stock), the services beside them.
func Authorities(out string) (folders []string, stock bool, err error) {
	all, err := memberFolders(out)
	if err != nil {
		return nil, false, err
	}
	of := func(role identity.Role) (is []string) {
		for _, f := range all {
			if strings.HasPrefix(f, string(role)+"-") {
				is = append(is, f)
			}
		}
		return is
	}
	if folders = of(identity.RoleService); len(folders) > 0 {
		return folders, true, nil
	}
	return of(identity.RoleBroker), false, nil
}

// distribute gives a member's folder the CA file and, once the new CA signs, a
// certificate of it for the key that is there.
func (e Exchange) distribute(done *Exchanged, folder string, t identity.Trust) error {
	at := func(name string) string { return filepath.Join(e.Out, folder, name) }
	if err := replace(at("ca.pem"), t.PEM()); err != nil {
		return err
	}
	done.add(folder, "ca.pem")
	if e.Step != StepSwitch {
		return nil
	}
	dir := filepath.Join(e.Out, "authority")
	if present(at("ca.key")) { // the broker that invites
		key, err := identity.ReadKeyFile(filepath.Join(dir, "ca.key"))
		if err != nil {
			return err
		}
		defer clear(key)
		if err := replace(at("ca.key"), key); err != nil {
			return err
		}
		done.add(folder, "ca.key")
	}
	if !present(at("cert.pem")) {
		return nil
	}
	ca, err := identity.LoadCA(dir)
	if err != nil {
		return err
	}
	files := configs.TLS{Certificate: at("cert.pem"), Key: at("cert.key")}
	owner, err := os.Stat(files.Certificate)
	if err != nil {
		return err
	}
	old, err := identity.LoadCertificate(files.Certificate, files.Key)
	if err != nil {
		return err
	}
	if t.Outdated(old.Leaf) {
		if _, err := renewFiles(ca, old, files, false); err != nil {
			return err
		}
		if err := keepOwner(files.Certificate, owner); err != nil {
			return err
		}
	}
	done.add(folder, "cert.pem")
	return nil
}

// replace writes a file anew, mode 0600, and leaves it to whom it belonged.
func replace(file string, data []byte) error {
	owner, err := os.Stat(file)
	if err != nil {
		return err
	}
	if err := identity.WriteKeyFile(file, data); err != nil {
		return err
	}
	return keepOwner(file, owner)
}

// allShowTheNew refuses to take the old root away while somebody needs it.
func (e Exchange) allShowTheNew(dir string) error {
	t, err := identity.LoadTrust(filepath.Join(dir, "ca.pem"))
	if err != nil {
		return err
	}
	if e.Force || !t.Exchanging() || t.Signer() == nil {
		return nil // what is not exchanged is told by the step itself
	}
	if ca, err := identity.LoadCA(dir); err != nil || !ca.Certificate().Equal(t.Signer()) {
		return errors.Join(identity.ErrSwitchCut, err) // nobody need be asked
	}
	if e.Live == nil {
		return e.nobodyAsked("who still shows a certificate of the old CA")
	}
	for _, a := range e.Live {
		if err := stillOld(a.Keys, identity.RootOf(t.Signer()), ""); err != nil {
			return fmt.Errorf("%s: %w", a.Whom, err)
		}
	}
	return nil
}

// nobodyAsked says whom to ask.
func (e Exchange) nobodyAsked(what string) error {
	_, stock, err := Authorities(e.Out)
	if err != nil {
		return err
	}
	who := identity.RoleBroker
	if stock {
		who = identity.RoleService
	}
	return fmt.Errorf("nobody was asked %s: name the admin listener of every %s (--config %s-1.yaml on its host, or --url with --token-file), or finish without (--force)", what, who, who)
}

// stillOld names the members that came last with a certificate of another root than
// signer, or never came, and would be locked out. own is known to be right. Which files
// are on a host that never came cannot be told, so of these the operator has to say.
func stillOld(k broker.Keys, signer, own string) error {
	if !slices.ContainsFunc(k.Roots, func(r broker.Root) bool { return r.ID == signer && r.Signs }) {
		return errors.New("what was asked does not know yet that the new CA signs: copy the files of the switch to it, and kill -HUP it")
	}
	var names []string
	for _, m := range k.Members {
		switch {
		case m.Root == signer || m.Name == own:
		case m.Root == "":
			names = append(names, m.Role+" "+m.Name+" (never came)")
		default:
			names = append(names, m.Role+" "+m.Name)
		}
	}
	if len(names) == 0 {
		return nil
	}
	return fmt.Errorf("%w: %s. A node where a broker invites follows by itself, once it is connected and nothing runs on it; of another, copy the certificate of the switch "+
		"to its host and kill -HUP it. One that is not to come back: iop revoke. Or finish all the same (--force)", ErrStillOld, strings.Join(names, ", "))
}

// ErrStillOld: to finish would lock members out.
var ErrStillOld = errors.New("these came last with a certificate of the old CA, or never came, and would be locked out")

// ---- the same of an iop up, in its own process ----

// exchanger is exchange of a folder; nil: there is none.
func (f *Fabric) exchanger(folder Folder) exchanger {
	if folder == "" {
		return nil
	}
	return func(ctx context.Context, what, step string, force bool) (string, error) {
		return f.exchange(ctx, folder, what, step, force)
	}
}

// issuers reads whose tokens the Edge believes, where that is the folder's affair.
func (f *Fabric) issuers(folder Folder) func() ([]string, error) {
	if folder == "" || f.cfg.Broker.IssuerKey != folder.NKey("issuer") {
		return nil
	}
	is, err := issuersIn(folder.path("keys"))
	if err != nil || !slices.Equal(is, f.cfg.Edge.Issuers) {
		return nil // they are the operator's own
	}
	return func() ([]string, error) { return issuersIn(folder.path("keys")) }
}

// exchange takes a step of an iop up, and has all its parts take it.
func (f *Fabric) exchange(ctx context.Context, folder Folder, what, step string, force bool) (key string, err error) {
	f.exchanging.Lock()
	defer f.exchanging.Unlock()
	if what == ExchangeIssuer {
		key, err = stepIssuer(folder.path("keys"), step)
	} else {
		err = f.exchangeCA(ctx, folder, step, force)
	}
	if err != nil {
		return key, err
	}
	return key, f.reload()
}

func (f *Fabric) exchangeCA(ctx context.Context, folder Folder, step string, force bool) error {
	dir := folder.path("pki")
	if f.cfg.Broker.TLS.CA != folder.CA() {
		return fmt.Errorf("this iop up has keys of its operator's own (broker.tls.ca is %s): exchange that CA where it was made", f.cfg.Broker.TLS.CA)
	}
	t, err := identity.LoadTrust(folder.CA())
	if err != nil {
		return err
	}
	if step == StepFinish && !force && t.Exchanging() && t.Signer() != nil && switched(t) {
		k, err := f.Broker.Keys(ctx)
		if err != nil {
			return err
		}
		if err := stillOld(k, identity.RootOf(t.Signer()), ""); err != nil {
			return err
		}
	}
	if t, err = stepCA(dir, step); err != nil || step != StepSwitch {
		return err
	}
	ca, err := identity.LoadCA(dir)
	if err != nil {
		return err
	}
	for _, own := range ownFiles(folder, f.cfg) {
		old, err := identity.LoadCertificate(own.Certificate, own.Key)
		if err != nil {
			return err
		}
		if t.Outdated(old.Leaf) {
			if _, err := renewFiles(ca, old, own, false); err != nil {
				return err
			}
		}
	}
	return nil
}
