package subjects

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/iop-fabric/iop/wire"
)

const root = "iop.v1."

// UserInfo is the server's own answer to "who am I?"; the one system subject a
// Node may publish to (B5, G2).
const UserInfo = "$SYS.REQ.USER.INFO"

// Verb is the last word of a subject that says what a message is.
type Verb string

// The verbs of a session, the contract's words.
const (
	SessionVerb Verb = "session"
	Register    Verb = "register"
	Ready       Verb = "ready"
	Heartbeat   Verb = "heartbeat"
	Renew       Verb = "renew"   // both ways, with the authority
	Event       Verb = "event"   // up, with run
	Frame       Verb = "frame"   // up, with run
	Ack         Verb = "ack"     // both ways
	Result      Verb = "result"  // up, with command id
	Run         Verb = "run"     // down, with run
	Tunnel      Verb = "tunnel"  // down, with run
	Body        Verb = "body"    // down, with run
	Cancel      Verb = "cancel"  // down, with run
	Command     Verb = "command" // down, with command id
	Refresh     Verb = "refresh" // down
	Fence       Verb = "fence"   // down
)

// The verbs of ctl, and the operations of the store.
const (
	Admitted Verb = "admitted"
	Closed   Verb = "closed"
	Changed  Verb = "changed"
	Get      Verb = "get"
	Put      Verb = "put"
	List     Verb = "list"
)

// What a leaf's agent and the session service tell each other (Y3). The first
// three are the agent's, the others the service's.
const (
	Beat   Verb = "beat"   // the agent is there
	Opened Verb = "opened" // a session's connection stands at the leaf
	Ended  Verb = "ended"  // it has ended
	Here   Verb = "here"   // the service is there
	Noted  Verb = "noted"  // what was opened or ended is known
	Kick   Verb = "kick"   // a session must go
)

// withRun says of each verb and direction whether a run id follows it.
var (
	upVerbs = map[Verb]bool{
		SessionVerb: false, Register: false, Ready: false, Heartbeat: false, Renew: false,
		Event: true, Frame: true, Ack: false, Result: true,
	}
	downVerbs = map[Verb]bool{
		SessionVerb: false, Register: false, Ready: false, Heartbeat: false, Renew: false,
		Run: true, Tunnel: true, Body: true, Ack: false, Cancel: true,
		Command: true, Refresh: false, Fence: false,
	}
	ctlVerbs  = map[Verb]bool{Admitted: true, Closed: true, Changed: true}
	storeOps  = map[Verb]bool{Get: true, Put: true, List: true}
	leafVerbs = map[Verb]bool{Beat: true, Opened: true, Ended: true, Here: true, Noted: true, Kick: true}
	errParse  = errors.New("not a subject of iop.v1")
	errTokens = errors.New("wrong number of tokens")
)

// ValidName reports whether s may be the name of an edge, a node or a leaf, and
// so a token of a subject: [a-z0-9][a-z0-9_-]{0,62} (Z1), and none of the words
// that stand in a name's place.
func ValidName(s string) bool { return CheckName(s) == nil }

// CheckName says what is wrong with a name.
func CheckName(s string) error { return wire.CheckName(s) }

// ValidConnection reports whether s may be a connection's name, the random part
// of its inbox: 16 to 32 of [a-z0-9] (B5).
func ValidConnection(s string) bool {
	if len(s) < 16 || len(s) > 32 {
		return false
	}
	for i := 0; i < len(s); i++ {
		if c := s[i]; (c < 'a' || c > 'z') && (c < '0' || c > '9') {
			return false
		}
	}
	return true
}

// Session names one session: a node's connection under its generation.
type Session struct {
	Edge, Node string
	Gen        uint64
}

// String is the session's name at the broker, <edge>.<node>.<gen> (G2).
func (s Session) String() string {
	return s.Edge + "." + s.Node + "." + strconv.FormatUint(s.Gen, 10)
}

// ParseSession reads what String wrote.
func ParseSession(name string) (Session, error) {
	parts := strings.Split(name, ".")
	if len(parts) != 3 {
		return Session{}, errTokens
	}
	return parseSession(parts)
}

func parseSession(parts []string) (Session, error) {
	if !ValidName(parts[0]) || !ValidName(parts[1]) {
		return Session{}, errParse
	}
	gen, err := parseGen(parts[2])
	if err != nil {
		return Session{}, err
	}
	return Session{Edge: parts[0], Node: parts[1], Gen: gen}, nil
}

func parseGen(s string) (uint64, error) {
	gen, err := strconv.ParseUint(s, 10, 64)
	if err != nil || gen == 0 || s[0] == '0' || s[0] == '+' {
		return 0, errParse
	}
	return gen, nil
}

// Up builds the subject of a message to Edge; run is empty for verbs without one.
func (s Session) Up(v Verb, run string) string { return s.build(".up.", upVerbs, v, run) }

// Down builds the subject of a message to the Node.
func (s Session) Down(v Verb, run string) string { return s.build(".down.", downVerbs, v, run) }

func (s Session) build(dir string, verbs map[Verb]bool, v Verb, run string) string {
	takesRun, ok := verbs[v]
	if !ok || !ValidName(s.Edge) || !ValidName(s.Node) || s.Gen == 0 || takesRun != (run != "") || (takesRun && !wire.ValidRunID(run)) {
		panic(fmt.Sprintf("BUG: subjects I2: %v%s%s.%q", s, dir, v, run))
	}
	b := make([]byte, 0, len(root)+len(s.Edge)+len(s.Node)+len(dir)+len(v)+len(run)+24)
	b = append(append(append(append(b, root...), s.Edge...), '.'), s.Node...)
	b = strconv.AppendUint(append(b, '.'), s.Gen, 10)
	b = append(append(b, dir...), v...)
	if takesRun {
		b = append(append(b, '.'), run...)
	}
	return string(b)
}

// Message is a parsed session subject.
type Message struct {
	Session Session
	Verb    Verb
	Run     string // empty for verbs without one
}

// ParseUp parses the subject of a message to Edge.
func ParseUp(subject string) (Message, error) { return parse(subject, "up", upVerbs) }

// ParseDown parses the subject of a message to a Node.
func ParseDown(subject string) (Message, error) { return parse(subject, "down", downVerbs) }

// parse allocates nothing: it runs for every frame.
func parse(subject, dir string, verbs map[Verb]bool) (Message, error) {
	rest, ok := strings.CutPrefix(subject, root)
	if !ok {
		return Message{}, errParse
	}
	var tok [6]string
	n := 0
	for more := true; more; n++ {
		if n == len(tok) {
			return Message{}, errTokens
		}
		tok[n], rest, more = strings.Cut(rest, ".")
	}
	if n < 5 || tok[3] != dir {
		return Message{}, errParse
	}
	s, err := parseSession(tok[:3])
	if err != nil {
		return Message{}, err
	}
	takesRun, known := verbs[Verb(tok[4])]
	if !known || takesRun != (n == 6) || (takesRun && !wire.ValidRunID(tok[5])) {
		return Message{}, errParse
	}
	return Message{Session: s, Verb: Verb(tok[4]), Run: tok[5]}, nil
}

// UpOf is whose message to Edge this is, though what follows may be nothing that
// ParseUp knows.
func UpOf(subject string) (Session, error) {
	rest, ok := strings.CutPrefix(subject, root)
	if !ok {
		return Session{}, errParse
	}
	parts := strings.SplitN(rest, ".", 5)
	if len(parts) < 5 || parts[3] != "up" {
		return Session{}, errParse
	}
	return parseSession(parts[:3])
}

// UpWildcard matches every message of every session to one Edge (U3).
func UpWildcard(edge string) string { return root + mustName(edge) + ".*.*.up.>" }

// DownWildcard matches everything one session may be told.
func (s Session) DownWildcard() string {
	return root + mustName(s.Edge) + "." + mustName(s.Node) + "." + strconv.FormatUint(s.Gen, 10) + ".down.>"
}

// UpEverywhere matches one verb of every session of every Edge: the session
// service's view.
func UpEverywhere(v Verb) string { return root + "*.*.*.up." + string(v) }

// DownEverywhere matches one verb to every session of every Edge: the session
// service's view.
func DownEverywhere(v Verb) string { return root + "*.*.*.down." + string(v) }

// Ctl builds iop.v1.<edge>.ctl.<verb>.
func Ctl(edge string, v Verb) string {
	if !ctlVerbs[v] {
		panic("BUG: subjects I2: ctl verb " + string(v))
	}
	return root + mustName(edge) + ".ctl." + string(v)
}

// CtlWildcard matches every notice to one Edge.
func CtlWildcard(edge string) string { return root + mustName(edge) + ".ctl.*" }

// CtlEverywhere matches one verb of notices to every Edge: how session services
// hear of each other's.
func CtlEverywhere(v Verb) string {
	if !ctlVerbs[v] {
		panic("BUG: subjects I2: ctl verb " + string(v))
	}
	return root + "*.ctl." + string(v)
}

// ParseCtl parses a notice's subject.
func ParseCtl(subject string) (edge string, v Verb, err error) {
	return parseThree(subject, "ctl", ctlVerbs)
}

// Store builds iop.v1.<edge>.store.<op>.
func Store(edge string, op Verb) string {
	if !storeOps[op] {
		panic("BUG: subjects I2: store operation " + string(op))
	}
	return root + mustName(edge) + ".store." + string(op)
}

// StoreEverywhere matches every Edge's store requests.
func StoreEverywhere() string { return root + "*.store.*" }

// ParseStore parses a store request's subject; the Edge's identity is there (B10).
func ParseStore(subject string) (edge string, op Verb, err error) {
	return parseThree(subject, "store", storeOps)
}

func parseThree(subject, word string, verbs map[Verb]bool) (string, Verb, error) {
	rest, ok := strings.CutPrefix(subject, root)
	if !ok {
		return "", "", errParse
	}
	parts := strings.Split(rest, ".")
	if len(parts) != 3 || parts[1] != word || !ValidName(parts[0]) || !verbs[Verb(parts[2])] {
		return "", "", errParse
	}
	return parts[0], Verb(parts[2]), nil
}

// Callout builds the subject a leaf's callout requests are mapped to.
func Callout(edge, leaf string) string {
	return root + "callout." + mustName(edge) + "." + mustName(leaf)
}

// CalloutEverywhere matches every leaf's callout requests.
func CalloutEverywhere() string { return root + "callout.*.*" }

// ParseCallout parses it; the edge a leaf may speak for is there.
func ParseCallout(subject string) (edge, leaf string, err error) {
	rest, ok := strings.CutPrefix(subject, root+"callout.")
	if !ok {
		return "", "", errParse
	}
	edge, leaf, ok = strings.Cut(rest, ".")
	if !ok || !ValidName(edge) || !ValidName(leaf) {
		return "", "", errParse
	}
	return edge, leaf, nil
}

// Leaf builds iop.v1.<edge>.leaf.<leaf>.<verb>: what one leaf's agent and the
// session service tell each other.
func Leaf(edge, leaf string, v Verb) string {
	if !leafVerbs[v] {
		panic("BUG: subjects I2: leaf verb " + string(v))
	}
	return root + mustName(edge) + ".leaf." + mustName(leaf) + "." + string(v)
}

// LeafEverywhere matches one verb of every leaf: the session service's view.
func LeafEverywhere(v Verb) string {
	if !leafVerbs[v] {
		panic("BUG: subjects I2: leaf verb " + string(v))
	}
	return root + "*.leaf.*." + string(v)
}

// ParseLeaf parses it; who speaks, or is spoken to, is there.
func ParseLeaf(subject string) (edge, leaf string, v Verb, err error) {
	rest, ok := strings.CutPrefix(subject, root)
	if !ok {
		return "", "", "", errParse
	}
	parts := strings.Split(rest, ".")
	if len(parts) != 4 || parts[1] != "leaf" || !ValidName(parts[0]) || !ValidName(parts[2]) || !leafVerbs[Verb(parts[3])] {
		return "", "", "", errParse
	}
	return parts[0], parts[2], Verb(parts[3]), nil
}

// NodeInbox is the prefix of the one inbox a Node's connection may be answered
// on; connection is that connection's name.
func NodeInbox(edge, node, connection string) string {
	if !ValidConnection(connection) {
		panic("BUG: subjects I2: connection name")
	}
	return "_INBOX." + mustName(edge) + "." + mustName(node) + "." + connection
}

// EdgeInbox is the prefix of an Edge's inboxes. "_edge" is no node's name.
func EdgeInbox(edge string) string { return "_INBOX." + mustName(edge) + "._edge" }

// NoResponders is the reply subject of what Edge sends about one run: nobody
// answers on it but the server, when nobody was there to read (G4).
func NoResponders(edge, run string) string {
	if !wire.ValidRunID(run) {
		panic("BUG: subjects I2: run id")
	}
	return "_INBOX." + mustName(edge) + "._nr." + run
}

// NoRespondersWildcard matches them all.
func NoRespondersWildcard(edge string) string { return "_INBOX." + mustName(edge) + "._nr.*" }

// ParseNoResponders returns the run id of such a notice.
func ParseNoResponders(subject string) (run string, err error) {
	i := strings.LastIndexByte(subject, '.')
	if i < 0 || !strings.HasPrefix(subject, "_INBOX.") || !strings.HasSuffix(subject[:i], "._nr") || !wire.ValidRunID(subject[i+1:]) {
		return "", errParse
	}
	return subject[i+1:], nil
}

func mustName(s string) string {
	if err := CheckName(s); err != nil {
		panic("BUG: subjects I2: " + err.Error())
	}
	return s
}
