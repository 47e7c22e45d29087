package configs

import (
	"cmp"
	"path/filepath"
	"time"

	"github.com/iop-fabric/iop/wire"
)

// The types of adapters.
const (
	TypeOpenAICompat = "openai_compat"
	TypeDemo         = "demo"
)

// Names of an Edge and a node that are one process and named otherwise nowhere.
const (
	DefaultEdge = "local"
	DefaultNode = "here"
)

const (
	defaultTrustDomain = "iop"
	defaultCapacity    = 8
	demoCapacity       = 64
	defaultStopGrace   = 10 * time.Second
	defaultAttempts    = 10
	defaultIntervalSec = 10
)

// nameItself gives the parts of one process the names nobody gave them.
func (f *File) nameItself() {
	or(&f.Edge.Name, DefaultEdge)
	if f.Node != nil {
		or(&f.Node.Name, DefaultNode)
		or(&f.Node.Edge, f.Edge.Name)
	}
}

// or sets a value that was left out.
func or[T comparable](v *T, def T) {
	var zero T
	if *v == zero {
		*v = def
	}
}

// applyDefaults gives every setting that is zero the default written at its field.
func (f *File) applyDefaults() {
	or(&f.Log.Level, "info")
	or(&f.Log.Format, "text")
	if f.Broker != nil {
		f.Broker.applyDefaults()
	}
	if f.Edge != nil {
		f.Edge.applyDefaults()
	}
	if f.Node != nil {
		if f.Broker != nil && f.Edge != nil { // an iop up never gives up (S3)
			f.Node.Reconnect.MaxAttempts = cmp.Or(f.Node.Reconnect.MaxAttempts, new(0))
			f.Node.Reconnect.IntervalSec = cmp.Or(f.Node.Reconnect.IntervalSec, new(2))
		}
		f.Node.applyDefaults()
	}
	if f.Leaf != nil {
		f.Leaf.applyDefaults()
	}
	if f.Service != nil {
		f.Service.applyDefaults()
	}
}

func (b *Broker) applyDefaults() {
	or(&b.Name, "broker")
	or(&b.Listen, "127.0.0.1:4222")
	or(&b.TrustDomain, defaultTrustDomain)
	or(&b.HeartbeatBound, wire.HeartbeatBound)
	b.clusterDefaults()
	b.Enrolment.applyDefaults()
}

func (e *Edge) applyDefaults() {
	or(&e.Listen, "127.0.0.1:8400")
	or(&e.AdminListen, "127.0.0.1:8401")
	or(&e.TrustDomain, defaultTrustDomain)
	or(&e.HeartbeatInterval, wire.HeartbeatInterval)
	or(&e.HeartbeatBound, wire.HeartbeatBound)
	or(&e.PendingBound, wire.PendingBound)
	or(&e.DiscoverInterval, 5*time.Second)
	or(&e.StopGrace, defaultStopGrace)
	or(&e.Queue.Depth, 1000)
	or(&e.Queue.Wait, 5*time.Minute)
	e.Limits.applyDefaults()
	if e.Models.Groups == nil {
		e.Models.Auto = true
	}
	for i := range e.Models.Groups {
		for j := range e.Models.Groups[i].Providers {
			or(&e.Models.Groups[i].Providers[j].Weight, 1)
		}
	}
	for i := range e.Nodes {
		e.Nodes[i].applyDefaults()
	}
	adapterDefaults(e.InvitedAdapters)
}

func (l *Limits) applyDefaults() {
	or(&l.Body, 64<<20)
	or(&l.BodyMemory, 1<<20)
	or(&l.BodiesTotal, 4<<30)
	or(&l.Header, 64<<10)
	or(&l.ReadHeader, 10*time.Second)
	or(&l.Idle, 2*time.Minute)
	or(&l.WriteStall, 2*time.Minute)
	or(&l.Streams, 1<<30)
}

func (n *EdgeNode) applyDefaults() {
	capacity := adapterDefaults(n.Adapters)
	for i := range n.Providers {
		p := &n.Providers[i]
		if p.Adapter != "" && p.Target != "" {
			or(&p.ID, p.Adapter+"/"+p.Target)
		}
		or(&p.Capacity, capacity[p.Adapter])
	}
}

// adapterDefaults returns the adapters' capacities by name.
func adapterDefaults(list []Adapter) map[string]int {
	capacity := map[string]int{}
	for i := range list {
		a := &list[i]
		or(&a.Name, a.Type) // M1
		switch a.Type {
		case TypeDemo:
			or(&a.Capacity, demoCapacity)
		case TypeOpenAICompat:
			or(&a.Profile, ProfileOpenAI)
		}
		or(&a.Capacity, defaultCapacity)
		capacity[a.Name] = a.Capacity
	}
	return capacity
}

func (n *Node) applyDefaults() {
	or(&n.TrustDomain, defaultTrustDomain)
	or(&n.StopGrace, defaultStopGrace)
	n.Reconnect.MaxAttempts = cmp.Or(n.Reconnect.MaxAttempts, new(defaultAttempts))
	n.Reconnect.IntervalSec = cmp.Or(n.Reconnect.IntervalSec, new(defaultIntervalSec))
}

// resolvePaths takes relative paths from dir, the folder of the file they stand in.
func (f *File) resolvePaths(dir string) {
	at := func(paths ...*string) {
		for _, p := range paths {
			if *p != "" && !filepath.IsAbs(*p) {
				*p = filepath.Join(dir, *p)
			}
		}
	}
	tls := func(t *TLS) { at(&t.Certificate, &t.Key, &t.CA) }
	if b := f.Broker; b != nil {
		tls(&b.TLS)
		at(&b.StoreDir, &b.IssuerKey, &b.SystemKey, &b.CalloutKey, &b.ServiceKey, &b.AdminToken.File)
		if b.Enrolment != nil {
			at(&b.Enrolment.CACertificate, &b.Enrolment.CAKey)
		}
		if b.Cluster != nil {
			at(b.Cluster.paths()...)
		}
	}
	if e := f.Edge; e != nil {
		tls(&e.Broker.TLS)
		at(&e.Broker.NKey, &e.AdminToken.File, &e.TLS.Certificate, &e.TLS.Key)
		for i := range e.Keys {
			at(&e.Keys[i].File)
		}
	}
	if n := f.Node; n != nil {
		tls(&n.Broker.TLS)
		at(&n.Broker.NKey, &n.CurveKey)
	}
	if f.Leaf != nil {
		at(f.Leaf.paths()...)
	}
	if f.Service != nil {
		at(f.Service.paths()...)
	}
}
