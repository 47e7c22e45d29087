package obs

import (
	"fmt"
	"testing"
)

// However many names come, the labels stay bounded, and a known one keeps its own.
//
// Contract: O2
func TestNames(t *testing.T) {
	n := NewNames(3)
	labels := map[string]bool{}
	for i := range 100 {
		labels[n.Label(fmt.Sprint(i))] = true
	}
	if len(labels) != 4 || !labels[Other] || n.Label("2") != "2" || n.Label("99") != Other {
		t.Errorf("%v", labels)
	}
}
