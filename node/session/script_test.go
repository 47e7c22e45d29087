package session

import (
	"bufio"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

var update = flag.Bool("update", false, "rewrite testdata")

var kinds = map[string]Kind{
	"start": Started, "connected": Connected, "dial-failed": DialFailed, "local-fault": LocalFault,
	"granted": Granted, "registered": RegisterAnswered, "applied": Applied, "ready": ReadyAnswered,
	"heartbeat": HeartbeatReceived, "fence": FenceReceived, "lost": ConnectionLost, "idle": Idle,
	"due": DeadlinePassed, "stop": StopAsked,
}

// epoch is where every script begins.
var epoch = time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)

// TestScripts replays testdata: a line of intent, events, and under each the
// effects and the state it leads to. "policy" begins anew, "+5s" lets time pass,
// "due" waits for the core's deadline first.
func TestScripts(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("no scripts: %v", err)
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			data, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			got, err := replay(string(data))
			if err != nil {
				t.Fatal(err)
			}
			if *update {
				if err := os.WriteFile(file, []byte(got), 0o600); err != nil {
					t.Fatal(err)
				}
				return
			}
			if got != string(data) {
				t.Errorf("the core does otherwise; if that is meant, run with -update\n--- got\n%s", got)
			}
		})
	}
}

func replay(script string) (string, error) {
	var out strings.Builder
	var c *Core
	now := epoch
	lines := bufio.NewScanner(strings.NewReader(script))
	for lines.Scan() {
		line := lines.Text()
		if strings.HasPrefix(line, "    ") {
			continue // the last run's output
		}
		fmt.Fprintln(&out, line)
		if line == "" || line[0] == '#' {
			continue
		}
		words := strings.Fields(line)
		if words[0] == "policy" {
			p, err := parsePolicy(words[1:])
			if err != nil {
				return "", err
			}
			c, now = New(Config{Policy: p}), epoch
			continue
		}
		if d, ok := strings.CutPrefix(words[0], "+"); ok {
			pass, err := time.ParseDuration(d)
			if err != nil {
				return "", err
			}
			now = now.Add(pass)
			words = words[1:]
		}
		ev, err := parseEvent(words, c)
		if err != nil {
			return "", fmt.Errorf("%q: %w", line, err)
		}
		if ev.Kind == DeadlinePassed && c.Deadline().After(now) {
			now = c.Deadline()
		}
		for _, ef := range c.Step(now, ev, nil) {
			fmt.Fprintf(&out, "    %s\n", show(ef))
		}
		at := "never"
		if d := c.Deadline(); !d.IsZero() {
			at = "+" + d.Sub(now).String()
		}
		fmt.Fprintf(&out, "    [%s gen=%d attempts=%d due=%s]\n", c.State(), c.Generation(), c.Attempts(), at)
	}
	return out.String(), nil
}

func show(ef Effect) string {
	s := ef.Kind.String()
	if ef.Reason != "" {
		s += " reason=" + string(ef.Reason)
	}
	if ef.Draining {
		s += " draining"
	}
	if ef.Kind == Exit {
		s += fmt.Sprintf(" err=%v", ef.Err)
	}
	return s
}

func parsePolicy(words []string) (p Policy, err error) {
	for _, w := range words {
		k, v, _ := strings.Cut(w, "=")
		switch k {
		case "max":
			p.MaxAttempts, err = strconv.Atoi(v)
		case "interval":
			p.Interval, err = time.ParseDuration(v)
		default:
			err = fmt.Errorf("policy: %s?", w)
		}
		if err != nil {
			return p, err
		}
	}
	return p, nil
}

func parseEvent(words []string, c *Core) (Event, error) {
	ev := Event{Kind: kinds[words[0]], Gen: c.Generation(), OK: true, Rand: 0.5}
	if ev.Kind == 0 {
		return ev, errors.New("no such event")
	}
	for _, w := range words[1:] {
		k, v, _ := strings.Cut(w, "=")
		var err error
		switch k {
		case "gen":
			ev.Gen, err = strconv.ParseUint(v, 10, 64)
		case "no":
			ev.OK = false
		case "reason":
			ev.Reason = Reason(v)
		case "edge":
			ev.Instance = v
		case "interval":
			ev.Interval, err = time.ParseDuration(v)
		case "bound":
			ev.Bound, err = time.ParseDuration(v)
		case "rand":
			ev.Rand, err = strconv.ParseFloat(v, 64)
		case "err":
			ev.Err = fmt.Errorf("%w: %s", ErrLocal, v)
		default:
			err = fmt.Errorf("%s?", w)
		}
		if err != nil {
			return ev, err
		}
	}
	return ev, nil
}
