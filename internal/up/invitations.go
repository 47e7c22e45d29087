package up

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/iop-fabric/iop/broker"
	"github.com/iop-fabric/iop/broker/enrol"
	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/edge/admin"
	"github.com/iop-fabric/iop/internal/adminapi"
	"github.com/iop-fabric/iop/internal/identity"
	"github.com/iop-fabric/iop/wire"
)

// Bounds of a request of the admin API.
const (
	maxInvite     = 4 << 10
	maxBrokerURLs = 16 // for one machine
)

// authority is the broker, or the service beside a server, for an operator.
type authority interface {
	Invite(ctx context.Context, name string, life time.Duration, brokerURLs ...string) (broker.Line, error)
	LeafURLs(leaf string) ([]string, error)
	Invitations(ctx context.Context) ([]broker.Invitation, error)
	CancelInvitation(ctx context.Context, name string) error
	Revoke(ctx context.Context, edge, role, name string) error
	Backup(ctx context.Context, w io.Writer) error
	Keys(ctx context.Context) (broker.Keys, error)
}

// exchanger takes a step of an exchange of a process's own keys; nil: they are files of
// another host.
type exchanger func(ctx context.Context, what, step string, force bool) (key string, err error)

// authorityPaths are the paths of the admin API that the broker answers, of the
// members of edge. own is this very process's node, if it has one.
func authorityPaths(b authority, edge, own string, exchange exchanger) map[string]http.Handler {
	a := authorityAPI{b, edge, own, exchange}
	return map[string]http.Handler{
		"/api/v1/invitations":                  http.HandlerFunc(a.invitations),
		"/api/v1/invitations/{name}":           http.HandlerFunc(a.invitation),
		"/api/v1/members/{role}/{name}/revoke": http.HandlerFunc(a.revoke),
		"/api/v1/backup":                       http.HandlerFunc(a.backup),
		"/api/v1/keys":                         http.HandlerFunc(a.keys),
		"/api/v1/keys/{what}/{step}":           http.HandlerFunc(a.step),
	}
}

type authorityAPI struct {
	b         authority
	edge, own string
	exchange  exchanger
}

func (a authorityAPI) invitations(w http.ResponseWriter, r *http.Request) {
	switch r.Method {
	case http.MethodGet, http.MethodHead:
		all, err := a.b.Invitations(r.Context())
		if err != nil {
			fail(w, err)
			return
		}
		out := []adminapi.Invitation{}
		for _, i := range all {
			out = append(out, told(i))
		}
		admin.Write(w, http.StatusOK, map[string]any{"invitations": out})
	case http.MethodPost:
		a.invite(w, r)
	default:
		notAllowed(w, "GET, HEAD, POST")
	}
}

func (a authorityAPI) invite(w http.ResponseWriter, r *http.Request) {
	var in adminapi.Invite
	d := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxInvite))
	d.DisallowUnknownFields()
	if err := d.Decode(&in); err != nil || d.Decode(&struct{}{}) != io.EOF {
		admin.Refuse(w, http.StatusBadRequest, "invalid_request", `want {"name":"gpu1"}, "expires_in_ms" where 24 hours will not do, and "broker_urls" or "leaf" where it is to dial others`)
		return
	}
	life := time.Duration(in.ExpiresInMs) * time.Millisecond
	switch {
	case in.ExpiresInMs == 0:
		life = enrol.DefaultLife
	case in.ExpiresInMs < time.Minute.Milliseconds() || in.ExpiresInMs > enrol.MaxLife.Milliseconds():
		admin.Refuse(w, http.StatusBadRequest, "invalid_request", "an invitation is good for one minute to 30 days")
		return
	}
	if !goodName(w, in.Name) {
		return
	}
	switch {
	case in.Leaf != "" && len(in.BrokerURLs) > 0:
		admin.Refuse(w, http.StatusBadRequest, "invalid_request", "leaf and broker_urls both say what the machine dials: give one of them")
		return
	case len(in.BrokerURLs) > maxBrokerURLs:
		admin.Refuse(w, http.StatusBadRequest, "invalid_request", fmt.Sprintf("broker_urls: at most %d", maxBrokerURLs))
		return
	}
	for _, u := range in.BrokerURLs {
		if err := configs.CheckBrokerURL(u); err != nil {
			admin.Refuse(w, http.StatusBadRequest, "invalid_request", fmt.Sprintf("broker_urls: %.200q: %v", u, err))
			return
		}
	}
	if in.Leaf != "" {
		var err error
		if in.BrokerURLs, err = a.b.LeafURLs(in.Leaf); err != nil {
			fail(w, err)
			return
		}
	}
	l, err := a.b.Invite(r.Context(), in.Name, life, in.BrokerURLs...)
	if err != nil {
		fail(w, err)
		return
	}
	admin.Write(w, http.StatusCreated, adminapi.Invited{
		Invitation: told(l.Invitation), Command: "iop join " + l.Dial + " " + l.Token.Reveal(),
		BrokerURLs: l.BrokerURLs, Warning: onlyHere(l),
	})
}

// onlyHere says so where a line, or what comes after it, leads to this machine
// alone.
func onlyHere(l broker.Line) string {
	for _, raw := range l.BrokerURLs {
		if u, err := url.Parse(raw); err == nil && !isLoopback(u.Hostname()) {
			return ""
		}
	}
	return "the broker listens on this machine alone, so no other machine can join: give it another address (broker.listen; iop up --broker-listen 0.0.0.0:4222) and invite again"
}

func isLoopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || (ip != nil && ip.IsLoopback())
}

func (a authorityAPI) invitation(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodDelete {
		notAllowed(w, "DELETE")
		return
	}
	if name := r.PathValue("name"); goodName(w, name) {
		done(w, a.b.CancelInvitation(r.Context(), name))
	}
}

func (a authorityAPI) revoke(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodPost {
		notAllowed(w, "POST")
		return
	}
	role, name := r.PathValue("role"), r.PathValue("name")
	switch known := role == string(identity.RoleNode) || role == string(identity.RoleEdge) || role == string(identity.RoleLeaf); {
	case !known:
		admin.Refuse(w, http.StatusBadRequest, "invalid_request", "want the role node, edge or leaf")
	case !goodName(w, name):
	case a.edge == "":
		admin.Refuse(w, http.StatusConflict, "no_edge", "this broker serves several edges and invites for none, so whose member is meant cannot be told")
	case role == string(identity.RoleNode) && name == a.own:
		admin.Refuse(w, http.StatusConflict, "own_node", name+" is this process's own node: it goes with the process, and would not come back")
	default:
		done(w, a.b.Revoke(r.Context(), a.edge, role, name))
	}
}

// backup answers with the file itself. It is whole or not begun: what is cut short
// on the way has no end, and is no backup.
func (a authorityAPI) backup(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodGet {
		notAllowed(w, "GET")
		return
	}
	var file bytes.Buffer
	if err := a.b.Backup(r.Context(), &file); err != nil {
		fail(w, err)
		return
	}
	w.Header().Set("Content-Type", "application/x-ndjson")
	w.Header().Set("Content-Length", strconv.Itoa(file.Len()))
	_, _ = file.WriteTo(w) // who has left asks again
}

// keys tells who shows a certificate of which CA, and which issuer signs.
func (a authorityAPI) keys(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		notAllowed(w, "GET, HEAD")
		return
	}
	k, err := a.b.Keys(r.Context())
	if err != nil {
		fail(w, err)
		return
	}
	out := adminapi.Keys{Roots: []adminapi.Root{}, Members: []adminapi.Shown{}, Issuer: k.Issuer, PinnedIssuer: k.Pinned}
	for _, root := range k.Roots {
		out.Roots = append(out.Roots, adminapi.Root(root))
	}
	for _, m := range k.Members {
		out.Members = append(out.Members, adminapi.Shown(m))
	}
	admin.Write(w, http.StatusOK, out)
}

// step takes a step of an exchange.
func (a authorityAPI) step(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodPost {
		notAllowed(w, "POST")
		return
	}
	var in adminapi.Step
	d := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxInvite))
	d.DisallowUnknownFields()
	if err := d.Decode(&in); err != nil || d.Decode(&struct{}{}) != io.EOF {
		admin.Refuse(w, http.StatusBadRequest, "invalid_request", `want {}, or {"force":true}`)
		return
	}
	what, step := r.PathValue("what"), r.PathValue("step")
	if err := CheckExchange(what, step); err != nil {
		admin.Refuse(w, http.StatusBadRequest, "invalid_request", err.Error())
		return
	}
	if a.exchange == nil {
		admin.Refuse(w, http.StatusConflict, "not_here", "the keys of this fabric are files of its authority: take the step there (iop rotate "+what+" "+step+" --out DIR)")
		return
	}
	key, err := a.exchange(r.Context(), what, step, in.Force)
	if err != nil {
		admin.Refuse(w, http.StatusConflict, "not_exchanged", err.Error())
		return
	}
	admin.Write(w, http.StatusOK, adminapi.Stepped{Key: key})
}

func goodName(w http.ResponseWriter, name string) bool {
	err := wire.CheckName(name)
	if err != nil {
		admin.Refuse(w, http.StatusBadRequest, "invalid_request", err.Error())
	}
	return err == nil
}

func notAllowed(w http.ResponseWriter, allow string) {
	w.Header().Set("Allow", allow)
	admin.Refuse(w, http.StatusMethodNotAllowed, "method_not_allowed", "this path takes "+allow)
}

func done(w http.ResponseWriter, err error) {
	if err != nil {
		fail(w, err)
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

// fail answers with what an operator can do something about.
func fail(w http.ResponseWriter, err error) {
	status, code := http.StatusServiceUnavailable, "not_running"
	switch {
	case errors.Is(err, broker.ErrNoEnrolment):
		status, code = http.StatusConflict, "no_enrolment"
	case errors.Is(err, broker.ErrUnknownLeaf):
		status, code = http.StatusNotFound, "unknown_leaf"
	case errors.Is(err, broker.ErrNameTaken):
		status, code = http.StatusConflict, "name_taken"
	case errors.Is(err, broker.ErrUnknownInvitation):
		status, code = http.StatusNotFound, "unknown_invitation"
	case errors.Is(err, broker.ErrConflict):
		status, code = http.StatusConflict, "conflict"
	case errors.Is(err, broker.ErrUnknownMember):
		status, code = http.StatusNotFound, "unknown_member"
	}
	admin.Refuse(w, status, code, strings.TrimPrefix(err.Error(), "broker: "))
}

func told(i broker.Invitation) adminapi.Invitation {
	return adminapi.Invitation{Edge: i.Edge, Name: i.Name, State: string(i.State), Created: i.Created, Expires: i.Expires, Used: i.Used}
}
