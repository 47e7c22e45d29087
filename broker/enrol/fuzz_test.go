package enrol

import (
	"testing"
	"time"
)

// What is taken for a token is exactly the token that Text writes.
func FuzzParseToken(f *testing.F) {
	f.Add(token().Text())
	f.Add("iop1.a.b.c.d")
	f.Fuzz(func(t *testing.T, text string) {
		if got, err := ParseToken(text); err == nil && got.Text() != text {
			t.Errorf("%q is taken for %q", text, got.Text())
		}
	})
}

// Whatever a stranger sends is refused or judged, and without the secret it is let
// in nowhere.
func FuzzUnseal(f *testing.F) {
	m := newMachine("gpu1")
	body, header, err := Seal(m.request, newSecret(1))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(body, header)
	f.Add([]byte(`{"name":"gpu1","csr":"","nkey":"","curve":""}`), "")
	now := time.Unix(1000, 0)
	i, err := New("gpu1", newSecret(2), now, time.Hour)
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, body []byte, header string) {
		r, mac, err := Unseal(body, header)
		if err != nil {
			return
		}
		if _, _, out := i.Judge(true, now, r, body, mac); out != WrongSecret {
			t.Errorf("%s", out)
		}
	})
}
