package up

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/iop-fabric/iop/broker"
)

// Who was overtaken by others again and again is told so, and not that nothing runs.
//
// Contract: B11
func TestConflictIsTold(t *testing.T) {
	w := httptest.NewRecorder()
	fail(w, fmt.Errorf("broker: invitation home.node.gpu1: %w", broker.ErrConflict))
	if w.Code != http.StatusConflict || !strings.Contains(w.Body.String(), `"conflict"`) || !strings.Contains(w.Body.String(), "try again") {
		t.Errorf("%d %s", w.Code, w.Body)
	}
}
