// Package script plays the scripts of a core's testdata. It is for tests alone.
//
// A script is lines: of intent, which begin with '#', of events, and under each
// event its effects, which begin with a tab. Playing one makes the effects anew;
// a test fails where they differ, and with -update they are written down.
package script

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "rewrite the effects in testdata")

// Event plays one event, given as its words, and returns the effects, one a line
// of the script. What is wrong with an event is t's to say.
type Event func(t *testing.T, words []string) (effects []string)

// Run plays every script of testdata, each with an Event of its own that start
// makes.
func Run(t *testing.T, start func() Event) {
	t.Helper()
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("no scripts: %v", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			got := play(t, string(want), start())
			if *update {
				if err := os.WriteFile(file, []byte(got), 0o600); err != nil {
					t.Fatal(err)
				}
				return
			}
			if got != string(want) {
				t.Errorf("the effects differ; if that is meant, run with -update; got:\n%s", got)
			}
		})
	}
}

func play(t *testing.T, text string, event Event) string {
	t.Helper()
	var out strings.Builder
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\n")
		if strings.HasPrefix(line, "\t") {
			continue // an effect
		}
		out.WriteString(line + "\n")
		words := strings.Fields(line)
		if len(words) == 0 || strings.HasPrefix(line, "#") {
			continue
		}
		for _, effect := range event(t, words) {
			out.WriteString("\t" + effect + "\n")
		}
	}
	return out.String()
}
