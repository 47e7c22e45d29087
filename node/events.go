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
)
