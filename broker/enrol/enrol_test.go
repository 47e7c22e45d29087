package enrol

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/iop-fabric/iop/internal/identity"
	"github.com/iop-fabric/iop/internal/secret"
)

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func newSecret(b byte) secret.String {
	return secret.New(string(bytes.Repeat([]byte{b}, SecretSize)))
}

func token() Token {
	return Token{Name: "gpu1", Secret: newSecret(7), CA: sha256.Sum256([]byte("ca"))}
}

// machine is who joins: its keys, and its request.
type machine struct {
	key     *identity.Key
	request Request
}

func newMachine(name string) machine {
	m := machine{key: must(identity.NewKey())}
	m.request = Request{
		Name: name, CSR: must(m.key.Request(name)),
		NKey: must(identity.NewUserKey()).Public(), Curve: must(identity.NewCurveKey()).Public(),
	}
	return m
}

// sealed is what arrives of a request.
func (m machine) sealed(t testing.TB, s secret.String) (r Request, body, mac []byte) {
	t.Helper()
	body, header, err := Seal(m.request, s)
	if err != nil {
		t.Fatal(err)
	}
	r, mac, err = Unseal(body, header)
	if err != nil {
		t.Fatal(err)
	}
	return r, body, mac
}

// A token comes back as it was told; cut or changed anywhere it is refused, and
// the refusal holds nothing of it.
//
// Contract: B11 D1
func TestToken(t *testing.T) {
	text := token().Text()
	got, err := ParseToken(text)
	if err != nil || got.Name != "gpu1" || !got.Secret.Equal(newSecret(7)) || got.CA != token().CA {
		t.Fatalf("%+v %v", got, err)
	}
	if s := fmt.Sprintf("%v %+v %#v", got, got, got); strings.Contains(s, newSecret(7).Reveal()) {
		t.Error("a token prints its secret")
	}
	for n := range len(text) {
		if _, err := ParseToken(text[:n]); err == nil {
			t.Errorf("cut after %d characters, it is taken", n)
		} else if n > len("iop1.gpu1.") && !strings.Contains(err.Error(), "cut short") && !strings.Contains(err.Error(), "mistyped") {
			t.Errorf("cut after %d: %v", n, err)
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		b := []byte(text)
		at := rapid.IntRange(0, len(b)-1).Draw(t, "at")
		b[at] = rapid.SampledFrom([]byte("abcXYZ019-_. \n\x00")).Draw(t, "to")
		_, err := ParseToken(string(b))
		if (err == nil) != (string(b) == text) {
			t.Fatalf("%q: %v", b, err)
		}
		if err != nil && strings.Contains(err.Error(), text[len("iop1.gpu1."):len("iop1.gpu1.")+8]) {
			t.Fatalf("the refusal holds the secret: %v", err)
		}
	})
	for _, bad := range []string{"", "x", "iop1", "iop2." + text[5:], text + ".", text + "x", " " + text, text + "\n", strings.ReplaceAll(text, ".", ",")} {
		if _, err := ParseToken(bad); err == nil {
			t.Errorf("%q is taken", bad)
		}
	}
}

// Contract: B11
func TestNew(t *testing.T) {
	now := time.Unix(1000, 0)
	for name, c := range map[string]struct {
		name   string
		secret secret.String
		life   time.Duration
		ok     bool
	}{
		"good":           {"gpu1", newSecret(1), DefaultLife, true},
		"a bad name":     {"GPU", newSecret(1), DefaultLife, false},
		"no name":        {"", newSecret(1), DefaultLife, false},
		"a short secret": {"gpu1", secret.New("x"), DefaultLife, false},
		"no life":        {"gpu1", newSecret(1), 0, false},
		"a past life":    {"gpu1", newSecret(1), -time.Hour, false},
		"too long":       {"gpu1", newSecret(1), MaxLife + 1, false},
	} {
		i, err := New(c.name, c.secret, now, c.life)
		if (err == nil) != c.ok {
			t.Errorf("%s: %v", name, err)
		}
		if c.ok && (i.State(now) != Open || bytes.Contains(must(json.Marshal(i)), []byte(c.secret.Reveal()))) {
			t.Errorf("%s: %+v", name, i)
		}
	}
}

// Every way an invitation may be answered, from every state.
//
// Contract: B11
func TestJudge(t *testing.T) {
	now := time.Unix(1000, 0)
	right, wrong := newSecret(1), newSecret(2)
	first, other := newMachine("gpu1"), newMachine("gpu1")
	open := must(New("gpu1", right, now, time.Hour))
	r, body, mac := first.sealed(t, right)
	used, changed, out := open.Judge(true, now, r, body, mac)
	if !changed || out != Accepted || used.State(now) != Used || used.Use.NKey != r.NKey || used.Use.Curve != r.Curve {
		t.Fatalf("%+v %v", used, out)
	}
	cancelled, did := open.Cancel(now)
	if !did {
		t.Fatal("an open one cannot be cancelled")
	}
	usedCancelled, did := used.Cancel(now)
	if !did {
		t.Fatal("a used one that is answered again cannot be cancelled")
	}
	closed := open
	closed.Wrong = MaxWrong
	almost := open
	almost.Wrong = MaxWrong - 1
	for name, c := range map[string]struct {
		i       Invitation
		found   bool
		after   time.Duration
		who     machine
		secret  secret.String
		want    Outcome
		changed bool
	}{
		"open":                        {open, true, 0, first, right, Accepted, true},
		"open, in the last instant":   {open, true, time.Hour - 1, first, right, Accepted, true},
		"open, wrong secret":          {open, true, 0, first, wrong, WrongSecret, true},
		"expired":                     {open, true, time.Hour, first, right, WasExpired, false},
		"expired, wrong secret":       {open, true, time.Hour, first, wrong, WrongSecret, false},
		"used, the same machine":      {used, true, time.Minute, first, right, Repeated, false},
		"used, the same, later":       {used, true, RepeatFor, first, right, WasUsed, false},
		"used, another":               {used, true, 0, other, right, WasUsed, false},
		"used, the same, wrong":       {used, true, 0, first, wrong, WrongSecret, false},
		"cancelled":                   {cancelled, true, 0, first, right, WasCancelled, false},
		"cancelled after it was used": {usedCancelled, true, 0, first, right, WasCancelled, false},
		"closed":                      {closed, true, 0, first, right, WasClosed, false},
		"one wrong from closed":       {almost, true, 0, first, right, Accepted, true},
		"none":                        {Invitation{}, false, 0, first, right, UnknownName, false},
	} {
		r, body, mac := c.who.sealed(t, c.secret)
		next, changed, out := c.i.Judge(c.found, now.Add(c.after), r, body, mac)
		if out != c.want || changed != c.changed {
			t.Errorf("%s: %v (changed: %v), want %v", name, out, changed, c.want)
		}
		if !changed && c.found && !bytes.Equal(must(json.Marshal(next)), must(json.Marshal(c.i))) {
			t.Errorf("%s: it says nothing changed, and %+v became %+v", name, c.i, next)
		}
	}
	// What is not there is not answered as if its secret were known to be nothing.
	body = must(json.Marshal(first.request))
	if _, _, out := (Invitation{}).Judge(false, now, r, body, sum(make([]byte, sha256.Size), body)); out != UnknownName {
		t.Errorf("a MAC under nothing: %v", out)
	}
	// A bit of the request changed on the way.
	r, body, mac = first.sealed(t, right)
	body[len(body)/2] ^= 1
	if _, _, out := open.Judge(true, now, r, body, mac); out != WrongSecret {
		t.Errorf("a changed request: %v", out)
	}
}

// Whatever comes in whatever order: one machine is let in, never after the end, and
// never with a wrong secret; ten wrong secrets close it.
//
// Contract: B11
func TestI2OneMachine(t *testing.T) {
	machines := []machine{newMachine("gpu1"), newMachine("gpu1"), newMachine("gpu1")}
	rapid.Check(t, func(t *rapid.T) {
		start := time.Unix(1000, 0)
		now := start
		i := must(New("gpu1", newSecret(1), now, time.Hour))
		let, wrongs := map[string]bool{}, 0
		for range rapid.IntRange(0, 40).Draw(t, "steps") {
			now = now.Add(time.Duration(rapid.IntRange(0, 600).Draw(t, "pause")) * time.Second)
			was := i.State(now)
			if rapid.IntRange(0, 19).Draw(t, "cancel") == 0 {
				i, _ = i.Cancel(now)
				continue
			}
			m := rapid.SampledFrom(machines).Draw(t, "who")
			s := newSecret(byte(rapid.IntRange(1, 2).Draw(t, "secret")))
			body, header, err := Seal(m.request, s)
			if err != nil {
				t.Fatal(err)
			}
			r, mac, err := Unseal(body, header)
			if err != nil {
				t.Fatal(err)
			}
			next, changed, out := i.Judge(true, now, r, body, mac)
			if changed {
				i = next
			}
			right := s.Equal(newSecret(1))
			if !right && was == Open {
				wrongs++
			}
			switch {
			case (out == Accepted || out == Repeated) && (!right || !now.Before(start.Add(time.Hour)) || was == Cancelled || was == Closed):
				t.Fatalf("%v from %v, right: %v", out, was, right)
			case out == Accepted && was != Open, out == Repeated && was != Used:
				t.Fatalf("%v from %v", out, was)
			case out == Accepted || out == Repeated:
				let[m.request.NKey] = true
			}
			if len(let) > 1 {
				t.Fatal("two machines were let in")
			}
			if wrongs >= MaxWrong && i.State(now) == Open {
				t.Fatalf("open after %d wrong secrets", wrongs)
			}
			if until := i.Until(now); (i.State(now) == Open) && !until.After(now) {
				t.Fatalf("open, and nothing is answered after %v", until)
			}
		}
	})
}

// Contract: B11
func TestUnseal(t *testing.T) {
	m := newMachine("gpu1")
	body, header, err := Seal(m.request, newSecret(1))
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := Unseal(body, header); err != nil {
		t.Fatal(err)
	}
	with := func(change func(r *Request)) []byte {
		r := m.request
		change(&r)
		return must(json.Marshal(r))
	}
	rsaLike := must(ecdsa.GenerateKey(elliptic.P384(), rand.Reader))
	p384 := must(x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, rsaLike))
	forged := bytes.Clone(m.request.CSR)
	forged[len(forged)-1] ^= 1
	for name, c := range map[string]struct {
		body   []byte
		header string
		want   string
	}{
		"nothing":           {nil, header, "JSON"},
		"no JSON":           {[]byte("{"), header, "JSON"},
		"too large":         {bytes.Repeat([]byte(" "), MaxRequest+1), header, "larger"},
		"no name":           {with(func(r *Request) { r.Name = "" }), header, "name"},
		"a bad name":        {with(func(r *Request) { r.Name = "a.b" }), header, "name"},
		"no nkey":           {with(func(r *Request) { r.NKey = "" }), header, "nkey"},
		"a curve as nkey":   {with(func(r *Request) { r.NKey = r.Curve }), header, "nkey"},
		"an nkey as curve":  {with(func(r *Request) { r.Curve = r.NKey }), header, "curve"},
		"no CSR":            {with(func(r *Request) { r.CSR = nil }), header, "csr"},
		"a CSR of P-384":    {with(func(r *Request) { r.CSR = p384 }), header, "another kind"},
		"a CSR not its own": {with(func(r *Request) { r.CSR = forged }), header, "csr"},
		"no MAC":            {body, "", Header},
		"half a MAC":        {body, header[:20], Header},
	} {
		if _, _, err := Unseal(c.body, c.header); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want one that says %q", name, err, c.want)
		}
	}
}

// The same machine may make its request anew; another's is another.
//
// Contract: B11
func TestDigest(t *testing.T) {
	m := newMachine("gpu1")
	again := m
	again.request.CSR = must(m.key.Request("something else"))
	a, _, _ := m.sealed(t, newSecret(1))
	b, _, _ := again.sealed(t, newSecret(1))
	if bytes.Equal(a.CSR, b.CSR) || !bytes.Equal(a.Digest(), b.Digest()) {
		t.Error("a request that was made anew is another machine's")
	}
	other := newMachine("gpu1")
	for name, change := range map[string]func(r *Request){
		"name":  func(r *Request) { r.Name = "gpu2" },
		"key":   func(r *Request) { r.CSR = other.request.CSR },
		"nkey":  func(r *Request) { r.NKey = other.request.NKey },
		"curve": func(r *Request) { r.Curve = other.request.Curve },
	} {
		changed := m
		change(&changed.request)
		c, _, _ := changed.sealed(t, newSecret(1))
		if bytes.Equal(a.Digest(), c.Digest()) {
			t.Errorf("another %s is the same machine", name)
		}
	}
}

// Whoever answers, the machine takes only what the line vouches for.
//
// Contract: B11 L8
func TestAccept(t *testing.T) {
	ca, strange := must(identity.NewCA("iop", time.Hour)), must(identity.NewCA("iop", time.Hour))
	m := newMachine("gpu1")
	tok := Token{Name: "gpu1", CA: identity.Fingerprint(ca.DER())}
	issuer := must(identity.NewAccountKey()).Public()
	answer := func(ca *identity.CA, id identity.ID, key []byte) Answer {
		der := must(ca.Sign(must(identity.ParseRequest(key)), id, nil, time.Hour))
		return Answer{
			Certificate: string(identity.EncodeChain([][]byte{der})), CA: string(ca.PEM()), Issuers: []string{issuer},
			BrokerURLs: []string{"tls://hub.example:4222"}, Edge: "home", TrustDomain: "iop",
		}
	}
	id := identity.ID{TrustDomain: "iop", Edge: "home", Role: identity.RoleNode, Name: "gpu1"}
	good := answer(ca, id, m.request.CSR)
	if c, _, err := good.Accept(tok, m.key); err != nil || c.ID() != id {
		t.Fatalf("%v", err)
	}
	with := func(change func(a *Answer)) Answer {
		a := good
		change(&a)
		return a
	}
	named := func(change func(id *identity.ID)) Answer {
		id := id
		change(&id)
		return answer(ca, id, m.request.CSR)
	}
	for name, a := range map[string]Answer{
		"nothing":                  {},
		"another CA":               answer(strange, id, m.request.CSR),
		"another CA's certificate": with(func(a *Answer) { a.Certificate = answer(strange, id, m.request.CSR).Certificate }),
		"two CAs":                  with(func(a *Answer) { a.CA += string(strange.PEM()) }),
		"another key":              answer(ca, id, newMachine("gpu1").request.CSR),
		"another name":             named(func(id *identity.ID) { id.Name = "gpu2" }),
		"another role":             named(func(id *identity.ID) { id.Role = identity.RoleEdge }),
		"another edge":             named(func(id *identity.ID) { id.Edge = "away" }),
		"another trust domain":     with(func(a *Answer) { a.TrustDomain = "else" }),
		"no broker":                with(func(a *Answer) { a.BrokerURLs = nil }),
		"a broker without TLS":     with(func(a *Answer) { a.BrokerURLs = []string{"nats://hub.example:4222"} }),
		"no issuer":                with(func(a *Answer) { a.Issuers = nil }),
		"an issuer that is none":   with(func(a *Answer) { a.Issuers = []string{m.request.NKey} }),
		"no certificate":           with(func(a *Answer) { a.Certificate = "" }),
	} {
		if _, _, err := a.Accept(tok, m.key); err == nil {
			t.Errorf("%s: it is taken", name)
		}
	}
}
