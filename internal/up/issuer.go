package up

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/identity"
)

// The exchange of the issuer of session tokens, in the folder of issuer.nk:
//
//	issuer.nk ──begin──> and issuer-next.nk ──switch──> issuer.nk is that, and issuer-old.nk ──finish──> issuer.nk
//
// The Edge believes every one that is there.
const (
	nextIssuerFile = "issuer-next.nk"
	oldIssuerFile  = "issuer-old.nk"
)

// issuersIn are the public keys of those in a folder, the one that signs first.
func issuersIn(dir string) (public []string, err error) {
	for _, name := range []string{issuerFile, nextIssuerFile, oldIssuerFile} {
		if file := filepath.Join(dir, name); name == issuerFile || present(file) {
			k, err := identity.LoadNKey(file)
			if err != nil {
				return nil, err
			}
			if !slices.Contains(public, k.Public()) {
				public = append(public, k.Public())
			}
		}
	}
	return public, nil
}

// stepIssuer takes a step, and returns the public key that it is about: the new one or,
// at the end, the one that is left.
func stepIssuer(dir, step string) (key string, err error) {
	current, next, old := filepath.Join(dir, issuerFile), filepath.Join(dir, nextIssuerFile), filepath.Join(dir, oldIssuerFile)
	switch step {
	case StepBegin:
		if present(old) {
			return "", errors.New("the issuer is being exchanged already, and the new one signs: finish")
		}
		k, err := ensureNKey(next, identity.NewAccountKey)
		if err != nil {
			return "", err
		}
		return k.Public(), nil
	case StepSwitch:
		if !present(next) && !present(old) {
			return "", errors.New("no exchange of the issuer has begun: begin one first")
		}
		if present(next) {
			was, err := identity.LoadNKey(current)
			if err != nil {
				return "", err
			}
			if err := was.Save(old); err != nil {
				return "", err
			}
			if err := os.Rename(next, current); err != nil {
				return "", err
			}
		}
	case StepFinish:
		switch {
		case present(next):
			return "", errors.New("the old issuer still signs: switch first")
		case !present(old):
			return "", errors.New("no exchange of the issuer is under way: it has been finished, or none has begun")
		}
		if err := os.Remove(old); err != nil && !errors.Is(err, os.ErrNotExist) {
			return "", err
		}
	}
	k, err := identity.LoadNKey(current)
	if err != nil {
		return "", err
	}
	return k.Public(), nil
}

// issuer takes the step in a folder of iop init --out.
func (e Exchange) issuer() (done Exchanged, err error) {
	dir := filepath.Join(e.Out, "authority")
	if err := e.issuerReady(dir); err != nil {
		return done, err
	}
	if e.Step == StepFinish && !present(filepath.Join(dir, nextIssuerFile)) { // its own file goes last: a cut is noticed by it
		if err := e.placeIssuers(&done, dir); err != nil {
			return done, err
		}
	}
	if done.Key, err = stepIssuer(dir, e.Step); err != nil || e.Step != StepSwitch {
		return done, err
	}
	return done, e.placeIssuers(&done, dir)
}

// placeIssuers gives every broker's folder what the step is for.
func (e Exchange) placeIssuers(done *Exchanged, dir string) error {
	seed, err := identity.ReadKeyFile(filepath.Join(dir, issuerFile))
	if err != nil {
		return err
	}
	defer clear(seed)
	folders, err := memberFolders(e.Out)
	if err != nil {
		return err
	}
	for _, folder := range folders {
		if file := filepath.Join(e.Out, folder, issuerFile); present(file) {
			if err := e.placeIssuer(done, folder, seed); err != nil {
				return err
			}
		}
	}
	return nil
}

// placeIssuer gives a broker's folder the new issuer, and the old one beside it until the
// end: leaves pin that one.
func (e Exchange) placeIssuer(done *Exchanged, folder string, seed []byte) error {
	old := filepath.Join(e.Out, folder, oldIssuerFile)
	if e.Step == StepFinish {
		if err := os.Remove(old); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		return nil
	}
	before, err := identity.LoadNKey(filepath.Join(e.Out, "authority", oldIssuerFile))
	if err != nil {
		return err
	}
	file := filepath.Join(e.Out, folder, issuerFile)
	owner, err := os.Stat(file)
	if err != nil {
		return err
	}
	if err := errors.Join(before.Save(old), keepOwner(old, owner)); err != nil {
		return err
	}
	done.add(folder, oldIssuerFile)
	done.add(folder, issuerFile)
	return replace(file, seed)
}

// issuerReady refuses a step that would leave tokens that no Edge believes.
func (e Exchange) issuerReady(dir string) error {
	if e.Force || e.Step == StepBegin {
		return nil
	}
	if e.Step == StepSwitch {
		next := filepath.Join(dir, nextIssuerFile)
		if !present(next) {
			return nil // told by the step, or done before
		}
		k, err := identity.LoadNKey(next)
		if err != nil {
			return err
		}
		f, err := configs.Load(filepath.Join(e.Out, "edge", "edge.yaml"))
		if err != nil {
			return err
		}
		if f.Edge == nil || !slices.Contains(f.Edge.Issuers, k.Public()) {
			return fmt.Errorf("edge.issuers of edge/edge.yaml does not list %s yet: add it there, copy the file to each Edge's host and kill -HUP the Edge, or go on without (--force)", k.Public())
		}
		return nil
	}
	if e.Live == nil {
		return e.nobodyAsked("which issuer signs")
	}
	k, err := identity.LoadNKey(filepath.Join(dir, issuerFile))
	if err != nil {
		return err
	}
	var leaves []string
	for _, a := range e.Live {
		if a.Issuer != k.Public() {
			return fmt.Errorf("%s still signs with another issuer, %s: copy issuer.nk of the switch to it, and kill -HUP it", a.Whom, a.Issuer)
		}
		for _, m := range a.Members {
			if m.Issuer != "" && m.Issuer != k.Public() && !slices.Contains(leaves, m.Name) {
				leaves = append(leaves, m.Name)
			}
		}
	}
	if len(leaves) > 0 {
		return fmt.Errorf("leaf.issuer is the old one still at %s: set it to %s there and restart the leaf, or go on without (--force), and nobody new comes in at its site", strings.Join(leaves, ", "), k.Public())
	}
	return nil
}
