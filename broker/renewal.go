package broker

import (
	"context"
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
	renewBacklog = 256         // one for each of a herd of Nodes; who is dropped asks again
	// renewPause is how long a Node waits between two requests; a third of a
	// certificate's life is left for them.
	renewPause = 10 * time.Second
	maxRenewed = 8192 // Nodes that asked within renewPause
)

// errNotRenewed is all that a Node is told; the log says more.
var errNotRenewed = errors.New("the certificate is not renewed: the authority's log says why")

// renewals answers Nodes that ask for a new certificate over their session (B8). It
// runs where the CA's key is, and nowhere else.
type renewals struct {
	a     *authority
	ca    *identity.CA
	s     *service
	asked map[memberID]time.Time // by whom, when; the worker's alone
}

// renew begins to answer; the service's end ends it.
func (e *enrolment) renew(s *service) error {
	r := &renewals{a: e.a, ca: e.ca, s: s, asked: map[memberID]time.Time{}}
	in := make(chan *nats.Msg, renewBacklog)
	if _, err := s.fabric.QueueSubscribe(subjects.UpEverywhere(subjects.Renew), renewQueue, s.spoken(newPace(renewPause), into(in))); err != nil {
		return fmt.Errorf("broker: subscribe renewals: %w", err)
	}
	s.workers.Go(func() { s.serve(in, r.answer) })
	return nil
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
	resp := &iopv1.RenewResponse{Nonce: req.GetNonce()}
	chain, until, err := r.sign(up.Session, &req)
	outcome := renewSigned
	if err != nil {
		resp.Reason, outcome = errNotRenewed.Error(), renewRefused
		r.a.log.Warn(eventNotRenewed, slog.String("edge", id.Edge), slog.String("name", id.Name), slog.String("reason", err.Error()))
	} else {
		resp.CertificateChain = chain
		r.a.log.Info(eventRenewed, slog.String("edge", id.Edge), slog.String("name", id.Name), slog.Time("until", until))
	}
	r.a.metrics.renewals.WithLabelValues(outcome).Inc()
	data, err := resp.MarshalVT()
	if err == nil {
		err = r.s.fabric.Publish(up.Session.Down(subjects.Renew, ""), data)
	}
	if err != nil {
		r.a.log.Warn(eventFault, slog.String("operation", "renewal"), slog.String("error", err.Error()))
	}
}

// allow bounds what one Node may cost, whatever it sends.
func (r *renewals) allow(id memberID, now time.Time) bool {
	for other, at := range r.asked {
		if now.Sub(at) >= renewPause {
			delete(r.asked, other)
		}
	}
	if _, again := r.asked[id]; again || len(r.asked) >= maxRenewed {
		return false
	}
	r.asked[id] = now
	return true
}

// sign signs the Node's own name and key anew: for its newest session alone, proved by
// its certificate and by the nkey that session was admitted with, which is still
// registered and not revoked.
func (r *renewals) sign(session subjects.Session, req *iopv1.RenewRequest) (chain [][]byte, until time.Time, err error) {
	ctx, cancel := context.WithTimeout(r.s.work, operationBound)
	defer cancel()
	record, err := r.s.generations.Current(ctx, session)
	if err != nil {
		return nil, until, err
	}
	m, found, err := r.s.members.Get(ctx, memberID{Edge: session.Edge, Role: identity.RoleNode, Name: session.Node})
	switch {
	case err != nil:
		return nil, until, err
	case !found, m.Revoked:
		return nil, until, errors.New("the node is revoked, or not registered")
	case !slices.Contains(m.NKeys, record.NKey):
		return nil, until, errors.New("the session's nkey is not registered any more")
	}
	trust := r.a.certs.Load().trust
	id, leaf, err := identity.VerifyRenew(trust.pool, record.NKey, session.Edge, session.Node, session.Gen, req)
	switch {
	case err != nil:
		return nil, until, err
	case id.TrustDomain != trust.domain:
		return nil, until, errors.New("renewal: certificate of another trust domain")
	case r.a.now().Before(identity.RenewalDue(leaf)):
		return nil, until, errors.New("renewal: the certificate is good for more than a third of its life yet")
	}
	der, err := r.ca.Sign(leaf.PublicKey, id, nil, nodeCertificateLife)
	if err != nil {
		return nil, until, err
	}
	chain = [][]byte{der}
	if _, leaf, err = identity.VerifyChain(r.ca.Pool(), chain, identity.RoleNode, false); err != nil {
		return nil, until, err
	}
	return chain, leaf.NotAfter, nil
}
