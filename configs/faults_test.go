package configs

import (
	"crypto/sha256"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

const (
	publicUser    = "UDCBJ3PZEMBTHCQCHZYPL2VXLJUIKJWYUW465QUXTRGU53UJOCKZRJL3"
	publicUser2   = "UCWOKVBU7IZNCFD7GZC3NT6N2YOFI645AKEKZBQQKOXXMIE5DGY5A3OI"
	publicAccount = "ABFN6JKRGEDRKRXHYB6FSWIU3EP2FVW4UUSEJS2FLO3REFZC364AD5A6"
)

// Every case is one document and all the faults it has, as they are printed.
//
// Contract: D3 M1 R7 S3 Z1
func TestI1Faults(t *testing.T) {
	// What else a file needs, on one line each, so that line numbers can be read.
	const (
		edge    = "broker:\nedge:\n  name: home\n"                                                                                          // the case begins on line 4
		node    = "broker:\nedge: {name: home}\nnode:\n  name: desk\n  edge: home\n"                                                        // on line 6
		broker  = "edge: {name: home}\nbroker:\n"                                                                                           // on line 3
		adapter = edge + "  nodes:\n  - name: desk\n    adapters:\n    - name: a\n      type: openai_compat\n      base_url: http://h/v1\n" // on line 10
	)
	key := strings.Repeat("ab", 32)
	for name, c := range map[string]struct {
		data string
		want []string
	}{
		"empty":                     {"", []string{"f.yaml: the file is empty; want a section broker, edge or node"}},
		"only comments":             {"# nothing\n", []string{"f.yaml: the file is empty; want a section broker, edge or node"}},
		"null":                      {"~\n", []string{"f.yaml: the file is empty; want a section broker, edge or node"}},
		"a list":                    {"- a\n", []string{"f.yaml:1: want a section of keys and values, got a list"}},
		"text":                      {"hello\n", []string{"f.yaml:1: want a section of keys and values, got other text"}},
		"not YAML":                  {"edge:\n  name: [home\n", []string{"f.yaml:2: not YAML: did not find expected ',' or ']'"}},
		"not YAML in line 1":        {"edge: [\n", []string{"f.yaml:2: not YAML: did not find expected node content"}},
		"not YAML, bad byte":        {"edge: \xff\n", []string{"f.yaml: not YAML: invalid leading UTF-8 octet"}},
		"tab":                       {"edge:\n\tname: home\n", []string{"f.yaml:2: not YAML: found character that cannot start any token"}},
		"two documents":             {edge + "---\nedge:\n", []string{"f.yaml:4: a second document begins here; a configuration is one document"}},
		"another edge's node":       {"broker: {}\nedge:\n  name: home\nnode:\n  name: desk\n  edge: work\n", []string{`f.yaml:6: node.edge: is not edge.name, "home": they are one process`}},
		"a node that is not listed": {"broker: {}\nedge:\n  name: home\n  nodes: [{name: desk}]\nnode:\n  edge: home\n  name: dsek\n", []string{`f.yaml:7: node.name: is not among edge.nodes, so it would have nothing to run; did you mean "desk"?`}},
		"misspelt":                  {edge + "  lisen: 127.0.0.1:1\n", []string{`f.yaml:4: edge.lisen: unknown key; did you mean "listen"?`}},
		"misspelt deep":             {edge + "  queue:\n    dept: 3\n", []string{`f.yaml:5: edge.queue.dept: unknown key; did you mean "depth"?`}},
		"misspelt above":            {edge + "nod:\n", []string{`f.yaml:4: nod: unknown key; did you mean "node"?`}},
		"unknown":                   {edge + "  queue: {colour: red}\n", []string{"f.yaml:4: edge.queue.colour: unknown key; want one of: depth, wait"}},
		"capitals":                  {edge + "  queue: {Depth: 3}\n", []string{`f.yaml:4: edge.queue.Depth: unknown key; did you mean "depth"?`}},
		"unprintable":               {edge + "  queue: {\"a\\nb\": 3}\n", []string{`f.yaml:4: edge.queue."a\nb": unknown key; want one of: depth, wait`}},
		"duplicate":                 {edge + "  listen: 127.0.0.1:1\n  listen: 127.0.0.1:2\n", []string{"f.yaml:5: edge.listen: duplicate key, first on line 4"}},
		"duplicate above":           {edge + "edge:\n", []string{"f.yaml:4: edge: duplicate key, first on line 2"}},
		"alias": {edge + "  queue: &q {depth: 3}\n  limits: *q\n", []string{
			"f.yaml:4: edge.queue: anchors and aliases are not used here; write the value out",
			"f.yaml:5: edge.limits: anchors and aliases are not used here; write the value out",
		}},
		"merge":       {edge + "  <<: {name: x}\n", []string{"f.yaml:4: edge.<<: unknown key; want one of: name, listen, admin_listen, admin_token, trust_domain, broker, issuers, keys, models, retry_on, nodes, invited, invited_adapters, queue, limits, keep_alive, cors, answer_headers, tls, trusted_proxies, heartbeat_interval, heartbeat_bound, pending_bound, discover_interval, stop_grace"}},
		"key no word": {edge + "  ? [a]\n  : b\n", []string{"f.yaml:4: edge: want a word as a key, got a list"}},
		"number as text": {"broker:\nedge:\n  name: 7\n", []string{
			"f.yaml:3: edge.name: want text; put the value in quotes", "f.yaml:3: edge.name: is required",
		}},
		"nothing as text":   {edge + "  listen:\n", []string{"f.yaml:4: edge.listen: want text, got nothing; leave the key out for the default"}},
		"text as number":    {edge + "  queue: {depth: many}\n", []string{"f.yaml:4: edge.queue.depth: want a whole number, got other text"}},
		"fraction":          {edge + "  queue: {depth: 1.5}\n", []string{"f.yaml:4: edge.queue.depth: want a whole number, got a number"}},
		"number too large":  {edge + "  queue: {depth: 99999999999999999999}\n", []string{"f.yaml:4: edge.queue.depth: want a whole number, got a number"}},
		"list as number":    {edge + "  queue: {depth: [1]}\n", []string{"f.yaml:4: edge.queue.depth: want a whole number, got a list"}},
		"yes as bool":       {adapter + "      disabled: \"yes\"\n", []string{"f.yaml:10: edge.nodes[0].adapters[0].disabled: want true or false, got other text"}},
		"bare duration":     {edge + "  stop_grace: 5\n", []string{"f.yaml:4: edge.stop_grace: want a duration such as 5s, got a number"}},
		"zero duration":     {edge + "  stop_grace: 0\n", []string{"f.yaml:4: edge.stop_grace: want a duration such as 5s, got a number"}},
		"bad duration":      {edge + "  stop_grace: 5 seconds\n", []string{"f.yaml:4: edge.stop_grace: want a duration such as 5s, got other text"}},
		"negative duration": {edge + "  stop_grace: -5s\n", []string{"f.yaml:4: edge.stop_grace: must be positive, such as 5s"}},
		"list as section":   {edge + "  queue: [1]\n", []string{"f.yaml:4: edge.queue: want a section of keys and values, got a list"}},
		"section as list":   {edge + "  nodes: {name: desk}\n", []string{"f.yaml:4: edge.nodes: want a list, got a section"}},
		"nothing as list":   {edge + "  nodes:\n", []string{"f.yaml:4: edge.nodes: want a list, got nothing; leave the key out for the default"}},
		"list as map":       {broker + "  edge_keys: [a]\n", []string{"f.yaml:3: broker.edge_keys: want keys and values, got a list"}},
		"models in a word":  {edge + "  models: all\n", []string{"f.yaml:4: edge.models: want the word auto or a list of models, got other text"}},
		"statuses": {edge + "  retry_on: [429, 5xx, 200, 4xx, [1], 0x1F4, '503']\n", []string{
			"f.yaml:4: edge.retry_on[2]: want a status from 400 to 599, or the word 5xx, got a number",
			"f.yaml:4: edge.retry_on[3]: want a status from 400 to 599, or the word 5xx, got other text",
			"f.yaml:4: edge.retry_on[4]: want a status from 400 to 599, or the word 5xx, got a list",
			"f.yaml:4: edge.retry_on[5]: want a status from 400 to 599, or the word 5xx, got a number",
		}},
		"enrolment, made here": {broker + "  enrolment: {url: 'hub.example:8443'}\n", nil},
		"enrolment, wrong": {broker + "  enrolment: {edge: A, listen: x, url: 'http://h', broker_urls: [h]}\n", []string{
			`f.yaml:3: broker.enrolment.edge: name "A": use a-z, 0-9, '-' and '_', beginning with a letter or digit`,
			"f.yaml:3: broker.enrolment.listen: want host:port, such as 127.0.0.1:8400",
			"f.yaml:3: broker.enrolment.url: want host or host:port, such as hub.example:8443",
			"f.yaml:3: broker.enrolment.broker_urls[0]: want tls://host:port and nothing else",
		}},
		"invited, off, with adapters": {edge + "  invited: false\n  invited_adapters: [{type: demo}]\n", []string{
			"f.yaml:5: edge.invited_adapters: is for nodes that edge.invited: true takes in",
		}},
		"invited, a bad adapter": {edge + "  invited: true\n  invited_adapters: [{type: openai_compat}]\n", []string{
			"f.yaml:5: edge.invited_adapters[0].base_url: is required",
		}},
		"keep-alive, hectic": {edge + "  keep_alive: {interval: 10ms}\n", []string{"f.yaml:4: edge.keep_alive.interval: must be at least 1s, or 0s for none"}},
		"keep-alive, never":  {edge + "  keep_alive: {queued: true}\n", []string{"f.yaml:4: edge.keep_alive.queued: needs edge.keep_alive.interval, such as 15s"}},
		"origins": {edge + "  cors: {allowed_origins: [https://a.example, 'http://[::1]:3000', app://x, a.example, 'https://a.example/', 'https://a.example:443', 'https://A.example', 'https://u@a.example', 'null', '*', https://a.example, 'http://a:']}\n", []string{
			"f.yaml:4: edge.cors.allowed_origins[3]: want an origin as browsers write it, such as https://app.example or http://localhost:3000, or \"*\" for all",
			"f.yaml:4: edge.cors.allowed_origins[4]: want an origin as browsers write it, such as https://app.example or http://localhost:3000, or \"*\" for all",
			"f.yaml:4: edge.cors.allowed_origins[5]: want an origin as browsers write it, such as https://app.example or http://localhost:3000, or \"*\" for all",
			"f.yaml:4: edge.cors.allowed_origins[6]: want an origin as browsers write it, such as https://app.example or http://localhost:3000, or \"*\" for all",
			"f.yaml:4: edge.cors.allowed_origins[7]: want an origin as browsers write it, such as https://app.example or http://localhost:3000, or \"*\" for all",
			"f.yaml:4: edge.cors.allowed_origins[8]: want an origin as browsers write it, such as https://app.example or http://localhost:3000, or \"*\" for all",
			"f.yaml:4: edge.cors.allowed_origins[9]: allows all; leave the others out",
			"f.yaml:4: edge.cors.allowed_origins[10]: the origin is already that of edge.cors.allowed_origins[0]",
			"f.yaml:4: edge.cors.allowed_origins[11]: want an origin as browsers write it, such as https://app.example or http://localhost:3000, or \"*\" for all",
		}},
		"half a pair": {edge + "  tls: {key: k}\n", []string{"f.yaml:4: edge.tls.certificate: is required"}},
		"proxies": {edge + "  trusted_proxies: [10.0.0.0/8, 192.0.2.7, '::1', 'fd00::/8', 10.0.0.1/8, here, 'fe80::1%eth0', 10.0.0.0/8, '::ffff:10.0.0.1']\n", []string{
			"f.yaml:4: edge.trusted_proxies[4]: want an address or a network, such as 10.0.0.0/8 or 192.0.2.7",
			"f.yaml:4: edge.trusted_proxies[5]: want an address or a network, such as 10.0.0.0/8 or 192.0.2.7",
			"f.yaml:4: edge.trusted_proxies[6]: want an address or a network, such as 10.0.0.0/8 or 192.0.2.7",
			"f.yaml:4: edge.trusted_proxies[7]: the network is already that of edge.trusted_proxies[0]",
			"f.yaml:4: edge.trusted_proxies[8]: want an address or a network, such as 10.0.0.0/8 or 192.0.2.7",
		}},
		"a status alone":    {edge + "  retry_on: 429\n", []string{"f.yaml:4: edge.retry_on: want a list, got a number"}},
		"log":               {edge + "log: {level: warning, format: xml}\n", []string{`f.yaml:4: log.level: unknown value "warning"; want one of: debug, info, warn, error`, `f.yaml:4: log.format: unknown value "xml"; want one of: text, json`}},
		"admin of a broker": {broker + "  admin_listen: here\n", []string{"f.yaml:3: broker.admin_listen: want host:port, such as 127.0.0.1:8400"}},
		"admin of a node":   {node + "  admin_listen: 127.0.0.1\n", []string{"f.yaml:6: node.admin_listen: want host:port, such as 127.0.0.1:8400"}},
		"all at once": {"broker:\nedge:\n  nam: x\n  listen: here\n  queue:\n    depth: -1\n", []string{
			"f.yaml:2: edge.name: is required", `f.yaml:3: edge.nam: unknown key; did you mean "name"?`,
			"f.yaml:4: edge.listen: want host:port, such as 127.0.0.1:8400", "f.yaml:6: edge.queue.depth: is -1, must be at least 1",
		}},

		// Names and places.
		"no name":         {"broker:\nedge:\n", []string{"f.yaml:2: edge.name: is required"}},
		"name with a dot": {"broker:\nedge:\n  name: a.b\n", []string{`f.yaml:3: edge.name: name "a.b": use a-z, 0-9, '-' and '_', beginning with a letter or digit`}},
		"reserved name":   {"broker:\nedge:\n  name: ctl\n", []string{`f.yaml:3: edge.name: name "ctl" is reserved`}},
		"wildcard": {"broker:\nedge: {name: home}\nnode: {name: '*', edge: '>'}\n", []string{
			`f.yaml:3: node.name: name "*": use a-z, 0-9, '-' and '_', beginning with a letter or digit`,
			`f.yaml:3: node.edge: name ">": use a-z, 0-9, '-' and '_', beginning with a letter or digit`,
		}},
		"trust domain":     {edge + "  trust_domain: Not.One\n", []string{`f.yaml:4: edge.trust_domain: trust domain "Not.One": use a-z, 0-9, '-' and dots`}},
		"port too high":    {edge + "  listen: 127.0.0.1:65536\n", []string{"f.yaml:4: edge.listen: want a port from 0 to 65535 after the colon"}},
		"port in words":    {edge + "  listen: 127.0.0.1:http\n", []string{"f.yaml:4: edge.listen: want a port from 0 to 65535 after the colon"}},
		"host of blanks":   {edge + "  listen: 'a b:1'\n", []string{"f.yaml:4: edge.listen: want an IP address or a host name before the colon"}},
		"the same address": {edge + "  admin_listen: 127.0.0.1:8400\n", []string{"f.yaml:4: edge.admin_listen: is the address of edge.listen"}},

		// Processes of their own need what one process makes for itself.
		"edge alone": {"edge: {name: home}\n", []string{
			"f.yaml:1: edge.broker.urls: is required, such as tls://broker.example:4222",
			"f.yaml:1: edge.broker.tls.certificate: is required", "f.yaml:1: edge.broker.tls.key: is required", "f.yaml:1: edge.broker.tls.ca: is required",
			"f.yaml:1: edge.broker.nkey: is required", "f.yaml:1: edge.issuers: is required: the public account nkeys (A...) of the broker's issuer",
		}},
		"broker alone": {"broker: {}\n", []string{
			"f.yaml:1: broker.store_dir: is required",
			"f.yaml:1: broker.tls.certificate: is required", "f.yaml:1: broker.tls.key: is required", "f.yaml:1: broker.tls.ca: is required",
			"f.yaml:1: broker.issuer_key: is required", "f.yaml:1: broker.system_key: is required", "f.yaml:1: broker.callout_key: is required", "f.yaml:1: broker.service_key: is required",
		}},
		"node alone": {"node: {name: desk, edge: home}\n", []string{
			"f.yaml:1: node.broker.urls: is required, such as tls://broker.example:4222",
			"f.yaml:1: node.broker.tls.certificate: is required", "f.yaml:1: node.broker.tls.key: is required", "f.yaml:1: node.broker.tls.ca: is required",
			"f.yaml:1: node.broker.nkey: is required", "f.yaml:1: node.curve_key: is required",
		}},
		"half a TLS section": {broker + "  tls: {key: k}\n", []string{"f.yaml:3: broker.tls.certificate: is required", "f.yaml:3: broker.tls.ca: is required"}},
		"URLs": {node + "  broker:\n    urls:\n    - nats://h:1\n    - tls://u:p@h:1\n    - tls://h:1/x\n    - tls://h:1\n    - tls://h:1\n    - 'tls://'\n", []string{
			"f.yaml:8: node.broker.urls[0]: want tls://host:port and nothing else", "f.yaml:9: node.broker.urls[1]: want tls://host:port and nothing else",
			"f.yaml:10: node.broker.urls[2]: want tls://host:port and nothing else", "f.yaml:12: node.broker.urls[4]: the address is already that of node.broker.urls[3]",
			"f.yaml:13: node.broker.urls[5]: want tls://host:port and nothing else",
		}},

		// S3.
		"attempts -1":             {node + "  reconnect: {max_attempts: -1}\n", []string{"f.yaml:6: node.reconnect.max_attempts: must not be negative; 0 tries for ever"}},
		"interval -1":             {node + "  reconnect: {interval_sec: -1}\n", []string{"f.yaml:6: node.reconnect.interval_sec: must not be negative"}},
		"interval 0, for ever":    {node + "  reconnect: {interval_sec: 0, max_attempts: 0}\n", []string{"f.yaml:6: node.reconnect.interval_sec: may be 0 only where max_attempts is positive"}},
		"interval 0, three times": {node + "  reconnect: {interval_sec: 0, max_attempts: 3}\n", nil},
		"interval 0, omitted":     {node + "  reconnect: {interval_sec: 0}\n", []string{"f.yaml:6: node.reconnect.interval_sec: may be 0 only where max_attempts is positive"}},

		// Broker.
		"edge key":       {broker + "  edge_keys:\n    home: SUABC\n    b.c: " + publicUser + "\n", []string{"f.yaml:4: broker.edge_keys.home: want a public user nkey (U..., 56 characters)", `f.yaml:5: broker.edge_keys.b.c: name "b.c": use a-z, 0-9, '-' and '_', beginning with a letter or digit`}},
		"edge key twice": {broker + "  edge_keys:\n    a: " + publicUser + "\n    b: " + publicUser + "\n", []string{"f.yaml:5: broker.edge_keys.b: its nkey is already that of broker.edge_keys.a"}},
		"members": {broker + "  members:\n  - {edge: home, role: nod, name: d, nkey: " + publicUser + "}\n  - {edge: home, role: node, nkey: " + publicUser + "}\n  - {edge: home, role: node, name: d, nkey: " + publicUser2 + "}\n", []string{
			`f.yaml:4: broker.members[0].role: unknown value "nod"; did you mean "node"?`,
			"f.yaml:5: broker.members[1].name: is required", "f.yaml:5: broker.members[1].nkey: its nkey is already that of broker.members[0].nkey",
		}},
		"two keys of one member": {broker + "  members:\n  - {edge: home, role: node, name: d, nkey: " + publicUser + "}\n  - {edge: home, role: node, name: d, nkey: " + publicUser2 + "}\n", nil},

		// Issuers and callers' keys.
		"issuer": {edge + "  issuers: [" + publicUser + ", " + publicAccount + ", " + publicAccount + "]\n", []string{
			"f.yaml:4: edge.issuers[0]: want a public account nkey (A..., 56 characters)", "f.yaml:4: edge.issuers[2]: the issuer is already that of edge.issuers[1]",
		}},
		"key of no source":      {edge + "  keys: [{name: a}]\n", []string{"f.yaml:4: edge.keys[0]: want exactly one of sha256, file and env"}},
		"key of two sources":    {edge + "  keys: [{name: a, file: f, env: E}]\n", []string{"f.yaml:4: edge.keys[0]: want exactly one of sha256, file and env"}},
		"key in plain":          {edge + "  keys: [{name: a, sha256: sk-secret}]\n", []string{"f.yaml:4: edge.keys[0].sha256: want the 64 hex digits of a key's SHA-256"}},
		"key cut short":         {edge + "  keys: [{name: a, sha256: " + key[2:] + "}]\n", []string{"f.yaml:4: edge.keys[0].sha256: want the 64 hex digits of a key's SHA-256"}},
		"key in a bad variable": {edge + "  keys: [{name: a, env: A-B}]\n", []string{"f.yaml:4: edge.keys[0].env: want the name of an environment variable: letters, digits and '_', no digit first"}},
		"key without a name":    {edge + "  keys: [{env: A}]\n", []string{"f.yaml:4: edge.keys[0].name: is required"}},
		"key of one name":       {edge + "  keys: [{name: a, env: A}, {name: a, env: B}]\n", []string{"f.yaml:4: edge.keys[1].name: the name is already that of edge.keys[0].name"}},
		"one key twice":         {edge + "  keys: [{name: a, sha256: " + key + "}, {name: b, sha256: " + strings.ToUpper(key) + "}]\n", []string{"f.yaml:4: edge.keys[1].sha256: the key is already that of edge.keys[0].sha256"}},
		"key of a model that is not": {adapter + "    providers: [{adapter: a, target: t}]\n  models: [{name: chat, providers: [{provider: desk/a/t}]}]\n  keys: [{name: a, env: A, models: [chta]}]\n", []string{
			`f.yaml:12: edge.keys[0].models[0]: no model of that name in edge.models; did you mean "chat"?`,
		}},

		// Nodes, adapters, providers.
		"node twice":              {edge + "  nodes: [{name: a}, {name: a}]\n", []string{"f.yaml:4: edge.nodes[1].name: the name is already that of edge.nodes[0].name"}},
		"adapter of no type":      {edge + "  nodes: [{name: a, adapters: [{name: x}]}]\n", []string{"f.yaml:4: edge.nodes[0].adapters[0].type: is required"}},
		"adapter of odd type":     {edge + "  nodes: [{name: a, adapters: [{type: openai_compt}]}]\n", []string{`f.yaml:4: edge.nodes[0].adapters[0].type: unknown value "openai_compt"; did you mean "openai_compat"?`}},
		"adapters both unnamed":   {edge + "  nodes:\n  - name: a\n    adapters:\n    - type: demo\n    - type: demo\n", []string{"f.yaml:8: edge.nodes[0].adapters[1].name: the name (the type, where none is given) is already that of edge.nodes[0].adapters[0].name"}},
		"adapter named as a type": {adapter + "    - {name: a, type: demo}\n", []string{"f.yaml:10: edge.nodes[0].adapters[1].name: the name (the type, where none is given) is already that of edge.nodes[0].adapters[0].name"}},
		"one name on two nodes":   {edge + "  nodes: [{name: a, adapters: [{type: demo}]}, {name: b, adapters: [{type: demo}]}]\n", nil},
		"adapter name":            {edge + "  nodes: [{name: a, adapters: [{name: x/y, type: demo}]}]\n", []string{`f.yaml:4: edge.nodes[0].adapters[0].name: name "x/y": use a-z, 0-9, '-' and '_', beginning with a letter or digit`}},
		"capacity -1":             {adapter + "      capacity: -1\n", []string{"f.yaml:10: edge.nodes[0].adapters[0].capacity: is -1, must be at least 1"}},
		"delay -1s":               {edge + "  nodes: [{name: a, adapters: [{type: demo, chunk_delay: -1s}]}]\n", []string{"f.yaml:4: edge.nodes[0].adapters[0].chunk_delay: must not be negative"}},
		"delay elsewhere":         {adapter + "      chunk_delay: 1s\n", []string{"f.yaml:10: edge.nodes[0].adapters[0].chunk_delay: is for type demo only"}},
		"zeros that are no default": {edge + "  queue: {depth: 0, wait: 0s}\n  limits: {write_stall: 0s, streams_per_key: 0, connections: 0}\n  nodes: [{name: a, adapters: [{type: demo, capacity: 0}], providers: [{adapter: demo, target: t, capacity: 0, long_capacity: 0}]}]\n  models: [{name: m, providers: [{provider: a/demo/t, weight: 0, priority: 0}]}]\n", []string{
			"f.yaml:4: edge.queue.depth: is 0, must be at least 1; leave the key out for the default",
			"f.yaml:4: edge.queue.wait: must be positive, such as 5s; leave the key out for the default",
			"f.yaml:5: edge.limits.write_stall: must be positive, such as 5s; leave the key out for the default",
			"f.yaml:6: edge.nodes[0].adapters[0].capacity: is 0, must be at least 1; leave the key out for the default",
			"f.yaml:6: edge.nodes[0].providers[0].capacity: is 0, must be at least 1; leave the key out for the default",
			"f.yaml:7: edge.models[0].providers[0].weight: is 0, must be at least 1; leave the key out for the default",
		}},
		"a port that is none": {adapter + "    - {name: b, type: openai_compat, base_url: 'http://h:99999/v1'}\n    - {name: c, type: openai_compat, base_url: 'http://h:0'}\n    - {name: d, type: openai_compat, base_url: 'http://h:'}\n    - {name: e, type: openai_compat, base_url: 'https://[::1]:65535/v1'}\n    - {name: f, type: openai_compat, base_url: 'http://[::1]'}\n", []string{
			"f.yaml:10: edge.nodes[0].adapters[1].base_url: want a port from 1 to 65535 after the host",
			"f.yaml:11: edge.nodes[0].adapters[2].base_url: want a port from 1 to 65535 after the host",
			"f.yaml:12: edge.nodes[0].adapters[3].base_url: want a port from 1 to 65535 after the host",
		}},
		"a key's model without its tag": {edge + "  nodes: [{name: a, adapters: [{type: demo}], providers: [{adapter: demo, target: t}]}]\n  models: [{name: 'm:latest', providers: [{provider: a/demo/t}]}, {name: n, providers: [{provider: a/demo/t}]}]\n  keys: [{name: k, env: K, models: [m, 'n:latest', 'm:7b']}]\n", []string{
			`f.yaml:6: edge.keys[0].models[2]: no model of that name in edge.models`,
		}},
		"demo with a URL":         {edge + "  nodes: [{name: a, adapters: [{type: demo, base_url: http://h, static_key_name: K}]}]\n", []string{"f.yaml:4: edge.nodes[0].adapters[0].base_url: type demo calls no provider", "f.yaml:4: edge.nodes[0].adapters[0].static_key_name: type demo calls no provider"}},
		"unknown profile":         {adapter + "      profile: lamacpp\n", []string{`f.yaml:10: edge.nodes[0].adapters[0].profile: unknown value "lamacpp"; did you mean "llamacpp"?`}},
		"profile of another kind": {adapter + "      profile: anthropic\n", []string{`f.yaml:10: edge.nodes[0].adapters[0].profile: unknown value "anthropic"; want one of: openai, ollama, llamacpp, vllm`}},
		"demo with a profile":     {edge + "  nodes: [{name: a, adapters: [{type: demo, profile: openai}]}]\n", []string{"f.yaml:4: edge.nodes[0].adapters[0].profile: is for type openai_compat only"}},
		"static key is a path":    {adapter + "      static_key_name: /etc/key\n", []string{"f.yaml:10: edge.nodes[0].adapters[0].static_key_name: want the name of an environment variable: letters, digits and '_', no digit first"}},
		"dangling adapter":        {adapter + "    providers: [{adapter: b, target: t}]\n", []string{`f.yaml:10: edge.nodes[0].providers[0].adapter: no adapter of that name on this node`}},
		"misspelt adapter":        {edge + "  nodes: [{name: d, adapters: [{type: demo}], providers: [{adapter: dmo, target: t}]}]\n", []string{`f.yaml:4: edge.nodes[0].providers[0].adapter: no adapter of that name on this node; did you mean "demo"?`}},
		"no target":               {adapter + "    providers: [{adapter: a}]\n", []string{"f.yaml:10: edge.nodes[0].providers[0].target: is required"}},
		"target of a line end":    {adapter + "    providers: [{adapter: a, target: \"a\\nb\"}]\n", []string{"f.yaml:10: edge.nodes[0].providers[0].target: holds a character that does not print"}},
		"id twice":                {adapter + "    providers:\n    - {adapter: a, target: t}\n    - {adapter: a, target: x, id: a/t}\n", []string{"f.yaml:12: edge.nodes[0].providers[1].id: the id is already that of edge.nodes[0].providers[0].id"}},
		"provider capacity":       {adapter + "    providers: [{adapter: a, target: t, capacity: -1}]\n", []string{"f.yaml:10: edge.nodes[0].providers[0].capacity: must be positive; leave it out for the adapter's"}},
		"half of long":            {adapter + "    providers: [{adapter: a, target: t, long_capacity: 1}]\n", []string{"f.yaml:10: edge.nodes[0].providers[0]: long_capacity and long_threshold go together: give both or neither"}},
		"long below 0":            {adapter + "    providers: [{adapter: a, target: t, long_capacity: -1, long_threshold: -1}]\n", []string{"f.yaml:10: edge.nodes[0].providers[0].long_capacity: is -1, must be at least 0", "f.yaml:10: edge.nodes[0].providers[0].long_threshold: is -1, must be at least 0"}},
		"stall below 0":           {adapter + "    providers: [{adapter: a, target: t, stall_timeout: -1s}]\n", []string{"f.yaml:10: edge.nodes[0].providers[0].stall_timeout: must not be negative"}},

		// Models.
		"no models":         {edge + "  models: []\n", []string{"f.yaml:4: edge.models: the list is empty; want models, or the word auto"}},
		"model of nothing":  {edge + "  models: [{name: m}]\n", []string{"f.yaml:4: edge.models[0].providers: is required: at least one provider serves a model"}},
		"dangling provider": {adapter + "    providers: [{adapter: a, target: t}]\n  models:\n  - name: m\n    providers:\n    - provider: desk/a/x\n", []string{`f.yaml:14: edge.models[0].providers[0].provider: no such provider; want <node>/<id> of one listed under edge.nodes[].providers; did you mean "desk/a/t"?`}},
		"model and provider twice": {adapter + "    providers: [{adapter: a, target: t}]\n  models:\n  - {name: m, providers: [{provider: desk/a/t}, {provider: desk/a/t}]}\n  - {name: m, providers: [{provider: desk/a/t, weight: -1}]}\n", []string{
			"f.yaml:12: edge.models[0].providers[1].provider: the provider is already that of edge.models[0].providers[0].provider",
			"f.yaml:13: edge.models[1].name: the name is already that of edge.models[0].name",
			"f.yaml:13: edge.models[1].providers[0].weight: is -1, must be at least 1",
		}},

		// Times and limits.
		"bound below the interval": {edge + "  heartbeat_interval: 3s\n", []string{"f.yaml:2: edge.heartbeat_bound: must be at least twice edge.heartbeat_interval"}},
		"limits below 0": {edge + "  limits: {body: -1, body_memory: -1, bodies_total: -1, header: -1, read_header: -1s, idle: -1s, write_stall: -1s, streams_per_key: -1, stream_memory: -1}\n", []string{
			"f.yaml:4: edge.limits.body: is -1, must be at least 1", "f.yaml:4: edge.limits.body_memory: is -1, must be at least 1", "f.yaml:4: edge.limits.bodies_total: is -1, must be at least 1",
			"f.yaml:4: edge.limits.header: is -1, must be at least 1024", "f.yaml:4: edge.limits.read_header: must be positive, such as 5s", "f.yaml:4: edge.limits.idle: must be positive, such as 5s",
			"f.yaml:4: edge.limits.write_stall: must be positive, such as 5s", "f.yaml:4: edge.limits.streams_per_key: is -1, must be at least 0", "f.yaml:4: edge.limits.stream_memory: is -1, must be at least 262144",
		}},
		"bodies below one": {edge + "  limits: {bodies_total: 1000}\n", []string{"f.yaml:4: edge.limits.bodies_total: is below edge.limits.body, so the largest body would never fit"}},
		"times below 0": {edge + "  heartbeat_interval: -1s\n  heartbeat_bound: -1s\n  pending_bound: -1s\n  discover_interval: -1s\n  queue: {wait: -1s}\n", []string{
			"f.yaml:4: edge.heartbeat_interval: must be positive, such as 5s", "f.yaml:5: edge.heartbeat_bound: must be positive, such as 5s", "f.yaml:6: edge.pending_bound: must be positive, such as 5s",
			"f.yaml:7: edge.discover_interval: must be positive, such as 5s", "f.yaml:8: edge.queue.wait: must be positive, such as 5s",
		}},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Parse("f.yaml", []byte(c.data))
			var got []string
			if err != nil {
				got = strings.Split(err.Error(), "\n")
			}
			if !reflect.DeepEqual(got, c.want) {
				t.Errorf("got\n  %s\nwant\n  %s\nfor\n%s", strings.Join(got, "\n  "), strings.Join(c.want, "\n  "), c.data)
			}
			var faults Faults
			if err != nil && !errors.As(err, &faults) {
				t.Errorf("a %T, want Faults", err)
			}
		})
	}
}

func TestBaseURL(t *testing.T) {
	for value, want := range map[string]string{
		"http://127.0.0.1:11434/v1": "", "https://api.example/v1/": "", "http://[::1]:8000": "", "http://gpu_1:8000": "",
		"127.0.0.1:11434": "begins with", "ftp://h": "begins with", "h/v1": "begins with", "http://": "want a host", "http:///v1": "want a host", "http://:80": "want a host",
		"https://user:hunter2@h/v1": "user or password", "http://h/v1?key=hunter2": "no query", "http://h/v1?": "no query", "http://h/#hunter2": "no query",
		"http://h/a/../b": "no ..", "http://h/%2e%2e/b": "no ..", "http://h:port": "begins with", "http://a b/": "begins with",
	} {
		v := new(validator)
		v.baseURL("p", value)
		got := v.faults.Error()
		if (want == "") != (got == "") || !strings.Contains(got, want) {
			t.Errorf("%s: got %q, want %q", value, got, want)
		}
		if strings.Contains(got, "hunter2") {
			t.Errorf("%q tells a secret", got)
		}
	}
}

// I4: whatever stands where a secret could, no fault holds it.
func TestI4FaultsTellNoSecret(t *testing.T) {
	const canary = "hunter2-canary"
	for _, data := range []string{
		"edge: {keys: [{name: a, sha256: " + canary + "}]}", "edge: {keys: [{name: a, file: [" + canary + "]}]}", "edge: {keys: " + canary + "}",
		"edge: {issuers: [" + canary + "]}", "broker: {edge_keys: {a: " + canary + "}}", "broker: {members: [{nkey: " + canary + "}]}",
		"edge: {nodes: [{name: a, adapters: [{type: openai_compat, base_url: 'http://u:" + canary + "@h'}]}]}",
		"edge: {nodes: [{name: a, adapters: [{type: openai_compat, base_url: http://h, static_key_name: '" + canary + "'}]}]}",
		"edge: {broker: {urls: ['tls://u:" + canary + "@h']}}", "edge: {listen: " + canary + "}", "edge: {queue: {depth: " + canary + "}}",
		"edge: {keys: [{name: a, env: '" + canary + "'}]}", "edge: {broker: {nkey: {a: " + canary + "}}}", "edge: {stop_grace: " + canary + "}",
	} {
		if _, err := Parse("f.yaml", []byte(data)); err == nil {
			t.Errorf("%s: accepted", data)
		} else if strings.Contains(err.Error(), canary) {
			t.Errorf("%s:\n%v", data, err)
		}
	}
}

const single = "broker:\nedge:\n  name: home\n  keys: [{name: me, env: IOP_EDGE_KEY}]\n  nodes: [{name: desk, adapters: [{type: openai_compat, base_url: http://h, static_key_name: IOP_NODE_VLLM}]}]\nnode: {name: desk, edge: home}\n"

// Contract: D3
func TestEnvironmentOverrides(t *testing.T) {
	f, err := parse("dir/f.yaml", []byte(single), []string{
		"IOP_EDGE_LISTEN=0.0.0.0:80", "IOP_EDGE_LIMITS_READ_HEADER=3s", "IOP_NODE_RECONNECT_MAX_ATTEMPTS=0", "IOP_LOG_LEVEL=debug",
		"IOP_EDGE_LIMITS_BODY=5", "IOP_BROKER_TLS_KEY=rel/k", "IOP_BROKER_TLS_CERTIFICATE=/abs/c", "IOP_BROKER_TLS_CA=/abs/ca",
		// Not ours, or named by the file itself.
		"IOP_EDGE_KEY=sk-1", "IOP_NODE_VLLM=sk-2", "IOP_API_KEY=sk-3", "IOP_DATA_DIR=/d", "IOPEDGE_X=1", "PATH=/bin", "=C:=x",
	}, false)
	if err != nil {
		t.Fatal(err)
	}
	if f.Edge.Listen != "0.0.0.0:80" || f.Edge.Limits.ReadHeader != 3*time.Second || *f.Node.Reconnect.MaxAttempts != 0 || f.Log.Level != "debug" || f.Edge.Limits.Body != 5 {
		t.Errorf("edge %+v, node %+v, log %+v", f.Edge, f.Node, f.Log)
	}
	if f.Broker.TLS.Key != "rel/k" || f.Broker.TLS.Certificate != "/abs/c" {
		t.Errorf("a variable's path was taken from the file's folder: %+v", f.Broker.TLS)
	}
}

// A variable sets what a file has as 0, and an iop without a file refuses one as well.
//
// Contract: D3
func TestZerosOfTheEnvironment(t *testing.T) {
	f, err := parse("f.yaml", []byte("broker:\nedge: {name: home, queue: {depth: 0}}\n"), []string{"IOP_EDGE_QUEUE_DEPTH=7"}, false)
	if err != nil || f.Edge.Queue.Depth != 7 {
		t.Errorf("%v", err)
	}
	if _, err := NewSingle([]string{"IOP_EDGE_QUEUE_DEPTH=0"}); err == nil || !strings.Contains(err.Error(), "environment: IOP_EDGE_QUEUE_DEPTH: is 0") {
		t.Errorf("%v", err)
	}
	if f, err := NewSingle([]string{"IOP_EDGE_LIMITS_STREAMS_PER_KEY=0", "IOP_EDGE_QUEUE_DEPTH=7"}); err != nil || f.Edge.Queue != (Queue{Depth: 7}) {
		t.Errorf("%v", err)
	}
}

// Contract: D3
func TestEnvironmentFaults(t *testing.T) {
	for entry, want := range map[string]string{
		"IOP_EDGE_LISEN=x":                    "environment: IOP_EDGE_LISEN: no such setting; did you mean IOP_EDGE_LISTEN?",
		"IOP_EGDE_LISTEN=x":                   "environment: IOP_EGDE_LISTEN: no such setting; did you mean IOP_EDGE_LISTEN?",
		"IOP_EDGE_SOMETHING_ELSE=x":           "environment: IOP_EDGE_SOMETHING_ELSE: no such setting in section edge",
		"IOP_EDGE_NODES=x":                    "environment: IOP_EDGE_NODES: no such setting in section edge",
		"IOP_EDGE_QUEUE_DEPTH=0":              "environment: IOP_EDGE_QUEUE_DEPTH: is 0, must be at least 1; leave the key out for the default",
		"IOP_EDGE_LIMITS_IDLE=0s":             "environment: IOP_EDGE_LIMITS_IDLE: must be positive, such as 5s; leave the key out for the default",
		"IOP_EDGE_QUEUE_DEPTH=many":           "environment: IOP_EDGE_QUEUE_DEPTH: want a whole number",
		"IOP_EDGE_QUEUE_DEPTH=-1":             "environment: IOP_EDGE_QUEUE_DEPTH: is -1, must be at least 1",
		"IOP_EDGE_STOP_GRACE=5":               "environment: IOP_EDGE_STOP_GRACE: want a duration such as 5s",
		"IOP_EDGE_LISTEN=x":                   "environment: IOP_EDGE_LISTEN: want host:port, such as 127.0.0.1:8400",
		"IOP_EDGE_NAME=":                      "environment: IOP_EDGE_NAME: is required",
		"IOP_NODE_RECONNECT_MAX_ATTEMPTS=-1":  "environment: IOP_NODE_RECONNECT_MAX_ATTEMPTS: must not be negative; 0 tries for ever",
		"IOP_NODE_RECONNECT_INTERVAL_SEC=1.5": "environment: IOP_NODE_RECONNECT_INTERVAL_SEC: want a whole number",
	} {
		_, err := parse("f.yaml", []byte(single), []string{entry}, false)
		if err == nil || err.Error() != want {
			t.Errorf("%s: got %v, want %s", entry, err, want)
		}
	}
	_, err := parse("f.yaml", []byte("broker:\nedge: {name: home}\n"), []string{"IOP_NODE_NAME=desk"}, false)
	if want := "environment: IOP_NODE_NAME: the file has no section node"; err == nil || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
}

func TestEveryVariableIsOneSetting(t *testing.T) {
	seen := map[string]string{}
	for _, l := range leavesOf(reflect.TypeFor[File](), "", nil) {
		if other, ok := seen[l.variable()]; ok {
			t.Errorf("%s is both %s and %s", l.variable(), other, l.path)
		}
		seen[l.variable()] = l.path
		// Each can be set, whatever its type.
		f := &File{Broker: &Broker{Cluster: new(Cluster), Enrolment: new(Enrolment)}, Edge: new(Edge), Node: new(Node), Leaf: new(Leaf), Service: &Service{Enrolment: new(Enrolment)}}
		v, ok := l.in(f)
		if !ok {
			t.Errorf("%s is not there", l.path)
			continue
		}
		setText(v, "1s")
	}
	for _, name := range []string{"IOP_LOG_LEVEL", "IOP_EDGE_BROKER_TLS_KEY", "IOP_NODE_RECONNECT_INTERVAL_SEC", "IOP_EDGE_LIMITS_STREAM_MEMORY"} {
		if seen[name] == "" {
			t.Errorf("no variable %s", name)
		}
	}
}

func TestLoadReadsTheEnvironment(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f.yaml")
	if err := os.WriteFile(path, []byte(single), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("IOP_EDGE_LISTEN", "127.0.0.1:9")
	f, err := Load(path)
	if err != nil || f.Edge.Listen != "127.0.0.1:9" {
		t.Errorf("got %v, %v", f, err)
	}
}

func TestDigest(t *testing.T) {
	want := sha256.Sum256([]byte("sk-1"))
	path := filepath.Join(t.TempDir(), "key")
	for _, content := range []string{"sk-1", "sk-1\n", "sk-1\r\n"} {
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if got, err := (APIKey{File: path}).Digest(); err != nil || got != want {
			t.Errorf("file %q: %x, %v", content, got, err)
		}
	}
	t.Setenv("KEY_OF_TEST", "sk-1")
	t.Setenv("EMPTY_OF_TEST", "")
	if got, err := (APIKey{Env: "KEY_OF_TEST"}).Digest(); err != nil || got != want {
		t.Errorf("variable: %x, %v", got, err)
	}
	hexKey := "f5" + strings.Repeat("0", 62)
	if got, err := (APIKey{SHA256: hexKey}).Digest(); err != nil || got[0] != 0xf5 {
		t.Errorf("sha256: %x, %v", got, err)
	}
	empty, huge := filepath.Join(t.TempDir(), "empty"), filepath.Join(t.TempDir(), "huge")
	for file, content := range map[string]string{empty: "\n", huge: strings.Repeat("sk-secret", 1000)} {
		if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, k := range []APIKey{
		{},
		{File: path, Env: "KEY_OF_TEST"},
		{SHA256: "sk-secret"},
		{Env: "EMPTY_OF_TEST"},
		{Env: "NOT_OF_TEST"},
		{File: empty},
		{File: huge},
		{File: filepath.Join(t.TempDir(), "none")},
	} {
		k.Name = "me"
		if _, err := k.Digest(); err == nil || !strings.Contains(err.Error(), `key "me"`) || strings.Contains(err.Error(), "sk-secret") {
			t.Errorf("%+v: got %v", k, err)
		}
	}
}

func FuzzParse(f *testing.F) {
	for _, name := range []string{"single", "broker", "edge", "node"} {
		data, err := os.ReadFile("samples/" + name + ".yaml")
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	f.Add([]byte("a: &a [*a]"))
	f.Add([]byte("edge: {models: [{name: !!binary x}]}\n---\n"))
	f.Add([]byte("? {a: b}\n: c"))
	f.Fuzz(func(t *testing.T, data []byte) {
		file, err := Parse("f.yaml", data)
		var faults Faults
		switch {
		case err != nil && !errors.As(err, &faults):
			t.Errorf("a %T, want Faults", err)
		case err == nil && file.Validate() != nil:
			t.Errorf("what Parse took does not validate: %v", file.Validate())
		}
		for _, fault := range faults {
			if strings.Contains(fault.String(), "\n") {
				t.Errorf("a fault of two lines: %q", fault.String())
			}
		}
	})
}

// One process need not name its parts; a process of its own must.
//
// Contract: D3
func TestSingleNamesItself(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f.yaml")
	if err := os.WriteFile(path, []byte("broker: {}\nedge: {}\nnode: {}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, load := range []func(string) (*File, error){LoadSingle, LoadAny} {
		f, err := load(path)
		if err != nil || f.Edge.Name != DefaultEdge || f.Node.Name != DefaultNode || f.Node.Edge != DefaultEdge {
			t.Errorf("%+v %v", f, err)
		}
	}
	if _, err := Load(path); err == nil {
		t.Error("Load needs no names")
	}
	if err := os.WriteFile(path, []byte("edge: {name: home}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := LoadSingle(path); err == nil || !strings.Contains(err.Error(), "broker: {} is enough") {
		t.Errorf("%v", err)
	}
	if err := os.WriteFile(path, []byte("edge: {}\nnode: {}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, loaded := LoadAny(path)
	_, checked := Check(path, time.Now())
	for _, err := range []error{loaded, checked} {
		if err == nil || !strings.Contains(strings.Split(err.Error(), "\n")[0], "broker: {} is enough") || !strings.Contains(err.Error(), "edge.name") {
			t.Errorf("edge and node without broker: %v", err)
		}
	}
	if f, err := NewSingle([]string{"IOP_EDGE_LISTEN=127.0.0.1:1", "IOP_LOG_LEVEL=debug"}); err != nil || f.Edge.Listen != "127.0.0.1:1" || f.Log.Level != "debug" {
		t.Errorf("%+v %v", f, err)
	}
	if _, err := NewSingle([]string{"IOP_EDGE_LISTN=x"}); err == nil || !strings.Contains(err.Error(), "IOP_EDGE_LISTEN") {
		t.Errorf("%v", err)
	}
}

// A broker of its own that is to invite needs all of it.
//
// Contract: D3 B11
func TestEnrolmentIsWhole(t *testing.T) {
	b, err := os.ReadFile("samples/broker.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for cut, want := range map[string]string{
		"    edge: home ":                  "broker.enrolment.edge: is required",
		"    url: ":                        "broker.enrolment.url: is required",
		"    ca_certificate:":              "broker.enrolment.ca_certificate: is required",
		"    ca_key:":                      "broker.enrolment.ca_key: is required",
		"  admin_listen:":                  "broker.admin_token: needs broker.admin_listen",
		"  admin_token:\n    file: secret": "broker.enrolment: needs broker.admin_listen and broker.admin_token",
	} {
		at := strings.Index(string(b), cut)
		if at < 0 {
			t.Fatalf("the sample holds no %q", cut)
		}
		end := at + len(cut) + strings.IndexByte(string(b[at+len(cut):]), '\n')
		if _, err := Parse("f.yaml", slices.Concat(b[:at], b[end:])); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("without %q: %v, want one that says %q", cut, err, want)
		}
	}
}
