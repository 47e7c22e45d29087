package identity

import (
	"bytes"
	"encoding/base64"
	"fmt"
	"strings"
	"testing"

	"github.com/nats-io/jwt/v2"
	"google.golang.org/protobuf/proto"

	"github.com/iop-fabric/iop/wire/iopv1"
)

func TestTokenRoundTrip(t *testing.T) {
	w := newWorld(t)
	got, err := VerifyToken(w.issuer.Public(), w.token)
	if err != nil || got != w.claims() {
		t.Errorf("got %+v, %v; want %+v", got, err, w.claims())
	}
}

// jwtToken signs claims as jwt does, whatever they are.
func jwtToken(issuer *NKey, subject string, change func(*jwt.GenericClaims)) []byte {
	c := jwt.NewGenericClaims(subject)
	c.Audience = tokenAudience
	for k, v := range map[string]string{"edge": "home", "node": "desk", "gen": "7", "nkey": subject} {
		c.Data[k] = v
	}
	change(c)
	return []byte(ok(c.Encode(issuer.pair())))
}

// Contract: G3
func TestI2TokenRefused(t *testing.T) {
	w := newWorld(t)
	stranger := ok(NewAccountKey())
	user := w.user.Public()
	if _, err := VerifyToken(w.issuer.Public(), jwtToken(w.issuer, user, func(*jwt.GenericClaims) {})); err != nil {
		t.Fatalf("the unchanged one is refused: %v", err)
	}
	set := func(key string, value any) []byte {
		return jwtToken(w.issuer, user, func(c *jwt.GenericClaims) { c.Data[key] = value })
	}
	uc := jwt.NewUserClaims(user)
	uc.Audience = tokenAudience
	callout := ok(uc.Encode(w.issuer.pair()))
	parts := strings.Split(string(w.token), ".")
	b64 := base64.RawURLEncoding.EncodeToString
	// jwt's older form signs the payload alone, and its decoder breaks on one
	// that has a type but no data.
	old := b64([]byte(`{"typ":"jwt","alg":"ed25519"}`))
	oldBody := b64([]byte(`{"iss":"` + stranger.Public() + `","type":"x","tags":["y"]}`))
	oldToken := old + "." + oldBody + "." + b64(ok(stranger.pair().Sign([]byte(oldBody))))
	oldBody2 := parts[1]
	oldToken2 := old + "." + oldBody2 + "." + b64(ok(w.issuer.pair().Sign([]byte(oldBody2))))
	claimed := bytes.Replace(ok(base64.RawURLEncoding.DecodeString(parts[1])), []byte(w.issuer.Public()), []byte(stranger.Public()), 1)
	claimedToken := parts[0] + "." + b64(claimed)
	claimedToken += "." + b64(ok(w.issuer.pair().Sign([]byte(claimedToken))))
	for name, c := range map[string]struct {
		token []byte
		want  string
	}{
		"none":                  {nil, "form"},
		"too long":              {bytes.Repeat([]byte("a"), maxToken+1), "longer"},
		"two parts":             {[]byte(parts[0] + "." + parts[1]), "form"},
		"four parts":            {append(bytes.Clone(w.token), ".x"...), "form"},
		"a line end after":      {append(bytes.Clone(w.token), '\n'), "form"},
		"a line end within":     {[]byte(parts[0] + "." + parts[1] + ".\n" + parts[2]), "form"},
		"the older form":        {[]byte(oldToken), "form"},
		"the older form, ours":  {[]byte(oldToken2), "form"},
		"another issuer":        {jwtToken(stranger, user, func(*jwt.GenericClaims) {}), "issuer"},
		"signature of another":  {[]byte(parts[0] + "." + parts[1] + "." + strings.Split(string(set("gen", "8")), ".")[2]), "issuer"},
		"says another issuer":   {[]byte(claimedToken), "another use"},
		"a user of the callout": {[]byte(callout), "another use"},
		"another audience":      {jwtToken(w.issuer, user, func(c *jwt.GenericClaims) { c.Audience = "FABRIC" }), "another use"},
		"another subject":       {set("nkey", w.other.Public()), "another use"},
		"a dot in the node":     {set("node", "a.b"), "node"},
		"no edge":               {set("edge", ""), "edge"},
		"generation 0":          {set("gen", "0"), "generation"},
		"generation 07":         {set("gen", "07"), "generation"},
		"generation +7":         {set("gen", "+7"), "generation"},
		"generation 2^64":       {set("gen", "18446744073709551616"), "generation"},
		"generation as number":  {set("gen", 7), "parse"},
		"no user key":           {jwtToken(w.issuer, w.curve.Public(), func(*jwt.GenericClaims) {}), "user"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := VerifyToken(w.issuer.Public(), c.token)
			refused(t, err, c.want)
		})
	}
	for _, pinned := range []string{"", stranger.Public(), w.user.Public(), w.issuer.Public()[:55]} {
		if _, err := VerifyToken(pinned, w.token); err == nil {
			t.Errorf("pinned %.3s: accepted", pinned)
		}
	}
}

// Contract: G3
func TestI2TokenWithOneBitTurned(t *testing.T) {
	w := newWorld(t)
	for i := range w.token {
		for bit := range 8 {
			if _, err := VerifyToken(w.issuer.Public(), flip(w.token, i, bit)); err == nil {
				t.Errorf("bit %d of byte %d of %d turned: accepted", bit, i, len(w.token))
			}
		}
	}
}

func TestIssueTokenRefuses(t *testing.T) {
	w := newWorld(t)
	good := w.claims()
	for name, c := range map[string]struct {
		issuer *NKey
		change func(*SessionClaims)
	}{
		"user key as issuer": {w.user, func(*SessionClaims) {}},
		"no issuer":          {nil, func(*SessionClaims) {}},
		"generation 0":       {w.issuer, func(c *SessionClaims) { c.Gen = 0 }},
		"edge":               {w.issuer, func(c *SessionClaims) { c.Edge = "a.b" }},
		"node":               {w.issuer, func(c *SessionClaims) { c.Node = ">" }},
		"nkey":               {w.issuer, func(c *SessionClaims) { c.NKey = w.curve.Public() }},
	} {
		claims := good
		c.change(&claims)
		if _, err := IssueToken(c.issuer, claims); err == nil {
			t.Errorf("%s: issued", name)
		}
	}
}

// Each case differs from a good registration in one thing, and is signed anew
// where the thing is not the signature.
//
// Contract: G3 L8
func TestRegisterRefused(t *testing.T) {
	w := newWorld(t)
	if err := w.verify(w.register); err != nil {
		t.Fatalf("the unchanged one is refused: %v", err)
	}
	stranger := ok(NewCA(DefaultTrustDomain, year))
	token := func(issuer *NKey, change func(*SessionClaims)) []byte {
		c := w.claims()
		change(&c)
		return ok(IssueToken(issuer, c))
	}
	signed := func(cert *Certificate, nkey *NKey, change func(*iopv1.RegisterRequest)) *iopv1.RegisterRequest {
		r := w.request()
		change(r)
		parts := registerParts(r)
		r.CertificateChain = cert.Chain
		r.CertificateSignature = ok(cert.Sign(labelRegister, parts...))
		r.NkeySignature = ok(nkey.SignLabelled(labelRegister, parts...))
		return r
	}
	same := func(*iopv1.RegisterRequest) {}
	withToken := func(tok []byte) *iopv1.RegisterRequest {
		return signed(w.node, w.user, func(r *iopv1.RegisterRequest) { r.SessionToken = tok })
	}
	unsigned := func(change func(*iopv1.RegisterRequest)) *iopv1.RegisterRequest {
		r := clone(w.register)
		change(r)
		return r
	}
	withChain := func(id ID, ca *CA) *iopv1.RegisterRequest { return signed(ok(ca.Issue(id, nil, year)), w.user, same) }
	for name, c := range map[string]struct {
		r    *iopv1.RegisterRequest
		want string
	}{
		"nothing at all":          {nil, "node id"},
		"another node id":         {signed(w.node, w.user, func(r *iopv1.RegisterRequest) { r.NodeId = "other" }), "node id"},
		"nonce of 31 bytes":       {signed(w.node, w.user, func(r *iopv1.RegisterRequest) { r.Nonce = r.Nonce[1:] }), "nonce"},
		"nonce of 33 bytes":       {signed(w.node, w.user, func(r *iopv1.RegisterRequest) { r.Nonce = append(r.Nonce, 0) }), "nonce"},
		"no nonce":                {signed(w.node, w.user, func(r *iopv1.RegisterRequest) { r.Nonce = nil }), "nonce"},
		"user key as recipient":   {signed(w.node, w.user, func(r *iopv1.RegisterRequest) { r.RecipientKey = w.user.Public() }), "curve"},
		"no recipient":            {signed(w.node, w.user, func(r *iopv1.RegisterRequest) { r.RecipientKey = "" }), "curve"},
		"recipient cut short":     {signed(w.node, w.user, func(r *iopv1.RegisterRequest) { r.RecipientKey = r.RecipientKey[:55] }), "curve"},
		"recipient, line end":     {signed(w.node, w.user, func(r *iopv1.RegisterRequest) { r.RecipientKey += "\n" }), "curve"},
		"token of another edge":   {withToken(token(w.issuer, func(c *SessionClaims) { c.Edge = "away" })), "another edge"},
		"token of another node":   {withToken(token(w.issuer, func(c *SessionClaims) { c.Node = "other" })), "another node"},
		"token of an older gen":   {withToken(token(w.issuer, func(c *SessionClaims) { c.Gen-- })), "another generation"},
		"token of a newer gen":    {withToken(token(w.issuer, func(c *SessionClaims) { c.Gen++ })), "another generation"},
		"token of another issuer": {withToken(token(ok(NewAccountKey()), func(*SessionClaims) {})), "issuer"},
		"token of another nkey":   {withToken(token(w.issuer, func(c *SessionClaims) { c.NKey = w.other.Public() })), "nkey signature"},
		"no token":                {withToken(nil), "token"},
		"wrong CA":                {withChain(nodeID("home", "desk"), stranger), "authority"},
		"wrong role":              {withChain(ID{DefaultTrustDomain, "home", RoleLeaf, "desk"}, w.ca), "certificate of a leaf"},
		"wrong edge":              {withChain(nodeID("away", "desk"), w.ca), "another edge"},
		"wrong name":              {withChain(nodeID("home", "other"), w.ca), "another node"},
		"no certificate":          {unsigned(func(r *iopv1.RegisterRequest) { r.CertificateChain = nil }), "no certificate"},
		"another of ours": {unsigned(func(r *iopv1.RegisterRequest) {
			r.CertificateChain = ok(w.ca.Issue(nodeID("home", "desk"), nil, year)).Chain
		}), "certificate signature"},
		"no certificate sig": {unsigned(func(r *iopv1.RegisterRequest) { r.CertificateSignature = nil }), "certificate signature"},
		"wrong certificate sig": {unsigned(func(r *iopv1.RegisterRequest) {
			r.CertificateSignature = ok(w.edge.Sign(labelRegister, registerParts(r)...))
		}), "certificate signature"},
		"no nkey sig": {unsigned(func(r *iopv1.RegisterRequest) { r.NkeySignature = nil }), "nkey signature"},
		"wrong nkey sig": {unsigned(func(r *iopv1.RegisterRequest) {
			r.NkeySignature = ok(w.other.SignLabelled(labelRegister, registerParts(r)...))
		}), "nkey signature"},
		"nonce of another":      {unsigned(func(r *iopv1.RegisterRequest) { r.Nonce = NewNonce() }), "signature"},
		"recipient changed":     {unsigned(func(r *iopv1.RegisterRequest) { r.RecipientKey = ok(NewCurveKey()).Public() }), "signature"},
		"instance changed":      {unsigned(func(r *iopv1.RegisterRequest) { r.InstanceId = "i2" }), "signature"},
		"range widened below":   {unsigned(func(r *iopv1.RegisterRequest) { r.ProtocolMin = 0 }), "signature"},
		"range widened above":   {unsigned(func(r *iopv1.RegisterRequest) { r.ProtocolMax = 3 }), "signature"},
		"range turned":          {unsigned(func(r *iopv1.RegisterRequest) { r.ProtocolMin, r.ProtocolMax = 2, 1 }), "signature"},
		"software changed":      {unsigned(func(r *iopv1.RegisterRequest) { r.Software = "iop/0" }), "signature"},
		"a feature more":        {unsigned(func(r *iopv1.RegisterRequest) { r.Features = append(r.Features, "c") }), "signature"},
		"a feature less":        {unsigned(func(r *iopv1.RegisterRequest) { r.Features = r.Features[:1] }), "signature"},
		"features merged":       {unsigned(func(r *iopv1.RegisterRequest) { r.Features = []string{"ab"} }), "signature"},
		"software as a feature": {unsigned(func(r *iopv1.RegisterRequest) { r.Software, r.Features = "", []string{"iop/1", "a", "b"} }), "signature"},
	} {
		t.Run(name, func(t *testing.T) { refused(t, w.verify(c.r), c.want) })
	}
	t.Run("token of another generation than the subject's", func(t *testing.T) {
		refused(t, VerifyRegister(w.ca.Pool(), w.issuer.Public(), "home", "desk", 7, w.register), "another generation")
	})
}

// A chain with no SAN, and one with two, whose key signs all else right.
//
// Contract: B2 G3
func TestRegisterNames(t *testing.T) {
	w := newWorld(t)
	_, none, two := w.namings(t)
	for want, cert := range map[string]*Certificate{"0 URI": none, "2 URI": two} {
		r := w.request()
		if err := SignRegister(cert, w.user, r); err != nil {
			t.Fatal(err)
		}
		refused(t, w.verify(r), want)
	}
}

func TestRegisterWithOneBitTurned(t *testing.T) {
	w := newWorld(t)
	fields := map[string]func(*iopv1.RegisterRequest) *[]byte{
		"certificate signature": func(r *iopv1.RegisterRequest) *[]byte { return &r.CertificateSignature },
		"nkey signature":        func(r *iopv1.RegisterRequest) *[]byte { return &r.NkeySignature },
		"nonce":                 func(r *iopv1.RegisterRequest) *[]byte { return &r.Nonce },
		"token":                 func(r *iopv1.RegisterRequest) *[]byte { return &r.SessionToken },
	}
	for name, field := range fields {
		for i := 0; i < len(*field(w.register)); i += 3 {
			r := clone(w.register)
			*field(r) = flip(*field(r), i, i%8)
			if w.verify(r) == nil {
				t.Errorf("%s with a bit of byte %d turned: accepted", name, i)
			}
		}
	}
}

func TestSignRegisterRefuses(t *testing.T) {
	w := newWorld(t)
	for name, c := range map[string]struct {
		nkey   *NKey
		change func(*iopv1.RegisterRequest)
	}{
		"account key":  {w.issuer, func(*iopv1.RegisterRequest) {}},
		"no key":       {nil, func(*iopv1.RegisterRequest) {}},
		"no nonce":     {w.user, func(r *iopv1.RegisterRequest) { r.Nonce = nil }},
		"no recipient": {w.user, func(r *iopv1.RegisterRequest) { r.RecipientKey = "" }},
	} {
		r := w.request()
		c.change(r)
		if err := SignRegister(w.node, c.nkey, r); err == nil {
			t.Errorf("%s: signed", name)
		}
	}
}

// Contract: G3 L8
func TestConfigRefused(t *testing.T) {
	w := newWorld(t)
	nonce, payload := NewNonce(), []byte("payload")
	good := ok(SignConfig(w.edge, payload, nonce, 5))
	verify := func(c *iopv1.SignedConfig) error { return VerifyConfig(w.ca.Pool(), "home", nonce, 4, c) }
	if err := verify(good); err != nil {
		t.Fatalf("the unchanged one is refused: %v", err)
	}
	// It passes through the wire.
	var again iopv1.SignedConfig
	if err := again.UnmarshalVT(ok(good.MarshalVT())); err != nil || verify(&again) != nil {
		t.Errorf("decoded: %v, %v", err, verify(&again))
	}
	by := func(cert *Certificate) *iopv1.SignedConfig { return ok(SignConfig(cert, payload, nonce, 5)) }
	changed := func(change func(*iopv1.SignedConfig)) *iopv1.SignedConfig {
		c := proto.Clone(good).(*iopv1.SignedConfig)
		change(c)
		return c
	}
	stranger := ok(NewCA(DefaultTrustDomain, year))
	for name, c := range map[string]struct {
		c    *iopv1.SignedConfig
		want string
	}{
		"nothing at all":    {nil, "nonce"},
		"another nonce":     {ok(SignConfig(w.edge, payload, NewNonce(), 5)), "nonce"},
		"the same revision": {ok(SignConfig(w.edge, payload, nonce, 4)), "revision"},
		"an older revision": {ok(SignConfig(w.edge, payload, nonce, 3)), "revision"},
		"revision raised":   {changed(func(c *iopv1.SignedConfig) { c.Revision = 6 }), "signature"},
		"payload changed":   {changed(func(c *iopv1.SignedConfig) { c.Payload = []byte("Payload") }), "signature"},
		"signature changed": {changed(func(c *iopv1.SignedConfig) { c.Signature[9] ^= 1 }), "signature"},
		"no signature":      {changed(func(c *iopv1.SignedConfig) { c.Signature = nil }), "signature"},
		"no certificate":    {changed(func(c *iopv1.SignedConfig) { c.CertificateChain = nil }), "no certificate"},
		"by a node":         {by(w.node), "certificate of a node"},
		"by another edge":   {by(ok(w.ca.Issue(edgeID("away"), nil, year))), "another edge"},
		"by another CA":     {by(ok(stranger.Issue(edgeID("home"), nil, year))), "authority"},
		"another's signature": {changed(func(c *iopv1.SignedConfig) {
			c.CertificateChain = ok(w.ca.Issue(edgeID("home"), nil, year)).Chain
		}), "signature"},
	} {
		t.Run(name, func(t *testing.T) { refused(t, verify(c.c), c.want) })
	}
	t.Run("a register's signature", func(t *testing.T) {
		c := proto.Clone(good).(*iopv1.SignedConfig)
		c.Signature = ok(w.edge.Sign(labelRegister, configParts(payload, nonce, 5)...))
		refused(t, verify(c), "signature")
	})
	if err := VerifyConfig(w.ca.Pool(), "home", nil, 4, &iopv1.SignedConfig{Revision: 5}); err == nil {
		t.Error("an empty nonce that equals an empty nonce: accepted")
	}
	if _, err := SignConfig(w.edge, payload, nil, 5); err == nil {
		t.Error("signed without a nonce")
	}
}

func FuzzVerifyToken(f *testing.F) {
	w := newWorld(f)
	f.Add(w.token)
	f.Add([]byte(tokenHeader + ".e30." + strings.Repeat("A", 86)))
	f.Add([]byte("e30.e30.e30"))
	f.Fuzz(func(t *testing.T, token []byte) {
		c, err := VerifyToken(w.issuer.Public(), token)
		if err == nil && (!bytes.Equal(token, w.token) || c != w.claims()) {
			t.Errorf("accepted %q as %+v", token, c)
		}
	})
}

func FuzzVerifyRegister(f *testing.F) {
	w := newWorld(f)
	f.Add(ok(w.register.MarshalVT()))
	f.Add([]byte(nil))
	f.Fuzz(func(t *testing.T, data []byte) {
		var r iopv1.RegisterRequest
		if r.UnmarshalVT(data) != nil || w.verify(&r) != nil {
			return
		}
		if fmt.Sprint(registerParts(&r)) != fmt.Sprint(registerParts(w.register)) {
			t.Errorf("accepted %x", data)
		}
	})
}
