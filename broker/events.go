package broker

// The log events of this package.
const (
	eventServer      = "broker.server"           // a line of the NATS server's own
	eventReady       = "broker.ready"            // connections are admitted
	eventRetiring    = "broker.retiring"         // it was told to stop; the Nodes here are told to leave
	eventStopped     = "broker.stopped"          // all has ended
	eventAdmitted    = "broker.admitted"         // a connection was let in
	eventRefused     = "broker.refused"          // one was not; the reason is a closed set
	eventSuperseded  = "broker.superseded"       // an older session is told and closed
	eventEvicted     = "broker.evicted"          // a member's connection is closed: it is revoked, or its certificate's time is over
	eventClosed      = "broker.closed"           // a session has ended
	eventMember      = "broker.member"           // what the authority knows has changed
	eventFault       = "broker.fault"            // the session service could not do something
	eventWaiting     = "broker.waiting"          // nobody can be admitted, and why
	eventResumed     = "broker.resumed"          // they can again
	eventLost        = "broker.lost"             // another server of the cluster is gone
	eventName        = "broker.name"             // another broker of the cluster has this one's name
	eventStoreMade   = "broker.store_made"       // there was no store, so one was made
	eventGenerations = "broker.generations_lost" // generations that were given are not in the store: nobody is admitted
	eventMembers     = "broker.members_lost"     // records of members are not in the store: nobody is admitted
	eventRestored    = "broker.restored"         // a backup is in the store
	eventStoreFull   = "broker.store_full"       // the store cannot be written, its disk is full or broken
	eventRotated     = "broker.rotated"          // new certificates serve from now on
	eventIssuer      = "broker.issuer_rotated"   // session tokens are signed by another issuer from now on
	eventRestart     = "broker.needs_restart"    // keys that the server pins are others in the files: it goes on with the old ones
	eventNKey        = "broker.nkey"             // a node has registered another nkey of its own, or has taken it
	eventInvited     = "broker.invited"          // a machine may join, under a name
	eventWithdrawn   = "broker.withdrawn"        // it may not any more
	eventEnrolled    = "broker.enrolled"         // it has joined
	eventNotJoined   = "broker.not_joined"       // somebody asked to join and may not; the reason is a closed set
	eventEnrolOpen   = "broker.enrol_open"       // invited machines can ask
	eventEnrolShut   = "broker.enrol_shut"       // no invitation is open: they cannot
	eventRenewed     = "broker.renewed"          // a node's certificate was signed anew
	eventNotRenewed  = "broker.not_renewed"      // a node asked for that and may not have it, with the reason
	eventLeafReady   = "leaf.ready"              // Nodes are admitted, by the hub
	eventLeafNear    = "leaf.hub_near"           // the hub is there
	eventLeafAway    = "leaf.hub_away"           // it is not: nobody new comes in
	eventLeafCut     = "leaf.cut"                // it was silent for the heartbeat bound: the site's sessions are closed
	eventLeafLink    = "leaf.link_refused"       // the hub does not take this leaf, and why
	eventLeafDenied  = "leaf.refused"            // a connection was not let in
	eventLeafKick    = "leaf.kicked"             // a session is closed, since the hub says so
)
