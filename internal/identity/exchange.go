package identity

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"
)

// The exchange of a CA, in the folder of ca.pem and ca.key:
//
//	one root ──BeginCA──> two, the old one signs ──SwitchCA──> two, the new one signs ──FinishCA──> one root
//
// Which state it is in stands in ca.pem alone. Each step writes that file once, and
// can be taken again where it was cut off.
const (
	nextKeyFile = "ca-next.key" // between begin and switch
	oldKeyFile  = "ca-old.key"  // between switch and finish
)

// Errors of a step that is not the next one.
var (
	ErrExchanging   = errors.New("the CA is being exchanged already: switch, then finish")
	ErrNotBegun     = errors.New("no exchange of the CA has begun: begin one first")
	ErrNotSwitched  = errors.New("the old CA still signs: switch first")
	ErrSwitchCut    = errors.New("the switch of the CA was cut off: take it again (iop rotate ca switch)")
	errKeyOfNeither = errors.New("it is not the key of the certificate")
)

// BeginCA makes the new CA beside the old one, which still signs.
func BeginCA(dir string, ttl time.Duration) (Trust, error) {
	old, err := LoadCA(dir)
	if err != nil {
		return Trust{}, err
	}
	if was, err := LoadTrust(filepath.Join(dir, caCertFile)); err != nil || was.Exchanging() {
		return Trust{}, errors.Join(ErrExchanging, err)
	}
	next, err := old.successor(ttl)
	if err != nil {
		return Trust{}, err
	}
	cross, err := old.cross(next)
	if err != nil {
		return Trust{}, err
	}
	if err := next.saveKey(filepath.Join(dir, nextKeyFile)); err != nil {
		return Trust{}, err
	}
	t, err := newTrust([]*x509.Certificate{old.cert, next.cert}, old, [][]byte{cross}, old, next)
	if err != nil {
		return Trust{}, err
	}
	return t, t.Save(filepath.Join(dir, caCertFile))
}

// SwitchCA has the new CA sign from now on.
func SwitchCA(dir string) (Trust, error) {
	file := filepath.Join(dir, caCertFile)
	was, err := LoadTrust(file)
	if err != nil {
		return Trust{}, err
	}
	if !was.Exchanging() {
		return Trust{}, ErrNotBegun
	}
	now, err := LoadCA(dir)
	if err != nil {
		return Trust{}, err
	}
	next := newest(was.roots)
	if now.cert.Equal(next) {
		return was, nil // done before
	}
	key, err := loadKey(filepath.Join(dir, nextKeyFile))
	if err != nil {
		return Trust{}, fileError("new CA key", filepath.Join(dir, nextKeyFile), err)
	}
	after, err := was.ca(key)
	if err != nil || !after.cert.Equal(next) {
		return Trust{}, fileError("new CA key", filepath.Join(dir, nextKeyFile), errKeyOfNeither)
	}
	t, err := newTrust(was.roots, after, was.bundle.GetCrosses(), now, after)
	if err != nil {
		return Trust{}, err
	}
	if err := now.saveKey(filepath.Join(dir, oldKeyFile)); err != nil {
		return Trust{}, err
	}
	if err := t.Save(file); err != nil {
		return Trust{}, err
	}
	return t, takeNext(dir)
}

// ResumeSwitch carries on a switch that was cut off between its last two writes: ca.pem
// says that the new CA signs, and ca.key is the old one's. Whatever else it finds it
// leaves alone.
func ResumeSwitch(dir string) error {
	t, err := LoadTrust(filepath.Join(dir, caCertFile))
	if err != nil || !t.Exchanging() || t.Signer() == nil {
		return err
	}
	key, err := loadKey(filepath.Join(dir, nextKeyFile))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fileError("new CA key", filepath.Join(dir, nextKeyFile), err)
	}
	if !key.PublicKey.Equal(t.Signer().PublicKey) {
		return nil // it has only begun
	}
	return takeNext(dir)
}

// takeNext has the new CA's key be the CA's.
func takeNext(dir string) error {
	keyFile := filepath.Join(dir, caKeyFile)
	if err := os.Rename(filepath.Join(dir, nextKeyFile), keyFile); err != nil {
		return fileError("new CA key", keyFile, err)
	}
	return syncDir(dir)
}

// FinishCA takes the old root out.
func FinishCA(dir string) (Trust, error) {
	file := filepath.Join(dir, caCertFile)
	was, err := LoadTrust(file)
	if err != nil {
		return Trust{}, err
	}
	if !was.Exchanging() {
		if was.bundle != nil {
			return was, removeOld(dir) // done before
		}
		return Trust{}, ErrNotBegun
	}
	ca, err := LoadCA(dir)
	if err != nil {
		return Trust{}, err
	}
	if signer := was.Signer(); signer != nil && !ca.cert.Equal(signer) {
		return Trust{}, ErrSwitchCut
	}
	if !ca.cert.Equal(newest(was.roots)) {
		return Trust{}, ErrNotSwitched
	}
	t, err := newTrust([]*x509.Certificate{ca.cert}, ca, nil, ca)
	if err != nil {
		return Trust{}, err
	}
	if err := t.Save(file); err != nil {
		return Trust{}, err
	}
	return t, removeOld(dir)
}

func removeOld(dir string) error {
	if err := os.Remove(filepath.Join(dir, oldKeyFile)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove the old CA's key: %w", err)
	}
	return nil
}

// ca is the one of the roots that the key is of.
func (t Trust) ca(key *ecdsa.PrivateKey) (*CA, error) {
	for _, c := range t.roots {
		if !key.PublicKey.Equal(c.PublicKey) {
			continue
		}
		ca := &CA{cert: c, key: seal(key)}
		for _, der := range t.bundle.GetCrosses() {
			if cross, err := x509.ParseCertificate(der); err == nil && bytes.Equal(cross.RawSubjectPublicKeyInfo, c.RawSubjectPublicKeyInfo) {
				ca.crosses = append(ca.crosses, der)
			}
		}
		return ca, nil
	}
	return nil, errKeyOfNeither
}

func (ca *CA) saveKey(file string) error {
	key, err := encodeKey(ca.key())
	if err != nil {
		return fmt.Errorf("save CA key: %w", err)
	}
	defer clear(key)
	if err := writeFile(file, key, 0o600); err != nil {
		return fmt.Errorf("save CA key: %w", err)
	}
	return nil
}
