package configs

import (
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/agnivade/levenshtein"
	"go.yaml.in/yaml/v3"
)

// decoder fills a value from YAML nodes and goes on after a fault, so that all
// are told at once.
type decoder struct {
	file   string
	faults Faults
	lines  map[string]int // path to the line it stands on
	zeros  []zero
}

func (d *decoder) fault(n *yaml.Node, path, format string, args ...any) {
	d.faults = append(d.faults, Fault{File: d.file, Line: n.Line, Path: path, Message: fmt.Sprintf(format, args...)})
}

// locate gives a fault that knows its path its file and line: its own, or that of
// the nearest thing around it that is there.
func (d *decoder) locate(f Fault) Fault {
	f.File = d.file
	for path := f.Path; ; {
		if line, ok := d.lines[path]; ok {
			f.Line = line
			return f
		}
		i := strings.LastIndexAny(path, ".[")
		if i < 0 {
			return f
		}
		path = path[:i]
	}
}

var (
	durationType = reflect.TypeFor[time.Duration]()
	modelsType   = reflect.TypeFor[Models]()
	statusType   = reflect.TypeFor[Status]()
)

func (d *decoder) document(root *yaml.Node, file *File) {
	if root == nil || isNull(root) {
		d.faults = append(d.faults, Fault{File: d.file, Message: "the file is empty; want a section broker, edge or node"})
		return
	}
	d.value(root, "", reflect.ValueOf(file).Elem())
}

// value decodes n into v. path is where n stands.
func (d *decoder) value(n *yaml.Node, path string, v reflect.Value) {
	if _, ok := d.lines[path]; !ok && path != "" {
		d.lines[path] = n.Line
	}
	if n.Kind == yaml.AliasNode || n.Anchor != "" {
		d.fault(n, path, "anchors and aliases are not used here; write the value out")
		return
	}
	switch t := v.Type(); {
	case t == modelsType:
		d.models(n, path, v)
	case t == statusType:
		v.Set(reflect.ValueOf(d.status(n, path)))
	case t.Kind() == reflect.Pointer:
		v.Set(reflect.New(t.Elem()))
		d.value(n, path, v.Elem())
	case t.Kind() == reflect.Struct:
		d.section(n, path, v)
	case t.Kind() == reflect.Map:
		d.mapping(n, path, v)
	case t.Kind() == reflect.Slice:
		d.list(n, path, v)
	default:
		if want := scalar(n, v); want != "" {
			d.fault(n, path, "%s", want)
			return
		}
		d.zeros = noteZero(d.zeros, path, v)
	}
}

// section decodes a mapping into a struct. A section with nothing in it is there.
func (d *decoder) section(n *yaml.Node, path string, v reflect.Value) {
	if isNull(n) {
		return
	}
	if n.Kind != yaml.MappingNode {
		d.fault(n, path, "want a section of keys and values, got %s", kind(n))
		return
	}
	fields := fieldsOf(v.Type())
	d.entries(n, path, func(key *yaml.Node, value *yaml.Node) {
		i := slices.Index(fields, key.Value)
		if i < 0 {
			d.fault(key, join(path, printable(key.Value)), "unknown key%s", suggestion(key.Value, fields))
			return
		}
		at := join(path, key.Value)
		d.lines[at] = key.Line
		d.value(value, at, v.Field(i))
	})
}

// entries calls each for every key of a mapping that is one, once.
func (d *decoder) entries(n *yaml.Node, path string, each func(key, value *yaml.Node)) {
	seen := map[string]int{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, value := n.Content[i], n.Content[i+1]
		if key.Kind != yaml.ScalarNode {
			d.fault(key, path, "want a word as a key, got %s", kind(key))
			continue
		}
		if first, ok := seen[key.Value]; ok {
			d.fault(key, join(path, printable(key.Value)), "duplicate key, first on line %d", first)
			continue
		}
		seen[key.Value] = key.Line
		each(key, value)
	}
}

func (d *decoder) mapping(n *yaml.Node, path string, v reflect.Value) {
	if n.Kind != yaml.MappingNode {
		d.fault(n, path, "want keys and values, got %s", kind(n))
		return
	}
	v.Set(reflect.MakeMap(v.Type()))
	d.entries(n, path, func(key, value *yaml.Node) {
		at := join(path, printable(key.Value))
		d.lines[at] = key.Line
		item := reflect.New(v.Type().Elem()).Elem()
		d.value(value, at, item)
		v.SetMapIndex(reflect.ValueOf(key.Value), item)
	})
}

func (d *decoder) list(n *yaml.Node, path string, v reflect.Value) {
	if n.Kind != yaml.SequenceNode {
		d.fault(n, path, "want a list, got %s", kind(n))
		return
	}
	v.Set(reflect.MakeSlice(v.Type(), len(n.Content), len(n.Content)))
	for i, item := range n.Content {
		d.value(item, fmt.Sprintf("%s[%d]", path, i), v.Index(i))
	}
}

func (d *decoder) models(n *yaml.Node, path string, v reflect.Value) {
	switch {
	case n.Kind == yaml.ScalarNode && n.Value == "auto":
		v.Set(reflect.ValueOf(Models{Auto: true}))
	case n.Kind == yaml.SequenceNode:
		d.list(n, path, v.FieldByName("Groups"))
	default:
		d.fault(n, path, "want the word auto or a list of models, got %s", kind(n))
	}
}

// scalar sets v from n, or says in words what is wanted.
func scalar(n *yaml.Node, v reflect.Value) (want string) {
	tag := n.ShortTag()
	ok := n.Kind == yaml.ScalarNode
	switch {
	case v.Type() == durationType:
		want = "want a duration such as 5s"
		ok = ok && setDuration(v, n.Value)
	case v.Kind() == reflect.String:
		want = "want text"
		if ok && tag != "!!str" && tag != "!!null" {
			return "want text; put the value in quotes"
		}
		ok = ok && tag == "!!str"
		if ok {
			v.SetString(n.Value)
		}
	case v.Kind() == reflect.Bool:
		want = "want true or false"
		ok = ok && tag == "!!bool" && n.Decode(v.Addr().Interface()) == nil
	case v.CanInt():
		want = "want a whole number"
		ok = ok && tag == "!!int" && n.Decode(v.Addr().Interface()) == nil
	default:
		panic("BUG: configs: no rule for " + v.Type().String())
	}
	if ok {
		return ""
	}
	return want + ", got " + kind(n)
}

// setText sets v from an environment variable.
func setText(v reflect.Value, text string) (want string) {
	switch {
	case v.Kind() == reflect.Pointer:
		item := reflect.New(v.Type().Elem())
		if want = setText(item.Elem(), text); want == "" {
			v.Set(item)
		}
	case v.Type() == durationType:
		if !setDuration(v, text) {
			return "want a duration such as 5s"
		}
	case v.Kind() == reflect.String:
		v.SetString(text)
	case v.Kind() == reflect.Bool:
		if text != "true" && text != "false" {
			return "want true or false"
		}
		v.SetBool(text == "true")
	case v.CanInt():
		i, err := strconv.ParseInt(text, 10, v.Type().Bits())
		if err != nil {
			return "want a whole number"
		}
		v.SetInt(i)
	default:
		panic("BUG: configs: no rule for " + v.Type().String())
	}
	return want
}

func setDuration(v reflect.Value, text string) bool {
	// A bare number, 0 included, would leave the unit to be guessed.
	if text == "" || text[len(text)-1] < 'a' {
		return false
	}
	dur, err := time.ParseDuration(text)
	if err == nil {
		v.SetInt(int64(dur))
	}
	return err == nil
}

// kind says what a node is, and never what it holds: it might be a secret.
func kind(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "a section"
	case yaml.SequenceNode:
		return "a list"
	case yaml.AliasNode:
		return "an alias"
	default: // a scalar, told by its tag below
	}
	switch n.ShortTag() {
	case "!!null":
		return "nothing; leave the key out for the default"
	case "!!int", "!!float":
		return "a number"
	case "!!bool":
		return "true or false"
	case "!!str":
		return "other text"
	default:
		return "another type"
	}
}

func isNull(n *yaml.Node) bool { return n.Kind == yaml.ScalarNode && n.ShortTag() == "!!null" }

// fieldsOf returns the YAML names of a struct's fields, by index.
func fieldsOf(t reflect.Type) []string {
	names := make([]string, t.NumField())
	for i := range names {
		names[i] = t.Field(i).Tag.Get("yaml")
	}
	return names
}

func join(path, key string) string {
	if path == "" {
		return key
	}
	return path + "." + key
}

// printable keeps what a file holds from breaking a message's line.
func printable(key string) string {
	if len(key) > 64 {
		key = key[:64] + "..."
	}
	if q := strconv.Quote(key); len(q) != len(key)+2 {
		return q
	}
	return key
}

// suggestion says which of known was meant, or which there are.
func suggestion(word string, known []string) string {
	if best := nearest(word, known); best != "" {
		return fmt.Sprintf("; did you mean %q?", best)
	}
	return "; want one of: " + strings.Join(known, ", ")
}

// nearest returns the known word at most two edits from word; "" if there is none.
func nearest(word string, known []string) string {
	best, least := "", 3
	for _, k := range known {
		if diff := len(k) - len(word); diff > 2 || diff < -2 {
			continue // it also keeps a huge key from costing anything
		}
		if n := levenshtein.ComputeDistance(word, k); n < least && n < len(k) {
			best, least = k, n
		}
	}
	return best
}
