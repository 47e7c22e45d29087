// Package adminapi is the Edge's admin API in Go: the answers of /api/v1/, and a
// client for them. Names and units here are what docs/protocol.md states; a field
// is never renamed, and an unknown one is ignored.
package adminapi

import "time"

// Snapshot is GET /api/v1/snapshot: everything below, of one instant.
type Snapshot struct {
	Edge string    `json:"edge"`
	Time time.Time `json:"time"`
	// Started is when this process began to serve.
	Started time.Time `json:"started"`
	Ready   bool      `json:"ready"`
	// Reason says what is lacking where Ready is false.
	Reason    string     `json:"reason,omitempty"`
	Nodes     []Node     `json:"nodes"`
	Providers []Provider `json:"providers"`
	Models    []Model    `json:"models"`
	Queue     Queue      `json:"queue"`
	// Certificates are this process's own.
	Certificates []Certificate `json:"certificates"`
}

// Certificate is one that proves who a process is.
type Certificate struct {
	Role    string    `json:"role"`
	Name    string    `json:"name"`
	Expires time.Time `json:"expires"`
}

// Node is one node. Nothing of how it is reached is told (N4).
type Node struct {
	Name string `json:"name"`
	// Configured is false for one that the broker let in and the Edge does not know.
	Configured bool `json:"configured"`
	// Connected: its session is ready for work.
	Connected bool `json:"connected"`
	// State is absent, admitted, pending or ready.
	State      string `json:"state"`
	Draining   bool   `json:"draining"`
	Generation uint64 `json:"generation"`
	// Since is when State was entered; left out where the node was never seen.
	Since time.Time `json:"since,omitzero"`
	// HeartbeatAgeMs is how long ago its last heartbeat came, of a ready one.
	HeartbeatAgeMs int64  `json:"heartbeat_age_ms,omitempty"`
	Software       string `json:"software,omitempty"`
	// InFlight is how many requests its providers serve now.
	InFlight int `json:"in_flight"`
	// CertificateExpires is the end of the certificate that its session was proved with.
	CertificateExpires time.Time `json:"certificate_expires,omitzero"`
}

// Provider is one provider: a target behind an adapter of a node.
type Provider struct {
	ID        string `json:"id"`
	Node      string `json:"node"`
	Adapter   string `json:"adapter"`
	Target    string `json:"target"`
	Connected bool   `json:"connected"`
	// Status is available, unavailable, draining, disabled or held.
	Status string `json:"status"`
	// Health is available, unavailable or offline.
	Health     string `json:"health"`
	Generation uint64 `json:"generation"`
	Capacity   int    `json:"capacity"`
	InFlight   int    `json:"in_flight"`
	// Queued counts the waiting requests that this provider could serve; one
	// request may count at several providers.
	Queued       int      `json:"queued"`
	LongCapacity int      `json:"long_capacity"`
	LongInFlight int      `json:"long_in_flight"`
	LongQueued   int      `json:"long_queued"`
	Models       []string `json:"models"`
}

// Model is one model that callers may name, or that requests still wait for.
type Model struct {
	Name    string    `json:"name"`
	Since   time.Time `json:"since,omitzero"`
	Offered bool      `json:"offered"`
	// Source is auto (a provider lists it) or configured.
	Source     string      `json:"source"`
	Candidates []Candidate `json:"candidates"`
	Waiting    int         `json:"waiting"`
	// OldestWaitMs is how long the first of those has waited.
	OldestWaitMs int64  `json:"oldest_wait_ms,omitempty"`
	Principals   []Wait `json:"principals,omitempty"`
	// WaitsFor says in words why a request for this model waits, or would wait now.
	WaitsFor string `json:"waits_for,omitempty"`
}

// Candidate is a provider's part in a model.
type Candidate struct {
	Provider string `json:"provider"`
	Priority int    `json:"priority"` // lower is better
	Weight   int    `json:"weight"`
}

// Wait is how many requests of one principal wait for a model.
type Wait struct {
	Principal string `json:"principal"`
	Waiting   int    `json:"waiting"`
}

// Queue is the queue as a whole.
type Queue struct {
	Waiting  int `json:"waiting"`
	InFlight int `json:"in_flight"`
	// Depth bounds the waiting of one principal for one model, Wait their time.
	Depth  int   `json:"depth"`
	WaitMs int64 `json:"wait_ms"`
}

// Invitation lets one machine join, or did (B11).
type Invitation struct {
	Edge string `json:"edge"`
	Name string `json:"name"`
	// State is open, used, expired, cancelled or closed (too many wrong secrets).
	State   string    `json:"state"`
	Created time.Time `json:"created"`
	Expires time.Time `json:"expires"`
	Used    time.Time `json:"used,omitzero"`
}

// Invite is the body of POST /api/v1/invitations.
type Invite struct {
	Name string `json:"name"`
	// ExpiresInMs is how long the invitation is good; left out: 24 hours.
	ExpiresInMs int64 `json:"expires_in_ms,omitempty"`
	// BrokerURLs are what the machine is to dial; left out: what every one is told.
	BrokerURLs []string `json:"broker_urls,omitempty"`
	// Leaf is in place of them: the name of a leaf in the authority's configuration.
	Leaf string `json:"leaf,omitempty"`
}

// Invited is its answer. The command holds the one-time secret, and is told once.
type Invited struct {
	Invitation
	// Command is the one line for the new machine.
	Command string `json:"command"`
	// BrokerURLs is what the machine will dial once it has joined.
	BrokerURLs []string `json:"broker_urls"`
	// Warning says why the line may not do on another machine.
	Warning string `json:"warning,omitempty"`
}

// Keys is GET /api/v1/keys: what to look at while the CA or the issuer is exchanged.
type Keys struct {
	Roots []Root `json:"roots"`
	// Members are all that may come in.
	Members []Shown `json:"members"`
	// Issuer signs session tokens. PinnedIssuer is the one that the server was started
	// with; where it is another, the process needs a restart.
	Issuer       string `json:"issuer"`
	PinnedIssuer string `json:"pinned_issuer"`
}

// Root is a CA that is trusted.
type Root struct {
	ID      string    `json:"id"` // of its key
	Expires time.Time `json:"expires"`
	Signs   bool      `json:"signs"` // certificates are signed by it now
}

// Shown is which CA signed the certificate that a member showed last.
type Shown struct {
	Edge string `json:"edge"`
	Role string `json:"role"`
	Name string `json:"name"`
	// Root is the ID of one; empty: the member never came.
	Root string `json:"root,omitempty"`
	// Issuer is what a leaf has pinned, once it has said so.
	Issuer string `json:"issuer,omitempty"`
}

// Step is the body of POST /api/v1/keys/{ca,issuer}/{begin,switch,finish}.
type Step struct {
	// Force finishes though members would be locked out.
	Force bool `json:"force,omitempty"`
}

// Stepped is its answer.
type Stepped struct {
	Key string `json:"key,omitempty"` // the issuer's that signs, or is to: public
}

// Error is what an answer with a status of 400 or more holds.
type Error struct {
	Error struct {
		Code    string `json:"code"`
		Message string `json:"message"`
	} `json:"error"`
}
