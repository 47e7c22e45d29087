package configs

import (
	"reflect"
	"slices"
	"strings"
)

const (
	envPrefix = "IOP_"
	envFile   = "environment"
)

// environment is what override took from the environment.
type environment struct {
	faults Faults
	set    map[string]string // path to the variable that set it
	zeros  []zero
}

// locate points a fault about a value that a variable set at that variable.
func (e environment) locate(f Fault) Fault {
	if name, ok := e.set[f.Path]; ok {
		return Fault{File: envFile, Path: name, Message: f.Message}
	}
	return f
}

// override sets what environ says. Every single value of a section has a
// variable: edge.limits.read_header is IOP_EDGE_LIMITS_READ_HEADER; lists and maps
// have none. A variable that names no setting but begins as if it did, or is two
// edits from one that does, is a fault: somebody believes it works. Others with
// the prefix are not ours to judge, nor are those the configuration itself names.
func override(f *File, environ []string) environment {
	e := environment{set: map[string]string{}}
	leaves := leavesOf(reflect.TypeFor[File](), "", nil)
	known := make([]string, 0, len(leaves))
	byName := make(map[string]leaf, len(leaves))
	for _, l := range leaves {
		known = append(known, l.variable())
		byName[l.variable()] = l
	}
	named := f.variables()
	for _, entry := range environ {
		name, text, ok := strings.Cut(entry, "=")
		if !ok || !strings.HasPrefix(name, envPrefix) || named[name] {
			continue
		}
		fault := func(message string) { e.faults = append(e.faults, Fault{File: envFile, Path: name, Message: message}) }
		l, ok := byName[name]
		if !ok {
			if best := nearest(name, known); best != "" {
				fault("no such setting; did you mean " + best + "?")
			} else if section := sectionOf(name); section != "" {
				fault("no such setting in section " + section)
			}
			continue
		}
		v, ok := l.in(f)
		if !ok {
			fault("the file has no section " + l.missing(f))
			continue
		}
		if want := setText(v, text); want != "" {
			fault(want)
			continue
		}
		e.set[l.path] = name
		e.zeros = noteZero(e.zeros, l.path, v)
	}
	return e
}

// variables are those the configuration itself names: callers' keys, the admin token, and static
// keys where the Node runs in this process.
func (f *File) variables() map[string]bool {
	named := map[string]bool{}
	if f.Broker != nil {
		named[f.Broker.AdminToken.Env] = true
	}
	if f.Service != nil {
		named[f.Service.AdminToken.Env] = true
	}
	if f.Edge == nil {
		return named
	}
	named[f.Edge.AdminToken.Env] = true
	for _, k := range f.Edge.Keys {
		named[k.Env] = true
	}
	for _, n := range append(f.Edge.Nodes[:len(f.Edge.Nodes):len(f.Edge.Nodes)], EdgeNode{Adapters: f.Edge.InvitedAdapters}) {
		for _, a := range n.Adapters {
			named[a.StaticKeyName] = true
		}
	}
	return named
}

// leaf is a single value of the schema.
type leaf struct {
	path  string
	index []int // as in reflect.Value.FieldByIndex
}

func (l leaf) variable() string {
	return envPrefix + strings.ToUpper(strings.ReplaceAll(l.path, ".", "_"))
}

// in returns the value in f; ok is false where its section is not there.
func (l leaf) in(f *File) (reflect.Value, bool) {
	v, err := reflect.ValueOf(f).Elem().FieldByIndexErr(l.index)
	return v, err == nil
}

// missing is the outermost section of the leaf that f does not have.
func (l leaf) missing(f *File) string {
	parts := strings.Split(l.path, ".")
	v := reflect.ValueOf(f).Elem()
	for i, at := range l.index {
		if v = v.Field(at); v.Kind() == reflect.Pointer {
			if v.IsNil() {
				return strings.Join(parts[:i+1], ".")
			}
			v = v.Elem()
		}
	}
	return l.path
}

func leavesOf(t reflect.Type, path string, index []int) []leaf {
	var out []leaf
	for i, name := range fieldsOf(t) {
		ft, at, ix := t.Field(i).Type, join(path, name), append(slices.Clone(index), i)
		if ft.Kind() == reflect.Pointer && ft.Elem().Kind() == reflect.Struct {
			ft = ft.Elem()
		}
		switch {
		case ft == modelsType, ft.Kind() == reflect.Slice, ft.Kind() == reflect.Map:
		case ft.Kind() == reflect.Struct:
			out = append(out, leavesOf(ft, at, ix)...)
		default:
			out = append(out, leaf{at, ix})
		}
	}
	return out
}

// sectionOf returns the section a variable's name begins with.
func sectionOf(variable string) string {
	for _, section := range fieldsOf(reflect.TypeFor[File]()) {
		if strings.HasPrefix(variable, envPrefix+strings.ToUpper(section)+"_") {
			return section
		}
	}
	return ""
}
