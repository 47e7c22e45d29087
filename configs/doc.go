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
package configs
