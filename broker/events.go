package broker

// The log events of this package.
const (
	eventServer     = "broker.server"     // a line of the NATS server's own
	eventReady      = "broker.ready"      // connections are admitted
	eventStopped    = "broker.stopped"    // all has ended
	eventAdmitted   = "broker.admitted"   // a connection was let in
	eventRefused    = "broker.refused"    // one was not; the reason is a closed set
	eventSuperseded = "broker.superseded" // an older session is told and closed
	eventEvicted    = "broker.evicted"    // a revoked member's connection is closed
	eventClosed     = "broker.closed"     // a session has ended
	eventMember     = "broker.member"     // what the authority knows has changed
	eventFault      = "broker.fault"      // the session service could not do something
	eventRotated    = "broker.rotated"    // new certificates serve from now on
)
