package identity

import (
	"bytes"
	"crypto/x509"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/iop-fabric/iop/wire/iopv1"
)

// exchanged is a CA's folder, and what is in it after each step.
type exchanged struct {
	dir                          string
	before, begun, switched, end Trust
	old, next                    *CA
}

func exchange(t *testing.T) (e exchanged) {
	t.Helper()
	e.dir = t.TempDir()
	e.old = try(NewCA("iop", time.Hour))(t)
	if err := e.old.Save(e.dir); err != nil {
		t.Fatal(err)
	}
	e.before = try(LoadTrust(filepath.Join(e.dir, caCertFile)))(t)
	for _, step := range []struct {
		run func() (Trust, error)
		to  *Trust
	}{
		{func() (Trust, error) { return BeginCA(e.dir, time.Hour) }, &e.begun},
		{func() (Trust, error) { return SwitchCA(e.dir) }, &e.switched},
		{func() (Trust, error) { return FinishCA(e.dir) }, &e.end},
	} {
		*step.to = try(step.run())(t)
		if got := try(LoadTrust(filepath.Join(e.dir, caCertFile)))(t); !got.SameAs(*step.to) || !proto.Equal(got.bundle, step.to.bundle) {
			t.Fatal("the file holds something else")
		}
	}
	e.next = try(LoadCA(e.dir))(t)
	return e
}

func node(t testing.TB, ca *CA) *Certificate {
	return try(ca.Issue(ID{TrustDomain: "iop", Edge: "home", Role: RoleNode, Name: "n1"}, nil, time.Minute))(t)
}

func verifies(t Trust, c *Certificate) bool {
	_, _, err := VerifyChain(t.Pool(), c.Chain, RoleNode, false)
	return err == nil
}

// While the CA is exchanged every certificate is good for everybody: that of the old
// one, that of the new one, for who knows both, the old one, or the new one. After it
// the old one is good for nobody who has heard.
//
// Contract: B8 L8
func TestExchangeOfTheCA(t *testing.T) {
	dir := t.TempDir()
	old := try(NewCA("iop", time.Hour))(t)
	if err := old.Save(dir); err != nil {
		t.Fatal(err)
	}
	only := try(LoadTrust(filepath.Join(dir, caCertFile)))(t)
	first := node(t, old)
	begun := try(BeginCA(dir, time.Hour))(t)
	if c := node(t, try(LoadCA(dir))(t)); IssuerOf(c.Leaf) != RootOf(old.cert) || begun.Outdated(c.Leaf) {
		t.Error("the new CA signs before the switch")
	}
	switched := try(SwitchCA(dir))(t)
	second := node(t, try(LoadCA(dir))(t))
	if !switched.Outdated(first.Leaf) || switched.Outdated(second.Leaf) {
		t.Error("which is outdated?")
	}
	end := try(FinishCA(dir))(t)
	for name, c := range map[string]struct {
		trust Trust
		cert  *Certificate
		want  bool
	}{
		"old root, old":              {only, first, true},
		"old root, new":              {only, second, true}, // by the cross certificate: who was off during the beginning
		"both, old":                  {switched, first, true},
		"both, new":                  {switched, second, true},
		"new root, new":              {end, second, true},
		"new root, old":              {end, first, false},
		"new root, new without more": {end, try(NewCertificate(second.Chain[:1], second.key.key()))(t), true},
		"old root, new without more": {only, try(NewCertificate(second.Chain[:1], second.key.key()))(t), false},
	} {
		if verifies(c.trust, c.cert) != c.want {
			t.Errorf("%s: %v", name, !c.want)
		}
	}
	if third := node(t, try(LoadCA(dir))(t)); len(third.Chain) != 1 {
		t.Error("after the end the old CA is still shown")
	}
	for _, name := range []string{oldKeyFile, nextKeyFile} {
		if _, err := os.Stat(filepath.Join(dir, name)); !os.IsNotExist(err) {
			t.Errorf("%s is left: %v", name, err)
		}
	}
	for name, step := range map[string]func(string) (Trust, error){"switch": SwitchCA} {
		if _, err := step(dir); !errors.Is(err, ErrNotBegun) {
			t.Errorf("%s: %v", name, err)
		}
	}
	// The next exchange goes as the first one did.
	if _, err := FinishCA(dir); err != nil {
		t.Errorf("finish, twice: %v", err)
	}
	again := try(BeginCA(dir, time.Hour))(t)
	if _, err := BeginCA(dir, time.Hour); !errors.Is(err, ErrExchanging) {
		t.Errorf("begin, twice: %v", err)
	}
	if _, err := FinishCA(dir); !errors.Is(err, ErrNotSwitched) {
		t.Errorf("finish before the switch: %v", err)
	}
	if after, changed, err := end.Learn(again.Bundle()); err != nil || !changed || len(after.Roots()) != 2 {
		t.Errorf("the second exchange: %v", err)
	}
}

// A CA that was made before it could certify its successor (path length 0) is
// exchanged all the same; who has not learnt the new root by then is not reached.
//
// Contract: B8
func TestExchangeOfAnOlderCA(t *testing.T) {
	dir := t.TempDir()
	old := try(NewCA("iop", time.Hour))(t)
	template := *old.cert
	template.MaxPathLen, template.MaxPathLenZero = 0, true
	der := try(x509.CreateCertificate(zeroReader{}, &template, &template, &old.key().PublicKey, old.key()))(t)
	old.cert = try(x509.ParseCertificate(der))(t)
	if err := old.Save(dir); err != nil {
		t.Fatal(err)
	}
	only := try(LoadTrust(filepath.Join(dir, caCertFile)))(t)
	begun := try(BeginCA(dir, time.Hour))(t)
	if _, err := SwitchCA(dir); err != nil {
		t.Fatal(err)
	}
	c := node(t, try(LoadCA(dir))(t))
	both, _, err := only.Learn(begun.Bundle())
	if err != nil || !verifies(both, c) || verifies(only, c) {
		t.Errorf("%v", err)
	}
}

type zeroReader struct{}

func (zeroReader) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// A step that was cut off anywhere is taken again, and leads to the same.
//
// Contract: B8
func TestExchangeCutOff(t *testing.T) {
	dir := t.TempDir()
	if err := try(NewCA("iop", time.Hour))(t).Save(dir); err != nil {
		t.Fatal(err)
	}
	before := try(os.ReadFile(filepath.Join(dir, caCertFile)))(t)
	if _, err := BeginCA(dir, time.Hour); err != nil {
		t.Fatal(err)
	}
	put := func(name string, data []byte) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	put(caCertFile, before) // the new key was written, ca.pem was not
	if _, err := BeginCA(dir, time.Hour); err != nil {
		t.Fatal(err)
	}
	begun := try(os.ReadFile(filepath.Join(dir, caCertFile)))(t)
	oldKey, nextKey := try(os.ReadFile(filepath.Join(dir, caKeyFile)))(t), try(os.ReadFile(filepath.Join(dir, nextKeyFile)))(t)
	want := try(SwitchCA(dir))(t)
	for name, undo := range map[string]func(){
		"before ca.pem":      func() { put(caCertFile, begun); put(caKeyFile, oldKey); put(nextKeyFile, nextKey) },
		"before the new key": func() { put(caKeyFile, oldKey); put(nextKeyFile, nextKey) },
		"at its end":         func() {},
	} {
		undo()
		if ca, err := LoadCA(dir); err != nil {
			t.Errorf("%s: the CA cannot be used: %v", name, err)
		} else if _, _, err := VerifyChain(want.Pool(), node(t, ca).Chain, RoleNode, false); err != nil {
			t.Errorf("%s: it signs for nobody: %v", name, err)
		}
		got, err := SwitchCA(dir)
		if err != nil || !got.SameAs(want) || !try(LoadCA(dir))(t).cert.Equal(newest(want.roots)) {
			t.Errorf("%s: %v", name, err)
		}
	}
	old := try(os.ReadFile(filepath.Join(dir, oldKeyFile)))(t)
	if _, err := FinishCA(dir); err != nil {
		t.Fatal(err)
	}
	put(oldKeyFile, old) // ca.pem was written, the old key is there still
	if _, err := FinishCA(dir); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(dir, oldKeyFile)); !os.IsNotExist(err) {
		t.Errorf("the old CA's key is left: %v", err)
	}
}

// A switch that was cut off between its last two writes is not finished but told, and the
// next start carries it on; before the switch, and after it, a start changes nothing.
//
// Contract: B8
func TestSwitchResumed(t *testing.T) {
	dir := t.TempDir()
	old := try(NewCA("iop", time.Hour))(t)
	if err := old.Save(dir); err != nil {
		t.Fatal(err)
	}
	signs := func(when string, want *x509.Certificate) {
		t.Helper()
		if err := ResumeSwitch(dir); err != nil {
			t.Errorf("%s: %v", when, err)
		}
		if ca := try(LoadCA(dir))(t); !ca.Certificate().Equal(want) {
			t.Errorf("%s: another CA signs", when)
		}
	}
	signs("no exchange", old.Certificate())
	if _, err := BeginCA(dir, time.Hour); err != nil {
		t.Fatal(err)
	}
	signs("begun", old.Certificate())
	files := map[string][]byte{}
	for _, name := range []string{caKeyFile, nextKeyFile} {
		files[name] = try(os.ReadFile(filepath.Join(dir, name)))(t)
	}
	after := try(SwitchCA(dir))(t)
	signs("switched", after.Signer())
	for name, data := range files { // as before the last write
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := FinishCA(dir); !errors.Is(err, ErrSwitchCut) {
		t.Errorf("finish: %v", err)
	}
	signs("cut off", after.Signer())
	if _, err := os.Stat(filepath.Join(dir, nextKeyFile)); !os.IsNotExist(err) {
		t.Errorf("the new key is there twice: %v", err)
	}
	if _, err := FinishCA(dir); err != nil {
		t.Error(err)
	}
	signs("finished", after.Signer())
}

// Whoever carries it: only what a trusted root has signed is learnt, and nothing of
// the past. This is each attack alone.
//
// Contract: B8 G3 L8 Z6
func TestI6Learn(t *testing.T) {
	e := exchange(t)
	for name, c := range map[string]struct {
		from   Trust
		bundle *iopv1.TrustBundle
		want   Trust
	}{
		"begin":                       {e.before, e.begun.bundle, e.begun},
		"switch":                      {e.begun, e.switched.bundle, e.switched},
		"switch, begin was missed":    {e.before, e.switched.bundle, e.switched},
		"finish":                      {e.switched, e.end.bundle, e.end},
		"finish, switch was missed":   {e.begun, e.end.bundle, e.end},
		"finish, both missed":         {e.before, e.end.bundle, e.before},
		"begin again after switch":    {e.switched, e.begun.bundle, e.switched},
		"begin again after finish":    {e.end, e.begun.bundle, e.end},
		"switch again after finish":   {e.end, e.switched.bundle, e.end},
		"the same":                    {e.switched, e.switched.bundle, e.switched},
		"nothing":                     {e.begun, &iopv1.TrustBundle{}, e.begun},
		"nil":                         {e.begun, nil, e.begun},
		"another fabric's":            {e.before, exchange(t).begun.bundle, e.before},
		"another fabric's, its begin": {e.begun, exchange(t).end.bundle, e.begun},
	} {
		got, changed, err := c.from.Learn(c.bundle)
		if !got.SameAs(c.want) || changed != !c.want.SameAs(c.from) {
			t.Errorf("%s: %d roots, changed: %v, %v", name, len(got.roots), changed, err)
		}
		if c.want.SameAs(c.from) && !c.want.SameAs(Trust{roots: c.want.roots, bundle: c.bundle}) && err == nil {
			t.Errorf("%s: it is not told why", name)
		}
	}

	evil := try(NewCA("iop", time.Hour))(t)
	evil = try(evil.successor(time.Hour))(t)
	older := try(newCA([]string{"iop"}, "iop CA iop", e.old.cert.NotBefore.Add(-time.Minute), time.Now().Add(time.Hour)))(t)
	elsewhere := try(NewCA("else", time.Hour))(t)
	elsewhere = try(elsewhere.successor(2 * time.Hour))(t)
	made := func(roots []*x509.Certificate, signer *CA, keys ...*CA) *iopv1.TrustBundle {
		return try(newTrust(roots, signer, nil, keys...))(t).bundle
	}
	changed := func(change func(b *iopv1.TrustBundle)) *iopv1.TrustBundle {
		b := proto.CloneOf(e.begun.bundle)
		change(b)
		return b
	}
	roots := func(c ...*CA) (out []*x509.Certificate) {
		for _, ca := range c {
			out = append(out, ca.cert)
		}
		return out
	}
	otherDomain := try(newCA([]string{"else"}, "iop CA", e.old.cert.NotBefore.Add(time.Minute), time.Now().Add(time.Hour)))(t)
	// By the old root's key, that the newest one is no root any more.
	if got, changed, err := e.begun.Learn(made(roots(e.old), e.old, e.old)); !errors.Is(err, ErrPastTrust) || changed || !got.SameAs(e.begun) {
		t.Errorf("the new root taken out again: %v", err)
	}
	for name, b := range map[string]*iopv1.TrustBundle{
		"signed by the new root alone":        made(roots(e.old, evil), evil, evil),
		"signed by nobody":                    made(roots(e.old, evil), e.old),
		"without the root that signed":        made(roots(evil), evil, e.old, evil),
		"another trust domain":                made(roots(e.old, otherDomain), e.old, e.old),
		"another trust domain, of a stranger": made(roots(e.old, elsewhere), e.old, elsewhere),
		"a root that is older":                made(roots(e.old, older), e.old, e.old),
		"a root put in":                       changed(func(b *iopv1.TrustBundle) { b.Roots[1] = evil.cert.Raw }),
		"another signer":                      changed(func(b *iopv1.TrustBundle) { b.Signer = bytes.Repeat([]byte{1}, 32) }),
		"a cross certificate put in":          changed(func(b *iopv1.TrustBundle) { b.Crosses = append(b.Crosses, evil.cert.Raw) }),
		"a root taken out":                    changed(func(b *iopv1.TrustBundle) { b.Roots, b.Signatures = b.Roots[:1], b.Signatures[:1] }),
		"no signatures":                       changed(func(b *iopv1.TrustBundle) { b.Signatures = nil }),
		"a root that is none":                 changed(func(b *iopv1.TrustBundle) { b.Roots[1] = []byte("x") }),
		"a leaf for a root":                   changed(func(b *iopv1.TrustBundle) { b.Roots[1] = node(t, e.old).Leaf.Raw }),
		"too many": changed(func(b *iopv1.TrustBundle) {
			for range maxRoots {
				b.Roots, b.Signatures = append(b.Roots, evil.cert.Raw), append(b.Signatures, nil)
			}
		}),
	} {
		if got, changed, err := e.before.Learn(b); err == nil || changed || !got.SameAs(e.before) {
			t.Errorf("%s: it is learnt", name)
		}
	}
}

// A CA file comes back as it was written; one that was put together from two, or cut,
// says so. What reads certificates alone, reads them.
//
// Contract: B8
func TestTrustFile(t *testing.T) {
	e := exchange(t)
	for name, c := range map[string]Trust{"one": e.before, "two": e.begun, "the new one": e.end} {
		got, err := ParseTrust(c.PEM())
		if err != nil || !got.SameAs(c) || !proto.Equal(got.bundle, c.bundle) {
			t.Errorf("%s: %v", name, err)
		}
		if pool := x509.NewCertPool(); !pool.AppendCertsFromPEM(c.PEM()) || !pool.Equal(c.Pool()) {
			t.Errorf("%s: another reader finds other roots", name)
		}
	}
	whole := e.begun.PEM()
	at := bytes.Index(whole, []byte("-----BEGIN "+blockTrust))
	for name, data := range map[string][]byte{
		"cut in the bundle":         whole[:len(whole)-20],
		"something after it":        append(bytes.Clone(whole), e.before.PEM()...),
		"another file before it":    append(e.end.PEM(), whole...),
		"the bundle of another one": append(e.before.PEM(), whole[at:]...),
		"the bundle alone":          whole[at:],
	} {
		if _, err := ParseTrust(data); err == nil {
			t.Errorf("%s: it is taken", name)
		}
	}
}

// A new key and its certificate are put into their places so that, wherever that is
// cut off, the two files and the one beside them hold a pair; and the next one goes
// through.
//
// Contract: B8 Z4
func TestSaveCutOff(t *testing.T) {
	ca := try(NewCA("iop", time.Hour))(t)
	old, next, last := node(t, ca), node(t, ca), node(t, ca)
	for n := range len(next.saving("", "")) + 1 {
		dir := t.TempDir()
		certFile, keyFile := filepath.Join(dir, "cert.pem"), filepath.Join(dir, "cert.key")
		if err := old.Save(certFile, keyFile); err != nil {
			t.Fatal(err)
		}
		for _, step := range next.saving(certFile, keyFile)[:n] {
			if err := step(); err != nil {
				t.Fatal(err)
			}
		}
		got, err := LoadCertificate(certFile, keyFile)
		if err != nil {
			t.Errorf("cut off after %d steps: %v", n, err)
			continue
		}
		if want := n >= 3; got.SameAs(next) != want || got.SameAs(old) == want {
			t.Errorf("cut off after %d steps: another pair", n)
		}
		if _, err := got.Sign("label"); err != nil {
			t.Error(err)
		}
		// The next one may be cut off anywhere, too.
		for m := range len(last.saving("", "")) {
			for _, step := range last.saving(certFile, keyFile)[:m] {
				if err := step(); err != nil {
					t.Fatal(err)
				}
			}
			if _, err := LoadCertificate(certFile, keyFile); err != nil {
				t.Errorf("cut off after %d steps, and then after %d: %v", n, m, err)
			}
		}
		got = try(LoadCertificate(certFile, keyFile))(t)
		// A renewal under the key that serves, then a new key.
		renewed := try(ca.Renew(got, nil, time.Minute))(t)
		if err := SettleKey(certFile, keyFile); err != nil {
			t.Error(err)
		}
		_ = os.Remove(keyFile + nextSuffix) // by now it is not needed
		if again, err := LoadCertificate(certFile, keyFile); err != nil || !again.SameAs(got) {
			t.Errorf("settled after %d steps: %v", n, err)
		}
		if err := renewed.SaveChain(certFile); err != nil {
			t.Error(err)
		}
		if again, err := LoadCertificate(certFile, keyFile); err != nil || !again.SameAs(renewed) {
			t.Errorf("renewed after %d steps: %v", n, err)
		}
		if err := last.Save(certFile, keyFile); err != nil {
			t.Error(err)
		}
		if again, err := LoadCertificate(certFile, keyFile); err != nil || !again.SameAs(last) {
			t.Errorf("the next one after %d steps: %v", n, err)
		}
		left := try(filepath.Glob(filepath.Join(dir, "*")))(t)
		if st, err := os.Stat(keyFile); err != nil || st.Mode().Perm() != 0o600 || len(left) != 2 {
			t.Errorf("after %d steps: %v, %v", n, left, err)
		}
	}
}
