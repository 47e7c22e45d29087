package configs

import (
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/nats-io/nkeys"

	"github.com/iop-fabric/iop/wire"
)

// validator collects faults. Its rules name a path and say what is wrong with the
// value there; none of them echoes a value that could be a secret.
type validator struct{ faults Faults }

func (v *validator) fault(path, format string, args ...any) {
	v.faults = append(v.faults, Fault{Path: path, Message: fmt.Sprintf(format, args...)})
}

// check tells err, if it is one, at path.
func (v *validator) check(path string, err error) {
	if err != nil {
		v.fault(path, "%s", err)
	}
}

func (v *validator) required(path, value string) bool {
	if value == "" {
		v.fault(path, "is required")
	}
	return value != ""
}

func (v *validator) name(path, value string) {
	if v.required(path, value) {
		v.check(path, wire.CheckName(value))
	}
}

func (v *validator) trustDomain(path, value string) { v.check(path, wire.CheckTrustDomain(value)) }

func (v *validator) oneOf(path, value string, known ...string) {
	if !slices.Contains(known, value) {
		v.fault(path, "unknown value %s%s", strconv.Quote(printable(value)), suggestion(value, known))
	}
}

// text is a name that goes nowhere but into JSON: any printable word.
func (v *validator) text(path, value string, most int) {
	switch {
	case !v.required(path, value):
	case len(value) > most:
		v.fault(path, "longer than %d bytes", most)
	case strings.ContainsFunc(value, func(r rune) bool { return !unicode.IsPrint(r) || r == unicode.ReplacementChar }):
		v.fault(path, "holds a character that does not print")
	case strings.TrimSpace(value) != value:
		v.fault(path, "begins or ends with a blank")
	}
}

func (v *validator) positive(path string, d time.Duration) {
	if d <= 0 {
		v.fault(path, "must be positive, such as 5s")
	}
}

func (v *validator) atLeast(path string, n, least int64) {
	if n < least {
		v.fault(path, "is %d, must be at least %d", n, least)
	}
}

// listen is an address to listen at; port 0 picks one.
func (v *validator) listen(path, value string) {
	host, port, err := net.SplitHostPort(value)
	if err != nil {
		v.fault(path, "want host:port, such as 127.0.0.1:8400")
		return
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || strconv.FormatUint(n, 10) != port {
		v.fault(path, "want a port from 0 to 65535 after the colon")
	}
	if host != "" && !isHost(host) {
		v.fault(path, "want an IP address or a host name before the colon")
	}
}

// optionalListen is a listener that is off where it is left out.
func (v *validator) optionalListen(path, value string) {
	if value != "" {
		v.listen(path, value)
	}
}

func isHost(host string) bool {
	return net.ParseIP(host) != nil || (len(host) <= 253 && !strings.ContainsFunc(host, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && r != '-' && r != '.' && r != '_'
	}))
}

// variable is the name of an environment variable, or of a key in a key store: it
// can be no path (R7).
func (v *validator) variable(path, value string) {
	ok := value != "" && len(value) <= 128 && (value[0] < '0' || value[0] > '9')
	for i := 0; ok && i < len(value); i++ {
		c := value[i]
		ok = c == '_' || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9')
	}
	if !ok {
		v.fault(path, "want the name of an environment variable: letters, digits and '_', no digit first")
	}
}

func (v *validator) userKey(path, value string) {
	if v.required(path, value) && (len(value) != 56 || !nkeys.IsValidPublicUserKey(value)) {
		v.fault(path, "want a public user nkey (U..., 56 characters)")
	}
}

// tls is given whole; it may be left out whole where the process makes its own.
func (v *validator) tls(path string, t TLS, made bool) {
	if made && t == (TLS{}) {
		return
	}
	v.required(path+".certificate", t.Certificate)
	v.required(path+".key", t.Key)
	v.required(path+".ca", t.CA)
}

// file is required unless the process makes its own.
func (v *validator) file(path, value string, made bool) {
	if !made {
		v.required(path, value)
	}
}

// unique tells the second of two equal values.
type unique map[string]string

func (u unique) add(v *validator, path, value, what string) {
	if value == "" {
		return
	}
	if first, ok := u[value]; ok {
		v.fault(path, "%s is already that of %s", what, first)
		return
	}
	u[value] = path
}

func (f *File) validate() Faults {
	v := new(validator)
	v.oneOf("log.level", f.Log.Level, "debug", "info", "warn", "error")
	v.oneOf("log.format", f.Log.Format, "text", "json")
	// A broker and an Edge in one file are one process, which makes its own keys.
	made := f.Broker != nil && f.Edge != nil
	if f.Broker != nil {
		f.Broker.validate(v, made)
	}
	if f.Edge != nil {
		f.Edge.validate(v, made)
	}
	if f.Node != nil {
		f.Node.validate(v, made)
	}
	if made && f.Node != nil {
		f.validateOwnNode(v)
	}
	if f.Leaf != nil {
		f.Leaf.validate(v)
	}
	if f.Service != nil {
		f.Service.validate(v)
	}
	return v.faults
}

// validateOwnNode checks that the node of one process is one of its Edge.
func (f *File) validateOwnNode(v *validator) {
	good := func(name string) bool { return wire.CheckName(name) == nil } // what is not has its own fault
	if good(f.Node.Edge) && good(f.Edge.Name) && f.Node.Edge != f.Edge.Name {
		v.fault("node.edge", "is not edge.name, %q: they are one process", f.Edge.Name)
	}
	var names []string
	for _, n := range f.Edge.Nodes {
		names = append(names, n.Name)
	}
	if len(names) > 0 && good(f.Node.Name) && !slices.Contains(names, f.Node.Name) {
		v.fault("node.name", "is not among edge.nodes, so it would have nothing to run%s", mean(f.Node.Name, names))
	}
}

func (b *Broker) validate(v *validator, made bool) {
	v.name("broker.name", b.Name)
	v.listen("broker.listen", b.Listen)
	if b.LeafListen != "" {
		v.listen("broker.leaf_listen", b.LeafListen)
		if b.LeafListen == b.Listen && !strings.HasSuffix(b.Listen, ":0") {
			v.fault("broker.leaf_listen", "is the address of broker.listen")
		}
	}
	v.trustDomain("broker.trust_domain", b.TrustDomain)
	v.file("broker.store_dir", b.StoreDir, made)
	v.tls("broker.tls", b.TLS, made)
	v.file("broker.issuer_key", b.IssuerKey, made)
	v.file("broker.system_key", b.SystemKey, made)
	v.file("broker.callout_key", b.CalloutKey, made)
	v.file("broker.service_key", b.ServiceKey, made)
	v.positive("broker.heartbeat_bound", b.HeartbeatBound)
	v.optionalListen("broker.admin_listen", b.AdminListen)
	v.adminToken("broker", b.AdminListen, b.AdminToken, b.Enrolment, made)
	b.Enrolment.validate(v, "broker", made)
	keys := unique{}
	for _, edge := range slices.Sorted(maps.Keys(b.EdgeKeys)) {
		path := "broker.edge_keys." + printable(edge)
		v.check(path, wire.CheckName(edge))
		v.userKey(path, b.EdgeKeys[edge])
		keys.add(v, path, b.EdgeKeys[edge], "its nkey")
	}
	v.members("broker.members", b.Members, keys)
	if b.Cluster != nil {
		b.Cluster.validate(v, b)
	}
}

func (v *validator) members(at string, list []Member, keys unique) {
	for i, m := range list {
		path := fmt.Sprintf("%s[%d]", at, i)
		v.name(path+".edge", m.Edge)
		v.oneOf(path+".role", m.Role, "node", "edge", "leaf")
		v.name(path+".name", m.Name)
		v.userKey(path+".nkey", m.NKey)
		// A name may have two keys while one replaces the other (B8), a key never two names.
		keys.add(v, path+".nkey", m.NKey, "its nkey")
	}
}

func (r Remote) validate(v *validator, path string, inProcess bool) {
	if len(r.URLs) == 0 && !inProcess {
		v.fault(path+".urls", "is required, such as tls://broker.example:4222")
	}
	v.brokerURLs(path+".urls", r.URLs)
	v.tls(path+".tls", r.TLS, inProcess)
	v.file(path+".nkey", r.NKey, inProcess)
}

// brokerURLs are addresses to dial, each once.
func (v *validator) brokerURLs(path string, urls []string) {
	seen := unique{}
	for i, raw := range urls {
		at := fmt.Sprintf("%s[%d]", path, i)
		v.check(at, CheckBrokerURL(raw))
		seen.add(v, at, raw, "the address")
	}
}

// CheckBrokerURL refuses what is no address that a Node could dial.
func CheckBrokerURL(raw string) error {
	u, err := url.Parse(raw)
	if err != nil || u.Scheme != "tls" || u.Hostname() == "" || !isPort(u) || u.User != nil || u.Path != "" || u.RawQuery != "" || u.Fragment != "" {
		return errBrokerURL
	}
	return nil
}

var errBrokerURL = errors.New("want tls://host:port and nothing else")

// adminToken is what lets an operator invite, revoke and back up. In one process
// that is asked over the Edge's listener.
func (v *validator) adminToken(section, listen string, token AdminToken, e *Enrolment, made bool) {
	if token.Set() {
		v.keySource(section+".admin_token", token.key())
	}
	switch {
	case made:
	case token.Set() && listen == "":
		v.fault(section+".admin_token", "needs %s.admin_listen, such as 127.0.0.1:8401", section)
	case e != nil && !token.Set():
		v.fault(section+".enrolment", "needs %s.admin_listen and %s.admin_token: without them nobody can invite", section, section)
	}
}

func (e *Edge) validate(v *validator, made bool) {
	v.name("edge.name", e.Name)
	v.listen("edge.listen", e.Listen)
	v.listen("edge.admin_listen", e.AdminListen)
	if e.Listen == e.AdminListen && !strings.HasSuffix(e.Listen, ":0") {
		v.fault("edge.admin_listen", "is the address of edge.listen")
	}
	v.trustDomain("edge.trust_domain", e.TrustDomain)
	e.Broker.validate(v, "edge.broker", made)
	if len(e.Issuers) == 0 && !made {
		v.fault("edge.issuers", "is required: the public account nkeys (A...) of the broker's issuer")
	}
	issuers := unique{}
	for i, key := range e.Issuers {
		path := fmt.Sprintf("edge.issuers[%d]", i)
		if len(key) != 56 || !nkeys.IsValidPublicAccountKey(key) {
			v.fault(path, "want a public account nkey (A..., 56 characters)")
		}
		issuers.add(v, path, key, "the issuer")
	}
	if e.AdminToken.Set() {
		v.keySource("edge.admin_token", e.AdminToken.key())
	}
	e.validateKeys(v)
	providers := e.validateNodes(v)
	e.validateModels(v, providers)
	e.validateTimes(v)
	e.Limits.validate(v)
	e.KeepAlive.validate(v)
	e.CORS.validate(v)
	e.TLS.validate(v, "edge.tls")
	e.validateProxies(v)
}

func (e *Edge) validateTimes(v *validator) {
	v.positive("edge.heartbeat_interval", e.HeartbeatInterval)
	v.positive("edge.heartbeat_bound", e.HeartbeatBound)
	if e.HeartbeatInterval > 0 && e.HeartbeatBound > 0 && e.HeartbeatBound/2 < e.HeartbeatInterval {
		v.fault("edge.heartbeat_bound", "must be at least twice edge.heartbeat_interval")
	}
	v.positive("edge.pending_bound", e.PendingBound)
	v.positive("edge.discover_interval", e.DiscoverInterval)
	v.positive("edge.stop_grace", e.StopGrace)
	v.atLeast("edge.queue.depth", int64(e.Queue.Depth), 1)
	v.positive("edge.queue.wait", e.Queue.Wait)
}

func (l Limits) validate(v *validator) {
	v.atLeast("edge.limits.body", l.Body, 1)
	v.atLeast("edge.limits.body_memory", l.BodyMemory, 1)
	v.atLeast("edge.limits.bodies_total", l.BodiesTotal, 1)
	if l.BodiesTotal > 0 && l.BodiesTotal < l.Body {
		v.fault("edge.limits.bodies_total", "is below edge.limits.body, so the largest body would never fit")
	}
	v.atLeast("edge.limits.header", int64(l.Header), 1<<10)
	v.positive("edge.limits.read_header", l.ReadHeader)
	v.positive("edge.limits.idle", l.Idle)
	v.positive("edge.limits.write_stall", l.WriteStall)
	v.atLeast("edge.limits.connections", int64(l.Connections), 0)
	v.atLeast("edge.limits.streams_per_key", int64(l.StreamsPerKey), 0)
	v.atLeast("edge.limits.stream_memory", l.Streams, wire.MinWindow)
}

// keySource checks where a key comes from; the key itself is not read.
func (v *validator) keySource(path string, k APIKey) {
	v.check(path, k.checkSource())
	if k.SHA256 != "" {
		if b, err := hex.DecodeString(k.SHA256); err != nil || len(b) != 32 {
			v.fault(path+".sha256", "want the 64 hex digits of a key's SHA-256")
		}
	}
	if k.Env != "" {
		v.variable(path+".env", k.Env)
	}
}

func (e *Edge) validateKeys(v *validator) {
	names, sources := unique{}, unique{}
	for i, k := range e.Keys {
		path := fmt.Sprintf("edge.keys[%d]", i)
		v.text(path+".name", k.Name, 128)
		names.add(v, path+".name", k.Name, "the name")
		v.keySource(path, k)
		if k.SHA256 != "" {
			sources.add(v, path+".sha256", strings.ToLower(k.SHA256), "the key")
		}
		for j, m := range k.Models {
			at := fmt.Sprintf("%s.models[%d]", path, j)
			v.text(at, m, 256)
			if !e.Models.Auto && m != "" && !slices.ContainsFunc(e.Models.Groups, func(g ModelGroup) bool { return g.Name == m || means(m, g.Name) || means(g.Name, m) }) {
				v.fault(at, "no model of that name in edge.models%s", mean(m, modelNames(e.Models.Groups)))
			}
		}
	}
}

// means reports whether a name without a tag is that of a model with ":latest".
func means(name, model string) bool { return !strings.Contains(name, ":") && model == name+":latest" }

func modelNames(groups []ModelGroup) []string {
	names := make([]string, len(groups))
	for i, g := range groups {
		names[i] = g.Name
	}
	return names
}

// validateNodes returns every provider as "<node>/<id>".
func (e *Edge) validateNodes(v *validator) []string {
	var providers []string
	names := unique{}
	for i := range e.Nodes {
		n, path := &e.Nodes[i], fmt.Sprintf("edge.nodes[%d]", i)
		v.name(path+".name", n.Name)
		names.add(v, path+".name", n.Name, "the name")
		adapters := v.adapters(path+".adapters", n.Adapters)
		ids := unique{}
		for j, p := range n.Providers {
			at := fmt.Sprintf("%s.providers[%d]", path, j)
			p.validate(v, at, adapters)
			ids.add(v, at+".id", p.ID, "the id")
			providers = append(providers, n.Name+"/"+p.ID)
		}
	}
	v.adapters("edge.invited_adapters", e.InvitedAdapters)
	if len(e.InvitedAdapters) > 0 && e.Invited != nil && !*e.Invited {
		v.fault("edge.invited_adapters", "is for nodes that edge.invited: true takes in")
	}
	return providers
}

// adapters returns the adapters' names.
func (v *validator) adapters(path string, list []Adapter) []string {
	var all []string
	names := unique{}
	for i, a := range list {
		at := fmt.Sprintf("%s[%d]", path, i)
		if v.required(at+".type", a.Type) {
			v.oneOf(at+".type", a.Type, TypeOpenAICompat, TypeDemo)
		}
		if a.Name != "" && a.Name != a.Type {
			v.name(at+".name", a.Name)
		}
		names.add(v, at+".name", a.Name, "the name (the type, where none is given)")
		v.atLeast(at+".capacity", int64(a.Capacity), 1)
		if a.ChunkDelay < 0 {
			v.fault(at+".chunk_delay", "must not be negative")
		}
		switch a.Type {
		case TypeOpenAICompat:
			if v.required(at+".base_url", a.BaseURL) {
				v.baseURL(at+".base_url", a.BaseURL)
			}
			v.oneOf(at+".profile", a.Profile, ProfileIDs()...)
			if a.StaticKeyName != "" {
				v.variable(at+".static_key_name", a.StaticKeyName)
			}
			if a.ChunkDelay != 0 {
				v.fault(at+".chunk_delay", "is for type %s only", TypeDemo)
			}
		case TypeDemo:
			if a.Profile != "" {
				v.fault(at+".profile", "is for type %s only", TypeOpenAICompat)
			}
			if a.BaseURL != "" {
				v.fault(at+".base_url", "type %s calls no provider", TypeDemo)
			}
			if a.StaticKeyName != "" {
				v.fault(at+".static_key_name", "type %s calls no provider", TypeDemo)
			}
		}
		all = append(all, a.Name)
	}
	return all
}

func (v *validator) baseURL(path, value string) {
	u, err := url.Parse(value)
	switch {
	case err != nil || (u.Scheme != "http" && u.Scheme != "https"):
		v.fault(path, "want a URL that begins with http:// or https://")
	case u.Hostname() == "" || !isHost(u.Hostname()):
		v.fault(path, "want a host after %s://", u.Scheme)
	case !isPort(u):
		v.fault(path, "want a port from 1 to 65535 after the host")
	case u.User != nil:
		v.fault(path, "holds a user or password; name a key with static_key_name instead")
	case u.RawQuery != "" || u.ForceQuery || u.Fragment != "":
		v.fault(path, "want no query and no fragment")
	case strings.Contains("/"+u.Path+"/", "/../"):
		v.fault(path, "want no .. in the path")
	}
}

// isPort reports whether what stands behind a URL's host is a port that can be dialled,
// or nothing.
func isPort(u *url.URL) bool {
	if !strings.HasSuffix(u.Host, ":") && u.Port() == "" {
		return true
	}
	n, err := strconv.ParseUint(u.Port(), 10, 16)
	return err == nil && n > 0
}

func (p Provider) validate(v *validator, path string, adapters []string) {
	if v.required(path+".adapter", p.Adapter) && !slices.Contains(adapters, p.Adapter) {
		v.fault(path+".adapter", "no adapter of that name on this node%s", mean(p.Adapter, adapters))
	}
	v.text(path+".target", p.Target, 256)
	if p.ID != "" && p.ID != p.Adapter+"/"+p.Target {
		v.text(path+".id", p.ID, 320)
	}
	if p.Capacity < 0 || (p.Capacity == 0 && slices.Contains(adapters, p.Adapter)) {
		v.fault(path+".capacity", "must be positive; leave it out for the adapter's")
	}
	v.atLeast(path+".long_capacity", int64(p.LongCapacity), 0)
	v.atLeast(path+".long_threshold", int64(p.LongThreshold), 0)
	if (p.LongCapacity > 0) != (p.LongThreshold > 0) {
		v.fault(path, "long_capacity and long_threshold go together: give both or neither")
	}
	if p.StallTimeout < 0 {
		v.fault(path+".stall_timeout", "must not be negative")
	}
}

func (e *Edge) validateModels(v *validator, providers []string) {
	if e.Models.Auto {
		return
	}
	if len(e.Models.Groups) == 0 {
		v.fault("edge.models", "the list is empty; want models, or the word auto")
	}
	names := unique{}
	for i, g := range e.Models.Groups {
		path := fmt.Sprintf("edge.models[%d]", i)
		v.text(path+".name", g.Name, 256)
		names.add(v, path+".name", g.Name, "the name")
		if len(g.Providers) == 0 {
			v.fault(path+".providers", "is required: at least one provider serves a model")
		}
		refs := unique{}
		for j, r := range g.Providers {
			at := fmt.Sprintf("%s.providers[%d]", path, j)
			if v.required(at+".provider", r.Provider) && !slices.Contains(providers, r.Provider) {
				v.fault(at+".provider", "no such provider; want <node>/<id> of one listed under edge.nodes[].providers%s", mean(r.Provider, providers))
			}
			refs.add(v, at+".provider", r.Provider, "the provider")
			v.atLeast(at+".weight", int64(r.Weight), 1)
		}
	}
}

// mean is the question whether another name was meant, if one is near.
func mean(word string, known []string) string {
	if best := nearest(word, known); best != "" {
		return fmt.Sprintf("; did you mean %q?", best)
	}
	return ""
}

func (n *Node) validate(v *validator, made bool) {
	v.name("node.name", n.Name)
	v.name("node.edge", n.Edge)
	v.trustDomain("node.trust_domain", n.TrustDomain)
	n.Broker.validate(v, "node.broker", made)
	v.file("node.curve_key", n.CurveKey, made)
	v.positive("node.stop_grace", n.StopGrace)
	v.optionalListen("node.admin_listen", n.AdminListen)
	n.Reconnect.validate(v)
}

// validate is S3's; what is omitted counts as its default.
func (r Reconnect) validate(v *validator) {
	attempts, interval := defaultAttempts, defaultIntervalSec
	if r.MaxAttempts != nil {
		attempts = *r.MaxAttempts
	}
	if r.IntervalSec != nil {
		interval = *r.IntervalSec
	}
	if attempts < 0 {
		v.fault("node.reconnect.max_attempts", "must not be negative; 0 tries for ever")
	}
	switch {
	case interval < 0:
		v.fault("node.reconnect.interval_sec", "must not be negative")
	case interval == 0 && attempts <= 0:
		v.fault("node.reconnect.interval_sec", "may be 0 only where max_attempts is positive")
	}
}
