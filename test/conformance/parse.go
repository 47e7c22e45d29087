package conformance

import (
	"embed"
	"fmt"
	"io/fs"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

//go:embed cases/*.txt
var files embed.FS

// Role is the side of the protocol that a case tests; the player is the other one.
type Role string

// Roles.
const (
	Node Role = "node"
	Edge Role = "edge"
)

// Case is one script.
type Case struct {
	ID     string // "credit-03"; its group is what stands before the number
	Role   Role
	Rules  []string
	Intent string
	// Virtual: it needs what only the bus in memory has: much time, another
	// generation, a lost connection.
	Virtual bool
	Steps   []Step
	File    string
}

// Group is what the case is about.
func (c *Case) Group() string { return c.ID[:strings.LastIndexByte(c.ID, '-')] }

// Exact says that it speaks of messages as they are. One that uses honest words alone must come
// out the same over a bus that loses, repeats and reorders.
func (c *Case) Exact() bool {
	return slices.ContainsFunc(c.Steps, func(s Step) bool { return s.Verb == "send" || s.Verb == "expect" || s.Verb == "again" })
}

// Step is one line of a case.
type Step struct {
	Line  int
	Verb  string // "send"
	Noun  string // "frame"; may be empty
	Flags map[string]bool
	Vals  map[string]string
	text  string
}

// word is what one kind of step may say. A value ends in '='.
type word struct {
	role   Role // "": both
	fields string
}

const fieldsOfFrame = "run= seq= kind= len= status= class= error= header= trailer= end forged usage"

// words is the language. A noun "" is a step of one word.
var words = map[string]word{
	"send tunnel":    {Node, "run= len= body_size= credit= timeout_sec= stall_ms= adapter= operation= header= body_follows lease id="},
	"send body":      {Node, "run= seq= len= last class= acked= credit= id= forged"},
	"send cancel":    {"", "run= id="},
	"send ack":       {"", "run= acked= credit= resend reset direction= id="},
	"send garbage":   {"", "run= verb= hex= times="},
	"send frame":     {Edge, fieldsOfFrame + " gen= id= times= rising"},
	"expect frame":   {Node, fieldsOfFrame + " after="},
	"again frame":    {Node, "run= seq= after="},
	"expect tunnel":  {Edge, "run= len= body_size= credit= body_follows timeout_sec="},
	"again tunnel":   {Edge, "run= after="},
	"expect body":    {Edge, "run= seq= len= last"},
	"again body":     {Edge, "run= seq= after="},
	"expect ack":     {"", "run= acked= credit= resend reset after="},
	"expect cancel":  {Edge, "run= after="},
	"expect silence": {"", "for="},
	"expect batch":   {"", "messages= entries="},

	"open":            {Node, "run= len= credit= timeout_sec= stall_ms= adapter="},
	"cancel":          {Node, "run="},
	"call":            {Edge, "run= len= timeout="},
	"serve":           {Edge, ""},
	"node start":      {Edge, "run= status= len= end"},
	"node body":       {Edge, "run= len= times="},
	"node usage":      {Edge, "run="},
	"node end":        {Edge, "run= len="},
	"node error":      {Edge, "run= class="},
	"node got":        {Edge, "run= bytes="},
	"node cancelled":  {Edge, "run="},
	"caller leave":    {Edge, "run="},
	"caller stop":     {Edge, "run="},
	"caller read":     {Edge, "run="},
	"slot back":       {Edge, "run= how="},
	"slot held":       {Edge, "run="},
	"fence":           {Edge, ""},
	"session lost":    {Edge, ""},
	"session kept":    {Edge, ""},
	"connection lost": {"", ""},
	"connection back": {"", ""},

	"provider called":  {Node, "run="},
	"provider answer":  {Node, "run= status= size="},
	"provider body":    {Node, "run= len= times="},
	"provider end":     {Node, "run="},
	"provider fail":    {Node, "run="},
	"provider read":    {Node, "run= len= bytes="},
	"provider gone":    {Node, "run="},
	"provider idle":    {Node, ""},
	"pause":            {Node, "run="},
	"resume":           {Node, "run="},
	"outcome end":      {"", "run= status= bytes="},
	"outcome error":    {"", "run= class= bytes="},
	"outcome none":     {"", "run="},
	"outcome progress": {"", "run= bytes="},
	"advance":          {"", "for="},
}

var caseID = regexp.MustCompile(`^[a-z]+-[0-9]{2}$`)

// Load reads the list.
func Load() ([]Case, error) {
	names, err := fs.Glob(files, "cases/*.txt")
	if err != nil {
		return nil, err
	}
	var all []Case
	seen := map[string]bool{}
	for _, name := range names {
		text, err := files.ReadFile(name)
		if err != nil {
			return nil, err
		}
		cases, err := parse(path.Base(name), string(text))
		if err != nil {
			return nil, err
		}
		for _, c := range cases {
			if seen[c.ID] {
				return nil, fmt.Errorf("%s: two cases are named %s", name, c.ID)
			}
			seen[c.ID] = true
		}
		all = append(all, cases...)
	}
	return all, nil
}

func parse(file, text string) (all []Case, err error) {
	var c *Case
	line := 0
	wrong := func(format string, args ...any) error {
		return fmt.Errorf("%s:%d: %s", file, line, fmt.Sprintf(format, args...))
	}
	for l := range strings.Lines(text) {
		line++
		l = strings.TrimSpace(l)
		switch {
		case l == "":
		case strings.HasPrefix(l, "#"):
			if c != nil && len(c.Steps) == 0 {
				c.Intent = strings.TrimSpace(c.Intent + " " + strings.TrimSpace(l[1:]))
			}
		case strings.HasPrefix(l, "case "):
			f := strings.Fields(l)[1:]
			if len(f) < 3 || !caseID.MatchString(f[0]) || (f[1] != string(Node) && f[1] != string(Edge)) {
				return nil, wrong("a case is: case GROUP-NN node|edge [virtual] RULE...")
			}
			all = append(all, Case{ID: f[0], Role: Role(f[1]), File: file})
			c = &all[len(all)-1]
			for _, w := range f[2:] {
				if w == "virtual" {
					c.Virtual = true
				} else {
					c.Rules = append(c.Rules, w)
				}
			}
		case c == nil:
			return nil, wrong("a step before any case")
		default:
			s, err := parseStep(c.Role, l)
			if err != nil {
				return nil, wrong("%v", err)
			}
			s.Line = line
			c.Steps = append(c.Steps, s)
		}
	}
	for i := range all {
		if all[i].Intent == "" || len(all[i].Steps) == 0 || len(all[i].Rules) == 0 {
			return nil, fmt.Errorf("%s: case %s needs an intent (#), a rule and steps", file, all[i].ID)
		}
	}
	return all, nil
}

func parseStep(role Role, text string) (Step, error) {
	f := strings.Fields(text)
	s := Step{Verb: f[0], Flags: map[string]bool{}, Vals: map[string]string{}, text: text}
	name, rest := f[0], f[1:]
	w, ok := words[name]
	if !ok && len(f) > 1 {
		s.Noun = f[1]
		name, rest = f[0]+" "+f[1], f[2:]
		w, ok = words[name]
	}
	if !ok {
		return s, fmt.Errorf("%q is no step", text)
	}
	if w.role != "" && w.role != role {
		return s, fmt.Errorf("%q is no step of a case whose role is %s", name, role)
	}
	fields := strings.Fields(w.fields)
	for _, word := range rest {
		key, value, pair := strings.Cut(word, "=")
		want := key
		if pair {
			want += "="
		}
		if !slices.Contains(fields, want) {
			return s, fmt.Errorf("%s has no %q; it has: %s", name, want, w.fields)
		}
		if pair {
			s.Vals[key] = value
		} else {
			s.Flags[key] = true
		}
	}
	return s, s.check()
}

// texts are the fields whose values are no numbers.
var texts = map[string]bool{
	"run": true, "kind": true, "class": true, "error": true, "header": true, "trailer": true, "adapter": true, "operation": true,
	"direction": true, "verb": true, "hex": true, "how": true, "id": true,
}

var durations = map[string]bool{"after": true, "for": true, "timeout": true}

func (s Step) check() error {
	for k, v := range s.Vals {
		var err error
		switch {
		case durations[k]:
			_, err = time.ParseDuration(v)
		case !texts[k]:
			_, err = strconv.ParseInt(v, 10, 64)
			if err != nil {
				_, err = strconv.ParseUint(v, 10, 64)
			}
		}
		if err != nil {
			return fmt.Errorf("%s=%s: %w", k, v, err)
		}
	}
	return nil
}

func (s Step) has(key string) bool { _, ok := s.Vals[key]; return ok }

// number is a value that check has seen; def if it is not given. A negative one is
// what a uint64 makes of it.
func (s Step) number(key string, def uint64) uint64 {
	v, ok := s.Vals[key]
	if !ok {
		return def
	}
	if n, err := strconv.ParseUint(v, 10, 64); err == nil {
		return n
	}
	n, _ := strconv.ParseInt(v, 10, 64)
	return uint64(n) //nolint:gosec // meant: negative numbers of int64 fields
}

func (s Step) int(key string, def int) int {
	return int(s.number(key, uint64(def))) //nolint:gosec // lengths and counts of a script
}

func (s Step) duration(key string) time.Duration {
	d, _ := time.ParseDuration(s.Vals[key])
	return d
}

func (s Step) str(key, def string) string {
	if v, ok := s.Vals[key]; ok {
		return v
	}
	return def
}
