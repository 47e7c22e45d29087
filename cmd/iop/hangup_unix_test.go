//go:build unix

package main

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/iop-fabric/iop/internal/ioptest"
	"github.com/iop-fabric/iop/internal/up"
)

// asProcess makes this test binary iop itself.
const asProcess = "IOP_TEST_AS_PROCESS"

func TestMain(m *testing.M) {
	if os.Getenv(asProcess) != "" {
		os.Unsetenv(asProcess)
		main()
	}
	os.Exit(m.Run())
}

// SIGHUP makes an iop up read its keys and goes on; it names the settings that need a
// restart, and none where nothing differs.
//
// Contract: B1 B8 D7
func TestUpAtHangup(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "iop.yaml")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	text := "broker: {listen: \"127.0.0.1:0\"}\nedge: {listen: \"127.0.0.1:0\", admin_listen: \"127.0.0.1:0\"}\n"
	write(text)
	var log ioptest.LogBuffer
	cmd := exec.Command(os.Args[0], "up", "--json", "--data-dir", filepath.Join(dir, "data"), "--config", file, "--log-level", "info")
	cmd.Env, cmd.Stderr = append(os.Environ(), asProcess+"=1"), &log
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Process.Kill() // it has ended, as a rule
	var info up.Info
	if err := json.NewDecoder(out).Decode(&info); err != nil {
		t.Fatalf("%v\n%s", err, &log)
	}
	hup := func(event string, words ...string) {
		t.Helper()
		if err := cmd.Process.Signal(syscall.SIGHUP); err != nil {
			t.Fatal(err)
		}
		log.AwaitEvent(t, event, words...)
	}
	write("edge: {}\n") // its keys are read for all that
	hup(up.EventReloadFailed, "the section is missing")
	log.AwaitEvent(t, "broker.rotated")
	write(strings.Replace(text, "edge: {", "edge: {stop_grace: 3s, ", 1))
	hup(up.EventNeedsRestart, "role=edge", "settings=[stop_grace]")
	write(text) // nothing differs
	hup("broker.rotated")
	log.Await(t, func(string) bool { return log.Count("broker.rotated") == 3 })
	if code, body := get(t, info.BaseURL+"/models", info.APIKey); code != 200 {
		t.Errorf("%d %s", code, body)
	}
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("%v\n%s", err, &log)
	}
	if n := log.Count(up.EventNeedsRestart); n != 1 {
		t.Errorf("it names settings %d times\n%s", n, &log)
	}
	if n := strings.Count(log.String(), "level=WARN"); n != 1 {
		t.Errorf("%d warnings: a plain stop is none\n%s", n, &log)
	}
}
