package broker

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/iop-fabric/iop/internal/identity"
	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/wire/iopv1"
)

const (
	renewQueue   = "iop-renew" // of the processes that hold the CA's key, one answers
	renewBacklog = 1024        // one for each of a herd of Nodes; who is dropped asks again
	// renewPause is how long a Node waits between two requests; a third of a
	// certificate's life is left for them.
	renewPause = 10 * time.Second
	maxRenewed = 8192 // Nodes that asked within renewPause
	// tellPause is how often a session is told of the roots: a word may be lost.
	tellPause = 5 * time.Minute
)

// errNotRenewed is all that a Node is told; the log says more.
var errNotRenewed = errors.New("the certificate is not renewed: the authority's log says why")

// renewals answers Nodes that ask for a new certificate, or for another nkey, over their
// session (B8), and tells all of them when the CA is exchanged. It runs where the CA's
// key is, and nowhere else.
type renewals struct {
	a *authority
	e *enrolment
	s *service

	// The worker's alone: who asked within renewPause, and in which order.
	asked map[memberID]struct{}
	order []asking

	// The heartbeats' alone: what each node's session was last told of the roots.
	told map[memberID]telling
}

type asking struct {
	who memberID
	at  time.Time
}

type telling struct {
	gen   uint64
	roots identity.Trust
	at    time.Time
}

func newRenewals(a *authority, e *enrolment, s *service) *renewals {
	return &renewals{a: a, e: e, s: s, asked: map[memberID]struct{}{}, told: map[memberID]telling{}}
}

// renew begins to answer and to tell; the service's end ends it.
func (e *enrolment) renew(s *service) error {
	r := newRenewals(e.a, e, s)
	in := make(chan *nats.Msg, renewBacklog)
	if _, err := s.fabric.QueueSubscribe(subjects.UpEverywhere(subjects.Renew), renewQueue, s.spoken(newPace(renewPause), into(in))); err != nil {
		return fmt.Errorf("broker: subscribe renewals: %w", err)
	}
	s.workers.Go(func() { s.serve(in, r.answer) })
	if _, err := s.fabric.Subscribe(subjects.UpEverywhere(subjects.Heartbeat), r.tell); err != nil {
		return fmt.Errorf("broker: subscribe renewals: %w", err)
	}
	return nil
}

// tell tells a session that is heard which roots there are, once the CA was ever
// exchanged. A word may be lost, so it is said again now and then.
func (r *renewals) tell(m *nats.Msg) {
	roots := r.e.signing.Load().roots
	up, err := subjects.ParseUp(m.Subject)
	if err != nil || roots.Bundle() == nil {
		return
	}
	id := memberID{Edge: up.Session.Edge, Role: identity.RoleNode, Name: up.Session.Node}
	now := r.a.now()
	if was := r.told[id]; was.gen == up.Session.Gen && was.roots.SameAs(roots) && now.Sub(was.at) < tellPause {
		return
	}
	r.told[id] = telling{up.Session.Gen, roots, now}
	r.say(up.Session, &iopv1.RenewResponse{Trust: roots.Bundle()})
}

func (r *renewals) say(session subjects.Session, resp *iopv1.RenewResponse) {
	data, err := resp.MarshalVT()
	if err == nil {
		err = r.s.fabric.Publish(session.Down(subjects.Renew, ""), data)
	}
	if err != nil {
		r.a.log.Warn(eventFault, slog.String("operation", "renewal"), slog.String("error", err.Error()))
	}
}

func (r *renewals) answer(m *nats.Msg) {
	up, err := subjects.ParseUp(m.Subject)
	if err != nil {
		return
	}
	id := memberID{Edge: up.Session.Edge, Role: identity.RoleNode, Name: up.Session.Node}
	if !r.allow(id, r.a.now()) {
		r.a.metrics.dropped.Inc()
		return
	}
	var req iopv1.RenewRequest
	if req.UnmarshalVT(m.Data) != nil {
		r.a.metrics.dropped.Inc()
		return
	}
	resp := &iopv1.RenewResponse{Nonce: req.GetNonce(), Trust: r.e.signing.Load().roots.Bundle()}
	outcome := renewSigned
	switch next := req.GetNewNkey(); next {
	case "":
		var until time.Time
		if resp.CertificateChain, until, err = r.sign(up.Session, &req); err == nil {
			r.a.log.Info(eventRenewed, slog.String("edge", id.Edge), slog.String("name", id.Name), slog.Time("until", until))
		}
	default:
		if err = r.register(up.Session, &req); err == nil {
			resp.NewNkey = next
			r.a.log.Info(eventNKey, slog.String("edge", id.Edge), slog.String("name", id.Name), slog.String("nkey", next), slog.Bool("taken", false))
		}
	}
	if err != nil {
		resp.Reason, outcome = errNotRenewed.Error(), renewRefused
		r.a.log.Warn(eventNotRenewed, slog.String("edge", id.Edge), slog.String("name", id.Name), slog.String("reason", err.Error()))
	}
	r.a.metrics.renewals.WithLabelValues(outcome).Inc()
	r.say(up.Session, resp)
}

// allow bounds what one Node may cost, whatever it sends. Who has waited long enough
// is at the front, so each is looked at once.
func (r *renewals) allow(id memberID, now time.Time) bool {
	for len(r.order) > 0 && now.Sub(r.order[0].at) >= renewPause {
		delete(r.asked, r.order[0].who)
		r.order = r.order[1:]
	}
	if _, again := r.asked[id]; again || len(r.asked) >= maxRenewed {
		return false
	}
	r.asked[id] = struct{}{}
	r.order = append(r.order, asking{id, now})
	return true
}

// proved checks a request: of the node's newest session alone, proved by its
// certificate and by the nkey that session was admitted with, which is still
// registered and not revoked.
func (r *renewals) proved(ctx context.Context, session subjects.Session, req *iopv1.RenewRequest) (id identity.ID, leaf *x509.Certificate, nkey string, err error) {
	record, err := r.s.generations.Current(ctx, session)
	if err != nil {
		return id, nil, "", err
	}
	m, found, err := r.s.members.Get(ctx, memberID{Edge: session.Edge, Role: identity.RoleNode, Name: session.Node})
	switch {
	case err != nil:
		return id, nil, "", err
	case !found, m.Revoked:
		return id, nil, "", errors.New("the node is revoked, or not registered")
	case !slices.Contains(m.NKeys, record.NKey):
		return id, nil, "", errors.New("the session's nkey is not registered any more")
	}
	trust := r.a.certs.Load().trust
	id, leaf, err = identity.VerifyRenew(trust.pool, record.NKey, session.Edge, session.Node, session.Gen, req)
	if err == nil && id.TrustDomain != trust.domain {
		err = errors.New("renewal: certificate of another trust domain")
	}
	return id, leaf, record.NKey, err
}

// register registers another nkey of the Node's own beside the one of its session.
func (r *renewals) register(session subjects.Session, req *iopv1.RenewRequest) error {
	ctx, cancel := context.WithTimeout(r.s.work, operationBound)
	defer cancel()
	id, _, nkey, err := r.proved(ctx, session, req)
	if err != nil {
		return err
	}
	return r.s.members.Replace(ctx, memberID{Edge: id.Edge, Role: id.Role, Name: id.Name}, nkey, req.GetNewNkey())
}

// sign signs the Node's own name and key anew, in the last third of its certificate's
// life, or where that is of a root that does not sign any more.
func (r *renewals) sign(session subjects.Session, req *iopv1.RenewRequest) (chain [][]byte, until time.Time, err error) {
	ctx, cancel := context.WithTimeout(r.s.work, operationBound)
	defer cancel()
	id, leaf, _, err := r.proved(ctx, session, req)
	ca := r.e.signing.Load().ca
	switch {
	case err != nil:
		return nil, until, err
	case r.a.now().Before(identity.RenewalDue(leaf)) && identity.IssuerOf(leaf) == identity.RootOf(ca.Certificate()):
		return nil, until, errors.New("renewal: the certificate is good for more than a third of its life yet")
	}
	der, err := ca.Sign(leaf.PublicKey, id, nil, nodeCertificateLife)
	if err != nil {
		return nil, until, err
	}
	chain = ca.Chain(der)
	if _, leaf, err = identity.VerifyChain(ca.Pool(), chain, identity.RoleNode, false); err != nil {
		return nil, until, err
	}
	return chain, leaf.NotAfter, nil
}
