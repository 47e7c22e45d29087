package openai_compat

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"

	"github.com/iop-fabric/iop/agent"
)

// maxListing bounds a model list that Probe reads; a longer one is unreadable.
const maxListing = 4 << 20

var errListing = errors.New("the model list is too long")

// Probe asks the provider for its models (C3). Available: exactly target is
// listed. Unavailable: refused, failed, not in time, or not listed. Unknown: an
// answer that does not tell, or no answer that the probe's owner waited for.
func (a *Adapter) Probe(ctx context.Context, target string) agent.Health {
	if target == "" {
		return agent.Unknown
	}
	var l listing
	err := a.models(ctx, &l)
	var f *agent.Failure
	switch {
	case errors.Is(err, errListing):
		return agent.Unknown
	case errors.As(err, &f) && (f.Code == agent.CodeUnreachable || f.Code == agent.CodeProvider) && f.Metadata[MetaReason] != string(ReasonStopped):
		return agent.Unavailable
	case errors.Is(err, context.DeadlineExceeded):
		return agent.Unavailable
	case err != nil:
		return agent.Unknown
	}
	switch {
	case l.status >= 500:
		return agent.Unavailable
	case l.status < 200 || l.status > 299:
		return agent.Unknown
	}
	return l.verdict(target)
}

// models reads the profile's model list, whatever operations it has.
func (a *Adapter) models(ctx context.Context, l *listing) error {
	return a.Exchange(ctx, agent.Exchange{Method: http.MethodGet, Path: a.profile.ModelsPath}, l)
}

// listing is a Sink that keeps a model list.
type listing struct {
	status int
	body   []byte
}

func (l *listing) Start(status int, _ []agent.Field, _ int64) error {
	l.status = status
	return nil
}

func (l *listing) Body(p []byte) error {
	if len(l.body)+len(p) > maxListing {
		return errListing
	}
	l.body = append(l.body, p...)
	return nil
}

func (*listing) Trailer([]agent.Field) error { return nil }

func (l *listing) verdict(target string) agent.Health {
	var list struct {
		Data *[]struct {
			ID string `json:"id"`
		} `json:"data"`
	}
	if err := json.Unmarshal(l.body, &list); err != nil || list.Data == nil {
		return agent.Unknown
	}
	for _, m := range *list.Data {
		if m.ID == target {
			return agent.Available
		}
	}
	return agent.Unavailable
}
