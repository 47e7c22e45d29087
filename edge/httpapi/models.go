package httpapi

import (
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/iop-fabric/iop/wire"
)

// modelObject is OpenAI's model object.
type modelObject struct {
	ID      string `json:"id"`
	Object  string `json:"object"`
	Created int64  `json:"created"`
	OwnedBy string `json:"owned_by"`
}

type modelList struct {
	Object string        `json:"object"`
	Data   []modelObject `json:"data"`
}

func objectOf(m Model) modelObject {
	return modelObject{ID: m.ID, Object: "model", Created: m.Created, OwnedBy: m.OwnedBy}
}

// anthropicModel is Anthropic's model object.
type anthropicModel struct {
	Type        string    `json:"type"`
	ID          string    `json:"id"`
	DisplayName string    `json:"display_name"`
	CreatedAt   time.Time `json:"created_at"`
}

type anthropicList struct {
	Data    []anthropicModel `json:"data"`
	HasMore bool             `json:"has_more"`
	FirstID *string          `json:"first_id"`
	LastID  *string          `json:"last_id"`
}

func anthropicOf(m Model) anthropicModel {
	return anthropicModel{Type: "model", ID: m.ID, DisplayName: m.ID, CreatedAt: time.Unix(m.Created, 0).UTC()}
}

// asksAnthropic: both dialects list models at one path; this header, which
// Anthropic's clients always send, tells them apart.
func asksAnthropic(h http.Header) bool { return len(h["Anthropic-Version"]) > 0 }

// listModels answers GET /v1/models with what the caller's key may name.
func (a *API) listModels(x *exchange, r *http.Request) reason {
	if x.key = a.authenticate(r.Header); x.key == nil {
		return noKey
	}
	allowed := a.modelsOf(x.key)
	if asksAnthropic(r.Header) {
		list, ok := anthropicPage(allowed, r.URL.Query())
		if !ok {
			x.detail = "limit must be a whole number from 1 to 1000"
			return reason(wire.Invalid)
		}
		return x.answer(list)
	}
	list := modelList{Object: "list", Data: make([]modelObject, len(allowed))}
	for i, m := range allowed {
		list.Data[i] = objectOf(m)
	}
	return x.answer(list)
}

// modelsOf are the models on offer that a key may name.
func (a *API) modelsOf(k *keyState) []Model {
	allowed := []Model{}
	for _, m := range a.pool.Models() {
		if k.allows(m.ID) {
			allowed = append(allowed, m)
		}
	}
	return allowed
}

// anthropicPage is the part of the list that limit, after_id and before_id ask
// for. Without a limit it is all of it; an id that is not there bounds nothing.
func anthropicPage(all []Model, q url.Values) (list anthropicList, ok bool) {
	at := func(id string) int { return slices.IndexFunc(all, func(m Model) bool { return m.ID == id }) }
	limit := len(all)
	if s := q.Get("limit"); s != "" {
		n, err := strconv.Atoi(s)
		if err != nil || n < 1 || n > 1000 {
			return list, false
		}
		limit = min(n, limit)
	}
	page := all
	if i := at(q.Get("before_id")); i >= 0 {
		page = page[:i]
		list.HasMore = len(page) > limit
		page = page[max(0, len(page)-limit):]
	} else {
		page = page[at(q.Get("after_id"))+1:]
		list.HasMore = len(page) > limit
		page = page[:min(limit, len(page))]
	}
	list.Data = make([]anthropicModel, len(page))
	for i, m := range page {
		list.Data[i] = anthropicOf(m)
	}
	if len(page) > 0 {
		list.FirstID, list.LastID = &page[0].ID, &page[len(page)-1].ID
	}
	return list, true
}

// getModel answers GET /v1/models/{id}; the id's slashes may be encoded (A44).
// A name that a call may use without its tag may be asked for without it too.
func (a *API) getModel(x *exchange, r *http.Request) reason {
	if x.key = a.authenticate(r.Header); x.key == nil {
		return noKey
	}
	id, ok := modelID(r.URL.EscapedPath())
	if !ok {
		return unknownModel
	}
	if !x.key.allows(id) {
		x.detail = a.modelHint(x.key, id, forbidden)
		return forbidden
	}
	all := a.pool.Models()
	i := slices.IndexFunc(all, func(m Model) bool { return m.ID == id })
	if i < 0 && !strings.Contains(id, ":") {
		i = slices.IndexFunc(all, func(m Model) bool { return m.ID == id+":latest" })
	}
	switch {
	case i < 0:
		x.detail = a.modelHint(x.key, id, unknownModel)
		return unknownModel
	case asksAnthropic(r.Header):
		return x.answer(anthropicOf(all[i]))
	default:
		return x.answer(objectOf(all[i]))
	}
}

// root answers GET and HEAD /, by which some tools look for a living server.
func (a *API) root(x *exchange, _ *http.Request) reason {
	return x.answer(struct {
		Service string `json:"service"`
		API     string `json:"api"`
	}{"iop", "/v1"})
}

func (x *exchange) answer(v any) reason {
	x.writeJSON(http.StatusOK, append(marshal(v), '\n'))
	if x.broken != nil {
		return callerGone
	}
	return ""
}
