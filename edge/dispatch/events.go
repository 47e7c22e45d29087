package dispatch

// Names of log events.
const (
	eventBreach     = "tunnel.breach"            // a Node broke a rule of a stream
	eventUnanswered = "tunnel.cancel_unanswered" // a slot came back without the Node's terminal
	eventMisbehaved = "node.misbehaved"          // a session went on breaking rules
	eventSendFailed = "tunnel.send_failed"       // the bus refused a message
	eventStopped    = "tunnel.stopped"           // all attempts have ended
)
