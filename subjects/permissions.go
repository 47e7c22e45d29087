package subjects

import "strconv"

// Permissions is what one connection may publish and subscribe to.
type Permissions struct {
	Publish, Subscribe []string
}

// NodePermissions is B5's set for one session; connection is its name.
func NodePermissions(s Session, connection string) Permissions {
	return Permissions{
		Publish:   []string{root + mustName(s.Edge) + "." + mustName(s.Node) + "." + strconv.FormatUint(s.Gen, 10) + ".up.>", UserInfo},
		Subscribe: []string{s.DownWildcard(), NodeInbox(s.Edge, s.Node, connection) + ".>"},
	}
}

// LobbyPermissions lets a refused peer read the reason and do nothing else (B3).
func LobbyPermissions(edge, node, connection string) Permissions {
	return Permissions{
		Publish:   []string{UserInfo},
		Subscribe: []string{NodeInbox(edge, node, connection) + ".>"},
	}
}

// EdgePermissions keeps an Edge within its own edge name.
func EdgePermissions(edge string) Permissions {
	return Permissions{
		Publish: []string{
			root + mustName(edge) + ".*.*.down.>",
			root + edge + ".store.*",
			UserInfo,
		},
		Subscribe: []string{
			UpWildcard(edge), CtlWildcard(edge),
			EdgeInbox(edge) + ".>", NoRespondersWildcard(edge),
		},
	}
}

// ServicePermissions is the session service's set in FABRIC (B1).
func ServicePermissions() Permissions {
	return Permissions{
		Publish: []string{
			root + "*.ctl.>", root + "*.*.*.down.session", root + "*.*.*.down.fence", root + "*.*.*.down.renew",
			LeafEverywhere(Here), LeafEverywhere(Noted), LeafEverywhere(Kick),
			// Answers to store requests go to the asking Edge's inbox.
			"_INBOX.*._edge.>",
		},
		Subscribe: []string{
			UpEverywhere(SessionVerb), UpEverywhere(Renew), UpEverywhere(Heartbeat), StoreEverywhere(), CtlEverywhere(Admitted),
			LeafEverywhere(Beat), LeafEverywhere(Opened), LeafEverywhere(Ended),
			DownEverywhere(Fence), // whom an Edge has fenced is to leave
		},
	}
}

// LeafPermissions confines a leaf link to what its site's Nodes and its agent
// need of one edge: it carries sessions, callouts and its agent's words, and no
// notice to the Edge, nothing of the store and nothing of another leaf. The
// replies of a callout come on "_R_.>".
func LeafPermissions(edge, leaf string) Permissions {
	agent := LeafAgentPermissions(edge, leaf)
	return Permissions{
		Publish:   append([]string{root + mustName(edge) + ".*.*.up.>", Callout(edge, leaf)}, agent.Publish...),
		Subscribe: append([]string{root + edge + ".*.*.down.>", "_R_.>"}, agent.Subscribe...),
	}
}

// LeafAgentPermissions is the set of the agent in a leaf's process, at its own
// leaf: what it and the session service tell each other.
func LeafAgentPermissions(edge, leaf string) Permissions {
	return Permissions{
		Publish:   []string{Leaf(edge, leaf, Beat), Leaf(edge, leaf, Opened), Leaf(edge, leaf, Ended)},
		Subscribe: []string{Leaf(edge, leaf, Here), Leaf(edge, leaf, Noted), Leaf(edge, leaf, Kick)},
	}
}
