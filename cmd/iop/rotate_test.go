package main

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/iop-fabric/iop/internal/adminapi"
	"github.com/iop-fabric/iop/internal/identity"
)

// says checks what a command prints: that it holds all, and none of the rest.
func says(t *testing.T, out string, all []string, none ...string) {
	t.Helper()
	for _, want := range all {
		if !strings.Contains(out, want) {
			t.Errorf("lacks %q:\n%s", want, out)
		}
	}
	for _, not := range none {
		if strings.Contains(out, not) {
			t.Errorf("says %q:\n%s", not, out)
		}
	}
}

// What is to be done after a rotation is said of what runs there: brokers take it at a
// hangup; a nats-server of an operator's own is restarted, since a reload closes every
// Node on it, and members are those of its service.
//
// Contract: B1 B8 D1
func TestRotateSaysWhatToDo(t *testing.T) {
	for _, stock := range []bool{false, true} {
		t.Run(map[bool]string{false: "brokers", true: "stock"}[stock], func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "fabric")
			args := []string{"init", "--out", dir, "--edge", "home", "--broker", "h1.example,h2.example,h3.example", "--node", "a", "--leaf", "attic"}
			if stock {
				args = append(args, "--stock")
			}
			mustIOP(t, args...)
			rotate := func(args ...string) string {
				t.Helper()
				return mustIOP(t, append(append([]string{"rotate"}, args...), "--out", dir)...)
			}
			reloads, both := "a reload", []string{"issuer-old.nk", "broker-1"}
			if stock {
				both[1] = "service-1"
				says(t, rotate("node", "a", "--nkey"), []string{"service.members of every service", "kill -HUP the services"}, "broker.members", "the brokers")
				says(t, rotate("broker", "broker-1"), []string{"Restart its nats-server", "would close every Node"}, "kill -HUP its process")
				says(t, rotate("service", "service-1"), []string{"kill -HUP its process"}, "nats-server")
				says(t, rotate("ca", "begin"), []string{"services first", "restart the nats-servers, one at a time", "would close every Node"}, "brokers first")
				says(t, rotate("ca", "switch"), []string{"services first", "restart the nats-servers", "--config service-1.yaml", "each of the 3 services"}, "brokers")
			} else {
				says(t, rotate("node", "a", "--nkey"), []string{"broker.members of every broker", "kill -HUP the brokers"}, "service")
				says(t, rotate("broker", "broker-1"), []string{"kill -HUP its process"}, "nats-server")
				says(t, rotate("ca", "begin"), []string{"brokers first"}, "nats-server", reloads)
				says(t, rotate("ca", "switch"), []string{"brokers first", "--config broker-1.yaml", "each of the 3 brokers"}, "nats-server", "service")
			}
			says(t, rotate("leaf", "attic", "--nkey"), []string{"The streams of its site end"})
			says(t, rotate("ca", "finish", "--force"), []string{"Nobody was asked"})
			says(t, rotate("ca", "begin", "--json"), nil, `"key"`)

			rotate("issuer", "begin")
			out := rotate("issuer", "switch", "--force")
			says(t, out, append(both, "set leaf.issuer to the new one, and restart it: the streams of its site end"))
			if stock {
				says(t, out, []string{"Copy each service", "write nats.conf anew", "restart the nats-server and then its service", "--config service-1.yaml"}, "Restart brokers")
			} else {
				says(t, out, []string{"Copy each broker", "after 8 s ends", "--config broker-1.yaml"}, "nats-server", reloads)
			}
			refused(t, exitFailed, "every "+admitting(stock)+" (--config "+admitting(stock)+"-1.yaml", "rotate", "issuer", "finish", "--out", dir)
			says(t, rotate("issuer", "finish", "--force"), []string{"Nobody was asked", "host of every " + admitting(stock)})
		})
	}
}

// fakeBroker answers as a broker's admin listener whose tokens are signed by issuer.
func fakeBroker(t *testing.T, issuer *string) (url string) {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_ = json.NewEncoder(w).Encode(adminapi.Keys{Issuer: *issuer, PinnedIssuer: *issuer})
	}))
	t.Cleanup(s.Close)
	return s.URL
}

// To finish an exchange of the issuer every broker can be asked; one that signs with the
// old one refuses it by its address, and what was not asked is said.
//
// Contract: B8 G3
func TestRotateIssuerFinishAsksSeveral(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "fabric")
	mustIOP(t, "init", "--out", dir, "--edge", "home", "--broker", "h1.example,h2.example,h3.example", "--node", "a")
	public := func() string {
		t.Helper()
		k, err := identity.LoadNKey(filepath.Join(dir, "authority", "issuer.nk"))
		if err != nil {
			t.Fatal(err)
		}
		return k.Public()
	}
	first := public()
	t.Setenv(tokenVariable, "0123456789abcdef")
	exchange := func() (is string) {
		t.Helper()
		mustIOP(t, "rotate", "issuer", "begin", "--out", dir)
		mustIOP(t, "rotate", "issuer", "switch", "--out", dir, "--force")
		return public()
	}
	second := exchange()
	one, two, three := second, first, second
	urls := []string{fakeBroker(t, &one), fakeBroker(t, &two), fakeBroker(t, &three)}
	finish := []string{"rotate", "issuer", "finish", "--out", dir, "--url", urls[0], "--url", urls[1]}
	if code, _, errs := ended(t, finish...); code != exitFailed || !strings.Contains(errs, urls[1]+" still signs with") {
		t.Errorf("one signs with the old one: %d %s", code, errs)
	}
	two = second
	says(t, mustIOP(t, finish...), []string{"2 of 3 brokers were asked", urls[0], urls[1], "each of the others"}, urls[2])
	one = exchange()
	two, three = one, one
	says(t, mustIOP(t, append(slices.Clone(finish), "--url", urls[2])...), []string{"Asked: " + strings.Join(urls, ", ")}, "each of the others")

	for name, c := range map[string]struct {
		args []string
		want string
	}{
		"twice":           {[]string{"issuer", "finish", "--out", dir, "--url", urls[0], "--url", urls[0]}, "named twice"},
		"a switch":        {[]string{"issuer", "switch", "--out", dir, "--url", urls[0], "--url", urls[1]}, "by the step finish"},
		"an iop up":       {[]string{"issuer", "finish", "--url", urls[0], "--url", urls[1]}, "by the step finish"},
		"no scheme":       {[]string{"ca", "status", "--url", "127.0.0.1:1"}, "want http://HOST:PORT"},
		"--dir, no nkey":  {[]string{"node", "--dir", dir}, "renewed by itself"},
		"--dir and --out": {[]string{"node", "a", "--nkey", "--dir", dir, "--out", dir}, "without NAME and --out"},
	} {
		if code, _, errs := ended(t, append([]string{"rotate"}, c.args...)...); code != exitUsage || !strings.Contains(errs, c.want) {
			t.Errorf("%s: %d %s", name, code, errs)
		}
	}
}

// What an iop up is told to do next is what whoever asked it can copy.
//
// Contract: D1
func TestRotateNextStepKeepsItsFlags(t *testing.T) {
	for o, want := range map[operator]string{
		{}:                                  "iop rotate ca switch",
		{dir: "/data"}:                      "iop rotate ca switch --data-dir /data",
		{url: "http://h:1", tokenFile: "t"}: "iop rotate ca switch --url http://h:1 --token-file t",
	} {
		if got := upStepped("ca", "begin", o); !strings.HasSuffix(got, "Next: "+want) {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// A member that is added says how each process takes it: brokers and services at a
// hangup, the Edge when it starts.
//
// Contract: D1 B1
func TestInitSaysHowAMemberIsTaken(t *testing.T) {
	for _, stock := range []bool{false, true} {
		dir := filepath.Join(t.TempDir(), "fabric")
		args := []string{"init", "--out", dir, "--edge", "home", "--broker", "h1.example", "--node", "a"}
		if stock {
			args = append(args, "--stock")
		}
		mustIOP(t, args...)
		out := mustIOP(t, "init", "--out", dir, "--node", "gpu2")
		if stock {
			says(t, out, []string{"kill -HUP the services", "A nats-server needs none of it", "restart the Edge"}, "restart what reads them", "HUP the brokers")
		} else {
			says(t, out, []string{"kill -HUP the brokers", "restart the Edge"}, "restart what reads them", "nats-server")
		}
		says(t, mustIOP(t, "init", "--out", dir, "--broker", "h1.example,h2.example"), []string{map[bool]string{false: "restart the brokers, one at a time", true: "write each nats.conf anew"}[stock]})
	}
}

// Who asks the wrong process is told which one to ask.
//
// Contract: D1 D4
func TestOperatorAsksTheRightProcess(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "fabric")
	mustIOP(t, "init", "--out", dir, "--edge", "home", "--broker", "h1.example", "--node", "a", "--stock")
	for _, args := range [][]string{{"status", "broker-1"}, {"nodes", "service-1"}, {"models", "broker-1"}} {
		refused(t, exitFailed, "shows no nodes: ask the Edge (--config edge.yaml)", args[0], "--config", config(dir, args[1]))
	}
	for _, args := range [][]string{{"invite", "gpu1"}, {"revoke", "a"}, {"rotate", "ca", "status"}} {
		refused(t, exitFailed, "is of an Edge, which admits nobody", append(args, "--config", config(dir, "edge"))...)
	}
	says(t, mustIOP(t, "--help"), []string{"iop service ", "exchange the CA, the issuer or an nkey"})
	for command, want := range map[string]string{"status": "edge.yaml", "invite": "broker-1.yaml", "revoke": "service-1.yaml", "rotate": "service-1.yaml"} {
		says(t, mustIOP(t, command, "--help"), []string{want})
	}
}
