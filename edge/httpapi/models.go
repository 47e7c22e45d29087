package httpapi

import (
	"encoding/json"
	"net/http"
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

// listModels answers GET /v1/models with what the caller's key may name.
func (a *API) listModels(x *exchange, r *http.Request) reason {
	if x.key = a.authenticate(r.Header); x.key == nil {
		return noKey
	}
	list := modelList{Object: "list", Data: []modelObject{}}
	for _, m := range a.pool.Models() {
		if x.key.allows(m.ID) {
			list.Data = append(list.Data, objectOf(m))
		}
	}
	return x.answer(list)
}

// getModel answers GET /v1/models/{id}; the id's slashes may be encoded (A44).
func (a *API) getModel(x *exchange, r *http.Request) reason {
	if x.key = a.authenticate(r.Header); x.key == nil {
		return noKey
	}
	id, ok := modelID(r.URL.EscapedPath())
	if !ok {
		return unknownModel
	}
	if !x.key.allows(id) {
		return forbidden
	}
	for _, m := range a.pool.Models() {
		if m.ID == id {
			return x.answer(objectOf(m))
		}
	}
	return unknownModel
}

// root answers GET and HEAD /, by which some tools look for a living server.
func (a *API) root(x *exchange, _ *http.Request) reason {
	return x.answer(struct {
		Service string `json:"service"`
		API     string `json:"api"`
	}{"iop", "/v1"})
}

func (x *exchange) answer(v any) reason {
	b, err := json.Marshal(v)
	if err != nil {
		panic("BUG: httpapi: an answer always marshals: " + err.Error())
	}
	x.writeJSON(http.StatusOK, append(b, '\n'))
	if x.broken != nil {
		return callerGone
	}
	return ""
}
