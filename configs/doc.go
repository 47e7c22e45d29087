// Package configs owns what an operator may set: one schema, strictly decoded.
// A file has a section per role (broker, edge, node); `iop up` reads all of
// them, a process of its own reads its own. Zero means the default written at
// the field. Validate reports every fault with its place: file, line, path,
// and what was meant (D3).
//
//	I1  An unknown or misspelt key, a duplicate, a bad value or a dangling
//	    reference is an error with file and line; nothing is ignored.
//	I2  No secret stands in a file: secrets are named by file or environment.
//	I3  The same document decodes to the same value, whatever the order of keys.
//	I4  A fault never echoes a value that could be a secret.
//
// Every single value of a section can be overridden by an environment variable:
// its path in capitals, joined by '_', after IOP_. edge.listen is IOP_EDGE_LISTEN,
// node.reconnect.max_attempts is IOP_NODE_RECONNECT_MAX_ATTEMPTS. Lists and maps
// have no variable. A variable that begins like a section but names no setting is
// a fault; IOP_ variables of other kinds are left alone.
//
// Relative paths in a file are taken from its folder, those in a variable from
// the process's own. A file with both a broker and an edge is one process, which
// makes the keys and certificates that the file leaves out.
package configs
