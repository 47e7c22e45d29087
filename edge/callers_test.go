package edge

import (
	"errors"
	"testing"

	"github.com/iop-fabric/iop/edge/httpapi"
	"github.com/iop-fabric/iop/edge/pool"
)

// Before the Edge has its broker no model is unknown: nobody could have listed it, and
// the caller is to come again.
//
// Contract: E7 P9
func TestNoModelIsUnknownBeforeTheBroker(t *testing.T) {
	l, stop := startLoop(t, &fakePort{}, 1)
	defer stop()
	ready := make(chan struct{})
	p := callersPool{l, ready}
	ask := func() error {
		var g httpapi.Grant
		return p.Acquire(t.Context(), &httpapi.Want{Model: "nobody lists it"}, &g)
	}
	if err := ask(); !errors.Is(err, pool.ErrNoProvider) {
		t.Errorf("before: %v", err)
	}
	close(ready)
	if err := ask(); !errors.Is(err, pool.ErrUnknownModel) {
		t.Errorf("after: %v", err)
	}
}
