package up

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/iop-fabric/iop/broker/enrol"
	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/identity"
)

// How long a machine asks before it gives up: the authority may be starting.
const (
	joinAttempts  = 6
	joinWaitFirst = 500 * time.Millisecond
	joinWaitLast  = 5 * time.Second
	joinBound     = 30 * time.Second // one attempt
)

// Join is a machine that joins a fabric by an invite line (B11). Its keys are made
// in its folder and stay there.
type Join struct {
	Folder    Folder
	Authority string // HOST:PORT of the line
	Token     string // the token of the line
	// BrokerURLs are what the Node dials instead of what the authority says.
	BrokerURLs []string
	// Tell says why it waits; nil: nobody is told.
	Tell func(string)
}

// joined is what stands in the folder once a machine has joined: what it was told.
type joined struct {
	Name        string    `json:"name"`
	Edge        string    `json:"edge"`
	TrustDomain string    `json:"trust_domain"`
	Issuers     []string  `json:"issuers"`
	BrokerURLs  []string  `json:"broker_urls"`
	Joined      time.Time `json:"joined"`
	// Invitation tells one invite line from another; it is no secret.
	Invitation string `json:"invitation"`
}

// NodeConfig is the configuration of a Node that joined in this folder.
func (f Folder) NodeConfig() string { return f.path("node.yaml") }

func (j Join) path(name string) string { return j.Folder.path(name) }

// Check says what is wrong with the line before anything is made or dialled.
func (j Join) Check() error {
	for _, u := range j.BrokerURLs {
		if err := configs.CheckBrokerURL(u); err != nil {
			return fmt.Errorf("--broker-url %q: %w", u, err)
		}
	}
	if j.Token == "" && j.Authority == "" {
		return nil
	}
	if _, err := enrol.ParseToken(j.Token); err != nil {
		return fmt.Errorf("the invite line: %w", err)
	}
	_, err := authorityAddress(j.Authority)
	return err
}

// Run joins, or finds that the folder has joined already. The caller holds the
// folder's Lock. What a start that was cut off has made is used again.
func (j Join) Run(ctx context.Context) error {
	if present(j.Folder.CA()) {
		return fmt.Errorf("%s is the data folder of an iop up: name another with --dir", j.Folder)
	}
	if present(j.path("ca.key")) {
		return fmt.Errorf("%s holds the keys of an authority: name another folder with --dir", j.Folder)
	}
	if err := checkPrivate(string(j.Folder)); err != nil {
		return err
	}
	if present(j.Folder.NodeConfig()) {
		return j.again()
	}
	if j.Token == "" {
		return fmt.Errorf("%s holds no machine that has joined: iop join HOST:PORT TOKEN, as iop invite printed it", j.Folder)
	}
	token, err := enrol.ParseToken(j.Token)
	if err != nil {
		return fmt.Errorf("the invite line: %w", err)
	}
	address, err := authorityAddress(j.Authority)
	if err != nil {
		return err
	}
	removeLeftovers(string(j.Folder))
	key, user, curve, err := j.keys()
	if err != nil {
		return fmt.Errorf("%w; nothing was asked yet: mend that, and give the same line again", err)
	}
	csr, err := key.Request(token.Name)
	if err != nil {
		return err
	}
	answer, err := j.ask(ctx, address, token, enrol.Request{Name: token.Name, CSR: csr, NKey: user.Public(), Curve: curve.Public()})
	if err != nil {
		return err
	}
	cert, roots, err := answer.Accept(token, key)
	if err == nil {
		err = j.finish(token, answer, cert, roots)
	}
	if err != nil { // the invitation is used by now, by this machine
		return fmt.Errorf("%s: %w; mend that, and give the same line again within %d minutes: it goes on where it was",
			address, clocked(err), int(enrol.RepeatFor.Minutes()))
	}
	return nil
}

// keys makes what the folder lacks of this machine's keys.
func (j Join) keys() (key *identity.Key, user, curve *identity.NKey, err error) {
	if err = j.begin(); err != nil {
		return nil, nil, nil, err
	}
	if key, err = ensureRequestKey(j.path("cert.key")); err != nil {
		return nil, nil, nil, err
	}
	if user, err = ensureNKey(j.path("user.nk"), identity.NewUserKey); err != nil {
		return nil, nil, nil, err
	}
	curve, err = ensureNKey(j.path("curve.nk"), identity.NewCurveKey)
	return key, user, curve, err
}

// clocked asks about the clock where a certificate is not good at this time.
func clocked(err error) error {
	var invalid x509.CertificateInvalidError
	if errors.As(err, &invalid) && invalid.Reason == x509.Expired {
		return fmt.Errorf("%w (is this machine's clock right?)", err)
	}
	return err
}

// invitation tells this line from another one.
func (j Join) invitation() string {
	sum := sha256.Sum256([]byte(j.Token))
	return hex.EncodeToString(sum[:])
}

// again is a second run on a folder that has joined.
func (j Join) again() error {
	if len(j.BrokerURLs) > 0 {
		return fmt.Errorf("%s has joined already: what it dials is node.broker.urls in %s", j.Folder, j.Folder.NodeConfig())
	}
	if j.Token == "" {
		return nil
	}
	var was joined
	b, err := identity.ReadKeyFile(j.path("joined.json"))
	if err != nil {
		return err
	}
	if err := json.Unmarshal(b, &was); err != nil {
		return fmt.Errorf("%s: is damaged: %w", j.path("joined.json"), err)
	}
	if was.Invitation != j.invitation() {
		return fmt.Errorf("%s has joined already, as node %s of edge %s, by another invitation: name another folder with --dir, or remove this one and its keys", j.Folder, was.Name, was.Edge)
	}
	return nil
}

// begin notes which invitation the folder's keys are for; those that were made for
// another one, and never certified, go.
func (j Join) begin() error {
	mark := j.path("joining")
	b, err := os.ReadFile(mark)
	if err == nil && strings.TrimSpace(string(b)) == j.invitation() {
		return nil
	}
	made := []string{"cert.key", "cert.pem", "user.nk", "curve.nk"}
	for _, name := range append([]string{"ca.pem", "joined.json"}, made...) {
		if err != nil && present(j.path(name)) { // no mark: they are not ours to write over
			return fmt.Errorf("%s is there, but no machine was joining in %s: name another folder with --dir", j.path(name), j.Folder)
		}
	}
	for _, name := range made {
		if err := os.Remove(j.path(name)); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return identity.WriteKeyFile(mark, []byte(j.invitation()+"\n"))
}

func ensureRequestKey(file string) (*identity.Key, error) {
	if present(file) {
		return identity.LoadKey(file)
	}
	k, err := identity.NewKey()
	if err != nil {
		return nil, err
	}
	return k, k.Save(file)
}

// finish writes what was answered; node.yaml comes last, and says that it is whole.
func (j Join) finish(t enrol.Token, a enrol.Answer, cert *identity.Certificate, roots identity.Trust) error {
	if err := cert.Save(j.path("cert.pem"), j.path("cert.key")); err != nil {
		return err
	}
	if err := identity.WriteKeyFile(j.path("ca.pem"), roots.PEM()); err != nil {
		return err
	}
	record, err := json.MarshalIndent(joined{
		Name: t.Name, Edge: a.Edge, TrustDomain: a.TrustDomain, Issuers: a.Issuers, BrokerURLs: a.BrokerURLs,
		Joined: time.Now().UTC(), Invitation: j.invitation(),
	}, "", "  ")
	if err != nil {
		return err
	}
	if err := identity.WriteKeyFile(j.path("joined.json"), append(record, '\n')); err != nil {
		return err
	}
	dial, urls := a.BrokerURLs, []string(nil)
	if len(j.BrokerURLs) > 0 {
		dial = j.BrokerURLs
	}
	for _, u := range dial {
		urls = append(urls, fmt.Sprintf("%q", u))
	}
	text := fmt.Sprintf(`# Node %s of edge %s: it joined by an invitation.
#
#   iop node --config %s
node:
  name: %q
  edge: %q
  trust_domain: %q
  broker:
    urls: [%s]
    tls: {%s}
    nkey: user.nk
  curve_key: curve.nk
  reconnect: {max_attempts: 0, interval_sec: 5} # 0: it never gives up
  # admin_listen: 127.0.0.1:8401   # /healthz, /readyz, /metrics; off by default
`, t.Name, a.Edge, quote(j.Folder.NodeConfig()), t.Name, a.Edge, a.TrustDomain, strings.Join(urls, ", "), tlsText)
	if _, err := configs.Parse(j.Folder.NodeConfig(), []byte(text)); err != nil {
		return fmt.Errorf("what the authority answered makes no configuration: %w", err)
	}
	if err := identity.WriteKeyFile(j.Folder.NodeConfig(), []byte(text)); err != nil {
		return err
	}
	_ = os.Remove(j.path("joining")) // it means nothing any more
	return nil
}

// authorityAddress takes HOST or HOST:PORT.
func authorityAddress(text string) (string, error) {
	host, port, err := net.SplitHostPort(text)
	if err != nil {
		host, port = strings.Trim(text, "[]"), configs.DefaultEnrolPort
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if (net.ParseIP(host) == nil && !validHost(host)) || err != nil || n == 0 {
		return "", fmt.Errorf("%q: want HOST:PORT, as iop invite printed it", text)
	}
	return net.JoinHostPort(host, port), nil
}

// errPinned: who answered is not the authority that invited.
var errPinned = errors.New("is not the authority of this invitation")

// errLater: the authority says that it cannot answer now.
var errLater = errors.New("the authority cannot answer now")

var errJoinStopped = errors.New("told to stop before this machine had joined; the same line goes on where it was")

// ask asks until there is an answer, a refusal, or nobody for too long.
func (j Join) ask(ctx context.Context, address string, t enrol.Token, r enrol.Request) (a enrol.Answer, err error) {
	body, mac, err := enrol.Seal(r, t.Secret)
	if err != nil {
		return a, err
	}
	transport := &http.Transport{
		Proxy: http.ProxyFromEnvironment, DisableKeepAlives: true, TLSHandshakeTimeout: joinBound,
		TLSClientConfig: &tls.Config{
			MinVersion: tls.VersionTLS13,
			// The CA's hash is all that is known; the host's name proves nothing.
			InsecureSkipVerify: true,
			VerifyConnection:   func(cs tls.ConnectionState) error { return pinned(cs, t.CA) },
		},
	}
	client := &http.Client{Transport: transport, Timeout: joinBound, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	wait := joinWaitFirst
	for attempt := 1; ; attempt++ {
		a, err = askOnce(ctx, client, address, body, mac)
		var op *net.OpError
		again := errors.Is(err, errLater) || errors.As(err, &op) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) || os.IsTimeout(err)
		switch {
		case ctx.Err() != nil && err != nil:
			return a, errJoinStopped
		case err == nil || errors.Is(err, errPinned) || !again || attempt == joinAttempts:
			return a, err
		}
		if j.Tell != nil && attempt == 1 {
			j.Tell(fmt.Sprintf("%v; trying again", err))
		}
		pause := time.NewTimer(wait)
		select {
		case <-pause.C:
		case <-ctx.Done():
			pause.Stop()
			return a, errJoinStopped
		}
		wait = min(2*wait, joinWaitLast)
	}
}

func askOnce(ctx context.Context, client *http.Client, address string, body []byte, mac string) (a enrol.Answer, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "https://"+address+enrol.Path, bytes.NewReader(body))
	if err != nil {
		return a, err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set(enrol.Header, mac)
	resp, err := client.Do(req)
	var u *url.Error
	if errors.As(err, &u) {
		err = u.Err // the address is told once
	}
	switch {
	case errors.Is(err, errPinned):
		return a, fmt.Errorf("%s %w", address, err)
	case err != nil:
		return a, fmt.Errorf("%s does not answer (it listens only while an invitation is open): %w", address, err)
	}
	defer resp.Body.Close() // only read
	b, err := io.ReadAll(io.LimitReader(resp.Body, enrol.MaxAnswer))
	if err != nil {
		return a, fmt.Errorf("%s does not answer: %w", address, err)
	}
	if resp.StatusCode == http.StatusOK {
		if err := json.Unmarshal(b, &a); err != nil {
			return a, fmt.Errorf("%s: its answer is not what an authority gives", address)
		}
		return a, nil
	}
	var e enrol.Error
	message := resp.Status
	if json.Unmarshal(b, &e) == nil && e.Error.Message != "" {
		message = e.Error.Message
	}
	if e.Error.Code == enrol.CodeLater {
		return a, fmt.Errorf("%s: %w: %s", address, errLater, message)
	}
	return a, fmt.Errorf("%s: %s", address, message)
}

// pinned admits a broker of the one CA that the invite line names.
func pinned(cs tls.ConnectionState, ca [sha256.Size]byte) error {
	pool := x509.NewCertPool()
	found := false
	chain := make([][]byte, len(cs.PeerCertificates))
	for i, c := range cs.PeerCertificates {
		chain[i] = c.Raw
		if identity.Fingerprint(c.Raw) == ca {
			pool.AddCert(c)
			found = true
		}
	}
	if !found {
		return fmt.Errorf("%w: its CA is another", errPinned)
	}
	if _, _, err := identity.VerifyChain(pool, chain, identity.RoleBroker, true); err != nil {
		return fmt.Errorf("%w: %w", errPinned, clocked(err))
	}
	return nil
}

// DefaultJoinFolder is where a machine that joins keeps its keys:
// $XDG_DATA_HOME/iop-node, or ~/.local/share/iop-node.
func DefaultJoinFolder() (Folder, error) {
	f, err := DefaultFolder()
	if err != nil {
		return "", err
	}
	return Folder(filepath.Dir(string(f))).join("iop-node"), nil
}
