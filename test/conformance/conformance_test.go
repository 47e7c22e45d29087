package conformance

import (
	"flag"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"

	"go.uber.org/goleak"

	"github.com/iop-fabric/iop/internal/ioptest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, ioptest.IgnoredGoroutines()...) }

// seeds is how many lossy buses every honest case is played over.
var seeds = flag.Uint64("seeds", 1, "lossy buses per case")

func load(t *testing.T, which func(*Case) bool) (some []Case) {
	t.Helper()
	cases, err := Load()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range cases {
		if which(&c) {
			some = append(some, c)
		}
	}
	return some
}

// tell says how many came out as they say.
func tell(where string, good, all int) { fmt.Printf("conformance, %s: %d of %d\n", where, good, all) }

// Every case against our Node and our Edge on the bus in memory, in virtual time.
//
// Contract: J1 J2 J3 J4 J6 J7 J8 J9 T3 T6 C1 M3 M4 V1
func TestInMemory(t *testing.T) {
	cases := load(t, func(*Case) bool { return true })
	good := 0
	for i := range cases {
		t.Run(cases[i].ID, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				if err := inMemory(&cases[i], 0); err != nil {
					t.Error(err)
					return
				}
				good++
			})
		})
	}
	tell("in memory", good, len(cases))
}

// The cases that use honest words alone come out the same over a bus that loses,
// repeats and reorders.
//
// Contract: J2 J3 J4
func TestLossy(t *testing.T) {
	cases := load(t, func(c *Case) bool { return !c.Exact() })
	good, all := 0, 0
	for i := range cases {
		for seed := uint64(1); seed <= *seeds; seed++ {
			all++
			t.Run(fmt.Sprintf("%s/%d", cases[i].ID, seed), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					if err := inMemory(&cases[i], seed); err != nil {
						t.Error(err)
						return
					}
					good++
				})
			})
		}
	}
	tell("over lossy buses", good, all)
}

// A line that is wrong is told with its place and what would be right.
func TestWrongLines(t *testing.T) {
	const head = "case x-01 node J1\n# Intent.\n"
	for text, want := range map[string]string{
		"send tunnel\n":                       "x.txt:1: a step before any case",
		"case x node J1\n":                    "x.txt:1: a case is: case GROUP-NN node|edge [virtual] RULE...",
		"case x-01 node J1\nsend tunnel\n":    "x.txt: case x-01 needs an intent (#), a rule and steps",
		head + "dance\n":                      `x.txt:3: "dance" is no step`,
		head + "call\n":                       `x.txt:3: "call" is no step of a case whose role is node`,
		head + "send body seq=one\n":          `x.txt:3: seq=one: strconv.ParseUint: parsing "one": invalid syntax`,
		head + "send body lenn=1\n":           `x.txt:3: send body has no "lenn="; it has: `,
		head + "advance for=soon\n":           `x.txt:3: for=soon: time: invalid duration "soon"`,
		head + "send tunnel body_follows=1\n": `x.txt:3: send tunnel has no "body_follows="`,
	} {
		if _, err := parse("x.txt", text); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%q: %v, want %s", text, err, want)
		}
	}
}
