package node

// Log events; the names are stable.
const (
	evState      = "node.state"       // the supervisor entered another state
	evDialFailed = "node.dial_failed" // an attempt failed before it was a session
	evSession    = "node.session_ended"
	evFenced     = "node.fenced"
	evConfig     = "node.config_applied"
	evBadConfig  = "node.config_refused"
	evAdapter    = "node.adapter_stop_failed"
	evPanic      = "node.adapter_panicked"
	evTunnel     = "node.tunnel_ended"
	evStream     = "node.stream_failed" // Edge broke the rules of a stream or left it
	evLeft       = "node.exchanges_left"
	evKeys       = "node.keys_renewed"         // other keys serve from this dial on
	evKeysBad    = "node.keys_unreadable"      // the files are no good; what served goes on
	evExpiring   = "node.certificate_expiring" // and nobody has renewed it
	evRenewed    = "node.certificate_renewed"  // the authority has signed it anew; it serves from the next dial
	evNotRenewed = "node.certificate_refused"  // the authority has not, or what came is no good
	evUser       = "node.nkey_registered"      // another nkey of its own; it serves from the next dial
	evTrust      = "node.trust_learnt"         // the fabric's CA is being exchanged, or was
	// evTrustRefused: what came as that is signed by no root that is trusted here, or
	// cannot be written.
	evTrustRefused = "node.trust_refused"
)

// Attribute keys.
const (
	keyState      = "state"
	keyGeneration = "generation"
	keyReason     = "reason"
	keyError      = "error"
	keyRun        = "run_id"
	keyAdapter    = "adapter"
	keyClass      = "class"
	keyCount      = "count"
	keyRevision   = "revision"
	keyAttempt    = "attempt"
	keyDuration   = "duration"
	keyStack      = "stack"
	keyUntil      = "until"
	keySigner     = "signer"
	keyNKey       = "nkey"
)
