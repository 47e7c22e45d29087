package configs

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// maxFile bounds a configuration file.
const maxFile = 4 << 20

// Load reads the file at path, lets the environment override it, and returns it
// complete and valid, or every fault as Faults.
func Load(path string) (*File, error) {
	data, err := read(path)
	if err != nil {
		return nil, err
	}
	return parse(path, data, os.Environ(), false)
}

func read(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("configuration: %w", err)
	}
	defer f.Close() // only read
	data, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err != nil {
		return nil, fmt.Errorf("configuration: %w", err)
	}
	return data, nil
}

// Parse is Load for data at hand, with no environment. name stands in faults, and
// relative paths in data are taken from its folder.
func Parse(name string, data []byte) (*File, error) { return parse(name, data, nil, false) }

func parse(name string, data []byte, environ []string, single bool) (*File, error) {
	file, _, err := decode(name, data, environ, single)
	return file, err
}

// decode also returns what gives a fault that knows its path its file and line.
func decode(name string, data []byte, environ []string, single bool) (*File, func(Fault) Fault, error) {
	if len(data) > maxFile {
		return nil, nil, Faults{{File: name, Message: fmt.Sprintf("larger than %d bytes", maxFile)}}
	}
	root, faults := document(name, data)
	if faults != nil {
		return nil, nil, faults
	}
	file := new(File)
	d := &decoder{file: name, lines: map[string]int{}}
	d.document(root, file)
	file.resolvePaths(filepath.Dir(name))
	env := override(file, environ)
	d.faults = append(d.faults, env.faults...)
	if single && file.Broker != nil && file.Edge != nil {
		file.nameItself()
	}
	faults = file.withDefaults(slices.Concat(d.zeros, env.zeros))
	locate := func(f Fault) Fault { return env.locate(d.locate(f)) }
	for _, fault := range append(faults, file.validate()...) {
		d.faults = append(d.faults, locate(fault))
	}
	if err := d.faults.err(); err != nil {
		return nil, nil, err
	}
	return file, locate, nil
}

// yamlLine finds the line in a message of the parser's.
var yamlLine = regexp.MustCompile(`^yaml: (?:line (\d+): )?`)

// parserError finds the messages of the parser proper, as opposed to the scanner's.
var parserError = regexp.MustCompile(`^did not find expected (node content|key|['<])|^found (undefined tag|duplicate %|incompatible)`)

// document returns the root of the one document there may be; nil if it is empty.
func document(name string, data []byte) (*yaml.Node, Faults) {
	dec := yaml.NewDecoder(bytes.NewReader(data))
	var doc, second yaml.Node
	switch err := dec.Decode(&doc); {
	case errors.Is(err, io.EOF):
		return nil, nil
	case err != nil:
		return nil, Faults{syntaxFault(name, err)}
	}
	switch err := dec.Decode(&second); {
	case err == nil:
		return nil, Faults{{File: name, Line: second.Line, Message: "a second document begins here; a configuration is one document"}}
	case !errors.Is(err, io.EOF):
		return nil, Faults{syntaxFault(name, err)}
	}
	return doc.Content[0], nil
}

func syntaxFault(name string, err error) Fault {
	m := yamlLine.FindStringSubmatch(err.Error())
	if m == nil {
		return Fault{File: name, Message: "not YAML: " + err.Error()}
	}
	line, _ := strconv.Atoi(m[1]) // no line in the message means no line here
	text := strings.TrimPrefix(err.Error(), m[0])
	if line > 0 && parserError.MatchString(text) {
		line++ // the scanner's messages count lines from 1, the parser's from 0
	}
	return Fault{File: name, Line: line, Message: "not YAML: " + text}
}

// Complete gives every setting that was left out its default and then validates:
// for a configuration that was built in code rather than loaded.
func (f *File) Complete() error {
	f.applyDefaults()
	return f.Validate()
}

// Validate reports every fault, as Faults. Files that are named are not opened.
func (f *File) Validate() error { return f.validate().err() }

// NewSingle is the configuration of a process that is broker, Edge and Node at
// once and has no file: empty sections, and what the environment sets in them.
func NewSingle(environ []string) (*File, error) {
	blank := func() *File { return &File{Broker: &Broker{Enrolment: &Enrolment{}}, Edge: &Edge{}, Node: &Node{}} }
	file, tried := blank(), blank()
	env := override(tried, environ)
	for _, fault := range tried.withDefaults(env.zeros) {
		env.faults = append(env.faults, env.locate(fault))
	}
	if err := env.faults.err(); err != nil {
		return nil, err
	}
	override(file, environ) // the defaults come later, after what the process makes itself
	return file, nil
}

// LoadSingle is Load for a process that is broker, Edge and Node at once. Such a
// file has the sections broker and edge, be they empty; its parts need no names.
func LoadSingle(path string) (*File, error) {
	data, err := read(path)
	if err != nil {
		return nil, err
	}
	for _, section := range []string{"broker", "edge"} {
		if !hasSection(data, section) {
			return nil, Faults{{
				File: path, Line: 1, Path: section,
				Message: "the section is missing: iop up is broker, edge and node in one process, so both broker and edge must be there (" + section + ": {} is enough)",
			}}
		}
	}
	return parse(path, data, os.Environ(), true)
}

// LoadAny is LoadSingle for a file that has both sections, Load for any other.
func LoadAny(path string) (*File, error) {
	data, err := read(path)
	if err != nil {
		return nil, err
	}
	f, err := parse(path, data, os.Environ(), hasSection(data, "broker") && hasSection(data, "edge"))
	return f, lacksBroker(path, data, err)
}

// lacksBroker puts first, before all that an iop up makes itself, that a file of Edge and
// Node is none of an iop up. Without other faults it may be that of two processes.
func lacksBroker(path string, data []byte, err error) error {
	var faults Faults
	if !errors.As(err, &faults) || hasSection(data, "broker") || !hasSection(data, "edge") || !hasSection(data, "node") {
		return err
	}
	return append(Faults{{
		File: path, Line: 1, Path: "broker",
		Message: "the section is missing, so this is no file of iop up, which makes names and keys itself (broker: {} is enough). As a file of iop edge and iop node:",
	}}, faults...)
}

// hasSection looks for a top-level key; what is no YAML is parse's to tell.
func hasSection(data []byte, name string) bool {
	var sections map[string]yaml.Node
	if yaml.Unmarshal(data, &sections) != nil {
		return true
	}
	_, ok := sections[name]
	return ok
}
