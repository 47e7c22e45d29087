package broker

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"log/slog"
	"maps"
	"mime"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/net/netutil"

	"github.com/iop-fabric/iop/broker/enrol"
	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/identity"
	"github.com/iop-fabric/iop/internal/secret"
)

// Bounds of the enrolment listener: strangers can reach it.
const (
	enrolConnections = 64
	enrolRead        = 10 * time.Second // for a whole request
	enrolWrite       = 20 * time.Second
	enrolHeader      = 8 << 10
	enrolRate        = 5.0  // requests a second, of all
	enrolBurst       = 20.0 // at once
	// refusalTime is how long every refusal takes, so that none tells by its time
	// what another does not.
	refusalTime = 300 * time.Millisecond
	recountWait = 5 * time.Second // after the store did not answer
	// nodeCertificateLife is that of the certificates that are signed here.
	nodeCertificateLife = 365 * 24 * time.Hour
)

// What an operator asked for cannot be done.
var (
	ErrNoEnrolment       = errors.New("nobody is invited here: enrolment is not set in the section broker or service of its configuration")
	ErrNameTaken         = errors.New("a machine of that name is registered already: choose another name, or revoke it first")
	ErrUnknownInvitation = errors.New("no invitation of that name is open")
)

// errHost: whoever joined would refuse the broker.
var errHost = errors.New("the broker's certificate is not good for the host that machines would dial: set broker.enrolment.url, or broker_urls for others")

// Invitation is one invitation, as an operator is told.
type Invitation struct {
	Edge, Name string
	State      enrol.State
	Created    time.Time
	Expires    time.Time
	Used       time.Time // zero: not
}

// Line is what an invited machine is told.
type Line struct {
	Invitation
	Dial       string        // host:port of the enrolment listener
	Token      secret.String // see enrol.Token
	BrokerURLs []string      // what it will dial then
}

// ErrUnknownLeaf: enrolment.leaves names no such leaf.
var ErrUnknownLeaf = errors.New("broker.enrolment.leaves names no such leaf")

// LeafURLs are what machines of a leaf's site dial, as the configuration says.
func (a *authority) LeafURLs(leaf string) ([]string, error) {
	if a.enrolment == nil {
		return nil, ErrNoEnrolment
	}
	if url, ok := a.enrolment.cfg.Leaves[leaf]; ok {
		return []string{url}, nil
	}
	known := slices.Sorted(maps.Keys(a.enrolment.cfg.Leaves))
	if len(known) == 0 {
		return nil, fmt.Errorf("%s: %w: it names none", leaf, ErrUnknownLeaf)
	}
	return nil, fmt.Errorf("%s: %w: it names %s", leaf, ErrUnknownLeaf, strings.Join(known, ", "))
}

// enrolment lets invited machines in (B11). Its loop alone opens and closes the
// listener.
type enrolment struct {
	a     *authority
	cfg   configs.Enrolment
	host  string
	limit limiter
	// signing is swapped as a whole when the CA is exchanged.
	signing atomic.Pointer[signing]

	asks    chan openAsk
	recount chan struct{} // one place: what is open may have changed

	// Set by start.
	invitations bucket
	members     members
	brokerURLs  []string
}

// signing is what certificates are signed with, and what a newcomer is told of it.
type signing struct {
	ca    *identity.CA
	roots identity.Trust
	// pin is the root that an invite line names: while the CA is exchanged the oldest
	// one that the broker can still be known by, since from it the way leads to the newer.
	pin *x509.Certificate
}

// openAsk wants the listener open until a time.
type openAsk struct {
	until time.Time
	reply chan opened // one place: the loop never waits
}

type opened struct {
	addr net.Addr
	err  error
}

// knows reports whether a root of that fingerprint is trusted still.
func (s *signing) knows(fingerprint []byte) bool {
	return slices.ContainsFunc(s.roots.Roots(), func(c *x509.Certificate) bool {
		sum := identity.Fingerprint(c.Raw)
		return bytes.Equal(sum[:], fingerprint)
	})
}

// newEnrolment reads the CA and checks that the broker's own certificate is of it:
// that is what a newcomer knows it by.
func newEnrolment(a *authority) (*enrolment, error) {
	e := &enrolment{a: a, cfg: *a.cfg.Enrolment, asks: make(chan openAsk), recount: make(chan struct{}, 1)}
	if err := checkMemberID(e.id("node")); err != nil {
		return nil, fmt.Errorf("broker: enrolment: %w", err)
	}
	if e.cfg.Listen == "" {
		e.cfg.Listen = ":" + configs.DefaultEnrolPort
	}
	if e.host, _ = e.cfg.HostPort(); e.host == "" {
		return nil, errors.New("broker: enrolment: url is empty: it names the host that machines dial")
	}
	s, err := e.load()
	if err != nil {
		return nil, err
	}
	e.signing.Store(s)
	return e, nil
}

// load reads the CA, and compares the certificate that serves, or is to, with it.
func (e *enrolment) load() (s *signing, err error) {
	s = &signing{}
	if s.ca, err = identity.LoadCAFiles(e.cfg.CACertificate, e.cfg.CAKey); err != nil {
		return nil, fmt.Errorf("broker: enrolment: %w", err)
	}
	if s.roots, err = identity.LoadTrust(e.cfg.CACertificate); err != nil {
		return nil, fmt.Errorf("broker: enrolment: %w", err)
	}
	if d := s.ca.TrustDomain(); d != "" && d != e.a.cfg.TrustDomain {
		return nil, fmt.Errorf("broker: enrolment: %s is the CA of trust domain %q, trust_domain is %q", e.cfg.CACertificate, d, e.a.cfg.TrustDomain)
	}
	cert, err := identity.LoadCertificate(e.a.cfg.TLS.Certificate, e.a.cfg.TLS.Key)
	if err != nil {
		return nil, fmt.Errorf("broker: tls: %w", err)
	}
	for _, root := range s.roots.Roots() {
		pool := x509.NewCertPool()
		pool.AddCert(root)
		_, _, fails := identity.VerifyChain(pool, cert.Chain, e.a.role, e.a.role == identity.RoleBroker)
		switch {
		case fails != nil:
			err = fails
		case s.pin == nil || root.NotBefore.Before(s.pin.NotBefore):
			s.pin = root
		}
	}
	if s.pin == nil {
		return nil, fmt.Errorf("broker: enrolment: %s is not of the CA in %s, which is all that a newcomer trusts: %w",
			e.a.cfg.TLS.Certificate, e.cfg.CACertificate, err)
	}
	return s, nil
}

func (e *enrolment) id(name string) memberID {
	return memberID{Edge: e.cfg.Edge, Role: identity.RoleNode, Name: name}
}

// start begins to listen whenever there is somebody to listen for; stop ends it.
func (e *enrolment) start(s *service, url string) (stop func()) {
	e.invitations, e.members, e.brokerURLs = s.invitations, s.members, e.cfg.BrokerURLs
	if len(e.brokerURLs) == 0 {
		_, port, _ := net.SplitHostPort(strings.TrimPrefix(url, "tls://")) // our own listener's
		e.brokerURLs = []string{"tls://" + net.JoinHostPort(e.host, port)}
	}
	ctx, cancel := context.WithCancel(s.ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		e.run(ctx)
	}()
	return func() { cancel(); <-done }
}

// run is the loop.
func (e *enrolment) run(ctx context.Context) {
	l := &enrolListener{e: e}
	defer l.close()
	timer := time.NewTimer(0) // reads at once what an earlier process has left open
	defer timer.Stop()
	var until time.Time
	for {
		select {
		case <-ctx.Done():
			return
		case ask := <-e.asks:
			err := l.open(ctx)
			if err == nil && ask.until.After(until) {
				until = ask.until
			}
			ask.reply <- opened{l.addr, err}
		case <-e.recount:
			until = e.latest(ctx, until)
		case <-timer.C:
			until = e.latest(ctx, until)
		case <-l.done: // nobody closed it
			l.server, l.done = nil, nil
			e.a.log.Warn(eventFault, slog.String("operation", "enrolment listener"), slog.String("error", "it ended"))
			timer.Reset(recountWait)
			continue
		}
		now := e.a.now()
		wait := until.Sub(now)
		if wait <= 0 {
			l.close()
			timer.Stop()
			continue
		}
		if err := l.open(ctx); err != nil {
			e.a.log.Warn(eventFault, slog.String("operation", "enrolment listener"), slog.String("error", err.Error()))
			wait = min(wait, recountWait)
		}
		timer.Reset(wait)
	}
}

// latest is until when something is answered; where the store cannot tell, a
// little longer than was known.
func (e *enrolment) latest(ctx context.Context, known time.Time) (until time.Time) {
	now := e.a.now()
	all, err := e.list(ctx)
	if err != nil {
		if ctx.Err() == nil {
			e.a.log.Warn(eventFault, slog.String("operation", "invitations"), slog.String("error", err.Error()))
		}
		if again := now.Add(recountWait); known.Before(again) {
			return again
		}
		return known
	}
	for _, i := range all {
		if at := i.record.Until(now); at.After(until) {
			until = at
		}
	}
	return until
}

func (e *enrolment) changed() {
	select {
	case e.recount <- struct{}{}:
	default: // it is known already
	}
}

// enrolListenNamed is what names the listener's address.
func (a *authority) enrolListenNamed() string {
	if a.role == identity.RoleService {
		return "service.enrolment.listen"
	}
	return "broker.enrolment.listen, or --enrol-listen,"
}

// enrolListener is the HTTPS listener, open or not. The loop owns it.
type enrolListener struct {
	e      *enrolment
	addr   net.Addr // the last one: a port that was picked stays
	server *http.Server
	done   chan struct{} // closed when it has ended; nil where there is none
}

func (l *enrolListener) open(ctx context.Context) error {
	if l.server != nil {
		return nil
	}
	listen := l.e.cfg.Listen
	if l.addr != nil {
		listen = l.addr.String()
	}
	tcp, err := (&net.ListenConfig{}).Listen(ctx, "tcp", listen)
	if err != nil {
		return fmt.Errorf("broker: cannot listen on %s (%s names another address): %w", listen, l.e.a.enrolListenNamed(), reason(err))
	}
	l.addr = tcp.Addr()
	var http1 http.Protocols
	http1.SetHTTP1(true)
	l.server = &http.Server{
		Handler: http.HandlerFunc(l.e.serve), TLSConfig: l.e.tlsConfig(), Protocols: &http1,
		ReadHeaderTimeout: enrolRead, ReadTimeout: enrolRead, WriteTimeout: enrolWrite, MaxHeaderBytes: enrolHeader,
		ErrorLog: log.New(io.Discard, "", 0), // what strangers do at the door is counted, not told
	}
	l.server.SetKeepAlivesEnabled(false) // one request each: places are few
	l.done = make(chan struct{})
	go func(s *http.Server, done chan struct{}) {
		defer close(done)
		_ = s.ServeTLS(netutil.LimitListener(tcp, enrolConnections), "", "") // it ends by close alone
	}(l.server, l.done)
	l.e.a.log.Info(eventEnrolOpen, slog.String("listen", tcp.Addr().String()))
	return nil
}

// close ends it, with what it is answering.
func (l *enrolListener) close() {
	if l.server == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), operationBound)
	defer cancel()
	if l.server.Shutdown(ctx) != nil {
		_ = l.server.Close() // who has not asked by now gets no answer
	}
	<-l.done
	l.server, l.done = nil, nil
	l.e.a.log.Info(eventEnrolShut)
}

// tlsConfig shows a broker's certificate as it is now, and the CA's with it: a
// newcomer knows the CA's hash alone.
func (e *enrolment) tlsConfig() *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13, SessionTicketsDisabled: true,
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
			by := e.signing.Load()
			c, err := e.shown(by)
			if err != nil {
				return nil, err
			}
			c.Certificate = c.Certificate[:len(c.Certificate):len(c.Certificate)]
			for _, root := range by.roots.Roots() {
				c.Certificate = append(c.Certificate, root.Raw)
			}
			return &c, nil
		},
	}
}

// shown is the certificate for a newcomer: the broker's own. That of a service
// beside a server is a client's, so what holds the CA's key signs itself one; for
// each handshake anew, since they are few and none can then expire.
func (e *enrolment) shown(by *signing) (tls.Certificate, error) {
	if e.a.role == identity.RoleBroker {
		return e.a.certs.Load().tls.Certificates[0], nil
	}
	id := identity.ID{TrustDomain: e.a.cfg.TrustDomain, Edge: "-", Role: identity.RoleBroker, Name: e.a.cfg.Name}
	c, err := by.ca.Issue(id, []string{e.host}, time.Hour)
	if err != nil {
		return tls.Certificate{}, err
	}
	return c.TLS(), nil
}

// ---- what an operator asks for ----

type listed struct {
	name   string
	record enrol.Invitation
}

func (e *enrolment) list(ctx context.Context) ([]listed, error) {
	ctx, cancel := context.WithTimeout(ctx, operationBound)
	defer cancel()
	keys, err := listKeys(ctx, e.invitations, e.cfg.Edge+"."+string(identity.RoleNode)+".*")
	if err != nil {
		return nil, err
	}
	var out []listed
	for _, key := range keys {
		id, ok := parseMemberKey(key)
		if !ok {
			continue
		}
		var i enrol.Invitation
		err := change(ctx, e.invitations, key, "invitation", func(v *enrol.Invitation, _ bool) (bool, error) { i = *v; return false, nil })
		if err != nil {
			return nil, err
		}
		out = append(out, listed{id.Name, i})
	}
	return out, nil
}

func (e *enrolment) told(name string, i enrol.Invitation) Invitation {
	out := Invitation{Edge: e.cfg.Edge, Name: name, State: i.State(e.a.now()), Created: i.Created, Expires: i.Expires}
	if i.Use != nil { // that its node was revoked later does not undo it; it is answered no more, though
		out.State, out.Used = enrol.Used, i.Use.At
	}
	if out.State == enrol.Open && len(i.CA) > 0 && !e.signing.Load().knows(i.CA) {
		out.State = enrol.OldCA
	}
	return out
}

// invite makes an invitation in the place of one of the same name, and opens the
// listener.
func (e *enrolment) invite(ctx context.Context, name string, life time.Duration, brokerURLs []string) (l Line, err error) {
	ctx, cancel := context.WithTimeout(ctx, operationBound)
	defer cancel()
	var key [enrol.SecretSize]byte
	rand.Read(key[:]) // never fails
	t := enrol.Token{Name: name, Secret: secret.New(string(key[:])), CA: identity.Fingerprint(e.signing.Load().pin.Raw)}
	made, err := enrol.New(name, t.Secret, e.a.now(), life)
	if err != nil {
		return l, err
	}
	made.BrokerURLs, made.CA = brokerURLs, t.CA[:]
	if len(brokerURLs) == 0 && len(e.cfg.BrokerURLs) == 0 && e.a.certs.Load().leaf.VerifyHostname(e.host) != nil {
		return l, fmt.Errorf("broker: %s: %w", e.host, errHost)
	}
	m, _, err := e.members.Get(ctx, e.id(name))
	switch {
	case err != nil:
		return l, err
	case m.enrols("", made.Created) != nil:
		return l, fmt.Errorf("%s: %w", name, ErrNameTaken)
	}
	err = change(ctx, e.invitations, e.id(name).key(), "invitation", func(v *enrol.Invitation, _ bool) (bool, error) { *v = made; return true, nil })
	if err != nil {
		return l, err
	}
	ask := openAsk{until: made.Expires, reply: make(chan opened, 1)}
	var at opened
	select {
	case e.asks <- ask:
		at = <-ask.reply
	case <-ctx.Done():
		at.err = ErrNotReady
	}
	if at.err != nil {
		_, err := e.cancel(ctx, name)
		return l, errors.Join(at.err, err)
	}
	_, port := e.cfg.HostPort()
	if port == "" {
		_, port, _ = net.SplitHostPort(at.addr.String()) // our own listener's
	}
	e.a.log.Info(eventInvited, slog.String("edge", e.cfg.Edge), slog.String("name", name), slog.Time("expires", made.Expires))
	return Line{
		Invitation: e.told(name, made), Dial: net.JoinHostPort(e.host, port),
		Token: secret.New(t.Text()), BrokerURLs: e.urlsOf(made),
	}, nil
}

// urlsOf are what the machine of an invitation will dial.
func (e *enrolment) urlsOf(i enrol.Invitation) []string {
	if len(i.BrokerURLs) > 0 {
		return i.BrokerURLs
	}
	return e.brokerURLs
}

// cancel withdraws what there is of a name; false: there was nothing.
func (e *enrolment) cancel(ctx context.Context, name string) (cancelled bool, err error) {
	err = change(ctx, e.invitations, e.id(name).key(), "invitation", func(v *enrol.Invitation, found bool) (bool, error) {
		if cancelled = false; found {
			*v, cancelled = v.Cancel(e.a.now())
		}
		return cancelled, nil
	})
	if cancelled && err == nil {
		e.a.log.Info(eventWithdrawn, slog.String("edge", e.cfg.Edge), slog.String("name", name))
		e.changed()
	}
	return cancelled && err == nil, err
}

// Invite lets one machine join as a node of that name, within life. It will dial
// brokerURLs; none are those of the configuration.
func (a *authority) Invite(ctx context.Context, name string, life time.Duration, brokerURLs ...string) (Line, error) {
	e, err := a.enrols()
	if err != nil {
		return Line{}, err
	}
	return e.invite(ctx, name, life, brokerURLs)
}

// Invitations lists those there are, by name; the last of each.
func (a *authority) Invitations(ctx context.Context) ([]Invitation, error) {
	e, err := a.enrols()
	if err != nil {
		return nil, err
	}
	all, err := e.list(ctx)
	out := make([]Invitation, len(all))
	for i, l := range all {
		out[i] = e.told(l.name, l.record)
	}
	return out, err
}

// CancelInvitation withdraws one that is open.
func (a *authority) CancelInvitation(ctx context.Context, name string) error {
	e, err := a.enrols()
	if err != nil {
		return err
	}
	if err := checkMemberID(e.id(name)); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, operationBound)
	defer cancel()
	cancelled, err := e.cancel(ctx, name)
	if err == nil && !cancelled {
		err = fmt.Errorf("%s: %w", name, ErrUnknownInvitation)
	}
	return err
}

func (a *authority) enrols() (*enrolment, error) {
	switch {
	case a.enrolment == nil:
		return nil, ErrNoEnrolment
	case !a.isReady():
		return nil, ErrNotReady
	}
	return a.enrolment, nil
}

// ---- what a machine asks for ----

// serve answers a machine.
func (e *enrolment) serve(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	h.Set("Cache-Control", "no-store")
	if !e.limit.allow(e.a.now()) {
		e.count(enrol.Limited)
		h.Set("Retry-After", "1")
		e.refuse(w, http.StatusTooManyRequests, enrol.CodeLater, "too many ask at once")
		return
	}
	late := time.NewTimer(refusalTime)
	defer late.Stop()
	switch media, _, err := mime.ParseMediaType(r.Header.Get("Content-Type")); {
	case r.URL.Path != enrol.Path:
		e.refuse(w, http.StatusNotFound, enrol.CodePath, "machines join at POST "+enrol.Path)
		return
	case r.Method != http.MethodPost:
		h.Set("Allow", http.MethodPost)
		e.refuse(w, http.StatusMethodNotAllowed, enrol.CodePath, "machines join at POST "+enrol.Path)
		return
	case err != nil || media != "application/json":
		e.invalid(w, http.StatusUnsupportedMediaType, "want Content-Type: application/json")
		return
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, enrol.MaxRequest))
	var large *http.MaxBytesError
	switch {
	case errors.As(err, &large):
		e.invalid(w, http.StatusRequestEntityTooLarge, fmt.Sprintf("the request is larger than %d bytes", enrol.MaxRequest))
		return
	case err != nil:
		e.invalid(w, http.StatusBadRequest, "the request did not come whole")
		return
	}
	req, mac, err := enrol.Unseal(body, r.Header.Get(enrol.Header))
	if err != nil {
		e.invalid(w, http.StatusBadRequest, err.Error())
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), operationBound)
	defer cancel()
	answer, out, err := e.admit(ctx, req, body, mac)
	e.count(out)
	switch out {
	case enrol.Accepted, enrol.Repeated:
		e.a.log.Info(eventEnrolled, slog.String("edge", e.cfg.Edge), slog.String("name", req.Name), slog.String("outcome", string(out)))
		e.write(w, http.StatusOK, answer)
		return
	case enrol.Failed:
		e.a.log.Warn(eventFault, slog.String("operation", "enrolment"), slog.String("error", err.Error()))
		h.Set("Retry-After", "2")
		e.refuse(w, http.StatusServiceUnavailable, enrol.CodeLater, "the authority cannot look it up at the moment")
		return
	case enrol.UnknownName: // a name that a stranger made up is not worth a line of its own choosing
		e.a.log.Warn(eventNotJoined, slog.String("edge", e.cfg.Edge), slog.String("reason", string(out)))
	default:
		e.a.log.Warn(eventNotJoined, slog.String("edge", e.cfg.Edge), slog.String("name", req.Name), slog.String("reason", string(out)))
	}
	select {
	case <-late.C:
	case <-r.Context().Done():
	}
	e.refuse(w, http.StatusForbidden, enrol.CodeRefused, "the invitation is not good: ask for a new line (iop invite NAME)")
}

// admit judges, writes down what it decided, and only then signs (I2 of enrol).
func (e *enrolment) admit(ctx context.Context, r enrol.Request, body, mac []byte) (a enrol.Answer, out enrol.Outcome, err error) {
	id, now := e.id(r.Name), e.a.now()
	var invited time.Time
	var urls []string
	err = change(ctx, e.invitations, id.key(), "invitation", func(v *enrol.Invitation, found bool) (changed bool, err error) {
		*v, changed, out = v.Judge(found, now, r, body, mac)
		invited, urls = v.Created, e.urlsOf(*v)
		if out != enrol.Accepted {
			return changed, nil
		}
		// A name that is taken uses no invitation up.
		m, _, err := e.members.Get(ctx, id)
		if why := m.enrols(r.NKey, invited); err == nil && why != nil {
			out, changed = outcomeOf(why), false
		}
		return changed, err
	})
	if err != nil {
		return a, enrol.Failed, err
	}
	if out == enrol.Accepted || out == enrol.WrongSecret { // what is open may be less now
		e.changed()
	}
	if out != enrol.Accepted && out != enrol.Repeated {
		return a, out, nil
	}
	by := e.signing.Load()
	if err := e.members.Enrol(ctx, id, r.NKey, identity.RootOf(by.ca.Certificate()), invited); err != nil {
		return a, outcomeOf(err), err
	}
	der, err := by.ca.Sign(r.Key(), identity.ID{TrustDomain: e.a.cfg.TrustDomain, Edge: id.Edge, Role: id.Role, Name: id.Name}, nil, nodeCertificateLife)
	if err != nil {
		return a, enrol.Failed, err
	}
	return enrol.Answer{
		Certificate: string(identity.EncodeChain(by.ca.Chain(der))), CA: string(by.roots.PEM()),
		Issuers: []string{e.a.issuer.Load().Public()}, BrokerURLs: urls,
		Edge: id.Edge, TrustDomain: e.a.cfg.TrustDomain,
	}, out, nil
}

func outcomeOf(err error) enrol.Outcome {
	switch {
	case errors.Is(err, errTaken):
		return enrol.NameTaken
	case errors.Is(err, errRevoked):
		return enrol.MemberRevoked
	}
	return enrol.Failed
}

func (e *enrolment) count(out enrol.Outcome) {
	e.a.metrics.enrolments.WithLabelValues(string(out)).Inc()
}

func (e *enrolment) invalid(w http.ResponseWriter, status int, message string) {
	e.count(enrol.Invalid)
	e.refuse(w, status, enrol.CodeInvalid, message)
}

func (e *enrolment) refuse(w http.ResponseWriter, status int, code, message string) {
	var v enrol.Error
	v.Error.Code, v.Error.Message = code, message
	e.write(w, status, v)
}

func (e *enrolment) write(w http.ResponseWriter, status int, v any) {
	b, err := json.Marshal(v)
	if err != nil {
		panic("BUG: broker: an answer cannot be written as JSON: " + err.Error())
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(len(b)))
	w.WriteHeader(status)
	_, _ = w.Write(b) // who has left asks again
}

// limiter is one bucket for all who ask: they have proved nothing yet, so there is
// nobody to tell them apart by.
type limiter struct {
	mu     sync.Mutex
	spent  float64
	before time.Time
}

func (l *limiter) allow(now time.Time) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.spent = max(0, l.spent-max(0, now.Sub(l.before).Seconds())*enrolRate)
	l.before = now
	if l.spent >= enrolBurst {
		return false
	}
	l.spent++
	return true
}
