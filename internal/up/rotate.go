package up

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/identity"
	"github.com/iop-fabric/iop/wire"
)

// Rotation signs one member's certificate anew, in a folder of `iop init --out`: for
// its hosts, its name, and its key or a new one.
type Rotation struct {
	Out  string // the authority's folder
	Role identity.Role
	Name string // of a node, a leaf, or a broker's or service's folder
	// NewKey makes a new key, too: what has the old one cannot be used with it.
	NewKey bool
	// NKey makes a new nkey, and leaves certificate and key as they are.
	NKey bool
}

// Rotated says what was done.
type Rotated struct {
	Certificate *identity.Certificate // as it is now
	Files       []string              // that its host must get
	// Member is the line of the new nkey, for broker.members, and Replaces the public
	// nkey of the line that goes in the end.
	Member, Replaces string
}

// folder is the member's, within Out.
func (r Rotation) folder() (string, error) {
	if r.Role != identity.RoleEdge {
		if err := wire.CheckName(r.Name); err != nil {
			return "", err
		}
	}
	switch r.Role {
	case identity.RoleEdge:
		return "edge", nil
	case identity.RoleBroker, identity.RoleService:
		return r.Name, nil
	case identity.RoleNode, identity.RoleLeaf:
		return string(r.Role) + "-" + r.Name, nil
	default:
		return "", fmt.Errorf("%s: want node, edge, broker, leaf or service", r.Role)
	}
}

// Run does it. The old certificate is good until its end: what runs goes on with it.
func (r Rotation) Run() (done Rotated, err error) {
	name, err := r.folder()
	if err != nil {
		return done, err
	}
	if !present(filepath.Join(r.Out, "authority")) {
		return done, fmt.Errorf("%s: is no folder of iop init --out: it has no authority", r.Out)
	}
	unlock, err := lock(Folder(r.Out))
	if err != nil {
		return done, err
	}
	defer unlock()
	files := configs.TLS{Certificate: filepath.Join(r.Out, name, "cert.pem"), Key: filepath.Join(r.Out, name, "cert.key")}
	if !present(files.Certificate) {
		return done, fmt.Errorf("%s: there is no %s of that name", files.Certificate, r.Role)
	}
	ca, err := identity.LoadCA(filepath.Join(r.Out, "authority"))
	if err != nil {
		return done, err
	}
	if err := identity.SettleKey(files.Certificate, files.Key); err != nil { // of a --key that was cut off
		return done, err
	}
	old, err := identity.LoadCertificate(files.Certificate, files.Key)
	if err != nil {
		return done, err
	}
	if old.ID().Role != r.Role {
		return done, fmt.Errorf("%s: is of a %s, not of a %s", files.Certificate, old.ID().Role, r.Role)
	}
	owner, err := os.Stat(files.Certificate)
	if err != nil {
		return done, err
	}
	if r.NKey {
		return r.nkey(old, filepath.Join(r.Out, name, "user.nk"))
	}
	if done.Certificate, err = renewFiles(ca, old, files, r.NewKey); err != nil {
		return done, err
	}
	done.Files = []string{files.Certificate}
	if r.NewKey {
		done.Files = append(done.Files, files.Key)
	}
	for _, file := range done.Files {
		if err := keepOwner(file, owner); err != nil {
			return done, err
		}
	}
	return done, nil
}

// nkey makes another nkey for the member. The old public one is kept in the answer: both
// are to be registered until the member has taken the new one.
func (r Rotation) nkey(cert *identity.Certificate, file string) (done Rotated, err error) {
	if r.Role == identity.RoleBroker {
		return done, errors.New("a broker has no nkey of its own: its four are those of the authority")
	}
	old, err := identity.LoadNKey(file)
	if err != nil {
		return done, err
	}
	next, err := identity.NewUserKey()
	if err != nil {
		return done, err
	}
	owner, err := os.Stat(file)
	if err != nil {
		return done, err
	}
	if err := errors.Join(next.Save(file), keepOwner(file, owner)); err != nil {
		return done, err
	}
	id := cert.ID()
	p := plan{Hosts: Hosts{Edge: id.Edge}}
	return Rotated{
		Certificate: cert, Files: []string{file}, Replaces: old.Public(),
		Member: p.memberText(member{role: id.Role, name: id.Name, nkey: next.Public()}),
	}, nil
}

// NextNKey makes the nkey that is to follow that of a Node which has joined. It never
// leaves the machine: the Node registers it over its session.
func NextNKey(node configs.Node) (public string, err error) {
	k, err := ensureNKey(nextNKey(node.Broker.NKey), identity.NewUserKey)
	if err != nil {
		return "", err
	}
	return k.Public(), nil
}

// renewFiles signs a certificate anew and puts it where it was read from. Under the
// same key that is one file, which fits the key at every moment; a new key comes first.
func renewFiles(ca *identity.CA, old *identity.Certificate, files configs.TLS, newKey bool) (*identity.Certificate, error) {
	hosts := old.Hosts()
	var c *identity.Certificate
	var err error
	if newKey {
		c, err = ca.Issue(old.ID(), hosts, certLife)
	} else {
		c, err = ca.Renew(old, hosts, certLife)
	}
	switch {
	case err != nil:
		return nil, err
	case newKey:
		return c, c.Save(files.Certificate, files.Key)
	}
	return c, c.SaveChain(files.Certificate)
}

const (
	ownLook = time.Hour // between two looks at the certificates of an `iop up`
	// worthwhile is what a renewal must add: a CA near its own end adds less.
	worthwhile = 24 * time.Hour
)

// Events of that.
const (
	eventOwnRenewed = "up.certificate_renewed" // one of this process's own was signed anew
	eventOwnFailed  = "up.renewal_failed"
)

// renewOwn signs those of an `iop up`'s own certificates anew that are in the last third
// of their lives: it holds the CA's key. One that is the operator's own is let be.
func renewOwn(f Folder, cfg *configs.File, now time.Time) (renewed []*identity.Certificate, err error) {
	for _, own := range ownFiles(f, cfg) {
		old, err := identity.LoadCertificate(own.Certificate, own.Key)
		if err != nil {
			return renewed, err
		}
		if now.Before(identity.RenewalDue(old.Leaf)) {
			continue
		}
		ca, err := identity.LoadCA(f.path("pki"))
		if err != nil {
			return renewed, err
		}
		if ca.Until().Sub(old.Leaf.NotAfter) < worthwhile {
			continue
		}
		c, err := renewFiles(ca, old, own, false)
		if err != nil {
			return renewed, err
		}
		renewed = append(renewed, c)
	}
	return renewed, nil
}

// ownFiles are the certificates of an iop up that its folder holds.
func ownFiles(f Folder, cfg *configs.File) (out []configs.TLS) {
	for _, own := range []struct {
		files configs.TLS
		role  identity.Role
		name  string
	}{
		{cfg.Broker.TLS, identity.RoleBroker, "broker"},
		{cfg.Edge.Broker.TLS, identity.RoleEdge, cfg.Edge.Name},
		{cfg.Node.Broker.TLS, identity.RoleNode, cfg.Node.Name},
	} {
		if own.files.Certificate == f.Certificate(own.role, own.name) && own.files.Key == f.key(own.role, own.name) {
			out = append(out, own.files)
		}
	}
	return out
}

// renewOwn does that, and has the broker take its own: Edge and Node see to theirs.
func (f *Fabric) renewOwn(folder Folder, now time.Time) {
	renewed, err := renewOwn(folder, f.cfg, now)
	for _, c := range renewed {
		f.log.LogAttrs(context.Background(), slog.LevelInfo, eventOwnRenewed,
			slog.String("role", string(c.ID().Role)), slog.String("name", c.ID().Name), slog.Time("until", c.Leaf.NotAfter))
		if c.ID().Role == identity.RoleBroker {
			err = errors.Join(err, f.Broker.Reload())
		}
	}
	if err != nil {
		f.log.LogAttrs(context.Background(), slog.LevelWarn, eventOwnFailed, slog.String("error", err.Error()))
	}
}

// lookAfter does it again and again, until stop.
func (f *Fabric) lookAfter(folder Folder) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(ownLook)
		defer tick.Stop()
		for {
			select {
			case now := <-tick.C:
				f.renewOwn(folder, now)
			case <-ctx.Done():
				return
			}
		}
	}()
	return func() { cancel(); <-done }
}
