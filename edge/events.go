package edge

// Names of log events.
const (
	eventStarted          = "edge.started"
	eventStopping         = "edge.stopping"
	eventStopped          = "edge.stopped"
	eventNodeRegistered   = "node.registered"
	eventNodeTakenIn      = "node.taken_in"
	eventNodeRefused      = "node.refused"
	eventNodeConnected    = "node.connected"
	eventNodeDisconnected = "node.disconnected"
	eventNodeFenced       = "node.fenced"
	eventNodeDraining     = "node.draining"
	eventSessionClosing   = "node.session_closing"
	eventModelsChanged    = "models.changed"
	eventListFailed       = "models.list_failed"
	eventBusError         = "bus.error"
	eventMisbehaved       = "node.misbehaved"
	eventKeys             = "edge.keys_renewed"         // its own certificate, towards broker and Nodes
	eventRoots            = "edge.roots_renewed"        // which CAs it trusts
	eventIssuers          = "edge.issuers_renewed"      // whose session tokens are good
	eventNodeLeft         = "edge.node_left"            // a node that was taken in is revoked: it is not listed any more
	eventKeysBad          = "edge.keys_unreadable"      // the files are no good; what served goes on
	eventExpiring         = "edge.certificate_expiring" // and nobody has renewed it
)
