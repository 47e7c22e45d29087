package pool

import "time"

// Config is everything an operator says about models, as one value. It was
// validated where it was read: a candidate that names no provider is left out.
type Config struct {
	Adapters  []Adapter
	Providers []Provider
	Groups    []Group
	// Auto makes groups of what the adapters list (AdoptTargets), merged by model
	// name; Groups is then not used, and of Providers only those that are listed.
	Auto  bool
	Queue Queue
}

// Adapter is one driver instance on a node. Its places are shared by all
// providers behind it: a slot takes one here and one of its provider.
type Adapter struct {
	Node     string
	Name     string
	Capacity int // 0: 8
	// Operations is what its adopted targets can do; empty: everything.
	Operations []string
	// Fallback: its adopted models are offered only while no other adapter of any
	// node lists a model.
	Fallback bool
	Disabled bool
	// Held: the node has not applied this adapter yet, so it gets nothing (C5).
	Held bool
}

// Provider is a catalogue entry: a target behind an adapter of a node.
type Provider struct {
	ID       string // unique in the Edge; empty: TargetID
	Node     string
	Adapter  string
	Target   string
	Capacity int // 0: the adapter's
	// LongCapacity is how many of the places long requests may have: those of
	// LongThreshold estimated prompt tokens or more. 0, either: no distinction.
	LongCapacity  int
	LongThreshold int64
	Operations    []string // what it can do; empty: the adapter's
	StallTimeout  time.Duration
	Disabled      bool
}

// TargetID is the id of a provider that has no other.
func TargetID(node, adapter, target string) string { return node + "/" + adapter + "/" + target }

// Group is one model that callers may name.
type Group struct {
	Name       string
	Candidates []Candidate
}

// Candidate is a provider's part in a group.
type Candidate struct {
	Provider string // Provider.ID
	Priority int    // lower is better
	Weight   int    // 0: 1
}

// Queue bounds the waiting and shares it out (Q3).
type Queue struct {
	Depth   int            // waiting requests per model and principal; 0: 1000
	Total   int            // waiting requests in all; 0: 100 000
	Wait    time.Duration  // the longest wait; 0: 5m
	Weights map[string]int // principal to turns in a row; absent: 1
}
